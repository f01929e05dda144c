#!/usr/bin/env python
"""`regrain provenance` by its name in a checkout, with the environment active; --help tells what it takes.

The command is in regrain/commands.py, and what it does in regrain/jobs/provenance.py.
"""

from regrain.__main__ import main

if __name__ == "__main__":
    main("provenance")
