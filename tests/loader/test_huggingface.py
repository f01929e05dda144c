"""Hugging Face: every record is the one of the data set, however it came about, and its identity is its content."""

import io
import itertools
import os
import pathlib
import pickle
import shutil
from collections.abc import Mapping
from typing import Any, Final

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from PIL import Image

import loader
from loader import ArraySource, Field, HuggingFaceSource, RecordSource

pytestmark = pytest.mark.usefixtures("quiet_datasets")

N: Final = 43
X: Final = np.random.default_rng(0).normal(size=(N, 2, 3)).astype("f4")
Y: Final = np.arange(N, dtype="i4") * 10
EVEN: Final = np.arange(N) % 2 == 0
WORDS: Final = np.array([f"w{row}" for row in range(N)], "U4")
IDS: Final = np.arange(N) + 1000
ARRAYS: Final = ArraySource({"x": X, "y": Y, "even": EVEN, "word": WORDS}, IDS)
FEATURES: Final = datasets.Features(
    {
        "x": datasets.Array2D((2, 3), "float32"),
        "y": datasets.Value("int32"),
        "even": datasets.Value("bool"),
        "word": datasets.Value("string"),
        "id": datasets.Value("int64"),
    }
)


def in_memory() -> Any:
    columns = {"x": X, "y": Y, "even": EVEN, "word": WORDS.tolist(), "id": IDS}
    return datasets.Dataset.from_dict(columns, features=FEATURES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved") / "set"
    in_memory().save_to_disk(folder, num_shards=3)
    return folder


def chunked(rows: int) -> Any:
    """A data set whose columns are in chunks, of several lengths."""
    table = in_memory().data.table
    parts = [table.slice(start, rows) for start in range(0, N, rows)]
    whole = pa.concat_tables(parts)
    other = pa.chunked_array([table.column("y").chunk(0)[:7], table.column("y").chunk(0)[7:]])
    return datasets.Dataset(whole.set_column(1, "y", other))


def opened(dataset: Any, **options: Any) -> HuggingFaceSource:
    return HuggingFaceSource(dataset, ids="id", fields={"word": "U4"}, **options)


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


# Reading


def loaded(saved: pathlib.Path) -> Any:
    return datasets.load_from_disk(saved)


MADE: Final[dict[str, Any]] = {
    "in memory": lambda _: in_memory(),
    "saved": loaded,
    "the folder": lambda saved: saved,
    "chunks of two": lambda _: chunked(2),
    "chunks of twenty": lambda _: chunked(20),
    "NumPy's format": lambda saved: loaded(saved).with_format("numpy"),
    "put together": lambda saved: datasets.concatenate_datasets(
        [in_memory().select(range(10)), loaded(saved).select(range(10, N))]
    ),
    "selected from a larger one": lambda saved: datasets.concatenate_datasets(
        [in_memory(), loaded(saved)]
    ).select(range(N, 2 * N)),
    "back from another order": lambda _: in_memory().select(range(N)[::-1]).select(range(N)[::-1]),
}


@pytest.mark.parametrize("made", MADE)
def test_any_rows_are_read_as_the_data_set_has_them(made: str, saved: pathlib.Path) -> None:
    source = opened(MADE[made](saved))
    assert isinstance(source, RecordSource)
    assert source.fields == ARRAYS.fields
    for rows in ([0], [], [N - 1, 0, 5, 5, 25, 9, 10], list(range(N))[::-1], list(range(10, 20))):
        chosen = np.array(rows, np.int64)
        assert_same(source.read(chosen), ARRAYS.read(chosen))
        np.testing.assert_array_equal(source.ids(chosen), IDS[chosen])


@pytest.mark.parametrize("made", MADE)
def test_its_identity_is_its_content(made: str, saved: pathlib.Path) -> None:
    assert opened(MADE[made](saved)).fingerprint() == ARRAYS.fingerprint()


def test_another_order_or_choice_is_another_data_set(saved: pathlib.Path) -> None:
    whole = loaded(saved)
    order = np.random.default_rng(0).permutation(N)
    for changed, rows in (
        (whole.select(order), order),
        (whole.select(range(5, 20)), np.arange(5, 20)),
        (whole.filter(lambda row: row["y"] % 20 == 0, keep_in_memory=True), np.arange(0, N, 2)),
    ):
        source = opened(changed)
        assert_same(source.read(np.arange(len(rows))), ARRAYS.read(rows))
        np.testing.assert_array_equal(source.ids(np.arange(len(rows))), IDS[rows])
        assert source.fingerprint() != ARRAYS.fingerprint()
        wanted = ArraySource(ARRAYS.read(rows), IDS[rows])
        assert source.fingerprint() == wanted.fingerprint()


def test_rows_of_a_selected_data_set_are_its_own(saved: pathlib.Path) -> None:
    source = HuggingFaceSource(loaded(saved).select([30, 2, 7]), columns=["y"])
    assert source.ids(np.array([2, 0])).tolist() == [2, 0]
    assert source.read(np.array([2, 0]))["y"].tolist() == [70, 300]


@pytest.mark.parametrize("made", ["in memory", "saved", "chunks of two"])
def test_what_is_read_is_fresh(made: str, saved: pathlib.Path) -> None:
    source = opened(MADE[made](saved))
    for array in source.read(np.arange(N)).values():
        array[:] = np.zeros((), array.dtype)
    assert_same(source.read(np.arange(N)), ARRAYS.read(np.arange(N)))


@pytest.mark.parametrize("rows", [[N], [-1], [0, N]])
def test_row_that_is_none_is_an_index_error(rows: list[int]) -> None:
    with pytest.raises(IndexError, match=f"rows run from 0 to {N - 1}"):
        opened(in_memory()).read(np.array(rows))


def test_a_source_can_be_sent_to_another_process(tmp_path: pathlib.Path) -> None:
    datasets.Dataset.from_dict({"x": np.arange(50_000)}).save_to_disk(tmp_path)
    source = HuggingFaceSource(loaded(tmp_path).select(range(7, 50_000)))
    source.read(np.arange(20))
    written = pickle.dumps(source)
    assert len(written) < 20_000
    assert pickle.loads(written).read(np.arange(2))["x"].tolist() == [7, 8]


# Features


def test_sequences_of_one_length_are_arrays() -> None:
    features = datasets.Features(
        {
            "fixed": datasets.List(datasets.Value("uint8"), length=3),
            "free": datasets.List(datasets.Value("float64")),
            "nested": datasets.List(datasets.List(datasets.Value("int16"), length=1), length=2),
            "array": datasets.Array3D((1, 2, 3), "int64"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    columns: dict[str, Any] = {
        "fixed": [[1, 2, 3], [4, 5, 6]],
        "free": [[0.5, 1], [2, 3]],
        "nested": [[[1], [2]], [[3], [4]]],
        "array": np.arange(12).reshape(2, 1, 2, 3),
        "label": [1, 0],
    }
    source = HuggingFaceSource(datasets.Dataset.from_dict(columns, features=features))
    assert source.fields == {
        "fixed": Field(np.dtype("u1"), (3,)),
        "free": Field(np.dtype("f8"), (2,)),
        "nested": Field(np.dtype("i2"), (2, 1)),
        "array": Field(np.dtype("i8"), (1, 2, 3)),
        "label": Field(np.dtype("i8")),
    }
    found = source.read(np.array([1, 0]))
    for name, values in columns.items():
        np.testing.assert_array_equal(found[name], np.asarray(values)[[1, 0]])


def png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


PIXELS: Final = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)


def test_images_are_decoded() -> None:
    features = datasets.Features({"image": datasets.Image(), "y": datasets.Value("int64")})
    values = [{"bytes": png(image), "path": None} for image in PIXELS]
    dataset = datasets.Dataset.from_dict({"image": values, "y": [0, 1, 2, 3]}, features=features)
    source = HuggingFaceSource(dataset)
    assert source.fields["image"] == Field(np.dtype(np.uint8), (6, 5, 3))
    np.testing.assert_array_equal(source.read(np.array([3, 1]))["image"], PIXELS[[3, 1]])
    grey = HuggingFaceSource(
        dataset, decode={"image": lambda data: loader.decode_image(data, (6, 5, 1))}
    )
    assert grey.read(np.array([0]))["image"].shape == (1, 6, 5, 1)


def images_of(feature: Any, images: npt.NDArray[np.uint8] = PIXELS) -> Any:
    values = [{"bytes": png(image), "path": None} for image in images]
    features = datasets.Features({"image": feature})
    return datasets.Dataset.from_dict({"image": values}, features=features)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_images_have_the_mode_of_their_feature(mode: str, channels: int) -> None:
    mixed = datasets.concatenate_datasets(
        [images_of(datasets.Image(mode=mode)), images_of(datasets.Image(mode=mode), PIXELS[..., 0])]
    )
    source = HuggingFaceSource(mixed)
    assert source.fields["image"].shape == (6, 5, channels)
    wanted = [np.asarray(image).reshape(6, 5, channels) for image in mixed["image"]]
    np.testing.assert_array_equal(source.read(np.arange(8))["image"], wanted)
    other = HuggingFaceSource(images_of(datasets.Image()))
    assert source.fingerprint() != other.fingerprint()
    own = HuggingFaceSource(mixed, decode={"image": lambda data: np.array([len(data) % 7])})
    assert own.fields["image"].shape == (1,)


def test_a_mode_that_is_not_delivered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'image' has the feature Image\(mode='CMYK'\)"):
        HuggingFaceSource(images_of(datasets.Image(mode="CMYK")))


def test_images_that_are_not_to_be_decoded_need_a_function() -> None:
    dataset = images_of(datasets.Image(decode=False))
    with pytest.raises(TypeError, match=r"'image' is struct.*give what decodes it, as decode"):
        HuggingFaceSource(dataset)
    source = HuggingFaceSource(dataset, decode={"image": loader.decode_image})
    np.testing.assert_array_equal(source.read(np.array([3, 1]))["image"], PIXELS[[3, 1]])


def test_the_identity_of_images_is_that_of_their_bytes() -> None:
    def identity(pixels: npt.NDArray[np.uint8], labels: list[int], **options: Any) -> Any:
        features = datasets.Features({"image": datasets.Image(), "y": datasets.Value("int64")})
        values = [{"bytes": png(image), "path": None} for image in pixels]
        columns = {"image": values, "y": labels}
        dataset = datasets.Dataset.from_dict(columns, features=features)
        return HuggingFaceSource(dataset, **options).fingerprint()

    calls = []

    def decode(data: bytes) -> Any:
        calls.append(data)
        return loader.decode_image(data)

    labels = [0, 1, 2, 3]
    found = identity(PIXELS, labels)
    assert found == identity(PIXELS, labels)
    assert found.columns["image"].shape == (6, 5, 3)
    assert found != identity(PIXELS[::-1], labels)
    assert found != identity(PIXELS, [0, 1, 2, 4])
    assert found != identity(PIXELS, labels, decode={"image": decode})
    assert len(calls) == 1  # the first one, which tells the shape
    changed = PIXELS.copy()
    changed[2, 1, 1, 0] ^= 1
    [difference] = found.diff(identity(changed, labels))
    assert difference.name == "dataset.image"


def test_an_image_that_is_none_is_named(tmp_path: pathlib.Path) -> None:
    features = datasets.Features({"image": datasets.Image()})
    values: list[Any] = [
        {"bytes": png(PIXELS[0]), "path": None},
        {"bytes": b"broken", "path": None},
        {"bytes": None, "path": str(tmp_path / "elsewhere.png")},
        None,
        {"bytes": png(PIXELS[0][:3]), "path": None},
    ]
    source = HuggingFaceSource(datasets.Dataset.from_dict({"image": values}, features=features))
    for row, named in (
        (1, "column 'image' cannot be decoded by decode_image: .*6 bytes"),
        (
            2,
            "column 'image' is null where the bytes should be, and names the file '.*elsewhere.png'",
        ),
        (3, "column 'image' is null"),
        (4, r"field 'image' is uint8\[3, 5, 3\]"),
    ):
        with pytest.raises(ValueError, match=rf"row {row}: {named}"):
            source.read(np.array([0, row]))


# What cannot be read


def test_a_null_is_named_and_the_others_are_read() -> None:
    columns: dict[str, list[Any]] = {
        "x": [1, 2, None, 4],
        "s": ["a", None, "b", "c"],
        "l": [[1], [2], [3], [4, 5]],
    }
    dataset = datasets.Dataset.from_dict(columns)
    for name, row, good in (("x", 2, [3, 0, 1]), ("s", 1, [3, 0, 2]), ("l", 3, [2, 0, 1])):
        fields = {"s": "U1"} if name == "s" else None
        for data, mapped in (
            (dataset, np.arange(4)),
            (dataset.select([3, 2, 1, 0]), np.arange(4)[::-1]),
        ):
            source = HuggingFaceSource(data, columns=[name], fields=fields)
            found = source.read(mapped[good])[name].reshape(-1).tolist()
            assert found == [np.ravel(columns[name][place])[0] for place in good]
            with pytest.raises(ValueError, match=f"row {mapped[row]}: column '{name}'"):
                source.read(mapped[[0, row]])


def test_records_that_were_filtered_out_are_not_asked_for_anything() -> None:
    columns: dict[str, list[Any]] = {
        "key": ["", None, "c", "d\0", "e"],
        "list": [None, [], [1, 2], [3], [4, 5]],
        "number": [1, 2, 3, 4, 5],
    }
    whole = datasets.Dataset.from_dict(columns)
    for chosen in ([2, 4], [4, 2]):
        source = HuggingFaceSource(whole.select(chosen), ids="key")
        rows = np.array([1, 0])
        assert source.ids(rows).tolist() == [columns["key"][row] for row in chosen[::-1]]
        assert source.read(rows)["list"].tolist() == [columns["list"][row] for row in chosen[::-1]]
    for chosen, named in (
        ([2, 1], "row 1 of the table: column 'key' is null"),
        ([0, 4], "column 'key' cannot be the IDs: row 0 has the ID ''"),
        ([3, 2], "column 'key' holds, in row 1, the string 'd"),
        ([4, 4], "ID 'e' belongs to rows 0 and 1;"),
    ):
        with pytest.raises(ValueError, match=named):
            HuggingFaceSource(whole.select(chosen), columns=["number"], ids="key")


def test_a_field_may_be_named_row() -> None:
    source = HuggingFaceSource(datasets.Dataset.from_dict({"row": [5, 6], "x": [1, 2]}))
    assert source.read(np.array([1]))["row"].tolist() == [6]
    assert source.ids(np.array([1])).tolist() == [1]


def spoil_offset(path: pathlib.Path, offsets: npt.NDArray[np.int32], at: int, value: int) -> None:
    """Changes one of the offsets in an Arrow file."""
    whole = path.read_bytes()
    assert whole.count(offsets.tobytes()) == 1
    changed = offsets.copy()
    changed[at] = value
    path.write_bytes(whole.replace(offsets.tobytes(), changed.tobytes()))


@pytest.mark.parametrize("value", [2**30, -5, 1])
@pytest.mark.parametrize("column", ["word", "list", "words"])
def test_offsets_that_lead_out_of_the_data_are_named_and_not_followed(
    tmp_path: pathlib.Path, column: str, value: int
) -> None:
    columns: dict[str, list[Any]] = {
        "word": [f"{row:03}" for row in range(90)],
        "list": [[row, row, row, row] for row in range(90)],
        "words": [[f"{row:05}"] for row in range(90)],
        "id": list(range(90)),
    }
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set", num_shards=3)
    width = {"word": 3, "list": 4, "words": 5}[column]
    path = tmp_path / "set" / "data-00001-of-00003.arrow"
    spoil_offset(path, np.arange(0, 31 * width, width, dtype=np.int32), 7, value)
    fields = {"word": "U3", "words": ("U5", (1,))}
    source = HuggingFaceSource(
        tmp_path / "set",
        columns=[column],
        ids="id",
        fields={column: fields[column]} if column != "list" else None,
    )
    rows = np.array([89, 3])
    assert (
        np.ravel(source.read(rows)[column]).tolist()
        == np.ravel([columns[column][89], columns[column][3]]).tolist()
    )
    named = (
        rf"column '{column}'.* \(file .*data-00001-of-00003.arrow, row |row 3\d \(file .*data-00001"
    )
    for read in (lambda: source.read(np.array([0, 37])), source.fingerprint):
        with pytest.raises(ValueError, match=named):
            read()
    if column == "word":
        with pytest.raises(ValueError, match="column 'word', rows 30 to 59 of the table"):
            HuggingFaceSource(tmp_path / "set", columns=["id", "list"][1:], ids="word")


def test_an_id_that_comes_twice_is_named_with_its_files(tmp_path: pathlib.Path) -> None:
    twice = datasets.Dataset.from_dict({"x": [1, 2, 3, 4], "key": ["a", "b", "c", "a"]})
    twice.save_to_disk(tmp_path / "set", num_shards=2)
    named = (
        r"rows 0 and 3 \(file .*00000-of-00002.arrow, row 0; file .*00001-of-00002.arrow, row 1\)"
    )
    with pytest.raises(ValueError, match=named):
        HuggingFaceSource(tmp_path / "set", ids="key")
    with pytest.raises(
        ValueError, match=r"rows 0 and 1 \(file .*00002.arrow, row 1; file .*, row 0\)"
    ):
        HuggingFaceSource(datasets.load_from_disk(tmp_path / "set").select([3, 0]), ids="key")


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_file_that_is_cut_is_named(
    saved: pathlib.Path, tmp_path: pathlib.Path, keep: int
) -> None:
    data = pathlib.Path(shutil.copytree(saved, tmp_path / "data"))
    path = data / "data-00001-of-00003.arrow"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=r"cannot be loaded, file .*data-00001-of-00003.arrow is cut"
    ):
        opened(data)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_a_description_that_is_cut_is_named(
    saved: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    data = pathlib.Path(shutil.copytree(saved, tmp_path / "data"))
    (data / name).write_text("{")
    with pytest.raises(
        ValueError, match=rf"cannot be loaded, file .*{name} is cut or damaged: JSON"
    ):
        opened(data)


def replace_by_another(path: pathlib.Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


def edit_in_place(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\1")


@pytest.mark.parametrize("change", [replace_by_another, edit_in_place, pathlib.Path.unlink])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    saved: pathlib.Path, tmp_path: pathlib.Path, change: Any
) -> None:
    data = pathlib.Path(shutil.copytree(saved, tmp_path / "data"))
    source = opened(data)
    source.read(np.arange(3))
    change(data / "data-00001-of-00003.arrow")
    with pytest.raises(
        ValueError, match=r"data-00001-of-00003.arrow of the data set (has changed|is gone)"
    ):
        source.read(np.arange(3))


def not_data_sets() -> list[tuple[Any, str]]:
    whole = in_memory()
    return [
        (whole.select([]), "the data set holds no record"),
        (datasets.DatasetDict({"train": whole}), r"several splits: .* dataset\['train'\]"),
        (whole.to_iterable_dataset(), "needed, not IterableDataset; one that is streamed"),
        ([1, 2], "a datasets.Dataset or its folder is needed, not list"),
        (whole.with_transform(lambda batch: batch), "has a transform of its own"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_what_holds_no_records_is_refused(number: int) -> None:
    dataset, named = not_data_sets()[number]
    with pytest.raises((TypeError, ValueError), match=named):
        HuggingFaceSource(dataset, fields={"word": "U4"})


REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"columns": ["z"]}, "columns names 'z', and there is 'x', 'y', 'even', 'word', 'id'"),
    ({"columns": ["word"]}, "field 'word' holds strings"),
    ({"columns": ["y"], "decode": {"y": len}}, "'y' is int32, not binary"),
    ({"columns": ["y"], "decode": {"x": len}}, "decode names 'x', and there is 'y'"),
    (
        {"columns": ["y"], "ids": "even"},
        "IDs must be integers or strings, and column 'even' is bool",
    ),
    ({"columns": ["y"], "ids": "file:row"}, 'ids must be "row"'),
    ({"columns": ["y"], "threads": 0}, "threads must be at least 1"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=itertools.count())
def test_what_names_nothing_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        HuggingFaceSource(in_memory(), **options)


def test_ids_that_come_twice_are_refused() -> None:
    twice = datasets.concatenate_datasets([in_memory(), in_memory()])
    with pytest.raises(ValueError, match=f"ID 1000 belongs to rows 0 and {N}"):
        opened(twice)
    assert len(opened(twice.select(range(N)))) == N


def test_a_folder_that_holds_no_data_set_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        HuggingFaceSource(tmp_path / "none")
