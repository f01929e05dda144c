"""Files of Arrow tables: which holds a row, whether offsets lead out of their data, and which file is at fault."""

import pathlib
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from loader.sources.arrow_files import ArrowFiles, Stretch, check_sound, file_at_fault

pytestmark = pytest.mark.usefixtures("quiet_datasets")


def write(path: pathlib.Path, *lengths: int) -> str:
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, pa.schema({"x": "int64"})) as to,
    ):
        for length in lengths:
            to.write_batch(pa.record_batch({"x": np.arange(length)}))
    return str(path)


def test_the_file_of_a_row_is_found(tmp_path: pathlib.Path) -> None:
    a, b, c = (write(tmp_path / name, 5) for name in "abc")
    files = ArrowFiles(
        [Stretch(2, (a,), 3), Stretch(4, (), None), Stretch(1, (b, c), 0), Stretch(2, (c,), None)]
    )
    assert files
    assert files.place(0) == f"file {a}, row 3"
    assert files.in_brackets(1) == f" (file {a}, row 4)"
    assert {files.in_brackets(row) for row in (2, 5)} == {""}
    assert files.place(6) == f"file {b} or {c}, row 0"
    assert files.place(8) == f"file {c}"
    assert files.place(9) == files.place(-1) == ""
    assert not ArrowFiles([Stretch(2, (), None)])


def test_a_data_set_tells_its_files(tmp_path: pathlib.Path) -> None:
    whole = datasets.Dataset.from_dict({"x": range(20)})
    whole.save_to_disk(tmp_path / "set", num_shards=4)
    saved = datasets.load_from_disk(tmp_path / "set")
    paths = [entry["filename"] for entry in saved.cache_files]
    files = ArrowFiles.of(saved.data)
    assert [files.place(row) for row in (0, 4, 5, 19)] == [
        f"file {paths[number]}, row {row}" for number, row in ((0, 0), (0, 4), (1, 0), (3, 4))
    ]
    middle = datasets.concatenate_datasets([whole, saved.select(range(7, 14)).select(range(1, 6))])
    files = ArrowFiles.of(middle.data)
    assert files.place(19) == ""
    assert [files.place(20 + row - 8) for row in (8, 10, 12)] == [
        f"file {paths[number]}, row {row}" for number, row in ((1, 3), (2, 0), (2, 2))
    ]
    beside = datasets.concatenate_datasets([saved.rename_column("x", "y"), whole], axis=1)
    assert ArrowFiles.of(beside.data).place(6) == f"file {paths[1]}, row 1"
    assert not ArrowFiles.of(whole.data)


def test_the_files_of_the_rows_are_looked_at_however_many_there_are(tmp_path: pathlib.Path) -> None:
    paths = [write(tmp_path / f"{number}", 2) for number in range(30)]
    other = write(tmp_path / "other", 2)
    files = ArrowFiles([Stretch(2, (path,), 0) for path in paths], [*paths, other])
    files.check(np.arange(60))
    files.check_others()
    (tmp_path / "17").write_bytes(b"changed")
    for _ in range(30):  # whichever else is looked at
        with pytest.raises(ValueError, match=r"/17 of the data set has changed: .* bytes"):
            files.check(np.array([5, 35]))
    (tmp_path / "other").unlink()
    with pytest.raises(ValueError, match=r"/other of the data set is gone"):
        files.check_others()


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
