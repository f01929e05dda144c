"""Whether a pipeline delivers the same batches however it is asked for them.

    report = loader.check_transform(pipeline)
    print(report)
    assert report.same

A stream can only be resumed exactly if its transform is a pure function of the batch. One that draws
from a global generator, looks at the clock, counts its calls or goes through a set is not, and
nothing about a single run shows it. So the same steps are made again: once more, in another order, by
reading threads, in other processes, where strings hash otherwise, and on demand from batches of another
size, as a resume with another one has them, and each of several JAX processes. A check of some steps can show
that something differs; that nothing ever will, it cannot.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.batch_iterator import ReadOptions
from loader.batching import Batch, Position, spread
from loader.config import PipelineConfig
from loader.fingerprint import Fingerprint
from loader.leaves import without_padding
from loader.pipeline import Pipeline
from loader.progress import counted
from loader.sources import Field

#: For each field of a batch: its dtype and shape, and a digest of each record.
_Marks = dict[str, tuple[str, list[str]]]

_CHILD_SECONDS: Final = 300.0
_KEPT: Final = 64


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that was not the same when a step was made again.

    Attributes:
      check: which one it was (see `TransformReport`).
      step: number of the batch.
      field: whose values differ; ``None`` where the batch could not be made.
      slot: place in the batch of the first record that differs in it; ``None`` where all of the field
        does, in its dtype or shape.
      record_id: of that record.
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
      steps: how many were made again, from the first on.
      done: the checks that were made, of ``"again"``, ``"in another order"``, ``"with N threads"``,
        ``"in batches of N"`` and ``"in another process, PYTHONHASHSEED=N"``.
      not_done: those that were not, with the reason.
      changes: what differed, one for each check, step and field; 64 at most.
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
    """Makes the same steps again in several ways, and compares them bit for bit.

    Args:
      pipeline: with the transform in question. Without one its source is checked.
      steps: how many, from the first on; fewer where the stream ends.
      threads: numbers of reading threads to try.
      hash_seeds: values of ``PYTHONHASHSEED``, each for a process of its own, which decide in what
        order sets of strings are gone through. The processes are spawned: a script that calls this
        needs ``if __name__ == "__main__":``, and a transform has to be one that can be pickled, or
        this part is reported as not done.
      batch_sizes: in batches of which each record must come out as in those of the pipeline. With a
        transform that is meant to look at its whole batch they cannot.

    Returns:
      The differences, by field and record, and what was not checked. Nothing is raised for them.

    Raises:
      TypeError, ValueError: not a pipeline, no step, or no size of a batch.
      RecordReadError: the first time that a step is made.
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
    """Compares steps with the first time that they were made, and keeps what differs."""

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
    """What identifies each record of each field."""
    return {name: _marks_of(np.asarray(value)) for name, value in batch.items()}


def _marks_of(array: npt.NDArray[Any]) -> tuple[str, list[str]]:
    if array.dtype.kind in "SU":
        # How wide an array of strings is depends on which others it was made with.
        array = np.array(array.tolist(), array.dtype.kind).reshape(array.shape)
    records = np.ascontiguousarray(without_padding(array)).reshape(len(array), -1)
    digests = [hashlib.blake2b(record.tobytes(), digest_size=8).hexdigest() for record in records]
    return f"{array.dtype}{list(array.shape)}", digests


def _made(pipeline: Pipeline, step: int) -> _Marks | str:
    """The marks of a step, or why it cannot be made."""
    try:
        return _marks(pipeline[step])
    except Exception as error:  # noqa: BLE001 (whatever a source or a transform may raise)
        return f"{type(error).__name__}: {error.__cause__ or error}"


def _by_threads(pipeline: Pipeline, steps: int, count: int) -> Iterator[tuple[int, _Marks | str]]:
    options = ReadOptions(num_threads=count, prefetch_buffer_size=max(steps, count))
    with contextlib.closing(pipeline.iterate(read_options=options)) as batches:
        for step in range(steps):
            try:
                yield step, _marks(next(batches))
            except Exception as error:  # noqa: BLE001 (whatever a source or a transform may raise)
                yield step, f"{type(error).__name__}: {error.__cause__ or error}"
                return


def _in_batches_of(size: int, pipeline: Pipeline, steps: int) -> Iterator[tuple[int, _Marks | str]]:
    """The records of each step, taken from batches of another size that begin with the step."""
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
        except Exception as error:  # noqa: BLE001 (whatever a source or a transform may raise)
            yield step, f"{type(error).__name__}: {error.__cause__ or error}"
            continue
        if pipeline.config.final_batch == "pad":
            batch = spread(batch, slice(stop - begin.offset), pipeline.config.batch_size)
        yield step, _marks(batch)


