"""Provenance: each answer by formula is what iterating, record by record, has seen."""

import dataclasses
import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import loader
from loader import ArraySource, Field, Fingerprint, Pipeline, PipelineConfig, Position, Segment

SHUFFLES: Final = ["feistel", "permutation", "none"]
POLICIES: Final = ["pad", "partial", "drop"]
RANGES: Final = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=3
).map(tuple)

#: The module: its name in `loader` is the function's.
module: Final = __import__("sys").modules["loader.audit.provenance"]


@dataclasses.dataclass
class Seen:
    """A batch as it was delivered."""

    position: Position
    ids: list[int]
    mask: list[bool]


def a_source(num_records: int, shift: int = 0) -> ArraySource:
    ids = np.random.default_rng(3).permutation(num_records) + shift if shift else None
    return ArraySource({"x": np.arange(num_records)}, ids)


def a_config(**settings: Any) -> PipelineConfig:
    usual = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 3}
    return PipelineConfig(**{**usual, **settings})


def a_legal_config(num_records: int, **settings: Any) -> PipelineConfig:
    """A config with what of ``skip`` and ``exclude`` there is in the stream; one that delivers anything."""
    plain = a_config(**{**settings, "skip": (), "exclude": ()})
    assume(plain.final_batch != "drop" or plain.batch_size <= num_records)
    end = loader.Segment(num_records, plain).num_steps
    assert end is not None
    config = a_config(
        **{
            **settings,
            "skip": [pair for pair in settings.get("skip", ()) if pair[0] < end],
            "exclude": [row for row in settings.get("exclude", ()) if row < num_records],
        }
    )
    assume(loader.Segment(num_records, config).num_steps)
    return config


def a_run(
    source: ArraySource, plan: Sequence[tuple[PipelineConfig, int | None]]
) -> tuple[list[Segment], list[Seen], Position]:
    """Iterates so many steps under each config in turn: the segments, the batches, and where it ends."""
    position, segments, seen = Position(), [], []
    for config, steps in plan:
        segments.append(Segment(len(source), config, position))
        iterator = Pipeline(source, config).iterate(position)
        for _ in itertools.count() if steps is None else range(steps):
            begin = iterator.position
            batch = next(iterator, None)
            if batch is None:
                break
            seen.append(Seen(begin, batch["id"].tolist(), batch["mask"].tolist()))
        position = iterator.position
    return segments, seen, position


def check(
    source: ArraySource, segments: list[Segment], seen: list[Seen], stop: Position | None
) -> None:
    """Compares every answer about a run with what it has seen."""
    found = loader.Provenance(segments, stop, source)
    assert found.num_steps == len(seen)
    came: dict[tuple[int, int], tuple[int, int, bool]] = {}
    for step, batch in enumerate(seen):
        records = found.records_at(step)
        ids, count = batch.ids, len(records.rows)
        assert records.ids is not None
        assert records.excluded is not None
        assert Position(records.epoch, records.offset, records.step) == batch.position
        assert records.step == step
        assert records.ids.tolist() == ids[:count]
        assert records.ids.tolist() == source.ids(records.rows).tolist()
        assert set(ids[count:]) <= {-1}
        assert records.slots == len(ids)
        assert (~records.excluded).tolist() + [False] * (len(ids) - count) == batch.mask
        for slot, record_id in enumerate(ids[:count]):
            came[record_id, batch.position.epoch] = (step, slot, not batch.mask[slot])
    for step in (-1, len(seen), len(seen) + 10**9):
        with pytest.raises(IndexError, match="step"):
            found.records_at(step)
    epochs = range(segments[-1].config.num_epochs or 0)
    for row, record_id in enumerate(source.ids(np.arange(len(source))).tolist()):
        assert found.row_of(record_id) == row
        visits = found.steps_of(record_id, epochs)
        assert found.steps_of_row(row, epochs) == visits
        assert found.steps_of(record_id) == [v for v in visits if v.epoch in (found.epochs or ())]
        for epoch, visit in zip(epochs, visits, strict=True):
            order = loader.epoch_order(
                len(source), segments[0].config.seed, epoch, segments[0].config.shuffle
            )
            assert (visit.epoch, order[visit.offset]) == (epoch, row)
            told = (visit.step, visit.slot, visit.excluded)
            if (record_id, epoch) in came:
                assert visit.outcome == "delivered"
                assert told == came[record_id, epoch]
            else:
                assert visit.outcome != "delivered"
                assert told[:2] == (None, None)
                reached = stop is None or (epoch, visit.offset) < (stop.epoch, stop.offset)
                assert (visit.outcome == "ahead") == (not reached)


