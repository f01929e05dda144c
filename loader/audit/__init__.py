"""The audit: what a stream delivered, against what its source and config say that it should have.

    report = loader.audit(pipeline, alignment=lambda batch: batch["y"] == 2 * batch["x"] - 1)
    print(report)
    assert report.clean

A right epoch length proves nothing: a duplicate and an omission cancel. So records are followed by
their IDs, and five findings are told apart by name (see `AuditReport`). Nothing here is shared with
the code that makes the batches: their borders, padding and masks are derived again from the config
(`due`), orders once more in blocks and at sampled positions by a slow formula (`formula`). The source is
asked for its records again, in another order of rows (`reading`).

Memory is a byte a record, for two epochs at a time, and one block of batches; where IDs are not row
numbers, their source has no ``rows_of(ids)``, and some came out of place, 16 bytes a record more.
``shuffle="permutation"`` holds the order of an epoch besides: 12 bytes a record.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np

from loader.audit.closing import Closing
from loader.audit.delivered import Alignment, Delivered, FieldCheck
from loader.audit.due import Due, Place
from loader.audit.formula import DerivedOrder
from loader.audit.keys import KeyCheck
from loader.audit.mixture import Batches, MixedStream, MixtureReport, steps_of_each
from loader.audit.reading import ids_of
from loader.audit.report import (
    FINDINGS,
    AuditReport,
    Coverage,
    EpochCount,
    Finding,
    Offender,
    Tally,
)
from loader.audit.rows import RowsOfIds
from loader.audit.stream import Stream
from loader.config import PipelineConfig
from loader.keys import check_key_field
from loader.progress import Work
from loader.sources import RecordSource, check_source

__all__ = [
    "FINDINGS",
    "AuditReport",
    "Coverage",
    "EpochCount",
    "Finding",
    "MixtureReport",
    "Offender",
    "audit",
    "audit_batches",
]

Progress = Callable[[int], None]


class _Pipeline(Protocol):
    """What is asked of a pipeline."""

    @property
    def source(self) -> RecordSource: ...
    @property
    def config(self) -> PipelineConfig: ...
    @property
    def transform(self) -> Any: ...
    def ids(self, step: int, /) -> Any: ...
    def position(self, step: int, /) -> Any: ...
    def iterate(self, start: Any, /) -> Iterator[Any]: ...


@overload
def audit(
    stream: _Pipeline,
    epochs: int | range | Sequence[int] | None = None,
    alignment: Alignment | None = None,
    *,
    ids_only: bool = False,
    progress: Progress | None = None,
) -> AuditReport: ...
@overload
def audit(
    stream: MixedStream,
    *,
    alignment: Alignment | None = None,
    steps: int | None = None,
    ids_only: bool = False,
    progress: Progress | None = None,
) -> MixtureReport: ...
def audit(
    stream: Any,
    epochs: int | range | Sequence[int] | None = None,
    alignment: Alignment | None = None,
    *,
    steps: int | None = None,
    ids_only: bool = False,
    progress: Progress | None = None,
) -> AuditReport | MixtureReport:
    """Audit the batches of a `Pipeline` or a `Mixture`.

    Args:
      stream: iterated as a training loop would. Fields are compared with the source's, bit for bit,
        unless there is a transform. An audit of a mixture also checks whose turn each step is, and
        makes an iterator for each step.
      epochs: of a pipeline: how many from the first on, or a range of them. Default: all, or the
        first one of a stream without end.
      alignment: an oracle of your own, such as ``y == 2 * x - 1``. It gets the real records of each
        batch (``id``, ``mask`` and all fields, with a leading axis of k) and returns bool[k].
      steps: of a mixture: how many from the first on. Default: until each part has come once through
        its records, or until the mixture ends. Each part's last epoch is audited as far as it came.
      ids_only: audit the IDs only (`Pipeline.ids`), without masks and fields. No record is read.
      progress: called with the number of slots done, now and then; in a mixture, of the current part.

    Returns:
      The findings and the coverage; for a mixture, by part. Records that cannot be read and are
      masked for it (``on_bad_record="mask"``) are left out as configured, and are counted.

    Raises:
      TypeError, ValueError: no such epochs or steps; an alignment function that returns something
        else, or that is given together with ``ids_only``.
      RecordReadError: under ``on_bad_record="raise"``.
    """
    if ids_only and alignment is not None:
        raise ValueError("an audit of IDs alone reads no fields that the alignment could look at")
    if hasattr(stream, "weights"):
        if epochs is not None:
            raise TypeError(
                f"epochs is {epochs!r}, but the parts of a mixture have epochs of their own: give steps"
            )
        return _audit_mixture(stream, steps, alignment, progress, ids_only=ids_only)
    if steps is not None:
        raise TypeError(f"steps is {steps!r}, but it is for mixtures: give epochs")
    return _audit_pipeline(stream, epochs, alignment, progress, ids_only=ids_only)


def _audit_pipeline(
    pipeline: _Pipeline,
    epochs: int | range | Sequence[int] | None,
    alignment: Alignment | None,
    progress: Progress | None,
    *,
    ids_only: bool,
) -> AuditReport:
    due = _due(pipeline.source, pipeline.config, epochs)
    first, last = due.step(due.first), due.step(due.end or due.first)
    to_the_end = due.end_epoch == pipeline.config.num_epochs
    batches: Iterator[Any] = iter(())
    if ids_only:
        batches = ({"id": pipeline.ids(step)} for step in range(first, last))
    elif first < last:
        # One more than is due, to see whether there is one.
        batches = pipeline.iterate(pipeline.position(first))
        batches = itertools.islice(batches, last - first + to_the_end)
    transformed = pipeline.transform is not None
    return _audit(
        batches,
        pipeline.source,
        due,
        alignment,
        progress,
        masks=not ids_only,
        transformed=transformed,
    )


def audit_batches(
    batches: Iterable[Mapping[str, Any]],
    source: RecordSource,
    config: PipelineConfig,
    *,
    epochs: int | range | Sequence[int] | None = None,
    alignment: Alignment | None = None,
    transformed: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Audits batches from anywhere, such as another loader's, or the log of a run.

        batches = ({"id": line.ids, "mask": line.mask} for line in read_step_log(path))
        report = loader.audit_batches(batches, source, config)

    Args:
      batches: dicts with at least ``id`` (int64[batch] or str[batch]) and ``mask`` (bool[batch]), in
        the order of delivery, from the first epoch that is audited on.
      source: the records, in the order that the config's shuffle is about. It may have a method
        ``rows_of(ids) -> int64[k]``, which saves an index of all IDs where they are not row numbers.
      config: what the stream should have been.
      epochs: how many are due from the first on, or a range of them; by default all, or, where there
        is no end, those that came.
      alignment: as of `audit`.
      transformed: whether fields were changed on the way, so that they are not compared with the
        source's. Batches of ``id`` and ``mask`` alone are not compared either.
      progress: called with the number of slots done, now and then.

    Returns:
      The findings, and what they cover.

    Raises:
      TypeError, ValueError: no such epochs; something that is no batch; an alignment function that
        returns something else.
    """
    due = _due(source, config, epochs, endless=epochs is None and config.num_epochs is None)
    return _audit(batches, source, due, alignment, progress, masks=True, transformed=transformed)


