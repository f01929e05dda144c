"""What scripts/train.py trains: data, a model, and a step; and how settings for it are read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

import loader

State = dict[str, Any]
Batch = Mapping[str, Any]
Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
      source: the records.
      transform: of a batch, or ``None``.
      init: makes the train state that a run begins with.
      train_step: from train state and batch, without its IDs, to the next train state and the loss.
      summary: a line on the trained model.
    """

    source: loader.RecordSource
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None
    init: Callable[[], State]
    train_step: Callable[[State, Batch], tuple[State, jax.Array]]
    summary: Callable[[State], str]


def settings_of(name: str, table: Any, kind: type[Settings]) -> Settings:
    """A table of a config file as a dataclass, whose fields are ints, floats and strings.

    Raises:
      ValueError: it is no table, or one error that names every unknown, missing and ill-typed key.
    """
    if not isinstance(table, dict):
        raise ValueError(f"[{name}] must be a table, not {table!r:.80}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    problems = [
        f"{key!r} is not a setting (known: {', '.join(fields)})"
        for key in table
        if key not in fields
    ]
    for key, field in fields.items():
        if key not in table:
            if field.default is dataclasses.MISSING:
                problems.append(f"{key!r} is missing: {_NAMES[field.type]}")
        elif type(table[key]) not in _KINDS[field.type]:
            problems.append(f"{key!r} must be {_NAMES[field.type]}, not {table[key]!r:.80}")
    if problems:
        raise ValueError(f"[{name}]: " + "; ".join(problems))
    return kind(**table)


_KINDS: dict[Any, tuple[type, ...]] = {int: (int,), float: (float, int), str: (str,)}
_NAMES: dict[Any, str] = {int: "an integer", float: "a number", str: "a string"}
