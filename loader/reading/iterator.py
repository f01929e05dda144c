"""Iterate over the batches of a pipeline or mixture: position, prefetching, figures."""

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
from loader.reading.stats import Amount, Meter, StatsHook, StreamStats, amount_of
from loader.reading.worker_process import Masked
from loader.reading.workers import Grids, WorkedStream, Workers, check_workers
from loader.stream import HasNextIds, StreamIterator, ids_ahead, refuse_second_thread

# isort: split
import grain

ReadOptions: TypeAlias = grain.ReadOptions
OnBatch = Callable[[Position, Batch], None]

_STATE_KEYS: Final = ("epoch", "offset", "step")
#: Read in the caller's thread. For data in memory, Grain's threads cost more than they save.
_NO_THREADS: Final = ReadOptions(num_threads=0, prefetch_buffer_size=0)


class _Grids(Grids, Protocol):
    """The batch borders of a stream; `Grid` has those of a pipeline."""

    def check(self, position: Position, /) -> Position: ...


class BatchStream(WorkedStream, HasNextIds, Protocol):
    """The part of a stream that a `BatchIterator` uses."""

    @property
    def grid(self) -> _Grids:
        """The batch borders."""

    @property
    def bad_count(self) -> int:
        """How many times a record was masked."""

    def read(
        self, position: Position, shard: Shard, note: Callable[[Masked], None] | None = None, /
    ) -> Batch:
        """Return a share of the batch at a position."""

    def batches_from(self, position: Position, shard: Shard, /) -> grain.MapDataset[Batch]:
        """Return shares of the batches from a position on."""


