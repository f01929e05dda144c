"""Check that a pipeline delivers the same batches in whichever way they are requested.

    report = loader.check_transform(pipeline)
    print(report)
    assert report.same

A stream can only be resumed exactly if its transform is a pure function of the batch. A transform that draws
from a global generator, reads the clock, counts its calls or iterates over a set is not, and no single run
shows that. So the same steps are made again: once more, in another order, by threads, in other processes with
other hashes of strings, and on request from batches of another size, as after a resume with another batch
size, and on each of several JAX processes. Such a check can find a difference; it cannot rule one out.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.batching import Batch, Position, spread
from loader.config import PipelineConfig
from loader.errors import RecordReadError
from loader.identity.digests import without_padding
from loader.identity.fingerprint import Fingerprint
from loader.progress import counted
from loader.reading.iterator import ReadOptions
from loader.reading.processes import WHOLE
from loader.reading.workers import Workers, check_workers
from loader.sources import Field, RecordSource
from loader.streams.pipeline import Pipeline

#: For each field of a batch: its dtype and shape, and a digest of each record.
_Marks = dict[str, tuple[str, list[str]]]

_KEPT: Final = 64


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference between a step and the same step made again.

    Attributes:
      check: the check that found it (see `TransformReport`).
      step: number of the batch.
      field: the field that differs; ``None`` if the batch could not be made again.
      slot: slot of the first record that differs; ``None`` if the field's dtype or shape differs.
      record_id: ID of that record.
      text: what differs.
    """

    check: str
    step: int
    field: str | None
    slot: int | None
    record_id: int | str | None
    text: str

    def __str__(self) -> str:
        field = "" if self.field is None else f", field {self.field!r}"
        record = "" if self.slot is None else f", slot {self.slot}, record {self.record_id!r}"
        return f"{self.check}: step {self.step}{field}{record}: {self.text}"


@dataclasses.dataclass(frozen=True)
class TransformReport:
    """The result of `check_transform`.

    Attributes:
      steps: number of steps made again, from the first on.
      done: the checks that were made: ``"again"``, ``"in another order"``, ``"with N threads"``,
        ``"in batches of N"``, ``"in another process, PYTHONHASHSEED=N"``.
      not_done: the checks that were not, with the reason.
      changes: the differences, one for each check, step and field; 64 at most.
    """

    steps: int
    done: tuple[str, ...]
    not_done: Mapping[str, str]
    changes: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differed in the checks that were made."""
        return not self.changes

    def __str__(self) -> str:
        verdict = "the same" if self.same else "NOT THE SAME"
        lines = [f"{verdict}: {self.steps} steps, made {', '.join(self.done)}"]
        lines += [f"  {change}" for change in self.changes]
        lines += [f"  not done: {check}: {why}" for check, why in self.not_done.items()]
        return "\n".join(lines)


def check_transform(
    pipeline: Pipeline,
    steps: int = 4,
    *,
    threads: Sequence[int] = (1, 4),
    hash_seeds: Sequence[int] = (1, 2),
    batch_sizes: Sequence[int] = (),
) -> TransformReport:
    """Make the same steps again in several ways, and compare them bit for bit.

    Args:
      pipeline: the pipeline with the transform in question. Without a transform its source is checked.
      steps: number of steps from the first on; fewer if the stream ends.
      threads: numbers of reading threads to try.
      hash_seeds: values of ``PYTHONHASHSEED``, which change the order of sets of strings. Each needs a
        worker process. If the transform cannot be pickled, or is defined in a script without
        ``if __name__ == "__main__":``, this check is reported as not done.
      batch_sizes: other batch sizes, in which each record must come out the same. Leave them out for a
        transform that looks at its whole batch on purpose.

    Returns:
      The differences, by field and record, and the checks that were not made. It raises for neither.

    Raises:
      TypeError, ValueError: not a pipeline, no step, or not a batch size.
      RecordReadError: a step cannot be made the first time.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline must be a Pipeline, not {type(pipeline).__name__}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if pipeline.config.num_epochs is not None:
        steps = min(steps, len(pipeline))
    check = _Check([_marks(pipeline[step]) for step in range(steps)], pipeline, steps)
    check.compare("again", ((step, _made(pipeline, step)) for step in range(steps)))
    backwards = reversed(range(steps))
    check.compare("in another order", ((step, _made(pipeline, step)) for step in backwards))
    for count in threads:
        check.compare(f"with {count} threads", _by_threads(pipeline, steps, count))
    for size in batch_sizes:
        check.compare(f"in batches of {size}", _in_batches_of(size, pipeline, steps))
    _in_processes(check, pipeline, steps, hash_seeds)
    return TransformReport(steps, tuple(check.done), check.not_done, tuple(check.changes[:_KEPT]))


