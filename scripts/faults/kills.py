"""SIGKILL at random instants: whatever a process was doing, the run goes on as if nothing had been.

The harness looks at the run's directory from outside, kills when the process is where the kill was
aimed at, and tells from what is left on disk where it landed.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import checkpointing
from checkpointing import CheckpointDamagedError, Delivery, Manifest
from checkpointing.storage.base import TMP_SUFFIX, TRASH
from loader.reading.program import Program
from scripts.faults import run

Phase = Literal["start-up", "training", "writing", "committing", "deleting"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
COMMAND: Final = (sys.executable, run.__file__)

#: The last file that Orbax writes before the manifest is completed and the step is committed.
_WRITTEN: Final = "train_state/manifest.ocdbt"
#: How often to look: when the phase matters, and before.
_POLL_SECONDS: Final = 0.0002
_IDLE_POLL_SECONDS: Final = 0.005
_LIMIT_SECONDS: Final = 120.0


class HarnessError(RuntimeError):
    """The harness could not do its work, so that nothing is known of the library."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """A SIGKILL, told as it was found afterwards.

    Attributes:
      run: which run, from 1.
      attempt: which process of the run, from 1.
      aim: what it was meant to hit.
      hit: what it hit, by what was left on disk.
      checkpoint: step of the newest whole checkpoint after it; 0 without one.
      acknowledged: the newest step of which the process knew that it was saved.
      replayed: steps that had been delivered before it and had to be delivered again.
    """

    run: int
    attempt: int
    aim: Phase
    hit: Phase
    checkpoint: int
    acknowledged: int
    replayed: int


@dataclasses.dataclass(frozen=True)
class KillReport:
    """What many kills have led to.

    Attributes:
      kills: in order.
      runs: that were killed again and again, until they came to their end.
      num_steps: of each run.
      lost: records that a run should have been trained on, and was not.
      repeated: records that a run was trained on once too often.
      final_states_equal: whether each run ended with the reference's train state, bit for bit, at the
        same position.
      faults: everything found after a kill or at an end that should not be.
    """

    kills: tuple[Kill, ...]
    runs: int
    num_steps: int
    lost: int
    repeated: int
    final_states_equal: bool
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, repeated or changed."""
        return not (self.lost or self.repeated or self.faults) and self.final_states_equal

    def hits(self) -> dict[str, int]:
        """How many kills landed in each phase."""
        found = collections.Counter(kill.hit for kill in self.kills)
        return {phase: found[phase] for phase in PHASES}


@dataclasses.dataclass(frozen=True)
class Reference:
    """A run that nothing has stopped.

    Attributes:
      deliveries: its batches.
      final: its newest checkpoint, as `checkpointing.load` gives it.
      seconds: how long each phase takes, the median.
    """

    deliveries: list[Delivery]
    final: tuple[Manifest, dict[str, Any]]
    seconds: Mapping[Phase, float]


def run_reference(folder: pathlib.Path, command: Sequence[str] = COMMAND) -> Reference:
    """Trains without a kill, and learns how long the phases take.

    Args:
      folder: for the run.
      command: to which the run's directory and the file for acknowledged steps are added.

    Raises:
      HarnessError: the run does not even work without a kill.
    """
    seen: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    place: Phase = "start-up"
    since = time.monotonic()
    with _Process(command, folder, 1) as process:
        while process.is_running():
            now = process.phase()
            if now != place:
                seen[place].append(time.monotonic() - since)
                place, since = now, time.monotonic()
            if time.monotonic() > process.started + _LIMIT_SECONDS:
                break
    if process.exit_code != 0:
        raise HarnessError(f"the run fails without a kill:\n{process.tail()}")
    seconds = {phase: statistics.median(times or [0.0]) for phase, times in seen.items()}
    return Reference(process.read_log(), checkpointing.load(process.directory), seconds)


