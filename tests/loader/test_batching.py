"""Where batches begin and end, how one is padded, and the mean that padding does not move."""

import dataclasses
import itertools
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from loader import PipelineConfig, Position, masked_mean
from loader.batching import Grid, spread
from loader.config import FINAL_BATCHES

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
END: Final = 2**63


def grid(num_records: int, batch_size: int, final_batch: str, num_epochs: int | None = 2) -> Grid:
    settings = {"batch_size": batch_size, "final_batch": final_batch, "num_epochs": num_epochs}
    return Grid(num_records, PipelineConfig.from_dict({"seed": 0, **settings}))


sizes = st.integers(1, 40)
policies = st.sampled_from(FINAL_BATCHES)


# Positions


@pytest.mark.parametrize("name", ["epoch", "offset", "step"])
@pytest.mark.parametrize("value", [1.0, "1", True, np.True_, None, [1], 1j, np.float64(2)])
def test_position_of_no_integers_is_a_type_error_that_names_the_part(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} of a position must be an integer"):
        Position(**{name: value})


@pytest.mark.parametrize("name", ["epoch", "offset", "step"])
@pytest.mark.parametrize("value", [-1, END])
def test_position_out_of_range_is_a_value_error_that_names_the_part(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} of a position must be 0 to .* not {value}"):
        Position(**{name: value})


def test_position_holds_plain_integers_and_is_frozen() -> None:
    position = Position(*np.arange(1, 4, dtype=np.uint8))
    assert position == Position(1, 2, 3)
    assert {type(value) for value in dataclasses.astuple(position)} == {int}
    with pytest.raises(dataclasses.FrozenInstanceError):
        position.epoch = 0  # type: ignore[misc]


def test_positions_are_in_the_order_of_the_stream() -> None:
    g = grid(10, 4, "partial")
    walk = [g.position(step) for step in range(6)]
    assert walk == sorted(walk)


# The grid


@given(sizes, sizes, policies)
def test_batches_of_an_epoch_are_its_records_once_each(n: int, size: int, policy: str) -> None:
    g = grid(n, size, policy)
    stretches = [
        (position.offset, g.stop(position))
        for position in map(g.position, range(g.steps_per_epoch))
    ]
    delivered = [record for low, high in stretches for record in range(low, high)]
    assert delivered == list(range(g.delivered_per_epoch))
    assert g.delivered_per_epoch == (n - n % size if policy == "drop" else n)
    assert all(high - low == size for low, high in stretches[:-1])


@given(sizes, sizes, policies, st.integers(0, 40))
def test_walk_from_any_offset_counts_the_batches_that_it_makes(
    n: int, size: int, policy: str, offset: int
) -> None:
    g = grid(n, size, policy)
    offset = min(offset, n)
    place, count = Position(0, offset, 7), 0
    while g.normal(place).epoch == 0:
        assert g.stop(place) - place.offset in ({size} if policy == "drop" else range(1, size + 1))
        place, count = g.after(place), count + 1
    assert count == g.steps_after(offset)
    assert place == Position(1, 0, 7 + count) or count == 0


@given(sizes, sizes, policies, st.integers(1, 3))
def test_position_of_a_step_is_where_the_walk_comes_by(
    n: int, size: int, policy: str, epochs: int
) -> None:
    g = grid(n, size, policy, epochs)
    if g.steps_per_epoch == 0:
        assert (policy, size > n) == ("drop", True)
        return
    place = Position()
    for step in range(g.steps_per_epoch * epochs):
        assert not g.is_end(place)
        assert place == g.position(step)
        place = g.after(place)
    assert g.is_end(place)
    assert place == Position(epochs, 0, g.num_steps or 0)


@pytest.mark.parametrize(
    ("policy", "place", "normal"),
    [
        ("partial", (0, 10), (1, 0)),
        ("pad", (0, 10), (1, 0)),
        ("drop", (0, 10), (1, 0)),
        ("drop", (0, 8), (1, 0)),
        ("drop", (0, 7), (1, 0)),
        ("drop", (0, 6), (0, 6)),
        ("partial", (0, 8), (0, 8)),
        ("partial", (1, 10), (2, 0)),
        ("partial", (2, 0), (2, 0)),
    ],
)
def test_end_of_an_epoch_is_the_start_of_the_next(
    policy: str, place: tuple[int, int], normal: tuple[int, int]
) -> None:
    assert grid(10, 4, policy).check(Position(*place, 3)) == Position(*normal, 3)


