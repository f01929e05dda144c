"""Every value that the lesson "Design an input pipeline" records, through the public names."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import loader

CONFIG: Final = Path(__file__).resolve().parents[2] / "configs" / "lesson.toml"

ORDERS: Final = (
    [9, 10, 4, 1, 0, 7, 6, 8, 2, 5, 3],
    [4, 0, 5, 10, 6, 2, 1, 9, 7, 3, 8],
)
OMITTED: Final = [2, 3, 5]
DIGEST: Final = "1a81451a8fb32a1bf0ad6307ea19198153ab1603b37174c76c4d498e343e6892"
MASKED_MEAN: Final = -1 / 3  # IDs 2, 5, 3: labels -0.6, 0, -0.4, over three records
UNMASKED_MEAN: Final = -1 / 4  # the same labels and a zero, over four slots

IDS: Final = np.arange(11, dtype=np.int64)
FEATURES: Final = (IDS / 10).astype(np.float32)
LABELS: Final = (2 * FEATURES - 1).astype(np.float32)

Array = npt.NDArray[Any]


def lesson_source() -> loader.ArraySource:
    return loader.ArraySource({"x": FEATURES, "y": LABELS}, ids=IDS)


def lesson_pipeline(**changes: Any) -> loader.Pipeline:
    config = loader.PipelineConfig.from_toml(CONFIG)
    return loader.Pipeline(lesson_source(), dataclasses.replace(config, **changes))


def delivered(pipeline: loader.Pipeline) -> list[int]:
    return [int(record) for batch in pipeline for record in batch["id"]]


def aligned(x: Array, y: Array) -> bool:
    """The lesson's oracle: each record has y = 2x - 1."""
    return bool(np.allclose(y, 2 * x - 1, atol=1e-7))


# --- batches and their order ----------------------------------------------------------------------


def test_the_config_holds_the_settings_of_the_lesson() -> None:
    assert loader.PipelineConfig.from_toml(CONFIG) == loader.PipelineConfig(
        batch_size=4, seed=17, final_batch="partial", num_epochs=2, shuffle="permutation"
    )


@pytest.mark.parametrize(
    ("final_batch", "sizes"), [("partial", [4, 4, 3]), ("drop", [4, 4]), ("pad", [4, 4, 4])]
)
def test_batch_sizes(final_batch: str, sizes: list[int]) -> None:
    batches = list(lesson_pipeline(final_batch=final_batch))
    assert [len(batch["id"]) for batch in batches] == sizes * 2
    assert all(len(batch[name]) == len(batch["id"]) for batch in batches for name in batch)


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_recorded_order_by_every_way_to_ask_for_it(epoch: int) -> None:
    pipeline, steps = lesson_pipeline(), range(3 * epoch, 3 * epoch + 3)
    start = loader.Position(epoch=epoch, step=3 * epoch)
    assert loader.epoch_order(11, 17, epoch, "permutation").tolist() == ORDERS[epoch]
    assert delivered(pipeline)[11 * epoch : 11 * (epoch + 1)] == ORDERS[epoch]
    for ways in (
        [pipeline[step]["id"] for step in steps],
        [pipeline.ids(step) for step in steps],
        [pipeline.dataset[step]["id"] for step in steps],
        [batch["id"] for batch in pipeline.iterate(start)][:3],
    ):
        assert np.concatenate(ways).tolist() == ORDERS[epoch]


def test_positions_are_the_inverse_of_the_recorded_order() -> None:
    positions = [loader.position_of(row, 11, 17, 0, "permutation") for row in ORDERS[0]]
    assert positions == list(range(11))


def test_epochs_differ_in_order_and_agree_in_membership() -> None:
    first, second = np.split(np.array(delivered(lesson_pipeline())), 2)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first), IDS)
    np.testing.assert_array_equal(np.sort(second), IDS)


def test_an_epoch_is_the_same_each_time() -> None:
    assert delivered(lesson_pipeline()) == delivered(lesson_pipeline())


@pytest.mark.parametrize("changes", [{"seed": 18}, {"shuffle": "feistel"}, {"shuffle": "none"}])
def test_another_seed_or_shuffle_is_another_order(changes: dict[str, Any]) -> None:
    other = delivered(lesson_pipeline(num_epochs=1, **changes))
    assert other != ORDERS[0]
    assert sorted(other) == IDS.tolist()


def test_the_batch_size_does_not_move_a_record() -> None:
    assert delivered(lesson_pipeline(batch_size=5)) == [*ORDERS[0], *ORDERS[1]]


