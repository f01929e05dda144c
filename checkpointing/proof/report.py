"""The report of a drill: its attempts, its kills, and the differences between the runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from checkpointing.proof.compare import FinalState, LeafDifference, RunDifference
from checkpointing.proof.process import Ending

Aim = Literal["start-up", "training", "save"]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the script, in one process or several.

    Attributes:
      run: ``"reference"``, or ``"drilled-1"`` and so on.
      number: counted from 1 in its run.
      began: seconds from the start of the drill to its start.
      seconds: from its start to its end.
      checkpoint: step of the newest checkpoint at its start; 0 without one.
      first_batch_seconds: from its start to its first batch; ``None`` if it delivered none.
      resumed_at: step of its first batch; ``None`` if it delivered none.
      steps_done: one more than the step of its last batch; ``None`` if it delivered none.
      replayed: number of its steps that an earlier attempt of the run had delivered.
      log: its step log, in the folder of the drill, for `read_step_log`.
      process_count: number of processes. A batch counts if all of them have delivered it.
      endings: how each process ended.
    """

    run: str
    number: int
    began: float
    seconds: float
    checkpoint: int
    first_batch_seconds: float | None
    resumed_at: int | None
    steps_done: int | None
    replayed: int
    log: str
    process_count: int = 1
    endings: tuple[Ending, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kill:
    """A SIGKILL that landed, as its traces show it.

    Attributes:
      run: the run that was killed.
      attempt: number of the attempt that it ended.
      aim: the intended hit.
      hit: the actual hit: ``"start-up"`` (no batch was delivered yet), ``"save"`` or ``"training"``.
      saving: the step of an unfinished save, whose temporary directory was left behind.
      steps_done: batches that all attempts of the run had delivered.
      checkpoint: step of the newest intact checkpoint; 0 without one.
      resumed_at: step at which the next attempt resumed; ``None`` if it was killed before its first batch.
      replayed: number of steps that the next attempt delivered again.
      resume_seconds: from the start of the next attempt to its first batch.
      process_count: number of processes of the attempt.
      processes: numbers of the killed processes.
      seconds: from the start of the attempt to the kill.
    """

    run: str
    attempt: int
    aim: Aim
    hit: Aim
    saving: int | None
    steps_done: int
    checkpoint: int
    resumed_at: int | None = None
    replayed: int = 0
    resume_seconds: float | None = None
    process_count: int = 1
    processes: tuple[int, ...] = (0,)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class DrillReport:
    """The report of a drill.

    Attributes:
      command: of the training script, with ``{run_dir}``.
      seed: of the instants.
      kills_asked: number of requested kills.
      kills: those that landed.
      attempts: all starts, the reference first.
      num_steps: number of batches of the reference.
      final_states: the newest checkpoint of each run.
      differences: between the drilled runs and the reference.
      packages: versions of the packages that wrote the checkpoints.
      seconds: duration of the drill.
      process_counts: numbers of processes of the attempts, over and over again; empty for one process.
      patience_seconds: time for processes to end by themselves after another one was killed.
      within: share of a leaf's largest value by which final states may differ; 0 for no bit.
      leaf_differences: distances of the leaves that are not bit for bit equal to the reference's, also
        within the bound.
    """

    command: tuple[str, ...]
    seed: int
    kills_asked: int
    kills: tuple[Kill, ...]
    attempts: tuple[Attempt, ...]
    num_steps: int
    final_states: Mapping[str, FinalState]
    differences: tuple[RunDifference, ...]
    packages: Mapping[str, str]
    seconds: float
    process_counts: tuple[int, ...] = ()
    patience_seconds: float = 0.0
    within: float = 0.0
    leaf_differences: tuple[LeafDifference, ...] = ()

    @property
    def replayed(self) -> int:
        """Number of steps that were delivered again after a kill, and compared with their first time."""
        return sum(attempt.replayed for attempt in self.attempts)

    @property
    def complete(self) -> bool:
        """Whether all requested kills have landed."""
        return len(self.kills) >= self.kills_asked

    @property
    def hung(self) -> int:
        """Number of processes that did not end by themselves after another one was killed."""
        endings = (ending for attempt in self.attempts for ending in attempt.endings)
        return sum(ending.cause == "given up" for ending in endings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        verdict = {"same": not self.differences, "complete": self.complete, "hung": self.hung}
        return {**verdict, "replayed": self.replayed, **dataclasses.asdict(self)}
