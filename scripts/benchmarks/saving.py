"""What a save costs: blocking and in all, beside an Orbax save of the train state alone."""

import contextlib
import dataclasses
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
import numpy as np
import orbax.checkpoint as ocp

import checkpointing
import loader
from scripts.benchmarks.section import (
    Section,
    Table,
    Target,
    at_most,
    ratios,
    spread,
    summary,
    unmeasured,
)

NAME: Final = "saving"

KB, MB, GB = 10**3, 10**6, 10**9
#: Bytes of train state, with the rounds of each.
FULL: Final = {KB: 40, 10 * MB: 30, 200 * MB: 15, GB: 7}
QUICK: Final = {KB: 2, MB: 1}
_LEAVES: Final = 16
_WARM_UP: Final = 2

OURS: Final = "Checkpoints.save"
#: Orbax alone, by whether it makes its directories in the background: its default.
PLAIN: Final = {"Orbax alone, defaults": True, "Orbax alone, directories first": False}
CONTENDERS: Final = (OURS, *PLAIN)
_JUDGED: Final = 200 * MB
_BLOCKING_BOUND: Final = 1.1
_BYTES_BOUND: Final = 64 * 1024
#: Enough for as many marks as a fingerprint can have: the manifest is as large as with any number.
_NUM_RECORDS: Final = 4096


@dataclasses.dataclass(frozen=True)
class Saves:
    """Seconds of each round, and bytes, at one size of train state.

    Attributes:
      blocking: until ``save`` returned, by contender.
      total: until the save was committed, by contender.
      iterator_bytes: of the iterator's item in a step.
      manifest_bytes: of the manifest's item in a step.
    """

    blocking: dict[str, list[float]]
    total: dict[str, list[float]]
    iterator_bytes: int
    manifest_bytes: int


#: Saves a step and gives seconds: blocking, in all.
Save = Callable[[int], tuple[float, float]]


def measure(*, quick: bool) -> Section:
    """Saves of several sizes, ours and Orbax's in turn."""
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        found = {
            size: measure_size(size, rounds, Path(folder, str(size)), quick=quick)
            for size, rounds in sizes.items()
        }
    return Section(
        NAME,
        "A save, beside the same Orbax save of the train state alone",
        conditions(sizes),
        (times(found), sizes_on_disk(found)),
        targets(found),
        {str(size): dataclasses.asdict(saves) for size, saves in found.items()},
    )


def measure_size(size: int, rounds: int, folder: Path, *, quick: bool) -> Saves:
    """Rounds of one size; the two contenders change the order from round to round."""
    train_state = make_train_state(size)
    blocking: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    total: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    step_bytes, warm_up = (0, 0), 0 if quick else _WARM_UP
    with contextlib.ExitStack() as stack:
        saves: dict[str, tuple[Path, Save]] = {}
        for name in CONTENDERS:
            where = folder / name
            saves[name] = where, stack.enter_context(opened(name, where, train_state))
        for number in range(warm_up + rounds):
            for name in CONTENDERS[:: 1 if number % 2 else -1]:
                where, save = saves[name]
                settle(quick=quick)
                taken = save(number + 1)
                step = where / str(number + 1)
                if name == OURS:
                    step_bytes = item_bytes(step / "iterator"), item_bytes(step / "manifest")
                shutil.rmtree(step)
                if number >= warm_up:
                    blocking[name].append(taken[0])
                    total[name].append(taken[1])
    return Saves(blocking, total, *step_bytes)


def opened(
    name: str, folder: Path, train_state: Mapping[str, jax.Array]
) -> contextlib.AbstractContextManager[Save]:
    """A contender, ready to save."""
    if name == OURS:
        return our_saves(folder, train_state)
    return plain_saves(folder, train_state, background=PLAIN[name])


def settle(*, quick: bool) -> None:
    """No save pays for what was written, deleted or dropped before it."""
    gc.collect()
    if not quick:  # which would wait for all that the machine writes
        os.sync()


def make_train_state(size: int) -> dict[str, jax.Array]:
    """Float32 noise, which no compression makes smaller by much, on the CPU."""
    generator = np.random.default_rng(0)
    each = size // _LEAVES // 4
    cpu = jax.local_devices(backend="cpu")[0]
    return {
        f"layer_{i:02}": jax.device_put(generator.standard_normal(each, np.float32), cpu)
        for i in range(_LEAVES)
    }


def make_pipeline() -> loader.Pipeline:
    """A stream whose fingerprint has as many marks as one can have."""
    source = loader.ArraySource({"x": np.arange(_NUM_RECORDS)})
    config = loader.PipelineConfig(batch_size=1, seed=17, final_batch="drop")
    return loader.Pipeline(source, config)


@contextlib.contextmanager
def our_saves(folder: Path, train_state: Mapping[str, jax.Array]) -> Iterator[Save]:
    """`Checkpoints.save`, once the batch that it is behind has been delivered."""
    with checkpointing.Checkpoints(folder, make_pipeline(), save_every=1, keep=1) as checkpoints:
        batches = checkpoints.resume(dict(train_state)).batches

        def save(_: int) -> tuple[float, float]:
            next(batches)
            start = time.perf_counter()
            begun = checkpoints.save(batches, train_state)
            returned = time.perf_counter()
            checkpoints.wait()
            done = time.perf_counter()
            if not begun:
                raise RuntimeError("a save was not begun")
            return returned - start, done - start

        yield save


