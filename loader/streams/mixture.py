"""Several pipelines as one stream: which one gives the batch of a step is a function of the step alone."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from loader.batching import Batch, Position, as_integer, as_length
from loader.identity.base import Place, PlaceError, StreamIdentity
from loader.identity.differences import Difference
from loader.identity.fingerprint import Fingerprint
from loader.reading.devices import Device, check_device, sharding_of
from loader.reading.iterator import BatchIterator, NumberedBatches, OnBatch, ReadOptions
from loader.reading.processes import WHOLE, Shard, check_shard, shard_of_process
from loader.reading.stats import OnStats, StatsHook
from loader.reading.worker_process import Masked
from loader.sources import Verify
from loader.stream import Stream, StreamIterator, ids_ahead
from loader.streams.identities import MixtureIdentity, combined
from loader.streams.pipeline import Pipeline
from loader.streams.turns import TURNS_VERSION, Turn, Turns

PART_FIELD: Final = "part"


class Mixture(Stream):
    """Batches of several pipelines in turn, by weight. Each batch comes from one of them, whole.

    Weights are made whole numbers without a common divisor. Their sum is a *round*: of any
    ``round_steps`` steps in a row, each part gives exactly as many as its weight says, and after any
    number of steps it has given less than one batch more or fewer than its share. Each part keeps the
    order, batches and epochs that it has alone, whatever the weights and the other parts are; with
    ``num_epochs=None`` it begins anew as often as it has to. Where a part has an end, the mixture ends
    when that part's turn comes and it has no batch left.

    Batches hold ``id``, ``mask``, the part's fields, and ``part``: int32[batch], the place of the part's
    name among all in alphabetical order. IDs need to be unique in each part only.

    Args:
      parts: by name, the pipelines; how they are ordered does not matter.
      weights: by name, how often a part's turn comes: numbers above 0. 0.7 is taken for 7/10, as it is
        written; the round may have 1,048,576 steps at most.

    Raises:
      TypeError, ValueError: no parts, or more than 256; a weight that is no number above 0, or
        missing; weights that take too long a round; parts whose fields differ, or that have a field
        ``part``; parts with ``record_keys`` beside others without; a mixture without a batch.
    """

    def __init__(
        self, parts: Mapping[str, Pipeline], weights: Mapping[str, float | Fraction]
    ) -> None:
        self._parts = _checked_parts(parts)
        if isinstance(weights, Mapping) and set(weights) != set(parts):
            without = [name for name in parts if name not in weights]
            others = [name for name in weights if name not in parts]
            raise ValueError(
                "weights must be given for each part, and for nothing else: "
                + "; ".join(
                    f"{what} {', '.join(map(repr, names))}"
                    for what, names in (("there is none for", without), ("no part is", others))
                    if names
                )
            )
        self.turns = Turns(weights)
        self.grid = MixtureSteps(self._num_steps())
        if self.grid.num_steps == 0:
            raise ValueError("the part whose turn comes first has no batch: the mixture has none")

    def __repr__(self) -> str:
        shares = ", ".join(f"{name}: {weight}" for name, weight in self.weights.items())
        return f"Mixture({shares})"

    @property
    def parts(self) -> Mapping[str, Pipeline]:
        """The pipelines by name, in alphabetical order."""
        return dict(self._parts)

    @property
    def weights(self) -> Mapping[str, int]:
        """The weights as whole numbers, by name in alphabetical order."""
        return dict(self.turns.weights)

    @property
    def round_steps(self) -> int:
        """Steps after which the turns repeat: the sum of the weights."""
        return len(self.turns)

    def __len__(self) -> int:
        """Batches until a part has none left when its turn comes.

        Raises:
          TypeError: no part has an end.
          OverflowError: there are more than ``sys.maxsize``.
        """
        if self.grid.num_steps is None:
            raise TypeError("a mixture of parts without end runs on and has no length")
        return as_length(self.grid.num_steps)

    def turn(self, step: SupportsIndex) -> Turn:
        """Which part gives the batch of a step, and which of its own batches that is.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        return self.turns.at(self._step(step))

    def step_of(self, part: str, step: SupportsIndex) -> int:
        """The step at which a part gives its own batch number ``step``: the inverse of `turn`.

        Raises:
          KeyError: there is no such part.
          IndexError: the mixture ends before.
          TypeError: ``step`` is not an integer.
        """
        if part not in self._parts:
            raise KeyError(f"{part!r} is none of the parts {', '.join(self._parts)}")
        return self._step(self.turns.step_of(part, as_integer("a step", step)))

    def delivered(self, step: SupportsIndex) -> dict[str, Position]:
        """Where each part stands before the batch of a step: its epochs, offset and batches so far.

        Raises:
          IndexError: the mixture ends before.
          TypeError: ``step`` is not an integer.
        """
        found = {}
        for name, count in self.turns.before(self._step(step, and_end=True)).items():
            pipeline = self._parts[name]
            at_end = count == pipeline.grid.num_steps
            end = Position(pipeline.config.num_epochs or 0, 0, count)
            found[name] = end if at_end else pipeline.position(count)
        return found

    def position(self, step: SupportsIndex) -> Position:
        """The position of a step, which says nothing but its number.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        return Position(0, 0, self._step(step))

    def ids(self, step: SupportsIndex) -> npt.NDArray[Any]:
        """The ``id`` of the batch of a step, padding included, without reading a record.

        Args:
          step: counted from 0 over all parts.

        Returns:
          int64[batch] or str[batch]; -1 or "" in empty slots.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        part, own = self.turn(step)
        return self._parts[part].ids(own)

    def __getitem__(self, step: SupportsIndex) -> Batch:
        """The batch of a step, without iterating.

        Raises:
          IndexError: there is no such batch.
          TypeError: ``step`` is not an integer.
        """
        return self.read(self.position(step))

    def read(
        self,
        position: Position,
        shard: Shard = WHOLE,
        note: Callable[[Masked], None] | None = None,
    ) -> Batch:
        """The batch at a position, or a share of it.

        Args:
          position: its step.
          shard: the share.
          note: is told of each record that is masked; by default it is counted here.

        Raises:
          RecordReadError: a record cannot be read or transformed; its position is the part's own.
        """
        name, own = self.turns.at(position.step)
        batch = self._parts[name].read(self._parts[name].position(own), shard, note)
        part = np.full(len(batch["mask"]), self.turns.names.index(name), np.int32)
        return {"id": batch.pop("id"), "mask": batch.pop("mask"), PART_FIELD: part, **batch}

    def count_masked(self, position: Position, masked: Iterable[Masked]) -> None:
        """Counts records of the batch at a position, which another process has read, as masked."""
        self._parts[self.turns.at(position.step).part].count_masked(position, masked)

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
        """An iterator over the stream, in constant time from any position; as `Pipeline.iterate`.

        Raises:
          TypeError, ValueError: a position that cannot be one of this stream, a device that cannot
            hold its batches, shares that are not equal, or parts that cannot be sent to workers.
        """
        if device is not None:
            check_device(device, self.batch_sizes())
            for pipeline in self._parts.values():
                check_device(device, set(), pipeline.field_dtypes())
        shard = shard_of_process(process_index, process_count, sharding_of(device))
        for pipeline in self._parts.values():
            check_shard(pipeline.config, shard)
        hook = StatsHook.of(on_stats, stats_every)
        return BatchIterator(self, start, read_options, device, on_batch, shard, workers, hook)

    def __iter__(self) -> BatchIterator:
        return self.iterate()

    @property
    def dataset(self) -> NumberedBatches:
        """The stream as a `grain.MapDataset` with a batch as element; as `Pipeline.dataset`."""
        return self.batches_from(Position())

    def batches_from(self, position: Position, shard: Shard = WHOLE) -> NumberedBatches:
        """The batches, or shares of them, from a position on."""
        steps, start = self.grid.num_steps, position.step
        count = None if steps is None else max(0, steps - start)
        return NumberedBatches(
            count,
            lambda number: self.read(Position(0, 0, start + number), shard),
            self,
            position,
            shard,
        )

    def batch_sizes(self) -> set[int]:
        """Lengths of the batch axis that occur."""
        return set[int]().union(*(pipeline.batch_sizes() for pipeline in self._parts.values()))

    @property
    def bad_records(self) -> dict[str, dict[int | str, int]]:
        """By part, the records that ``on_bad_record="mask"`` has masked in this process."""
        return {name: pipeline.bad_records for name, pipeline in self._parts.items()}

    @property
    def bad_count(self) -> int:
        """How many times a record of any part was masked."""
        return sum(pipeline.bad_count for pipeline in self._parts.values())

    def fingerprint(self, *, verify: Verify = "cache") -> Fingerprint:
        """Identity of the content of all parts: a column for each, with the digest of its own.

        Args:
          verify: as for `Pipeline.fingerprint`.
        """
        parts = self._parts.items()
        return combined({name: pipeline.fingerprint(verify=verify) for name, pipeline in parts})

    def settings(self) -> dict[str, Any]:
        """What decides the stream, beside the data and transforms of its parts, as checkpoints hold it.

        Returns:
          JSON values: ``mixture`` (weights, and the version of their turns) and ``parts``, of each
          `Pipeline.settings`.
        """
        return {
            "mixture": {"weights": self.weights, "version": TURNS_VERSION},
            "parts": {name: pipeline.settings() for name, pipeline in self._parts.items()},
        }

    def transforms(self) -> Mapping[str, Callable[..., Any]]:
        """The transforms of the parts that have one."""
        return {
            f"parts.{name}.{what}": transform
            for name, pipeline in self._parts.items()
            for what, transform in pipeline.transforms().items()
        }

    def identity(self, *, verify: Verify = "cache") -> MixtureIdentity:
        """What the mixture is known by to checkpoints; ``verify`` as for `Pipeline.fingerprint`."""
        parts = {name: part.identity(verify=verify) for name, part in self._parts.items()}
        return MixtureIdentity(parts, self.weights, TURNS_VERSION)

    def check_identity(self) -> None:
        """As ``Stream.check_identity``."""
        for pipeline in self._parts.values():
            pipeline.check_identity()

    def diff_next(
        self, before: StreamIdentity, place: Place, iterate: Callable[..., StreamIterator]
    ) -> list[Difference]:
        """As ``Stream.diff_next``; no record is read."""
        del before, iterate
        if place.state is not None:
            raise PlaceError(
                f"a mixture has no state beside its position, such as {place.state!r:.80}"
            )
        try:
            position = self.grid.check(place.position)
        except ValueError as error:
            raise PlaceError(str(error)) from error
        return place.ahead.diff(ids_ahead(self, position))

    def count_steps(self, limit: int) -> int:
        """As ``Stream.count_steps``; no record is read."""
        steps = self.grid.num_steps
        return limit if steps is None else min(steps, limit)

    def first_ids(self, position: Position, limit: int) -> list[int | str]:
        """The first IDs of the batch at a position, at most ``limit``, padding left out."""
        name, own = self.turns.at(position.step)
        return self._parts[name].first_ids(self._parts[name].position(own), limit)

    def _step(self, step: SupportsIndex, *, and_end: bool = False) -> int:
        number = as_integer("a step", step)
        steps = self.grid.num_steps
        if not 0 <= number < min((steps + and_end) if steps is not None else 2**63, 2**63):
            raise IndexError(f"step {number} is not one of the {steps or 'unlimited'} steps from 0")
        return number

    def _num_steps(self) -> int | None:
        ends = [
            self.turns.step_of(name, pipeline.grid.num_steps)
            for name, pipeline in self._parts.items()
            if pipeline.grid.num_steps is not None
        ]
        return min(ends, default=None)