class _Check:
    """Compare steps with their first time, and keep the differences."""

    def __init__(self, first: list[_Marks], pipeline: Pipeline, steps: int) -> None:
        self._first = first
        self._ids = [pipeline.ids(step).tolist() for step in range(steps)]
        self.done: list[str] = []
        self.not_done: dict[str, str] = {}
        self.changes: list[Change] = []

    def compare(self, check: str, made: Iterable[tuple[int, _Marks | str]]) -> None:
        self.done.append(check)
        whole = ([one] for one in made)
        for [(step, marks)] in counted(whole, f"batches {check}", len(self._first), "batches"):
            if isinstance(marks, str):
                text = f"cannot be made again: {marks}"
                self.changes.append(Change(check, step, None, None, None, text))
                continue
            first = self._first[step]
            for field in sorted({*first, *marks}):
                self._compare_field(check, step, field, first.get(field), marks.get(field))

    def _compare_field(
        self,
        check: str,
        step: int,
        field: str,
        first: tuple[str, list[str]] | None,
        again: tuple[str, list[str]] | None,
    ) -> None:
        if first is None or again is None or first[0] != again[0]:
            before, after = (value[0] if value else "missing" for value in (first, again))
            self.changes.append(Change(check, step, field, None, None, f"{before}, then {after}"))
            return
        slots = [i for i, (a, b) in enumerate(zip(first[1], again[1], strict=True)) if a != b]
        if slots:
            text = f"{len(slots)} of {len(first[1])} records differ"
            record_id = self._ids[step][slots[0]]
            self.changes.append(Change(check, step, field, slots[0], record_id, text))


def _marks(batch: Batch) -> _Marks:
    """A digest of each record in each field."""
    return {name: _marks_of(np.asarray(value)) for name, value in batch.items()}


def _marks_of(array: npt.NDArray[Any]) -> tuple[str, list[str]]:
    if array.dtype.kind in "SU":
        # The width of an array of strings depends on its longest one.
        array = np.array(array.tolist(), array.dtype.kind).reshape(array.shape)
    records = np.ascontiguousarray(without_padding(array)).reshape(len(array), -1)
    digests = [hashlib.blake2b(record.tobytes(), digest_size=8).hexdigest() for record in records]
    return f"{array.dtype}{list(array.shape)}", digests


def _made(pipeline: Pipeline, step: int) -> _Marks | str:
    """The marks of a step, or why it cannot be made."""
    try:
        return _marks(pipeline[step])
    except Exception as error:  # noqa: BLE001 (sources and transforms raise anything)
        return _why(error)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error.__cause__ or error}"


def _by_threads(pipeline: Pipeline, steps: int, count: int) -> Iterator[tuple[int, _Marks | str]]:
    options = ReadOptions(num_threads=count, prefetch_buffer_size=max(steps, count))
    with contextlib.closing(pipeline.iterate(read_options=options)) as batches:
        for step in range(steps):
            try:
                yield step, _marks(next(batches))
            except Exception as error:  # noqa: BLE001 (sources and transforms raise anything)
                yield step, _why(error)
                return