@given(
    num_records=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    shuffle=st.sampled_from(SHUFFLES),
    final_batch=st.sampled_from(POLICIES),
    skip=RANGES,
    exclude=st.sets(st.integers(0, 23), max_size=3),
)
def test_of_a_whole_stream_it_tells_what_iterating_sees(
    num_records: int, batch_size: int, shuffle: Any, final_batch: Any, skip: Any, exclude: Any
) -> None:
    config = a_legal_config(
        num_records,
        batch_size=batch_size,
        shuffle=shuffle,
        final_batch=final_batch,
        skip=skip,
        exclude=sorted(exclude),
    )
    source = a_source(num_records, 100)
    config = dataclasses.replace(
        config, exclude=tuple(row + 100 for row in sorted(exclude) if row < num_records)
    )
    segments, seen, stop = a_run(source, [(config, None)])
    check(source, segments, seen, None)
    check(source, segments, seen, stop)
    found = loader.provenance(Pipeline(source, config))
    assert (found.segments, found.stop, found.source) == ((segments[0],), None, source)


CHANGES = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 9)},
    optional={"skip": RANGES, "exclude": st.sets(st.integers(0, 23), max_size=3).map(sorted)},
)


@given(
    num_records=st.integers(9, 23),
    shuffle=st.sampled_from(SHUFFLES),
    final_batch=st.sampled_from(POLICIES),
    changes=st.lists(st.tuples(CHANGES, st.integers(0, 9)), min_size=1, max_size=4),
)
@example(10, "none", "drop", [({"batch_size": 4}, 1), ({"batch_size": 7}, 1)])
@example(10, "none", "pad", [({"batch_size": 3}, 1), ({"batch_size": 4, "skip": ((1, 3),)}, 2)])
def test_of_a_run_that_changed_on_the_way_it_tells_what_iterating_saw(
    num_records: int, shuffle: Any, final_batch: Any, changes: Any
) -> None:
    """Batch sizes change at any step, so inside epochs too; with what is left out, or without."""
    source = a_source(num_records)
    plan = [
        (a_legal_config(num_records, shuffle=shuffle, final_batch=final_batch, **settings), steps)
        for settings, steps in changes
    ]
    check(source, *a_run(source, plan))
    segments, seen, _ = a_run(source, [*plan[:-1], (plan[-1][0], None)])
    check(source, segments, seen, None)


@given(
    num_records=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    final_batch=st.sampled_from(POLICIES),
    skip=RANGES,
    start=st.integers(0, 100),
    asked=st.integers(0, 30),
)
def test_the_number_of_a_steps_batch_is_what_skip_goes_by(
    num_records: int, batch_size: int, final_batch: Any, skip: Any, start: int, asked: int
) -> None:
    """From any place in an epoch on, as a change of the batch size leaves it."""
    batch_size = min(batch_size, num_records)
    config = a_config(batch_size=batch_size, final_batch=final_batch, skip=skip, num_epochs=None)
    begin = Segment(num_records, config).grid.normal(Position(0, start % num_records, 0))
    segment = Segment(num_records, config, begin)
    places = [segment.position(step) for step in range(40)]
    number = segment.grid.number(places[asked])
    without = dataclasses.replace(config, skip=(*config.skip, (number, number + 1)))
    begin = Segment(num_records, without).grid.normal(begin)
    rest = Segment(num_records, without, begin)
    expected = [(one.epoch, one.offset) for step, one in enumerate(places) if step != asked]
    found = [rest.position(step) for step in range(39)]
    assert [(one.epoch, one.offset) for one in found] == expected


@pytest.mark.parametrize("final_batch", POLICIES)
@pytest.mark.parametrize("steps", range(19))
def test_until_says_how_far_a_run_has_come(final_batch: Any, steps: int) -> None:
    source, config = a_source(11), a_config(batch_size=2, final_batch=final_batch)
    segments, seen, stop = a_run(source, [(config, steps)])
    found = loader.provenance(Pipeline(source, config), min(steps, len(seen)))
    assert found.stop == stop
    check(source, segments, seen, found.stop)


