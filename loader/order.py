"""The order of an epoch: a permutation of rows, as a pure function of (shuffle, num_records, seed, epoch).

Nothing here has a state that matters, so any stretch of any epoch can be asked for at once, in any
order, by anyone: the pipeline that serves it, the resume that checks it, the person who audits it.

Three kinds, each with a version of its own in `ORDER_VERSIONS`:

- ``"feistel"``: a keyed Feistel network over row numbers, in 64-bit integer arithmetic of our own.
  Constant memory at any size, invertible, and no library upgrade can move it.
- ``"permutation"``: NumPy's ``default_rng(SeedSequence([seed, epoch])).permutation(n)``; O(n) memory.
- ``"none"``: the order of the source.
"""

import functools
import hashlib
import math
import operator
import struct
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

Shuffle = Literal["feistel", "permutation", "none"]
Rows = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

SHUFFLES: Final[tuple[str, ...]] = get_args(Shuffle)

#: Changing what an order returns means a new number here, with the old one kept readable.
ORDER_VERSIONS: Final[dict[str, int]] = {"feistel": 1, "permutation": 1, "none": 1}

MAX_RECORDS: Final = 2**63
MAX_SEED: Final = 2**32 - 1
MAX_EPOCH: Final = 2**63 - 1

# Over few records a network cannot reach every permutation (its rounds hold too few choices), so up
# to this many the "feistel" order is an exact random permutation: the rows sorted by a keyed 64-bit
# hash. The constant bounds its memory.
_EXACT_UP_TO: Final = 4096
_ROUNDS: Final = 8
_BLOCK: Final = 1 << 14

# The odd multipliers of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", OOPSLA 2014; constants of Stafford's mix 13) and its golden-ratio increment.
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_U27, _U30, _U31, _U32 = (np.uint64(bits) for bits in (27, 30, 31, 32))


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
    out = np.empty(stop - start, dtype=np.int64)
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        positions = np.arange(low, high, dtype=np.uint64)
        out[low - start : high - start] = _walk(_forward, positions, num_records, seed, epoch)
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
    return int(_walk(_backward, np.array([row], np.uint64), num_records, seed, epoch)[0])


class EpochOrder:
    """The orders of one stream, with the stretch last used kept at hand.

    Batches are small and come one after the other, so rows are made in blocks: a block costs a
    fraction of what its batches would cost singly. What is kept never changes an answer.
    """

    def __init__(self, num_records: int, seed: int, shuffle: str) -> None:
        self._num_records, self._seed, _ = _check_stream(num_records, seed, 0, shuffle)
        self._shuffle = shuffle
        # (epoch, start, rows), replaced as a whole: threads may share it without a lock.
        self._kept: tuple[int, int, npt.NDArray[Any]] = (-1, 0, np.empty(0, np.int64))

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Rows at positions ``start`` to ``stop`` of ``epoch``: int64[stop - start]."""
        if self._shuffle == "none":
            return _in_order(start, stop)
        kept_epoch, kept_start, kept = self._kept
        if kept_epoch != epoch or start < kept_start or stop > kept_start + len(kept):
            if self._shuffle == "permutation":
                kept_start, whole = 0, _numpy_permutation(self._num_records, self._seed, epoch)
                kept = whole.astype(np.min_scalar_type(self._num_records - 1), copy=False)
            else:
                kept_start = start
                until = min(max(stop, start + _BLOCK), self._num_records)
                kept = epoch_order(
                    self._num_records, self._seed, epoch, self._shuffle, start, until
                )
            self._kept = (epoch, kept_start, kept)
        return kept[start - kept_start : stop - kept_start].astype(np.int64)


def _in_order(start: int, stop: int) -> Rows:
    return (np.arange(stop - start, dtype=np.uint64) + np.uint64(start)).view(np.int64)


def _numpy_permutation(num_records: int, seed: int, epoch: int) -> Rows:
    generator = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    return generator.permutation(num_records)


@functools.lru_cache(maxsize=16)
def _exact_permutation(num_records: int, seed: int, epoch: int) -> Rows:
    (key,) = _keys(num_records, seed, epoch, 1)
    hashes = _mix(np.arange(1, num_records + 1, dtype=np.uint64) * _GOLDEN + key)
    # No two rows tie: each step from row to hash is a bijection of 64-bit words.
    rows = np.argsort(hashes).astype(np.int64)
    rows.flags.writeable = False
    return rows


def _mix(words: _Words) -> _Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every output bit depends on every input bit."""
    words = (words ^ (words >> _U30)) * _MIX_1
    words = (words ^ (words >> _U27)) * _MIX_2
    return words ^ (words >> _U31)


