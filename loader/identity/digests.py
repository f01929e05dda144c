"""The leaves of a fingerprint: a digest of each column over each chunk of records.

A leaf is the digest of its column's dtype, of its shape in the chunk, and of its bytes in C order.
No leaf needs another one: all cores compute them, and those of some rows can be computed anywhere,
at any time, and merged.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from numpy.lib import recfunctions

from loader.reading.threads import Crew, in_order

ID_COLUMN: Final = "id"
MARK_HEX: Final = 12  # 48 bits: a mark only places a difference that whole digests have shown

_SHARED_BYTES: Final = 1 << 20
_NARROW: Final = 64
#: x86's extended precision: bits of its mantissa, as NumPy counts them, and its bytes.
_EXTENDED_NMANT: Final = 63
_EXTENDED_BYTES: Final = 10

#: IDs, under `ID_COLUMN`, and all fields, of the rows from one to another.
Read = Callable[[int, int], Mapping[str, npt.NDArray[Any]]]

_Crew = Crew["Leaves"]

#: By name, each field's dtype, as text, and per-record shape.
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class ColumnLeaves:
    """A column's dtype, as text, its per-record shape, and its leaves: 32 bytes for each chunk."""

    dtype: str
    shape: tuple[int, ...]
    digests: bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The leaves of some of a data set's chunks, one after another.

    Attributes:
      start: the first row, where a chunk begins.
      stop: one past the last row, where a chunk ends; only a data set's last one may be shorter.
      chunk_records: records to a chunk.
      columns: by name, the leaves of the IDs (under ``"id"``) and of each field.
      marks: 12 hex digits for each chunk, over its leaves of all columns.
    """

    start: int
    stop: int
    chunk_records: int
    columns: Mapping[str, ColumnLeaves]
    marks: str

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        """The leaves of several parts, in any order, that are one stretch of rows together.

        Raises:
          ValueError: no part, rows that are in two parts or between them, or other columns or chunks
            in one part than in another.
        """
        ordered = sorted(parts, key=lambda part: part.start)
        if not ordered:
            raise ValueError("there are no leaves to merge")
        for before, after in itertools.pairwise(ordered):
            before._check_next(after)  # noqa: SLF001 (it is of this class)
        first, last = ordered[0], ordered[-1]
        columns = {
            name: ColumnLeaves(
                dtype=column.dtype,
                shape=column.shape,
                digests=b"".join(part.columns[name].digests for part in ordered),
            )
            for name, column in first.columns.items()
        }
        marks = "".join(part.marks for part in ordered)
        return cls(first.start, last.stop, first.chunk_records, columns, marks)

    def _check_next(self, other: Self) -> None:
        if self.chunk_records != other.chunk_records:
            raise ValueError(
                f"the chunks of {self._rows} have {self.chunk_records} records, those of "
                f"{other._rows} {other.chunk_records}; only leaves of the same chunks can be merged"
            )
        if self.stop != other.start or (self.stop - self.start) % self.chunk_records:
            raise ValueError(
                f"{other._rows} do not follow on {self._rows} where a chunk of "
                f"{self.chunk_records} records ends"
            )
        for name in {**self.columns, **other.columns}:
            mine, others = self.columns.get(name), other.columns.get(name)
            if (
                mine is None
                or others is None
                or (mine.dtype, mine.shape) != (others.dtype, others.shape)
            ):
                raise ValueError(
                    f"{name!r} is {mine or 'absent'} in {self._rows} and {others or 'absent'} in "
                    f"{other._rows}; it must be the same in all rows"
                )

    @property
    def _rows(self) -> str:
        return f"rows {self.start}-{self.stop - 1}"


def digest_rows(
    read: Read,
    start: int,
    stop: int,
    *,
    chunk_records: int,
    kinds: Kinds,
    piece_records: int,
    threads: int,
) -> Leaves:
    """Reads and digests some rows, on several threads.

    Args:
      read: reads some rows; called by several threads at once.
      start: the first row, where a chunk begins.
      stop: one past the last row, where a chunk or the data set ends.
      chunk_records: records to a chunk.
      kinds: the fields.
      piece_records: how many records a thread reads and holds at a time, at most.
      threads: how many threads; with 1 it is the calling thread alone.

    Returns:
      Their `Leaves`.

    Raises:
      ValueError: the IDs are integers in some rows and strings in others.
      Exception: any that ``read`` raises; if it fails at several pieces, that of the first.
    """
    span = max(1, piece_records // chunk_records) * chunk_records

    def add(low: int, high: int, columns: dict[str, _Column], records: int, crew: _Crew) -> None:
        arrays = read(low, high)
        columns[ID_COLUMN].check_ids(arrays[ID_COLUMN], f"rows {low}-{high - 1}")
        adding = [
            functools.partial(columns[name].add, array, records, chunk_records)
            for name, array in arrays.items()
        ]
        crew.share(adding, sum(array.nbytes >= _SHARED_BYTES for array in arrays.values()))

    def task(number: int, crew: _Crew) -> Leaves:
        first = start + number * span
        last = min(first + span, stop)
        columns = _columns(kinds)
        for low in range(first, last, piece_records):
            crew.check(number)
            add(low, min(low + piece_records, last), columns, last - first, crew)
        return _leaves(columns, first, last, chunk_records)

    if start == stop:
        return _leaves(_columns(kinds), start, stop, chunk_records)
    return Leaves.merge(in_order(task, -(-(stop - start) // span), threads))


def _columns(kinds: Kinds) -> "dict[str, _Column]":
    every = {ID_COLUMN: ("", ()), **kinds}  # the first piece tells what IDs are
    return {name: _Column(*kind) for name, kind in every.items()}


def _leaves(columns: "dict[str, _Column]", start: int, stop: int, chunk_records: int) -> Leaves:
    ordered = [columns[name].digests for name in sorted(columns)]
    marks = [
        hashlib.sha256(b"".join(chunk)).digest()[: MARK_HEX // 2]
        for chunk in zip(*ordered, strict=True)
    ]
    found = {
        name: ColumnLeaves(column.dtype, column.shape, b"".join(column.digests))
        for name, column in columns.items()
    }
    return Leaves(start, stop, chunk_records, found, b"".join(marks).hex())


class _Column:
    """The leaves of a column, as far as its records have come."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.digests: list[bytes] = []
        self._leaf, self._came = hashlib.sha256(), 0

    def check_ids(self, ids: npt.NDArray[Any], rows: str) -> None:
        """Checks that IDs are of the same kind as those before."""
        dtype = "str" if ids.dtype.kind == "U" else "int64"
        if self.dtype not in {"", dtype}:
            raise ValueError(f"the IDs of {rows} are {dtype}, those before {self.dtype}")
        self.dtype = dtype

    def add(self, array: npt.NDArray[Any], records: int, chunk_records: int) -> None:
        """Takes all of so many records in, in chunks, or some of them, if they are all of one chunk."""
        if len(array) < records:
            self._add_part(array, records)
            return
        data, borders = _bytes_of(array, [*range(0, records, chunk_records), records])
        head, rest = self._head(chunk_records), records % chunk_records
        leaves = [head.copy() for _ in range(records // chunk_records)]
        if rest:
            leaves.append(self._head(rest))
        parts = [data[low:high] for low, high in itertools.pairwise(borders)]
        # To digest is all that is done without Python's lock: a thread that had to wait for the lock
        # after each leaf would wait longer than a small leaf takes.
        collections.deque(map(type(head).update, leaves, parts), maxlen=0)
        self.digests += [leaf.digest() for leaf in leaves]

    def _add_part(self, array: npt.NDArray[Any], records: int) -> None:
        if self._came == 0:
            self._leaf = self._head(records)
        data, (low, high) = _bytes_of(array, [0, len(array)])
        self._leaf.update(data[low:high])
        self._came += len(array)
        if self._came == records:
            self.digests.append(self._leaf.digest())

    def _head(self, records: int) -> "hashlib._Hash":
        return hashlib.sha256((self.dtype + str((records, *self.shape))).encode())


def raw_bytes(array: npt.NDArray[Any]) -> Any:
    """An array's bytes in C order, without a copy where it is contiguous; padding as zeros."""
    if array.nbytes == 0:
        return b""
    return np.ascontiguousarray(without_padding(array)).reshape(-1).view(np.uint8).data


def without_padding(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array; where its elements have bytes that are part of no value, a copy with zeros there.

    What stands in these bytes is left by whatever was in memory before: of equal arrays it may differ.
    A `numpy.longdouble` has some (of its 16 bytes on x86, 10 hold a value), and so has a structured
    dtype with gaps between its fields.
    """
    unused = _padding(array.dtype)
    if unused is None or array.nbytes == 0:
        return array
    copy = np.array(array, order="C")
    copy.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)[:, unused] = 0
    return copy


@functools.cache
def _padding(dtype: np.dtype[Any]) -> npt.NDArray[np.intp] | None:
    """Places of an element's bytes that are part of no value, if there are any."""
    unused = np.flatnonzero(~_valued(dtype))
    return unused if unused.size else None


def _valued(dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Which of an element's bytes are part of a value."""
    if dtype.subdtype is not None:
        part, shape = dtype.subdtype
        return np.tile(_valued(part), math.prod(shape))
    if dtype.names is not None and dtype.fields is not None:
        valued = np.zeros(dtype.itemsize, np.bool_)
        for field, offset, *_ in (dtype.fields[name] for name in dtype.names):
            valued[offset : offset + field.itemsize] |= _valued(field)
        return valued
    valued = np.ones(dtype.itemsize, np.bool_)
    # By its type: one of the dtypes that other packages have made has the character of a clongdouble.
    numbers = {np.longdouble: 1, np.clongdouble: 2}.get(dtype.type, 0)
    if numbers and np.finfo(np.longdouble).nmant == _EXTENDED_NMANT:
        parts = valued.reshape(numbers, -1)
        if dtype.isnative == (sys.byteorder == "little"):
            parts[:, _EXTENDED_BYTES:] = False
        else:
            parts[:, :-_EXTENDED_BYTES] = False
    return valued


def _bytes_of(array: npt.NDArray[Any], rows: list[int]) -> tuple[Any, list[int]]:
    """A column's bytes, and where in them some of its rows begin.

    Strings are given as UTF-8, each after its length and a colon: the width NumPy stores them in
    is no part of what they say. Nor are the gaps of an aligned structured dtype, which a copy need
    not keep; what else of an element is part of no value is given as zeros.
    """
    if array.dtype.kind == "U":
        each = array.size // len(array)
        return _text_bytes(array.reshape(-1), [row * each for row in rows])
    if array.dtype.names is not None:
        array = recfunctions.repack_fields(array, recurse=True)
    size = array.nbytes // len(array)
    return raw_bytes(array), [row * size for row in rows]


def _text_bytes(texts: npt.NDArray[np.str_], places: list[int]) -> tuple[bytes, list[int]]:
    encoded = _ascii_bytes(texts)
    if encoded is not None:
        data, ends = encoded
        return data, ends[places].tolist()
    each = [f"{len(text)}:{text}" for text in texts.tolist()]
    parts = [
        "".join(each[low:high]).encode("utf-8", "surrogatepass")
        for low, high in itertools.pairwise(places)
    ]
    return b"".join(parts), [0, *itertools.accumulate(map(len, parts))]


def _ascii_bytes(texts: npt.NDArray[np.str_]) -> tuple[bytes, npt.NDArray[np.int64]] | None:
    """Each text after its length and a colon, and where they end; ``None`` if not all are short ASCII.

    Python makes an object of each text, which costs more than to digest it. Here each is a row of a
    table that has a place for each digit and character, and those that are not there are left out.
    """
    width = texts.itemsize // 4
    if not 0 < width <= _NARROW or not texts.dtype.isnative or texts.size == 0:
        return None
    codes = np.ascontiguousarray(texts).view(np.uint32).reshape(-1, width)
    if codes.max() >= 128:
        return None
    lengths = np.strings.str_len(texts)
    digits = len(str(width))
    table = np.empty((len(texts), digits + 1 + width), np.uint8)
    there = np.empty(table.shape, bool)
    for place in range(digits):
        power = 10 ** (digits - 1 - place)
        table[:, place] = ord("0") + lengths // power % 10
        there[:, place] = (lengths >= power) | (power == 1)
    table[:, digits] = ord(":")
    there[:, digits] = True
    table[:, digits + 1 :] = codes
    np.less(np.arange(width), lengths[:, np.newaxis], out=there[:, digits + 1 :])
    ends = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.count_nonzero(there, axis=1), out=ends[1:])
    return table[there].tobytes(), ends
