"""Records of a Python sequence, or of anything else that gives one record for a number."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import Fingerprint, fingerprint
from loader.sources.columns import (
    Entries,
    Where,
    check_fields,
    chosen_columns,
    field_like,
    gathered,
    stacked,
)
from loader.sources.identifiers import IdRule, make_row_ids
from loader.sources.protocol import Field, field_list

_COLUMN_ROWS: Final = 1 << 12


class SequenceSource:
    """A `RecordSource` over a sequence of records: a list, or a `grain.sources.RandomAccessDataSource`.

    Each record is read on its own, by ``sequence[row]``, or all of a batch by ``__getitems__`` where
    the sequence has that, and stacked: that costs some 2 us a field and record, and what the sequence
    takes. Nothing is kept.

    Args:
      sequence: has ``__len__`` and ``__getitem__``, which gives for the same row the same record
        always, also to several threads: a dict of arrays, numbers or strings, or an array alone.
      columns: which entries of a record are fields; by default all but the one that ``ids`` names, and
        no record may have others than the first. Where you list them, nobody looks at other entries:
        they are in no batch and no fingerprint. A record that is an array alone has one entry,
        ``"value"``.
      fields: dtype and per-record shape of entries of which the first record does not tell it: of
        strings ``{"word": "U32"}``, which are up to 32 characters. By default as in the first record.
      ids: ``"row"``, a function of rows, or the name of an entry, for which all records are read at
        once.

    Raises:
      TypeError, ValueError: a bad argument, no record, or a first record that cannot be batched.
    """

    def __init__(
        self,
        sequence: Any,
        *,
        columns: Sequence[str] | None = None,
        fields: Mapping[str, Any] | None = None,
        ids: IdRule = "row",
    ) -> None:
        if isinstance(sequence, str | bytes | Mapping) or not (
            hasattr(sequence, "__len__") and hasattr(sequence, "__getitem__")
        ):
            raise TypeError(
                f"a sequence of records is needed, not {type(sequence).__name__}: it must have "
                "__len__ and __getitem__; for a dict of arrays use loader.ArraySource"
            )
        self._sequence, self._len = sequence, len(sequence)
        if self._len < 1:
            raise ValueError("the sequence holds no record")
        self._entries = Entries()
        [first] = self._records(np.zeros(1, np.int64), lambda _: "row 0")
        self._entries = Entries.like(first, columns, ids)
        wanted = chosen_columns(first, columns, ids)
        known = check_fields(fields, wanted)
        self._fields = {name: known.get(name) or field_like(name, first[name]) for name in wanted}
        self._ids = make_row_ids(ids, self._len, first, self._column)

    def __len__(self) -> int:
        """How many records."""
        return self._len

    def __repr__(self) -> str:
        return f"SequenceSource({self._len} records; {field_list(self._fields)})"

    @property
    def fields(self) -> Mapping[str, Field]:
        """Each field's dtype and per-record shape."""
        return self._fields

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        return self._ids(rows)

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape].

        Raises:
          ValueError: a record cannot be read, is not like the first, or has an entry that this one has
            not; names the row.
        """

        def where(place: int) -> str:
            return f"row {rows[place]}"

        records = self._records(rows, where)
        return {name: gathered(name, field, records, where) for name, field in self._fields.items()}

    def fingerprint(self) -> Fingerprint:
        """Reads all records, and digests them."""
        return fingerprint(self)

    def _records(self, rows: npt.NDArray[np.int64], where: Where) -> list[Mapping[str, Any]]:
        numbers = rows.tolist()
        if hasattr(self._sequence, "__getitems__") and len(numbers) > 1:
            found = self._many(numbers)
            if len(found) != len(numbers):
                raise ValueError(f"the sequence gave {len(found)} records for {len(numbers)} rows")
        else:
            found = [self._record(number) for number in numbers]
        records = [_entries(record, where, place) for place, record in enumerate(found)]
        self._entries.check_all(records, where)
        return records

    def _many(self, rows: list[int]) -> list[Any]:
        try:
            return list(self._sequence.__getitems__(rows))
        except Exception as error:
            for row in rows:
                self._record(row)  # which raises, if the record alone is at fault
            raise ValueError(
                f"rows {', '.join(map(str, rows[:8]))}{', ...' if len(rows) > 8 else ''} cannot be read together, "
                f"though each alone can: {type(error).__name__}: {error}"
            ) from error

    def _record(self, row: int) -> Any:
        try:
            return self._sequence[row]
        except Exception as error:
            raise ValueError(
                f"row {row} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _column(self, name: str) -> Iterator[npt.NDArray[Any]]:
        for start in range(0, self._len, _COLUMN_ROWS):
            rows = np.arange(start, min(start + _COLUMN_ROWS, self._len), dtype=np.int64)
            where = functools.partial(_row_after, start)
            yield stacked(name, self._records(rows, where), where)


def _entries(record: Any, where: Where, place: int) -> Mapping[str, Any]:
    if isinstance(record, Mapping):
        return record
    if record is None or isinstance(record, list | tuple | set):
        raise ValueError(
            f"{where(place)} is {record!r:.80}, not a dict of arrays or an array: turn each record into one, "
            "by a function around the sequence"
        )
    return {"value": record}


def _row_after(start: int, place: int) -> str:
    return f"row {start + place}"
