"""A small classifier of scikit-learn's digits: 1,797 images of 8 x 8, in plain JAX."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import loader
from regrain.cli import sources
from scripts.training.formats import in_format
from scripts.training.micro_batches import check_micro_batches, sum_in_order
from scripts.training.processes import Layout
from scripts.training.task import Batch, State, Task, settings_of

CLASSES: Final = 10

Params = list[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Data:
    """The table ``[data]``.

    Attributes:
      kind: ``"digits"``.
      format: one of `FORMATS`.
    """

    kind: str = "digits"
    format: str = "array"


@dataclasses.dataclass(frozen=True)
class Train:
    """The table ``[train]``.

    Attributes:
      seed: of the first parameters and of the noise.
      hidden: units in each of the two hidden layers.
      learning_rate: of the gradient's step.
      momentum: share of the last step that is in the next one.
      noise: standard deviation of the noise on pixels, which are 0 to 1.
      micro_batches: into how many equal ones a batch is divided, whose gradients are added up in turn:
        then the train state has the same bits on any number of devices that divides it. With 1, the
        batch is one, and devices that share it add up in an order of their own.
    """

    seed: int
    hidden: int
    learning_rate: float
    momentum: float
    noise: float
    micro_batches: int = 1


def task(data: Any, train: Any) -> Task:
    """The task, from the tables of a config file."""
    source = digits(settings_of("data", data, Data).format)
    settings = settings_of("train", train, Train)

    def summary(state: State) -> str:
        read = source.read(np.arange(len(source)))
        guesses = forward(state["params"], scale(dict(read))["image"]).argmax(axis=1)
        share = np.mean(guesses == read["label"])
        return f"accuracy {share:.4f} on the {len(source)} images it was trained on"

    return Task(source, scale, lambda: init(settings), make_train_step(settings), summary)


def digits(data_format: str = "array") -> loader.RecordSource:
    """The images, uint8[1797, 8, 8], and their labels; a record's ID is its number in the data set."""
    return in_format("digits", data_format, sources.digits())


def scale(batch: dict[str, Any]) -> dict[str, Any]:
    """Pixels from uint8, 0 to 16, to float32, 0 to 1."""
    return {**batch, "image": batch["image"].astype(np.float32) / np.float32(16)}


def init(train: Train) -> State:
    """The train state that a run begins with."""
    key, *layer_keys = jax.random.split(jax.random.key(train.seed), 4)
    sizes = (8 * 8, train.hidden, train.hidden, CLASSES)
    params = [
        {
            "weights": jax.random.normal(layer_key, (inputs, outputs)) * (2 / inputs) ** 0.5,
            "bias": jnp.zeros((1, outputs)),
        }
        for layer_key, inputs, outputs in zip(layer_keys, sizes[:-1], sizes[1:], strict=True)
    ]
    return {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "key": key,
        "step": jnp.zeros((), jnp.int32),
    }


def forward(params: Params, images: Any) -> jax.Array:
    """Logits, float32[batch, 10], of images, float32[batch, 8, 8]."""
    hidden = jnp.asarray(images).reshape(len(images), -1)
    for layer in params[:-1]:
        hidden = jax.nn.relu(hidden @ layer["weights"] + layer["bias"])
    return hidden @ params[-1]["weights"] + params[-1]["bias"]


def make_train_step(train: Train, mesh: Mesh | None = None) -> Any:
    """The compiled function (state, batch) -> (next state, loss).

    Args:
      train: the settings.
      mesh: the devices that share a batch, by default those of all processes.
    """

    def losses_of(params: Params, key: jax.Array, batch: Batch) -> jax.Array:
        images = batch["image"]
        images += train.noise * jax.random.normal(key, images.shape)
        log_probabilities = jax.nn.log_softmax(forward(params, images))
        return -jnp.sum(log_probabilities * jax.nn.one_hot(batch["label"], CLASSES), axis=1)

    def mean_loss(params: Params, key: jax.Array, batch: Batch) -> jax.Array:
        losses = losses_of(params, key, batch)
        loss: jax.Array = loader.masked_mean(losses, batch["mask"])  # what pads a batch is no digit
        return loss

    def sum_of_losses(params: Params, key: jax.Array, batch: Batch) -> jax.Array:
        return jnp.sum(losses_of(params, key, batch), where=batch["mask"])

    if train.micro_batches == 1:
        loss_and_gradients = jax.value_and_grad(mean_loss)
    else:
        mesh = mesh or Layout.of_all_processes().mesh
        check_micro_batches(train.micro_batches, mesh)

        def of_one(params: Params, key: jax.Array, batch: Batch) -> Any:
            summed = jax.value_and_grad(sum_of_losses)(params, key, batch)
            return summed, jnp.sum(batch["mask"], dtype=jnp.float32)

        def loss_and_gradients(params: Params, key: jax.Array, batch: Batch) -> Any:
            summed, count = sum_in_order(of_one, train.micro_batches, mesh, params, key, batch)
            return jax.tree.map(lambda total: total / count, summed)

    @jax.jit
    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        key, noise_key = jax.random.split(state["key"])
        loss, gradients = loss_and_gradients(state["params"], noise_key, batch)
        momentum = jax.tree.map(lambda m, g: train.momentum * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - train.learning_rate * m, state["params"], momentum)
        state = {"params": params, "momentum": momentum, "key": key, "step": state["step"] + 1}
        return state, loss

    return train_step
