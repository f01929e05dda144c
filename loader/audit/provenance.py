"""Which records came in a step, and in which steps a record came: by formula, with nothing replayed.

A run is a row of segments, each under one config, and each but the first begins where a resume
changed something (the batch size, what is left out).
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from loader import order
from loader.batching import Outcome, Position, Segment, as_integer
from loader.config import PipelineConfig
from loader.identity.records import HasIds, read_ids
from loader.progress import counted
from loader.streams.mixture import Mixture
from loader.streams.pipeline import Pipeline
from loader.streams.turns import Turns

#: Beyond it, an index of all IDs would take gigabytes; a source that large has to look IDs up itself.
INDEX_UP_TO: Final = 1 << 26
_BLOCK: Final = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class StepRecords:
    """What came in a step.

    Attributes:
      step: counted from 0.
      batch: the number of its batch, as `PipelineConfig.skip` counts them, under the config that the step
        came under. It is not the step once a batch was left out, or the batch size has changed.
      epoch: that it belongs to.
      offset: records of the epoch that came before it.
      rows: int64[k], the rows of the records in its first k slots.
      ids: int64[k] or str[k]; ``None`` where nothing at hand tells them.
      excluded: bool[k], slots that came with ``mask`` False, because the config's ``exclude`` names
        their record; ``None`` where that would take the IDs. Under ``on_bad_record="mask"`` slots of
        records that could not be read came so too, which only reading them again can tell.
      slots: of the batch: more than k where it was padded.
      part: of a mixture, whose batch it was; all but ``step`` are as the part itself counts.
    """

    step: int
    batch: int
    epoch: int
    offset: int
    rows: order.Rows
    ids: npt.NDArray[Any] | None
    excluded: npt.NDArray[np.bool_] | None
    slots: int
    part: str | None = None


@dataclasses.dataclass(frozen=True)
class Visit:
    """What became of a record in an epoch.

    Attributes:
      epoch: counted from 0.
      outcome: ``"delivered"``; ``"skipped"``: its batch is one that ``skip`` leaves out;
        ``"dropped"``: under ``final_batch="drop"`` it was among the last that fill no batch;
        ``"ahead"``: the run has not come that far.
      step: in which it came; ``None`` where it did not.
      slot: its place in the batch; ``None`` where it did not come.
      offset: its place in the epoch.
      excluded: whether its slot came with ``mask`` False, because ``exclude`` names the record;
        ``None`` where that would take its ID.
    """

    epoch: int
    outcome: Outcome
    step: int | None
    slot: int | None
    offset: int
    excluded: bool | None


class Provenance:
    """What a run has seen: the records of any step, the steps of any record.

    Each answer takes constant time and memory at any number of records and steps; under
    ``shuffle="permutation"``, those that NumPy needs for the order of an epoch.

    Args:
      segments: of the run, in order.
      stop: how far the run has come; ``None`` answers for all of the stream.
      source: gives the IDs; without one, there are only rows. To find a record by its ID takes
        constant time where the IDs are row numbers, or where the source offers ``rows_of(ids)``: its
        inverse of ``ids(rows)``, int64[k], with -1 for an ID that it does not hold. Otherwise all
        IDs are read and sorted, once.
      ids_from: in words, how the IDs are known.

    Raises:
      ValueError: the segments are not those of one run.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        stop: Position | None = None,
        source: HasIds | None = None,
        ids_from: str = "",
    ) -> None:
        self.segments = tuple(segments)
        self.stop = stop
        self.source = source
        self.ids_from = ids_from
        _check_segments(self.segments, stop)
        config = self.segments[0].config
        self._order = order.EpochOrder(self.num_records, config.seed, config.shuffle)
        self._places = [(one.start.epoch, one.start.offset) for one in self.segments]
        self._steps = [one.start.step for one in self.segments]

    @property
    def num_records(self) -> int:
        """Records in an epoch."""
        return self.segments[0].num_records

    @property
    def num_steps(self) -> int | None:
        """Steps that it answers for; ``None`` where there is no end of them."""
        if self.stop is not None:
            return self.stop.step
        last = self.segments[-1]
        return None if last.num_steps is None else last.start.step + last.num_steps

    @property
    def epochs(self) -> range | None:
        """Epochs that it answers for, the one under way included; ``None`` where there is no end."""
        if self.stop is not None:
            return range(self.stop.epoch + (self.stop.offset > 0))
        epochs = self.segments[-1].config.num_epochs
        return None if epochs is None else range(epochs)

    @functools.cached_property
    def has_text_ids(self) -> bool:
        """Whether IDs are known to be strings."""
        return self.source is not None and _first_id(self.source).dtype.kind == "U"

    def segment_of(self, step: int) -> Segment:
        """The segment that a step belongs to."""
        return self.segments[max(0, bisect.bisect_right(self._steps, step) - 1)]

    def records_at(self, step: SupportsIndex, limit: int | None = None) -> StepRecords:
        """The records of a step.

        Args:
          step: counted from 0.
          limit: only the first ``limit`` slots; by default all.

        Raises:
          IndexError: there is no such step, or none yet.
          TypeError: ``step`` is not an integer.
        """
        step = as_integer("a step", step)
        if not 0 <= step < min(self.num_steps or 2**63, 2**63) or self.num_steps == 0:
            raise IndexError(self._no_step(step))
        segment = self.segment_of(step)
        config, position = segment.config, segment.position(step)
        stop = segment.grid.stop(position)
        slots = config.batch_size if config.final_batch == "pad" else stop - position.offset
        if limit is not None:
            stop = min(stop, position.offset + limit)
        rows = self._order.rows(position.epoch, position.offset, stop)
        ids = None if self.source is None else read_ids(self.source, rows)
        excluded = _excluded(config, rows, ids)
        batch = segment.grid.number(position)
        return StepRecords(step, batch, position.epoch, position.offset, rows, ids, excluded, slots)

    def steps_of(self, record_id: int | str, epochs: range | None = None) -> list[Visit]:
        """What became of a record in each epoch.

        Args:
          record_id: its ID.
          epochs: which ones; by default all so far (see `epochs`).

        Raises:
          KeyError: no record has that ID.
          ValueError: the IDs are not known, or cannot be looked up; an epoch beyond the last; no
            ``epochs`` for a stream without end.
        """
        row = self.row_of(record_id)
        return self._visits(row, record_id, epochs)

    def steps_of_row(self, row: SupportsIndex, epochs: range | None = None) -> list[Visit]:
        """As `steps_of`, for a record given by its row; needs no IDs.

        Raises:
          IndexError: there is no such row.
          TypeError: ``row`` is not an integer.
          ValueError: an epoch beyond the last; no ``epochs`` for a stream without end.
        """
        number = self._row(row)
        return self._visits(number, self.id_of(number), epochs)

    def id_of(self, row: SupportsIndex) -> int | str | None:
        """The ID of the record in a row; ``None`` where nothing at hand tells it.

        Raises:
          IndexError: there is no such row.
          TypeError: ``row`` is not an integer.
        """
        number = self._row(row)
        if self.source is None:
            return None
        found: int | str = read_ids(self.source, np.array([number], np.int64)).tolist()[0]
        return found

    def row_of(self, record_id: int | str) -> int:
        """The row of a record.

        Raises:
          KeyError: no record has that ID.
          ValueError: the IDs are not known, or cannot be looked up.
        """
        if self.source is None:
            raise ValueError(
                "nothing at hand tells which ID belongs to which row: give the source of the "
                "records, or ask by row"
            )
        row = self._lookup.row_of(record_id)
        if row is None:
            raise KeyError(f"no record has the ID {record_id!r:.80}")
        return row

    @functools.cached_property
    def _lookup(self) -> "_Lookup":
        if self.source is None:
            raise ValueError("there is no source")
        return _Lookup(self.source)

    def _visits(self, row: int, record_id: int | str | None, epochs: range | None) -> list[Visit]:
        known = self.epochs
        if epochs is None:
            epochs = known
            if epochs is None:
                raise ValueError(
                    "the stream has no end, and each record comes in each epoch: say in which "
                    "epochs, or how many steps were delivered (until)"
                )
        last = self.segments[-1].config.num_epochs
        for epoch in (epochs[:1] or [0])[0], (epochs[-1:] or [0])[0]:
            if epoch < 0 or (last is not None and epoch >= last):
                raise ValueError(f"epoch {epoch} is not one of the {last or 'unlimited'} from 0")
        return [self._visit(row, record_id, epoch) for epoch in epochs]

    def _visit(self, row: int, record_id: int | str | None, epoch: int) -> Visit:
        config = self.segments[0].config  # seed and shuffle are the same in all
        offset = order.position_of(row, self.num_records, config.seed, epoch, config.shuffle)
        if self.stop is not None and (epoch, offset) >= (self.stop.epoch, self.stop.offset):
            return Visit(epoch, "ahead", None, None, offset, None)
        at = bisect.bisect_right(self._places, (epoch, offset)) - 1
        segment = self.segments[at]
        outcome, step, slot = segment.find(epoch, offset)
        exclude = segment.config.exclude
        excluded = record_id in exclude if record_id is not None or not exclude else None
        return Visit(epoch, outcome, step, slot, offset, excluded)

    def _row(self, row: SupportsIndex) -> int:
        number = as_integer("a row", row)
        if not 0 <= number < self.num_records:
            raise IndexError(f"row {number} is not one of the {self.num_records} rows from 0")
        return number

    def _no_step(self, step: int) -> str:
        if self.stop is None:
            return f"step {step} is not one of the {self.num_steps or 'unlimited'} steps from 0"
        done = f"{self.stop.step} steps are done, numbered from 0"
        return (
            f"step {step} is not done: {done}" if step >= 0 else f"there is no step {step}; {done}"
        )


