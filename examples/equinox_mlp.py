"""Equinox with Optax: a network with dropout, whose random keys come with the batch.

    python examples/equinox_mlp.py runs/equinox [STEPS]      # stop it at any time, and run it again
    regrain drill --kills 2 -- python examples/equinox_mlp.py {run_dir}

The train state is the arrays of model and optimizer. It needs no PRNG key: with `record_keys=True`
each record has a key, which changes with the epoch. The model takes one record and its key, and is
mapped over the batch.
"""

import sys
from typing import Any, Final

import equinox as eqx
import jax
import optax
from sklearn.datasets import load_digits

import regrain

OPTIMIZER: Final = optax.adamw(3e-3)


class Classifier(eqx.Module):
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    logits: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 64, key=first)
        self.dropout = eqx.nn.Dropout(0.3)
        self.logits = eqx.nn.Linear(64, 10, key=second)

    def __call__(self, image: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.logits(self.dropout(jax.nn.relu(self.hidden(image)), key=key))


@eqx.filter_value_and_grad
def mean_loss(model: Classifier, batch: dict[str, Any]) -> Any:
    logits = jax.vmap(model)(batch["image"], jax.random.wrap_key_data(batch["key"]))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return regrain.masked_mean(losses, batch["mask"])


@eqx.filter_jit
def train_step(state: Any, batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    model, opt_state = state
    loss, gradients = mean_loss(model, batch)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return (eqx.apply_updates(model, updates), opt_state), loss


def main(run_dir: str, steps: int) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    source = regrain.ArraySource({"image": images[:1500], "label": labels[:1500]})
    config = regrain.PipelineConfig(128, 17, num_epochs=None, final_batch="pad", record_keys=True)
    model = Classifier(jax.random.key(5))
    state = model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    with regrain.Checkpoints(run_dir, regrain.Pipeline(source, config), 100, 3) as checkpoints:
        arrays, static = eqx.partition(state, eqx.is_array)
        run = checkpoints.resume(arrays)
        state = eqx.combine(run.train_state, static)
        while run.batches.position.step < steps:
            state, loss = train_step(state, next(run.batches))
            if checkpoints.save(run.batches, eqx.filter(state, eqx.is_array)):
                print(f"step {run.batches.position.step}: loss {loss:.6f}", flush=True)
        checkpoints.save(run.batches, eqx.filter(state, eqx.is_array), force=True)
    evaluated = jax.vmap(eqx.nn.inference_mode(state[0]))
    right = evaluated(images[1500:]).argmax(axis=1) == labels[1500:]
    print(f"accuracy {right.mean():.4f} on {len(right)} digits held out")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 2000)
