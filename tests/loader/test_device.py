"""Batches delivered on a device: the same ones, transferred one ahead, and a state that knows none of it."""

import copy
import pickle
import threading
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from loader import ArraySource, Pipeline, PipelineConfig, Position, ReadOptions, RecordReadError
from loader.reading.devices import to_device

Rows = npt.NDArray[np.int64]
THREADS = ReadOptions(num_threads=2, prefetch_buffer_size=3)


def cpu() -> jax.Device:
    return jax.devices("cpu")[0]


def pipeline_of(num_records: int = 23, **settings: Any) -> Pipeline:
    fields: dict[str, npt.NDArray[Any]] = {
        "x": np.arange(num_records * 6, dtype=np.uint8).reshape(num_records, 2, 3),
        "y": np.arange(num_records, dtype=np.float32),
        "name": np.array([f"r{i}" for i in range(num_records)]),
    }
    usual: dict[str, Any] = {"batch_size": 4, "seed": 17, "final_batch": "partial", "num_epochs": 2}
    config = PipelineConfig(**(usual | settings))
    return Pipeline(ArraySource(fields, ids=np.arange(num_records) + 2**40), config)


@pytest.mark.parametrize("read_options", [None, THREADS])
@pytest.mark.parametrize("final_batch", ["partial", "pad", "drop"])
def test_batches_are_the_same_ones(final_batch: str, read_options: ReadOptions | None) -> None:
    pipeline = pipeline_of(final_batch=final_batch)
    batches = pipeline.iterate(device=cpu(), read_options=read_options)
    for expected in pipeline:
        batch = next(batches)
        assert list(batch) == list(expected)
        for name, array in expected.items():
            assert isinstance(batch[name], jax.Array) == (name in ("x", "y", "mask")), name
            assert batch[name].dtype == array.dtype
            np.testing.assert_array_equal(batch[name], array)
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_state_is_that_of_what_was_delivered_not_of_what_was_read() -> None:
    pipeline = pipeline_of()
    batches = pipeline.iterate(device=cpu())
    for step in range(len(pipeline)):
        assert batches.position == pipeline.position(step)
        assert batches.get_state() == pipeline.iterate(pipeline.position(step)).get_state()
        resumed = pipeline.iterate(batches.position, device=cpu())
        np.testing.assert_array_equal(next(resumed)["id"], pipeline.ids(step))
        next(batches)


@pytest.mark.parametrize("read_options", [None, THREADS])
def test_moving_the_iterator_drops_what_is_under_way(read_options: ReadOptions | None) -> None:
    pipeline = pipeline_of()
    batches = pipeline.iterate(device=cpu(), read_options=read_options)
    for target in (7, 0, 11, 3):
        next(batches)
        position = pipeline.position(target)
        batches.set_state({"epoch": position.epoch, "offset": position.offset, "step": target})
        for step in range(target, min(target + 3, len(pipeline) - 1)):
            np.testing.assert_array_equal(next(batches)["id"], pipeline.ids(step))
    batches.close()


class Logged:
    """A source that tells when it is read, and fails where it is told to."""

    def __init__(self, source: ArraySource) -> None:
        self._source = source
        self.events: list[Any] = []
        self.broken_row = -1
        self.fields, self.ids, self.fingerprint = source.fields, source.ids, source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        self.events.append(len(rows))
        if self.broken_row in rows:
            raise OSError("gone")
        return self._source.read(rows)


@pytest.fixture
def logged() -> tuple[Logged, Pipeline]:
    source = Logged(ArraySource({"x": np.arange(20)}))
    return source, Pipeline(source, PipelineConfig(4, 17, "partial", 1))


def test_next_batch_is_read_while_one_is_trained_on(logged: tuple[Logged, Pipeline]) -> None:
    source, pipeline = logged
    batches = pipeline.iterate(device=cpu())
    for step in range(5):
        next(batches)
        ahead = min(step + 2, 5)
        for _ in range(500):
            if len(source.events) == ahead:
                break
            time.sleep(0.01)
        assert source.events == [4] * ahead, "without asking for it"
    batches.close()


@pytest.mark.parametrize("read_options", [None, THREADS])
def test_fault_in_a_batch_read_ahead_comes_when_its_turn_comes(
    logged: tuple[Logged, Pipeline], read_options: ReadOptions | None
) -> None:
    source, pipeline = logged
    ids = [pipeline.ids(step).tolist() for step in range(5)]
    source.broken_row = ids[3][1]
    batches = pipeline.iterate(device=cpu(), read_options=read_options)
    assert [next(batches)["id"].tolist() for _ in range(3)] == ids[:3]
    for _ in range(2):
        with pytest.raises(RecordReadError) as caught:
            next(batches)
        assert caught.value.position == batches.position == pipeline.position(3)
        assert caught.value.record_id == ids[3][1]
    source.broken_row = -1
    assert [batch["id"].tolist() for batch in batches] == ids[3:]
    batches.close()


def test_loss_of_a_batch_in_the_callback_loses_no_batch() -> None:
    pipeline = pipeline_of()
    told: list[int] = []

    def once(position: Position, batch: dict[str, Any]) -> None:
        told.append(position.step)
        if told.count(2) == 1 and position.step == 2:
            raise RuntimeError("full")

    batches = pipeline.iterate(device=cpu(), on_batch=once)
    got = [next(batches)["id"].tolist() for _ in range(2)]
    with pytest.raises(RuntimeError, match="full"):
        next(batches)
    got += [batch["id"].tolist() for batch in batches]
    assert got == [pipeline.ids(step).tolist() for step in range(len(pipeline))]