def _keys(num_records: int, seed: int, epoch: int, count: int) -> list[np.uint64]:
    """64-bit round keys. Hashed, so that neighbouring seeds and epochs have nothing in common."""
    message = struct.pack("<QQQQ", ORDER_VERSIONS["feistel"], num_records, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=8 * count, person=b"regrain.feistel").digest()
    return [np.uint64(word) for word in struct.unpack(f"<{count}Q", digest)]


@functools.lru_cache(maxsize=64)
def _network(num_records: int, seed: int, epoch: int) -> tuple[int, int, tuple[np.uint64, ...]]:
    """Shape and keys of the network: it permutes ``0 <= left < a, 0 <= right < b`` with ``a * b >= n``.

    The sides are near the square root, chosen so that few points lie beyond the last record: those
    have to be walked over (see `_walk`).
    """
    root = math.isqrt(num_records - 1) + 1
    a = min(range(root, root + 64), key=lambda side: -num_records % side)
    b = -(-num_records // a)
    return a, b, tuple(_keys(num_records, seed, epoch, _ROUNDS))


def _walk(step: Any, points: _Words, num_records: int, seed: int, epoch: int) -> Rows:
    """Applies a permutation of ``a * b`` points until each is a record.

    Cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) makes a
    permutation of the records out of a permutation of a slightly larger set.
    """
    network = _network(num_records, seed, epoch)
    limit = np.uint64(num_records)
    points = step(points, network)
    beyond = np.flatnonzero(points >= limit)
    while beyond.size:
        points[beyond] = step(points[beyond], network)
        beyond = beyond[points[beyond] >= limit]
    return points.view(np.int64)


def _round(words: _Words, key: np.uint64, side: np.uint64) -> _Words:
    """A keyed hash of each word into ``0 <= result < side``, for ``side <= 2**32``.

    A middle square (the upper half of the low 64 bits of a square, as in Widynski, "Squares: a fast
    counter-based RNG", 2020), then Lemire's multiply-shift in place of a remainder ("Fast random
    integer generation in an interval", ACM TOMACS 2019). Over as many records as a network is used
    for, the tests cannot tell eight rounds of it from NumPy's permutations; they can tell four. One
    trait is left by construction: where both sides are odd and their product is the number of
    records, the permutation is even.
    """
    words = words * _MIX_1
    words += key
    words *= words
    words >>= _U32
    words *= side
    words >>= _U32
    return words


def _forward(points: _Words, network: tuple[int, int, tuple[np.uint64, ...]]) -> _Words:
    a, b, keys = np.uint64(network[0]), np.uint64(network[1]), network[2]
    left = points // b
    right = points - left * b
    for i in range(0, _ROUNDS, 2):
        left += _round(right, keys[i], a)
        left = np.minimum(left, left - a)  # modulo a: below a, the difference wraps to far above
        right += _round(left, keys[i + 1], b)
        right = np.minimum(right, right - b)
    left *= b
    left += right
    return left


def _backward(points: _Words, network: tuple[int, int, tuple[np.uint64, ...]]) -> _Words:
    a, b, keys = np.uint64(network[0]), np.uint64(network[1]), network[2]
    left = points // b
    right = points - left * b
    for i in range(_ROUNDS - 2, -2, -2):
        right -= _round(left, keys[i + 1], b)
        right = np.minimum(right, right + b)
        left -= _round(right, keys[i], a)
        left = np.minimum(left, left + a)
    left *= b
    left += right
    return left


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
