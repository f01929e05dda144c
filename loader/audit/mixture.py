"""The audit of a mixture: whose turn each step was, and each part as the stream that it is."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np

from loader.audit.report import AuditReport

KEPT_TURNS: Final = 16


class MixedStream(Protocol):
    """What is asked of a mixture."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """The pipelines, by name."""
        ...

    @property
    def weights(self) -> Mapping[str, int]:
        """The weights as whole numbers, by name."""
        ...

    def ids(self, step: int, /) -> Any:
        """The ``id`` of a step's batch."""
        ...

    def turn(self, step: int, /) -> Any:
        """Whose turn a step is, as ``part``."""
        ...

    def position(self, step: int, /) -> Any:
        """Where an iterator starts for a step."""
        ...

    def iterate(self, start: Any, /) -> Iterator[Any]:
        """An iterator from there."""
        ...


@dataclasses.dataclass(frozen=True)
class MixtureReport:
    """The result of an audit of a mixture.

    Attributes:
      steps: how many were audited, from the first on.
      parts: by name, the audit of what came of each part.
      wrong_turns: steps that were another part's turn.
      turn_sample: some of them, 16 at most: the step, the part whose turn it was, and the part that came.
    """

    steps: int
    parts: Mapping[str, AuditReport]
    wrong_turns: int
    turn_sample: tuple[tuple[int, str, str], ...]

    @property
    def clean(self) -> bool:
        """Whether there is no finding, in any part, and each turn was the right one's."""
        return self.wrong_turns == 0 and all(report.clean for report in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "clean": self.clean,
            "steps": self.steps,
            "wrong_turns": self.wrong_turns,
            "turn_sample": [list(turn) for turn in self.turn_sample],
            "parts": {name: report.to_dict() for name, report in self.parts.items()},
        }

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of a mixture: {self.wrong_turns} came at another part's turn"]
        lines += [
            f"  step {step} was {due}'s turn, and {came} came"
            for step, due, came in self.turn_sample
        ]
        for name, report in self.parts.items():
            lines += [f"part {name}:", *(f"  {line}" for line in str(report).splitlines())]
        return "\n".join(lines)


class DueTurns:
    """Whose turn each step is, derived from the weights alone, one step after the other.

    The rule of `loader.streams.turns`, by its definition: of the parts whose next turn may have come, the one
    whose next turn has to come first.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(sorted(weights.items()))
        self._had = dict.fromkeys(self._weights, 0)
        self._step = 0

    def __next__(self) -> str:
        """The name of the part whose turn the next step is."""
        total = sum(self._weights.values())
        _, name = min(
            (-(-(self._had[name] + 1) * total // weight), name)
            for name, weight in self._weights.items()
            if self._had[name] * total // weight <= self._step
        )
        self._had[name] += 1
        self._step += 1
        return name


def steps_of_each(mixture: MixedStream, steps: int) -> dict[str, list[int]]:
    """The steps that are each part's turn, of the first ``steps``."""
    found: dict[str, list[int]] = {name: [] for name in sorted(mixture.weights)}
    due = DueTurns(mixture.weights)
    for step in range(steps):
        found[next(due)].append(step)
    return found


class Batches:
    """What a mixture delivers at the steps that are a part's turn; notes turns that were another's."""

    def __init__(self, mixture: MixedStream, *, ids_only: bool) -> None:
        self._mixture = mixture
        self._ids_only = ids_only
        self._names = sorted(mixture.weights)
        self.wrong = 0
        self.sample: list[tuple[int, str, str]] = []

    def of(self, part: str, steps: list[int]) -> Iterator[dict[str, Any]]:
        """The batches at some steps, without the field that says whose they are."""
        for step in steps:
            came = self._mixture.turn(step).part
            if self._ids_only:
                batch = {"id": self._mixture.ids(step)}
            else:
                batch = dict(next(self._mixture.iterate(self._mixture.position(step))))
                places = np.unique(batch.pop("part")).tolist()
                known = [self._names[i] for i in places if 0 <= i < len(self._names)]
                # What the field says counts, where it is not what was announced.
                came = came if known == [came] else " and ".join(known) or "none of the parts"
            if came != part:
                self.wrong += 1
                if len(self.sample) < KEPT_TURNS:
                    self.sample.append((step, part, came))
            yield batch