@pytest.mark.parametrize(
    ("position", "named"),
    [
        (Position(0, 11), "offset 11 is beyond an epoch of 10 records"),
        (Position(2, 1), "epoch 2, offset 1 is beyond the end of 2 epochs"),
        (Position(3, 0), "epoch 3, offset 0 is beyond the end of 2 epochs"),
        (Position(END - 1, 0), "beyond the end of 2 epochs"),
    ],
)
def test_position_of_another_stream_is_refused(position: Position, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        grid(10, 4, "partial").check(position)


def test_stream_without_end_has_no_last_position() -> None:
    g = grid(10, 4, "partial", None)
    assert g.num_steps is None
    far = Position(2**62, 9, 5)
    assert g.check(far) == far
    assert not g.is_end(far)
    assert g.after(far) == Position(2**62 + 1, 0, 6)


# Padding


@pytest.mark.parametrize(
    "values",
    [
        np.arange(1, 7, dtype=np.float16).reshape(3, 2),
        np.arange(1, 4, dtype=">i4"),
        np.array([1, 2, 3], BFLOAT16),
        np.array(["2020-01-01"] * 3, "datetime64[D]"),
        np.array([b"ab", b"c", b"d"]),
        np.array(["ab", "c", "é"]),
        np.array([(1, 2.0)] * 3, [("a", "i1"), ("b", "f8", (2,))]),
        np.ones(3, bool),
    ],
    ids=lambda values: str(values.dtype),
)
def test_empty_slots_are_zero_and_full_ones_untouched(values: npt.NDArray[Any]) -> None:
    batch = {"id": np.array([5, 0, 7]), "mask": np.ones(3, bool), "x": values}
    for slots in (slice(3), np.array([4, 0, 3])):
        out = spread(batch, slots, 5)
        empty = np.setdiff1d(np.arange(5), np.arange(5)[slots])
        assert list(out) == list(batch)
        for name, given_ in batch.items():
            assert out[name].dtype == given_.dtype
            np.testing.assert_array_equal(out[name][slots], given_)
        np.testing.assert_array_equal(out["id"][empty], -1)
        assert not out["mask"][empty].any()
        assert out["x"][empty].tobytes() == bytes(2 * values[:1].nbytes)


def test_empty_slots_of_text_ids_are_empty_strings() -> None:
    out = spread({"id": np.array(["ab", "c"])}, slice(2), 4)
    assert out["id"].tolist() == ["ab", "c", "", ""]
    assert out["id"].dtype == np.dtype("<U2")


# The masked mean


def masked_values(dtype: Any) -> st.SearchStrategy[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    shapes = nps.array_shapes(min_dims=1, max_dims=3, max_side=6)
    small = st.integers(0, 1 if np.dtype(dtype) == np.bool_ else 100)
    return shapes.flatmap(
        lambda shape: st.tuples(
            nps.arrays(np.int64, shape, elements=small).map(lambda array: array.astype(dtype)),
            nps.arrays(np.bool_, shape[:1]).filter(np.any),
        )
    )


DTYPES: Final = [np.float64, np.float32, np.float16, BFLOAT16, np.int32, np.uint8, np.bool_]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def tolerance(dtype: Any) -> float:
    return {BFLOAT16: 1e-2, np.dtype(np.float16): 1e-3}.get(np.dtype(dtype), 1e-5)


@dtypes
def test_masked_mean_is_the_mean_over_real_records(dtype: Any) -> None:
    @given(masked_values(dtype))
    def check(case: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
        values, mask = case
        real = np.mean(values[mask].astype(np.float64))
        found = masked_mean(values, mask)
        assert np.shape(found) == ()
        np.testing.assert_allclose(np.float64(found), real, rtol=tolerance(dtype))

    check()


@dtypes
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_masked_mean_is_the_same_in_jax(dtype: Any, wrap: Any) -> None:
    rng = np.random.default_rng(0)
    mean = wrap(masked_mean)
    for shape in ((6,), (6, 3)):
        values = rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)
        for mask in (np.arange(6) < 4, np.ones(6, bool), np.arange(6) == 5):
            real = np.mean(values[mask].astype(np.float64))
            found = mean(jnp.asarray(values), jnp.asarray(mask))
            assert found.shape == ()
            assert found.dtype == jnp.mean(jnp.asarray(values)).dtype
            np.testing.assert_allclose(np.float64(found), real, rtol=tolerance(dtype))


@dtypes
def test_masked_mean_has_the_dtype_of_mean(dtype: Any) -> None:
    values, mask = np.ones((3, 2), dtype), np.array([True, False, True])
    wanted = np.mean(values).dtype
    assert masked_mean(values, mask).dtype == wanted
    assert np.asarray(masked_mean(values, ~mask & mask)).dtype == wanted


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_masked_mean_adds_small_floats_up_without_saturating(dtype: Any) -> None:
    """In bfloat16, 256 + 1 is 256; in float16, the sum of this is infinite."""
    values, mask = np.full(4096, 100, dtype), np.ones(4096, bool)
    assert float(masked_mean(values, mask)) == 100
    assert float(masked_mean(jnp.asarray(values), mask)) == 100


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["f32", "f16", "bf16"])
def test_masked_slots_have_no_influence(junk: float, dtype: Any) -> None:
    values = np.array([[1, 3], [5, 7], [junk, junk]], dtype)
    mask = np.array([True, True, False])
    assert float(masked_mean(values, mask)) == 4
    assert float(masked_mean(jnp.asarray(values), mask)) == 4
    assert float(jax.jit(masked_mean)(values, mask)) == 4
    assert not np.isfinite(np.mean(values.astype(np.float32)))  # the check can fail
    assert not np.isfinite(float(masked_mean(values, np.ones(3, bool))))


@pytest.mark.parametrize("junk", [np.nan, np.inf, 0.0])
def test_masked_slots_have_no_gradient(junk: float) -> None:
    values = jnp.array([2.0, 4.0, junk, 6.0])
    mask = jnp.array([True, True, False, True])

    def loss(values: jax.Array) -> jax.Array:
        return masked_mean(values**2, mask)  # type: ignore[no-any-return]

    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_allclose(grad(values)[jnp.array([0, 1, 3])], np.array([4, 8, 12]) / 3)
        assert grad(jnp.where(mask, values, 0.0))[2] == 0
    slope = jax.grad(lambda values: masked_mean(values, mask))(values)
    np.testing.assert_allclose(slope, np.array([1, 1, 0, 1]) / 3, rtol=1e-6)


def test_masked_mean_under_vmap_is_that_of_each() -> None:
    values = jnp.arange(12.0).reshape(2, 3, 2)
    masks = jnp.array([[True, True, False], [False, False, True]])
    found = jax.vmap(masked_mean)(values, masks)
    np.testing.assert_allclose(found, [1.5, 10.5])


def test_masked_mean_may_be_traced_in_one_argument_only() -> None:
    values, mask = np.array([1.0, 3.0, 9.0], np.float32), np.array([True, True, False])
    assert jax.jit(lambda values: masked_mean(values, mask))(values) == 2
    assert jax.jit(lambda mask: masked_mean(values, mask))(mask) == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.int32, np.bool_])
