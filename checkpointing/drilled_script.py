"""A training script that is drilled: its processes, and what its directory and its logs tell of it."""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Final, Self

from checkpointing.directory import RunDirectory, StepDamagedError
from checkpointing.drill_report import DrillError
from checkpointing.program import Program
from checkpointing.programs import Programs
from checkpointing.step_log import (
    STEP_LOG_VARIABLE,
    Delivery,
    Part,
    joined,
    log_paths,
    parse_line,
    read_process_logs,
)
from checkpointing.storage import TMP_SUFFIX

RUN_DIR: Final = "{run_dir}"
COORDINATOR, PROCESS_INDEX, PROCESS_COUNT = "{coordinator}", "{process_index}", "{process_count}"
#: What a command must say for several processes to find each other.
PROCESS_PLACEHOLDERS: Final = (COORDINATOR, PROCESS_INDEX, PROCESS_COUNT)

_POLL_SECONDS: Final = 0.001


class DrilledScript(Programs):
    """One attempt of a run: a script that runs, in one process or several that share the run.

    Args:
      command: of the script, with placeholders.
      folder: of the run.
      number: of the attempt.
      count: how many processes.
      coordinator: an address for them to meet at.
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
        self._tails = [_Tail(path) for path in log_paths(self.log, count)]
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
        """Starts all processes.

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
        """Steps whose temporary directories are there."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.run_dir) as entries:
            names = [entry.name.partition(TMP_SUFFIX) for entry in entries]
            return [int(step) for step, suffix, _ in names if suffix and step.isdigit()]
        return []

    def newest_checkpoint(self) -> int:
        """Step of the newest whole checkpoint; 0 without one."""
        directory = RunDirectory(self.run_dir, write=False)
        with contextlib.suppress(FileNotFoundError):
            for step in reversed(directory.steps()):
                with contextlib.suppress(StepDamagedError):
                    directory.check(step, "manifest")
                    return step
        return 0

    def read_log(self) -> tuple[list[Delivery], list[Part]]:
        """All batches that all processes have delivered, and what only some of them have."""
        return joined(read_process_logs(self.log, self.count))

    def place(self, process: int) -> str:
        """Which process that is, for messages."""
        of = f", process {process} of {self.count}" if self.count > 1 else ""
        return f"in attempt {self.number} of the run {self.folder.name}{of}"


class _Tail:
    """The end of a step log that grows."""

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)
        self._read_bytes = 0
        self._step = -1

    def last_step(self) -> int:
        """The step last delivered; -1 before the first one."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            *whole, _ = file.read().split(b"\n")
            self._read_bytes += sum(len(line) + 1 for line in whole)
            for line in whole[-1:]:
                delivery = parse_line(line, str(self._path))
                self._step = delivery.position.step if delivery else self._step
        return self._step


def _filled(command: Sequence[str], values: dict[str, str]) -> list[str]:
    filled = list(command)
    for placeholder, value in values.items():
        filled = [argument.replace(placeholder, value) for argument in filled]
    return filled
