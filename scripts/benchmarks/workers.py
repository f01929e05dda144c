"""What worker processes bring where a batch takes long to make, beside threads and Grain's processes."""

import contextlib
import dataclasses
import gc
import io
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import loader
from scripts.benchmarks.section import Section, Table, ratios, spread, summary

NAME: Final = "workers"

SEED: Final = 17
BATCH: Final = 32
SIDE: Final = 224
#: Bytes of a text, each of which Python looks at.
TEXT: Final = 4096
ALONE, THREADS = "no workers", "2 reading threads"
WORKERS: Final = {"1 worker": 1, "2 workers": 2}
GRAIN: Final = "Grain, 2 worker processes"
#: Batches before each window that are not counted: as many as all others have ready by then.
_UNCOUNTED: Final = 12

Batches = Iterator[Any]
Batch = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """How much is read, and how often."""

    num_records: int
    rounds: int
    batches: int


FULL: Final = Setting(2048, 7, 48)
QUICK: Final = Setting(128, 2, 2)


def images(count: int) -> loader.ArraySource:
    """``encoded uint8[n, m]``: JPEG images, each with zeros behind its end, which no decoder looks at."""
    from PIL import Image

    encoded = []
    for pixels in np.random.default_rng(0).integers(0, 256, (count, 28, 28, 3), np.uint8):
        file = io.BytesIO()
        Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "jpeg")
        encoded.append(np.frombuffer(file.getvalue(), np.uint8))
    data = np.zeros((count, max(map(len, encoded))), np.uint8)
    for row, one in zip(data, encoded, strict=True):
        row[: len(one)] = one
    return loader.ArraySource({"encoded": data})


def decoded(batch: Batch) -> dict[str, Any]:
    """``image uint8[k, 224, 224, 3]``: by Pillow, which lets other threads run meanwhile."""
    return {"image": np.stack([loader.decode_image(row.tobytes()) for row in batch["encoded"]])}


def texts(count: int) -> loader.ArraySource:
    """``text uint8[n, 4096]`` of letters and blanks."""
    generator = np.random.default_rng(0)
    return loader.ArraySource({"text": generator.integers(32, 40, (count, TEXT), np.uint8)})


def words(batch: Batch) -> dict[str, Any]:
    """``lengths int32[k, 64]``: how many words have each length; in Python, which lets no thread run."""
    made = np.zeros((len(batch["text"]), 64), np.int32)
    for counts, text in zip(made, batch["text"], strict=True):
        length = 0
        for code in text.tolist():
            if code == 32:
                counts[min(length, 63)] += 1
                length = 0
            else:
                length += 1
    return {"lengths": made}


#: By name: the source of so many records, the transform, and what it is.
JOBS: Final[
    dict[str, tuple[Callable[[int], loader.ArraySource], Callable[[Batch], dict[str, Any]], str]]
] = {
    "JPEG": (
        images,
        decoded,
        f"{BATCH} JPEG images of {SIDE} x {SIDE}, decoded by Pillow, which lets other threads run",
    ),
    "Python": (
        texts,
        words,
        f"{BATCH} texts of {TEXT:,} bytes, each looked at by a loop in Python, which lets no thread run",
    ),
}


def measure(*, quick: bool) -> Section:
    """Time for a batch of each job, by each way to make it."""
    setting = QUICK if quick else FULL
    times = {name: measure_job(name, setting) for name in JOBS}
    return Section(
        NAME,
        "Worker processes, where a batch takes long to make",
        conditions(setting),
        [table(name, of) for name, of in times.items()],
        (),
        {"batch": BATCH, "microseconds_a_batch": times},
    )


def measure_job(name: str, setting: Setting) -> dict[str, list[float]]:
    """Microseconds a batch of each way, window by window, in turn."""
    make, transform, _ = JOBS[name]
    source = make(setting.num_records)
    with contextlib.ExitStack() as stack:
        ways = {
            way: stack.enter_context(contextlib.closing(batches))
            for way, batches in iterators(source, transform).items()
        }
        check(ways)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(setting.rounds):
            gc.collect()
            for way, batches in ways.items():
                found[way].append(window(batches, setting.batches))
    return found


