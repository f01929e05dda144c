"""Records per second of this loader, bare NumPy and other loaders, and what a training loop waits."""

import contextlib
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from scripts.benchmarks.contenders import CONTENDERS, GRAIN_RECORDS, NUMPY, OURS
from scripts.benchmarks.processes import DISCARDED, Crew
from scripts.benchmarks.rounds import FULL, QUICK, TRIALS, Outcome, Run, Windows
from scripts.benchmarks.section import (
    Section,
    Table,
    Target,
    at_least,
    at_most,
    ratios,
    spread,
    summary,
    unmeasured,
)
from scripts.benchmarks.workloads import (
    GIB,
    LABEL,
    Workload,
    file_system,
    free_memory,
    make_data,
    workloads,
)

NAME: Final = "loading"
WORKLOADS: Final = ("records", "mapped-warm", "tokens", "images", "training")
MAPPED_GIB: Final = 16.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What of the section is measured, and how large its largest file may be.

    Attributes:
      workloads: their names; empty for all.
      contenders: their names; empty for all.
      rounds: windows of each contender; ``None``: as many as usual.
      mapped_gib: at most so many GiB for the memory-mapped file.
    """

    workloads: Sequence[str] = ()
    contenders: Sequence[str] = ()
    rounds: int | None = None
    mapped_gib: float = MAPPED_GIB


def measure(*, quick: bool, options: Options | None = None) -> Section:
    """Measures the workloads one after the other; all files and processes end with it."""
    options, windows = options or Options(), QUICK if quick else FULL
    if options.rounds is not None:
        windows = dataclasses.replace(windows, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        free, storage = free_memory(), file_system(folder)
        sized = workloads(quick=quick, mapped_gib=options.mapped_gib, folder=folder)
        chosen = [w for w in sized if not options.workloads or w.name in options.workloads]
        names = [n for n in CONTENDERS if not options.contenders or n in options.contenders]
        outcomes = list(_outcomes(chosen, names, folder, windows, reuse=quick))
    return Section(
        NAME,
        "Batches from each loader, and what a training loop waits for them",
        conditions(outcomes, windows, storage, free),
        [table(outcome) for outcome in outcomes],
        [target for outcome in outcomes for target in targets(outcome)],
        {outcome.workload.name: dataclasses.asdict(outcome) for outcome in outcomes},
    )


def _outcomes(
    chosen: Sequence[Workload], names: Sequence[str], folder: Path, windows: Windows, *, reuse: bool
) -> Iterator[Outcome]:
    """Each workload's outcome; with ``reuse`` the processes stay from one to the next."""
    with contextlib.closing(Crew(folder)) as crew, _saying() as say:
        for data, grouped in itertools.groupby(chosen, lambda workload: workload.data):
            place, group = folder / data, list(grouped)
            say(f"{data}: writing {group[0].data_bytes / 1e6:,.0f} MB")
            place.mkdir()
            make_data(group[0], place)
            for workload in group:
                absent = {
                    name: word for name in names if (word := CONTENDERS[name].absence(workload))
                }
                outcome = Outcome(workload, absent=absent)
                members = crew.members([name for name in names if name not in absent])
                Run(outcome, members, place, windows, _prefixed(say, workload.name)).measure()
                yield outcome
                if not reuse:
                    crew.close()
            shutil.rmtree(place)


@contextlib.contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """Tells on a terminal what goes on, and nowhere else."""
    with Console(stderr=True, highlight=False).status("") as status:
        yield status.update


