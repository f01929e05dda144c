"""Rich's console and progress bars, as the commands use them."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import IO, Final, NoReturn, Self

import rich.console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

import loader
from regrain.cli import console as output

#: The exit code of a program killed by SIGPIPE: the reader of the output has gone.
UNREAD: Final = 141
#: Shorter work gets no progress bar.
BAR_AFTER_SECONDS: Final = 2.0
#: The width of output to a file or a program, so that columns are not broken.
_WIDTH_OF_NO_TERMINAL: Final = 200


class Console(rich.console.Console):
    """A console that ends the program with `UNREAD` if nobody reads its output any more."""

    @contextlib.contextmanager
    def kept_to(self, stream: IO[str]) -> Iterator[None]:
        """A context in which the console writes to a stream, even if stdout and stderr are replaced."""
        before, self._file = self._file, stream
        try:
            yield
        finally:
            self._file = before

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        end_unread()


def console_of(*, stderr: bool) -> Console:
    """A console on standard output or standard error."""
    stream = sys.stderr if stderr else sys.stdout
    fixed = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    width = None if fixed else _WIDTH_OF_NO_TERMINAL
    return Console(highlight=False, emoji=False, stderr=stderr, width=width)


def end_unread() -> NoReturn:
    """End the program without writing what is left in the buffer of standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.console.rich.file.fileno())
    raise SystemExit(UNREAD)


class Bars(Progress):
    """A bar on stderr for each piece of work that takes longer than two seconds, if stderr is a terminal."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
        )
        super().__init__(*columns, console=output.notes.rich, transient=True)
        self._bars: dict[int, TaskID] = {}
        self._lock_of_bars = threading.Lock()

    def __enter__(self) -> Self:
        """Show nothing before there is something to show."""
        return self

    def __exit__(self, *_: object) -> None:
        if self.live.is_started:  # else an empty line would be printed
            self.stop()

    def show(self, progress: loader.Progress) -> None:
        """Show how far a piece of work has come."""
        if not output.notes.rich.is_terminal:
            return
        with self._lock_of_bars:
            known = self._bars.get(progress.number)
            if progress.ended:
                if known is not None:
                    self.remove_task(self._bars.pop(progress.number))
            elif known is not None:
                self.update(
                    known,
                    description=output.plain(progress),
                    completed=progress.done,
                    total=progress.total,
                )
            elif progress.seconds > BAR_AFTER_SECONDS:
                self._bars[progress.number] = self.add_task(
                    output.plain(progress), completed=progress.done, total=progress.total
                )
                self.start()
