"""What an iterator has delivered, and how long its loop has waited for it.

A count and two readings of the clock for each batch; all else is worked out when somebody asks. Nothing
here has any influence on the stream, on a position or on a state.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, Final, Self, TypeAlias

import jax
import numpy as np

from loader.amounts import bytes_text, count_text, seconds_text, things_text

_log: Final = logging.getLogger(__name__)
_nbytes: Final = operator.attrgetter("nbytes")


@dataclasses.dataclass(frozen=True)
class StreamStats:
    """What an iterator has delivered since it was made, or between two looks at it (see `since`).

    They are this process's own: where each of several reads its share of a batch, its share.

    The clock starts when the first batch is asked for, so that neither opening nor resuming counts, and
    runs through all that the loop does: training, saving, logging. It stands still from the
    iterator's ``stop_clock()`` (before an evaluation, say), from the end of the stream and from ``close``
    on, until the next batch is asked for.

    Attributes:
      step: the step of the batch that comes next; for a plot, the place on its axis.
      batches: batches delivered.
      records: records delivered, without empty slots. ``None`` where an element of a `GrainStream` has
        neither ``id`` nor a ``mask`` of NumPy's, and so does not tell how many it holds.
      empty_slots: slots delivered whose ``mask`` is False: padding, excluded and bad records.
      bytes: bytes of all arrays delivered, ``id`` and ``mask`` included, as they were on the host.
      bad_records: how many times ``on_bad_record="mask"`` has masked a record in this process, in
        batches that are still read ahead too.
      wall_s: seconds on the clock.
      wait_s: seconds of these that the loop spent in ``next``: for reading where nothing reads ahead, and
        for what was not ready yet where something does.
      ready: batches that lie ready to be delivered, now; ``None`` where nothing reads ahead, or Grain does
        so for a `GrainStream`, which does not tell.
      ready_limit: how many could lie ready at most.
    """

    step: int
    batches: int
    records: int | None
    empty_slots: int
    bytes: int
    bad_records: int
    wall_s: float
    wait_s: float
    ready: int | None = None
    ready_limit: int | None = None

    @property
    def batches_per_s(self) -> float:
        """Batches a second of ``wall_s``; 0 where none was delivered."""
        return self._per_second(self.batches)

    @property
    def records_per_s(self) -> float | None:
        """Records a second of ``wall_s``."""
        return None if self.records is None else self._per_second(self.records)

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of ``wall_s``."""
        return self._per_second(self.bytes)

    @property
    def wait_share(self) -> float:
        """``wait_s`` over ``wall_s``, 0 to 1: the share of its time that the loop waits for data.

        JAX's devices work on while Python waits, so this is the most that they can have stood idle for it.
        """
        return self.wait_s / self.wall_s if self.wall_s else 0.0

    def since(self, earlier: Self) -> Self:
        """What came after an earlier look at the same iterator: counts and seconds in between.

        ``step``, ``ready`` and ``ready_limit`` are those of the later one.

        Raises:
          ValueError: ``earlier`` is the later one, or of another iterator.
        """
        if earlier.batches > self.batches or earlier.wall_s > self.wall_s:
            raise ValueError(
                f"{earlier.batches} batches in {earlier.wall_s:.1f} s are not earlier than "
                f"{self.batches} in {self.wall_s:.1f} s: call later.since(earlier), of one iterator"
            )
        known = self.records is not None and earlier.records is not None
        return dataclasses.replace(
            self,
            batches=self.batches - earlier.batches,
            records=(self.records or 0) - (earlier.records or 0) if known else None,
            empty_slots=self.empty_slots - earlier.empty_slots,
            bytes=self.bytes - earlier.bytes,
            bad_records=self.bad_records - earlier.bad_records,
            wall_s=self.wall_s - earlier.wall_s,
            wait_s=self.wait_s - earlier.wait_s,
        )

    def to_dict(self) -> dict[str, int | float]:
        """All attributes and rates by name, as JSON and loggers of scalars take them; no ``None``."""
        rates = ("batches_per_s", "records_per_s", "bytes_per_s", "wait_share")
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in rates}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        per_second = [f"{bytes_text(self.bytes_per_s)}/s"]
        if self.records_per_s is not None:
            per_second.insert(0, f"{count_text(self.records_per_s)} records/s")
        parts = [
            f"step {self.step}: {things_text(self.batches, 'batch')} in {seconds_text(self.wall_s)}",
            *per_second,
            f"waited {100 * self.wait_share:.1f}% for data",
        ]
        if self.ready is not None:
            parts.append(f"{self.ready} of {self.ready_limit} ready")
        if self.bad_records:
            parts.append(things_text(self.bad_records, "bad record"))
        return ", ".join(parts)

    def _per_second(self, count: int) -> float:
        return count / self.wall_s if self.wall_s else 0.0


