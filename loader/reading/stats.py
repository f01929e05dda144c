"""Count the batches that an iterator delivers, and the time that its loop waits for them.

The counts have no influence on the stream, on a position or on a state.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, Self, TypeAlias

import jax
import numpy as np

from loader.checks import integer
from loader.progress import bytes_text, count_text, seconds_text, things_text

_log: Final = logging.getLogger(__name__)
_nbytes: Final = operator.attrgetter("nbytes")


@dataclasses.dataclass(frozen=True)
class StreamStats:
    """Figures of an iterator in this process, since it was made or between two calls (see `since`).

    If several processes each read a share of a batch, the figures are those of this share.

    The clock starts with the first request for a batch, so opening and resuming do not count. It includes
    all that the loop does: training, saving, logging. It stops at ``stop_clock()`` (before an evaluation,
    for example), at the end of the stream and at ``close``, until the next request for a batch.

    Attributes:
      step: the step of the next batch; the x coordinate of a plot.
      batches: batches delivered.
      records: records delivered, without empty slots. ``None`` if an element of a `GrainStream` has
        neither ``id`` nor a NumPy ``mask``, so that its records cannot be counted.
      empty_slots: slots delivered whose ``mask`` is False: padding, excluded and bad records.
      bytes: bytes of all arrays delivered, including ``id`` and ``mask``, as they were on the host.
      bad_records: how many times ``on_bad_record="mask"`` has masked a record in this process. Batches
        that are read ahead count too.
      wall_s: seconds on the clock.
      wait_s: the part of these seconds that the loop spent in ``next``.
      ready: batches that are ready now; ``None`` if nothing reads ahead, or for a `GrainStream`, because
        Grain does not report it.
      ready_limit: the largest possible ``ready``.
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
        """Batches per second of ``wall_s``; 0 before the first batch."""
        return self._per_second(self.batches)

    @property
    def records_per_s(self) -> float | None:
        """Records per second of ``wall_s``."""
        return None if self.records is None else self._per_second(self.records)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of ``wall_s``."""
        return self._per_second(self.bytes)

    @property
    def wait_share(self) -> float:
        """``wait_s`` over ``wall_s``, 0 to 1: the share of its time that the loop waits for data.

        JAX's devices work on while Python waits, so they have been idle for at most this share.
        """
        return self.wait_s / self.wall_s if self.wall_s else 0.0

    def since(self, earlier: Self) -> Self:
        """Return the counts and seconds since an earlier call of the same iterator's ``stats``.

        ``step``, ``ready`` and ``ready_limit`` are those of the later one.

        Raises:
          ValueError: ``earlier`` is the later one, or of another iterator.
        """
        if earlier.batches > self.batches or earlier.wall_s > self.wall_s:
            raise ValueError(
                f"{earlier.batches} batches in {earlier.wall_s:.1f} s are not earlier than "
                f"{self.batches} in {self.wall_s:.1f} s: call later.since(earlier), of one iterator"
            )
        names = ("batches", "records", "empty_slots", "bytes", "bad_records", "wall_s", "wait_s")
        pairs = {name: (getattr(self, name), getattr(earlier, name)) for name in names}
        less = {name: None if None in pair else pair[0] - pair[1] for name, pair in pairs.items()}
        return dataclasses.replace(self, **less)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, int | float]:
        """Return all attributes and rates by name, as JSON values, without those that are ``None``."""
        rates = ("batches_per_s", "records_per_s", "bytes_per_s", "wait_share")
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in rates}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = [
            f"step {self.step}: {things_text(self.batches, 'batch')} in {seconds_text(self.wall_s)}"
        ]
        if self.records_per_s is not None:
            parts.append(f"{count_text(self.records_per_s)} records/s")
        parts.append(f"{bytes_text(self.bytes_per_s)}/s")
        parts.append(f"waited {100 * self.wait_share:.1f}% for data")
        if self.ready is not None:
            parts.append(f"{self.ready} of {self.ready_limit} ready")
        if self.bad_records:
            parts.append(things_text(self.bad_records, "bad record"))
        return ", ".join(parts)

    def _per_second(self, count: int) -> float:
        return count / self.wall_s if self.wall_s else 0.0


OnStats: TypeAlias = Callable[[StreamStats], Any]
"""A function that gets the figures of a run every so many steps, to send them on."""


class Amount(NamedTuple):
    """The slots of a batch (``None`` if unknown), the empty ones among them, and its bytes."""

    slots: int | None
    empty: int
    bytes: int


def amount_of(element: Any) -> Amount:
    """Count the slots of an element by its ``mask`` (a NumPy bool[n]) or ``id``, and its bytes.

    A ``mask`` on a device is not fetched, because that would take longer than everything else. Such an
    element has unknown slots; an element that raises while it is counted has no bytes either.
    """
    try:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(element) if hasattr(leaf, "nbytes"))
        fields: Mapping[str, Any] = element if isinstance(element, Mapping) else {}
        mask = fields.get("mask")
        ids: Any = fields.get("id")
        if isinstance(mask, np.ndarray) and mask.dtype == bool and mask.ndim == 1:
            return Amount(len(mask), len(mask) - int(np.count_nonzero(mask)), size)
        unknown = ids is None or isinstance(mask, jax.Array)
        return Amount(None if unknown else (*np.shape(ids), 1)[0], 0, size)
    except Exception:  # noqa: BLE001 (an element may be any object; it is delivered all the same)
        return Amount(None, 0, 0)


class Meter:
    """The counts and the clock of an iterator."""

    __slots__ = ("_bytes", "_clock", "_empty", "_slots", "_unknown", "_wait_ns", "batches")

    def __init__(self) -> None:
        self.batches = self._slots = self._empty = self._bytes = self._wait_ns = 0
        self._unknown = False
        #: The time when the clock last stopped, and when it was started since; ``None`` if it is stopped.
        #: One tuple, so that another thread reads both of the same instant.
        self._clock: tuple[int, int | None] = (0, None)

    def add_batch(self, batch: Mapping[str, Any], begun: int) -> None:
        """Count a batch of NumPy arrays with a ``mask``, requested at ``begun`` and delivered now."""
        mask = batch["mask"]
        self.batches += 1
        self._slots += len(mask)
        self._bytes += sum(map(_nbytes, batch.values()))
        if 0 in mask.tobytes():  # faster than NumPy, and as a rule all slots are full
            self._empty += len(mask) - int(np.count_nonzero(mask))
        self.add_wait(begun)

    def add_amount(self, amount: Amount, begun: int) -> None:
        """Count an element, requested at ``begun`` and delivered now, by its amount."""
        self.batches += 1
        self._unknown |= amount.slots is None
        self._slots += amount.slots or 0
        self._empty += amount.empty
        self._bytes += amount.bytes
        self.add_wait(begun)

    def add_wait(self, begun: int) -> None:
        """Count the time since ``begun`` as waiting."""
        if self._clock[1] is None:
            self._clock = (self._clock[0], begun)
        self._wait_ns += perf_counter_ns() - begun

    def stop(self) -> None:
        """Stop the clock until something is added."""
        wall_ns, since = self._clock
        if since is not None:
            self._clock = (wall_ns + perf_counter_ns() - since, None)

    def stats(self, step: int, bad_records: int = 0, **ready: Any) -> StreamStats:
        """Return the figures so far."""
        wait_ns = self._wait_ns  # read before the clock, which includes it
        wall_ns, since = self._clock
        if since is not None:
            wall_ns += perf_counter_ns() - since
        records = None if self._unknown else self._slots - self._empty
        counts = (self.batches, records, self._empty, self._bytes, bad_records)
        return StreamStats(step, *counts, wall_ns / 1e9, wait_ns / 1e9, **ready)


class StatsHook:
    """A user's callback for the figures since its last call.

    An `Exception` that it raises is logged and not raised, so that no dashboard ends a training run.

    Args:
      on_stats: the callback.
      every: call it at multiples of this step, and at the end of the stream.

    Raises:
      TypeError, ValueError: ``on_stats`` cannot be called, or ``every`` is not an integer from 1 on.
    """

    def __init__(self, on_stats: OnStats, every: int) -> None:
        if not callable(on_stats):
            raise TypeError(f"on_stats must be callable, not {on_stats!r}")
        self._on_stats, self.every = on_stats, integer("stats_every", every, 1)
        self._last: StreamStats | None = None
        self._failed = 0

    @classmethod
    def of(cls, on_stats: OnStats | None, every: int) -> Self | None:
        """Return a hook for a callback, or ``None`` without a callback."""
        return None if on_stats is None else cls(on_stats, every)

    def call(self, now: StreamStats) -> None:
        """Call the callback, if a batch was delivered since the last call."""
        window = now if self._last is None else now.since(self._last)
        if not window.batches:
            return
        self._last = now
        try:
            self._on_stats(window)
        except Exception as error:  # noqa: BLE001 (a dashboard's client may raise anything)
            self._failed += 1
            first = self._failed == 1
            _log.log(
                logging.WARNING if first else logging.DEBUG,
                "on_stats has failed at step %d: %s: %s. Training goes on, and it is called again",
                now.step,
                type(error).__name__,
                error,
                exc_info=first,
            )
            return
        if self._failed:
            _log.info("on_stats works again at step %d, after %d failures", now.step, self._failed)
            self._failed = 0