class MixtureProvenance:
    """What a run on a mixture has seen; answers in steps of the mixture, in constant time.

    Args:
      turns: whose turn each step is.
      parts: by name, the provenance of each part, as far as the run has come in it.
      stop: steps that the run has done; ``None`` answers for all of the stream.
      end: steps of the whole stream; ``None`` is without end.
    """

    def __init__(
        self,
        turns: Turns,
        parts: Mapping[str, Provenance],
        stop: int | None = None,
        end: int | None = None,
    ) -> None:
        self.turns = turns
        self.parts = dict(parts)
        self.stop = stop
        self._end = end

    @property
    def num_steps(self) -> int | None:
        """Steps that it answers for; ``None`` where there is no end of them."""
        return self._end if self.stop is None else self.stop

    def records_at(self, step: SupportsIndex, limit: int | None = None) -> StepRecords:
        """The records of a step, and whose they are; as `Provenance.records_at`."""
        number = as_integer("a step", step)
        if (self.num_steps is not None and number >= self.num_steps) or not 0 <= number < 2**63:
            done = f"the {self.num_steps} " if self.num_steps is not None else "unlimited "
            raise IndexError(f"step {number} is not one of {done}steps from 0")
        turn = self.turns.at(number)
        records = self.parts[turn.part].records_at(turn.step, limit)
        return dataclasses.replace(records, step=number, part=turn.part)

    def steps_of(self, part: str, record_id: int | str, epochs: range | None = None) -> list[Visit]:
        """What became of a part's record in each epoch of the part; as `Provenance.steps_of`.

        Raises:
          KeyError: there is no such part, or no record of it has that ID.
        """
        return self._visits(part, self._part(part).steps_of(record_id, epochs))

    def steps_of_row(
        self, part: str, row: SupportsIndex, epochs: range | None = None
    ) -> list[Visit]:
        """As `steps_of`, for a record given by its row in the part's source; needs no IDs."""
        return self._visits(part, self._part(part).steps_of_row(row, epochs))

    def _part(self, name: str) -> Provenance:
        if name not in self.parts:
            raise KeyError(f"{name!r} is none of the parts {', '.join(self.parts)}")
        return self.parts[name]

    def _visits(self, part: str, visits: list[Visit]) -> list[Visit]:
        found = []
        for visit in visits:
            step = None if visit.step is None else self.turns.step_of(part, visit.step)
            if step is not None and self._end is not None and step >= self._end:
                # The mixture ends in the middle of this part.
                found.append(Visit(visit.epoch, "ahead", None, None, visit.offset, None))
            else:
                found.append(dataclasses.replace(visit, step=step))
        return found


