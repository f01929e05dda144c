"""Output of all commands: tables and lines for people, JSON, one-line errors, bars for long work."""

import contextlib
import functools
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

if TYPE_CHECKING:  # rich takes longer to import than everything that help needs
    from rich.table import Table

    from regrain.cli.rich_console import Console

WRONG_USE: Final = 2

MAX_TEXT: Final = 400


class Output:
    """Standard output or standard error. Rich is imported when something is printed."""

    def __init__(self, *, stderr: bool) -> None:
        self._stderr = stderr

    @functools.cached_property
    def rich(self) -> "Console":
        """The console of rich behind it."""
        from regrain.cli.rich_console import console_of

        return console_of(stderr=self._stderr)

    def print(self, *values: Any, **how: Any) -> None:
        """Print as `rich.console.Console.print`."""
        self.rich.print(*values, **how)

    def rule(self, title: str) -> None:
        """Print a line with a title in it."""
        self.rich.rule(title, align="left", style="dim")


console: Final = Output(stderr=False)
#: For everything but the answer.
notes: Final = Output(stderr=True)


def table(
    headings: Iterable[str], rows: Iterable[Sequence[Any]] = (), *, right: Iterable[str] = ()
) -> "Table":
    """A table without frames, whose rows are added as given: cells may hold markup.

    Args:
      headings: of the columns.
      rows: cells, from left to right.
      right: headings of the columns to align to the right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in headings:
        made.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


def plain(value: object, limit: int = MAX_TEXT) -> str:
    """A value as printable text in one line of at most ``limit`` characters.

    Text from a file could hold sequences that move the cursor or change colours.
    """
    text = str(value)
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def safe(value: object, limit: int = MAX_TEXT) -> str:
    """As `plain`, with rich's markup escaped."""
    from rich.markup import escape

    return escape(plain(value, limit))


def print_json(value: Any) -> None:
    """Print one JSON document, in ASCII, on a line."""
    console.rich.file.write(f"{json.dumps(value)}\n")
    console.rich.file.flush()


def fail(command: str, message: str, code: int = WRONG_USE) -> NoReturn:
    """End the program with a message on stderr."""
    notes.print(f"[bold red]regrain {command}:[/] {_lines(message)}", soft_wrap=True)
    raise typer.Exit(code)


def _lines(message: str) -> str:
    """A message with each of its lines safe to print."""
    return "\n".join(safe(line, 4 * MAX_TEXT) for line in message.splitlines())


@contextlib.contextmanager
def running(command: str, *, on_the_cpu: bool = True) -> Iterator[None]:
    """A context for the work of a command, which imports what it needs inside.

    An error in the arguments, the data or a file ends the program with a short message, and a bug with a
    traceback; both with exit code 2, since 1 is an answer. Long work has a progress bar. What the user's own
    functions print goes to stderr.

    Args:
      command: its name.
      on_the_cpu: keep JAX off the accelerator, on which a run may be training.
    """
    if on_the_cpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    handler = _Warnings(command)
    logging.getLogger().addHandler(handler)
    try:
        import loader
        from regrain.cli.rich_console import Bars

        with _only_the_answer(), Bars() as bars, loader.watch_progress(bars.show):
            yield
    except typer.Exit:  # a RuntimeError too
        raise
    except BrokenPipeError:
        from regrain.cli.rich_console import end_unread

        end_unread()
    except ModuleNotFoundError as error:
        from loader.sources.extras import EXTRAS, missing

        package = str(error.name).partition(".")[0]
        if package not in EXTRAS:
            _fail_by_itself(command, error)
        fail(command, missing(package, EXTRAS[package]))
    except OSError as error:
        fail(command, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        fail(command, str(error) or repr(error))
    except Exception as error:  # noqa: BLE001 (an exit with 1 would say that it found something)
        _fail_by_itself(command, error)
    finally:
        logging.getLogger().removeHandler(handler)


def _fail_by_itself(command: str, error: Exception) -> NoReturn:
    """End the program for a bug, with its traceback."""
    notes.print("".join(traceback.format_exception(error)), markup=False, soft_wrap=True)
    fail(command, f"a fault of the command itself: {error!r}")


@contextlib.contextmanager
def _only_the_answer() -> Iterator[None]:
    """A context in which stdout gets what the console prints, and nothing else."""
    if sys.stdout is None:  # closed
        yield
        return
    with console.rich.kept_to(sys.stdout), contextlib.redirect_stdout(sys.stderr):
        yield


class _Warnings(logging.Handler):
    """Prints warnings of the library on stderr."""

    def __init__(self, command: str) -> None:
        super().__init__(logging.WARNING)
        self._command = command
        self.addFilter(lambda record: record.name.startswith(("loader", "checkpointing")))

    def emit(self, record: logging.LogRecord) -> None:
        notes.print(
            f"[yellow]regrain {self._command}:[/] {_lines(record.getMessage())}", soft_wrap=True
        )
