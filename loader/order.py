"""The order of an epoch: a permutation of rows, as a pure function of (shuffle, num_records, seed, epoch).

Nothing here has a state that matters, so any stretch of any epoch can be asked for at once, in any
order, by anyone: the pipeline that serves it, the resume that checks it, the person who audits it.

Three kinds, each with a version of its own in `ORDER_VERSIONS`:

- ``"feistel"``: a keyed Feistel network over row numbers, in 64-bit integer arithmetic of our own.
  Constant memory at any size, invertible, and no library upgrade can move it.
- ``"permutation"``: NumPy's ``default_rng(SeedSequence([seed, epoch])).permutation(n)``; O(n) memory.
- ``"none"``: the order of the source.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import operator
import struct
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from numpy import add, minimum, multiply, right_shift, subtract

from loader.splitmix import GOLDEN, MIX_1, Words, mix, word

Shuffle = Literal["feistel", "permutation", "none"]
Rows = npt.NDArray[np.int64]

SHUFFLES: Final[tuple[str, ...]] = get_args(Shuffle)

ORDER_VERSIONS: Final[dict[str, int]] = {"feistel": 1, "permutation": 1, "none": 1}
"""The version of each kind of order, which manifests hold.

Changing what an order returns means a new number here, with the old one kept readable.
"""

MAX_RECORDS: Final = 2**63
MAX_SEED: Final = 2**32 - 1
MAX_EPOCH: Final = 2**63 - 1

# Over few records a network cannot reach every permutation (its rounds hold too few choices), so up
# to this many the "feistel" order is an exact random permutation: the rows sorted by a keyed 64-bit
# hash. The constant bounds its memory.
_EXACT_UP_TO: Final = 4096
_ROUNDS: Final = 8
_BLOCK: Final = 1 << 14
#: Smaller permutations are made in less time than a thread would save.
_AHEAD_FROM: Final = 1 << 16


def epoch_order(
    num_records: int,
    seed: int,
    epoch: int,
    shuffle: str = "feistel",
    start: int = 0,
    stop: int | None = None,
) -> Rows:
    """Rows at positions ``start`` to ``stop`` of an epoch.

    Args:
      num_records: records in the source, 1 to 2**63.
      seed: 0 to 2**32 - 1.
      epoch: counted from 0.
      shuffle: ``"feistel"``, ``"permutation"`` or ``"none"``.
      start: first position.
      stop: one past the last position; ``None`` is ``num_records``.

    Returns:
      int64[stop - start], each ``0 <= row < num_records``. Over all positions every row comes once.
      ``"feistel"`` and ``"none"`` cost time and memory for the positions asked for only;
      ``"permutation"`` makes the whole epoch each time.

    Raises:
      TypeError, ValueError: an argument of the wrong type, or outside its range.
    """
    num_records, seed, epoch = _check_stream(num_records, seed, epoch, shuffle)
    stop = num_records if stop is None else _integer("stop", stop)
    start = _integer("start", start)
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
    """Position in an epoch at which a row comes: the inverse of `epoch_order`.

    Args:
      row: 0 <= row < num_records.
      num_records: records in the source, 1 to 2**63.
      seed: 0 to 2**32 - 1.
      epoch: counted from 0.
      shuffle: ``"feistel"``, ``"permutation"`` or ``"none"``.

    Returns:
      The position, ``0 <= position < num_records``. Constant time, but for ``"permutation"``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, or outside its range.
    """
    num_records, seed, epoch = _check_stream(num_records, seed, epoch, shuffle)
    row = _integer("row", row)
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
    """The orders of one stream, with what was used last kept at hand. Threads may share it.

    Batches are small and come one after the other. So ``"feistel"`` is made in blocks, which cost a
    fraction of what their batches would cost singly; they grow as batches follow each other, and a
    batch asked for on its own costs itself alone. ``"permutation"`` is kept whole, in the smallest
    integer type that holds it, and once the second half of an epoch is being served, a thread that
    ends by itself makes the next one. What is kept never changes an answer.

    Args:
      num_records: as for `epoch_order`.
      seed: as for `epoch_order`.
      shuffle: as for `epoch_order`.
      num_epochs: epochs that will be asked for; ``None`` is without end.
    """

    def __init__(
        self, num_records: int, seed: int, shuffle: str, num_epochs: int | None = None
    ) -> None:
        self._num_records, self._seed, _ = _check_stream(num_records, seed, 0, shuffle)
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        # Both are replaced as a whole, so that threads need no lock to read them.
        self._kept = _Kept(-1, 0, 0, np.empty(0, np.int64))
        self._ahead: _Ahead | None = None
        self._making = threading.Lock()

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Rows at positions ``start`` to ``stop`` of ``epoch``: int64[stop - start], the caller's own."""
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
        """The rows asked for, and more behind them if the last ones were asked for right before."""
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
        with self._making:  # so that each is made once
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
    """The order of an epoch, being made by a thread of its own, which ends with it."""

    def __init__(self, epoch: int, make: Callable[[int], npt.NDArray[Any]]) -> None:
        self.epoch = epoch
        self._make = make
        self._rows: npt.NDArray[Any] | None = None
        # A daemon, since it cannot be stopped and a program that ends should not wait for it.
        self._thread = threading.Thread(target=self._run, name="regrain-order", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Without memory for two orders, the next one is made when it is needed.
        with contextlib.suppress(MemoryError):
            self._rows = self._make(self.epoch)

    def result(self) -> npt.NDArray[Any] | None:
        """The order, or ``None`` where there was no memory to make it ahead."""
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
    # No two rows tie: each step from row to hash is a bijection of 64-bit words.
    rows = np.argsort(hashes).astype(np.int64)
    rows.flags.writeable = False
    return rows


def _keys(num_records: int, seed: int, epoch: int, count: int) -> list[np.uint64]:
    """64-bit round keys. Hashed, so that neighbouring seeds and epochs have nothing in common."""
    message = struct.pack("<QQQQ", ORDER_VERSIONS["feistel"], num_records, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=8 * count, person=b"regrain.feistel").digest()
    return [np.uint64(word) for word in struct.unpack(f"<{count}Q", digest)]


@dataclasses.dataclass(frozen=True)
class _Network:
    """Shape and keys of a network that permutes ``0 <= left < a, 0 <= right < b`` with ``a * b >= limit``.

    All but ``limit`` are uint64[()]: as an operand, an array without axes costs NumPy half of what a
    scalar does.
    """

    b: Words
    #: Of each round the key, and the side of the half that it moves: a, b, a, b, ...
    rounds: tuple[tuple[Words, Words], ...]
    limit: int

    @classmethod
    def of(cls, a: int, b: int, keys: list[np.uint64], limit: int) -> "_Network":
        sides = word(a), word(b)
        rounds = tuple((word(key), sides[i % 2]) for i, key in enumerate(keys))
        return cls(sides[1], rounds, limit)


@functools.lru_cache(maxsize=64)
def _network(num_records: int, seed: int, epoch: int) -> _Network:
    """The network of an epoch.

    The sides are near the square root, chosen so that few points lie beyond the last record: those
    have to be walked over (see `_walk`).
    """
    root = math.isqrt(num_records - 1) + 1
    a = min(range(root, root + 64), key=lambda side: -num_records % side)
    b = -(-num_records // a)
    return _Network.of(a, b, _keys(num_records, seed, epoch, _ROUNDS), num_records)


_W_32: Final = word(32)
_Step = Callable[[Words, _Network], Words]


def _walk(step: _Step, points: Words, network: _Network) -> Rows:
    """Applies a permutation of ``a * b`` points until each is a record.

    Cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) makes a
    permutation of the records out of a permutation of a slightly larger set.
    """
    if points.size == 0:
        return points.view(np.int64)
    points = step(points, network)
    # As a rule no point is beyond: the largest tells so at less cost than a comparison of each.
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
    """Moves the left half by a keyed hash of the right one, modulo its side, then swaps them; and so on.

    The hash is a middle square (the upper half of the low 64 bits of a square, as in Widynski,
    "Squares: a fast counter-based RNG", 2020), put below the side, which is at most 2**32, by
    Lemire's multiply-shift in place of a remainder ("Fast random integer generation in an interval",
    ACM TOMACS 2019). Over as many records as a network is used for, the tests cannot tell eight
    rounds of it from NumPy's permutations; they can tell four. One trait is left by construction:
    where both sides are odd and their product is the number of records, the permutation is even.
    """
    out, mix, half = np.empty_like(left), MIX_1, _W_32
    # For a batch, nearly all time goes into calling NumPy: hence bare names, and outputs as third
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
        minimum(left, out, out=left)  # the one of both that has not wrapped to far above
        left, right = right, left
    return left, right


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, not {value!r} of type {type(value).__name__}"
        ) from None


def _check_stream(num_records: int, seed: int, epoch: int, shuffle: str) -> tuple[int, int, int]:
    num_records = _integer("num_records", num_records)
    seed = _integer("seed", seed)
    epoch = _integer("epoch", epoch)
    if not 1 <= num_records <= MAX_RECORDS:
        raise ValueError(f"num_records must be 1 to 2**63, not {num_records}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be 0 to 2**32 - 1, not {seed}")
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"epoch must be 0 to 2**63 - 1, not {epoch}")
    if shuffle not in SHUFFLES:
        raise ValueError(
            f"shuffle must be one of {', '.join(map(repr, SHUFFLES))}, not {shuffle!r}"
        )
    return num_records, seed, epoch