OnStats: TypeAlias = Callable[[StreamStats], Any]
"""What may be called with the figures of a run every so many steps, to send them on."""


@dataclasses.dataclass(frozen=True)
class Amount:
    """What a batch holds: slots (``None`` where it does not tell), empty ones among them, and bytes."""

    slots: int | None
    empty: int
    bytes: int

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> Self:
        """Of a batch of NumPy arrays, with a ``mask``."""
        mask = batch["mask"]
        return cls(
            len(mask), len(mask) - int(np.count_nonzero(mask)), sum(map(_nbytes, batch.values()))
        )

    @classmethod
    def of_element(cls, element: Any) -> Self:
        """Of anything: it tells how many records it holds by ``mask`` (bool[n], in NumPy) or ``id``.

        A ``mask`` on a device tells nothing: to fetch it would take longer than all else. What cannot be
        looked at (an object of the user's own, a dict with names of two kinds) tells nothing either, and
        counts no byte.
        """
        try:
            return cls._of_element(element)
        except Exception:  # noqa: BLE001 (whatever an element is, it is delivered)
            return cls(None, 0, 0)

    @classmethod
    def _of_element(cls, element: Any) -> Self:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(element) if hasattr(leaf, "nbytes"))
        if not isinstance(element, Mapping):
            return cls(None, 0, size)
        mask, ids = element.get("mask"), element.get("id")
        if isinstance(mask, np.ndarray) and mask.dtype == bool and mask.ndim == 1:
            return cls(len(mask), len(mask) - int(np.count_nonzero(mask)), size)
        if ids is None or isinstance(mask, jax.Array):
            return cls(None, 0, size)
        return cls((*np.shape(ids), 1)[0], 0, size)


