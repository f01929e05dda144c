"""What the order of an epoch costs: positions per second, memory, and a call for one batch."""

import dataclasses
import gc
import itertools
import threading
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import loader
from scripts.benchmarks.resumes import Virtual
from scripts.benchmarks.section import (
    Section,
    Table,
    Target,
    at_least,
    at_most,
    ratios,
    spread,
    summary,
)

NAME: Final = "orders"

SEED: Final = 17
BATCH: Final = 256
#: Positions asked for in a call.
BLOCK: Final = 1 << 14
HUGE: Final = 10**12
#: What a window asks for: the shuffle, and the number of records.
STREAMS: Final = (
    ("feistel", 60_000),
    ("feistel", 10**6),
    ("feistel", HUGE),
    ("permutation", 60_000),
    ("permutation", 10**6),
)
#: A number of records for each integer type, and the bytes of the smallest that holds its rows.
KEPT: Final = {60_000: 2, 70_000: 4, 10**6: 4}
CALL, NEW_EPOCH, GATHER = "a lone call", "a lone call, first of its epoch", "the gather it feeds"
#: Why a lone call costs what it does.
_FLOOR: Final = (
    "eight rounds are some 80 NumPy calls, which over 256 positions cost more than their arithmetic; "
    "an iterator makes such a call for its first batch only, and blocks from then on"
)
_IMAGES: Final = (60_000, 784)
_RATE_BOUND: Final = 1e7
_SAME_MEMORY: Final = 1.1
_KEPT_BOUND: Final = 1.05


@dataclasses.dataclass(frozen=True)
class Setting:
    """How much is asked for, and how often.

    Attributes:
      positions: in a window, at least.
      rounds: windows of each stream.
      calls: lone calls that are timed.
      batches: in a pass whose memory is measured.
    """

    positions: int
    rounds: int
    calls: int
    batches: int


FULL: Final = Setting(1 << 22, 15, 2000, 500)
QUICK: Final = Setting(1 << 16, 3, 20, 80)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Bytes that a pipeline keeps for its order.

    Attributes:
      first: behind the first batch of an epoch.
      last: behind the last one, when the next epoch's order is there too.
    """

    first: int
    last: int


def measure(*, quick: bool) -> Section:
    """Blocks, lone calls, and memory."""
    setting = QUICK if quick else FULL
    rates = block_rates(setting)
    calls = lone_calls(setting)
    peaks = {
        (shuffle, n, batch): peak_bytes(shuffle, n, batch, setting.batches)
        for batch in (BATCH, 16 * BATCH)
        for shuffle, n in (("feistel", 10**6), ("feistel", HUGE), ("permutation", 10**6))
    }
    kept = {n: kept_bytes(n) for n in KEPT}
    return Section(
        NAME,
        "The order of an epoch: speed and memory",
        conditions(setting),
        (rate_table(rates), call_table(calls), peak_table(peaks), kept_table(kept)),
        targets(rates, calls, peaks, kept),
        data(rates, calls, peaks, kept),
    )


# --- speed ----------------------------------------------------------------------------------------

Stream = tuple[str, int]


def block_rates(setting: Setting) -> dict[Stream, list[float]]:
    """Positions per second of each stream, round by round, behind a round that does not count."""
    rates: dict[Stream, list[float]] = {stream: [] for stream in STREAMS}
    for number in range(1 + setting.rounds):
        gc.collect()
        for (shuffle, num_records), found in rates.items():
            rate = window_rate(shuffle, num_records, setting.positions, first_epoch=1000 * number)
            if number:
                found.append(rate)
    return rates


def window_rate(shuffle: str, num_records: int, positions: int, *, first_epoch: int) -> float:
    """Positions per second over a stretch of epochs that nobody has asked for before."""
    # NumPy's order is made whole in each call, so that its block is the epoch.
    block = num_records if shuffle == "permutation" else min(BLOCK, num_records)
    done = 0
    start = time.perf_counter()
    for epoch in itertools.count(first_epoch):
        for low in range(0, num_records, block):
            high = min(low + block, num_records)
            done += len(loader.epoch_order(num_records, SEED, epoch, shuffle, low, high))
            if done >= positions:
                return done / (time.perf_counter() - start)
    raise AssertionError  # the count has no end


def lone_calls(setting: Setting) -> dict[str, list[float]]:
    """Seconds of single calls for a batch's rows, in turn with the gather of as many records."""
    generator = np.random.default_rng(SEED)
    images = generator.integers(0, 256, _IMAGES, np.uint8)
    starts = generator.integers(0, HUGE - BATCH, setting.calls).tolist()
    batches = generator.integers(0, len(images), (setting.calls, BATCH))
    seconds: dict[str, list[float]] = {CALL: [], NEW_EPOCH: [], GATHER: []}
    epochs = itertools.count(1)
    for _ in range(2):  # the first time does not count
        for taken in seconds.values():
            taken.clear()
        for low, rows in zip(starts, batches, strict=True):
            seconds[CALL].append(call_seconds(low, epoch=0))
            seconds[GATHER].append(gather_seconds(images, rows))
            seconds[NEW_EPOCH].append(call_seconds(low, epoch=next(epochs)))
    return seconds


