"""What a resume costs, by how many records are behind it: here, and in other loaders."""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks import resumes
from scripts.benchmarks.resumes import GROUPS, OURS, Setting
from scripts.benchmarks.section import (
    Section,
    Table,
    Target,
    at_most,
    ratios,
    spread,
    summary,
)

NAME: Final = "resuming"

FULL: Final = Setting((0, 10**5, 10**6, 10**7), 9 * 10**11, 12_000_000, 200, 3, 20.0)
QUICK: Final = Setting((0, 1000, 10_000), 9 * 10**11, 12_000, 3, 2, 0.5)

#: What a way must answer within, making ready included.
_LIMIT_SECONDS: Final = 300
#: What a process has to end by itself.
_PATIENCE_SECONDS: Final = 20
_SAME_TIME: Final = (
    resumes.RESUME,
    resumes.ITERATE,
    resumes.IDS,
    resumes.STEPS_OF,
    resumes.CHECKPOINTS,
)
#: "Milliseconds", read strictly.
_MILLISECONDS: Final = 10.0

Windows = dict[int, list[float]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a group.

    Attributes:
      windows: for each way and position, seconds of each round.
      words: why there is nothing, or nothing more.
    """

    windows: dict[str, Windows]
    words: str = ""


def measure(*, quick: bool) -> Section:
    """A resume at several depths, in a source of 10**12 records, and in other loaders."""
    setting = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        results = measure_groups(setting, Path(folder))
    if results[OURS].words:
        raise RuntimeError(f"a resume of this loader failed: {results[OURS].words}")
    return Section(
        NAME,
        "A resume, by how many records are behind it",
        conditions(setting),
        (medians(results, setting), spreads(results)),
        targets(results[OURS].windows, setting),
        data(results, setting),
    )


def measure_groups(setting: Setting, folder: Path) -> dict[str, Result]:
    """All groups, one after the other; their processes import at the same time."""
    absent = {name: missing(group.packages) for name, group in GROUPS.items()}
    with contextlib.ExitStack() as every:
        ends = {name: every.enter_context(contextlib.ExitStack()) for name in GROUPS}
        pipes = {
            name: ends[name].enter_context(started(name, setting, folder))
            for name in GROUPS
            if not absent[name]
        }
        errors = {name: answer(pipe)[1] for name, pipe in pipes.items()}
        results = {}
        for name in GROUPS:
            if absent[name]:
                results[name] = Result({}, f"{name}: not installed ({', '.join(absent[name])})")
            elif errors[name]:
                results[name] = Result({}, f"{name}: {errors[name]}")
            else:
                results[name] = run_group(name, pipes[name], setting)
            ends[name].close()  # so that it disturbs nobody behind it
    return results


def missing(packages: Sequence[str]) -> list[str]:
    """Those that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


@contextlib.contextmanager
def started(name: str, setting: Setting, folder: Path) -> Iterator[Connection]:
    """A group's process, in a folder of its own; it ends with the context, or when it is told to."""
    context = multiprocessing.get_context("spawn")
    own = folder / name.replace(" ", "-")
    own.mkdir()
    ours, theirs = context.Pipe()
    process = context.Process(target=resumes.serve, args=(name, setting, own, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    try:
        yield ours
    finally:
        ours.close()
        process.join(_PATIENCE_SECONDS)
        process.kill()  # the threads of some loaders have no end
        process.join()
        process.close()


def answer(pipe: Connection) -> tuple[Any, str]:
    """What a group's process sends next, and what went wrong instead, in words."""
    if not pipe.poll(_LIMIT_SECONDS):
        return None, f"no answer in {_LIMIT_SECONDS} s"
    try:
        found, error = pipe.recv()
    except EOFError:
        return None, "its process ended"
    return found, error or ""


def run_group(group: str, pipe: Connection, setting: Setting) -> Result:
    """Rounds of each way, after one that does not count; then the group's process may end."""
    pipe.send(True)
    names, words = answer(pipe)
    if words:
        return Result({}, f"{group}: {words}")
    result = Result({})
    for name in names:
        windows, words = run_way(name, pipe, setting)
        if windows:
            result.windows[name] = windows
        if words:
            return Result(result.windows, f"{name}: {words}")
    pipe.send(None)
    return result


def run_way(name: str, pipe: Connection, setting: Setting) -> tuple[Windows, str]:
    """Rounds of one way until there are enough of them, or their time is over."""
    windows: Windows = {}
    begun = 0.0
    for number in range(-1, setting.rounds):
        if number >= setting.least and time.monotonic() - begun > setting.seconds:
            break
        pipe.send((name, number % 2 == 1))
        seconds, words = answer(pipe)
        if words:
            return windows, words
        if number < 0:
            begun = time.monotonic()
            continue
        for position, taken in seconds.items():
            windows.setdefault(position, []).append(taken)
    return windows, ""


# --- the report -----------------------------------------------------------------------------------


def conditions(setting: Setting) -> dict[str, str]:
    """Everything that one must know to read the figures."""
    batch, few = resumes.BATCH, f"{setting.num_records:,}"
    return {
        "clock": "perf_counter from nothing to the IDs of the next batch: the loader is made, moved, and "
        "asked for one batch. regrain's `construct, resume` is `Pipeline(...)`, `iterate(start)`, `next`; "
        "`Checkpoints.resume` the same with `Checkpoints(...)` and `resume` in between; `construct` is "
        "`Pipeline(...)` alone; for `iterate(start)` (and `next`), `ids(step)` and "
        "`provenance(pipeline).steps_of(id)` a pipeline is already open. Left out: imports, making the "
        "data, taking the states, closing",
        "data": f"regrain: {resumes.VIRTUAL_RECORDS:,} records of one int64, computed from the row, 3 epochs, "
        f'"feistel"; all others, and "permutation": {few} records of one int64, read at almost no cost; '
        "for loaders that read the batches they skip, records of 784 B from 47 MB in memory, gathered a "
        "batch at a time",
        "batch": f"{batch} records, so that a batch begins at each position; no worker, no thread",
        "in turn": "each way visits all positions and returns (A B B A), in a process with similar "
        f"ones, with everything made again each time: at most {setting.rounds} rounds, none begun after "
        f"{setting.seconds:g} s but for the first {setting.least}, behind one that is not counted; each round "
        "begins with a resume that is not counted. Nothing is extrapolated",
        "checked": "the IDs of each resume are compared: with the order (regrain), a pass without a stop "
        "(StatefulDataLoader; StreamingDataset at the first position), random access (Grain), the data "
        "(datasets)",
        "keys": "the keys of an epoch's order, some 50 microseconds, are kept in a process after the "
        "first round, for all positions",
        "Checkpoints": "a train state of 2.6 KB, keep=1, verify='full', on the disk of the temporary folder, "
        "in the page cache",
        "StreamingDataset": f"{resumes.SHARDS} local shards, links to one file, in the page cache; py1e, "
        "num_canonical_nodes=1; no download",
        "datasets": "an Arrow table in memory as one shard, not shuffled: the buffer of its shuffle is not "
        "restored by a resume, but filled again",
        "StatefulDataLoader": "with torchdata's own RandomSampler, which draws as many numbers again, "
        "without reading records",
    }


def medians(results: Mapping[str, Result], setting: Setting) -> Table:
    """Milliseconds by position, and how many times the first position's the last one's are."""
    positions = (*setting.positions, setting.deep)
    columns = (
        "resume to the first batch's IDs, ms",
        "records in all",
        *map(depth, positions),
        "last / 0",
    )
    rows = []
    for group, result in results.items():
        for name, windows in result.windows.items():
            cells = [milliseconds(windows.get(position)) for position in positions]
            rows.append((label(group, name), size(group, name, setting), *cells, growth(windows)))
        if result.words:
            rows.append((result.words, *[""] * (len(columns) - 1)))
    return Table("Resume, by records behind it (medians)", columns, rows)


def spreads(results: Mapping[str, Result]) -> Table:
    """Every figure with its spread."""
    rows = [
        (
            label(group, name),
            depth(position),
            *spread([1000 * x for x in taken], ".3f"),
            str(len(taken)),
        )
        for group, result in results.items()
        for name, windows in result.windows.items()
        for position, taken in windows.items()
    ]
    columns = ("resume, ms", "records behind it", "median", "quartiles", "range", "rounds")
    return Table("Resume: spread", columns, rows)


def label(group: str, name: str) -> str:
    """A way as tables call it."""
    return f"{group}: {name}" if group == OURS else name


def size(group: str, name: str, setting: Setting) -> str:
    """Records in the data of a way."""
    virtual = group == OURS and name != resumes.PERMUTATION
    return depth(resumes.VIRTUAL_RECORDS if virtual else setting.num_records)


def depth(records: int) -> str:
    """A number of records, short."""
    for power in (12, 11):
        if records and records % 10**power == 0:
            factor = records // 10**power
            return f"10^{power}" if factor == 1 else f"{factor} x 10^{power}"
    return f"{records:,}"


def milliseconds(seconds: Sequence[float] | None) -> str:
    """The median, or nothing."""
    if not seconds:
        return ""
    found = 1000 * summary(seconds)["median"]
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def growth(windows: Windows) -> str:
    """The last position over the first, by rounds."""
    if len(windows) < 2:
        return ""
    return f"{summary(ratios(windows[max(windows)], windows[0]))['median']:.2f}"


def targets(windows: Mapping[str, Windows], setting: Setting) -> list[Target]:
    """The same time at any depth, and milliseconds."""
    found = []
    for name in _SAME_TIME:
        by_rounds = ratios(windows[name][setting.deep], windows[name][0])
        what = f"regrain, {name}: record {depth(setting.deep)} of 10^12 over record 0, by rounds"
        found.append(at_most(what, summary(by_rounds)["median"], 1.2, in_words(by_rounds)))
    taken = [1000 * seconds for seconds in windows[resumes.RESUME][setting.deep]]
    what = f"regrain, {resumes.RESUME}: at record {depth(setting.deep)} of 10^12, milliseconds"
    return [*found, at_most(what, summary(taken)["median"], _MILLISECONDS, in_words(taken))]


def in_words(values: Sequence[float]) -> str:
    """The spread, for a target that is missed."""
    _, quartiles, whole = spread(values)
    return f"{len(values)} rounds, quartiles {quartiles}, range {whole}"


def data(results: Mapping[str, Result], setting: Setting) -> dict[str, Any]:
    """All of it; positions are strings, as JSON has them."""
    return {
        "setting": dataclasses.asdict(setting),
        "seconds": {
            group: {
                name: {str(position): taken for position, taken in windows.items()}
                for name, windows in result.windows.items()
            }
            for group, result in results.items()
        },
        "words": {group: result.words for group, result in results.items() if result.words},
    }
