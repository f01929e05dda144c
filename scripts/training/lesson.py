"""A straight line through the lesson's eleven records, x = ID / 10 and y = 2 x - 1."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import loader
from regrain.cli import sources
from scripts.training.formats import in_format
from scripts.training.task import Batch, State, Task, settings_of


@dataclasses.dataclass(frozen=True)
class Data:
    """The table ``[data]``.

    Attributes:
      kind: ``"lesson"``.
      format: one of `FORMATS`.
    """

    kind: str = "lesson"
    format: str = "array"


@dataclasses.dataclass(frozen=True)
class Train:
    """The table ``[train]``.

    Attributes:
      learning_rate: of the gradient's step.
    """

    learning_rate: float


def task(data: Any, train: Any) -> Task:
    """The task, from the tables of a config file."""
    source = lesson(settings_of("data", data, Data).format)
    train_step = make_train_step(settings_of("train", train, Train))

    def summary(state: State) -> str:
        return f"y = {float(state['slope']):.4f} x + {float(state['intercept']):.4f}"

    return Task(source, None, init, train_step, summary)


def lesson(data_format: str = "array") -> loader.RecordSource:
    """The records: x and y, float32[11]; their IDs are 0 to 10."""
    return in_format("lesson", data_format, sources.lesson())


def init() -> State:
    """The train state that a run begins with."""
    return {"slope": jnp.zeros(()), "intercept": jnp.zeros(()), "step": jnp.zeros((), jnp.int32)}


def make_train_step(train: Train) -> Any:
    """The compiled function (state, batch) -> (next state, loss)."""

    def loss_of(line: tuple[jax.Array, jax.Array], batch: Batch) -> jax.Array:
        errors = line[0] * batch["x"] + line[1] - batch["y"]
        loss: jax.Array = loader.masked_mean(errors**2, batch["mask"])
        return loss

    @jax.jit
    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        line = state["slope"], state["intercept"]
        loss, gradient = jax.value_and_grad(loss_of)(line, batch)
        slope, intercept = (
            p - train.learning_rate * g for p, g in zip(line, gradient, strict=True)
        )
        return {"slope": slope, "intercept": intercept, "step": state["step"] + 1}, loss

    return train_step
