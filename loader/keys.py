"""Random numbers of a record: a pure function of (seed, epoch, record ID).

They do not depend on the batch, the process or the order of reading, so an augmentation that draws from
them is the same wherever a run was stopped. The arithmetic is our own and uses integers only; just the
distributions of `rng` are NumPy's.

- `record_keys`: 64 bits for each record, in the form that `jax.random.wrap_key_data` takes.
- `uniforms`: numbers in [0, 1) for a batch of keys at once.
- `rng`: a NumPy generator for one key.
"""

import functools
import hashlib
import struct
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy import add, multiply, right_shift

from loader.checks import integer
from loader.config import PipelineConfig
from loader.order import MAX_EPOCH, MAX_SEED
from loader.splitmix import GOLDEN, Words, mix, word

Keys = npt.NDArray[np.uint32]

#: A change to the keys that `record_keys` returns needs a new number here.
KEYS_VERSION: Final = 1

#: Name of the field in a batch.
KEY_FIELD: Final = "key"

#: Characters of an ID hashed at once, which bounds the memory for long IDs.
_BLOCK_CHARACTERS: Final = 64
_U11: Final = word(11)


def record_keys(ids: npt.ArrayLike, seed: int, epoch: int) -> Keys:
    """Return the keys of records in an epoch: the field ``key`` of a batch.

    Seed and epoch are hashed into two words, never added: seed 0's epoch 1 is not seed 1's epoch 0. A
    record's key is SplitMix64's output at the place of its ID, seeded by the first word, with the bits
    of the second word flipped half-way. Different integer IDs therefore have different keys within an
    epoch. For strings, and across epochs and seeds, keys collide as rarely as random 64-bit numbers.

    Args:
      ids: int64[k] or str[k], the record IDs.
      seed: 0 to 2**32 - 1.
      epoch: counted from 0, to 2**63 - 1.

    Returns:
      uint32[k, 2], for `jax.random.wrap_key_data` with JAX's default, ``threefry2x32``.

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
    """Return ``n`` random numbers for each record: the first outputs of SplitMix64, seeded by its key.

        u = regrain.uniforms(batch["key"], 3)
        flip, left, top = u[:, 0] < 0.5, np.int64(u[:, 1] * 5), np.int64(u[:, 2] * 5)

    They do not depend on NumPy's version. A larger ``n`` only adds columns.

    Args:
      keys: uint32[k, 2], a batch's field ``key``.
      n: numbers for each record.

    Returns:
      float64[k, n], multiples of 2**-53 in [0, 1).

    Raises:
      TypeError, ValueError: ``keys`` is not an array of keys, or ``n`` is negative.
    """
    seeds = _words_of_keys(keys)
    count = integer("n", n, 0)
    words = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + seeds[:, np.newaxis]
    mix(words)
    draws: npt.NDArray[np.float64] = right_shift(words, _U11) * 2.0**-53
    return draws


def rng(key: npt.ArrayLike) -> np.random.Generator:
    """Return a NumPy generator for one record, for transforms on the host.

        generators = [regrain.rng(key) for key in batch["key"]]

    Its bits come from Philox, which NumPy promises to keep. Its methods (``normal``, ``permutation``,
    ...) may change with NumPy's version; `uniforms` does not.

    Args:
      key: uint32[2], one row of the field ``key``.

    Raises:
      TypeError, ValueError: ``key`` is not a key.
    """
    given = np.asarray(key)
    if given.shape != (2,):
        raise ValueError(
            f"key must be uint32[2], one row of the field {KEY_FIELD!r}, not "
            f"{given.dtype}{list(given.shape)}"
        )
    return np.random.Generator(np.random.Philox(key=int(_words_of_keys(given[np.newaxis])[0])))


def check_key_field(fields: Collection[str], config: PipelineConfig) -> None:
    """Raise ValueError if the source has a field with the name that ``record_keys`` needs."""
    if config.record_keys and KEY_FIELD in fields:
        raise ValueError(
            f"the source has a field {KEY_FIELD!r}, and record_keys=True adds a field of that name to each "
            'batch. Rename the source\'s field with Pipeline(..., rename={"key": "..."}), or leave '
            "record_keys off"
        )


@functools.lru_cache(maxsize=64, typed=True)
def _words_of_epoch(seed: int, epoch: int) -> tuple[Words, Words]:
    seed, epoch = integer("seed", seed, 0, MAX_SEED), integer("epoch", epoch, 0, MAX_EPOCH)
    message = struct.pack("<QQQ", KEYS_VERSION, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=16, person=b"regrain.keys").digest()
    before, between = struct.unpack("<2Q", digest)
    return word(before), word(between)


def _words_of_ids(ids: npt.ArrayLike) -> Words:
    """Return 64 bits for each ID: the integer itself, or a hash of the string."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one axis, not shape {list(array.shape)}")
    if array.dtype.kind == "U":
        return _hashes(array)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise TypeError(f"ids must be int64 or strings, not {array.dtype}")
    return np.ascontiguousarray(array, np.int64).view(np.uint64)


def _hashes(ids: npt.NDArray[np.str_]) -> Words:
    """Return multilinear hashes of strings: the sum of each character times a coefficient of its place.

    The width of the array has no effect, because strings are padded with zeros. Two ASCII IDs collide
    with probability at most 2**-58 over the choice of coefficients (Lemire and Kaser, "Strongly
    universal string hashing is fast", The Computer Journal 2014).
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
    """Return the coefficients of the places from ``first`` on: the outputs of SplitMix64 with seed 0."""
    places = np.arange(first + 1, first + 1 + _BLOCK_CHARACTERS, dtype=np.uint64)
    words = places * GOLDEN
    mix(words)
    return words


def _words_of_keys(keys: npt.ArrayLike) -> Words:
    array = np.asarray(keys)
    if array.dtype != np.uint32 or array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(
            f"keys must be uint32[k, 2], the field {KEY_FIELD!r} that record_keys=True adds to a batch, "
            f"not {array.dtype}{list(array.shape)}"
        )
    words: Words = array[:, 0] + (array[:, 1].astype(np.uint64) << np.uint64(32))
    return words
