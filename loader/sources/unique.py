"""Whether many IDs are unique, at a bounded cost of memory.

IDs are read in blocks, as often as needed. If they rise, one pass shows it. Otherwise each has a key of
64 bits (an integer is its own, a string has a hash), and keys are sorted: as many at a time as half a GiB
holds, each pass a part of them that a mix of their bits selects. Equal keys are looked up and compared.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import ColumnDigest
from loader.identity.records import check_ids
from loader.progress import counted
from loader.sources.kept import encoded

#: Gives all IDs, in order, in arrays int64[k] or str[k], the same ones each time.
Blocks = Callable[[], Iterable[npt.NDArray[Any]]]

_KEY_BYTES: Final = 1 << 29
_LOOKED_UP: Final = 1 << 16
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: Knuth's multiplicative hash
_SHIFT: Final = np.uint64(32)


def scan_ids(
    blocks: Blocks,
    total: int,
    *,
    key_bytes: int = _KEY_BYTES,
    where: Callable[[int], str] | None = None,
) -> ColumnDigest:
    """Reads IDs, checks that each is one and that none comes twice, and digests them.

    Args:
      blocks: gives them.
      total: how many they must be.
      key_bytes: memory for keys.
      where: from a row to what an error says of its place, beside the row: the file that holds it, or
        ``""``.

    Returns:
      Their kind and digest.

    Raises:
      TypeError, ValueError: an ID is neither integer nor string, is -1 or "", or comes twice, or there
        are fewer or more; names the rows.
    """
    scan = _Scan()
    for block in counted(blocks(), "checking the IDs", total):
        scan.add(block)
    if scan.count != total:
        raise ValueError(f"there are {scan.count} IDs of {total} records")
    if not scan.rising:
        _check_unique(blocks, total, max(1, key_bytes // 8), where)
    return scan.column()


class _Scan:
    """What one pass over IDs tells."""

    def __init__(self) -> None:
        self.count, self.rising = 0, True
        self._kind = ""
        self._last: Any = None
        self._bytes, self._lengths = hashlib.sha256(), hashlib.sha256()

    def add(self, block: npt.NDArray[Any]) -> None:
        if not len(block):
            return
        check_ids(block, self.count)
        if self._kind not in ("", block.dtype.kind):
            raise TypeError(
                f"IDs are integers in some rows and strings in others, from row {self.count} on"
            )
        self._kind = block.dtype.kind
        self.count += len(block)
        if self.rising:
            self.rising = bool((block[1:] > block[:-1]).all()) and (
                self._last is None or bool(block[0] > self._last)
            )
            self._last = block[-1]
        if self._kind == "i":
            self._bytes.update(np.ascontiguousarray(block, "<i8").data)
        else:
            data, lengths = encoded(block)
            self._bytes.update(data.data)
            self._lengths.update(lengths.astype("<u4").data)

    def column(self) -> ColumnDigest:
        digest = hashlib.sha256(self._bytes.digest() + self._lengths.digest()).hexdigest()
        return ColumnDigest("int64" if self._kind == "i" else "str", (), "sha256:" + digest)


def _check_unique(
    blocks: Blocks, total: int, keys_at_once: int, where: Callable[[int], str] | None
) -> None:
    passes = -(-total // keys_at_once)
    for number in range(passes):
        twice = _equal_keys(blocks, total, passes, number)
        for start in range(0, len(twice), _LOOKED_UP):
            _compare(blocks, twice[start : start + _LOOKED_UP], where)


def _equal_keys(blocks: Blocks, total: int, passes: int, number: int) -> npt.NDArray[np.uint64]:
    """Keys that come more than once, rising, of those whose mixed bits fall to this pass."""
    room = total if passes == 1 else int(total / passes * 1.05) + 1000
    keys = np.empty(room, np.uint64)
    count = 0
    part = "" if passes == 1 else f", part {number + 1} of {passes}"
    for block in counted(blocks(), f"looking for IDs that come twice{part}", total):
        some = _keys(block)
        if passes > 1:
            some = some[((some * _ODD) >> _SHIFT) % np.uint64(passes) == number]
        fits = min(len(some), room - count)
        keys[count : count + fits] = some[:fits]
        count += fits
        if fits < len(some):
            break  # far more than its share: so many equal keys are there already
    keys = keys[:count]
    keys.sort()
    return _neighbours(keys)


def _neighbours(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Values that come more than once among sorted ones."""
    step = 1 << 22
    found = []
    for start in range(0, len(keys), step):
        some = keys[start : start + step + 1]
        found.append(np.unique(some[1:][some[1:] == some[:-1]]))
    return np.unique(np.concatenate(found)) if found else keys[:0]


def _compare(
    blocks: Blocks, keys: npt.NDArray[np.uint64], where: Callable[[int], str] | None
) -> None:
    """Raises if two of the IDs with one of these keys, which are sorted, are equal."""
    seen: dict[Any, int] = {}
    for row, value in _with_keys(blocks, keys):
        first = seen.setdefault(value, row)
        if first != row:
            places = "" if where is None else f" ({where(first)}; {where(row)})"
            places = "" if places == " (; )" else places
            raise ValueError(
                f"ID {value!r} belongs to rows {first} and {row}{places}; an ID must name one record, or "
                "nothing can tell what was seen"
            )


def _with_keys(blocks: Blocks, keys: npt.NDArray[np.uint64]) -> Iterator[tuple[int, Any]]:
    start = 0
    for block in blocks():
        found = _keys(block)
        places = np.searchsorted(keys, found).clip(max=len(keys) - 1)
        hits = np.flatnonzero(keys[places] == found)
        yield from zip((hits + start).tolist(), block[hits].tolist(), strict=True)
        start += len(block)


def _keys(ids: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A key of 64 bits for each ID: ``uint64[k]``. Equal IDs have equal ones, of whatever width."""
    if ids.dtype.kind == "i":
        return ids.view(np.uint64)
    points = np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), -1)
    keys = np.zeros(len(ids), np.uint64)
    weight = _ODD
    for place in range(points.shape[1]):
        keys += points[:, place] * weight
        weight = _mixed(weight)
    keys ^= keys >> _SHIFT
    return keys * _ODD


def _mixed(weight: np.uint64) -> np.uint64:
    """The next of a fixed sequence of odd numbers."""
    value = int(weight) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB
    return np.uint64(((value ^ (value >> 31)) & (2**64 - 1)) | 1)
