"""The stream: whichever way it is reached, stopped and resumed, the same records in the same batches.

What is expected is derived here anew, from the order of an epoch alone: no code that cuts or pads
batches is shared with the loader.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import pathlib
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grain
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import (
    ArraySource,
    BatchIterator,
    DataChangedError,
    Field,
    Fingerprint,
    Pipeline,
    PipelineConfig,
    Position,
    ReadOptions,
    RecordReadError,
    RecordSource,
    epoch_order,
)

Batch = dict[str, Any]
Rows = npt.NDArray[np.int64]

N: Final = 11
B: Final = 4
EPOCHS: Final = 3
POLICIES: Final = ("partial", "drop", "pad")
SHUFFLES: Final = ("feistel", "permutation", "none")
STREAMS: Final = list(itertools.product(POLICIES, SHUFFLES))

#: Every way of reading: in the caller's thread, and with threads and buffers small and large.
READS: Final = {
    "default": None,
    "no threads": ReadOptions(num_threads=0, prefetch_buffer_size=0),
    "no threads, buffer": ReadOptions(num_threads=0, prefetch_buffer_size=3),
    "1 thread": ReadOptions(num_threads=1, prefetch_buffer_size=1),
    "1 thread, no buffer": ReadOptions(num_threads=1, prefetch_buffer_size=0),
    "4 threads": ReadOptions(num_threads=4, prefetch_buffer_size=2),
    "4 threads, all ahead": ReadOptions(num_threads=4, prefetch_buffer_size=500),
}

streams = pytest.mark.parametrize(("policy", "shuffle"), STREAMS)
policies = pytest.mark.parametrize("policy", POLICIES)
reads = pytest.mark.parametrize("read_options", READS.values(), ids=READS)
threads = pytest.mark.parametrize(
    "read_options", [None, READS["4 threads"]], ids=["no threads", "4 threads"]
)


def config(
    policy: str = "pad",
    shuffle: str = "feistel",
    batch_size: int = B,
    num_epochs: int | None = EPOCHS,
    **more: Any,
) -> PipelineConfig:
    return PipelineConfig.from_dict(
        {
            "batch_size": batch_size,
            "seed": 17,
            "final_batch": policy,
            "num_epochs": num_epochs,
            "shuffle": shuffle,
            **more,
        }
    )


def source(n: int = N) -> ArraySource:
    """Records whose fields tell their ID."""
    ids = np.arange(n) * 7 + 100
    return ArraySource({"x": np.stack([ids, -ids], 1).astype(np.float32), "y": ids * 2}, ids)


def pipeline(*args: Any, n: int = N, **more: Any) -> Pipeline:
    return Pipeline(source(n), config(*args, **more))


def expected(of: PipelineConfig, n: int = N, epochs: Iterable[int] = range(EPOCHS)) -> list[Batch]:
    """The stream over `source`, derived from the order of each epoch."""
    batches = []
    for epoch in epochs:
        rows = epoch_order(n, of.seed, epoch, of.shuffle).tolist()
        while rows:
            taken, rows = rows[: of.batch_size], rows[of.batch_size :]
            empty = of.batch_size - len(taken)
            if empty and of.final_batch == "drop":
                break
            ids = [row * 7 + 100 for row in taken]
            if of.final_batch != "pad":
                empty = 0
            real = [*ids, *[0] * empty]
            batches.append(
                {
                    "id": np.array([*ids, *[-1] * empty], np.int64),
                    "mask": np.array([True] * len(ids) + [False] * empty),
                    "x": np.array([[value, -value] for value in real], np.float32),
                    "y": np.array([value * 2 for value in real], np.int64),
                }
            )
    return batches


def assert_same(found: Iterable[Batch], wanted: Iterable[Batch]) -> None:
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert list(a) == list(b)
        for name, value in b.items():
            assert type(a[name]) is np.ndarray, name
            assert a[name].dtype == value.dtype, name
            np.testing.assert_array_equal(a[name], value, name)


def real_ids(batches: Iterable[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"][batch["mask"]]]


def through_json(state: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(state))
    return copied


def steps(iterator: Iterator[Batch], count: int) -> list[Batch]:
    return list(itertools.islice(iterator, count))


# One stream, whichever way it is read


@streams
@reads
def test_stream_is_that_of_the_orders(
    policy: str, shuffle: str, read_options: ReadOptions | None
) -> None:
    p = pipeline(policy, shuffle)
    wanted = expected(p.config)
    assert len(p) == len(wanted) == EPOCHS * p.steps_per_epoch
    assert_same(p.iterate(read_options=read_options), wanted)


@streams
def test_batch_of_a_step_is_that_of_the_walk(policy: str, shuffle: str) -> None:
    p = pipeline(policy, shuffle)
    wanted = expected(p.config)
    backwards = range(len(p) - 1, -1, -1)
    assert_same([p[step] for step in backwards], wanted[::-1])
    assert_same([p[np.int32(step)] for step in range(len(p))], wanted)
    for step, batch in enumerate(wanted):
        np.testing.assert_array_equal(p.ids(step), batch["id"])
        assert p.ids(step).dtype == batch["id"].dtype


@streams
def test_dataset_holds_the_same_batches(policy: str, shuffle: str) -> None:
    p = pipeline(policy, shuffle)
    wanted = expected(p.config)
    assert isinstance(p.dataset, grain.MapDataset)
    assert len(p.dataset) == len(wanted)
    assert_same([p.dataset[step] for step in range(len(p))], wanted)
    assert_same(p.dataset, wanted)


def test_pipeline_is_iterated_from_its_start_each_time() -> None:
    p = pipeline()
    wanted = expected(p.config)
    assert_same(p, wanted)
    assert_same(p, wanted)


def test_two_iterators_do_not_disturb_each_other() -> None:
    p = pipeline()
    wanted = expected(p.config)
    pairs = list(zip(p.iterate(), p.iterate(), strict=True))
    assert_same([a for a, _ in pairs], wanted)
    assert_same([b for _, b in pairs], wanted)


def test_threads_may_share_a_pipeline() -> None:
    p = pipeline("partial", n=5000, batch_size=7)
    wanted = expected(p.config, 5000)
    order = np.random.default_rng(0).permutation(len(p))[:1500]
    with ThreadPoolExecutor(4) as pool:
        assert_same(pool.map(p.__getitem__, order.tolist()), [wanted[step] for step in order])


def test_another_seed_or_epoch_is_another_order() -> None:
    p = pipeline("partial", n=100, batch_size=100)
    orders = {tuple(batch["id"]) for batch in p}
    orders |= {tuple(batch["id"]) for batch in Pipeline(source(100), config(seed=18))}
    assert len(orders) == EPOCHS + (100 // B) * EPOCHS


@policies
def test_batches_are_fresh_arrays(policy: str) -> None:
    p = pipeline(policy, "none", batch_size=11)
    first = p[0]
    for array in first.values():
        array[...] = 0
    assert_same(p, expected(p.config))


@pytest.mark.parametrize("policy", ["drop", "pad"])
def test_every_batch_has_one_structure(policy: str) -> None:
    shapes = {
        tuple((name, array.dtype, array.shape) for name, array in batch.items())
        for batch in pipeline(policy)
    }
    assert len(shapes) == 1


# Resuming


@streams
@reads
def test_fresh_iterator_restored_at_every_step_gives_the_whole_tail(
    policy: str, shuffle: str, read_options: ReadOptions | None
) -> None:
    p = pipeline(policy, shuffle)
    wanted = expected(p.config)
    walk = p.iterate(read_options=read_options)
    for step in range(len(p) + 1):
        state = through_json(walk.get_state())
        fresh = Pipeline(source(), p.config).iterate(read_options=read_options)
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert_same(fresh, wanted[step:])
        started_there = p.iterate(walk.position, read_options=read_options)
        assert_same(started_there, wanted[step:])
        assert_same(steps(walk, 1), wanted[step : step + 1])


@streams
@pytest.mark.parametrize("resumes", [1, 2, 3])
def test_any_chain_of_resumes_gives_the_stream(policy: str, shuffle: str, resumes: int) -> None:
    p = pipeline(policy, shuffle)
    wanted = expected(p.config)
    for cuts in itertools.combinations_with_replacement(range(len(p) + 1), resumes):
        found: list[Batch] = []
        iterator = p.iterate()
        for cut in cuts:
            found += steps(iterator, cut - len(found))
            state = through_json(iterator.get_state())
            iterator = p.iterate()
            iterator.set_state(state)
        assert_same(found + list(iterator), wanted)


@pytest.mark.parametrize(
    ("policy", "step", "place"),
    [
        ("partial", 0, (0, 0)),
        ("partial", 1, (0, 4)),
        ("partial", 2, (0, 8)),
        ("partial", 3, (1, 0)),
        ("partial", 4, (1, 4)),
        ("partial", 8, (2, 8)),
        ("partial", 9, (3, 0)),
        ("pad", 2, (0, 8)),
        ("pad", 3, (1, 0)),
        ("pad", 9, (3, 0)),
        ("drop", 1, (0, 4)),
        ("drop", 2, (1, 0)),
        ("drop", 5, (2, 4)),
        ("drop", 6, (3, 0)),
    ],
)
@reads
def test_state_is_the_place_in_records_whatever_the_threads(
    policy: str, step: int, place: tuple[int, int], read_options: ReadOptions | None
) -> None:
    iterator = pipeline(policy).iterate(read_options=read_options)
    steps(iterator, step)
    assert iterator.get_state() == {"epoch": place[0], "offset": place[1], "step": step}
    assert iterator.position == Position(*place, step)
    assert {type(value) for value in iterator.get_state().values()} == {int}


@threads
def test_started_iterator_goes_from_any_step_to_any(read_options: ReadOptions | None) -> None:
    p = pipeline("partial")
    wanted = expected(p.config)
    states = [dataclasses.asdict(p.position(step)) for step in range(len(p))]
    iterator = p.iterate(read_options=read_options)
    for start, goal in itertools.product(range(len(p)), repeat=2):
        for step in (start, goal):
            iterator.set_state(states[step])
            assert iterator.get_state() == states[step]
            assert_same(steps(iterator, 1), wanted[step : step + 1])


@threads
def test_finished_iterator_goes_back(read_options: ReadOptions | None) -> None:
    p = pipeline()
    iterator = p.iterate(read_options=read_options)
    start = iterator.get_state()
    wanted = expected(p.config)
    assert_same(iterator, wanted)
    assert list(iterator) == []
    iterator.set_state(start)
    assert_same(iterator, wanted)


def test_state_that_was_taken_does_not_move_with_the_iterator() -> None:
    iterator = pipeline().iterate()
    state = iterator.get_state()
    next(iterator)
    assert state == {"epoch": 0, "offset": 0, "step": 0}
    state["step"] = 99
    assert iterator.get_state()["step"] == 1


BAD_STATES: Final[list[Any]] = [
    {},
    {"epoch": 0, "offset": 0},
    {"epoch": 0, "offset": 0, "step": 0, "seed": 1},
    {"next_index": 3},
    {"epoch": 0, "offset": 0, "next_index": 3},
    *({"epoch": 0, "offset": 0, "step": 0, key: value}
      for key in ("epoch", "offset", "step")
      for value in (1.0, True, "1", None, -1, 2**63, [1])),
    {"epoch": 0, "offset": N + 1, "step": 0},
    {"epoch": EPOCHS, "offset": 1, "step": 0},
    {"epoch": EPOCHS + 1, "offset": 0, "step": 0},
    None,
    3,
    "epoch offset step",
    ["epoch", "offset", "step"],
    [("epoch", 0), ("offset", 0), ("step", 0)],
    b"{}",
]  # fmt: skip


@threads
@pytest.mark.parametrize("state", BAD_STATES, ids=repr)
def test_bad_state_is_refused_and_moves_nothing(
    state: Any, read_options: ReadOptions | None
) -> None:
    p = pipeline()
    iterator = p.iterate(read_options=read_options)
    steps(iterator, 4)
    before = iterator.get_state()
    with pytest.raises((ValueError, TypeError)) as caught:
        iterator.set_state(state)
    assert "position" in str(caught.value) or "a state holds epoch, offset, step" in str(
        caught.value
    )
    assert iterator.get_state() == before
    assert_same(iterator, expected(p.config)[4:])


@pytest.mark.parametrize("start", [{"epoch": 0}, 3, (0, 0, 0), "0"])
def test_start_must_be_a_position(start: Any) -> None:
    with pytest.raises(TypeError, match="start must be a Position, not"):
        pipeline().iterate(start)


def test_start_beyond_the_data_is_refused_when_the_iterator_is_made() -> None:
    with pytest.raises(ValueError, match="offset 12 is beyond an epoch of 11 records"):
        pipeline().iterate(Position(0, 12))
    with pytest.raises(ValueError, match="beyond the end of 3 epochs"):
        pipeline().iterate(Position(3, 1))
    assert list(pipeline().iterate(Position(3, 0, 9))) == []


def test_read_options_must_be_such() -> None:
    with pytest.raises(TypeError, match="read_options must be a ReadOptions, not 4"):
        pipeline().iterate(read_options=4)


# Resuming at another batch size


@given(
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from(STREAMS),
    st.integers(0, 30),
    st.integers(0, 2),
)
def test_start_at_any_record_repeats_none_and_loses_none(
    n: int, batch_size: int, stream: tuple[str, str], offset: int, epoch: int
) -> None:
    policy, shuffle = stream
    offset = min(offset, n)
    if policy == "drop":
        batch_size = min(batch_size, n)
    p = pipeline(policy, shuffle, batch_size, n=n)
    start = Position(epoch, offset, 5)
    batches = list(p.iterate(start))
    assert_same(p.iterate(start, read_options=READS["4 threads"]), batches)
    seen = np.array(real_ids(batches), np.int64)
    orders = [epoch_order(n, 17, e, shuffle) * 7 + 100 for e in range(epoch, EPOCHS)]
    orders[0] = orders[0][offset:]
    if policy == "drop":
        orders = [order[: len(order) // batch_size * batch_size] for order in orders]
        assert all(batch["mask"].all() and len(batch["id"]) == batch_size for batch in batches)
    np.testing.assert_array_equal(seen, np.concatenate(orders))
    for batch in batches:
        np.testing.assert_array_equal(batch["y"], np.where(batch["mask"], batch["id"] * 2, 0))


@policies
@threads
def test_iterator_off_the_grid_resumes_at_every_step(
    policy: str, read_options: ReadOptions | None
) -> None:
    p = pipeline(policy)
    for offset in range(N + 1):
        start = Position(0, offset, 3)
        whole = list(p.iterate(start))
        walk = p.iterate(start, read_options=read_options)
        for step in range(len(whole) + 1):
            assert walk.get_state()["step"] == 3 + step
            fresh = p.iterate(read_options=read_options)
            fresh.set_state(through_json(walk.get_state()))
            assert_same(fresh, whole[step:])
            steps(walk, 1)


# Through Grain and Orbax


@reads
def test_grain_may_execute_the_dataset(read_options: ReadOptions | None) -> None:
    p = pipeline("partial")
    wanted = expected(p.config)
    executed = p.dataset.to_iter_dataset(read_options or READS["4 threads"])
    walk = iter(executed)
    for step in range(len(p) + 1):
        fresh = iter(executed)
        fresh.set_state(through_json(walk.get_state()))
        assert_same(fresh, wanted[step:])
        assert_same(steps(walk, 1), wanted[step : step + 1])


@pytest.mark.parametrize(
    "part", [slice(None, None, 2), slice(1, None, 2), slice(3, 7), slice(-2, None)]
)
def test_dataset_may_be_sliced(part: slice) -> None:
    p = pipeline()
    wanted = expected(p.config)[part]
    assert_same(p.dataset[part], wanted)
    sliced = p.dataset[part]
    assert len(sliced) == len(wanted)
    assert_same([sliced[i] for i in range(len(sliced))], wanted)
    assert_same(sliced.to_iter_dataset(READS["4 threads"]), wanted)


def test_dataset_may_be_mapped_and_resumed_through_grain() -> None:
    def doubled(batch: Batch) -> Batch:
        return {**batch, "y": batch["y"] * 2}

    p = pipeline()
    wanted = [doubled(batch) for batch in expected(p.config)][::2]
    executed = p.dataset.map(doubled)[::2].to_iter_dataset(READS["4 threads"])
    assert_same(executed, wanted)
    for step in range(len(wanted) + 1):
        walk, fresh = iter(executed), iter(executed)
        steps(walk, step)
        fresh.set_state(through_json(walk.get_state()))
        assert_same(fresh, wanted[step:])


@streams
def test_repeated_dataset_is_the_stream_of_more_epochs(policy: str, shuffle: str) -> None:
    one = pipeline(policy, shuffle, num_epochs=1)
    assert_same(one.dataset.repeat(EPOCHS), expected(config(policy, shuffle)))


def test_dataset_has_no_batch_before_the_first() -> None:
    with pytest.raises(IndexError, match="-1"):
        pipeline().dataset[-1]


def test_iterator_is_grains() -> None:
    iterator = pipeline().iterate()
    assert isinstance(iterator, grain.DatasetIterator)
    assert iter(iterator) is iterator


@threads
@policies
def test_grains_own_checkpoints_hold_the_iterator(
    tmp_path: pathlib.Path, policy: str, read_options: ReadOptions | None
) -> None:
    p = pipeline(policy)
    wanted = expected(p.config)
    walk = p.iterate(read_options=read_options)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in range(len(p) + 1):
            manager.save(step, args=grain.checkpoint.CheckpointSave(walk))
            steps(walk, 1)
        for step in (len(p), 0, 1, 2, 3, len(p) - 1):
            fresh = p.iterate(read_options=read_options)
            args = grain.checkpoint.CheckpointRestore(fresh)
            assert manager.restore(step, args=args) is fresh
            assert fresh.get_state()["step"] == step
            assert_same(fresh, wanted[step:])


@reads
def test_start_of_the_prefetch_changes_nothing(read_options: ReadOptions | None) -> None:
    p = pipeline()
    iterator = p.iterate(read_options=read_options)
    iterator.start_prefetch()
    iterator.start_prefetch()
    assert iterator.get_state() == {"epoch": 0, "offset": 0, "step": 0}
    steps(iterator, 4)
    iterator.start_prefetch()
    assert_same(iterator, expected(p.config)[4:])
    iterator.start_prefetch()
    assert list(iterator) == []


def test_prefetch_reads_before_a_batch_is_asked_for() -> None:
    reading = threading.Event()
    watched = Planted(reading.set)
    iterator = Pipeline(watched, config()).iterate(read_options=READS["1 thread"])
    assert not reading.is_set()
    iterator.start_prefetch()
    assert reading.wait(timeout=60)
    iterator.close()


# Closing


def reading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}


def assert_all_end(started: Iterable[threading.Thread]) -> None:
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()


@reads
def test_closed_iterator_gives_no_batch_and_leaves_no_thread(
    read_options: ReadOptions | None,
) -> None:
    before = reading_threads()
    iterator = pipeline().iterate(read_options=read_options)
    next(iterator)
    started = reading_threads() - before
    assert bool(started) == (
        read_options is not None
        and read_options.num_threads > 0
        and read_options.prefetch_buffer_size > 0
    )
    state = iterator.get_state()
    iterator.close()
    iterator.close()
    assert_all_end(started)
    with pytest.raises(ValueError, match="this iterator is closed"):
        next(iterator)
    iterator.start_prefetch()
    assert iterator.get_state() == state
    assert reading_threads() - before <= started


@pytest.mark.parametrize("how", ["drop", "finish", "move", "fail"])
def test_iterator_that_is_done_with_leaves_no_thread(how: str) -> None:
    before = reading_threads()
    planted = Planted()
    iterator = Pipeline(planted, config()).iterate(read_options=READS["4 threads"])
    next(iterator)
    started = reading_threads() - before
    assert started
    if how == "finish":
        list(iterator)
    elif how == "move":
        iterator.set_state({"epoch": 0, "offset": 0, "step": 0})
    elif how == "fail":
        planted.bad = set(range(N))
        with pytest.raises(RecordReadError):
            list(iterator)
    if how in {"drop", "finish"}:
        del iterator
        gc.collect()
    assert_all_end(started)


# Faults


class Planted:
    """`source`, but for records that cannot be read while they are in ``bad``."""

    def __init__(self, on_read: Callable[[], None] = lambda: None) -> None:
        self._sound = source()
        self._on_read = on_read
        self.fields = self._sound.fields
        self.bad: set[int] = set()
        self.bad_batches = False
        self.error: Callable[[str], BaseException] = OSError

    def __len__(self) -> int:
        return len(self._sound)

    def ids(self, rows: Rows) -> npt.NDArray[Any]:
        return self._sound.ids(rows)

    def read(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        self._on_read()
        for row in rows.tolist():
            if row in self.bad:
                raise self.error(f"row {row} is gone")
        if self.bad_batches and len(rows) > 1:
            raise self.error("too many rows at once")
        return self._sound.read(rows)

    def fingerprint(self) -> Fingerprint:
        return self._sound.fingerprint()


@policies
@threads
@pytest.mark.parametrize("error", [OSError, ValueError, KeyError, StopIteration, MemoryError])
def test_fault_leaves_the_iterator_at_the_batch_that_failed(
    policy: str, error: type[Exception], read_options: ReadOptions | None
) -> None:
    planted = Planted()
    planted.error = error
    p = Pipeline(planted, config(policy))
    wanted = expected(p.config)
    for step in range(len(p)):
        iterator = p.iterate(read_options=read_options)
        assert_same(steps(iterator, step), wanted[:step])
        state = iterator.get_state()
        planted.bad = {int(p.rows_at(p.position(step))[-1])}
        iterator.set_state(state)  # forgets what was read ahead, in good health
        for _ in range(3):
            with pytest.raises(RecordReadError):
                next(iterator)
            assert iterator.get_state() == state
        planted.bad = set()
        assert_same(iterator, wanted[step:])


@threads
def test_fault_names_the_record_its_place_and_its_cause(read_options: ReadOptions | None) -> None:
    planted = Planted()
    p = Pipeline(planted, config())
    row = int(p.rows_at(p.position(1))[2])
    planted.bad = {row}
    iterator = p.iterate(read_options=read_options)
    next(iterator)
    with pytest.raises(RecordReadError, match=rf"record {row * 7 + 100} \(row {row}\)") as caught:
        next(iterator)
    assert "epoch 0, offset 4, step 1" in str(caught.value)
    assert (caught.value.record_id, caught.value.row) == (row * 7 + 100, row)
    assert caught.value.position == Position(0, 4, 1)
    assert repr(caught.value.__cause__) == f"OSError('row {row} is gone')"


@threads
def test_fault_of_no_single_record_is_that_of_the_batch(read_options: ReadOptions | None) -> None:
    planted = Planted()
    p = Pipeline(planted, config())
    iterator = p.iterate(read_options=read_options)
    planted.bad_batches = True
    with pytest.raises(RecordReadError, match="the batch at epoch 0, offset 0, step 0") as caught:
        next(iterator)
    assert (caught.value.record_id, caught.value.row) == (None, None)
    assert str(caught.value.__cause__) == "too many rows at once"
    planted.bad_batches = False
    assert_same(iterator, expected(p.config))


def test_interrupt_leaves_the_iterator_where_it_was() -> None:
    planted = Planted()
    p = Pipeline(planted, config())
    iterator = p.iterate()
    next(iterator)
    planted.error, planted.bad = KeyboardInterrupt, set(range(N))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    planted.bad = set()
    assert_same(iterator, expected(p.config)[1:])


@threads
def test_fault_of_a_transform_leaves_the_iterator_at_the_batch(
    read_options: ReadOptions | None,
) -> None:
    bad: set[int] = set()

    def transform(batch: Batch) -> Batch:
        if bad & set(batch["id"].tolist()):
            raise ZeroDivisionError
        return batch

    p = Pipeline(source(), config(), transform)
    wanted = expected(p.config)
    iterator = p.iterate(read_options=read_options)
    bad.add(int(wanted[0]["id"][1]))
    with pytest.raises(RecordReadError, match=f"record {wanted[0]['id'][1]} ") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    bad.clear()
    assert_same(iterator, wanted)


@threads
def test_fault_of_the_callback_delivers_the_batch_again(read_options: ReadOptions | None) -> None:
    calls: list[Position] = []

    def on_batch(position: Position, batch: Batch) -> None:
        calls.append(position)
        if len(calls) % 2:
            raise RuntimeError("no space for the log")

    p = pipeline()
    wanted = expected(p.config)
    iterator = p.iterate(read_options=read_options, on_batch=on_batch)
    for step, batch in enumerate(wanted):
        with pytest.raises(RuntimeError, match="no space"):
            next(iterator)
        assert iterator.position == p.position(step)
        assert_same(steps(iterator, 1), [batch])
    assert calls == [p.position(step) for step in range(len(p)) for _ in range(2)]


@reads
def test_callback_sees_each_batch_and_where_it_begins(read_options: ReadOptions | None) -> None:
    seen: list[tuple[Position, Batch]] = []
    p = pipeline("drop")
    iterator = p.iterate(
        p.position(2),
        read_options=read_options,
        on_batch=lambda position, batch: seen.append((position, batch)),
    )
    delivered = list(iterator)
    assert [position for position, _ in seen] == [p.position(step) for step in range(2, len(p))]
    assert all(a is b for (_, a), b in zip(seen, delivered, strict=True))


# Records that cannot be read, masked


@streams
@threads
def test_masked_bad_records_are_empty_slots_and_nobody_moves(
    policy: str, shuffle: str, read_options: ReadOptions | None
) -> None:
    planted = Planted()
    p = Pipeline(planted, config(policy, shuffle, on_bad_record="mask"))
    whole = expected(config(policy, shuffle))
    planted.bad = {2, 3, 9}
    bad_ids = [row * 7 + 100 for row in planted.bad]
    for batch in whole:
        gone = np.isin(batch["id"], bad_ids)
        batch["mask"][gone] = False
        batch["x"][gone] = 0
        batch["y"][gone] = 0
    assert_same(p.iterate(read_options=read_options), whole)
    state = dataclasses.asdict(p.position(2))
    iterator = p.iterate(read_options=read_options)
    iterator.set_state(state)
    assert_same(iterator, whole[2:])


def test_batch_of_bad_records_only_has_the_structure_of_others() -> None:
    planted = Planted()
    p = Pipeline(
        planted,
        config("pad", "none", on_bad_record="mask"),
        lambda batch: {"x": batch["x"].astype(np.float16)},
    )
    planted.bad = {0, 1, 2, 3}
    first, second = p[0], p[1]
    assert first["id"].tolist() == [100, 107, 114, 121]
    assert not first["mask"].any()
    assert not first["x"].any()
    for name in second:
        assert (first[name].dtype, first[name].shape) == (second[name].dtype, second[name].shape)


def test_each_masked_record_is_logged_by_its_id(caplog: pytest.LogCaptureFixture) -> None:
    planted = Planted()
    p = Pipeline(planted, config("pad", "none", on_bad_record="mask"))
    planted.bad = {1, 2}
    with caplog.at_level(logging.WARNING, logger="loader.streams.pipeline"):
        p[0]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "record 107 (row 1)" in caplog.messages[0]
    assert "row 2 is gone" in caplog.messages[1]


def test_fault_of_a_whole_batch_is_never_masked() -> None:
    planted = Planted()
    p = Pipeline(planted, config(on_bad_record="mask"))
    planted.bad_batches = True
    with pytest.raises(RecordReadError, match="the batch at"):
        p[0]


def test_data_that_has_changed_is_never_masked() -> None:
    """Under the same IDs there are other records now: to go on without them would go on in other data."""

    class Changed(Planted):
        def read(self, rows: Rows) -> dict[str, Any]:
            try:
                return super().read(rows)
            except OSError as error:
                try:
                    raise DataChangedError("file a has changed") from error
                except DataChangedError as change:
                    raise ValueError("row 3: cannot be read") from change

    planted = Changed()
    p = Pipeline(planted, config("pad", "none", on_bad_record="mask"))
    planted.bad = {3}
    with pytest.raises(RecordReadError, match=r"record 121 \(row 3\) .*restore the data") as failed:
        p[0]
    assert failed.value.row == 3
    planted.bad, planted.bad_batches = set(), True
    with pytest.raises(RecordReadError, match=r"the batch at .*restore the data"):
        p[0]
    assert p.bad_records == {}


# Streams without end, and large ones


def test_stream_without_end_has_no_length() -> None:
    p = pipeline(num_epochs=None)
    with pytest.raises(TypeError, match="num_epochs=None"):
        len(p)
    assert len(p.dataset) == sys.maxsize
    with pytest.raises(IndexError, match="unlimited"):
        p[-1]
    with pytest.raises(IndexError):
        p[10**30]


@streams
def test_stream_without_end_begins_like_one_with(policy: str, shuffle: str) -> None:
    wanted = expected(config(policy, shuffle))
    assert_same(steps(pipeline(policy, shuffle, num_epochs=None).iterate(), len(wanted)), wanted)


@streams
@threads
def test_steps_far_out_are_those_of_their_epochs(
    policy: str, shuffle: str, read_options: ReadOptions | None
) -> None:
    p = pipeline(policy, shuffle, num_epochs=None)
    step = 10**9
    epoch = step // p.steps_per_epoch
    wanted = expected(p.config, epochs=range(epoch, epoch + 3))
    first = step - epoch * p.steps_per_epoch
    assert_same([p[step + i] for i in range(4)], wanted[first : first + 4])
    assert_same([p.dataset[step + i] for i in range(4)], wanted[first : first + 4])
    iterator = p.iterate(p.position(step), read_options=read_options)
    assert_same(steps(iterator, 4), wanted[first : first + 4])
    assert iterator.get_state()["step"] == step + 4


def test_last_step_that_a_position_can_count_is_there() -> None:
    p = pipeline("drop", num_epochs=None)
    epoch = (2**63 - 1) // p.steps_per_epoch
    wanted = expected(p.config, epochs=[epoch])
    assert_same([p[2**63 - 1]], wanted[1:])


def test_stream_longer_than_python_can_count_still_runs() -> None:
    p = pipeline("drop", num_epochs=2**63 - 1)
    assert len(p.dataset) == sys.maxsize
    with pytest.raises(OverflowError, match=r"has \d{19,} batches, .* num_epochs is too large"):
        len(p)
    iterator = p.iterate(read_options=READS["4 threads"])
    assert_same(steps(iterator, 6), expected(p.config))


class Virtual:
    """10**12 records that are computed, so that nothing but the loader holds memory."""

    fields: Final = {"x": Field(np.dtype(np.int64))}

    def __len__(self) -> int:
        return 10**12

    def ids(self, rows: Rows) -> Rows:
        return rows + 5

    def read(self, rows: Rows) -> dict[str, Rows]:
        return {"x": rows * 2}

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of_revision("v1", self)


@contextlib.contextmanager
def peak_bytes() -> Iterator[list[int]]:
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shuffle", ["feistel", "none"])
@policies
def test_memory_is_that_of_batches_at_any_size(policy: str, shuffle: str) -> None:
    with peak_bytes() as peak:
        p = Pipeline(Virtual(), config(policy, shuffle, 256, num_epochs=None))
        ids = p.ids(10**9 + 3)
        batches = steps(p.iterate(Position(7, 10**11, 1)), 3)
        p.omitted_ids(3)
        p.fingerprint()
    assert peak[0] < 8 << 20
    order = epoch_order(10**12, 17, 7, shuffle, 10**11, 10**11 + 768)
    np.testing.assert_array_equal(np.concatenate([batch["id"] for batch in batches]), order + 5)
    assert len(ids) == 256
    np.testing.assert_array_equal(batches[0]["x"], (batches[0]["id"] - 5) * 2)


@policies
def test_tail_of_a_large_epoch_is_cut_like_that_of_a_small_one(policy: str) -> None:
    p = Pipeline(Virtual(), config(policy, "none", 300, num_epochs=1))
    assert p.steps_per_epoch == 10**12 // 300 + (policy != "drop")
    tail = list(p.iterate(Position(0, 10**12 - 100, 9)))
    assert [len(batch["id"]) for batch in tail] == {"drop": [], "partial": [100], "pad": [300]}[
        policy
    ]
    assert p.omitted_ids(0).tolist() == (
        list(range(10**12 - 95, 10**12 + 5)) if policy == "drop" else []
    )


# Sizes


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(
    ("policy", "n", "batch_size"),
    [
        *itertools.product(("partial", "pad"), (1, 2, 5), (1, 2, 5, 6, 1000)),
        *((policy, n, size) for policy in ["drop"] for n in (1, 2, 5) for size in range(1, n + 1)),
    ],
)
def test_every_small_size_is_served(policy: str, n: int, batch_size: int, shuffle: str) -> None:
    p = pipeline(policy, shuffle, batch_size, n=n)
    wanted = expected(p.config, n)
    assert_same(p, wanted)
    walk = p.iterate()
    for step in range(len(p)):
        fresh = p.iterate()
        fresh.set_state(walk.get_state())
        assert_same(fresh, wanted[step:])
        next(walk)


def test_drop_that_would_deliver_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 12 is larger than the 11 records"):
        pipeline("drop", batch_size=12)


@streams
def test_omitted_ids_are_those_that_no_batch_holds(policy: str, shuffle: str) -> None:
    p = pipeline(policy, shuffle)
    everything = set((np.arange(N) * 7 + 100).tolist())
    for epoch in range(EPOCHS):
        first = epoch * p.steps_per_epoch
        seen = real_ids([p[first + step] for step in range(p.steps_per_epoch)])
        assert len(seen) == len(set(seen))
        assert p.omitted_ids(epoch).tolist() == sorted(everything - set(seen))
        assert len(p.omitted_ids(epoch)) == (3 if policy == "drop" else 0)


@pytest.mark.parametrize("epoch", [-1, EPOCHS, 10**30])
def test_epoch_that_is_none_is_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match=f"epoch {epoch} is not one of the 3"):
        pipeline("drop").omitted_ids(epoch)


@pytest.mark.parametrize("step", [-1, 9, 10**30])
def test_step_that_is_none_is_an_index_error(step: int) -> None:
    p = pipeline()
    for access in (p.__getitem__, p.ids, p.position):
        with pytest.raises(IndexError, match=f"step {step} is not one of the 9 steps"):
            access(step)


@pytest.mark.parametrize("step", [1.0, "1", None, slice(2), (1,), True, np.array([0])])
def test_step_that_is_no_integer_is_a_type_error(step: Any) -> None:
    p = pipeline()
    for access in (p.__getitem__, p.ids, p.position):
        with pytest.raises(TypeError, match="a step is an integer, not"):
            access(step)
    with pytest.raises(TypeError, match="an epoch is an integer, not"):
        p.omitted_ids(step)


# Records of every kind

KINDS: Final[dict[str, npt.NDArray[Any]]] = {
    "structured": np.array([(i, i / 2) for i in range(N)], [("a", "i2"), ("b", "f4")]),
    "datetime64": np.arange(N).astype("M8[D]"),
    "timedelta64": np.arange(N).astype("m8[s]"),
    "bool": np.arange(N) % 2 == 0,
    "bytes": np.array([b"b%d" % i for i in range(N)]),
    "text": np.array([f"é{i}" for i in range(N)]),
    "float16": np.arange(N, dtype=np.float16),
    "bfloat16": np.arange(N).astype(jnp.bfloat16),
    "big-endian": np.arange(N, dtype=">i4"),
    "complex": np.arange(N) * 1j,
    "images": np.arange(N * 24, dtype=np.uint8).reshape(N, 2, 3, 4),
    "not contiguous": np.arange(N * 6).reshape(N, 6)[:, ::2],
    "transposed": np.arange(N * 3).reshape(3, N).T,
    "reversed": np.arange(N)[::-1],
    "repeated": np.broadcast_to(np.arange(3), (N, 3)),
}


@policies
@pytest.mark.parametrize("kind", KINDS)
def test_field_of_every_kind_comes_as_it_is(kind: str, policy: str) -> None:
    values = KINDS[kind]
    p = Pipeline(ArraySource({"x": values}), config(policy))
    for batch in p.iterate(read_options=READS["4 threads"]):
        x, rows, mask = batch["x"], batch["id"], batch["mask"]
        assert x.dtype == values.dtype
        assert x.shape == (len(rows), *values.shape[1:])
        np.testing.assert_array_equal(x[mask], values[rows[mask]])
        assert not np.frombuffer(x[~mask].tobytes(), np.uint8).any()


@policies
@pytest.mark.parametrize(
    "ids",
    [
        np.arange(N) - 20,
        np.arange(N) + 2**62,
        [f"r{i:02}" for i in range(N)],
        ["é" * (i + 1) for i in range(N)],
    ],
    ids=["negative", "large", "text", "text of many widths"],
)
def test_ids_of_every_kind_come_as_they_are(ids: Any, policy: str) -> None:
    p = Pipeline(ArraySource({"row": np.arange(N)}, ids), config(policy))
    ids = np.asarray(ids)
    for step, batch in enumerate(p):
        mask = batch["mask"]
        assert batch["id"].dtype == ids.dtype
        np.testing.assert_array_equal(batch["id"][mask], ids[batch["row"][mask]])
        assert set(batch["id"][~mask].tolist()) <= ({""} if ids.dtype.kind == "U" else {-1})
        np.testing.assert_array_equal(p.ids(step), batch["id"])


# Sources of others


class Own:
    """A sound source with the members of the protocol and no more, but for what is given."""

    def __init__(self, **changes: Callable[[Any], Any]) -> None:
        self._changes = changes
        self._sound = source()

    fields = property(lambda self: self._changed("fields", dict(self._sound.fields)))

    def __len__(self) -> int:
        length: int = self._changed("len", N)
        return length

    def ids(self, rows: Rows) -> Any:
        return self._changed("ids", self._sound.ids(rows))

    def read(self, rows: Rows) -> Any:
        return self._changed("read", self._sound.read(rows))

    def fingerprint(self) -> Fingerprint:
        return self._sound.fingerprint()

    def _changed(self, member: str, sound: Any) -> Any:
        return self._changes.get(member, lambda value: value)(sound)


def of(changed: Own) -> RecordSource:
    return changed


@streams
def test_source_of_a_user_is_served_like_ours(policy: str, shuffle: str) -> None:
    p = Pipeline(Own(), config(policy, shuffle))
    assert_same(p, expected(p.config))


def test_source_may_give_lists() -> None:
    listed = Own(
        ids=lambda ids: ids.tolist(), read=lambda fields: {**fields, "y": fields["y"].tolist()}
    )
    assert_same(Pipeline(of(listed), config()), expected(config()))


def test_source_may_read_more_than_its_fields() -> None:
    more = Own(read=lambda fields: {"z": 3, **fields, "id": 7})
    assert_same(Pipeline(of(more), config()), expected(config()))


BAD_IDS: Final[list[tuple[Callable[[Any], Any], str]]] = [
    (lambda ids: ids[:-1], r"int64\[3\] as the IDs of 4 rows"),
    (lambda ids: ids[:, None], r"int64\[4, 1\] as the IDs of 4 rows"),
    (lambda ids: ids.astype(np.uint64), r"uint64\[4\] as the IDs of 4 rows"),
    (lambda ids: ids.astype(np.float64), r"float64\[4\] as the IDs of 4 rows"),
    (lambda ids: ids.astype(object), r"object\[4\] as the IDs of 4 rows"),
    (lambda _: None, r"object\[\] as the IDs of 4 rows"),
]


@threads
@pytest.mark.parametrize(("change", "named"), BAD_IDS, ids=itertools.count())
def test_source_of_bad_ids_is_an_error_that_names_them(
    change: Callable[[Any], Any], named: str, read_options: ReadOptions | None
) -> None:
    p = Pipeline(of(Own(ids=change)), config())
    iterator = p.iterate(read_options=read_options)
    with pytest.raises(ValueError, match=named):
        next(iterator)
    assert iterator.position == Position()
    with pytest.raises(ValueError, match=named):
        p.ids(0)


BAD_READS: Final[list[tuple[Callable[[Any], Any], str]]] = [
    (lambda fields: {"x": fields["x"]}, "did not read 'y'"),
    (lambda _: {}, "did not read 'x', 'y'"),
    (lambda _: None, "must read as a dict of arrays, not NoneType"),
    (lambda fields: {**fields, "y": fields["y"][:0]}, r"'y' reads as int64\[0\] for 1 rows"),
    (lambda fields: {**fields, "y": fields["y"] / 2}, r"'y' reads as float64\[1\] for 1 rows"),
    (lambda fields: {**fields, "x": fields["x"][:, :1]}, r"'x' reads as float32\[1, 1\] for 1"),
    (lambda fields: {**fields, "x": None}, r"'x' reads as object\[\] for 1 rows"),
]


@threads
@pytest.mark.parametrize(("change", "named"), BAD_READS, ids=itertools.count())
def test_source_of_bad_fields_is_an_error_that_names_them(
    change: Callable[[Any], Any], named: str, read_options: ReadOptions | None
) -> None:
    iterator = Pipeline(of(Own(read=change)), config()).iterate(read_options=read_options)
    with pytest.raises(RecordReadError) as caught:
        next(iterator)
    with pytest.raises(ValueError, match=named):
        raise caught.value.__cause__ or caught.value


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"len": lambda _: 0}, ValueError, "holds no record"),
        ({"fields": lambda _: None}, TypeError, "fields must map names to dtypes and shapes"),
        ({"fields": lambda fields: {**fields, "id": fields["y"]}}, ValueError, "named 'id'"),
        ({"fields": lambda fields: {**fields, "mask": fields["y"]}}, ValueError, "named 'mask'"),
        ({"fields": lambda fields: {**fields, "": fields["y"]}}, TypeError, "not ''"),
        ({"fields": lambda fields: {**fields, 3: fields["y"]}}, TypeError, "not 3"),
        ({"fields": lambda _: {"x": np.float32}}, TypeError, "'x' must have a dtype and a shape"),
        ({"fields": lambda _: {"x": Field(np.dtype(object))}}, TypeError, "'x' has dtype object"),
        ({"fields": lambda _: {"x": Field(np.dtype("U0"))}}, ValueError, "'x' holds nothing"),
        ({"fields": lambda _: {"x": Field(np.dtype("f4"), (2, 0))}}, ValueError, "holds nothing"),
    ],
    ids=itertools.count(),
)
def test_source_that_cannot_be_batched_is_refused_at_construction(
    change: dict[str, Callable[[Any], Any]], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        Pipeline(of(Own(**change)), config())


@pytest.mark.parametrize("wrong", [None, 3, [1, 2], {"x": np.zeros(3)}, np.zeros(3)], ids=repr)
def test_what_is_no_source_is_refused_with_what_it_lacks(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a RecordSource: it has no .*fingerprint"):
        Pipeline(wrong, config())


@pytest.mark.parametrize("wrong", [None, {"batch_size": 4}, "lesson.toml"], ids=repr)
def test_what_is_no_config_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="config must be a PipelineConfig"):
        Pipeline(source(), wrong)


def test_what_is_no_transform_is_refused() -> None:
    wrong: Any = "double"
    with pytest.raises(TypeError, match="transform must be callable, not 'double'"):
        Pipeline(source(), config(), wrong)


# Transforms


def transformed(transform: Any, policy: str = "pad") -> Pipeline:
    return Pipeline(source(), config(policy), transform)


@policies
@reads
def test_transform_sees_real_records_only_and_padding_comes_after(
    policy: str, read_options: ReadOptions | None
) -> None:
    def transform(batch: Batch) -> Batch:
        assert batch["mask"].all()
        assert (batch["id"] >= 100).all()
        assert list(batch) == ["id", "mask", "x", "y"]
        return {"z": batch["y"] + 1.0}

    p = transformed(transform, policy)
    for found, wanted in zip(p.iterate(read_options=read_options), expected(p.config), strict=True):
        assert list(found) == ["id", "mask", "z"]
        np.testing.assert_array_equal(found["id"], wanted["id"])
        np.testing.assert_array_equal(found["mask"], wanted["mask"])
        np.testing.assert_array_equal(found["z"], np.where(wanted["mask"], wanted["y"] + 1.0, 0))


@pytest.mark.parametrize(
    "transform",
    [
        lambda batch: batch,
        lambda batch: {"x": batch["x"], "y": batch["y"]},
        lambda batch: {"x": batch["x"], "y": batch["y"], "id": batch["id"].copy()},
        lambda batch: {"x": batch["x"].tolist() and batch["x"], "y": batch["y"].tolist()},
        lambda batch: {**batch, "mask": batch["mask"].tolist()},
    ],
    ids=["nothing", "without id and mask", "id copied", "lists", "mask as a list"],
)
def test_id_and_mask_are_kept_whatever_the_transform_returns(transform: Any) -> None:
    assert_same(transformed(transform), expected(config()))


def test_transform_may_return_jax_arrays() -> None:
    p = transformed(lambda batch: {**batch, "x": jnp.asarray(batch["x"]) * 2.0})
    wanted = [{**batch, "x": batch["x"] * 2} for batch in expected(p.config)]
    assert_same(p, wanted)
    p = transformed(jax.jit(lambda batch: {"y": batch["y"] + 1}))
    for batch in p:
        assert batch["y"].dtype == np.int32
        np.testing.assert_array_equal(batch["y"], (batch["id"] * 2 + 1) * batch["mask"])


def test_transform_that_edits_its_fields_in_place_changes_the_batch_and_no_record() -> None:
    def transform(batch: Batch) -> Batch:
        batch["y"] += 1
        del batch["x"]
        return batch

    p = transformed(transform, "partial")
    for _ in range(2):
        for batch in p:
            assert list(batch) == ["id", "mask", "y"]
            np.testing.assert_array_equal(batch["y"], batch["id"] * 2 + 1)


def mutate_id(batch: Batch) -> Batch:
    batch["id"] += 1
    return batch


def mutate_mask(batch: Batch) -> Batch:
    batch["mask"][:] = False
    return batch


BAD_TRANSFORMS: Final[dict[str, tuple[Callable[[Batch], Any], str]]] = {
    "nothing": (lambda _: None, "must return a dict of arrays, not NoneType"),
    "a list": (lambda batch: list(batch.values()), "must return a dict of arrays, not list"),
    "an array": (lambda batch: batch["x"], "must return a dict of arrays, not ndarray"),
    "an id": (lambda batch: {**batch, "id": batch["id"] + 1}, "the transform changed 'id'"),
    "ids as text": (lambda batch: {"id": batch["id"].astype(str)}, "the transform changed 'id'"),
    "a mask": (lambda batch: {**batch, "mask": ~batch["mask"]}, "the transform changed 'mask'"),
    "an id in place": (mutate_id, "read-only"),
    "a mask in place": (mutate_mask, "read-only"),
    "too many": (lambda batch: {"z": np.zeros(len(batch["y"]) + 1)}, r"'z' is float64\[2\]; for 1"),
    "none": (lambda batch: {"z": batch["y"][:0]}, r"'z' is int64\[0\]; for 1 records"),
    "fewer ids": (lambda batch: {"id": batch["id"][:0]}, r"'id' is int64\[0\]; for 1 records"),
    "a number": (lambda _: {"z": 3.0}, r"'z' is float64\[\]; for 1 records"),
    "an object": (lambda _: {"z": [object()]}, r"'z' is object\[1\]"),
    "ragged": (lambda _: {"z": [[1, 2], [3]]}, "'z' is not an array"),
    "an unnamed field": (lambda batch: {3: batch["y"]}, "named by strings, not 3"),
}


@threads
@pytest.mark.parametrize("name", BAD_TRANSFORMS)
def test_bad_output_of_a_transform_is_an_error_that_names_it(
    name: str, read_options: ReadOptions | None
) -> None:
    transform, named = BAD_TRANSFORMS[name]
    iterator = transformed(transform).iterate(read_options=read_options)
    with pytest.raises(RecordReadError) as caught:
        next(iterator)
    with pytest.raises((TypeError, ValueError), match=named):
        raise caught.value.__cause__ or caught.value
    assert iterator.position == Position()


# Odds and ends


def test_fingerprint_is_that_of_the_source_now() -> None:
    x = np.arange(N)
    p = Pipeline(ArraySource({"x": x}), config())
    before = p.fingerprint()
    assert before == ArraySource({"x": np.arange(N)}).fingerprint()
    x[3] = 99
    assert p.fingerprint() != before


def test_limit_of_rows_is_a_beginning_of_the_batch() -> None:
    p = pipeline("partial")
    for step in range(len(p)):
        rows = p.rows_at(p.position(step))
        for limit in range(6):
            np.testing.assert_array_equal(p.rows_at(p.position(step), limit), rows[:limit])


def test_iterator_knows_its_pipeline() -> None:
    p = pipeline()
    iterator = p.iterate()
    assert isinstance(iterator, BatchIterator)
    assert iterator.pipeline is p


@given(st.lists(st.tuples(st.sampled_from(["next", "save", "restore", "close"]), st.booleans())))
@settings(max_examples=50)
def test_any_run_of_calls_keeps_to_the_stream(calls: Sequence[tuple[str, bool]]) -> None:
    """A model: the step alone says what comes next, whatever was called before."""
    p = pipeline("pad")
    wanted = expected(p.config)
    iterator, step = p.iterate(), 0
    saved, saved_step = iterator.get_state(), 0
    for call, threaded in calls:
        if call == "next":
            assert_same(steps(iterator, 1), wanted[step : step + 1])
            step = min(step + 1, len(p))
        elif call == "save":
            saved, saved_step = through_json(iterator.get_state()), step
        elif call == "restore":
            iterator.set_state(saved)
            step = saved_step
        else:
            state = iterator.get_state()
            iterator.close()
            iterator = p.iterate(read_options=READS["4 threads"] if threaded else None)
            iterator.set_state(state)
        assert iterator.get_state()["step"] == step
    iterator.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.astype(np.int32),
        lambda ids: ids.tolist(),
        lambda ids: [f"r{name}" for name in ids],
        lambda ids: np.array([f"r{name}" for name in ids], object),
    ],
    ids=itertools.count(),
)
def test_ids_may_come_as_lists_and_as_smaller_integers(change: Callable[[Any], Any]) -> None:
    p = Pipeline(of(Own(ids=change)), config())
    for step in range(len(p)):
        ids = p.ids(step)
        assert ids.dtype == np.int64 or ids.dtype.kind == "U"
        assert ids.tolist() == p[step]["id"].tolist()
    assert p.fingerprint() == of(Own(ids=change)).fingerprint()


def test_omitted_ids_are_of_the_sources_kind_also_where_there_are_none() -> None:
    class Named(ArraySource):
        def ids(self, rows: Any, /) -> Any:
            return np.array([f"r{row}" for row in rows])

    p = Pipeline(Named({"x": np.arange(8)}), config(batch_size=4, final_batch="drop"))
    assert p.omitted_ids(0).tolist() == []
    assert p.omitted_ids(0).dtype.kind == "U"


def test_the_warning_of_a_masked_record_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(ArraySource):
        def read(self, rows: Any, /) -> Any:
            if 3 in rows:
                raise OSError("disk on fire")
            return super().read(rows)

    source = Bad({"x": np.arange(8)}, np.arange(8) + 10)
    with pytest.raises(RecordReadError, match=r"record 13 \(row 3\) .* \(OSError: disk on fire\)"):
        list(Pipeline(source, config(batch_size=4)))
    with caplog.at_level(logging.WARNING):
        p = Pipeline(source, config(batch_size=4, on_bad_record="mask", num_epochs=1))
        assert p.bad_records == {}
        list(p)
        assert p.bad_records == {13: 1}
    assert [record.getMessage() for record in caplog.records] == [
        "record 13 (row 3) is masked: OSError: disk on fire"
    ]
