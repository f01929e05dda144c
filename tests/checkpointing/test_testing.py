"""The assertions for others' test suites: they pass what is right, and tell what is wrong, where and with whom."""

import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import loader
from checkpointing import testing
from checkpointing.proof.compare import compare_batches
from loader import ArraySource, Mixture, Pipeline, PipelineConfig, Position, ReadOptions

N: Final = 23
IDS: Final = np.arange(100, 100 + N)
Batch = dict[str, Any]


def a_source(ids: Any = IDS) -> ArraySource:
    return ArraySource({"x": np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)}, ids)


def a_pipeline(transform: Any = None, source: Any = None, kind: Any = Pipeline, **more: Any) -> Any:
    settings = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 2, **more}
    return kind(a_source() if source is None else source, PipelineConfig(**settings), transform)


def message(check: Callable[[], None]) -> str:
    with pytest.raises(AssertionError) as caught:
        check()
    return str(caught.value)


# What is right passes


def scaled(batch: Batch) -> Batch:
    draws = loader.uniforms(batch["key"], 1).astype(np.float32)
    return {**batch, "x": batch["x"] * draws}


@pytest.mark.parametrize(
    "make",
    [
        lambda: a_pipeline(scaled, record_keys=True),
        lambda: a_pipeline(final_batch="partial", skip=[(2, 4)], exclude=[103]),
        lambda: a_pipeline(source=a_source([f"f:{i}" for i in range(N)]), final_batch="drop"),
        lambda: a_pipeline(num_epochs=None, shuffle="permutation", batch_size=1),
        lambda: Mixture(
            {"a": a_pipeline(num_epochs=None), "b": a_pipeline(seed=1, num_epochs=None)},
            {"a": 2, "b": 1},
        ),
    ],
    ids=["augmented", "partial", "strings", "endless", "mixture"],
)
def test_what_is_right_passes_and_leaves_nothing_behind(
    make: Callable[[], Any], tmp_path: pathlib.Path
) -> None:
    testing.assert_resumes_exactly(make, tmp_path)
    testing.assert_resumes_exactly(make(), tmp_path, steps=7, stops=[1, 2, 6])
    testing.assert_deterministic(make, hash_seeds=())
    testing.assert_covers_epoch(make)
    testing.assert_covers_epoch(make, ids_only=True)
    assert [*tmp_path.iterdir()] == []


def test_a_transform_is_made_again_in_another_process() -> None:
    testing.assert_deterministic(a_pipeline(scaled, record_keys=True), threads=(), hash_seeds=(3,))


def init() -> dict[str, Any]:
    return {"w": jnp.zeros(2), "key": jax.random.key(7), "step": jnp.zeros((), jnp.int32)}


@jax.jit
def train_step(state: dict[str, Any], batch: Batch) -> dict[str, Any]:
    key, now = jax.random.split(state["key"])
    mean = jax.vmap(loader.masked_mean, (1, None))(batch["x"], batch["mask"])
    w = state["w"] * 0.9 + mean + jax.random.normal(now, (2,))
    return {"w": w, "key": key, "step": state["step"] + 1}


def test_a_training_step_is_tested_with_the_stream_also_where_it_takes_its_buffers(
    tmp_path: pathlib.Path,
) -> None:
    donating = jax.jit(train_step, donate_argnums=0)
    options = ReadOptions(num_threads=2, prefetch_buffer_size=4)
    for step in (train_step, donating):
        testing.assert_resumes_exactly(
            a_pipeline(),
            tmp_path,
            steps=9,
            init=init,
            train_step=step,
            read_options=options,
            device=jax.devices()[0],
        )


class Virtual:
    """A trillion records, whose reads are counted, known by a revision."""

    fields: Final = {"x": loader.Field(np.dtype(np.int64))}

    def __init__(self, num_records: int = 10**12) -> None:
        self.num_records, self.num_read = num_records, 0

    def __len__(self) -> int:
        return self.num_records

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        return rows

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        self.num_read += len(rows)
        return {"x": rows}

    def fingerprint(self) -> loader.Fingerprint:
        return loader.Fingerprint.of_revision("1", self)


