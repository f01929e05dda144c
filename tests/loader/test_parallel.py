"""Numbered tasks on threads: the same results and the same error as one after another, and no thread left."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.reading.threads import Crew, Stopped, in_order, usable_cores

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 60  # longer than any thread waits here, but for a fault


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def times(work: Callable[[int], Any], count: int, threads: int) -> list[Any]:
    return in_order(lambda number, _: work(number), count, threads)


@given(st.integers(0, 30), st.integers(1, 8))
def test_results_come_in_order(count: int, threads: int) -> None:
    assert times(lambda number: number * 3, count, threads) == [3 * i for i in range(count)]


@given(st.sets(st.integers(0, 19), min_size=1), st.integers(1, 8))
def test_the_error_is_that_of_the_first_task_that_fails(failing: set[int], threads: int) -> None:
    def work(number: int) -> None:
        if number in failing:
            raise ValueError(f"task {number}")

    with pytest.raises(ValueError, match=f"^task {min(failing)}$"):
        times(work, 20, threads)


def test_the_error_is_that_of_the_first_task_also_if_a_later_one_fails_before() -> None:
    later_failed = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            assert later_failed.wait(SECONDS)
            raise ValueError("task 0")
        later_failed.set()
        raise ValueError("a later task")

    with pytest.raises(ValueError, match="task 0"):
        times(work, 5, 3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_after_a_failure_nothing_is_begun(threads: int) -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        times(work, 1000, threads)
    assert len(begun) <= threads


def test_a_task_after_one_that_failed_need_not_be_finished() -> None:
    begun, checked = threading.Event(), []

    def work(number: int, crew: Crew[None]) -> None:
        if number == 0:
            assert begun.wait(SECONDS)
            raise ValueError("task 0")
        begun.set()
        try:
            while True:
                crew.check(number)
        except Stopped:
            checked.append(number)
            raise

    with pytest.raises(ValueError, match="task 0"):
        in_order(work, 2, 2)
    assert checked == [1]


def test_one_thread_is_the_calling_one() -> None:
    assert set(times(lambda _: threading.get_ident(), 9, 1)) == {threading.get_ident()}


@pytest.mark.parametrize("threads", [2, 3])
def test_tasks_are_done_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads)
    assert len(times(lambda _: together.wait(SECONDS), threads, threads)) == threads


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("in_caller", [True, False])
def test_an_interrupt_ends_all(kind: type[BaseException], in_caller: bool) -> None:
    caller, together = threading.get_ident(), threading.Barrier(2)

    def work(number: int, crew: Crew[None]) -> None:
        together.wait(SECONDS)
        if (threading.get_ident() == caller) == in_caller:
            raise kind
        while True:
            crew.check(number)

    with pytest.raises(kind):
        in_order(work, 100, 2)


class Big:
    """Stands for what a task has read."""


def test_an_error_that_is_gone_keeps_nothing_alive() -> None:
    alive: weakref.WeakSet[Big] = weakref.WeakSet()

    def work(number: int) -> None:
        read = Big()
        alive.add(read)
        raise ValueError(number)

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            times(work, 5, 2)
        assert not alive
    finally:
        gc.enable()


# Parts of a task


@pytest.mark.parametrize(("threads", "helpers"), [(1, 4), (2, 1), (2, 4), (4, 4)])
def test_each_part_is_done_once(threads: int, helpers: int) -> None:
    def work(number: int, crew: Crew[list[int]]) -> list[int]:
        done: list[int] = []
        crew.share([functools.partial(done.append, part) for part in range(9)], helpers)
        return done

    for done in in_order(work, 6, threads):
        assert sorted(done) == list(range(9))


def test_parts_of_the_last_task_are_done_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def part() -> None:
        together.wait(SECONDS)

    in_order(lambda _, crew: crew.share([part] * 3, 3), 1, 3)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_part_that_fails_fails_the_task(threads: int) -> None:
    def fail() -> None:
        raise ValueError("a part")

    def work(_: int, crew: Crew[None]) -> None:
        crew.share([lambda: None, fail, lambda: None], 3)

    with pytest.raises(ValueError, match="a part"):
        in_order(work, 3, threads)


# Where there are no threads to be had


def test_without_threads_the_calling_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    assert set(times(lambda _: threading.get_ident(), 9, 4)) == {threading.get_ident()}


EXIT: Final = """
import atexit
from loader.reading.threads import in_order
atexit.register(lambda: print(in_order(lambda number, _: number, 5, 4)))
"""


@pytest.mark.processes
def test_it_works_at_the_interpreters_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["[0, 1, 2, 3, 4]", ""]


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such call here")
def test_usable_cores_are_those_that_the_process_may_run_on() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert usable_cores() == len(cores)
    code = "import os; os.sched_setaffinity(0, {%d}); from loader.reading.threads import usable_cores; print(usable_cores())"
    done = subprocess.run(
        [sys.executable, "-c", code % cores[-1]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1\n"
