"""Both sides of the diff in docs/grain.md train on the same batches, before and after a stop."""

import pathlib
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "grain.md"
STEPS = 87  # 29 batches in each of three epochs
STOP = 20


def side(sign: str) -> str:
    """The script before (-) or after (+) the diff."""
    diff = re.search(r"```diff\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert diff
    lines = diff[1].splitlines()
    return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", sign))


class StoppedError(Exception):
    """Raised to stop a run."""


def run(script: str, directory: pathlib.Path, stop: int | None, monkeypatch: Any) -> list[Any]:
    """Run one side and return what it printed in each step."""
    printed: list[Any] = []

    def recorded(ids: Any, loss: Any) -> None:
        printed.append((np.asarray(ids).tolist(), float(loss)))
        if stop is not None and len(printed) == stop:
            raise StoppedError

    monkeypatch.setattr(sys, "argv", ["train.py", str(directory)])
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        try:
            exec(compile(script, "train.py", "exec"), {"print": recorded, "__name__": "__main__"})
        except StoppedError:
            assert stop
    return printed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_sides_train_on_the_same_batches(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(side("+"), tmp_path / "whole", None, monkeypatch)
    assert len(whole) == STEPS
    for sign in "-+":
        directory = tmp_path / f"run{sign}"
        first = run(side(sign), directory, STOP, monkeypatch)
        assert first == whole[:STOP]
        steps = [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
        assert run(side(sign), directory, None, monkeypatch) == whole[max(steps) :]
        assert 8 <= max(steps) < STOP


def test_five_lines_come_in_beside_imports() -> None:
    before, after = (side(sign).splitlines() for sign in "-+")
    new = [line for line in after if line not in before]
    assert len([line for line in new if not line.startswith("import ")]) == 5