def _in_batches_of(size: int, pipeline: Pipeline, steps: int) -> Iterator[tuple[int, _Marks | str]]:
    """The records of each step, from batches of another size that begin at the step."""
    settings = {"batch_size": size, "final_batch": "partial", "skip": (), "num_epochs": None}
    config = PipelineConfig.from_dict({**pipeline.config.to_dict(), **settings})
    other = Pipeline(pipeline.source, config, pipeline.transform)
    for step in range(steps):
        begin = pipeline.position(step)
        stop = pipeline.grid.stop(begin)
        offsets = range(begin.offset, stop, size)
        try:
            parts = [other.read(Position(begin.epoch, offset, step)) for offset in offsets]
            batch = {
                name: np.concatenate([part[name] for part in parts])[: stop - begin.offset]
                for name in parts[0]
            }
        except Exception as error:  # noqa: BLE001 (sources and transforms raise anything)
            yield step, _why(error)
            continue
        if pipeline.config.final_batch == "pad":
            batch = spread(batch, slice(stop - begin.offset), pipeline.config.batch_size)
        yield step, _marks(batch)


# --- in another process -------------------------------------------------------------------------


class _Recorded:
    """A source of the records that some steps need, which can be sent to another process."""

    def __init__(self, pipeline: Pipeline, steps: int) -> None:
        source = pipeline.source
        rows = np.unique(
            np.concatenate([pipeline.rows_at(pipeline.position(step)) for step in range(steps)])
        )
        ids = source.ids(rows)
        excluded = set(pipeline.config.exclude)
        self.excluded = tuple(sorted(excluded.intersection(ids.tolist())))
        self._len, self._first = len(source), ids[:1]
        self._ids = dict(zip(rows.tolist(), ids.tolist(), strict=True))
        self.fields = {name: Field(f.dtype, f.shape) for name, f in pipeline.fields.items()}
        self._records = {
            row: _record(source, row)
            for row, record_id in self._ids.items()
            if record_id not in excluded
        }

    def __len__(self) -> int:
        return self._len

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        # Pipeline looks up excluded IDs in all rows: those that are not recorded get an ID that is.
        (other,) = self._first.tolist()
        return np.array(
            [self._ids.get(row, other) for row in rows.tolist()], self._first.dtype.kind
        )

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        records = [self._records[row] for row in rows.tolist()]
        for record in records:
            if isinstance(record, str):
                raise ValueError(record)
        return {
            name: np.concatenate(
                [record[name] for record in records if not isinstance(record, str)]
            )
            for name in self.fields
        }

    def fingerprint(self) -> Fingerprint:
        raise NotImplementedError("recorded rows are a part of a source")


def _record(source: RecordSource, row: int) -> dict[str, npt.NDArray[Any]] | str:
    """The fields of a record, or why it cannot be read."""
    try:
        return {name: np.array(value) for name, value in source.read(np.array([row])).items()}
    except Exception as error:  # noqa: BLE001 (sources raise anything)
        return str(error)


def _in_processes(check: _Check, pipeline: Pipeline, steps: int, hash_seeds: Sequence[int]) -> None:
    if not hash_seeds:
        return
    name = "in another process"
    if pipeline.transform is None:
        check.not_done[name] = "there is no transform, and the source stays where it is"
        return
    source = _Recorded(pipeline, steps)
    config = dataclasses.replace(pipeline.config, exclude=source.excluded)
    recorded = Pipeline(source, config, pipeline.transform)
    try:
        check_workers(1, recorded)
    except TypeError as error:
        check.not_done[name] = f"the transform cannot be pickled: {error}"
        return
    platforms = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "")}
    with contextlib.ExitStack() as running:
        # All start before one is waited for: most of their time goes into imports.
        started = [
            (seed, Workers(recorded, WHOLE, 1, {**platforms, "PYTHONHASHSEED": str(seed)}))
            for seed in hash_seeds
        ]
        for _, workers in started:
            running.callback(workers.close)
        for seed, workers in started:
            name = f"in another process, PYTHONHASHSEED={seed}"
            try:
                check.compare(name, list(_by_worker(workers, pipeline, steps)))
            except RuntimeError as error:
                check.not_done[name] = str(error)


def _by_worker(
    workers: Workers, pipeline: Pipeline, steps: int
) -> Iterator[tuple[int, _Marks | str]]:
    for step in range(steps):
        try:
            yield step, _marks(workers.read(pipeline.position(step)))
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, RecordReadError):
                raise  # the process cannot start, or has ended
            yield step, _why(error)
            return