def test_a_record_left_out_is_told_apart_by_its_reason() -> None:
    config = a_config(shuffle="none", final_batch="drop", skip=((1, 2),), exclude=(2,))
    found = loader.provenance(Pipeline(a_source(11), config), until=2)
    told = {row: [(v.outcome, v.excluded) for v in found.steps_of(row)] for row in (1, 2, 5, 9)}
    assert told == {
        1: [("delivered", False), ("delivered", False)],
        2: [("delivered", True), ("delivered", True)],
        5: [("skipped", False), ("ahead", None)],
        9: [("dropped", False), ("ahead", None)],
    }


def test_a_limit_gives_the_first_slots() -> None:
    found = loader.provenance(Pipeline(a_source(11), a_config()))
    whole, few = found.records_at(2), found.records_at(2, limit=2)
    assert (len(whole.rows), whole.slots, few.slots) == (3, 4, 4)
    assert few.rows.tolist() == whole.rows[:2].tolist()
    assert found.records_at(2, limit=9).rows.tolist() == whole.rows.tolist()


class Vast:
    """10**12 records that are computed; an ID is its row, plus a number."""

    fields: Final = {"x": Field(np.dtype(np.int64))}

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def __len__(self) -> int:
        return 10**12

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        return rows + self._shift

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, Any]:
        raise AssertionError("a record was read")

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of_revision("v1", self)


