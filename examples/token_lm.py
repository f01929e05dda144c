"""A language model of bytes, trained on Python's standard library, with evaluations.

    python examples/token_lm.py runs/lm [STEPS]      # stop it at any time, and run it again
    regrain drill --kills 2 -- python examples/token_lm.py {run_dir}

The held-out text is another stream; it begins anew each time and is not in the checkpoint.
"""

import math
import sys
import sysconfig
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

import regrain

TEXT: Final = sysconfig.get_path("stdlib")  # text files are files of uint8 tokens
WINDOW, WIDTH, EVAL_EVERY = 64, 64, 50
SHAPES: Final = {"bytes": (256, WIDTH), "places": (WINDOW, WIDTH), "attention": (WIDTH, 3 * WIDTH)}
SHAPES.update({"hidden": (WIDTH, 256), "out": (256, WIDTH), "logits": (WIDTH, 256)})
OPTIMIZER: Final = optax.adamw(3e-3)


def pipeline_of(names: list[str], **settings: Any) -> regrain.Pipeline:
    # The rest of a file is one more window, padded.
    source = regrain.TokenSource(TEXT, WINDOW, dtype="uint8", names=names, rest="pad", ids="row")
    return regrain.Pipeline(source, regrain.PipelineConfig(32, final_batch="pad", **settings))


@jax.jit
def losses_of(params: Any, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    x = jax.nn.one_hot(batch["tokens"][:, :-1], 256) @ params["bytes"] + params["places"]
    mixed = jnp.split((jax.nn.standardize(x) @ params["attention"])[:, :, None], 3, axis=-1)
    x += jax.nn.dot_product_attention(*mixed, is_causal=True)[:, :, 0]
    x += jax.nn.gelu(jax.nn.standardize(x) @ params["hidden"]) @ params["out"]
    logits = jax.nn.standardize(x) @ params["logits"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    # Padding of a file's last window, or of an epoch's last batch, is no target.
    return losses, (jnp.arange(1, WINDOW + 1) < batch["length"][:, None]) & batch["mask"][:, None]


@jax.jit
def train_step(state: Any, batch: dict[str, Any]) -> Any:
    params, opt_state = state
    gradients = jax.grad(lambda p: regrain.masked_mean(*losses_of(p, batch)))(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def perplexity(params: Any, held_out: regrain.Pipeline) -> float:
    results = [losses_of(params, batch) for batch in held_out]
    total = sum(float(losses.sum(where=is_there)) for losses, is_there in results)
    return math.exp(total / sum(int(is_there.sum()) for _, is_there in results))


def main(run_dir: str, steps: int) -> None:
    pipeline = pipeline_of(["argparse.py", "ast.py", "difflib.py"], seed=17, num_epochs=None)
    held_out = pipeline_of(["csv.py", "textwrap.py"], seed=0, shuffle="none")
    keys = dict(zip(SHAPES, jax.random.split(jax.random.key(5), len(SHAPES)), strict=True))
    params = {name: jax.random.normal(keys[name], SHAPES[name]) / 8 for name in SHAPES}
    with regrain.Checkpoints(run_dir, pipeline, save_every=50, keep=3) as checkpoints:
        run = checkpoints.resume((params, OPTIMIZER.init(params)))
        state = run.train_state
        while run.batches.position.step < steps:
            state = train_step(state, next(run.batches))
            if run.batches.position.step % EVAL_EVERY == 0:
                score = perplexity(state[0], held_out)
                print(f"step {run.batches.position.step}: perplexity {score:.6f}", flush=True)
            checkpoints.save(run.batches, state)
        checkpoints.save(run.batches, state, force=True)
    print(f"perplexity {perplexity(state[0], held_out):.6f} on text held out")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 600)