@contextlib.contextmanager
def plain_saves(
    folder: Path, train_state: Mapping[str, jax.Array], *, background: bool
) -> Iterator[Save]:
    """An `AsyncCheckpointer` with `StandardSave`; whether it makes directories in the background."""
    folder.mkdir(parents=True)
    options = ocp.options.AsyncOptions(create_directories_asynchronously=background)
    handler = ocp.StandardCheckpointHandler()
    with ocp.AsyncCheckpointer(handler, async_options=options) as orbax:

        def save(step: int) -> tuple[float, float]:
            start = time.perf_counter()
            orbax.save(folder / str(step), args=ocp.args.StandardSave(dict(train_state)))
            returned = time.perf_counter()
            orbax.wait_until_finished()
            return returned - start, time.perf_counter() - start

        yield save


def item_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- the report -----------------------------------------------------------------------------------


def conditions(sizes: Mapping[int, int]) -> dict[str, str]:
    """Everything that one must know to read the figures."""
    rounds = ", ".join(f"{in_bytes(size)}: {count}" for size, count in sizes.items())
    return {
        "clock": "perf_counter around the call of save (blocking), and from the call until wait returns (total); "
        "nothing else runs between the two",
        "train state": f"{_LEAVES} float32 arrays of noise, equally large, JAX arrays on the CPU; the same at "
        "each save",
        "Orbax alone": "AsyncCheckpointer(StandardCheckpointHandler()), StandardSave of the same train state; once "
        "with its default options, under which it makes its directories in the background, and once with "
        "create_directories_asynchronously=False. Ours is compared with the one that blocks less",
        "what ours does more": "the iterator's state and the manifest, with the next 64 IDs; the sha256 of every "
        "file; fsync of every file and directory of the step and of the rename that commits it. Orbax "
        "syncs only its array files, so its total ends before everything is on disk",
        "in turn": f"A B C C B A ..., {_WARM_UP} rounds that are not counted, then rounds ({rounds})",
        "storage": f"new directories below {tempfile.gettempdir()}, all on one file system; before each save, "
        "outside the clock: sync, garbage collection, the previous step removed (so that no deletion of old "
        "steps is in any)",
        "manifest": f"a fingerprint with the largest number of marks (2,048), {_LEAVES} leaves",
    }


def in_bytes(size: int) -> str:
    """A size in its unit."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def times(found: Mapping[int, Saves]) -> Table:
    """Milliseconds of each contender, and their ratio by rounds."""
    rows = []
    for size, saves in found.items():
        for what, seconds in (("blocking", saves.blocking), ("total", saves.total)):
            for name, values in seconds.items():
                taken = [1000 * value for value in values]
                rows.append((f"{in_bytes(size)}, {what}, ms", name, *spread(taken, ".1f")))
            other, by_rounds = against_faster(seconds)
            rows.append((f"{in_bytes(size)}, {what}", f"ratio to {other}", *spread(by_rounds)))
    columns = ("train state", "", "median", "quartiles", "range")
    return Table("Save", columns, rows)


def against_faster(seconds: Mapping[str, Sequence[float]]) -> tuple[str, list[float]]:
    """The faster of the two forms of Orbax alone, and ours over it by rounds."""
    other = min(PLAIN, key=lambda name: summary(seconds[name])["median"])
    return other, ratios(seconds[OURS], seconds[other])


def sizes_on_disk(found: Mapping[int, Saves]) -> Table:
    """Bytes that ours adds to a step."""
    rows = [
        (in_bytes(size), f"{saves.iterator_bytes:,}", f"{saves.manifest_bytes:,}")
        for size, saves in found.items()
    ]
    return Table("Save: bytes added to a step", ("train state", "iterator", "manifest"), rows)


def targets(found: Mapping[int, Saves]) -> list[Target]:
    """Blocking time at 200 MB, and bytes at any size."""
    name = f"blocking time of a save of {in_bytes(_JUDGED)}, over Orbax alone, by rounds"
    if _JUDGED in found:
        other, blocked = against_faster(found[_JUDGED].blocking)
        why = f"over {other}; {in_words(blocked)}"
        judged = at_most(name, summary(blocked)["median"], _BLOCKING_BOUND, why)
    else:
        judged = unmeasured(
            name, f"<= {_BLOCKING_BOUND:g}", "the quick form saves nothing so large"
        )
    most = max(saves.iterator_bytes + saves.manifest_bytes for saves in found.values())
    return [judged, at_most("iterator and manifest in a step, bytes", most, _BYTES_BOUND)]


def in_words(values: Sequence[float]) -> str:
    """The spread, for a target that is missed."""
    _, quartiles, whole = spread(values)
    return f"{len(values)} rounds, quartiles {quartiles}, range {whole}"
