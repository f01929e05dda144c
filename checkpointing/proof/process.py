"""The processes of one attempt of a drilled run: start them, follow them, kill some, see how each ended."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Literal, Self

from checkpointing.proof.step_log import (
    STEP_LOG_VARIABLE,
    Delivery,
    Part,
    joined,
    log_paths,
    parse_line,
    read_process_logs,
)
from checkpointing.storage.base import TMP_SUFFIX
from checkpointing.storage.directory import RunDirectory, StepDamagedError
from loader.reading.program import Program, kill_all

RUN_DIR: Final = "{run_dir}"
COORDINATOR, PROCESS_INDEX, PROCESS_COUNT = "{coordinator}", "{process_index}", "{process_count}"
#: A command needs these for several processes to find each other.
PROCESS_PLACEHOLDERS: Final = (COORDINATOR, PROCESS_INDEX, PROCESS_COUNT)
_POLL_SECONDS: Final = 0.001

#: By itself (also by an error), by an intended kill, or by a kill because it hung.
Cause = Literal["itself", "killed", "given up"]


class DrillError(RuntimeError):
    """The drill cannot be carried out: the script failed by itself, or is not suited to a drill."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one process of an attempt ended.

    Attributes:
      process: its number.
      exit_code: negative for a signal.
      cause: ``"itself"``, ``"killed"`` by `Programs.kill`, or ``"given up"`` by `Programs.wait`.
      after_kill_seconds: from the first kill to its end; ``None`` if none was killed.
    """

    process: int
    exit_code: int | None
    cause: Cause
    after_kill_seconds: float | None


class Programs:
    """Programs that start together and run until the context ends.

    Args:
      programs: in the order of their numbers, from 0.

    Attributes:
      killed_at: time of the first kill on the system's monotonic clock; ``None`` before it.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = tuple(programs)
        self.killed_at: float | None = None
        self._causes: dict[int, Cause] = {}

    def __enter__(self) -> Self:
        """Start all of them.

        Raises:
          OSError: one cannot be started; none is left running.
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
        """When the first one started, on the system's monotonic clock."""
        return self.programs[0].started

    @property
    def ended(self) -> float:
        """When the end of the last one was noticed."""
        return max(program.ended for program in self.programs)

    @property
    def failed(self) -> list[int]:
        """Numbers of those that ended by themselves with an error, in the order of their ends."""
        numbers = [
            number
            for number, program in enumerate(self.programs)
            if program.exit_code not in (None, 0) and number not in self._causes
        ]
        return sorted(numbers, key=lambda number: self.programs[number].ended)

    def is_running(self) -> bool:
        """Whether one is running; takes a moment, so a loop may call this all the time."""
        # The end of each one has to be noticed when it comes.
        running = [self.programs[number].is_running() for number in self._left()]
        return any(running)

    def kill(self, numbers: Sequence[int]) -> bool:
        """Kill some; returns whether one of them was still running. For the others call `wait`."""
        now = time.monotonic()
        landed = self._kill(numbers, "killed")
        if landed and self.killed_at is None:
            self.killed_at = now
        return landed

    def wait(self, seconds: float) -> None:
        """Wait for all to end by themselves; kill those that are left after this time."""
        until = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > until:
                self._kill(self._left(), "given up")

    def endings(self) -> tuple[Ending, ...]:
        """How each one ended, after the end of all."""
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
        landed = kill_all([self.programs[number] for number in numbers])
        killed = [number for number, one in zip(numbers, landed, strict=True) if one]
        self._causes.update(dict.fromkeys(killed, cause))
        return bool(killed)


class DrilledScript(Programs):
    """One attempt of a run: a training script in one process, or in several that share the run.

    Args:
      command: of the script, with placeholders.
      folder: of the run.
      number: of the attempt.
      count: number of processes.
      coordinator: address at which they meet.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: pathlib.Path,
        number: int,
        count: int,
        coordinator: str,
    ) -> None:
        self.folder, self.number, self.count = folder, number, count
        self.run_dir = folder / "run"
        self.log = folder / f"steps-{number}.jsonl"
        self._tails = [_Tail(pathlib.Path(path)) for path in log_paths(self.log, count)]
        self._name = command[0]
        values = {RUN_DIR: str(self.run_dir), COORDINATOR: coordinator, PROCESS_COUNT: str(count)}
        super().__init__(
            [
                Program(
                    _filled(command, {**values, PROCESS_INDEX: str(process)}),
                    folder / f"output-{number}{f'.process-{process}' if count > 1 else ''}.txt",
                    {STEP_LOG_VARIABLE: str(self.log)},
                    _POLL_SECONDS,
                )
                for process in range(count)
            ]
        )

    def __enter__(self) -> Self:
        """Start all processes.

        Raises:
          DrillError: they cannot be started.
        """
        try:
            return super().__enter__()
        except OSError as error:
            raise DrillError(
                f"{self._name} cannot be started: {error.strerror}. Nothing was run. Give the "
                "program and its arguments as they are typed in a shell"
            ) from error

    def last_step(self) -> int:
        """The last step that all processes have delivered; -1 before their first one."""
        return min(tail.last_step() for tail in self._tails)

    def saving(self) -> list[int]:
        """Steps that have a temporary directory."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.run_dir) as entries:
            names = [entry.name.partition(TMP_SUFFIX) for entry in entries]
            return [int(step) for step, suffix, _ in names if suffix and step.isdigit()]
        return []

    def newest_checkpoint(self) -> int:
        """Step of the newest intact checkpoint; 0 without one."""
        directory = RunDirectory(self.run_dir, write=False)
        with contextlib.suppress(FileNotFoundError):
            for step in reversed(directory.steps()):
                with contextlib.suppress(StepDamagedError):
                    directory.check(step, "manifest")
                    return step
        return 0

    def read_log(self) -> tuple[list[Delivery], list[Part]]:
        """The batches that all processes have delivered, and those that only some have."""
        return joined(read_process_logs(self.log, self.count))

    def place(self, process: int) -> str:
        """Attempt, run and number of a process, for messages."""
        of = f", process {process} of {self.count}" if self.count > 1 else ""
        return f"in attempt {self.number} of the run {self.folder.name}{of}"


class _Tail:
    """The end of a step log that grows."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._step = -1

    def last_step(self) -> int:
        """The last step delivered; -1 before the first one."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            *whole, _ = file.read().split(b"\n")
            self._read_bytes += sum(len(line) + 1 for line in whole)
            if whole and (delivery := parse_line(whole[-1], str(self._path))):
                self._step = delivery.position.step
        return self._step


def _filled(command: Sequence[str], values: dict[str, str]) -> list[str]:
    filled = list(command)
    for placeholder, value in values.items():
        filled = [argument.replace(placeholder, value) for argument in filled]
    return filled


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Host and port on this machine, kept from other programs until the context ends.

    A server that shares its port (``SO_REUSEPORT``), as `jax.distributed`'s does, can listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
