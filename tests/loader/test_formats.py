"""One data set, the digits, in every format: the same records, batches and content, whatever holds it."""

import functools
import io
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_data_source import ArrayRecordDataSource
from PIL import Image
from sklearn.datasets import load_digits

import loader
from loader import PipelineConfig, RecordSource, dataset_digest

DIGITS: Final = load_digits()
IMAGES: Final = DIGITS.images.astype(np.uint8)[..., np.newaxis]
LABELS: Final = DIGITS.target.astype(np.int32)
IDS: Final = np.arange(len(LABELS)) + 1000
N: Final = len(LABELS)
SHARDS: Final = ((0, 1000), (1000, 1001), (1001, N))
ARRAYS: Final = loader.ArraySource({"image": IMAGES, "label": LABELS}, IDS)

Make = Callable[[pathlib.Path], RecordSource]


def shards(folder: pathlib.Path, kind: str) -> list[tuple[pathlib.Path, slice]]:
    folder.mkdir()
    return [
        (folder / f"digits-{number:05}-of-{len(SHARDS):05}.{kind}", slice(*rows))
        for number, rows in enumerate(SHARDS)
    ]


def png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[..., 0]).save(file, "PNG")
    return file.getvalue()


def array_record(folder: pathlib.Path) -> RecordSource:
    for path, rows in shards(folder, "array_record"):
        parts = zip(IMAGES[rows], LABELS[rows], IDS[rows], strict=True)
        loader.write_array_record(
            path, ({"image": image, "label": label, "id": one} for image, label, one in parts)
        )
    return loader.ArrayRecordSource(folder, ids="id")


def array_record_of_images(folder: pathlib.Path) -> RecordSource:
    for path, rows in shards(folder, "array_record"):
        parts = zip(IMAGES[rows], LABELS[rows], IDS[rows], strict=True)
        loader.write_array_record(
            path, ({"image": png(image), "label": label, "id": one} for image, label, one in parts)
        )
    return loader.ArrayRecordSource(folder, ids="id", decode={"image": loader.decode_image})


def table(rows: slice, images: Any) -> Any:
    return pa.table({"image": images, "label": LABELS[rows], "id": IDS[rows]})


def parquet(folder: pathlib.Path) -> RecordSource:
    for path, rows in shards(folder, "parquet"):
        images = pa.FixedShapeTensorArray.from_numpy_ndarray(IMAGES[rows])
        pq.write_table(table(rows, images), path, row_group_size=300)
    return loader.ParquetSource(folder, ids="id")


def parquet_of_images(folder: pathlib.Path) -> RecordSource:
    for path, rows in shards(folder, "parquet"):
        pq.write_table(table(rows, [*map(png, IMAGES[rows])]), path, row_group_size=300)
    return loader.ParquetSource(folder, ids="id", decode={"image": loader.decode_image})


def hugging_face() -> Any:
    import datasets

    features = datasets.Features(
        {
            "image": datasets.Array3D((8, 8, 1), "uint8"),
            "label": datasets.Value("int32"),
            "id": datasets.Value("int64"),
        }
    )
    columns = {"image": IMAGES, "label": LABELS, "id": IDS}
    return datasets.Dataset.from_dict(columns, features=features)


def hugging_face_saved(folder: pathlib.Path) -> RecordSource:
    import datasets

    watched = datasets.utils.tqdm.monitor_interval
    datasets.utils.tqdm.monitor_interval = 0  # no thread that watches a progress bar
    datasets.disable_progress_bars()
    try:
        hugging_face().save_to_disk(folder, num_shards=2)
    finally:
        datasets.utils.tqdm.monitor_interval = watched
    return loader.HuggingFaceSource(folder, ids="id")


def hugging_face_of_images(folder: pathlib.Path) -> RecordSource:
    import datasets

    values = [{"bytes": png(image), "path": None} for image in IMAGES]
    whole = datasets.Dataset.from_dict(
        {"image": values, "label": LABELS, "id": IDS},
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.Value("int32"),
                "id": datasets.Value("int64"),
            }
        ),
    )
    return loader.HuggingFaceSource(whole, ids="id")


