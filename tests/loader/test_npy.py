"""The .npy folder as a source: records, IDs, changes seen, and every folder that is refused."""

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from sklearn.datasets import load_digits

import loader
from loader.sources.npy_folder import DESCRIPTION, write_npy

N = 50
IMAGE = np.random.default_rng(0).integers(0, 255, (N, 4, 3), np.uint8)
LABEL = np.arange(N, dtype=np.int32)[::-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ids = [f"r{row}" for row in range(N)]
    source = loader.ArraySource({"image": IMAGE, "label": LABEL}, ids)
    write_npy(source, tmp_path / "data")
    return tmp_path / "data"


def rows_of(count: int = 7) -> npt.NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, N, count)


def test_records_and_ids_come_in_the_order_asked(folder: Path) -> None:
    source = loader.NpySource(folder)
    rows = rows_of()
    assert isinstance(source, loader.RecordSource)
    assert len(source) == N
    assert source.ids(rows).tolist() == [f"r{row}" for row in rows]
    read = source.read(rows)
    assert (read["image"] == IMAGE[rows]).all()
    assert (read["label"] == LABEL[rows]).all()
    read["image"][:] = 0  # a fresh array, and no part of the file
    assert (source.read(rows)["image"] == IMAGE[rows]).all()


def test_the_digits_give_the_same_batches_as_from_memory(tmp_path: Path) -> None:
    digits = load_digits()
    fields = {"image": digits.images.astype(np.uint8), "label": digits.target.astype(np.int32)}
    memory = loader.ArraySource(fields, np.arange(len(digits.images)) + 1000)
    write_npy(memory, tmp_path / "digits")
    disk = loader.NpySource(tmp_path / "digits")
    assert loader.fingerprint(disk) == memory.fingerprint()
    config = loader.PipelineConfig(batch_size=256, seed=3, final_batch="pad", num_epochs=1)
    for ours, theirs in zip(
        loader.Pipeline(disk, config), loader.Pipeline(memory, config), strict=True
    ):
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("row", [3, 1]), ("label", [N - 4, N - 2]), (lambda rows: rows * 2, [6, 2])],
)
def test_ids_can_be_others_than_the_folders(folder: Path, rule: Any, expected: list[int]) -> None:
    assert loader.NpySource(folder, ids=rule).ids(np.array([3, 1])).tolist() == expected


@pytest.mark.parametrize("rule", ["image", "nothing", "file:row", 3])
def test_ids_that_cannot_be_are_refused(folder: Path, rule: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"image|ids must be"):
        loader.NpySource(folder, ids=rule)


def test_row_numbers_take_no_file(tmp_path: Path) -> None:
    write_npy(loader.ArraySource({"x": LABEL}), tmp_path / "data")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {DESCRIPTION, "x.npy"}
    assert loader.NpySource(tmp_path / "data").ids(np.array([4, 2])).tolist() == [4, 2]


def test_a_folder_without_a_description_is_read_by_its_names(folder: Path) -> None:
    (folder / DESCRIPTION).unlink()
    source = loader.NpySource(folder)
    assert sorted(source.fields) == ["image", "label"]
    assert source.ids(np.array([4])).tolist() == ["r4"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).astype(ml_dtypes.bfloat16).reshape(3, 2),
        np.arange(3).astype(ml_dtypes.float8_e4m3fn),
        np.array(["a", "bc", "\u00e9"]),
        np.array(["2024-01-01", "2025-01-01", "2026-01-01"], "M8[D]"),
        np.array([(1, 2.5), (3, 4.5), (5, 6.5)], [("a", "i4"), ("b", "f8")]),
        np.arange(3, dtype=">i4"),
        np.array([True, False, True]),
        np.arange(3) * 1j,
    ],
)
def test_every_dtype_comes_back(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    memory = loader.ArraySource({"x/y": array, "X": array, "x": array})
    write_npy(memory, tmp_path / "data")
    disk = loader.NpySource(tmp_path / "data")
    assert disk.fields == memory.fields
    assert loader.fingerprint(disk) == memory.fingerprint()


def test_a_file_in_fortran_order_is_read_and_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "rows.npy", array)
    np.save(tmp_path / "columns.npy", np.asfortranarray(array))
    source = loader.NpySource(tmp_path)
    [warning] = caplog.messages
    assert "file columns.npy is in Fortran order" in warning
    read = source.read(np.array([3, 1]))
    assert read["columns"].flags.c_contiguous
    assert (read["columns"] == read["rows"]).all()
    write_npy(source, tmp_path / "again")
    caplog.clear()
    loader.NpySource(tmp_path / "again")
    assert not caplog.messages


@pytest.mark.processes
def test_it_can_be_sent_to_another_process(folder: Path) -> None:
    source = loader.NpySource(folder)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        read = pool.apply(source.read, (rows_of(),))
    assert (read["image"] == IMAGE[rows_of()]).all()
    os.utime(folder / "image.npy", ns=(1, 1))
    with pytest.raises(ValueError, match=r"file image\.npy: it has changed"):
        pickle.loads(pickle.dumps(source))


