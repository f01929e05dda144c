"""Files of a data set: which they are, in which order, which row is in which, and whether they changed."""

from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a.bin", "a/../b.bin", "a//b.bin", "."])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file"):
        FileSet.open(tmp_path, [".bin"], [name])
