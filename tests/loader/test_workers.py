"""Worker processes change nothing but the time: the same batches, errors and counts, and nothing is left."""

import collections
import contextlib
import functools
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from checkpointing import Checkpoints
from loader import (
    ArraySource,
    BatchIterator,
    Fingerprint,
    Mixture,
    Pipeline,
    PipelineConfig,
    Position,
    ReadOptions,
    RecordReadError,
    WorkerDiedError,
)
from tests.held import PROC, Held, children, settled

pytestmark = pytest.mark.processes

Batch = dict[str, Any]
Rows = npt.NDArray[np.int64]

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
N: Final = 23
PATIENCE_SECONDS: Final = 120.0

linux = pytest.mark.skipif(not PROC.exists(), reason="counts by /proc")


# The streams: their sources and transforms, as they are at the top level of a module


class Unsendable(Exception):  # noqa: N818
    """An exception that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unreadable(Exception):  # noqa: N818
    """An exception that can be pickled, and not be made again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Planted:
    """A source of which some rows raise: in `ids` or in `read`."""

    def __init__(self, bad: Callable[[int], BaseException | None] = lambda row: None) -> None:
        ids = [f"r{i}" for i in range(N)]
        self._sound = ArraySource({"x": np.arange(2 * N).reshape(N, 2)}, ids)
        self._bad = bad
        self.fields = self._sound.fields

    def __len__(self) -> int:
        return N

    def ids(self, rows: Rows) -> npt.NDArray[Any]:
        return self._sound.ids(rows)

    def read(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        for row in rows.tolist():
            if (error := self._bad(row)) is not None:
                raise error
        return self._sound.read(rows)

    def fingerprint(self) -> Fingerprint:
        return self._sound.fingerprint()


class WithoutIds(Planted):
    """A source that cannot tell the IDs of a row."""

    def ids(self, rows: Rows) -> npt.NDArray[Any]:
        if 7 in rows.tolist():
            raise Unsendable("no ID for row 7")
        return super().ids(rows)


def no_error(row: int) -> None:
    """None."""


def every_fifth(row: int) -> Exception | None:
    return OSError(f"row {row} is gone") if row % 5 == 3 else None


def sendable(row: int) -> Exception | None:
    return KeyError(f"row {row}") if row == 7 else None


def unsendable(row: int) -> Exception | None:
    return Unsendable("of row 7") if row == 7 else None


def unreadable(row: int) -> Exception | None:
    return Unreadable("of row", " 7") if row == 7 else None


def interrupted(row: int) -> BaseException | None:
    return KeyboardInterrupt("at row 7") if row == 7 else None


def summed(batch: Batch) -> Batch:
    """A transform: new fields of several dtypes and layouts."""
    x = batch["x"]
    return {
        **batch,
        "sum": x.sum(1).astype(np.float32) / 3,
        "text": batch["id"].astype("U9"),
        "reversed": x[:, ::-1],
        "empty": x[:, :0],
    }


def whose(batch: Batch) -> Batch:
    """A transform that tells of the process it runs in."""
    backends = len(jax._src.xla_bridge._backends)
    return {
        **batch,
        "pid": np.full(len(batch["id"]), os.getpid()),
        "backends": np.full(len(batch["id"]), backends),
        "cpu": np.full(len(batch["id"]), os.environ.get("JAX_PLATFORMS") == "cpu"),
    }


def asleep(batch: Batch, unless: int = -1, mark: str = "") -> Batch:
    """A transform that takes ten minutes, but for the batch with row ``unless``; makes a file before."""
    if unless not in batch["x"][:, 0] // 2:
        if mark:
            pathlib.Path(mark).touch()
        time.sleep(600)
    return batch


def a_pipeline(
    transform: Any = None,
    bad: Callable[[int], BaseException | None] = no_error,
    *,
    source: type[Planted] = Planted,
    **settings: Any,
) -> Pipeline:
    config = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 3} | settings
    return Pipeline(source(bad), PipelineConfig.from_dict(config), transform)


