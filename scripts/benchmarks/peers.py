"""How other loaders are made to deliver a workload's batches, each by its own fast path."""

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.workloads import Array, Batch, Data

# --- PyTorch and torchdata ------------------------------------------------------------------------


class TorchDataset:
    """A map-style data set whose batches are gathered at once."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, rows: list[int]) -> dict[str, Array]:
        return self._data.read(rows)

    def __getitems__(self, rows: list[int]) -> dict[str, Array]:
        return self._data.read(rows)


def as_tensors(batch: dict[str, Array]) -> dict[str, Any]:
    """The batch as tensors over the same memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


def torch_loader(
    data: Data, device: Any, *, workers: int, whole: bool, stateful: bool = False
) -> Iterator[Batch]:
    """A DataLoader; ``whole`` gives it batches of rows as indices, else it makes them itself."""
    del device
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    make = DataLoader
    if stateful:
        make = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    dataset, size = TorchDataset(data), data.workload.batch_size
    if whole:
        sampler = BatchSampler(RandomSampler(dataset), size, drop_last=False)
        batching = {"batch_size": None, "sampler": sampler}
    else:
        batching = {"batch_size": size, "shuffle": True}
    loader = make(dataset, collate_fn=as_tensors, **batching, **worker_settings(workers))
    while True:
        yield from loader


def worker_settings(workers: int) -> dict[str, Any]:
    """Workers that stay from epoch to epoch.

    They are forked, as is usual on Linux, but not from a process that has JAX's threads. (A process
    that was spawned itself, as this one, would spawn them unless told.)
    """
    if not workers:
        return {"num_workers": 0}
    method = "forkserver" if "jax" in sys.modules else "fork"
    return {
        "num_workers": workers,
        "persistent_workers": True,
        "multiprocessing_context": multiprocessing.get_context(method),
    }


# --- Hugging Face datasets ------------------------------------------------------------------------


def hugging_face(data: Data, device: Any, *, form: str, flatten: bool = False) -> Iterator[Batch]:
    """``Dataset.shuffle(seed=epoch).iter(batch_size)``."""
    del device
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    workload = data.workload
    columns = {name: _arrow(array, data) for name, array in data.arrays.items()}
    # Without a fingerprint it would make one out of all bytes, in memory.
    dataset = datasets.Dataset(pa.table(columns), fingerprint="benchmark").with_format(form)
    epoch = 0
    while True:
        shuffled = dataset.shuffle(seed=epoch, keep_in_memory=True)
        if flatten:
            shuffled = shuffled.flatten_indices(keep_in_memory=True).with_format(form)
        for batch in shuffled.iter(workload.batch_size):
            yield {name: _unpacked(batch[name], array) for name, array in data.arrays.items()}
        epoch += 1


def _arrow(array: Array, data: Data) -> Any:
    """An Arrow array of rows over the same memory; windows that overlap are stored as rows first."""
    import pyarrow as pa

    if array.ndim == 1:
        return pa.array(array)
    if data.workload.stride:
        array = _stored(array, data.folder / f"{data.workload.data}-rows.npy")
    flat = array.reshape(-1)
    values = pa.Array.from_buffers(
        pa.from_numpy_dtype(array.dtype), flat.size, [None, pa.py_buffer(flat)]
    )
    return pa.FixedSizeListArray.from_arrays(values, flat.size // len(array))


def _stored(array: Array, path: Path) -> Array:
    if not path.exists():
        np.save(path, array)
    return np.asarray(np.load(path, mmap_mode="r"))


def _unpacked(column: Any, like: Array) -> Array:
    """A batch's column as an array of the records' dtype and shape; copies Arrow's values no more."""
    if not isinstance(column, np.ndarray):
        chunk = column.combine_chunks()
        values = chunk if like.ndim == 1 else chunk.flatten()
        column = values.to_numpy(zero_copy_only=False)
    array: Array = np.asarray(column).astype(like.dtype, copy=False)
    return array.reshape(-1, *like.shape[1:])


# --- MosaicML Streaming ---------------------------------------------------------------------------


def streaming_loader(data: Data, device: Any, *, workers: int) -> Iterator[Batch]:
    """A StreamingDataLoader over local shards, which are written first."""
    del device
    import streaming

    workload = data.workload
    folder = data.folder / f"{workload.data}-mds"
    if not folder.exists():
        _write_shards(data, folder)
    dataset = streaming.StreamingDataset(
        local=str(folder),
        shuffle=True,
        shuffle_algo="py1s",
        num_canonical_nodes=1,
        batch_size=workload.batch_size,
    )
    loader = streaming.StreamingDataLoader(
        dataset,
        batch_size=workload.batch_size,
        collate_fn=stack_records,
        **worker_settings(workers),
    )
    while True:
        yield from loader


def _write_shards(data: Data, folder: Path) -> None:
    import streaming

    workload = data.workload
    shape = ",".join(map(str, workload.shape))
    columns = {workload.field: f"ndarray:{workload.dtype}:{shape}", "label": "int32"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for row in range(len(data)):
            writer.write(data.record(row))


def stack_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Records of NumPy values as a batch of tensors."""
    import torch

    return {
        name: torch.from_numpy(np.stack([record[name] for record in records]))
        for name in records[0]
    }


# --- SPDL -----------------------------------------------------------------------------------------


def spdl_pipeline(data: Data, device: Any, *, threads: int) -> Iterator[Batch]:
    """Threads that gather whole batches, delivered in the order of the rows."""
    del device
    from spdl.pipeline import PipelineBuilder

    size = data.workload.batch_size

    def rows() -> Iterator[Array]:
        generator = np.random.default_rng(17)
        while True:
            order = generator.permutation(len(data))
            yield from (order[at : at + size] for at in range(0, len(data), size))

    builder = PipelineBuilder().add_source(rows())
    builder = builder.pipe(data.read, concurrency=threads, output_order="input")
    pipeline = builder.add_sink(2 * threads).build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline
