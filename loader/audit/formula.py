"""The orders once more: derived in blocks, and a sample of them by a slow formula in plain integers.

`DerivedOrder` takes an epoch's rows from `loader.order`, as any stream does. So that a fault in that
vectorised code does not go unseen, positions of each epoch are derived a second time by `by_formula`,
one record at a time, in Python's integers, from what `loader.order` says of itself.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.order import Rows, epoch_order, position_of

#: Positions of an epoch that are derived a second time: all of them up to here, a sample beyond.
SAMPLED_POSITIONS: Final = 256

MASK: Final = 2**64 - 1
_EXACT_UP_TO: Final = 4096
_MIX_1, _MIX_2, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


def by_formula(
    num_records: int, seed: int, epoch: int, shuffle: str, positions: Sequence[int]
) -> list[int]:
    """Rows at some positions of an epoch, in plain integers.

    Args:
      num_records: records in the source.
      seed: of the shuffle.
      epoch: counted from 0.
      shuffle: ``"feistel"``, ``"permutation"`` (NumPy's own formula) or ``"none"``.
      positions: each ``0 <= position < num_records``.

    Returns:
      One row for each position.
    """
    if shuffle == "none":
        return list(positions)
    if shuffle == "permutation":
        generator = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
        whole = generator.permutation(num_records)
        return [int(whole[position]) for position in positions]
    if num_records <= _EXACT_UP_TO:
        (key,) = _keys(num_records, seed, epoch, 1)
        order = sorted(range(num_records), key=lambda row: mix((row + 1) * GOLDEN + key & MASK))
        return [order[position] for position in positions]
    keys = _keys(num_records, seed, epoch, 8)
    root = math.isqrt(num_records - 1) + 1
    waste = {side: -num_records % side for side in range(root, root + 64)}
    a = min(side for side in waste if waste[side] == min(waste.values()))
    b = -(-num_records // a)
    return [_network(position, num_records, a, b, keys) for position in positions]


def _network(point: int, num_records: int, a: int, b: int, keys: Sequence[int]) -> int:
    while True:
        left, right = divmod(point, b)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + _round(right, even, a)) % a
            right = (right + _round(left, odd, b)) % b
        point = left * b + right
        if point < num_records:
            return point


def _round(word: int, key: int, side: int) -> int:
    word = word * _MIX_1 + key & MASK
    return ((word * word & MASK) >> 32) * side >> 32


def mix(word: int, flipped: int = 0) -> int:
    """SplitMix64's finaliser of a 64-bit word, with some bits flipped between its halves."""
    word = (word ^ word >> 30) * _MIX_1 & MASK
    word = (word ^ word >> 27 ^ flipped) * _MIX_2 & MASK
    return word ^ word >> 31


def _keys(num_records: int, seed: int, epoch: int, count: int) -> tuple[int, ...]:
    message = struct.pack("<QQQQ", 1, num_records, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=8 * count, person=b"regrain.feistel").digest()
    return struct.unpack(f"<{count}Q", digest)


class DerivedOrder:
    """The orders of a stream, each checked at sampled positions when rows are taken from it.

    Attributes:
      checked: positions that have been derived twice.
      faults: (epoch, position, row, row by the formula) where the two differ.
    """

    KEPT_FAULTS: Final = 1024
    _HEAD: Final = 1 << 16

    def __init__(self, num_records: int, seed: int, shuffle: str) -> None:
        self._stream = (num_records, seed)
        self._shuffle = shuffle
        self.checked = 0
        self.fault_count = 0
        self.faults: list[tuple[int, int, int, int]] = []
        # Of a few epochs: sampled positions that are still to check, and the rows there.
        self._pending: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        # Of one epoch, where an order can be had as a whole only.
        self._whole: tuple[int, npt.NDArray[Any]] = (-1, np.empty(0, np.int64))
        self._inverse: tuple[int, npt.NDArray[Any]] = (-1, np.empty(0, np.int64))
        self._heads: dict[int, npt.NDArray[Any]] = {}

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Rows at positions ``start`` to ``stop`` of ``epoch``: int64[stop - start]."""
        if epoch not in self._pending:
            self._sample(epoch)
        if self._shuffle == "permutation":
            rows = self._of_permutation(epoch, start, stop)
        else:
            num_records, seed = self._stream
            rows = epoch_order(num_records, seed, epoch, self._shuffle, start, stop)
        positions, expected = self._pending[epoch]
        low, high = np.searchsorted(positions, [start, stop])
        if low < high:
            found = rows[positions[low:high] - start]
            for at in np.flatnonzero(found != expected[low:high]).tolist():
                self.fault_count += 1
                if len(self.faults) < self.KEPT_FAULTS:
                    position, row = int(positions[low + at]), int(expected[low + at])
                    self.faults.append((epoch, position, int(found[at]), row))
            self.checked += int(high - low)
            rest = np.r_[: int(low), int(high) : len(positions)]
            self._pending[epoch] = positions[rest], expected[rest]
        return rows

    def position(self, row: int, epoch: int) -> int:
        """Position of a row in an epoch."""
        num_records, seed = self._stream
        if self._shuffle != "permutation":
            return position_of(row, num_records, seed, epoch, self._shuffle)
        if self._inverse[0] != epoch:
            order = self._permutation(epoch)
            inverse = np.empty_like(order)
            inverse[order] = np.arange(num_records, dtype=order.dtype)
            self._inverse = epoch, inverse
        return int(self._inverse[1][row])

    def _of_permutation(self, epoch: int, start: int, stop: int) -> Rows:
        """Rows of an epoch that can be had as a whole only.

        Faulty streams are compared with the start of the next epoch again and again, so that is kept.
        """
        if epoch == self._whole[0] or start > 0 or stop > self._HEAD:
            return self._permutation(epoch)[start:stop].astype(np.int64)
        if epoch not in self._heads:
            num_records, seed = self._stream
            whole = epoch_order(num_records, seed, epoch, self._shuffle)
            self._heads = {epoch: whole[: self._HEAD].copy()}
        return self._heads[epoch][start:stop]

    def _permutation(self, epoch: int) -> npt.NDArray[Any]:
        if self._whole[0] != epoch:
            num_records, seed = self._stream
            self._whole = self._inverse = -1, np.empty(0, np.int64)
            whole = epoch_order(num_records, seed, epoch, self._shuffle)
            small = np.min_scalar_type(num_records - 1)
            self._whole = epoch, whole.astype(small, copy=False)
        return self._whole[1]

    def _sample(self, epoch: int) -> None:
        num_records, seed = self._stream
        if num_records <= max(SAMPLED_POSITIONS, _EXACT_UP_TO):
            positions = np.arange(num_records)
        else:
            generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
            drawn = generator.integers(num_records, size=SAMPLED_POSITIONS - 2, dtype=np.uint64)
            ends = np.array([0, num_records - 1], np.uint64)
            positions = np.unique(np.concatenate([drawn, ends])).astype(np.int64)
        expected = by_formula(num_records, seed, epoch, self._shuffle, positions.tolist())
        while len(self._pending) > 2:
            del self._pending[min(self._pending)]
        self._pending[epoch] = positions, np.array(expected, np.int64)
