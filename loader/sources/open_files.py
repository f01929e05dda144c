"""Files that sources keep open: one budget for all sources of a process, half of its file descriptors."""

import resource
import threading
import weakref
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_LEAST: Final = 8
#: Linux allows a process some 65,000 memory maps.
_MOST: Final = 1 << 14

_lock: Final = threading.Lock()
_owners: Final[weakref.WeakSet["OpenFiles[Any]"]] = weakref.WeakSet()


def budget() -> int:
    """The number of files that all sources of this process together keep open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return min(max(limit // 2, _LEAST), _MOST)


class OpenFiles(Generic[T]):
    """The open files of one source, by number: maps or readers, each with one file descriptor.

    When all sources together keep more than the budget, the source with the most open files drops its
    oldest one. It is closed once no thread uses it any more.
    """

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        with _lock:
            _owners.add(self)

    def __len__(self) -> int:
        """The number of open files."""
        return len(self._kept)

    def get(self, number: int) -> T | None:
        """The open file, or ``None``."""
        return self._kept.get(number)

    def put(self, number: int, opened: T) -> None:
        """Keep a file open."""
        dropped = []  # closed after the lock is released
        with _lock:
            self._kept[number] = opened
            owners, most = list(_owners), budget()
            while sum(map(len, owners)) > most:
                largest = max(owners, key=len)
                dropped.append(largest._pop_oldest())  # noqa: SLF001 (of this class)

    def drop(self, number: int) -> None:
        """Keep a file open no longer."""
        with _lock:
            dropped = self._kept.pop(number, None)
        del dropped

    def _pop_oldest(self) -> T:
        return self._kept.pop(next(iter(self._kept)))
