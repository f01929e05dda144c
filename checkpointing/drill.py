"""The drill: runs a training script once without a stop and once with SIGKILLs, and compares the two.

Any script will do that trains from the batches of `Checkpoints.resume` and keeps its checkpoints in
the directory that it is given. It needs no change: `resume` logs the batches (see `step_log`).
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Self

from checkpointing.comparison import (
    FinalState,
    RunDifference,
    Stretch,
    compare_checkpoints,
    compare_streams,
    final_state,
)
from checkpointing.directory import RunDirectory, StepDamagedError
from checkpointing.program import Program
from checkpointing.step_log import STEP_LOG_VARIABLE, Delivery, parse_line, read_step_log

Aim = Literal["start-up", "training", "save"]

REPORT_FILE: Final = "report.json"
PICTURE_FILE: Final = "drill.png"

_RUN_DIR: Final = "{run_dir}"
_MARKER: Final = ".regrain-drill"
_TMP_SUFFIX: Final = ".orbax-checkpoint-tmp"
_POLL_SECONDS: Final = 0.001
#: A mix for any number of kills. Three in six go for a save: it is the shortest of the three.
_AIMS: Final[tuple[Aim, ...]] = ("save", "training", "start-up", "save", "training", "save")
#: A script may end before its last kills; as many runs are killed until all kills have landed.
_MAX_RUNS: Final = 3


class DrillError(RuntimeError):
    """The drill could not be carried out: the script failed by itself, or cannot be drilled."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of a run.

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
      log: its step log, in the folder of the drill.
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


