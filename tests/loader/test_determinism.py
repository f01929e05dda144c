"""Whether a transform is a pure function: those that are not are caught, by field and record."""

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader import ArraySource, Pipeline, PipelineConfig, check_transform

Batch = dict[str, Any]

# Processes are spawned by few of these tests: each takes the time to import Grain.
HERE: dict[str, Any] = {"hash_seeds": ()}


def a_pipeline(transform: Any, n: int = 23, **settings: Any) -> Pipeline:
    chosen: dict[str, Any] = {"batch_size": 4, "seed": 17, "final_batch": "pad", **settings}
    source = ArraySource({"x": np.arange(float(n)), "y": np.arange(n)}, np.arange(100, 100 + n))
    return Pipeline(source, PipelineConfig(**chosen), transform)


def double(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] * 2}


def words_in_a_set(batch: Batch) -> Batch:
    order = list({f"word {i}" for i in range(50)})
    return {**batch, "x": np.array([float(order.index("word 7"))] * len(batch["x"]))}


def global_generator(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] + np.random.rand(len(batch["x"]))}  # noqa: NPY002


def the_clock(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] * 0 + time.perf_counter_ns()}


def the_thread(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] * 0 + (threading.current_thread() is threading.main_thread())}


def the_process(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] * 0 + os.getpid()}


class Counter:
    """Is right in order and wrong in any other."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Batch) -> Batch:
        self.calls += 1
        return {**batch, "y": batch["y"] + self.calls % 4}


def one_record() -> Callable[[Batch], Batch]:
    numbers = itertools.count()

    def transform(batch: Batch) -> Batch:
        y = batch["y"].copy()
        y[batch["id"] == 107] = next(numbers)
        return {**batch, "y": y}

    return transform


def test_a_pure_transform_is_the_same_in_every_way() -> None:
    report = check_transform(a_pipeline(double))
    assert report.same
    assert report.not_done == {}
    assert report.done == (
        "again",
        "in another order",
        "with 1 threads",
        "with 4 threads",
        "in another process, PYTHONHASHSEED=1",
        "in another process, PYTHONHASHSEED=2",
    )
    assert str(report).startswith("the same: 4 steps, made again, in another order")


@pytest.mark.parametrize("transform", [global_generator, the_clock])
def test_a_generator_or_a_clock_is_caught_at_once(transform: Any) -> None:
    report = check_transform(a_pipeline(transform), **HERE)
    assert not report.same
    first = report.changes[0]
    assert (first.check, first.step, first.field) == ("again", 0, "x")
    assert first.record_id == a_pipeline(None).ids(0)[0]
    assert {change.field for change in report.changes} == {"x"}
    assert "NOT THE SAME" in str(report)
    assert f"slot 0, record {first.record_id}" in str(report)


def test_the_order_of_a_set_of_strings_is_caught_in_another_process() -> None:
    """And there alone: within a process nothing differs."""
    report = check_transform(a_pipeline(words_in_a_set), hash_seeds=(1, 2, 3))
    checks = {change.check for change in report.changes}
    assert checks
    assert all(check.startswith("in another process") for check in checks)
    assert {change.field for change in report.changes} == {"x"}


def test_what_depends_on_the_process_or_on_the_thread_is_caught() -> None:
    report = check_transform(a_pipeline(the_process), threads=(), hash_seeds=(1,))
    assert {change.check for change in report.changes} == {"in another process, PYTHONHASHSEED=1"}
    report = check_transform(a_pipeline(the_thread), **HERE)
    assert {change.check for change in report.changes} == {"with 1 threads", "with 4 threads"}


def test_a_transform_that_counts_its_calls_is_caught_by_the_order_alone() -> None:
    # Four steps leave the count where it was, so that the same order gives the same batches.
    report = check_transform(a_pipeline(Counter()), threads=(), **HERE)
    assert {change.check for change in report.changes} == {"in another order"}
    assert {change.field for change in report.changes} == {"y"}


def test_the_record_that_differs_is_named() -> None:
    pipeline = a_pipeline(one_record())
    (step,) = [step for step in range(6) if 107 in pipeline.ids(step)]
    report = check_transform(pipeline, steps=6, **HERE)
    assert {(change.step, change.field, change.record_id) for change in report.changes} == {
        (step, "y", 107)
    }
    assert report.changes[0].text == "1 of 4 records differ"


def test_a_transform_that_cannot_be_pickled_is_said_to_be_and_the_rest_is_done() -> None:
    report = check_transform(a_pipeline(lambda batch: {**batch}))
    assert report.same
    (reason,) = report.not_done.values()
    assert "cannot be pickled" in reason
    assert "top level" in reason
    assert len(report.done) == 4
    assert f"not done: in another process: {reason}" in str(report)


def test_without_a_transform_the_source_is_checked() -> None:
    class Source(ArraySource):
        def read(self, rows: Any, /) -> Any:
            return {**super().read(rows), "x": np.random.rand(len(rows))}  # noqa: NPY002

    source = Source({"x": np.arange(9.0), "y": np.arange(9)})
    report = check_transform(Pipeline(source, PipelineConfig(4, 1, "partial")))
    assert {change.field for change in report.changes} == {"x"}
    assert "there is no transform" in report.not_done["in another process"]
    assert check_transform(a_pipeline(None), **HERE).same


def test_a_dtype_a_field_or_an_error_that_comes_and_goes_is_a_change() -> None:
    def build(change: Callable[[Batch, int], Batch]) -> Any:
        calls = itertools.count()
        return lambda batch: change(batch, next(calls))

    def dtype(batch: Batch, call: int) -> Batch:
        return {**batch, "x": batch["x"].astype("f4" if call == 1 else "f8")}

    def gone(batch: Batch, call: int) -> Batch:
        return {"y": batch["y"]} if call == 1 else batch

    def fails(batch: Batch, call: int) -> Batch:
        if call >= 1:
            raise OSError("broken")
        return batch

    for change, field, text in (
        (dtype, "x", "float64[4], then float32[4]"),
        (gone, "x", "float64[4], then missing"),
        (fails, None, "cannot be made again: RecordReadError: broken"),
    ):
        report = check_transform(a_pipeline(build(change)), steps=1, **HERE)
        first = report.changes[0]
        assert (first.check, first.field, first.record_id, first.text) == (
            "again",
            field,
            None,
            text,
        )


def centred(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] - batch["x"].mean()}


def every_third(batch: Batch) -> Batch:
    x = batch["x"].copy()
    x[2::3] += 1
    return {**batch, "x": x}


def test_what_looks_at_other_records_or_at_the_slot_is_caught_in_batches_of_another_size() -> None:
    report = check_transform(a_pipeline(centred), batch_sizes=(4, 2), **HERE)
    assert {change.check for change in report.changes} == {"in batches of 2"}
    assert check_transform(a_pipeline(centred), **HERE).same
    report = check_transform(a_pipeline(every_third), batch_sizes=(2,), **HERE)
    assert {(change.field, change.slot) for change in report.changes} == {("x", 2)}
    ids = [a_pipeline(None).ids(step)[2] for step in range(4)]
    assert [change.record_id for change in report.changes] == ids
    assert "1 of 4 records differ" in str(report)


@pytest.mark.parametrize("final_batch", ["pad", "partial", "drop"])
@pytest.mark.parametrize("size", [1, 3, 8, 50])
def test_what_looks_at_each_record_alone_is_the_same_in_batches_of_any_size(
    size: int, final_batch: str
) -> None:
    """Also over epochs' ends, with records that are left out and strings of many lengths."""

    class Source(ArraySource):
        def read(self, rows: Any, /) -> Any:
            if 3 in rows:
                raise OSError("unreadable")
            return super().read(rows)

    names = np.array([f"{'long' * (i % 4)}{i}" for i in range(23)])
    source = Source({"x": np.arange(23.0), "name": names}, names)
    settings: dict[str, Any] = {"num_epochs": 2, "on_bad_record": "mask", "skip": ((2, 4),)}
    config = PipelineConfig(4, 17, final_batch, exclude=(names[5],), **settings)  # type: ignore[arg-type]

    def named(batch: Batch) -> Batch:
        return {**double(batch), "same": batch["id"]}

    report = check_transform(
        Pipeline(source, config, named), steps=99, batch_sizes=(size,), threads=(), **HERE
    )
    assert report.same, str(report)
    assert report.steps > 6