def test_of_vast_data_no_more_is_read_than_the_steps_ask_for(tmp_path: pathlib.Path) -> None:
    source = Virtual()
    testing.assert_resumes_exactly(a_pipeline(source=source), tmp_path, steps=6, stops=[2])
    assert source.num_read == 2 * 6 * 4
    source.num_read = 0
    testing.assert_deterministic(
        a_pipeline(source=source), steps=3, threads=(), batch_sizes=(2,), hash_seeds=()
    )
    assert source.num_read == 4 * 3 * 4
    source = Virtual(100_000)
    testing.assert_covers_epoch(a_pipeline(source=source, batch_size=64), 1, ids_only=True)
    assert source.num_read == 0


def test_the_stops_are_those_that_the_seed_picks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    whole = testing._Trial.run_stretch

    def run_stretch(self: Any, stream: Any, begin: int, end: int) -> Any:
        seen[-1].append(begin)
        return whole(self, stream, begin, end)

    monkeypatch.setattr(testing._Trial, "run_stretch", run_stretch)
    for seed in (1, 1, 2):
        seen.append([])
        testing.assert_resumes_exactly(a_pipeline(), tmp_path, steps=12, seed=seed)
    assert seen[0] == seen[1] != seen[2]
    assert all(stops[0] == 0 and len(stops) == 3 for stops in seen)


# What is wrong is told


def counter() -> Callable[[Batch], Batch]:
    calls = itertools.count()

    def transform(batch: Batch) -> Batch:
        x = batch["x"].copy()
        x[2, 1] += next(calls)
        return {**batch, "x": x}

    return transform


def counting() -> Any:
    return a_pipeline(counter())


def test_a_counter_in_a_transform_shows_after_the_first_stop(tmp_path: pathlib.Path) -> None:
    """As in a new process, which begins to count anew."""
    text = message(
        lambda: testing.assert_resumes_exactly(counting, tmp_path, steps=8, stops=[3, 5])
    )
    record, value = counting().ids(3)[2], a_pipeline()[3]["x"][2, 1]
    assert text.splitlines() == [
        "the run that was stopped after 3 steps is not as the one without a stop; the first difference:",
        f"  step 3, slot 2, ID {record}: 'x'",
        f"    without a stop  {value + 3}",
        f"    with stops      {value}",
        "    [1] of the record, 1 of whose 2 elements differ; 1 of 4 records differ",
        *testing._IMPURE.splitlines(),
    ]
    (kept,) = tmp_path.iterdir()
    assert {path.name for path in kept.iterdir()} == {"uninterrupted", "stopped"}


def test_a_counter_in_a_transform_that_is_made_once_shows_at_once(tmp_path: pathlib.Path) -> None:
    text = message(lambda: testing.assert_resumes_exactly(counting(), tmp_path, steps=8))
    assert text.startswith("made a second time, the run is not the same, even before it is stopped")
    assert f"step 0, slot 2, ID {counting().ids(0)[2]}: 'x'" in text
    text = message(lambda: testing.assert_deterministic(counting, hash_seeds=()))
    first = (
        f"again: step 0, field 'x', slot 2, record {counting().ids(0)[2]}: 1 of 4 records differ"
    )
    assert first in text
    assert text.endswith(testing._IMPURE)


def centred(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] - batch["x"].mean()}


def test_a_transform_that_depends_on_the_batch_shows_in_batches_of_another_size(
    tmp_path: pathlib.Path,
) -> None:
    pipeline = a_pipeline(centred)
    record = pipeline.ids(0)[0]
    text = message(lambda: testing.assert_deterministic(pipeline, hash_seeds=()))
    assert text.splitlines()[:2] == [
        "the pipeline does not give the same batches each time; the first difference:",
        f"  in batches of 2: step 0, field 'x', slot 0, record {record}: 4 of 4 records differ",
    ]
    assert "a transform must look at each record alone" in text
    # It may be meant so, and then resumes exactly as long as the batch size stays.
    testing.assert_deterministic(pipeline, batch_sizes=(), hash_seeds=())
    testing.assert_resumes_exactly(pipeline, tmp_path, steps=6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("final_batch", ["pad", "partial", "drop"])
def test_a_transform_of_each_record_alone_passes_in_batches_of_any_size(
    size: int, final_batch: str
) -> None:
    names = [f"{'long' * (i % 3)}{i}" for i in range(N)]
    pipeline = a_pipeline(
        scaled,
        a_source(names),
        final_batch=final_batch,
        record_keys=True,
        exclude=names[2:4],
        skip=[(3, 5)],
    )
    testing.assert_deterministic(
        pipeline, steps=100, threads=(), batch_sizes=(size,), hash_seeds=()
    )


def test_a_transform_that_cannot_be_sent_to_another_process_is_no_silent_pass() -> None:
    pipeline = a_pipeline(lambda batch: batch)
    text = message(lambda: testing.assert_deterministic(pipeline, threads=()))
    assert "the transform cannot be pickled" in text
    assert text.endswith("hash_seeds=() goes without")


def test_a_source_that_changes_is_told_with_the_records_that_have(tmp_path: pathlib.Path) -> None:
    made = itertools.count()

    def drifting() -> Any:
        x = np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)
        x[7] += next(made) > 2
        return a_pipeline(source=ArraySource({"x": x}, IDS))

    text = message(lambda: testing.assert_resumes_exactly(drifting, tmp_path, steps=6, stops=[2]))
    assert text.startswith(
        "the run that was stopped after 2 steps cannot be resumed, though nothing"
    )
    assert re.search(r"dataset\.x .*\(1 of 23 records differs: id 107\)", text)
    assert "must make the same one each time" in text


