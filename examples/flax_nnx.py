"""Flax NNX with Optax: dropout and batch normalisation, resumed bit for bit.

    python examples/flax_nnx.py runs/flax [STEPS]      # stop it at any time, and run it again
    regrain drill --kills 2 -- python examples/flax_nnx.py {run_dir}

The train state is one `nnx.State` of model, optimizer and RNG streams: parameters, batch statistics,
Adam's moments, and the count of draws of each stream.
"""

import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import regrain

ADAM: Final = optax.adamw(3e-3)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3)
        self.logits = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: Any, mask: Any = None, rngs: nnx.Rngs | None = None) -> jax.Array:
        hidden = nnx.relu(self.norm(self.hidden(images), mask=mask))
        return self.logits(self.dropout(hidden, rngs=rngs))


@jax.jit
def train_step(graphdef: Any, train_state: Any, batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    model, optimizer, rngs = nnx.merge(graphdef, train_state)

    def mean_loss(model: Classifier, rngs: nnx.Rngs) -> Any:
        # Padding counts neither in batch statistics nor in the loss.
        logits = model(batch["image"], batch["mask"][:, None], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return regrain.masked_mean(losses, batch["mask"])

    loss, gradients = nnx.value_and_grad(mean_loss)(model, rngs)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer, rngs)), loss


def main(run_dir: str, steps: int) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    source = regrain.ArraySource({"image": images[:1500], "label": labels[:1500]})
    config = regrain.PipelineConfig(128, seed=17, num_epochs=None, final_batch="pad")
    rngs = nnx.Rngs(params=0, dropout=1)
    model = Classifier(rngs)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    graphdef, train_state = nnx.split((model, optimizer, rngs))
    with regrain.Checkpoints(run_dir, regrain.Pipeline(source, config), 100, 3) as checkpoints:
        run = checkpoints.resume(train_state)
        train_state = run.train_state
        while run.batches.position.step < steps:
            train_state, loss = train_step(graphdef, train_state, next(run.batches))
            if checkpoints.save(run.batches, train_state):
                print(f"step {run.batches.position.step}: loss {loss:.6f}", flush=True)
        checkpoints.save(run.batches, train_state, force=True)
    nnx.update((model, optimizer, rngs), train_state)
    evaluated = nnx.view(model, deterministic=True, use_running_average=True)
    right = evaluated(jnp.asarray(images[1500:])).argmax(axis=1) == labels[1500:]
    print(f"accuracy {right.mean():.4f} on {len(right)} digits held out")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 2000)
