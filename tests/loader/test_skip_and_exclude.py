"""Batches and records that a run leaves out: nobody else's place moves, and resumes stay exact."""

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loader
from checkpointing import CheckpointMismatchError, Checkpoints, load
from loader import ArraySource, Pipeline, PipelineConfig, Position

N, EPOCHS = 23, 3
IDS = np.arange(100, 100 + N)

RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=3
)


def a_pipeline(**settings: Any) -> Pipeline:
    chosen: dict[str, Any] = {"batch_size": 4, "seed": 17, "final_batch": "pad"}
    config = PipelineConfig(**{**chosen, "num_epochs": EPOCHS, **settings})
    return Pipeline(ArraySource({"x": np.arange(1.0, N + 1)}, IDS), config)


def batches(stream: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in stream]


def left_out(ranges: Any, numbers: Iterator[int]) -> list[int]:
    return [n for n in numbers if not any(first <= n < end for first, end in ranges)]


@given(ranges=RANGES, final_batch=st.sampled_from(["pad", "partial", "drop"]))
def test_skipped_batches_are_left_out_and_the_others_stay_as_they_are(
    ranges: Any, final_batch: str
) -> None:
    whole = batches(a_pipeline(final_batch=final_batch))
    numbers = left_out(ranges, iter(range(len(whole))))
    if not numbers:
        with pytest.raises(ValueError, match="skip leaves out every batch"):
            a_pipeline(final_batch=final_batch, skip=ranges)
        return
    pipeline = a_pipeline(final_batch=final_batch, skip=ranges)
    expected = [whole[number] for number in numbers]
    assert len(pipeline) == len(pipeline.dataset) == len(expected)
    assert batches(pipeline) == expected
    assert batches(pipeline.dataset) == expected
    assert batches(pipeline[step] for step in range(len(pipeline))) == expected
    assert [pipeline.ids(step).tolist() for step in range(len(pipeline))] == expected
    states = []
    iterator = pipeline.iterate()
    for _ in range(len(expected)):
        states.append(iterator.get_state())
        next(iterator)
    for step, state in enumerate(states):
        assert state["step"] == step
        fresh = pipeline.iterate()
        fresh.set_state(state)
        assert batches(fresh) == expected[step:]


@given(
    ranges=RANGES,
    offset=st.integers(0, N),
    epoch=st.integers(0, EPOCHS - 1),
    final_batch=st.sampled_from(["pad", "partial", "drop"]),
)
def test_a_start_anywhere_passes_over_the_same_batches_with_threads_and_without(
    ranges: Any, offset: int, epoch: int, final_batch: str
) -> None:
    """Also from inside a gap, and off the grid, where a batch counts by the number it begins in."""
    if not left_out(
        ranges, iter(range(EPOCHS * a_pipeline(final_batch=final_batch).steps_per_epoch))
    ):
        return
    start = Position(epoch, offset, 5)
    plain = a_pipeline(final_batch=final_batch)
    expected = []
    iterator = plain.iterate(start)
    while not plain.grid.is_end(iterator.position):
        number = plain.grid.number(iterator.position)
        ids = next(iterator)["id"].tolist()
        if not any(first <= number < end for first, end in ranges):
            expected.append(ids)
    pipeline = a_pipeline(final_batch=final_batch, skip=ranges)
    assert batches(pipeline.iterate(start)) == expected
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = pipeline.iterate(start, read_options=threads)
    assert batches(iterator) == expected
    assert iterator.position.step == 5 + len(expected)