def all_kinds() -> Mixture:
    """A stream with batches of every kind: each final batch and order, masked, excluded, skipped ones."""
    parts = {
        "drop": a_pipeline(summed, final_batch="drop", shuffle="permutation"),
        "masked": a_pipeline(summed, every_fifth, on_bad_record="mask"),
        "pad": a_pipeline(summed, exclude=("r3", "r4"), skip=((2, 5),)),
        "partial": a_pipeline(summed, final_batch="partial", shuffle="none"),
    }
    return Mixture(parts, {"drop": 1, "masked": 2, "pad": 1, "partial": 2})


def assert_same(found: Batch, wanted: Batch) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert type(found[name]) is np.ndarray, name
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
        assert found[name].flags.writeable, name


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until, "it does not come to hold"
        time.sleep(0.01)


# The same batches


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_and_counts_are_those_of_no_workers_from_anywhere(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "loader.streams.pipeline")
    alone, mixture, generator = all_kinds(), all_kinds(), random.Random(5)
    wanted = list(alone)
    logged = [record.getMessage() for record in caplog.records]
    batches = mixture.iterate(workers=workers)
    for _ in range(12):
        start = generator.randrange(len(wanted))
        batches.set_state({"epoch": 0, "offset": 0, "step": start})
        for step in range(start, min(start + generator.randrange(5), len(wanted))):
            assert_same(next(batches), wanted[step])
            assert batches.get_state() == {"epoch": 0, "offset": 0, "step": step + 1}
    batches.set_state({"epoch": 0, "offset": 0, "step": 0})
    caplog.clear()
    before = collections.Counter(mixture.bad_records["masked"])
    for step, batch in enumerate(batches):
        assert_same(batch, wanted[step])
        assert batches.position == Position(0, 0, step + 1)
    assert batches.position.step == len(wanted)
    assert (
        collections.Counter(mixture.bad_records["masked"]) - before == alone.bad_records["masked"]
    )
    assert [record.getMessage() for record in caplog.records] == logged != []


def test_end_of_the_stream_ends_the_workers_and_one_can_go_back() -> None:
    pipeline = a_pipeline(summed, num_epochs=1)
    batches = pipeline.iterate(pipeline.position(len(pipeline) - 1), workers=1)
    assert_same(next(batches), pipeline[len(pipeline) - 1])
    assert batches._workers is not None
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)
        assert batches._workers is None
    batches.start_prefetch()
    assert batches._workers is None
    batches.set_state({"epoch": 0, "offset": 4, "step": 1})
    assert_same(next(batches), pipeline[1])
    batches.close()


def test_what_nobody_waits_for_any_more_is_not_read(tmp_path: pathlib.Path) -> None:
    pipeline = a_pipeline(functools.partial(held, folder=str(tmp_path)), shuffle="none")
    batches = pipeline.iterate(workers=1)
    batches.start_prefetch()
    wait_until((tmp_path / "read-0").exists)
    batches.set_state({"epoch": 0, "offset": 12, "step": 3})
    batches.start_prefetch()
    (tmp_path / "go").touch()
    assert_same(next(batches), pipeline[3])
    assert_same(next(batches), pipeline[4])
    assert not (tmp_path / "read-4").exists()
    batches.close()


@pytest.fixture(scope="module")
def telling() -> Iterator[BatchIterator]:
    """An iterator whose batches tell which process has read them, without an end."""
    batches = a_pipeline(whose, num_epochs=None).iterate(
        workers=2, process_index=1, process_count=2
    )
    yield batches
    batches.close()


def test_share_of_a_process_is_read_in_the_workers(telling: BatchIterator) -> None:
    pipeline = a_pipeline(num_epochs=None)
    start = telling.position.step
    for step in range(start, start + 9):
        batch = next(telling)
        assert batch["id"].tolist() == pipeline.ids(step)[2:].tolist()
        assert telling.position == pipeline.position(step + 1)


def test_batches_come_from_all_workers_and_from_them_alone(telling: BatchIterator) -> None:
    telling.set_state({"epoch": 0, "offset": 0, "step": 0})
    pids = [next(telling)["pid"][0] for _ in range(4)]
    assert pids[:2] == pids[2:]
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


def test_workers_start_no_backend_of_jax_and_are_told_so_alone(telling: BatchIterator) -> None:
    batch = next(telling)
    assert batch["cpu"].all()
    assert not batch["backends"].any()


