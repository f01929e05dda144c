"""The drill: run a training script once without a stop and once with SIGKILLs, and compare the two.

The script needs no change, if it trains from the batches of `Checkpoints.resume` and keeps its checkpoints in
the directory that it is given: `resume` logs the batches (see `step_log`).

An elastic drill runs the script in several processes, kills one or all of them, and goes on with another number
of processes; the run without a stop has one.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from checkpointing.proof.compare import (
    LeafDifference,
    RunDifference,
    Stretch,
    compare_checkpoints,
    compare_streams,
    final_state,
    leaf_differences,
)
from checkpointing.proof.process import (
    PROCESS_PLACEHOLDERS,
    RUN_DIR,
    DrilledScript,
    DrillError,
    reserved_address,
)
from checkpointing.proof.report import Aim, Attempt, DrillReport, Kill
from checkpointing.proof.step_log import Delivery, Part, joined, read_process_logs

#: The processes to kill: all of them, the first one (JAX's coordinator), or another one.
Victims = Literal["all", "first", "other"]

REPORT_FILE: Final = "report.json"
PICTURE_FILE: Final = "drill.png"

_MARKER: Final = ".regrain-drill"
#: A mix for any number of kills. Three in six are aimed at a save, the shortest of the three.
_AIMS: Final[tuple[Aim, ...]] = ("save", "training", "start-up", "save", "training", "save")
_VICTIMS: Final[tuple[Victims, ...]] = ("other", "first", "all")
#: A script may end before its last kills: up to this many runs are killed until all kills have landed.
_MAX_RUNS: Final = 3


def run_drill(
    command: Sequence[str],
    out: str | os.PathLike[str],
    *,
    kills: int = 6,
    seed: int = 0,
    processes: Sequence[int] = (),
    patience_seconds: float = 120.0,
    within: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> DrillReport:
    """Run a training script once without a stop and once with kills, and compare the two.

    All batches are compared, and the newest checkpoints, restored by this process on its default JAX device.

    Args:
      command: program and arguments. ``{run_dir}`` in them becomes the directory that the script must
        give to `Checkpoints`.
      out: folder for runs, logs, the scripts' output and ``report.json``; made if it does not exist.
        The files of an earlier drill are removed.
      kills: number of SIGKILLs that must land. If a run ends before its last kill, up to two more runs
        are killed.
      seed: of the instants. The same seed aims at the same ones; where a kill lands also depends on the
        machine.
      processes: for an elastic drill, the number of processes of each attempt, over and over again. The
        command then also needs ``{coordinator}`` (a free address of this machine), ``{process_index}``
        and ``{process_count}``, for `jax.distributed.initialize`. Kills hit one process or all.
      patience_seconds: time for the other processes to end by themselves after one was killed. JAX ends
        them after the ``heartbeat_timeout_seconds`` of `jax.distributed.initialize`, 100 s by default.
        Those that hang are killed and counted (`DrillReport.hung`).
      within: floating-point leaves of the final train state may differ by this share of their largest
        absolute value: the last bits of a sum over processes may depend on their number. By default no
        bit may differ.
      progress: called with a line of text at each step of the drill.

    Returns:
      The report, which is also written to ``out``. Fewer kills than requested may have landed
      (`DrillReport.complete`).

    Raises:
      DrillError: the script ended with an error, hung, delivered no batch, saved no checkpoint, or
        ended before a single kill could land.
      ValueError: a bad argument, or ``out`` holds other files than a drill's.
    """
    if kills < 1:
        raise ValueError(f"kills must be at least 1, not {kills}: without a kill nothing is tested")
    if not any(RUN_DIR in argument for argument in command):
        raise ValueError(
            f"the command {' '.join(command)!r} has no {RUN_DIR}: each run needs a directory of "
            f"its own. Put {RUN_DIR} where the script takes the directory of its checkpoints"
        )
    _check_processes(command, processes)
    with _prepared(pathlib.Path(out).absolute()) as folder:
        drill = _Drill(tuple(command), folder, progress, tuple(processes), patience_seconds)
        return _run_drill(drill, kills, seed, within)


def _check_processes(command: Sequence[str], counts: Sequence[int]) -> None:
    for count in counts:
        if type(count) is not int or count < 1:
            raise ValueError(f"processes must be numbers from 1 on, not {count!r}")
    missing = [
        placeholder
        for placeholder in PROCESS_PLACEHOLDERS
        if counts and not any(placeholder in argument for argument in command)
    ]
    if missing:
        raise ValueError(
            f"the command {' '.join(command)!r} has no {' and no '.join(missing)}: several processes "
            "cannot find each other. Put them where the script takes the arguments of "
            "jax.distributed.initialize"
        )


def _run_drill(drill: "_Drill", kills: int, seed: int, within: float) -> DrillReport:
    rhythm = drill.run_reference()
    landed: list[Kill] = []
    # One process is killed at the same instants whether there is a choice of victims or not.
    rng, victims = random.Random(seed), random.Random(f"{seed}: victims")  # noqa: S311 (no secrets)
    for number in range(1, _MAX_RUNS + 1):
        if len(landed) < kills:
            instants = _plan(kills - len(landed), rhythm, rng)
            landed += drill.run_killed(f"drilled-{number}", _with_victims(instants, victims))
    if not landed:
        raise DrillError(
            f"the script ended before it could be killed, in {_MAX_RUNS} of {_MAX_RUNS} runs: "
            f"nothing was tried. Have it train for longer ({rhythm.describe()})"
        )
    report = drill.report(seed, kills, landed, within)
    text = json.dumps(report.to_dict(), indent=2)
    (drill.out / REPORT_FILE).write_text(f"{text}\n", "utf-8")
    return report


@dataclasses.dataclass(frozen=True)
class _Rhythm:
    """The times of the reference run, by which kills are aimed.

    Attributes:
      seconds: from start to end.
      startup_seconds: from the start to the first batch.
      step_seconds: median time between two batches.
      save_seconds: median time that a temporary directory was seen; 0 if none was.
      last_save: the last step with a temporary directory; 0 if none was seen.
      num_steps: number of batches.
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
    """When to kill: ``delay_seconds`` after the start, the step ``step``, or the first save from it on.

    ``choice``, from 0 to 1, picks the process if ``victims`` is ``"other"``.
    """

    aim: Aim
    step: int
    delay_seconds: float
    victims: Victims = "all"
    choice: float = 0.0

    def processes(self, count: int) -> tuple[int, ...]:
        """Numbers of the processes to kill among ``count``."""
        if self.victims == "all" or count == 1:
            return tuple(range(count))
        return (0 if self.victims == "first" else 1 + int(self.choice * (count - 1)),)


