"""What Flax, Equinox and Optax make comes back bit for bit, in its structure, or is refused by name."""

import inspect
import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import checkpointing
import loader
from checkpointing.train_state import describe


class Model(nnx.Module):
    """Every kind of variable: parameters, batch statistics, RNG streams, metadata, lists and dicts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.named = nnx.Dict({"a.b": nnx.BatchNorm(2, rngs=rngs)})
        self.blocks = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.relu)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(2), role="scale")
        self.loss = nnx.metrics.Average("loss")


class Tied(nnx.Module):
    """Its two layers have one kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)
        self.second.kernel = self.first.kernel


class Stateful(eqx.Module):
    """Static fields, functions and numbers among the arrays, and state beside them."""

    norm: eqx.nn.BatchNorm
    layers: list[Any]
    width: int = eqx.field(static=True)
    scale: float

    def __init__(self, key: jax.Array) -> None:
        mode: Any = (
            {"mode": "batch"} if "mode" in inspect.signature(eqx.nn.BatchNorm).parameters else {}
        )
        self.norm = eqx.nn.BatchNorm(2, "batch", **mode)
        self.layers = [eqx.nn.Linear(2, 2, key=key), jax.nn.relu]
        self.width, self.scale = 2, 0.5


def of_flax(seed: int) -> Any:
    rngs = nnx.Rngs(params=seed, dropout=seed + 1)
    model = Model(rngs)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), rngs


def of_equinox(seed: int) -> Any:
    model, state = eqx.nn.make_with_state(Stateful)(jax.random.key(seed))
    return eqx.filter(model, eqx.is_array), state


PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
OPTIMIZERS: dict[str, Any] = {
    "a chain with a schedule": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
    ),
    "accumulated gradients": optax.MultiSteps(optax.sgd(1e-3, momentum=0.9), 4),
    "hyperparameters in the state": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "a mask": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "several for several": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "a key": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "only if finite": optax.apply_if_finite(optax.adafactor(1e-3), 3),
}

STATES: dict[str, Any] = {
    "nnx.state": lambda seed: nnx.state(of_flax(seed)),
    "nnx.split in parts": lambda seed: nnx.split(of_flax(seed), nnx.Param, nnx.RngState, ...)[1:],
    "a pure dict of nnx": lambda seed: nnx.to_pure_dict(nnx.state(of_flax(seed))),
    "modules of nnx": of_flax,
    "an average that begins as the parameters of nnx": lambda seed: [
        state := nnx.state(of_flax(seed)),
        nnx.filter_state(state, nnx.Param),
    ],
    "nnx.state of tied layers": lambda seed: nnx.state(Tied(nnx.Rngs(seed))),
    "arrays and state of Equinox": of_equinox,
    "states of Optax": lambda seed: (
        {name: one.init(PARAMS) for name, one in OPTIMIZERS.items()},
        jax.random.key(seed),
    ),
}


def a_pipeline() -> loader.Pipeline:
    source = loader.ArraySource({"x": np.arange(4.0)})
    return loader.Pipeline(source, loader.PipelineConfig(2, seed=0, final_batch="partial"))


def raw(leaf: Any) -> tuple[Any, ...]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return leaf.dtype, array.shape, array.tobytes()


def bits(tree: Any) -> list[tuple[Any, ...]]:
    return list(map(raw, jax.tree.leaves(tree)))


def saved_and_resumed(directory: pathlib.Path, state: Any, *templates: Any) -> list[Any]:
    with checkpointing.Checkpoints(directory, a_pipeline(), save_every=1, keep=1) as checkpoints:
        run = checkpoints.resume(state)
        next(run.batches)
        checkpoints.save(run.batches, state)
        checkpoints.wait()
        return [checkpoints.resume(template).train_state for template in templates]


@pytest.mark.parametrize("name", STATES)
def test_it_comes_back_as_it_was(name: str, tmp_path: pathlib.Path) -> None:
    state, template = STATES[name](0), STATES[name](10)
    (found,) = saved_and_resumed(tmp_path, state, template)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, template)]
    assert structures[0] == structures[1]
    assert bits(found) == bits(state) != bits(template)


