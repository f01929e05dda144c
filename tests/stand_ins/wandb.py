"""As much of Weights & Biases as the pages use, with the signatures of its own `init` and `Run.log`.

It keeps what it is given, and refuses what the real one would not take.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self


class Run:
    """A run: what was logged, and the last value of each name."""

    def __init__(self) -> None:
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        if self.finished:
            raise RuntimeError("the run is finished")
        if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
            raise ValueError("wandb.log must be passed a dictionary whose keys are strings")
        if not isinstance(step, int) or (self.history and step < self.history[-1][0]):
            raise ValueError(f"steps are whole numbers that do not fall, not {step!r}")
        if not all(isinstance(value, int | float) for value in data.values()):
            raise ValueError(f"no scalars: {data!r}")
        self.history.append((step, dict(data)))
        self.summary.update(data)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self.finished = True


def init(
    entity: str | None = None,
    project: str | None = None,
    dir: str | None = None,  # noqa: A002 (its name there)
    id: str | None = None,  # noqa: A002 (its name there)
    name: str | None = None,
    notes: str | None = None,
    tags: Sequence[str] | None = None,
    config: dict[str, Any] | str | None = None,
    *,
    mode: Literal["online", "offline", "disabled"] | None = None,
    resume: bool | Literal["allow", "never", "must", "auto"] | None = None,
) -> Run:
    return Run()