def test_what_the_workers_have_read_lies_ready(telling: BatchIterator) -> None:
    for _ in range(3):
        next(telling)
        wait_until(lambda: telling.stats().ready == 4)
    assert telling.stats().ready_limit == 4
    telling.set_state({"epoch": 0, "offset": 0, "step": 0})
    next(telling)  # what was read of another place is none of it
    wait_until(lambda: telling.stats().ready == 4)


def test_workers_that_have_not_started_have_read_nothing() -> None:
    stats = a_pipeline().iterate(workers=3).stats()
    assert (stats.ready, stats.ready_limit) == (0, 6)


def by_jax(batch: Batch) -> Batch:
    """A transform whose dtype depends on how JAX is set."""
    return {**batch, "third": jnp.asarray(batch["x"], jnp.float64) / jnp.float64(3)}


def test_transforms_find_jax_as_the_program_has_set_it() -> None:
    with jax.enable_x64(True):
        pipeline = a_pipeline(by_jax)
        batches = pipeline.iterate(workers=1)
        batch = next(batches)
        assert batch["third"].dtype == np.float64
        assert_same(batch, pipeline[0])
        batches.close()


def test_environment_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    before = dict(os.environ)
    batches = a_pipeline(whose).iterate(workers=1)
    assert next(batches)["cpu"].all()
    assert dict(os.environ) == before
    batches.close()


@linux
def test_nothing_starts_before_a_batch_is_asked_for() -> None:
    before = children()
    batches = a_pipeline(whose).iterate(workers=2)
    assert children() == before
    batches.start_prefetch()
    batches.start_prefetch()
    started = children() - before
    assert len(started) == 2
    assert {next(batches)["pid"][0] for _ in range(2)} == started
    batches.close()
    batches.start_prefetch()
    assert children() == before


def test_what_is_read_is_the_pipeline_as_it_is_at_the_first_batch() -> None:
    array = np.arange(2 * N).reshape(N, 2)
    pipeline = Pipeline(ArraySource({"x": array}), PipelineConfig(4, 17, "pad"))
    batches = pipeline.iterate(workers=1)
    array += 100
    assert_same(next(batches), pipeline[0])
    batches.close()


def test_batches_on_a_device() -> None:
    pipeline = a_pipeline(summed)
    batches = pipeline.iterate(workers=2, device=jax.devices("cpu")[0])
    for step in range(4):
        batch = next(batches)
        assert isinstance(batch["sum"], jax.Array)
        for name, array in pipeline[step].items():
            np.testing.assert_array_equal(np.asarray(batch[name]), array)
    batches.set_state({"epoch": 1, "offset": 4, "step": 7})
    assert next(batches)["id"].tolist() == pipeline.ids(7).tolist()
    batches.start_prefetch()
    assert sum(1 for _ in batches) == len(pipeline) - 8
    batches.close()


def test_number_of_workers_may_change_at_a_resume(tmp_path: pathlib.Path) -> None:
    pipeline = a_pipeline(summed, every_fifth, on_bad_record="mask", num_epochs=2)
    steps = iter(range(len(pipeline)))
    for workers, until in ((2, 5), (0, 7), (3, len(pipeline))):
        with Checkpoints(tmp_path / "run", pipeline, save_every=1, keep=2) as checkpoints:
            run = checkpoints.resume({"w": np.zeros(2)}, workers=workers)
            for batch in run.batches:
                assert_same(batch, pipeline[next(steps)])
                checkpoints.save(run.batches, run.train_state)
                if run.batches.position.step == until:
                    break
            run.batches.close()
    assert next(steps, None) is None
    assert sum(pipeline.bad_records.values()) > 0


# What is refused


@pytest.mark.parametrize(
    ("workers", "error"),
    [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("2", TypeError), (None, TypeError)],
)
def test_number_of_workers_must_be_one(workers: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="workers must be"):
        a_pipeline().iterate(workers=workers)


def test_workers_and_reading_threads_are_one_too_many(tmp_path: pathlib.Path) -> None:
    threads = ReadOptions(num_threads=2, prefetch_buffer_size=2)
    none = ReadOptions(num_threads=0, prefetch_buffer_size=0)
    with pytest.raises(ValueError, match="workers=3 and 2 reading threads both read"):
        all_kinds().iterate(workers=3, read_options=threads)
    a_pipeline().iterate(workers=3, read_options=none)
    with (
        Checkpoints(tmp_path / "run", a_pipeline(), 1, 1) as checkpoints,
        pytest.raises(ValueError, match="workers=1 and 2"),
    ):
        checkpoints.resume({}, workers=1, read_options=threads)


