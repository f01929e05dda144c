"""Documents in flat files of tokens: what an index says, what a last token says, and what is wrong with either."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.sources import documents
from loader.sources.documents import borders_by_index, borders_by_token
from loader.sources.files import FileSet


def files_of(root: Path, *lengths: int) -> FileSet:
    for number, length in enumerate(lengths):
        np.arange(length, dtype="<u2").tofile(root / f"{number}.bin")
    return FileSet.open(root, [".bin"])


def index(root: Path, number: int, *offsets: int) -> None:
    np.array(offsets, "<i8").tofile(root / f"{number}.idx")


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=3))
def test_a_document_ends_behind_its_last_token(every: list[list[int]]) -> None:
    files = FileSet(Path(), tuple(map(str, range(len(every)))), ())
    arrays = [np.array(tokens, np.uint16) for tokens in every]
    if not any(3 in tokens for tokens in every):
        return
    found = borders_by_token(files, lambda number: arrays[number], 3)
    for tokens, edges in zip(every, found, strict=True):
        ends = [place + 1 for place, token in enumerate(tokens) if token == 3]
        assert edges.tolist() == [0, *ends, len(tokens)]


def test_borders_do_not_depend_on_the_pieces_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileSet(Path(), ("a",), ())
    tokens = np.array([0, 9, 0, 0, 9, 9, 0], np.uint16)
    for piece in (1, 2, 3, 100):
        monkeypatch.setattr(documents, "_SCANNED_TOKENS", piece)
        (edges,) = borders_by_token(files, lambda _: tokens, 9)
        assert edges.tolist() == [0, 2, 5, 6, 7]


def test_a_token_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token id 7: it is nowhere in 2 files"):
        borders_by_token(files_of(tmp_path, 3, 3), lambda _: np.zeros(3, np.uint16), 7)


@pytest.mark.parametrize(("offsets", "edges"), [([0, 2, 2], [0, 2, 2, 5]), ([0, 5], [0, 5, 5])])
def test_an_index_lists_where_documents_begin(
    tmp_path: Path, offsets: list[int], edges: list[int]
) -> None:
    files = files_of(tmp_path, 5, 1)
    index(tmp_path, 0, *offsets)
    index(tmp_path, 1, 0)
    (first, second), digest = borders_by_index(files, [5, 1], ".idx")
    assert first.tolist() == edges
    assert second.tolist() == [0, 1]
    index(tmp_path, 0, 0, 3)
    assert borders_by_index(files, [5, 1], ".idx")[1] != digest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.array([1, 2], "<i8").tobytes(), "begins with the offset 1; the first document is at 0"),
        (np.array([0, 4, 3], "<i8").tobytes(), "entry 2: the offset 3 comes after 4"),
        (np.array([0, 6, 9], "<i8").tobytes(), "entry 1: the offset 6 is beyond the 5 tokens"),
        (b"123456789", "9 bytes, which is no whole number of int64"),
        (b"", "0.idx in .* is empty"),
    ],
)
def test_an_index_that_does_not_fit_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    files = files_of(tmp_path, 5)
    (tmp_path / "0.idx").write_bytes(data)
    with pytest.raises(ValueError, match=r"0\.idx") as caught:
        borders_by_index(files, [5], ".idx")
    assert caught.match(message)


def test_an_index_that_is_missing_is_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, 5, 5)
    index(tmp_path, 0, 0)
    with pytest.raises(FileNotFoundError, match=r"1\.idx"):
        borders_by_index(files, [5, 5], ".idx")


@pytest.mark.parametrize("suffix", ["", ".bin", "idx", "/"])
def test_a_suffix_that_names_no_index_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match="suffix"):
        borders_by_index(files_of(tmp_path, 5), [5], suffix)
