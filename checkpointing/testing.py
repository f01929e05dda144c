"""Assertions for a team's own tests: its pipeline resumes exactly, and delivers the right records.

    from checkpointing import testing

    def test_our_pipeline_resumes_exactly(tmp_path):
        testing.assert_resumes_exactly(make_pipeline, tmp_path)

- `assert_resumes_exactly`: a run with stops equals one without, bit for bit.
- `assert_deterministic`: the same steps come out the same in whichever way they are made.
- `assert_covers_epoch`: each record comes once, in its place, with its own fields.

They raise AssertionError with the first difference (step, slot, ID, field), and need no test framework.
Each takes a `loader.Pipeline` or a `loader.Mixture`, and the first also a `loader.GrainStream`. Better give a
function that makes it: it is called for each run, as each process would call it, so that state which a pipeline
keeps between runs shows.
"""

import dataclasses
import itertools
import pathlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from checkpointing.checkpoints import Checkpoints, load
from checkpointing.errors import CheckpointMismatchError
from checkpointing.proof.compare import RunDifference, compare_batches, compare_checkpoints
from checkpointing.train_state import pointer
from loader import (
    AuditReport,
    Device,
    Mixture,
    MixtureReport,
    Pipeline,
    ReadOptions,
    audit,
    audit_batches,
    check_transform,
)
from loader.stream import Stream

__all__ = ["assert_covers_epoch", "assert_deterministic", "assert_resumes_exactly"]

MakesStream: TypeAlias = Stream | Callable[[], Stream]

_STOPS: Final = 2
_IMPURE: Final = (
    "A transform must depend on its batch alone: not on a counter, a clock or a generator of its own.\n"
    'What is random in it can be drawn from batch["key"], with PipelineConfig(record_keys=True).'
)
_MADE_ANEW: Final = (
    "Whatever makes the pipeline must make the same one each time: the same records in the same order,\n"
    "the same settings and transform, in this process and in the next."
)
_IMPURE_STEP: Final = (
    "The batches were the same: it is the training step that ended in other bits. Whatever it depends\n"
    "on must be in the train state (PRNG keys, counters), and its operations must be deterministic."
)


def assert_resumes_exactly(
    stream: MakesStream,
    directory: str | pathlib.Path,
    *,
    steps: int = 20,
    stops: Sequence[int] | None = None,
    seed: int = 0,
    init: Callable[[], Any] | None = None,
    train_step: Callable[[Any, Any], Any] | None = None,
    read_options: ReadOptions | None = None,
    device: Device | None = None,
) -> None:
    """Train once without a stop and once with stops, through `Checkpoints`, and compare the two runs.

    Each batch is compared bit for bit, and at each stop the position, the next IDs and the train state.
    This reads ``steps`` batches twice (of a `GrainStream` three times, first to count them) and holds those
    of one run in memory. The data is identified twice, and once more for each stop: for large data use
    ``cache=True`` or `Fingerprint.of_revision`. It is for one JAX process.

    Args:
      stream: the stream to test, or a function that makes it.
      directory: such as pytest's ``tmp_path``. Both runs are kept in a new folder in it, which is removed
        if they are equal.
      steps: number of batches to train on; fewer if the stream ends.
      stops: steps after which the second run is saved, ended and resumed, each 1 to ``steps - 1``; by
        default two steps that ``seed`` picks.
      seed: for the default stops.
      init: makes the train state at the beginning of a run; given together with ``train_step``. Without
        them only the batches are tested.
      train_step: from a train state and a batch to the next train state.
      read_options: for the second run, as for `Pipeline.iterate`.
      device: for both runs, as for `Pipeline.iterate`.

    Raises:
      AssertionError: the two are not equal; names the first difference.
      TypeError, ValueError: a bad argument.
    """
    __tracebackhide__ = True
    if (init is None) != (train_step is None):
        raise ValueError("give init and train_step both, or neither")
    steps = _made(stream).count_steps(steps)
    if steps < 2:
        raise ValueError(f"{steps} step leaves no place for a stop: at least 2 are needed")
    ends = [*_stops(steps, stops, seed), steps]
    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="resumes-exactly-", dir=directory))
    trial = _Trial(
        folder, init or _nothing_seen, train_step or _one_more, ends, device, read_options
    )
    fault = trial.run_reference(_made(stream))
    if fault is not None:
        raise AssertionError(_told("the run without a stop is no run of its steps in turn", fault))
    for begin, end in itertools.pairwise([0, *ends]):
        try:
            difference = trial.run_stretch(_made(stream), begin, end)
        except CheckpointMismatchError as error:
            raise AssertionError(
                f"the run that was stopped after {begin} steps cannot be resumed, though nothing was "
                f"changed on purpose. {error}\n{_MADE_ANEW}"
            ) from error
        if difference is not None:
            if begin:
                what = (
                    f"the run that was stopped after {begin} steps is not as the one without a stop"
                )
            else:
                what = "made a second time, the run is not the same, even before it is stopped"
            raise AssertionError(_told(what, difference))
    shutil.rmtree(folder)


