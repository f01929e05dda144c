"""Start the command `regrain`, also as `python -m regrain`."""

import io
import signal
import sys

WRONG_USE, INTERRUPTED = 2, 130
#: Packages that every command needs, and the library does not.
_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command named by the program's arguments, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character gets its escape.
            stream.reconfigure(errors="backslashreplace")
    try:
        from regrain.cli.app import app  # noqa: PLC0415 (so that an error can name what is missing)

        app(prog_name="regrain")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _NEEDED:
            raise
        print(  # noqa: T201 (rich may be what is missing)
            f"regrain: {error.name} is not installed, and the command line needs it: "
            "pip install 'regrain[cli]'",
            file=sys.stderr,
        )
        sys.exit(WRONG_USE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        # Ctrl-C while the interpreter exits would only print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
