"""Plain JAX: a network for handwritten digits, with momentum, noise and warm-up by hand.

    python examples/plain_jax.py runs/plain [STEPS]      # stop it at any time, and run it again
    regrain drill --kills 2 -- python examples/plain_jax.py {run_dir}

The train state is a tree of arrays: parameters, velocity, a PRNG key, the number of steps.
"""

import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
from sklearn.datasets import load_digits

import regrain

#: Each checkpoint holds them; a resume with other settings is refused.
SETTINGS: Final = {"learning_rate": 0.1, "momentum": 0.9, "noise": 0.2, "warm_up_steps": 100}

State = dict[str, Any]
Batch = dict[str, Any]


def init(seed: int) -> State:
    key, first, second = jax.random.split(jax.random.key(seed), 3)
    params = {
        "hidden": jax.random.normal(first, (64, 32)) / 8,
        "logits": jax.random.normal(second, (32, 10)) / 6,
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "velocity": velocity, "key": key, "step": jnp.zeros((), jnp.int32)}


def logits_of(params: dict[str, jax.Array], images: Any) -> jax.Array:
    return jax.nn.relu(images @ params["hidden"]) @ params["logits"]


@jax.jit
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    key, noise_key = jax.random.split(state["key"])
    noise = SETTINGS["noise"] * jax.random.normal(noise_key, batch["image"].shape)

    def mean_loss(params: dict[str, jax.Array]) -> Any:
        log_probabilities = jax.nn.log_softmax(logits_of(params, batch["image"] + noise))
        losses = -jnp.sum(log_probabilities * jax.nn.one_hot(batch["label"], 10), axis=1)
        return regrain.masked_mean(losses, batch["mask"])

    loss, gradient = jax.value_and_grad(mean_loss)(state["params"])
    rate = SETTINGS["learning_rate"] * jnp.minimum(1, state["step"] / SETTINGS["warm_up_steps"])
    velocity = jax.tree.map(lambda v, g: SETTINGS["momentum"] * v + g, state["velocity"], gradient)
    params = jax.tree.map(lambda p, v: p - rate * v, state["params"], velocity)
    return {"params": params, "velocity": velocity, "key": key, "step": state["step"] + 1}, loss


def main(run_dir: str, steps: int) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    source = regrain.ArraySource({"image": images[:1500], "label": labels[:1500]})
    config = regrain.PipelineConfig(128, seed=17, num_epochs=None, final_batch="pad")
    pipeline = regrain.Pipeline(source, config)
    with regrain.Checkpoints(run_dir, pipeline, 100, 3, run_config=SETTINGS) as checkpoints:
        run = checkpoints.resume(init(seed=5))
        state = run.train_state
        while run.batches.position.step < steps:
            state, loss = train_step(state, next(run.batches))
            if checkpoints.save(run.batches, state):
                print(f"step {run.batches.position.step}: loss {loss:.6f}", flush=True)
        checkpoints.save(run.batches, state, force=True)
    right = logits_of(state["params"], images[1500:]).argmax(axis=1) == labels[1500:]
    print(f"accuracy {right.mean():.4f} on {len(right)} digits held out")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 2000)