# --- in another process -------------------------------------------------------------------------


class _Recorded:
    """The rows that some steps need, and no others: a source that can be sent to another process."""

    def __init__(self, pipeline: Pipeline, steps: int) -> None:
        rows = [pipeline.rows_at(pipeline.position(step)) for step in range(steps)]
        self._rows = np.unique(np.concatenate(rows))
        self._len = len(pipeline.source)
        self._ids = pipeline.source.ids(self._rows)
        self._excluded = np.isin(self._ids, np.array(pipeline.config.exclude or [self._ids[0]]))
        self._excluded &= bool(pipeline.config.exclude)
        self.fields = {name: Field(f.dtype, f.shape) for name, f in pipeline.fields.items()}
        self._values = {
            name: np.zeros((len(self._rows), *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        self._bad: dict[int, str] = {}
        for at in np.flatnonzero(~self._excluded).tolist():
            try:
                record = pipeline.source.read(self._rows[at : at + 1])
            except Exception as error:  # noqa: BLE001 (whatever a source may raise)
                self._bad[int(self._rows[at])] = str(error)
                continue
            for name, value in record.items():
                self._values[name][at] = value[0]

    def __len__(self) -> int:
        return self._len

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        return self._ids[np.searchsorted(self._rows, rows)]

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        at = np.searchsorted(self._rows, rows)
        if (at >= len(self._rows)).any() or (self._rows[at] != rows).any():
            raise KeyError("a row that was not recorded")
        for row in rows.tolist():
            if row in self._bad:
                raise ValueError(self._bad[row])
        return {name: values[at] for name, values in self._values.items()}

    def fingerprint(self) -> Fingerprint:
        raise NotImplementedError("recorded rows are a part of a source")


def _in_processes(check: _Check, pipeline: Pipeline, steps: int, hash_seeds: Sequence[int]) -> None:
    if not hash_seeds:
        return
    name = "in another process"
    if pipeline.transform is None:
        check.not_done[name] = "there is no transform, and the source stays where it is"
        return
    parts = (_Recorded(pipeline, steps), pipeline.config, pipeline.transform)
    try:
        # All run before one is waited for: most of their time goes into imports.
        children = [(seed, _start(parts, steps, seed)) for seed in hash_seeds]
    except RuntimeError:
        raise  # a child of a script without a guard, which must not start children of its own
    except Exception as error:  # noqa: BLE001 (sending a transform calls code of its own)
        check.not_done[name] = (
            f"the transform cannot be pickled ({error}); define it at the top level of a module"
        )
        return
    for seed, (process, results) in children:
        answer = _answer(process, results)
        name = f"in another process, PYTHONHASHSEED={seed}"
        if isinstance(answer, str):
            check.not_done[name] = answer
        else:
            check.compare(name, enumerate(answer))


def _start(parts: tuple[Any, ...], steps: int, seed: int) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(parts, steps, sender), daemon=True)
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(seed)  # Python looks at it once, when it starts
    try:
        process.start()
    except BaseException:
        results.close()
        sender.close()
        raise
    finally:
        del os.environ["PYTHONHASHSEED"]
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
    sender.close()
    return process, results


def _answer(process: Any, results: Any) -> list[_Marks | str] | str:
    """The marks that a process made of each step, or why there are none."""
    try:
        if not results.poll(_CHILD_SECONDS):
            return f"the process gave no answer in {_CHILD_SECONDS:.0f} seconds"
        answer = json.loads(results.recv_bytes())
    except (EOFError, OSError):
        process.join(_CHILD_SECONDS)
        return (
            f"the process ended with exit code {process.exitcode} and no answer; a script that calls "
            'check_transform needs if __name__ == "__main__":'
        )
    finally:
        process.terminate()
        process.join()
        results.close()
    if isinstance(answer, str):
        return answer
    return [
        made
        if isinstance(made, str)
        else {field: (kind, digests) for field, (kind, digests) in made.items()}
        for made in answer
    ]


def _child(parts: tuple[Any, ...], steps: int, sender: Any) -> None:
    """Makes the steps in another process, and sends their marks as JSON."""
    answer: list[_Marks | str] | str
    try:
        pipeline = Pipeline(*parts)
        answer = [_made(pipeline, step) for step in range(steps)]
    except Exception as error:  # noqa: BLE001 (whatever a transform may raise)
        answer = f"the transform cannot be loaded there ({type(error).__name__}: {error})"
    sender.send_bytes(json.dumps(answer).encode())
    sender.close()