@linux
def test_what_cannot_be_sent_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    before = children()
    with pytest.raises(TypeError, match=r"pipeline\.transform, <function .*<lambda>"):
        a_pipeline(lambda batch: batch).iterate(workers=1)
    with (tmp_path / "open").open("w") as file:
        pipeline = a_pipeline(functools.partial(asleep, unless=file))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"pipeline\.transform\.unless, <_io.Text"):
            pipeline.iterate(workers=1)
    assert children() == before


# Errors


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (sendable, KeyError("row 7")),
        (unsendable, RuntimeError("tests.loader.test_workers.Unsendable: of row 7")),
        (unreadable, RuntimeError("tests.loader.test_workers.Unreadable: of row 7")),
    ],
)
def test_error_names_the_record_as_without_workers(
    bad: Callable[[int], Exception | None], cause: Exception
) -> None:
    pipeline = a_pipeline(bad=bad)
    step = next(step for step in range(len(pipeline)) if "r7" in pipeline.ids(step))
    with pytest.raises(RecordReadError) as wanted:
        pipeline[step]
    batches = pipeline.iterate(pipeline.position(step - 1), workers=1)
    assert_same(next(batches), pipeline[step - 1])
    for _ in range(2 if bad is sendable else 1):
        with pytest.raises(RecordReadError) as caught:
            next(batches)
        assert str(caught.value) == str(wanted.value)
        found = caught.value
        assert (found.position, found.record_id, found.row) == (pipeline.position(step), "r7", 7)
        assert type(found.__cause__) is type(cause)
        assert str(cause) in str(found.__cause__)
        assert "In worker process" in found.__notes__[0]
        assert "in read\n" in found.__notes__[0], "where it was raised"
        assert batches.position == pipeline.position(step)
    batches.set_state({"epoch": 0, "offset": 4 * (step + 1), "step": step + 1})
    assert_same(next(batches), pipeline[step + 1])
    batches.close()


def test_error_of_no_single_record_that_cannot_be_sent_is_that_of_the_batch() -> None:
    pipeline = a_pipeline(source=WithoutIds, shuffle="none")
    batches = pipeline.iterate(pipeline.position(1), workers=1)
    with pytest.raises(RecordReadError, match="the batch at epoch 0, offset 4, step 1") as caught:
        next(batches)
    assert "Unsendable: no ID for row 7" in str(caught.value)
    assert (caught.value.record_id, caught.value.row) == (None, None)
    assert batches.position == pipeline.position(1)
    batches.close()


def test_what_is_no_error_of_a_record_comes_as_it_is() -> None:
    pipeline = a_pipeline(bad=interrupted, shuffle="none")
    batches = pipeline.iterate(pipeline.position(1), workers=1)
    with pytest.raises(KeyboardInterrupt, match="at row 7"):
        next(batches)
    assert batches.position == pipeline.position(1)
    batches.close()


def test_fault_of_the_callback_delivers_the_batch_again() -> None:
    failing = iter([False, True, False, False])

    def on_batch(position: Position, batch: Batch) -> None:
        if next(failing):
            raise RuntimeError("no space for the log")

    pipeline = a_pipeline(summed)
    batches = pipeline.iterate(workers=1, on_batch=on_batch)
    assert_same(next(batches), pipeline[0])
    with pytest.raises(RuntimeError, match="no space"):
        next(batches)
    assert batches.position == pipeline.position(1)
    for step in (1, 2):
        assert_same(next(batches), pipeline[step])
    batches.close()


# Workers that end


def read_until_one_is_missed(
    pipeline: Pipeline, step: int, batches: BatchIterator
) -> tuple[int, WorkerDiedError]:
    """Reads from a step on, as far as was read ahead; returns the step of the error, and that."""
    for ahead in range(step, step + 6):
        try:
            batch = next(batches)
        except WorkerDiedError as error:
            return ahead, error
        assert_same(batch, pipeline[ahead])
    pytest.fail("no worker is missed")


