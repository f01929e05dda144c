"""What is due: batch borders, padding and what is left out, derived from a config alone.

This says again, on its own, what `loader.batching` says, because an audit that shared its code
would repeat its faults. Batches have numbers, counted over all epochs as without any ``skip``.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from loader.config import PipelineConfig


class Place(NamedTuple):
    """A place between two records: those of ``epoch`` before ``offset`` have been passed."""

    epoch: int
    offset: int


class Piece(NamedTuple):
    """Positions ``start`` to ``stop`` of an epoch."""

    epoch: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Due:
    """The batches that a stream has to deliver.

    Attributes:
      num_records: in an epoch.
      config: what decides the stream.
      first: number of the batch with which the audit begins.
      end: one past the last number; ``None`` where there is no end.
    """

    num_records: int
    config: PipelineConfig
    first: int
    end: int | None

    @property
    def records_per_epoch(self) -> int:
        """Records of an epoch that stand in a batch."""
        if self.config.final_batch == "drop":
            return self.num_records - self.num_records % self.config.batch_size
        return self.num_records

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch, skipped ones included."""
        full, rest = divmod(self.num_records, self.config.batch_size)
        return full + (rest > 0 and self.config.final_batch != "drop")

    @property
    def end_epoch(self) -> int | None:
        """One past the last epoch of which a batch is due."""
        return None if self.end is None else -(-self.end // self.batches_per_epoch)

    def number(self, place: Place) -> int:
        """Number of the batch that holds the record behind a place."""
        return place.epoch * self.batches_per_epoch + place.offset // self.config.batch_size

    def place(self, number: int) -> Place:
        """Where the batch of a number begins."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        return Place(epoch, batch * self.config.batch_size)

    def step(self, number: int) -> int:
        """How many batches with a smaller number are delivered."""
        skipped = sum(min(end, number) - start for start, end in self.config.skip if start < number)
        return number - skipped

    def settled(self, place: Place) -> Place:
        """The same place, or the next from which a record is due."""
        while True:
            if place.offset >= self.records_per_epoch:
                place = Place(place.epoch + 1, 0)
            number = self.number(place)
            past = [end for start, end in self.config.skip if start <= number < end]
            if not past:
                return place
            place = self.place(past[0])

    def at_end(self, place: Place) -> bool:
        """Whether nothing is due behind a settled place."""
        return self.end is not None and self.number(place) >= self.end

    def batch(self, place: Place) -> Piece:
        """The batch that begins at a settled place."""
        stop = min(place.offset + self.config.batch_size, self.records_per_epoch)
        return Piece(place.epoch, place.offset, stop)

    def slots(self, piece: Piece) -> int:
        """Slots of a batch of those positions, padding included."""
        return self.config.batch_size if self.config.final_batch == "pad" else len_of(piece)

    def run(self, place: Place, batches: int) -> Piece:
        """The positions of up to so many batches in a row from a place on the grid.

        It ends with the epoch, and before the next batch that is not due.
        """
        number, per_epoch = self.number(place), self.batches_per_epoch
        ends = [number + batches, (place.epoch + 1) * per_epoch]
        ends += [start for start, _ in self.config.skip if start >= number]
        ends += [] if self.end is None else [self.end]
        stop = place.offset + (min(ends) - number) * self.config.batch_size
        return Piece(place.epoch, place.offset, min(stop, self.num_records))

    def stretch(self, place: Place, count: int) -> list[Piece]:
        """The next ``count`` records that are due from a place, over borders; fewer at the end."""
        pieces = []
        place = self.settled(place)
        while count > 0 and not self.at_end(place):
            batch = self.batch(place)
            stop = min(batch.stop, place.offset + count, self.records_per_epoch)
            pieces.append(Piece(place.epoch, place.offset, stop))
            count -= stop - place.offset
            place = self.settled(Place(place.epoch, stop))
        return pieces

    def not_due(self, epoch: int) -> Iterator[tuple[str, int, int]]:
        """What of an epoch is not due: (why, start, stop) of positions, without overlap."""
        per_epoch, size = self.batches_per_epoch, self.config.batch_size
        base = epoch * per_epoch
        low = min(max(self.first - base, 0), per_epoch)
        high = per_epoch if self.end is None else min(max(self.end - base, 0), per_epoch)

        def positions(start: int, stop: int) -> tuple[int, int]:
            return start * size, min(stop * size, self.records_per_epoch)

        if low > 0:
            yield ("ahead", *positions(0, low))
        for start, end in self.config.skip:
            start, end = max(start - base, low), min(end - base, high)  # noqa: PLW2901
            if start < end:
                yield ("skipped", *positions(start, end))
        if high < per_epoch:
            yield ("ahead", *positions(high, per_epoch))
        if self.records_per_epoch < self.num_records:
            why = "dropped" if high == per_epoch else "ahead"
            yield (why, self.records_per_epoch, self.num_records)


def len_of(piece: Piece) -> int:
    """Positions in a piece."""
    return piece.stop - piece.start
