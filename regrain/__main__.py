"""Starts the command `regrain`; also as `python -m regrain`, and for the entries in scripts/."""

import io
import signal
import sys

WRONG_USE, INTERRUPTED = 2, 130
#: What every command needs, and a library by itself does not.
_NEEDED = ("typer", "rich")


def main(*first: str) -> None:
    """Runs the command that the arguments of the program name, and ends it with the command's exit code.

    Args:
      first: arguments that come before those of the program.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # That a terminal has no such character is no reason to say nothing.
            stream.reconfigure(errors="backslashreplace")
    try:
        from regrain.commands import app  # noqa: PLC0415 (so that an error can say what is missing)

        app(args=[*first, *sys.argv[1:]], prog_name="regrain")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _NEEDED:
            raise
        print(  # noqa: T201 (what prints better is what is missing)
            f"regrain: {error.name} is not installed, and the command line needs it: "
            "pip install '.[cli]' in a checkout of regrain",
            file=sys.stderr,
        )
        sys.exit(WRONG_USE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        # What is done is done: Ctrl-C while the interpreter goes would only print where it was.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