@overload
def provenance(stream: Pipeline, until: SupportsIndex | None = None) -> Provenance: ...
@overload
def provenance(stream: Mixture, until: SupportsIndex | None = None) -> MixtureProvenance: ...
def provenance(
    stream: Pipeline | Mixture, until: SupportsIndex | None = None
) -> Provenance | MixtureProvenance:
    """Return the provenance of a stream whose config never changed.

    Args:
      stream: only IDs are read.
      until: the number of steps that were delivered. Default: all of the stream.

    Raises:
      TypeError: ``stream`` is neither a `Pipeline` nor a `Mixture`; ``until`` is not an integer.
      ValueError: ``until`` is more than the stream's number of steps, or negative.
    """
    if not isinstance(stream, Pipeline | Mixture):
        raise TypeError(
            f"provenance is derived for a Pipeline or a Mixture, not for {type(stream).__name__}"
        )
    steps = stream.grid.num_steps
    stop = None if until is None else _until(until, steps)
    if isinstance(stream, Pipeline):
        return _of_pipeline(stream, stop)
    mixture = stream
    counts = dict.fromkeys(mixture.parts) if stop is None else mixture.turns.before(stop)
    parts = {name: _of_pipeline(mixture.parts[name], count) for name, count in counts.items()}
    return MixtureProvenance(mixture.turns, parts, stop, steps)