def test_a_source_that_changes_behind_its_fingerprint_is_told_by_the_batch(
    tmp_path: pathlib.Path,
) -> None:
    class Noisy(Virtual):
        def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
            batch = super().read(rows)
            return {"x": batch["x"] + self.num_read // 25}

    text = message(
        lambda: testing.assert_resumes_exactly(
            a_pipeline(source=Noisy(N)), tmp_path, steps=6, stops=[2]
        )
    )
    assert re.search(r"step 0, slot 0, ID \d+: 'x'\n", text)
    text = message(lambda: testing.assert_covers_epoch(a_pipeline(source=Noisy(N))))
    assert "alignment" in text
    assert "field 'x': not the record's" in text


class Skips(Pipeline):
    """Its iterators begin a batch too late, unless they begin at the start."""

    def iterate(self, start: Position | None = None, **more: Any) -> Any:
        if start is not None and start.step:
            start = self.grid.after(start)
        return super().iterate(start, **more)


class Miscounts(Pipeline):
    """Its iterators deliver a batch too few, and say nothing of it."""

    def iterate(self, start: Position | None = None, **more: Any) -> Any:
        batches = super().iterate(start, **more)
        if start is None:
            next(batches)
        return batches


def test_an_iterator_that_skips_is_told_by_the_first_id_that_is_not_due(
    tmp_path: pathlib.Path,
) -> None:
    pipeline = a_pipeline(kind=Skips)
    text = message(lambda: testing.assert_resumes_exactly(pipeline, tmp_path, steps=8, stops=[3]))
    due, came = pipeline.ids(3)[0], pipeline.ids(4)[0]
    assert text.splitlines()[:4] == [
        "the run that was stopped after 3 steps is not as the one without a stop; the first difference:",
        f"  step 3, slot 0, ID {due}: 'id'",
        f"    without a stop  {due}",
        f"    with stops      {came}",
    ]
    text = message(
        lambda: testing.assert_resumes_exactly(a_pipeline(kind=Miscounts), tmp_path, steps=8)
    )
    assert text.startswith("the run without a stop is no run of its steps in turn")
    assert (
        "after 1 batches: 'position'\n    without a stop  step 1\n    with stops      step 2"
        in text
    )


def test_an_iterator_that_ends_too_early_is_told(tmp_path: pathlib.Path) -> None:
    class Ends(loader.BatchIterator):
        def __next__(self) -> Batch:
            if self.position.step == 5:
                raise StopIteration
            return super().__next__()

    class Shortens(Pipeline):
        def iterate(self, start: Position | None = None, **more: Any) -> Any:
            return super().iterate(start, **more) if start is None else Ends(self, start)

    pipeline = a_pipeline(kind=Shortens)
    text = message(lambda: testing.assert_resumes_exactly(pipeline, tmp_path, steps=8, stops=[3]))
    assert "step 5: 'batch'\n    without a stop  one more" in text
    assert "with stops      the iterator has ended" in text


def test_a_training_step_that_keeps_something_to_itself_is_told_by_its_leaf(
    tmp_path: pathlib.Path,
) -> None:
    calls = itertools.count()

    def counts(state: dict[str, Any], _batch: Batch) -> dict[str, Any]:
        return {"same": state["same"], "w": state["w"] + next(calls) * np.array([0, 1, 0])}

    text = message(
        lambda: testing.assert_resumes_exactly(
            a_pipeline(),
            tmp_path,
            steps=8,
            stops=[3],
            init=lambda: {"same": np.zeros(1), "w": np.zeros(3)},
            train_step=counts,
        )
    )
    assert "  after step 2: train state /w\n    without a stop  float64[3] sha256:" in text
    assert "1 of 3 elements" in text
    assert "it is the training step that ended in other bits" in text


def test_a_part_of_a_mixture_at_fault_is_named(tmp_path: pathlib.Path) -> None:
    def make() -> Mixture:
        good, bad = a_pipeline(num_epochs=None), a_pipeline(centred, seed=1, num_epochs=None)
        return Mixture({"good": good, "bad": bad}, {"good": 2, "bad": 1})

    text = message(lambda: testing.assert_deterministic(make, hash_seeds=()))
    assert text.startswith("part 'bad' of the mixture does not give the same batches each time")
    testing.assert_resumes_exactly(make, tmp_path, steps=6)


# An epoch's coverage


def loses(batches: Iterator[Batch]) -> Iterator[Batch]:
    return (batch for i, batch in enumerate(batches) if i != 2)


def repeats(batches: Iterator[Batch]) -> Iterator[Batch]:
    return itertools.chain.from_iterable([b, b] if i == 2 else [b] for i, b in enumerate(batches))


def swaps(batches: Iterator[Batch]) -> Iterator[Batch]:
    return (
        {**batch, "x": batch["x"][::-1]} if i == 2 else batch for i, batch in enumerate(batches)
    )


@pytest.mark.parametrize(
    ("fault", "found"),
    [(loses, "omissions"), (repeats, "multiplicity"), (swaps, "alignment")],
)
def test_what_stands_between_a_pipeline_and_the_loop_is_audited_too(fault: Any, found: str) -> None:
    pipeline = a_pipeline()
    testing.assert_covers_epoch(pipeline, batches=iter(pipeline))
    testing.assert_covers_epoch(pipeline, 1, batches=pipeline.iterate(Position(1, 0, 6)))
    text = message(lambda: testing.assert_covers_epoch(pipeline, batches=fault(iter(pipeline))))
    assert text.startswith("what was delivered is not what is due.\nFOUND ")
    assert found in text.splitlines()[1]
    assert re.search(r"epoch 0, step \d, place \d: ID \d+", text)


def test_a_source_that_gives_records_in_an_order_of_its_own_is_found() -> None:
    class Sorting(ArraySource):
        def read(self, rows: Any, /) -> Any:
            return super().read(np.sort(rows))

    source = Sorting({"x": np.arange(11.0)})
    told = message(lambda: testing.assert_covers_epoch(a_pipeline(source=source)))
    assert "'x': the source gives another value when rows are asked for in another order" in told


def test_batches_beyond_the_last_epoch_are_seen_and_those_of_the_next_one_are_not() -> None:
    once, twice = a_pipeline(num_epochs=1), a_pipeline()
    text = message(lambda: testing.assert_covers_epoch(once, batches=iter(twice)))
    assert "multiplicity" in text.splitlines()[1]
    skipping = a_pipeline(skip=[(1, 3), (7, 8)])
    testing.assert_covers_epoch(skipping, batches=iter(skipping))
    testing.assert_covers_epoch(skipping, 1, batches=skipping.iterate(Position(1, 0, 4)))


def test_an_oracle_is_asked() -> None:
    testing.assert_covers_epoch(
        a_pipeline(), alignment=lambda b: b["x"][:, 0] == 2 * (b["id"] - 100)
    )
    text = message(
        lambda: testing.assert_covers_epoch(a_pipeline(), alignment=lambda b: b["id"] != 107)
    )
    assert "ID 107: the alignment function says no" in text


def test_a_skipping_pipeline_and_a_mixtures_faults_are_found() -> None:
    class Rereads(Pipeline):
        def read(self, position: Position, *more: Any) -> Batch:
            return super().read(Position(position.epoch, 0, position.step), *more)

    faulty = a_pipeline(kind=Rereads)
    assert "multiplicity" in message(lambda: testing.assert_covers_epoch(faulty))
    mixture = Mixture({"good": a_pipeline(), "bad": faulty}, {"good": 1, "bad": 1})
    text = message(lambda: testing.assert_covers_epoch(mixture))
    assert "part bad:\n  FOUND " in text


# Wrong use


def test_wrong_use_is_refused(tmp_path: pathlib.Path) -> None:
    pipeline = a_pipeline()
    mixture = Mixture({"a": pipeline}, {"a": 1})
    check: Any = testing.assert_resumes_exactly
    for given in (3, None, lambda: 3, a_source()):
        for use in (
            lambda given=given: check(given, tmp_path),
            lambda given=given: testing.assert_deterministic(given),
            lambda given=given: testing.assert_covers_epoch(given),
        ):
            with pytest.raises(
                TypeError, match="or a function without arguments that makes one, not"
            ):
                use()
    for stops in ([], [0], [8], [-1], [3, 12]):
        with pytest.raises(ValueError, match=r"each 1 to 7 in a run of 8, not \["):
            check(pipeline, tmp_path, steps=8, stops=stops)
    for steps in (1, 0):
        with pytest.raises(ValueError, match=f"{steps} step leaves no place for a stop"):
            check(pipeline, tmp_path, steps=steps)
    with pytest.raises(ValueError, match="give init and train_step both"):
        check(pipeline, tmp_path, init=dict)
    with pytest.raises(ValueError, match="takes neither epoch nor batches"):
        testing.assert_covers_epoch(mixture, 1)
    with pytest.raises(ValueError, match="takes neither epoch nor batches"):
        testing.assert_covers_epoch(mixture, batches=[])
    with pytest.raises(ValueError, match="ids_only takes IDs from the pipeline"):
        testing.assert_covers_epoch(pipeline, batches=[], ids_only=True)
    with pytest.raises(ValueError, match="beyond the 2 of the config"):
        testing.assert_covers_epoch(pipeline, 2)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.processes
def test_it_is_imported_on_demand_and_needs_no_pytest() -> None:
    code = (
        "import sys, checkpointing; assert 'checkpointing.testing' not in sys.modules; "
        "import checkpointing.testing; assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Two batches


@pytest.mark.parametrize(
    ("change", "what", "texts", "note"),
    [
        ({"x": np.zeros((2, 3))}, "x", ("float32[2,3]", "float64[2,3]"), ""),
        ({"x": np.zeros((2, 4), np.float32)}, "x", ("float32[2,3]", "float32[2,4]"), ""),
        ({"x": None}, "x", ("float32[2,3]", "absent"), ""),
        ({"more": np.zeros(2)}, "more", ("absent", "float64[2]"), ""),
        ({"mask": np.array([True, False])}, "mask", ("True", "False"), "1 of 2 records differ"),
        ({"id": np.array(["a", "c"])}, "id", ("'b'", "'c'"), "1 of 2 records differ"),
        (
            {"x": np.array([[0, -0.0, 0], [0, 0, 1]], np.float32)},
            "x",
            ("0.0", "-0.0"),
            "[1] of the record, 1 of whose 3 elements differ; 2 of 2 records differ",
        ),
    ],
)
def test_what_differs_between_two_batches_is_told(
    change: Batch, what: str, texts: tuple[str, str], note: str
) -> None:
    batch = {
        "x": np.zeros((2, 3), np.float32),
        "id": np.array(["a", "b"]),
        "mask": np.ones(2, np.bool_),
    }
    assert compare_batches("here", batch, dict(batch)) == []
    wide = {**batch, "id": batch["id"].astype("U9")}
    assert compare_batches("here", batch, wide) == []
    other = {name: value for name, value in {**batch, **change}.items() if value is not None}
    (found,) = compare_batches("here", batch, other)
    assert (found.what, (found.reference, found.drilled), found.note) == (what, texts, note)


def test_nan_equals_itself_and_ids_come_first() -> None:
    batch = {"x": np.array([np.nan, 1.0]), "id": np.arange(2), "mask": np.ones(2, np.bool_)}
    assert compare_batches("here", batch, {k: v.copy() for k, v in batch.items()}) == []
    other = {"x": batch["x"][::-1], "id": batch["id"][::-1], "mask": batch["mask"]}
    assert [one.what for one in compare_batches("here", batch, other)] == ["id", "x"]
