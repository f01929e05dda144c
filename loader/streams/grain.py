"""A chain of Grain data sets that the user built, as a stream that checkpoints can hold.

Grain's own state is what is saved; this module gives it what it lacks: it is taken before an element
is asked for, so that no exception can spoil it, and it comes with what is delivered next.
"""

import collections
import contextlib
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, Final

import jax
import numpy as np

from loader.batching import Position
from loader.identity.base import Ahead, Place, PlaceError, StreamIdentity
from loader.identity.differences import Difference
from loader.identity.digests import raw_bytes
from loader.identity.fingerprint import Fingerprint
from loader.identity.json_form import from_json, json_settings, to_json
from loader.reading.devices import Device
from loader.reading.iterator import ReadOptions
from loader.reading.stats import Meter, OnStats, StatsHook, StreamStats, amount_of
from loader.sources import Verify
from loader.stream import NEXT_IDS, NEXT_IDS_BYTES, Stream, StreamIterator
from loader.streams.chain_identity import ChainIdentity
from loader.streams.grain_chain import chain_of

# isort: split
import grain

_log: Final = logging.getLogger(__name__)
MAX_STATE_BYTES: Final = 256 << 10
#: So many elements are looked at ahead, or as many as hold the next IDs; at least one.
AHEAD_ELEMENTS: Final = 8

OnElement = Callable[[Position, Any], None]


class GrainStateError(ValueError):
    """Grain does not take a state, or gives one that cannot be kept."""


