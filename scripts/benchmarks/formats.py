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
LARGE: Final = 3072
#: Of text, records of a batch, and tokens of a window.
WINDOWS: Final = 64
WINDOW: Final = 2048
#: What is timed: batches through the iterator, the bare reader, and the two calls of the source.
OURS, BARE, RECORDS, IDS = "ours", "bare", "records", "IDs"
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
      batch: records of a batch.
    """

    source: loader.RecordSource
    bare: Read
    how: str
    batch: int = BATCH


def measure(*, quick: bool) -> Section:
    """Time for a batch of each source through `Pipeline.iterate`, and of the bare reader."""
    setting = QUICK if quick else FULL
    times: dict[str, dict[str, list[float]]] = {}
    hows: dict[str, str] = {}
    batches: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in FORMATS.items():
            place = Path(folder, name.replace(" ", "-"))
            place.mkdir()
            with make(place, setting.num_records) as one:
                hows[name], batches[name] = one.how, one.batch
                times[name] = measure_format(one, setting)
    return Section(
        NAME,
        "Batches from each format, beside its own reader",
        conditions(setting) | {f"bare loop, {name}": how for name, how in hows.items()},
        (table(times, batches), parts(times)),
        targets(times),
        {"batch": batches, "microseconds_a_batch": times},
    )


def measure_format(one: Format, setting: Setting) -> dict[str, list[float]]:
    """Times, window by window, in turn; the first round warms up and is left out."""
    config = loader.PipelineConfig(one.batch, 17, "drop", None)
    batches = loader.Pipeline(one.source, config).iterate()
    # Rows of their own for each: what one has read is in a cache for the next one.
    bare, read, ids = (bare_rows(len(one.source), one.batch, seed) for seed in range(3))
    deliver: dict[str, Callable[[], object]] = {
        OURS: lambda: next(batches),
        BARE: lambda: one.bare(next(bare)),
        RECORDS: lambda: one.source.read(next(read)),
        IDS: lambda: one.source.ids(next(ids)),
    }
    found: dict[str, list[float]] = {name: [] for name in deliver}
    turns = list(deliver)
    for number in range(setting.rounds + 1):
        gc.collect()
        for name in turns:
            took = timed(deliver[name], setting.batches)
            if number > 0:
                found[name].append(took)
        turns.append(turns.pop(0))  # the one behind the collection finds cold caches
    batches.close()
    return found


def timed(deliver: Callable[[], object], batches: int) -> float:
    """Microseconds a batch, over some batches."""
    begin = time.perf_counter()
    for _ in range(batches):
        deliver()
    return 1e6 * (time.perf_counter() - begin) / batches


def bare_rows(num_records: int, batch: int, seed: int) -> Iterator[Rows]:
    """Rows of batches in shuffled orders, which are made outside the clock as far as they are at hand."""
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(num_records) for _ in range(2)]
    while True:
        for order in orders:
            for low in range(0, num_records - batch + 1, batch):
                yield order[low : low + batch]


def records(count: int, image: int = IMAGE) -> Arrays:
    """``image uint8[n, image]`` of noise and ``label int32[n]``."""
    generator = np.random.default_rng(0)
    return {
        "image": generator.integers(0, 256, (count, image), np.uint8),
        "label": generator.integers(0, 10, count, np.int32),
    }


@contextlib.contextmanager
def npy(place: Path, count: int) -> Iterator[Format]:
    """A folder of ``.npy`` files, whose bare reader is the index that one sees in training scripts."""
    source, mapped = npy_folder(place, records(count))
    how = "np.load(path, mmap_mode='r')[rows] for each field"
    yield Format(source, lambda rows: {name: array[rows] for name, array in mapped.items()}, how)


@contextlib.contextmanager
def npy_taken(place: Path, count: int) -> Iterator[Format]:
    """The same files, whose bare reader is the fastest call that NumPy has."""
    source, mapped = npy_folder(place, records(count))
    how = "np.take(np.load(path, mmap_mode='r'), rows, axis=0) for each field"
    yield Format(source, taken(mapped), how)


@contextlib.contextmanager
def npy_large(place: Path, count: int) -> Iterator[Format]:
    """A folder of fewer and larger records, as images in colour are."""
    source, mapped = npy_folder(place, records(max(count * IMAGE // LARGE, 2 * BATCH), LARGE))
    yield Format(source, taken(mapped), f"as above, of image uint8[{LARGE:,}]")


def npy_folder(place: Path, arrays: Arrays) -> tuple[loader.NpySource, Arrays]:
    """The source, and each field's file as NumPy maps it."""
    for name, array in arrays.items():
        np.save(place / f"{name}.npy", array)
    mapped = {path.stem: np.load(path, mmap_mode="r") for path in place.glob("*.npy")}
    return loader.NpySource(place), mapped


def taken(mapped: Arrays) -> Read:
    """Reads with `np.take`."""
    return lambda rows: {name: array.take(rows, axis=0) for name, array in mapped.items()}


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
    source, whole = parquet_file(place, count)

    def bare(rows: Rows) -> object:
        taken = whole.take(rows)
        image = taken["image"].combine_chunks().flatten().to_numpy().reshape(-1, IMAGE)
        return {"image": image, "label": taken["label"].to_numpy()}

    how = "pyarrow.Table.take(rows) on the file read whole into one chunk, and its columns as NumPy arrays"
    yield Format(source, bare, how)


@contextlib.contextmanager
def parquet_taken(place: Path, count: int) -> Iterator[Format]:
    """The same file, whose bare reader leaves its records where they are in Arrow."""
    source, whole = parquet_file(place, count)
    how = "pyarrow.Table.take(rows) alone: Arrow data, not NumPy arrays"
    yield Format(source, whole.take, how)


