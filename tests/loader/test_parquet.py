"""Parquet: every record is the one that was written, whatever is kept, and a file that cannot be read is named."""

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
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import loader
from loader import ArraySource, ParquetSource, RecordSource

COUNTS: Final = (25, 1, 17)
N: Final = sum(COUNTS)
X: Final = np.random.default_rng(0).normal(size=(N, 2, 3)).astype("f4")
Y: Final = np.arange(N, dtype="i4") * 10
EVEN: Final = np.arange(N) % 2 == 0
WORDS: Final = np.array([f"w{row}" for row in range(N)], "U4")
IDS: Final = np.arange(N) + 1000
ARRAYS: Final = ArraySource({"x": X, "y": Y, "even": EVEN, "word": WORDS}, IDS)
BYTES: Final = N * (24 + 4 + 1 + 16)


TABLE: Final = pa.table(
    {
        "id": IDS,
        "x": pa.FixedShapeTensorArray.from_numpy_ndarray(X),
        "y": Y,
        "even": EVEN,
        "word": WORDS.tolist(),
    }
)


def table(start: int = 0, stop: int = N) -> Any:
    return TABLE.slice(start, stop - start)


def write(path: pathlib.Path, what: Any, **options: Any) -> None:
    pq.write_table(what, path, **{"row_group_size": 10, "write_page_checksum": True, **options})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("written")
    start = 0
    for number, count in enumerate(COUNTS):
        write(folder / f"{number}.parquet", table(start, start + count))
        start += count
    return folder


