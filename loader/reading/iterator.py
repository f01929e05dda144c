"""The iterator over the batches of a pipeline or mixture: its place, its reading ahead, its figures."""

import operator
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from time import perf_counter_ns
from typing import Any, Final, Protocol, TypeAlias

from loader.batching import Batch, Position
from loader.identity.base import Place
from loader.reading.devices import Device, to_device
from loader.reading.processes import WHOLE, Shard
from loader.reading.stats import Amount, Meter, StatsHook, StreamStats
from loader.reading.worker_process import Masked
from loader.reading.workers import Grids, WorkedStream, Workers, check_workers
from loader.stream import HasNextIds, StreamIterator, enter_alone, ids_ahead

# isort: split
import grain

ReadOptions: TypeAlias = grain.ReadOptions
OnBatch = Callable[[Position, Batch], None]

_STATE_KEYS: Final = ("epoch", "offset", "step")
#: Reads in the caller's thread. For data in memory Grain's threads cost more than they bring.
_NO_THREADS: Final = ReadOptions(num_threads=0, prefetch_buffer_size=0)


class _Grids(Grids, Protocol):
    """Where batches begin and end in a stream, as `Grid` tells of a pipeline's."""

    def check(self, position: Position, /) -> Position: ...


class BatchStream(WorkedStream, HasNextIds, Protocol):
    """What a `BatchIterator` needs of the stream whose batches it delivers."""

    @property
    def grid(self) -> _Grids:
        """Where batches begin and end."""

    @property
    def bad_count(self) -> int:
        """How many times a record was masked."""

    @property
    def has_same_slots(self) -> bool:
        """Whether each slot of each batch has as many bytes, but for IDs that are strings."""

    def read(
        self, position: Position, shard: Shard, note: Callable[[Masked], None] | None = None, /
    ) -> Batch:
        """A share of the batch at a position."""

    def batches_from(self, position: Position, shard: Shard, /) -> grain.MapDataset[Batch]:
        """Shares of the batches from a position on."""