def npy(folder: pathlib.Path) -> RecordSource:
    folder.mkdir()
    for name, array in (("image", IMAGES), ("label", LABELS), ("id", IDS)):
        np.save(folder / f"{name}.npy", array)
    return loader.NpySource(folder)


def records(_folder: pathlib.Path) -> RecordSource:
    parts = zip(IMAGES, LABELS, IDS, strict=True)
    made = [{"image": image, "label": label, "id": one} for image, label, one in parts]
    return loader.SequenceSource(made, ids="id")


class Decoding:
    """Grain's own reader of ArrayRecord, with records decoded as they come."""

    def __init__(self, paths: list[str]) -> None:
        self._source = ArrayRecordDataSource(paths)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> Any:
        return loader.decode_record(self._source[row])


def grains_source(folder: pathlib.Path) -> RecordSource:
    array_record(folder)
    return loader.SequenceSource(Decoding(sorted(map(str, folder.iterdir()))), ids="id")


FORMATS: Final[dict[str, Make]] = {
    make.__name__: make
    for make in (
        array_record,
        array_record_of_images,
        parquet,
        parquet_of_images,
        hugging_face_saved,
        hugging_face_of_images,
        npy,
        records,
        grains_source,
    )
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RecordSource]:
    """Makes each source once, in whatever order tests come."""
    folder = tmp_path_factory.mktemp("digits")
    return functools.cache(lambda name: FORMATS[name](folder / name))


@pytest.fixture(params=FORMATS)
def source(request: pytest.FixtureRequest, made: Callable[[str], RecordSource]) -> RecordSource:
    return made(request.param)


CONFIGS: Final = [
    PipelineConfig(batch_size=256, seed=17, num_epochs=2, final_batch="pad"),
    PipelineConfig(batch_size=100, seed=3, num_epochs=1, final_batch="partial", shuffle="none"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["shuffled", "in order"])
def test_the_same_config_gives_the_same_batches_bit_for_bit(
    source: RecordSource, config: PipelineConfig
) -> None:
    found = list(loader.Pipeline(source, config))
    wanted = list(loader.Pipeline(ARRAYS, config))
    assert len(found) == len(wanted)
    for batch, other in zip(found, wanted, strict=True):
        assert sorted(batch) == sorted(other)
        for name, array in other.items():
            assert batch[name].dtype == array.dtype
            assert batch[name].shape == array.shape
            assert batch[name].tobytes() == array.tobytes()


def test_the_content_is_the_same(source: RecordSource) -> None:
    assert loader.fingerprint(source) == loader.fingerprint(ARRAYS)


def test_each_record_has_one_digest(source: RecordSource) -> None:
    rows = np.array([0, 999, 1000, 1001, N - 1])

    def digests(of: RecordSource) -> list[str]:
        ids, fields = of.ids(rows), of.read(rows)
        return [
            dataset_digest(ids[i], *(fields[name][i] for name in sorted(fields)))
            for i in range(len(rows))
        ]

    assert digests(source) == digests(ARRAYS)


def test_its_own_fingerprint_is_the_same_each_time(source: RecordSource) -> None:
    assert source.fingerprint() == source.fingerprint()


def test_the_audit_finds_nothing(source: RecordSource) -> None:
    config = PipelineConfig(batch_size=256, seed=17, num_epochs=1, final_batch="drop")
    assert loader.audit(loader.Pipeline(source, config)).clean


# What each needs


OPTIONAL: Final = ("pyarrow", "datasets", "PIL", "pandas")


@pytest.mark.processes
def test_each_package_is_imported_when_it_is_needed_and_named_where_it_is_missing() -> None:
    program = f"""
import sys, loader
print([name for name in {OPTIONAL} if name in sys.modules])
sys.modules.update(dict.fromkeys({OPTIONAL}))
def why(call):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
why(lambda: loader.ParquetSource("none"))
why(lambda: loader.HuggingFaceSource("none"))
why(lambda: loader.decode_image(b""))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported, *errors = done.stdout.splitlines()
    assert imported == "[]"
    for line, extra in zip(errors, ("parquet", "huggingface", "images"), strict=True):
        assert f"pip install 'regrain[{extra}]'" in line