def test_a_file_that_changes_while_it_is_read_is_named(folder: Path) -> None:
    source = loader.NpySource(folder)
    source.read(rows_of())
    with (folder / "label.npy").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(ValueError, match=rf"file label\.npy, row {rows_of()[0]}: it has changed"):
        source.read(rows_of())
    pipeline = loader.Pipeline(source, loader.PipelineConfig(8, seed=1, final_batch="drop"))
    with pytest.raises(loader.RecordReadError) as failed:
        pipeline[0]
    assert "file label.npy, row" in str(failed.value.__cause__)
    masking = loader.PipelineConfig(8, seed=1, final_batch="drop", on_bad_record="mask")
    with pytest.raises(loader.RecordReadError, match="restore the data"):
        loader.Pipeline(source, masking)[0]


def test_a_file_that_is_replaced_stays_as_it_was(folder: Path) -> None:
    source = loader.NpySource(folder)
    shutil.copy(folder / "label.npy", folder / "new.npy")
    (folder / "new.npy").write_bytes((folder / "label.npy").read_bytes()[:-4] + b"1234")
    (folder / "new.npy").replace(folder / "label.npy")
    assert (source.read(rows_of())["label"] == LABEL[rows_of()]).all()
    with pytest.raises(ValueError, match=r"file label\.npy"):
        source.fingerprint()


def test_moving_the_folder_changes_nothing(folder: Path) -> None:
    source = loader.NpySource(folder)
    before = source.fingerprint()
    moved = folder.rename(folder.with_name("elsewhere"))
    assert loader.NpySource(moved).fingerprint() == before
    assert (source.read(rows_of())["label"] == LABEL[rows_of()]).all()


def test_the_current_folder_may_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    source = loader.NpySource("data")
    monkeypatch.chdir("/")
    assert source.fingerprint() == loader.NpySource(folder).fingerprint()


def edit(folder: Path, **changes: Any) -> None:
    described = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(described | changes))


def replaced(folder: Path, name: str, array: Any) -> None:
    np.save(folder / name, array, allow_pickle=True)


def archived(folder: Path, name: str) -> None:
    np.savez(folder / "a.npz", IMAGE)
    (folder / "a.npz").replace(folder / name)


def field(file: str, dtype: str = "int32", shape: Any = ()) -> dict[str, Any]:
    return {"x": {"file": file, "dtype": dtype, "shape": shape}}


