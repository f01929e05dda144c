"""How far long work has come: told to whoever watches, and to the log every ten seconds.

Work that reads all data (fingerprints, checks of IDs, audits, conversions, ...) says how much there is to
do, and counts. Who watches need not be handed down to it, through sources and functions of the user's own.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import numbers
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextvars import ContextVar
from typing import Any, Final, Self, TypeAlias, TypeVar

from loader.amounts import bytes_text, count_text, seconds_text

_Part = TypeVar("_Part", bound=Sized)

_log: Final = logging.getLogger(__name__)
_LOG_SECONDS: Final = 10.0
#: Work that took less is over before anybody could have wondered.
_WORTH_A_LINE_SECONDS: Final = 2.0
_numbers: Final = itertools.count()


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a piece of work has come.

    Attributes:
      what: what it is, such as ``"fingerprint of ArraySource"``.
      done: how much of it is done, in ``unit``.
      total: how much there is to do; ``None`` where nobody knows before the end.
      unit: ``"bytes"``, ``"records"``, ``"files"``, ``"slots"``, ``"batches"`` or ``"steps"``.
      seconds: since its start.
      number: of the work, counted up in this process: tells two of the same name apart.
      ended: whether it is over: done, or failed.
    """

    what: str
    done: int
    total: int | None
    unit: str
    seconds: float
    number: int
    ended: bool = False

    @property
    def per_second(self) -> float:
        """Units a second so far; 0 at the start."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until the end, at that speed; infinite as long as nothing tells."""
        if self.total is None or not self.per_second:
            return math.inf
        return max(0.0, self.total - self.done) / self.per_second

    def __str__(self) -> str:
        """A line such as ``fingerprint of NpySource: 3.10 GB of 12.0 GB, 1.20 GB/s, 7.4 s left``."""
        took, speed = seconds_text(self.seconds), f"{self._amount(self.per_second)}/s"
        if self.ended and self.total in (None, self.done):
            return f"{self.what}: {self._amount(self.done)} in {took}, {speed}"
        if self.ended:
            return f"{self.what}: ended after {self._part}, {took}"
        left = "" if math.isinf(self.seconds_left) else f", {seconds_text(self.seconds_left)} left"
        return f"{self.what}: {self._part}, {speed}{left}"

    @property
    def _part(self) -> str:
        if self.total is None:
            return self._amount(self.done)
        done = bytes_text(self.done) if self.unit == "bytes" else count_text(self.done)
        return f"{done} of {self._amount(self.total)}"

    def _amount(self, count: float) -> str:
        return bytes_text(count) if self.unit == "bytes" else f"{count_text(count)} {self.unit}"


OnProgress: TypeAlias = Callable[[Progress], Any]
"""What is called with how far some work has come."""


@dataclasses.dataclass(frozen=True)
class _Watcher:
    on_progress: OnProgress
    every_s: float


_watchers: Final = ContextVar[tuple[_Watcher, ...]]("watchers", default=())


@contextlib.contextmanager
def watch_progress(on_progress: OnProgress, *, every_s: float = 0.1) -> Iterator[None]:
    """A context in which long work tells how far it has come: what opens, identifies, audits or converts data.

        with loader.watch_progress(print, every_s=5):
            source = loader.ParquetSource("data")
            print(source.fingerprint().digest)

    Args:
      on_progress: called with a `Progress` at the start of each piece of work, now and then, and at its
        end. Calls come one at a time for a piece of work, and from any thread that does it. An exception
        is logged, and ends what this piece of work tells, but not the work.
      every_s: at least so many seconds lie between two calls, but for the first and last one.

    It is about work that is begun in this thread (or asyncio task), but not by ``on_progress`` itself.

    Raises:
      TypeError, ValueError: ``on_progress`` cannot be called, or ``every_s`` is no number of seconds.
    """
    if not callable(on_progress):
        raise TypeError(f"on_progress must be callable, not {on_progress!r}")
    if not isinstance(every_s, numbers.Real):
        raise TypeError(f"every_s must be a number of seconds, not {every_s!r}")
    if not every_s >= 0:
        raise ValueError(f"every_s must be at least 0 seconds, not {every_s}")
    token = _watchers.set((*_watchers.get(), _Watcher(on_progress, every_s)))
    try:
        yield
    finally:
        _watchers.reset(token)


class Work:
    """A piece of work that is under way. A context manager.

    Args:
      what: as of `Progress`.
      total: as of `Progress`.
      unit: as of `Progress`.
    """

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._number, self._done = next(_numbers), 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._began = now = time.monotonic()
        #: Who is told, and when next; nobody where there is nothing to do.
        watchers = () if self._total == 0 else _watchers.get()
        self._next_told = [(now + watcher.every_s, watcher) for watcher in watchers]
        self._next_logged = now + _LOG_SECONDS
        self._next_look = min([self._next_logged, *(at for at, _ in self._next_told)])
        self._tell([watcher for _, watcher in self._next_told], self._progress(now))
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            progress = self._progress(time.monotonic(), ended=True)
            self._tell([watcher for _, watcher in self._next_told], progress)
        is_long = progress.seconds >= _WORTH_A_LINE_SECONDS
        _log.log(logging.INFO if is_long else logging.DEBUG, "%s", progress)

    def advance(self, count: int = 1) -> None:
        """Counts what is done. May be called by several threads at once."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now >= self._next_look:
                self._look(now)

    def over(self, parts: Iterable[_Part]) -> Generator[_Part, None, None]:
        """The parts one by one, each of which counts by its length, once it is done with."""
        for part in parts:
            yield part
            self.advance(len(part))

    def _look(self, now: float) -> None:
        progress = self._progress(now)
        due = [watcher for at, watcher in self._next_told if now >= at]
        self._next_told = [
            (now + watcher.every_s if now >= at else at, watcher) for at, watcher in self._next_told
        ]
        self._tell(due, progress)
        if now >= self._next_logged:
            self._next_logged = now + _LOG_SECONDS
            _log.info("%s", progress)
        self._next_look = min([self._next_logged, *(at for at, _ in self._next_told)])

    def _progress(self, now: float, *, ended: bool = False) -> Progress:
        return Progress(
            self._what,
            self._done,
            self._total,
            self._unit,
            now - self._began,
            self._number,
            ended,
        )

    def _tell(self, watchers: Sequence[_Watcher], progress: Progress) -> None:
        if not watchers:
            return
        # Who looks at data when told would else be told of that too, and look again, without end.
        token = _watchers.set(())
        try:
            self._tell_each(watchers, progress)
        finally:
            _watchers.reset(token)

    def _tell_each(self, watchers: Sequence[_Watcher], progress: Progress) -> None:
        for watcher in watchers:
            try:
                watcher.on_progress(progress)
            except Exception as error:  # noqa: BLE001 (the work does not depend on who watches)
                _log.warning(
                    "on_progress has failed, and is told no more of this %s: %s: %s",
                    progress.what,
                    type(error).__name__,
                    error,
                    exc_info=True,
                )
                self._next_told = [one for one in self._next_told if one[1] is not watcher]


def counted(
    parts: Iterable[_Part], what: str, total: int | None, unit: str = "records"
) -> Generator[_Part, None, None]:
    """The parts one by one, as a piece of work of its own, in which each counts by its length."""
    with Work(what, total, unit) as work:
        yield from work.over(parts)
