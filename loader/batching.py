"""Where batches begin and end, and what the last one of an epoch looks like.

Words: an epoch has ``num_records`` positions; a batch is a stretch of them; ``offset`` counts the
records of the current epoch that have been delivered; ``step`` counts batches from the start.
"""

import dataclasses
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from loader.config import PipelineConfig

Batch = dict[str, Any]
#: What became of a record in an epoch.
Outcome = Literal["delivered", "skipped", "dropped", "ahead"]

_LIMIT: Final = 2**63


@dataclasses.dataclass(frozen=True, order=True, init=False)
class Position:
    """A place in the stream, between two batches.

    Attributes:
      epoch: passes over the data that are complete.
      offset: records of the current pass that have been delivered.
      step: batches delivered in all.
    """

    epoch: int = 0
    offset: int = 0
    step: int = 0

    def __init__(self, epoch: int = 0, offset: int = 0, step: int = 0) -> None:
        # Made once a batch: the usual case must cost next to nothing. (Of several integers' bits, | is
        # negative if one of them is.)
        if not (
            type(epoch) is type(offset) is type(step) is int and 0 <= epoch | offset | step < _LIMIT
        ):
            epoch, offset, step = (
                _checked(name, value)
                for name, value in (("epoch", epoch), ("offset", offset), ("step", step))
            )
        fields = self.__dict__
        fields["epoch"], fields["offset"], fields["step"] = epoch, offset, step


def _checked(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} of a position must be an integer, not {value!r}") from None
    if not 0 <= value < _LIMIT:
        raise ValueError(f"{name} of a position must be 0 to 2**63 - 1, not {value}")
    return int(value)