def test_mean_of_no_record_is_nan_without_a_warning(dtype: Any) -> None:
    values, mask = np.ones((3, 2), dtype), np.zeros(3, bool)
    assert np.isnan(float(masked_mean(values, mask)))
    assert np.isnan(float(masked_mean(jnp.asarray(values), mask)))
    assert np.isnan(float(jax.jit(masked_mean)(values, mask)))


def test_mean_of_an_empty_axis_is_nan() -> None:
    assert np.isnan(masked_mean(np.ones((3, 0)), np.ones(3, bool)))


def test_mask_may_cover_more_axes_and_hold_numbers() -> None:
    values = np.arange(6.0).reshape(3, 2)
    mask = np.array([[1, 0], [0, 1], [0, 0]])
    for kind in (np.bool_, np.float32, np.int32):
        assert masked_mean(values, mask.astype(kind)) == 1.5
        assert masked_mean(jnp.asarray(values), jnp.asarray(mask.astype(kind))) == 1.5


def test_lists_are_taken_as_arrays() -> None:
    assert masked_mean([1, 2, 30], [True, True, False]) == 1.5


SHAPES: Final = [((3,), (2,)), ((3,), ()), ((3,), (3, 1)), ((), (3,)), ((), ()), ((3, 2), (2,))]


@pytest.mark.parametrize(("shape", "mask_shape"), SHAPES)
def test_wrong_mask_shape_is_a_value_error_that_shows_both(
    shape: tuple[int, ...], mask_shape: tuple[int, ...]
) -> None:
    values, mask = np.ones(shape), np.ones(mask_shape, bool)
    for a, b in itertools.product((values, jnp.asarray(values)), (mask, jnp.asarray(mask))):
        with pytest.raises(ValueError, match="must match the first axes of values") as caught:
            masked_mean(a, b)
        assert str(list(shape)) in str(caught.value)
        assert str(list(mask_shape)) in str(caught.value)
