"""Shares of each batch: their union is the stream, for any number of processes; real JAX processes."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import loader
from loader import ArraySource, Mixture, Pipeline, PipelineConfig, Position, ReadOptions
from loader.reading.processes import Shard, shard_of_process
from tests.jax_processes import run_processes


def a_pipeline(num_records: int = 101, batch_size: int = 24, **settings: Any) -> Pipeline:
    fields = {
        "x": np.arange(3 * num_records, dtype=np.float32).reshape(num_records, 3),
        "name": np.array([f"r{i}" for i in range(num_records)]),
    }
    settings = {"final_batch": "pad", "num_epochs": 2, **settings}
    return Pipeline(ArraySource(fields), PipelineConfig(batch_size, 17, **settings))


def joined(shares: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def assert_equal(batch: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(batch) == list(expected)
    for name, array in expected.items():
        assert batch[name].dtype == array.dtype
        np.testing.assert_array_equal(batch[name], array)


@given(
    count=st.integers(1, 8),
    per_process=st.integers(1, 6),
    num_records=st.integers(1, 120),
    offset=st.integers(0, 119),
    final_batch=st.sampled_from(["pad", "drop"]),
    threads=st.booleans(),
)
def test_union_of_the_shares_is_the_stream_in_order(
    count: int, per_process: int, num_records: int, offset: int, final_batch: str, threads: bool
) -> None:
    size = count * per_process
    if final_batch == "drop" and num_records < size:
        num_records += size
    pipeline = a_pipeline(num_records, size, final_batch=final_batch)
    start = Position(0, min(offset, num_records), 0)
    options = ReadOptions(num_threads=2, prefetch_buffer_size=2) if threads else None
    iterators = [
        pipeline.iterate(start, read_options=options, process_index=i, process_count=count)
        for i in range(count)
    ]
    whole = pipeline.iterate(start)
    for batch in whole:
        assert_equal(joined([next(iterator) for iterator in iterators]), batch)
        for iterator in iterators:
            assert iterator.get_state() == whole.get_state()
    for iterator in iterators:
        assert next(iterator, None) is None
        iterator.close()


@pytest.mark.parametrize("count", range(1, 9))
def test_each_process_reads_its_rows_alone(count: int) -> None:
    read: list[int] = []

    class Counted:
        def __init__(self, source: ArraySource) -> None:
            self._source = source
            self.fields, self.ids, self.fingerprint = source.fields, source.ids, source.fingerprint

        def __len__(self) -> int:
            return len(self._source)

        def read(self, rows: Any) -> Any:
            read.extend(rows.tolist())
            return self._source.read(rows)

    size = 24 * count
    pipeline = a_pipeline(10 * size, size)
    counted = Pipeline(Counted(pipeline.source), pipeline.config)  # type: ignore[arg-type]
    for index in range(count):
        read.clear()
        next(counted.iterate(process_index=index, process_count=count))
        assert read == pipeline.ids(0)[24 * index : 24 * (index + 1)].tolist()


def test_shares_of_a_mixture_make_up_its_batches() -> None:
    mixture = Mixture({"a": a_pipeline(99), "b": a_pipeline(50, 8)}, {"a": 1, "b": 2})
    shares = [mixture.iterate(process_index=i, process_count=4) for i in range(4)]
    for batch in mixture:
        assert_equal(joined([next(share) for share in shares]), batch)


def test_excluded_and_unreadable_records_keep_their_slots() -> None:
    pipeline = a_pipeline(exclude=(3, 50, 51))
    shares = [pipeline.iterate(process_index=i, process_count=8) for i in range(8)]
    for batch in pipeline:
        assert_equal(joined([next(share) for share in shares]), batch)


@pytest.mark.parametrize(
    ("settings", "shard", "message"),
    [
        ({"final_batch": "partial"}, (0, 2), 'final_batch="partial" gives .* Use "pad"'),
        ({"batch_size": 24}, (0, 5), "24 cannot be shared out equally among 5"),
        ({}, (2, 2), "process_index is 2, and process_count 2"),
        ({}, (-1, 2), "process_index is -1"),
        ({}, (0, 0), "process_count 0"),
        ({}, (0, None), "both, or neither"),
        ({}, (None, 3), "both, or neither"),
    ],
)
def test_shares_that_cannot_be_are_an_error_at_once(
    settings: dict[str, Any], shard: tuple[Any, Any], message: str
) -> None:
    index, count = shard
    with pytest.raises(ValueError, match=message):
        a_pipeline(**settings).iterate(process_index=index, process_count=count)
    mixture = Mixture({"a": a_pipeline(), "b": a_pipeline(**settings)}, {"a": 1, "b": 2})
    with pytest.raises(ValueError, match=message):
        mixture.iterate(process_index=index, process_count=count)


@pytest.mark.parametrize("wrong", [True, 1.0, "1"])
def test_process_numbers_are_integers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="process_count must be an integer"):
        a_pipeline().iterate(process_index=0, process_count=wrong)
    with pytest.raises(TypeError, match="process_index must be an integer"):
        a_pipeline().iterate(process_index=wrong, process_count=2)


def test_partial_batches_are_whole_in_one_process() -> None:
    pipeline = a_pipeline(final_batch="partial")
    batches = pipeline.iterate(process_index=0, process_count=1)
    assert [len(batch["id"]) for batch in batches] == [24, 24, 24, 24, 5] * 2


def test_without_distributed_jax_a_process_has_the_whole_batch() -> None:
    assert not jax.distributed.is_initialized()
    assert shard_of_process(None, None) == Shard(0, 1)


def test_global_batch_in_one_process() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batch = a_pipeline()[0]
    found = loader.global_batch({name: batch[name] for name in ("mask", "x")}, sharding)
    for name, array in found.items():
        assert isinstance(array, jax.Array)
        assert array.sharding == sharding
        np.testing.assert_array_equal(array, batch[name])


PROGRAM = """
import json
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import loader
from tests.loader.test_processes import a_pipeline

