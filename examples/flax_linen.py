"""Flax Linen with Optax: the `TrainState` of Linen, as `TrainState.create` makes it.

    python examples/flax_linen.py runs/linen [STEPS]      # stop it as you like, and run it again
    regrain drill --kills 2 -- python examples/flax_linen.py {run_dir}

`TrainState` begins with ``step=0``, a Python number, and has an int32 array after a jitted step. Both are
the same leaf: a resume takes the first and returns the second. Dropout needs no key in the train state,
since its keys follow from the step.
"""

import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import checkpointing
import loader

DROPOUT_SEED: Final = 7


class Classifier(linen.Module):
    @linen.compact
    def __call__(self, images: Any, *, train: bool = False) -> Any:
        hidden = linen.relu(linen.Dense(64)(images))
        return linen.Dense(10)(linen.Dropout(0.3, deterministic=not train)(hidden))


@jax.jit
def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    dropout = {"dropout": jax.random.fold_in(jax.random.key(DROPOUT_SEED), state.step)}

    def mean_loss(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs=dropout)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loader.masked_mean(losses, batch["mask"])  # padding of the last batch is no digit

    loss, gradients = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main(run_dir: str, steps: int) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    source = loader.ArraySource({"image": images[:1500], "label": labels[:1500]})
    config = loader.PipelineConfig(128, seed=17, num_epochs=None, final_batch="pad")
    model = Classifier()
    params = model.init(jax.random.key(5), images[:1])["params"]
    optimizer = optax.adamw(3e-3)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    with checkpointing.Checkpoints(run_dir, loader.Pipeline(source, config), 100, 3) as checkpoints:
        run = checkpoints.resume(state)
        state = run.train_state
        while run.batches.position.step < steps:
            state, loss = train_step(state, next(run.batches))
            if checkpoints.save(run.batches, state):
                print(f"step {run.batches.position.step}: loss {loss:.6f}", flush=True)
        checkpoints.save(run.batches, state, force=True)
    logits: Any = model.apply({"params": state.params}, jnp.asarray(images[1500:]))
    right = logits.argmax(axis=1) == labels[1500:]
    print(f"accuracy {right.mean():.4f} on {len(right)} digits that it was not trained on")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 2000)
