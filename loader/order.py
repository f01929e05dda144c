"""The order of an epoch: a permutation of rows, as a pure function of (shuffle, num_records, seed, epoch).

Any part of any epoch can be computed alone, without history.

There are three kinds, each with its own version in `ORDER_VERSIONS`:

- ``"feistel"``: a keyed Feistel network over row numbers, in our own 64-bit integer arithmetic.
  It needs constant memory at any size, has an inverse, and does not depend on any library.
- ``"permutation"``: NumPy's ``default_rng(SeedSequence([seed, epoch])).permutation(n)``; O(n) memory.
- ``"none"``: the order of the source.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import struct
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from numpy import add, minimum, multiply, right_shift, subtract

from loader.checks import integer
from loader.splitmix import GOLDEN, MIX_1, Words, mix, word

Shuffle = Literal["feistel", "permutation", "none"]
Rows = npt.NDArray[np.int64]

SHUFFLES: Final[tuple[str, ...]] = get_args(Shuffle)

ORDER_VERSIONS: Final[dict[str, int]] = {"feistel": 1, "permutation": 1, "none": 1}
"""The version of each kind of order, which manifests hold.

A change to the rows that an order returns needs a new number here, and the old order must stay readable.
"""

MAX_RECORDS: Final = 2**63
MAX_SEED: Final = 2**32 - 1
MAX_EPOCH: Final = 2**63 - 1

# A network over few records cannot reach every permutation, because its rounds hold too few choices.
# Up to this many records, "feistel" sorts the rows by a keyed 64-bit hash instead, which is an exact
# random permutation. The limit bounds its memory.
_EXACT_UP_TO: Final = 4096
_ROUNDS: Final = 8
_BLOCK: Final = 1 << 14
#: Starting a thread costs more than making a smaller permutation.
_AHEAD_FROM: Final = 1 << 16


def epoch_order(
    num_records: int,
    seed: int,
    epoch: int,
    shuffle: str = "feistel",
    start: int = 0,
    stop: int | None = None,
) -> Rows:
    """Return the rows at positions ``start`` to ``stop`` of an epoch.

    Args:
      num_records: records in the source, 1 to 2**63.
      seed: 0 to 2**32 - 1.
      epoch: counted from 0.
      shuffle: ``"feistel"``, ``"permutation"`` or ``"none"``.
      start: first position.
      stop: one past the last position; ``None`` is ``num_records``.

    Returns:
      int64[stop - start], each ``0 <= row < num_records``. Every row occurs once in an epoch.
      ``"feistel"`` and ``"none"`` cost time and memory only for the positions requested.
      ``"permutation"`` computes the whole epoch each time.

    Raises:
      TypeError, ValueError: an argument of the wrong type, or outside its range.
    """
    num_records, seed, epoch = _check_stream(num_records, seed, epoch, shuffle)
    stop = num_records if stop is None else integer("stop", stop)
    start = integer("start", start)
    if not 0 <= start <= stop <= num_records:
        raise ValueError(
            f"positions {start}:{stop} are not inside an epoch of {num_records} records; "
            f"give 0 <= start <= stop <= {num_records}"
        )
    if shuffle == "none":
        return _in_order(start, stop)
    if shuffle == "permutation":
        return _numpy_permutation(num_records, seed, epoch)[start:stop].copy()
    if num_records <= _EXACT_UP_TO:
        return _exact_permutation(num_records, seed, epoch)[start:stop].copy()
    network = _network(num_records, seed, epoch)
    if stop - start <= _BLOCK:
        return _walk(_forward, np.arange(start, stop, dtype=np.uint64), network)
    out = np.empty(stop - start, dtype=np.int64)
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        positions = np.arange(low, high, dtype=np.uint64)
        out[low - start : high - start] = _walk(_forward, positions, network)
    return out


def position_of(row: int, num_records: int, seed: int, epoch: int, shuffle: str = "feistel") -> int:
    """Return the position of a row in an epoch: the inverse of `epoch_order`.

    Args:
      row: 0 <= row < num_records.
      num_records: records in the source, 1 to 2**63.
      seed: 0 to 2**32 - 1.
      epoch: counted from 0.
      shuffle: ``"feistel"``, ``"permutation"`` or ``"none"``.

    Returns:
      The position, ``0 <= position < num_records``, in constant time except for ``"permutation"``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, or outside its range.
    """
    num_records, seed, epoch = _check_stream(num_records, seed, epoch, shuffle)
    row = integer("row", row)
    if not 0 <= row < num_records:
        raise ValueError(f"row {row} is not in a source of {num_records} records")
    if shuffle == "none":
        return row
    if shuffle == "permutation":
        return int(np.flatnonzero(_numpy_permutation(num_records, seed, epoch) == row)[0])
    if num_records <= _EXACT_UP_TO:
        return int(np.flatnonzero(_exact_permutation(num_records, seed, epoch) == row)[0])
    network = _network(num_records, seed, epoch)
    return int(_walk(_backward, np.array([row], np.uint64), network)[0])


class EpochOrder:
    """The orders of one stream, with a cache. Threads may share it.

    ``"feistel"`` computes and keeps a block of several batches at once, which costs less per batch. The
    block grows while batches follow each other; a single batch costs only itself. ``"permutation"``
    keeps the whole epoch in the smallest integer type, and a thread computes the next epoch during the
    second half of this one. The cache never changes a result.

    Args:
      num_records: as for `epoch_order`.
      seed: as for `epoch_order`.
      shuffle: as for `epoch_order`.
      num_epochs: number of epochs, or ``None`` for no end.
    """

    def __init__(
        self, num_records: int, seed: int, shuffle: str, num_epochs: int | None = None
    ) -> None:
        self._num_records, self._seed, _ = _check_stream(num_records, seed, 0, shuffle)
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        # Each is replaced as a whole, so that threads can read it without a lock.
        self._kept = _Kept(-1, 0, 0, np.empty(0, np.int64))
        self._ahead: _Ahead | None = None
        self._making = threading.Lock()

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Return a new int64[stop - start]: the rows at positions ``start`` to ``stop`` of ``epoch``."""
        if self._shuffle == "none":
            return _in_order(start, stop)
        kept_epoch, first, end, rows = self._kept
        if kept_epoch != epoch or start < first or stop > end:
            make = self._epoch if self._shuffle == "permutation" else self._block
            self._kept = _, first, _, rows = make(epoch, start, stop)
        elif self._shuffle == "permutation" and stop > self._num_records // 2:
            self._make_ahead(epoch + 1)
        part = rows[start - first : stop - first]
        return part.astype(np.int64) if self._shuffle == "permutation" else part.copy()

    def _block(self, epoch: int, start: int, stop: int) -> "_Kept":
        """Compute the rows requested, and some after them if requests follow each other."""
        kept, count = self._kept, max(stop - start, 1)
        if (epoch, start) == (kept.epoch + 1, 0) and kept.stop == self._num_records:
            length = _BLOCK
        elif epoch == kept.epoch and kept.start < start <= kept.stop:
            length = min(2 * len(kept.rows), _BLOCK)
        else:
            length = count
        until = min(start + max(length // count, 1) * count, self._num_records)
        rows = epoch_order(self._num_records, self._seed, epoch, self._shuffle, start, until)
        return _Kept(epoch, start, until, rows)

    def _epoch(self, epoch: int, _start: int, _stop: int) -> "_Kept":
        with self._making:  # each epoch is made once
            kept = self._kept
            if kept.epoch == epoch:
                return kept
            ahead, self._ahead = self._ahead, None
            rows = None if ahead is None or ahead.epoch != epoch else ahead.result()
            if rows is None:
                rows = self._small_permutation(epoch)
            return _Kept(epoch, 0, self._num_records, rows)

    def _make_ahead(self, epoch: int) -> None:
        if (
            self._ahead is not None
            or self._num_records < _AHEAD_FROM
            or (self._num_epochs is not None and epoch >= self._num_epochs)
        ):
            return
        with self._making:
            if self._ahead is None:
                self._ahead = _Ahead(epoch, self._small_permutation)

    def _small_permutation(self, epoch: int) -> npt.NDArray[Any]:
        rows = _numpy_permutation(self._num_records, self._seed, epoch)
        return rows.astype(np.min_scalar_type(self._num_records - 1), copy=False)


class _Kept(NamedTuple):
    """Rows at positions ``start`` to ``stop`` of an epoch."""

    epoch: int
    start: int
    stop: int
    rows: npt.NDArray[Any]


class _Ahead:
    """The order of an epoch, computed by a thread."""

    def __init__(self, epoch: int, make: Callable[[int], npt.NDArray[Any]]) -> None:
        self.epoch = epoch
        self._make = make
        self._rows: npt.NDArray[Any] | None = None
        # A daemon: it cannot be stopped, and the program's exit should not wait for it.
        self._thread = threading.Thread(target=self._run, name="regrain-order", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Without memory for two orders, the next one is computed when it is needed.
        with contextlib.suppress(MemoryError):
            self._rows = self._make(self.epoch)

    def result(self) -> npt.NDArray[Any] | None:
        """Return the order, or ``None`` if memory was short."""
        self._thread.join()
        return self._rows


def _in_order(start: int, stop: int) -> Rows:
    return (np.arange(stop - start, dtype=np.uint64) + np.uint64(start)).view(np.int64)


def _numpy_permutation(num_records: int, seed: int, epoch: int) -> Rows:
    generator = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    return generator.permutation(num_records)


@functools.lru_cache(maxsize=16)
def _exact_permutation(num_records: int, seed: int, epoch: int) -> Rows:
    (key,) = _keys(num_records, seed, epoch, 1)
    hashes = np.arange(1, num_records + 1, dtype=np.uint64) * GOLDEN + key
    mix(hashes)
    # No two rows tie: every step from row to hash is a bijection of 64-bit words.
    rows = np.argsort(hashes).astype(np.int64)
    rows.flags.writeable = False
    return rows


def _keys(num_records: int, seed: int, epoch: int, count: int) -> list[np.uint64]:
    """Return 64-bit round keys, hashed so that neighbouring seeds and epochs are unrelated."""
    message = struct.pack("<QQQQ", ORDER_VERSIONS["feistel"], num_records, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=8 * count, person=b"regrain.feistel").digest()
    return [np.uint64(word) for word in struct.unpack(f"<{count}Q", digest)]


@dataclasses.dataclass(frozen=True)
class _Network:
    """Shape and keys of a network that permutes ``0 <= left < a, 0 <= right < b`` with ``a * b >= limit``.

    All but ``limit`` are uint64[()], which NumPy handles in half the time of a scalar.
    """

    b: Words
    #: The key of each round, and the side of the half that it moves: a, b, a, b, ...
    rounds: tuple[tuple[Words, Words], ...]
    limit: int

    @classmethod
    def of(cls, a: int, b: int, keys: list[np.uint64], limit: int) -> "_Network":
        sides = word(a), word(b)
        rounds = tuple((word(key), sides[i % 2]) for i, key in enumerate(keys))
        return cls(sides[1], rounds, limit)


@functools.lru_cache(maxsize=64)
def _network(num_records: int, seed: int, epoch: int) -> _Network:
    """Return the network of an epoch.

    The sides are near the square root. They are chosen to leave few points beyond the last record,
    because `_walk` must step over these.
    """
    root = math.isqrt(num_records - 1) + 1
    a = min(range(root, root + 64), key=lambda side: -num_records % side)
    b = -(-num_records // a)
    return _Network.of(a, b, _keys(num_records, seed, epoch, _ROUNDS), num_records)


_W_32: Final = word(32)
_Step = Callable[[Words, _Network], Words]


def _walk(step: _Step, points: Words, network: _Network) -> Rows:
    """Apply a permutation of ``a * b`` points until each point is a record.

    Cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) turns a
    permutation of a slightly larger set into a permutation of the records.
    """
    if points.size == 0:
        return points.view(np.int64)
    points = step(points, network)
    # Usually no point lies beyond. Finding the largest is cheaper than comparing each.
    while points.max() >= network.limit:
        beyond = np.flatnonzero(points >= np.uint64(network.limit))
        points[beyond] = step(points[beyond], network)
    return points.view(np.int64)


def _forward(points: Words, network: _Network) -> Words:
    left, right = _split(points, network)
    left, right = _rounds(left, right, network.rounds, add, subtract)
    return _joined(left, right, network)


def _backward(points: Words, network: _Network) -> Words:
    left, right = _split(points, network)
    right, left = _rounds(right, left, network.rounds[::-1], subtract, add)
    return _joined(left, right, network)


def _split(points: Words, network: _Network) -> tuple[Words, Words]:
    left = points // network.b
    right = left * network.b
    return left, subtract(points, right, right)


def _joined(left: Words, right: Words, network: _Network) -> Words:
    multiply(left, network.b, left)
    return add(left, right, left)


def _rounds(
    left: Words,
    right: Words,
    rounds: tuple[tuple[Words, Words], ...],
    move: np.ufunc,
    correct: np.ufunc,
) -> tuple[Words, Words]:
    """Run the rounds: move the left half by a keyed hash of the right half, modulo its side, then swap.

    The hash is a middle square (the upper half of the low 64 bits of a square, as in Widynski,
    "Squares: a fast counter-based RNG", 2020). Lemire's multiply-shift reduces it below the side, which
    is at most 2**32 ("Fast random integer generation in an interval", ACM TOMACS 2019). The tests
    cannot distinguish eight rounds from NumPy's permutations; they can distinguish four. One bias
    remains by construction: if both sides are odd and their product is the number of records, the
    permutation is even.
    """
    out, mix, half = np.empty_like(left), MIX_1, _W_32
    # Nearly all the time for a batch goes into calling NumPy, hence the bare names and the output
    # arguments.
    for key, side in rounds:
        multiply(right, mix, out)
        add(out, key, out)
        multiply(out, out, out)
        right_shift(out, half, out)
        multiply(out, side, out)
        right_shift(out, half, out)
        move(left, out, left)
        correct(left, side, out)
        minimum(left, out, out=left)  # the other one has wrapped around
        left, right = right, left
    return left, right


def _check_stream(num_records: int, seed: int, epoch: int, shuffle: str) -> tuple[int, int, int]:
    num_records = integer("num_records", num_records, 1, MAX_RECORDS)
    seed, epoch = integer("seed", seed, 0, MAX_SEED), integer("epoch", epoch, 0, MAX_EPOCH)
    if shuffle not in SHUFFLES:
        raise ValueError(
            f"shuffle must be one of {', '.join(map(repr, SHUFFLES))}, not {shuffle!r}"
        )
    return num_records, seed, epoch
