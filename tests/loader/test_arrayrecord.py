"""ArrayRecord: every record is the one that was written, and a file that cannot be read is named."""

import collections
import io
import logging
import os
import pathlib
import pickle
import resource
import shutil
import threading
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from array_record.python import array_record_module
from PIL import Image

import loader
from loader import ArrayRecordSource, ArraySource, RecordSource, write_array_record
from loader.sources import array_record_readers, open_files

COUNTS: Final = (5, 1, 7)
N: Final = sum(COUNTS)
X: Final = np.random.default_rng(0).normal(size=(N, 2, 3)).astype("f4")
Y: Final = np.arange(N, dtype="i4") * 10
WORDS: Final = np.array([f"w{row}" for row in range(N)], "U4")
IDS: Final = np.arange(N) + 1000


def records(start: int = 0, stop: int = N) -> list[dict[str, Any]]:
    return [
        {"x": X[row], "y": Y[row], "word": np.array(WORDS[row], "U4"), "id": IDS[row]}
        for row in range(start, stop)
    ]


def write_raw(path: pathlib.Path, values: list[bytes], options: str = "group_size:1") -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for value in values:
        writer.write(value)
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("written")
    start = 0
    for number, count in enumerate(COUNTS):
        write_array_record(folder / f"{number}.array_record", records(start, start + count))
        start += count
    return folder


