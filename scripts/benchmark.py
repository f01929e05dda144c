#!/usr/bin/env python
"""Measures records per second: this loader, bare NumPy, and Grain record by record, in one run.

    scripts/benchmark.py                      about a minute
    scripts/benchmark.py --quick              a quarter of that
    scripts/benchmark.py --json results.json  everything that was measured, too

Run it with the environment active, on a machine that does nothing else.

Every contender delivers the same records in batches of the same sizes, shuffled, epoch after epoch,
from the same arrays in memory, in a process of its own. The processes take turns, one window of
whole epochs each (A B C D A B C D ...), so that whatever else the machine does meets all of them;
ratios are taken between windows of the same round.

Before the clock starts, each contender delivers one whole epoch, which is checked: each record
comes once with its own label, and the sums of all labels and of all bytes are those of the data.

Exit codes: 0 measured; 1 a contender delivered something else, failed, or the JSON file cannot be
written; 2 the command is wrong.
"""

import collections
import dataclasses
import gc
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import grain
import numpy as np
import numpy.typing as npt
import rich
import rich.box
import typer
from rich.table import Table

import loader

Array = npt.NDArray[Any]
Batch = Mapping[str, Array]

SEED: Final = 17
OURS: Final = "regrain"
NUMPY_ORDERS: Final = 4
NUMPY: Final = ("numpy fancy", "numpy take")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every contender has to deliver, and for how long.

    Attributes:
      num_records: records in the data.
      record_bytes: bytes of a record's ``image: uint8``; its ``label: int32`` comes on top.
      batch_size: records in a batch; an epoch's last one may be shorter.
      epochs: epochs in a window.
      windows: windows of each contender that are measured.
      warmup: windows of each contender before those, measured by nobody.
    """

    num_records: int
    record_bytes: int
    batch_size: int
    epochs: int
    windows: int
    warmup: int

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return -(-self.num_records // self.batch_size)


def make_arrays(workload: Workload) -> dict[str, Array]:
    """The data, the same in each process: ``image: uint8[n, bytes]``, ``label: int32[n]``."""
    generator = np.random.default_rng(0)
    shape = (workload.num_records, workload.record_bytes)
    return {
        "image": generator.integers(0, 256, shape, np.uint8),
        "label": generator.integers(0, 1000, workload.num_records, np.int32),
    }


# --- the contenders: each makes an endless iterator over batches ----------------------------------


def numpy_gather(arrays: dict[str, Array], workload: Workload, *, take: bool) -> Iterator[Batch]:
    """A bare gather with rows that are known before the clock starts."""
    generator, size = np.random.default_rng(SEED), workload.batch_size
    orders = [generator.permutation(workload.num_records) for _ in range(NUMPY_ORDERS)]
    starts = range(0, workload.num_records, size)
    for part in itertools.cycle([rows[at : at + size] for rows in orders for at in starts]):
        if take:
            yield {name: np.take(array, part, axis=0) for name, array in arrays.items()}
        else:
            yield {name: array[part] for name, array in arrays.items()}


def numpy_fancy(arrays: dict[str, Array], workload: Workload) -> Iterator[Batch]:
    """``array[rows]`` for each field; orders are made outside the clock."""
    return numpy_gather(arrays, workload, take=False)


def numpy_take(arrays: dict[str, Array], workload: Workload) -> Iterator[Batch]:
    """``np.take(array, rows, axis=0)`` for each field; orders are made outside the clock."""
    return numpy_gather(arrays, workload, take=True)


def regrain(arrays: dict[str, Array], workload: Workload) -> Iterator[Batch]:
    """``Pipeline.iterate()``, all defaults: feistel order inside the clock, no threads; id and mask too."""
    config = loader.PipelineConfig(workload.batch_size, SEED, "partial", num_epochs=None)
    batches: Iterator[Batch] = loader.Pipeline(loader.ArraySource(arrays), config).iterate()
    return batches


class Records:
    """Grain's way to a record: one at a time."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["label"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: array[index] for name, array in self._arrays.items()}


def grain_records(arrays: dict[str, Array], workload: Workload) -> Iterator[Batch]:
    """``source.shuffle.batch.repeat``, no threads and no buffer, its fastest for memory; order inside the clock."""
    dataset = grain.MapDataset.source(Records(arrays)).shuffle(seed=SEED)
    dataset = dataset.batch(workload.batch_size).repeat()
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches: Iterator[Batch] = iter(dataset.to_iter_dataset(options))
    return batches


Contender = Callable[[dict[str, Array], Workload], Iterator[Batch]]

