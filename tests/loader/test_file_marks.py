"""Marks of files: which files differ, from two fingerprints of any numbers of files."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.identity import files as file_marks
from loader.identity.files import FileEntry, FileMarks, coarser, marks_of


def entries_of(total: int, **edits: str) -> list[FileEntry]:
    """Files ``f0000`` and so on; ``edits`` give some of them other digests."""
    names = [f"f{number:04}" for number in range(total)]
    return [FileEntry(name, 10, 3, edits.get(name, "0" * 64)) for name in names]


def compared(before: list[FileEntry], after: list[FileEntry], *, marked: bool = False) -> str:
    then, now = FileMarks.of(before, {}), FileMarks.of(after, {})
    names = [entry.name for entry in after]
    return then.compared(now, names, marks_of(after) if marked else None)


FEW = entries_of(12)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (entries_of(13), "the first 12 files are the same, and 1 was appended: f0012"),
        (
            entries_of(14),
            "the first 12 files are the same, and 2 were appended: f0012, f0013",
        ),
        (entries_of(12, f0007="1"), "1 of 12 files differs: f0007"),
        (entries_of(12, f0007="1", f0002="1"), "2 of 12 files differ: f0002, f0007"),
        (entries_of(13, f0007="1"), "1 edited: f0007; 1 appended: f0012"),
        (FEW[:3] + FEW[4:], "1 removed: number 3"),
        (FEW[::-1], "the same files in another order"),
        ([*FEW[:3], FileEntry("new", 1, 1, "2"), *FEW[3:]], "1 inserted: new"),
        (FEW, ""),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_files_added_edited_removed_and_moved_are_told_apart(
    after: list[FileEntry], told: str, marked: bool
) -> None:
    assert compared(FEW, after, marked=marked) == told


def test_files_without_names_are_numbered() -> None:
    then, now = FileMarks.of(FEW, {}), FileMarks.of(entries_of(12, f0007="1"), {})
    assert then.compared(now) == "1 of 12 files differs: number 7"


@pytest.mark.parametrize(
    ("before", "after", "told", "told_with_marks"),
    [
        (
            2048,
            2050,
            "the first 2048 files are the same, and 2 were appended: f2048, f2049",
            "the first 2048 files are the same, and 2 were appended: f2048, f2049",
        ),
        (
            5001,
            5003,
            "the first 5000 files are the same; after them 1 became 3",
            "the first 5001 files are the same, and 2 were appended: f5001, f5002",
        ),
        (
            5004,
            5000,
            "the first 5000 files are the same, and 4 were removed from the end: number 5000, number 5001, number 5002, number 5003",
            "the first 5000 files are the same, and 4 were removed from the end: number 5000, number 5001, number 5002, number 5003",
        ),
    ],
)
def test_added_files_are_told_from_edited_ones_where_a_mark_is_of_several(
    before: int, after: int, told: str, told_with_marks: str
) -> None:
    assert compared(entries_of(before), entries_of(after)) == told
    assert compared(entries_of(before), entries_of(after), marked=True) == told_with_marks


@pytest.mark.parametrize("marked", [False, True])
def test_edited_files_are_placed_where_a_mark_is_of_several(marked: bool) -> None:
    after = entries_of(5000, f0007="1", f4999="1")
    told = "in 2 of 1250 groups of 4 files: f0004 to f0007, f4996 to f4999"
    assert compared(entries_of(5000), after, marked=marked) == told


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 39), st.integers(0, 2))
def test_nothing_is_said_to_be_added_where_something_was_edited(
    before: int, more: int, edited: int, power: int
) -> None:
    after = entries_of(before + more, **{f"f{edited:04}": "1"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_marks, "MAX_MARKS", 10 * 2**power)
        told = compared(entries_of(before), after, marked=True)
        assert ("are the same, and" in told or "file is the same, and" in told) == (
            edited >= before and more > 0
        )
        assert (told == "") == (edited >= before and more == 0)


def test_marks_of_single_files_make_up_those_of_several() -> None:
    for total in (1, 2049, 5001, 10_000):
        marks = FileMarks.of(entries_of(total), {})
        assert "".join(coarser(marks_of(entries_of(total)), marks.files_per_mark)) == marks.marks
        assert len(marks.marks) <= 2048 * 12


def test_the_size_is_bounded_and_json_brings_it_back() -> None:
    marks = FileMarks.of(entries_of(10_000), {"format": "bytes", "window": 3})
    text = json.dumps(marks.to_dict())
    assert len(text) < 40 * 1024
    assert FileMarks.from_dict(json.loads(text)) == marks
    with pytest.raises(ValueError, match="too large"):
        FileMarks.of(FEW, {"names": "x" * 20_000})
    with pytest.raises(TypeError):
        FileMarks.of(FEW, {"decode": test_the_size_is_bounded_and_json_brings_it_back})


@pytest.mark.parametrize("part", ["name", "size", "records", "digest"])
def test_the_digest_covers_every_part_of_an_entry_and_the_order(part: str) -> None:
    values: dict[str, Any] = {"name": "x", "size": 1, "records": 1, "digest": "1" * 64}
    edited = [*FEW[:5], FEW[5]._replace(**{part: values[part]}), *FEW[6:]]
    whole = FileMarks.of(FEW, {}).digest
    assert FileMarks.of(edited, {}).digest != whole
    assert FileMarks.of(FEW[::-1], {}).digest != whole


@pytest.mark.parametrize(
    "edit",
    [
        {"num_files": 0},
        {"num_files": 13},
        {"num_files": "12"},
        {"num_files": True},
        {"files_per_mark": 3},
        {"digest": "sha256:0"},
        {"marks": ""},
        {"marks": "x" * 144},
        {"marks": 3},
        {"reading": []},
        {"reading": None},
    ],
    ids=str,
)
def test_what_are_no_marks_is_refused(edit: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        FileMarks.from_dict(FileMarks.of(FEW, {}).to_dict() | edit)