class Meter:
    """Counts what an iterator delivers, and holds its clock.

    Args:
      same_slots: whether each slot of each batch has as many bytes, but for IDs that are strings. Then
        one batch tells for all, and counting costs half as much.
    """

    __slots__ = (
        "_bytes",
        "_clock",
        "_empty",
        "_same_slots",
        "_slot_bytes",
        "_slots",
        "_unknown",
        "_wait_ns",
        "_weighs",
        "batches",
    )

    def __init__(self, *, same_slots: bool = False) -> None:
        self._same_slots = same_slots
        self.batches = 0
        self._slots = self._empty = self._bytes = self._slot_bytes = 0
        self._weighs, self._unknown = True, False
        self._wait_ns = 0
        #: What the clock had when it last stood, and since when it runs; ``None`` where it stands. In one,
        #: so that whoever looks from another thread sees both of the same instant.
        self._clock: tuple[int, int | None] = (0, None)

    def add(self, batch: Mapping[str, Any], begun: int) -> None:
        """Counts a batch of NumPy arrays that is delivered now, and was asked for at ``begun``."""
        # Once a batch, of which the fastest take 30 us: each line here costs less than 0.1.
        mask = batch["mask"]
        self.batches += 1
        self._slots += len(mask)
        if 0 in mask.tobytes():
            self._empty += len(mask) - int(np.count_nonzero(mask))
        if self._weighs:
            self._weigh(batch)
        if self._clock[1] is None:
            self._clock = (self._clock[0], begun)
        self._wait_ns += perf_counter_ns() - begun

    def add_amount(self, amount: Amount, begun: int) -> None:
        """As `add`, of what is counted already."""
        self.batches += 1
        if amount.slots is None:
            self._unknown = True
        else:
            self._slots += amount.slots
        self._empty += amount.empty
        self._bytes += amount.bytes
        self.add_wait(begun)

    def add_wait(self, begun: int) -> None:
        """Counts the time since ``begun``, after which nothing is delivered."""
        if self._clock[1] is None:
            self._clock = (self._clock[0], begun)
        self._wait_ns += perf_counter_ns() - begun

    def stop(self) -> None:
        """Stops the clock, until something is added."""
        wall_ns, since = self._clock
        if since is not None:
            self._clock = (wall_ns + perf_counter_ns() - since, None)

    def stats(
        self,
        step: int,
        *,
        bad_records: int = 0,
        ready: int | None = None,
        ready_limit: int | None = None,
    ) -> StreamStats:
        """All that was counted so far."""
        wait_ns = self._wait_ns  # first: it is a part of what the clock says
        wall_ns, since = self._clock
        if since is not None:
            wall_ns += perf_counter_ns() - since
        return StreamStats(
            step=step,
            batches=self.batches,
            records=None if self._unknown else self._slots - self._empty,
            empty_slots=self._empty,
            bytes=self._bytes + self._slots * self._slot_bytes,
            bad_records=bad_records,
            wall_s=wall_ns / 1e9,
            wait_s=wait_ns / 1e9,
            ready=ready,
            ready_limit=ready_limit,
        )

    def _weigh(self, batch: Mapping[str, Any]) -> None:
        size, slots = sum(map(_nbytes, batch.values())), len(batch["mask"])
        if self._same_slots and slots and batch["id"].dtype.kind == "i":
            self._slot_bytes, self._weighs = size // slots, False
        else:
            self._bytes += size


class StatsHook:
    """Somebody who is told, every so many steps, what came since the last time.

    What it raises is logged and goes no further, so that no dashboard can end a training run. Only what is
    no `Exception`, such as KeyboardInterrupt, goes through.

    Args:
      on_stats: is called with them.
      every: the steps: at multiples of it, and at the end of the stream.

    Raises:
      TypeError, ValueError: it cannot be called, or is to be at no multiple of steps.
    """

    def __init__(self, on_stats: OnStats, every: int) -> None:
        if not callable(on_stats):
            raise TypeError(f"on_stats must be callable, not {on_stats!r}")
        if isinstance(every, bool | np.bool_) or not hasattr(every, "__index__"):
            raise TypeError(f"stats_every must be a number of steps, not {every!r}")
        if operator.index(every) < 1:
            raise ValueError(f"stats_every must be at least 1, not {every}")
        self._on_stats, self.every = on_stats, operator.index(every)
        self._told: StreamStats | None = None
        self._failed = 0

    def tell(self, now: StreamStats) -> None:
        """Tells what came since the last time, if there was something."""
        window = now if self._told is None else now.since(self._told)
        if not window.batches:
            return
        self._told = now
        try:
            self._on_stats(window)
        except Exception as error:  # noqa: BLE001 (whatever a dashboard's client raises)
            self._failed += 1
            again = "" if self._failed == 1 else f", {self._failed} times in a row"
            _log.log(
                logging.WARNING if self._failed == 1 else logging.DEBUG,
                "on_stats has failed at step %d%s: %s: %s. Training goes on, and it is called again",
                now.step,
                again,
                type(error).__name__,
                error,
                exc_info=self._failed == 1,
            )
            return
        if self._failed:
            _log.info("on_stats works again at step %d, after %d failures", now.step, self._failed)
            self._failed = 0


def hook_of(on_stats: OnStats | None, every: int) -> StatsHook | None:
    """Who is to be told, if anybody is."""
    return None if on_stats is None else StatsHook(on_stats, every)