@linux
def test_killed_worker_loses_and_repeats_no_batch() -> None:
    pipeline, generator = a_pipeline(summed, num_epochs=None), random.Random(3)
    batches = pipeline.iterate(workers=2)
    before, step = children(), 0
    for _ in range(2):
        assert_same(next(batches), pipeline[step])
        os.kill(generator.choice(sorted(children() - before)), signal.SIGKILL)
        step, error = read_until_one_is_missed(pipeline, step + 1, batches)
        assert error.exit_code == -signal.SIGKILL
        assert error.position == batches.position == pipeline.position(step)
        assert children() == before
    assert_same(next(batches), pipeline[step])
    batches.close()


@linux
@pytest.mark.parametrize("device", [None, jax.Device], ids=["no device", "device"])
def test_worker_killed_at_its_work_is_told_of(device: Any) -> None:
    pipeline = a_pipeline(functools.partial(asleep, unless=0), shuffle="none")
    before = children()
    batches = pipeline.iterate(workers=2, device=device and jax.devices("cpu")[0])
    batches.start_prefetch()
    next(batches)
    assert batches._workers is not None
    os.kill(batches._workers._workers[1].program.pid, signal.SIGKILL)  # it has the second one
    with pytest.raises(WorkerDiedError, match=r"killed by SIGKILL before .* offset 4, step 1"):
        next(batches)
    assert children() == before
    batches.close()


def held(batch: Batch, folder: str) -> Batch:
    """A transform that makes a file for each batch, and waits for another in the first."""
    row = batch["x"][0, 0] // 2
    pathlib.Path(folder, f"read-{row}").touch()
    while row == 0 and not pathlib.Path(folder, "go").exists():
        time.sleep(0.01)
    return batch


def ended(batch: Batch) -> Batch:
    """A transform that ends the process, where it comes to row 7."""
    if "r7" in batch["id"]:
        os._exit(3)
    return batch


def test_worker_that_ends_by_itself_is_told_of() -> None:
    pipeline = a_pipeline(ended, shuffle="none")
    batches = pipeline.iterate(workers=1)
    assert_same(next(batches), pipeline[0])
    with pytest.raises(WorkerDiedError, match="ended with exit code 3 before"):
        next(batches)
    assert batches.position == pipeline.position(1)
    batches.close()


def forked(batch: Batch) -> Batch:
    """A transform that leaves a process behind, which has inherited all that the worker had open."""
    if "r7" in batch["id"]:
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            time.sleep(PATIENCE_SECONDS)
            os._exit(0)
        batch["x"] = np.full_like(batch["x"], pid)
    return batch


@linux
def test_worker_is_missed_though_another_process_holds_its_connection() -> None:
    before = children()
    batches = a_pipeline(forked, shuffle="none", num_epochs=None).iterate(workers=1)
    next(batches)
    left = int(next(batches)["x"][0, 0])
    try:
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            collections.deque(batches, 0)
        wait_until(lambda: not is_running(left))  # it is of the worker's process group
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
        batches.close()


# Workers that are stopped


@linux
def test_stopped_worker_is_warned_of_and_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.reading.workers._LOOK_SECONDS", 0.01)
    pipeline, before = a_pipeline(summed, num_epochs=None), children()
    batches = pipeline.iterate(workers=1)
    assert_same(next(batches), pipeline[0])
    (worker,) = children() - before
    os.kill(worker, signal.SIGSTOP)

    class Continue(logging.Handler):
        """Continues the worker when the warning comes, before which it gives at most two batches."""

        def emit(self, record: logging.LogRecord) -> None:
            os.kill(worker, signal.SIGCONT)

    handler, log = Continue(logging.WARNING), logging.getLogger("loader.reading.workers")
    log.addHandler(handler)
    try:
        for step in range(1, 9):
            assert_same(next(batches), pipeline[step])
    finally:
        log.removeHandler(handler)
        batches.close()
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert f"worker process {worker} is stopped, and the next batch waits for it" in warning
    assert f"kill -CONT {worker}" in warning


# Nothing is left


def closed(batches: BatchIterator) -> None:
    batches.close()
    batches.close()


def dropped(batches: BatchIterator) -> None:
    del batches


def finished(batches: BatchIterator) -> None:
    assert sum(1 for _ in batches) > 0
    del batches


