"""What became of things between two lists of marks."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loader.told_apart import told_apart


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 13), unique=True))
def test_every_record_that_is_gone_or_new_is_counted_once_and_as_few_as_possible_moved(
    before: list[int], after: list[int]
) -> None:
    found = told_apart([f"{mark:x}" for mark in before], [f"{mark:x}" for mark in after])
    gone = [row for row, mark in enumerate(before) if mark not in after]
    new = [row for row, mark in enumerate(after) if mark not in before]
    arrived = found["edited"] + found["inserted"] + found["appended"]
    assert sorted(arrived) == new
    assert len(found["edited"]) + len(found["removed"]) == len(gone)
    assert set(found["removed"]) <= set(gone)
    common = [mark for mark in after if mark in before]
    longest = [1] * len(common)
    for i, j in itertools.combinations(range(len(common)), 2):
        if before.index(common[i]) < before.index(common[j]):
            longest[j] = max(longest[j], longest[i] + 1)
    assert len(found["moved"]) == len(common) - max(longest, default=0)
    assert {after[row] for row in found["moved"]} <= set(common)
    last = max((after.index(mark) for mark in common), default=-1)
    assert all(row > last for row in found["appended"]) or found["moved"]
