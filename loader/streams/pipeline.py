"""The stream itself: source -> seeded shuffle -> batches, executed by Grain.

One Grain element is one batch, gathered in one vectorised read. What batch stands where is decided
by `order` and `batching`, as a pure function of the configuration, so every way to get at a batch
(iterating, resuming, a step's number) gives the same one.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from loader.batching import Batch, Grid, Position, Segment, as_integer, as_length, spread
from loader.config import PipelineConfig
from loader.errors import PUT_BACK, DataChangedError, RecordReadError
from loader.identity.base import Place, PlaceError
from loader.identity.changes import check_skip, log_drops
from loader.identity.differences import Difference
from loader.identity.fingerprint import Fingerprint
from loader.identity.records import read_fields, read_ids
from loader.identity.values import transform_identity
from loader.keys import KEY_FIELD, KEYS_VERSION, check_key_field, record_keys, rng
from loader.order import ORDER_VERSIONS, EpochOrder, Rows
from loader.progress import things_text
from loader.reading.devices import Device, check_device, sharding_of
from loader.reading.iterator import BatchIterator, NumberedBatches, OnBatch, ReadOptions
from loader.reading.processes import WHOLE, Shard, check_shard, shard_of_process
from loader.reading.stats import OnStats, StatsHook
from loader.reading.worker_process import Masked
from loader.sources import RecordSource, RenamedSource, Verify, check_source, fingerprint_of
from loader.stream import Stream, StreamIterator, ids_ahead
from loader.streams.identities import PipelineIdentity

# isort: split
import grain

Transform = Callable[[Batch], Mapping[str, Any]]

_log: Final = logging.getLogger(__name__)
#: Up to this many records, each excluded ID is looked for among those of the source.
_CHECKED_FOR_EXCLUDED: Final = 1 << 20
_TRIED_FOR_STRUCTURE: Final = 1024
#: What tells of the records themselves. A transform cannot change it.
_OWN_FIELDS: Final = ("id", "mask")


class Pipeline(Stream):
    """A stream of batches over a source: a pure function of (source, config, transform).

    Each batch is a dict of NumPy arrays with a leading batch axis: ``id`` (int64 or str), ``mask``
    (bool, False where a slot holds no record), under ``record_keys`` ``key`` (uint32[batch, 2]), and
    the source's fields, as changed by the transform.

    Args:
      source: a `RecordSource`.
      config: what decides the stream.
      transform: from a batch to the batch that is delivered. It sees real records only (padding is
        added after it), must keep the leading axis, and must be a pure function of the batch; what is
        random in it, it draws from ``key`` (see `rng` and `uniforms`). ``id``, ``mask`` and ``key``
        it may leave out, but not change: they are delivered as they are. It is known to checkpoints
        by its name and by its attribute ``version``, if it has one: change the version when you
        change what it does.

      rename: other names for fields, such as ``{"mask": "attention_mask"}``: a batch has a ``mask`` of
        its own. ``pipeline.source`` is then the source with these names.

    Raises:
      TypeError, ValueError: something that would only fail at the first batch, or deliver none.
    """

    may_change = PipelineIdentity.may_change

    def __init__(
        self,
        source: RecordSource,
        config: PipelineConfig,
        transform: Transform | None = None,
        *,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(config, PipelineConfig):
            raise TypeError(f"config must be a PipelineConfig, not {type(config).__name__}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable, not {transform!r}")
        if rename:
            source = RenamedSource(source, rename)
        self.fields = check_source(source)
        if "mask" in self.fields:
            raise ValueError(
                "a field cannot be named 'mask' in batches, which have a mask of their own: give it another name, "
                'Pipeline(source, config, rename={"mask": "attention_mask"})'
            )
        check_key_field(self.fields, config)
        self.source = source
        self.config = config
        self.transform = transform
        self.grid = Grid(len(source), config)
        if self.grid.steps_per_epoch == 0:
            raise ValueError(
                f"batch_size {config.batch_size} is larger than the {len(source)} records, and "
                'final_batch="drop" leaves every one of them out; use a smaller batch, "pad" or '
                '"partial"'
            )
        if self.grid.num_steps == 0:
            raise ValueError(f"skip leaves out every batch of the stream: {config.skip}")
        self._excluded = _excluded(source, config)
        self._begin()
        self._all = np.ones(min(config.batch_size, len(source)), np.bool_)
        self._specs = {name: (field.dtype, field.shape) for name, field in self.fields.items()}

    def _begin(self) -> None:
        """Makes what is of one process alone."""
        config = self.config
        self._bad: collections.Counter[int | str] = collections.Counter()
        self._bad_lock = threading.Lock()  # reading threads count too
        self._order = EpochOrder(
            self.grid.num_records, config.seed, config.shuffle, config.num_epochs
        )

    def __getstate__(self) -> dict[str, Any]:
        """So that it can be sent to another process, which makes its own orders and counts for itself."""
        own = ("_bad", "_bad_lock", "_order")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"Pipeline({self.source!r}, {self.config!r})"

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.grid.steps_per_epoch

    def __len__(self) -> int:
        """Batches in all epochs.

        Raises:
          TypeError: ``num_epochs`` is ``None``, so that the stream has no end.
          OverflowError: there are more than ``sys.maxsize``.
        """
        steps = self.grid.num_steps
        if steps is None:
            raise TypeError("a pipeline with num_epochs=None runs on and has no length")
        return as_length(steps)

    @property
    def dataset(self) -> grain.MapDataset[Batch]:
        """The stream as a `grain.MapDataset` with a batch as element, to chain Grain's transformations.

        Its length is that of the pipeline; ``sys.maxsize`` where that has no end, or a later one.
        """
        return self.batches_from(Position())

    def iterate(
        self,
        start: Position | None = None,
        *,
        read_options: ReadOptions | None = None,
        workers: int = 0,
        device: Device | None = None,
        process_index: int | None = None,
        process_count: int | None = None,
        on_batch: OnBatch | None = None,
        on_stats: OnStats | None = None,
        stats_every: int = 100,
    ) -> BatchIterator:
        """An iterator over the stream, in constant time from any position.

        Args:
          start: where to begin; by default at the beginning. A position inside an epoch may be any
            number of records into it: batches are counted on from there.
          read_options: Grain's reading threads and the batches they read ahead; by default none.
            They have no influence on what is delivered or on the iterator's state.
          workers: how many processes read batches ahead, two each, in place of this one; by default
            none. They pay for what takes longer to decode or transform than to copy, and have no
            influence on what is delivered or on the iterator's state either. They start at the first
            batch, in a second or two, and get a copy of the pipeline as it is then. Of arrays in
            memory one copy is made for all of them, and none of what is mapped from files; other
            objects, such as lists, and the order of ``"permutation"``, each has for itself. Modules are
            imported anew: what the program has set in them since is not set there, but for JAX's
            settings of dtypes, precision and random numbers, and JAX is on the CPU. Source and
            transform must be such that they can be pickled; where they come from the program's main
            module, that needs ``if __name__ == "__main__":``. Workers cannot be combined with reading
            threads.
          device: a `jax.Device`, or a `jax.sharding.Sharding` that splits the batch axis; fields
            that JAX has a dtype for are delivered as `jax.Array` there (``id`` never is: its 64
            bits would be cut). A thread reads the next batch and begins its transfer while one is
            trained on. By default all fields are NumPy arrays, and there is no thread. Under `jax.distributed`, a sharding over the devices of several processes
            gives global arrays.
          process_index: which of ``process_count`` equal shares of each batch is delivered: rows
            ``index * B / count`` on. By default JAX's own, once `jax.distributed` is initialised, and
            the whole batch without it. The iterator's state is that of the whole stream.
          process_count: see there.
          on_batch: called with each batch and the position at which it begins, right before the
            batch is delivered: to log, to count. It must not change the batch.
          on_stats: called with the `StreamStats` since its last call: at multiples of ``stats_every``
            steps, when the batch after them is asked for, and at the end of the stream. An exception of
            its own is logged, and goes no further.
          stats_every: see there.

        Raises:
          TypeError, ValueError: a position that cannot be one of this stream, a device that cannot
            hold its batches, shares that are not equal, or a pipeline that cannot be sent to workers.
        """
        if device is not None:
            check_device(device, self.batch_sizes(), self.field_dtypes())
        shard = shard_of_process(process_index, process_count, sharding_of(device))
        check_shard(self.config, shard)
        hook = StatsHook.of(on_stats, stats_every)
        return BatchIterator(self, start, read_options, device, on_batch, shard, workers, hook)

    def __iter__(self) -> BatchIterator:
        return self.iterate()

    def __getitem__(self, step: SupportsIndex) -> Batch:
        """Batch number ``step``, counted from 0 over all epochs, without iterating.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        return self.read(self.position(step))

    def ids(self, step: SupportsIndex) -> npt.NDArray[Any]:
        """The ``id`` of batch number ``step``, padding included, without reading a record.

        Args:
          step: counted from 0 over all epochs.

        Returns:
          int64[batch] or str[batch]; -1 or "" in empty slots.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        ids = self._ids(self.rows_at(self.position(step)))
        if self.config.final_batch == "pad":
            ids = spread({"id": ids}, slice(len(ids)), self.config.batch_size)["id"]
        return ids

    def position(self, step: SupportsIndex) -> Position:
        """Where batch number ``step`` begins.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        number = as_integer("a step", step)
        steps = self.grid.num_steps
        if not 0 <= number < min(steps or 2**63, 2**63):
            raise IndexError(f"step {number} is not one of the {steps or 'unlimited'} steps from 0")
        return self.grid.position(number)

    def omitted_ids(self, epoch: int) -> npt.NDArray[Any]:
        """IDs that ``final_batch="drop"`` leaves out of an epoch, sorted; none under other policies.

        Args:
          epoch: counted from 0.

        Returns:
          int64[k] or str[k], fewer than a batch.

        Raises:
          TypeError: ``epoch`` is not an integer.
          ValueError: there is no such epoch.
        """
        epoch = as_integer("an epoch", epoch)
        epochs = self.config.num_epochs
        if epoch < 0 or (epochs is not None and epoch >= epochs):
            raise ValueError(f"epoch {epoch} is not one of the {epochs or 'unlimited'} from 0")
        rows = self._order.rows(epoch, self.grid.delivered_per_epoch, len(self.source))
        return np.sort(self._ids(rows))

    def rng(self, record_id: int | str, epoch: int) -> np.random.Generator:
        """NumPy's generator for a record in an epoch, whatever batch it comes in.

        Args:
          record_id: the record's.
          epoch: counted from 0.

        Returns:
          What `loader.rng` gives for the record's entry in the field ``key``.

        Raises:
          TypeError, ValueError: what can be no ID, or no epoch.
        """
        return rng(record_keys([record_id], self.config.seed, epoch)[0])

    @property
    def bad_records(self) -> dict[int | str, int]:
        """Records that ``on_bad_record="mask"`` has masked in this process: by ID, how many times."""
        with self._bad_lock:
            return dict(self._bad)

    @property
    def bad_count(self) -> int:
        """How many times a record was masked, of all in `bad_records`."""
        with self._bad_lock:
            return sum(self._bad.values())

    def fingerprint(self, *, verify: Verify = "cache") -> Fingerprint:
        """Identity of the source's content, read anew where the source does not keep it.

        Args:
          verify: with ``"full"`` all is read, also what a source's ``cache`` has digests of.
        """
        return fingerprint_of(self.source, verify)

    def settings(self) -> dict[str, Any]:
        """What decides the stream, beside its data and transform, as checkpoints hold it.

        Returns:
          JSON values: ``config``, ``order`` (kind and version), and under ``record_keys`` ``keys`` (version).
        """
        kind = self.config.shuffle
        keys = {"keys": {"version": KEYS_VERSION}} if self.config.record_keys else {}
        order = {"kind": kind, "version": ORDER_VERSIONS[kind]}
        return {"config": self.config.to_dict(), "order": order, **keys}

    def transforms(self) -> Mapping[str, Transform]:
        """The transform, if there is one."""
        return {} if self.transform is None else {"transform": self.transform}

    def identity(self, *, verify: Verify = "cache") -> PipelineIdentity:
        """What the pipeline is known by to checkpoints; ``verify`` as for `fingerprint`.

        Raises:
          TypeError: the source gives no `Fingerprint`, or the transform cannot be recognised again.
        """
        fingerprint = self.fingerprint(verify=verify)
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(
                f"the source's fingerprint() gave a {type(fingerprint).__name__}, not a "
                "loader.Fingerprint; usually it is: return loader.fingerprint(self)"
            )
        return PipelineIdentity(
            fingerprint,
            self.config.to_dict(),
            ORDER_VERSIONS[self.config.shuffle],
            transform_identity(self.transform),
            KEYS_VERSION if self.config.record_keys else None,
            self.source,
        )

    def check_identity(self) -> None:
        """As ``Stream.check_identity``."""
        transform_identity(self.transform)

    def diff_next(
        self, before: Any, place: Place, iterate: Callable[..., StreamIterator]
    ) -> list[Difference]:
        """As ``Stream.diff_next``: under the checkpoint's config, no record is read."""
        del iterate
        if place.state is not None:
            raise PlaceError(
                f"a pipeline has no state beside its position, such as {place.state!r:.80}"
            )
        try:
            earlier = self._under(before)
            position = earlier.grid.check(place.position)
        except ValueError as error:
            raise PlaceError(str(error)) from error
        return place.ahead.diff(ids_ahead(earlier, position))

    def check_change(self, before: Any, place: Place, where: str) -> None:
        """As ``Stream.check_change``: what was trained on already cannot be skipped any more."""
        earlier = self._under(before)
        segments = [Segment(len(one.source), one.config) for one in (earlier, self)]
        check_skip(where, place.position, *segments)
        log_drops(where, place.position, *segments)

    def _under(self, before: PipelineIdentity) -> "Pipeline":
        """The same source and transform under the config of a checkpoint."""
        return Pipeline(self.source, PipelineConfig.from_dict(dict(before.config)), self.transform)

    def count_steps(self, limit: int) -> int:
        """As ``Stream.count_steps``; no record is read."""
        steps = self.grid.num_steps
        return limit if steps is None else min(steps, limit)

    def describe(self) -> str:
        """As ``Stream.describe``."""
        steps, epochs = self.grid.num_steps, self.config.num_epochs
        long = "no end" if epochs is None else things_text(epochs, "epoch")
        in_all = "" if steps is None else f", {things_text(steps, 'step')}"
        records = things_text(len(self.source), "record")
        return f"{records} in batches of {self.config.batch_size}, {long}{in_all}"

    def first_ids(self, position: Position, limit: int) -> list[int | str]:
        """The first IDs of the batch at a position, at most ``limit``, padding left out."""
        ids: list[int | str] = self._ids(self.rows_at(position, limit)).tolist()
        return ids

    def rows_at(self, position: Position, limit: int | None = None) -> Rows:
        """Rows of the records in the batch that begins at ``position``; the first ``limit`` of them."""
        stop = self.grid.stop(position)
        if limit is not None:
            stop = min(stop, position.offset + limit)
        return self._order.rows(position.epoch, position.offset, stop)

    def read(
        self,
        position: Position,
        shard: Shard = WHOLE,
        note: Callable[[Masked], None] | None = None,
    ) -> Batch:
        """The batch that begins at ``position``, or a share of it.

        Args:
          position: where it begins.
          shard: the share.
          note: is told of each record that is masked; by default it is counted here.

        Raises:
          RecordReadError: a record cannot be read or transformed (see ``on_bad_record``).
        """
        note = note or self._count_masked
        size = self.config.batch_size
        start, stop = position.offset, self.grid.stop(position)
        if shard.count > 1:
            size //= shard.count
            start = min(start + shard.index * size, stop)
            stop = min(start + size, stop)
        rows = self._order.rows(position.epoch, start, stop)
        ids = read_ids(self.source, rows)
        if self._excluded is None or not (excluded := np.isin(ids, self._excluded)).any():
            batch = self._good_records(rows, ids, position, note)
        else:
            kept = np.flatnonzero(~excluded)
            good = self._good_records(rows[kept], ids[kept], position, note)
            batch = self._spread(good, kept, ids)
        if len(rows) < size and self.config.final_batch == "pad":
            batch = spread(batch, slice(len(rows)), size)
        return batch

    def count_masked(self, position: Position, masked: Iterable[Masked]) -> None:
        """Counts records of the batch at ``position``, which another process has read, as masked."""
        del position
        for one in masked:
            self._count_masked(one)

    def batches_from(self, position: Position, shard: Shard = WHOLE) -> grain.MapDataset[Batch]:
        """The batches, or shares of them, from a position on: any number of records into an epoch."""
        start = self.grid.normal(position)
        count = Segment(len(self.source), self.config, start).num_steps
        endless = dataclasses.replace(self.config, num_epochs=None)
        rest = Segment(len(self.source), endless, start)
        return NumberedBatches(
            count,
            lambda number: self.read(rest.position(start.step + number), shard),
            self,
            start,
            shard,
        )

    def batch_sizes(self) -> set[int]:
        """Lengths of the batch axis that occur."""
        size, left = self.config.batch_size, len(self.source) % self.config.batch_size
        if self.config.final_batch != "partial" or left == 0:
            return {size}
        return {left} if left == len(self.source) else {size, left}

    def field_dtypes(self) -> dict[str, np.dtype[Any]]:
        """The dtypes of a batch's fields; empty if a transform decides them."""
        if self.transform is not None:
            return {}
        return {name: field.dtype for name, field in self.fields.items()}

    def _good_records(
        self,
        rows: Rows,
        ids: npt.NDArray[Any],
        position: Position,
        note: Callable[[Masked], None],
    ) -> Batch:
        """The transformed records of some rows, with empty slots for bad ones where that is asked for."""
        if len(rows) == 0:
            return self._empty_batch(position)
        try:
            return self._gather(rows, ids, position.epoch)
        except Exception as error:  # noqa: BLE001 (whatever a source or a transform may raise)
            return self._without_bad_records(rows, ids, position, note, error)

    def _spread(self, batch: Batch, slots: Any, ids: npt.NDArray[Any]) -> Batch:
        """A batch's records in some slots of one that keeps the IDs of all."""
        return {**spread(batch, slots, len(ids)), "id": ids}

    def _gather(self, rows: Rows, ids: npt.NDArray[Any], epoch: int) -> Batch:
        """The transformed records of some rows, as an epoch has them."""
        batch: Batch = {"id": ids, "mask": self._all[: len(rows)].copy()}
        if self.config.record_keys:
            batch[KEY_FIELD] = record_keys(ids, self.config.seed, epoch)
        batch.update(read_fields(self.source, rows, self._specs))
        if self.transform is None:
            return batch
        own = (*_OWN_FIELDS, KEY_FIELD) if self.config.record_keys else _OWN_FIELDS
        return _transformed(self.transform, batch, own)

    def _without_bad_records(
        self,
        rows: Rows,
        ids: npt.NDArray[Any],
        position: Position,
        note: Callable[[Masked], None],
        error: Exception,
    ) -> Batch:
        """Finds the records at fault in a batch that failed; raises, or leaves their slots empty."""
        bad: list[int] = []
        for i, record_id in enumerate(ids.tolist()):
            found = self._failure(rows[i], ids[i], position.epoch)
            if found is not None:
                why = f"{type(found).__name__}: {found}"
                if _is_change(found):
                    raise RecordReadError(
                        position, record_id, int(rows[i]), why, PUT_BACK
                    ) from found
                if self.config.on_bad_record == "raise":
                    raise RecordReadError(position, record_id, int(rows[i]), why) from found
                note((record_id, int(rows[i]), why))
                bad.append(i)
        if not bad:
            # No record fails by itself; the batch as a whole is at fault.
            why = f"{type(error).__name__}: {error}"
            if _is_change(error):
                raise RecordReadError(position, None, None, why, PUT_BACK) from error
            raise RecordReadError(position, None, None, why) from error
        good = np.delete(np.arange(len(rows)), bad)
        if good.size:
            kept = self._gather(rows[good], ids[good], position.epoch)
        else:
            kept = self._empty_batch(position)
        return self._spread(kept, good, ids)

    def _count_masked(self, masked: Masked) -> None:
        with self._bad_lock:
            self._bad[masked[0]] += 1
        _log.warning("record %r (row %d) is masked: %s", *masked)

    def _failure(self, row: np.int64, record_id: Any, epoch: int) -> Exception | None:
        """What one record raises when it is read alone."""
        try:
            self._gather(np.array([row]), np.array([record_id]), epoch)
        except Exception as error:  # noqa: BLE001 (whatever a source or a transform may raise)
            return error
        return None

    def _empty_batch(self, position: Position) -> Batch:
        """A batch of no record, in the structure that the first readable record of the source has."""
        for row in range(min(len(self.source), _TRIED_FOR_STRUCTURE)):
            rows = np.array([row], np.int64)
            ids = self._ids(rows)
            if self._failure(rows[0], ids[0], position.epoch) is None:
                like = self._gather(rows, ids, position.epoch)
                return {name: array[:0] for name, array in like.items()}
        why = f"nor can any of the first {_TRIED_FOR_STRUCTURE} records of the source"
        raise RecordReadError(position, None, None, why)

    def _ids(self, rows: Rows) -> npt.NDArray[Any]:
        return read_ids(self.source, rows)


