"""A stream: batches in an order that can be resumed, with what identifies it, for checkpoints.

A kind of stream implements `Stream` and `StreamIterator`. Checkpoints need no more than that.
"""

import abc
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn, Protocol

from loader.batching import Position
from loader.identity.base import Ahead, Place, StreamIdentity, canonical
from loader.identity.differences import Difference
from loader.reading.stats import StreamStats
from loader.sources import Verify

_root_handlers = logging.root.handlers[:]
import grain  # noqa: E402

# Grain's import gives the root logger a handler, after which a program's own basicConfig does nothing.
logging.root.handlers[:] = _root_handlers

#: Checkpoints hold so many of the IDs that come next, and so many bytes of them.
NEXT_IDS: Final = 64
NEXT_IDS_BYTES: Final = 16 << 10
NOT_COPIED: Final = (
    "an iterator is not copied or pickled, since what it has read ahead would be in one of the two alone: "
    "take its get_state(), and make another iterator that set_state() gives it to"
)


class StreamIterator(grain.DatasetIterator[Any]):
    """An iterator over a stream. It belongs to one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._in_use = threading.RLock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_COPIED)

    @property
    @abc.abstractmethod
    def position(self) -> Position:
        """Where the next batch begins. Its ``step`` is the number of batches delivered."""

    @abc.abstractmethod
    def place(self) -> Place:
        """Where the iterator stands, as checkpoints hold it. The iterator does not move."""

    @abc.abstractmethod
    def is_at_end(self) -> bool:
        """Whether no batch is left."""

    @abc.abstractmethod
    def stats(self) -> StreamStats:
        """What this iterator has delivered since it was made, how fast, and how long its loop waited."""

    @contextlib.contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            refuse_second_thread()
        try:
            yield
        finally:
            self._in_use.release()


def refuse_second_thread() -> NoReturn:
    """Raise RuntimeError, because another thread uses the iterator."""
    raise RuntimeError(
        "two threads use this iterator at the same time, so neither its batches nor its position would be "
        "certain. Give each thread an iterator of its own, or have one thread take the batches and hand "
        "them on"
    )


class Stream(abc.ABC):
    """A stream of batches that checkpoints can hold and resume.

    Attributes:
      may_change: names of differences that a run can go on with, if the user allows them.
      single_process: why only one JAX process can train on the stream; empty if several can.
    """

    may_change: ClassVar[frozenset[str]] = frozenset()
    single_process: ClassVar[str] = ""

    @abc.abstractmethod
    def identity(self, *, verify: Verify = "cache") -> StreamIdentity:
        """What the stream is known by. Reads the data if the source must, to identify them."""

    @abc.abstractmethod
    def iterate(self, *args: Any, **options: Any) -> StreamIterator:
        """Return an iterator.

        The one positional argument is where it starts, see `Place.start`; by default at the beginning. The
        options are those of `Pipeline.iterate`; a stream may refuse some.
        """

    @abc.abstractmethod
    def diff_next(
        self, before: StreamIdentity, place: Place, iterate: Callable[..., StreamIterator]
    ) -> list[Difference]:
        """Compare what comes next with what a checkpoint has of it.

        Args:
          before: the checkpoint's identity, which differs from this stream's in ``may_change`` at most.
          place: the checkpoint's.
          iterate: makes an iterator over this stream from a place.

        Raises:
          PlaceError: the place cannot be one of the stream.
        """

    def check_change(  # noqa: B027 (most streams have nothing to check)
        self, before: StreamIdentity, place: Place, where: str
    ) -> None:
        """Check that the run can go on at a place with what has changed since.

        Args:
          before: the checkpoint's identity.
          place: the checkpoint's.
          where: names the checkpoint, for messages.

        Raises:
          ValueError: it cannot.
        """

    def check_identity(self) -> None:  # noqa: B027 (as above)
        """Check that the stream can be identified, without reading data.

        Raises:
          TypeError, ValueError: it cannot.
        """

    def settings(self) -> dict[str, Any]:
        """What decides the stream, beside its data and functions, as JSON values."""
        return {}

    def transforms(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that decide the stream, by name."""
        return {}

    def count_steps(self, limit: int) -> int:
        """How many batches there are, if fewer than ``limit``; else ``limit``."""
        with contextlib.closing(self.iterate()) as batches:
            return sum(1 for _ in itertools.islice(batches, limit))

    def describe(self) -> str:
        """The stream in a line, for logs."""
        return repr(self)


class HasNextIds(Protocol):
    """A stream whose next IDs can be looked up without iterating."""

    @property
    def grid(self) -> Any:
        """Where batches begin and end."""

    def first_ids(self, position: Position, limit: int, /) -> Sequence[int | str]:
        """The first IDs of the batch at a position, at most ``limit``, padding left out."""


def next_ids(stream: HasNextIds, position: Position) -> tuple[int | str, ...]:
    """IDs of the records delivered next from a position: at most 64, and 16 KiB of JSON."""
    found: list[int | str] = []
    size = 0
    while len(found) < NEXT_IDS and not stream.grid.is_end(position):
        # A batch can hold millions of records; only its first ones are looked up.
        for entry in stream.first_ids(position, NEXT_IDS - len(found)):
            size += len(str(entry) if isinstance(entry, int) else canonical(entry))
            if size > NEXT_IDS_BYTES:
                return tuple(found)
            found.append(entry)
        position = stream.grid.after(position)
    return tuple(found)


def ids_ahead(stream: HasNextIds, position: Position) -> Ahead:
    """What comes next in a stream whose records have IDs."""
    end = stream.grid.is_end(position)
    return Ahead("end") if end else Ahead("ids", next_ids(stream, position))
