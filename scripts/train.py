"""Trains a small classifier on scikit-learn's digits (1,797 images of 8 x 8), in plain JAX.

    python scripts/train.py runs/digits

Stop it at any time, in any way, and run it again: it goes on from the newest checkpoint in the
directory, and ends in the same train state, bit for bit, as if it had not been stopped.
"""

import os
import pathlib
import tomllib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from sklearn.datasets import load_digits

import checkpointing
import loader

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "digits.toml"
CLASSES = 10

Params = list[dict[str, jax.Array]]


def main(
    run_dir: Annotated[pathlib.Path, typer.Argument(help="Directory of the run's checkpoints.")],
    config: Annotated[
        pathlib.Path,
        typer.Option(help="TOML file of all settings.", show_default="configs/digits.toml"),
    ] = CONFIG,
    log: Annotated[pathlib.Path | None, typer.Option(help="Append each step's IDs here.")] = None,
) -> None:
    """Trains to the end, from the newest checkpoint in RUN_DIR or from the start."""
    if log:
        os.environ["REGRAIN_STEP_LOG"] = str(log)  # Checkpoints.resume looks for it
    settings = tomllib.loads(config.read_text("utf-8"))
    source = digits()
    pipeline = loader.Pipeline(source, loader.PipelineConfig.from_toml(config), scale)

    with checkpointing.Checkpoints(
        run_dir, pipeline, **settings["checkpoints"], run_config=settings["train"]
    ) as checkpoints:
        run = checkpoints.resume(jax.jit(lambda: init(settings["train"]))())
        state = run.train_state
        train_step = make_train_step(settings["train"])
        for batch in run.batches:
            state, loss = train_step(state, batch["image"], batch["label"], batch["mask"])
            if checkpoints.save(run.batches, state):
                print(f"step {run.batches.position.step:5}  loss {loss:.4f}", flush=True)
        checkpoints.save(run.batches, state, force=True)

    images, labels = (source.read(np.arange(len(source)))[name] for name in ("image", "label"))
    guesses = forward(state["params"], scale({"image": images})["image"]).argmax(axis=1)
    print(
        f"accuracy {np.mean(guesses == labels):.4f} on the {len(source)} images it was trained on"
    )


def digits() -> loader.ArraySource:
    """The images, uint8[1797, 8, 8], and their labels; a record's ID is its number in the data set."""
    data = load_digits()
    fields = {"image": data.images.astype(np.uint8), "label": data.target.astype(np.int32)}
    return loader.ArraySource(fields, ids=np.arange(len(data.images)))


def scale(batch: dict[str, Any]) -> dict[str, Any]:
    """Pixels from uint8, 0 to 16, to float32, 0 to 1."""
    return {**batch, "image": batch["image"].astype(np.float32) / np.float32(16)}


def init(train: dict[str, Any]) -> dict[str, Any]:
    """The train state that a run begins with."""
    key, *layer_keys = jax.random.split(jax.random.key(train["seed"]), 4)
    sizes = (8 * 8, train["hidden"], train["hidden"], CLASSES)
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


def make_train_step(train: dict[str, Any]) -> Any:
    """The compiled function (state, images, labels, mask) -> (next state, loss)."""

    def loss_of(params: Params, images: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        log_probabilities = jax.nn.log_softmax(forward(params, images))
        losses = -jnp.sum(log_probabilities * jax.nn.one_hot(labels, CLASSES), axis=1)
        return loader.masked_mean(
            losses, mask
        )  # the slots that pad an epoch's last batch are no digits

    @jax.jit
    def train_step(
        state: dict[str, Any], images: jax.Array, labels: jax.Array, mask: jax.Array
    ) -> tuple[dict[str, Any], jax.Array]:
        key, noise_key = jax.random.split(state["key"])
        images += train["noise"] * jax.random.normal(noise_key, images.shape)
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], images, labels, mask)
        momentum = jax.tree.map(
            lambda m, g: train["momentum"] * m + g, state["momentum"], gradients
        )
        params = jax.tree.map(
            lambda p, m: p - train["learning_rate"] * m, state["params"], momentum
        )
        state = {"params": params, "momentum": momentum, "key": key, "step": state["step"] + 1}
        return state, loss

    return train_step


if __name__ == "__main__":
    typer.run(main)