class GrainStream(Stream):
    """A `grain.MapDataset` or `grain.IterDataset` with what identifies it, for `Checkpoints`.

    Its elements are batches, or whatever a training step takes, and a step is one element. Where an
    element is a dict with ``id`` (integers or strings), the IDs that come next are in each checkpoint;
    of others, a digest of the next element.

    At a resume these must be the same again: the fingerprint, ``config``, Grain's version, the number
    of its workers, and for each data set of the chain the class, the length and the settings that it
    was made with (batch size, seed, epochs, weights, ...). Functions are known by their names, their
    attribute ``version`` and the arguments of a partial; objects that are called, transformations of
    Grain's and data sets of other classes by class, ``version`` and their plain attributes as they are
    when this is made, without those that their methods assign; `Pipeline.dataset` by all that a
    pipeline is known by. **Not** checked are the code of functions, what they close over, and objects
    of which only the class can be told; set another ``version`` when you change what one does. Nor is
    it checked that ``fingerprint`` is that of the data which the chain reads. ``docs/grain.md`` has it
    in full.

    Args:
      dataset: the chain. It is iterated anew at each resume, and must not be changed afterwards.
      fingerprint: of its data, such as `loader.fingerprint` of a `RecordSource` gives, or
        `Fingerprint.of_revision`.
      config: settings of your own that decide the stream, as JSON can hold them.

    Raises:
      TypeError: something is not of these kinds.
    """

    may_change = ChainIdentity.may_change
    single_process = (
        "a GrainStream is for one JAX process: Grain's state is that of one process's share, and no process "
        "could say where the others are. Use a Pipeline, or run one process"
    )

    def __init__(
        self,
        dataset: Any,
        *,
        fingerprint: Fingerprint,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(dataset, grain.MapDataset | grain.IterDataset):
            raise TypeError(
                "dataset must be a grain.MapDataset or a grain.IterDataset, not a "
                f"{type(dataset).__name__}; of an iterator, give the data set, and of a DataLoader, write "
                "it as a chain: grain.MapDataset.source(...).shuffle(seed).repeat(epochs).map(...).batch(size)"
            )
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(
                f"fingerprint must be a loader.Fingerprint, not a {type(fingerprint).__name__}: that of "
                "the data, by loader.fingerprint(source)"
            )
        self.dataset = dataset
        self._fingerprint = fingerprint
        self.config = json_settings("config", config)
        self.chain = chain_of(dataset, grain.__version__)

    def __repr__(self) -> str:
        return f"GrainStream({' > '.join(link['class'] for link in self.chain.links)})"

    def fingerprint(self, *, verify: Verify = "cache") -> Fingerprint:  # noqa: ARG002
        """Identity of the data, as it was given; ``verify`` has no influence on it."""
        return self._fingerprint

    def iterate(
        self,
        start: Mapping[str, Any] | None = None,
        *,
        read_options: ReadOptions | None = None,
        workers: int = 0,
        device: Device | None = None,
        on_batch: OnElement | None = None,
        on_stats: OnStats | None = None,
        stats_every: int = 100,
    ) -> "GrainIterator":
        """An iterator over the stream.

        Args:
          start: a state of such an iterator; by default the beginning.
          read_options: Grain's reading threads, where the chain is a `grain.MapDataset`. By default
            Grain's own: 16 threads, and up to 500 elements in memory.
          workers: none, the chain has its own (``mp_prefetch``).
          device: none, the chain brings its elements there (``grain.experimental.device_put``).
          on_batch: called with each element and its position, right before it is delivered.
          on_stats: as for `Pipeline.iterate`.
          stats_every: as for `Pipeline.iterate`.

        Raises:
          TypeError, ValueError: a state of another iterator, or an option that the chain decides.
        """
        if device is not None or workers:
            raise ValueError(
                f"{'device' if device is not None else 'workers'} is up to the chain of a GrainStream: use "
                "grain.experimental.device_put, or mp_prefetch, at its end"
            )
        if read_options is not None and not isinstance(self.dataset, grain.MapDataset):
            raise ValueError(
                "read_options are for a grain.MapDataset, and this chain is a grain.IterDataset: it has "
                "had its own since to_iter_dataset"
            )
        return GrainIterator(
            self, start, read_options, on_batch, StatsHook.of(on_stats, stats_every)
        )

    def __iter__(self) -> "GrainIterator":
        return self.iterate()

    def identity(self, *, verify: Verify = "cache") -> ChainIdentity:
        """What the stream is known by to checkpoints; ``verify`` has no influence on it."""
        return ChainIdentity(self.fingerprint(verify=verify), self.config, self.chain)

    def diff_next(
        self, before: StreamIdentity, place: Place, iterate: Callable[..., Any]
    ) -> list[Difference]:
        """As ``Stream.diff_next``: Grain makes the next elements from the checkpoint's state."""
        del before
        state, step = place.state, place.position.step
        if not isinstance(state, Mapping) or place.position != Position(0, 0, step):
            raise PlaceError(
                f"{place.position} with the state {state!r:.80} is no place of a chain of Grain's"
            )
        try:
            batches = iterate(state)
        except (TypeError, ValueError) as error:
            raise PlaceError(str(error)) from error
        with contextlib.closing(batches):
            if batches.position != place.position:
                raise PlaceError(f"{batches.position} in its state is not {place.position}")
            try:
                now = batches.ahead()
            except GrainStateError as error:
                kept = json.dumps(state["grain"])
                return [Difference("grain_state", kept, "refused", str(error))]
        if place.ahead.kind == "error":
            _log.warning(
                "step %d: the element behind it could not be made when it was saved (%s), so that it "
                "cannot be compared now",
                step,
                place.ahead.digest,
            )
        return place.ahead.diff(now, f"of the element at step {step}, by Grain's state")


class GrainIterator(StreamIterator):
    """Grain's iterator over a chain, with a state that can be trusted.

    Its state is always that before the next element: where Grain raises, its iterator is let go, and
    the next call makes a new one that goes on at the same element. It belongs to one thread.
    """

    def __init__(
        self,
        stream: GrainStream,
        start: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        on_batch: OnElement | None = None,
        hook: StatsHook | None = None,
    ) -> None:
        super().__init__()
        # First, since close() looks at them, also where what follows raises.
        self._meter = Meter()
        self._iterator: Any = None
        #: What was read and not delivered yet, each with Grain's state before it.
        self._read: collections.deque[tuple[str, Any]] = collections.deque()
        if read_options is not None and not isinstance(read_options, ReadOptions):  # type: ignore[misc]
            raise TypeError(f"read_options must be a ReadOptions, not {read_options!r}")
        self._stream = stream
        self._read_options = read_options
        self._on_batch = on_batch
        self._hook = hook
        #: Grain's state behind what was read, as JSON; ``None`` at the beginning.
        self._state: str | None = None
        self._step = 0
        self._ended = False
        self._ahead: Ahead | None = None
        if stream.chain.workers:
            # At the exit, while Python can still let go of the memory that Grain's workers share.
            weakref.finalize(self, _close, weakref.ref(self), os.getpid())
        if start is not None:
            self._step, self._state = _checked_state(start)

    @property
    def position(self) -> Position:
        """Where the next element is: how many have been delivered, as ``step``."""
        return Position(0, 0, self._step)

    def __next__(self) -> Any:
        # The callback comes first, because it may close this iterator.
        if self._hook is not None and self._step % self._hook.every == 0:
            self._hook.call(self.stats())
        if self._closed:
            raise ValueError("this iterator is closed; make another with GrainStream.iterate")
        with self._one_thread():
            return self._next()

    def _next(self) -> Any:
        begun = perf_counter_ns()
        if not self._read:
            try:
                self._pull()
            except StopIteration:
                self._meter.stop()
                if self._hook is not None:
                    self._hook.call(self.stats())
                raise
            except Exception as error:
                self._meter.add_wait(begun)
                error.add_note(
                    f"This is of step {self._step}. The iterator stays there: the next call asks for it "
                    "again, from a new iterator of Grain's, and a checkpoint goes on there too."
                )
                raise
        element = self._read[0][1]
        if self._on_batch is not None:
            self._on_batch(self.position, element)
        self._meter.add_amount(amount_of(element), begun)
        self._read.popleft()
        self._step += 1
        self._ahead = None
        return element

    def stats(self) -> StreamStats:
        """What this iterator has delivered since it was made, as `BatchIterator.stats`.

        ``ready`` is ``None``: Grain does not tell how many elements it has read ahead.
        """
        return self._meter.stats(self._step)

    def stop_clock(self) -> None:
        """Stops the clock of `stats` until the next element is asked for."""
        self._meter.stop()

    def ahead(self) -> Ahead:
        """What comes next, without moving the iterator.

        The elements that this takes are kept, and delivered when it is their turn: at most 8, and one
        where it has 64 IDs or none. No element is made twice. Where the iterator has not
        read them yet, it takes as long as the next calls would have to wait for them; a digest takes a
        second for 0.5 to 2 GB.

        Raises:
          GrainStateError: Grain does not take the state.
        """
        with self._one_thread():
            if self._ahead is None:
                self._ahead = self._look_ahead()
            return self._ahead

    def place(self) -> Place:
        """As ``StreamIterator.place``; see `ahead`."""
        return Place(self.position, self.ahead(), self.get_state())

    def is_at_end(self) -> bool:
        """As ``StreamIterator.is_at_end``; see `ahead`."""
        return self.ahead().kind == "end"

    def _look_ahead(self) -> Ahead:
        found: list[int | str] = []
        size = 0
        for number in range(AHEAD_ELEMENTS):
            try:
                if number == len(self._read):
                    self._pull()
            except StopIteration:
                if number:
                    break
                return Ahead("end")
            except GrainStateError:
                raise
            except Exception as error:  # noqa: BLE001 (whatever a source or a function may raise)
                if number:
                    break
                return Ahead("error", digest=f"{type(error).__name__}: {error}"[:1000])
            element = self._read[number][1]
            ids = element_ids(element, NEXT_IDS - len(found))
            if ids is None:
                if number:
                    break
                return Ahead("digest", digest=element_digest(element))
            for entry in ids:
                size += len(json.dumps(entry))
                if size > NEXT_IDS_BYTES:
                    return Ahead("ids", tuple(found))
                found.append(entry)
            if len(found) >= NEXT_IDS:
                break
        return Ahead("ids", tuple(found))

    def get_state(self) -> dict[str, Any]:
        """``{"step": ..., "grain": ...}``: elements delivered, and Grain's state before the next one.

        JSON gives it back as it is: tuples and arrays in Grain's state are encoded.
        """
        text = self._read[0][0] if self._read else self._state or self._open()[1]
        return {"step": self._step, "grain": json.loads(text)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a place, with a new iterator of Grain's.

        Raises:
          TypeError, ValueError: not such a state; the iterator stays where it is.
        """
        step, text = _checked_state(state)
        with self._one_thread():
            self._drop()
            self._read.clear()
            self._step, self._state = step, text
            self._ended, self._ahead = False, None

    def start_prefetch(self) -> None:
        """Has Grain's threads or processes begin, if there are any, before an element is asked for."""
        if not self._closed:
            self._open()[0].start_prefetch()

    def close(self) -> None:
        """Ends Grain's threads and processes, and lets go of what was read ahead. Safe to call again.

        Where the chain has workers (``mp_prefetch``), this is done at Python's exit, if nobody has.
        """
        self._meter.stop()
        self._drop()
        self._read.clear()
        super().close()

    def _pull(self) -> None:
        """Reads one more element, behind those that are read already."""
        if self._ended:
            raise StopIteration
        iterator, before = self._open()
        try:
            element = next(iterator)
            self._state = _text(iterator.get_state())
        except StopIteration:
            self._ended = True
            raise
        except BaseException:
            self._drop()  # Grain's iterator has lost count
            raise
        self._read.append((before, element))

    def _open(self) -> tuple[Any, str]:
        """Grain's iterator behind what was read, a new one if there is none; and its state."""
        if self._iterator is not None and self._state is not None:
            return self._iterator, self._state
        dataset = self._stream.dataset
        if self._read_options is not None:
            dataset = dataset.to_iter_dataset(self._read_options)
        iterator = iter(dataset)
        try:
            if self._state is None:
                state = _text(iterator.get_state())
            else:
                state = self._state
                _restore(iterator, state)
        except BaseException:
            iterator.close()
            raise
        self._iterator, self._state = iterator, state
        return iterator, state

    def _drop(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()


def _close(iterator: "weakref.ref[GrainIterator]", process: int) -> None:
    there = iterator()
    if there is not None and os.getpid() == process:  # and not a fork of it
        there.close()


def element_ids(element: Any, limit: int | None = None) -> list[int | str] | None:
    """The first IDs of an element: what it has under ``id``, if that is integers or strings."""
    if not isinstance(element, Mapping) or "id" not in element:
        return None
    ids = np.asarray(element["id"]).reshape(-1)[:limit]
    values: list[int | str] = ids.tolist()
    if ids.dtype.kind in "iuU" or (ids.size and all(type(one) in (int, str) for one in values)):
        return values
    return None


def element_digest(element: Any) -> str:
    """``sha256:`` + 64 hex digits over all leaves of an element: path, dtype, shape and bytes.

    A leaf that is no array, number or text counts by its type alone.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(element)[0]:
        try:
            array = np.asarray(leaf)
        except (TypeError, ValueError):
            array = np.asarray(None)
        known = not array.dtype.hasobject
        kind = f"{array.dtype}{list(array.shape)}" if known else type(leaf).__qualname__
        digest.update(json.dumps([jax.tree_util.keystr(path), kind]).encode())
        if known:
            digest.update(raw_bytes(array))
    return f"sha256:{digest.hexdigest()}"


def _restore(iterator: Any, text: str) -> None:
    try:
        iterator.set_state(from_json(json.loads(text)))
    except Exception as error:
        raise GrainStateError(
            f"Grain does not take its own state {text:.200}: {type(error).__name__}: {error}"
        ) from error


def _checked_state(state: Mapping[str, Any]) -> tuple[int, str]:
    """The step and Grain's state of a state."""
    if not isinstance(state, Mapping) or set(state) != {"step", "grain"}:
        raise ValueError(
            f"a state holds step and grain and nothing else, not {state!r:.200}; it may come from "
            "another iterator"
        )
    # It may be as `get_state` encodes it, or as Grain itself gives it, with tuples.
    return Position(0, 0, state["step"]).step, _text(from_json(state["grain"]))


def _text(state: Any) -> str:
    """Grain's state as JSON that gives back an equal state, with the same types.

    Raises:
      GrainStateError: it cannot be saved.
    """
    try:
        text = json.dumps(to_json(state), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GrainStateError(
            f"the state of this chain cannot be saved: {error}. A data set's state may hold numbers, "
            "strings, bytes, NumPy arrays, and lists, tuples and dicts of them"
        ) from error
    return _bounded(text)


def _bounded(text: str) -> str:
    if len(text) > MAX_STATE_BYTES:
        raise GrainStateError(
            f"the state of this chain has {len(text)} bytes, and {MAX_STATE_BYTES} are allowed; a data set "
            "in it keeps elements in its state"
        )
    return text