# --- the final batch ------------------------------------------------------------------------------


def test_the_last_batch_is_short_and_holds_the_recorded_ids() -> None:
    assert lesson_pipeline()[2]["id"].tolist() == [2, 5, 3]


def test_drop_omits_the_recorded_ids_and_says_so() -> None:
    pipeline = lesson_pipeline(final_batch="drop")
    retained = delivered(pipeline)[:8]
    assert len(retained) == 8
    assert np.setdiff1d(IDS, retained).tolist() == OMITTED
    assert pipeline.omitted_ids(0).tolist() == OMITTED
    assert pipeline.omitted_ids(1).tolist() == sorted(ORDERS[1][8:]) != OMITTED


@pytest.mark.parametrize("final_batch", ["partial", "pad"])
def test_the_other_policies_omit_nothing(final_batch: str) -> None:
    assert lesson_pipeline(final_batch=final_batch).omitted_ids(0).tolist() == []


def padded_batch() -> dict[str, Array]:
    return lesson_pipeline(final_batch="pad")[2]


def test_padding_is_marked_as_no_record() -> None:
    batch = padded_batch()
    assert batch["id"].tolist() == [2, 5, 3, -1]
    assert batch["mask"].tolist() == [True, True, True, False]
    np.testing.assert_array_equal(batch["y"], np.append(LABELS[[2, 5, 3]], np.float32(0)))


MEANS: Final[dict[str, Callable[[Array, Array], Any]]] = {
    "numpy": loader.masked_mean,
    "jax": lambda y, mask: loader.masked_mean(jnp.asarray(y), jnp.asarray(mask)),
    "jax values, numpy mask": lambda y, mask: loader.masked_mean(jnp.asarray(y), mask),
    "jit": jax.jit(loader.masked_mean),
    "jit, mask as float32": lambda y, mask: jax.jit(loader.masked_mean)(y, np.float32(mask)),
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_the_masked_mean_of_the_padded_batch_is_that_of_its_records(
    mean: Callable[[Array, Array], Any],
) -> None:
    y, mask = padded_batch()["y"], padded_batch()["mask"]
    assert float(mean(y, mask)) == pytest.approx(MASKED_MEAN, abs=1e-7)
    assert mean(y, mask).dtype == np.float32
    assert float(mean(y, mask)) == pytest.approx(float(LABELS[[2, 5, 3]].mean()), abs=1e-7)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_the_unmasked_mean_differs(mean: Callable[[Array, Array], Any]) -> None:
    y = padded_batch()["y"]
    assert float(y.mean()) == pytest.approx(UNMASKED_MEAN, abs=1e-7)
    assert float(mean(y, np.ones(4, np.bool_))) == pytest.approx(UNMASKED_MEAN, abs=1e-7)
    assert not np.isclose(UNMASKED_MEAN, MASKED_MEAN)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_a_reversed_batch_has_the_same_mean_only_with_its_mask_reversed(
    mean: Callable[[Array, Array], Any],
) -> None:
    y, mask = padded_batch()["y"], padded_batch()["mask"]
    assert float(mean(y[::-1], mask[::-1])) == pytest.approx(MASKED_MEAN, abs=1e-7)
    assert float(mean(y[::-1], mask)) == pytest.approx(-0.4 / 3, abs=1e-7)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("rubbish", [7.0, np.inf, np.nan])
def test_what_stands_in_the_padding_has_no_influence(
    mean: Callable[[Array, Array], Any], rubbish: float
) -> None:
    y, mask = padded_batch()["y"].copy(), padded_batch()["mask"]
    y[3] = rubbish
    assert float(mean(y, mask)) == pytest.approx(MASKED_MEAN, abs=1e-7)


# --- alignment ------------------------------------------------------------------------------------


def test_every_batch_is_aligned() -> None:
    batches = list(lesson_pipeline())
    assert all(aligned(batch["x"], batch["y"]) for batch in batches)
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], FEATURES[batch["id"]])
        np.testing.assert_array_equal(batch["y"], LABELS[batch["id"]])


@pytest.mark.parametrize("step", range(6))
def test_reversed_targets_are_told_apart_and_mended_by_the_ids(step: int) -> None:
    batch = lesson_pipeline()[step]
    wrong = batch["y"][::-1]
    assert wrong.shape == batch["y"].shape
    assert sorted(wrong) == sorted(batch["y"])
    assert not aligned(batch["x"], wrong)
    assert aligned(batch["x"], LABELS[batch["id"]])


