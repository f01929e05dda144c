"""The two errors of a resume that callers may want to catch."""

from collections.abc import Sequence

from loader import Difference


class CheckpointMismatchError(ValueError):
    """A whole checkpoint belongs to another stream, run or train state; nothing was restored.

    Attributes:
      differences: everything that differs, each with the checkpoint's value and the current one.
    """

    def __init__(self, where: str, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        names = max(len(difference.name) for difference in differences)
        befores = max(len(difference.checkpoint) for difference in differences)
        nows = max(len(difference.now) for difference in differences)
        lines = [f"{where} belongs to a different stream; nothing was restored."]
        for name, before, now, note in map(_texts, differences):
            line = f"  {name:{names}}  checkpoint {before:{befores}}  now {now:{nows}}"
            lines.append(line + (f"  ({note})" if note else ""))
        lines.append(
            "Use the data and config of that run, or start a new directory. batch_size alone may "
            'change with allow={"batch_size"}.'
        )
        super().__init__("\n".join(line.rstrip() for line in lines))


class CheckpointDamagedError(RuntimeError):
    """There are checkpoints, and none of them is whole; nothing was restored.

    Attributes:
      reasons: for each step, what is wrong with it.
    """

    def __init__(self, where: str, reasons: dict[int, str]) -> None:
        self.reasons = dict(reasons)
        lines = [f"no checkpoint in {where} is whole; nothing was restored."]
        lines += [f"  step {step}: {reason}" for step, reason in reasons.items()]
        lines.append(
            "Bring the directory back from a copy, or, to begin again from the start, use a new one."
        )
        super().__init__("\n".join(lines))


def _texts(difference: Difference) -> tuple[str, str, str, str]:
    return difference.name, difference.checkpoint, difference.now, difference.note
