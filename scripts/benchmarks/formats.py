"""How fast each format's source gives batches, beside the format's own reader in a bare loop."""

import contextlib
import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import loader
from scripts.benchmarks.section import Section, Table, Target, at_least, ratios, spread, summary

NAME: Final = "formats"

BATCH: Final = 256
IMAGE: Final = 784
WINDOW: Final = 256  # tokens
_BOUND: Final = 0.8

Rows = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
#: Reads a batch of some rows, by the format's own means.
Read = Callable[[Rows], object]


@dataclasses.dataclass(frozen=True)
class Setting:
    """How much is read, and how often."""

    num_records: int
    rounds: int
    batches: int


FULL: Final = Setting(50_000, 15, 60)
QUICK: Final = Setting(1_000, 2, 3)


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: our source, and the bare reader.

    Attributes:
      source: opened over the files.
      bare: the format's own reader.
      how: what the bare loop calls for a batch, in words.
    """

    source: loader.RecordSource
    bare: Read
    how: str


def measure(*, quick: bool) -> Section:
    """Records per second of each source through `Pipeline.iterate`, and of the bare reader."""
    setting = QUICK if quick else FULL
    rates: dict[str, dict[str, list[float]]] = {}
    hows: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in FORMATS.items():
            place = Path(folder, name.replace(" ", "-"))
            place.mkdir()
            with make(place, setting.num_records) as one:
                hows[name] = one.how
                rates[name] = measure_format(one, setting)
    return Section(
        NAME,
        "Batches from each format, beside its own reader",
        conditions(setting) | {f"bare loop, {name}": how for name, how in hows.items()},
        (table(rates),),
        targets(rates),
        {"records_per_second": rates},
    )


def measure_format(one: Format, setting: Setting) -> dict[str, list[float]]:
    """Both rates, window by window, in turn; the first window of each warms up and is left out."""
    config = loader.PipelineConfig(BATCH, 17, "drop", None)
    batches = loader.Pipeline(one.source, config).iterate()
    rows = bare_rows(len(one.source))
    found: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(setting.rounds + 1):
        gc.collect()
        ours = timed(lambda: next(batches), setting.batches)
        bare = timed(lambda: one.bare(next(rows)), setting.batches)
        if number > 0:
            found["ours"].append(ours)
            found["bare"].append(bare)
    batches.close()
    return found


def timed(deliver: Callable[[], object], batches: int) -> float:
    """Records per second over some batches."""
    begin = time.perf_counter()
    for _ in range(batches):
        deliver()
    return batches * BATCH / (time.perf_counter() - begin)


def bare_rows(num_records: int) -> Iterator[Rows]:
    """Rows of batches in shuffled orders, which are made outside the clock as far as they are at hand."""
    generator = np.random.default_rng(17)
    orders = [generator.permutation(num_records) for _ in range(2)]
    while True:
        for order in orders:
            for low in range(0, num_records - BATCH + 1, BATCH):
                yield order[low : low + BATCH]


def records(count: int) -> Arrays:
    """``image uint8[n, 784]`` of noise and ``label int32[n]``."""
    generator = np.random.default_rng(0)
    return {
        "image": generator.integers(0, 256, (count, IMAGE), np.uint8),
        "label": generator.integers(0, 10, count, np.int32),
    }


@contextlib.contextmanager
def npy(place: Path, count: int) -> Iterator[Format]:
    """A folder of ``.npy`` files."""
    for name, array in records(count).items():
        np.save(place / f"{name}.npy", array)
    mapped = {path.stem: np.load(path, mmap_mode="r") for path in place.glob("*.npy")}
    how = "np.take(np.load(path, mmap_mode='r'), rows, axis=0) for each field"
    yield Format(
        loader.NpySource(place),
        lambda rows: {name: array.take(rows, axis=0) for name, array in mapped.items()},
        how,
    )


@contextlib.contextmanager
def arrayrecord(place: Path, count: int) -> Iterator[Format]:
    """One ArrayRecord file, group_size:1."""
    from array_record.python.array_record_module import (
        ArrayRecordReader,
    )

    arrays, path = records(count), place / "data.array_record"
    loader.write_array_record(
        path, ({name: array[i] for name, array in arrays.items()} for i in range(count))
    )
    reader = ArrayRecordReader(str(path))
    how = "ArrayRecordReader.read(rows): a list of bytes, not decoded"
    yield Format(loader.ArrayRecordSource(path), lambda rows: reader.read(rows.tolist()), how)
    reader.close()


@contextlib.contextmanager
def parquet(place: Path, count: int) -> Iterator[Format]:
    """One Parquet file in row groups of 4,096, which all fit into the source's cache."""
    import pyarrow.parquet as pq

    path = place / "data.parquet"
    pq.write_table(arrow(count), path, row_group_size=4096)
    whole = pq.read_table(path).combine_chunks()
    how = "pyarrow.Table.take(rows) on the file read whole into one chunk: Arrow data, not NumPy arrays"
    yield Format(loader.ParquetSource(path), whole.take, how)


