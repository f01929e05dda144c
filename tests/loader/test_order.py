"""The orders of an epoch: bijections, pure, pinned, and as random as NumPy's permutations.

Every random choice is seeded, so a test passes always or never. Thresholds are set such that each
check would reject true random permutations with a chance below FALSE_ALARM, had its seeds been
drawn afresh, and so each test with one below 1e-4; the bound used stands with each. Every statistic
is also shown to catch a planted bad order.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grain
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader import order
from loader.order import MAX_EPOCH, MAX_RECORDS, MAX_SEED, SHUFFLES, epoch_order, position_of

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
#: (num_records, seed, epoch) -> the whole order.
Maker = Callable[[int, int, int], Rows]

FALSE_ALARM: Final = 1e-5

#: The largest size of the exact permutation: from the next on, the network serves.
SWITCH: Final = order._EXACT_UP_TO
#: The size whose network is furthest from a square, 127 by 33: the short side hashes to little.
LEAST_SQUARE: Final = 4191
#: 4**k + 1: Grain 0.2.18 serves one record twice and another never.
GRAIN_FAILS: Final = (65_537, 262_145, 1_048_577)

sizes = st.one_of(
    st.integers(1, 2**40),
    st.integers(0, 40).map(lambda bits: 2**bits),
    st.integers(SWITCH - 2, SWITCH + 200),
    st.integers(MAX_RECORDS - 2**20, MAX_RECORDS),
)
seeds = st.integers(0, MAX_SEED)
epochs = st.one_of(st.integers(0, 100), st.integers(0, MAX_EPOCH))


def _forget() -> None:
    order._network.cache_clear()
    order._exact_permutation.cache_clear()


@contextlib.contextmanager
def planted(*, rounds: int = order._ROUNDS, exact_up_to: int = SWITCH) -> Iterator[None]:
    """Another network for a while; no key made for it outlives it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_ROUNDS", rounds)
        patch.setattr(order, "_EXACT_UP_TO", exact_up_to)
        _forget()
        try:
            yield
        finally:
            _forget()


def assert_bijection(rows: Rows, num_records: int) -> None:
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_records))


def digest(rows: Rows) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()


# Bijections, and their inverses


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(
    "num_records",
    [*range(1, 70), 1000, *range(SWITCH - 2, SWITCH + 6), 60_000, 65_535, 65_536, *GRAIN_FAILS],
)
def test_order_is_a_bijection_at_every_size(num_records: int, shuffle: str) -> None:
    assert_bijection(epoch_order(num_records, 17, 3, shuffle), num_records)


def test_network_is_a_bijection_at_every_small_size() -> None:
    """Below its range too: there the sides are least like squares, and most points are walked."""
    with planted(exact_up_to=0):
        for num_records in range(1, 400):
            rows = epoch_order(num_records, 17, 3)
            assert_bijection(rows, num_records)
            back = [position_of(int(row), num_records, 17, 3) for row in rows[:20]]
            assert back == list(range(len(back)))