@dataclasses.dataclass(frozen=True)
class MixtureSteps:
    """The borders of a stream whose position is a number of steps.

    Attributes:
      num_steps: batches in all; ``None`` is without end.
    """

    num_steps: int | None

    def is_end(self, position: Position) -> bool:
        """Whether no batch begins there."""
        return self.num_steps is not None and position.step >= self.num_steps

    def after(self, position: Position) -> Position:
        """The place behind the batch at ``position``."""
        return Position(0, 0, position.step + 1)

    def check(self, position: Position) -> Position:
        """Checks that a position can be one of this stream; returns it.

        Raises:
          ValueError: it counts epochs or records, or is beyond the last step.
        """
        if position.epoch or position.offset:
            raise ValueError(
                f"{position} is none of a mixture, which counts steps alone; it belongs to another "
                "stream"
            )
        if self.num_steps is not None and position.step > self.num_steps:
            raise ValueError(
                f"step {position.step} is beyond the {self.num_steps} steps of the mixture; the "
                "position belongs to other data or another configuration"
            )
        return position


def _checked_parts(parts: Mapping[str, Pipeline]) -> dict[str, Pipeline]:
    if not isinstance(parts, Mapping):
        raise TypeError(f"parts must map names to pipelines, not be {parts!r:.80}")
    if not parts:
        raise ValueError("a mixture has at least one part")
    for name, pipeline in parts.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a part's name must be a string that is not empty, not {name!r}")
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"part {name!r} must be a Pipeline, not {type(pipeline).__name__}")
        if PART_FIELD in pipeline.fields:
            raise ValueError(
                f"part {name!r} has a field {PART_FIELD!r}, and a mixture adds its own: give that of the source "
                'another name, Pipeline(..., rename={"part": "..."})'
            )
    ordered = {name: parts[name] for name in sorted(parts)}
    (first, pattern), *others = ordered.items()
    for name, pipeline in others:
        if pipeline.config.record_keys != pattern.config.record_keys:
            raise ValueError(
                f"record_keys is {pattern.config.record_keys} in part {first!r}, and "
                f"{pipeline.config.record_keys} in {name!r}: a training step takes one kind of batch. "
                "Set it in all parts, or in none"
            )
        # What a transform makes of the fields shows in its batches only.
        if pattern.transform is None and pipeline.transform is None:
            kinds = [
                {name: str(field) for name, field in one.fields.items()}
                for one in (pattern, pipeline)
            ]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"the fields of part {first!r} are {kinds[0]}, and those of {name!r} are "
                    f"{kinds[1]}: a training step takes one kind of batch. Give a part a transform "
                    "that makes them alike"
                )
    return ordered
