"""Changes between two lists of marks; texts that differ and look alike."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loader.identity.differences import in_print
from loader.identity.marks import told_apart


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


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["caf\xe9", "cafe\u0301"], ["caf\\xe9", "cafe\\u0301"]),
        (["a", "\u0430"], ["a", "\\u0430"]),
        (["\u03bf", "\u043e"], ["\\u03bf", "\\u043e"]),
        (["a\ufe0f", "a"], ["a\\ufe0f", "a"]),
        (["x", "x\u200b"], ["x", "x\\u200b"]),
        (["\ud800", "\ud801"], ["\\ud800", "\\ud801"]),
        (["fi", "\ufb01"], ["fi", "\\ufb01"]),
        (["1 2", "1\xa02"], ["1 2", "1\\xa02"]),
        (["x", "x "], ["'x'", "'x '"]),
        (["a b", "a\tb"], ["'a b'", r"'a\tb'"]),
        (["caf\xe9", "cafe\u0301", "tea"], ["caf\\xe9", "cafe\\u0301", "tea"]),
        (["caf\xe9", "the", "th\xe9"], ["caf\xe9", "the", "th\xe9"]),
        (["caf\xe9", "caf\xe9"], ["caf\xe9"]),
        (["\u6771\u4eac", "\u5927\u962a"], ["\u6771\u4eac", "\u5927\u962a"]),
        (["x", "x\u200b", "x\\u200b"], ["'x'", r"'x\u200b'", r"'x\\u200b'"]),
        (["", "a"], ["", "a"]),
        (["", "\0"], ["''", r"'\x00'"]),
    ],
)
def test_texts_that_look_alike_are_shown_by_what_they_are(
    texts: list[str], shown: list[str]
) -> None:
    found = in_print(texts)
    assert list(found) == list(dict.fromkeys(texts))
    assert list(found.values()) == shown


PRINTED = st.text(st.sampled_from("a\u0430e\xe9\u0301 \t\\x9'\"\u200b\ud800"), max_size=6)


@given(st.lists(PRINTED))
def test_no_two_texts_are_shown_as_one(texts: list[str]) -> None:
    found = in_print(texts)
    assert len(set(found.values())) == len(set(texts))


@given(PRINTED, PRINTED)
@example("a b", "a  b")
@example("a ", "a\t")
@example("'a b'", "'a  b'")
def test_what_is_in_print_stays_as_it_is(one: str, other: str) -> None:
    shown = list(in_print([one, other]).values())
    assert list(in_print(shown).values()) == shown
