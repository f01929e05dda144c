"""Writes a file whole or not at all."""

import os
import pathlib


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a file under another name first, then in one step under its own.

    Raises:
      OSError: it cannot be written; names it, and what was there is there still.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