DAMAGES: dict[str, tuple[Any, str]] = {
    "no folder": (shutil.rmtree, "there is no folder"),
    "no file": (lambda f: (f / "image.npy").unlink(), "there is no file 'image.npy'"),
    "no IDs": (lambda f: (f / "id.npy").unlink(), "there is no file 'id.npy'"),
    "empty": (lambda f: (f / "image.npy").write_bytes(b""), r"file image\.npy .* is empty"),
    "cut in the header": (
        lambda f: os.truncate(f / "image.npy", 60),
        r"file image\.npy cannot be read",
    ),
    "cut": (lambda f: os.truncate(f / "image.npy", 300), r"file image\.npy cannot be read"),
    "longer": (
        lambda f: (f / "image.npy").write_bytes((f / "image.npy").read_bytes() + b"1"),
        r"file image\.npy has \d+ bytes",
    ),
    "other bytes": (
        lambda f: (f / "image.npy").write_bytes(b"a" * 999),
        r"file image\.npy cannot be read",
    ),
    "objects": (
        lambda f: replaced(f, "image.npy", np.array([{}] * N)),
        r"file image\.npy cannot be",
    ),
    "no record": (
        lambda f: replaced(f, "image.npy", IMAGE[:0]),
        r"file image\.npy holds no record",
    ),
    "no axis": (lambda f: replaced(f, "image.npy", np.int8(1)), r"file image\.npy holds no record"),
    "shorter": (lambda f: replaced(f, "image.npy", IMAGE[1:]), "numbers of records differ"),
    "other shape": (lambda f: replaced(f, "image.npy", IMAGE[:, 1:]), r"says uint8\[4, 3\]"),
    "other dtype": (
        lambda f: replaced(f, "image.npy", IMAGE * 1.0),
        r"float64\[4, 3\], and .* says uint8",
    ),
    "ID twice": (
        lambda f: replaced(f, "id.npy", LABEL // 2),
        r"file id\.npy cannot be the IDs: ID 24",
    ),
    "ID of padding": (
        lambda f: replaced(f, "id.npy", LABEL - 1),
        r"file id\.npy cannot be the IDs: row 49",
    ),
    "fewer IDs": (lambda f: replaced(f, "id.npy", LABEL[1:]), r"id\.npy cannot be .* 49 IDs of 50"),
    "IDs of floats": (
        lambda f: replaced(f, "id.npy", LABEL * 1.0),
        r"file id\.npy cannot be the IDs",
    ),
    "ID too large": (
        lambda f: replaced(f, "id.npy", LABEL.astype(np.uint64) + 2**63),
        "does not fit int64",
    ),
    "archive": (lambda f: archived(f, "image.npy"), r"file image\.npy .* an archive of several"),
    "pickle": (
        lambda f: (f / "image.npy").write_bytes(pickle.dumps(IMAGE)),
        r"file image\.npy cannot be read as \.npy: it begins with b'.*', and such a file with b'.x93NUMPY'",
    ),
    "cut in the magic": (
        lambda f: os.truncate(f / "image.npy", 3),
        r"file image\.npy .* begins with b'.x93NU', and",
    ),
    "version": (lambda f: edit(f, version=2), "its format and version are"),
    "no field": (lambda f: edit(f, fields={}), "it names no field"),
    "path above": (lambda f: edit(f, fields=field("../data/label.npy")), "inside the folder"),
    "absolute path": (lambda f: edit(f, fields=field("/label.npy")), "inside the folder"),
    "file twice": (
        lambda f: edit(f, fields=field("label.npy") | {"y": field("label.npy")["x"]}),
        "twice",
    ),
    "field named id": (
        lambda f: edit(f, fields={"id": field("label.npy")["x"]}),
        "cannot be named 'id'",
    ),
    "no file named": (lambda f: edit(f, fields={"x": {}}), "it has no 'file'"),
    "fields a list": (lambda f: edit(f, fields=[]), "is no description"),
    "count a text": (lambda f: edit(f, num_records="50"), "is no description: '50' is no number"),
    "count not whole": (
        lambda f: edit(f, num_records=50.5),
        "is no description: 50.5 is no number",
    ),
    "count infinite": (lambda f: edit(f, num_records=float("inf")), "is no description: inf is no"),
    "shape a text": (
        lambda f: edit(f, fields=field("label.npy", shape="12")),
        "is no description: '12' is no list",
    ),
    "dtype a number": (
        lambda f: edit(f, fields={"x": {"file": "label.npy", "dtype": 3, "shape": []}}),
        "is no description: 3 is no dtype's name",
    ),
    "other count": (lambda f: edit(f, num_records=49), "numbers of records differ"),
    "torn": (lambda f: (f / DESCRIPTION).write_text("{"), "is no description"),
    "nested": (lambda f: (f / DESCRIPTION).write_text("[" * 10**5), "is no description"),
    "large": (lambda f: (f / DESCRIPTION).write_text(" " * 5_000_000), "more than 4194304 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_and_the_file_named(folder: Path, damage: str) -> None:
    damaged, message = DAMAGES[damage]
    damaged(folder)
    with pytest.raises((FileNotFoundError, ValueError, TypeError), match=message):
        loader.NpySource(folder)


#: Headers of damaged files, of which Python's own parsers say what they please.
HEADERS = {
    "end in a bracket": "{'descr': '<i4', 'fortran_order': False, 'shape': (50,",
    "end in a text": "{'descr': '''<i4",
    "nested": "(" * 3000,
    "no literal": "__import__('os').system('false')",
    "not hashed": "{[]: 1}",
    "shape too large": f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({10**30},)}}",
    "shape wraps around": f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({2**62}, 4, 50)}}",
    "shape negative": "{'descr': '<i4', 'fortran_order': False, 'shape': (-50,)}",
    "shape of truth values": "{'descr': '<i4', 'fortran_order': False, 'shape': (True,)}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (50,)}",
    "objects inside": "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (50,)}",
    "of Python 2": "{'descr': '<i4', 'fortran_order': False, 'shape': (50L,)}",
    "long": "{'descr': '<i4', 'fortran_order': False, 'shape': (50,)}" + " " * 20_000,
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_damaged_header_is_refused_and_the_file_named(folder: Path, header: str) -> None:
    text = HEADERS[header].encode() + b"\n"
    start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
    (folder / "label.npy").write_bytes(start + text + bytes(200))
    with pytest.raises(ValueError, match=r"file label\.npy cannot be read as \.npy") as refused:
        loader.NpySource(folder)
    assert "pickle" not in str(refused.value)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("array", [np.asfortranarray(IMAGE), LABEL.astype(">i4")], ids=["F", ">"])
def test_files_of_all_versions_orders_and_byte_orders_are_read(
    tmp_path: Path, array: npt.NDArray[Any], version: tuple[int, int]
) -> None:
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version)
    found = loader.NpySource(tmp_path).read(rows_of())["x"]
    assert found.dtype == array.dtype
    assert (found == array[rows_of()]).all()


def test_nothing_is_left_of_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    class Bad(loader.ArraySource):
        def read(self, rows: Any, /) -> dict[str, Any]:
            if rows[-1] == N - 1:
                raise OSError("the last one cannot be read")
            return super().read(rows)

    with pytest.raises(OSError, match="the last one"):
        write_npy(Bad({"x": LABEL}), tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_there_is_not_written_over(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "data"
    if kind == "file":
        target.touch()
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="is there already"):
        write_npy(loader.ArraySource({"x": LABEL}), target)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_without_a_description_holds_one_split(tmp_path: Path) -> None:
    for name in ("x_train", "x_test", "_scratch"):
        np.save(tmp_path / f"{name}.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"test \(x_test\), train \(x_train\).* folder of its own"):
        loader.NpySource(tmp_path)
    (tmp_path / "x_test.npy").unlink()
    assert list(loader.NpySource(tmp_path).fields) == ["x_train"]