def test_a_state_of_nnx_keeps_the_kinds_and_metadata_of_its_variables(
    tmp_path: pathlib.Path,
) -> None:
    """So filters, merge and updates in place work on it, also where shapes alone were given."""
    graphdef, state = nnx.split(of_flax(0))
    shapes = nnx.eval_shape(lambda: nnx.state(of_flax(10)))
    found, of_shapes = saved_and_resumed(tmp_path, state, nnx.state(of_flax(10)), shapes)
    assert bits(of_shapes) == bits(found)
    model, optimizer, rngs = nnx.merge(graphdef, of_shapes)
    assert model.scale.get_metadata("role") == "scale"
    assert bits(nnx.state(model, nnx.BatchStat)) == bits(nnx.filter_state(state, nnx.BatchStat))
    gradients = nnx.grad(lambda one: one.layers[0](one.dropout(jnp.ones((1, 2)))).sum())(model)
    with jax.numpy_dtype_promotion("standard"):  # Optax is not as strict as the tests are
        optimizer.update(model, gradients)
    count = rngs.dropout.count[...]
    rngs.dropout()
    assert optimizer.step[...] == 1
    assert rngs.dropout.count[...] == count + 1


def test_the_train_state_of_linen_goes_on_as_without_a_stop(tmp_path: pathlib.Path) -> None:
    """It begins with ``step=0``, a Python number, and has an int32 array from the first jitted step on."""

    def begin() -> TrainState:
        model = linen.Dense(2)
        params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
        create: Any = TrainState.create
        state: TrainState = create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
        return state

    @jax.jit
    def update(state: TrainState, x: Any) -> TrainState:
        def loss(params: Any) -> Any:
            return jnp.sum(state.apply_fn({"params": params}, jnp.full((1, 3), x.sum())) ** 2)

        apply_gradients: Any = state.apply_gradients
        updated: TrainState = apply_gradients(grads=jax.grad(loss)(state.params))
        return updated

    def train(name: str, until: int, template: Any) -> Any:
        pipeline = loader.Pipeline(
            loader.ArraySource({"x": np.arange(8, dtype=np.float32)}),
            loader.PipelineConfig(2, seed=0, num_epochs=None, final_batch="drop"),
        )
        with (
            checkpointing.Checkpoints(tmp_path / name, pipeline, save_every=2, keep=1) as saved,
            jax.numpy_dtype_promotion("standard"),  # Optax is not as strict as the tests are
        ):
            run = saved.resume(template)
            state = run.train_state
            while run.batches.position.step < until:
                state = update(state, next(run.batches)["x"])
                saved.save(run.batches, state)
            return state

    assert type(begin().step) is int
    whole = train("whole", 8, begin())
    assert train("run", 3, begin()).step == 3
    assert train("run", 5, begin()).step == 5
    found = train("run", 8, jax.eval_shape(begin))
    assert bits(found) == bits(whole)
    assert found.step.weak_type == whole.step.weak_type
    assert train("run", 8, begin()).step.dtype == jnp.int32


def test_learning_rates_in_an_optimizers_state_come_from_the_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    def begin(rate: float) -> Any:
        return optax.inject_hyperparams(optax.adam)(learning_rate=rate).init(PARAMS)

    (found,) = saved_and_resumed(tmp_path, begin(0.25), begin(0.5))
    assert found.hyperparams["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("state", "paths"),
    [
        (lambda: (jnp.zeros(2), Tied(nnx.Rngs(0))), "/1/first/kernel and /1/second/kernel"),
        (lambda: [model := nnx.List([nnx.Param(jnp.zeros(2))]), model], "/0/0 and /1/0"),
    ],
)
def test_modules_that_share_a_variable_are_refused(state: Any, paths: str) -> None:
    """As a tree they have it twice, and two would come back, which the next update makes differ."""
    with pytest.raises(
        TypeError, match=rf"{paths} .* one nnx.Param, .* nnx.state\(...\) of the modules"
    ):
        describe(state())