class BatchIterator(StreamIterator):
    """A `grain.DatasetIterator` whose state is a place in the stream, counted in records.

    The state says nothing of threads, buffers or how the batches were read, and after an error it
    is that of the batch that failed. It belongs to one thread at a time.
    """

    def __init__(
        self,
        pipeline: BatchStream,
        start: Position | None = None,
        read_options: ReadOptions | None = None,
        device: Device | None = None,
        on_batch: OnBatch | None = None,
        shard: Shard = WHOLE,
        workers: int = 0,
        hook: StatsHook | None = None,
    ) -> None:
        super().__init__()
        # First, since close() looks at them, also where what follows raises.
        self._meter = Meter(same_slots=pipeline.has_same_slots)
        self._batches: grain.DatasetIterator[Batch] | None = None
        #: What reads and moves batches to the device, and the batch at the position, on its way there.
        self._mover: ThreadPoolExecutor | None = None
        self._moving: Future[tuple[Batch, Amount]] | None = None
        self._workers: Workers | None = None
        start = Position() if start is None else start
        if not isinstance(start, Position):
            raise TypeError(f"start must be a Position, not {start!r}")
        if read_options is not None and not isinstance(read_options, ReadOptions):  # type: ignore[misc]
            raise TypeError(f"read_options must be a ReadOptions, not {read_options!r}")
        self._worker_count = check_workers(workers, pipeline)
        if self._worker_count and read_options is not None and read_options.num_threads > 0:
            raise ValueError(
                f"workers={self._worker_count} and {read_options.num_threads} reading threads both read "
                "batches ahead: give one of them, and leave the other out"
            )
        self._pipeline = pipeline
        self._read_options = read_options or _NO_THREADS
        self._device = device
        self._on_batch = on_batch
        self._shard = shard
        self._hook = hook
        self._bad_before = pipeline.bad_count
        #: By Grain's threads, if there are any.
        self._read_ahead = _ReadAhead()
        self._position = pipeline.grid.check(start)

    @property
    def pipeline(self) -> BatchStream:
        """The pipeline, or mixture, whose batches these are."""
        return self._pipeline

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self._position

    def __next__(self) -> Batch:
        # First, since who is told may close this iterator.
        if self._hook is not None and self._position.step % self._hook.every == 0:
            self._hook.tell(self.stats())
        if self._closed:
            raise ValueError("this iterator is closed; make another with Pipeline.iterate")
        enter_alone(self._in_use)
        try:
            return self._next()
        finally:
            self._in_use.release()

    def _next(self) -> Batch:
        begun = perf_counter_ns()
        grid = self._pipeline.grid
        if grid.is_end(self._position):
            self._end_workers()
            self._meter.stop()
            if self._hook is not None:
                self._hook.tell(self.stats())
            raise StopIteration
        try:
            amount: Amount | None = None
            if self._device is None:
                batch = self._read(self._position)
            else:
                batch, amount = self._moved(self._device)
            if self._on_batch is not None:
                self._on_batch(self._position, batch)
            if amount is None:
                self._meter.add(batch, begun)
            else:
                self._meter.add_amount(amount, begun)
            self._position = grid.after(self._position)
        except BaseException:
            # Grain's own iterator has lost count, or is a batch ahead; the next call starts a new one.
            self._drop_prefetched()
            self._meter.add_wait(begun)
            raise
        return batch

    def stats(self) -> StreamStats:
        """What this iterator has delivered since it was made, how fast, and how long its loop waited.

        Of a window, ``later.since(earlier)`` tells. May be called from any thread, at any time.
        """
        bad = self._pipeline.bad_count - self._bad_before
        ready, limit = self._ready()
        return self._meter.stats(
            self._position.step, bad_records=bad, ready=ready, ready_limit=limit
        )

    def place(self) -> Place:
        """As `StreamIterator.place`."""
        return Place(self._position, ids_ahead(self._pipeline, self._position))

    def is_at_end(self) -> bool:
        """As `StreamIterator.is_at_end`."""
        return self._pipeline.grid.is_end(self._position)

    def stop_clock(self) -> None:
        """Stops the clock of `stats` until the next batch is asked for: before an evaluation, say."""
        self._meter.stop()

    def _ready(self) -> tuple[int | None, int | None]:
        """How many batches lie ready, and how many could."""
        ready = limit = 0
        if self._worker_count:
            workers = self._workers
            ready += 0 if workers is None else workers.count_ready()
            limit += Workers.most_ready(self._worker_count)
        elif self._read_options.num_threads > 0:
            ready += self._read_ahead.count
            limit += self._read_options.prefetch_buffer_size
        if self._device is not None:
            moving = self._moving
            ready += moving is not None and moving.done()
            limit += 1
        return (ready, limit) if limit else (None, None)

    def _read(self, position: Position) -> Batch:
        """The batch at a position, which is the one behind that last read."""
        if self._worker_count:
            return self._started_workers().read(position)
        if self._read_options.num_threads == 0:
            return self._pipeline.read(position, self._shard)
        batch: Batch = next(self._prefetched())
        self._read_ahead.take()
        return batch

    def _moved(self, device: Device) -> tuple[Batch, Amount]:
        """The batch at the position, on the device; has the one behind it moved, by a thread of its own."""
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "regrain-device")
        moving, self._moving = self._moving, None
        if moving is None:
            if self._worker_count:
                self._started_workers()  # by this thread: see `loader.reading.worker_process.PROGRAM`
            moving = self._mover.submit(self._read_and_move, self._position, device)
        moved = moving.result()
        following = self._pipeline.grid.after(self._position)
        if not self._pipeline.grid.is_end(following):
            self._moving = self._mover.submit(self._read_and_move, following, device)
        return moved

    def _read_and_move(self, position: Position, device: Device) -> tuple[Batch, Amount]:
        batch = self._read(position)
        return to_device(batch, device), Amount.of_batch(batch)

    def start_prefetch(self) -> None:
        """Starts the reading threads or workers, if there are any, before a batch is asked for."""
        if self._closed:
            return
        if self._worker_count and not self._pipeline.grid.is_end(self._position):
            if self._moving is None:  # else a thread has started them
                self._started_workers().read_ahead(self._position)
        elif self._read_options.num_threads > 0:
            self._prefetched().start_prefetch()

    def _started_workers(self) -> Workers:
        if self._workers is None or self._workers.is_closed:
            self._workers = Workers(self._pipeline, self._shard, self._worker_count)
        return self._workers

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _prefetched(self) -> Any:
        if self._batches is None:
            ahead = self._pipeline.batches_from(self._position, self._shard)
            self._read_ahead = counted = _ReadAhead()
            read = NumberedBatches(len(ahead), lambda number: counted.note(ahead[number]))
            self._batches = iter(read.to_iter_dataset(self._read_options))
        return self._batches

    def _drop_prefetched(self, *, keep_workers: bool = False) -> None:
        if self._workers is not None and not keep_workers:
            self._workers.kill()  # so that nobody waits for them any more
        moving, self._moving = self._moving, None
        if moving is not None and not moving.cancel():
            wait_for([moving])  # what it reads from belongs to it until then
        if not keep_workers:
            self._end_workers()
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()
            self._read_ahead = _ReadAhead()

    def get_state(self) -> dict[str, int]:
        """The position, as JSON can hold it: ``{"epoch": ..., "offset": ..., "step": ...}``."""
        position = self._position
        return {"epoch": position.epoch, "offset": position.offset, "step": position.step}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position, in constant time.

        Raises:
          TypeError, ValueError: not a state of this stream; the iterator stays where it is.
        """
        if not isinstance(state, Mapping) or set(state) != set(_STATE_KEYS):
            raise ValueError(
                f"a state holds {', '.join(_STATE_KEYS)} and nothing else, not {state!r:.200}; it "
                "may come from another iterator"
            )
        position = self._pipeline.grid.check(Position(**state))
        with self._one_thread():
            self._drop_prefetched(keep_workers=True)
            self._position = position

    def close(self) -> None:
        """Ends reading threads and workers, and lets go of what was read ahead. Safe to call again."""
        self._meter.stop()
        self._drop_prefetched()
        if self._mover is not None:
            # Its thread has nothing to do and ends; it may be this one, where it held the last reference.
            self._mover.shutdown(wait=False)
        super().close()


class _ReadAhead:
    """How many batches threads have read that were not delivered yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def note(self, batch: Batch) -> Batch:
        """Counts a batch that is read now."""
        with self._lock:
            self.count += 1
        return batch

    def take(self) -> None:
        """Counts a batch that is delivered."""
        with self._lock:
            self.count -= 1


class NumberedBatches(grain.MapDataset[Batch]):
    """Batches by number, as Grain's executors want them.

    Args:
      count: how many; ``None`` is without end, for which Grain's word is ``sys.maxsize``.
      read: gives the batch of a number, from 0; numbers beyond the last are asked for by ``repeat``.
      stream: the pipeline, or mixture, whose batches they are; tells what decides them.
      start: the place of the first of them.
      shard: of which share of each batch they are.
    """

    def __init__(
        self,
        count: int | None,
        read: Callable[[int], Batch],
        stream: Any = None,
        start: Position = Position(),  # noqa: B008 (it is frozen)
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        self.stream, self.start, self.shard = stream, start, shard
        self._count = sys.maxsize if count is None else min(count, sys.maxsize)
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        number = operator.index(index)
        if number < 0:
            raise IndexError(f"batches are numbered from 0, and {number} is none of them")
        return self._read(number)