class BatchIterator(StreamIterator):
    """A `grain.DatasetIterator` whose state is a position in the stream, counted in records.

    The state does not depend on threads or buffers. After an error it is the position of the batch that
    failed. Only one thread at a time may use the iterator.
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
        # These come first, because close() uses them even if the checks below raise.
        self._meter = Meter()
        self._batches: grain.DatasetIterator[Batch] | None = None
        #: The thread that reads batches and moves them to the device, and the batch at the position.
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
        self._reads_here = not self._worker_count and self._read_options.num_threads == 0
        self._device = device
        self._on_batch = on_batch
        self._shard = shard
        self._hook = hook
        self._bad_before = pipeline.bad_count
        #: Batches read by Grain's threads.
        self._read_ahead = _ReadAhead()
        self._position = pipeline.grid.check(start)

    @property
    def pipeline(self) -> BatchStream:
        """The pipeline or mixture that the batches come from."""
        return self._pipeline

    @property
    def position(self) -> Position:
        """The position of the next batch."""
        return self._position

    def __next__(self) -> Batch:
        # The callback comes first, because it may close this iterator.
        if self._hook is not None and self._position.step % self._hook.every == 0:
            self._hook.call(self.stats())
        if self._closed:
            raise ValueError("this iterator is closed; make another with Pipeline.iterate")
        # One function, without calls in between: the fastest batches take 30 us.
        if not self._in_use.acquire(False):
            refuse_second_thread()
        try:
            begun, position, grid = perf_counter_ns(), self._position, self._pipeline.grid
            if grid.is_end(position):
                self._finish()
                raise StopIteration
            try:
                amount: Amount | None = None
                if self._device is not None:
                    batch, amount = self._moved(self._device)
                elif self._reads_here:
                    batch = self._pipeline.read(position, self._shard)
                else:
                    batch = self._read(position)
                if self._on_batch is not None:
                    self._on_batch(position, batch)
                if amount is None:
                    self._meter.add_batch(batch, begun)
                else:
                    self._meter.add_amount(amount, begun)
                self._position = grid.after(position)
            except BaseException:
                # Grain's iterator has lost count, or is a batch ahead; the next call starts a new one.
                self._drop_prefetched()
                self._meter.add_wait(begun)
                raise
            return batch
        finally:
            self._in_use.release()

    def _finish(self) -> None:
        """Stop workers and clock at the end of the stream, and report the last figures."""
        self._end_workers()
        self._meter.stop()
        if self._hook is not None:
            self._hook.call(self.stats())

    def stats(self) -> StreamStats:
        """Return the figures since this iterator was made; ``later.since(earlier)`` gives those of a window.

        Any thread may call it at any time.
        """
        bad = self._pipeline.bad_count - self._bad_before
        ready, limit = self._ready()
        return self._meter.stats(self._position.step, bad, ready=ready, ready_limit=limit)

    def place(self) -> Place:
        """Return the place, as ``StreamIterator.place``."""
        return Place(self._position, ids_ahead(self._pipeline, self._position))

    def is_at_end(self) -> bool:
        """Return whether no batch is left."""
        return self._pipeline.grid.is_end(self._position)

    def stop_clock(self) -> None:
        """Stop the clock of `stats` until the next batch is requested, for an evaluation for example."""
        self._meter.stop()

    def _ready(self) -> tuple[int | None, int | None]:
        """Return how many batches are ready, and the largest possible number."""
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
        """Read the batch at a position, which follows the last one read."""
        if self._worker_count:
            return self._started_workers().read(position)
        if self._read_options.num_threads == 0:
            return self._pipeline.read(position, self._shard)
        batch: Batch = next(self._prefetched())
        self._read_ahead.take()
        return batch

    def _moved(self, device: Device) -> tuple[Batch, Amount]:
        """Return the batch at the position on the device, and have a thread read and move the next one."""
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "regrain-device")
        moving, self._moving = self._moving, None
        if moving is None:
            if self._worker_count:
                self._started_workers()  # by this thread: see `loader.reading.workers.PROGRAM`
            moving = self._mover.submit(self._read_and_move, self._position, device)
        moved = moving.result()
        following = self._pipeline.grid.after(self._position)
        if not self._pipeline.grid.is_end(following):
            self._moving = self._mover.submit(self._read_and_move, following, device)
        return moved

    def _read_and_move(self, position: Position, device: Device) -> tuple[Batch, Amount]:
        batch = self._read(position)
        return to_device(batch, device), amount_of(batch)

    def start_prefetch(self) -> None:
        """Start the reading threads or workers, if there are any, before a batch is requested."""
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
            self._workers.kill()  # ends a thread's wait for them
        moving, self._moving = self._moving, None
        if moving is not None and not moving.cancel():
            wait_for([moving])  # until then it uses the iterators below
        if not keep_workers:
            self._end_workers()
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()
            self._read_ahead = _ReadAhead()

    def get_state(self) -> dict[str, int]:
        """Return the position as JSON values: ``{"epoch": ..., "offset": ..., "step": ...}``."""
        position = self._position
        return {"epoch": position.epoch, "offset": position.offset, "step": position.step}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position, in constant time.

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
        """End reading threads and workers and drop the batches read ahead. Safe to call again."""
        self._meter.stop()
        self._drop_prefetched()
        if self._mover is not None:
            # Its idle thread ends. It may be this very thread, if it held the last reference.
            self._mover.shutdown(wait=False)
        super().close()


class _ReadAhead:
    """A count of the batches that threads have read and that were not delivered yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def note(self, batch: Batch) -> Batch:
        """Count a batch that is read now."""
        with self._lock:
            self.count += 1
        return batch

    def take(self) -> None:
        """Count a batch that is delivered."""
        with self._lock:
            self.count -= 1


class NumberedBatches(grain.MapDataset[Batch]):
    """Batches by number, for Grain's executors.

    Args:
      count: number of batches; ``None`` for a stream without end, which has the length ``sys.maxsize``.
      read: returns the batch with a number, from 0; ``repeat`` requests numbers beyond the last.
      stream: the pipeline or mixture that the batches come from, for their identity.
      start: the position of the first batch.
      shard: the share of each batch.
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
            raise IndexError(f"batches are numbered from 0; got {number}")
        return self._read(number)
