"""The ways to resume that are compared, and the process in which each is tried.

A way takes a position, in records behind the start of an epoch, to the records of the batch that
comes next there. Packages that are no part of this project are imported in the process of their way
only.
"""

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

import checkpointing
import loader

Rows = npt.NDArray[np.int64]

SEED: Final = 17
#: Divides every position, so that a batch begins at each.
BATCH: Final = 250
VIRTUAL_RECORDS: Final = 10**12
_EPOCHS: Final = 3
#: What batches that are skipped have to be read from: 47 MB, as often over as the data is longer.
_IMAGES: Final = (60_000, 784)
SHARDS: Final = 120


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a resume is measured, and how often.

    Attributes:
      positions: records behind the start of the epoch, the start itself first.
      deep: the position that only a formula reaches, in a source of `VIRTUAL_RECORDS`.
      num_records: in the data of all others.
      rounds: of each way at most, each of them once at every position.
      least: rounds of each way in any case.
      seconds: of each way, after which no further round begins.
    """

    positions: tuple[int, ...]
    deep: int
    num_records: int
    rounds: int
    least: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to resume.

    Attributes:
      positions: at which it is tried.
      attempt: makes ready for a resume at a position, and returns what the clock surrounds: it gives
        the records of the next batch, and leaves what is to be closed after the clock to the stack.
      due: the records that have to come at a position; ``None`` where nothing tells them beforehand.
    """

    positions: tuple[int, ...]
    attempt: Callable[[int, contextlib.ExitStack], Callable[[], Any]]
    due: Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Group:
    """Ways that share a process.

    Attributes:
      make: from the setting and a folder, the ways by name.
      packages: modules that it needs and that may be missing.
    """

    make: Callable[[Setting, Path], Mapping[str, Way]]
    packages: tuple[str, ...] = ()


# --- this loader ----------------------------------------------------------------------------------


