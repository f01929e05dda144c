"""A run that stops and resumes is the run that never stopped; whatever could make it another is refused."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpointing
import checkpointing.storage.local
import loader
from checkpointing import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    Checkpoints,
    Manifest,
    inspect_run,
)
from checkpointing.manifest import seal
from loader import Pipeline, PipelineConfig, Position
from tests.jax_versions import has_prng

ROOT = pathlib.Path(__file__).resolve().parents[2]
N = 11
POLICIES = ("partial", "drop", "pad")
SHUFFLES = ("feistel", "permutation", "none")

Batch = dict[str, Any]
State = dict[str, Any]
Trace = list[tuple[list[Any], dict[str, bytes]]]


def shift(batch: Batch) -> dict[str, Any]:
    return {"x": batch["x"] + np.float32(1)}


class Scale:
    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return {"x": batch["x"]}


def data(num_records: int = N) -> dict[str, Any]:
    return {
        "x": np.linspace(0, 1, num_records, dtype=np.float32),
        "y": np.arange(2 * num_records, dtype=np.int32).reshape(num_records, 2),
    }


def a_pipeline(
    *,
    fields: dict[str, Any] | None = None,
    ids: Any = None,
    transform: Any = shift,
    **config: Any,
) -> Pipeline:
    fields = data() if fields is None else fields
    ids = np.arange(100, 100 + len(fields["x"])) if ids is None else ids
    chosen: dict[str, Any] = {"batch_size": 3, "seed": 1, "final_batch": "pad", "num_epochs": 2}
    source = loader.ArraySource(fields, ids=ids)
    return Pipeline(source, PipelineConfig(**{**chosen, **config}), transform)


def a_state() -> State:
    return {
        "w": jnp.linspace(-1, 1, 4),
        "opt": {"mu": np.zeros(4), "count": 0},
        "key": jax.random.key(7),
        "step": jnp.zeros((), jnp.int32),
    }


@jax.jit
def update(w: jax.Array, key: jax.Array, x: jax.Array, mask: jax.Array) -> tuple[Any, Any]:
    key, now = jax.random.split(key)
    loss = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask).astype(jnp.float32)
    return w * 0.9 + jax.random.normal(now, w.shape) * loss, key


def train_step(state: State, batch: Batch) -> State:
    w, key = update(state["w"], state["key"], batch["x"], batch["mask"])
    opt = {"mu": state["opt"]["mu"] * 0.5 + np.asarray(w), "count": state["opt"]["count"] + 1}
    return {"w": w, "opt": opt, "key": key, "step": state["step"] + 1}


def bits(tree: Any) -> dict[str, bytes]:
    """All of a train state, bit for bit, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): raw(leaf) for path, leaf in leaves}


def raw(leaf: Any) -> bytes:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{leaf.dtype}".encode() + raw(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return f"{type(leaf).__name__} {array.dtype}{array.shape}".encode() + array.tobytes()


def train(
    checkpoints: Checkpoints, run: "checkpointing.Run[State]", steps: int | None = None
) -> tuple[Trace, State]:
    """Trains on up to ``steps`` batches, offering each step to be saved."""
    trace: Trace = []
    state = run.train_state
    while steps is None or len(trace) < steps:
        batch = next(run.batches, None)
        if batch is None:
            break
        state = train_step(state, batch)
        trace.append((batch["id"].tolist(), bits(state)))
        checkpoints.save(run.batches, state)
    return trace, state


@functools.cache
def uninterrupted(final_batch: str, shuffle: str = "feistel") -> Trace:
    """What each step delivers and leaves, in a run without checkpoints."""
    trace: Trace = []
    state = a_state()
    for batch in a_pipeline(final_batch=final_batch, shuffle=shuffle):
        state = train_step(state, batch)
        trace.append((batch["id"].tolist(), bits(state)))
    return trace


def write(directory: pathlib.Path, pipeline: Pipeline, steps: int, **settings: Any) -> None:
    """Trains from the start, with every step saved and kept."""
    with Checkpoints(directory, pipeline, 1, 100, **settings) as checkpoints:
        train(checkpoints, checkpoints.resume(a_state()), steps)


def content(directory: pathlib.Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != ".lock"
    }


