"""What all commands print with: tables and lines for people, bars for long work, errors in a line."""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

WRONG_USE: Final = 2
#: Work that ends sooner needs no progress bar.
BAR_AFTER_SECONDS: Final = 2.0

_MAX_TEXT: Final = 400
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


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    fixed = stream.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, stderr=stderr, width=None if fixed else _WIDTH_OF_NO_TERMINAL)


console: Final = _console(stderr=False)
notes: Final = _console(stderr=True)


def plain(value: object, limit: int = _MAX_TEXT) -> str:
    """A value as text that a terminal can only show: in one line, and no longer than ``limit``.

    What comes from a file could hold sequences that move the cursor or change colours.
    """
    text = str(value)
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def safe(value: object, limit: int = _MAX_TEXT) -> str:
    """As `plain`, for a place where rich looks for markup."""
    return escape(plain(value, limit))


def print_json(value: Any) -> None:
    """Prints one JSON document, in ASCII, and a line's end."""
    sys.stdout.write(f"{json.dumps(value)}\n")


def size(num_bytes: int | None) -> str:
    """A number of bytes for people: ``81.3 kB``."""
    if num_bytes is None:
        return "?"
    if num_bytes < 1000:
        return f"{num_bytes} B"
    amount, unit = float(num_bytes), "B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):  # noqa: B007 (it is used behind the loop)
        amount /= 1000
        if amount < 999.95:
            break
    return f"{amount:,.1f} {unit}"


def fail(command: str, message: str, code: int = WRONG_USE) -> NoReturn:
    """Ends the program with a message on stderr."""
    notes.print(f"[bold red]regrain {command}:[/] {_lines(message)}", soft_wrap=True)
    raise typer.Exit(code)


def _lines(message: str) -> str:
    """A message of several lines, each of which is safe to print."""
    return "\n".join(safe(line, 4 * _MAX_TEXT) for line in message.splitlines())


@contextlib.contextmanager
def failures(command: str) -> Iterator[None]:
    """A context in which what is wrong with the command, the data or a file ends the program in a line."""
    handler = _Warnings(command)
    logging.getLogger().addHandler(handler)
    try:
        yield
    except typer.Exit:  # a RuntimeError too
        raise
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            raise
        fail(
            command,
            f"it needs {error.name}, which is not installed: pip install 'regrain[{extra}]'",
        )
    except OSError as error:
        fail(command, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        fail(command, str(error) or repr(error))
    finally:
        logging.getLogger().removeHandler(handler)


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


class Bar:
    """A progress bar on stderr, if that is a terminal, and once the work takes longer than two seconds."""

    def __init__(self, progress: Progress, total: int | None, what: str) -> None:
        self._progress, self._task = progress, progress.add_task(what, total=total)
        self._began = time.monotonic()

    def advance(self, count: int) -> None:
        """Tells that so much more is done. Any thread may."""
        self._progress.advance(self._task, count)
        self._show()

    def reach(self, done: int, total: int | None = None) -> None:
        """Tells how much is done, and of how much."""
        self._progress.update(self._task, completed=done, total=total)
        self._show()

    def _show(self) -> None:
        late = time.monotonic() - self._began > BAR_AFTER_SECONDS
        if late and notes.is_terminal and not self._progress.live.is_started:
            self._progress.start()


@contextlib.contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Bar]:
    """A context in which work may be watched; the bar is gone at its end."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=notes, transient=True)
    try:
        yield Bar(progress, total, what)
    finally:
        if progress.live.is_started:  # else to stop it would print an empty line
            progress.stop()
