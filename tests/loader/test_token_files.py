"""Files of tokens with a header: their tokens and nothing else, or an error that names the file."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loader


def read(source: loader.TokenSource) -> list[list[int]]:
    found: list[list[int]] = source.read(np.arange(len(source)))["tokens"].tolist()
    return found


def llmc(path: Path, magic: int, version: int, tokens: npt.NDArray[Any], count: int = -1) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count < 0 else count
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", ">u2", ">u4"])
def test_an_npy_file_is_read_by_its_header(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(40, 49).astype(dtype)
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens)
    expected = [[40, 41, 42, 43, 44], [44, 45, 46, 47, 48]]
    for source in (
        loader.TokenSource(tmp_path, 4, suffix=".npy"),
        loader.TokenSource(tmp_path / "a.bin", 4),
        loader.TokenSource(tmp_path, 4, rest="pad"),
    ):
        assert read(source) == expected
        assert read(pickle.loads(pickle.dumps(source))) == expected
        assert source.read(np.array([0]))["tokens"].dtype == np.int32


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_the_header_of_llm_c_is_skipped(
    tmp_path: Path, magic: int, version: int, dtype: str
) -> None:
    path = llmc(tmp_path / "a.bin", magic, version, np.arange(7, 16).astype(dtype))
    source = loader.TokenSource(path, 4)
    assert read(source) == [[7, 8, 9, 10, 11], [11, 12, 13, 14, 15]]
    documents = loader.TokenSource(tmp_path, 3, documents=11, rest="pad")
    assert read(documents) == [[7, 8, 9, 10], [10, 11, 0, 0], [12, 13, 14, 15]]


def test_a_header_of_another_kind_is_skipped_by_its_length(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"header" + np.arange(5, dtype="<u2").tobytes())
    assert read(loader.TokenSource(tmp_path, 4, header_bytes=6)) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match=r"a\.bin holds 16 bytes, and no token .* 16 of header"):
        loader.TokenSource(tmp_path, 4, header_bytes=16)
    with pytest.raises(ValueError, match="header_bytes must be at least 0, not -1"):
        loader.TokenSource(tmp_path, 4, header_bytes=-1)


def test_where_the_tokens_begin_is_part_of_the_identity(tmp_path: Path) -> None:
    np.arange(9, dtype="<u2").tofile(tmp_path / "a.bin")
    usual = loader.TokenSource(tmp_path, 3).fingerprint()
    assert usual.diff(loader.TokenSource(tmp_path, 3, header_bytes=2).fingerprint())


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"PK\x03\x04", "zip archive"),
        (b"PAR1", "Parquet file"),
        (b"ARROW1\0\0", "Arrow file"),
        (gzip.compress(b"x", mtime=0)[:8], "compressed by gzip"),
        (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
        (b"MMIDIDX\0", "index of Megatron-LM"),
    ],
)
def test_other_formats_are_refused_unless_said_to_be_flat(
    tmp_path: Path, start: bytes, what: str
) -> None:
    (tmp_path / "a.bin").write_bytes(start + bytes(20))
    with pytest.raises(ValueError, match=rf"file a\.bin begins with .*{what}.*header_bytes=0"):
        loader.TokenSource(tmp_path, 3)
    flat = loader.TokenSource(tmp_path, 3, header_bytes=0)
    assert flat.read(np.array([0]))["tokens"][0, 0] == int.from_bytes(start[:2], "little")


@pytest.mark.parametrize(
    ("magic", "version", "count", "message"),
    [
        (20240520, 2, 9, "magic number 20240520 and version 2"),
        (20240522, 1, 9, "magic number 20240522"),
        (20240520, 1, 10, "describes 10 tokens of uint16, 1044 bytes"),
        (20240520, 1, 0, "describes 0 tokens"),
    ],
)
def test_a_header_of_llm_c_that_does_not_fit_is_refused(
    tmp_path: Path, magic: int, version: int, count: int, message: str
) -> None:
    llmc(tmp_path / "a.bin", magic, version, np.arange(9, dtype="<u2"), count)
    with pytest.raises(ValueError, match=rf"file a\.bin .*{message}"):
        loader.TokenSource(tmp_path, 3)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(9), r"is an array int64\[9\], and tokens must have one axis"),
        (np.zeros((3, 3), np.uint16), r"is an array uint16\[3, 3\]"),
        (np.zeros(0, np.uint16), "0 tokens"),
    ],
)
def test_an_npy_file_of_anything_else_is_refused(
    tmp_path: Path, array: npt.NDArray[Any], message: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=rf"file a\.npy .*{message}"):
        loader.TokenSource(tmp_path / "a.npy", 3)


def test_an_npy_file_that_is_cut_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(9, dtype=np.uint16))
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:20], b"x" + whole[1:], whole[:6] + b"\x09\0" + whole[8:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"file a\.npy"):
            loader.TokenSource(path, 3)


def test_files_of_unequal_dtypes_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(9, dtype=np.uint32))
    with pytest.raises(ValueError, match=r"file b\.npy holds uint32, and file a\.npy uint16"):
        loader.TokenSource(tmp_path, 3, suffix=".npy")
    with pytest.raises(ValueError, match=r"a\.npy holds uint16, as its header says, .* 'uint32'"):
        loader.TokenSource(tmp_path / "a.npy", 3, dtype="uint32")
