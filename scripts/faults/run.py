"""The small run that is put through the faults. It needs NumPy alone, so a process of it starts in a second.

    python scripts/faults/run.py DIRECTORY ACKNOWLEDGED

trains to the end, from the newest checkpoint in DIRECTORY or from the start, and saves each step. To
the file ACKNOWLEDGED it appends the step of every save of which it knows that it is on disk.
"""

import hashlib
import os
import sys
import time
from typing import Any, Final

import numpy as np

import checkpointing
import loader

NUM_STEPS: Final = 30
KEEP: Final = 2
_NUM_RECORDS: Final = 22
_WIDTH: Final = 96
#: A step takes time, so that a kill can hit it.
_STEP_SECONDS: Final = 0.01

State = dict[str, Any]


def a_pipeline() -> loader.Pipeline:
    """30 steps: 5 epochs of 22 records in batches of 4, the last one of each epoch padded."""
    noise = np.random.default_rng(0).normal(size=(_NUM_RECORDS, _WIDTH))
    source = loader.ArraySource({"x": noise}, ids=[f"record {i}" for i in range(_NUM_RECORDS)])
    config = loader.PipelineConfig(batch_size=4, seed=1, num_epochs=5, final_batch="pad")
    return loader.Pipeline(source, config)


def first_state() -> State:
    """What a run begins with; the weights are large enough to get a file of their own."""
    weights = np.random.default_rng(1).normal(size=(_WIDTH, _WIDTH)).astype(np.float32)
    return {"weights": weights, "momentum": np.zeros(_WIDTH), "step": 0}


def update(state: State, batch: dict[str, Any]) -> State:
    """A step whose result depends on every record of the batch and on the order of all batches."""
    mean = (batch["x"] * batch["mask"][:, None]).sum(axis=0) / batch["mask"].sum()
    momentum = 0.9 * state["momentum"] + mean
    weights = state["weights"] * np.float32(0.99) + momentum.astype(np.float32)
    return {"weights": weights, "momentum": momentum, "step": state["step"] + 1}


def digest(state: State) -> str:
    """Of every bit of a train state."""
    arrays = {name: np.asarray(state[name]) for name in sorted(state)}
    parts = [f"{name} {a.dtype}{a.shape}".encode() + a.tobytes() for name, a in arrays.items()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def open_checkpoints(
    directory: str | os.PathLike[str], save_every: int = 1, keep: int = KEEP
) -> checkpointing.Checkpoints:
    """The checkpoints of such a run."""
    return checkpointing.Checkpoints(directory, a_pipeline(), save_every, keep)


def train(
    checkpoints: checkpointing.Checkpoints,
    run: "checkpointing.Run[State]",
    until: int,
    state: State | None = None,
) -> State:
    """Trains until a step, from the state at the resume or a later one, and offers each to be saved."""
    state = run.train_state if state is None else state
    while run.batches.position.step < until:
        state = update(state, next(run.batches))
        checkpoints.save(run.batches, state)
    return state


def main(directory: str, acknowledged: str) -> None:
    """Trains slowly, and writes down which saves are known to be on disk."""
    log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    begun = 0
    with open_checkpoints(directory) as checkpoints:
        run = checkpoints.resume(first_state())
        state = run.train_state
        for batch in run.batches:
            state = update(state, batch)
            time.sleep(_STEP_SECONDS)
            checkpoints.save(run.batches, state)
            if begun:  # a save that could begin has waited for the one before it
                os.write(log, f"{begun}\n".encode())
            begun = run.batches.position.step
            if begun % 5 == 0:
                checkpoints.wait()
                os.write(log, f"{begun}\n".encode())
        checkpoints.wait()
        if begun:
            os.write(log, f"{begun}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
