"""Report the progress of long work to callbacks, and every ten seconds to the log; write amounts as text.

Work that reads all data (fingerprints, checks of IDs, audits, conversions, ...) counts what it has done. A
callback applies to all work in a context, so that it need not be passed through sources and functions.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import numbers
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any, Final, Self, TypeAlias, TypeVar

_Part = TypeVar("_Part", bound=Sized)

_log: Final = logging.getLogger(__name__)
_LOG_SECONDS: Final = 10.0
#: Shorter work is logged at level DEBUG only.
_WORTH_A_LINE_SECONDS: Final = 2.0
_numbers: Final = itertools.count()


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a piece of work.

    Attributes:
      what: the name of the work, such as ``"fingerprint of ArraySource"``.
      done: the amount done, in ``unit``.
      total: the whole amount; ``None`` if it is unknown before the end.
      unit: ``"bytes"``, ``"records"``, ``"files"``, ``"slots"``, ``"batches"`` or ``"steps"``.
      seconds: seconds since the start.
      number: a number for each piece of work in this process, since two can have the same name.
      ended: whether the work has ended, by success or failure.
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
        """Units per second so far; 0 at the start."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until the end at this speed; infinite if the total or the speed is unknown."""
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
"""A function that gets the progress of long work."""


@dataclasses.dataclass(eq=False)
class _Watcher:
    """A callback, the seconds between two calls, and the time of the next call."""

    on_progress: OnProgress
    every_s: float
    due: float = 0.0


_watchers: Final = ContextVar[tuple[_Watcher, ...]]("watchers", default=())


@contextlib.contextmanager
def watch_progress(on_progress: OnProgress, *, every_s: float = 0.1) -> Iterator[None]:
    """Report the progress of work in this context that opens, identifies, audits or converts data.

        with loader.watch_progress(print, every_s=5):
            source = loader.ParquetSource("data")
            print(source.fingerprint().digest)

    Args:
      on_progress: called with a `Progress` at the start of each piece of work, at intervals, and at its
        end. For one piece of work, calls come one at a time, from any of its threads. After an exception,
        which is logged, it is not called again for this piece of work; the work goes on.
      every_s: the least number of seconds between two calls, except for the first and last call.

    It covers work that begins in this thread (or asyncio task), except work of ``on_progress`` itself.

    Raises:
      TypeError, ValueError: ``on_progress`` cannot be called, or ``every_s`` is not a number of seconds.
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
    """A piece of work whose progress is reported. A context manager.

    Args:
      what: as in `Progress`.
      total: as in `Progress`; work with nothing to do is logged only.
      unit: as in `Progress`.
    """

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._number, self._done = next(_numbers), 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._began = now = time.monotonic()
        watchers = () if self._total == 0 else _watchers.get()
        self._watchers = [dataclasses.replace(watcher) for watcher in watchers]
        self._report(now, to_all=True)
        self._watchers.append(_Watcher(_log_line, _LOG_SECONDS, now + _LOG_SECONDS))
        self._next_due = min(watcher.due for watcher in self._watchers)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._report(time.monotonic(), to_all=True, ended=True)

    def advance(self, count: int = 1) -> None:
        """Count work that is done. Several threads may call this at once."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now >= self._next_due:
                self._report(now)
                self._next_due = min(watcher.due for watcher in self._watchers)

    def over(self, parts: Iterable[_Part]) -> Generator[_Part, None, None]:
        """Yield the parts; count each by its length when the next one is requested."""
        for part in parts:
            yield part
            self.advance(len(part))

    def _report(self, now: float, *, to_all: bool = False, ended: bool = False) -> None:
        amounts = (self._done, self._total, self._unit, now - self._began)
        progress = Progress(self._what, *amounts, self._number, ended)
        # A callback that reads data would else get the progress of its own work, without end.
        token = _watchers.set(())
        try:
            for watcher in list(self._watchers):
                if to_all or now >= watcher.due:
                    watcher.due = now + watcher.every_s
                    self._call(watcher, progress)
        finally:
            _watchers.reset(token)

    def _call(self, watcher: _Watcher, progress: Progress) -> None:
        try:
            watcher.on_progress(progress)
        except Exception as error:  # noqa: BLE001 (the work does not depend on its callbacks)
            _log.warning(
                "on_progress has failed, and is not called again for this %s: %s: %s",
                progress.what,
                type(error).__name__,
                error,
                exc_info=True,
            )
            self._watchers.remove(watcher)


def _log_line(progress: Progress) -> None:
    is_short = progress.ended and progress.seconds < _WORTH_A_LINE_SECONDS
    _log.log(logging.DEBUG if is_short else logging.INFO, "%s", progress)


def counted(
    parts: Iterable[_Part], what: str, total: int | None, unit: str = "records"
) -> Generator[_Part, None, None]:
    """Yield the parts as a piece of work of its own; count each by its length."""
    with Work(what, total, unit) as work:
        yield from work.over(parts)


def bytes_text(count: float) -> str:
    """Return bytes as text such as ``12.3 MB``, in powers of 1000."""
    return (
        f"{count:.0f} B"
        if abs(count) < 999.5
        else _scaled(count, (" kB", " MB", " GB", " TB", " PB"))
    )


def count_text(count: float) -> str:
    """Return a count as text such as ``12.3M``; below 10,000 as a whole number."""
    return f"{round(count):,}" if abs(count) < 10_000 else _scaled(count, ("k", "M", "G", "T", "P"))


def things_text(count: int, thing: str) -> str:
    """Return a count of things as text such as ``1 file`` or ``12.3M files``."""
    ending = "" if count == 1 else "es" if thing.endswith(("batch", "process")) else "s"
    return f"{count_text(count)} {thing}{ending}"


def seconds_text(seconds: float) -> str:
    """Return seconds as text such as ``4 ms``, ``1.3 s``, ``2 min 5 s`` or ``3 h 20 min``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _scaled(count: float, prefixed: tuple[str, ...]) -> str:
    """Return a number of at least 999.5 in three digits, with the prefix of its power of 1000."""
    power = 1
    while power < len(prefixed) and abs(count) >= 999.5 * 1000**power:
        power += 1
    scaled = count / 1000**power
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{prefixed[power - 1]}"