def test_excluded_and_bad_records_are_the_same_in_another_process() -> None:
    class Source(ArraySource):
        def read(self, rows: Any, /) -> Any:
            if 3 in rows:
                raise OSError("unreadable")
            return super().read(rows)

    source = Source({"x": np.arange(23.0)}, np.arange(100, 123))
    settings: dict[str, Any] = {"exclude": (105,), "skip": ((1, 2),), "on_bad_record": "mask"}
    config = PipelineConfig(4, 17, "pad", **settings)
    for steps in (9, 1):  # one step has no excluded record
        report = check_transform(Pipeline(source, config, double), steps=steps, hash_seeds=(1,))
        assert report.same, str(report)
        assert report.steps == min(steps, 5)
        assert report.not_done == {}


@pytest.mark.processes
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    code = """
        import numpy as np
        import loader
        def transform(batch):
            return batch
        source = loader.ArraySource({"x": np.arange(9)})
        pipeline = loader.Pipeline(source, loader.PipelineConfig(4, 1, "pad"), transform)
        print(loader.check_transform(pipeline, hash_seeds=(1,)))
    """
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "the same" in done.stdout
    assert 'Put all that the program does under if __name__ == "__main__":' in done.stdout


def test_wrong_use_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a Pipeline"):
        check_transform(double)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        check_transform(a_pipeline(double), steps=0)
    with pytest.raises(ValueError, match="'batch_size' must be"):
        check_transform(a_pipeline(double), batch_sizes=(0,), **HERE)
    assert loader.check_transform is check_transform