def test_points_beyond_the_last_record_are_walked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: here half of the square, so that walks are long."""
    network = order._Network.of(101, 99, order._keys(5000, 17, 3, 8), 5000)
    monkeypatch.setattr(order, "_network", lambda *stream: network)
    rows = epoch_order(5000, 17, 3)
    assert_bijection(rows, 5000)
    assert [position_of(row, 5000, 17, 3) for row in rows[:500].tolist()] == list(range(500))


@pytest.mark.parametrize("num_records", GRAIN_FAILS[:1])
def test_bijection_check_catches_grains_shuffle(num_records: int) -> None:
    shuffle = functools.partial(
        grain.experimental.index_shuffle, max_index=num_records - 1, seed=17, rounds=4
    )
    rows = np.array([shuffle(position) for position in range(num_records)])
    with pytest.raises(AssertionError):
        assert_bijection(rows, num_records)


@given(sizes, seeds, epochs, st.data())
@example(MAX_RECORDS, MAX_SEED, MAX_EPOCH, None)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_feistel_order_is_a_bijection_by_sampling(
    num_records: int, seed: int, epoch: int, data: st.DataObject | None
) -> None:
    """From positions to rows and back, from rows to positions and back: one-to-one, and onto."""
    places = st.integers(0, num_records - 1)
    start = num_records - 1 if data is None else data.draw(places, label="start")
    stop = min(num_records, start + 300)
    rows = epoch_order(num_records, seed, epoch, "feistel", start, stop)
    assert rows.dtype == np.int64
    assert len(np.unique(rows)) == stop - start
    assert rows.min() >= 0
    assert rows.max() < num_records
    for offset in (0, len(rows) // 2, len(rows) - 1):
        assert position_of(int(rows[offset]), num_records, seed, epoch) == start + offset
    row = num_records - 1 if data is None else data.draw(places, label="row")
    position = position_of(row, num_records, seed, epoch)
    assert epoch_order(num_records, seed, epoch, "feistel", position, position + 1) == [row]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_records", [1, 2, 11, 300])
def test_position_of_is_the_inverse_of_every_kind(num_records: int, shuffle: str) -> None:
    rows = epoch_order(num_records, 17, 3, shuffle)
    back = [position_of(row, num_records, 17, 3, shuffle) for row in rows.tolist()]
    assert back == list(range(num_records))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_records", [SWITCH, SWITCH + 1, 60_000, 65_537])
def test_position_of_is_the_inverse_at_larger_sizes(num_records: int, shuffle: str) -> None:
    rows = epoch_order(num_records, 17, 3, shuffle)
    sample = [*range(0, num_records, num_records // 40), num_records - 1]
    assert [position_of(int(rows[i]), num_records, 17, 3, shuffle) for i in sample] == sample


# Stretches


@functools.cache
def _whole(num_records: int, shuffle: str) -> Rows:
    rows = epoch_order(num_records, 17, 3, shuffle)
    rows.flags.writeable = False
    return rows


block_borders = st.builds(
    lambda block, offset: max(0, block * order._BLOCK + offset),
    st.integers(0, 5),
    st.integers(-2, 2),
)
cuts = st.one_of(block_borders, st.integers(0, 70_000))


@given(
    st.sampled_from([1, 2, 11, SWITCH, SWITCH + 1, 60_000, 65_537]),
    st.sampled_from(SHUFFLES),
    st.tuples(cuts, cuts),
)
@example(65_537, "feistel", (0, 4 * order._BLOCK))
@example(65_537, "feistel", (4 * order._BLOCK, 65_537))
@settings(deadline=None, derandomize=True, max_examples=250)
def test_stretch_is_the_slice_of_the_whole(
    num_records: int, shuffle: str, ends: tuple[int, int]
) -> None:
    start, stop = sorted(min(end, num_records) for end in ends)
    rows = epoch_order(num_records, 17, 3, shuffle, start, stop)
    np.testing.assert_array_equal(rows, _whole(num_records, shuffle)[start:stop])


@given(
    st.sampled_from([SWITCH + 1, 10**12, MAX_RECORDS]),
    st.sampled_from(["feistel", "none"]),
    st.floats(0, 1),
    st.tuples(cuts, cuts),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_stretches_join_at_any_cut(
    num_records: int, shuffle: str, where: float, lengths: tuple[int, int]
) -> None:
    start = int((num_records - 1) * where)
    cut, stop = (min(num_records, start + length) for length in sorted(lengths))
    whole, head, tail = (
        epoch_order(num_records, 17, 3, shuffle, *ends)
        for ends in ((start, stop), (start, cut), (cut, stop))
    )
    np.testing.assert_array_equal(whole, np.concatenate([head, tail]))


@pytest.mark.parametrize("shuffle", ["feistel", "none"])
def test_empty_stretch_is_empty_at_both_ends_of_the_largest_epoch(shuffle: str) -> None:
    for end in (0, MAX_RECORDS):
        rows = epoch_order(MAX_RECORDS, 17, 3, shuffle, end, end)
        assert rows.shape == (0,)
        assert rows.dtype == np.int64


def test_stop_of_none_is_the_end() -> None:
    np.testing.assert_array_equal(epoch_order(11, 17, 0, start=8), epoch_order(11, 17, 0)[8:])


# What each kind is


@pytest.mark.parametrize(
    ("epoch", "rows"),
    [
        (0, [9, 10, 4, 1, 0, 7, 6, 8, 2, 5, 3]),
        (1, [4, 0, 5, 10, 6, 2, 1, 9, 7, 3, 8]),
    ],
)
def test_permutation_order_is_the_one_that_the_lesson_recorded(epoch: int, rows: list[int]) -> None:
    assert epoch_order(11, 17, epoch, "permutation").tolist() == rows


@given(st.integers(1, 5000), seeds, epochs)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_permutation_order_is_numpys_formula(num_records: int, seed: int, epoch: int) -> None:
    generator = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    np.testing.assert_array_equal(
        epoch_order(num_records, seed, epoch, "permutation"), generator.permutation(num_records)
    )


def test_order_of_none_is_the_order_of_the_source() -> None:
    assert epoch_order(11, 17, 3, "none").tolist() == list(range(11))
    last = epoch_order(MAX_RECORDS, 17, 3, "none", MAX_RECORDS - 2)
    assert last.tolist() == [MAX_RECORDS - 2, MAX_RECORDS - 1]


def test_feistel_is_the_default() -> None:
    np.testing.assert_array_equal(epoch_order(60, 17, 3), epoch_order(60, 17, 3, "feistel"))
    assert position_of(5, 60, 17, 3) == position_of(5, 60, 17, 3, "feistel")


#: sha256 of int64 little-endian rows. A run that stopped yesterday resumes by these: where one
#: changes, the order needs a new version and the old one has to stay readable. "permutation" is
#: NumPy's to change; the manifest's proof then refuses to resume, and this says why.
DIGESTS: Final = {
    ("feistel", 1): {
        (1, 0, 1): "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc",
        (2, 0, 2): "9d34149fbd1fe777eb238799054c8cbfbce372255f219f8740838def9bfd02db",
        (11, 0, 11): "0d16ae4a6caa0947763005df1fc52f76303f7550749f311cef0a07d880510e0c",
        (4_096, 0, 4_096): "4710f5d5ca994c5274aabcfe5e443a23944ac99d779909ea816e222550b8298a",
        (4_097, 0, 4_097): "67a3a70933f137191527c9fd042e06d7c57555c90b0a29e365d1acde951f152a",
        (60_000, 0, 60_000): "315473b9464b46141fcd47217228941df97262cfdf3cfefcd52d448ba9cf56e3",
        (10**12, 0, 1_000): "759e275a868fd4cb36e929486fbd9a9971ec0138097668b47568e8b4edb1ae28",
        (
            2**63,
            2**63 - 1000,
            2**63,
        ): "74caae04accef6679e39ad051418f56385e9af522352eef7404ff79f374d6cbb",
    },
    ("permutation", 1): {
        (1, 0, 1): "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc",
        (2, 0, 2): "9d34149fbd1fe777eb238799054c8cbfbce372255f219f8740838def9bfd02db",
        (11, 0, 11): "3b7bea89f30248b48cce3f207651cb6b7d4b49eedaba695a74f3d6c885c0a28b",
        (4_096, 0, 4_096): "09f3bc43b77760a955f83bc7a851aba3e75066f6271fef395a7350d6b90bd2ab",
        (4_097, 0, 4_097): "64b3e700170be346e4ae22249886f16498b1956c7d1be30334247cda487254a7",
        (60_000, 0, 60_000): "1afcb2746ffb9e9b2db1b13a8b1afa181a28df9be1ee470dcaa26a405dd9d43c",
    },
    ("none", 1): {
        (1, 0, 1): "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc",
        (2, 0, 2): "9d34149fbd1fe777eb238799054c8cbfbce372255f219f8740838def9bfd02db",
        (11, 0, 11): "2121328acdf4592d1d9250e74871207361b39ce2382e60fc303f79a02e5399e6",
        (4_096, 0, 4_096): "b83e23eb1db808bf694ae4894d62b50c9840bcd869ba7ac2456f40ddf0530bf3",
        (4_097, 0, 4_097): "7371197b696004f011c764848eaa47f336d0945fd3efe06b858dd947bb626d51",
        (60_000, 0, 60_000): "fe4e39bbf5e7508e2743343e541d967d3a36c5d8560d34e7e1d41073ece735ba",
        (10**12, 0, 1_000): "702746827e553786bb026ac120cb58745fef3d3f554c33891809001cc37639f0",
        (
            2**63,
            2**63 - 1000,
            2**63,
        ): "60f56a299e6ff046a07fab84bf312876c83c02ba851b87f3604596675b97a4c5",
    },
}


def test_every_version_has_its_digests() -> None:
    assert set(order.ORDER_VERSIONS.items()) <= set(DIGESTS)
    assert set(order.ORDER_VERSIONS) == set(SHUFFLES)


@pytest.mark.parametrize(
    ("kind", "stretch", "sha256"),
    [
        (kind, stretch, sha256)
        for kind, pinned in DIGESTS.items()
        for stretch, sha256 in pinned.items()
    ],
)
def test_order_is_the_one_pinned(
    kind: tuple[str, int], stretch: tuple[int, int, int], sha256: str
) -> None:
    shuffle, version = kind
    assert order.ORDER_VERSIONS[shuffle] == version
    num_records, start, stop = stretch
    assert digest(epoch_order(num_records, 17, 3, shuffle, start, stop)) == sha256


# Purity


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads change over as often as they can, so that a race shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


CALLS: Final = [
    (num_records, seed, epoch, shuffle, start, start + 40)
    for num_records, start in ((60, 13), (SWITCH + 1, 4000), (20_000, order._BLOCK - 20))
    for seed in (0, 1, 17)
    for epoch in (0, 1, 2)
    for shuffle in SHUFFLES
]


@pytest.mark.usefixtures("hasty_threads")
def test_order_depends_on_its_arguments_alone() -> None:
    """In any sequence and from several threads, though keys and small orders are kept."""
    _forget()
    first = [epoch_order(*call) for call in CALLS]
    shuffled = np.random.default_rng(0).permutation(len(CALLS) * 4) % len(CALLS)
    _forget()
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda i: epoch_order(*CALLS[i]), shuffled))
    for i, rows in zip(shuffled, again, strict=True):
        np.testing.assert_array_equal(rows, first[i])


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_records", [11, 20_000])
def test_result_is_the_callers_own(num_records: int, shuffle: str) -> None:
    stream = order.EpochOrder(num_records, 17, shuffle)
    makers: tuple[Callable[[], Rows], ...] = (
        lambda: epoch_order(num_records, 17, 3, shuffle, 2, 9),
        lambda: epoch_order(num_records, 17, 3, shuffle)[2:9],
        lambda: stream.rows(3, 2, 9),
    )
    for make in makers:
        rows = make()
        assert rows.dtype == np.int64
        assert rows.flags.writeable
        kept = rows.copy()
        rows[:] = -1
        for again in makers:
            assert not np.shares_memory(again(), rows)
            np.testing.assert_array_equal(again(), kept)


#: A stretch is worked on in blocks: their few arrays, and what Python itself takes.
WORKING_BYTES: Final = 12 * 8 * order._BLOCK + 2**16


def peak_bytes(call: Callable[[], object]) -> int:
    _forget()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("start", [0, 5 * 10**11, 10**12 - 2**18])
@pytest.mark.parametrize("length", [1, 256, 2**18])
def test_memory_is_that_of_the_stretch(start: int, length: int) -> None:
    def ask() -> None:
        epoch_order(10**12, 17, 3, "feistel", start, start + length)

    assert peak_bytes(ask) < 8 * length + min(12 * 8 * length + 2**16, WORKING_BYTES)


def test_memory_of_a_stream_and_of_the_inverse_stays_constant() -> None:
    stream = order.EpochOrder(10**12, 17, "feistel")

    def serve() -> None:
        for step in range(200):
            stream.rows(0, step * 256, (step + 1) * 256)

    assert peak_bytes(serve) < 2 * 8 * order._BLOCK + WORKING_BYTES
    assert peak_bytes(lambda: position_of(10**11, 10**12, 17, 3)) < 2**16


# The orders of one stream


@given(
    st.sampled_from([1, 11, SWITCH + 1, 40_000]),
    st.sampled_from(SHUFFLES),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), cuts), min_size=1, max_size=12),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_stream_serves_the_epochs_order_whatever_was_asked_before(
    num_records: int, shuffle: str, asked: list[tuple[int, float, int]]
) -> None:
    stream = order.EpochOrder(num_records, 17, shuffle)
    for epoch, where, length in asked:
        start = int(num_records * where)
        stop = min(num_records, start + length)
        rows = stream.rows(epoch, start, stop)
        assert rows.dtype == np.int64
        np.testing.assert_array_equal(
            rows, epoch_order(num_records, 17, epoch, shuffle, start, stop)
        )


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_stream_may_be_shared_by_threads(shuffle: str) -> None:
    num_records, batch = 40_000, 500
    stream = order.EpochOrder(num_records, 17, shuffle)
    wanted = {epoch: epoch_order(num_records, 17, epoch, shuffle) for epoch in (0, 1)}
    asked = [(epoch, start) for start in range(0, num_records, batch) for epoch in (0, 1)] * 3
    mixed = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]

    def served_rightly(where: tuple[int, int]) -> bool:
        epoch, start = where
        rows = stream.rows(epoch, start, start + batch)
        return np.array_equal(rows, wanted[epoch][start : start + batch])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(served_rightly, mixed))


class Raced(order.EpochOrder):
    """Another thread serves another epoch each time that one has looked at what is kept."""

    looks = 0
    _now: order._Kept

    @property
    def _kept(self) -> order._Kept:
        wrong = np.full(self._num_records, -1)
        kept, self._now = self._now, order._Kept(99, 0, self._num_records, wrong)
        self.looks += 1
        return kept

    @_kept.setter
    def _kept(self, kept: order._Kept) -> None:
        self._now = kept


@pytest.mark.parametrize("shuffle", ["feistel", "permutation"])
def test_stream_looks_once_at_what_threads_replace(shuffle: str) -> None:
    """The test above meets a race by luck, this one always."""
    stream = Raced(20_000, 17, shuffle)
    for start in (0, 500, 19_500):
        wanted = epoch_order(20_000, 17, 3, shuffle, start, start + 500)
        np.testing.assert_array_equal(stream.rows(3, start, start + 500), wanted)
        stream._kept = order._Kept(3, start, start + 500, wanted)
        np.testing.assert_array_equal(stream.rows(3, start, start + 500), wanted)
    assert stream.looks


class Counted:
    """Counts the positions that are made, and those asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int, int]] = []

        def counting(
            num_records: int, seed: int, epoch: int, shuffle: str, start: int, stop: int
        ) -> Rows:
            self.calls.append((epoch, start, stop))
            return epoch_order(num_records, seed, epoch, shuffle, start, stop)

        monkeypatch.setattr(order, "epoch_order", counting)