def test_a_skipped_range_may_be_vast() -> None:
    pipeline = a_pipeline(num_epochs=None, skip=[(3, 10**15)])
    assert pipeline.iterate(pipeline.position(3)).position == Position(10**15 // 6, 16, 3)
    assert pipeline.ids(3).tolist() == a_pipeline(num_epochs=None).ids(10**15).tolist()


@pytest.mark.parametrize("final_batch", ["pad", "partial", "drop"])
def test_excluded_records_keep_their_slot_and_are_never_read(final_batch: str) -> None:
    read: list[int] = []

    class Source(ArraySource):
        def read(self, rows: Any, /) -> dict[str, Any]:
            read.extend(rows.tolist())
            return super().read(rows)

    config = a_pipeline(final_batch=final_batch).config
    exclude = [103, 111, 122]
    source = Source({"x": np.arange(1.0, N + 1)}, IDS)
    settings = {**config.to_dict(), "exclude": exclude}
    pipeline = Pipeline(source, PipelineConfig.from_dict(settings), lambda b: {"x": b["x"] * 2})
    for found, plain in itertools.zip_longest(pipeline, a_pipeline(final_batch=final_batch)):
        assert found["id"].tolist() == plain["id"].tolist()
        gone = np.isin(plain["id"], exclude)
        assert found["mask"].tolist() == (plain["mask"] & ~gone).tolist()
        assert found["x"].tolist() == np.where(found["mask"], 2 * plain["x"], 0).tolist()
    assert not {3, 11, 22} & set(read)


def test_a_batch_of_excluded_records_only_has_the_structure_of_the_others() -> None:
    pipeline = a_pipeline(exclude=a_pipeline().ids(2))
    batch = pipeline[2]
    assert batch["id"].tolist() == a_pipeline().ids(2).tolist()
    assert not batch["mask"].any()
    assert (batch["x"].dtype, batch["x"].tolist()) == (np.float64, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("skip", [(3, 3)], ValueError),
        ("skip", [(-1, 3)], ValueError),
        ("skip", [(1, 2, 3)], ValueError),
        ("skip", [(1.0, 2)], ValueError),
        ("skip", [(False, 2)], ValueError),
        ("skip", 3, TypeError),
        ("exclude", [-1], ValueError),
        ("exclude", [""], ValueError),
        ("exclude", [1, "a"], ValueError),
        ("exclude", [1.5], ValueError),
        ("exclude", [2**63], ValueError),
        ("exclude", "abc", TypeError),
    ],
)
def test_bad_ranges_and_ids_are_named(setting: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"'{setting}' must be"):
        a_pipeline(**{setting: value})


def test_the_same_ranges_make_the_same_config_however_they_are_written(
    tmp_path: pathlib.Path,
) -> None:
    first = a_pipeline(skip=[(1, 3), (8, 9)], exclude=[101, 105]).config
    second = a_pipeline(skip=((8, 9), (2, 3), (1, 2)), exclude=np.array([105, 101, 105])).config
    assert first == second
    assert PipelineConfig.from_dict(first.to_dict()) == first
    text = "batch_size = 4\nseed = 17\nfinal_batch = 'pad'\nnum_epochs = 3\n"
    (tmp_path / "c.toml").write_text(text + "skip = [[1, 3], [8, 9]]\nexclude = [101, 105]\n")
    assert PipelineConfig.from_toml(tmp_path / "c.toml") == first


def run(directory: pathlib.Path, pipeline: Pipeline, steps: int | None = None, **how: Any) -> Any:
    """Trains some steps; returns the batches' IDs."""
    with Checkpoints(directory, pipeline, 1, 100) as checkpoints:
        resumed = checkpoints.resume({"sum": np.zeros(())}, **how)
        state, seen = resumed.train_state, []
        for batch in itertools.islice(resumed.batches, steps):
            state = {"sum": state["sum"] + batch["x"].sum()}
            seen.append(batch["id"].tolist())
            checkpoints.save(resumed.batches, state)
    return seen


def test_batches_ahead_may_be_skipped_at_a_resume_and_it_is_recorded(
    tmp_path: pathlib.Path,
) -> None:
    whole = batches(a_pipeline())
    assert run(tmp_path, a_pipeline(), 4) == whole[:4]
    skipping = a_pipeline(skip=[(4, 7), (9, 10)])
    with pytest.raises(CheckpointMismatchError, match=r"skip +checkpoint \[\] +now \[\[4, 7\]"):
        run(tmp_path, skipping)
    assert run(tmp_path, skipping, 1, allow={"skip"}) == whole[7:8]
    assert run(tmp_path, skipping) == [whole[8], *whole[10:]]
    history = load(tmp_path)[0].history
    assert [change["changed"] for change in history] == [{"skip": [[], [[4, 7], [9, 10]]]}]
    assert history[0]["position"]["step"] == 4