@contextlib.contextmanager
def huggingface(_place: Path, count: int) -> Iterator[Format]:
    """A data set in memory."""
    import datasets

    dataset = datasets.Dataset(arrow(count))
    formatted = dataset.with_format("numpy")
    how = "dataset.with_format('numpy')[rows]"
    yield Format(loader.HuggingFaceSource(dataset), lambda rows: formatted[rows], how)


@contextlib.contextmanager
def tokens(place: Path, count: int) -> Iterator[Format]:
    """A flat file of uint16 tokens, windows of 256 + 1."""
    path = place / "data.bin"
    np.random.default_rng(0).integers(0, 50_000, count * WINDOW + 1, np.uint16).tofile(path)
    flat = np.memmap(path, "<u2", "r")

    def bare(rows: Rows) -> object:
        starts = (rows * WINDOW).tolist()
        return np.stack([flat[start : start + WINDOW + 1] for start in starts]).astype(np.int32)

    how = "np.stack of slices of a np.memmap, as int32"
    yield Format(loader.TokenSource(path, WINDOW), bare, how)


def arrow(count: int) -> Any:
    """The records as an Arrow table."""
    import pyarrow as pa

    arrays = records(count)
    images = pa.FixedSizeListArray.from_arrays(pa.array(arrays["image"].reshape(-1)), IMAGE)
    return pa.table({"image": images, "label": pa.array(arrays["label"])})


FORMATS: Final[dict[str, Callable[[Path, int], contextlib.AbstractContextManager[Format]]]] = {
    "npy folder": npy,
    "ArrayRecord": arrayrecord,
    "Parquet": parquet,
    "Hugging Face": huggingface,
    "token file": tokens,
}


def table(rates: dict[str, dict[str, list[float]]]) -> Table:
    """A row for each format."""
    rows = [
        [
            name,
            f"{summary(of['ours'])['median']:,.0f}",
            f"{summary(of['bare'])['median']:,.0f}",
            *spread(ratios(of["ours"], of["bare"]))[:2],
        ]
        for name, of in rates.items()
    ]
    columns = ("format", "records/s", "bare loop", "ratio", "quartiles")
    return Table("batches of 256, shuffled", columns, rows)


def targets(rates: dict[str, dict[str, list[float]]]) -> list[Target]:
    """At least 0.8 of the bare loop."""
    return [
        at_least(
            f"{name}: batches through the iterator / the format's own reader",
            summary(ratios(of["ours"], of["bare"]))["median"],
            _BOUND,
            "the bare loop makes no order, IDs or masks, nor fields' arrays where it says so",
        )
        for name, of in rates.items()
    ]


def conditions(setting: Setting) -> dict[str, str]:
    """What one must know to read the numbers."""
    return {
        "records": f"{setting.num_records:,} of image uint8[{IMAGE}] and label int32; tokens: windows of "
        f"{WINDOW} + 1, given as int32",
        "windows": f"{setting.rounds} of {setting.batches} batches each, ours and the bare loop's in turn, in "
        "one process and thread, after one that warms up",
        "clock": "perf_counter around the batches: order, IDs, masks and iterator inside it for ours; the "
        "bare loop is given its rows",
        "storage": "files just written, in the page cache; Parquet and Hugging Face data fit into memory",
    }
