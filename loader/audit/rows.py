"""From IDs to rows, for IDs that came where another was due."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.audit.reading import ids_of
from loader.progress import Work
from loader.sources import RecordSource

_BLOCK: Final = 1 << 18


class RowsOfIds:
    """Finds the rows of IDs, and trusts nothing that the source's own ``ids`` does not confirm.

    First by the source's ``rows_of(ids) -> rows``, where it has one; then by the guess that an ID is
    a row number; then by an index of all IDs, sorted by a 64-bit hash, which is made when it is first
    needed and holds 16 bytes a record.
    """

    def __init__(self, source: RecordSource) -> None:
        self._source = source
        self._total = len(source)
        self.kind = np.asarray(source.ids(np.zeros(1, np.int64))).dtype.kind
        self._index: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        self._numbered: bool | None = False if self.kind == "U" else None

    def rows(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Rows of ``ids: int64[k]`` or ``str[k]``: int64[k], -1 where no record has the ID."""
        found = np.full(len(ids), -1, np.int64)
        if (ids.dtype.kind == "U") != (self.kind == "U"):
            return found
        if hasattr(self._source, "rows_of"):
            self._confirm(ids, np.asarray(self._source.rows_of(ids), np.int64), found)
            return found
        if self.kind != "U":
            self._confirm(ids, ids, found)
        if (found < 0).any() and not self._ids_are_rows():
            self._look_up(ids, found)
        return found

    def _confirm(
        self, ids: npt.NDArray[Any], guess: npt.NDArray[np.int64], found: npt.NDArray[np.int64]
    ) -> None:
        """Sets ``found`` where the record in the guessed row has the ID."""
        at = np.flatnonzero((found < 0) & (guess >= 0) & (guess < self._total))
        rows = np.asarray(guess[at], np.int64)
        if at.size:
            right = ids_of(self._source, rows, np.argsort(rows)) == ids[at]
            found[at[right]] = rows[right]

    def _ids_are_rows(self) -> bool:
        """Whether each row's ID is its number, so that an ID beyond them belongs to no record."""
        if self._numbered is None:
            blocks = (
                np.arange(low, min(low + _BLOCK, self._total), dtype=np.int64)
                for low in range(0, self._total, _BLOCK)
            )
            self._numbered = all(
                np.array_equal(np.asarray(self._source.ids(rows)), rows) for rows in blocks
            )
        return self._numbered

    def _look_up(self, ids: npt.NDArray[Any], found: npt.NDArray[np.int64]) -> None:
        hashes, rows = self._index = self._index or self._made()
        wanted = _hashes(ids)
        at = np.searchsorted(hashes, wanted)
        # Different IDs may share a hash: go on through the run of equal ones.
        while (open_ := (found < 0) & (at < self._total)).any():
            open_[open_] = hashes[at[open_]] == wanted[open_]
            if not open_.any():
                return
            guess = np.full(len(ids), -1, np.int64)
            guess[open_] = rows[at[open_]]
            self._confirm(ids, guess, found)
            at[open_] += 1

    def _made(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        hashes = np.empty(self._total, np.int64)
        with Work("an index of the IDs", self._total, "records") as work:
            for low in range(0, self._total, _BLOCK):
                high = min(low + _BLOCK, self._total)
                ids = self._source.ids(np.arange(low, high, dtype=np.int64))
                hashes[low:high] = _hashes(np.asarray(ids))
                work.advance(high - low)
        rows = np.argsort(hashes)
        hashes.sort()
        return hashes, rows


def _hashes(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """64 bits for each ID, which need not stay the same beyond this process."""
    if ids.dtype.kind != "U":
        return ids.astype(np.int64)
    return np.fromiter(map(hash, ids.tolist()), np.int64, len(ids))