def ids_and_sum(batch):
    return batch["id"].tolist()

pipeline = a_pipeline()
own = [ids_and_sum(batch) for batch in pipeline.iterate()]
devices = np.array(jax.devices()).reshape(count, -1)
found = {"own": own, "local": jax.local_device_count()}
for name, mesh, spec in (
    ("data", Mesh(devices, ("data", "fsdp")), PartitionSpec(("data", "fsdp"))),
    ("reversed", Mesh(devices[::-1], ("data", "fsdp")), PartitionSpec(("data", "fsdp"))),
    ("shared", Mesh(devices, ("model", "data")), PartitionSpec("data")),
):
    sharding = NamedSharding(mesh, spec)
    total = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    try:
        found[name] = [
            np.asarray(total(batch["x"])).tolist() for batch in pipeline.iterate(device=sharding)
        ]
    except ValueError as error:
        found[name] = str(error)
    if name == "data":
        batch = next(pipeline.iterate())
        made = loader.global_batch({"x": batch["x"]}, sharding)["x"]
        found["global_batch"] = np.asarray(total(made)).tolist()
try:
    pipeline.iterate(device=NamedSharding(Mesh(devices, ("data", "fsdp")), PartitionSpec(("data", "fsdp"))),
                     process_index=(index + 1) % count, process_count=count)
except ValueError as error:
    found["wrong"] = str(error)
print("FOUND" + json.dumps(found))
"""


def found_by(count: int, devices_each: int) -> list[dict[str, Any]]:
    found = []
    for code, out, error in run_processes(PROGRAM, count, devices_each=devices_each):
        assert code == 0, error[-4000:]
        line = next(line for line in out.splitlines() if line.startswith("FOUND"))
        found.append(json.loads(line.removeprefix("FOUND")))
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("count", "devices_each"), [(2, 2), (3, 1)])
def test_jax_processes_make_up_the_stream(count: int, devices_each: int) -> None:
    found = found_by(count, devices_each)
    pipeline = a_pipeline()
    for step, batch in enumerate(pipeline):
        ids = [i for process in found for i in process["own"][step]]
        assert ids == batch["id"].tolist()
        for process in found:
            for way in ("data", "reversed", "shared"):
                np.testing.assert_array_equal(process[way][step], batch["x"])
    for process in found:
        assert process["local"] == devices_each
        np.testing.assert_array_equal(process["global_batch"], pipeline[0]["x"])
        assert "is asked for, and the devices of this process hold" in process["wrong"]