def assert_deterministic(
    stream: MakesStream,
    *,
    steps: int = 4,
    threads: Sequence[int] = (1, 4),
    batch_sizes: Sequence[int] | None = None,
    hash_seeds: Sequence[int] = (1, 2),
) -> None:
    """Make the same steps again in several ways (see `loader.check_transform`), and compare the results.

    Args:
      stream: the stream to test, or a function that makes it; of a mixture each part is tested.
      steps: number of steps from the first on; fewer if the stream ends.
      threads: numbers of reading threads to try.
      batch_sizes: other batch sizes in which each record must come out the same, as after a resume with
        another batch size, or on several JAX processes. By default half of the pipeline's; () for a
        transform that looks at its whole batch on purpose, or if a library adds up in another order for
        another size.
      hash_seeds: values of ``PYTHONHASHSEED``, each for a process that the transform is sent to, which takes
        a few seconds; () for a transform that cannot be pickled. A small set may keep its order under
        another seed: more seeds find more.

    Raises:
      AssertionError: something differs, or a transform could not be sent to another process; names the
        first difference.
      TypeError, ValueError: a bad argument.
      RecordReadError: a step cannot be made the first time.
    """
    __tracebackhide__ = True
    made = _own(_made(stream))
    parts: Mapping[str, Pipeline] = made.parts if isinstance(made, Mixture) else {"": made}
    for name, pipeline in parts.items():
        sizes = batch_sizes
        if sizes is None:
            sizes = (-(-pipeline.config.batch_size // 2) if pipeline.config.batch_size > 1 else 2,)
        seeds = () if pipeline.transform is None else hash_seeds
        report = check_transform(
            pipeline, steps, threads=threads, hash_seeds=seeds, batch_sizes=sizes
        )
        what = f"part {name!r} of the mixture" if name else "the pipeline"
        if not report.same:
            first, more = report.changes[0], len(report.changes) - 1
            raise AssertionError(
                f"{what} does not give the same batches each time; the first difference:\n  {first}\n"
                + (f"  and {more} more of other checks, steps or fields\n" if more else "")
                + _why_not(first.check)
            )
        if report.not_done:
            reasons = "; ".join(f"{check}: {why}" for check, why in report.not_done.items())
            raise AssertionError(
                f"{what} could not be checked as asked: {reasons}. hash_seeds=() goes without"
            )


def assert_covers_epoch(
    stream: MakesStream,
    epoch: int = 0,
    *,
    batches: Iterable[Mapping[str, Any]] | None = None,
    alignment: Callable[[dict[str, Any]], Any] | None = None,
    ids_only: bool = False,
) -> None:
    """Audit an epoch: each record that is due came once, in its place, with the fields of its ID.

    Records that the config leaves out are not due: the last ones under ``final_batch="drop"``, ``skip``,
    ``exclude``, and bad records that are masked.

    Args:
      stream: the stream to test, or a function that makes it. Each part of a mixture is followed through
        its first epoch, or as far as the mixture goes.
      epoch: number of the epoch.
      batches: batches to audit in place of the pipeline's own: from the epoch's first one on, as your
        training loop gets them.
      alignment: an oracle of your own, as for `loader.audit`.
      ids_only: compare IDs only and read no record, for large data.

    Raises:
      AssertionError: something is not as due; says what, how often, and where first.
      TypeError, ValueError: a bad argument.
    """
    __tracebackhide__ = True
    made = _own(_made(stream))
    report: AuditReport | MixtureReport
    if batches is not None and ids_only:
        raise ValueError(
            "ids_only takes IDs from the pipeline, but batches are given: leave one of them out"
        )
    if isinstance(made, Mixture):
        if epoch or batches is not None:
            raise ValueError(
                "a mixture's parts have epochs of their own: it is audited as a whole, from the first step "
                "on, and takes neither epoch nor batches"
            )
        report = audit(made, alignment=alignment, ids_only=ids_only)
    elif batches is None:
        epochs = range(epoch, epoch + 1)
        report = audit(made, epochs, alignment, ids_only=ids_only)
    else:
        report = audit_batches(
            itertools.islice(batches, _batches_of(made, epoch)),
            made.source,
            made.config,
            epochs=range(epoch, epoch + 1),
            alignment=alignment,
            transformed=made.transform is not None,
        )
    if not report.clean:
        raise AssertionError(f"what was delivered is not what is due.\n{report}")


@dataclasses.dataclass
class _Trial:
    """A run without a stop, and one with stops that is compared with it.

    Attributes:
      folder: of both.
      init: makes the train state at the beginning of a run.
      train_step: from a train state and a batch to the next train state.
      ends: steps at which both are saved, the last one included.
      device: that batches are delivered to.
      read_options: of the run with stops.
    """

    folder: pathlib.Path
    init: Callable[[], Any]
    train_step: Callable[[Any, Any], Any]
    ends: Sequence[int]
    device: Device | None
    read_options: ReadOptions | None
    _batches: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def run_reference(self, stream: Stream) -> RunDifference | None:
        """The run without a stop; returns the first fault that it has alone."""
        return self._run("uninterrupted", stream, 0, self.ends, None)

    def run_stretch(self, stream: Stream, begin: int, end: int) -> RunDifference | None:
        """The other run from one stop to the next; returns the first difference."""
        difference = self._run("stopped", stream, begin, [end], self.read_options)
        if difference is not None:
            return difference
        one, other = (load(self.folder / name, end) for name in ("uninterrupted", "stopped"))
        return next(iter(compare_checkpoints(f"after step {end - 1}", one, other)), None)

    def _run(
        self,
        name: str,
        stream: Stream,
        begin: int,
        ends: Sequence[int],
        read_options: ReadOptions | None,
    ) -> RunDifference | None:
        """Train to the last of some steps, and save at each; the first run's batches are kept."""
        with Checkpoints(
            self.folder / name, stream, self.ends[-1], keep=len(self.ends)
        ) as checkpoints:
            run = checkpoints.resume(self.init(), read_options=read_options, device=self.device)
            state = run.train_state
            for step in range(begin, ends[-1]):
                batch = next(run.batches, None)
                if batch is None:
                    return RunDifference(
                        "batch", f"step {step}", "one more", "the iterator has ended"
                    )
                kept, done, found = _kept(batch), step + 1, run.batches.position.step
                expected = self._batches.setdefault(step, kept)
                differences = compare_batches(f"step {step}", expected, kept)
                if found != done:
                    where = f"after {done} batches"
                    differences.append(
                        RunDifference("position", where, f"step {done}", f"step {found}")
                    )
                if differences:
                    return differences[0]
                state = self.train_step(state, batch)
                if done in ends:
                    checkpoints.save(run.batches, state, force=True)
        return None


def _told(what: str, difference: RunDifference) -> str:
    is_leaf = difference.what.startswith("/")
    name = f"train state {difference.what}" if is_leaf else f"{difference.what!r}"
    lines = [
        f"{what}; the first difference:",
        f"  {difference.where}: {name}",
        f"    without a stop  {difference.reference}",
        f"    with stops      {difference.drilled}",
        *([f"    {difference.note}"] if difference.note else []),
        _IMPURE_STEP if is_leaf else _IMPURE,
    ]
    return "\n".join(lines)


def _why_not(check: str) -> str:
    if check.startswith("in batches"):
        return (
            "A record comes with others after a resume with another batch size, and where JAX processes\n"
            "share a batch out: a transform must look at each record alone. batch_sizes=() leaves this out."
        )
    return _IMPURE


def _made(stream: MakesStream) -> Stream:
    made = stream if isinstance(stream, Stream) or not callable(stream) else stream()
    if not isinstance(made, Stream):
        raise TypeError(
            "give a loader.Pipeline, a loader.Mixture, a loader.GrainStream, or a function without arguments "
            f"that makes one, not {made!r:.80}"
        )
    return made


def _own(stream: Stream) -> Pipeline | Mixture:
    if not isinstance(stream, Pipeline | Mixture):
        raise TypeError(
            f"the order of a {type(stream).__name__} cannot be derived or made again step by step. Use "
            "assert_resumes_exactly for it"
        )
    return stream


def _stops(steps: int, stops: Sequence[int] | None, seed: int) -> list[int]:
    if stops is None:
        rng = random.Random(seed)  # noqa: S311 (places, no secrets)
        return sorted(rng.sample(range(1, steps), min(_STOPS, steps - 1)))
    chosen = sorted(set(stops))
    if not chosen or chosen[0] < 1 or chosen[-1] >= steps:
        raise ValueError(
            f"stops are numbers of steps, at least one, each 1 to {steps - 1} in a run of {steps}, not "
            f"{list(stops)}"
        )
    return chosen


def _batches_of(pipeline: Pipeline, epoch: int) -> int:
    """Number of batches in an epoch; for the last epoch one more, which must not exist."""
    config, per_epoch = pipeline.config, pipeline.steps_per_epoch
    first, end = epoch * per_epoch, (epoch + 1) * per_epoch
    skipped = sum(max(0, min(high, end) - max(low, first)) for low, high in config.skip)
    return per_epoch - skipped + (epoch + 1 == config.num_epochs)


def _kept(batch: Any) -> dict[str, Any]:
    """A copy of a batch by the names of its leaves: a training step may write into it, or donate it."""
    kept = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        array = np.atleast_1d(np.array(leaf))
        if array.dtype.hasobject:  # of which no more can be compared
            array = np.array([str(leaf) if isinstance(leaf, str) else type(leaf).__qualname__])
        kept[pointer(keys)[1:] or "element"] = array
    return kept


def _nothing_seen() -> dict[str, Any]:
    return {"batches": np.zeros(1, np.int64)}


def _one_more(state: dict[str, Any], _batch: Any) -> dict[str, Any]:
    return {"batches": state["batches"] + 1}
