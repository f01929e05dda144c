"""A name and a number are put together as Python writes them, whatever the numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.sources import numbered
from loader.sources.numbered import NumberedNames

NAMES = ("a", "train/00017.bin", "é:1")
#: Numbers near the borders between groups of digits are as likely as others.
NUMBERS = st.integers(0, 2**63 - 2) | st.builds(
    lambda power, more: max(0, 10**power + more), st.integers(0, 18), st.integers(-2, 10_002)
)


def expected(parts: list[tuple[int, int]]) -> list[str]:
    return [f"{NAMES[name]}:{number}" for name, number in parts]


@given(st.lists(st.tuples(st.integers(0, 2), NUMBERS), min_size=1))
def test_any_number_comes_behind_any_name(parts: list[tuple[int, int]]) -> None:
    names, numbers = (np.array(column) for column in zip(*parts, strict=True))
    counts = np.array([1, int(numbers.max()) + 1, 12_345])
    counts[names] = int(numbers.max()) + 1
    assert NumberedNames(NAMES, counts)(names, numbers).tolist() == expected(parts)


@pytest.mark.parametrize(("few", "most"), [(0, 3), (0, 5), (0, 1000), (1000, 3), (1000, 1000)])
def test_few_heads_and_many_give_the_same(
    few: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbered, "_FEW_HEADS", few)
    monkeypatch.setattr(numbered, "_MAX_HEADS", most)
    counts = np.array([123_456, 1, 10_000])
    parts = [(name, number) for name, count in enumerate(counts) for number in range(count)]
    names, numbers = (np.array(column) for column in zip(*parts, strict=True))
    assert NumberedNames(NAMES, counts)(names, numbers).tolist() == expected(parts)


def test_a_single_name_needs_no_look_up() -> None:
    numbers = np.arange(20_001)
    found = NumberedNames(["x"], np.array([20_001]))(np.zeros_like(numbers), numbers)
    assert found.tolist() == [f"x:{number}" for number in numbers]
    assert found.dtype == np.dtype("U7")  # no wider than the longest


def test_no_number_gives_no_text() -> None:
    none = np.zeros(0, np.int64)
    assert NumberedNames(NAMES, np.array([3, 4, 5]))(none, none).shape == (0,)