def test_features_and_labels_shuffled_apart_are_told_apart() -> None:
    x_rows, y_rows = (loader.epoch_order(11, 17, epoch, "permutation") for epoch in (0, 1))
    source = loader.ArraySource({"x": FEATURES[x_rows], "y": LABELS[y_rows]})
    config = loader.PipelineConfig.from_toml(CONFIG)
    assert not any(aligned(batch["x"], batch["y"]) for batch in loader.Pipeline(source, config))


# --- identity of the data -------------------------------------------------------------------------


def edited(row: int = 0, by: float = 0.1) -> Array:
    labels = LABELS.copy()
    labels[row] += np.float32(by)
    return labels


def test_the_recorded_digest() -> None:
    assert loader.dataset_digest(FEATURES, LABELS) == DIGEST


@pytest.mark.parametrize(
    ("x", "y"),
    [
        pytest.param(FEATURES.copy(), LABELS.copy(), id="copy"),
        pytest.param(FEATURES[::-1][::-1], LABELS[::-1][::-1], id="views"),
        pytest.param(np.repeat(FEATURES, 2)[::2], LABELS, id="strided view"),
        pytest.param(jnp.asarray(FEATURES), jnp.asarray(LABELS), id="jax"),
    ],
)
def test_an_unchanged_copy_keeps_the_digest(x: Any, y: Any) -> None:
    assert loader.dataset_digest(x, y) == DIGEST


@pytest.mark.parametrize(
    ("x", "y"),
    [
        pytest.param(FEATURES[::-1], LABELS[::-1], id="reordered"),
        pytest.param(FEATURES, edited(), id="label edited by 0.1"),
        pytest.param(FEATURES, edited(by=1), id="label edited by 1"),
        pytest.param(FEATURES, edited(row=10), id="last label edited"),
        pytest.param(LABELS, FEATURES, id="swapped"),
        pytest.param(FEATURES.astype(np.float64), LABELS, id="dtype"),
        pytest.param(FEATURES.reshape(11, 1), LABELS, id="shape"),
        pytest.param(FEATURES.astype(">f4"), LABELS, id="byte order"),
        pytest.param(FEATURES[:10], LABELS[:10], id="a record fewer"),
    ],
)
def test_a_change_changes_the_digest(x: Array, y: Array) -> None:
    assert loader.dataset_digest(x, y) != DIGEST


def test_a_copy_has_the_same_fingerprint() -> None:
    copy = loader.ArraySource({"y": LABELS.copy(), "x": FEATURES.copy()}, ids=IDS.copy())
    before, now = lesson_source().fingerprint(), copy.fingerprint()
    assert before == now
    assert before.digest == now.digest
    assert before.diff(now, copy) == []


ALL_BUT_THE_MIDDLE: Final = "10 of 11 records differ"

CHANGED: Final = {
    "records reordered, IDs with them": (
        loader.ArraySource({"x": FEATURES[::-1], "y": LABELS[::-1]}, ids=IDS[::-1]),
        dict.fromkeys(
            ["dataset.id", "dataset.x", "dataset.y"], "the same records in another order"
        ),
    ),
    "records reordered under the same IDs": (
        loader.ArraySource({"x": FEATURES[::-1], "y": LABELS[::-1]}, ids=IDS),
        dict.fromkeys(["dataset.x", "dataset.y"], ALL_BUT_THE_MIDDLE),
    ),
    "a label edited": (
        loader.ArraySource({"x": FEATURES, "y": edited()}, ids=IDS),
        {"dataset.y": "1 of 11 records differs: id 0"},
    ),
    "another label edited": (
        loader.ArraySource({"x": FEATURES, "y": edited(row=7, by=1)}, ids=IDS),
        {"dataset.y": "1 of 11 records differs: id 7"},
    ),
}


@pytest.mark.parametrize(("now", "differences"), CHANGED.values(), ids=CHANGED)
def test_a_change_changes_the_fingerprint_and_is_named(
    now: loader.ArraySource, differences: dict[str, str]
) -> None:
    before, after = lesson_source().fingerprint(), now.fingerprint()
    assert before.digest != after.digest
    found = before.diff(after, now)
    assert [difference.name for difference in found] == list(differences)
    for difference in found:
        assert differences[difference.name] in difference.note
        assert difference.checkpoint != difference.now


def test_another_order_of_the_iterator_is_no_change_of_the_data() -> None:
    orders = [lesson_pipeline(seed=seed) for seed in (17, 18)]
    assert delivered(orders[0]) != delivered(orders[1])
    assert orders[0].fingerprint() == orders[1].fingerprint()