def failed(batches: BatchIterator) -> None:
    with pytest.raises(RecordReadError):
        next(batches)


@linux
@pytest.mark.parametrize("end", [closed, dropped, finished, failed])
def test_iterator_leaves_nothing(end: Callable[[BatchIterator], None]) -> None:
    pipeline = a_pipeline(bad=sendable if end is failed else no_error, shuffle="none")
    device = None if end in (failed, finished) else jax.devices("cpu")[0]
    next(pipeline.iterate(device=device)).clear()  # what is made once for the whole process
    before = Held()
    batches = pipeline.iterate(workers=2, device=device)
    next(batches)
    held = Held()
    assert len(held.children - before.children) == 2
    assert held.files - before.files
    assert held.memory - before.memory
    end(batches)
    del batches
    assert settled(before) == []


@linux
def test_close_does_not_wait_for_what_is_under_way() -> None:
    pipeline = a_pipeline(functools.partial(asleep, unless=0), shuffle="none")
    before = Held()
    for device in (None, jax.devices("cpu")[0]):
        batches = pipeline.iterate(workers=1, device=device)
        next(batches)  # the second is asleep for ten minutes, with a thread that waits for it
        batches.close()
    assert settled(before) == []


def maps_of(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/maps").read_text()


@linux
def test_workers_share_large_arrays_and_use_no_memory_with_a_name() -> None:
    source = ArraySource({"x": np.ones((1 << 16, 100), np.uint8)})
    before, own_maps = children(), maps_of(os.getpid()).count("/dev/shm")
    batches = Pipeline(source, PipelineConfig(1 << 12, 17, "pad")).iterate(workers=2)
    for _ in range(4):
        assert next(batches)["x"].all()
    workers = children() - before
    assert len(workers) == 2
    for pid in (os.getpid(), *workers):
        maps = maps_of(pid)
        assert "/memfd:regrain-batch (deleted)" in maps
        assert maps.count("/dev/shm") == (own_maps if pid == os.getpid() else 0)
    for pid in workers:
        _, shared = pathlib.Path(f"/proc/{pid}/smaps").read_text().split("/memfd:regrain-parcel")
        assert int(re.findall(r"^Size: +(\d+) kB", shared, re.MULTILINE)[0]) > 6400
        assert int(re.findall(r"^Anonymous: +(\d+) kB", shared, re.MULTILINE)[0]) == 0, "its own"
    batches.close()


@linux
@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_while_workers_start_leaves_none(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            started.append(self)
            if len(started) == number:
                os.kill(os.getpid(), signal.SIGINT)

    pipeline, before = a_pipeline(), Held()
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.iterate(workers=2).start_prefetch()
    assert started
    for process in started:
        assert process.returncode == -signal.SIGKILL
    del started[:], process
    assert settled(before) == []


@linux
def test_workers_started_and_closed_again_and_again_leave_nothing() -> None:
    pipeline, before = a_pipeline(), Held()

    def start_and_close() -> None:
        batches = pipeline.iterate(workers=2)
        batches.start_prefetch()
        batches.close()

    for _ in range(20):
        start_and_close()
        assert children() == before.children
    assert settled(before) == []


@linux
@pytest.mark.parametrize("device", [None, jax.Device], ids=["no device", "device"])
def test_workers_outlive_the_thread_that_started_them(device: Any) -> None:
    pipeline = a_pipeline(whose, num_epochs=None)
    batches = pipeline.iterate(workers=2, device=device and jax.devices("cpu")[0])
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(int(next(batches)["pid"][0])))
    thread.start()
    thread.join()
    found += [int(next(batches)["pid"][0]) for _ in range(7)]
    assert found == found[:2] * 4
    batches.close()


# Whole programs

HEAD: Final = """
import functools, os, sys, threading, time
import numpy as np
import loader

SOURCE = loader.ArraySource({"x": np.arange(8192).reshape(4096, 2)})
CONFIG = loader.PipelineConfig(4, 17, "pad", num_epochs=None)

def pids():
    tasks = os.listdir("/proc/self/task")
    found = [open(f"/proc/self/task/{task}/children").read() for task in tasks]
    return " ".join("".join(found).split())
"""


@contextlib.contextmanager
def program(folder: pathlib.Path, text: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A program in a process group of its own, of which the context's end leaves nothing."""
    path = folder / "program.py"
    path.write_text(HEAD + textwrap.dedent(text))
    running = subprocess.Popen(
        [sys.executable, path, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def said_by(running: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Waits for a program's end: exit code, output, errors."""
    output, errors = running.communicate(timeout=PATIENCE_SECONDS)
    return running.returncode, output, errors


def pids_from(running: "subprocess.Popen[str]") -> list[int]:
    assert running.stdout is not None
    line = running.stdout.readline()
    assert line, "" if running.stderr is None else running.stderr.read()
    return [int(pid) for pid in line.split()]


@linux
@pytest.mark.parametrize("moment", ["starting", "waiting", "working"])
def test_killed_program_leaves_no_worker(tmp_path: pathlib.Path, moment: str) -> None:
    text = """
        from tests.loader.test_workers import asleep
        transform = functools.partial(asleep, mark="mark") if sys.argv[1] == "working" else None
        batches = loader.Pipeline(SOURCE, CONFIG, transform).iterate(workers=2)
        batches.start_prefetch()
        if sys.argv[1] == "waiting":
            next(batches)
        print(pids(), flush=True)
        threading.Event().wait()
    """
    with program(tmp_path, text, moment) as running:
        workers = pids_from(running)
        assert len(workers) == 2
        if moment == "working":
            wait_until((tmp_path / "mark").exists)
        running.kill()
        running.wait()
        wait_until(lambda: not any(map(is_running, workers)))


@linux
@pytest.mark.parametrize("thread", ["main", "other"])
def test_killed_program_leaves_no_worker_that_is_still_importing(
    tmp_path: pathlib.Path, thread: str
) -> None:
    text = """
        batches = loader.Pipeline(SOURCE, CONFIG).iterate(workers=2)
        os.mkdir("first")
        with open("first/jax.py", "w") as file:  # workers import it in place of JAX, for ten minutes
            print("import os, time; open(f'begun-{os.getpid()}', 'w'); time.sleep(600)", file=file)
        sys.path.insert(0, os.path.abspath("first"))
        if sys.argv[1] == "main":
            batches.start_prefetch()
        else:
            starting = threading.Thread(target=batches.start_prefetch)
            starting.start()
            starting.join()
        print(pids(), flush=True)
        threading.Event().wait()
    """
    with program(tmp_path, text, thread) as running:
        workers = pids_from(running)
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == len(workers) == 2)
        running.kill()
        running.wait()
        wait_until(lambda: not any(map(is_running, workers)))


@linux
def test_killed_program_leaves_no_worker_that_is_stopped(tmp_path: pathlib.Path) -> None:
    text = """
        batches = loader.Pipeline(SOURCE, CONFIG).iterate(workers=1)
        next(batches)
        print(pids(), flush=True)
        threading.Event().wait()
    """
    with program(tmp_path, text) as running:
        (worker,) = pids_from(running)
        os.kill(worker, signal.SIGSTOP)
        running.kill()
        running.wait()
        wait_until(lambda: not is_running(worker))


@linux
def test_forked_process_neither_ends_the_workers_nor_keeps_them(tmp_path: pathlib.Path) -> None:
    text = """
        pipeline = loader.Pipeline(SOURCE, CONFIG)
        batches = pipeline.iterate(workers=1)
        next(batches)
        workers = pids()
        if (pid := os.fork()) == 0:
            sys.exit(0)  # as a program ends, with all that this brings
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for step in range(1, 6):
            assert next(batches)["id"].tolist() == pipeline.ids(step).tolist()
        assert workers == pids()
        if (pid := os.fork()) == 0:
            time.sleep(600)
        print(workers, pid, flush=True)
        threading.Event().wait()
    """
    with program(tmp_path, text) as running:
        worker, forked_process = pids_from(running)
        running.kill()
        running.wait()
        wait_until(lambda: not is_running(worker))
        assert is_running(forked_process)


@linux
@pytest.mark.parametrize("end", ["pass", "raise ValueError('of the loop')", "os._exit(0)"])
def test_program_that_ends_without_closing_leaves_no_worker(
    tmp_path: pathlib.Path, end: str
) -> None:
    text = f"""
        import jax
        kept = [
            loader.Pipeline(SOURCE, CONFIG).iterate(workers=1, device=device)
            for device in (None, jax.devices("cpu")[0])
        ]
        for batches in kept:
            next(batches)
        print(pids(), flush=True)
        {end}
    """
    with program(tmp_path, text) as running:
        workers = pids_from(running)
        assert len(workers) == 2
        code, _, errors = said_by(running)
        wait_until(lambda: not any(map(is_running, workers)))
    assert code == ("raise" in end)
    assert errors.count("Traceback") == ("raise" in end), errors
    assert ("ValueError: of the loop" in errors) == ("raise" in end)


@linux
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)]
)
def test_signal_to_all_processes_lets_a_run_save_and_end(
    tmp_path: pathlib.Path, number: signal.Signals, code: int
) -> None:
    text = """
        import checkpointing, signal
        pipeline = loader.Pipeline(SOURCE, CONFIG)
        with (
            checkpointing.Checkpoints("run", pipeline, 10**9, 1) as checkpoints,
            checkpoints.stop_on_signals([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]),
        ):
            run = checkpoints.resume({"w": np.zeros(2)}, workers=2)
            for batch in run.batches:
                if run.batches.position.step == 1:
                    print(pids(), flush=True)
                time.sleep(0.01)
                checkpoints.save(run.batches, run.train_state)
    """
    with program(tmp_path, text) as running:
        workers = pids_from(running)
        for pid in (running.pid, *workers):  # as a job's manager does
            os.kill(pid, number)
        found, _, errors = said_by(running)
        wait_until(lambda: not any(map(is_running, workers)))
    assert found == code
    assert "Traceback" not in errors
    steps = [path.name for path in (tmp_path / "run").iterdir() if path.name.isdecimal()]
    assert len(steps) == 1


def test_program_without_a_guard_is_told_so(tmp_path: pathlib.Path) -> None:
    text = """
        with open("started", "a") as file:
            print(os.getpid(), file=file)

        def doubled(batch):
            return {**batch, "x": 2 * batch["x"]}

        batches = loader.Pipeline(SOURCE, CONFIG, doubled).iterate(workers=2)
        print(next(batches)["x"].shape)
    """
    with program(tmp_path, text) as running:
        code, output, errors = said_by(running)
    assert (code, output) == (1, "")
    assert errors.count("Traceback (most recent call last)") == 2, (
        "of the program and in its worker"
    )
    assert "a worker process cannot start: RuntimeError: this is a worker process" in errors
    assert f"imports the program's main module, {tmp_path / 'program.py'}. Put all" in errors
    assert 'if __name__ == "__main__":' in errors
    assert 1 < len((tmp_path / "started").read_text().split()) <= 3


def test_program_with_a_guard_works_and_one_that_needs_none_too(tmp_path: pathlib.Path) -> None:
    text = """
        def doubled(batch):
            return {**batch, "x": 2 * batch["x"]}

        def first(transform):
            pipeline = loader.Pipeline(SOURCE, CONFIG, transform)
            batches = pipeline.iterate(workers=1)
            assert (next(batches)["x"] == pipeline[0]["x"]).all()
            batches.close()

        if sys.argv[1] == "guard":
            if __name__ == "__main__":
                first(doubled)
        else:
            first(None)
        print(__name__)
    """
    for guard, printed in (("guard", ["__mp_main__", "__main__"]), ("none", ["__main__"])):
        with program(tmp_path, text, guard) as running:
            code, output, errors = said_by(running)
        assert code == 0, errors
        assert output.split() == printed


def test_flags_of_a_program_are_its_own(tmp_path: pathlib.Path) -> None:
    text = """
        from absl import app, flags
        flags.DEFINE_integer("depth", 1, "how deep")

        def first():
            batches = loader.Pipeline(SOURCE, CONFIG).iterate(workers=1)
            next(batches)
            batches.close()

        def main(argv):
            first()
            print(flags.FLAGS.depth, argv[1:])

        if __name__ == "__main__":
            first()
            print(flags.FLAGS.is_parsed())
            app.run(main)
    """
    with program(tmp_path, text, "--depth=7", "rest") as running:
        code, output, errors = said_by(running)
    assert code == 0, errors
    assert output.splitlines() == ["False", "7 ['rest']"]
