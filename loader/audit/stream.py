"""Follows a delivered stream along the one that is due, and books what came of each record."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.audit.delivered import Delivered, FieldCheck, is_padding
from loader.audit.due import Due, Piece, Place, len_of
from loader.audit.formula import DerivedOrder
from loader.audit.ledger import BAD, EXCLUDED, HELD, MASKED, STRAY, Ledger, Sighting
from loader.audit.reading import ids_of
from loader.audit.report import Offender, Tally
from loader.audit.rows import RowsOfIds
from loader.order import Rows
from loader.sources import RecordSource

_BLOCK_SLOTS: Final = 1 << 16
_BLOCK_BYTES: Final = 1 << 24

#: Closes the book of an epoch: it will not be written to again.
Close = Callable[[Due, int, Ledger], None]
#: Counts epochs that are left out whole, from the first to before the last.
PassOver = Callable[[Due, int, int], None]


class Stream:
    """The state of an audit: a place in the due stream, and the books of the epochs about it.

    Batches are compared in blocks with those that are due. One that differs is looked at slot by
    slot, after it is settled which batch it is: the due one with faults, or, judged by the batch
    that follows it, one that comes too much, or one before which others are missing.
    """

    def __init__(
        self,
        source: RecordSource,
        due: Due,
        order: DerivedOrder,
        rows: RowsOfIds,
        check: FieldCheck,
        tallies: dict[str, Tally],
        close: Close,
        pass_over: PassOver,
    ) -> None:
        self._source, self._due, self._order, self._rows = source, due, order, rows
        self._check, self._tallies = check, tallies
        self._close, self._pass_over = close, pass_over
        self.place = due.settled(due.place(due.first))
        self._ledgers: dict[int, Ledger] = {}
        self._closed = self._first_epoch = due.first // due.batches_per_epoch
        self._pad: Any = "" if rows.kind == "U" else -1
        self._excluded = np.array(due.config.exclude) if due.config.exclude else None
        self._waiting: list[Delivered] = []
        self._waiting_slots = self._waiting_bytes = 0
        self._run = 1
        self.padding = 0

    def feed(self, batch: Delivered) -> bool:
        """Takes the next batch. Returns whether it and those before it have been worked on."""
        self._check.meet(batch)
        self._waiting.append(batch)
        self._waiting_slots += len(batch.ids)
        self._waiting_bytes += batch.nbytes
        if self._waiting_slots < _BLOCK_SLOTS and self._waiting_bytes < _BLOCK_BYTES:
            return False
        self._work(final=False)
        return True

    def finish(self) -> None:
        """Ends the stream: what has not come by now does not come."""
        self._work(final=True)
        if self._due.end is None:
            size, place = self._due.config.batch_size, self.place
            end = self._due.number(place) + (place.offset % size > 0)
            self._due = dataclasses.replace(self._due, end=end)
        self._close_before(self._due.end_epoch, final=True)

    def _work(self, *, final: bool) -> None:
        at, waiting = 0, self._waiting
        while at < len(waiting):
            count, fine = self._in_bulk(waiting, at)
            at += count
            self._run = min(2 * self._run, _BLOCK_SLOTS) if fine else 1
            if not fine:
                last = at + 1 == len(waiting)
                if last and not final:
                    break  # which batch this is shows by the next
                self._one(waiting[at], None if last else waiting[at + 1])
                at += 1
        del waiting[:at]
        self._waiting_slots = sum(len(batch.ids) for batch in waiting)
        self._waiting_bytes = sum(batch.nbytes for batch in waiting)

    # Batches that are as they should be.

    def _in_bulk(self, waiting: list[Delivered], at: int) -> tuple[int, bool]:
        """How many of the next batches are exactly those due, and whether none was seen that is not.

        Those that are, are booked.
        """
        due, place, size = self._due, self.place, self._due.config.batch_size
        if due.at_end(place) or place.offset % size:
            return 0, False
        run = due.run(place, min(self._run, len(waiting) - at))
        pieces = [
            Piece(run.epoch, start, min(start + size, run.stop))
            for start in range(run.start, run.stop, size)
        ]
        batches = waiting[at : at + len(pieces)]
        for count, (batch, piece) in enumerate(zip(batches, pieces, strict=True)):
            if len(batch.ids) != due.slots(piece) or not self._is_kind(batch):
                batches = batches[:count]
                break
        if not batches:
            return 0, False
        run = Piece(run.epoch, run.start, pieces[len(batches) - 1].stop)
        rows = self._order.rows(*run)
        want = ids_of(self._source, rows)
        kept = self._kept(want)
        got = np.concatenate([batch.ids for batch in batches])
        masks = np.concatenate([self._mask(batch) for batch in batches])
        same = np.zeros(len(got), np.bool_)
        same[: len(want)] = (got[: len(want)] == want) & (masks[: len(want)] == kept)
        same[len(want) :] = (got[len(want) :] == self._pad) & ~masks[len(want) :]
        if not same.all():
            batches = batches[: int(np.argmin(same)) // size]
            run = Piece(run.epoch, run.start, run.start + len(batches) * size)
            rows, kept = rows[: len_of(run)], kept[: len_of(run)]
        if batches:
            self._book_run(batches, run, rows, kept)
        return len(batches), len(batches) == len(pieces)

    def _book_run(
        self, batches: list[Delivered], run: Piece, rows: Rows, kept: npt.NDArray[np.bool_]
    ) -> None:
        size, first = self._due.config.batch_size, batches[0].step
        ledger = self._ledger(run.epoch)

        def sightings(at: npt.NDArray[np.int64]) -> Callable[[int], Sighting]:
            def sighting(i: int) -> Sighting:
                step, place = divmod(int(at[i]), size)
                batch = batches[step]
                return Sighting(
                    first + step, place, int(rows[at[i]]), batch.ids[place].item(), None
                )

            return sighting

        live, hidden = np.flatnonzero(kept), np.flatnonzero(~kept)
        ledger.in_place(rows[live] if len(hidden) else rows, sightings(live))
        if len(hidden):
            ledger.masked(rows[hidden], EXCLUDED, HELD, sightings(hidden))
        for batch in batches:
            low = (batch.step - first) * size
            here = rows[low : low + size]
            self.padding += len(batch.ids) - len(here)
            if batch.fields:
                slots = np.full(len(batch.ids), -1, np.int64)
                slots[: len(here)] = here
                is_live = np.zeros(len(slots), np.bool_)
                is_live[: len(here)] = kept[low : low + size]
                self._check.check(batch, run.epoch, slots, is_live, ~is_live)
        self._go(Place(run.epoch, run.stop))

    # Batches that differ.

    def _one(self, batch: Delivered, following: Delivered | None) -> None:
        due, place = self._due, self.place
        if due.at_end(place):
            self._extra(batch)
            return
        piece = due.batch(place)
        on_grid = place.offset % due.config.batch_size == 0
        here = self._matches(batch, place)
        if here and on_grid and batch.used == len_of(piece):
            self._in_batch(batch, piece)
        elif following is None:
            missing = self._ahead(batch)
            if here and not on_grid:
                self._off_grid(batch)
            elif missing and due.at_end(self._behind(missing, batch)):
                self._jump(batch, missing)
            else:
                self._in_batch(batch, piece)
        elif self._matches(following, due.settled(Place(place.epoch, piece.stop))):
            self._in_batch(batch, piece)
        elif here:
            self._off_grid(batch)
        elif self._matches(following, place):
            self._extra(batch)
        elif (missing := self._ahead(batch)) and self._matches(
            following, self._behind(missing, batch)
        ):
            self._jump(batch, missing)
        else:
            self._in_batch(batch, piece)

    def _matches(self, batch: Delivered, place: Place) -> bool:
        """Whether a batch's records are the next ones from a place, wherever borders are."""
        if not batch.used or self._due.at_end(place) or not self._is_kind(batch):
            return False
        pieces = self._due.stretch(place, batch.used)
        low = 0
        for piece in pieces:
            want = ids_of(self._source, self._order.rows(*piece))
            if not np.array_equal(batch.ids[low : low + len_of(piece)], want):
                return False
            low += len_of(piece)
        return low == batch.used

    def _behind(self, place: Place, batch: Delivered) -> Place:
        """The place behind a batch's records, which begin at ``place``."""
        last = self._due.stretch(place, batch.used)[-1]
        return self._due.settled(Place(last.epoch, last.stop))

    def _ahead(self, batch: Delivered) -> Place | None:
        """Where ahead, less than an epoch away, the records of a batch are due as they came."""
        if not batch.used:
            return None
        places = [self._due.settled(Place(self.place.epoch + 1, 0))]
        if (in_epoch := self._in_epoch(batch, self.place.epoch)) is not None:
            places.insert(0, Place(self.place.epoch, in_epoch))
        for place in places:
            far = place.epoch > self.place.epoch and (
                place.epoch > self.place.epoch + 1 or place.offset >= self.place.offset
            )
            settled = not self._due.at_end(place) and self._due.settled(place) == place
            if place > self.place and not far and settled and self._matches(batch, place):
                return place
        return None

    def _in_epoch(self, batch: Delivered, epoch: int) -> int | None:
        """The offset at which the records of a batch stand in an epoch, due or not, in this order."""
        if not batch.used or not self._is_kind(batch):
            return None
        (row,) = self._rows.rows(batch.ids[:1]).tolist()
        if row < 0:
            return None
        start = self._order.position(row, epoch)
        stop = start + batch.used
        if stop > self._due.num_records:
            return None
        want = ids_of(self._source, self._order.rows(epoch, start, stop))
        return start if np.array_equal(batch.ids[: batch.used], want) else None

    def _jump(self, batch: Delivered, place: Place) -> None:
        """Books a batch before which others are missing."""
        self._go(place)
        piece = self._due.batch(self.place)
        if place.offset % self._due.config.batch_size or batch.used != len_of(piece):
            self._off_grid(batch)
        else:
            self._in_batch(batch, piece)

    def _off_grid(self, batch: Delivered) -> None:
        """Books a batch that holds the next records, but begins or ends where no batch does."""
        pieces = self._due.stretch(self.place, batch.used)
        crossed = pieces[0].epoch != pieces[-1].epoch
        cause = "the epoch's end is crossed" if crossed else "the batch has other borders"
        place = len_of(pieces[0]) if crossed else 0
        offender = Offender(pieces[0].epoch, batch.step, place, batch.ids[place].item(), cause)
        self._tallies["order"].add(cause, 1, [offender])
        low = 0
        for piece in pieces:
            self._slots(batch, piece, low, low + len_of(piece))
            low += len_of(piece)
        self._slots(batch, Piece(pieces[-1].epoch, 0, 0), low, len(batch.ids))
        self._go(Place(pieces[-1].epoch, pieces[-1].stop))

    def _in_batch(self, batch: Delivered, piece: Piece) -> None:
        """Books a batch in the place of the one that is due, and goes behind that."""
        due, slots, count = self._due, len(batch.ids), len_of(piece)
        self._slots(batch, piece, 0, slots)
        is_short = count < due.config.batch_size
        if slots != due.slots(piece) and count <= slots and batch.used <= due.slots(piece):
            cause = f"a batch of {slots} slots, not {due.slots(piece)}"
            place = min(slots, due.slots(piece)) - 1
            offender = Offender(piece.epoch, batch.step, place, batch.ids[place].item(), cause)
            tally = self._tallies["omissions" if is_short else "order"]
            tally.add("final batch" if is_short else "the batch has other borders", 1, [offender])
        self._go(Place(piece.epoch, piece.stop))

    def _extra(self, batch: Delivered) -> None:
        """Books a batch that comes too much; the place stays."""
        epoch, offset = self.place
        if self._due.at_end(self.place) and self._due.end_epoch is not None:
            epoch = max(self._due.end_epoch - 1, self._first_epoch)
        elif offset == 0 and epoch > self._closed:
            # It may be the last one before, again or against the final-batch policy.
            epoch -= self._in_epoch(batch, epoch - 1) is not None
        self._slots(batch, Piece(epoch, 0, 0), 0, len(batch.ids))
        if not batch.used and not self._mask(batch).any():
            # Nothing in its slots tells of it, and yet the steps behind it have other numbers.
            cause = "a batch without a record"
            offender = Offender(epoch, batch.step, 0, self._pad, cause)
            self._tallies["membership"].add(cause, 1, [offender])

    # Slots.

    def _slots(self, batch: Delivered, piece: Piece, low: int, high: int) -> None:
        """Books the slots ``low`` to ``high``, of which the first are due to hold the piece's records."""
        count = min(len_of(piece), high - low)
        want_rows = self._order.rows(piece.epoch, piece.start, piece.start + count)
        want = ids_of(self._source, want_rows)
        ids, mask = batch.ids[low:high], self._mask(batch)[low:high]
        rows = self._rows.rows(ids)
        excluded = ~self._kept(ids)
        padding = is_padding(ids)
        right = np.zeros(len(ids), np.bool_)
        if self._is_kind(batch):
            right[:count] = ids[:count] == want
            rows[:count][right[:count]] = want_rows[right[:count]]
        ledger = self._ledger(piece.epoch)
        expected = dict(enumerate(want.tolist())) if not right[:count].all() else {}

        def sightings(slots: npt.NDArray[np.int64]) -> Callable[[int], Sighting]:
            def sighting(i: int) -> Sighting:
                slot = int(slots[i])
                instead = None if right[slot] else expected.get(slot)
                return Sighting(batch.step, low + slot, int(rows[slot]), ids[slot].item(), instead)

            return sighting

        fine = mask & ~excluded & ~padding & (rows >= 0)
        at = np.flatnonzero(fine & right)
        ledger.in_place(rows[at], sightings(at))
        at = np.flatnonzero(fine & ~right)
        ledger.out_of_place(rows[at], sightings(at))
        empty = padding & ~mask
        self.padding += int(np.count_nonzero(empty))
        at = np.flatnonzero(~fine & ~empty)
        for i, slot in enumerate(at.tolist()):
            kind = "foreign" if rows[slot] < 0 else "excluded" if excluded[slot] else "record"
            kind = "padding" if padding[slot] else kind
            seen = sightings(at)(i)
            due = slot < count, bool(right[slot])
            empty[slot] = self._odd(ledger, piece.epoch, seen, kind, due, bool(mask[slot]))
        if batch.fields:
            rows[padding] = -1
            self._check_slots(batch, piece.epoch, low, rows, mask & (rows >= 0) & ~excluded, empty)

    def _check_slots(
        self,
        batch: Delivered,
        epoch: int,
        low: int,
        rows: npt.NDArray[np.int64],
        live: npt.NDArray[np.bool_],
        empty: npt.NDArray[np.bool_],
    ) -> None:
        slots = len(batch.ids)
        whole = np.full(slots, -1, np.int64)
        whole_live, whole_empty = np.zeros((2, slots), np.bool_)
        at = slice(low, low + len(rows))
        whole[at], whole_live[at], whole_empty[at] = rows, live, empty
        self._check.check(batch, epoch, whole, whole_live, whole_empty)

    def _odd(
        self,
        ledger: Ledger,
        epoch: int,
        seen: Sighting,
        kind: str,
        due: tuple[bool, bool],
        mask: bool,
    ) -> bool:
        """Books a slot that is not simply right; returns whether it must hold zeros.

        ``due`` says whether a record is due in the slot, and whether it is this one.
        """
        cause = ""
        rows, where = np.array([seen.row]), HELD if due[1] else STRAY
        hidden = kind == "excluded" and not mask
        if kind == "padding":
            cause = "padding is counted as a record"
        elif kind == "foreign":
            cause = "no record of the source"
        elif hidden:
            ledger.masked(rows, EXCLUDED, where, lambda _: seen)
        elif kind == "excluded":
            cause = "an excluded record is delivered"
            ledger.mark(rows, EXCLUDED)
        elif not due[0]:
            cause = "padding has the ID of a record"
        elif self._due.config.on_bad_record == "mask" and not self._check.can_read(seen.row):
            ledger.masked(rows, BAD, where, lambda _: seen)
            return True
        else:
            ledger.mark(rows, MASKED)
        if cause:
            offender = Offender(epoch, seen.step, seen.place, seen.id, cause, seen.expected)
            self._tallies["membership"].add(cause, 1, [offender])
        return hidden

    def _is_kind(self, batch: Delivered) -> bool:
        """Whether a batch's IDs are of the source's kind, integers or strings."""
        return (batch.ids.dtype.kind == "U") == (self._rows.kind == "U")

    def _kept(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which IDs the config does not exclude."""
        if self._excluded is None or (ids.dtype.kind == "U") != (self._excluded.dtype.kind == "U"):
            return np.ones(len(ids), np.bool_)
        return ~np.isin(ids, self._excluded)

    def _mask(self, batch: Delivered) -> npt.NDArray[np.bool_]:
        """The mask; where only IDs are at hand, the one that they should have."""
        if batch.mask is not None:
            return batch.mask
        return ~is_padding(batch.ids) & self._kept(batch.ids)

    # Epochs.

    def _ledger(self, epoch: int) -> Ledger:
        if epoch not in self._ledgers:
            self._ledgers[epoch] = Ledger.of(self._due.num_records)
        return self._ledgers[epoch]

    def _go(self, place: Place) -> None:
        """Goes to a place. The epoch before its own stays open: a batch of it may come late."""
        self.place = self._due.settled(place)
        end = self._due.end_epoch
        epoch = self.place.epoch if end is None else min(self.place.epoch, end)
        self._close_before(epoch - 1)

    def _close_before(self, epoch: int | None, *, final: bool = False) -> None:
        if epoch is None:
            return
        while self._closed < epoch:
            nothing = self._closed not in self._ledgers
            if nothing and (due := self._due.settled(Place(self._closed, 0)).epoch) > self._closed:
                # Left out as a whole, perhaps with a great many others: all of them at once.
                if due > epoch and not final:
                    return
                stop = min(
                    epoch, due, *(booked for booked in self._ledgers if booked > self._closed)
                )
                self._pass_over(self._due, self._closed, stop)
                self._closed = stop
                continue
            ledger = self._ledgers.pop(self._closed, None) or Ledger.of(self._due.num_records)
            self._close(self._due, self._closed, ledger)
            self._closed += 1