def as_integer(what: str, value: Any) -> int:
    """A number that counts something, from any kind of integer.

    Args:
      what: it is, for the message, such as ``"a step"``.
      value: given for it.

    Raises:
      TypeError: it is something else, a truth value, say.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an integer, not {value!r:.80}") from None


def as_length(num_steps: int) -> int:
    """A number of batches, as ``len`` can give it.

    Raises:
      OverflowError: it is too large for that.
    """
    if num_steps > sys.maxsize:
        raise OverflowError(
            f"the stream has {num_steps} batches, and len() can tell of {sys.maxsize} at most: num_epochs is "
            "too large. It can be iterated all the same; None is the num_epochs of a stream without end"
        )
    return num_steps


@dataclasses.dataclass(frozen=True)
class Grid:
    """The batch borders of a stream: the same in each epoch.

    Attributes:
      num_records: records in an epoch.
      config: its batch size, final-batch policy and number of epochs are used.
    """

    num_records: int
    config: PipelineConfig

    @property
    def delivered_per_epoch(self) -> int:
        """Records that an epoch delivers: all, or under ``"drop"`` those that fill batches."""
        if self.config.final_batch == "drop":
            return self.num_records // self.config.batch_size * self.config.batch_size
        return self.num_records

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.steps_after(0)

    def steps_after(self, offset: int) -> int:
        """Batches in what is left of an epoch of which ``offset`` records have been delivered."""
        left = self.num_records - offset
        if self.config.final_batch == "drop":
            return left // self.config.batch_size
        return -(-left // self.config.batch_size)

    @property
    def num_steps(self) -> int | None:
        """Batches delivered in all; ``None`` where ``num_epochs`` is."""
        if self.config.num_epochs is None:
            return None
        total = self.config.num_epochs * self.steps_per_epoch
        return total - sum(min(end, total) - min(first, total) for first, end in self.config.skip)

    def number(self, position: Position) -> int:
        """Number of the batch that begins at ``position``, as `PipelineConfig.skip` counts them."""
        return position.epoch * self.steps_per_epoch + position.offset // self.config.batch_size

    def position(self, step: int) -> Position:
        """Where the batch of a step begins, in a run that never changed its batch size."""
        epoch, batch = divmod(passing(self.config.skip, step), self.steps_per_epoch)
        return Position(epoch, batch * self.config.batch_size, step)

    def stop(self, position: Position) -> int:
        """Offset at which the batch that begins at ``position`` ends."""
        return min(position.offset + self.config.batch_size, self.num_records)

    def normal(self, position: Position) -> Position:
        """The same place, where a batch begins that is delivered.

        An epoch's end is the next one's start, and the first batch of a skipped range is the first
        one behind it.
        """
        left = self.num_records - position.offset
        if left <= 0 or (self.config.final_batch == "drop" and left < self.config.batch_size):
            position = Position(position.epoch + 1, 0, position.step)
        if self.is_end(position) or not self.config.skip:
            return position
        number = self.number(position)
        end = next((end for first, end in self.config.skip if first <= number < end), None)
        if end is None:
            return position
        epoch, batch = divmod(end, self.steps_per_epoch)
        if epoch == position.epoch:
            # Behind a start off the grid, the epoch's batches stay off it.
            offset = position.offset + (end - number) * self.config.batch_size
            return self.normal(Position(epoch, min(offset, self.num_records), position.step))
        if self.config.num_epochs is not None and epoch >= self.config.num_epochs:
            return Position(self.config.num_epochs, 0, position.step)
        return self.normal(Position(epoch, batch * self.config.batch_size, position.step))

    def after(self, position: Position) -> Position:
        """The place behind the batch that begins at ``position``."""
        size = self.config.batch_size
        offset = position.offset + size
        if offset + size <= self.num_records and not self.config.skip:
            return Position(position.epoch, offset, position.step + 1)  # as nearly always
        return self.normal(Position(position.epoch, self.stop(position), position.step + 1))

    def is_end(self, position: Position) -> bool:
        """Whether no batch begins there."""
        return self.config.num_epochs is not None and position.epoch >= self.config.num_epochs

    def check(self, position: Position) -> Position:
        """Checks that a position can be one of this stream; returns it in its normal form.

        Raises:
          ValueError: an offset beyond the records, or an epoch beyond the last.
        """
        if position.offset > self.num_records:
            raise ValueError(
                f"offset {position.offset} is beyond an epoch of {self.num_records} records; the "
                "position belongs to other data"
            )
        epochs = self.config.num_epochs
        if epochs is not None and (position.epoch, position.offset) > (epochs, 0):
            raise ValueError(
                f"epoch {position.epoch}, offset {position.offset} is beyond the end of "
                f"{epochs} epochs; the position belongs to another configuration"
            )
        return self.normal(position)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of a run under one config.

    Batches in it are counted by an index from its start on, those that `PipelineConfig.skip` leaves
    out included.

    Attributes:
      num_records: in an epoch.
      config: what decided the stream there.
      start: where it begins: in the middle of an epoch, it may stand off the grid of batches.
    """

    num_records: int
    config: PipelineConfig
    start: Position = dataclasses.field(default_factory=Position)

    @functools.cached_property
    def grid(self) -> Grid:
        """The batch borders of an epoch that begins under this config."""
        return Grid(self.num_records, self.config)

    @functools.cached_property
    def num_steps(self) -> int | None:
        """Batches delivered from the start on, if it stays the last segment; ``None`` if without end."""
        if self.config.num_epochs is None:
            return None
        batches = self._index(self.config.num_epochs * self.grid.steps_per_epoch)
        return batches - sum(min(end, batches) - min(low, batches) for low, end in self._skipped)

    def position(self, step: int) -> Position:
        """Where the batch of a step begins, ``step`` at or after that of the start."""
        index = passing(self._skipped, step - self.start.step)
        if index < self._first:
            offset = self.start.offset + index * self.config.batch_size
            return Position(self.start.epoch, offset, step)
        epochs, batch = divmod(index - self._first, self.grid.steps_per_epoch)
        epoch, epochs_in_all = self.start.epoch + 1 + epochs, self.config.num_epochs
        if epochs_in_all is not None and epoch >= epochs_in_all:
            return Position(epochs_in_all, 0, step)
        return Position(epoch, batch * self.config.batch_size, step)

    def find(self, epoch: int, offset: int) -> tuple[Outcome, int | None, int | None]:
        """The outcome, step and slot of the record at a place at or after the start.

        Args:
          epoch: counted from 0.
          offset: the record's place in the epoch, counted from 0.

        Returns:
          As `Visit` has them: an outcome, and where it came the step and the slot.
        """
        begin = self.start.offset if epoch == self.start.epoch else 0
        index, slot = divmod(offset - begin, self.config.batch_size)
        if index >= self.grid.steps_after(begin):
            return "dropped", None, None
        if epoch > self.start.epoch:
            index += self._first + (epoch - self.start.epoch - 1) * self.grid.steps_per_epoch
        behind = 0
        for low, end in self._skipped:
            if low <= index < end:
                return "skipped", None, None
            behind += end - low if end <= index else 0
        return "delivered", self.start.step + index - behind, slot

    @functools.cached_property
    def _first(self) -> int:
        """Batches in what is left of the epoch in which the segment begins."""
        return self.grid.steps_after(self.start.offset)

    @functools.cached_property
    def _skipped(self) -> list[tuple[int, int]]:
        """The config's ``skip``, as ranges of indices."""
        ranges = [(self._index(low), self._index(end)) for low, end in self.config.skip]
        return [(low, end) for low, end in ranges if low < end]

    def _index(self, number: int) -> int:
        """How many batches from the start on have a smaller number, as ``skip`` counts them."""
        border = (self.start.epoch + 1) * self.grid.steps_per_epoch
        if number > border:
            return self._first + number - border
        return max(0, min(self._first, number - self.grid.number(self.start)))


