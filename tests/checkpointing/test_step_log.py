"""The step log: whole lines for batches delivered, and no harm from a torn one."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

import loader
from checkpointing import Checkpoints, Delivery, read_step_log, step_log
from checkpointing.proof.step_log import STEP_LOG_VARIABLE, joined, process_log, read_process_logs
from loader import Position

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


NEGATIVE = '{"epoch": 0, "offset": 0, "step": -1, "ids": [1], "mask": [1], "monotonic_s": 1.0}'


@pytest.mark.parametrize("line", ["{}", "17", '"step"', "[1, 2]", NEGATIVE])
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


# Several processes

PADDED = loader.Pipeline(
    loader.ArraySource({"x": np.arange(22)}),
    loader.PipelineConfig(batch_size=12, seed=1, num_epochs=2, final_batch="pad"),
)


def shares(count: int) -> list[list[Delivery]]:
    """What each of some processes logs of a whole run, at a time of its own."""
    size = PADDED.config.batch_size // count
    logs: list[list[Delivery]] = [[] for _ in range(count)]
    for step in range(len(PADDED)):
        batch, position = PADDED[step], PADDED.position(step)
        for process, log in enumerate(logs):
            rows = slice(process * size, (process + 1) * size)
            ids, mask = batch["id"][rows].tolist(), batch["mask"][rows].astype(int).tolist()
            log.append(Delivery(position, tuple(ids), tuple(mask), 10 * step + process))
    return logs


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12])
def test_shares_are_joined_to_the_batches(count: int) -> None:
    whole, parts = joined(shares(count))
    assert parts == []
    assert [one.ids for one in whole] == [one.ids for one in shares(1)[0]]
    assert [one.mask for one in whole] == [one.mask for one in shares(1)[0]]
    assert [one.position for one in whole] == [PADDED.position(step) for step in range(4)]
    assert [one.seconds for one in whole] == [10 * step + count - 1 for step in range(4)]


def test_what_not_all_have_logged_is_left_as_parts() -> None:
    logs = shares(3)
    logs[1] = logs[1][:2]
    logs[2] = logs[2][:3]
    whole, parts = joined(logs)
    assert [one.position.step for one in whole] == [0, 1]
    told = [(one.process, one.count, one.delivery.position.step) for one in parts]
    assert told == [(0, 3, 2), (0, 3, 3), (2, 3, 2)]
    assert parts[0].delivery == shares(3)[0][2]


def test_a_process_that_has_logged_nothing_leaves_no_batch_whole() -> None:
    whole, parts = joined([shares(2)[0], []])
    assert whole == []
    assert len(parts) == 4


def test_shares_of_different_places_are_not_joined() -> None:
    logs = shares(2)
    moved = dataclasses.replace(logs[1][1], position=Position(0, 5, 1))
    whole, parts = joined([logs[0], [logs[1][0], moved, *logs[1][2:]]])
    assert [one.position.step for one in whole] == [0, 2, 3]
    assert [part.delivery for part in parts] == [logs[0][1], moved]


def test_a_step_that_comes_twice_is_joined_twice() -> None:
    one, two = shares(2)
    again = [1, 0, 1, 2, 3]
    whole, parts = joined([[one[step] for step in again], [two[step] for step in again]])
    assert [delivery.position.step for delivery in whole] == again
    whole, parts = joined([[one[step] for step in again], two])
    assert [delivery.position.step for delivery in whole] == [1, 0, 2, 3]
    assert [part.delivery for part in parts] == [one[1]]


def test_logs_of_several_processes_are_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for process in range(3):
        log = step_log(process_log(path, process))
        list(PADDED.iterate(process_index=process, process_count=3, on_batch=log))
    os.truncate(process_log(path, 1), Path(process_log(path, 1)).stat().st_size - 7)
    assert [one.ids for one in read_step_log(path, 3)] == [one.ids for one in shares(1)[0][:3]]
    assert [len(log) for log in read_process_logs(path, 3)] == [4, 3, 4]
    Path(process_log(path, 2)).unlink()
    assert read_step_log(path, 3) == []
    for process in range(2):
        Path(process_log(path, process)).unlink()
    with pytest.raises(FileNotFoundError, match=r"none of 3 processes has logged to .*process-0"):
        read_step_log(path, 3)
    assert read_process_logs(path, 1) == [[]]
