"""A program in a process group of its own, of which nothing outlives the context, whatever ends that."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from checkpointing.signals import signals_held

_GROUP_SECONDS: Final = 5.0
_GROUP_POLL_SECONDS: Final = 0.001


class Program:
    """A program, which runs as long as the context is open. Its output goes to a file.

    Args:
      arguments: it and what it is given.
      output: the file for all that it prints.
      environment: added to that of this process.
      poll_seconds: how long `is_running` takes.

    Attributes:
      started, ended: on the system's monotonic clock; the end as it was noticed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: pathlib.Path,
        environment: Mapping[str, str],
        poll_seconds: float,
    ) -> None:
        self.output = output
        self._arguments, self._environment = list(arguments), dict(environment)
        self._poll_seconds = poll_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.started = self.ended = time.monotonic()

    def __enter__(self) -> Self:
        """Starts it.

        Raises:
          OSError: it cannot be started.
        """
        try:
            # A signal that raised an exception in here would leave a process of which nobody knows.
            with signals_held(), self.output.open("wb") as output:
                self.started = self.ended = time.monotonic()
                self._process = subprocess.Popen(  # noqa: S603 (the caller's own command)
                    self._arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                )
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; ``None`` as long as `is_running` has not seen its end."""
        return self._process.returncode if self._process else None

    def is_running(self) -> bool:
        """Whether it has not ended yet; takes a moment, so that a loop may ask all the time."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._poll_seconds)
            self.ended = time.monotonic()
            return False
        return True

    def kill(self) -> bool:
        """Kills the whole group and waits for it; returns whether that is what ended the program."""
        if self._process is None:
            return False
        with signals_held():
            return self._kill(self._process)

    def send_kill(self) -> None:
        """Kills the whole group, without waiting for its end as `kill` does, which has to come next."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self, lines: int = 20) -> str:
        """The last lines of its output."""
        text = self.output.read_text("utf-8", errors="replace")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:]) or "  | (none)"

    def _kill(self, process: "subprocess.Popen[bytes]") -> bool:
        running = process.returncode is None
        patience = time.monotonic() + _GROUP_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # Children may be in the middle of a write, and end a little later.
            while time.monotonic() < patience:
                os.killpg(process.pid, 0)
                time.sleep(_GROUP_POLL_SECONDS)
        if running:
            self.ended = time.monotonic()
        return running and process.wait() == -signal.SIGKILL
