"""What came of each record in one epoch: a byte for each row of the source."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.order import Rows

#: Came unmasked where it was due; came unmasked elsewhere; came masked, for one of three reasons.
IN_PLACE, ELSEWHERE, EXCLUDED, BAD, MASKED = 1, 2, 4, 8, 16
SEEN: Final = IN_PLACE | ELSEWHERE
#: Came masked, as the config has it, where it was due; elsewhere.
HELD, STRAY = 32, 64
HIDDEN: Final = HELD | STRAY

_KEPT: Final = 1 << 12
_BLOCK: Final = 1 << 22


class Sighting(NamedTuple):
    """A record in a slot where it was not due, or not again."""

    step: int
    place: int
    row: int
    id: Any
    expected: Any
    cause: str = ""


@dataclasses.dataclass
class Ledger:
    """The book of an epoch.

    Attributes:
      state: uint8[n], a set of the flags above for each row.
      sightings: unmasked slots that held a record.
      elsewhere: the first of the sightings out of place. Which of them came too often, and which
        came in the wrong place, is known when the epoch is over.
      again: the first of the sightings of records that had come in the same way before.
      late: the first of the sightings in place of records that had come elsewhere before.
      hidden: masked slots that held a record that is excluded or bad.
      strays: the first of these out of place.
      hidden_again: the first of these whose record had come so before.
      next_look: sightings at which ``elsewhere``, if it is full, is gone through again.
    """

    state: npt.NDArray[np.uint8]
    sightings: int = 0
    elsewhere: list[Sighting] = dataclasses.field(default_factory=list)
    again: list[Sighting] = dataclasses.field(default_factory=list)
    late: list[Sighting] = dataclasses.field(default_factory=list)
    hidden: int = 0
    strays: list[Sighting] = dataclasses.field(default_factory=list)
    hidden_again: list[Sighting] = dataclasses.field(default_factory=list)
    next_look: int = 0

    @classmethod
    def of(cls, num_records: int) -> "Ledger":
        """An empty one."""
        return cls(np.zeros(num_records, np.uint8))

    def mark(self, rows: Rows, flag: int) -> None:
        """Sets a flag of some rows."""
        self.state[rows] |= np.uint8(flag)

    def in_place(self, rows: Rows, sighting: Callable[[int], Sighting]) -> None:
        """Books records that came where they were due; ``sighting`` tells more of the i-th."""
        self.sightings += len(rows)
        before = self._before(rows, IN_PLACE)
        # Orders that are no permutation: even where each record is due, some come twice.
        self._keep(self.again, before & IN_PLACE, sighting)
        self._keep(self.late, before & ELSEWHERE, sighting)
        self.mark(rows, IN_PLACE)

    def out_of_place(self, rows: Rows, sighting: Callable[[int], Sighting]) -> None:
        """Books records that came where others were due, or none."""
        self.sightings += len(rows)
        self._keep(self.again, self._before(rows, ELSEWHERE) & ELSEWHERE, sighting)
        self.mark(rows, ELSEWHERE)
        room = 2 * _KEPT - len(self.elsewhere)
        self.elsewhere += [sighting(i) for i in range(min(room, len(rows)))]
        if room <= len(rows) and self.sightings >= self.next_look:
            # Those that came in place as well by now are a matter of multiplicity, and few are kept.
            self.next_look = 2 * self.sightings
            extra = [s for s in self.elsewhere if self.state[s.row] & IN_PLACE]
            self.elsewhere = [s for s in self.elsewhere if not self.state[s.row] & IN_PLACE]
            self.again += extra[: _KEPT - len(self.again)]

    def masked(self, rows: Rows, why: int, where: int, sighting: Callable[[int], Sighting]) -> None:
        """Books records that came masked, ``EXCLUDED`` or ``BAD``, and are ``HELD`` there or ``STRAY``."""
        self.hidden += len(rows)
        self._keep(self.hidden_again, self._before(rows, HIDDEN) & HIDDEN, sighting)
        if where == STRAY:
            self._keep(self.strays, np.ones(len(rows), np.bool_), sighting)
        self.mark(rows, why | where)

    def _before(self, rows: Rows, flag: int) -> npt.NDArray[np.uint8]:
        """The state before each of the rows; one that was among them before has the flag."""
        before = self.state[rows]
        in_order = np.sort(rows)
        if (in_order[1:] == in_order[:-1]).any():
            _, first = np.unique(rows, return_index=True)
            before[~np.isin(np.arange(len(rows)), first)] |= flag
        return before

    def _keep(self, kept: list[Sighting], which: Any, sighting: Callable[[int], Sighting]) -> None:
        if which.any() and len(kept) < _KEPT:
            kept += [sighting(i) for i in np.flatnonzero(which)[:16].tolist()]

    def count(self, condition: Callable[[npt.NDArray[np.uint8]], Any]) -> int:
        """How many rows have a state with a property, asked in blocks."""
        return sum(int(np.count_nonzero(condition(block))) for block in self._blocks())

    def _blocks(self) -> Iterator[npt.NDArray[np.uint8]]:
        for low in range(0, len(self.state), _BLOCK):
            yield self.state[low : low + _BLOCK]

    def first_rows(self, condition: Callable[[npt.NDArray[np.uint8]], Any], most: int) -> list[int]:
        """The lowest rows that have such a state."""
        found: list[int] = []
        for number, block in enumerate(self._blocks()):
            found += (np.flatnonzero(condition(block)) + number * _BLOCK).tolist()[:most]
            if len(found) >= most:
                break
        return found[:most]