def _prefixed(say: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda text: say(f"{prefix}: {text}")


# --- the report -----------------------------------------------------------------------------------


def conditions(
    outcomes: Sequence[Outcome], windows: Windows, storage: str, free: int
) -> dict[str, str]:
    """Everything that one must know to read the figures."""
    of_workloads = {
        outcome.workload.name: _described(outcome, storage, free) for outcome in outcomes
    }
    trial = (
        "none: each contender's first setting"
        if windows.trial_seconds is None
        else (
            f"up to {TRIALS} windows of {windows.trial_seconds:g} s or one unit for each setting, "
            "after one warm-up; the setting with the best window is measured, and named in the tables"
        )
    )
    return (
        of_workloads
        | {
            "batches": "each contender delivers the same records in batches of the same sizes, shuffled "
            "anew each epoch, in its own order; an epoch's last batch may be shorter",
            "processes": "each contender in its own process, which opens the data itself; they take "
            "turns (A B C ... A B C ...)",
            "windows": f"{windows.rounds} of each contender, "
            f"after {windows.warmup} of warm-up, each of as many whole units as fill {windows.seconds:g} s, "
            f"at least one; {DISCARDED} batches right before each are not counted, so that batches "
            "read ahead give no advantage; ratios are between windows of the same round",
            "clock": "perf_counter around the loop over a window's batches: order, gather, collate, "
            "iterator, hand-over from threads and workers, making and freeing the arrays",
            "left out": "preparation of the data, imports, start of workers, the first epoch; "
            "decoding, augmentation, and, except for training, transfer to a device",
            "check": "before the clock starts, each contender delivers a unit, in which each record "
            "must come once (at most once in less than an epoch), with the bytes of its label",
            "settings": f"trial: {trial}",
            "garbage collector": "on, as in a training loop; collected before each window, imports frozen",
        }
        | {f"contender {name}": made.how for name, made in CONTENDERS.items()}
    )


def _described(outcome: Outcome, storage: str, free: int) -> str:
    workload = outcome.workload
    shape = ", ".join(map(str, (workload.batch_size, *workload.shape)))
    text = (
        f"batches of {workload.field} {workload.dtype}[{shape}] and {LABEL} "
        f"int32[{workload.batch_size}]; {workload.num_records:,} records, "
        f"{workload.data_bytes / 1e6:,.0f} MB, {_storage(outcome, storage, free)}; unit: "
    )
    text += "an epoch" if workload.whole_epochs else f"{workload.unit_batches} batches"
    if workload.stride:
        text += f"; windows begin every {workload.stride:,} elements and overlap"
    if workload.trains:
        text += _training(outcome)
    return text


def _storage(outcome: Outcome, storage: str, free: int) -> str:
    workload = outcome.workload
    if not workload.mapped:
        return "in memory, allocated and filled by each process"
    shares = [share for share in outcome.resident if share is not None]
    found = (
        f"{min(shares):.1%} to {max(shares):.1%} of it" if shares else "nobody tells how much of it"
    )
    state = f"read through before, {found} was in memory (page cache) when a round began"
    return (
        f"memory-mapped from a file on {storage}, {workload.data_bytes / free:.0%} of the "
        f"{free / GIB:.1f} GiB of memory that were free; {state}"
    )


def _training(outcome: Outcome) -> str:
    windows = [window for of in outcome.windows.values() for window in of]
    alone = summary([window["alone"] / window["steps"] for window in windows])
    return (
        f"; a step in plain JAX reads the batch and computes for a median of {1000 * alone['median']:.2f} "
        f"ms (quartiles {1000 * alone['q1']:.2f} - {1000 * alone['q3']:.2f}) in one thread, on "
        "the first device that JAX has; three loops a window, each of "
        f"{windows[0]['steps']:.0f} steps: over one batch that is on the device; 'awaited', which waits "
        "for each step before it asks for a batch; 'ahead', which asks for a batch while the step "
        "before is computed, and waits for the step before that. Who has no way to a device gets a "
        "jax.device_put of each batch"
    )


def table(outcome: Outcome) -> Table:
    """A row for each contender, absent ones last."""
    rows = [
        _training_row(outcome, name) if outcome.workload.trains else _row(outcome, name)
        for name in outcome.windows
    ]
    columns = (
        ("contender", "waits, awaited", "quartiles", "longer, ahead", "quartiles", "setting")
        if outcome.workload.trains
        else (
            "contender",
            "1,000 records/s",
            "quartiles",
            f"{OURS} / it",
            "quartiles",
            "range",
            "setting",
        )
    )
    blank = [""] * (len(columns) - 2)
    rows += [[name, *blank, word] for name, word in outcome.absent.items()]
    return Table(f"{outcome.workload.name}: {TITLES[outcome.workload.name]}", columns, rows)


TITLES: Final = {
    "records": "256 x 784 B from memory",
    "mapped-warm": "256 x 3 KB from a memory-mapped file, page cache warm",
    "tokens": "windows of 64 x 2,048 int32 from a memory-mapped file",
    "images": "32 x 150 KB from a memory-mapped file",
    "training": "share of the wall by which 256 x 3 KB from memory hold up 2 ms steps",
}


def _row(outcome: Outcome, name: str) -> list[str]:
    rate = spread([rate / 1000 for rate in outcome.values(name)], ",.1f")
    setting = outcome.settings[name]
    if name == OURS or OURS not in outcome.windows:
        return [name, *rate[:2], "", "", "", setting]
    return [name, *rate[:2], *spread(against(outcome, name), ".2f"), setting]


def _training_row(outcome: Outcome, name: str) -> list[str]:
    shares = [
        cell
        for values in (waits(outcome, name), slowdowns(outcome, name))
        for cell in spread(values, ".1%")[:2]
    ]
    return [name, *shares, outcome.settings[name]]


def against(outcome: Outcome, name: str) -> list[float]:
    """Our rate over another contender's, round by round."""
    return ratios(outcome.values(OURS), outcome.values(name))


def waits(outcome: Outcome, name: str) -> list[float]:
    """Share of the awaited loop's wall that went into waiting for batches on the device."""
    return ratios(outcome.values(name, "wait"), outcome.values(name, "awaited"))


def slowdowns(outcome: Outcome, name: str) -> list[float]:
    """Share of the wall of the loop that asks ahead that its steps alone do not need."""
    alone = ratios(outcome.values(name, "alone"), outcome.values(name, "ahead"))
    return [1 - share for share in alone]


# --- the targets ----------------------------------------------------------------------------------


def targets(outcome: Outcome) -> list[Target]:
    """What is promised for a workload, and whether it is kept."""
    if OURS not in outcome.windows:
        return []
    made = [_no_slower(outcome)]
    if outcome.workload.name == "records":
        made += _on_records(outcome)
    if outcome.workload.trains:
        made += _on_training(outcome)
    return made


def _others(outcome: Outcome) -> list[str]:
    return [name for name in outcome.windows if name != OURS and name not in NUMPY]


def _fastest(outcome: Outcome, names: Iterable[str]) -> str | None:
    """Against whom our ratio is the lowest, of those that were measured."""
    measured = [name for name in names if name in outcome.windows]
    return min(measured, key=lambda name: _median(against(outcome, name)), default=None)


def _median(values: Sequence[float]) -> float:
    return summary(values)["median"]


def _no_slower(outcome: Outcome) -> Target:
    name = f"{outcome.workload.name}: no contender but bare NumPy is faster ({OURS} / fastest)"
    fastest = _fastest(outcome, _others(outcome))
    if fastest is None:
        return unmeasured(name, ">= 1", "no other contender was measured")
    got = _median(against(outcome, fastest))
    return at_least(name, got, 1, f"the fastest is {_named(outcome, fastest)}")


def _on_records(outcome: Outcome) -> list[Target]:
    bar, peer = _fastest(outcome, NUMPY), _fastest(outcome, _others(outcome))
    made = []
    if bar is not None:
        why = (
            "the rest goes into order, ids, mask and iterator, which the bare gather does not make"
        )
        made.append(
            at_least(
                f"records: {OURS} / better bare gather", _median(against(outcome, bar)), 0.85, why
            )
        )
    if peer is not None:
        got = _median(against(outcome, peer))
        made.append(
            at_least(
                f"records: {OURS} / fastest peer loader", got, 5, _why_close(outcome, peer, bar)
            )
        )
    if GRAIN_RECORDS in outcome.windows:
        got = _median(against(outcome, GRAIN_RECORDS))
        why = f"Grain's fastest here is {_named(outcome, GRAIN_RECORDS)}"
        made.append(at_least(f"records: {OURS} / {GRAIN_RECORDS}", got, 150, why))
    return made


def _why_close(outcome: Outcome, peer: str, bar: str | None) -> str:
    """Why no loader can be so much faster than this peer, if that is so."""
    why = f"the fastest peer is {_named(outcome, peer)}"
    if bar is not None:
        room = _median(ratios(outcome.values(bar), outcome.values(peer)))
        why += f"; the bare gather itself ({bar}) is only {room:.1f} times as fast"
    return why


def _named(outcome: Outcome, name: str) -> str:
    setting = outcome.settings[name]
    return f"{name} ({setting})" if setting else name


def _on_training(outcome: Outcome) -> list[Target]:
    setting = outcome.settings[OURS]
    return [
        at_most(
            "training: data wait of a loop that asks a step ahead, share of the wall",
            _median(slowdowns(outcome, OURS)),
            0.02,
            f"with {setting}; loader and step share the cores of one machine",
        ),
        at_most(
            "training: data wait of a loop that awaits each step first, share of the wall",
            _median(waits(outcome, OURS)),
            0.02,
            f"with {setting}; nothing overlaps with the step but what threads read ahead",
        ),
    ]