class Virtual:
    """A source of any length that stores nothing: IDs and the one field are computed from rows."""

    fields: Final = {"value": loader.Field(np.dtype(np.int64))}

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records

    def __len__(self) -> int:
        """How many records."""
        return self._num_records

    def ids(self, rows: Rows, /) -> Rows:
        """Odd numbers: not the rows, so that a look-up has to ask `rows_of`."""
        return 2 * rows + 1

    def rows_of(self, ids: Rows, /) -> Rows:
        """The inverse of `ids`; -1 where there is no such record."""
        return np.where(ids % 2 == 1, ids // 2, -1)

    def read(self, rows: Rows, /) -> dict[str, Rows]:
        """All fields of some rows."""
        return {"value": rows * rows}

    def fingerprint(self) -> loader.Fingerprint:
        """Known by a revision: nobody reads 10**12 records."""
        return loader.Fingerprint.of_revision("squares, revision 1", self)


def fresh_pipeline(num_records: int, shuffle: Any = "feistel") -> loader.Pipeline:
    """A new pipeline over a new source."""
    config = loader.PipelineConfig(BATCH, SEED, "partial", num_epochs=_EPOCHS, shuffle=shuffle)
    return loader.Pipeline(Virtual(num_records), config)


def place(position: int) -> loader.Position:
    """A number of records in the first epoch, as a position."""
    return loader.Position(0, position, position // BATCH)


def due_ids(num_records: int, position: int, shuffle: str = "feistel") -> Rows:
    """IDs that have to come next, by the order alone."""
    stop = position + BATCH
    rows = loader.epoch_order(num_records, SEED, 0, shuffle, start=position, stop=stop)
    return 2 * rows + 1


def make_ours(setting: Setting, folder: Path) -> dict[str, Way]:
    """Everything that goes to a position, over `VIRTUAL_RECORDS`; and NumPy's order over fewer."""
    deep = (*setting.positions, setting.deep)
    few = setting.num_records

    def way(attempt: Callable[[int, contextlib.ExitStack], Callable[[], Any]]) -> Way:
        return Way(deep, attempt, lambda position: due_ids(VIRTUAL_RECORDS, position))

    resume_permutation = Way(
        setting.positions,
        lambda position, _: lambda: first_ids(fresh_pipeline(few, "permutation"), position),
        lambda position: due_ids(few, position, "permutation"),
    )
    construct = Way((0,), lambda *_: lambda: fresh_pipeline(VIRTUAL_RECORDS), lambda _: None)
    resume = way(lambda position, _: lambda: first_ids(fresh_pipeline(VIRTUAL_RECORDS), position))
    steps_of = Way(deep, steps_of_first, lambda position: position // BATCH)
    return {
        CONSTRUCT: construct,
        RESUME: resume,
        ITERATE: way(iterate_from),
        IDS: way(ids_of_step),
        STEPS_OF: steps_of,
        CHECKPOINTS: way(checkpoint_resumes(deep, folder)),
        PERMUTATION: resume_permutation,
    }


CONSTRUCT: Final = "construct"
RESUME: Final = "construct, resume"
ITERATE: Final = "iterate(start)"
IDS: Final = "ids(step)"
STEPS_OF: Final = "steps_of(id)"
CHECKPOINTS: Final = "Checkpoints.resume"
PERMUTATION: Final = "construct, resume (permutation)"


def first_ids(pipeline: loader.Pipeline, position: int) -> Any:
    """IDs of the batch that an iterator from a position begins with."""
    return next(pipeline.iterate(place(position)))["id"]


def iterate_from(position: int, _: contextlib.ExitStack) -> Callable[[], Any]:
    """As `first_ids`, of a pipeline that is there already."""
    pipeline = fresh_pipeline(VIRTUAL_RECORDS)
    return lambda: first_ids(pipeline, position)


def ids_of_step(position: int, _: contextlib.ExitStack) -> Callable[[], Any]:
    """IDs of a batch by its number."""
    pipeline = fresh_pipeline(VIRTUAL_RECORDS)
    return lambda: pipeline.ids(position // BATCH)


def steps_of_first(position: int, _: contextlib.ExitStack) -> Callable[[], Any]:
    """The step, in the first epoch, of the first record at a position; all epochs are answered."""
    pipeline = fresh_pipeline(VIRTUAL_RECORDS)
    record_id = int(due_ids(VIRTUAL_RECORDS, position)[0])
    return lambda: loader.provenance(pipeline).steps_of(record_id)[0].step


def checkpoint_resumes(
    positions: Iterable[int], folder: Path
) -> Callable[[int, contextlib.ExitStack], Callable[[], Any]]:
    """Resumes of a small train state, from a checkpoint at each position."""
    train_state = small_train_state()

    def opened(position: int) -> checkpointing.Checkpoints:
        pipeline = fresh_pipeline(VIRTUAL_RECORDS)
        return checkpointing.Checkpoints(folder / f"run-{position}", pipeline, 1, 1)

    for position in positions:
        with opened(position) as checkpoints:
            batches = checkpoints.resume(train_state).batches
            batches.set_state(dataclasses.asdict(place(position)))
            checkpoints.save(batches, train_state, force=True)

    def attempt(position: int, after: contextlib.ExitStack) -> Callable[[], Any]:
        def resume() -> Any:
            checkpoints = after.enter_context(opened(position))
            return next(checkpoints.resume(train_state).batches)["id"]

        return resume

    return attempt


def small_train_state() -> dict[str, Any]:
    """2.6 KB in two arrays, on the CPU."""
    state = {"w": np.ones((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    placed: dict[str, Any] = jax.device_put(state, jax.local_devices(backend="cpu")[0])
    return placed


# --- the others -----------------------------------------------------------------------------------


class RowSource:
    """Records that are their own rows: to read one costs a loader nothing but its own way to it."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records

    def __len__(self) -> int:
        """How many records."""
        return self._num_records

    def __getitem__(self, row: int) -> int:
        """A record."""
        return row

    def __getitems__(self, rows: list[int]) -> list[int]:
        """Records, as PyTorch asks for a batch of them."""
        return rows


class ImageSource(RowSource):
    """Records of 784 B from memory: `_IMAGES` again and again."""

    def __init__(self, num_records: int) -> None:
        super().__init__(num_records)
        self._images = np.random.default_rng(0).integers(0, 256, _IMAGES, np.uint8)

    def read(self, rows: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Records in one gather."""
        return self._images.take(np.remainder(rows, len(self._images)), axis=0)

    __getitem__ = __getitems__ = read  # type: ignore[assignment]


def make_numpy(setting: Setting, _: Path) -> dict[str, Way]:
    """What nobody who skips batches can undercut."""
    images = ImageSource(setting.num_records)

    def resume(position: int) -> Any:
        rows = np.random.default_rng(SEED).permutation(len(images))
        batches = (images.read(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH))
        return next(itertools.islice(batches, position // BATCH, None))

    return {"bare np.take: skip batches": Way(setting.positions, _plainly(resume), _unknown)}


def make_torch(setting: Setting, _: Path) -> dict[str, Way]:
    """A DataLoader has no state: batches are skipped."""
    torch = importlib.import_module("torch")
    data = importlib.import_module("torch.utils.data")
    images = ImageSource(setting.num_records)

    def resume(position: int) -> Any:
        batches = data.DataLoader(
            images,
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(SEED),
            collate_fn=torch.from_numpy,
        )
        return next(itertools.islice(iter(batches), position // BATCH, None))

    return {"torch DataLoader: skip batches": Way(setting.positions, _plainly(resume), _unknown)}


def make_stateful(setting: Setting, _: Path) -> dict[str, Way]:
    """Its states are taken in one pass, along with the batch behind each."""
    torch = importlib.import_module("torch")
    stateful = importlib.import_module("torchdata.stateful_dataloader")
    sampling = importlib.import_module("torchdata.stateful_dataloader.sampler")

    def new() -> Any:
        # With a generator given to the loader itself, 0.10 resumes with other records: the loader
        # draws a number from it between the sampler's state and the sampler's permutation.
        source = RowSource(setting.num_records)
        sampler = sampling.RandomSampler(source, generator=torch.Generator().manual_seed(SEED))
        return stateful.StatefulDataLoader(
            source, batch_size=BATCH, sampler=sampler, collate_fn=torch.as_tensor
        )

    states, due = pass_over(new, setting.positions)

    def resume(position: int) -> Any:
        batches = new()
        if position:
            batches.load_state_dict(states[position])
        return next(iter(batches))

    name = "StatefulDataLoader: load_state_dict"
    return {name: Way(setting.positions, _plainly(resume), due.__getitem__)}


def make_hugging_face(setting: Setting, _: Path) -> dict[str, Way]:
    """In the order of the data: the buffer of its shuffle is filled anew after a resume."""
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"x": np.arange(setting.num_records)}).with_format("numpy")

    def new() -> Any:
        return data.to_iterable_dataset().batch(BATCH)

    states, _due = pass_over(new, setting.positions)

    def load(position: int) -> Any:
        batches = new()
        if position:
            batches.load_state_dict(states[position])
        return next(iter(batches))["x"]

    def skip(position: int) -> Any:
        return next(iter(data.to_iterable_dataset().skip(position).iter(BATCH)))["x"]

    def due(position: int) -> Any:
        return np.arange(position, position + BATCH)

    names = {
        "datasets (no shuffle): load_state_dict": load,
        "datasets (no shuffle): skip": skip,
    }
    return {name: Way(setting.positions, _plainly(resume), due) for name, resume in names.items()}


def make_mosaic(setting: Setting, folder: Path) -> dict[str, Way]:
    """Local shards, all of them links to one file; a state that was taken at the first position."""
    streaming = importlib.import_module("streaming")
    shards = link_shards(streaming, setting.num_records // SHARDS, folder)

    def new(stack: contextlib.ExitStack) -> Any:
        data = streaming.StreamingDataset(
            local=str(shards),
            batch_size=BATCH,
            shuffle=True,
            shuffle_seed=SEED,
            num_canonical_nodes=1,
        )
        stack.callback(lambda: data._iterator.exit())  # noqa: SLF001, PLW0108 (no public way ends its threads; made later)
        return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=0)

    first = setting.positions[1]
    with contextlib.ExitStack() as stack:
        states, due = pass_over(lambda: new(stack), (0, first))

    def attempt(position: int, after: contextlib.ExitStack) -> Callable[[], Any]:
        def resume() -> Any:
            batches = new(after)
            if position:
                batches.load_state_dict({**states[first], "sample_in_epoch": position})
            return next(iter(batches))["x"]

        return resume

    def known(position: int) -> Any:
        found = due.get(position)
        return None if found is None else found["x"]

    return {"StreamingDataset: load_state_dict": Way(setting.positions, attempt, known)}


def link_shards(streaming: Any, records: int, folder: Path) -> Path:
    """A folder of `SHARDS` shards of some records each; only one of them is written."""
    one, shards = folder / "one", folder / "shards"
    with streaming.MDSWriter(out=str(one), columns={"x": "int64"}, size_limit=1 << 31) as writer:
        for row in range(records):
            writer.write({"x": row})
    index = json.loads((one / "index.json").read_text("utf-8"))
    (shard,) = index["shards"]
    shards.mkdir()
    entries = []
    for number in range(SHARDS):
        name = f"shard.{number:05d}.mds"
        os.link(one / shard["raw_data"]["basename"], shards / name)
        entries.append({**shard, "raw_data": {**shard["raw_data"], "basename": name}})
    (shards / "index.json").write_text(json.dumps({**index, "shards": entries}), "utf-8")
    return shards


def make_grain(setting: Setting, _: Path) -> dict[str, Way]:
    """Grain record by record: its state is a number of batches, and its order a formula."""
    grain = importlib.import_module("grain")
    data = grain.MapDataset.source(RowSource(setting.num_records)).shuffle(seed=SEED).batch(BATCH)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

    def resume(position: int) -> Any:
        source = grain.MapDataset.source(RowSource(setting.num_records))
        batches = iter(source.shuffle(seed=SEED).batch(BATCH).to_iter_dataset(options))
        batches.set_state({"next_index": position // BATCH})
        return next(batches)

    return {
        "Grain per record: set_state": Way(
            setting.positions, _plainly(resume), lambda position: data[position // BATCH]
        )
    }


def pass_over(
    make: Callable[[], Any], positions: Iterable[int]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """One pass without a stop: at each position the loader's state, and the batch that comes next."""
    loader_of_batches = make()
    states: dict[int, Any] = {}
    batches: dict[int, Any] = {}
    wanted = set(positions)
    for number, batch in enumerate(loader_of_batches):
        if number * BATCH in wanted:
            batches[number * BATCH] = batch
        if len(batches) == len(wanted):
            break
        if (number + 1) * BATCH in wanted:
            states[(number + 1) * BATCH] = loader_of_batches.state_dict()
    return states, batches


def _plainly(
    resume: Callable[[int], Any],
) -> Callable[[int, contextlib.ExitStack], Callable[[], Any]]:
    """A resume that needs nothing made ready and leaves nothing to close."""
    return lambda position, _: lambda: resume(position)


def _unknown(_: int) -> None:
    """Whoever skips batches ends where the batches end that were skipped."""


OURS: Final = "regrain"
GROUPS: Final[dict[str, Group]] = {
    OURS: Group(make_ours),
    "NumPy": Group(make_numpy),
    "Grain": Group(make_grain),
    "torch": Group(make_torch, ("torch",)),
    "torchdata": Group(make_stateful, ("torch", "torchdata")),
    "Hugging Face datasets": Group(make_hugging_face, ("datasets",)),
    "MosaicML Streaming": Group(make_mosaic, ("streaming",)),
}


# --- the process of a group -----------------------------------------------------------------------


class WrongRecordsError(Exception):
    """A resume came to other records than those that were due."""


def serve(name: str, setting: Setting, folder: Path, connection: Connection) -> None:
    """Runs a group in this process: makes its ways when told, then does a round of one when told.

    Each answer is a pair: the answer, and what went wrong instead.
    """
    _stay_in(folder)
    try:
        for package in GROUPS[name].packages:
            importlib.import_module(package)
        connection.send((None, None))
        connection.recv()
        ways = GROUPS[name].make(setting, folder)
        connection.send((list(ways), None))
        gc.collect()
        gc.freeze()  # what the imports left is not to be gone through in some rounds and not in others
        while (asked := connection.recv()) is not None:
            connection.send((one_round(ways[asked[0]], backwards=asked[1]), None))
    except EOFError:
        return  # nobody asks any more
    except Exception as error:  # noqa: BLE001 (others' code may raise anything, and the report tells it)
        connection.send((None, f"{type(error).__name__}: {error}"))


def _stay_in(folder: Path) -> None:
    """Whatever the packages write goes to one folder; their warnings are none of the report's."""
    os.environ |= {"TMPDIR": str(folder), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    tempfile.tempdir = None
    warnings.simplefilter("ignore")


def one_round(way: Way, *, backwards: bool) -> dict[int, float]:
    """Seconds of a resume at each position, one after the other, behind one that does not count.

    Raises:
      WrongRecordsError: one came elsewhere.
    """
    gc.collect()
    timed_resume(way, way.positions[0])  # whoever comes first pays for cold caches
    order = way.positions[::-1] if backwards else way.positions
    return {position: timed_resume(way, position) for position in order}


def timed_resume(way: Way, position: int) -> float:
    """Seconds of one resume, which is checked."""
    due = way.due(position)
    with contextlib.ExitStack() as after:
        resume = way.attempt(position, after)
        start = time.perf_counter()
        got = resume()
        seconds = time.perf_counter() - start
        if due is not None and not np.array_equal(np.asarray(got), np.asarray(due)):
            raise WrongRecordsError(f"at {position:,} other records came than without a stop")
    return seconds