CONTENDERS: Final[dict[str, Contender]] = {
    "numpy fancy": numpy_fancy,
    "numpy take": numpy_take,
    OURS: regrain,
    "grain per record": grain_records,
}


# --- a contender's process ------------------------------------------------------------------------


def serve(name: str, workload: Workload, connection: Connection) -> None:
    """Runs a contender in this process: checks an epoch of it, then times a window when told."""
    arrays = make_arrays(workload)
    batches = CONTENDERS[name](arrays, workload)
    connection.send(check(batches, arrays, workload))
    gc.collect()
    gc.freeze()  # what the imports left is not to be gone through in some windows and not in others
    while connection.recv():
        connection.send(timed_window(batches, workload))


def check(batches: Iterator[Batch], arrays: Mapping[str, Array], workload: Workload) -> list[str]:
    """Consumes an epoch; says in what it is not the data's."""
    epoch = list(itertools.islice(batches, workload.batches))
    full, left = divmod(workload.num_records, workload.batch_size)
    sizes = [workload.batch_size] * full + ([left] if left else [])
    got = {name: np.concatenate([batch[name] for batch in epoch]) for name in arrays}
    faults = [
        f"{name} is {got[name].dtype}{list(got[name].shape)}, sum {got[name].sum()}"
        for name, array in arrays.items()
        if (got[name].dtype, got[name].shape, got[name].sum())
        != (array.dtype, array.shape, array.sum())
    ]
    if [len(batch["label"]) for batch in epoch] != sizes:
        faults.append("batches of other sizes")
    if record_counts(got) != record_counts(arrays):
        faults.append("not each record once, with its own label")
    return faults


def record_counts(arrays: Mapping[str, Array]) -> collections.Counter[int]:
    """How often each record comes, known by a hash of the bytes of all its fields."""
    rows = zip(*(arrays[name] for name in sorted(arrays)), strict=False)
    return collections.Counter(hash(b"".join(map(bytes, row))) for row in rows)


def timed_window(batches: Iterator[Batch], workload: Workload) -> float:
    """Seconds in which whole epochs are delivered."""
    wanted = workload.epochs * workload.num_records
    gc.collect()
    records = 0
    start = time.perf_counter()
    for batch in itertools.islice(batches, workload.epochs * workload.batches):
        records += len(batch["label"])
    seconds = time.perf_counter() - start
    if records != wanted:
        raise RuntimeError(f"a window delivered {records} records, not {wanted}")
    return seconds


# --- the run --------------------------------------------------------------------------------------


def measure(workload: Workload) -> dict[str, list[float]]:
    """Records per second of each contender in each window; windows of one index are one round."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name in CONTENDERS:
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, workload, theirs), daemon=True).start()
        theirs.close()  # so that the end of the process is the end of the pipe
    for name, pipe in pipes.items():
        if faults := answer(name, pipe):
            raise RuntimeError(f"{name} delivered something else than the data: {faults}")
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for window in range(workload.warmup + workload.windows):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds = answer(name, pipe)
            if window >= workload.warmup:
                rates[name].append(workload.epochs * workload.num_records / seconds)
    for pipe in pipes.values():
        pipe.send(False)
    return rates


def answer(name: str, pipe: Connection) -> Any:
    """What a contender's process sends next."""
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name} ended; its error stands above") from None


def summary(values: list[float]) -> dict[str, float]:
    """Median, quartiles and range."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high, "min": min(values), "max": max(values)}


def ratios(rates: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Our rate over each other contender's, round by round."""
    return {
        f"{OURS} / {name}": summary([a / b for a, b in zip(rates[OURS], other, strict=True)])
        for name, other in rates.items()
        if name != OURS
    }


# --- the report -----------------------------------------------------------------------------------


def conditions(workload: Workload) -> dict[str, Any]:
    """Everything that one must know to read the numbers."""
    size, image = workload.batch_size, workload.record_bytes
    data = workload.num_records * (image + 4)
    return {
        "batch": f"image uint8[{size}, {image}], label int32[{size}]; an epoch's last may be shorter",
        "data": f"{workload.num_records:,} records, {data / 1e6:.1f} MB, shuffled anew each epoch "
        f"(bare numpy: {NUMPY_ORDERS} orders in turn)",
        "window": f"{workload.epochs} epochs of {workload.batches} batches; {workload.windows} windows "
        f"of each contender, in turn, after 1 checked epoch and {workload.warmup} windows of warm-up",
        "clock": "perf_counter around the for loop over a window's batches: order, gather, iterator, and "
        "making and freeing the batch's arrays",
        "left out": "making the data, the first epoch, any decoding, transfer to a device, model, or "
        "storage",
        "storage": "none: arrays in memory, allocated and filled by each process",
        "cache": f"warm: all data was read before; last-level cache {last_level_cache()}",
        "threads": "one process a contender, one thread that reads; no worker process, no prefetch",
        "garbage collector": "on, as in a training loop; collected before each window, imports frozen",
    }