def _plan(kills: int, rhythm: _Rhythm, rng: random.Random) -> list[_Instant]:
    """Instants over the whole run: one in each of as many equal stretches."""
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
        else:  # also if saves are too quick to be seen
            instants.append(_Instant("training", step, fraction * rhythm.step_seconds))
    return instants


def _with_victims(instants: Sequence[_Instant], rng: random.Random) -> list[_Instant]:
    """The same instants, each with the processes to kill."""
    victims = [_VICTIMS[i % len(_VICTIMS)] for i in range(len(instants))]
    rng.shuffle(victims)
    return [
        dataclasses.replace(instant, victims=whom, choice=rng.random())
        for instant, whom in zip(instants, victims, strict=True)
    ]


@dataclasses.dataclass
class _Drill:
    """The runs of one drill."""

    command: tuple[str, ...]
    out: pathlib.Path
    progress: Callable[[str], None]
    counts: tuple[int, ...]
    patience_seconds: float
    _began: float = dataclasses.field(default_factory=time.monotonic)
    _attempts: list[Attempt] = dataclasses.field(default_factory=list)
    _limit_seconds: float | None = None
    _num_steps: int = 0

    def run_reference(self) -> _Rhythm:
        """Run the script without a stop."""
        saves: dict[int, list[float]] = {}
        with self._started("reference", 1, 1) as script:
            while script.is_running():
                for step in script.saving():
                    saves.setdefault(step, []).append(time.monotonic())
        attempt, log = self._finish(script, 0, 0)
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
        if not script.newest_checkpoint():
            raise DrillError(
                f"the script saved no checkpoint in {script.run_dir}: it cannot resume. Give "
                f"{RUN_DIR} to Checkpoints as it is, and call save after each step"
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
        self.progress(f"reference: {rhythm.describe()}")
        return rhythm

    def run_killed(self, run: str, instants: Sequence[_Instant]) -> list[Kill]:
        """Run the script until it ends by itself, with a kill at each instant until then."""
        kills: list[Kill] = []
        steps_done = checkpoint = 0
        counts = itertools.cycle(self.counts or [1])
        pending: Sequence[_Instant | None] = [*instants, None]
        for number, instant in enumerate(pending, start=1):
            with self._started(run, number, next(counts)) as script:
                killed = self._wait(script, instant)
                # Before the other processes react to the kill.
                saving = max(script.saving(), default=None) if killed else None
                script.wait(self.patience_seconds)
            attempt, _ = self._finish(script, checkpoint, steps_done)
            if kills:
                kills[-1] = dataclasses.replace(
                    kills[-1],
                    resumed_at=attempt.resumed_at,
                    replayed=attempt.replayed,
                    resume_seconds=attempt.first_batch_seconds,
                )
            steps_done = max(steps_done, attempt.steps_done or 0)
            checkpoint = script.newest_checkpoint()
            if not killed or instant is None:
                self.progress(f"{run}: ended at step {steps_done} of {self._num_steps}")
                break
            # Before its first batch a script may not have removed what an older kill left.
            delivered = attempt.steps_done is not None
            saving = saving if delivered else None
            hit: Aim = "save" if saving else "training" if delivered else "start-up"
            kills.append(
                Kill(
                    run,
                    number,
                    instant.aim,
                    hit,
                    saving,
                    steps_done,
                    checkpoint,
                    process_count=script.count,
                    processes=tuple(
                        ending.process for ending in attempt.endings if ending.cause == "killed"
                    ),
                    seconds=(script.killed_at or script.ended) - script.started,
                )
            )
            self.progress(f"{run}: {_summary(kills[-1], attempt)}")
        return kills

    def report(self, seed: int, kills_asked: int, kills: list[Kill], within: float) -> DrillReport:
        """Compare all runs with the reference."""
        # Not at the top: `checkpoints` imports the step log from this package.
        from checkpointing.checkpoints import load  # noqa: PLC0415

        reference, _ = self._read(self._attempts[0])
        reference_state = load(self.out / "reference" / "run")
        final_states = {"reference": final_state(*reference_state)}
        differences: list[RunDifference] = []
        distances: list[LeafDifference] = []
        for run in dict.fromkeys(attempt.run for attempt in self._attempts[1:]):
            stretches = (
                Stretch(f"{run}, attempt {one.number}", one.checkpoint, *self._read(one))
                for one in self._attempts
                if one.run == run
            )
            differences += compare_streams(reference, stretches)
            state = load(self.out / run / "run")
            differences += compare_checkpoints(run, reference_state, state, within)
            distances += leaf_differences(run, reference_state[1], state[1])
            final_states[run] = final_state(*state)
        return DrillReport(
            self.command,
            seed,
            kills_asked,
            tuple(kills),
            tuple(self._attempts),
            self._num_steps,
            final_states,
            tuple(differences),
            dict(reference_state[0].packages),
            time.monotonic() - self._began,
            self.counts,
            self.patience_seconds,
            within,
            tuple(distances),
        )

    @contextlib.contextmanager
    def _started(self, run: str, number: int, count: int) -> Iterator[DrilledScript]:
        folder = self.out / run
        folder.mkdir(exist_ok=True)
        with (
            reserved_address() as address,
            DrilledScript(self.command, folder, number, count, address) as script,
        ):
            yield script

    def _wait(self, script: DrilledScript, instant: _Instant | None) -> bool:
        """Wait for the instant and kill its processes; returns whether one was still running."""
        # The reference had the machine for itself; several processes share it.
        slower = max(1.0, script.count / (os.cpu_count() or 1))
        limit = self._limit_seconds * script.count if self._limit_seconds else None
        reached, delay = 0.0, slower * instant.delay_seconds if instant else 0.0
        while script.is_running() and not script.failed:
            now = time.monotonic()
            if limit and now - script.started > limit:
                each = ", for each of its processes" if script.count > 1 else ""
                raise DrillError(
                    f"the script hangs: it has not ended in {limit:.0f} s, ten times and a minute more "
                    f"than it took without a kill{each}.\n{script.programs[0].tail()}"
                )
            if instant is None:
                continue
            if reached and instant.aim == "save" and not script.saving():
                reached, delay = 0.0, delay / 2  # it is over already: try the next one, sooner
            if not reached and _is_at(script, instant):
                reached = now
            if reached and now >= reached + delay:
                if script.kill(instant.processes(script.count)):
                    return True
                instant = None  # it has ended already; others of its run may not have
        return False

    def _finish(
        self, script: DrilledScript, checkpoint: int, steps_done: int
    ) -> tuple[Attempt, list[Delivery]]:
        """Record an attempt; raises if it failed by itself."""
        if script.killed_at is None and script.failed:
            first = script.failed[0]
            program = script.programs[first]
            raise DrillError(
                f"the script failed by itself, with exit code {program.exit_code}, "
                f"{script.place(first)}: the drill has no end to compare."
                f" The last lines of its output:\n{program.tail()}"
            )
        log, _ = script.read_log()
        steps = [delivery.position.step for delivery in log]
        attempt = Attempt(
            script.folder.name,
            script.number,
            script.started - self._began,
            script.ended - script.started,
            checkpoint,
            log[0].seconds - script.started if log else None,
            steps[0] if steps else None,
            steps[-1] + 1 if steps else None,
            sum(step < steps_done for step in steps),
            str(script.log.relative_to(self.out)),
            script.count,
            script.endings(),
        )
        self._attempts.append(attempt)
        return attempt, log

    def _read(self, attempt: Attempt) -> tuple[list[Delivery], list[Part]]:
        return joined(read_process_logs(self.out / attempt.log, attempt.process_count))


def _is_at(script: DrilledScript, instant: _Instant) -> bool:
    """Whether the place is reached from which the delay counts."""
    if instant.aim == "start-up":
        return True
    step = script.last_step()
    if step < 0 or step < instant.step - (instant.aim == "save"):
        return False
    return instant.aim == "training" or bool(script.saving())


def _summary(kill: Kill, attempt: Attempt) -> str:
    """A line on a kill and its effects."""
    whom = "killed"
    if kill.process_count > 1:
        numbers = ", ".join(map(str, kill.processes))
        whom = f"{kill.process_count} processes, killed {numbers}"
    what = f"the save of step {kill.saving}" if kill.saving else kill.hit
    line = f"{whom} during {what}, after {kill.steps_done} steps"
    others = [one for one in attempt.endings if one.cause != "killed"]
    if others:
        line += f"; the others ended in {max(one.after_kill_seconds or 0 for one in others):.1f} s"
    hung = sum(one.cause == "given up" for one in others)
    return line + (f", {hung} of them by another kill, for they hung" if hung else "")


@contextlib.contextmanager
def _prepared(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """The output folder, without the files of an earlier drill, locked until the context ends.

    Raises:
      ValueError: it holds other files than a drill's, is not a folder, or another drill runs in it.
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
