"""Windows of tokens from flat files: the right ones, under IDs that name their places, and clear faults."""

import gc
import itertools
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader
from loader.sources import open_files

END = 99


def written(root: Path, *files: Sequence[int], dtype: str = "<u2") -> Path:
    root.mkdir(exist_ok=True)
    for number, tokens in enumerate(files):
        np.array(tokens, dtype).tofile(root / f"shard-{number}.bin")
    return root


def everything(source: loader.TokenSource) -> tuple[list[Any], dict[str, npt.NDArray[Any]]]:
    rows = np.arange(len(source))
    return source.ids(rows).tolist(), source.read(rows)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two files of 10 and 7 tokens; the first digit tells which."""
    return written(tmp_path / "data", range(100, 110), range(200, 207))


def test_windows_follow_each_other_by_a_token_less_than_they_have(root: Path) -> None:
    ids, fields = everything(loader.TokenSource(root, 3))
    assert ids == [
        "shard-0.bin:0",
        "shard-0.bin:3",
        "shard-0.bin:6",
        "shard-1.bin:0",
        "shard-1.bin:3",
    ]
    assert fields["tokens"].tolist() == [
        [100, 101, 102, 103],
        [103, 104, 105, 106],
        [106, 107, 108, 109],
        [200, 201, 202, 203],
        [203, 204, 205, 206],
    ]
    assert fields["tokens"].dtype == np.int32
    assert set(fields) == {"tokens"}


def test_a_stride_of_one_is_a_window_at_every_offset(root: Path) -> None:
    ids, fields = everything(loader.TokenSource(root, 5, stride=1))
    assert ids == [*(f"shard-0.bin:{i}" for i in range(5)), "shard-1.bin:0", "shard-1.bin:1"]
    assert fields["tokens"][:, 0].tolist() == [100, 101, 102, 103, 104, 200, 201]


def test_what_is_left_is_padded_where_that_is_asked_for(root: Path) -> None:
    ids, fields = everything(loader.TokenSource(root, 4, rest="pad"))
    assert ids[2:] == ["shard-0.bin:8", "shard-1.bin:0", "shard-1.bin:4"]
    assert fields["tokens"][2].tolist() == [108, 109, 0, 0, 0]
    assert fields["tokens"][4].tolist() == [204, 205, 206, 0, 0]
    assert fields["length"].tolist() == [5, 5, 2, 5, 3]
    assert fields["length"].dtype == np.int32


def test_rows_come_as_they_are_asked_for(root: Path) -> None:
    for source in (loader.TokenSource(root, 3), loader.TokenSource(root, 3, rest="pad")):
        ids, fields = everything(source)
        rows = np.array([4, 0, 0, 2, 3, 1])
        assert source.ids(rows).tolist() == [ids[row] for row in rows]
        read = source.read(rows)
        for name in fields:
            assert np.array_equal(read[name], fields[name][rows])
        none = source.read(rows[:0])
        assert [len(none[name]) for name in fields] == [0] * len(fields)
        assert np.array_equal(source.read_file(1, np.array([1]))["tokens"], read["tokens"][:1])
        with pytest.raises(IndexError):
            source.read(np.array([len(source)]))


def test_a_single_file_is_data_too(root: Path) -> None:
    source = loader.TokenSource(root / "shard-1.bin", 3)
    rows = np.array([1, 0, 1])
    assert source.ids(rows).tolist() == ["shard-1.bin:3", "shard-1.bin:0", "shard-1.bin:3"]
    assert source.read(rows)["tokens"][:, 0].tolist() == [203, 200, 203]
    assert source.read(rows[:0])["tokens"].shape == (0, 4)
    with pytest.raises(IndexError):
        source.read(np.array([-1]))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("batch_dtype", ["int32", "int64", "uint8", "uint16", "uint32"])
def test_dtypes_of_file_and_batch(tmp_path: Path, dtype: str, batch_dtype: str) -> None:
    data = written(tmp_path, range(9), dtype=dtype)
    source = loader.TokenSource(data, 4, dtype=dtype, batch_dtype=batch_dtype)
    tokens = source.read(np.array([1]))["tokens"]
    assert tokens.dtype == source.fields["tokens"].dtype == np.dtype(batch_dtype)
    assert tokens.tolist() == [[4, 5, 6, 7, 8]]
    tokens[:] = 0  # a batch of one's own, also where nothing was converted
    assert source.read(np.array([1]))["tokens"].tolist() == [[4, 5, 6, 7, 8]]


# Documents

DOCUMENTS = st.lists(
    st.lists(st.integers(0, END - 1), max_size=12).map(lambda tokens: [*tokens, END]),
    min_size=1,
    max_size=6,
)


@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.integers(1, 5), st.booleans())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_window_crosses_a_document_and_each_token_is_a_target_once(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[list[int]]],
    window: int,
    by_index: bool,
) -> None:
    root = tmp_path_factory.mktemp("data")
    written(root, *(list(itertools.chain(*documents)) for documents in files))
    if by_index:
        for number, documents in enumerate(files):
            sizes = [len(one) for one in documents]
            np.cumsum([0, *sizes[:-1]]).astype("<i8").tofile(root / f"shard-{number}.idx")
    if any(max(map(len, documents)) < 2 for documents in files):
        with pytest.raises(ValueError, match="has no stretch of the 2"):
            loader.TokenSource(root, window, documents=END, rest="pad")
        return
    source = loader.TokenSource(root, window, documents=".idx" if by_index else END, rest="pad")
    ids, fields = everything(source)
    assert len(set(ids)) == len(ids)
    expected = []
    for documents in files:
        for document in documents:
            for start in range(0, len(document) - 1, window):
                part = document[start : start + window + 1]
                expected.append((part + [0] * (window + 1 - len(part)), len(part)))
    found = zip(fields["tokens"].tolist(), fields["length"].tolist(), strict=True)
    assert list(found) == expected


def test_without_documents_windows_run_over_their_ends(tmp_path: Path) -> None:
    data = written(tmp_path, [1, END, 2, 3, END, 4, 5])
    assert len(loader.TokenSource(data, 2)) == 3
    kept = loader.TokenSource(data, 2, documents=END)
    assert everything(kept)[1]["tokens"].tolist() == [[2, 3, END]]


# IDs


def test_rows_are_found_by_their_ids(root: Path) -> None:
    source = loader.TokenSource(root, 3, rest="pad")
    ids, _ = everything(source)
    assert source.rows_of(np.array(ids)).tolist() == list(range(len(source)))
    others = ["shard-0.bin:1", "shard-0.bin:00", "shard-0.bin:12", "shard-9.bin:0", "x", "a:b"]
    others += ["shard-0.bin:-3", "shard-0.bin:", f"shard-0.bin:{10**30}", "shard-1.bin:6"]
    assert source.rows_of(np.array(others)).tolist() == [-1] * len(others)
    assert source.rows_of(np.array([0, 3])).tolist() == [-1, -1]  # which are IDs of another kind


def test_ids_may_be_row_numbers(root: Path) -> None:
    source = loader.TokenSource(root, 3, ids="row")
    ids = source.ids(np.array([4, 0]))
    assert ids.tolist() == [4, 0]
    assert ids.dtype == np.int64
    assert source.rows_of(np.array([4, 5, -1])).tolist() == [4, -1, -1]
    assert source.rows_of(np.array(["4", "shard-0.bin:0"])).tolist() == [-1, -1]


def test_a_name_with_a_colon_makes_no_id_twice(tmp_path: Path) -> None:
    (tmp_path / "a:0.bin").write_bytes(bytes(8))
    source = loader.TokenSource(tmp_path, 1)
    ids, _ = everything(source)
    assert ids == ["a:0.bin:0", "a:0.bin:1", "a:0.bin:2"]
    assert source.rows_of(np.array(ids)).tolist() == [0, 1, 2]


# As part of a pipeline


def test_a_stream_is_audited_and_its_records_are_found(root: Path) -> None:
    source = loader.TokenSource(root, 2, rest="pad")
    config = loader.PipelineConfig(batch_size=4, seed=3, num_epochs=2, final_batch="pad")
    pipeline = loader.Pipeline(source, config)
    assert loader.audit(pipeline).clean
    visits = loader.provenance(pipeline).steps_of("shard-1.bin:4")
    assert [visit.epoch for visit in visits] == [0, 1]
    for visit in visits:
        assert visit.step is not None
        assert visit.slot is not None
        assert pipeline[visit.step]["id"][visit.slot] == "shard-1.bin:4"
        assert pipeline[visit.step]["tokens"][visit.slot].tolist() == [204, 205, 206]
    report = loader.check_transform(pipeline)
    assert report.same, report


def test_a_source_goes_to_another_process(root: Path) -> None:
    source = loader.TokenSource(root, 2, rest="pad")
    again = pickle.loads(pickle.dumps(source))
    ids, fields = everything(source)
    ids_again, fields_again = everything(again)
    assert ids == ids_again
    assert fields.keys() == fields_again.keys()
    assert all(np.array_equal(fields[name], fields_again[name]) for name in fields)
    assert again.fingerprint() == source.fingerprint()


def test_more_files_are_read_than_are_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "budget", lambda: 3)
    gc.collect()
    data = written(tmp_path, *([number, 0, 0] for number in range(9)))
    source = loader.TokenSource(data, 2)
    for _ in range(2):
        assert everything(source)[1]["tokens"][:, 0].tolist() == list(range(9))
    assert len(source._maps._kept) <= 3


# Identity


def test_the_place_of_the_data_is_no_part_of_its_identity(root: Path, tmp_path: Path) -> None:
    before = loader.TokenSource(root, 3).fingerprint()
    root.rename(tmp_path / "elsewhere")
    assert loader.TokenSource(tmp_path / "elsewhere", 3).fingerprint() == before


@pytest.mark.parametrize(
    "change",
    [
        {"window": 4},
        {"stride": 2},
        {"rest": "pad"},
        {"documents": 103},
        {"documents": ".idx"},
        {"ids": "row"},
        {"batch_dtype": "int64"},
        {"names": ["shard-1.bin", "shard-0.bin"]},
    ],
)
def test_how_windows_are_laid_is_part_of_the_identity(root: Path, change: dict[str, Any]) -> None:
    for number in range(2):
        np.zeros(1, "<i8").tofile(root / f"shard-{number}.idx")
    usual: dict[str, Any] = {"window": 3}
    before = loader.TokenSource(root, **usual).fingerprint()
    assert loader.TokenSource(root, **usual).fingerprint() == before
    after = loader.TokenSource(root, **usual | change).fingerprint()
    assert before.diff(after)


def test_a_token_and_a_border_are_part_of_the_identity(root: Path) -> None:
    def identity() -> loader.Fingerprint:
        return loader.TokenSource(root, 2, documents=".idx").fingerprint()

    np.array([0, 4], "<i8").tofile(root / "shard-0.idx")
    np.array([0], "<i8").tofile(root / "shard-1.idx")
    first = identity()
    np.array([0, 5], "<i8").tofile(root / "shard-0.idx")
    second = identity()
    written(root, [*range(100, 109), 0], range(200, 207))
    assert len({one.digest for one in (first, second, identity())}) == 3


# Faults


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, not 0"),
        ({"window": 2**63 - 1}, ValueError, r"window must be at most 2\*\*62"),
        ({"stride": 10**5000}, ValueError, r"stride must be at most 2\*\*62"),
        ({"window": 2.0}, TypeError, "window must be an integer"),
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"stride": True}, TypeError, "stride must be an integer"),
        ({"dtype": "int16"}, ValueError, "dtype must be one of 'uint8', 'uint16', 'uint32'"),
        ({"batch_dtype": "float32"}, ValueError, "batch_dtype must be one of"),
        ({"rest": "keep"}, ValueError, "rest must be one of 'drop', 'pad', not 'keep'"),
        ({"ids": "hash"}, ValueError, "ids must be one of 'file:offset', 'row'"),
        ({"vocabulary": 0}, ValueError, "vocabulary must be at least 1"),
        ({"documents": 2.5}, TypeError, "documents must be a token id, a suffix or None"),
        ({"documents": 1 << 16}, ValueError, "documents must be a token id from 0 to 65535"),
        ({"documents": 300, "vocabulary": 300}, ValueError, "a token id from 0 to 299, not 300"),
        ({"documents": 5}, ValueError, "token id 5: it is nowhere in 2 files"),
        ({"window": 8}, ValueError, r"shard-1\.bin of 7 tokens has no stretch of the 9"),
        ({"window": 90}, ValueError, r"shard-0\.bin of 10 .* the 91 .*, nor have 1 other files"),
        ({"suffix": ".tokens"}, ValueError, r"holds no file \.tokens"),
        ({"names": ["shard-7.bin"]}, FileNotFoundError, r"no file 'shard-7\.bin'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    root: Path, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        loader.TokenSource(root, **{"window": 3} | arguments)


def test_a_file_that_is_cut_is_named(root: Path) -> None:
    with (root / "shard-1.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"shard-1\.bin holds 15 bytes.* 1 too many after byte 14"):
        loader.TokenSource(root, 3)


def test_a_file_that_is_empty_is_named(root: Path) -> None:
    (root / "shard-0.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"shard-0\.bin in .* is empty"):
        loader.TokenSource(root, 3)


def test_a_token_beyond_the_vocabulary_is_named_with_its_offset(root: Path) -> None:
    loader.TokenSource(root, 3, vocabulary=207).read(np.arange(5))
    sources = [
        loader.TokenSource(root, 3, vocabulary=206),
        loader.TokenSource(root, 3, vocabulary=206, rest="pad"),
        loader.TokenSource(root / "shard-1.bin", 3, vocabulary=206),
    ]
    for source in sources:
        with pytest.raises(ValueError, match=r"shard-1\.bin, offset 6: .* id 206.* before 206"):
            source.read(np.array([0, len(source) - 1]))


def test_a_token_that_a_batch_has_no_place_for_is_named(tmp_path: Path) -> None:
    data = written(tmp_path, [1, 2, 2**31], dtype="<u4")
    source = loader.TokenSource(data, 2, dtype="uint32")
    with pytest.raises(ValueError, match="offset 2: there is the token id 2147483648"):
        source.read(np.array([0]))
    whole = loader.TokenSource(data, 2, dtype="uint32", batch_dtype="int64")
    assert whole.read(np.array([0]))["tokens"].tolist() == [[1, 2, 2**31]]


@pytest.mark.parametrize("change", ["cut", "edited", "replaced", "removed"])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_a_file_that_changes_during_the_run_is_named(
    root: Path, change: str, mapped: bool, single: bool
) -> None:
    path = root / "shard-1.bin"
    source = loader.TokenSource(path if single else root, 3)
    rows = np.array([len(source) - 1])
    if mapped:
        source.read(rows)
    if change == "cut":
        os.truncate(path, 2)
    elif change == "removed":
        path.unlink()
    elif change == "edited":
        path.write_bytes(bytes(14))
        os.utime(path, ns=(0, 0))
    else:
        other = root / "other"
        other.write_bytes(path.read_bytes())
        other.replace(path)
    with pytest.raises(ValueError, match=r"file shard-1\.bin, row 1: it "):
        source.read(rows)


def test_the_stream_names_the_window_whose_file_has_changed(root: Path) -> None:
    source = loader.TokenSource(root, 3)
    pipeline = loader.Pipeline(source, loader.PipelineConfig(5, seed=1, final_batch="drop"))
    (root / "shard-1.bin").unlink()
    with pytest.raises(loader.RecordReadError, match=r"'shard-1\.bin:[03]'"):
        pipeline.read(loader.Position())
