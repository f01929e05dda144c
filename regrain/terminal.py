"""What all commands print with: tables and lines for people, bars for long work, errors in a line."""

import contextlib
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

if TYPE_CHECKING:
    import loader

WRONG_USE: Final = 2
#: As of SIGPIPE: whoever was to read the output has gone.
UNREAD: Final = 141
#: Work that ends sooner needs no progress bar.
BAR_AFTER_SECONDS: Final = 2.0

MAX_TEXT: Final = 400
#: Where output goes to a file or another program, nothing is broken into narrow columns.
_WIDTH_OF_NO_TERMINAL: Final = 200
#: By the module that is missing, the extra that brings it.
_EXTRAS: Final = {
    "matplotlib": "cli",
    "pyarrow": "parquet",
    "datasets": "huggingface",
    "PIL": "images",
    "sklearn": "examples",
    "gcsfs": "gcs",
}


class _Console(Console):
    """A console that ends the program as the system ends others whose output nobody reads any more."""

    @contextlib.contextmanager
    def kept_to(self, stream: IO[str]) -> Iterator[None]:
        """A context in which it writes to a stream, whatever stdout and stderr are."""
        before, self._file = self._file, stream
        try:
            yield
        finally:
            self._file = before

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        _end_unread()


def _console(*, stderr: bool) -> _Console:
    stream = sys.stderr if stderr else sys.stdout
    fixed = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    width = None if fixed else _WIDTH_OF_NO_TERMINAL
    return _Console(highlight=False, emoji=False, stderr=stderr, width=width)


def _end_unread() -> NoReturn:
    # Nor is there anybody for what is still in the buffer, which Python writes at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), console.file.fileno())
    raise SystemExit(UNREAD)


console: Final = _console(stderr=False)
#: For all but the answer.
notes: Final = _console(stderr=True)


def plain(value: object, limit: int = MAX_TEXT) -> str:
    """A value as text that a terminal can only show: in one line, and no longer than ``limit``.

    What comes from a file could hold sequences that move the cursor or change colours.
    """
    text = str(value)
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def safe(value: object, limit: int = MAX_TEXT) -> str:
    """As `plain`, for a place where rich looks for markup."""
    return escape(plain(value, limit))


def print_json(value: Any) -> None:
    """Prints one JSON document, in ASCII, and a line's end."""
    console.file.write(f"{json.dumps(value)}\n")
    console.file.flush()


def fail(command: str, message: str, code: int = WRONG_USE) -> NoReturn:
    """Ends the program with a message on stderr."""
    notes.print(f"[bold red]regrain {command}:[/] {_lines(message)}", soft_wrap=True)
    raise typer.Exit(code)


def _lines(message: str) -> str:
    """A message of several lines, each of which is safe to print."""
    return "\n".join(safe(line, 4 * MAX_TEXT) for line in message.splitlines())


@contextlib.contextmanager
def running(command: str, *, on_the_cpu: bool = True) -> Iterator[None]:
    """A context in which a command does its work, to be imported in it.

    What is wrong with its arguments, the data or a file ends the program, in a line or a few, and a fault of
    its own with a traceback; both with exit code 2, since 1 is an answer. Long work
    has a bar. What the user's own functions print goes to stderr.

    Args:
      command: its name.
      on_the_cpu: whether JAX is kept from an accelerator, on which a run may be training.
    """
    if on_the_cpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    handler = _Warnings(command)
    logging.getLogger().addHandler(handler)
    try:
        import loader  # noqa: PLC0415 (the first thing that takes time)

        with _only_the_answer(), _Bars() as bars, loader.watch_progress(bars.show):
            yield
    except typer.Exit:  # a RuntimeError too
        raise
    except BrokenPipeError:
        _end_unread()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            _fail_by_itself(command, error)
        fail(
            command,
            f"it needs {error.name}, which is not installed: pip install '.[{extra}]' in a "
            "checkout of regrain",
        )
    except OSError as error:
        fail(command, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        fail(command, str(error) or repr(error))
    except Exception as error:  # noqa: BLE001 (an exit with 1 would say that it found something)
        _fail_by_itself(command, error)
    finally:
        logging.getLogger().removeHandler(handler)


def _fail_by_itself(command: str, error: Exception) -> NoReturn:
    """Ends the program for an error that no input should provoke, with all that helps to find it."""
    notes.print("".join(traceback.format_exception(error)), markup=False, soft_wrap=True)
    fail(command, f"a fault of the command itself: {error!r}")


@contextlib.contextmanager
def _only_the_answer() -> Iterator[None]:
    """A context in which stdout gets what the console prints, and nothing else."""
    if sys.stdout is None:  # closed: there is nobody to answer
        yield
        return
    with console.kept_to(sys.stdout), contextlib.redirect_stdout(sys.stderr):
        yield


class _Warnings(logging.Handler):
    """Prints the library's own warnings as the command's."""

    def __init__(self, command: str) -> None:
        super().__init__(logging.WARNING)
        self._command = command
        self.addFilter(lambda record: record.name.startswith(("loader", "checkpointing")))

    def emit(self, record: logging.LogRecord) -> None:
        notes.print(
            f"[yellow]regrain {self._command}:[/] {_lines(record.getMessage())}", soft_wrap=True
        )


class _Bars(Progress):
    """A bar on stderr for each piece of work, if that is a terminal, and once it takes longer than two seconds."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
        )
        super().__init__(*columns, console=notes, transient=True)
        self._bars: dict[int, TaskID] = {}
        self._lock_of_bars = threading.Lock()

    def __enter__(self) -> Self:
        """Nothing is shown before there is something to show."""
        return self

    def __exit__(self, *_: object) -> None:
        if self.live.is_started:  # else to stop it would print an empty line
            self.stop()

    def show(self, progress: "loader.Progress") -> None:
        """Shows how far a piece of work has come."""
        if not notes.is_terminal:
            return
        with self._lock_of_bars:
            known = self._bars.get(progress.number)
            if progress.ended:
                if known is not None:
                    self.remove_task(self._bars.pop(progress.number))
            elif known is not None:
                self.update(
                    known,
                    description=plain(progress),
                    completed=progress.done,
                    total=progress.total,
                )
            elif progress.seconds > BAR_AFTER_SECONDS:
                self._bars[progress.number] = self.add_task(
                    plain(progress), completed=progress.done, total=progress.total
                )
                self.start()