def _audit_mixture(
    mixture: MixedStream,
    steps: int | None,
    alignment: Alignment | None,
    progress: Progress | None,
    *,
    ids_only: bool,
) -> MixtureReport:
    due = {
        name: _due(part.source, part.config, None, endless=True)
        for name, part in mixture.parts.items()
    }
    steps = _steps_of_mixture(mixture, due, steps)
    batches = Batches(mixture, ids_only=ids_only)
    reports = {
        name: _audit(
            batches.of(name, turns),
            mixture.parts[name].source,
            due[name],
            alignment,
            progress,
            masks=not ids_only,
            transformed=mixture.parts[name].transform is not None,
            work=Work(f"audit of {name!r}", len(turns), "batches"),
        )
        for name, turns in steps_of_each(mixture, steps).items()
    }
    return MixtureReport(steps, reports, batches.wrong, tuple(batches.sample))


def _steps_of_mixture(mixture: MixedStream, due: Mapping[str, Due], steps: int | None) -> int:
    """The steps to audit: what is asked for, if there are so many, or once through each part."""
    total = sum(mixture.weights.values())
    ends = [
        # A part's turn number j has to come before this step.
        -(-due[name].batches_per_epoch * total // mixture.weights[name])
        for name in mixture.parts
    ]
    wanted = max(ends) if steps is None else operator.index(steps)
    if wanted < 1:
        raise ValueError(f"steps must be at least 1, not {steps!r}")
    try:
        there = len(mixture)  # type: ignore[arg-type]
    except TypeError:
        return wanted
    if steps is not None and wanted > there:
        raise ValueError(f"steps is {steps}, and the mixture ends after {there}")
    return min(wanted, there)


def _audit(
    batches: Iterable[Mapping[str, Any]],
    source: RecordSource,
    due: Due,
    alignment: Alignment | None,
    progress: Progress | None,
    *,
    masks: bool,
    transformed: bool,
    work: Work | None = None,
) -> AuditReport:
    tallies = {name: Tally(name) for name in FINDINGS}
    order = DerivedOrder(due.num_records, due.config.seed, due.config.shuffle)
    keys = KeyCheck(due.config.seed) if due.config.record_keys else None
    check = FieldCheck(source, alignment, tallies["alignment"], keys, transformed=transformed)
    closing = Closing(source, order, tallies)
    rows = RowsOfIds(source)
    stream = Stream(source, due, order, rows, check, tallies, closing.close, closing.pass_over)
    first_step = due.step(due.first)
    steps = None if due.end is None else due.step(due.end) - first_step
    count = slots = 0
    with work or Work("audit", steps, "batches") as told:
        for count, batch in enumerate(batches, 1):
            delivered = Delivered.of(batch, first_step + count - 1, masks=masks)
            slots += len(delivered.ids)
            if stream.feed(delivered) and progress is not None:
                progress(slots)
            told.advance()
        stream.finish()
    _add_faults_of_formula(order, due, source, tallies["order"])
    if progress is not None:
        progress(slots)
    coverage = Coverage(
        due.num_records,
        due.first // due.batches_per_epoch,
        count,
        sum(epoch.delivered for epoch in closing.epochs),
        stream.padding,
        masks,
        check.fields,
        check.compared,
        check.judged,
        order.checked,
        tuple(_notes(due, check, alignment, order, keys, masks=masks, transformed=transformed)),
    )
    findings = {name: tally.finding() for name, tally in tallies.items()}
    return AuditReport(
        **findings,
        epochs=tuple(closing.epochs),
        left_out=closing.left_out,
        left_out_sample=closing.sample,
        coverage=coverage,
    )


def _notes(
    due: Due,
    check: FieldCheck,
    alignment: Alignment | None,
    order: DerivedOrder,
    keys: KeyCheck | None,
    *,
    masks: bool,
    transformed: bool,
) -> Iterator[str]:
    """What was not looked at, and why."""
    if not masks:
        yield "IDs alone: no record was read, and neither masks nor fields were looked at"
    elif transformed:
        yield "a transform changed the fields: they were not compared with the source"
        if check.tried:
            yield f"the source was asked for {check.tried:,} records in two orders of rows"
    elif not check.fields:
        yield "the batches hold no fields: nothing was compared with the source"
    if masks and alignment is None:
        yield "no alignment function was given"
    if masks and due.config.on_bad_record == "mask" and not check.fields:
        yield "whether masked records are bad was not tried"
    yield (
        f"{order.checked:,} positions of the order were derived a second time, by a slow formula"
    )
    if keys is not None:
        yield f"{keys.checked:,} keys of records were derived a second time, by a slow formula"


def _add_faults_of_formula(
    order: DerivedOrder, due: Due, source: RecordSource, tally: Tally
) -> None:
    offenders = []
    for epoch, position, row, right in order.faults[: 4 * Tally.KEPT]:
        found, expected = ids_of(source, np.array([row, right], np.int64)).tolist()
        step = due.step(due.number(Place(epoch, position)))
        place = position % due.config.batch_size
        cause = "the order is not what its formula says"
        offenders.append(Offender(epoch, step, place, found, cause, expected))
    tally.add("not what the formula says", order.fault_count, offenders)


def _due(
    source: RecordSource,
    config: PipelineConfig,
    epochs: int | range | Sequence[int] | None,
    *,
    endless: bool = False,
) -> Due:
    """What is due in some epochs."""
    if not isinstance(config, PipelineConfig):
        raise TypeError(f"config must be a PipelineConfig, not {type(config).__name__}")
    check_key_field(check_source(source), config)
    due = Due(len(source), config, 0, None)
    if due.batches_per_epoch == 0:
        raise ValueError(f"no epoch has a batch: {due.num_records} records, and {config}")
    if endless:
        return due
    chosen = _range(epochs, config.num_epochs)
    per_epoch = due.batches_per_epoch
    return Due(due.num_records, config, chosen.start * per_epoch, chosen.stop * per_epoch)


def _range(epochs: Any, num_epochs: int | None) -> range:
    if epochs is None:
        return range(num_epochs or 1)
    if isinstance(epochs, range):
        chosen = epochs
    elif isinstance(epochs, list | tuple) and epochs:
        chosen = range(operator.index(epochs[0]), operator.index(epochs[-1]) + 1)
        if list(chosen) != list(epochs):
            raise ValueError(f"epochs must be in a row, not {epochs!r}")
    else:
        if isinstance(epochs, bool | np.bool_):
            raise TypeError(f"epochs must be a number or a range of them, not {epochs!r}")
        chosen = range(operator.index(epochs))
    if chosen.step != 1 or not chosen or chosen.start < 0:
        raise ValueError(f"epochs must be at least one, in a row, not {epochs!r}")
    if num_epochs is not None and chosen.stop > num_epochs:
        raise ValueError(f"epochs {epochs!r} go beyond the {num_epochs} of the config")
    return chosen
