"""How fast a data set is fingerprinted, beside what sha256 alone reaches on the same cores."""

import concurrent.futures
import dataclasses
import gc
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import loader
from scripts.benchmarks.section import Section, Table, Target, at_least, ratios, spread, summary

NAME: Final = "fingerprints"

RECORD_BYTES: Final = 784
OURS: Final = "ArraySource.fingerprint"
MEMORY, WARM, COLD = "memory", "a cached file", "a file that is not cached"
_BOUND: Final = 0.9
_FILL_RECORDS: Final = 1 << 14

Images = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Setting:
    """How much is read, and how often."""

    num_records: int
    rounds: int
    warm_up: int

    @property
    def num_bytes(self) -> int:
        """Of the field."""
        return self.num_records * RECORD_BYTES


FULL: Final = Setting(1_000_000, 11, 1)
QUICK: Final = Setting(20_000, 2, 1)

#: Opens the data anew, as the storage wants it.
Open = Callable[[], Images]


def measure(*, quick: bool) -> Section:
    """Bytes per second over records in memory, and over the same in a memory-mapped file."""
    setting = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "images.npy")
        write_images(path, setting.num_records)
        held = np.load(path)
        opens: dict[str, Open] = {MEMORY: lambda: held, WARM: lambda: mapped(path)}
        if hasattr(os, "posix_fadvise"):  # not on macOS
            opens[COLD] = lambda: cold(path)
        rates = {storage: measure_storage(open_, setting) for storage, open_ in opens.items()}
    return Section(
        NAME,
        "Fingerprinting, beside sha256 alone",
        conditions(setting),
        (table(rates),),
        targets(rates),
        {"num_bytes": setting.num_bytes, "threads": usable_cores(), "bytes_per_second": rates},
    )


def write_images(path: Path, num_records: int) -> None:
    """``uint8[num_records, 784]`` of noise as an ``.npy`` file, which is synced."""
    shape = (num_records, RECORD_BYTES)
    images = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    generator = np.random.default_rng(0)
    for low in range(0, num_records, _FILL_RECORDS):
        part = images[low : low + _FILL_RECORDS]
        part[:] = generator.integers(0, 256, part.shape, np.uint8)
    images.flush()


def mapped(path: Path) -> Images:
    """The file, memory-mapped anew."""
    images: Images = np.load(path, mmap_mode="r")
    return images


def cold(path: Path) -> Images:
    """The file, memory-mapped anew after the system was asked to drop what it holds of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return mapped(path)


# --- the contenders -------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def our_digest(images: Images) -> str:
    """The digest of a new source, with all defaults."""
    return loader.ArraySource({"image": images}).fingerprint().digest


def sha256_alone(images: Images, threads: int) -> str:
    """sha256 of equal slices, a thread each; the digests of all of them, one behind the other."""
    data = images.reshape(-1).data
    cuts = [len(data) * i // threads for i in range(threads + 1)]
    slices = [data[low:high] for low, high in itertools.pairwise(cuts)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return "".join(pool.map(lambda part: hashlib.sha256(part).hexdigest(), slices))


def contenders() -> dict[str, Callable[[Images], str]]:
    """Who takes part: ours, sha256 on as many threads as there are cores, and on one."""
    cores = usable_cores()
    made: dict[str, Callable[[Images], str]] = {
        OURS: our_digest,
        bar(): lambda images: sha256_alone(images, cores),
    }
    if cores > 1:
        made["sha256 alone, 1 thread"] = lambda images: sha256_alone(images, 1)
    return made


def bar() -> str:
    """The contender that ours is held against."""
    cores = usable_cores()
    return f"sha256 alone, {cores} thread{'s' if cores > 1 else ''}"


def measure_storage(open_: Open, setting: Setting) -> dict[str, list[float]]:
    """Bytes per second of each contender, round by round.

    Raises:
      RuntimeError: a contender's digest was not the same each time.
    """
    rates: dict[str, list[float]] = {name: [] for name in contenders()}
    digests: dict[str, str] = {}
    for number in range(setting.warm_up + setting.rounds):
        gc.collect()
        for name, digest in contenders().items():
            images = open_()
            start = time.perf_counter()
            found = digest(images)
            seconds = time.perf_counter() - start
            del images  # and with it a map of the file, whose pages could not be dropped
            if digests.setdefault(name, found) != found:
                raise RuntimeError(f"{name} gave {found}, and before {digests[name]}")
            if number >= setting.warm_up:
                rates[name].append(setting.num_bytes / seconds)
    return rates


# --- the report -----------------------------------------------------------------------------------


def conditions(setting: Setting) -> dict[str, str]:
    """Everything that one must know to read the figures."""
    return {
        "clock": "perf_counter around ArraySource(...).fingerprint(), all defaults, its threads started and "
        "ended inside; and around sha256 of equal slices, a thread each, started and ended inside. Opening "
        "the file is left out",
        "data": f"{setting.num_records:,} records of {RECORD_BYTES} B of noise, {setting.num_bytes / 1e6:,.0f} MB; "
        "IDs are the row numbers. Rates are of the records' bytes: other bytes that ours digests (8 B "
        "of ID a record, a mark for each chunk) do not count",
        "in turn": f"A B C A B C ..., {setting.rounds} rounds after {setting.warm_up} that is not counted; each "
        "with a new source and a new map of the file",
        "storage": f"{MEMORY}: one array; else an .npy file below {tempfile.gettempdir()}, memory-mapped; cached: "
        "in the page cache; not cached: dropped by POSIX_FADV_DONTNEED, which does not reach the cache "
        "of a disk or hypervisor",
        "threads": f"{usable_cores()} usable cores; sha256 is that of hashlib",
    }


def table(rates: dict[str, dict[str, list[float]]]) -> Table:
    """GB/s, and the ratio to sha256 alone by rounds."""
    rows = []
    for storage, of in rates.items():
        for name, values in of.items():
            rows.append((storage, f"{name}, GB/s", *spread([rate / 1e9 for rate in values])))
        by_rounds = ratios(of[OURS], of[bar()])
        rows.append((storage, f"ratio to {bar()}", *spread(by_rounds)))
    columns = ("records in", "", "median", "quartiles", "range")
    return Table("Fingerprint", columns, rows)


def targets(rates: dict[str, dict[str, list[float]]]) -> list[Target]:
    """Nearly what sha256 alone reaches, from each storage."""
    found = []
    for storage, of in rates.items():
        by_rounds = ratios(of[OURS], of[bar()])
        name = f"fingerprint, records in {storage}, over {bar()} (median of rounds)"
        why = in_words(by_rounds)
        found.append(at_least(name, summary(by_rounds)["median"], _BOUND, why))
    return found


def in_words(values: Sequence[float]) -> str:
    """The spread, for a target that is missed."""
    _, quartiles, whole = spread(values)
    return f"{len(values)} rounds, quartiles {quartiles}, range {whole}"