class Indexed(Vast):
    """The same, which looks IDs up itself."""

    def rows_of(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        rows = ids - self._shift
        return np.where((rows >= 0) & (rows < len(self)), rows, -1)


@pytest.mark.parametrize("source", [Vast(), Indexed(5), Indexed(10**15)])
def test_a_trillion_records_take_no_more_memory_than_a_batch(source: Vast) -> None:
    config = a_config(batch_size=256, num_epochs=None, skip=((10**9, 10**10),), exclude=(77,))
    tracemalloc.start()
    try:
        found = loader.provenance(Pipeline(source, config), until=10**11)
        records = found.records_at(10**11 - 1)
        assert records.ids is not None
        record_id = records.ids.tolist()[200]
        visits = found.steps_of(record_id)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (visits[records.epoch].step, visits[records.epoch].slot) == (10**11 - 1, 200)
    assert [visit.epoch for visit in visits] == list(range(records.epoch + 1))
    assert peak < 1 << 20


@given(step=st.integers(0, 10**13), slot=st.integers(0, 6))
def test_at_a_trillion_records_each_question_inverts_the_other(step: int, slot: int) -> None:
    config = a_config(batch_size=7, num_epochs=None, skip=((3, 10**10),))
    changed = dataclasses.replace(config, batch_size=9)
    start = Segment(10**12, config).position(10**6)
    found = loader.Provenance([Segment(10**12, config), Segment(10**12, changed, start)])
    records = found.records_at(step)
    slot %= len(records.rows)
    (visit,) = found.steps_of_row(records.rows[slot], range(records.epoch, records.epoch + 1))
    assert (visit.outcome, visit.step, visit.slot) == ("delivered", step, slot)
    assert visit.excluded is False


@pytest.mark.parametrize("kind", [int, str])
@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_every_id_is_found_and_no_other(
    kind: type, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    ids = [kind(number) for number in (5, 0, 12, 3, 999)]
    source = ArraySource({"x": np.zeros(5)}, ids)
    found = loader.provenance(Pipeline(source, a_config()))
    assert [found.row_of(record_id) for record_id in ids] == list(range(5))
    for absent in (1, 4, 1000, -1, 2**63, 10**30):
        with pytest.raises(KeyError, match="no record has the ID"):
            found.row_of(kind(absent))
    other = str if kind is int else int
    with pytest.raises(KeyError, match="the IDs are"):
        found.row_of(other(5))
    for wrong in (True, 1.0, None):
        with pytest.raises(KeyError, match="an ID is an integer or a string"):
            found.row_of(wrong)  # type: ignore[arg-type]


def test_all_ids_are_read_once_however_many_are_asked_for() -> None:
    read: list[int] = []

    class Source(ArraySource):
        def ids(self, rows: Any, /) -> Any:
            read.append(len(rows))
            return super().ids(rows)

    source = Source({"x": np.zeros(500)}, np.arange(500) + 1000)
    found = loader.provenance(Pipeline(source, a_config()))
    assert [found.row_of(i) for i in range(1000, 1500)] == list(range(500))
    assert read.count(500) == 1


def test_a_source_that_looks_up_wrongly_is_not_believed() -> None:
    class Wrong(Indexed):
        def rows_of(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
            return super().rows_of(ids) + 1

    found = loader.provenance(Pipeline(Wrong(10**15), a_config()))
    with pytest.raises(KeyError, match="no record has the ID"):
        found.row_of(10**15)


def test_ids_too_many_to_be_sorted_need_the_sources_help() -> None:
    found = loader.provenance(Pipeline(Vast(10**15), a_config()))
    with pytest.raises(ValueError, match=r"has to offer rows_of\(ids\)"):
        found.row_of(10**15 + 3)


def test_without_ids_there_are_rows() -> None:
    config = a_config(exclude=(3,))
    found = loader.Provenance([Segment(11, config)])
    records = found.records_at(0)
    assert (records.ids, records.excluded) == (None, None)
    assert records.rows.tolist() == loader.epoch_order(11, 17, 0, stop=4).tolist()
    assert [visit.excluded for visit in found.steps_of_row(3)] == [None] * 3
    with pytest.raises(ValueError, match="give the source of the records, or ask by row"):
        found.steps_of(3)


def test_a_stream_without_end_asks_which_epochs() -> None:
    found = loader.provenance(Pipeline(a_source(11), a_config(num_epochs=None)))
    assert (found.num_steps, found.epochs) == (None, None)
    with pytest.raises(ValueError, match="say in which epochs"):
        found.steps_of(3)
    assert [visit.epoch for visit in found.steps_of(3, range(10**9, 10**9 + 2))] == [
        10**9,
        10**9 + 1,
    ]
    assert found.steps_of(3, range(0)) == []


@pytest.mark.parametrize("step", [1.0, "1", None, True])
def test_what_is_no_integer_is_no_step_no_row_and_no_count(step: Any) -> None:
    pipeline = Pipeline(a_source(11), a_config())
    found = loader.provenance(pipeline)
    with pytest.raises(TypeError, match="a step is an integer"):
        found.records_at(step)
    with pytest.raises(TypeError, match="a row is an integer"):
        found.steps_of_row(step)
    if step is not None:
        with pytest.raises(TypeError, match="until is an integer"):
            loader.provenance(pipeline, until=step)


@pytest.mark.parametrize("row", [-1, 11])
def test_a_row_that_there_is_not_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match="is not one of the 11 rows"):
        loader.provenance(Pipeline(a_source(11), a_config())).steps_of_row(row)


@pytest.mark.parametrize("until", [-1, 10])
def test_no_more_steps_are_done_than_there_are(until: int) -> None:
    with pytest.raises(ValueError, match=f"until is {until}, and the stream has 9 steps"):
        loader.provenance(Pipeline(a_source(11), a_config()), until)


@pytest.mark.parametrize("epochs", [range(-1, 2), range(2, 4), range(3, 4)])
def test_epochs_that_there_are_not_are_refused(epochs: range) -> None:
    found = loader.provenance(Pipeline(a_source(11), a_config()))
    with pytest.raises(ValueError, match="is not one of the 3 from 0"):
        found.steps_of(3, epochs)


def test_segments_that_are_not_of_one_run_are_refused() -> None:
    first, second = Segment(11, a_config()), a_config(batch_size=2)
    begin = Position(0, 8, 2)
    for segments, stop, message in [
        ([], None, "at least one segment"),
        ([Segment(11, a_config(), begin)], None, "a run begins at"),
        ([first, Segment(12, second, begin)], None, "one order of one number"),
        ([first, Segment(11, a_config(seed=3), begin)], None, "one order of one number"),
        ([first, Segment(11, second, Position(0, 7, 2))], None, "a segment cannot begin at"),
        ([first, Segment(11, second, Position(0, 8, 3))], None, "a segment cannot begin at"),
        ([first, Segment(11, second, begin)], Position(0, 4, 1), "is no place"),
        ([first], Position(3, 0, 10), "is no place"),
    ]:
        with pytest.raises(ValueError, match=message):
            loader.Provenance(segments, stop)
    assert loader.Provenance([first, Segment(11, second, begin)], begin).num_steps == 2
