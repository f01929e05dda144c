"""What an iterator says it has delivered is what came, and saying so changes nothing."""

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader import (
    ArraySource,
    GrainStream,
    Mixture,
    Pipeline,
    PipelineConfig,
    Position,
    ReadOptions,
    StreamStats,
)
from loader.reading import iterator as pipeline_module
from loader.reading import stats as stats_module
from loader.reading.stats import Amount, amount_of

N = 23
THREADS = ReadOptions(num_threads=2, prefetch_buffer_size=3)


class Fragile(ArraySource):
    """A source of which every fifth record cannot be read."""

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        if (rows % 5 == 3).any():
            raise OSError(f"one of rows {rows} is gone")
        return super().read(rows)


def source(ids: Any = None, kind: type[ArraySource] = ArraySource) -> ArraySource:
    return kind({"x": np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)}, ids)


def pipeline(transform: Any = None, of: Any = None, **settings: Any) -> Pipeline:
    usual: dict[str, Any] = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 2}
    return Pipeline(of or source(), PipelineConfig(**(usual | settings)), transform)


def mixture() -> Mixture:
    return Mixture({"a": pipeline(), "b": pipeline(seed=2)}, {"a": 2, "b": 1})


def chain() -> GrainStream:
    elements = [{"id": i, "x": np.float32(i)} for i in range(N)]
    dataset = grain.MapDataset.source(elements).shuffle(seed=3).batch(4)
    return GrainStream(dataset, fingerprint=loader.fingerprint(source()))


def wider(batch: dict[str, Any]) -> dict[str, Any]:
    """A field whose size is another one in each batch."""
    return {**batch, "y": np.zeros((len(batch["id"]), int(batch["id"][0]) % 7), np.int8)}