def iterators(source: loader.ArraySource, transform: Callable[[Batch], Any]) -> dict[str, Any]:
    """An iterator for each way to make the same batches; all of them can be closed."""
    config = loader.PipelineConfig(BATCH, SEED, "drop", None)
    pipeline = loader.Pipeline(source, config, transform)
    ways: dict[str, Any] = {
        ALONE: pipeline.iterate(),
        THREADS: pipeline.iterate(read_options=loader.ReadOptions(2, 4)),
    }
    for way, workers in WORKERS.items():
        ways[way] = pipeline.iterate(workers=workers)
    ways[GRAIN] = grain_workers(source, transform)
    return ways


class Made:
    """For a batch's number, the batch: what a Grain user can write, over an order of NumPy's."""

    def __init__(self, source: loader.ArraySource, transform: Callable[[Batch], Any]) -> None:
        self._source, self._transform = source, transform

    def __call__(self, index: int, element: int) -> dict[str, Any]:
        """The batch; ``element`` is the index within the epoch."""
        steps = len(self._source) // BATCH
        order = np.random.default_rng([SEED, index // steps]).permutation(len(self._source))
        rows = order[element * BATCH :][:BATCH]
        made: dict[str, Any] = self._transform(self._source.read(rows))
        return made


def grain_workers(source: loader.ArraySource, transform: Callable[[Batch], Any]) -> Any:
    """Grain's processes, each of which makes whole batches."""
    import absl.flags
    import grain

    absl.flags.FLAGS.mark_as_parsed()  # without it, Grain's workers do not start
    dataset = grain.MapDataset.range(len(source) // BATCH)
    dataset = dataset.map_with_index(Made(source, transform)).repeat()
    batches = dataset.to_iter_dataset(grain.ReadOptions(0, 0))
    return iter(batches.mp_prefetch(grain.MultiprocessingOptions(2, 2)))


def check(ways: dict[str, Any]) -> None:
    """Raises where one of our ways gives something else than another; takes as many batches of each."""
    first = {way: [next(batches) for _ in range(2)] for way, batches in ways.items()}
    expected = first[ALONE]
    for way in (THREADS, *WORKERS):
        for batch, other in zip(expected, first[way], strict=True):
            if any(not np.array_equal(batch[field], other[field]) for field in batch):
                raise RuntimeError(f"{way} gives other batches than {ALONE}")
    if {name for batch in first[GRAIN] for name in batch} - set(expected[0]):
        raise RuntimeError(f"{GRAIN} gives other fields than {ALONE}")


def window(batches: Batches, count: int) -> float:
    """Microseconds a batch, over some."""
    for _ in range(_UNCOUNTED):
        next(batches)
    begin = time.perf_counter()
    for _ in range(count):
        next(batches)
    return 1e6 * (time.perf_counter() - begin) / count


def table(name: str, times: dict[str, list[float]]) -> Table:
    """A row for each way."""
    rows = [
        [
            way,
            f"{summary(of)['median'] / 1000:,.1f}",
            *spread(ratios(times[ALONE], of)),
        ]
        for way, of in times.items()
    ]
    columns = ("way", "ms a batch", f"times as fast as {ALONE}", "quartiles", "range")
    return Table(f"{name}: {JOBS[name][2]}", columns, rows)


def conditions(setting: Setting) -> dict[str, str]:
    """What one must know to read the numbers."""
    return {
        "cores": f"{len(os.sched_getaffinity(0))}, of which the consuming loop uses hardly any",
        "windows": f"{setting.rounds} of {setting.batches} batches each, in turn, after {_UNCOUNTED} that are "
        "not counted, so that batches read ahead give no advantage",
        "left out": "start of the workers, a second or two",
        "check": "all of ours give the same batches, compared before the clock starts",
        "records": f"{setting.num_records:,}, in memory; each worker process has a copy or shares one",
    }
