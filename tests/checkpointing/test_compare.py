"""The comparison of two runs finds each planted difference, says where it is, and finds nothing else."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import loader
from checkpointing import Delivery, Manifest
from checkpointing.manifest import Identity
from checkpointing.proof.compare import (
    LeafDifference,
    RunDifference,
    Stretch,
    compare_checkpoints,
    compare_streams,
    final_state,
    leaf_differences,
)
from checkpointing.proof.step_log import Part
from checkpointing.train_state import describe
from loader.identity.base import Place
from loader.stream import ids_ahead

PIPELINE = loader.Pipeline(
    loader.ArraySource({"x": np.arange(10)}),
    loader.PipelineConfig(batch_size=4, seed=3, num_epochs=2, final_batch="pad"),
)


def delivery(step: int) -> Delivery:
    batch = PIPELINE[step]
    ids, mask = batch["id"].tolist(), batch["mask"].astype(int).tolist()
    return Delivery(PIPELINE.position(step), tuple(ids), tuple(mask), 0.5 * step)


REFERENCE = [delivery(step) for step in range(len(PIPELINE))]


def killed_run() -> list[Stretch]:
    """A kill in step 3, which is replayed from step 2 on; another at start-up; then all the rest."""
    return [
        Stretch("attempt 1", 0, REFERENCE[:4]),
        Stretch("attempt 2", 2, []),
        Stretch("attempt 3", 2, REFERENCE[2:]),
    ]


def test_a_run_that_was_killed_and_resumed_rightly_is_the_same() -> None:
    assert compare_streams(REFERENCE, killed_run()) == []


def test_times_are_not_compared() -> None:
    later = [dataclasses.replace(one, seconds=one.seconds + 9) for one in REFERENCE]
    assert compare_streams(REFERENCE, [Stretch("attempt 1", 0, later)]) == []


def edited(step: int, **changes: Any) -> list[Stretch]:
    """The killed run with one delivery of its last attempt changed."""
    *first, last = killed_run()
    deliveries = list(last.deliveries)
    deliveries[step - 2] = dataclasses.replace(deliveries[step - 2], **changes)
    return [*first, Stretch("attempt 3", 2, deliveries)]


def swapped(step: int) -> tuple[int | str, ...]:
    ids = REFERENCE[step].ids
    return (ids[0], ids[2], ids[1], ids[3])


def without(step: int) -> list[Stretch]:
    *first, last = killed_run()
    kept = [one for one in last.deliveries if one.position.step != step]
    return [*first, Stretch("attempt 3", 2, kept)]


EXTRA = dataclasses.replace(REFERENCE[-1], position=loader.Position(2, 0, 6))


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda: edited(4, ids=swapped(4)), {"ids": "step 4, attempt 3, from slot 1 on"}),
        (lambda: edited(4, ids=REFERENCE[4].ids[:2]), {"ids": "step 4, attempt 3, from slot 2 on"}),
        (lambda: edited(5, mask=(1, 1, 1, 0)), {"mask": "step 5, attempt 3, from slot 2 on"}),
        (lambda: edited(4, position=loader.Position(1, 5, 4)), {"place": "step 4, attempt 3"}),
        (
            lambda: edited(3, ids=swapped(3)),
            {"ids": "step 3, attempt 3, from slot 1 on", "replay": "step 3, attempt 3"},
        ),
        # The step that was skipped had been delivered before the kill: only the sequence tells.
        (lambda: without(2), {"sequence": "step 3, attempt 3"}),
        (lambda: without(4), {"sequence": "step 5, attempt 3", "missing step": "step 4"}),
        (lambda: [Stretch("attempt 1", 0, REFERENCE[:5])], {"missing step": "step 5"}),
        (
            lambda: [Stretch("attempt 1", 0, [*REFERENCE, EXTRA])],
            {"extra step": "step 6, attempt 1"},
        ),
        # It has a checkpoint of step 2 and begins anew.
        (
            lambda: [Stretch("attempt 1", 0, REFERENCE[:3]), Stretch("attempt 2", 2, REFERENCE)],
            {"sequence": "step 0, attempt 2"},
        ),
    ],
)
def test_a_planted_difference_of_the_stream_is_found(
    run: Callable[[], list[Stretch]], found: dict[str, str]
) -> None:
    differences = compare_streams(REFERENCE, run())
    assert {
        one.what: one.where.split(", from slot")[0] if one.what == "replay" else one.where
        for one in differences
    } == found


def test_ids_stand_on_both_sides_and_further_steps_are_counted() -> None:
    wrong = [dataclasses.replace(one, ids=(7, 7, 7, 7)) for one in REFERENCE]
    (found,) = compare_streams(REFERENCE, [Stretch("attempt 1", 0, wrong)])
    assert found == RunDifference(
        "ids",
        "step 0, attempt 1, from slot 0 on",
        ", ".join(map(str, REFERENCE[0].ids)),
        "7, 7, 7, 7",
        "and 5 more",
    )


STATE = {
    "/b": np.array([1.0, np.nan], np.float32),
    "/key": np.array([1, 2], np.uint32),
    "/w": jnp.ones((2, 3), jnp.bfloat16),
}


def manifest(step: int = 4) -> Manifest:
    position = PIPELINE.position(step)
    identity = Identity.of(PIPELINE, {}, describe({}))
    return Manifest(step, Place(position, ids_ahead(PIPELINE, position)), identity, (), {})


def test_equal_checkpoints_are_equal_bit_for_bit() -> None:
    assert compare_checkpoints("run", (manifest(), STATE), (manifest(), dict(STATE))) == []


@pytest.mark.parametrize(
    ("path", "leaf", "note"),
    [
        ("/b", np.array([1.0, 0.0], np.float32), "1 of 2 elements"),
        # Equal as numbers, not bit for bit.
        ("/key", np.array([1, 2], np.int32), ""),
        ("/key", np.array([[1, 2]], np.uint32), ""),
        ("/w", jnp.full((2, 3), 2, jnp.bfloat16), "6 of 6 elements"),
        ("/w", None, ""),
    ],
)
def test_a_planted_difference_of_a_leaf_is_found(path: str, leaf: Any, note: str) -> None:
    other = {name: value for name, value in {**STATE, path: leaf}.items() if value is not None}
    (found,) = compare_checkpoints("run", (manifest(), STATE), (manifest(), other))
    assert (found.what, found.note) == (path, note)
    assert found.reference != found.drilled
    assert final_state(manifest(), other).sha256 != final_state(manifest(), STATE).sha256


def test_minus_zero_is_not_zero() -> None:
    states = [{"/w": np.array([zero], np.float32)} for zero in (0.0, -0.0)]
    (found,) = compare_checkpoints("run", (manifest(), states[0]), (manifest(), states[1]))
    assert found.note == "1 of 1 elements"


def test_a_leaf_more_is_found() -> None:
    (found,) = compare_checkpoints("run", (manifest(), STATE), (manifest(), {**STATE, "/x": 1}))
    assert (found.what, found.reference) == ("/x", "absent")


def test_another_place_in_the_stream_is_found() -> None:
    found = compare_checkpoints("run", (manifest(4), STATE), (manifest(5), STATE))
    assert [one.what for one in found] == ["checkpoint", "checkpoint"]
    assert [one.where for one in found] == ["position, run", "next IDs, run"]


def test_final_state_does_not_depend_on_the_order_of_leaves() -> None:
    backwards = dict(reversed(STATE.items()))
    assert final_state(manifest(), backwards) == final_state(manifest(), STATE)


# Several processes


def share(step: int, process: int) -> Part:
    """What one of two processes has of a batch."""
    whole, rows = REFERENCE[step], slice(2 * process, 2 * process + 2)
    one = dataclasses.replace(whole, ids=whole.ids[rows], mask=whole.mask[rows])
    return Part(process, 2, one)


def test_a_step_that_only_some_processes_have_at_the_end_is_no_difference() -> None:
    """It counts as delivered in the next attempt, where all of them have it."""
    parts = [share(4, 0), share(5, 0)]
    run = [Stretch("attempt 1", 0, REFERENCE[:4], parts), Stretch("attempt 2", 2, REFERENCE[2:])]
    assert compare_streams(REFERENCE, run) == []
    (found,) = compare_streams(REFERENCE, run[:1])
    assert (found.what, found.where, found.note) == ("missing step", "step 4", "and 1 more")


def changed(part: Part, **changes: Any) -> Part:
    return dataclasses.replace(part, delivery=dataclasses.replace(part.delivery, **changes))


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (changed(share(4, 1), ids=share(4, 0).delivery.ids), {"ids"}),
        (changed(share(4, 1), ids=share(5, 1).delivery.ids), {"ids"}),
        (changed(share(4, 1), mask=(1, 0)), {"mask"}),
        (changed(share(4, 1), ids=(), mask=()), {"ids", "mask"}),
        (changed(share(4, 1), position=loader.Position(1, 2, 4)), {"place"}),
        (changed(share(4, 1), position=loader.Position(1, 4, 6)), {"extra step"}),
        # It comes before what all processes have: one of them has left it out.
        (share(2, 1), {"incomplete step"}),
    ],
)
def test_rows_of_one_process_must_be_its_own(part: Part, found: set[str]) -> None:
    run = [Stretch("attempt 1", 0, REFERENCE[:4], [part]), Stretch("attempt 2", 2, REFERENCE[2:])]
    differences = compare_streams(REFERENCE, run)
    assert {one.what for one in differences} == found
    for one in differences:
        assert one.where.startswith(f"step {part.delivery.position.step}, attempt 1, process 1 of ")


# How far states are apart


def test_leaves_that_are_not_the_same_are_measured() -> None:
    one = {
        "/a": np.array([-4, 1, np.nan, np.inf], np.float32),
        "/b": jnp.array([2, 1], jnp.bfloat16),
        "/c": np.array([1 + 1j, 3j]),
        "/d": np.zeros(3),
        "/e": np.ones(2),
    }
    other = {
        "/a": np.array([-4, 1.5, np.nan, np.inf], np.float32),
        "/b": jnp.array([2, 2], jnp.bfloat16),
        "/c": np.array([1 + 1j, 3j + 4]),
        "/d": np.array([0, 0.5, 0]),
        "/e": np.ones(2),
    }
    assert leaf_differences("run", one, other) == [
        LeafDifference("run", "/a", 1, 4, 0.5, 0.125),
        LeafDifference("run", "/b", 1, 2, 1.0, 0.5),
        LeafDifference("run", "/c", 1, 2, 4.0, 4 / 3),
        LeafDifference("run", "/d", 1, 3, 0.5, None),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([True]), np.array([False])),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
        (np.array([1.0, np.inf]), np.array([1.0, -np.inf])),
        (np.array([1.0, 2.0]), np.array([1.0, np.inf])),
    ],
)
def test_where_a_distance_says_nothing_no_bound_is_kept(one: Any, other: Any) -> None:
    (found,) = leaf_differences("run", {"/w": one}, {"/w": other})
    assert found == LeafDifference("run", "/w", 1, found.size, None, None)
    assert not found.is_within(float("inf"))


def test_leaves_of_another_kind_have_no_distance() -> None:
    one = {"/a": np.zeros(2), "/b": np.zeros(2, np.float32), "/c": np.zeros(1)}
    assert leaf_differences("run", one, {"/a": np.zeros(3), "/b": np.zeros(2)}) == []


def test_a_state_may_differ_within_a_bound() -> None:
    one = {"/w": np.array([10.0, 1.0]), "/zero": np.array([0.0, 5.0]), "/key": np.array([7])}
    other = {"/w": np.array([10.0, 1.001]), "/zero": np.array([-0.0, 5.0]), "/key": np.array([7])}

    def found(within: float, **changes: Any) -> list[str]:
        states = (manifest(), one), (manifest(), {**other, **changes})
        return [difference.what for difference in compare_checkpoints("run", *states, within)]

    assert found(0) == ["/w", "/zero"]
    assert found(0.9e-4) == ["/w"]
    assert found(1.1e-4) == []
    assert found(1, **{"/key": np.array([8])}) == ["/key"]
    assert found(1, **{"/w": np.zeros(3)}) == ["/w"]