@pytest.fixture
def data(written: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the data that a test may spoil."""
    return pathlib.Path(shutil.copytree(written, tmp_path / "data"))


ARRAYS: Final = ArraySource({"x": X, "y": Y, "word": WORDS}, IDS)


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


# Reading


@pytest.mark.parametrize("rows", [[0], [], [N - 1, 0, 5, 5, 4], list(range(N))[::-1]])
def test_any_rows_are_read_as_they_were_written(written: pathlib.Path, rows: list[int]) -> None:
    source = ArrayRecordSource(written, ids="id")
    chosen = np.array(rows, np.int64)
    assert isinstance(source, RecordSource)
    assert source.fields == ARRAYS.fields
    assert_same(source.read(chosen), ARRAYS.read(chosen))
    np.testing.assert_array_equal(source.ids(chosen), IDS[chosen])


def test_content_is_that_of_the_same_arrays(written: pathlib.Path) -> None:
    assert loader.fingerprint(ArrayRecordSource(written, ids="id")) == ARRAYS.fingerprint()


def test_what_is_read_is_fresh(written: pathlib.Path) -> None:
    source = ArrayRecordSource(written, ids="id")
    for array in source.read(np.arange(N)).values():
        array[:] = 0
    assert_same(source.read(np.arange(N)), ARRAYS.read(np.arange(N)))


def test_one_file_is_a_data_set_whatever_its_name(
    written: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copy(written / "2.array_record", tmp_path / "shard-2")
    source = ArrayRecordSource(tmp_path / "shard-2", columns=["x"])
    assert source.ids(np.array([0, 6])).tolist() == ["shard-2:0", "shard-2:6"]


def test_shards_are_found_by_their_names(written: pathlib.Path, tmp_path: pathlib.Path) -> None:
    names = [f"x.array_record-{number:05}-of-00003" for number in range(3)]
    for number, name in enumerate(names):
        shutil.copy(written / f"{number}.array_record", tmp_path / name)
    (tmp_path / "features.json").write_text("{}")
    source = ArrayRecordSource(tmp_path, ids="id")
    assert source.files.names == tuple(names)
    assert_same(source.read(np.arange(N)), ARRAYS.read(np.arange(N)))


def test_columns_are_chosen_and_ordered(written: pathlib.Path) -> None:
    source = ArrayRecordSource(written, columns=["word", "y"])
    assert list(source.read(np.arange(3))) == list(source.fields) == ["word", "y"]


def test_row_that_is_none_is_an_index_error(written: pathlib.Path) -> None:
    for row in (N, -1):
        with pytest.raises(IndexError, match=rf"rows run from 0 to {N - 1}"):
            ArrayRecordSource(written, ids="id").read(np.array([row]))


def test_a_batch_is_one_read_of_each_file(
    written: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ArrayRecordSource(written, ids="id")
    calls = collections.Counter[int]()
    real = array_record_readers.Readers._reader

    def counted(self: Any, number: int, row: int) -> Any:
        calls[number] += 1
        return real(self, number, row)

    monkeypatch.setattr(array_record_readers.Readers, "_reader", counted)
    source.read(np.arange(N))
    assert calls == {0: 1, 1: 1, 2: 1}


def test_more_files_than_readers_are_read(
    written: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "budget", lambda: 1)
    source = ArrayRecordSource(written, ids="id")
    for _ in range(3):
        assert_same(source.read(np.arange(N)), ARRAYS.read(np.arange(N)))
    assert len(source._readers._open) <= 1


def test_several_threads_read_the_same(
    written: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "budget", lambda: 2)
    source = ArrayRecordSource(written, ids="id")
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            rows = rng.integers(0, N, 8)
            if not (source.read(rows)["y"] == Y[rows]).all():
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_source_can_be_sent_to_another_process(written: pathlib.Path) -> None:
    source = ArrayRecordSource(written, ids="id")
    source.read(np.arange(N))
    sent = pickle.loads(pickle.dumps(source))
    assert_same(sent.read(np.arange(N)), ARRAYS.read(np.arange(N)))
    assert sent.fingerprint() == source.fingerprint()


# Decoding


def pairs(record: bytes) -> dict[str, Any]:
    left, right = np.frombuffer(record, "<i4")
    return {"left": left, "right": right, "key": f"k{left}"}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("raw") / "pairs.array_record"
    write_raw(path, [np.array([row, -row], "<i4").tobytes() for row in range(9)])
    return path


def test_records_of_any_kind_are_decoded_by_a_function(raw: pathlib.Path) -> None:
    source = ArrayRecordSource(raw, decode=pairs, ids="key")
    assert source.read(np.array([8, 0]))["right"].tolist() == [-8, 0]
    assert source.ids(np.array([8, 0])).tolist() == ["k8", "k0"]
    assert list(source.fields) == ["left", "right"]


def test_strings_that_a_function_gives_need_a_width(raw: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match=r"file pairs.array_record, row 0: field 'key' holds strings"
    ):
        ArrayRecordSource(raw, decode=pairs)
    source = ArrayRecordSource(raw, decode=pairs, fields={"key": "U4"})
    assert source.read(np.array([3]))["key"].tolist() == ["k3"]


def test_images_in_records_are_decoded(tmp_path: pathlib.Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)

    def png(image: npt.NDArray[np.uint8]) -> bytes:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return file.getvalue()

    path = tmp_path / "a.array_record"
    write_array_record(path, ({"image": png(image), "y": y} for y, image in enumerate(pixels)))
    source = ArrayRecordSource(path, decode={"image": loader.decode_image})
    assert_same(source.read(np.array([2, 0])), {"image": pixels[[2, 0]], "y": np.array([2, 0])})
    with pytest.raises(ValueError, match=r"row 0: 'image' is bytes, .*loader.decode_image"):
        ArrayRecordSource(path)
    assert list(ArrayRecordSource(path, columns=["y"]).fields) == ["y"]


@pytest.mark.parametrize(
    ("decode", "named"),
    [
        ({"y": bytes}, "row 0: the record has no bytes named 'y' to be decoded; it has x, y"),
        ({"z": bytes}, "row 0: the record has no bytes named 'z'"),
        (lambda _: 1, "row 0: .*<lambda> must give a dict of arrays, not 1"),
        (lambda _: {}, "must give a dict of arrays"),
        (lambda _: {"x": None}, "row 0: field 'x' has dtype object"),
        (lambda _: {"id": 1, "x": 1}, "'id' cannot be a field: .*ids='id'"),
        (lambda _: 1 // 0, "row 0: the record cannot be decoded by .*: ZeroDivisionError"),
        ("png", "decode must be a function"),
        ({"x": 1}, "decode must map names to functions"),
    ],
)
def test_decoding_that_gives_no_fields_is_refused(
    written: pathlib.Path, decode: Any, named: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        ArrayRecordSource(written, decode=decode)


def test_how_records_are_decoded_is_part_of_the_identity(raw: pathlib.Path) -> None:
    def again(record: bytes) -> dict[str, Any]:
        return pairs(record)

    columns = ["left", "right"]
    found = ArrayRecordSource(raw, decode=pairs, columns=columns).fingerprint()
    assert found == ArrayRecordSource(raw, decode=pairs, columns=columns).fingerprint()
    assert found != ArrayRecordSource(raw, decode=again, columns=columns).fingerprint()


# What cannot be read


def test_a_record_unlike_the_first_is_named(tmp_path: pathlib.Path) -> None:
    others: list[dict[str, Any]] = [
        {"x": np.zeros(3, "f4")},
        {"x": np.zeros(2, "f8")},
        {"y": np.zeros(2, "f4")},
    ]
    path = tmp_path / "a.array_record"
    write_array_record(path, [{"x": np.zeros(2, "f4")}, *others])
    source = ArrayRecordSource(path)
    assert source.read(np.array([0]))["x"].tolist() == [[0, 0]]
    for row, named in enumerate([r"float32\[3\]", r"float64\[2\]", "no 'x'; it has y"], 1):
        with pytest.raises(ValueError, match=rf"file a.array_record, row {row}: .*{named}"):
            source.read(np.array([0, row]))


@pytest.mark.parametrize("decode", [None, {}, loader.decode_record, {"image": len}])
def test_an_entry_that_the_first_record_has_not_is_named(
    tmp_path: pathlib.Path, decode: Any
) -> None:
    image = {"image": b"abc"} if decode == {"image": len} else {}
    records: list[dict[str, Any]] = [{"key": row, "x": row / 2, **image} for row in range(5)]
    records[3]["weight"] = 2.0
    path = tmp_path / "a.array_record"
    write_array_record(path, records)
    named = (
        r"file a.array_record, row 3, id 3: the record has 'weight', which the first record has not"
    )
    with pytest.raises(ValueError, match=named):
        ArrayRecordSource(path, decode=decode, ids="key")
    source = ArrayRecordSource(path, decode=decode)
    assert source.read(np.array([4, 0]))["x"].tolist() == [2, 0]
    for rows in ([3], [0, 3], [3, 0]):
        with pytest.raises(ValueError, match="row 3: the record has 'weight'"):
            source.read(np.array(rows))
    some = ArrayRecordSource(path, decode=decode, ids="key", columns=["x"])
    assert some.read(np.arange(5))["x"].tolist() == [0, 0.5, 1, 1.5, 2]


def test_a_value_that_is_no_record_is_named(tmp_path: pathlib.Path) -> None:
    good = loader.encode_record({"x": 1})
    write_raw(tmp_path / "a.array_record", [good, b"no record at all", good[:-1]])
    source = ArrayRecordSource(tmp_path)
    with pytest.raises(
        ValueError, match=r"row 1: the record cannot be decoded .*begin with b'no record"
    ):
        source.read(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"row 2: the record cannot be decoded .*it is cut"):
        source.read(np.array([0, 2]))


def cut(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


def spoil_all(path: pathlib.Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


def leave_open(path: pathlib.Path) -> None:
    """What a writer leaves that was killed: records, and no index of them."""
    path.write_bytes(path.read_bytes()[: 1 << 15])


@pytest.mark.parametrize("spoil", [cut, spoil_all, leave_open])
def test_a_file_that_is_no_whole_one_is_named_at_once(data: pathlib.Path, spoil: Any) -> None:
    spoil(data / "1.array_record")
    with pytest.raises(
        ValueError, match=r"file 1.array_record, row 0: it is no ArrayRecord file, is cut"
    ):
        ArrayRecordSource(data)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(data: pathlib.Path) -> None:
    source = ArrayRecordSource(data, columns=["y"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match=r"file 1.array_record cannot be read: Too many open"):
            source.read(np.array([5]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert source.read(np.array([5]))["y"].tolist() == [50]


def test_files_that_are_not_there_or_hold_nothing_are_named(data: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder"):
        ArrayRecordSource(data / "none")
    with pytest.raises(FileNotFoundError, match=r"no file '3.array_record'"):
        ArrayRecordSource(data, names=["3.array_record"])
    (data / "3.array_record").touch()
    with pytest.raises(ValueError, match=r"file 3.array_record .*is empty"):
        ArrayRecordSource(data)
    write_raw(data / "3.array_record", [])
    with pytest.raises(ValueError, match=r"file 3.array_record holds no record"):
        ArrayRecordSource(data)


def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.array_record"
    values = np.random.default_rng(0).integers(0, 256, (9, 5000), np.uint8)
    write_array_record(path, ({"x": value} for value in values))
    whole = bytearray(path.read_bytes())
    place = whole.index(values[4].tobytes()[:64]) + 200
    whole[place] ^= 1
    path.write_bytes(whole)
    source = ArrayRecordSource(path)
    with pytest.raises(
        ValueError,
        match=r"file a.array_record, row 4: it cannot be read, the file is damaged: .*hash mismatch",
    ):
        source.read(np.array([8, 4, 1]))
    np.testing.assert_array_equal(source.read(np.array([8, 3, 1]))["x"], values[[8, 3, 1]])


def replace_by_another(path: pathlib.Path) -> None:
    other = path.with_name(".other")
    write_array_record(other, records(0, 7))
    other.replace(path)


def edit_in_place(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\0" * 64)


@pytest.mark.parametrize("change", [replace_by_another, edit_in_place, cut, pathlib.Path.unlink])
@pytest.mark.parametrize("was_read", [True, False])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    data: pathlib.Path, change: Any, was_read: bool
) -> None:
    source = ArrayRecordSource(data, columns=["y"])
    if was_read:
        source.read(np.arange(N))
    change(data / "2.array_record")
    with pytest.raises(
        ValueError, match=r"file 2.array_record, row 3: it (has changed|cannot be looked at)"
    ):
        source.read(np.array([9, 0]))
    assert source.read(np.array([0]))["y"].tolist() == [0]


def test_ids_that_come_twice_are_refused(tmp_path: pathlib.Path) -> None:
    write_array_record(tmp_path / "a.array_record", [{"x": 1, "id": 5}, {"x": 2, "id": 5}])
    with pytest.raises(ValueError, match=r"ID 5 belongs to rows 0 and 1"):
        ArrayRecordSource(tmp_path, ids="id")


def test_ids_of_several_kinds_are_refused(tmp_path: pathlib.Path) -> None:
    write_array_record(tmp_path / "a.array_record", [{"x": 1, "id": 5}, {"x": 2, "id": "a"}])
    with pytest.raises(ValueError, match=r"row 1: 'id' is <U1"):
        ArrayRecordSource(tmp_path, ids="id")


def test_a_bad_record_can_be_masked(tmp_path: pathlib.Path) -> None:
    good = loader.encode_record({"x": 1})
    write_raw(tmp_path / "a.array_record", [good, good, b"bad", good])
    source = ArrayRecordSource(tmp_path)
    config = loader.PipelineConfig(
        batch_size=4, seed=1, final_batch="drop", num_epochs=1, shuffle="none", on_bad_record="mask"
    )
    batch = loader.Pipeline(source, config)[0]
    assert batch["mask"].tolist() == [True, True, False, True]


# Writing


def test_large_groups_are_warned_of_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        write_array_record(tmp_path / f"{name}.array_record", records(), "group_size:4")
    with caplog.at_level(logging.WARNING):
        source = ArrayRecordSource(tmp_path, columns=["y"])
        found = source.read(np.arange(2 * N))
    np.testing.assert_array_equal(found["y"], np.tile(Y, 2))
    assert [record.name for record in caplog.records] == ["loader.sources.array_record_readers"]
    assert "4 records to a group" in caplog.text


def test_a_file_is_there_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    def failing() -> Any:
        yield {"x": 1}
        raise KeyError("lost")

    with pytest.raises(KeyError):
        write_array_record(tmp_path / "a.array_record", failing())
    with pytest.raises(ValueError, match=r"there is no record to write"):
        write_array_record(tmp_path / "a.array_record", [])
    with pytest.raises(OSError, match=r"cannot be written"):
        write_array_record(tmp_path / "none" / "a.array_record", [{"x": 1}])
    assert list(tmp_path.iterdir()) == []
    write_array_record(tmp_path / "a.array_record", [{"x": 1}])
    written = (tmp_path / "a.array_record").read_bytes()
    with pytest.raises(FileExistsError, match="is there already; name another file"):
        write_array_record(tmp_path / "a.array_record", [{"x": 2}])
    assert (tmp_path / "a.array_record").read_bytes() == written
    assert [path.name for path in tmp_path.iterdir()] == ["a.array_record"]
