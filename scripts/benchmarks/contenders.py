"""The contenders: for each, how it is made to deliver a workload's batches, as fast as it can be.

Each makes an endless iterator over batches that holds the same records in batches of the same sizes,
shuffled, epoch after epoch. Some have several settings; a trial finds the fastest. A contender's own
packages are imported in its process only.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from scripts.benchmarks import peers
from scripts.benchmarks.workloads import LABEL, Array, Batch, Data, Workload

SEED: Final = 17
OURS: Final = "regrain"
NUMPY: Final = ("numpy fancy", "numpy take")
GRAIN_RECORDS: Final = "grain per record"
_NUMPY_ORDERS: Final = 4

Make = Callable[[Data, Any], Iterator[Batch]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to get batches.

    Attributes:
      how: what it does, for the report.
      settings: for each setting's name what makes the iterator, from the data and from the device
        that batches should come on (``None``: in host memory); who cannot do that leaves them there.
      packages: distributions that it needs.
      modules: what its process imports first.
      rewrites: settings that write all data anew for each epoch, and need epochs as units.
      install: how they get there.
      apart: data that it cannot take part in, and why.
    """

    how: str
    settings: Mapping[str, Make]
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    install: str = ""
    apart: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def fitting(self, workload: Workload) -> list[str]:
        """The settings that can be tried on a workload."""
        return [
            name for name in self.settings if workload.whole_epochs or name not in self.rewrites
        ]

    def absence(self, workload: Workload) -> str:
        """A word if it takes no part in a workload, else empty."""
        if workload.data in self.apart:
            return "left out"
        for package in self.packages:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return "not installed"
        return "" if self.settings else "not driven"


# --- bare NumPy -----------------------------------------------------------------------------------


def _row_batches(workload: Workload) -> Iterator[npt.NDArray[np.int64]]:
    """Endless batches of rows, all made before the first is given."""
    generator, size = np.random.default_rng(SEED), workload.batch_size
    orders = [generator.permutation(workload.num_records) for _ in range(_NUMPY_ORDERS)]
    starts = range(0, workload.num_records, size)
    return itertools.cycle([rows[at : at + size] for rows in orders for at in starts])


def numpy_fancy(data: Data, device: Any) -> Iterator[Batch]:
    """``array[rows]`` for each field."""
    del device
    for rows in _row_batches(data.workload):
        yield {name: array[rows] for name, array in data.arrays.items()}


def numpy_take(data: Data, device: Any) -> Iterator[Batch]:
    """``np.take(array, rows, axis=0)`` for each field; for windows ``np.take(flat, elements)``."""
    del device
    workload = data.workload
    if not workload.stride:
        for rows in _row_batches(workload):
            yield {name: np.take(array, rows, axis=0) for name, array in data.arrays.items()}
    flat, inside, labels = np.asarray(data.flat), np.arange(workload.shape[0]), data.arrays[LABEL]
    for rows in _row_batches(workload):
        elements = rows[:, None] * workload.stride + inside
        yield {workload.field: np.take(flat, elements), LABEL: np.take(labels, rows)}


# --- this loader ----------------------------------------------------------------------------------


class WindowSource:
    """A source whose records are windows into a flat array: what a user writes for token files."""

    def __init__(self, data: Data) -> None:
        import loader

        self._data = data
        self.fields = {
            name: loader.Field(array.dtype, array.shape[1:]) for name, array in data.arrays.items()
        }

    def __len__(self) -> int:
        return len(self._data)

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """A window's number: int64[k]."""
        return rows

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, Array]:
        """The windows of ``rows: int64[k]``."""
        return self._data.read(rows)

    def fingerprint(self) -> Any:
        """Reads all windows."""
        import loader

        return loader.fingerprint(self)


def regrain(data: Data, device: Any, *, threads: int) -> Iterator[Batch]:
    """``Pipeline.iterate()``; order inside the clock; ``id`` and ``mask`` come on top."""
    import loader

    source: loader.RecordSource
    if data.workload.stride:
        source = WindowSource(data)
    elif data.workload.mapped:
        source = loader.NpySource(data.folder)
    else:
        source = loader.ArraySource(data.arrays)
    config = loader.PipelineConfig(data.workload.batch_size, SEED, "partial", num_epochs=None)
    options = loader.ReadOptions(threads, 2 * threads)
    batches = loader.Pipeline(source, config).iterate(read_options=options, device=device)
    try:
        yield from batches
    finally:
        batches.close()


# --- Grain ----------------------------------------------------------------------------------------


class Records:
    """Grain's way to a record: one at a time."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._data.record(row)


def grain_records(data: Data, device: Any, *, threads: int, workers: int = 0) -> Iterator[Batch]:
    """``source.shuffle.batch.repeat``."""
    import grain

    dataset = grain.MapDataset.source(Records(data)).shuffle(seed=SEED)
    dataset = dataset.batch(data.workload.batch_size).repeat()
    return _grain_iterator(dataset, device, threads, workers)


class Gather:
    """For a batch's number, counted over all epochs, the batch: what a Grain user can write."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._order = functools.lru_cache(2)(self._order_of)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._data,)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([SEED, epoch]).permutation(len(self._data))

    def __call__(self, index: int, element: int) -> dict[str, Array]:
        """The batch; ``element`` is the index within the epoch."""
        del element
        epoch, batch = divmod(index, self._data.workload.epoch_batches)
        start = batch * self._data.workload.batch_size
        return self._data.read(self._order(epoch)[start : start + self._data.workload.batch_size])


