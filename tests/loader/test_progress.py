"""Long work tells how far it has come, to whoever watches and to the log, and does not depend on them."""

import functools
import itertools
import json
import logging
import math
import pathlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import loader
from loader import progress as progress_module
from loader.progress import Progress, Work, counted, watch_progress


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def told() -> Iterator[list[Progress]]:
    """What a watcher is told that wants to hear everything."""
    found: list[Progress] = []
    with watch_progress(found.append, every_s=0):
        yield found


def test_a_watcher_is_told_of_start_and_end_and_now_and_then_between(clock: Clock) -> None:
    found: list[Progress] = []
    with watch_progress(found.append, every_s=3), Work("reading", 100, "bytes") as work:
        for _ in range(10):
            clock.now += 1
            work.advance(10)
    assert [(one.done, one.seconds, one.ended) for one in found] == [
        (0, 0, False),
        (30, 3, False),
        (60, 6, False),
        (90, 9, False),
        (100, 10, True),
    ]
    assert len({one.number for one in found}) == 1
    assert found[2].per_second == 10
    assert found[2].seconds_left == 4


def test_two_watchers_are_told_each_in_its_time(clock: Clock) -> None:
    seldom: list[Progress] = []
    often: list[Progress] = []
    with (
        watch_progress(seldom.append, every_s=4),
        watch_progress(often.append, every_s=1),
        Work("reading", 8, "records") as work,
    ):
        for _ in range(8):
            clock.now += 1
            work.advance()
    assert [one.done for one in seldom] == [0, 4, 8, 8]
    assert [one.done for one in often] == [0, *range(1, 9), 8]


def test_behind_the_context_nobody_is_told(told: list[Progress]) -> None:
    inner: list[Progress] = []
    with watch_progress(inner.append), Work("one", 1, "files"):
        pass
    with Work("two", 1, "files"):
        pass
    assert {one.what for one in inner} == {"one"}
    assert {one.what for one in told} == {"one", "two"}


def test_two_pieces_of_work_have_two_numbers(told: list[Progress]) -> None:
    for _ in range(2):
        with Work("the same", 1, "files"):
            pass
    assert [one.number for one in told] == sorted(one.number for one in told)
    assert len({one.number for one in told}) == 2


def test_work_that_fails_is_over_too(told: list[Progress]) -> None:
    with pytest.raises(OSError, match="planted"), Work("reading", 4, "records") as work:  # noqa: PT012
        work.advance(3)
        raise OSError("planted")
    assert told[-1].ended
    assert str(told[-1]).startswith("reading: ended after 3 of 4 records, ")


def test_of_nothing_to_do_nothing_is_said(told: list[Progress]) -> None:
    with Work("digests of 0 of 3 files", 0, "bytes"):
        pass
    assert told == []


def test_counts_of_several_threads_add_up_and_come_one_at_a_time() -> None:
    found: list[int] = []
    inside = threading.Lock()

    def tell(progress: Progress) -> None:
        assert inside.acquire(blocking=False)
        found.append(progress.done)
        inside.release()

    with (
        watch_progress(tell, every_s=0),
        Work("reading", 4000, "records") as work,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(lambda _: work.advance(), range(4000)))
    assert found == [0, *range(1, 4001), 4000]


def test_parts_count_by_their_length(told: list[Progress]) -> None:
    assert list(counted(["ab", "c", ""], "parts", 3)) == ["ab", "c", ""]
    assert [one.done for one in told] == [0, 2, 3, 3, 3]


def test_the_log_is_told_every_ten_seconds_and_at_the_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Work("fingerprint of NpySource", 30_000_000_000, "bytes") as work:
        for _ in range(25):
            clock.now += 1
            work.advance(1_200_000_000)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        (
            "loader.progress",
            f"fingerprint of NpySource: {text}",
        )
        for text in (
            "12.0 GB of 30.0 GB, 1.20 GB/s, 15.0 s left",
            "24.0 GB of 30.0 GB, 1.20 GB/s, 5.0 s left",
            "30.0 GB in 25.0 s, 1.20 GB/s",
        )
    ]


