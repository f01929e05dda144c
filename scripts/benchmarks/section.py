"""What a section of the benchmark reports: its conditions, tables, targets, and everything measured.

A module of a section has a ``NAME: Final[str]`` for the command line, and

    def measure(*, quick: bool) -> Section: ...

``quick`` asks for a run of seconds, to see that all of it works; its figures mean nothing.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """A promise, and what was measured of it.

    Attributes:
      name: what is promised.
      wanted: the bound, in words: ``">= 0.85"``.
      got: the figure that is held against it; ``None`` where it could not be measured.
      met: whether it keeps the bound; ``None`` where it could not be measured.
      why: where it is missed or not measured, the reason as far as it is known.
    """

    name: str
    wanted: str
    got: float | None
    met: bool | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as it is printed; the first column is to the left, all others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
      name: as on the command line.
      title: a line that says what was measured.
      conditions: what one must know to read the figures, each with a name.
      tables: the figures for people.
      targets: the promises that they bear on.
      data: all that was measured, window by window; JSON-able.
    """

    name: str
    title: str
    conditions: dict[str, str]
    tables: Sequence[Table]
    targets: Sequence[Target]
    data: dict[str, Any]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and range of at least one value: median, q1, q3, min, max."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values
    low, high = quartiles[0], quartiles[-1]
    middle = statistics.median(values)
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, each with the window of the same round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> list[str]:
    """Three cells of a table: median, quartiles, range; ``form`` as in ``format``."""
    of = {name: format(value, form) for name, value in summary(values).items()}
    return [of["median"], f"{of['q1']} - {of['q3']}", f"{of['min']} - {of['max']}"]


def at_least(name: str, got: float, bound: float, why: str = "") -> Target:
    """A target that is met from ``bound`` on; ``why`` counts where it is missed."""
    met = got >= bound
    return Target(name, f">= {bound:g}", got, met, "" if met else why)


def at_most(name: str, got: float, bound: float, why: str = "") -> Target:
    """A target that is met up to ``bound``; ``why`` counts where it is missed."""
    met = got <= bound
    return Target(name, f"<= {bound:g}", got, met, "" if met else why)


def unmeasured(name: str, wanted: str, why: str) -> Target:
    """A target of which nothing is known in this run."""
    return Target(name, wanted, None, None, why)