def machine() -> dict[str, Any]:
    """The machine, and how busy it is."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": cpu_model(),
        "cores usable": len(affinity(0)) if affinity else os.cpu_count(),
        "system": platform.platform(),
        "load average (1, 5, 15 min)": [round(load, 2) for load in os.getloadavg()],
    }


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def last_level_cache() -> str:
    """Size of the largest cache, where the system tells it."""
    found = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return found[-1].read_text("utf-8").strip() if found else "of unknown size"


def versions() -> dict[str, str]:
    """Versions of what is measured."""
    names = ("regrain", "grain", "numpy", "jax")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in names
    }


def report_of(workload: Workload) -> dict[str, Any]:
    """Measures, and puts everything that is known into one JSON-able dict."""
    before = machine()
    rates = measure(workload)
    bar = max(NUMPY, key=lambda name: statistics.median(rates[name]))
    return {
        "format": 1,
        "workload": dataclasses.asdict(workload),
        "contenders": {name: make.__doc__ for name, make in CONTENDERS.items()},
        "conditions": conditions(workload),
        "machine": before | {"load average at the end": [round(x, 2) for x in os.getloadavg()]},
        "versions": versions(),
        "records_per_second": {name: summary(values) for name, values in rates.items()},
        "windows_records_per_second": rates,
        "ratios": ratios(rates),
        "bar": {"bare numpy, the better of two": bar},
    }


def show(report: Mapping[str, Any]) -> None:
    """Prints the report as tables."""
    rates, ratio_of = report["records_per_second"], report["ratios"]
    rich.print(table("1,000 records/s", rates, lambda rate: f"{rate / 1000:,.0f}"))
    rich.print(table("ratio, by rounds", ratio_of, lambda ratio: f"{ratio:.2f}"))
    for part in ("bar", "contenders", "conditions", "machine", "versions"):
        for name, value in report[part].items():
            print(f"{name}: {value}")


def table(title: str, rows: Mapping[str, dict[str, float]], text: Callable[[float], str]) -> Table:
    """A row for each name, with its median and spread."""
    made = Table(title, box=rich.box.SIMPLE_HEAD)
    for column in ("median", "quartiles", "range"):
        made.add_column(column, justify="right", no_wrap=True)
    for name, of in rows.items():
        spreads = (f"{text(of[a])} - {text(of[b])}" for a, b in (("q1", "q3"), ("min", "max")))
        made.add_row(name, text(of["median"]), *spreads)
    return made


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer, shorter windows.")] = False,
    num_records: Annotated[int, typer.Option(min=1, help="Records in the data.")] = 60_000,
    record_bytes: Annotated[int, typer.Option(min=1, help="Bytes of an image.")] = 784,
    batch_size: Annotated[int, typer.Option(min=1, help="Records in a batch.")] = 256,
    windows: Annotated[
        int | None, typer.Option(min=2, help="Measured windows of each contender.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File for the whole report, as JSON.")
    ] = None,
) -> None:
    """Measure records per second: this loader, bare NumPy, and Grain record by record, in one run.

    \b
    scripts/benchmark.py                      about a minute
    scripts/benchmark.py --quick              a quarter of that
    scripts/benchmark.py --json results.json  everything that was measured, too

    Contenders run in processes of their own and take turns. Compare ratios, not rates: those change
    with the machine. If the quartiles lie far apart, the machine was busy: run it again.

    Exit codes: 0 measured; 1 a contender delivered something else, failed, or the JSON file cannot
    be written; 2 the command is wrong.
    """  # noqa: D301 (\b keeps Click from joining the lines of the examples)
    if json_path is not None and not json_path.parent.is_dir():
        fail(f"{json_path} cannot be written: there is no folder {json_path.parent}")
    epochs, count, warmup = (1, 5, 1) if quick else (2, 15, 2)
    workload = Workload(num_records, record_bytes, batch_size, epochs, windows or count, warmup)
    try:
        report = report_of(workload)
        show(report)
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    except (OSError, RuntimeError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Ends the program with a message on stderr."""
    print(f"benchmark.py: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    app()
