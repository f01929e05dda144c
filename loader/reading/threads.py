"""Run numbered tasks on several threads: results in order, the first task's error, no thread left."""

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

_Result = TypeVar("_Result")


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "process_cpu_count"):  # from Python 3.13 on
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(
    work: "Callable[[int, Crew[_Result]], _Result]", count: int, threads: int
) -> list[_Result]:
    """Call ``work(number, crew)`` for each number below ``count``, on the calling thread and others.

    Numbers start in order. After a failure no other starts, and those before it are finished, so the error
    does not depend on which thread was faster.

    Args:
      work: takes a number and the `Crew` that works on it.
      count: number of calls.
      threads: number of threads, including the calling one; with 1 no other is started.

    Returns:
      A result for each number, in order, when all other threads have ended.

    Raises:
      Exception: the error of the first number that failed, when all other threads have ended. After a
        KeyboardInterrupt no further number is finished.
    """
    crew = Crew(work, count)
    if threads > 1 and count > 0:
        crew.work_with(threads - 1)
    else:
        crew.work()
    return crew.results()


class Stopped(Exception):  # noqa: N818 (not an error: another task's error ends this one)
    """A task need not be finished, because one before it has failed."""


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
        """Raise `Stopped` if the task of this number need not be finished."""
        if number >= self._end:
            raise Stopped

    def share(self, jobs: Iterable[Callable[[], None]], threads: int) -> None:
        """Run parts of a task, on several threads if no task is left for the others."""
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
            if not helper.cancel():  # if cancelled, no thread was free, and nothing is left to do
                helper.result()

    def work_with(self, others: int) -> None:
        """Work together with other threads until no task is left."""
        with ThreadPoolExecutor(others, "loader") as self._pool:
            try:
                started = _started(self._pool, self.work, min(others, self._end - 1))
                self.work()
                for other in started:
                    other.result()
            finally:
                self._stop_from(0)  # has an effect only if this thread was interrupted

    def work(self) -> None:
        """Run one task after another until none is left."""
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
        """The results of the tasks; raises the error of the first that failed."""
        if not self._errors:
            return [self._results[number] for number in sorted(self._results)]
        first = self._errors.pop(min(self._errors))
        self._errors.clear()  # an error holds its frames, and these hold this crew
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
        # At the interpreter's exit, or at the system's limit, no thread can be started: the others do the work.
        with contextlib.suppress(RuntimeError):
            started.extend(pool.submit(what) for _ in range(count))
    return started