@pytest.fixture
def data(written: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the data that a test may spoil."""
    return pathlib.Path(shutil.copytree(written, tmp_path / "data"))


def opened(data: pathlib.Path, **options: Any) -> ParquetSource:
    return ParquetSource(data, ids="id", fields={"word": "U4"}, **options)


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


# Reading

KEPT: Final = {"all": BYTES, "most": BYTES - 1, "one group": BYTES // 4, "nothing": 0}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("rows", [[0], [], [N - 1, 0, 5, 5, 25, 9, 10], list(range(N))[::-1]])
def test_any_rows_are_read_as_they_were_written(
    written: pathlib.Path, rows: list[int], kept: str
) -> None:
    source = opened(written, cache_bytes=KEPT[kept])
    chosen = np.array(rows, np.int64)
    assert isinstance(source, RecordSource)
    assert source.fields == ARRAYS.fields
    for _ in range(2):
        assert_same(source.read(chosen), ARRAYS.read(chosen))
    np.testing.assert_array_equal(source.ids(chosen), IDS[chosen])


@pytest.mark.parametrize("kept", KEPT)
def test_content_is_that_of_the_same_arrays(written: pathlib.Path, kept: str) -> None:
    source = opened(written, cache_bytes=KEPT[kept])
    assert loader.fingerprint(source) == ARRAYS.fingerprint()
    assert loader.fingerprint(source) == ARRAYS.fingerprint()


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_read_is_fresh(written: pathlib.Path, kept: str) -> None:
    source = opened(written, cache_bytes=KEPT[kept])
    for _ in range(3):
        for array in source.read(np.arange(N)).values():
            assert array.flags.writeable
            array[:] = np.zeros((), array.dtype)
    assert_same(source.read(np.arange(N)), ARRAYS.read(np.arange(N)))


@pytest.mark.parametrize("kept", KEPT)
def test_no_more_is_kept_than_was_allowed(written: pathlib.Path, kept: str) -> None:
    source = opened(written, cache_bytes=KEPT[kept])
    groups = source._groups
    for start in range(0, N, 7):
        source.read(np.arange(start, min(start + 7, N)))
        assert groups._kept_bytes <= KEPT[kept]
        assert groups._kept_bytes == sum(
            b.nbytes for k in groups._kept.values() for b in k.values()
        )
    assert (groups._missing == 0) == (kept == "all")


def test_a_row_group_that_is_kept_is_decoded_once(
    written: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(written)
    decoded: list[int] = []
    real = type(source._groups)._decode

    def counted(self: Any, number: int, row: int) -> Any:
        decoded.append(number)
        return real(self, number, row)

    monkeypatch.setattr(type(source._groups), "_decode", counted)
    threads = [
        threading.Thread(target=source.read, args=(np.random.default_rng(i).integers(0, N, 30),))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source.read(np.arange(N))
    assert sorted(decoded) == list(range(3 + 1 + 2))


def test_several_threads_read_the_same_while_groups_come_and_go(written: pathlib.Path) -> None:
    source = opened(written, cache_bytes=BYTES // 3)
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            rows = rng.integers(0, N, 8)
            if not (source.read(rows)["x"] == X[rows]).all():
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_columns_are_chosen_and_ordered(written: pathlib.Path) -> None:
    source = ParquetSource(written, columns=["even", "y"])
    assert list(source.read(np.arange(3))) == list(source.fields) == ["even", "y"]
    assert source.ids(np.array([0, N - 1])).tolist() == ["0.parquet:0", "2.parquet:16"]


def test_a_column_may_be_field_and_id(written: pathlib.Path) -> None:
    source = ParquetSource(written, columns=["word", "y"], fields={"word": "U4"}, ids="word")
    assert (
        source.ids(np.array([3])).tolist() == source.read(np.array([3]))["word"].tolist() == ["w3"]
    )


@pytest.mark.parametrize("rows", [[N], [-1], [0, N]])
def test_row_that_is_none_is_an_index_error(written: pathlib.Path, rows: list[int]) -> None:
    with pytest.raises(IndexError, match=f"rows run from 0 to {N - 1}"):
        opened(written).read(np.array(rows))


def test_empty_row_groups_are_passed_over(tmp_path: pathlib.Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", table().schema) as writer:
        for start, stop in ((0, 0), (0, 3), (3, 3), (3, 8)):
            writer.write_table(table(start, stop))
    source = opened(tmp_path)
    for _ in range(2):
        assert_same(source.read(np.arange(8)), ARRAYS.read(np.arange(8)))
    assert source._groups._missing == 0


def test_a_source_can_be_sent_to_another_process(written: pathlib.Path) -> None:
    source = opened(written)
    source.read(np.arange(N))
    sent = pickle.loads(pickle.dumps(source))
    assert_same(sent.read(np.arange(N)), ARRAYS.read(np.arange(N)))
    assert sent.fingerprint() == source.fingerprint()


def test_a_data_set_that_cannot_be_kept_is_warned_of(
    written: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        opened(written)
        assert caplog.text == ""
        opened(written, cache_bytes=BYTES - 1)
    assert "of which cache_bytes keeps" in caplog.text


def test_types_that_a_reader_needs_help_with(tmp_path: pathlib.Path) -> None:
    columns = {
        "list": pa.array([[1, 2], [3, 4]]),
        "nested": pa.array([[[1.0], [2.0]], [[3.0], [4.0]]], pa.list_(pa.list_(pa.float32(), 1))),
        "bytes": pa.array([b"ab\0", b"\0\0\0"], pa.binary(3)),
        "date": pa.array(np.array(["2020-01-01", "1960-01-01"], "M8[D]")),
        "category": pa.array([7, 5]).dictionary_encode(),
        "half": pa.array(np.array([0.5, 2], "f2")),
    }
    write(tmp_path / "a.parquet", pa.table(columns))
    found = ParquetSource(tmp_path).read(np.array([1, 0]))
    assert found["list"].tolist() == [[3, 4], [1, 2]]
    assert found["nested"].tolist() == [[[3], [4]], [[1], [2]]]
    assert found["bytes"].tolist() == [[0, 0, 0], [97, 98, 0]]
    assert found["date"].astype(str).tolist() == ["1960-01-01", "2020-01-01"]
    assert found["category"].tolist() == [5, 7]
    assert found["half"].dtype == np.float16


def png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_images_are_decoded(tmp_path: pathlib.Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), np.uint8)
    write(tmp_path / "a.parquet", pa.table({"image": [*map(png, pixels[:3]), b"broken", None]}))
    write(tmp_path / "b.parquet", pa.table({"image": [*map(png, pixels[3:])]}))
    source = ParquetSource(tmp_path, decode={"image": loader.decode_image})
    assert source.fields["image"] == loader.Field(np.dtype(np.uint8), (6, 4, 3))
    np.testing.assert_array_equal(
        source.read(np.array([6, 0, 5, 2]))["image"], pixels[[4, 0, 3, 2]]
    )
    with pytest.raises(
        ValueError,
        match=r"file a.parquet, row 3: column 'image' cannot be decoded by decode_image: .*6 bytes",
    ):
        source.read(np.array([0, 3]))
    with pytest.raises(ValueError, match=r"file a.parquet, row 4: column 'image' is null"):
        source.read(np.array([0, 4]))


def test_how_values_are_decoded_is_part_of_the_identity(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": [b"ab", b"cd"]}))
    found = {
        ParquetSource(tmp_path, decode={"x": decode}).fingerprint().digest
        for decode in (len, max, max)
    }
    assert len(found) == 2


# What cannot be read


def test_a_file_of_other_columns_is_named(data: pathlib.Path) -> None:
    for name, wrong in (
        ("y", table().set_column(2, "y", pa.array(Y.astype("i8")))),
        ("y", table().drop_columns(["y"])),
        ("id", table().set_column(0, "id", pa.array(WORDS.tolist()))),
    ):
        write(data / "1.parquet", wrong)
        with pytest.raises(
            ValueError, match=rf"file 1.parquet, row 0: column '{name}' is .*, and in 0.parquet"
        ):
            opened(data)
    write(data / "1.parquet", table().set_column(2, "y", pa.array(Y.astype("i8"))))
    assert len(ParquetSource(data, columns=["even"])) == 25 + N + 17


def test_a_file_with_a_column_that_the_first_has_not_is_named(data: pathlib.Path) -> None:
    write(data / "1.parquet", table().append_column("weight", pa.array(Y)))
    with pytest.raises(
        ValueError, match=r"file 1.parquet, row 0: it has 'weight', a column that 0.parquet has not"
    ):
        opened(data)
    assert len(ParquetSource(data, columns=["even"])) == 25 + N + 17


def cut(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


def spoil_all(path: pathlib.Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


def spoil_footer(path: pathlib.Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-60:-20] = b"\xff" * 40
    path.write_bytes(whole)


@pytest.mark.parametrize("spoil", [cut, spoil_all, spoil_footer])
@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_no_whole_one_is_named_at_once(
    data: pathlib.Path, spoil: Any, number: int
) -> None:
    spoil(data / f"{number}.parquet")
    with pytest.raises(
        ValueError, match=rf"file {number}.parquet, row 0: it cannot be read, the file is cut"
    ):
        opened(data)


def test_a_column_that_comes_twice_is_refused_where_it_is_wanted(tmp_path: pathlib.Path) -> None:
    columns = [pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])]
    write(tmp_path / "a.parquet", pa.Table.from_arrays(columns, names=["x", "y", "x"]))
    for wanted, ids in ((None, "row"), (["x"], "row"), (["y"], "x")):
        with pytest.raises(ValueError, match=r"file a.parquet has 2 columns named 'x'"):
            ParquetSource(tmp_path, columns=wanted, ids=ids)
    assert ParquetSource(tmp_path, columns=["y"]).read(np.arange(2))["y"].tolist() == [3, 4]


def test_a_column_named_as_a_part_of_another_is_read(tmp_path: pathlib.Path) -> None:
    column = {"a": [{"b": 1}, {"b": 2}], "a.b": [[5], [6]], "a.c": [7, 8]}
    write(tmp_path / "a.parquet", pa.table(column))
    source = ParquetSource(tmp_path, columns=["a.b"], ids="a.c")
    assert source.read(np.array([1]))["a.b"].tolist() == [[6]]
    assert source.ids(np.array([1])).tolist() == [8]
    write(tmp_path / "a.parquet", pa.table({"a": [{"b": 1}, {"b": 2}], "a.b": [5, 6]}))
    source = ParquetSource(tmp_path, columns=["a.b"], ids="a.b")
    assert source.ids(np.array([1])).tolist() == source.read(np.array([1]))["a.b"].tolist() == [6]


def test_a_text_that_is_none_is_named_and_the_others_are_read(tmp_path: pathlib.Path) -> None:
    ends = pa.array([0, 1, 2, 3], pa.int32())
    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, ends.buffers()[1], pa.py_buffer(b"a\xffb")]
    )
    write(tmp_path / "a.parquet", pa.table({"t": texts, "n": [1, 2, 3]}))
    source = ParquetSource(tmp_path, columns=["t"], fields={"t": "U1"})
    assert source.read(np.array([2, 0]))["t"].tolist() == ["b", "a"]
    with pytest.raises(ValueError, match=r"file a.parquet, row 1: column 't' holds b'.xff'"):
        source.read(np.array([2, 1]))
    with pytest.raises(ValueError, match=r"file a.parquet, row 1: column 't' holds b'.xff'"):
        ParquetSource(tmp_path, columns=["n"], ids="t")


def test_a_file_that_cannot_be_opened_is_not_called_damaged(data: pathlib.Path) -> None:
    source = opened(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match=r"file 0.parquet cannot be read: Too many open files"):
            source.read(np.array([0]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(source.read(np.array([0]))["y"]) == 1


def test_files_that_are_not_there_or_hold_nothing_are_named(data: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        ParquetSource(data / "none")
    with pytest.raises(FileNotFoundError, match=r"no file '3.parquet'"):
        ParquetSource(data, names=["3.parquet"])
    write(data / "3.parquet", table(0, 0))
    with pytest.raises(ValueError, match=r"file 3.parquet holds no record"):
        opened(data)


def test_a_damaged_row_group_is_named_and_the_others_are_read(data: pathlib.Path) -> None:
    path = data / "0.parquet"
    start = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    whole = bytearray(path.read_bytes())
    whole[start + 60 : start + 90] = b"\xff" * 30
    path.write_bytes(whole)
    source = opened(data)
    with pytest.raises(ValueError, match=r"file 0.parquet, row 14: row group 1 cannot be read"):
        source.read(np.array([14, 0, 30]))
    rows = np.array([0, 9, 20, 42])
    assert_same(source.read(rows), ARRAYS.read(rows))


def replace_by_another(path: pathlib.Path) -> None:
    other = path.with_name(".other")
    write(other, table(0, 17))
    other.replace(path)


def edit_in_place(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\0" * 4)


@pytest.mark.parametrize("change", [replace_by_another, edit_in_place, cut, pathlib.Path.unlink])
def test_a_file_that_changes_before_it_is_read_is_an_error(data: pathlib.Path, change: Any) -> None:
    source = opened(data)
    before = source.read(np.arange(30, 36))
    change(data / "2.parquet")
    with pytest.raises(ValueError, match=r"file 2.parquet, row 11: .*(has changed|cannot be)"):
        source.read(np.array([37, 0]))
    # What was decoded before the change is still what was opened.
    assert_same(source.read(np.arange(30, 36)), before)


def test_a_null_is_named_and_the_others_are_read(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": [1, 2, None, 4], "y": [[1], [2], [3], [4, 5]]}))
    source = ParquetSource(tmp_path, columns=["x"])
    with pytest.raises(ValueError, match=r"file a.parquet, row 2: column 'x' is null"):
        source.read(np.array([0, 2]))
    assert source.read(np.array([3, 0, 1]))["x"].tolist() == [4, 1, 2]
    source = ParquetSource(tmp_path, columns=["y"])
    with pytest.raises(
        ValueError, match=r"file a.parquet, row 3: column 'y' has a list of 2 values"
    ):
        source.read(np.array([0, 3]))
    assert source.read(np.array([2, 0]))["y"].tolist() == [[3], [1]]


def test_ids_that_are_none_are_named(tmp_path: pathlib.Path) -> None:
    write(
        tmp_path / "a.parquet",
        pa.table({"x": [1, 2, 3], "n": [5, None, 6], "d": [1.5, 2.5, 3.5], "t": [5, 6, 5]}),
    )
    for ids, named in (
        ("n", r"file a.parquet, row 1: column 'n' is null"),
        ("d", r"IDs must be integers or strings, and column 'd' is double"),
        ("t", r"ID 5 belongs to rows 0 and 2 \(file a.parquet, row 0; file a.parquet, row 2\)"),
        ("z", r"ids must be .*a column, one of x, n, d, t; not 'z'"),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            ParquetSource(tmp_path, columns=["x"], ids=ids)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1G"])
def test_cache_bytes_is_a_number_of_bytes(written: pathlib.Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="cache_bytes must be a number of bytes"):
        opened(written, cache_bytes=wrong)


def int96(path: pathlib.Path, times: Any, **columns: Any) -> ParquetSource:
    given = pa.table({"t": times, **columns})
    write(path, given, row_group_size=4, use_deprecated_int96_timestamps=True)
    return ParquetSource(path)


EDGES: Final = np.array(
    ["1677-09-21T00:12:44.000001", "1969-12-31T23:59:59.999999", "1970", "2262-04-11T23:47:16.1"],
    "M8[ns]",
)


def test_int96_times_that_fit_are_exact(tmp_path: pathlib.Path) -> None:
    lists = pa.FixedSizeListArray.from_arrays(np.repeat(EDGES, 2), 2)
    source = int96(tmp_path / "a.parquet", EDGES, pair=lists, **{"t.u": [1, 2, 3, 4]})
    assert pq.ParquetFile(tmp_path / "a.parquet").schema.column(0).physical_type == "INT96"
    found = source.read(np.arange(4))
    np.testing.assert_array_equal(found["t"], EDGES)
    np.testing.assert_array_equal(found["pair"], np.repeat(EDGES, 2).reshape(4, 2))


@pytest.mark.parametrize(
    "time", ["0001-01-01", "1677-09-21T00:12:43.1", "2262-04-11T23:47:17", "9999-12-31T23:59:59"]
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("null", [False, True])
def test_an_int96_time_that_would_wrap_is_named(
    tmp_path: pathlib.Path, time: str, nested: bool, null: bool
) -> None:
    times: list[Any] = np.array([*EDGES, "1970", time], "M8[us]").tolist()
    times[4] = None if null else times[4]
    if nested:
        given = pa.array([[one, one] for one in times], pa.list_(pa.timestamp("us")))
    else:
        given = pa.array(times, pa.timestamp("us"))
    source = int96(tmp_path / "a.parquet", given)
    assert (source.read(np.arange(4))["t"].reshape(4, -1) == EDGES[:, np.newaxis]).all()
    with pytest.raises(
        ValueError, match=rf"a\.parquet, row 5: column 't' holds {time[:10]}.* INT96"
    ):
        source.read(np.array([5]))


@pytest.mark.parametrize("room", [1 << 23, 0])
def test_a_footer_is_parsed_once_and_no_file_stays_open(
    data: pathlib.Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("loader.sources.row_groups._FOOTER_BYTES", room)
    source = ParquetSource(data, ids="id", columns=["y"], cache_bytes=0, threads=1)
    parsed: list[str] = []

    class Counted(pq.ParquetFile):  # type: ignore[misc]
        def __init__(self, path: str, metadata: Any = None, **options: Any) -> None:
            if metadata is None:
                parsed.append(path)
            super().__init__(path, metadata=metadata, **options)

    before = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(pq, "ParquetFile", Counted)
    for rows in (np.arange(25), np.arange(25)[::-1], np.arange(25, 43)):
        np.testing.assert_array_equal(source.read(rows)["y"], Y[rows])
    assert len(set(parsed)) == 3
    assert not room or len(parsed) == 3
    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) == before
    del parsed[:]
    source.read(np.arange(25))
    assert len(parsed) == (0 if room else 1)