class Clock:
    """A clock that is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        for module in (stats_module, pipeline_module):
            patch.setattr(module, "perf_counter_ns", lambda: int(self.seconds * 1e9))

    def transform(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One that takes a quarter of a second."""
        self.seconds += 0.25
        return batch


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes true in the next minute."""
    limit = time.monotonic() + 60
    while not holds() and time.monotonic() < limit:
        threading.Event().wait(0.002)
    return holds()


STREAMS: dict[str, Callable[[], Any]] = {
    "padded": pipeline,
    "partial": lambda: pipeline(final_batch="partial"),
    "texts": lambda: pipeline(of=source([f"record {i:{i % 5}}" for i in range(N)])),
    "excluded": lambda: pipeline(exclude=[3, 4, 19]),
    "bad": lambda: pipeline(of=source(kind=Fragile), on_bad_record="mask"),
    "keys": lambda: pipeline(record_keys=True),
    "transformed": lambda: pipeline(wider),
    "skipping": lambda: pipeline(skip=[(2, 4)]),
    "mixture": mixture,
    "grain": chain,
}
HOWS: dict[str, dict[str, Any]] = {
    "alone": {},
    "threads": {"read_options": THREADS},
    "device": {"device": True},
    "device and threads": {"device": True, "read_options": THREADS},
}


@pytest.mark.parametrize(
    ("name", "how"),
    # A Grain chain brings its elements to devices itself.
    [(name, how) for name in STREAMS for how in HOWS if name != "grain" or "device" not in how],
)
def test_counts_are_those_of_what_came(name: str, how: str) -> None:
    stream, options = STREAMS[name](), dict(HOWS[how])
    if "device" in options:
        options["device"] = jax.devices("cpu")[0]
    batches = stream.iterate(**options)
    on_host = iter(STREAMS[name]())  # whose bytes no device has narrowed
    assert batches.stats().batches == 0
    records = slots = size = 0
    for number, batch in enumerate(batches, 1):
        slots += len(batch["id"])
        records += int(np.sum(batch.get("mask", np.ones(len(batch["id"]), bool))))
        size += sum(array.nbytes for array in next(on_host).values())
        stats = batches.stats()
        assert (stats.step, stats.batches, stats.records) == (number, number, records)
        assert (stats.empty_slots, stats.bytes) == (slots - records, size)
    assert batches.stats().records == records
    if name == "bad":
        assert batches.stats().bad_records == 2 * sum(row % 5 == 3 for row in range(N))
    batches.close()


@pytest.mark.parametrize("name", STREAMS)
def test_looking_moves_nothing(name: str) -> None:
    looked, other = iter(STREAMS[name]()), iter(STREAMS[name]())
    for expected in other:
        looked.stats()
        looked.stop_clock()
        batch = next(looked)
        np.testing.assert_equal(batch, expected)
        looked.stats()
        assert looked.get_state() == other.get_state()


def test_a_share_counts_its_own_records() -> None:
    stream = pipeline()
    shares = [stream.iterate(process_index=i, process_count=2) for i in range(2)]
    for share in shares:
        list(share)
    records = [share.stats().records or 0 for share in shares]
    assert sum(records) == 2 * N
    assert records[0] > records[1]  # padding is at the end


def test_counts_go_on_behind_an_error_and_a_jump() -> None:
    stream = pipeline(of=source(kind=Fragile))
    batches = stream.iterate()
    assert batches.stats().batches == 0
    with pytest.raises(loader.RecordReadError):
        list(batches)
    before = batches.stats()
    assert before.batches == batches.position.step
    batches.set_state({"epoch": 2, "offset": 0, "step": 12})
    after = batches.stats()
    assert (after.step, after.batches, after.records) == (12, before.batches, before.records)


def test_the_clock_runs_from_the_first_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    batches = pipeline(clock.transform).iterate()
    clock.seconds += 100  # from opening to the loop: a compilation, say
    assert batches.stats().wall_s == 0
    assert batches.stats().records_per_s == batches.stats().wait_share == 0
    for _ in range(2):
        next(batches)
        clock.seconds += 0.75
    stats = batches.stats()
    assert (stats.wall_s, stats.wait_s, stats.wait_share) == (2.0, 0.5, 0.25)
    assert (stats.records_per_s, stats.batches_per_s, stats.bytes_per_s) == (4, 1, stats.bytes / 2)


def test_the_clock_stands_in_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    batches = pipeline(clock.transform).iterate()
    next(batches)
    for _ in range(2):
        batches.stop_clock()
        clock.seconds += 100
        assert batches.stats().wall_s == 0.25
    next(batches)
    assert batches.stats().wall_s == batches.stats().wait_s == 0.5


@pytest.mark.parametrize("how", ["end", "close"])
def test_the_clock_stands_at_the_end(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    batches = pipeline(clock.transform).iterate()
    if how == "end":
        list(batches)
    else:
        next(batches)
        batches.close()
    before = batches.stats()
    clock.seconds += 100
    assert batches.stats() == before
    assert before.wall_s == 0.25 * before.batches


def test_what_an_error_took_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def fail(batch: Any) -> Any:
        clock.transform(batch)
        raise ValueError("planted")

    batches = pipeline(fail, batch_size=1).iterate()
    with pytest.raises(loader.RecordReadError):
        next(batches)
    stats = batches.stats()
    assert stats.batches == 0
    assert stats.wait_s == stats.wall_s > 0


def test_a_window_is_what_came_since() -> None:
    batches = pipeline().iterate()
    looks = [batches.stats()]
    for batch in batches:
        del batch
        looks.append(batches.stats())
    windows = [later.since(earlier) for earlier, later in itertools.pairwise(looks)]
    total = looks[-1]
    assert [window.batches for window in windows] == [1] * 12
    assert sum(window.records or 0 for window in windows) == total.records
    assert sum(window.bytes for window in windows) == total.bytes
    assert sum(window.wall_s for window in windows) == pytest.approx(total.wall_s)
    assert windows[3].step == 4
    with pytest.raises(ValueError, match=r"12 batches in .* are not earlier than 0 in"):
        looks[0].since(total)


def test_json_holds_all_that_is_known() -> None:
    stats = StreamStats(7, 2, None, 1, 100, 0, 4.0, 1.0, ready=3, ready_limit=4)
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["wait_share"] == 0.25
    assert values["bytes_per_s"] == 25
    assert values["ready"] == 3
    assert not {"records", "records_per_s"} & values.keys()
    assert None not in values.values()
    batches = pipeline().iterate()
    next(batches)
    json.dumps(batches.stats().to_dict())


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        (
            StreamStats(300, 100, 25600, 0, 20_070_400, 0, 2.0, 0.01),
            "step 300: 100 batches in 2.0 s, 12.8k records/s, 10.0 MB/s, waited 0.5% for data",
        ),
        (
            StreamStats(300, 1, None, 0, 10, 2, 0.5, 0.5, 0, 4),
            "step 300: 1 batch in 500 ms, 20 B/s, waited 100.0% for data, 0 of 4 ready, 2 bad records",
        ),
    ],
)
def test_a_line_tells_it(stats: StreamStats, text: str) -> None:
    assert str(stats) == text


# What lies ready


def test_without_anybody_who_reads_ahead_nothing_is_said_of_it() -> None:
    batches = pipeline().iterate()
    assert (batches.stats().ready, batches.stats().ready_limit) == (None, None)
    assert iter(chain()).stats().ready is None


def test_what_threads_have_read_lies_ready() -> None:
    batches = pipeline(num_epochs=None).iterate(read_options=THREADS)
    assert (batches.stats().ready, batches.stats().ready_limit) == (0, 3)
    for _ in range(5):
        next(batches)
        assert eventually(lambda: batches.stats().ready == 3)
    batches.set_state(batches.get_state())
    assert batches.stats().ready == 0
    batches.close()


def test_what_threads_have_not_read_yet_does_not() -> None:
    held = threading.Event()

    def wait(batch: Any) -> Any:
        held.wait(60)
        return batch

    batches = pipeline(wait).iterate(read_options=THREADS)
    batches.start_prefetch()
    assert batches.stats().ready == 0
    held.set()
    assert eventually(lambda: batches.stats().ready == 3)
    batches.close()


def test_what_is_on_the_device_lies_ready() -> None:
    batches = pipeline().iterate(device=jax.devices("cpu")[0])
    assert (batches.stats().ready, batches.stats().ready_limit) == (0, 1)
    next(batches)
    assert eventually(lambda: batches.stats().ready == 1)
    list(batches)
    assert batches.stats().ready == 0
    batches.close()


# Of elements that are no batches of ours


@pytest.mark.parametrize(
    ("element", "amount"),
    [
        ({"id": 5, "x": np.zeros(2, np.float32)}, Amount(1, 0, 8)),
        ({"id": np.arange(3), "x": np.zeros((3, 2), np.int8)}, Amount(3, 0, 30)),
        ({"id": ["a", "b"], "x": {"y": np.zeros(2, np.int8)}}, Amount(2, 0, 2)),
        ({"mask": np.array([True, False]), "x": np.zeros(7, np.int8)}, Amount(2, 1, 9)),
        ({"id": np.arange(2), "mask": np.ones((2, 9), bool)}, Amount(2, 0, 34)),
        ({"id": np.arange(2), "mask": jnp.ones(2, bool)}, Amount(None, 0, 18)),
        ({"x": np.zeros(2, np.int8)}, Amount(None, 0, 2)),
        ((np.zeros(2, np.int8), 7), Amount(None, 0, 2)),
    ],
)
def test_an_element_tells_what_it_holds(element: Any, amount: Amount) -> None:
    assert amount_of(element) == amount


def test_elements_that_do_not_tell_make_no_count_of_records() -> None:
    dataset = grain.MapDataset.range(6).map(np.asarray)
    batches = GrainStream(dataset, fingerprint=loader.fingerprint(source())).iterate()
    list(batches)
    assert (batches.stats().records, batches.stats().records_per_s) == (None, None)
    assert (batches.stats().batches, batches.stats().bytes) == (6, 48)
    window = batches.stats().since(batches.stats())
    assert window.records is None


# The hook


@pytest.mark.parametrize("stream", [pipeline, mixture, chain])
@pytest.mark.parametrize("every", [1, 4, 5, 100])
def test_windows_cover_all_and_end_at_multiples(stream: Callable[[], Any], every: int) -> None:
    told: list[StreamStats] = []
    batches = stream().iterate(on_stats=told.append, stats_every=every)
    count = len(list(batches))
    with pytest.raises(StopIteration):
        next(batches)
    steps = sorted({*range(every, count + 1, every), count})
    assert [stats.step for stats in told] == steps
    assert sum(stats.batches for stats in told) == count
    assert sum(stats.records or 0 for stats in told) == batches.stats().records


def test_a_resumed_run_is_told_of_at_the_same_steps() -> None:
    told: list[StreamStats] = []
    start = Position(0, 12, 3)
    list(pipeline().iterate(start, on_stats=told.append, stats_every=5))
    assert [(stats.step, stats.batches) for stats in told] == [(5, 2), (10, 5), (12, 2)]


def test_what_the_hook_takes_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def tell(stats: StreamStats) -> None:
        clock.seconds += 10

    batches = pipeline(clock.transform).iterate(on_stats=tell, stats_every=1)
    list(batches)
    assert batches.stats().wait_s == 12 * 0.25
    assert batches.stats().wall_s == 12 * 0.25 + 12 * 10


def test_a_hook_that_fails_is_logged_once_and_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[int] = []

    def tell(stats: StreamStats) -> None:
        if 3 <= stats.step < 6:
            raise ConnectionError("the dashboard is away")
        told.append(stats.step)

    with caplog.at_level(logging.INFO, "loader.reading.stats"):
        batches = list(pipeline().iterate(on_stats=tell, stats_every=1))
    np.testing.assert_equal(batches, list(pipeline()))
    assert told == [1, 2, 6, 7, 8, 9, 10, 11, 12]
    failed, works = caplog.records
    assert failed.levelno == logging.WARNING
    assert failed.exc_info is not None
    assert "at step 3: ConnectionError: the dashboard is away. Training goes on" in failed.message
    assert works.levelno == logging.INFO
    assert works.message == "on_stats works again at step 6, after 3 failures"


def test_an_exit_from_the_hook_loses_no_batch() -> None:
    def leave(stats: StreamStats) -> None:
        raise SystemExit(3)

    batches = pipeline().iterate(on_stats=leave, stats_every=2)
    came = [next(batches), next(batches)]
    with pytest.raises(SystemExit):
        next(batches)
    assert batches.position.step == 2
    came += _rest(batches)
    np.testing.assert_equal(came, list(pipeline()))


def _rest(batches: Iterator[Any]) -> list[Any]:
    found = []
    while True:
        try:
            found.append(next(batches))
        except SystemExit:
            continue
        except StopIteration:
            return found


@pytest.mark.parametrize("stream", [pipeline, mixture, chain])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"on_stats": 3}, TypeError, "on_stats must be callable, not 3"),
        (
            {"on_stats": print, "stats_every": 0},
            ValueError,
            "stats_every must be at least 1, not 0",
        ),
        (
            {"on_stats": print, "stats_every": True},
            TypeError,
            "stats_every must be an integer, not True",
        ),
        (
            {"on_stats": print, "stats_every": 1.5},
            TypeError,
            "stats_every must be an integer, not 1.5",
        ),
    ],
)
def test_a_hook_that_cannot_be_is_refused(
    stream: Callable[[], Any], bad: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stream().iterate(**bad)


@pytest.mark.parametrize("parts", [("numbers", "names"), ("names", "numbers")])
def test_bytes_of_a_mixture_count_where_ids_of_one_part_are_strings(parts: tuple[str, str]) -> None:
    kinds = {"numbers": pipeline(), "names": pipeline(of=source([f"r{i:07}" for i in range(N)]))}
    mixed = Mixture({f"{i}": kinds[name] for i, name in enumerate(parts)}, {"0": 2, "1": 1})
    batches = mixed.iterate()
    came = sum(field.nbytes for batch in batches for field in batch.values())
    assert batches.stats().bytes == came


def test_a_clock_that_is_stopped_while_it_is_read_says_no_nonsense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = stats_module.Meter()
    meter.add_wait(time.perf_counter_ns())
    times = iter([5_000_000_000, 5_000_000_000])

    def now() -> int:
        """As if another thread had its turn just here."""
        monkeypatch.setattr(stats_module, "perf_counter_ns", lambda: next(times))
        meter.stop()
        return next(times)

    meter._clock = (0, 2_000_000_000)
    monkeypatch.setattr(stats_module, "perf_counter_ns", now)
    assert meter.stats(0).wall_s == 3.0


class Sized:
    """Has a size in bytes, as a function."""

    def nbytes(self) -> int:
        return 3


@pytest.mark.parametrize(
    "element",
    [{"a": 1, 2: 3}, {"id": 1, "x": Sized()}, {"id": [[1], [2, 3]]}],
    ids=["names of two kinds", "an object", "uneven IDs"],
)
def test_an_element_that_cannot_be_looked_at_is_delivered(element: Any) -> None:
    data = grain.MapDataset.source([0, 1]).map(lambda _: element)
    batches = GrainStream(data, fingerprint=source().fingerprint()).iterate()
    assert len(list(batches)) == 2
    stats = batches.stats()
    assert (stats.batches, stats.records, stats.bytes) == (2, None, 0)


@pytest.mark.parametrize("stream", [pipeline, chain])
def test_an_iterator_that_its_hook_closes_stays_closed(stream: Callable[[], Any]) -> None:
    batches: Any = stream().iterate(
        on_stats=lambda _: batches.close(), stats_every=2, read_options=THREADS
    )
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(ValueError, match="this iterator is closed"):
        next(batches)