def test_a_batch_asked_for_on_its_own_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    stream = order.EpochOrder(10**12, 17, "feistel")
    asked = [(3, 10**11, 10**11 + 256), (3, 0, 256), (0, 512, 768), (1, 0, 256)]
    for epoch, start, stop in asked:
        stream.rows(epoch, start, stop)
    assert counted.calls == asked


def test_batches_that_follow_each_other_are_made_in_growing_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    num_records, size = 100_000, 300
    stream = order.EpochOrder(num_records, 17, "feistel")
    for epoch in (0, 1):
        for start in range(0, num_records, size):
            stream.rows(epoch, start, min(start + size, num_records))
    lengths = [stop - start for epoch, start, stop in counted.calls]
    whole = order._BLOCK // size * size
    assert lengths[:7] == [300, 600, 1200, 2400, 4800, 9600, whole]
    assert max(lengths) == whole
    assert sum(lengths) == 2 * num_records, "nothing is made twice"
    assert len(lengths) <= 6 + 2 * (1 + num_records // whole)


# The next permutation, made ahead


def order_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "regrain-order"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The epochs whose permutation is made, and by which thread."""
    calls: list[tuple[int, str]] = []
    make = order._numpy_permutation

    def counting(num_records: int, seed: int, epoch: int) -> Rows:
        calls.append((epoch, threading.current_thread().name))
        return make(num_records, seed, epoch)

    monkeypatch.setattr(order, "_numpy_permutation", counting)
    return calls


AHEAD_FROM: Final = order._AHEAD_FROM


@pytest.mark.parametrize("num_epochs", [3, None])
def test_each_permutation_is_made_once_and_the_next_one_ahead(
    num_epochs: int | None, made: list[tuple[int, str]]
) -> None:
    here = threading.current_thread().name
    stream = order.EpochOrder(AHEAD_FROM, 17, "permutation", num_epochs)
    for epoch in range(3):
        rows = [stream.rows(epoch, start, start + 256) for start in range(0, AHEAD_FROM, 256)]
        assert np.array_equal(
            np.concatenate(rows),
            np.random.default_rng(np.random.SeedSequence([17, epoch])).permutation(AHEAD_FROM),
        )
        for thread in order_threads():
            thread.join()
    ahead = [(1, "regrain-order"), (2, "regrain-order")] + [(3, "regrain-order")] * (not num_epochs)
    assert made == [(0, here), *ahead], "none after the last epoch"
    assert order_threads() == []


def test_permutation_made_ahead_that_is_not_asked_for_does_no_harm(
    made: list[tuple[int, str]],
) -> None:
    stream = order.EpochOrder(AHEAD_FROM, 17, "permutation")
    wanted = {e: epoch_order(AHEAD_FROM, 17, e, "permutation") for e in (0, 5)}
    for epoch in (0, 5, 0):
        rows = stream.rows(epoch, AHEAD_FROM - 9, AHEAD_FROM)
        assert np.array_equal(rows, wanted[epoch][-9:])
        assert np.array_equal(stream.rows(epoch, AHEAD_FROM - 9, AHEAD_FROM), rows)
    for thread in order_threads():
        thread.join()


def test_without_memory_for_two_permutations_each_is_made_when_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = order._numpy_permutation

    def short_of_memory(num_records: int, seed: int, epoch: int) -> Rows:
        if threading.current_thread().name == "regrain-order":
            raise MemoryError
        return make(num_records, seed, epoch)

    monkeypatch.setattr(order, "_numpy_permutation", short_of_memory)
    stream = order.EpochOrder(AHEAD_FROM, 17, "permutation")
    for epoch in (0, 1):
        rows = [stream.rows(epoch, start, start + 2**15) for start in range(0, AHEAD_FROM, 2**15)]
        assert np.array_equal(
            np.concatenate(rows), epoch_order(AHEAD_FROM, 17, epoch, "permutation")
        )
    for thread in order_threads():
        thread.join()


@pytest.mark.parametrize(
    ("num_records", "itemsize"), [(200, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 4)]
)
def test_permutation_is_kept_in_the_smallest_integer_type(num_records: int, itemsize: int) -> None:
    stream = order.EpochOrder(num_records, 17, "permutation")
    rows = stream.rows(0, 0, 100)
    assert rows.dtype == np.int64
    assert stream._kept.rows.itemsize == itemsize


# Arguments

GOOD: Final = {"num_records": 11, "seed": 17, "epoch": 0, "shuffle": "feistel"}

NOT_INTEGERS: Final = (True, np.True_, 3.0, np.float64(3), "3", None, [3], np.array([3]))
OUT_OF_RANGE: Final = (
    ("num_records", 0),
    ("num_records", -7),
    ("num_records", MAX_RECORDS + 1),
    ("seed", -7),
    ("seed", MAX_SEED + 1),
    ("epoch", -7),
    ("epoch", MAX_EPOCH + 1),
    ("shuffle", "random"),
    ("shuffle", "Feistel"),
    ("shuffle", ""),
    ("shuffle", None),
    ("shuffle", 3),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("num_records", "seed", "epoch", "start", "stop", "row")
        for value in NOT_INTEGERS
        if not (name == "stop" and value is None)  # the end of the epoch
    ],
    ids=repr,
)
def test_argument_that_is_no_integer_is_named(name: str, value: Any) -> None:
    call: Callable[..., object] = position_of if name == "row" else epoch_order
    with pytest.raises(TypeError) as error:
        call(**{**GOOD, name: value})
    assert name in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=repr)
def test_argument_out_of_range_is_named(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {**GOOD, name: value}
    calls: list[Callable[[], object]] = [
        lambda: epoch_order(**arguments),
        lambda: position_of(row=0, **arguments),
    ]
    if name != "epoch":
        calls.append(
            lambda: order.EpochOrder(
                arguments["num_records"], arguments["seed"], arguments["shuffle"]
            )
        )
    for call in calls:
        with pytest.raises(ValueError, match=name) as error:
            call()
        assert repr(value) in str(error.value)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(("start", "stop"), [(-3, 5), (0, 12), (7, 5), (12, 12), (5, -3)])
def test_positions_outside_the_epoch_are_named(start: int, stop: int, shuffle: str) -> None:
    with pytest.raises(ValueError, match=f"{start}:{stop} .* 11 records"):
        epoch_order(11, 17, 0, shuffle, start, stop)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("row", [-1, 11, 2**64])
def test_row_outside_the_source_is_named(row: int, shuffle: str) -> None:
    with pytest.raises(ValueError, match=f"row {row} .* 11 records"):
        position_of(row, 11, 17, 0, shuffle)


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_records", [100, 20_000])
def test_numpy_integers_are_integers(num_records: int, shuffle: str, integer: Any) -> None:
    seed, epoch, start, stop = (integer(value) for value in (17, 3, 2, 9))
    size = num_records if num_records > np.iinfo(integer).max else integer(num_records)
    rows = epoch_order(num_records, 17, 3, shuffle, 2, 9)
    np.testing.assert_array_equal(epoch_order(size, seed, epoch, shuffle, start, stop), rows)
    np.testing.assert_array_equal(order.EpochOrder(size, seed, shuffle).rows(3, 2, 9), rows)
    row = integer(5)
    position = position_of(row, size, seed, epoch, shuffle)
    assert type(position) is int
    assert position == position_of(5, num_records, 17, 3, shuffle)


# Seeds and epochs

CORNERS: Final = (0, 1, 2, 3, 17, 2**16, MAX_SEED - 1, MAX_SEED)


@pytest.mark.parametrize("shuffle", ["feistel", "permutation"])
@pytest.mark.parametrize("num_records", [100, 5000])
def test_no_two_seeds_and_epochs_share_an_order(num_records: int, shuffle: str) -> None:
    """Seed 0's epoch 1 is not seed 1's epoch 0, nor is an epoch cut to 32 bits."""
    late = (2**32, 2**32 + 1, MAX_EPOCH - 1, MAX_EPOCH)
    streams = itertools.product(CORNERS, (*CORNERS, *late))
    orders = [epoch_order(num_records, *stream, shuffle).tobytes() for stream in streams]
    assert len(set(orders)) == len(orders)


# Statistics: exact expectations


def chi_square_is_plausible(value: float, freedom: int, false_alarm: float = FALSE_ALARM) -> bool:
    """Neither too uneven nor too even.

    Laurent and Massart, "Adaptive estimation of a quadratic functional by model selection" (Annals
    of Statistics 2000), lemma 1: above d + 2 sqrt(d x) + 2 x, or below d - 2 sqrt(d x), with a
    chance of exp(-x) each.
    """
    x = math.log(2 / false_alarm)
    return (
        freedom - 2 * math.sqrt(freedom * x)
        <= value
        <= freedom + 2 * math.sqrt(freedom * x) + 2 * x
    )


def is_uniform(cells: Iterable[int], num_cells: int) -> bool:
    counts = np.bincount(np.fromiter(cells, np.int64), minlength=num_cells)
    expected = counts.sum() / num_cells
    assert expected >= 5  # where a chi-square is one
    return chi_square_is_plausible(
        float(((counts - expected) ** 2).sum() / expected), num_cells - 1
    )


def code(rows: Rows, num_records: int) -> int:
    """A number of the ordered selection ``rows`` out of ``num_records``, below n (n-1) (n-2) ..."""
    left = list(range(num_records))
    value = 0
    for row in rows.tolist():
        place = left.index(row)
        value = value * len(left) + place
        del left[place]
    return value


#: How to walk through streams: their (seed, epoch).
WALKS: Final[dict[str, Callable[[int], tuple[int, int]]]] = {
    "seeds": lambda i: (i, 0),
    "epochs": lambda i: (17, i),
    "diagonal": lambda i: (i, 10**6 - i),
}


def numpy_order(num_records: int, seed: int, epoch: int) -> Rows:
    """The reference. Its seed holds the size: NumPy's permutations of n and n + 1 are alike."""
    return np.random.default_rng([num_records, seed, epoch]).permutation(num_records)


def feistel_order(num_records: int, seed: int, epoch: int) -> Rows:
    return epoch_order(num_records, seed, epoch)


def permutation_order(num_records: int, seed: int, epoch: int) -> Rows:
    return epoch_order(num_records, seed, epoch, "permutation")


def naive_swaps(num_records: int, seed: int, epoch: int) -> Rows:
    """The classical wrong shuffle: each place swapped with any place, n**n ways to n! orders."""
    rows = np.arange(num_records)
    for i, j in enumerate(
        np.random.default_rng([seed, epoch]).integers(num_records, size=len(rows))
    ):
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def rotation(num_records: int, seed: int, epoch: int) -> Rows:
    shift = int(np.random.default_rng([seed, epoch]).integers(num_records))
    return np.roll(np.random.default_rng(5).permutation(num_records), shift)


def seed_plus_epoch(num_records: int, seed: int, epoch: int) -> Rows:
    return np.random.default_rng(seed + epoch).permutation(num_records)


def one_order_a_seed(num_records: int, seed: int, epoch: int) -> Rows:
    return np.random.default_rng(seed).permutation(num_records)


def one_order_an_epoch(num_records: int, seed: int, epoch: int) -> Rows:
    return np.random.default_rng(epoch).permutation(num_records)


def identity(num_records: int, seed: int, epoch: int) -> Rows:
    return np.arange(num_records)


def shuffle_buffer(num_records: int, seed: int, epoch: int) -> Rows:
    """What a buffer of an eighth of the records does: a row comes near its place."""
    noise = np.random.default_rng([seed, epoch]).random(num_records)
    return np.argsort(np.arange(num_records) + noise * num_records / 8)


def affine(num_records: int, seed: int, epoch: int) -> Rows:
    """A linear congruence: a bijection with one difference."""
    generator = np.random.default_rng([seed, epoch])
    factor = int(generator.integers(1, num_records))
    while math.gcd(factor, num_records) > 1:
        factor = factor % num_records + 1
    return (np.arange(num_records) * factor + int(generator.integers(num_records))) % num_records


def size_ignored(num_records: int, seed: int, epoch: int) -> Rows:
    """Rows by a hash that does not know how many there are: one record more changes nothing."""
    return np.argsort(np.random.default_rng([seed, epoch]).random(num_records))


def grain_order(num_records: int, seed: int, epoch: int) -> Rows:
    """Grain 0.2.18's `MapDataset.shuffle`."""
    shuffle = functools.partial(
        grain.experimental.index_shuffle, max_index=num_records - 1, seed=seed + epoch, rounds=4
    )
    return np.array([shuffle(position) for position in range(num_records)])


def small_orders_are_uniform(make: Maker, num_records: int, walk: str) -> bool:
    """The first five rows over all that they can be: at n <= 5 the whole order."""
    chosen = min(num_records, 5 if num_records <= 5 else 3)
    cells = math.perm(num_records, chosen)
    streams = map(WALKS[walk], range(max(20 * cells, 6000)))
    return is_uniform(
        (code(make(num_records, *stream)[:chosen], num_records) for stream in streams), cells
    )


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("num_records", [2, 3, 5, 11])
@pytest.mark.parametrize("make", [feistel_order, permutation_order])
def test_every_order_of_few_records_is_as_likely(make: Maker, num_records: int, walk: str) -> None:
    assert small_orders_are_uniform(make, num_records, walk)


@pytest.mark.parametrize("num_records", [3, 5, 11])
@pytest.mark.parametrize("fault", [naive_swaps, rotation, identity])
def test_uniformity_catches(fault: Maker, num_records: int) -> None:
    assert not small_orders_are_uniform(fault, num_records, "seeds")


#: (seed, epoch) of a neighbour of (seed, epoch).
NEIGHBOURS: Final[dict[str, tuple[int, int]]] = {
    "next epoch": (0, 1),
    "next seed": (1, 0),
    "next seed, epoch before": (1, -1),
}


def neighbours_are_independent(make: Maker, neighbour: str) -> bool:
    """All 36 pairs of orders of three records."""
    seed_step, epoch_step = NEIGHBOURS[neighbour]
    streams = itertools.product(range(60), range(1, 121))
    return is_uniform(
        (
            6 * code(make(3, seed, epoch), 3)
            + code(make(3, seed + seed_step, epoch + epoch_step), 3)
            for seed, epoch in streams
        ),
        36,
    )


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("make", [feistel_order, permutation_order])
def test_neighbouring_streams_are_independent(make: Maker, neighbour: str) -> None:
    assert neighbours_are_independent(make, neighbour)


@pytest.mark.parametrize(
    ("fault", "neighbour"),
    [
        (one_order_a_seed, "next epoch"),
        (one_order_an_epoch, "next seed"),
        (seed_plus_epoch, "next seed, epoch before"),
    ],
)
def test_independence_catches(fault: Maker, neighbour: str) -> None:
    assert not neighbours_are_independent(fault, neighbour)


#: Classes of records, as sources hold them: sorted, or in turn.
CLASSES: Final[dict[str, Callable[[Rows, int], Rows]]] = {
    "halves": lambda rows, n: rows * 2 // n,
    "ten sorted": lambda rows, n: rows * 10 // n,
    "odd and even": lambda rows, n: rows % 2,
    "ten in turn": lambda rows, n: rows % 10,
}


def batches_are_balanced(make: Maker, num_records: int, classes: str, orders: int) -> bool:
    """Counts of each class in each batch of 256: neither clustered nor spread more than by chance.

    With both margins given, Pearson's statistic times (N - 1) / N has mean (r - 1) (c - 1)
    exactly, and is a chi-square where counts are some tens, as here.
    """
    batch, total, freedom = 256, 0.0, 0
    for stream in map(WALKS["epochs"], range(orders)):
        labels = CLASSES[classes](make(num_records, *stream), num_records)
        kept = labels[: num_records // batch * batch].reshape(-1, batch)
        table = np.stack([(kept == label).sum(1) for label in range(labels.max() + 1)], 1)
        expected = table.sum(0) / len(table)
        scale = (table.sum() - 1) / table.sum()
        total += float(((table - expected) ** 2 / expected).sum()) * scale
        freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
    return chi_square_is_plausible(total, freedom)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("num_records", [SWITCH + 1, 60_000, 65_536, 65_537])
@pytest.mark.parametrize("make", [feistel_order, permutation_order])
def test_batches_hold_every_class_as_often_as_by_chance(
    make: Maker, num_records: int, classes: str
) -> None:
    assert batches_are_balanced(make, num_records, classes, orders=12)


@pytest.mark.parametrize("classes", ["halves", "odd and even"])
@pytest.mark.parametrize("orders", [1, 3])
def test_balance_catches_grains_shuffle(classes: str, orders: int) -> None:
    """At 65,536 every batch of Grain's order has 128 records of the first half, not 128 ± 8."""
    assert not batches_are_balanced(grain_order, 65_536, classes, orders)


@pytest.mark.parametrize("fault", [identity, shuffle_buffer, affine])
def test_balance_catches(fault: Maker) -> None:
    assert not batches_are_balanced(fault, 60_000, "ten sorted", orders=1)


def places_are_uniform(orders: Rows) -> bool:
    """Each row at each position, over many orders of n: int64[orders, n].

    The covariance of one order's n x n indicators is that of two crossed margins over (n - 1), so
    the sum below is a chi-square of (n - 1)**2 degrees of freedom.
    """
    count, n = orders.shape
    table = np.bincount((orders + n * np.arange(n)).ravel(), minlength=n * n)
    expected = count / n
    statistic = float(((table - expected) ** 2).sum() / expected) * (n - 1) / n
    return chi_square_is_plausible(statistic, (n - 1) ** 2)


def differences_are_uniform(orders: Rows, sides: tuple[int, int]) -> bool:
    """How a step in the network's square changes the row, over many orders: int64[orders, n].

    For each of the n - 1 steps from one point of the a x b square to another (modulo its sides),
    the step between their rows; a network of too few rounds has favourites, whatever its keys. Mean
    and variance of a count in one order are n / (n - 1) within 1e-3 of it, and the sums along both
    margins are given; a step and its opposite are one and the same count. So it is a chi-square of
    half of (n - 2)**2 degrees of freedom, scaled.
    """
    a, b = sides
    left, right = (side.reshape(-1, a, b) for side in np.divmod(orders, b))
    total = 0.0
    expected = len(orders) * a * b / (a * b - 1)
    for down, across in itertools.product(range(a), range(b)):
        if down or across:
            move = (-down, -across)
            steps = (np.roll(left, move, (1, 2)) - left) % a * b
            steps += (np.roll(right, move, (1, 2)) - right) % b
            counts = np.bincount(steps.ravel(), minlength=a * b)[1:]
            total += float(((counts - expected) ** 2).sum() / expected)
    scale = ((a * b - 2) / (a * b - 1)) ** 2 / 2
    return chi_square_is_plausible(total * scale, (a * b - 2) ** 2 // 2)


def orders_of(make: Maker, num_records: int, count: int) -> Rows:
    return np.stack([make(num_records, *WALKS["epochs"](i)) for i in range(count)])


# Of 64 records, eight by eight, a network has least to work with and shows most of its structure;
# what it serves has 4097 at least.
def test_network_over_few_records_is_uniform() -> None:
    with planted(exact_up_to=0):
        orders = orders_of(feistel_order, 64, 4000)
        assert sides_of(64) == (8, 8)
    assert places_are_uniform(orders)
    assert differences_are_uniform(orders, (8, 8))


def test_numpys_permutations_pass_for_uniform() -> None:
    orders = orders_of(numpy_order, 64, 4000)
    assert places_are_uniform(orders)
    assert differences_are_uniform(orders, (8, 8))


@pytest.mark.parametrize("rounds", [2, 4, 6])
def test_uniformity_of_differences_catches_a_network_of_fewer_rounds(rounds: int) -> None:
    with planted(exact_up_to=0, rounds=rounds):
        orders = orders_of(feistel_order, 64, 4000)
    assert not differences_are_uniform(orders, (8, 8))


@pytest.mark.parametrize("fault", [identity, naive_swaps, shuffle_buffer])
def test_uniformity_of_places_catches(fault: Maker) -> None:
    assert not places_are_uniform(orders_of(fault, 64, 4000))


#: Bins of a stretch of a vast epoch: what is looked at, of rows int64[length] below n.
VIEWS: Final[dict[str, Callable[[Rows, int], Rows]]] = {
    "row": lambda rows, n: rows,
    "difference": lambda rows, n: np.diff(rows) % n,
    "bend": lambda rows, n: (np.diff(rows[1:]) - np.diff(rows[:-1])) % n,
    "left": lambda rows, n: rows // sides_of(n)[1] * (n // sides_of(n)[0]),
    "right": lambda rows, n: rows % sides_of(n)[1] * (n // sides_of(n)[1]),
    "difference of right": lambda rows, n: (
        np.diff(rows % sides_of(n)[1]) % sides_of(n)[1] * (n // sides_of(n)[1])
    ),
}


def stretch_is_uniform(num_records: int, view: str, where: float, shuffle: str = "feistel") -> bool:
    """A thousand bins over a stretch in which a network's left half is one number throughout.

    Of a vast epoch, 10**5 positions come as if drawn with replacement: a multinomial.
    """
    start, bins = int(num_records * where), 1000
    rows = epoch_order(num_records, 17, 3, shuffle, start, start + 10**5)
    seen = VIEWS[view](rows, num_records)
    return is_uniform((min(bins - 1, int(x) * bins // num_records) for x in seen.tolist()), bins)


@pytest.mark.parametrize("where", [0, 0.5])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("num_records", [10**12, 2**40 + 1, 2**62])
def test_stretch_of_a_vast_epoch_is_spread_as_by_chance(
    num_records: int, view: str, where: float
) -> None:
    assert stretch_is_uniform(num_records, view, where)


@pytest.mark.parametrize("view", VIEWS)
def test_spread_of_a_stretch_catches_the_order_of_the_source(view: str) -> None:
    assert not stretch_is_uniform(10**12, view, 0, "none")


@pytest.mark.parametrize("view", ["difference", "bend"])
def test_spread_of_a_stretch_catches_a_network_of_two_rounds(view: str) -> None:
    """The middle square's second differences are one number for all keys."""
    with planted(rounds=2):
        assert not stretch_is_uniform(10**12, view, 0)


# Statistics: beside NumPy's permutations


def sides_of(num_records: int) -> tuple[int, int]:
    rounds = order._network(num_records, 0, 0).rounds
    return int(rounds[0][1]), int(rounds[1][1])


def batch_of(num_records: int) -> int:
    return max(2, math.isqrt(num_records))


def repeats(values: Rows) -> int:
    return len(values) - int(np.count_nonzero(np.bincount(values - values.min())))


def unevenness(values: Rows) -> int:
    return int((np.bincount(values - values.min()) ** 2).sum())


def spread_over_batches(labels: npt.NDArray[Any]) -> float:
    batch = batch_of(len(labels))
    return float(labels[: len(labels) // batch * batch].reshape(-1, batch).sum(1).var())


def of_order(rows: Rows) -> dict[str, float]:
    """Numbers of one order that a random permutation spreads in its own way."""
    n = len(rows)
    a, b = sides_of(n)
    places = np.arange(n)
    steps, strides = np.diff(rows), rows[b:] - rows[:-b] if b < n else np.zeros(1, np.int64)
    ins, outs = np.divmod(places, b), np.divmod(rows, b)
    numbers: dict[str, float] = {
        "drift": float(places @ rows),
        "fixed points": int(np.count_nonzero(rows == places)),
        "ascents": int(np.count_nonzero(steps > 0)),
        "repeated differences": repeats(steps),
        "repeated bends": repeats(np.diff(steps)) if n > 2 else 0,
        "first half by batch": spread_over_batches(rows < n // 2),
        "low bit by batch": spread_over_batches(rows & 1),
        "tenths by batch": spread_over_batches(rows * 10 // n),
        # The left half of a network's input is what differs here, or bends.
        "repeated differences of the left": repeats(strides),
        "repeated bends of the left": repeats(strides[b:] - strides[:-b]) if n > 3 * b else 0,
    }
    for (i, entered), (j, left) in itertools.product(enumerate(ins), enumerate(outs)):
        name = f"{('left', 'right')[i]} in, {('left', 'right')[j]} out"
        numbers[name] = unevenness(entered * max(a, b) + left)
        numbers[f"{name}, difference"] = unevenness((entered - left) % max(a, b))
    return {name: float(value) for name, value in numbers.items()}


def of_two_orders(rows: Rows, others: Rows) -> dict[str, float]:
    """Numbers of two orders of the same records that independence spreads in its own way."""
    n, batch = len(rows), batch_of(len(rows))
    places, other_places = np.argsort(rows), np.argsort(others)
    return {
        "same places": float(np.count_nonzero(rows == others)),
        "correlation": float(rows @ others),
        "same shifts": float(repeats((places - other_places) % n)),
        "same batches": float(
            unevenness(places // batch * (n // batch + 1) + other_places // batch)
        ),
    }


def numbers_of(make: Maker, num_records: int, orders: int) -> dict[str, Values]:
    """Every number for each of ``orders`` streams: float64[orders] by name."""
    found: dict[str, list[float]] = {}
    for i in range(orders):
        seed, epoch = 2 * i, 1 + i % 3
        rows = make(num_records, seed, epoch)
        numbers = of_order(rows)
        relatives = {
            name: make(num_records, seed + seed_step, epoch + epoch_step)
            for name, (seed_step, epoch_step) in NEIGHBOURS.items()
        }
        longer = make(num_records + 1, seed, epoch)
        relatives["next size"] = longer[longer < num_records]
        for relative, others in relatives.items():
            for name, number in of_two_orders(rows, others).items():
                numbers[f"{name}, {relative}"] = number
        for name, number in numbers.items():
            found.setdefault(name, []).append(number)
    return {name: np.array(numbers) for name, numbers in found.items()}


def kolmogorov_smirnov(ours: Values, theirs: Values) -> float:
    """The largest distance between the distribution functions of two samples."""
    at = np.concatenate([ours, theirs])
    below = (np.searchsorted(np.sort(x), at, "right") / len(x) for x in (ours, theirs))
    return float(np.abs(np.subtract(*below)).max())


def told_apart(ours: dict[str, Values], theirs: dict[str, Values]) -> set[str]:
    """The numbers by which two samples of orders differ.

    Wei and Dudley, "Two-sample Dvoretzky-Kiefer-Wolfowitz inequalities" (Statistics and
    Probability Letters 2012): for two samples of m each, the distance is above d with a chance
    below e exp(-m d**2). Shared among the numbers, so that all of them together raise FALSE_ALARM.
    """
    found = set()
    for name, sample in ours.items():
        assert len(sample) == len(theirs[name])
        limit = math.sqrt(math.log(math.e * len(ours) / FALSE_ALARM) / len(sample))
        assert limit < 1  # or nothing could be found
        if kolmogorov_smirnov(sample, theirs[name]) > limit:
            found.add(name)
    return found


@pytest.mark.parametrize(
    ("num_records", "orders"),
    [
        *((small, 800) for small in (3, 5, 11)),
        *((middle, 400) for middle in (1000, SWITCH, SWITCH + 1, LEAST_SQUARE)),
        *((large, 70) for large in (60_000, 65_536, 65_537)),
    ],
)
def test_order_cannot_be_told_from_numpys(num_records: int, orders: int) -> None:
    ours = numbers_of(feistel_order, num_records, orders)
    assert told_apart(ours, numbers_of(numpy_order, num_records, orders)) == set()


@pytest.mark.parametrize(("num_records", "orders"), [(64, 3000), (1797, 600)])
def test_network_cannot_be_told_from_numpys(num_records: int, orders: int) -> None:
    with planted(exact_up_to=0):
        ours = numbers_of(feistel_order, num_records, orders)
    assert told_apart(ours, numbers_of(numpy_order, num_records, orders)) == set()


PAIRED: Final = ("same places", "correlation", "same shifts", "same batches")


def _every_neighbour_of(*kinds: str) -> set[str]:
    return {f"{kind}, {relative}" for kind in PAIRED for relative in kinds}


#: What has to be noticed of each wrong order, among all that is.
NOTICED: Final[dict[Maker, set[str]]] = {
    identity: {"fixed points", "ascents", "drift"},
    shuffle_buffer: {"drift", "first half by batch", "tenths by batch", "left in, left out"},
    affine: {
        "low bit by batch",
        "repeated differences",
        "repeated bends",
        "left in, right out",
        "left in, right out, difference",
    },
    rotation: {f"same shifts, {neighbour}" for neighbour in NEIGHBOURS},
    one_order_a_seed: _every_neighbour_of("next epoch"),
    one_order_an_epoch: _every_neighbour_of("next seed"),
    seed_plus_epoch: _every_neighbour_of("next seed, epoch before"),
    size_ignored: _every_neighbour_of("next size"),
}

#: The same for networks of few rounds.
NOTICED_OF_ROUNDS: Final = {
    2: {
        "left in, left out",
        "right in, left out",
        "right in, left out, difference",
        "right in, right out",
        "right in, right out, difference",
        "repeated differences",
        "repeated bends",
        "repeated bends of the left",
    },
    4: {"left in, left out, difference", "repeated differences of the left"},
}


@pytest.mark.parametrize("num_records", [64, 1797])
@pytest.mark.parametrize("fault", NOTICED)
def test_comparison_catches(fault: Maker, num_records: int) -> None:
    ours = numbers_of(fault, num_records, 100)
    assert told_apart(ours, numbers_of(numpy_order, num_records, 100)) >= NOTICED[fault]


@pytest.mark.parametrize("num_records", [64, 1797])
@pytest.mark.parametrize("rounds", NOTICED_OF_ROUNDS)
def test_comparison_catches_a_network_of_fewer_rounds(rounds: int, num_records: int) -> None:
    with planted(exact_up_to=0, rounds=rounds):
        ours = numbers_of(feistel_order, num_records, 300)
    assert told_apart(ours, numbers_of(numpy_order, num_records, 300)) >= NOTICED_OF_ROUNDS[rounds]


def test_every_number_compared_catches_something() -> None:
    compared = set(numbers_of(numpy_order, 64, 1))
    assert set().union(*NOTICED.values(), *NOTICED_OF_ROUNDS.values()) == compared