def grain_batches(data: Data, device: Any, *, threads: int, workers: int = 0) -> Iterator[Batch]:
    """``range.map_with_index(gather).repeat``: a batch is one element, gathered by our own function."""
    import grain

    dataset = grain.MapDataset.range(data.workload.epoch_batches)
    dataset = dataset.map_with_index(Gather(data)).repeat()
    return _grain_iterator(dataset, device, threads, workers)


def _grain_iterator(dataset: Any, device: Any, threads: int, workers: int) -> Iterator[Batch]:
    import grain

    dataset = dataset.to_iter_dataset(grain.ReadOptions(threads, 2 * threads))
    if workers:
        import absl.flags

        absl.flags.FLAGS.mark_as_parsed()  # without it, Grain's workers do not start
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(workers, 2))
    if device is not None:
        dataset = grain.experimental.device_put(dataset, device, cpu_buffer_size=2)
    batches = iter(dataset)
    try:
        yield from batches
    finally:
        batches.close()


# --- all of them ----------------------------------------------------------------------------------


def _with_threads(make: Callable[..., Iterator[Batch]], *counts: int) -> dict[str, Make]:
    return {
        f"{count or 'no'} reading thread{'s' if count != 1 else ''}": functools.partial(
            make, threads=count
        )
        for count in counts
    }


def _with_workers(
    make: Callable[..., Iterator[Batch]], form: str = "", **settings: Any
) -> dict[str, Make]:
    counts = sorted({0, 1, 2, min(8, os.cpu_count() or 1)})
    return {
        f"{form}num_workers={count}": functools.partial(make, workers=count, **settings)
        for count in counts
    }


_BENCH: Final = "pip install '.[bench]'"
_TORCH_FORMS: Final = {"__getitems__, ": False, "BatchSampler as sampler, ": True}

CONTENDERS: Final[dict[str, Contender]] = {
    "numpy fancy": Contender(
        f"array[rows] for each field; {_NUMPY_ORDERS} orders in turn, made outside the clock",
        {"": numpy_fancy},
    ),
    "numpy take": Contender(
        "np.take(array, rows, axis=0) for each field, for windows np.take(flat, elements); "
        f"{_NUMPY_ORDERS} orders in turn, made outside the clock",
        {"": numpy_take},
    ),
    OURS: Contender(
        "Pipeline.iterate(): feistel order, ids and masks inside the clock; ArraySource, for mapped "
        "files NpySource, for windows a source of 20 lines; in training with device=",
        _with_threads(regrain, 0, 1, 2, 8),
        modules=("loader",),
    ),
    GRAIN_RECORDS: Contender(
        "MapDataset.source.shuffle.batch.repeat, order inside the clock",
        _with_threads(grain_records, 0, 4)
        | {"2 worker processes": functools.partial(grain_records, threads=0, workers=2)},
        modules=("grain",),
    ),
    "grain per batch": Contender(
        "MapDataset.range.map_with_index(gather).repeat: a hand-written gather of whole batches over "
        "NumPy permutations, which Grain executes; in training with grain.experimental.device_put",
        _with_threads(grain_batches, 0, 1, 2, 8)
        | {"2 worker processes": functools.partial(grain_batches, threads=0, workers=2)},
        modules=("grain",),
    ),
    "torch DataLoader": Contender(
        "Dataset.__getitems__ gathers a batch at once; collate is torch.from_numpy",
        {
            name: make
            for form, whole in _TORCH_FORMS.items()
            for name, make in _with_workers(peers.torch_loader, form, whole=whole).items()
        },
        packages=("torch",),
        modules=("torch",),
        install=_BENCH,
    ),
    "torchdata StatefulDataLoader": Contender(
        "the same data set and collate as torch DataLoader",
        {
            name: make
            for form, whole in _TORCH_FORMS.items()
            for name, make in _with_workers(
                peers.torch_loader, form, whole=whole, stateful=True
            ).items()
        },
        packages=("torch", "torchdata"),
        modules=("torchdata.stateful_dataloader",),
        install=_BENCH,
    ),
    "Hugging Face datasets": Contender(
        "Dataset over the same memory as Arrow, shuffle(seed=epoch) and iter(batch_size); windows are "
        "stored as rows first; in NumPy format integers come as int64 and are cast back",
        {
            "NumPy format": functools.partial(peers.hugging_face, form="numpy"),
            "Arrow format": functools.partial(peers.hugging_face, form="arrow"),
            "Arrow format, flatten_indices": functools.partial(
                peers.hugging_face, form="arrow", flatten=True
            ),
        },
        packages=("datasets", "pyarrow"),
        modules=("datasets",),
        rewrites=("Arrow format, flatten_indices",),
        install=_BENCH,
    ),
    "MosaicML Streaming": Contender(
        "StreamingDataset over local MDS shards of the same records (windows stored as records), "
        "shuffle=True, py1s; StreamingDataLoader; collate stacks and casts nothing",
        _with_workers(peers.streaming_loader),
        packages=("mosaicml-streaming", "torch"),
        modules=("streaming",),
        install="pip install --no-deps mosaicml-streaming, since it asks for numpy<2.2; then what it imports",
        apart={"mapped": "it reads files of its own, and two copies do not fit into memory"},
    ),
    "SPDL": Contender(
        "PipelineBuilder over batches of rows from NumPy permutations, pipe(gather), add_sink",
        {
            f"concurrency={count}": functools.partial(peers.spdl_pipeline, threads=count)
            for count in (1, 2, 8)
        },
        packages=("spdl",),
        modules=("spdl.pipeline",),
        install=_BENCH,
    ),
    "ffcv": Contender(
        "not driven: its package does not build without OpenCV's and libjpeg-turbo's headers",
        {},
        packages=("ffcv",),
        install="builds only with OpenCV's and libjpeg-turbo's headers",
    ),
}
