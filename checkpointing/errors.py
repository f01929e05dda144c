"""The two errors of a resume that callers may want to catch."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from loader import Difference

#: Of a step, why it counts for nothing here, though it may be as whole as it ever was.
PLAIN_ORBAX: Final = "a checkpoint of plain Orbax, with no manifest to compare with"
_MAX_TEXT: Final = 200
_MAX_COLUMN: Final = 40


class CheckpointMismatchError(ValueError):
    """A whole checkpoint belongs to another stream, run or train state; nothing was restored.

    Attributes:
      differences: everything that differs, each with the checkpoint's value and the current one.
    """

    def __init__(
        self, where: str, differences: Sequence[Difference], may_change: str = "batch_size"
    ) -> None:
        self._where, self.differences = where, tuple(differences)
        self._may_change = may_change
        rows = [_texts(difference) for difference in differences]
        names, befores, nows = (
            min(max(len(row[column]) for row in rows), _MAX_COLUMN) for column in range(3)
        )
        only_state = all(one.name.startswith("train_state") for one in differences)
        what = "holds a different train state" if only_state else "belongs to a different stream"
        lines = [f"{where} {what}; nothing was restored."]
        for name, before, now, note in rows:
            line = f"  {name:{names}}  checkpoint {before:{befores}}  now {now:{nows}}"
            lines.append(line + (f"  ({note})" if note else ""))
        if only_state:
            lines.append("Use the model and optimizer of that run, or start a new directory.")
        else:
            hint = "Use the data and config of that run, or start a new directory."
            if may_change and not any(
                one.name.startswith(("stream", "parts.", "weights.")) for one in differences
            ):
                hint += f' {may_change} alone may change with allow={{"{may_change}"}}.'
            lines.append(hint)
        if {"skip", "exclude"} & {difference.name for difference in differences}:
            lines.append("So may skip, ahead of here, and exclude: allow={'skip', 'exclude'}.")
        super().__init__("\n".join(line.rstrip() for line in lines))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that the error can be sent to another process."""
        return type(self), (self._where, self.differences, self._may_change)


class CheckpointDamagedError(RuntimeError):
    """There are checkpoints, and none of them is whole; nothing was restored.

    Attributes:
      reasons: for each step, what is wrong with it.
    """

    def __init__(self, where: str, reasons: dict[int, str]) -> None:
        self._where, self.reasons = where, dict(reasons)
        others = bool(reasons) and set(reasons.values()) == {PLAIN_ORBAX}
        what = "was written by Checkpoints" if others else "is whole"
        lines = [f"no checkpoint in {where} {what}; nothing was restored."]
        lines += [f"  step {step}: {reason}" for step, reason in reasons.items()]
        lines.append(
            "Use a new directory. A run that has begun under plain Orbax and Grain is carried over once, as "
            "docs/grain.md has it."
            if others
            else "Bring the directory back from a copy, or, to begin again from the start, use a new one."
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that the error can be sent to another process."""
        return type(self), (self._where, self.reasons)


def _texts(difference: Difference) -> tuple[str, str, str, str]:
    """The parts of a difference on one line each, and none so long that it hides the others."""
    name, before, now, note = (
        text if text.isprintable() else repr(text)
        for text in dataclasses.astuple(difference.shortened(_MAX_TEXT))
    )
    return _brief(name), _brief(before), _brief(now), note


def _brief(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
