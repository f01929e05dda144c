"""The benchmark's sections on costs do what they say: of resumes, saves, fingerprints and orders.

No test looks at how fast anything is.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import loader
from scripts.benchmarks import fingerprints, orders, resumes, resuming, saving
from scripts.benchmarks.resumes import Group, Setting, Way
from scripts.benchmarks.section import Section, Target

TINY: Final = Setting((0, 250, 1000), 9 * 10**11, 12_000, 3, 1, 0.0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for all temporary files, which have to be gone in the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def check(section: Section, name: str) -> dict[str, Any]:
    """The form that all sections have; returns the data as they come out of JSON."""
    assert section.name == name
    assert section.title
    assert all(section.conditions.values())
    for table in section.tables:
        assert table.rows
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert all(isinstance(cell, str) for cell in row)
    assert section.targets
    for target in section.targets:
        assert (target.got is None) == (target.met is None)
        assert target.why or target.met
    data: dict[str, Any] = json.loads(json.dumps(section.data, allow_nan=False))
    return data


def by_name(section: Section, words: str) -> Target:
    (found,) = [target for target in section.targets if words in target.name]
    return found


# --- resumes --------------------------------------------------------------------------------------


@pytest.mark.processes
def test_resumes_are_measured_at_every_position_or_have_a_word() -> None:
    section = resuming.measure(quick=True)
    data = check(section, "resuming")
    ours, deep = data["seconds"]["regrain"], str(9 * 10**11)
    for way in ("construct, resume", "iterate(start)", "ids(step)", "steps_of(id)"):
        assert {len(taken) for taken in ours[way].values()} == {resuming.QUICK.rounds}
        assert min(min(taken) for taken in ours[way].values()) > 0
        assert by_name(section, f"regrain, {way}: record").got is not None
    positions = [str(position) for position in resuming.QUICK.positions]
    assert sorted(ours["Checkpoints.resume"]) == sorted([*positions, deep])
    assert list(data["seconds"]["Grain"]["Grain per record: set_state"]) == positions
    for name, group in resumes.GROUPS.items():
        if all(importlib.util.find_spec(package) for package in group.packages):
            assert data["seconds"][name], data["words"]
        else:
            assert "not installed" in data["words"][name]
    assert len(section.tables[0].rows) >= len(resumes.GROUPS)


@pytest.mark.parametrize("name", ["construct, resume", "iterate(start)", "ids(step)"])
def test_each_way_comes_to_the_records_of_its_position(name: str, tmp_path: Path) -> None:
    way = resumes.make_ours(dataclasses.replace(TINY, positions=()), tmp_path)[name]
    (deep,) = way.positions
    with contextlib.ExitStack() as after:
        got = way.attempt(deep, after)()
    rows = loader.epoch_order(10**12, resumes.SEED, 0, start=deep, stop=deep + resumes.BATCH)
    assert got.tolist() == (2 * rows + 1).tolist() == way.due(deep).tolist()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)


def test_the_virtual_source_finds_its_records() -> None:
    source = resumes.Virtual(10**12)
    rows = np.array([0, 7, 10**12 - 1])
    assert source.rows_of(source.ids(rows)).tolist() == rows.tolist()
    assert source.rows_of(np.array([2])).tolist() == [-1]


def test_a_pass_takes_the_state_and_the_batch_of_each_position() -> None:
    class Counter:
        def __init__(self) -> None:
            self.done = 0

        def __iter__(self) -> Iterator[int]:
            for self.done in range(1, 100):
                yield self.done - 1

        def state_dict(self) -> int:
            return self.done

    states, batches = resumes.pass_over(Counter, (0, 500, 1000))
    assert states == {500: 2, 1000: 4}
    assert batches == {0: 0, 500: 2, 1000: 4}


def a_way(resume: Callable[[int], Any]) -> Way:
    return Way((0, 250), lambda position, _: lambda: resume(position), lambda position: [position])


def test_a_resume_to_other_records_is_found() -> None:
    assert list(resumes.one_round(a_way(lambda at: [at]), backwards=False)) == [0, 250]
    assert list(resumes.one_round(a_way(lambda at: [at]), backwards=True)) == [250, 0]
    with pytest.raises(resumes.WrongRecordsError, match="at 250 other records"):
        resumes.one_round(a_way(lambda at: [0] if at else [at]), backwards=False)


def test_what_is_to_be_closed_is_closed_behind_the_clock() -> None:
    closed: list[int] = []

    def attempt(position: int, after: contextlib.ExitStack) -> Callable[[], Any]:
        after.callback(closed.append, position)
        return lambda: [len(closed)]

    assert resumes.timed_resume(Way((0,), attempt, lambda _: [0]), 0) > 0
    assert closed == [0]


def run_here(
    group: Group, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> resuming.Result:
    """What the parent finds of a group that is served by a thread of this process."""
    monkeypatch.setitem(resumes.GROUPS, "planted", group)
    monkeypatch.setattr(resumes, "_stay_in", lambda folder: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        arguments = ("planted", setting, tmp_path, theirs)
        server = threading.Thread(target=resumes.serve, args=arguments)
        server.start()
        _, words = resuming.answer(ours)
        result = resuming.Result({}, words)
        if not words:
            result = resuming.run_group("planted", ours, setting)
        server.join(60)
    assert not server.is_alive()
    return result


def test_rounds_end_with_their_number_or_their_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Group(lambda *_: {"good": a_way(lambda at: [at])})
    for setting, rounds in ((TINY, 1), (dataclasses.replace(TINY, seconds=600.0), 3)):
        result = run_here(group, setting, monkeypatch, tmp_path)
        assert result.words == ""
        assert {at: len(taken) for at, taken in result.windows["good"].items()} == {
            0: rounds,
            250: rounds,
        }


def test_who_fails_gets_a_word_and_keeps_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Group(lambda *_: {"good": a_way(lambda at: [at]), "bad": a_way(lambda _: [1])})
    result = run_here(group, TINY, monkeypatch, tmp_path)
    assert result.words == "bad: WrongRecordsError: at 0 other records came than without a stop"
    assert list(result.windows) == ["good"]

    def fails(*_: object) -> Any:
        raise OSError("no room")

    assert run_here(Group(fails), TINY, monkeypatch, tmp_path).words == "planted: OSError: no room"
    absent = Group(lambda *_: {}, ("no_such_package",))
    assert "No module named" in run_here(absent, TINY, monkeypatch, tmp_path).words
    assert resuming.missing(["json", "no_such_package"]) == ["no_such_package"]


def test_a_process_that_gives_no_answer_gets_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(resuming, "_LIMIT_SECONDS", 0)
    with ours:
        assert resuming.answer(ours) == (None, "no answer in 0 s")
        theirs.close()
        assert resuming.answer(ours) == (None, "its process ended")


@pytest.mark.parametrize(
    ("records", "text"),
    [(0, "0"), (10**7, "10,000,000"), (9 * 10**11, "9 x 10^11"), (10**12, "10^12")],
)
def test_a_depth_is_short(records: int, text: str) -> None:
    assert resuming.depth(records) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), ([5.5e-5], "0.055"), ([0.0212], "21.2"), ([1.234], "1,234")]
)
def test_milliseconds_have_the_digits_that_mean_something(
    seconds: list[float] | None, text: str
) -> None:
    assert resuming.milliseconds(seconds) == text


# --- saves ----------------------------------------------------------------------------------------


def test_saves_are_measured_in_turn_and_leave_nothing() -> None:
    section = saving.measure(quick=True)
    data = check(section, "saving")
    for size, rounds in saving.QUICK.items():
        found = data[str(size)]
        for seconds in (found["blocking"], found["total"]):
            assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys(
                saving.CONTENDERS, rounds
            )
        for name in saving.CONTENDERS:
            for blocking, total in zip(found["blocking"][name], found["total"][name], strict=True):
                assert 0 < blocking <= total
    assert by_name(section, "blocking time of a save of 200 MB").met is None
    assert by_name(section, "iterator and manifest").met
    assert "fsync" in section.conditions["what ours does more"]


def test_the_manifest_has_as_many_marks_as_there_can_be() -> None:
    marks = saving.make_pipeline().fingerprint().marks
    more = loader.ArraySource({"x": np.arange(100_000)}).fingerprint().marks
    assert len(marks) >= len(more)
    assert len(marks) == 2048 * 12


def test_ours_is_held_against_the_faster_form_of_the_other() -> None:
    one, other = saving.PLAIN
    seconds = {saving.OURS: [2.0, 8.0], one: [9.0, 1.0], other: [4.0, 4.0]}
    assert saving.against_faster(seconds) == (other, [0.5, 2.0])


@pytest.mark.parametrize("size", [1000, 10**6])
def test_a_train_state_has_its_size(size: int) -> None:
    arrays = saving.make_train_state(size).values()
    assert 0.9 * size <= sum(array.nbytes for array in arrays) <= size
    assert saving.in_bytes(size) == {1000: "1 KB", 10**6: "1 MB"}[size]


# --- fingerprints ---------------------------------------------------------------------------------


def test_fingerprints_are_measured_from_memory_and_from_a_file() -> None:
    section = fingerprints.measure(quick=True)
    data = check(section, "fingerprints")
    storages = [fingerprints.MEMORY, fingerprints.WARM]
    storages += [fingerprints.COLD] if hasattr(os, "posix_fadvise") else []
    assert list(data["bytes_per_second"]) == storages
    for of in data["bytes_per_second"].values():
        assert list(of) == list(fingerprints.contenders())
        assert all(len(values) == fingerprints.QUICK.rounds for values in of.values())
        assert all(min(values) > 0 for values in of.values())
    assert len(section.targets) == len(storages)


def test_the_file_holds_what_is_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    fingerprints.write_images(path, 1000)
    held = np.load(path)
    opened = [fingerprints.mapped(path)]
    if hasattr(os, "posix_fadvise"):
        opened.append(fingerprints.cold(path))
    for images in opened:
        assert isinstance(images, np.memmap)
        assert fingerprints.our_digest(images) == fingerprints.our_digest(held)
    path.unlink()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_sha256_alone_sees_every_byte_once(threads: int) -> None:
    images = np.arange(10 * 784, dtype=np.uint8).reshape(10, 784)
    digests = fingerprints.sha256_alone(images, threads)
    assert len(digests) == 64 * threads
    for row in range(len(images)):
        changed = images.copy()
        changed[row, -1] ^= 1
        differing = [
            i
            for i in range(0, len(digests), 64)
            if digests[i : i + 64] != fingerprints.sha256_alone(changed, threads)[i : i + 64]
        ]
        assert len(differing) == 1


def test_a_digest_that_changes_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    monkeypatch.setattr(
        fingerprints, "contenders", lambda: {"fickle": lambda images: str(next(calls))}
    )
    with pytest.raises(RuntimeError, match="fickle gave 1, and before 0"):
        fingerprints.measure_storage(lambda: np.zeros((1, 784), np.uint8), fingerprints.QUICK)


# --- orders ---------------------------------------------------------------------------------------


def test_orders_are_measured_in_blocks_alone_and_in_memory() -> None:
    section = orders.measure(quick=True)
    data = check(section, "orders")
    rates = data["positions_per_second"]
    assert list(rates) == [f"{shuffle} {n}" for shuffle, n in orders.STREAMS]
    assert all(len(of) == orders.QUICK.rounds and min(of) > 0 for of in rates.values())
    assert {name: len(of) for name, of in data["call_seconds"].items()} == {
        orders.CALL: orders.QUICK.calls,
        orders.NEW_EPOCH: orders.QUICK.calls,
        orders.GATHER: orders.QUICK.calls,
    }
    assert by_name(section, "peak memory of a pass").met
    assert data["peak_bytes"]["permutation 1000000 batch 256"] > 10**6
    assert data["kept_bytes"]["1000000"]["first"] < data["kept_bytes"]["1000000"]["last"]
    assert list(section.tables[0].rows[-1]) == ["permutation", "10^12", "does not fit", "", ""]


def test_a_window_asks_for_each_position_of_its_epochs_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def order(n: int, seed: int, epoch: int, shuffle: str, start: int, stop: int) -> range:
        asked.append((epoch, start, stop))
        return range(start, stop)

    monkeypatch.setattr(loader, "epoch_order", order)
    assert orders.window_rate("feistel", 20_000, 40_000, first_epoch=5) > 0
    assert asked == [(5, 0, 16_384), (5, 16_384, 20_000), (6, 0, 16_384), (6, 16_384, 20_000)]
    asked.clear()
    orders.window_rate("permutation", 20_000, 30_000, first_epoch=0)
    assert asked == [(0, 0, 20_000), (1, 0, 20_000)]
