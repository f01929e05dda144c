"""A run's step log, audited: its batches, and whether a run can have written its lines as they stand.

The batch of a step is the one that was delivered last: after a kill, a run delivers the steps since its
checkpoint again. All other lines of the step must tell of the same batch.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

import checkpointing
import loader

#: Offenders that a finding keeps.
KEPT: Final = 16

BEYOND = "the stream ends before this step"
AHEAD = "the step before it was not logged before it"
MISPLACED = "the line says another epoch or offset than its step begins at"
DIFFERS = "logged again with another batch"


def audit_log(
    path: Path, pipeline: loader.Pipeline, epochs: int | None = None
) -> loader.AuditReport:
    """Audits the batches of a step log, as far as it came or of some epochs.

    Args:
      path: of the log, as it was asked for: where several processes have logged, without the ending of
        their files, ``.process-0`` and so on.
      pipeline: whose source and config say what is due.
      epochs: how many, from the first on, of all of which each batch is due; ``None`` for what was logged.

    Returns:
      The report. What is wrong with the lines themselves is among its findings of order.

    Raises:
      OSError, ValueError: there is no such log, or nothing in it; as `loader.audit_batches`.
    """
    logs, batches = read(path)
    config = pipeline.config
    end = steps_of(pipeline, config.num_epochs)
    asked = end if epochs is None else steps_of(pipeline, epochs)
    last = {line.position.step: line for line in batches}
    due = [line for step, line in sorted(last.items()) if asked is None or step < asked]
    if epochs is None and (asked is None or len(due) < asked):
        config = dataclasses.replace(config, num_epochs=None)
    report = loader.audit_batches(
        ({"id": np.array(line.ids), "mask": np.array(line.mask)} for line in due),
        pipeline.source,
        config,
        epochs=epochs,
    )
    found = [
        fault
        for fault in itertools.chain.from_iterable(faults(log, pipeline) for log in logs)
        if asked is None or fault.step < asked or fault.cause == BEYOND
    ]
    return with_faults(report, found, sum(map(len, logs)))


def read(
    path: Path,
) -> tuple[list[list[checkpointing.Delivery]], list[checkpointing.Delivery]]:
    """The lines of each process, and the batches that they make, in the order of delivery."""
    processes = itertools.takewhile(
        Path.exists, (path.with_name(f"{path.name}.process-{i}") for i in itertools.count())
    )
    paths = [path] if path.exists() else list(processes) or [path]
    logs = [checkpointing.read_step_log(one) for one in paths]
    batches = logs[0] if len(logs) == 1 else checkpointing.read_step_log(path, len(logs))
    if not batches:
        whole = "line" if len(logs) == 1 else f"batch of {len(logs)} processes"
        raise ValueError(
            f"{path} holds no whole {whole}: no batch was logged, so nothing is audited"
        )
    return logs, batches


def steps_of(pipeline: loader.Pipeline, epochs: int | None) -> int | None:
    """Steps in so many epochs, or ``None`` where there is no end."""
    if epochs is None:
        return None
    end = epochs * pipeline.steps_per_epoch
    return end - sum(min(high, end) - low for low, high in pipeline.config.skip if low < end)


def faults(
    log: Sequence[checkpointing.Delivery], pipeline: loader.Pipeline
) -> Iterator[loader.Offender]:
    """What is wrong with the lines of one process, in their order.

    A run logs the next step, or, when it is resumed, an earlier one.
    """
    end = steps_of(pipeline, pipeline.config.num_epochs)
    endless = loader.Pipeline(
        pipeline.source, dataclasses.replace(pipeline.config, num_epochs=None)
    )
    last = {line.position.step: line for line in log}
    before = -1
    for line in log:
        step = line.position.step
        place = endless.position(step)
        first = line.ids[0] if line.ids else ""
        if end is not None and step >= end:
            yield loader.Offender(place.epoch, step, 0, first, BEYOND)
        elif line.position != place:
            yield loader.Offender(place.epoch, step, 0, first, MISPLACED)
        if step > before + 1:
            yield loader.Offender(place.epoch, step, 0, first, AHEAD)
        yield from _differs(line, last[step], place.epoch)
        before = step


def _differs(
    line: checkpointing.Delivery, last: checkpointing.Delivery, epoch: int
) -> Iterator[loader.Offender]:
    """The first slot in which a line tells of another batch than the last line of its step."""
    if (line.ids, line.mask) == (last.ids, last.mask):
        return
    ours, others = (itertools.zip_longest(one.ids, one.mask) for one in (line, last))
    pairs = enumerate(itertools.zip_longest(ours, others))
    slot = next((slot for slot, (mine, due) in pairs if mine != due), 0)
    mine, due = (one.ids[slot] if slot < len(one.ids) else "" for one in (line, last))
    expected = None if mine == due else due
    yield loader.Offender(epoch, line.position.step, slot, mine, DIFFERS, expected)


def with_faults(
    report: loader.AuditReport, found: Sequence[loader.Offender], lines: int
) -> loader.AuditReport:
    """The report with faults of lines among its findings of order."""
    causes = dict(report.order.causes)
    for fault in found:
        causes[fault.cause] = causes.get(fault.cause, 0) + 1
    sample = sorted([*report.order.sample, *found], key=lambda one: (one.step, one.place))
    order = loader.Finding("order", report.order.count + len(found), causes, tuple(sample[:KEPT]))
    note = f"{lines:,} lines of the log: their sequence, their positions, and steps logged again were compared"
    coverage = dataclasses.replace(report.coverage, notes=(*report.coverage.notes, note))
    return dataclasses.replace(report, order=order, coverage=coverage)