def passing(ranges: Sequence[tuple[int, int]], count: int) -> int:
    """The number that follows ``count`` others, when those in ``ranges`` are passed over.

    Args:
      ranges: ``(first, end)`` in rising order, without overlap.
      count: how many numbers, from 0 on, come before it.
    """
    for first, end in ranges:
        if count < first:
            break
        count += end - first
    return count


def spread(batch: Mapping[str, Any], slots: Any, size: int) -> Batch:
    """A batch's records put into some slots of a larger one, whose other slots hold no record.

    Args:
      batch: arrays with a leading axis of k records.
      slots: where they go: int[k], or a slice.
      size: slots of the result.

    Returns:
      Arrays with a leading axis of ``size``; empty slots are zero, with ``id`` -1 or "" and ``mask``
      False.
    """
    filled = {}
    for name, array in batch.items():
        filled[name] = np.zeros((size, *array.shape[1:]), array.dtype)
        if name == "id" and array.dtype.kind != "U":
            filled[name][:] = -1
        filled[name][slots] = array
    return filled


def masked_mean(values: Any, mask: Any) -> Any:
    """Mean over real records only: the sum over unmasked slots, divided by how many values they hold.

    Equal to the mean over the same records in a batch without padding, which a plain ``mean`` over
    padded slots is not.

    Args:
      values: ``[batch, ...]``, a NumPy or JAX array (also traced); what stands in masked slots,
        NaN included, has no influence. (On a gradient it has one where a masked value's own
        derivative is infinite or NaN: replace such a slot's input with ``jnp.where``.)
      mask: ``bool[batch]``, or any shape that is a leading part of that of ``values``.

    Returns:
      A scalar, in the dtype that ``mean`` gives for ``values``; NaN where the mask selects nothing.

    Raises:
      ValueError: the mask's shape is not a leading part of the values' shape.
    """
    xp: Any = np
    for given in (mask, values):
        if hasattr(given, "__array_namespace__") and not isinstance(given, np.ndarray | np.generic):
            xp = given.__array_namespace__()
    values, mask = xp.asarray(values), xp.asarray(mask).astype(bool)
    if mask.ndim == 0 or values.shape[: mask.ndim] != mask.shape:
        raise ValueError(
            f"mask{list(mask.shape)} must match the first axes of values{list(values.shape)}"
        )
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    mask = xp.broadcast_to(mask, values.shape)
    if xp is not np:
        return xp.mean(values, where=mask)
    if not mask.any():  # NumPy would warn of it
        return np.float64(np.nan).astype(np.mean(np.zeros(1, values.dtype)).dtype)
    if values.dtype.kind == "V":
        # NumPy adds bfloat16 up in bfloat16, in which 256 + 1 is 256.
        return np.mean(values.astype(np.float32), where=mask).astype(values.dtype)
    return np.mean(values, where=mask)