def _excluded(source: RecordSource, config: PipelineConfig) -> npt.NDArray[Any] | None:
    """The excluded IDs, if they can be IDs of the source: a wrong one would leave nobody out."""
    if not config.exclude:
        return None
    excluded = np.array(config.exclude)
    known = len(source) if len(source) <= _CHECKED_FOR_EXCLUDED else 1
    ids = read_ids(source, np.arange(known, dtype=np.int64))
    if ids.dtype.kind != excluded.dtype.kind:
        raise TypeError(
            f"exclude holds {config.exclude[0]!r}, and the source's IDs are like {ids[0].item()!r}"
        )
    absent = np.setdiff1d(excluded, ids) if known == len(source) else excluded[:0]
    if absent.size:
        raise ValueError(
            f"exclude holds {absent[0].item()!r} ({absent.size} such IDs), which no record has"
        )
    return excluded


def _is_change(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is that the data has changed."""
    while error is not None and not isinstance(error, DataChangedError):
        error = error.__cause__
    return error is not None


def _transformed(transform: Transform, batch: Batch, own: tuple[str, ...]) -> Batch:
    """The transform's output as NumPy arrays, with those fields that are the pipeline's own as they were."""
    ids = batch["id"]
    given = transform({**batch, **{name: _read_only(batch[name]) for name in own}})
    if not isinstance(given, Mapping):
        raise TypeError(f"the transform must return a dict of arrays, not {type(given).__name__}")
    out: Batch = {name: batch[name] for name in own}
    for name, value in given.items():
        if not isinstance(name, str):
            raise TypeError(f"the transform's fields must be named by strings, not {name!r}")
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"the transform's {name!r} is not an array: {error}") from error
        if array.ndim == 0 or len(array) != len(ids) or array.dtype.hasobject:
            raise ValueError(
                f"the transform's {name!r} is {array.dtype}{list(array.shape)}; for {len(ids)} "
                "records it must be an array with that first axis, of a dtype of fixed size"
            )
        if name in own and not np.array_equal(array, batch[name]):
            raise ValueError(
                f"the transform changed {name!r}: it belongs to the records, and must stay; a field of "
                "your own needs another name"
            )
        if name not in out:
            out[name] = array
    return out


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
