"""Audits of step logs: what a run with stops can have written is clean, and nothing else is."""

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import checkpointing
import loader
from regrain.cli import logged

SOURCE: Final = loader.ArraySource({"x": np.arange(30.0)})
CONFIG: Final = loader.PipelineConfig(batch_size=8, seed=3, final_batch="pad", num_epochs=2)
Lines = list[dict[str, Any]]


def pipeline(**settings: Any) -> loader.Pipeline:
    return loader.Pipeline(SOURCE, dataclasses.replace(CONFIG, **settings))


def a_run(path: Path, stream: loader.Pipeline, start: int = 0, steps: int = 99, **more: Any) -> int:
    """Logs some steps from a place on; returns how many there were."""
    log = checkpointing.step_log(path)
    batches = stream.iterate(stream.position(start), on_batch=log, **more)
    return sum(1 for _ in zip(range(steps), batches, strict=False))


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


# --- what a run can have written ----------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"final_batch": "drop"},
        {"final_batch": "partial", "num_epochs": None},
        {"skip": ((0, 1), (3, 5))},
        {"skip": ((4, 8),)},
        {"skip": ((4, 99),), "num_epochs": 3},
        {"skip": ((4, 8),), "num_epochs": 3, "exclude": (1, 2, 3)},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_log_of_a_run_with_kills_is_clean_wherever_it_stops(
    tmp_path: Path, settings: dict[str, Any], seed: int
) -> None:
    draw = random.Random(seed)
    stream, path = pipeline(**settings), tmp_path / "log"
    most = 9 if stream.config.num_epochs is None else len(stream)
    done = 0
    for _ in range(3):
        start = draw.randint(0, min(done, most - 1))
        done = start + a_run(path, stream, start, draw.randint(1, most - start))
        if done > start + 1 and draw.random() < 0.5:  # torn: its batch was not delivered
            os.truncate(path, path.stat().st_size - 5)
            done -= 1
        report = logged.audit_log(path, stream)
        assert report.clean, str(report)
    a_run(path, stream, min(done, most - 1), most)
    report = logged.audit_log(path, stream)
    assert report.clean, str(report)
    if stream.config.num_epochs is not None:
        assert report.to_dict()["epochs"] == loader.audit(stream, ids_only=True).to_dict()["epochs"]
        assert logged.audit_log(path, stream, stream.config.num_epochs).clean
    assert logged.audit_log(path, stream, 1).clean


def test_a_part_of_a_log_is_audited_where_fewer_epochs_are_asked_for(tmp_path: Path) -> None:
    stream, path = pipeline(), tmp_path / "log"
    a_run(path, stream, steps=5)
    report = logged.audit_log(path, stream, 1)
    assert report.clean
    assert [epoch.epoch for epoch in report.epochs] == [0]
    assert logged.audit_log(path, stream, 2).found == ("omissions",)
    with pytest.raises(ValueError, match="go beyond the 2"):
        logged.audit_log(path, stream, 3)


@pytest.mark.parametrize("count", [2, 4])
def test_logs_of_several_processes_are_audited_as_one(tmp_path: Path, count: int) -> None:
    stream, path = pipeline(), tmp_path / "log"
    for process in range(count):
        own = tmp_path / f"log.process-{process}"
        shard = {"process_index": process, "process_count": count}
        a_run(own, stream, steps=4 + process % 2, **shard)
        a_run(own, stream, 3, **shard)
    report = logged.audit_log(path, stream)
    assert report.clean, str(report)
    assert report.coverage.records == 60
    lines = lines_of(tmp_path / "log.process-1")
    lines[2]["ids"].reverse()
    write(tmp_path / "log.process-1", lines)
    assert not logged.audit_log(path, stream).clean
    (tmp_path / "log.process-1").write_text("")
    with pytest.raises(ValueError, match=f"no whole batch of {count} processes"):
        logged.audit_log(path, stream)


# --- what no run can have written ---------------------------------------------------------------


def again_with_others(lines: Lines) -> None:
    lines.insert(3, {**lines[3], "ids": lines[3]["ids"][::-1]})


def again_with_fewer(lines: Lines) -> None:
    lines.insert(3, {**lines[3], "ids": lines[3]["ids"][:5], "mask": lines[3]["mask"][:5]})