def _until(until: SupportsIndex, num_steps: int | None) -> int:
    steps = as_integer("until", until)
    if not 0 <= steps <= min(num_steps if num_steps is not None else 2**63 - 1, 2**63 - 1):
        raise ValueError(f"until is {steps}, and the stream has {num_steps} steps")
    return steps


def _of_pipeline(pipeline: Pipeline, steps: int | None) -> Provenance:
    segment = Segment(len(pipeline.source), pipeline.config)
    stop = None if steps is None else segment.position(steps)
    return Provenance([segment], stop, pipeline.source, "those of the source")


class _Lookup:
    """From IDs to rows: by the source's own means, by a guess that is checked, or by an index."""

    def __init__(self, source: HasIds) -> None:
        self._source = source

    def row_of(self, record_id: int | str) -> int | None:
        if isinstance(record_id, bool | np.bool_) or not isinstance(
            record_id, int | str | np.integer
        ):
            raise KeyError(f"an ID is an integer or a string, not {record_id!r:.80}")
        is_text = _first_id(self._source).dtype.kind == "U"
        if is_text != isinstance(record_id, str):
            kind = "strings" if is_text else "integers"
            raise KeyError(f"no record has the ID {record_id!r:.80}: the IDs are {kind}")
        if not isinstance(record_id, str):
            if not -(2**63) <= record_id < 2**63:
                return None
            if 0 <= record_id < len(self._source) and self._is_at(record_id, int(record_id)):
                return int(record_id)
        if hasattr(self._source, "rows_of"):
            (row,) = np.asarray(self._source.rows_of(np.array([record_id]))).tolist()
        else:
            row = self._row_in_index(record_id)
        return row if 0 <= row < len(self._source) and self._is_at(record_id, row) else None

    def _is_at(self, record_id: int | str, row: int) -> bool:
        return bool(read_ids(self._source, np.array([row], np.int64))[0] == record_id)

    def _row_in_index(self, record_id: int | str) -> int:
        ids, rows = self._index
        at = int(np.searchsorted(ids, np.array([record_id]))[0])
        return int(rows[at]) if at < len(ids) else -1

    @functools.cached_property
    def _index(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """All IDs in rising order, and their rows."""
        total = len(self._source)
        if total > INDEX_UP_TO:
            raise ValueError(
                f"to find a record by its ID among {total}, their source has to offer "
                "rows_of(ids) -> rows; or ask by row"
            )
        blocks = (
            read_ids(self._source, np.arange(low, min(low + _BLOCK, total), dtype=np.int64))
            for low in range(0, total, _BLOCK)
        )
        ids = np.concatenate(list(counted(blocks, "an index of the IDs", total)))
        rows = np.argsort(ids, kind="stable")
        return ids[rows], rows


def _first_id(source: HasIds) -> npt.NDArray[Any]:
    return read_ids(source, np.zeros(1, np.int64))


def _excluded(
    config: PipelineConfig, rows: order.Rows, ids: npt.NDArray[Any] | None
) -> npt.NDArray[np.bool_] | None:
    if not config.exclude:
        return np.zeros(len(rows), np.bool_)
    return None if ids is None else np.isin(ids, np.array(config.exclude))


def _check_segments(segments: Sequence[Segment], stop: Position | None) -> None:
    if not segments:
        raise ValueError("a run has at least one segment")
    if segments[0].start != Position():
        raise ValueError(f"a run begins at {Position()}, not at {segments[0].start}")
    first = segments[0]
    for before, after in itertools.pairwise(segments):
        same = (after.num_records, after.config.seed, after.config.shuffle)
        if same != (first.num_records, first.config.seed, first.config.shuffle):
            raise ValueError("all segments of a run have one order of one number of records")
        if _reached(before, after.start):
            continue
        raise ValueError(f"a segment cannot begin at {after.start} behind one from {before.start}")
    if stop is not None and not _reached(segments[-1], stop):
        raise ValueError(f"{stop} is no place that a segment from {segments[-1].start} comes to")


def _reached(segment: Segment, position: Position) -> bool:
    """Whether a run that follows a segment comes to a position."""
    if position == segment.start:
        return True
    if position.step < segment.start.step or segment.grid.steps_per_epoch == 0:
        return False
    end = segment.num_steps
    inside = end is None or position.step <= segment.start.step + end
    return inside and segment.position(position.step) == position
