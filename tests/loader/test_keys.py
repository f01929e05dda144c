"""Keys of records: fixed for ever, and as good as random in seed, epoch and ID."""

import hashlib
import itertools
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loader
from loader import record_keys, rng, uniforms
from loader.audit.keys import key_by_formula
from loader.keys import KEYS_VERSION

Words = npt.NDArray[np.uint64]

INTEGERS = st.integers(-(2**63), 2**63 - 1)
#: NumPy drops zeros at a string's end.
STRINGS = st.text(max_size=80).filter(lambda text: not text.endswith("\0"))
SEEDS, EPOCHS = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)

PINNED: Final = ["91b89be839ac2b4b", "98b18f0a9789446b", "3c247604ea8ea1c3", "ac9811edfd6c2164"]
PINNED_KEY: Final = [262857630, 4275865109]
PINNED_DRAWS: Final = [0.474359182770026, 0.18549977006528018]
PINNED_RAW: Final = 963750307221784846


def words(ids: Any, seed: int = 17, epoch: int = 3) -> Words:
    """The keys as 64-bit words."""
    halves = record_keys(ids, seed, epoch).astype(np.uint64)
    return np.asarray(halves[:, 0] | halves[:, 1] << np.uint64(32))


def bits(of: Words) -> npt.NDArray[np.uint8]:
    """uint8[k, 64], the lowest bit first."""
    return np.unpackbits(of.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")


def digest(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# Fixed for ever


def test_version_1_stays_what_it_is() -> None:
    """A digest that fails says that augmentation in old runs would change: the code is wrong, not the digest."""
    assert KEYS_VERSION == 1
    ids = np.concatenate([np.arange(-500, 500), np.array([2**63 - 1, -(2**63), 2**32, 2**32 + 1])])
    names = np.array([f"shard-{i % 7:05}.parquet:{i}" for i in range(1000)] + ["ü☃𝄞", "x" * 300])
    found = [
        digest(record_keys(i, s, e)) for i in (ids, names) for s, e in [(0, 0), (2**32 - 1, 9)]
    ]
    assert [one[:16] for one in found] == PINNED
    assert record_keys([7], 17, 3).tolist() == [PINNED_KEY]
    key = np.array(PINNED_KEY, np.uint32)
    assert uniforms([key], 2).tolist() == [PINNED_DRAWS]
    assert rng(key).bit_generator.random_raw() == PINNED_RAW


@given(st.lists(INTEGERS, max_size=5) | st.lists(STRINGS, min_size=1, max_size=5), SEEDS, EPOCHS)
def test_keys_are_what_the_formula_says_in_plain_integers(
    ids: list[Any], seed: int, epoch: int
) -> None:
    array = np.array(ids, np.int64 if not ids or isinstance(ids[0], int) else np.str_)
    found = record_keys(array, seed, epoch)
    assert found.dtype == np.uint32
    assert found.shape == (len(ids), 2)
    assert [tuple(key) for key in found.tolist()] == [
        key_by_formula(one, seed, epoch) for one in array.tolist()
    ]


def test_how_an_array_lies_in_memory_makes_no_difference() -> None:
    names = np.array(["a", "", "file.bin:123", "ü☃𝄞"])
    expected = record_keys(names, 17, 3)
    swapped = names.astype(names.dtype.newbyteorder())
    for same in (names.astype("U300"), np.repeat(names, 2)[::2], swapped, names.tolist()):
        assert np.array_equal(record_keys(same, 17, 3), expected)
    ids = np.array([5, -3, 100])
    expected = record_keys(ids, 17, 3)
    for same in (ids.astype(np.int8), np.repeat(ids, 2)[::2], ids.tolist(), ids.astype(">i8")):
        assert np.array_equal(record_keys(same, 17, 3), expected)
    assert ids.tolist() == [5, -3, 100]
    assert np.array_equal(record_keys(np.array([5, 100], np.uint8), 17, 3), expected[::2])


def test_a_key_does_not_depend_on_the_others_that_are_asked_for() -> None:
    names = np.array([f"{'x' * (i % 90)}:{i}" for i in range(200)])
    together = record_keys(names, 17, 3)
    alone = np.concatenate([record_keys([name], 17, 3) for name in names.tolist()])
    assert np.array_equal(together, alone)


# As good as random


def test_integer_ids_that_differ_have_different_keys_in_an_epoch() -> None:
    near = np.arange(-(1 << 17), 1 << 17)
    far = near << np.int64(32)
    ids = np.unique(np.concatenate([near, far, near + 2**62, near - 2**62]))
    assert len(np.unique(words(ids))) == len(ids)


def test_no_two_visits_of_a_million_share_a_key() -> None:
    """Neighbouring seeds, epochs and IDs, so that a sum of them in place of a hash would show at once."""
    visits = [words(np.arange(-64, 64), s, e) for s, e in itertools.product(range(64), range(128))]
    assert len(np.unique(np.concatenate(visits))) == 64 * 128 * 128
    texts = [words([f"f:{i}" for i in range(128)], s, e) for s in range(8) for e in range(128)]
    assert len(np.unique(np.concatenate(texts))) == 8 * 128 * 128


def test_seed_0s_epoch_1_is_not_seed_1s_epoch_0() -> None:
    ids = np.arange(1000)
    for (s, e), (t, f) in [((0, 1), (1, 0)), ((7, 2**32), (8, 0)), ((0, 2**32), (1, 0))]:
        assert not np.intersect1d(words(ids, s, e), words(ids, t, f)).size


@pytest.mark.parametrize("half", [0, 1])
def test_each_half_of_a_key_repeats_as_often_as_chance_has_it(half: int) -> None:
    halves = record_keys(np.arange(1 << 18), 17, 3)[:, half]
    # Pairs of equal halves among 2**18: 8 are expected, with a deviation of 2.8.
    pairs = len(halves) - len(np.unique(halves))
    assert 0 < pairs < 8 + 5 * 2.8


def flips_of_id(bit: int) -> tuple[Words, Words]:
    ids = np.random.default_rng(bit).integers(-(2**63), 2**63 - 1, 4096)
    return words(ids), words(ids ^ np.array(1 << bit, np.uint64).view(np.int64))


def flips_of_small_id(bit: int) -> tuple[Words, Words]:
    ids = np.arange(4096)
    return words(ids), words(ids ^ np.array(1 << bit, np.uint64).view(np.int64))


def flips_of_seed(bit: int) -> tuple[Words, Words]:
    pairs = [(words([0], s, 0), words([0], s ^ 1 << bit, 0)) for s in range(4096)]
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def flips_of_epoch(bit: int) -> tuple[Words, Words]:
    pairs = [(words([0], 0, e), words([0], 0, e ^ 1 << bit)) for e in range(4096)]
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def flips_of_character(bit: int) -> tuple[Words, Words]:
    texts = [f"{i:012}:{i}" for i in range(4096)]
    place, which = divmod(bit, 7)
    flipped = [t[:place] + chr(ord(t[place]) ^ 1 << which) + t[place + 1 :] for t in texts]
    return words(texts), words(flipped)


@pytest.mark.parametrize(
    ("flips", "num_bits"),
    [
        (flips_of_id, range(64)),
        (flips_of_small_id, range(64)),
        (flips_of_seed, range(0, 32, 4)),
        (flips_of_epoch, range(0, 63, 9)),
        (flips_of_character, range(0, 80, 3)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_bit_of_the_input_flips_each_bit_of_the_key_in_half_of_the_cases(
    flips: Any, num_bits: range
) -> None:
    rates = np.array([bits(np.bitwise_xor(*flips(bit))).mean(axis=0) for bit in num_bits])
    # Of 4,096 cases each: a deviation of 1/128. All of up to 4,096 rates lie within 5 of them.
    assert np.abs(rates - 0.5).max() < 5 / 128
    assert abs(rates.mean() - 0.5) < 5 / 128 / np.sqrt(rates.size)


@pytest.mark.parametrize(
    "other",
    [(17, 4), (18, 3), (17, 3 + 2**32), (3, 17)],
    ids=["next epoch", "next seed", "far epoch", "exchanged"],
)
def test_neighbouring_seeds_and_epochs_have_nothing_in_common(other: tuple[int, int]) -> None:
    ids = np.arange(1 << 14)
    here, there = words(ids), words(ids, *other)
    # The same ID, and the ID at each small distance: as many equal bits as chance has it.
    for shift in range(-4, 5):
        equal = 1 - bits(here ^ np.roll(there, shift))
        assert abs(equal.mean() - 0.5) < 5 * 0.5 / np.sqrt(equal.size)
        assert np.abs(equal.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(ids))
        per_key = equal.sum(axis=1)
        assert abs(per_key.var() - 16) < 5 * 16 * np.sqrt(2 / len(ids))


def test_keys_have_nothing_in_common_with_the_order_of_the_same_seed_and_epoch() -> None:
    n = 4096
    position = np.empty(n, np.int64)
    position[loader.epoch_order(n, 17, 3)] = np.arange(n)
    for key in (words(np.arange(n)), record_keys(np.arange(n), 17, 3)[:, 1]):
        ranks = np.argsort(np.argsort(key))
        assert abs(np.corrcoef(position, ranks)[0, 1]) < 5 / np.sqrt(n)


def test_ids_that_differ_in_one_digit_hash_apart() -> None:
    """Among a million names of files and rows none meets another: by chance one in 2**25 such sets would."""
    names = np.char.add(
        np.repeat([f"s{i:03}.bin:" for i in range(1000)], 1000),
        np.tile(np.arange(1000).astype(str), 1000),
    )
    assert len(np.unique(words(names))) == len(names)


# Draws


def test_uniforms_are_uniform_in_each_column_and_independent_between_them() -> None:
    draws = uniforms(record_keys(np.arange(1 << 16), 17, 3), 4)
    assert draws.dtype == np.float64
    assert draws.shape == (1 << 16, 4)
    assert (draws >= 0).all()
    assert (draws < 1).all()
    for column in draws.T:
        counts = np.histogram(column, 256, (0, 1))[0]
        chi2 = ((counts - 256) ** 2 / 256).sum()
        assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 5 / 256
    off_diagonal = np.corrcoef(draws.T) - np.eye(4)
    assert np.abs(off_diagonal).max() < 5 / 256


def test_more_columns_leave_the_first_ones_as_they_are() -> None:
    keys = record_keys(np.arange(5), 17, 3)
    assert np.array_equal(uniforms(keys, 7)[:, :3], uniforms(keys, 3))
    assert uniforms(keys, 0).shape == (5, 0)
    assert uniforms(keys[:0], 3).shape == (0, 3)
    assert np.array_equal(uniforms(keys[2:3], 3)[0], uniforms(keys, 3)[2])


def test_a_generator_is_the_same_each_time_and_another_for_each_key() -> None:
    keys = record_keys(np.arange(100), 17, 3)
    draws = np.array([rng(key).random(3) for key in keys])
    assert np.array_equal(draws, [rng(key).random(3) for key in keys])
    assert len(np.unique(draws)) == draws.size


def test_jax_takes_the_keys_and_draws_as_for_any_key() -> None:
    keys = record_keys(np.arange(4096), 17, 3)
    draw = jax.jit(lambda keys: jax.vmap(jax.random.uniform)(jax.random.wrap_key_data(keys)))
    draws = np.asarray(draw(keys))
    assert np.array_equal(draws[7:9], draw(keys[7:9]))
    counts = np.histogram(draws, 64, (0, 1))[0]
    assert abs(((counts - 64) ** 2 / 64).sum() - 63) < 5 * np.sqrt(2 * 63)
    assert abs(np.corrcoef(draws, uniforms(keys, 1)[:, 0])[0, 1]) < 5 / 64


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([1], -1, 0), ValueError, r"seed must be 0 to 2\*\*32 - 1, not -1"),
        (([1], 2**32, 0), ValueError, r"seed must be 0 to 2\*\*32 - 1"),
        (([1], 0, -1), ValueError, "epoch must be 0 to"),
        (([1], 0, 2**63), ValueError, "epoch must be 0 to"),
        (([1], 0, 1.0), TypeError, r"epoch must be an integer, not 1\.0"),
        (([1], True, 0), TypeError, "seed must be an integer, not True"),
        (([1.5], 0, 0), TypeError, "int64 or strings, not float64"),
        (([True], 0, 0), TypeError, "int64 or strings, not bool"),
        (([2**63], 0, 0), TypeError, "int64 or strings, not uint64"),
        (([[1]], 0, 0), ValueError, r"one axis, not shape \[1, 1\]"),
        ((7, 0, 0), ValueError, r"one axis, not shape \[\]"),
    ],
)
def test_wrong_use_of_record_keys_is_refused(arguments: Any, kind: Any, text: str) -> None:
    record_keys([1], 1, 1)  # what it keeps of it must not let True and 1.0 pass
    with pytest.raises(kind, match=text):
        record_keys(*arguments)


@pytest.mark.parametrize("keys", [[[1, 2]], np.zeros((3, 2), np.int64), np.zeros(2, np.uint32)])
def test_what_is_no_array_of_keys_is_refused(keys: Any) -> None:
    with pytest.raises(ValueError, match=r"keys must be uint32\[k, 2\], the field 'key'"):
        uniforms(keys, 3)


def test_wrong_numbers_of_draws_and_what_is_no_key_are_refused() -> None:
    keys = record_keys([1, 2], 0, 0)
    with pytest.raises(ValueError, match="not -1"):
        uniforms(keys, -1)
    with pytest.raises(TypeError, match=r"not 1\.5"):
        uniforms(keys, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key must be uint32\[2\], .*, not uint32\[2, 2\]"):
        rng(keys)
    with pytest.raises(ValueError, match=r"not int64\[1, 2\]"):
        rng([1, 2])
