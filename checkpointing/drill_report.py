"""What a drill did and found: its attempts, its kills, how the runs compare; or why there is nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from checkpointing.comparison import FinalState, LeafDifference, RunDifference
from checkpointing.programs import Ending

Aim = Literal["start-up", "training", "save"]


class DrillError(RuntimeError):
    """The drill could not be carried out: the script failed by itself, or cannot be drilled."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of a run, in one process or several.

    Attributes:
      run: ``"reference"``, or ``"drilled-1"`` and so on.
      number: from 1 in its run.
      began: seconds since the drill began.
      seconds: from its start to its end.
      checkpoint: step of the newest checkpoint when it began; 0 without one.
      first_batch_seconds: from its start to its first batch; ``None`` where it delivered none.
      resumed_at: step of its first batch; ``None`` where it delivered none.
      steps_done: one more than the step of its last batch; ``None`` where it delivered none.
      replayed: how many of its steps an earlier attempt of the run had already delivered.
      log: its step log, in the folder of the drill; each of several processes adds its number, as
        `read_step_log` knows.
      process_count: how many processes it had. What all of them have delivered counts.
      endings: how each of them ended.
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
    """A SIGKILL that landed, told as it was found afterwards, not as it was meant.

    Attributes:
      run: the run that was killed.
      attempt: the number of the attempt that it ended.
      aim: what it was meant to hit.
      hit: what it hit: ``"start-up"`` (no batch was delivered yet), ``"save"`` or ``"training"``.
      saving: the step whose save was under way; its temporary directory was left behind.
      steps_done: batches that the run had delivered, all attempts together.
      checkpoint: step of the newest whole checkpoint; 0 without one.
      resumed_at: step at which the next attempt went on; ``None`` where that was killed before its
        first batch.
      replayed: steps that the next attempt delivered once more.
      resume_seconds: from the start of the next attempt to its first batch.
      process_count: how many processes the attempt had.
      processes: numbers of those that were killed.
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
    """What a drill did and found.

    Attributes:
      command: of the training script, with ``{run_dir}``.
      seed: of the instants.
      kills_asked: how many kills were to land.
      kills: those that did.
      attempts: all starts, that of the reference first.
      num_steps: batches of the reference.
      final_states: by run, its newest checkpoint.
      differences: everything that the drilled runs do not have in common with the reference.
      packages: versions of what wrote the checkpoints.
      seconds: the whole drill.
      process_counts: of the attempts, one after another and over again; empty for one process.
      patience_seconds: how long processes had to end by themselves after another one was killed.
      within: the share of a leaf's largest value by which final states may differ; 0 for no bit.
      leaf_differences: how far leaves of the drilled runs are from the reference's, if they are not
        bit for bit the same, also within the bound.
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
        """Steps that were delivered again after a kill, and compared with their first try."""
        return sum(attempt.replayed for attempt in self.attempts)

    @property
    def complete(self) -> bool:
        """Whether all kills that were asked for have landed."""
        return len(self.kills) >= self.kills_asked

    @property
    def hung(self) -> int:
        """Processes that had not ended by themselves, in all patience, after another one was killed."""
        endings = (ending for attempt in self.attempts for ending in attempt.endings)
        return sum(ending.cause == "given up" for ending in endings)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        verdict = {"same": not self.differences, "complete": self.complete, "hung": self.hung}
        return {**verdict, "replayed": self.replayed, **dataclasses.asdict(self)}
