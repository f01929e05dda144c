"""Numbered tasks on several threads: results in order, the error of the first that fails, no thread left."""

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

_Result = TypeVar("_Result")


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "process_cpu_count"):  # from Python 3.13 on
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(
    work: "Callable[[int, Crew[_Result]], _Result]", count: int, threads: int
) -> list[_Result]:
    """Does ``work(number, crew)`` for each number below ``count``, on the calling thread and others.

    Numbers are begun in order. After a failure none is begun any more, and those before it are
    finished: whichever thread was faster, the error is that of the first number that fails.

    Args:
      work: takes a number, and the `Crew` that does it.
      count: how many.
      threads: how many threads work, the calling one among them; with 1 no other is started.

    Returns:
      A result for each number, in order, once all other threads have ended.

    Raises:
      Exception: that of the first number that failed, once all other threads have ended; so too a
        KeyboardInterrupt, for which no further number is finished.
    """
    crew = Crew(work, count)
    if threads > 1 and count > 0:
        crew.work_with(threads - 1)
    else:
        crew.work()
    return crew.results()


class Stopped(Exception):  # noqa: N818 (it is no error: another task's error ends this one)
    """A task that need not be finished, because one before it has failed."""


class Crew(Generic[_Result]):
    """The threads that work on one call of `in_order`."""

    def __init__(self, work: "Callable[[int, Crew[_Result]], _Result]", count: int) -> None:
        self._work: Final = work
        self._lock: Final = threading.Lock()
        self._next, self._end = 0, count
        self._results: Final[dict[int, _Result]] = {}
        self._errors: Final[dict[int, Exception]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def check(self, number: int) -> None:
        """Raises `Stopped` where the task of this number need not be finished."""
        if number >= self._end:
            raise Stopped

    def share(self, jobs: Iterable[Callable[[], None]], threads: int) -> None:
        """Does parts of a task, on so many threads if there is no task left for the other ones."""
        waiting = collections.deque(jobs)

        def help_out() -> None:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                job()

        idle = self._pool if self._next >= self._end else None
        helpers = _started(idle, help_out, threads - 1)
        help_out()
        for helper in helpers:
            if not helper.cancel():  # else no thread was free, and nothing is left to do
                helper.result()

    def work_with(self, others: int) -> None:
        """Works together with other threads, until there is nothing left to do."""
        with ThreadPoolExecutor(others, "loader") as self._pool:
            try:
                started = _started(self._pool, self.work, min(others, self._end - 1))
                self.work()
                for other in started:
                    other.result()
            finally:
                self._stop_from(0)  # has an effect only where this thread was interrupted

    def work(self) -> None:
        """Does one task after another, until there is none left."""
        while (number := self._take()) is not None:
            try:
                self._results[number] = self._work(number, self)
            except Stopped:
                return
            except Exception as error:  # noqa: BLE001 (`results` raises it)
                self._errors[number] = error
                self._stop_from(number)
            except BaseException:
                self._stop_from(0)
                raise

    def results(self) -> list[_Result]:
        """The result of each task, or the error of the first that failed."""
        if not self._errors:
            return [self._results[number] for number in sorted(self._results)]
        first = self._errors.pop(min(self._errors))
        self._errors.clear()  # an error holds the frames that it came through, and they this crew
        try:
            raise first
        finally:
            del first

    def _take(self) -> int | None:
        with self._lock:
            if self._next >= self._end:
                return None
            self._next += 1
            return self._next - 1

    def _stop_from(self, number: int) -> None:
        with self._lock:
            self._end = min(self._end, number)


def _started(
    pool: ThreadPoolExecutor | None, what: Callable[[], None], count: int
) -> list[Future[None]]:
    started: list[Future[None]] = []
    if pool is not None:
        # At the interpreter's exit, or at the system's limit, there are no more threads to be had;
        # those there are do it all.
        with contextlib.suppress(RuntimeError):
            started.extend(pool.submit(what) for _ in range(count))
    return started