def again_with_another_mask(lines: Lines) -> None:
    lines.insert(3, {**lines[3], "mask": [0, *lines[3]["mask"][1:]]})


def again_elsewhere(lines: Lines) -> None:
    lines.insert(3, {**lines[3], "offset": 8})


def a_false_epoch(lines: Lines) -> None:
    lines[1]["epoch"] = 7


def a_false_offset(lines: Lines) -> None:
    lines[1]["offset"] = 3


def a_line_too_early(lines: Lines) -> None:
    lines.insert(4, lines.pop(6))


def two_lines_swapped(lines: Lines) -> None:
    lines[2], lines[3] = lines[3], lines[2]


def a_step_passed_over_at_a_resume(lines: Lines) -> None:
    lines[5:5] = [lines[1], lines[3], lines[4]]


def a_line_missing(lines: Lines) -> None:
    del lines[3]


def the_first_line_missing(lines: Lines) -> None:
    del lines[0]


def steps_of_two_lines_swapped(lines: Lines) -> None:
    lines[2]["step"], lines[3]["step"] = 3, 2


def a_number_passed_over(lines: Lines) -> None:
    """The batches are all there, and in order; the steps are not theirs."""
    for line in lines[4:]:
        line["step"] += 1
    lines.pop()


PLANTS: Final[list[tuple[Callable[[Lines], None], str, int]]] = [
    (again_with_others, logged.DIFFERS, 3),
    (again_with_fewer, logged.DIFFERS, 3),
    (again_with_another_mask, logged.DIFFERS, 3),
    (again_elsewhere, logged.MISPLACED, 3),
    (a_false_epoch, logged.MISPLACED, 1),
    (a_false_offset, logged.MISPLACED, 1),
    (a_line_too_early, logged.AHEAD, 6),
    (two_lines_swapped, logged.AHEAD, 3),
    (a_step_passed_over_at_a_resume, logged.AHEAD, 3),
    (a_line_missing, logged.AHEAD, 4),
    (the_first_line_missing, logged.AHEAD, 1),
    (steps_of_two_lines_swapped, logged.MISPLACED, 2),
    (a_number_passed_over, logged.AHEAD, 5),
]


@pytest.mark.parametrize(("plant", "cause", "step"), PLANTS)
def test_lines_that_no_run_has_written_are_found(
    tmp_path: Path, plant: Callable[[Lines], None], cause: str, step: int
) -> None:
    stream, path = pipeline(), tmp_path / "log"
    a_run(path, stream)
    assert logged.audit_log(path, stream).clean
    lines = lines_of(path)
    plant(lines)
    write(path, lines)
    report = logged.audit_log(path, stream)
    assert "order" in report.found
    assert cause in report.order.causes
    assert step in [one.step for one in report.order.sample if one.cause == cause]
    assert sum(report.order.causes.values()) == report.order.count


def test_a_batch_that_differs_is_told_by_its_first_slot(tmp_path: Path) -> None:
    stream, path = pipeline(), tmp_path / "log"
    a_run(path, stream)
    lines = lines_of(path)
    other = [*lines[3]["ids"]]
    other[4] = 29 if other[4] != 29 else 28
    write(path, [*lines[:3], {**lines[3], "ids": other}, *lines[3:]])
    report = logged.audit_log(path, stream)
    (first,) = report.order.sample
    assert (first.step, first.place, first.id) == (3, 4, other[4])
    assert first.expected == lines[3]["ids"][4]
    assert report.order.causes == {logged.DIFFERS: 1}


@pytest.mark.parametrize("skip", [(), ((4, 6),)])
def test_steps_beyond_the_end_are_found(tmp_path: Path, skip: Any) -> None:
    path = tmp_path / "log"
    a_run(path, pipeline(num_epochs=5, skip=skip))
    stream = pipeline(skip=skip)
    report = logged.audit_log(path, stream)
    assert report.found == ("order",)
    assert report.order.causes == {logged.BEYOND: 12}
    assert report.order.first is not None
    assert report.order.first.step == len(stream)
    assert [epoch.epoch for epoch in report.epochs] == [0, 1]
    assert logged.audit_log(path, stream, 2).found == ("order",)
    assert logged.audit_log(path, pipeline(num_epochs=5, skip=skip), 2).clean