@dataclasses.dataclass(frozen=True)
class DrillReport:
    """What a drill did and found.

    Attributes:
      command: of the training script, with ``{run_dir}``.
      seed: of the instants.
      kills_asked: how many kills were to land.
      kills: those that did.
      attempts: all processes, those of the reference first.
      num_steps: batches of the reference.
      final_states: by run, its newest checkpoint.
      differences: everything that the drilled runs do not have in common with the reference.
      packages: versions of what wrote the checkpoints.
      seconds: the whole drill.
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

    @property
    def replayed(self) -> int:
        """Steps that were delivered again after a kill, and compared with their first try."""
        return sum(attempt.replayed for attempt in self.attempts)

    @property
    def complete(self) -> bool:
        """Whether all kills that were asked for have landed."""
        return len(self.kills) >= self.kills_asked

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        verdict = {"same": not self.differences, "complete": self.complete}
        return {**verdict, "replayed": self.replayed, **dataclasses.asdict(self)}


def run_drill(
    command: Sequence[str],
    out: str | os.PathLike[str],
    *,
    kills: int = 6,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> DrillReport:
    """Runs a training script once without a stop and once with kills, and compares batches and end.

    The end of a run is its newest checkpoint, restored by this process, on its default JAX device.

    Args:
      command: program and arguments. ``{run_dir}``, wherever it stands in them, becomes the
        directory that the script must give to `Checkpoints`.
      out: folder for runs, logs, the scripts' output and ``report.json``; made if it does not
        exist. What an earlier drill has left there is removed.
      kills: how many SIGKILLs must land. Where a run ends before it has had its share, up to two
        more runs are killed.
      seed: of the instants. The same seed aims at the same ones; where a kill lands is also up to
        the machine.
      progress: called with a line of text at each step of the drill.

    Returns:
      The report; it is also in ``out``. There may be fewer kills than asked (`DrillReport.complete`).

    Raises:
      DrillError: the script ended with an error, hung, delivered no batch, saved no checkpoint, or
        was over before a single kill could land.
      ValueError: a bad argument, or ``out`` holds something that is not of a drill.
    """
    if kills < 1:
        raise ValueError(f"kills must be at least 1, not {kills}: without one, nothing is tried")
    if not any(_RUN_DIR in argument for argument in command):
        raise ValueError(
            f"the command {' '.join(command)!r} has no {_RUN_DIR}: each run needs a directory of "
            f"its own. Put {_RUN_DIR} where the script takes the directory of its checkpoints"
        )
    with _prepared(pathlib.Path(out).absolute()) as folder:
        return _run_drill(_Drill(tuple(command), folder, progress), kills, seed)


def _run_drill(drill: "_Drill", kills: int, seed: int) -> DrillReport:
    rhythm = drill.run_reference()
    landed: list[Kill] = []
    rng = random.Random(seed)  # noqa: S311 (instants, no secrets)
    for number in range(1, _MAX_RUNS + 1):
        if len(landed) < kills:
            landed += drill.run_killed(f"drilled-{number}", _plan(kills - len(landed), rhythm, rng))
    if not landed:
        raise DrillError(
            f"the script ended before it could be killed, in {_MAX_RUNS} of {_MAX_RUNS} runs: "
            f"nothing was tried. Have it train for longer ({rhythm.describe()})"
        )
    report = drill.report(seed, kills, landed)
    text = json.dumps(report.to_dict(), indent=2)
    (drill.out / REPORT_FILE).write_text(f"{text}\n", "utf-8")
    return report


@dataclasses.dataclass(frozen=True)
class _Rhythm:
    """How the reference spent its time: what the kills are aimed by.

    Attributes:
      seconds: all of it.
      startup_seconds: until the first batch.
      step_seconds: between two batches, the median.
      save_seconds: that a temporary directory was seen, the median; 0 where none was.
      last_save: the last step with a temporary directory that was seen; 0 where none was.
      num_steps: batches.
    """

    seconds: float
    startup_seconds: float
    step_seconds: float
    save_seconds: float
    last_save: int
    num_steps: int

    def describe(self) -> str:
        return (
            f"{self.num_steps} steps in {self.seconds:.1f} s, the first after "
            f"{self.startup_seconds:.1f} s"
        )


@dataclasses.dataclass(frozen=True)
class _Instant:
    """When to kill: ``delay_seconds`` after the start, the step ``step``, or the first save from there on."""

    aim: Aim
    step: int
    delay_seconds: float


def _plan(kills: int, rhythm: _Rhythm, rng: random.Random) -> list[_Instant]:
    """Instants spread over the whole run: one in each of as many stretches of equal length."""
    aims = [_AIMS[i % len(_AIMS)] for i in range(kills)]
    rng.shuffle(aims)
    instants = []
    for i, aim in enumerate(aims):
        step, fraction = int((i + rng.random()) / kills * rhythm.num_steps), rng.random()
        if aim == "start-up":
            # The first tenth is the interpreter's own start.
            delay = (0.1 + 0.9 * fraction) * rhythm.startup_seconds
            instants.append(_Instant(aim, step, delay))
        elif aim == "save" and rhythm.last_save:
            delay = fraction * rhythm.save_seconds
            instants.append(_Instant(aim, min(step, rhythm.last_save), delay))
        else:  # also where saves are too quick to be seen
            instants.append(_Instant("training", step, fraction * rhythm.step_seconds))
    return instants


class _Drill:
    """The runs of one drill, and what is known of them so far."""

    def __init__(
        self, command: tuple[str, ...], out: pathlib.Path, progress: Callable[[str], None]
    ) -> None:
        self.out = out
        self._command = command
        self._progress = progress
        self._began = time.monotonic()
        self._attempts: list[Attempt] = []
        self._limit_seconds: float | None = None
        self._num_steps = 0

    def run_reference(self) -> _Rhythm:
        """Runs the script without a stop."""
        saves: dict[int, list[float]] = {}
        with self._start("reference", 1) as process:
            while process.is_running():
                for step in process.saving():
                    saves.setdefault(step, []).append(time.monotonic())
        attempt, log = self._finish(process, 0, 0)
        steps = [delivery.position.step for delivery in log]
        if attempt.first_batch_seconds is None:
            raise DrillError(
                "the script delivered no batch through the iterator of Checkpoints.resume: there is "
                "nothing to compare. Train from run.batches, in a directory that is new to the script"
            )
        if steps != list(range(len(steps))):
            raise DrillError(
                "the uninterrupted run did not deliver steps 0, 1, 2, ... in turn: several iterators "
                "or processes log to one file. Have the script resume once, in one process"
            )
        if not process.newest_checkpoint():
            raise DrillError(
                f"the script saved no checkpoint in {process.run_dir}: it cannot resume. Give "
                f"{_RUN_DIR} to Checkpoints as it is, and call save after each step"
            )
        times = [delivery.seconds for delivery in log]
        rhythm = _Rhythm(
            attempt.seconds,
            attempt.first_batch_seconds,
            statistics.median([b - a for a, b in itertools.pairwise(times)] or [0.0]),
            statistics.median([seen[-1] - seen[0] for seen in saves.values()] or [0.0]),
            max(saves, default=0),
            len(steps),
        )
        self._num_steps = len(steps)
        self._limit_seconds = 60 + 10 * attempt.seconds
        self._progress(f"reference: {rhythm.describe()}")
        return rhythm

    def run_killed(self, run: str, instants: Sequence[_Instant]) -> list[Kill]:
        """Runs the script until it ends by itself, with a kill at each instant until then."""
        kills: list[Kill] = []
        steps_done = checkpoint = 0
        pending: Sequence[_Instant | None] = [*instants, None]
        for number, instant in enumerate(pending, start=1):
            with self._start(run, number) as process:
                killed = self._wait(process, instant)
            attempt, _ = self._finish(process, checkpoint, steps_done, killed=killed)
            if kills:
                kills[-1] = dataclasses.replace(
                    kills[-1],
                    resumed_at=attempt.resumed_at,
                    replayed=attempt.replayed,
                    resume_seconds=attempt.first_batch_seconds,
                )
            steps_done = max(steps_done, attempt.steps_done or 0)
            checkpoint = process.newest_checkpoint()
            if not killed or instant is None:
                self._progress(f"{run}: ended at step {steps_done} of {self._num_steps}")
                break
            # Before its first batch a script may not have come to remove what older kills left.
            delivered = attempt.steps_done is not None
            saving = max(process.saving(), default=None) if delivered else None
            hit: Aim = "save" if saving else "training" if delivered else "start-up"
            kills.append(Kill(run, number, instant.aim, hit, saving, steps_done, checkpoint))
            what = f"the save of step {saving}" if saving else hit
            self._progress(f"{run}: killed during {what}, after {steps_done} steps")
        return kills

    def report(self, seed: int, kills_asked: int, kills: list[Kill]) -> DrillReport:
        """Compares all runs with the reference."""
        # Not at the top: Checkpoints itself imports the step log from this package.
        from checkpointing.checkpoints import load  # noqa: PLC0415

        reference = read_step_log(self.out / self._attempts[0].log)
        reference_state = load(self.out / "reference" / "run")
        final_states = {"reference": final_state(*reference_state)}
        differences: list[RunDifference] = []
        for run in dict.fromkeys(attempt.run for attempt in self._attempts[1:]):
            stretches = (
                Stretch(f"{run}, attempt {attempt.number}", attempt.checkpoint, self._read(attempt))
                for attempt in self._attempts
                if attempt.run == run
            )
            differences += compare_streams(reference, stretches)
            state = load(self.out / run / "run")
            differences += compare_checkpoints(run, reference_state, state)
            final_states[run] = final_state(*state)
        return DrillReport(
            self._command,
            seed,
            kills_asked,
            tuple(kills),
            tuple(self._attempts),
            self._num_steps,
            final_states,
            tuple(differences),
            dict(reference_state[0].packages),
            time.monotonic() - self._began,
        )

    def _start(self, run: str, number: int) -> "_Process":
        folder = self.out / run
        folder.mkdir(exist_ok=True)
        return _Process(self._command, folder, number)

    def _wait(self, process: "_Process", instant: _Instant | None) -> bool:
        """Waits for the instant and kills the process; returns whether it was still running."""
        reached, delay = 0.0, instant.delay_seconds if instant else 0.0
        while process.is_running():
            now = time.monotonic()
            if self._limit_seconds and now - process.started > self._limit_seconds:
                raise DrillError(
                    f"the script hangs: it has not ended in {self._limit_seconds:.0f} s, ten times "
                    f"and a minute more than it took without a kill.\n{process.tail()}"
                )
            if instant is None:
                continue
            if reached and instant.aim == "save" and not process.saving():
                reached, delay = 0.0, delay / 2  # it is over already: try the next one, sooner
            if not reached and process.is_at(instant):
                reached = now
            if reached and now >= reached + delay:
                return process.kill()
        return False

    def _finish(
        self, process: "_Process", checkpoint: int, steps_done: int, *, killed: bool = False
    ) -> tuple[Attempt, list[Delivery]]:
        """Takes down what an attempt did; raises if it failed by itself."""
        if not killed and process.exit_code != 0:
            raise DrillError(
                f"the script failed by itself, with exit code {process.exit_code}, in attempt "
                f"{process.number} of the run {process.folder.name}: the drill has no end to compare."
                f" The last lines of its output:\n{process.tail()}"
            )
        log = process.read_log()
        steps = [delivery.position.step for delivery in log]
        attempt = Attempt(
            process.folder.name,
            process.number,
            process.started - self._began,
            process.ended - process.started,
            checkpoint,
            log[0].seconds - process.started if log else None,
            steps[0] if steps else None,
            steps[-1] + 1 if steps else None,
            sum(step < steps_done for step in steps),
            str(process.log.relative_to(self.out)),
        )
        self._attempts.append(attempt)
        return attempt, log

    def _read(self, attempt: Attempt) -> list[Delivery]:
        path = self.out / attempt.log
        return read_step_log(path) if path.exists() else []


class _Process(Program):
    """A running script, and what its run's directory and its log tell of it."""

    def __init__(self, command: Sequence[str], folder: pathlib.Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.run_dir = folder / "run"
        self.log = folder / f"steps-{number}.jsonl"
        self._read_bytes = 0
        self._step: int | None = None
        self._program, *arguments = (
            argument.replace(_RUN_DIR, str(self.run_dir)) for argument in command
        )
        super().__init__(
            [self._program, *arguments],
            folder / f"output-{number}.txt",
            {STEP_LOG_VARIABLE: str(self.log)},
            _POLL_SECONDS,
        )

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except OSError as error:
            raise DrillError(
                f"{self._program} cannot be started: {error.strerror}. Nothing was run. Give the "
                "program and its arguments as they are typed in a shell"
            ) from error

    def is_at(self, instant: _Instant) -> bool:
        """Whether the place is reached from which the instant counts."""
        if instant.aim == "start-up":
            return True
        step = self._last_step()
        if step is None or step < instant.step - (instant.aim == "save"):
            return False
        return instant.aim == "training" or bool(self.saving())

    def saving(self) -> list[int]:
        """Steps whose temporary directories are there."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.run_dir) as entries:
            names = [entry.name.partition(_TMP_SUFFIX) for entry in entries]
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

    def read_log(self) -> list[Delivery]:
        """All batches that it has delivered."""
        return read_step_log(self.log) if self.log.exists() else []

    def _last_step(self) -> int | None:
        """The step last delivered, from what was added to the log since the last call."""
        for line in self._new_lines():
            delivery = parse_line(line, str(self.log))
            self._step = delivery.position.step if delivery else self._step
        return self._step

    def _new_lines(self) -> Iterator[bytes]:
        """The last whole line that is new, if there is one."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self._read_bytes)
            *whole, _ = file.read().split(b"\n")
            self._read_bytes += sum(len(line) + 1 for line in whole)
            yield from whole[-1:]


@contextlib.contextmanager
def _prepared(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """An output folder of our own, without the files of an earlier drill, as long as the context is open.

    Raises:
      ValueError: it holds other files and no drill's, is no folder, or another drill is under way.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: a drill needs a folder for its runs. Choose another")
    marker = out / _MARKER
    if out.exists() and not marker.is_file() and any(out.iterdir()):
        raise ValueError(
            f"{out} is not empty, and no drill has made it: what it holds is left alone. Choose a "
            "new folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    with marker.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another drill is under way in {out}, and would lose its runs. Wait for it, or choose "
                "another folder"
            ) from None
        file.write("A drill of regrain made this folder; the next one may replace its files.\n")
        file.flush()
        runs = ("reference", *(f"drilled-{number}" for number in range(1, _MAX_RUNS + 1)))
        for run in runs:
            shutil.rmtree(out / run, ignore_errors=True)
        for name in (REPORT_FILE, PICTURE_FILE):
            (out / name).unlink(missing_ok=True)
        yield out