def names(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def resume(directory: pathlib.Path, pipeline: Pipeline | None = None, **settings: Any) -> Any:
    """The run that goes on from a directory, which is left closed."""
    allow = settings.pop("allow", ())
    state = settings.pop("state", None)
    pipeline = a_pipeline() if pipeline is None else pipeline
    with Checkpoints(directory, pipeline, 1, 100, **settings) as checkpoints:
        return checkpoints.resume(a_state() if state is None else state, allow=allow)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 1, 2 and 3 of the usual run. Never written to: tests work on copies."""
    directory = tmp_path_factory.mktemp("written") / "run"
    write(directory, a_pipeline(), 3, run_config={"lr": 0.1, "layers": [1, 2]})
    return directory


@pytest.fixture(scope="session")
def every_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pipeline], pathlib.Path]:
    """A directory with every step of a pipeline's run, by its config. Never written to again."""

    @functools.cache
    def made(config: PipelineConfig) -> pathlib.Path:
        pipeline = a_pipeline(**config.to_dict())
        directory = tmp_path_factory.mktemp("every") / "run"
        write(directory, pipeline, len(pipeline))
        return directory

    return lambda pipeline: made(pipeline.config)


RUN_CONFIG: dict[str, Any] = {"lr": 0.1, "layers": [1, 2]}


@pytest.fixture
def copied(written: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(written, tmp_path / "run"))


@pytest.fixture
def run_directory(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run"


# The same run.


@pytest.mark.parametrize("final_batch", POLICIES)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_resume_at_every_step_reproduces_the_rest_of_the_run(
    final_batch: str,
    shuffle: str,
    every_step: Callable[[Pipeline], pathlib.Path],
    tmp_path: pathlib.Path,
) -> None:
    pipeline = a_pipeline(final_batch=final_batch, shuffle=shuffle)
    expected = uninterrupted(final_batch, shuffle)
    assert len(expected) == len(pipeline)
    written = every_step(pipeline)
    for step in range(1, len(expected) + 1):
        one = tmp_path / str(step)
        shutil.copytree(written / str(step), one / str(step))
        again = a_pipeline(final_batch=final_batch, shuffle=shuffle)
        with Checkpoints(one, again, 100, 100) as checkpoints:
            run = checkpoints.resume(a_state())
            assert run.position == again.grid.position(step) == run.batches.position
            assert bits(run.train_state) == expected[step - 1][1]
            trace, _ = train(checkpoints, run)
        assert trace == expected[step:]


@pytest.mark.parametrize("final_batch", POLICIES)
@pytest.mark.parametrize("stops", [(4,), (3, 5), (1, 1), (1, 2, 3), (2, 4, 6)])
def test_resumes_in_a_row_reproduce_the_run(
    final_batch: str, stops: tuple[int, ...], run_directory: pathlib.Path
) -> None:
    found: Trace = []
    for stop in (*stops, None):
        with Checkpoints(run_directory, a_pipeline(final_batch=final_batch), 1, 1) as checkpoints:
            run = checkpoints.resume(a_state())
            assert run.position.step == len(found)
            trace, _ = train(checkpoints, run, None if stop is None else stop - len(found))
            found += trace
    assert found == uninterrupted(final_batch)


def test_what_was_trained_after_the_last_save_is_trained_again_the_same(
    run_directory: pathlib.Path,
) -> None:
    for resumed_at, stop in ((0, 5), (4, 7), (6, 7)):
        with Checkpoints(run_directory, a_pipeline(), 2, 3) as checkpoints:
            run = checkpoints.resume(a_state())
            assert run.position.step == resumed_at
            trace, _ = train(checkpoints, run, stop - resumed_at)
        assert trace == uninterrupted("pad")[resumed_at:stop]


def test_threads_may_change_at_a_resume(copied: pathlib.Path) -> None:
    options = loader.ReadOptions(num_threads=2, prefetch_buffer_size=3)
    with Checkpoints(copied, a_pipeline(), 1, 9, run_config=RUN_CONFIG) as checkpoints:
        run = checkpoints.resume(a_state(), read_options=options)
        trace, _ = train(checkpoints, run)
        run.batches.close()
    assert trace == uninterrupted("pad")[3:]
    assert checkpointing.load(copied)[0].step == len(uninterrupted("pad"))


def test_a_run_may_move_to_another_directory_and_machine(
    copied: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    moved = copied.rename(tmp_path / "elsewhere ünder ∂")
    run = resume(moved, run_config=RUN_CONFIG)
    assert bits(run.train_state) == uninterrupted("pad")[2][1]


def test_a_finished_run_resumes_at_its_end(run_directory: pathlib.Path) -> None:
    pipeline = a_pipeline()
    write(run_directory, pipeline, len(pipeline))
    before = content(run_directory)
    with Checkpoints(run_directory, a_pipeline(), 1, 100) as checkpoints:
        run = checkpoints.resume(a_state())
        assert run.position == Position(2, 0, len(pipeline))
        assert list(run.batches) == []
        assert not checkpoints.save(run.batches, run.train_state)
        assert not checkpoints.save(run.batches, run.train_state, force=True)
    assert content(run_directory) == before


def test_a_new_run_begins_with_the_train_state_that_was_passed(
    run_directory: pathlib.Path,
) -> None:
    state = a_state()
    run = resume(run_directory, state=state)
    assert run.train_state is state
    assert run.position == run.batches.position == Position()


def test_a_new_run_needs_values(run_directory: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match=r"holds no checkpoint, and .* shapes without values; pass"
    ):
        resume(run_directory, state={"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


# What does not match.


def changed(name: str, rows: Any, value: Any) -> dict[str, Any]:
    fields = data()
    fields[name] = fields[name].copy()
    fields[name][rows] = value
    return fields


def without(state: State, name: str) -> State:
    return {key: leaf for key, leaf in state.items() if key != name}


def reordered() -> dict[str, Any]:
    order = np.roll(np.arange(N), 1)
    return {
        "fields": {name: field[order] for name, field in data().items()},
        "ids": np.arange(100, 100 + N)[order],
    }


Y = data()["y"]
STRANGE_IDS = np.where(np.arange(N) == 4, 7, np.arange(100, 100 + N))

#: What changed -> how the run looks now, and lines of the error: name, checkpoint, now, remark.
MISMATCHES: dict[str, tuple[dict[str, Any], list[tuple[str, str, str, str]]]] = {
    "content": ({"fields": changed("y", (7, 1), -1)}, [("dataset.y", "sha256:", "sha256:", "1 of 11 records differs: id 107")]),
    "content of two": ({"fields": changed("x", [2, 5], 9)}, [("dataset.x", "sha256:", "sha256:", "2 of 11 records differ: id 102, 105")]),
    "an ID": ({"ids": STRANGE_IDS}, [("dataset.id", "sha256:", "sha256:", "1 of 11 records differs: id 7")]),
    "kind of IDs": ({"ids": [str(i) for i in range(100, 100 + N)]}, [("dataset.id", "int64", "str", "")]),
    "order of records": (reordered(), [("dataset.id", "sha256:", "sha256:", "the same records in another order"), ("dataset.x", "sha256:", "sha256:", "the same records in another order"), ("dataset.y", "sha256:", "sha256:", "the same records in another order")]),
    "a record less": ({"fields": {k: v[:-1] for k, v in data().items()}, "ids": np.arange(100, 100 + N - 1)}, [("dataset.num_records", "11", "10", ""), ("dataset.id", "", "", ""), ("dataset.x", "", "", ""), ("dataset.y", "", "", "")]),
    "dtype": ({"fields": {**data(), "y": Y.astype(np.int64)}}, [("dataset.y", "int32[2]", "int64[2]", "")]),
    "shape": ({"fields": {**data(), "y": Y.reshape(N, 2, 1)}}, [("dataset.y", "int32[2]", "int32[2, 1]", "")]),
    "a field more": ({"fields": {**data(), "z": np.arange(N)}}, [("dataset.z", "absent", "sha256:", "")]),
    "a field less": ({"fields": {"x": data()["x"]}}, [("dataset.y", "sha256:", "absent", "")]),
    "a field's name": ({"fields": {"x": data()["x"], "label": Y}}, [("dataset.label", "absent", "sha256:", ""), ("dataset.y", "sha256:", "absent", "")]),
    "seed": ({"seed": 2}, [("seed", "1", "2", "")]),
    "shuffle": ({"shuffle": "none"}, [("shuffle", "feistel", "none", "")]),
    "final batch": ({"final_batch": "drop"}, [("final_batch", "pad", "drop", "")]),
    "num_epochs": ({"num_epochs": None}, [("num_epochs", "2", "None", "")]),
    "bad records": ({"on_bad_record": "mask"}, [("on_bad_record", "raise", "mask", "")]),
    "batch size": ({"batch_size": 4}, [("batch_size", "3", "4", "")]),
    "no transform": ({"transform": None}, [("transform.name", "shift", "absent", ""), ("transform.version", "''", "absent", "")]),
    "another transform": ({"transform": Scale(2)}, [("transform.name", "shift", "Scale", ""), ("transform.version", "''", "'2'", "")]),
    "run config": ({"run_config": {"lr": 0.2, "layers": [1, 2]}}, [("run_config.lr", "0.1", "0.2", "")]),
    "run config, a key less": ({"run_config": {"lr": 0.1}}, [("run_config.layers", "[1, 2]", "absent", "")]),
    "run config, none": ({"run_config": None}, [("run_config.lr", "0.1", "absent", ""), ("run_config.layers", "[1, 2]", "absent", "")]),
    "run config, a key more": ({"run_config": {**RUN_CONFIG, "clip": True}}, [("run_config.clip", "absent", "True", "")]),
    "a leaf's shape": ({"state": {**a_state(), "w": jnp.zeros(5)}}, [("train_state/w", "float32[4]", "float32[5]", "")]),
    "a leaf's dtype": ({"state": {**a_state(), "w": jnp.zeros(4, jnp.int32)}}, [("train_state/w", "float32[4]", "int32[4]", "")]),
    "a NumPy leaf's shape": ({"state": {**a_state(), "opt": {"mu": np.zeros((2, 2)), "count": 0}}}, [("train_state/opt/mu", "float64[4]", "float64[2,2]", "")]),
    "kind of number": ({"state": {**a_state(), "opt": {"mu": np.zeros(4), "count": 0.0}}}, [("train_state/opt/count", "int[]", "float[]", "")]),
    "PRNG implementation": ({"state": {**a_state(), "key": jax.random.key(7, impl="rbg")}}, [("train_state/key", "key<threefry2x32>[]", "key<rbg>[]", "")]),
    "raw key": ({"state": {**a_state(), "key": jax.random.PRNGKey(7)}}, [("train_state/key", "key<threefry2x32>[]", "uint32[2]", "")]),
    "a leaf less": ({"state": without(a_state(), "opt")}, [("train_state/opt/count", "int[]", "absent", ""), ("train_state/opt/mu", "float64[4]", "absent", "")]),
    "a leaf more": ({"state": {**a_state(), "ema": 0.5}}, [("train_state/ema", "absent", "float[]", "")]),
    "a leaf's name": ({"state": {**without(a_state(), "w"), "v": a_state()["w"]}}, [("train_state/v", "absent", "float32[4]", ""), ("train_state/w", "float32[4]", "absent", "")]),
    "shapes only": ({"state": {**a_state(), "w": jax.ShapeDtypeStruct((5,), jnp.float32)}}, [("train_state/w", "float32[4]", "float32[5]", "")]),
}  # fmt: skip
if has_prng("philox4x32"):
    MISMATCHES["PRNG of the same size"] = (
        {"state": {**a_state(), "key": jax.random.key(7, impl="philox4x32")}},
        [("train_state/key", "key<threefry2x32>[]", "key<philox4x32>[]", "")],
    )


def split_up(now: dict[str, Any]) -> tuple[Pipeline, State, Any]:
    now = {key: value for key, value in now.items() if key != "shapes"}
    state, run_config = now.pop("state", None), now.pop("run_config", RUN_CONFIG)
    return a_pipeline(**now), a_state() if state is None else state, run_config


def assert_refused(
    directory: pathlib.Path, now: dict[str, Any], allow: Any = ()
) -> CheckpointMismatchError:
    """Resumes with a change; nothing on disk or in the caller's hands may move."""
    pipeline, state, run_config = split_up(now)
    on_disk, in_hand = content(directory), bits(state) if "shapes" not in now else None
    live = pipeline.iterate()
    next(live)
    position = live.position
    with Checkpoints(directory, pipeline, 1, 1, run_config=run_config) as checkpoints:
        with pytest.raises(CheckpointMismatchError) as caught:
            checkpoints.resume(state, allow=allow)
        with pytest.raises(ValueError, match="call resume before save"):
            checkpoints.save(live, state)
    assert content(directory) == on_disk
    assert live.position == position
    if in_hand is not None:
        assert bits(state) == in_hand
    return caught.value


def is_shapes(now: dict[str, Any]) -> dict[str, Any]:
    leaves = jax.tree.leaves(now.get("state"))
    return (
        {**now, "shapes": True} if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves) else now
    )


@pytest.mark.parametrize("change", MISMATCHES)
def test_each_change_is_refused_with_both_values_and_nothing_is_restored(
    change: str, copied: pathlib.Path
) -> None:
    now, expected = MISMATCHES[change]
    error = assert_refused(copied, is_shapes(now))
    assert len(error.differences) == len(expected)
    lines = str(error).splitlines()
    if all(name.startswith("train_state") for name, *_ in expected):
        headline, footer = (
            "holds a different train state",
            "Use the model and optimizer of that run,",
        )
    else:
        headline, footer = "belongs to a different stream", "Use the data and config of that run,"
    assert lines[0] == f"{copied} step 3 {headline}; nothing was restored."
    assert lines[-1].startswith(f"{footer} or start a new directory.")
    found = sorted(dataclasses.astuple(one) for one in error.differences)
    for (name, before, after, note), line in zip(found, sorted(lines[1:-1]), strict=True):
        assert line.split()[:2] == [name, "checkpoint"]
        assert before in line
        assert f"now {after}" in line
        assert note in line
    for parts, wanted in zip(found, sorted(expected), strict=True):
        assert parts[0] == wanted[0]
        assert all(part.startswith(want) for part, want in zip(parts, wanted, strict=True))


def test_all_differences_stand_in_one_error(copied: pathlib.Path) -> None:
    now = {
        "fields": changed("y", 7, 1),
        "seed": 2,
        "batch_size": 4,
        "shuffle": "permutation",
        "final_batch": "partial",
        "num_epochs": 3,
        "transform": None,
        "run_config": {"lr": 1, "layers": [1, 2]},
        "state": {**a_state(), "w": jnp.zeros(5), "more": 1},
    }
    names = [difference.name for difference in assert_refused(copied, now).differences]
    assert names == [
        *("dataset.y", "batch_size", "seed", "final_batch", "num_epochs", "shuffle"),
        *("transform.name", "transform.version", "run_config.lr"),
        *("train_state/w", "train_state/more"),
    ]


def test_a_refusal_shows_one_line_of_ours_above_its_message(copied: pathlib.Path) -> None:
    error = assert_refused(copied, {"seed": 2})
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["assert_refused", "resume"]
    assert error.__cause__ is error.__context__ is None


def test_the_version_of_a_transform_is_part_of_the_stream(run_directory: pathlib.Path) -> None:
    write(run_directory, a_pipeline(transform=Scale(1)), 1)
    resume(run_directory, a_pipeline(transform=Scale(1)))
    with pytest.raises(CheckpointMismatchError, match=r"transform\.version  checkpoint 1  now 2"):
        resume(run_directory, a_pipeline(transform=Scale(2)))


def test_the_version_of_an_order_is_part_of_the_stream(
    copied: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loader.ORDER_VERSIONS, "permutation", 2)
    resume(copied, run_config=RUN_CONFIG)  # another kind's version is none of this run's business
    monkeypatch.setitem(loader.ORDER_VERSIONS, "feistel", 2)
    error = assert_refused(copied, {})
    assert [dataclasses.astuple(one) for one in error.differences] == [
        ("order_version", "1", "2", "")
    ]


def other_permutation(num_records: int, seed: int, epoch: int) -> Any:
    return np.random.default_rng([seed, epoch, 1]).permutation(num_records)


def later_permutation(num_records: int, seed: int, epoch: int) -> Any:
    """The same as ever in the first epoch, and another one in the second."""
    return np.random.default_rng(
        np.random.SeedSequence([seed, epoch + 10 * (epoch > 0)])
    ).permutation(num_records)


@pytest.mark.parametrize("moved", [other_permutation, later_permutation])
def test_an_order_that_a_library_moved_is_caught_by_the_next_ids(
    moved: Any, run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_directory, a_pipeline(shuffle="permutation"), 3)
    resume(run_directory, a_pipeline(shuffle="permutation"))
    monkeypatch.setattr(loader.order, "_numpy_permutation", moved)
    with pytest.raises(CheckpointMismatchError, match=r"next_ids +checkpoint \[1") as caught:
        resume(run_directory, a_pipeline(shuffle="permutation"))
    (difference,) = caught.value.differences
    place = 0 if moved is other_permutation else 2  # two records are left of the first epoch
    assert f"from record {place} after the cursor on: the order has moved" in difference.note
    assert difference.checkpoint != difference.now
    versions = {**checkpointing.manifest.package_versions(), "numpy": "99.1"}
    monkeypatch.setattr(checkpointing.differences, "package_versions", lambda: versions)
    with pytest.raises(CheckpointMismatchError, match=f"moved since numpy {np.__version__}"):
        resume(run_directory, a_pipeline(shuffle="permutation"))


def test_other_versions_of_packages_alone_change_nothing(
    copied: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = dict.fromkeys(checkpointing.manifest.package_versions(), "0.0.1")
    monkeypatch.setattr(checkpointing.checkpoints, "package_versions", lambda: versions)
    assert resume(copied, run_config=RUN_CONFIG).position.step == 3


def test_a_mismatch_never_falls_back_to_an_older_step_that_matches(
    copied: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    write(tmp_path / "other", a_pipeline(seed=2), 4, run_config=RUN_CONFIG)
    shutil.copytree(tmp_path / "other/4", copied / "4")
    error = assert_refused(copied, {})
    assert f"{copied} step 4 belongs to a different stream" in str(error)
    assert [one.name for one in error.differences] == ["seed"]


def test_the_newest_whole_step_decides_where_newer_ones_are_damaged(copied: pathlib.Path) -> None:
    (copied / "3/manifest/metadata").unlink()
    assert_refused(copied, {"seed": 2})


# A change of the batch size.


@pytest.mark.parametrize("final_batch", POLICIES)
@pytest.mark.parametrize(("old", "new"), [(3, 4), (3, 1), (3, 11), (5, 2)])
def test_a_new_batch_size_goes_on_at_the_same_record_from_any_step(
    final_batch: str,
    old: int,
    new: int,
    every_step: Callable[[Pipeline], pathlib.Path],
    tmp_path: pathlib.Path,
) -> None:
    before = a_pipeline(final_batch=final_batch, batch_size=old)
    after = a_pipeline(final_batch=final_batch, batch_size=new)
    for step in range(1, len(before) + 1):
        shutil.copytree(every_step(before) / str(step), tmp_path / str(step) / str(step))
        run = resume(tmp_path / str(step), after, allow={"batch_size"})
        assert run.position.step == step
        seen: list[tuple[int, int]] = []
        for i in range(step):
            seen += real_ids(before.grid.position(i), before[i])
        while (position := run.batches.position).epoch < 2:
            seen += real_ids(position, next(run.batches))
        for epoch in (0, 1):
            order = [100 + row for row in loader.epoch_order(N, 1, epoch)]
            delivered = [entry for at, entry in seen if at == epoch]
            # None is repeated, and none is lost but those that fill no batch under "drop".
            assert delivered == order[: len(delivered)]
            last = before if (epoch + 1, 0) <= (before.grid.position(step).epoch, 0) else after
            left_out = 0 if final_batch != "drop" else last.config.batch_size - 1
            assert N - len(delivered) <= left_out


def real_ids(position: Position, batch: Batch) -> list[tuple[int, int]]:
    return [(position.epoch, entry) for entry in batch["id"][batch["mask"]].tolist()]


def test_later_manifests_tell_of_each_change_of_the_batch_size(run_directory: pathlib.Path) -> None:
    write(run_directory, a_pipeline(), 1)
    seen: list[int] = a_pipeline()[0]["id"].tolist()
    history: list[dict[str, Any]] = []
    for old, new, steps in ((3, 4, 1), (4, 2, 1), (2, 2, 0), (2, 3, 1)):
        with Checkpoints(run_directory, a_pipeline(batch_size=new), 1, 1) as checkpoints:
            run = checkpoints.resume(a_state(), allow={"batch_size"})
            if old != new:
                position = dataclasses.asdict(run.position)
                history.append({"position": position, "changed": {"batch_size": [old, new]}})
            trace, _ = train(checkpoints, run, steps)
            seen += [entry for ids, _ in trace for entry in ids if entry != -1]
        assert list(checkpointing.load(run_directory)[0].history) == history
    assert seen == [100 + row for row in loader.epoch_order(N, 1, 0)]
    assert [change["position"]["offset"] for change in history] == [3, 7, 9]


def test_allowing_a_change_allows_no_other(copied: pathlib.Path) -> None:
    error = assert_refused(copied, {"batch_size": 4, "seed": 2}, allow={"batch_size"})
    assert [one.name for one in error.differences] == ["seed"]


def test_an_order_that_moved_is_caught_under_another_batch_size_too(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_directory, a_pipeline(shuffle="permutation"), 1)
    monkeypatch.setattr(loader.order, "_numpy_permutation", other_permutation)
    with pytest.raises(CheckpointMismatchError, match="next_ids"):
        resume(run_directory, a_pipeline(shuffle="permutation", batch_size=2), allow={"batch_size"})


def test_nothing_but_batch_size_skip_and_exclude_can_be_allowed(
    run_directory: pathlib.Path,
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 1) as checkpoints:
        for allow in ({"seed"}, ["batch_size", "run_config.lr"], {"batch"}, ("",)):
            with pytest.raises(ValueError, match=r"allow can hold \['batch_size', 'ex"):
                checkpoints.resume(a_state(), allow=allow)
        with pytest.raises(TypeError, match=r'write allow={"batch_size"}'):
            checkpoints.resume(a_state(), allow="batch_size")
        wrong: Any = 5
        with pytest.raises(TypeError, match=r'a set of names, such as {"batch_size"}, not 5'):
            checkpoints.resume(a_state(), allow=wrong)
        assert checkpoints.resume(a_state(), allow=["batch_size"]).position == Position()


# Saving.


def test_bad_arguments_are_refused_before_anything_is_made(run_directory: pathlib.Path) -> None:
    pipeline = a_pipeline()
    for name, value, kind in (
        ("save_every", 0, ValueError),
        ("save_every", -1, ValueError),
        ("save_every", 1.0, TypeError),
        ("save_every", True, TypeError),
        ("keep", 0, ValueError),
        ("keep", None, TypeError),
        ("pipeline", pipeline.config, TypeError),
        ("pipeline", [1], TypeError),
        ("run_config", {"a": object()}, TypeError),
        ("run_config", {"a": float("nan")}, TypeError),
        ("run_config", {1: 2}, TypeError),
        *(("run_config", wrong, TypeError) for wrong in ([1], "ab", ["ab"], 0, [(1, 2, 3)])),
        ("process_timeout_s", "600", ValueError),
        *(("directory", wrong, TypeError) for wrong in (None, 3, b"x")),
    ):
        given: dict[str, Any] = {"directory": run_directory, "pipeline": pipeline}
        given |= {"save_every": 1, "keep": 1}
        with pytest.raises(kind, match=name):
            Checkpoints(**{**given, name: value})
    assert not run_directory.exists()


def test_a_bad_way_to_verify_is_refused(copied: pathlib.Path) -> None:
    with Checkpoints(copied, a_pipeline(), 1, 9, run_config=RUN_CONFIG) as checkpoints:
        verify: Any = "none"
        with pytest.raises(ValueError, match='verify must be "full" or "manifest", not'):
            checkpoints.resume(a_state(), verify=verify)
        assert checkpoints.resume(a_state(), verify="manifest").position.step == 3
    with pytest.raises(ValueError, match='verify must be "full" or "manifest", not'):
        checkpointing.load(copied, verify=verify)


def test_steps_off_the_multiples_are_saved_only_by_force(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 3, 100) as checkpoints:
        run = checkpoints.resume(a_state())
        state, saved = run.train_state, []
        assert not checkpoints.save(run.batches, state)
        for batch in run.batches:
            state = train_step(state, batch)
            saved.append(checkpoints.save(run.batches, state, force=run.batches.position.step == 7))
        checkpoints.wait()
        assert checkpoints.steps() == [3, 6, 7]
    assert saved == [False, False, True, False, False, True, True, False]


def test_the_start_can_be_saved_by_force(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 3, 100) as checkpoints:
        run = checkpoints.resume(a_state())
        assert checkpoints.save(run.batches, run.train_state, force=True)
    assert checkpointing.load(run_directory)[0].position == Position()
    with Checkpoints(run_directory, a_pipeline(), 100, 100) as checkpoints:
        assert train(checkpoints, checkpoints.resume(a_state()))[0] == uninterrupted("pad")


def test_a_step_is_saved_once(copied: pathlib.Path) -> None:
    with Checkpoints(copied, a_pipeline(), 1, 9, run_config=RUN_CONFIG) as checkpoints:
        run = checkpoints.resume(a_state())
        assert not checkpoints.save(run.batches, run.train_state, force=True)
        state = train_step(run.train_state, next(run.batches))
        assert checkpoints.save(run.batches, state)
        assert not checkpoints.save(run.batches, state)
        checkpoints.wait()
        before = content(copied)
        assert not checkpoints.save(run.batches, state, force=True)
    assert content(copied) == before


@pytest.mark.parametrize("keep", [1, 3])
def test_exactly_the_newest_checkpoints_are_kept(keep: int, run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, keep) as checkpoints:
        run = checkpoints.resume(a_state())
        state = run.train_state
        for batch in run.batches:
            state = train_step(state, batch)
            checkpoints.save(run.batches, state)
            checkpoints.wait()
            step = run.batches.position.step
            assert checkpoints.steps() == list(range(max(1, step - keep + 1), step + 1))
    assert names(run_directory) == sorted([".lock", *map(str, range(9 - keep, 9))])


def test_saving_needs_the_iterator_of_this_run(run_directory: pathlib.Path) -> None:
    pipeline = a_pipeline()
    with Checkpoints(run_directory, pipeline, 1, 1) as checkpoints:
        state = a_state()
        with pytest.raises(ValueError, match="call resume before save"):
            checkpoints.save(pipeline.iterate(), state)
        run = checkpoints.resume(state)
        next(run.batches)
        wrong: Any
        for wrong in (iter([1]), list(run.batches), pipeline, run, None):
            with pytest.raises(TypeError, match="batches must be the iterator that resume gave"):
                checkpoints.save(wrong, state)
        foreign = pipeline.iterate()
        next(foreign)
        with pytest.raises(
            ValueError, match=r"train on run\.batches, not on an iterator of your own"
        ):
            checkpoints.save(foreign, state)
        assert checkpoints.steps() == []


def test_a_train_state_that_could_not_be_resumed_is_not_saved(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 1) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        with pytest.raises(
            ValueError, match=r"/w was float32\[4\] and is float32\[5\]; /more was absent"
        ):
            checkpoints.save(run.batches, {**state, "w": jnp.zeros(5), "more": 1})
        with pytest.raises(TypeError, match="leaf /w is 'text' of type str"):
            checkpoints.save(run.batches, {**state, "w": "text"})
        assert checkpoints.steps() == []
        assert checkpoints.save(run.batches, state)


def test_the_train_states_own_step_must_be_that_of_the_iterator(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 1) as checkpoints:
        with pytest.raises(
            ValueError, match=r"own step is 5, and a new run in .* begins at step 0: .* set it to 0"
        ):
            checkpoints.resume({**a_state(), "step": jnp.array(5)})
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        with pytest.raises(ValueError, match=r"own step is 2, and the iterator of .* is at step 1"):
            checkpoints.save(run.batches, {**state, "step": state["step"] + 1})
        assert checkpoints.save(run.batches, state)
        checkpoints.wait()
        state = train_step(state, next(run.batches))
        with monkeypatch.context() as patched:
            patched.setattr(checkpointing.checkpoints, "check_step", lambda *_: None)
            assert checkpoints.save(run.batches, {**state, "step": state["step"] + 1})
            checkpoints.wait()
        with pytest.raises(
            ValueError, match=r"own step is 3, and .* step 2 is at step 2: .* together"
        ):
            checkpoints.resume(a_state())


def test_reading_ahead_of_the_training_is_caught_at_save(run_directory: pathlib.Path) -> None:
    def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
        waiting = next(batches)
        for batch in batches:
            yield waiting
            waiting = batch
        yield waiting

    with Checkpoints(run_directory, a_pipeline(), 1, 1) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(one_ahead(run.batches)))
        with pytest.raises(ValueError, match=r"own step is 1, .* at step 2: .*no read-ahead"):
            checkpoints.save(run.batches, state)
        assert checkpoints.steps() == []


def test_everything_passed_may_be_overwritten_donated_or_deleted_after_save(
    run_directory: pathlib.Path,
) -> None:
    size = 200_000
    expected: dict[str, Any] = {
        "donated": np.arange(size, dtype=np.float32),
        "deleted": np.arange(size, dtype=np.float32) + 1,
        "written": np.arange(size, dtype=np.float64),
    }
    run_config: dict[str, Any] = {"lr": 0.1, "nested": {"list": [1, 2]}}
    state: dict[str, Any] = {
        name: jnp.asarray(value) for name, value in expected.items() if name != "written"
    }
    state["written"] = expected["written"].copy()
    with Checkpoints(run_directory, a_pipeline(), 1, 1, run_config=run_config) as checkpoints:
        run = checkpoints.resume(state)
        run_config["lr"] = 9.0
        run_config["nested"]["list"].append(3)
        next(run.batches)
        assert checkpoints.save(run.batches, state)
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(state["donated"]).block_until_ready()
        state["deleted"].delete()
        state["written"][:] = -1
        state.clear()
        for _ in run.batches:
            pass
    manifest, leaves = checkpointing.load(run_directory)
    assert {path[1:]: raw(np.asarray(leaf)) for path, leaf in leaves.items()} == {
        name: raw(leaf) for name, leaf in expected.items()
    }
    assert manifest.position == Position(0, 3, 1)
    assert manifest.identity.run_config == {"lr": 0.1, "nested": {"list": [1, 2]}}


def test_plain_orbax_can_list_and_read_a_checkpoint(copied: pathlib.Path) -> None:
    with ocp.CheckpointManager(copied) as manager:
        assert sorted(manager.all_steps()) == [1, 2, 3]
        template = without(a_state(), "key") | {"key": jax.random.key_data(a_state()["key"])}
        items = manager.restore(
            3,
            args=ocp.args.Composite(
                train_state=ocp.args.StandardRestore(template),
                iterator=ocp.args.JsonRestore(),
                manifest=ocp.args.JsonRestore(),
            ),
        )
        # A manager that is not told the kinds of the items finds them in what is kept with the step.
        assert manager.restore(3).iterator == items.iterator
        assert manager.metadata(3).commit_timestamp_nsecs > manager.metadata(3).init_timestamp_nsecs
    assert items.iterator == {"epoch": 0, "offset": 9, "step": 3}
    assert items.manifest["step"] == 3
    assert raw(items.train_state["w"]) == uninterrupted("pad")[2][1]["['w']"]


def test_load_reads_any_step_and_by_default_the_newest_whole_one(copied: pathlib.Path) -> None:
    before = content(copied)
    for step, wanted in ((None, 3), (1, 1), (3, 3)):
        manifest, leaves = checkpointing.load(copied, step)
        assert isinstance(manifest, Manifest)
        assert (manifest.step, manifest.position) == (wanted, a_pipeline().grid.position(wanted))
        assert leaves.keys() == {"/w", "/opt/mu", "/opt/count", "/key", "/step"}
        assert raw(jnp.asarray(leaves["/w"])) == uninterrupted("pad")[wanted - 1][1]["['w']"]
        assert np.asarray(leaves["/key"]).dtype == np.uint32
    assert content(copied) == before


def test_load_says_what_is_not_there_or_damaged(
    copied: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(FileNotFoundError, match="has no step 7"):
        checkpointing.load(copied, 7)
    wrong: Any
    for wrong in ("3", 3.0, True, [3]):
        for read in (checkpointing.load, lambda path, step: inspect_run(path, steps=[step])):
            with pytest.raises(TypeError, match=re.escape(f"a step is an integer, not {wrong!r}")):
                read(copied, wrong)
    wrong = 3
    with pytest.raises(TypeError, match=r"steps lists numbers of steps, such as \[3\], and is 3"):
        inspect_run(copied, steps=wrong)
    assert checkpointing.load(copied, np.int64(3))[0].step == 3  # type: ignore[arg-type]
    for look in (checkpointing.load, inspect_run, checkpointing.provenance):
        with pytest.raises(ValueError, match="is of one step, not the directory of a run"):
            look(copied / "3")
    with pytest.raises(FileNotFoundError):
        checkpointing.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no steps"):
        checkpointing.load(tmp_path / "empty")
    (copied / "8").write_text("a file")
    (copied / "3/iterator/metadata").unlink()
    assert checkpointing.load(copied)[0].step == 2
    with pytest.raises(CheckpointDamagedError, match="step 3: iterator/metadata is missing"):
        checkpointing.load(copied, 3)
    for step in (1, 2):
        (copied / str(step) / "manifest/metadata").unlink()
    with pytest.raises(CheckpointDamagedError) as caught:
        checkpointing.load(copied)
    assert list(caught.value.reasons) == [8, 3, 2, 1]


def test_a_run_can_be_read_while_it_is_written(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 2) as checkpoints:
        train(checkpoints, checkpoints.resume(a_state()), 3)
        checkpoints.wait()
        assert checkpointing.load(run_directory)[0].step == 3


def test_a_relative_directory_stays_where_it_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    name = "runs/with blanks and ünicode ☃"
    with Checkpoints(name, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(checkpoints, run, 2)
    assert resume(tmp_path / name).position.step == 2
    assert names(tmp_path / "elsewhere") == []


def test_a_second_writer_gets_a_clear_error_at_once(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 1) as checkpoints:
        run = checkpoints.resume(a_state())
        with pytest.raises(
            BlockingIOError, match=f"open for writing in process {os.getpid()}; two writers"
        ):
            Checkpoints(run_directory, a_pipeline(), 1, 1)
        train(checkpoints, run, 1)
        checkpoints.close()
        assert resume(run_directory).position.step == 1
        checkpoints.close()


def test_a_clock_that_jumps_back_does_not_change_which_step_is_newest(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, clock_ns = time.time, time.time_ns
    for step in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda step=step: clock() - 100_000 * step)
            patched.setattr(time, "time_ns", lambda step=step: clock_ns() - 10**14 * step)
            with Checkpoints(run_directory, a_pipeline(), 1, 2) as checkpoints:
                run = checkpoints.resume(a_state())
                assert run.position.step == step
                train(checkpoints, run, 1)
    os.utime(run_directory / "3", (0, 0))
    assert names(run_directory) == [".lock", "2", "3"]
    assert resume(run_directory).position.step == 3


def test_what_is_closed_neither_saves_nor_resumes(copied: pathlib.Path) -> None:
    with Checkpoints(copied, a_pipeline(), 1, 9, run_config=RUN_CONFIG) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
    before = content(copied)
    with Checkpoints(copied, a_pipeline(), 1, 9, run_config=RUN_CONFIG):
        with pytest.raises(ValueError, match=r"checkpoints of .* are closed, and another run may"):
            checkpoints.save(run.batches, state)
        with pytest.raises(ValueError, match="are closed"):
            checkpoints.resume(a_state())
        checkpoints.wait()
        checkpoints.close()
    assert content(copied) == before


# A save that fails.


class PlannedError(Exception):
    """What a test makes happen."""


@pytest.fixture
def fail_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the next save fail in the background, right before it would be committed."""
    real = checkpointing.storage.local.seal_step
    failing: list[bool] = []

    def seal_step(path: pathlib.Path, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        if failing:
            failing.clear()
            raise PlannedError("the disk is gone")
        return real(path, manifest, about)

    monkeypatch.setattr(checkpointing.storage.local, "seal_step", seal_step)
    return lambda: failing.append(True)


FAILED_STEP_2 = (
    r"the save of step 2 in .* has failed: .*the disk is gone\. Earlier checkpoints are intact"
)


def begin_failing(checkpoints: Checkpoints, fail_once: Callable[[], None]) -> Any:
    """A run whose save of step 2 has failed, which nobody has been told yet."""
    run = checkpoints.resume(a_state())
    train(checkpoints, run, 1)
    checkpoints.wait()
    state = train_step(train_step(a_state(), a_pipeline()[0]), next(run.batches))
    fail_once()
    assert checkpoints.save(run.batches, state)
    checkpoints._writer.settle()
    return dataclasses.replace(run, train_state=state)


def test_the_save_after_a_failed_one_raises_its_error_and_is_done_all_the_same(
    run_directory: pathlib.Path, fail_once: Callable[[], None]
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = begin_failing(checkpoints, fail_once)
        state = train_step(run.train_state, next(run.batches))
        with pytest.raises(RuntimeError, match=FAILED_STEP_2) as caught:
            checkpoints.save(run.batches, state)
        assert isinstance(caught.value.__cause__, PlannedError)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
        state = train_step(state, next(run.batches))
        assert checkpoints.save(run.batches, state)
    assert names(run_directory) == [".lock", "1", "3", "4"]
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[3][1]


@pytest.mark.parametrize("surface", ["a save that is not due", "wait", "resume", "close"])
def test_the_error_of_a_failed_save_surfaces_at_any_next_call_once(
    surface: str, run_directory: pathlib.Path, fail_once: Callable[[], None]
) -> None:
    checkpoints = Checkpoints(run_directory, a_pipeline(), 1, 9)
    run = begin_failing(checkpoints, fail_once)
    checkpoints._save_every = 100
    calls: dict[str, Callable[[], Any]] = {
        "a save that is not due": lambda: checkpoints.save(run.batches, run.train_state),
        "wait": checkpoints.wait,
        "resume": lambda: checkpoints.resume(a_state()),
        "close": checkpoints.close,
    }
    with pytest.raises(RuntimeError, match=FAILED_STEP_2):
        calls[surface]()
    calls[surface]()
    checkpoints.close()
    assert names(run_directory) == [".lock", "1"]
    assert resume(run_directory).position.step == 1


def test_a_step_whose_save_has_failed_can_be_saved_again(
    run_directory: pathlib.Path, fail_once: Callable[[], None]
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = begin_failing(checkpoints, fail_once)
        with pytest.raises(RuntimeError, match=FAILED_STEP_2):
            checkpoints.save(run.batches, run.train_state)
        checkpoints.wait()
        assert not checkpoints.save(run.batches, run.train_state)
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[1][1]


def test_leaving_the_context_raises_the_error_of_a_failed_save(
    run_directory: pathlib.Path, fail_once: Callable[[], None]
) -> None:
    with (
        pytest.raises(RuntimeError, match=FAILED_STEP_2),
        Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints,
    ):
        begin_failing(checkpoints, fail_once)
    assert resume(run_directory).position.step == 1


def test_the_loops_own_error_is_kept_and_told_of_the_failed_save(
    run_directory: pathlib.Path, fail_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ZeroDivisionError) as caught,
        Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints,
    ):
        _ = begin_failing(checkpoints, fail_once).position.step / 0
    assert ["the save of step 2" in note for note in caught.value.__notes__] == [True]
    assert "the save of step 2" in caplog.text
    assert resume(run_directory).position.step == 1


def test_an_exception_in_the_loop_loses_no_save(run_directory: pathlib.Path) -> None:
    with (
        pytest.raises(ZeroDivisionError) as caught,
        Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints,
    ):
        _ = len(train(checkpoints, checkpoints.resume(a_state()), 3)) / 0
    assert not hasattr(caught.value, "__notes__")
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[2][1]


@pytest.mark.parametrize("unsynced", ["manifest/metadata", "train_state", "the run's directory"])
def test_a_disk_that_cannot_sync_is_an_error_of_that_save_alone(
    unsynced: str, run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one comes after the rename: the step is there, and may not outlast a power cut."""
    real, failed = os.fsync, False

    def fsync(descriptor: int) -> None:
        nonlocal failed
        path = str(pathlib.Path(f"/proc/self/fd/{descriptor}").readlink())
        if not failed and (path.endswith(unsynced) or path == os.path.realpath(run_directory)):
            failed = True
            raise OSError(errno.EIO, "planned")
        real(descriptor)

    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        monkeypatch.setattr(os, "fsync", fsync)
        trace, state = train(checkpoints, run, 1)
        with pytest.raises(RuntimeError, match=r"save of step 1 .*\[Errno 5\] planned"):
            checkpoints.wait()
        assert checkpoints.save(run.batches, state)
        checkpoints.wait()
    assert bits(resume(run_directory).train_state) == trace[0][1]


def test_a_step_before_the_last_one_saved_is_refused(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        _, state = train(checkpoints, run, 2)
        run.batches.set_state({"epoch": 0, "offset": 4, "step": 1})
        with pytest.raises(ValueError, match="step 1 comes before step 2, which is saved"):
            checkpoints.save(run.batches, {**state, "step": np.int32(1)})
    assert names(run_directory) == [".lock", "1", "2"]


def test_a_whole_checkpoint_that_cannot_be_read_is_an_error_and_no_older_one_is_used(
    copied: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory, or an Orbax that does not read what it wrote: an older step would fail alike."""

    def fail(*_: Any) -> None:
        raise MemoryError("planned")

    monkeypatch.setattr(checkpointing.checkpoints, "read_arrays", fail)
    with pytest.raises(RuntimeError, match="step 3 is whole, but its train state cannot be read"):
        resume(copied, run_config={"lr": 0.1, "layers": [1, 2]})


class BeforeCopy:
    """Makes something happen in the next save, right before the arrays are copied."""

    def __init__(self, checkpoints: Checkpoints, action: Callable[[], None]) -> None:
        self._arrays = checkpoints._writer._arrays
        self._action = action

    def begin(self, *args: Any) -> Any:
        self._action()
        return self._arrays.begin(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arrays, name)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("no_thread_is_left")
def test_a_copy_that_fails_leaves_nothing_and_the_next_save_is_done(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise PlannedError("no room")

    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints._writer, "_arrays", BeforeCopy(checkpoints, fail))
            with pytest.raises(
                RuntimeError, match=r"save of step 1 in .* has failed: no room\. Earl"
            ):
                checkpoints.save(run.batches, state)
        checkpoints.wait()
        assert names(run_directory) == [".lock"]
        assert checkpoints.save(run.batches, state)
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[0][1]


OURS = str(pathlib.Path(checkpointing.__file__).parent)


class Interrupted:
    """Raises KeyboardInterrupt in this thread at a line of the package, and again while the first one unwinds.

    Args:
      line: the line, by the number of lines executed before it.
      times: how many are raised: the second one at the next line that is executed in a caller's frame.
    """

    def __init__(self, line: int, times: int) -> None:
        self._line, self._times = line, times
        self._lines = self.raised = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._unwind)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self._lines += 1
            if self._lines > self._line and self.raised < self._times:
                self.raised += 1
                raise KeyboardInterrupt  # which ends the tracing
        return self._trace

    def _unwind(self, frame: Any, event: str, _: Any) -> None:
        if event == "return" and 0 < self.raised < self._times and frame.f_back is not None:
            frame.f_back.f_trace = self._trace
            sys.settrace(self._trace)


class NoArrays:
    """Writes no arrays, so that saves are quick."""

    def begin(self, *_: Any) -> list[Any]:
        return []

    def finish(self, _: Any) -> None:
        pass

    merge = finish


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_any_line_of_a_save_never_leaves_anything_to_wait_for(
    times: int, run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later call ends, and saves what is asked of it; nothing half written counts as a step."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    state: dict[str, Any] = {"w": np.zeros(3)}
    raised: list[int] = []

    def interrupted_saves(checkpoints: Checkpoints, pool: ThreadPoolExecutor) -> None:
        run = checkpoints.resume(state)
        while 0 not in raised:
            next(run.batches)
            with contextlib.suppress(KeyboardInterrupt), Interrupted(len(raised), times) as one:
                checkpoints.save(run.batches, state)
            raised.append(one.raised)
            # A hang is an error of this line, and no state is left that refuses a save.
            pool.submit(checkpoints.wait).result(60)
            checkpoints.save(run.batches, state)
            pool.submit(checkpoints.wait).result(60)
            assert run.batches.position.step in checkpoints.steps()

    # In a thread of its own: an exception that a trace function raises while another one is handled
    # may stay that thread's current one, and would be the context of all that later tests raise.
    with (
        Checkpoints(run_directory, a_pipeline(num_epochs=None), 1, 2) as checkpoints,
        ThreadPoolExecutor(1) as pool,
        ThreadPoolExecutor(1) as interrupted,
        monkeypatch.context() as patched,
    ):
        patched.setattr(checkpoints._writer, "_arrays", NoArrays())
        interrupted.submit(interrupted_saves, checkpoints, pool).result()
    assert raised.count(times) > 80
    steps = [int(name) for name in names(run_directory) if name != ".lock"]
    assert len(steps) == 2
    assert inspect_run(run_directory, verify="full").intact


def test_saves_are_whole_however_threads_take_turns(run_directory: pathlib.Path) -> None:
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with Checkpoints(run_directory, a_pipeline(num_epochs=None), 1, 2) as checkpoints:
            train(checkpoints, checkpoints.resume(a_state()), 30)
    finally:
        sys.setswitchinterval(interval)
    for step in (29, 30):
        checkpointing.load(run_directory, step)


def test_a_save_that_fails_is_removed_when_nobody_writes_there_any_more(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several things that are written in the background, the first may fail while others go on."""
    over = threading.Event()
    removed: list[bool] = []

    class Fails:
        def result(self) -> None:
            raise PlannedError("the disk is full")

    class Slow:
        def result(self) -> None:
            time.sleep(0.2)
            over.set()

    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        writer, clean = checkpoints._writer, checkpoints._directory.clean_step

        def noted(step: int) -> None:
            removed.append(over.is_set())
            clean(step)

        with monkeypatch.context() as patch:
            patch.setattr(writer._arrays, "begin", lambda *_: [Fails(), Slow()])
            patch.setattr(checkpoints._directory, "clean_step", noted)
            checkpoints.save(run.batches, state)
            with pytest.raises(RuntimeError, match="the disk is full"):
                checkpoints.wait()
        assert removed == [True]
        assert [path.name for path in run_directory.iterdir()] == [".lock"]


# Orbax leaves coroutines behind for which it has no thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_cannot_be_started_is_an_error_of_that_save_alone(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match=r"save of step 1 .*can't start new thread\."):
                checkpoints.save(run.batches, state)
        assert names(run_directory) == [".lock"]
        assert checkpoints.save(run.batches, state)
    gc.collect()  # the coroutines, before the next test
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[0][1]


# Orbax closes the event loop of a write that has failed, and TensorStore calls into it all the same.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_thread_is_left")
def test_arrays_that_cannot_be_written_are_an_error_of_that_save_alone(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of Orbax's threads runs into it by itself."""

    def make_a_mess() -> None:
        (run_directory / "1.regrain.orbax-checkpoint-tmp/train_state").rmdir()
        (run_directory / "1.regrain.orbax-checkpoint-tmp/train_state").write_text("in the way")

    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints._writer, "_arrays", BeforeCopy(checkpoints, make_a_mess))
            _, state = train(checkpoints, run, 1)
            with pytest.raises(RuntimeError, match=r"save of step 1 in .* has failed: "):
                checkpoints.wait()
        assert names(run_directory) == [".lock"]
        assert checkpoints.save(run.batches, state)
        checkpoints.wait()
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[0][1]
    gc.collect()


def test_what_a_failed_save_has_left_is_not_in_the_way_of_the_next(
    run_directory: pathlib.Path,
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        (run_directory / "1.regrain.orbax-checkpoint-tmp/train_state/d").mkdir(parents=True)
        (run_directory / "1.regrain.orbax-checkpoint-tmp/train_state/d/stray").write_bytes(
            b"values"
        )
        (run_directory / "2.regrain.orbax-checkpoint-tmp").write_bytes(b"a file")
        train(checkpoints, run, 2)
    assert names(run_directory) == [".lock", "1", "2"]
    assert not list((run_directory / "1").rglob("stray"))
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[1][1]


def test_arrays_are_spread_over_several_files_and_none_is_cut_up(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several cores can digest several files. Orbax cuts arrays by divisors, and a prime number has none."""
    monkeypatch.setattr(checkpointing.arrays, "_FILE_BYTES", 5_000)
    noise = np.random.default_rng(0)
    state: State = {
        name: jnp.asarray(noise.standard_normal(size).astype(np.float32))
        for name, size in {**dict.fromkeys("abcdef", 1009), "long": 4999}.items()
    }
    state["numpy"] = noise.standard_normal((127, 31))
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(state)
        next(run.batches)
        checkpoints.save(run.batches, state)
    arrays = run_directory / "1/train_state"
    large = [path for path in arrays.rglob("d/*") if path.stat().st_size > 4_000]
    assert len(large) >= 2
    with ocp.PyTreeCheckpointer() as reader:
        kept = reader.metadata(arrays).item_metadata.tree
    assert {name: leaf.storage.chunk_shape for name, leaf in kept.items()} == {
        name: leaf.shape for name, leaf in state.items()
    }
    assert bits(resume(run_directory, state=state).train_state) == bits(state)


def test_files_of_arrays_are_no_larger_than_orbax_makes_them() -> None:
    for size, expected in ((1, 32 << 20), (50_000_000, 50_000_000), (1 << 40, 2 << 30)):
        stored = {"a": np.broadcast_to(np.int8(0), (size,)), "b": np.zeros(3)}
        assert checkpointing.arrays._file_bytes(stored) == expected


def test_a_run_in_a_notebook_saves_and_resumes(run_directory: pathlib.Path) -> None:
    """There, an event loop is running in the thread of the training loop."""

    async def cell(steps: int) -> Trace:
        with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
            return train(checkpoints, checkpoints.resume(a_state()), steps)[0]

    assert asyncio.run(cell(2)) + asyncio.run(cell(3)) == uninterrupted("pad")[:5]


def test_another_save_by_orbax_whose_directories_are_not_there_yet_does_not_hold_up_a_run(
    run_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    go_on = threading.Event()

    class Slow(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
        async def create(self) -> Any:
            assert go_on.wait(60)
            return await super().create()

    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), temporary_path_class=Slow) as other:
        try:
            other.save(tmp_path / "other", args=ocp.args.StandardSave({"w": np.zeros(3)}))
            with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
                trace, _ = train(checkpoints, checkpoints.resume(a_state()), 1)
                checkpoints.wait()
                assert checkpoints.steps() == [1]
        finally:
            go_on.set()
    assert bits(resume(run_directory).train_state) == trace[0][1]


def test_a_donated_array_is_named_before_anything_is_written(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        gone = jnp.zeros(4) + 1.0
        gone.delete()
        with pytest.raises(ValueError, match="leaf /w has been deleted or donated; save the train"):
            checkpoints.save(run.batches, {**state, "w": gone})
        assert names(run_directory) == [".lock"]
        assert checkpoints.save(run.batches, state)
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[0][1]


def test_threads_that_save_at_once_take_turns(run_directory: pathlib.Path) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        state = run.train_state
        with ThreadPoolExecutor(3) as pool:
            for _ in range(6):
                state = train_step(state, next(run.batches))
                saves = [pool.submit(checkpoints.save, run.batches, state) for _ in range(3)]
                assert sorted(one.result() for one in saves) == [False, False, True]
        checkpoints.wait()
        assert names(run_directory) == [".lock", *"123456"]
    assert inspect_run(run_directory, verify="full").intact
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[5][1]


def test_a_save_in_the_middle_of_a_save_is_refused(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        state = train_step(run.train_state, next(run.batches))
        module: Any = checkpointing.checkpoints
        real, told = module.to_stored, []

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            # As a signal's handler would, in the same thread.
            with pytest.raises(RuntimeError, match="in the middle of a save or resume"):
                checkpoints.save(run.batches, state)
            with pytest.raises(RuntimeError, match=r"resume was called in the middle"):
                checkpoints.resume(state)
            told.append(True)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, "to_stored", interrupted)
        assert checkpoints.save(run.batches, state)
        assert told == [True]
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[0][1]


# How a process ends.

SCRIPT = """
import pathlib, sys
import jax.numpy as jnp, numpy as np
import checkpointing, loader

source = loader.ArraySource({"x": np.arange(64)})
config = loader.PipelineConfig(batch_size=1, seed=0, final_batch="drop")
checkpoints = checkpointing.Checkpoints(sys.argv[1], loader.Pipeline(source, config), 1, 2)
state = {"w": jnp.zeros(1 << 20)}
run = checkpoints.resume(state)
for _ in range(3):
    next(run.batches)
    state = {"w": state["w"] + 1.0}
    checkpoints.save(run.batches, state)
"""


def run_script(directory: pathlib.Path, end: str) -> "subprocess.CompletedProcess[str]":
    # The time-out is no measurement: it is far below the 300 s that Orbax can block an exit for.
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(end), str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ZeroDivisionError", 1),
        ("del checkpoints, run", 0),
        ("def main(): checkpoints.save(run.batches, state)\nmain(); sys.exit('stop')", 1),
    ],
)
def test_a_process_that_ends_without_close_loses_no_save_and_keeps_its_exit_code(
    end: str, code: int, run_directory: pathlib.Path
) -> None:
    done = run_script(run_directory, end)
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == ("Zero" in end)
    assert names(run_directory) == [".lock", "2", "3"]
    manifest, leaves = checkpointing.load(run_directory, 3)
    assert manifest.step == 3
    assert raw(leaves["/w"]) == raw(np.full(1 << 20, 3.0, np.float32))


@pytest.mark.parametrize("is_closed_in_time", [False, True])
def test_where_an_exit_starts_no_threads_a_save_waits_unless_with_does(
    is_closed_in_time: bool,
    run_directory: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "checkpointing")
    real, returned = checkpointing.storage.local.seal_step, threading.Event()
    before_the_commit = []

    def seal_step(path: pathlib.Path, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        # Who waits returns only after this; who does not is given the time for it.
        before_the_commit.append(returned.wait(30.0 if is_closed_in_time else 0.3))
        return real(path, manifest, about)

    monkeypatch.setattr(checkpointing.storage.local, "seal_step", seal_step)
    monkeypatch.setattr(checkpointing.writer, "STARTS_NO_THREADS_AT_EXIT", True)
    checkpoints = Checkpoints(run_directory, a_pipeline(), 1, 9)
    with checkpoints if is_closed_in_time else contextlib.closing(checkpoints):
        run = checkpoints.resume(a_state())
        checkpoints.save(run.batches, train_step(run.train_state, next(run.batches)))
        returned.set()
        if not is_closed_in_time:
            assert names(run_directory) == [".lock", "1"]
    assert before_the_commit == [is_closed_in_time]
    told = re.search(r"the loop waited (.+), (.+) in all", caplog.text)
    assert told is not None
    assert is_closed_in_time or told[1] == told[2]


FORK = """
    import os, threading, time
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(0.05), fsync(file))
    next(run.batches)
    checkpoints.save(run.batches, state)
    if (child := os.fork()) == 0:
        try:
            checkpoints.save(run.batches, state)
        except RuntimeError as error:
            print(error, flush=True)
        checkpoints.close()
        threading._shutdown()  # as children of multiprocessing end: JAX's own end can crash in one
        os._exit(5)
    assert not os.path.exists(f"{sys.argv[1]}/4")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
def test_a_forked_child_ends_while_its_parent_saves_and_cannot_save_itself(
    run_directory: pathlib.Path,
) -> None:
    done = run_script(run_directory, f"with checkpoints:{FORK}")
    assert done.returncode == 0, done.stderr
    told, code = done.stdout.splitlines()
    assert re.search(r"were opened by process \d+, of which this is a fork", told)
    assert code == "5"
    assert names(run_directory) == [".lock", "3", "4"]
    assert checkpointing.load(run_directory)[0].step == 4


FAIL = """
    def fail(*_): raise OSError(28, "No space left on device")
    checkpoints.wait()
    checkpointing.storage.local.seal_step = fail
    next(run.batches)
    checkpoints.save(run.batches, state)
"""
NO_DIRECTORY = """
    import shutil
    next(run.batches)
    checkpoints.wait()
    shutil.rmtree(sys.argv[1])
    pathlib.Path(sys.argv[1]).write_text("a file")
    try:
        checkpoints.save(run.batches, state)
        checkpoints.wait()
    except RuntimeError as error:
        print("told:", error)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("end", "told"), [(FAIL, False), (NO_DIRECTORY, True)])
def test_a_process_ends_at_once_after_a_failed_save_and_says_so(
    end: str, told: bool, run_directory: pathlib.Path
) -> None:
    done = run_script(run_directory, end)
    assert done.returncode == 0, done.stderr
    assert "the save of step 4" in (done.stdout if told else done.stderr)
    if not told:
        assert checkpointing.load(run_directory)[0].step == 3


# Damage.


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 1 and 2 with an array of 64 KiB, whose values have a file of their own."""
    directory = tmp_path_factory.mktemp("larger") / "run"
    with Checkpoints(directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(larger_state(0))
        for step in (1, 2):
            next(run.batches)
            checkpoints.save(run.batches, larger_state(step))
    return directory


def larger_state(step: int) -> State:
    noise = np.random.default_rng(step).standard_normal(1 << 14)
    return {
        "w": jnp.asarray(noise.astype(np.float32)),
        "n": np.arange(step, 3 + step),
        "count": step,
        "key": jax.random.key(step),
    }


def flip(where: float) -> Callable[[bytes, bytes], bytes]:
    def flipped(data: bytes, _: bytes) -> bytes:
        at = int(where * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else data

    return flipped


FAULTS: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "flipped at the start": flip(0),
    "flipped in the middle": flip(0.5),
    "flipped at the end": flip(1),
    "cut": lambda data, _: data[: len(data) // 2],
    "longer": lambda data, _: data + b"\0",
    "emptied": lambda data, _: b"",
    "zeros": lambda data, _: b"\0" * len(data),
    "removed": lambda data, _: None,
    "of another step": lambda data, other: other,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_damage_to_each_file_is_detected_or_without_effect(
    fault: str, larger: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {step: bits(larger_state(step)) for step in (1, 2)}
    others = [path for path in (larger / "1").rglob("*") if path.is_file()]
    files = [path for path in (larger / "2").rglob("*") if path.is_file()]
    assert len(files) >= 12
    manifest, _ = checkpointing.load(larger, 2)
    for number, file in enumerate(sorted(files)):
        name = file.relative_to(larger / "2").as_posix()
        # Names of array files are drawn anew in each step: the other step's file of that folder.
        same_name = [path for path in others if path.relative_to(larger / "1").as_posix() == name]
        same_folder = [path for path in others if path.parent.name == file.parent.name]
        other = (same_name + same_folder)[0]
        data = file.read_bytes()
        damaged = FAULTS[fault](data, other.read_bytes())
        directory = pathlib.Path(shutil.copytree(larger, tmp_path / str(number)))
        if damaged is None:
            (directory / "2" / name).unlink()
        else:
            (directory / "2" / name).write_bytes(damaged)
        caplog.clear()
        run = resume(directory, state=larger_state(0))
        assert bits(run.train_state) == expected[run.position.step]
        detected = run.position.step == 1
        warnings = [text for text in caplog.messages if "is damaged and was skipped" in text]
        assert len(warnings) == detected
        covered = name in manifest.files or name == "manifest/metadata"
        assert detected == (covered and damaged != data), name
        assert covered or name in ("_CHECKPOINT_METADATA", "commit_success.txt")
        if detected:
            assert f"{directory} step 2 is damaged and was skipped: " in warnings[0]
            shutil.rmtree(directory / "1")
            before = content(directory)
            with pytest.raises(
                CheckpointDamagedError, match=r"no checkpoint in .* is whole"
            ) as caught:
                resume(directory, state=larger_state(0))
            assert list(caught.value.reasons) == [2]
            assert caught.value.reasons[2] in warnings[0]
            assert content(directory) == before


def test_what_stands_in_place_of_steps_is_skipped_with_a_reason_each_and_never_deleted(
    copied: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(copied / "2", copied / "14")
    shutil.rmtree(copied / "14/train_state/d")
    shutil.copytree(copied / "2", copied / "13")
    (copied / "12").mkdir()
    (copied / "11").mkdir()
    (copied / "11/params.npz").write_bytes(b"theirs")
    (copied / "10").write_bytes(b"a file")
    (copied / "9").symlink_to(copied / "3")
    (copied / "step_99").mkdir()
    before = content(copied)
    run = resume(copied, run_config=RUN_CONFIG)
    assert bits(run.train_state) == uninterrupted("pad")[2][1]
    reasons = ["holds a checkpoint of step 2"] * 2
    reasons += ["manifest/metadata is missing"] * 2 + ["it is not a directory"] * 2
    warnings = [text for text in caplog.messages if "is damaged and was skipped" in text]
    for step, text, reason in zip(range(14, 8, -1), warnings, reasons, strict=True):
        assert text.startswith(f"{copied} step {step} is damaged")
        assert reason in text
    assert content(copied) == before
    for step in (1, 2, 3):
        (copied / str(step) / "train_state/manifest.ocdbt").unlink()
    with pytest.raises(CheckpointDamagedError) as caught:
        resume(copied, run_config=RUN_CONFIG)
    assert list(caught.value.reasons) == [14, 13, 12, 11, 10, 9, 3, 2, 1]
    for step in caught.value.reasons:
        assert f"\n  step {step}: " in str(caught.value)


def test_a_half_deleted_step_is_skipped(copied: pathlib.Path) -> None:
    for name in ("manifest", "iterator", "commit_success.txt", "_CHECKPOINT_METADATA"):
        path = copied / "3" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run = resume(copied, run_config=RUN_CONFIG)
    assert bits(run.train_state) == uninterrupted("pad")[1][1]


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_after_a_fall_back_the_run_saves_again_at_the_damaged_steps_too(
    keep: int, copied: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copied / "3/train_state/manifest.ocdbt").write_bytes(b"")
    (copied / "2/iterator/metadata").write_bytes(b"{}")
    (copied / "5").mkdir()
    (copied / "5/notes").write_text("foreign")
    damaged = {step: content(copied / str(step)) for step in (2, 3, 5)}
    with Checkpoints(copied, a_pipeline(), 1, keep, run_config=RUN_CONFIG) as checkpoints:
        run = checkpoints.resume(a_state())
        assert run.position.step == 1
        trace, state = train(checkpoints, run, 3)
        checkpoints.wait()
        assert checkpoints.steps() == sorted([*[1, 2, 3, 4][-keep:], 5])
    assert trace == uninterrupted("pad")[1:4]
    for step in (2, 3):
        assert content(copied / f"{step}.set-aside-1") == damaged[step]
        assert (
            f"{copied / str(step)} stood in the way of a save; it is now {step}.set-aside-1"
            in caplog.text
        )
    assert content(copied / "5") == damaged[5]
    run = resume(copied, run_config=RUN_CONFIG)
    assert run.position.step == 4
    assert bits(run.train_state) == bits(state)


def test_a_damaged_step_does_not_count_among_those_kept(copied: pathlib.Path) -> None:
    (values,) = (copied / "3/train_state/d").iterdir()
    values.write_bytes(flip(0.5)(values.read_bytes(), b""))
    with Checkpoints(copied, a_pipeline(), 4, 2, run_config=RUN_CONFIG) as checkpoints:
        train(checkpoints, checkpoints.resume(a_state()), 2)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4]
    for step in (2, 4):
        checkpointing.load(copied, step)


def test_a_file_in_the_way_of_a_save_is_set_aside(run_directory: pathlib.Path) -> None:
    run_directory.mkdir()
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        (run_directory / "1").write_text("mine")
        (run_directory / "2").symlink_to("nowhere")
        train(checkpoints, run, 2)
    assert (run_directory / "1.set-aside-1").read_text() == "mine"
    assert (run_directory / "2.set-aside-1").is_symlink()
    assert resume(run_directory).position.step == 2


def test_a_temporary_name_that_is_a_link_destroys_nothing(
    run_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("precious")
    run_directory.mkdir()
    (run_directory / "1.regrain.orbax-checkpoint-tmp").symlink_to(tmp_path / "precious")
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        _, state = train(checkpoints, run, 1)
        checkpoints.wait()
    assert content(tmp_path / "precious") == {"file": b"precious"}
    assert bits(resume(run_directory).train_state) == bits(state)


# A stranger's manifest.


def rewrite(directory: pathlib.Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a step's manifest, under a digest that holds."""
    path = directory / str(step) / "manifest/metadata"
    value = json.loads(path.read_bytes())
    del value["sha256"]
    change(value)
    path.write_bytes(seal(value))


def test_bytes_of_the_manifest_cannot_change_unnoticed(copied: pathlib.Path) -> None:
    path = copied / "3/manifest/metadata"
    data = path.read_bytes()
    for at in range(0, len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert resume(copied, run_config=RUN_CONFIG).position.step == 2


@pytest.mark.parametrize("shape", [[10**18], [0, 10**30], [0, 2**62, 2**62], [7]])
def test_a_stranger_manifest_with_another_shape_is_damage(
    copied: pathlib.Path, shape: list[int]
) -> None:
    rewrite(copied, 3, lambda manifest: manifest["train_state"][0].update(shape=shape))
    with pytest.raises(CheckpointDamagedError, match="step 3: "):
        checkpointing.load(copied, 3)
    assert checkpointing.load(copied)[0].step == 2


def test_an_extra_empty_folder_changes_nothing(copied: pathlib.Path) -> None:
    (copied / "3/train_state/more").mkdir()
    run = resume(copied, run_config=RUN_CONFIG)
    assert run.position.step == 3
    assert checkpointing.load(copied)[0].step == 3


def test_a_name_with_control_characters_is_escaped_in_messages(tmp_path: pathlib.Path) -> None:
    with (
        Checkpoints(tmp_path / "a\x1b[31m\nb", a_pipeline(), 1, 9) as checkpoints,
        pytest.raises(ValueError, match=r"a\\x1b\[31m\\nb holds no checkpoint"),
    ):
        checkpoints.resume(jax.eval_shape(a_state))


def test_a_step_deleted_while_it_is_read_is_not_damage(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with ``keep=1`` saves another step at the worst moments of a reader."""
    directory: Any = checkpointing.storage.directory.RunDirectory
    module: Any = checkpointing.checkpoints
    check, read_arrays = directory.check, module.read_arrays
    with Checkpoints(run_directory, a_pipeline(num_epochs=None), 1, 1) as checkpoints:
        run = checkpoints.resume(a_state())
        state = run.train_state

        def save_another() -> None:
            nonlocal state
            state = train_step(state, next(run.batches))
            checkpoints.save(run.batches, state)
            checkpoints.wait()

        def before(read: Callable[..., Any], at: int) -> Callable[..., Any]:
            calls = itertools.count()

            def slow(*arguments: Any, **settings: Any) -> Any:
                if next(calls) == at:
                    save_another()
                return read(*arguments, **settings)

            return slow

        for name, target, real in [
            ("check", directory, check),
            ("read_arrays", module, read_arrays),
        ]:
            save_another()
            with monkeypatch.context() as patched:
                patched.setattr(target, name, before(real, 0))
                manifest, leaves = checkpointing.load(run_directory)
            assert manifest.step == run.batches.position.step
            assert leaves["/step"] == manifest.step
            with monkeypatch.context() as patched:
                patched.setattr(target, name, before(real, 0))
                with pytest.raises(FileNotFoundError, match=r"has no step \d+; its newest steps: "):
                    checkpointing.load(run_directory, run.batches.position.step)
        with monkeypatch.context() as patched:
            patched.setattr(directory, "check", before(check, 0))
            report = inspect_run(run_directory)
        assert report.intact
        assert [one.step for one in report.steps] == [run.batches.position.step]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda m: m.update(format=2), "damaged"),
    "step": (lambda m: m.update(step=4), "damaged"),
    "position": (lambda m: m["position"].update(offset=6), "damaged"),
    "stream.fingerprint.digest": (lambda m: m["stream"]["fingerprint"].update(digest="sha256:" + "0" * 64), "damaged"),
    "stream.fingerprint.num_records": (lambda m: m["stream"]["fingerprint"].update(num_records=12), "damaged"),
    "stream.fingerprint.columns": (lambda m: m["stream"]["fingerprint"]["columns"]["x"].update(dtype="int8"), "damaged"),
    "stream.config.batch_size": (lambda m: m["stream"]["config"].update(batch_size=4), "mismatch"),
    "stream.config.seed": (lambda m: m["stream"]["config"].update(seed=4), "mismatch"),
    "stream.config.num_epochs": (lambda m: m["stream"]["config"].update(num_epochs=4), "mismatch"),
    "stream.config and order": (lambda m: (m["stream"]["config"].update(shuffle="none"), m["stream"]["order"].update(kind="none")), "mismatch"),
    "stream.order.kind": (lambda m: m["stream"]["order"].update(kind="none"), "damaged"),
    "stream.order.version": (lambda m: m["stream"]["order"].update(version=2), "mismatch"),
    "stream.transform": (lambda m: m["stream"].update(transform=None), "mismatch"),
    "stream.transform.name": (lambda m: m["stream"]["transform"].update(name="other"), "mismatch"),
    "state": (lambda m: m.update(state={}), "damaged"),
    "run_config": (lambda m: m["run_config"].update(lr=1), "mismatch"),
    "train_state": (lambda m: m["train_state"].pop(), "mismatch"),
    "train_state.shape": (lambda m: m["train_state"][-1].update(shape=[3]), "mismatch"),
    "next": (lambda m: m["next"]["ids"].reverse(), "mismatch"),
    "next, cut": (lambda m: m["next"]["ids"].pop(), "mismatch"),
    "next, none": (lambda m: m["next"]["ids"].clear(), "mismatch"),
    "files": (lambda m: m["files"].popitem(), "damaged"),
    "files.sha256": (lambda m: m["files"]["iterator/metadata"].update(sha256="0" * 64), "damaged"),
    "files.bytes": (lambda m: m["files"]["iterator/metadata"].update(bytes=1), "damaged"),
    # These tell of the past, and decide nothing.
    "history": (lambda m: m["history"].append({"position": {}, "changed": {}}), "same"),
    "packages": (lambda m: m["packages"].update(numpy="1"), "same"),
}  # fmt: skip


def test_an_edit_is_listed_for_every_part_of_the_manifest(written: pathlib.Path) -> None:
    parts = json.loads((written / "3/manifest/metadata").read_bytes()).keys()
    assert {name.replace(",", ".").split(".")[0].split(" ")[0] for name in EDITS} == parts - {
        "sha256"
    }


@pytest.mark.parametrize("edit", EDITS)
def test_each_part_of_the_manifest_changed_is_caught_though_its_digest_holds(
    edit: str, copied: pathlib.Path
) -> None:
    change, outcome = EDITS[edit]
    rewrite(copied, 3, change)
    if outcome == "mismatch":
        assert_refused(copied, {})
    else:
        run = resume(copied, run_config=RUN_CONFIG)
        assert run.position.step == (2 if outcome == "damaged" else 3)
        assert bits(run.train_state) == uninterrupted("pad")[run.position.step - 1][1]


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a batch of more records than there are": lambda m: m["stream"]["config"].update(
        batch_size=2**31 - 1, final_batch="drop"
    ),
    "an offset beyond the data": lambda m: m["position"].update(offset=10**9),
    "an epoch beyond the last": lambda m: m["position"].update(epoch=10**9),
    "a file outside": lambda m: m["files"].update(
        {"../../../etc/passwd": {"sha256": "0" * 64, "bytes": 1}}
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_no_run_can_have_written_is_damage(case: str, copied: pathlib.Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        HOSTILE[case](manifest)
        place = json.dumps(manifest["position"]).encode()
        (copied / "3/iterator/metadata").write_bytes(place)
        described = manifest["files"]["iterator/metadata"]
        described.update(checkpointing.storage.local._describe(copied / "3/iterator/metadata"))

    rewrite(copied, 3, change)
    pipeline = a_pipeline(final_batch="drop") if "batch" in case else a_pipeline()
    with Checkpoints(copied, pipeline, 1, 9, run_config=RUN_CONFIG) as checkpoints:
        if "batch" in case:
            shutil.rmtree(copied / "1")
            shutil.rmtree(copied / "2")
            with pytest.raises(
                CheckpointDamagedError, match="step 3: its position is none of its stream"
            ):
                checkpoints.resume(a_state(), allow={"batch_size"})
        else:
            assert checkpoints.resume(a_state()).position.step == 2


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 20)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    parts: Any = enumerate(value) if isinstance(value, list) else getattr(value, "items", tuple)()
    for key, part in parts:
        found += places(part, (*path, key))
    return found


@pytest.fixture(scope="module")
def shared(written: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Step 3 alone; each example writes its manifest anew."""
    directory = tmp_path_factory.mktemp("shared") / "run"
    shutil.copytree(written / "3", directory / "3")
    return directory


@given(choice=st.data(), value=json_values, allowed=st.booleans())
@settings(max_examples=150)
def test_whatever_a_stranger_writes_resume_gives_the_run_or_one_of_its_two_errors(
    choice: st.DataObject, value: Any, allowed: bool, written: pathlib.Path, shared: pathlib.Path
) -> None:
    original = (written / "3/manifest/metadata").read_bytes()
    whole = json.loads(original)
    del whole["sha256"]
    place = choice.draw(st.sampled_from(places(whole)))
    functools.reduce(lambda part, key: part[key], place[:-1], whole)[place[-1]] = value
    (shared / "3/manifest/metadata").write_bytes(seal(whole))
    try:
        allow = {"batch_size"} if allowed else ()
        run = resume(shared, run_config=RUN_CONFIG, allow=allow)
    except (CheckpointMismatchError, CheckpointDamagedError):
        return
    assert run.position == Position(0, 9, 3)
    assert bits(run.train_state) == uninterrupted("pad")[2][1]


def test_a_leaf_that_became_strongly_typed_comes_back_so(run_directory: pathlib.Path) -> None:
    """Weak leaves yield in promotions: brought back weak, the next updates would end in other bits."""

    @jax.jit
    def step(state: State) -> State:
        rate = state["rate"].astype(jnp.float32)
        w = (state["w"] - state["rate"] * state["w"]).astype(jnp.bfloat16)
        return {"w": w, "rate": rate * jnp.float32(0.9)}

    first = {"w": jnp.linspace(1, 2, 8).astype(jnp.bfloat16), "rate": jnp.asarray(0.1)}
    with jax.numpy_dtype_promotion("standard"):
        straight = first
        for _ in range(5):
            straight = step(straight)
            with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
                run = checkpoints.resume(first)
                next(run.batches)
                stopped = step(run.train_state)
                checkpoints.save(run.batches, stopped)
            assert bits(stopped) == bits(straight)
    assert first["rate"].weak_type
    assert not resume(run_directory, state=first).train_state["rate"].weak_type


def test_arrays_come_back_as_free_to_move_as_they_were(run_directory: pathlib.Path) -> None:
    """JAX refuses to combine an array that is committed to one device with one on others."""
    device = jax.devices()[0]
    state = {
        "free": jnp.zeros(3),
        "bound": jax.device_put(jnp.zeros(3), device),
        "key": jax.random.key(0),
        "weak": jnp.full(2, 1.0),
    }
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(state)
        next(run.batches)
        checkpoints.save(run.batches, state)
    restored = resume(run_directory, state=state).train_state
    committed = {name: leaf.committed for name, leaf in restored.items()}
    assert committed == {"free": False, "bound": True, "key": False, "weak": False}
    assert restored["weak"].weak_type


@pytest.mark.parametrize("verify", ["full", "manifest"])
def test_empty_parts_of_a_tree_may_come_and_go(verify: Any, run_directory: pathlib.Path) -> None:
    """They hold nothing that could be lost: an optimiser's stateless stage, a None."""
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        begun = checkpoints.resume({"opt": (jnp.ones(3), ())})
        next(begun.batches)
        checkpoints.save(begun.batches, {"opt": (jnp.ones(3), ())})
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        template: Any = {"opt": (jnp.zeros(3),), "none": None}
        run = checkpoints.resume(template, verify=verify)
    assert run.position.step == 1
    structures: list[Any] = [jax.tree.structure(tree) for tree in (run.train_state, template)]
    assert structures[0] == structures[1]
    assert run.train_state["opt"][0].tolist() == [1, 1, 1]


def test_ctrl_c_while_waiting_lets_nobody_in_before_the_save_is_done(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = checkpointing.storage.local.seal_step

    def seal_step(*args: Any) -> Manifest:
        begun.set()
        assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(checkpointing.storage.local, "seal_step", seal_step)
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        train(checkpoints, checkpoints.resume(a_state()), 1)
        assert begun.wait(60)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
        timer.join()
        threading.Timer(0.2, go_on.set).start()
        checkpoints.close()
        assert go_on.is_set()
    assert bits(resume(run_directory).train_state) == uninterrupted("pad")[0][1]


def test_a_directory_that_is_moved_away_is_an_error_of_the_next_save(
    run_directory: pathlib.Path,
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = checkpoints.resume(a_state())
        _, state = train(checkpoints, run, 1)
        checkpoints.wait()
        moved = run_directory.rename(run_directory.with_name("moved"))
        state = train_step(state, next(run.batches))
        with pytest.raises(RuntimeError, match="was deleted or moved while they were open"):
            checkpoints.save(run.batches, state)
    assert not run_directory.exists()
    assert bits(resume(moved).train_state) == uninterrupted("pad")[0][1]


def test_a_new_error_tells_of_the_one_before(
    run_directory: pathlib.Path, fail_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(run_directory, a_pipeline(), 1, 9) as checkpoints:
        run = begin_failing(checkpoints, fail_once)
        state = train_step(run.train_state, next(run.batches))

        def fail(*_: Any) -> None:
            raise PlannedError("another")

        monkeypatch.setattr(checkpointing.checkpoints, "package_versions", fail)
        with pytest.raises(PlannedError, match="another") as caught:
            checkpoints.save(run.batches, state)
        assert "the save of step 2" in caught.value.__notes__[0]


def test_each_nested_setting_of_the_run_is_named(run_directory: pathlib.Path) -> None:
    model = {f"layer{i}": {"width": 256, "depth": i} for i in range(20)}
    write(run_directory, a_pipeline(), 1, run_config={"model": {**model, "lr": 0.1}})
    with pytest.raises(CheckpointMismatchError) as caught:
        resume(run_directory, run_config={"model": {"lr": 0.2, **model}})
    assert [(one.name, one.checkpoint, one.now) for one in caught.value.differences] == [
        ("run_config.model.lr", "0.1", "0.2")
    ]


def test_batches_of_a_resume_are_delivered_on_a_device(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("REGRAIN_STEP_LOG", str(tmp_path / "log"))
    state = a_state()
    for first in (0, 2):
        with Checkpoints(run_directory, a_pipeline(), save_every=2, keep=2) as checkpoints:
            run = checkpoints.resume(state, device=jax.devices("cpu")[0])
            assert run.position.step == first
            state = run.train_state
            for _ in range(2):
                batch = next(run.batches)
                assert isinstance(batch["x"], jax.Array)
                assert isinstance(batch["mask"], jax.Array)
                state = train_step(state, batch)
            assert checkpoints.save(run.batches, state)
    log = checkpointing.read_step_log(tmp_path / "log")
    assert [delivery.position.step for delivery in log] == [0, 1, 2, 3]


def test_wrong_device_is_refused_before_anything_is_read(run_directory: pathlib.Path) -> None:
    with (
        Checkpoints(run_directory, a_pipeline(), save_every=2, keep=2) as checkpoints,
        pytest.raises(TypeError, match="device must be"),
    ):
        checkpoints.resume(a_state(), device="cpu")


def test_steps_that_plain_orbax_has_written_are_called_by_their_name(
    tmp_path: pathlib.Path,
) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        state = ocp.args.StandardSave({"w": np.ones(2)})
        manager.save(3, args=ocp.args.Composite(state=state))
    with (
        Checkpoints(tmp_path, a_pipeline(), 1, 1) as checkpoints,
        pytest.raises(CheckpointDamagedError, match=r"written by Checkpoints.*\n.*plain Orbax"),
    ):
        checkpoints.resume(a_state())


def test_a_chain_that_is_in_no_stream_is_refused_with_what_it_should_be_in(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(TypeError, match="a GrainStream around a chain of Grain's data sets"):
        Checkpoints(tmp_path, a_pipeline().dataset, 1, 1)