def call_seconds(low: int, *, epoch: int) -> float:
    """Of the rows of one batch, anywhere among 10**12."""
    start = time.perf_counter()
    loader.epoch_order(HUGE, SEED, epoch, start=low, stop=low + BATCH)
    return time.perf_counter() - start


def gather_seconds(images: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64]) -> float:
    """Of a batch's records."""
    start = time.perf_counter()
    np.take(images, rows, axis=0)
    return time.perf_counter() - start


# --- memory ---------------------------------------------------------------------------------------


def make_pipeline(shuffle: Any, num_records: int, batch_size: int) -> loader.Pipeline:
    """A stream without end, of records that take no memory of their own."""
    config = loader.PipelineConfig(batch_size, SEED, "partial", num_epochs=None, shuffle=shuffle)
    return loader.Pipeline(Virtual(num_records), config)


def peak_bytes(shuffle: str, num_records: int, batch_size: int, batches: int) -> int:
    """The most that a pass over some batches holds at a time, its batches of 25 B a record included."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for batch in itertools.islice(make_pipeline(shuffle, num_records, batch_size), batches):
            del batch
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def kept_bytes(num_records: int) -> Kept:
    """What a pipeline with NumPy's order holds between two batches."""
    gc.collect()
    tracemalloc.start()
    try:
        pipeline = make_pipeline("permutation", num_records, BATCH)
        before = tracemalloc.get_traced_memory()[0]
        pipeline.ids(0)
        first = tracemalloc.get_traced_memory()[0] - before
        others = set(threading.enumerate())
        pipeline.ids(pipeline.steps_per_epoch - 1)
        for thread in set(threading.enumerate()) - others:
            thread.join()
        return Kept(first, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


# --- the report -----------------------------------------------------------------------------------

Rates = Mapping[Stream, Sequence[float]]
Calls = Mapping[str, Sequence[float]]
Peaks = Mapping[tuple[str, int, int], int]


def conditions(setting: Setting) -> dict[str, str]:
    """Everything that one must know to read the figures."""
    return {
        "clock": "perf_counter around calls of loader.epoch_order, and around np.take; nothing else",
        "threads": "one, in one process",
        "blocks": f"{BLOCK:,} positions a call, one after the other from the start of an epoch; "
        '"permutation" makes a whole epoch in each call. A window is at least '
        f"{setting.positions:,} positions of new epochs, including the time for their keys; "
        f"{setting.rounds} windows of each in turn, after one that is not counted",
        "lone call": f"{BATCH} positions from a random one on, of 10^12 records; the epoch's keys are "
        "ready, except at its first call",
        "gather": f"np.take of {BATCH} random records of 784 B from 47 MB in memory; {setting.calls} "
        "calls of each, in turn, so that both find the same caches",
        "memory": f"tracemalloc, of a pass over {setting.batches} batches of records of 8 B, the batches included",
        "kept": "tracemalloc, the memory that a pipeline keeps for its order between two batches",
    }


def millions(num_records: int) -> str:
    """A number of records, short."""
    return "10^12" if num_records == HUGE else f"{num_records:,}"


def rate_table(rates: Rates) -> Table:
    """Millions of positions per second."""
    rows = [
        (shuffle, millions(n), *spread([rate / 1e6 for rate in of], ".1f"))
        for (shuffle, n), of in rates.items()
    ]
    rows.append(("permutation", millions(HUGE), "does not fit", "", ""))
    columns = ("million positions/s, one core", "records", "median", "quartiles", "range")
    return Table("Order: blocks", columns, rows)


def call_table(calls: Calls) -> Table:
    """Microseconds, and the ratio of neighbours."""
    rows = [
        (f"{name}, microseconds", *spread([1e6 * second for second in of], ".1f"))
        for name, of in calls.items()
    ]
    rows.append((f"{CALL} / {GATHER}", *spread(ratios(calls[CALL], calls[GATHER]))))
    columns = (f"{BATCH} positions of 10^12", "median", "quartiles", "range")
    return Table("Order: a lone call", columns, rows)


def peak_table(peaks: Peaks) -> Table:
    """The most memory of a pass."""
    rows = [
        (shuffle, millions(n), f"{batch:,}", f"{found:,}")
        for (shuffle, n, batch), found in peaks.items()
    ]
    return Table("Order: peak memory of a pass", ("order", "records", "batch", "bytes"), rows)


def kept_table(kept: Mapping[int, Kept]) -> Table:
    """Bytes per record of NumPy's order."""
    rows = [
        (millions(n), str(KEPT[n]), f"{of.first / n:.2f}", f"{of.last / n:.2f}")
        for n, of in kept.items()
    ]
    columns = (
        'records, "permutation"',
        "smallest integer, bytes",
        "kept, bytes/record",
        "with the next epoch's",
    )
    return Table("Order: kept between batches", columns, rows)


def targets(rates: Rates, calls: Calls, peaks: Peaks, kept: Mapping[int, Kept]) -> list[Target]:
    """Speed in blocks, a lone call, memory."""
    found = [
        at_least(
            f'positions/s in blocks, "{shuffle}" of {millions(n)}',
            summary(of)["median"],
            _RATE_BOUND,
            in_words([rate / 1e6 for rate in of], "million/s"),
        )
        for (shuffle, n), of in rates.items()
    ]
    by_calls = ratios(calls[CALL], calls[GATHER])
    name = f"a lone call for {BATCH} positions of 10^12, over the gather it feeds"
    why = f"{_FLOOR}; {in_words(by_calls, 'ratio')}"
    found.append(at_most(name, summary(by_calls)["median"], 1, why))
    few, many = (peaks["feistel", n, BATCH] for n in (10**6, HUGE))
    name = "peak memory of a pass at 10^12 records, over that at 10^6"
    found.append(at_most(name, many / few, _SAME_MEMORY, f"{many:,} B and {few:,} B"))
    for n, of in kept.items():
        name = f'kept by "permutation" of {millions(n)}, over the smallest integer type'
        why = f"{of.first:,} B are kept"
        found.append(at_most(name, of.first / n / KEPT[n], _KEPT_BOUND, why))
    return found


def in_words(values: Sequence[float], unit: str) -> str:
    """The spread, for a target that is missed."""
    _, quartiles, whole = spread(values)
    return f"{unit}: quartiles {quartiles}, range {whole}, of {len(values)}"


def data(rates: Rates, calls: Calls, peaks: Peaks, kept: Mapping[int, Kept]) -> dict[str, Any]:
    """All of it, with keys as JSON has them."""
    return {
        "positions_per_second": {f"{shuffle} {n}": list(of) for (shuffle, n), of in rates.items()},
        "call_seconds": {name: list(of) for name, of in calls.items()},
        "peak_bytes": {f"{shuffle} {n} batch {b}": v for (shuffle, n, b), v in peaks.items()},
        "kept_bytes": {str(n): dataclasses.asdict(of) for n, of in kept.items()},
    }
