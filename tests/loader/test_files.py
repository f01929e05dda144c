"""Files of a data set: which they are, in which order, which row is in which, and whether they changed."""

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.sources.files import FileRows, FileSet


def make(root: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        path = root / name.replace("__", "/").replace("_bin", ".bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))


def test_a_folders_files_are_found_at_any_depth_and_sorted(tmp_path: Path) -> None:
    make(tmp_path, b_bin=1, a__c__d_bin=2, a__b_bin=3, other=4)
    make(tmp_path / ".hidden", b_bin=1)
    found = FileSet.open(tmp_path, [".bin"])
    assert found.names == ("a/b.bin", "a/c/d.bin", "b.bin")
    assert [state.size for state in found.states] == [3, 2, 1]


def test_the_callers_order_is_kept(tmp_path: Path) -> None:
    make(tmp_path, b_bin=1, a_bin=2)
    assert FileSet.open(tmp_path, [".bin"], ["b.bin", "a.bin"]).names == ("b.bin", "a.bin")


def test_rows_are_located_and_grouped_by_file(tmp_path: Path) -> None:
    make(tmp_path, a_bin=1, b_bin=1, c_bin=1)
    rows = FileRows.of(FileSet.open(tmp_path, [".bin"]), [2, 3, 1])
    assert len(rows) == 6
    asked = np.array([5, 0, 4, 1, 4, 2])
    files, places = rows.locate(asked)
    assert files.tolist() == [2, 0, 1, 0, 1, 1]
    assert places.tolist() == [0, 0, 2, 1, 2, 0]
    for group in rows.groups(asked):
        assert (files[group.places] == group.file).all()
        assert (places[group.places] == group.rows).all()


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_every_row_is_in_one_group_once_and_groups_rise(counts: list[int], rows: list[int]) -> None:
    names = tuple(f"{number}.bin" for number in range(len(counts)))
    found = FileRows.of(FileSet(Path("/"), names, ()), counts)
    asked = np.array([row % len(found) for row in rows], np.int64)
    every = [(number, row) for number, count in enumerate(counts) for row in range(count)]
    groups = found.groups(asked)
    placed = np.concatenate([*(group.places for group in groups), asked[:0]])
    assert sorted(placed.tolist()) == list(range(len(asked)))
    for group in groups:
        pairs = [(group.file, row) for row in group.rows.tolist()]
        assert pairs == sorted(pairs)
        assert pairs == [every[row] for row in asked[group.places]]
    assert [group.file for group in groups] == sorted({every[row][0] for row in asked})
    assert found.counts.tolist() == counts


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    rows = FileRows(np.array([0, 2, 5]))
    for ask in (rows.locate, rows.groups):
        with pytest.raises(IndexError, match="rows run from 0 to 4"):
            ask(np.array([0, row]))


def test_more_rows_than_can_be_counted_are_refused() -> None:
    files = FileSet(Path("/"), ("a", "b"), ())
    with pytest.raises(ValueError, match="more records than an int64 can count"):
        FileRows.of(files, [2**62, 2**62])


def test_a_file_without_records_is_named(tmp_path: Path) -> None:
    make(tmp_path, a_bin=1, b_bin=1)
    with pytest.raises(ValueError, match=r"file b\.bin holds no record"):
        FileRows.of(FileSet.open(tmp_path, [".bin"]), [2, 0])


def test_a_change_is_seen_and_the_file_and_row_are_named(tmp_path: Path) -> None:
    make(tmp_path, a_bin=1, b_bin=1)
    files = FileSet.open(tmp_path, [".bin"])
    files.check(1, 17)
    make(tmp_path, b_bin=2)
    with pytest.raises(ValueError, match=r"file b\.bin, row 17: it has changed: 1 bytes"):
        files.check(1, 17)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../a.bin", "a/../b.bin", "a//b.bin", ".", "a\0.bin", 3, "b\udcff.bin"],
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="file"):
        FileSet.open(tmp_path, [".bin"], [name])


def test_names_are_a_list_or_a_pattern(tmp_path: Path) -> None:
    make(tmp_path, a_bin=1, b__a_bin=1)
    with pytest.raises(TypeError, match="names must be a list of names of files, or a pattern"):
        FileSet.open(tmp_path, [".bin"], 3)  # type: ignore[arg-type]
    assert FileSet.open(tmp_path, [".bin"], "b*").names == ("b/a.bin",)
    with pytest.raises(ValueError, match=r"no file for names 'c\*'; it holds a\.bin, b/a\.bin"):
        FileSet.open(tmp_path, [".bin"], "c*")
    with pytest.raises(ValueError, match="names holds no name"):
        FileSet.open(tmp_path, [".bin"], [])


def placed(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


@pytest.mark.parametrize(
    "names",
    [
        ["train.bin", "val.bin"],
        ["train-00000-of-00001.bin", "validation-00000-of-00001.bin"],
        ["data/train/0.bin", "data/test/0.bin", "other.bin"],
        ["edufineweb_val_000000.bin", "edufineweb_train_000001.bin"],
        ["Dev1.bin", "EVAL1.bin"],
    ],
)
def test_splits_are_not_mixed(tmp_path: Path, names: list[str]) -> None:
    placed(tmp_path, *names)
    with pytest.raises(ValueError, match="files of several splits") as caught:
        FileSet.open(tmp_path, [".bin"])
    assert all(name in str(caught.value) for name in names[:2])
    assert 'split="train"' in str(caught.value)
    assert FileSet.open(tmp_path, [".bin"], names).names == tuple(names)
    assert FileSet.open(tmp_path, [".bin"], "*").names == tuple(sorted(names))


def test_a_split_is_chosen_by_its_word(tmp_path: Path) -> None:
    names = ["train-0.bin", "train/1.bin", "training.bin", "test.bin", "x_train_sft.bin"]
    placed(tmp_path, *names)
    assert FileSet.open(tmp_path, [".bin"], split="train").names == (
        "train-0.bin",
        "train/1.bin",
        "x_train_sft.bin",
    )
    assert FileSet.open(tmp_path, [".bin"], split="train_sft").names == ("x_train_sft.bin",)
    with pytest.raises(ValueError, match="no file for split 'eval'"):
        FileSet.open(tmp_path, [".bin"], split="eval")
    with pytest.raises(ValueError, match="give one of them"):
        FileSet.open(tmp_path, [".bin"], ["test.bin"], "test")
    with pytest.raises(ValueError, match="choose among a folder's"):
        FileSet.open(tmp_path / "test.bin", [".bin"], split="test")
    with pytest.raises(TypeError, match="split must be a word"):
        FileSet.open(tmp_path, [".bin"], split="")


@pytest.mark.parametrize(
    "names",
    [
        ["a.bin", "train.bin"],
        ["devtools.bin", "training.bin", "contest.bin"],
        ["eval/train/0.bin", "eval/train/1.bin"],
    ],
)
def test_other_names_may_mix(tmp_path: Path, names: list[str]) -> None:
    assert FileSet.open(placed(tmp_path, *names), [".bin"]).names == tuple(sorted(names))


def test_splits_within_the_chosen_one_are_not_mixed(tmp_path: Path) -> None:
    placed(tmp_path, "train/val/0.bin", "train/test/0.bin", "train/1.bin")
    with pytest.raises(ValueError, match=r"test \(train/test/0\.bin\), val \(train/val/0\.bin\)"):
        FileSet.open(tmp_path, [".bin"], split="train")


def test_names_that_begin_with_an_underscore_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placed(tmp_path, "a.bin", "_tmp.bin", "_temporary/0/a.bin", "_delta_log/0.bin", ".b.bin")
    assert FileSet.open(tmp_path, [".bin"]).names == ("a.bin",)
    assert "table with a log, _delta_log" in caplog.text
    assert FileSet.open(tmp_path, [".bin"], ["_tmp.bin"]).names == ("_tmp.bin",)
    with pytest.raises(ValueError, match=r"that begin with \. or _ are"):
        FileSet.open(placed(tmp_path / "other", "_a.bin"), [".bin"])


def test_a_partitioned_table_is_refused_as_its_columns_are_not_read(tmp_path: Path) -> None:
    placed(tmp_path, "year=2025/month=1/0.bin", "year=2026/month=2/0.bin", "a=b.bin")
    with pytest.raises(ValueError, match="the values of 'year' and 'month' are in the names"):
        FileSet.open(tmp_path, [".bin"])
    assert len(FileSet.open(tmp_path, [".bin"], "*")) == 3
    assert len(FileSet.open(tmp_path / "year=2025" / "month=1", [".bin"])) == 1


@pytest.mark.parametrize("data", [None, ["a.bin"], b"a.bin", 3])
def test_data_is_one_path(data: Any) -> None:
    with pytest.raises(
        TypeError, match=r"data must be the path of a file or folder, not .* as names"
    ):
        FileSet.open(data, [".bin"])


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["x-00000-of-00003.bin", "x-00002-of-00003.bin"], "2 of the 3 files x-*-of-00003.bin"),
        (["x-00000-of-00003.bin", "x-00002-of-00003.bin"], "missing is x-00001-of-00003.bin."),
        (["x.bin-00001-of-00002"], "missing is x.bin-00000-of-00002."),
        (["x-2-of-2.bin"], "missing is x-1-of-2.bin."),
        (["x-3-of-9.bin"], "missing is x-0-of-9.bin, and 7 more."),
        (["a/x-0-of-2.bin", "b/x-1-of-2.bin"], "missing is b/x-0-of-2.bin."),
        (["x-0-of-2.bin", "x-1-of-2.bin", "y-0-of-1.bin"], ""),
        (["x-1-of-2.bin", "x-2-of-2.bin"], ""),
        (["x-00-of-02.bin", "x-01-of-02.bin", "x-0-of-1.bin", "x.bin", "2-of-3.bin"], ""),
        ([f"x-0-of-{'9' * 180}.bin"], ""),
    ],
    ids=itertools.count(),
)
def test_missing_files_of_a_numbered_set_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], told: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    with caplog.at_level(logging.WARNING):
        found = FileSet.open(tmp_path, [".bin", ".bi"])
    assert (told in caplog.text) if told else not caplog.text
    caplog.clear()
    FileSet.open(tmp_path, [".bin", ".bi"], found.names)
    assert not caplog.text


