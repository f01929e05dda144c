"""The result of an audit: five findings, the counts of each epoch, and the coverage."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

FINDINGS: Final = ("membership", "multiplicity", "omissions", "order", "alignment")

RecordId = int | str


@dataclasses.dataclass(frozen=True)
class Offender:
    """One wrong place in the stream.

    Attributes:
      epoch: the epoch of the place.
      step: number of the batch among those delivered, from 0; of an omission, the step in which the
        record was due.
      place: slot in the batch, from 0.
      id: of the record, or what stood there in its stead.
      cause: what is wrong there, in a few words.
      expected: the ID due there; ``None`` where there is none, or where it is the same.
      field: that differs; ``None`` where no field is at fault.
    """

    epoch: int
    step: int
    place: int
    id: RecordId
    cause: str
    expected: RecordId | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = f"epoch {self.epoch}, step {self.step}, place {self.place}: ID {self.id!r}"
        due = "" if self.expected is None else f" (due: {self.expected!r})"
        field = "" if self.field is None else f", field {self.field!r}"
        return f"{where}{due}{field}: {self.cause}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One of the five findings, with its count and its earliest places.

    Attributes:
      name: ``"membership"``, ``"multiplicity"``, ``"omissions"``, ``"order"`` or ``"alignment"``.
      count: places, records or batches at fault, as ``causes`` tells them apart; 0 is no finding.
      causes: the count of each cause.
      first: the earliest offender.
      sample: the earliest offenders, 16 at most.
    """

    name: str
    count: int
    causes: Mapping[str, int]
    sample: tuple[Offender, ...]

    @property
    def first(self) -> Offender | None:
        """The earliest offender; ``None`` if there is no finding."""
        return self.sample[0] if self.sample else None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON."""
        offenders = [dataclasses.asdict(offender) for offender in self.sample]
        return {
            "count": self.count,
            "causes": dict(self.causes),
            "first": offenders[0] if offenders else None,
            "sample": offenders,
        }


@dataclasses.dataclass(frozen=True)
class EpochCount:
    """The records of one epoch, counted.

    Attributes:
      epoch: counted from 0.
      delivered: unmasked slots that hold a record of the source.
      distinct: different records among them.
      again: records beyond the first of each: ``delivered - distinct``.
      misplaced: records that came in this epoch, but not where they were due.
      omitted: records that were due and did not come.
      left_out: records that did not come, as the config has it, by cause: ``"dropped"``,
        ``"skipped"``, ``"excluded"``, ``"bad record"``.
      ahead: records that were not due yet where the audit ended, or before it began.
    """

    epoch: int
    delivered: int
    distinct: int
    again: int
    misplaced: int
    omitted: int
    left_out: Mapping[str, int]
    ahead: int = 0


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What the audit checked, and what it did not.

    Attributes:
      num_records: in the source.
      first_epoch: with which the audit began.
      batches: delivered.
      records: delivered.
      padding: masked slots that hold no record.
      masks: whether there were masks to look at; an audit of IDs alone derives them.
      fields: compared with the source.
      compared: records whose fields were.
      judged: records that the user's alignment function was applied to.
      positions: of the order that were derived once more by a slow formula in plain integers.
      notes: what was not looked at, and why.
    """

    num_records: int
    first_epoch: int
    batches: int
    records: int
    padding: int
    masks: bool
    fields: tuple[str, ...]
    compared: int
    judged: int
    positions: int
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
      membership: IDs that do not belong: not of the source, of an excluded record, or of padding
        that is counted as a record; batches too much that hold no record at all.
      multiplicity: records that came more than once in an epoch, masked ones included.
      omissions: records that were due and did not come, and final batches that are not as
        ``final_batch`` has them. Records that the config leaves out are in ``left_out``.
      order: records that came in another place than the order has it (masked ones too: a batch of
        nothing else is a step as well), batches that begin or end elsewhere, and orders that are not
        what their formula says.
      alignment: records whose fields are not those of the source's record of that ID, whose key is
        not theirs, or that the user's alignment function rejects; masked slots that hold something.
      epochs: the counts of each epoch; more than 1,024 in a row that ``skip`` leaves out whole are in ``left_out``
        alone.
      left_out: records that did not come, as the config has it, by cause, over all epochs.
      left_out_sample: some of their IDs, by cause, 16 at most.
      coverage: what was looked at.
    """

    membership: Finding
    multiplicity: Finding
    omissions: Finding
    order: Finding
    alignment: Finding
    epochs: tuple[EpochCount, ...]
    left_out: Mapping[str, int]
    left_out_sample: Mapping[str, tuple[RecordId, ...]]
    coverage: Coverage

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All five findings in a fixed order, including those with a count of 0."""
        return tuple(getattr(self, name) for name in FINDINGS)

    @property
    def found(self) -> tuple[str, ...]:
        """Names of the findings that have a count."""
        return tuple(finding.name for finding in self.findings if finding.count)

    @property
    def clean(self) -> bool:
        """Whether there is no finding."""
        return not self.found

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON."""
        return {
            "clean": self.clean,
            "findings": {finding.name: finding.to_dict() for finding in self.findings},
            "left_out": dict(self.left_out),
            "left_out_sample": {cause: list(ids) for cause, ids in self.left_out_sample.items()},
            "epochs": [
                {**dataclasses.asdict(epoch), "left_out": dict(epoch.left_out)}
                for epoch in self.epochs
            ],
            "coverage": dataclasses.asdict(self.coverage),
        }

    def __str__(self) -> str:
        covered = self.coverage
        epochs = f"{len(self.epochs)} epoch{'s'[: len(self.epochs) != 1]}"
        verdict = "clean" if self.clean else f"FOUND {', '.join(self.found)}"
        size = f"{covered.records:,} records in {covered.batches:,} batches of {epochs}"
        lines = [f"{verdict}: {size}"]
        for finding in self.findings:
            causes = ", ".join(f"{cause} {count:,}" for cause, count in finding.causes.items())
            lines.append(f"  {finding.name:<13}{finding.count:,}{causes and f' ({causes})'}")
            lines += [f"    {offender}" for offender in finding.sample[:3]]
        if self.left_out:
            causes = ", ".join(f"{cause} {count:,}" for cause, count in self.left_out.items())
            lines.append(f"  left out as configured: {causes}")
        return "\n".join([*lines, *(f"  {note}" for note in covered.notes)])


class Tally:
    """A finding under construction: counts every fault and keeps the earliest few."""

    KEPT: Final = 16

    def __init__(self, name: str) -> None:
        self._name = name
        self._causes: dict[str, int] = {}
        self._count = 0
        self._sample: list[Offender] = []

    def add(self, cause: str, count: int, offenders: list[Offender]) -> None:
        """Counts ``count`` more, of which ``offenders`` are some."""
        if count:
            self._causes[cause] = self._causes.get(cause, 0) + count
            self._count += count
            self.keep(offenders)

    def add_once(self, causes: Mapping[str, int], count: int, offenders: list[Offender]) -> None:
        """As `add`, where the same ``count`` of records may have more than one cause."""
        for cause, of_cause in causes.items():
            self._causes[cause] = self._causes.get(cause, 0) + of_cause
        self._count += count
        self.keep(offenders)

    def keep(self, offenders: list[Offender]) -> None:
        """Keep those offenders that are among the earliest."""
        both = self._sample + offenders[: 4 * self.KEPT]
        both.sort(key=lambda offender: (offender.step, offender.place))
        self._sample = both[: self.KEPT]

    def finding(self) -> Finding:
        """The finding so far."""
        return Finding(self._name, self._count, dict(self._causes), tuple(self._sample))
