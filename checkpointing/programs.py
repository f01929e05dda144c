"""Programs that run together, as the processes of one run do, and how each of them ended."""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal, Self

from checkpointing.program import Program
from checkpointing.signals import signals_held

#: By itself (of its own or by an error), by a kill that was meant, or by one at the end of all patience.
Cause = Literal["itself", "killed", "given up"]


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one process of a group ended.

    Attributes:
      process: its number.
      exit_code: negative for a signal.
      cause: ``"itself"``, ``"killed"`` by `Programs.kill`, or ``"given up"`` by `Programs.wait`.
      after_kill_seconds: from the first kill to its end; ``None`` where none was killed.
    """

    process: int
    exit_code: int | None
    cause: Cause
    after_kill_seconds: float | None


class Programs:
    """Programs that are started together, and run as long as the context is open.

    Args:
      programs: in the order of their numbers, from 0.

    Attributes:
      killed_at: when the first one was killed, on the system's monotonic clock; ``None`` before.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = tuple(programs)
        self.killed_at: float | None = None
        self._causes: dict[int, Cause] = {}

    def __enter__(self) -> Self:
        """Starts all of them.

        Raises:
          OSError: one cannot be started; none is left.
        """
        try:
            for program in self.programs:
                program.__enter__()
        except BaseException:
            self._kill(range(len(self.programs)), "given up")
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill(range(len(self.programs)), "given up")

    @property
    def started(self) -> float:
        """When the first one was, on the system's monotonic clock."""
        return self.programs[0].started

    @property
    def ended(self) -> float:
        """When the end of the last one was noticed."""
        return max(program.ended for program in self.programs)

    @property
    def failed(self) -> list[int]:
        """Numbers of those that have ended by themselves, with an error; the first to end first."""
        numbers = [
            number
            for number, program in enumerate(self.programs)
            if program.exit_code not in (None, 0) and number not in self._causes
        ]
        return sorted(numbers, key=lambda number: self.programs[number].ended)

    def is_running(self) -> bool:
        """Whether one has not ended yet; takes a moment, so that a loop may ask all the time."""
        # All of them are asked, so that the end of each is noticed when it comes.
        running = [self.programs[number].is_running() for number in self._left()]
        return any(running)

    def kill(self, numbers: Sequence[int]) -> bool:
        """Kills some; returns whether one of them was still running.

        What the others do then is up to them: see `wait`.
        """
        now = time.monotonic()
        landed = self._kill(numbers, "killed")
        if landed and self.killed_at is None:
            self.killed_at = now
        return landed

    def wait(self, seconds: float) -> None:
        """Waits for all to end by themselves, and kills those that have not after so long."""
        until = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > until:
                self._kill(self._left(), "given up")

    def endings(self) -> tuple[Ending, ...]:
        """How each has ended, when none is running any more."""
        return tuple(
            Ending(
                number,
                program.exit_code,
                self._causes.get(number, "itself"),
                None if self.killed_at is None else program.ended - self.killed_at,
            )
            for number, program in enumerate(self.programs)
        )

    def _left(self) -> list[int]:
        return [n for n, program in enumerate(self.programs) if program.exit_code is None]

    def _kill(self, numbers: Sequence[int], cause: Cause) -> bool:
        # A signal that raised an exception between two of them would spare the second one.
        with signals_held():
            # All at once, before one of them can notice that another one has ended.
            for number in numbers:
                self.programs[number].send_kill()
            killed = [number for number in numbers if self.programs[number].kill()]
        self._causes.update(dict.fromkeys(killed, cause))
        return bool(killed)


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Host and port on this machine, kept from other programs as long as the context is open.

    A server that shares its port (``SO_REUSEPORT``), as that of `jax.distributed` does, can listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