def test_the_log_is_told_nothing_of_short_work(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Work("reading", 1, "files") as work:
        clock.now += 1.9
        work.advance()
    assert caplog.records == []


def test_a_watcher_that_fails_is_told_no_more_and_the_work_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[Progress] = []
    other: list[Progress] = []

    def fail(progress: Progress) -> None:
        calls.append(progress)
        raise ConnectionError("planted")

    with (
        watch_progress(fail, every_s=0),
        watch_progress(other.append, every_s=0),
        Work("reading", 2, "files") as work,
    ):
        work.advance()
        work.advance()
    assert len(calls) == 1
    assert [one.done for one in other] == [0, 1, 2, 2]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is not called again for this reading: ConnectionError: planted" in record.getMessage()


def test_an_interrupt_in_a_watcher_ends_the_work() -> None:
    def stop(progress: Progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        watch_progress(stop, every_s=0),
        Work("reading", 2, "files") as work,
    ):
        work.advance()


def test_a_watcher_that_works_itself_is_not_told_of_that() -> None:
    seen: list[str] = []

    def look(progress: Progress) -> None:
        seen.append(progress.what)
        assert len(seen) < 9
        with Work("a look of its own", 1, "records") as own:
            own.advance()

    with watch_progress(look), Work("the work", 1, "records") as work:
        work.advance()
    assert set(seen) == {"the work"}


@pytest.mark.parametrize(
    ("every_s", "error"),
    [("5", TypeError), (None, TypeError), (math.nan, ValueError), (-1, ValueError)],
)
def test_a_time_between_calls_that_is_none_is_refused_at_once(
    every_s: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="every_s must be"), watch_progress(print, every_s=every_s):
        pass


def test_who_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="on_progress must be callable, not 'bar'"), _watch("bar"):
        pass


_watch: Any = watch_progress


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("audit", 0, 10, "batches", 0.0, 1), "audit: 0 of 10 batches, 0 batches/s"),
        (
            Progress("audit", 5, 10, "batches", 2.0, 1),
            "audit: 5 of 10 batches, 2 batches/s, 2.0 s left",
        ),
        (
            Progress("audit", 25_000, None, "batches", 2.0, 1),
            "audit: 25.0k batches, 12.5k batches/s",
        ),
        (
            Progress("audit", 12, None, "batches", 2.0, 1, ended=True),
            "audit: 12 batches in 2.0 s, 6 batches/s",
        ),
    ],
)
def test_a_line_tells_it(progress: Progress, text: str) -> None:
    assert str(progress) == text
    assert progress.seconds_left >= 0
    if progress.total is None or not progress.done:
        assert math.isinf(progress.seconds_left)


# All that reads much tells


def source(count: int = 40, ids: Any = None) -> loader.ArraySource:
    return loader.ArraySource({"x": np.arange(count * 2).reshape(count, 2)}, ids)


