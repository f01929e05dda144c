"""Closes the book of an epoch: what the sightings of its records come to."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from loader.audit.due import Due, Place
from loader.audit.formula import DerivedOrder
from loader.audit.ledger import (
    BAD,
    ELSEWHERE,
    EXCLUDED,
    HELD,
    HIDDEN,
    IN_PLACE,
    MASKED,
    SEEN,
    STRAY,
    Ledger,
    Sighting,
)
from loader.audit.reading import ids_of
from loader.audit.report import EpochCount, Offender, RecordId, Tally
from loader.sources import RecordSource

_BLOCK = 1 << 16
#: So many missing records are looked up one by one; of more, the first come soon in the order.
_LOOK_UP_TO = 1024
#: So many epochs in a row that are left out whole are listed one by one; of more, their records are counted.
LISTED_EPOCHS = 1024
_State = npt.NDArray[np.uint8]


class Closing:
    """Takes the books of epochs, one after the other, and adds up their findings.

    Attributes:
      epochs: the counts of those closed.
      left_out: records that did not come, as the config has it, by cause.
      sample: some of their IDs.
    """

    def __init__(
        self, source: RecordSource, order: DerivedOrder, tallies: dict[str, Tally]
    ) -> None:
        self._source, self._order, self._tallies = source, order, tallies
        self.epochs: list[EpochCount] = []
        self.left_out: dict[str, int] = {}
        self.sample: dict[str, tuple[RecordId, ...]] = {}

    def close(self, due: Due, epoch: int, ledger: Ledger) -> None:
        """Closes one epoch.

        Where records came that are not due (a dropped or a skipped one), as many others that are due
        but did not come were displaced by them: that is one matter, of order. What is left of either
        is omissions.
        """
        left_out, not_due, came = self._not_due(due, epoch, ledger)
        ahead = left_out.pop("ahead", 0)
        missing = ledger.count(lambda state: state == 0) - not_due
        omitted, against = max(0, missing - came), max(0, came - missing)
        masked = ledger.count(_only(MASKED))
        for cause, flag in (("excluded", EXCLUDED), ("bad record", BAD)):
            left_out[cause] = ledger.count(_only(flag))
            rows = ledger.first_rows(_only(flag), Tally.KEPT) if left_out[cause] else []
            self._note(cause, rows)
        misplaced = ledger.count(lambda state: (state & SEEN) == ELSEWHERE) - against
        distinct = ledger.count(lambda state: (state & SEEN) != 0)

        again, moved, undue = self._sorted_out(due, epoch, ledger, against)
        self._add("multiplicity", "came again", ledger.sightings - distinct, epoch, again)
        self._add("order", "in another place", misplaced, epoch, moved)
        self._add("omissions", "came, though left out", against, epoch, undue)
        self._add_masked(epoch, ledger)
        if omitted:
            found = self._first_missing(due, epoch, ledger, omitted)
            self._tallies["omissions"].add("did not come", omitted, found)
        if masked:
            rows = ledger.first_rows(_only(MASKED), _LOOK_UP_TO)
            found = self._due_places(due, epoch, rows, "came masked")
            self._tallies["omissions"].add("came masked", masked, found)

        left_out = {cause: count for cause, count in left_out.items() if count}
        for cause, count in left_out.items():
            self.left_out[cause] = self.left_out.get(cause, 0) + count
        self.epochs.append(
            EpochCount(
                epoch,
                ledger.sightings,
                distinct,
                ledger.sightings - distinct,
                misplaced,
                omitted + masked,
                left_out,
                ahead,
            )
        )

    def pass_over(self, due: Due, first: int, stop: int) -> None:
        """Counts the epochs ``first`` to ``stop``, which ``skip`` leaves out whole."""
        per_epoch, total = due.records_per_epoch, due.num_records
        parts = (("skipped", 0, per_epoch), ("dropped", per_epoch, total))
        left_out = {cause: high - low for cause, low, high in parts if low < high}
        for cause, low, high in parts:
            if low < high:
                self.left_out[cause] = self.left_out.get(cause, 0) + (stop - first) * (high - low)
            if low < high and len(self.sample.get(cause, ())) < Tally.KEPT:
                rows = self._order.rows(first, low, min(low + Tally.KEPT, high))
                self._note(cause, rows.tolist())
        if stop - first <= LISTED_EPOCHS:
            self.epochs += [EpochCount(i, 0, 0, 0, 0, 0, left_out) for i in range(first, stop)]

    def _add_masked(self, epoch: int, ledger: Ledger) -> None:
        """Masked slots with a record are due like others: their batches count as steps."""
        if not ledger.hidden:
            return
        state = ledger.state
        moved = [seen for seen in ledger.strays if not state[seen.row] & HELD]
        # A record that came early and again in its place: it is the early one that should not be.
        early = [seen for seen in ledger.strays if state[seen.row] & HELD]
        count = ledger.hidden - ledger.count(lambda state: (state & HIDDEN) != 0)
        self._add("multiplicity", "came again, masked", count, epoch, early or ledger.hidden_again)
        count = ledger.count(lambda state: (state & HIDDEN) == STRAY)
        self._add("order", "in another place, masked", count, epoch, moved)

    def _add(
        self, name: str, cause: str, count: int, epoch: int, sightings: list[Sighting]
    ) -> None:
        offenders = [
            Offender(epoch, s.step, s.place, s.id, s.cause or cause, s.expected)
            for s in sightings[: 4 * Tally.KEPT]
        ]
        self._tallies[name].add(cause, count, offenders)

    def _not_due(self, due: Due, epoch: int, ledger: Ledger) -> tuple[dict[str, int], int, int]:
        """Records that are not due and did not come, by cause and in all; and those that did come."""
        left_out: dict[str, int] = {}
        did_not, came = 0, 0
        for why, start, stop in due.not_due(epoch):
            for low in range(start, stop, _BLOCK):
                rows = self._order.rows(epoch, low, min(low + _BLOCK, stop))
                absent = rows[ledger.state[rows] == 0]
                left_out[why] = left_out.get(why, 0) + len(absent)
                did_not += len(absent)
                came += int(np.count_nonzero(ledger.state[rows] & SEEN))
                if why != "ahead":
                    self._note(why, absent[: Tally.KEPT].tolist())
        return left_out, did_not, came

    def _note(self, cause: str, rows: list[int]) -> None:
        kept = self.sample.get(cause, ())
        if rows and len(kept) < Tally.KEPT:
            ids = ids_of(self._source, np.array(rows[: Tally.KEPT - len(kept)], np.int64))
            self.sample[cause] = kept + tuple(ids.tolist())

    def _sorted_out(
        self, due: Due, epoch: int, ledger: Ledger, against: int
    ) -> tuple[list[Sighting], list[Sighting], list[Sighting]]:
        """The sightings out of place: those that came again, that moved, and that were not due."""
        again = set(ledger.again)
        moved: list[Sighting] = []
        undue: list[Sighting] = []
        met: set[int] = set()
        for seen in ledger.elsewhere:
            if ledger.state[seen.row] & IN_PLACE or seen.row in met:
                again.add(seen)
                continue
            met.add(seen.row)
            if len(moved) >= 4 * Tally.KEPT and len(undue) >= min(against, 4 * Tally.KEPT):
                continue
            why = self._why_not_due(due, epoch, seen.row) if len(undue) < against else None
            if why is None:
                moved.append(seen)
            else:
                undue.append(seen._replace(cause=f"came, though {why}"))
        # A record that came early and again in its place: it is the early one that should not be.
        return sorted(again, key=lambda s: (s.step, s.place)) or ledger.late, moved, undue

    def _why_not_due(self, due: Due, epoch: int, row: int) -> str | None:
        position = self._order.position(row, epoch)
        reasons = (why for why, low, high in due.not_due(epoch) if low <= position < high)
        return next(reasons, None)

    def _first_missing(self, due: Due, epoch: int, ledger: Ledger, omitted: int) -> list[Offender]:
        """The first records that are due and did not come."""
        cause = "did not come"
        if ledger.count(lambda state: state == 0) <= _LOOK_UP_TO:
            rows = ledger.first_rows(lambda state: state == 0, _LOOK_UP_TO)
            rows = [row for row in rows if self._why_not_due(due, epoch, row) is None]
            return self._due_places(due, epoch, rows, cause)
        most = min(omitted, Tally.KEPT)
        found = itertools.islice(self._missing(due, epoch, ledger), most)
        return [self._offender(due, epoch, position, row, cause) for position, row in found]

    def _missing(self, due: Due, epoch: int, ledger: Ledger) -> Iterator[tuple[int, int]]:
        """(position, row) of each record that is due and did not come, in the order."""
        gaps = sorted((low, high) for _, low, high in due.not_due(epoch) if low < high)
        place = 0
        for gap, behind in [*gaps, (due.num_records, due.num_records)]:
            for low in range(place, gap, _BLOCK):
                rows = self._order.rows(epoch, low, min(low + _BLOCK, gap))
                for i in np.flatnonzero(ledger.state[rows] == 0).tolist():
                    yield low + i, int(rows[i])
            place = behind

    def _due_places(self, due: Due, epoch: int, rows: list[int], cause: str) -> list[Offender]:
        places = sorted((self._order.position(row, epoch), row) for row in rows)
        return [self._offender(due, epoch, *place, cause) for place in places[: Tally.KEPT]]

    def _offender(self, due: Due, epoch: int, position: int, row: int, cause: str) -> Offender:
        record_id = np.asarray(self._source.ids(np.array([row], np.int64)))[0].item()
        step = due.step(due.number(Place(epoch, position)))
        return Offender(epoch, step, position % due.config.batch_size, record_id, cause)


def _only(flag: int) -> Callable[[_State], npt.NDArray[np.bool_]]:
    """Which rows have a flag and did not come unmasked."""
    return lambda state: ((state & flag) != 0) & ((state & SEEN) == 0)