def kill_runs(
    folder: pathlib.Path,
    kills: int,
    seed: int,
    *,
    command: Sequence[str] = COMMAND,
    phases: Sequence[Phase] = PHASES,
    reference: Reference | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> KillReport:
    """Trains with kills, run after run, until all have landed, and compares with a run never killed.

    Args:
      folder: empty; for the runs.
      kills: how many.
      seed: of the instants.
      command: as for `run_reference`.
      phases: what to aim at, in equal shares.
      reference: by default, one is made.
      progress: called with a line now and then.

    Raises:
      HarnessError: the run does not even work without a kill, hangs, or is over before the kills.
    """
    reference = reference or run_reference(folder / "reference", command)
    harness = _Harness(folder, tuple(command), reference)
    rng = random.Random(seed)  # noqa: S311 (instants, no secrets)
    aims = [phases[i % len(phases)] for i in range(kills)]
    rng.shuffle(aims)
    # A run that is wrong already says nothing more.
    while aims and not harness.faults:
        before = len(aims)
        harness.run_killed(aims, rng, lambda: progress(f"{kills - len(aims)} of {kills} kills"))
        if len(aims) == before and not harness.faults:
            raise HarnessError("a run ended before it could be killed")
    return harness.report()


class _Harness:
    """The runs of one call of `kill_runs`, and what is known so far."""

    def __init__(
        self, folder: pathlib.Path, command: tuple[str, ...], reference: Reference
    ) -> None:
        self.kills: list[Kill] = []
        self.faults: list[str] = []
        self._runs = 0
        self._folder = folder
        self._command = command
        self._reference = reference
        self._lost = self._repeated = 0
        self._equal = True

    def run_killed(
        self, aims: list[Phase], rng: random.Random, progress: Callable[[], None]
    ) -> None:
        """Trains to the end, with a kill for each aim as long as there are any."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        checkpoint = 0
        stream: list[Delivery] = []
        killed = True
        attempt = 0
        while killed:
            progress()
            attempt += 1
            aim = aims[-1] if aims else None
            with _Process(self._command, folder, attempt) as process:
                killed = self._kill(process, aim, rng)
            where = f"run {self._runs}, process {attempt}"
            deliveries = process.read_log()
            self._check_sequence(where, checkpoint, deliveries)
            if deliveries:
                self._note_replayed(len(stream) - checkpoint)
                stream[checkpoint:] = deliveries
            checkpoint = self._check_directory(where, process)
            if aim and killed:
                aims.pop()
                hit = process.hit(delivered=bool(deliveries))
                acknowledged = max(process.acknowledged(), default=0)
                self.kills.append(Kill(self._runs, attempt, aim, hit, checkpoint, acknowledged, 0))
            elif process.exit_code != 0:
                self.faults.append(f"{where}: exit code {process.exit_code}\n{process.tail()}")
        self._compare(folder / "run", stream)

    def report(self) -> KillReport:
        """What has been found so far."""
        return KillReport(
            tuple(self.kills),
            self._runs,
            len(self._reference.deliveries),
            self._lost,
            self._repeated,
            self._equal,
            tuple(self.faults),
        )

    def _note_replayed(self, steps: int) -> None:
        if self.kills and self.kills[-1].run == self._runs:
            self.kills[-1] = dataclasses.replace(self.kills[-1], replayed=steps)

    def _kill(self, process: "_Process", aim: Phase | None, rng: random.Random) -> bool:
        """Waits until the process is where the kill is aimed at; returns whether it was killed there."""
        after = 0 if aim == "start-up" else rng.randint(1, 6)
        fraction = rng.random()
        if aim == "start-up":  # which is imports for the most part, and then what matters
            fraction = 0.6 + 0.4 * fraction
        delay = fraction * self._reference.seconds[aim] if aim else 0.0
        due: float | None = process.started + delay if aim == "start-up" else None
        while process.is_running():
            now = time.monotonic()
            if now > process.started + _LIMIT_SECONDS:
                process.kill()
                raise HarnessError(f"the run hangs:\n{process.tail()}")
            if due is None and (aim is None or process.num_delivered() < after):
                time.sleep(_IDLE_POLL_SECONDS)
            elif due is None and process.phase() == aim:
                due = now + delay
            if due is not None and now >= due:
                return process.kill()
        return False

    def _check_sequence(self, where: str, checkpoint: int, deliveries: list[Delivery]) -> None:
        """A process goes on right at the newest whole checkpoint, and leaves out nothing."""
        steps = [delivery.position.step for delivery in deliveries]
        if steps != list(range(checkpoint, checkpoint + len(steps))):
            self.faults.append(f"{where}: began at step {checkpoint} and delivered steps {steps}")

    def _check_directory(self, where: str, process: "_Process") -> int:
        """Every step is whole, and each acknowledged one is there; returns the newest."""
        whole = []
        for step in process.steps():
            try:
                checkpointing.load(process.directory, step)
                whole.append(step)
            except CheckpointDamagedError as error:
                self.faults.append(f"{where}: {error.reasons[step]}, in a directory named {step}")
        acknowledged = process.acknowledged()
        newest = max(whole, default=0)
        if newest < max(acknowledged, default=0):
            self.faults.append(f"{where}: step {max(acknowledged)} was saved, and {newest} is left")
        if len(whole) < min(run.KEEP, len(acknowledged)):
            self.faults.append(f"{where}: only {whole} are left of {sorted(acknowledged)}")
        return newest

    def _compare(self, directory: pathlib.Path, stream: list[Delivery]) -> None:
        """Compares a run that has come to its end with the reference."""
        reference = self._reference.deliveries
        expected, found = _records(reference), _records(stream)
        self._lost += (expected - found).total()
        self._repeated += (found - expected).total()
        if [_content(one) for one in stream] != [_content(one) for one in reference]:
            self.faults.append(f"run {self._runs} was not trained on the batches of the reference")
        with contextlib.suppress(FileNotFoundError, CheckpointDamagedError):
            if _bits(*checkpointing.load(directory)) == _bits(*self._reference.final):
                return
        self._equal = False


def _records(deliveries: Sequence[Delivery]) -> collections.Counter[tuple[int, int | str]]:
    """How often each record was delivered in each epoch, padding left out."""
    return collections.Counter(
        (delivery.position.epoch, record)
        for delivery in deliveries
        for record, real in zip(delivery.ids, delivery.mask, strict=True)
        if real
    )


def _content(delivery: Delivery) -> Any:
    return delivery.position, delivery.ids, delivery.mask


def _bits(manifest: Manifest, leaves: dict[str, Any]) -> Any:
    content = {path: (leaf.dtype.str, leaf.shape, leaf.tobytes()) for path, leaf in leaves.items()}
    return manifest.position, manifest.next_ids, content


class _Process(Program):
    """A process of a run, and what its run's directory and its log tell of it."""

    def __init__(self, command: Sequence[str], folder: pathlib.Path, attempt: int) -> None:
        folder.mkdir(exist_ok=True)
        self.directory = folder / "run"
        self._acknowledged = folder / "acknowledged"
        self._log = folder / f"steps-{attempt}.jsonl"
        super().__init__(
            [*command, str(self.directory), str(self._acknowledged)],
            folder / f"output-{attempt}.txt",
            {"JAX_PLATFORMS": "cpu", "REGRAIN_STEP_LOG": str(self._log)},
            _POLL_SECONDS,
        )

    def phase(self) -> Phase:
        """What it is doing, as its directory looks from outside."""
        names = self._names()
        saving = [name for name in names if name.endswith(TMP_SUFFIX)]
        if TRASH in names:
            return "deleting"
        if saving:
            written = (self.directory / saving[0] / _WRITTEN).exists()
            return "committing" if written else "writing"
        if sum(name.isdigit() for name in names) > run.KEEP:
            return "committing"
        return "training" if self.num_delivered() else "start-up"

    def hit(self, *, delivered: bool) -> Phase:
        """What it was doing when it was killed, from what it has left."""
        if not delivered:
            return "start-up"
        for name in self._names():
            if name.endswith(TMP_SUFFIX):
                return "committing" if _is_sealed(self.directory / name) else "writing"
        return self.phase()

    def steps(self) -> list[int]:
        """Everything in the directory that looks like a step."""
        return sorted(int(name) for name in self._names() if name.isdigit())

    def acknowledged(self) -> set[int]:
        """Steps that the run knows to be saved, over all its processes."""
        if not self._acknowledged.exists():
            return set()
        # A line that a kill has torn is no acknowledgement.
        *lines, _ = self._acknowledged.read_text().split("\n")
        return {int(line) for line in lines}

    def num_delivered(self) -> int:
        """How many batches it has delivered."""
        try:
            return self._log.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def read_log(self) -> list[Delivery]:
        return checkpointing.read_step_log(self._log) if self._log.exists() else []

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.directory) as entries:
                return [entry.name for entry in entries]
        except FileNotFoundError:
            return []


def _is_sealed(step: pathlib.Path) -> bool:
    """Whether everything is written and the manifest is complete, so that only the rename is missing."""
    try:
        return bool(json.loads((step / "manifest/metadata").read_bytes())["files"])
    except (OSError, ValueError, KeyError):
        return False
