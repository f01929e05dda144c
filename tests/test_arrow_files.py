"""Files of Arrow tables: which holds a row, whether offsets lead out of their data, and which file is at fault."""

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from loader.sources.arrow_files import ArrowFiles, check_sound, file_at_fault


def write(path: pathlib.Path, *lengths: int) -> str:
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, pa.schema({"x": "int64"})) as to,
    ):
        for length in lengths:
            to.write_batch(pa.record_batch({"x": np.arange(length)}))
    return str(path)


def test_the_file_of_a_row_is_found_where_files_follow_each_other(tmp_path: pathlib.Path) -> None:
    paths = [write(tmp_path / "a", 2, 3), write(tmp_path / "b", 1)]
    files = ArrowFiles(paths, 6)
    assert files
    assert files.place(0) == f"file {paths[0]}, row 0"
    assert files.place(4) == f"file {paths[0]}, row 4"
    assert files.in_brackets(5) == f" (file {paths[1]}, row 0)"
    assert files.place(6) == ""


def test_no_file_is_named_where_it_cannot_be_told(tmp_path: pathlib.Path) -> None:
    paths = [write(tmp_path / "a", 2), write(tmp_path / "b", 2)]
    assert ArrowFiles(paths, 2).in_brackets(0) == ""  # such as two that are side by side
    assert not ArrowFiles([], 2)
    assert ArrowFiles([], 2).place(0) == ""
    files = ArrowFiles(paths, 4)
    (tmp_path / "b").write_bytes(b"123")
    assert files.place(0) == ""


def array(kind: Any, offsets: list[int], data: bytes) -> Any:
    """An array whose offsets are changed once Arrow has looked at them, as on disk."""
    ends = np.zeros(len(offsets), np.int64 if "large" in str(kind) else np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    made = pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
    ends[:] = offsets
    return made


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()], ids=str)
def test_offsets_are_looked_at_and_texts_are_not(kind: Any) -> None:
    for sound in (array(kind, [0, 1, 3], b"a\xffb"), array(kind, [0, 1, 3, 3], b"abc")[1:]):
        check_sound(sound, lambda: "it")
    for offsets in ([0, 5, 3], [0, 1, 9], [0, 2, 1, 3], [-1, 1, 3]):
        with pytest.raises(ValueError, match="it is damaged, and none of it is read: "):
            check_sound(array(kind, offsets, b"abc"), lambda: "it")


def test_the_file_at_fault_is_found(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.arrow", 2)
    (tmp_path / "info.json").write_text("{}")
    assert file_at_fault(str(tmp_path)) == "one of its files"
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "b.arrow").write_bytes(whole[:-20])
    assert file_at_fault(str(tmp_path)) == f"file {tmp_path / 'b.arrow'}"
    (tmp_path / "b.arrow").unlink()
    (tmp_path / "info.json").write_text("{")
    assert file_at_fault(str(tmp_path)) == f"file {tmp_path / 'info.json'}"
