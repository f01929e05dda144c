"""What all file sources share, shown with a format of one byte a record."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader.sources import digests
from loader.sources.digests import Cache
from loader.sources.file_source import FileSource
from loader.sources.files import FileSet
from loader.sources.identifiers import IdRule


class ByteSource(FileSource):
    """Each byte of each file is a record."""

    def __init__(self, root: Path, ids: IdRule = "file:row", cache: Cache = None) -> None:
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
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "0.bin").write_bytes(bytes([10, 11, 12]))
    (tmp_path / "data" / "b.bin").write_bytes(bytes([20, 21]))
    return tmp_path / "data"


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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be digested, in a list that grows."""
    found: list[str] = []
    real = digests._digest_piece

    def watched(files: FileSet, number: int, start: int) -> bytes:
        found.append(files.names[number])
        return real(files, number, start)

    monkeypatch.setattr(digests, "_digest_piece", watched)
    return found


def test_with_a_cache_only_what_has_changed_is_read(root: Path, reads: list[str]) -> None:
    expected = ByteSource(root).fingerprint()
    for cache in (True, root.parent / "kept"):
        reads.clear()
        assert ByteSource(root, cache=cache).fingerprint() == expected
        assert reads == ["a/0.bin", "b.bin"]
        assert ByteSource(root, cache=cache).fingerprint() == expected
        assert len(reads) == 2
        assert ByteSource(root, cache=cache).fingerprint(verify="full") == expected
        assert len(reads) == 4
    (root / "b.bin").write_bytes(bytes([1, 2]))
    reads.clear()
    assert ByteSource(root, cache=True).fingerprint() != expected
    assert reads == ["b.bin"]


def test_without_a_cache_every_file_is_read(root: Path, reads: list[str]) -> None:
    source = ByteSource(root)
    source.fingerprint()
    source.fingerprint()
    assert len(reads) == 4
    assert sorted(path.name for path in root.iterdir()) == ["a", "b.bin"]


def test_digests_of_several_workers_make_up_the_fingerprint(root: Path, reads: list[str]) -> None:
    source = ByteSource(root)
    expected = source.fingerprint()
    parts = [digests.digest_files(source.files, [number]) for number in (1, 0)]
    reads.clear()
    assert source.fingerprint(digests=digests.merge_digests(parts)) == expected
    assert reads == []
    assert source.fingerprint(digests=parts[0]) == expected
    assert reads == ["a/0.bin"]
    state = dataclasses.replace(source.files.states[0], size=4)
    other = {"a/0.bin": dataclasses.replace(parts[1]["a/0.bin"], state=state)}
    with pytest.raises(ValueError, match=r"file a/0\.bin has 3 bytes here, and 4"):
        source.fingerprint(digests=other)


def test_files_that_differ_are_named_by_the_fingerprint_alone(
    tmp_path: Path,
) -> None:
    """As a chain of Grain's gives it, and no source; one that was stored has numbers alone."""
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"abc")
    before = ByteSource(tmp_path).fingerprint()
    (tmp_path / "b.bin").write_bytes(b"abd")
    after = ByteSource(tmp_path).fingerprint()
    assert [one.note for one in before.diff(after)] == ["1 of 2 files differs: b.bin"]
    stored = loader.Fingerprint.from_dict(after.to_dict())
    assert stored == after
    assert [one.note for one in before.diff(stored)] == ["1 of 2 files differs: number 1"]
