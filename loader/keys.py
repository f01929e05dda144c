"""Random numbers of a record: a pure function of (seed, epoch, record ID).

Whoever asks for them, in whatever batch, process or order, gets the same ones, so an augmentation that
draws from them comes out the same wherever a run was stopped. All of it is integer arithmetic of our
own, which no library upgrade can move, but for the distributions of `rng`, which are NumPy's.

- `record_keys`: 64 bits a record, in the form in which `jax.random.wrap_key_data` takes them.
- `uniforms`: numbers in [0, 1) for a whole batch of such keys, at once.
- `rng`: a NumPy generator for one such key.
"""

import functools
import hashlib
import operator
import struct
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy import add, multiply, right_shift

from loader.config import PipelineConfig
from loader.order import MAX_EPOCH, MAX_SEED
from loader.splitmix import GOLDEN, Words, mix, word

Keys = npt.NDArray[np.uint32]

#: Changing what `record_keys` returns means a new number here.
KEYS_VERSION: Final = 1

#: What the field is called in a batch.
KEY_FIELD: Final = "key"

#: Characters of an ID that are hashed at once: bounds the memory that long IDs take.
_BLOCK_CHARACTERS: Final = 64
_U11: Final = word(11)


def record_keys(ids: npt.ArrayLike, seed: int, epoch: int) -> Keys:
    """The keys of records in an epoch, which the field ``key`` of a batch holds.

    Seed and epoch are hashed, never added (seed 0's epoch 1 is not seed 1's epoch 0), into two words.
    In an epoch, a record's key is what SplitMix64 gives at the place of its ID, from the first word as
    seed, with the second one's bits flipped half-way. So integer IDs that differ have different keys
    in an epoch; across epochs and seeds, and for strings, two keys are equal as seldom as random ones
    of 64 bits are.

    Args:
      ids: of the records: integers of at most 64 bits, or strings, with one axis.
      seed: 0 to 2**32 - 1.
      epoch: counted from 0, to 2**63 - 1.

    Returns:
      uint32[k, 2], as `jax.random.wrap_key_data` takes it for JAX's default, ``threefry2x32``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, or outside its range.
    """
    before, between = _words_of_epoch(seed, epoch)
    words = multiply(_words_of_ids(ids), GOLDEN)
    add(words, before, words)
    mix(words, between)
    # The lower half comes first, on every machine.
    halves = words.astype("<u8", copy=False).view("<u4").reshape(-1, 2)
    return halves.astype(np.uint32, copy=False)


def uniforms(keys: npt.ArrayLike, n: int) -> npt.NDArray[np.float64]:
    """Random numbers for each record of a batch: the first ``n`` that SplitMix64 gives, seeded by its key.

        u = loader.uniforms(batch["key"], 3)
        flip, left, top = u[:, 0] < 0.5, np.int64(u[:, 1] * 5), np.int64(u[:, 2] * 5)

    No version of NumPy changes them, and a larger ``n`` only adds columns.

    Args:
      keys: uint32[k, 2], a batch's field ``key``.
      n: numbers for each record.

    Returns:
      float64[k, n], multiples of 2**-53 that are at least 0 and less than 1.

    Raises:
      TypeError, ValueError: something that is no array of keys, or a negative ``n``.
    """
    seeds = _words_of_keys(keys)
    count = _index("n", n)
    if count < 0:
        raise ValueError(f"n is how many numbers each record gets, not {count}")
    words = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + seeds[:, np.newaxis]
    mix(words)
    draws: npt.NDArray[np.float64] = right_shift(words, _U11) * 2.0**-53
    return draws


def rng(key: npt.ArrayLike) -> np.random.Generator:
    """NumPy's generator for one record, for transforms on the host.

        generators = [loader.rng(key) for key in batch["key"]]

    Its bits are those of Philox, which NumPy promises to keep. What its methods make of them
    (``normal``, ``permutation``, ...) may change with NumPy's version; `uniforms` does not.

    Args:
      key: uint32[2], a record's entry in the field ``key``.

    Raises:
      TypeError, ValueError: something that is no key.
    """
    given = np.asarray(key)
    if given.shape != (2,):
        raise ValueError(
            f"a key is uint32[2], one record's entry of the field {KEY_FIELD!r}, not "
            f"{given.dtype}{list(given.shape)}"
        )
    return np.random.Generator(np.random.Philox(key=int(_words_of_keys(given[np.newaxis])[0])))


def check_key_field(fields: Collection[str], config: PipelineConfig) -> None:
    """Checks that a source leaves the field's name to the keys, where a config asks for them.

    Raises:
      ValueError: it does not.
    """
    if config.record_keys and KEY_FIELD in fields:
        raise ValueError(
            f"the source has a field {KEY_FIELD!r}, and record_keys=True adds one of that name to each "
            'batch: give that of the source another name, Pipeline(..., rename={"key": "..."}), or leave '
            "record_keys off"
        )


@functools.lru_cache(maxsize=64, typed=True)
def _words_of_epoch(seed: int, epoch: int) -> tuple[Words, Words]:
    for name, value, limit in (("seed", seed, MAX_SEED), ("epoch", epoch, MAX_EPOCH)):
        if not 0 <= _index(name, value) <= limit:
            raise ValueError(f"{name} must be 0 to {limit}, not {value}")
    message = struct.pack("<QQQ", KEYS_VERSION, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=16, person=b"regrain.keys").digest()
    before, between = struct.unpack("<2Q", digest)
    return word(before), word(between)


def _words_of_ids(ids: npt.ArrayLike) -> Words:
    """64 bits for each ID: an integer's own, and a hash of a string's characters."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids have one axis, not shape {list(array.shape)}")
    if array.dtype.kind == "U":
        return _hashes(array)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise TypeError(f"ids are int64 or strings, not {array.dtype}")
    return np.ascontiguousarray(array, np.int64).view(np.uint64)


def _hashes(ids: npt.NDArray[np.str_]) -> Words:
    """Multilinear hashes of strings: the sum of each character times a coefficient of its place.

    They do not depend on how wide the array is, since what fills a string up is 0. Two IDs of ASCII
    meet with a chance of at most 2**-58 over the choice of the coefficients (Lemire and Kaser,
    "Strongly universal string hashing is fast", The Computer Journal 2014).
    """
    width = ids.dtype.itemsize // 4
    native = np.ascontiguousarray(ids, ids.dtype.newbyteorder("="))
    characters = native.view(np.uint32).reshape(len(ids), width)
    sums = np.zeros(len(ids), np.uint64)
    for low in range(0, width, _BLOCK_CHARACTERS):
        block = characters[:, low : low + _BLOCK_CHARACTERS].astype(np.uint64)
        sums += block @ _coefficients(low)[: block.shape[1]]
    return sums


@functools.lru_cache(maxsize=64)
def _coefficients(first: int) -> Words:
    """Those of the places from ``first`` on: what SplitMix64 gives from the seed 0."""
    places = np.arange(first + 1, first + 1 + _BLOCK_CHARACTERS, dtype=np.uint64)
    words = places * GOLDEN
    mix(words)
    return words


def _words_of_keys(keys: npt.ArrayLike) -> Words:
    array = np.asarray(keys)
    if array.dtype != np.uint32 or array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(
            f"keys are uint32[k, 2], the field {KEY_FIELD!r} that record_keys=True adds to a batch, "
            f"not {array.dtype}{list(array.shape)}"
        )
    words: Words = array[:, 0] + (array[:, 1].astype(np.uint64) << np.uint64(32))
    return words


def _index(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
