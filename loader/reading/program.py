"""Run a program in its own process group, and kill the group on exit."""

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Final, Self

#: Signals that schedulers, terminals and people send to a program.
PROGRAM_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_KILL_SECONDS: Final = 5.0
_GROUP_POLL_SECONDS: Final = 0.001


class Program:
    """A program and its children, which run until the context ends.

    Args:
      arguments: the program and its arguments.
      output: file for stdout and stderr; by default they are those of this process.
      environment: variables added to those of this process.
      poll_seconds: how long `is_running` waits for the end.
      pass_fds: descriptors that the program inherits.

    Attributes:
      started, ended: times on the system's monotonic clock; ``ended`` is when the end was noticed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: pathlib.Path | None,
        environment: Mapping[str, str],
        poll_seconds: float,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.output = output
        self._arguments, self._environment = list(arguments), dict(environment)
        self._poll_seconds, self._pass_fds = poll_seconds, tuple(pass_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self.started = self.ended = time.monotonic()

    def __enter__(self) -> Self:
        """Start it.

        Raises:
          OSError: it cannot be started.
        """
        try:
            # An exception from a signal handler would lose the process between its start and here.
            with signals_held(), contextlib.ExitStack() as files:
                output = (
                    None if self.output is None else files.enter_context(self.output.open("wb"))
                )
                self.started = self.ended = time.monotonic()
                self._process = subprocess.Popen(  # noqa: S603 (the caller's own command)
                    self._arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                    pass_fds=self._pass_fds,
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
    def pid(self) -> int:
        """Its process ID; 0 before it is started."""
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` until its end was noticed."""
        return self._process.returncode if self._process else None

    def is_running(self, seconds: float | None = None) -> bool:
        """Whether it runs; waits some seconds for its end, by default ``poll_seconds``."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._poll_seconds if seconds is None else seconds)
            self.ended = time.monotonic()
            return False
        return True

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it; never on systems without `os.waitid`."""
        if self._process is None or self._process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):
            return False
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except ChildProcessError:
            return False

    def kill(self) -> bool:
        """Kill the group and wait for its end; returns whether that is what ended the program."""
        if self._process is None:
            return False
        with signals_held():
            return self._kill(self._process)

    def send_kill(self) -> None:
        """Kill the group without waiting; call `kill` afterwards."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self, lines: int = 20) -> str:
        """The last lines of the output file."""
        text = "" if self.output is None else self.output.read_text("utf-8", errors="replace")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:]) or "  | (none)"

    def _kill(self, process: "subprocess.Popen[bytes]") -> bool:
        running = process.returncode is None
        patience = time.monotonic() + _KILL_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_SECONDS)
            # Its children may be inside a system call, and end a little later.
            while time.monotonic() < patience:
                os.killpg(process.pid, 0)
                time.sleep(_GROUP_POLL_SECONDS)
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
            self.ended = time.monotonic()
        return running and process.returncode == -signal.SIGKILL


def kill_all(programs: Sequence[Program]) -> list[bool]:
    """Kill some programs at once; returns for each whether that is what ended it."""
    with signals_held():
        # All get the signal before one of them can notice that another has ended.
        for program in programs:
            program.send_kill()
        return [program.kill() for program in programs]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay this process's Python signal handlers, and what they raise, to the end of the context.

    Signals without a Python handler act as usual. In a thread other than the main one this does
    nothing: Python runs no handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in PROGRAM_SIGNALS}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)

    for held in handlers:
        signal.signal(held, note)
    try:
        yield
    finally:
        for held, handler in handlers.items():
            signal.signal(held, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