def parquet_file(place: Path, count: int) -> tuple[loader.ParquetSource, Any]:
    """The source, and the file as a table in memory, in one chunk."""
    import pyarrow.parquet as pq

    path = place / "data.parquet"
    pq.write_table(arrow(count), path, row_group_size=4096)
    return loader.ParquetSource(path), pq.read_table(path).combine_chunks()


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
    """A flat file of uint16 tokens, whose bare reader is the loop that one sees in training scripts."""
    source, flat = token_file(place, count)

    def bare(rows: Rows) -> object:
        starts = (rows * WINDOW).tolist()
        return np.stack([flat[start : start + WINDOW + 1] for start in starts]).astype(np.int32)

    how = "np.stack of slices of a np.memmap, as int32"
    yield Format(source, bare, how, WINDOWS)


@contextlib.contextmanager
def tokens_gathered(place: Path, count: int) -> Iterator[Format]:
    """The same file, whose bare reader is one call of NumPy."""
    source, flat = token_file(place, count)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(flat), WINDOW + 1)
    how = "sliding_window_view(np.memmap, window + 1)[starts], as int32"
    yield Format(source, lambda rows: windows[rows * WINDOW].astype(np.int32), how, WINDOWS)


def token_file(place: Path, count: int) -> tuple[loader.TokenSource, npt.NDArray[np.uint16]]:
    """As many bytes of tokens as the other formats have of images, or a few windows."""
    path = place / "data.bin"
    num_windows = max(count * IMAGE // (2 * WINDOW), 2 * WINDOWS)
    np.random.default_rng(0).integers(0, 50_000, num_windows * WINDOW + 1, np.uint16).tofile(path)
    return loader.TokenSource(path, WINDOW), np.memmap(path, "<u2", "r")


def arrow(count: int) -> Any:
    """The records as an Arrow table."""
    import pyarrow as pa

    arrays = records(count)
    images = pa.FixedSizeListArray.from_arrays(pa.array(arrays["image"].reshape(-1)), IMAGE)
    return pa.table({"image": images, "label": pa.array(arrays["label"])})


FORMATS: Final[dict[str, Callable[[Path, int], contextlib.AbstractContextManager[Format]]]] = {
    "npy folder": npy,
    "npy folder, np.take": npy_taken,
    "npy folder, np.take, 3 KB": npy_large,
    "ArrayRecord": arrayrecord,
    "Parquet": parquet,
    "Parquet, left as Arrow data": parquet_taken,
    "Hugging Face": huggingface,
    "token file": tokens,
    "token file, one gather": tokens_gathered,
}


def table(times: dict[str, dict[str, list[float]]], batches: dict[str, int]) -> Table:
    """A row for each format."""
    rows = [
        [
            name,
            f"{batches[name]}",
            f"{1e6 * batches[name] / median(of, OURS):,.0f}",
            f"{1e6 * batches[name] / median(of, BARE):,.0f}",
            *spread(ratios(of[BARE], of[OURS]))[:2],
        ]
        for name, of in times.items()
    ]
    columns = ("format", "batch", "records/s", "bare loop", "ratio", "quartiles")
    return Table("shuffled batches through the iterator", columns, rows)


def parts(times: dict[str, dict[str, list[float]]]) -> Table:
    """Where a batch's time goes."""
    rows = []
    for name, of in times.items():
        took = [median(of, part) for part in (OURS, RECORDS, IDS)]
        cells = [f"{value:,.1f}" for value in (*took, rest(of), median(of, BARE))]
        rows.append([name, *cells, *spread(ratios(of[BARE], of[RECORDS]))[:1]])
    columns = ("format", "iterator", "read", "ids", "the rest", "bare loop", "bare loop / read")
    return Table(
        "microseconds a batch: the iterator, and the source's two calls alone", columns, rows
    )


def median(times: dict[str, list[float]], part: str) -> float:
    """Microseconds a batch."""
    return summary(times[part])["median"]


def rest(times: dict[str, list[float]]) -> float:
    """What the source's two calls do not take of a batch's time."""
    return median(times, OURS) - median(times, RECORDS) - median(times, IDS)


def targets(times: dict[str, dict[str, list[float]]]) -> list[Target]:
    """At least 0.8 of the bare loop."""
    return [
        at_least(
            f"{name}: batches through the iterator / the format's own reader",
            summary(ratios(of[BARE], of[OURS]))["median"],
            _BOUND,
            f"beside {median(of, BARE):,.1f} us of the bare loop, {median(of, RECORDS):,.1f} for the records, "
            f"{median(of, IDS):,.1f} for IDs, and {rest(of):,.1f} for order, mask, checks and the iterator, "
            "which the bare loop has none of",
        )
        for name, of in times.items()
    ]


def conditions(setting: Setting) -> dict[str, str]:
    """What one must know to read the numbers."""
    return {
        "records": f"{setting.num_records:,} of image uint8[{IMAGE}] and label int32, or as many bytes of "
        f"larger ones; tokens: as many bytes, in windows of {WINDOW:,} + 1, given as int32",
        "bare loops": "two each for npy folders, Parquet and token files: the usual code of training "
        "scripts, and the fastest call for a part of it",
        "windows": f"{setting.rounds} of {setting.batches} batches each, those of the iterator, the bare loop "
        "and the source's two calls in turn, each round starts with another of them, in one process "
        "and thread, after one warm-up round",
        "clock": "perf_counter around the batches: for ours with order, IDs, masks and iterator; the "
        "bare loop gets its rows and makes no IDs",
        "IDs": "as each source makes them by default: file:row (ArrayRecord, Parquet), file:offset (tokens), "
        "else row numbers",
        "storage": "files just written, in the page cache; Parquet and Hugging Face data fit into memory",
    }
