"""What all file sources share, shown with a format of one byte a record."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader.sources.file_source import FileSource
from loader.sources.files import FileSet
from loader.sources.identifiers import IdRule


class ByteSource(FileSource):
    """Each byte of each file is a record."""

    def __init__(self, root: Path, ids: IdRule = "file:row", cache: bool | None = None) -> None:
        files = FileSet.open(root, [".bin"])
        counts = [state.size for state in files.states]
        fields = {"value": loader.Field(np.dtype("u1"))}
        reading = {"format": "bytes"}
        super().__init__(
            files, counts, fields, ids=ids, columns=["value"], reading=reading, cache=cache
        )

    def read_file(self, number: int, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        self.files.check(number, int(rows[0]))
        return {"value": np.fromfile(self.files.path(number), np.uint8)[rows]}

    def read_column(self, _name: str, number: int, /) -> npt.NDArray[Any]:
        return np.fromfile(self.files.path(number), np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.bin").write_bytes(bytes([10, 11, 12]))
    (tmp_path / "b.bin").write_bytes(bytes([20, 21]))
    return tmp_path


def test_records_come_in_the_order_asked_from_all_files(root: Path) -> None:
    source = ByteSource(root)
    rows = np.array([4, 0, 2, 3, 0])
    assert source.read(rows)["value"].tolist() == [21, 10, 12, 20, 10]
    assert source.ids(rows).tolist() == [
        "b.bin:1",
        "a/0.bin:0",
        "a/0.bin:2",
        "b.bin:0",
        "a/0.bin:0",
    ]
    assert isinstance(source, loader.RecordSource)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("row", [0, 1, 2, 3, 4]),
        ("value", [10, 11, 12, 20, 21]),
        (lambda rows: rows * 7, [0, 7, 14, 21, 28]),
        (lambda rows: [f"r{row}" for row in rows], ["r0", "r1", "r2", "r3", "r4"]),
    ],
)
def test_ids_are_made_by_each_rule(root: Path, rule: IdRule, expected: list[Any]) -> None:
    assert ByteSource(root, rule).ids(np.arange(5)).tolist() == expected


def test_ids_that_come_twice_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="rows 0 and 2"):
        ByteSource(root, lambda rows: rows % 2)


def test_the_fingerprint_knows_bytes_and_names_and_not_the_path(root: Path) -> None:
    before = ByteSource(root).fingerprint()
    moved = root.rename(root.with_name("moved"))
    assert ByteSource(moved).fingerprint() == before
    (moved / "b.bin").rename(moved / "c.bin")
    assert ByteSource(moved).fingerprint() != before
    (moved / "c.bin").rename(moved / "b.bin")
    os.utime(moved / "b.bin")
    assert ByteSource(moved).fingerprint() == before
    (moved / "b.bin").write_bytes(bytes([20, 22]))
    assert ByteSource(moved).fingerprint() != before
