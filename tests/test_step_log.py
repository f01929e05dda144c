"""The step log: whole lines for batches delivered, and no harm from a torn one."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import loader
from checkpointing import Checkpoints, read_step_log, step_log
from checkpointing.step_log import STEP_LOG_VARIABLE

SOURCE = loader.ArraySource({"x": np.arange(5)}, ids=[f"record {i}" for i in range(5)])
CONFIG = loader.PipelineConfig(batch_size=2, seed=1, final_batch="pad")
PIPELINE = loader.Pipeline(SOURCE, CONFIG)


def test_log_holds_each_batch_as_it_was_delivered(tmp_path: Path) -> None:
    batches = list(PIPELINE.iterate(on_batch=step_log(tmp_path / "log")))
    log = read_step_log(tmp_path / "log")
    assert [one.position for one in log] == [PIPELINE.position(step) for step in range(3)]
    assert [list(one.ids) for one in log] == [batch["id"].tolist() for batch in batches]
    assert [one.mask for one in log] == [(1, 1), (1, 1), (1, 0)]
    assert log[0].seconds <= log[1].seconds <= log[2].seconds


def test_a_line_is_there_before_its_batch_is(tmp_path: Path) -> None:
    batches = PIPELINE.iterate(on_batch=step_log(tmp_path / "log"))
    for delivered in range(3):
        assert len(read_step_log(tmp_path / "log")) == delivered
        next(batches)


def test_integer_ids_stay_integers(tmp_path: Path) -> None:
    pipeline = loader.Pipeline(loader.ArraySource({"x": np.arange(5)}), CONFIG)
    ids = [batch["id"].tolist() for batch in pipeline.iterate(on_batch=step_log(tmp_path / "log"))]
    assert [list(one.ids) for one in read_step_log(tmp_path / "log")] == ids


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_skipped_and_does_not_spoil_the_next(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    list(PIPELINE.iterate(on_batch=step_log(path)))
    os.truncate(path, path.stat().st_size - cut)
    whole = 3 if cut == 1 else 2  # without its newline alone, the last line is still whole
    assert len(read_step_log(path)) == whole
    list(PIPELINE.iterate(PIPELINE.position(2), on_batch=step_log(path)))
    assert [one.position.step for one in read_step_log(path)] == [*range(whole), 2]


@pytest.mark.parametrize("line", ["{}", "17", '"step"', "[1, 2]"])
def test_a_file_of_something_else_is_an_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(line + "\n")
    with pytest.raises(ValueError, match="is not a step log"):
        read_step_log(tmp_path / "log")


def test_a_log_that_cannot_be_opened_fails_before_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        step_log(tmp_path / "no folder" / "log")


def test_resume_logs_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_LOG_VARIABLE, str(tmp_path / "log"))
    with Checkpoints(tmp_path / "run", PIPELINE, 1, 1) as checkpoints:
        next(checkpoints.resume({"w": np.zeros(1)}).batches)
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert set(json.loads(line)) == {"epoch", "offset", "step", "ids", "mask", "monotonic_s"}


@pytest.mark.parametrize("value", [None, ""])
def test_resume_logs_nothing_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(STEP_LOG_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(STEP_LOG_VARIABLE, value)
    monkeypatch.chdir(tmp_path)
    with Checkpoints(tmp_path / "run", PIPELINE, 1, 1) as checkpoints:
        next(checkpoints.resume({"w": np.zeros(1)}).batches)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