def test_close_lets_go_of_what_was_read_ahead() -> None:
    batches = pipeline_of().iterate(device=cpu())
    next(batches)
    batches.close()
    assert batches._moving is None
    for thread in threading.enumerate():
        if "regrain-device" in thread.name:
            thread.join(10)
            assert not thread.is_alive()


def test_sharding_is_kept() -> None:
    mesh = Mesh([cpu()], ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batch = next(pipeline_of().iterate(device=sharding))
    assert batch["x"].sharding == batch["mask"].sharding == sharding


def two_ways(*spec: str) -> NamedSharding:
    return NamedSharding(AbstractMesh((2,), ("data",)), PartitionSpec(*spec))


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"batch_size": 5, "final_batch": "pad"}, 5),
        ({"batch_size": 5, "final_batch": "drop"}, 5),
        ({"batch_size": 4, "final_batch": "partial"}, 3),
        ({"batch_size": 40, "final_batch": "partial"}, 23),
    ],
)
def test_sharding_that_cannot_split_a_batch_is_an_error_at_once(
    settings: dict[str, Any], size: int
) -> None:
    with pytest.raises(ValueError, match=f"cannot hold a batch of {size} records"):
        pipeline_of(**settings).iterate(device=two_ways("data"))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 4, "final_batch": "pad"},
        {"batch_size": 4, "final_batch": "drop"},
        {"batch_size": 24, "final_batch": "pad"},
        {"batch_size": 4, "final_batch": "partial", "num_records": 40},
    ],
)
def test_sharding_that_splits_each_batch_is_taken(settings: dict[str, Any]) -> None:
    pipeline_of(**settings).iterate(device=two_ways("data"))


@pytest.mark.parametrize("device", ["cpu", 0, jax.devices, True])
def test_what_is_no_device_is_named(device: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a jax\.Device"):
        pipeline_of().iterate(device=device)


@pytest.mark.parametrize(
    ("dtype", "moves"),
    [
        (np.bool_, True),
        (np.int64, True),
        (np.float64, True),
        (np.complex64, True),
        (ml_dtypes.bfloat16, True),
        (ml_dtypes.float8_e4m3fn, True),
        ("U3", False),
        ("S3", False),
        ("M8[s]", False),
        ("m8[s]", False),
        (">i4", True),
        (">f2", True),
        ([("a", "i4")], False),
    ],
)
def test_fields_that_jax_has_no_dtype_for_stay(dtype: Any, moves: bool) -> None:
    array = np.zeros((2, 3), dtype)
    batch = to_device({"id": np.array([1, 2]), "x": array}, cpu())
    assert isinstance(batch["x"], jax.Array) == moves
    assert isinstance(batch["id"], np.ndarray)
    assert moves or batch["x"] is array


@pytest.mark.parametrize(
    ("dtype", "fit", "odd"),
    [
        (np.int64, [-(2**31), 2**31 - 1], 2**31),
        (np.int64, [0, -1], -(2**40)),
        (np.uint64, [0, 2**32 - 1], 2**32),
    ],
)
def test_an_integer_that_jax_would_cut_is_refused(dtype: Any, fit: list[int], odd: int) -> None:
    moved = to_device({"user": np.array(fit, dtype)}, cpu())["user"]
    assert moved.dtype.itemsize == 4
    assert moved.tolist() == fit
    with pytest.raises(ValueError, match=f"field 'user' holds {odd}, which does not fit u?int32"):
        to_device({"user": np.array([*fit, odd], dtype)}, cpu())
    with jax.enable_x64(True):
        whole = to_device({"user": np.array([*fit, odd], dtype)}, cpu())["user"]
        assert whole.tolist() == [*fit, odd]


def test_a_batch_with_an_integer_that_is_refused_is_not_lost() -> None:
    users = np.array([1, 2, 2**40, 4])
    pipeline = Pipeline(ArraySource({"user": users}), PipelineConfig(2, 0, "drop", shuffle="none"))
    batches = pipeline.iterate(device=cpu())
    assert next(batches)["user"].tolist() == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"holds {2**40}"):
            next(batches)
        assert batches.position == Position(0, 2, 1)
    batches.close()


def test_sharding_of_another_axis_is_named() -> None:
    with pytest.raises(ValueError, match="must split the batch axis alone"):
        pipeline_of(batch_size=4, final_batch="pad").iterate(
            device=NamedSharding(AbstractMesh((2,), ("data",)), PartitionSpec(None, "data"))
        )


def test_an_iterator_is_not_copied() -> None:
    batches = pipeline_of().iterate()
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"not copied or pickled.*take its get_state\(\)"):
            copies(batches)
    assert next(batches)["id"].tolist() == pipeline_of().ids(0).tolist()


def test_training_step_takes_the_batch() -> None:
    pipeline = pipeline_of(final_batch="pad")
    total = jax.jit(lambda y, mask: y.sum(where=mask))
    sums = [total(batch["y"], batch["mask"]) for batch in pipeline.iterate(device=cpu())]
    assert float(sum(sums)) == 2 * sum(range(23))
