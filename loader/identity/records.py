"""Read the IDs and fields of a source's records, and check them."""

import operator
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from loader.identity.digests import ID_COLUMN, Read

_INT64: Final = np.dtype(np.int64)
_BLOCK: Final = 1 << 14
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, of no pattern: 2**64 / the golden ratio

#: By name, the dtype and per-record shape of each field.
Specs = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class Field(Protocol):
    """A field's dtype and per-record shape."""

    @property
    def dtype(self) -> Any:
        """The dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's value."""


class HasIds(Protocol):
    """The part of a `RecordSource` that identifies its records."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        ...


class Readable(HasIds, Protocol):
    """The part of a `RecordSource` that a fingerprint uses."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields by name."""

    def read(self, rows: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the fields of some rows."""


class _Ranged(Readable, Protocol):
    """A `RecordSource` that also has the optional ``read_range``."""

    def read_range(self, start: int, stop: int, /) -> Mapping[str, npt.NDArray[Any]]: ...


class _Range:
    """The result of ``read_range``, as a source of these rows alone."""

    def __init__(self, source: _Ranged, start: int, stop: int) -> None:
        self.fields, self._len = source.fields, stop - start
        self._records = source.read_range(start, stop)
        if not isinstance(self._records, Mapping) or ID_COLUMN not in self._records:
            raise ValueError(
                "read_range must give a dict of arrays, the IDs under 'id' among them, not "
                f"{self._records!r:.80}"
            )

    def __len__(self) -> int:
        return self._len

    def ids(self, _rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        return self._records[ID_COLUMN]

    def read(self, _rows: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        return self._records


def dtype_and_shape(field: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and per-record shape of a field, which may also be a pair of them or a dtype.

    Raises:
      AttributeError, TypeError, ValueError: the field is something else.
    """
    if isinstance(field, np.dtype):
        field = (field, ())
    dtype, shape = field if isinstance(field, tuple) else (field.dtype, field.shape)
    return np.dtype(dtype), tuple(operator.index(side) for side in shape)


def read_ids(source: HasIds, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return a source's IDs of some rows: int64[k] or str[k].

    Raises:
      ValueError: the source gives something else.
    """
    if rows.size == 0:  # the dtype needs at least one ID
        return read_ids(source, np.zeros(1, np.int64))[:0]
    ids = np.asarray(source.ids(rows))
    if ids.dtype == _INT64 and ids.shape == rows.shape:
        return ids
    if ids.dtype.kind in "iu" and ids.dtype.itemsize < 8:
        ids = ids.astype(np.int64)
    elif ids.dtype.kind == "O" and all(isinstance(name, str) for name in ids.flat):
        ids = ids.astype(np.str_)
    if ids.shape != rows.shape or (ids.dtype.kind != "U" and ids.dtype != np.int64):
        raise ValueError(
            f"the source gave {ids.dtype}{list(ids.shape)} as the IDs of {len(rows)} rows; it must "
            f"give int64[{len(rows)}] or strings"
        )
    return ids


def read_fields(
    source: Readable, rows: npt.NDArray[np.int64], specs: Specs
) -> dict[str, npt.NDArray[Any]]:
    """Return a source's fields of some rows: for each an array dtype[k, *shape].

    Raises:
      ValueError: the source gives something else than its ``fields``; names the field.
    """
    given = source.read(rows)
    # This runs once a batch, so the usual case, a dict of arrays, must be fast.
    if type(given) is not dict and not isinstance(given, Mapping):
        raise ValueError(f"the source must read as a dict of arrays, not {type(given).__name__}")
    arrays = {}
    length = rows.shape
    for name, (dtype, shape) in specs.items():
        if name not in given:
            absent = ", ".join(repr(name) for name in specs if name not in given)
            raise ValueError(f"the source did not read {absent}, of its fields")
        arrays[name] = array = np.asarray(given[name])
        if array.dtype != dtype or array.shape != length + shape:
            raise ValueError(
                f"field {name!r} reads as {array.dtype}{list(array.shape)} for {len(rows)} rows, "
                f"but the source's fields say {dtype}{[len(rows), *shape]}"
            )
    return arrays


def check_ids(ids: npt.NDArray[Any], first_row: int = 0) -> None:
    """Check that IDs are int64[n] or str[n], and that none is the ID of padding.

    Raises:
      TypeError, ValueError: they are not; names the row.
    """
    if ids.ndim != 1 or (ids.dtype.kind != "U" and ids.dtype != np.int64):
        raise TypeError(f"IDs must be int64[n] or str[n], not {ids.dtype}{list(ids.shape)}")
    padding: Any = "" if ids.dtype.kind == "U" else -1
    taken = ids == padding
    if taken.any():
        raise ValueError(
            f"row {first_row + int(taken.argmax())} has the ID {padding!r}, which marks an empty slot of a "
            "padded batch; give the record another ID"
        )


def check_unique(ids: npt.NDArray[Any]) -> None:
    """Check that no ID occurs twice.

    Raises:
      ValueError: one does; names it and two of its rows.
    """
    if (ids[1:] > ids[:-1]).all():
        return
    numbers = np.sort(_numbers(ids))
    if (numbers[1:] != numbers[:-1]).all():
        return
    by_id = np.argsort(ids, kind="stable")  # many times slower, and needed only for the message
    twice = np.flatnonzero(ids[by_id[1:]] == ids[by_id[:-1]])
    if not twice.size:
        return  # two texts had the same number by chance
    first, second = by_id[twice[0]], by_id[twice[0] + 1]
    raise ValueError(
        f"ID {ids[first].item()!r} belongs to rows {first} and {second} ({twice.size} such pairs); an "
        "ID must name one record"
    )


def _numbers(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an integer for each ID: for text a 64-bit hash, so two texts may rarely have the same."""
    if ids.dtype.kind != "U" or ids.itemsize == 0:
        return ids
    codes = np.ascontiguousarray(ids, ids.dtype.newbyteorder("=")).view(np.uint32)
    codes = codes.reshape(len(ids), -1)
    numbers = np.zeros(len(ids), np.uint64)
    for low in range(0, len(ids), _BLOCK):
        some = numbers[low : low + _BLOCK]
        for column in codes[low : low + _BLOCK].T:
            some *= _MULTIPLIER
            some += column
    return numbers


def reader_of(source: Readable, specs: Specs, piece_records: int) -> Read:
    """Return a function that reads and checks the rows from one to another."""
    ranged = cast("_Ranged", source) if has_ranges(source) else None
    as_many = np.zeros(piece_records, np.int64)  # `_Range` needs only their number

    def read(start: int, stop: int) -> Mapping[str, npt.NDArray[Any]]:
        if ranged is None:
            of, rows = source, np.arange(start, stop, dtype=np.int64)
        else:
            of, rows = _Range(ranged, start, stop), as_many[: stop - start]
        ids = read_ids(of, rows)
        check_ids(ids, start)
        return {**read_fields(of, rows, specs), ID_COLUMN: ids}

    return read


def has_ranges(source: Readable) -> bool:
    """Return whether a source's ``read_range`` belongs to the same class as its ``read`` and ``ids``.

    A class that inherits ``read_range`` and overrides the others reads something else.
    """
    for of in type(source).__mro__:
        if not vars(of).keys().isdisjoint({"read_range", "read", "ids"}):
            return "read_range" in vars(of)
    return False