def test_batches_behind_cannot_be_skipped_any_more(tmp_path: pathlib.Path) -> None:
    run(tmp_path, a_pipeline(), 4)
    with pytest.raises(ValueError, match=r"is at batch 4, and skip changes before it, from"):
        run(tmp_path, a_pipeline(skip=[(3, 7)]), allow={"skip"})
    assert load(tmp_path)[0].step == 4


def test_a_range_may_grow_at_its_end_while_the_run_is_before_or_in_it(
    tmp_path: pathlib.Path,
) -> None:
    whole = batches(a_pipeline())
    assert run(tmp_path, a_pipeline(skip=[(2, 4)]), 2) == whole[:2]
    assert run(tmp_path, a_pipeline(skip=[(2, 6)]), 1, allow={"skip"}) == whole[6:7]
    with pytest.raises(ValueError, match="is at batch 7, and skip changes before it"):
        run(tmp_path, a_pipeline(skip=[(2, 8)]), allow={"skip"})


@pytest.mark.parametrize(
    ("exclude", "kind", "named"),
    [
        (["5"], TypeError, "exclude holds '5', and the source's IDs are like 100"),
        ([100, 7], ValueError, r"exclude holds 7 \(1 such IDs\), which no record has"),
    ],
)
def test_an_excluded_id_that_no_record_has_is_refused(
    exclude: Any, kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        a_pipeline(exclude=exclude)


def test_skipped_batches_are_not_taken_for_others_when_the_batch_size_changes(
    tmp_path: pathlib.Path,
) -> None:
    """Their numbers count batches: at another size the same numbers are other records."""
    run(tmp_path, a_pipeline(skip=[(4, 6)]), 6)  # at epoch 1, offset 8
    with pytest.raises(ValueError, match=r"skip has batches 4 to 5, counted in batches of 4"):
        run(tmp_path, a_pipeline(skip=[(4, 6)], batch_size=8), allow={"batch_size"})
    with pytest.raises(ValueError, match=r"ranges from batch 4 on, and allow"):
        run(tmp_path, a_pipeline(skip=[(3, 5)], batch_size=8), allow={"batch_size", "skip"})
    seen = run(tmp_path, a_pipeline(skip=[(5, 6)], batch_size=8), allow={"batch_size", "skip"})
    plain = a_pipeline(batch_size=8)
    assert seen == batches(plain[step] for step in (4, 6, 7, 8))


def test_skipped_batches_long_passed_are_no_matter_when_the_batch_size_changes(
    tmp_path: pathlib.Path,
) -> None:
    run(tmp_path, a_pipeline(skip=[(1, 2)]), 7)  # at epoch 1, offset 8
    seen = run(tmp_path, a_pipeline(skip=[(1, 2)], batch_size=8), allow={"batch_size"})
    assert seen == batches(a_pipeline(batch_size=8).iterate(Position(1, 8, 7)))


def test_records_may_be_excluded_at_a_resume(tmp_path: pathlib.Path) -> None:
    whole = batches(a_pipeline())
    run(tmp_path, a_pipeline(), 4)
    gone = whole[4][1]
    excluding = a_pipeline(exclude=[gone])
    with pytest.raises(CheckpointMismatchError, match="exclude"):
        run(tmp_path, excluding)
    assert run(tmp_path, excluding, allow={"exclude"}) == whole[4:]
    assert load(tmp_path)[0].history[0]["changed"] == {"exclude": [[], [gone]]}


def test_the_masked_mean_leaves_excluded_records_out() -> None:
    batch = a_pipeline(exclude=a_pipeline().ids(0)[:2])[0]
    real = np.searchsorted(IDS, batch["id"][2:]) + 1.0
    assert loader.masked_mean(batch["x"], batch["mask"]) == real.mean()