def test_links_are_followed_and_a_circle_of_them_is_an_error(tmp_path: Path) -> None:
    make(tmp_path / "store", blob=3, sub__x_bin=2)
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.bin").symlink_to(tmp_path / "store" / "blob")
    (data / "b").symlink_to(tmp_path / "store")
    found = FileSet.open(data, [".bin"])
    assert found.names == ("a.bin", "b/sub/x.bin")
    assert [state.size for state in found.states] == [3, 2]
    (tmp_path / "store" / "sub" / "back").symlink_to(data)
    with pytest.raises(ValueError, match="round in a circle"):
        FileSet.open(data, [".bin"])


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    def refused(kind: type[Exception], match: str, *names: str) -> None:
        with pytest.raises(kind, match=match):
            FileSet.open(tmp_path, [".bin"], names or None)

    with pytest.raises(FileNotFoundError, match="no file or folder"):
        FileSet.open(tmp_path / "nothing", [".bin"])
    refused(ValueError, r"holds no file \.bin")
    make(tmp_path, a_bin=1)
    refused(FileNotFoundError, r"there is no file 'b\.bin'", "a.bin", "b.bin")
    refused(ValueError, r"file a\.bin is named twice", "a.bin", "a.bin")
    with pytest.raises(ValueError, match="is a file: names and split choose among"):
        FileSet.open(tmp_path / "a.bin", [".bin"], ["a.bin"])
    make(tmp_path, b_bin=0)
    refused(ValueError, r"file b\.bin in .* is empty")
    (tmp_path / "b.bin").unlink()
    os.mkfifo(tmp_path / "b.bin")
    refused(ValueError, r"'b\.bin' in .* is not a file")
    (tmp_path / "b.bin").unlink()
    (tmp_path / "b.bin").symlink_to("nothing")
    refused(FileNotFoundError, r"there is no file 'b\.bin'")


def test_a_file_that_is_gone_or_replaced_is_seen(tmp_path: Path) -> None:
    make(tmp_path, a_bin=1, b_bin=1)
    files = FileSet.open(tmp_path, [".bin"])
    with (tmp_path / "a.bin").open("rb") as kept:
        (tmp_path / "new").write_bytes(b"1")
        os.utime(tmp_path / "new", ns=(1, files.states[0].mtime_ns))
        (tmp_path / "new").replace(tmp_path / "a.bin")
        files.check(0, fd=kept.fileno())
        with pytest.raises(ValueError, match=r"file a\.bin: it has changed: .* inode"):
            files.check(0)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ValueError, match=r"file b\.bin, row 3: it cannot be looked at any more"):
        files.check(1, 3)


def test_a_file_alone_needs_no_suffix(tmp_path: Path) -> None:
    make(tmp_path, whatever=5)
    found = FileSet.open(tmp_path / "whatever", [".bin"])
    assert (found.root, found.names, len(found)) == (tmp_path, ("whatever",), 1)