class Hashed:
    """A source whose IDs have to be looked for."""

    def __init__(self) -> None:
        self._sound = source(ids=[f"r{i}" for i in range(40)])
        self.fields = self._sound.fields

    def __len__(self) -> int:
        return len(self._sound)

    def ids(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._sound.ids(rows)

    def read(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._sound.read(rows)

    def fingerprint(self) -> loader.Fingerprint:
        return loader.fingerprint(self)


def pipeline(of: Any = None) -> loader.Pipeline:
    return loader.Pipeline(of or source(), loader.PipelineConfig(4, seed=3, final_batch="drop"))


def tokens(folder: pathlib.Path, **more: Any) -> loader.TokenSource:
    folder.mkdir(exist_ok=True)
    for name in "ab":
        np.arange(100, dtype="<u2").tofile(folder / f"{name}.bin")
    return loader.TokenSource(folder, window=4, **more)


def array_records(folder: pathlib.Path) -> loader.ArrayRecordSource:
    folder.mkdir()
    records: Any = [{"name": f"r{i % 7}{i}", "x": np.float32(i)} for i in range(20)]
    loader.write_array_record(folder / "a.array_record", records)
    return loader.ArrayRecordSource(folder, ids="name")


def parquet(folder: pathlib.Path) -> loader.ParquetSource:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    pq.write_table(pa.table({"x": list(range(9)), "y": list(range(9))}), folder / "a.parquet")
    return loader.ParquetSource(folder, ids="x")


WORK: dict[str, tuple[Callable[[pathlib.Path], Any], dict[str, tuple[int | None, str]]]] = {
    "a fingerprint": (
        lambda _: source().fingerprint(),
        {"fingerprint of ArraySource": (40 * 24, "bytes")},
    ),
    "a source of files": (
        lambda path: tokens(path / "t", documents=7),
        {
            "looking at the files in 't'": (2, "files"),
            "borders of documents in 't'": (400, "bytes"),
        },
    ),
    "digests of files": (
        lambda path: tokens(path / "t").fingerprint(),
        {"digests of 2 of 2 files in 't'": (400, "bytes")},
    ),
    "ArrayRecord with IDs of its own": (
        lambda path: array_records(path / "r"),
        {
            "opening the files in 'r'": (1, "files"),
            "reading the IDs": (20, "records"),
            "checking the IDs": (20, "records"),
            "looking for IDs that come twice": (20, "records"),
        },
    ),
    "Parquet": (lambda path: parquet(path / "p"), {"opening the files in 'p'": (1, "files")}),
    "a conversion": (
        lambda path: loader.write_npy(source(ids=np.arange(40) * 3), path / "n"),
        {
            "looking at the IDs": (40, "records"),
            "writing the IDs to 'n'": (40, "records"),
            "writing the records to 'n'": (40, "records"),
        },
    ),
    "an audit": (lambda _: loader.audit(pipeline()), {"audit": (10, "batches")}),
    "an audit of a mixture": (
        lambda _: loader.audit(
            loader.Mixture({"a": pipeline(), "b": pipeline()}, {"a": 2, "b": 1}), steps=9
        ),
        {"audit of 'a'": (6, "batches"), "audit of 'b'": (3, "batches")},
    ),
    "a check of a transform": (
        lambda _: loader.check_transform(pipeline(), 3, hash_seeds=(), threads=()),
        {"batches again": (3, "batches"), "batches in another order": (3, "batches")},
    ),
    "provenance by ID": (
        lambda _: loader.provenance(pipeline(Hashed())).steps_of("r7"),
        {"an index of the IDs": (40, "records")},
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_all_that_reads_much_tells(name: str, told: list[Progress], tmp_path: pathlib.Path) -> None:
    work, expected = WORK[name]
    work(tmp_path)
    by_number = {key: list(each) for key, each in itertools.groupby(told, lambda one: one.number)}
    found = {each[0].what: (each[0].total, each[0].unit) for each in by_number.values()}
    for what, total in expected.items():
        assert found[what] == total
    ends = [each[-1] for each in by_number.values()]
    assert all(one.ended and one.done == one.total for one in ends), ends


def test_an_audit_of_a_stream_without_end_knows_no_total(told: list[Progress]) -> None:
    config = loader.PipelineConfig(4, seed=3, final_batch="drop", num_epochs=None)
    endless = loader.Pipeline(source(), config)
    batches = itertools.islice(endless, 7)
    loader.audit_batches(batches, endless.source, config)
    assert (told[-1].done, told[-1].total) == (7, None)


def test_watching_changes_no_digest(told: list[Progress]) -> None:
    found = source().fingerprint()
    assert told
    with ThreadPoolExecutor(1) as pool:  # begun in another thread, whose work nobody watches
        told.clear()
        assert pool.submit(functools.partial(loader.fingerprint, source())).result() == found
    assert told == []
    assert json.dumps(found.to_dict())
