"""A script under drill: what each of its processes is told, and what its logs tell of all of them."""

import sys
from pathlib import Path

import numpy as np
import pytest

from checkpointing import DrillError, step_log
from checkpointing.proof.process import DrilledScript
from checkpointing.proof.step_log import process_log
from loader import Position


def script(folder: Path, count: int, *command: str) -> DrilledScript:
    return DrilledScript(command, folder, 3, count, "127.0.0.1:7")


def log(path: Path | str, *steps: int) -> None:
    write = step_log(path)
    for step in steps:
        write(Position(0, 2 * step, step), {"id": np.array([step]), "mask": np.ones(1, bool)})


ECHO = "import os, sys; print(sys.argv[1:], os.environ['REGRAIN_STEP_LOG'])"


@pytest.mark.parametrize("count", [1, 3])
def test_each_process_is_told_its_number_and_all_the_same_place(tmp_path: Path, count: int) -> None:
    places = ("--dir={run_dir}/x", "{coordinator}", "{process_index}/{process_count}")
    with script(tmp_path, count, sys.executable, "-c", ECHO, *places) as running:
        running.wait(60)
    assert running.failed == []
    for process, program in enumerate(running.programs):
        told = [f"--dir={tmp_path / 'run'}/x", "127.0.0.1:7", f"{process}/{count}"]
        assert program.output is not None
        assert program.output.read_text().strip() == f"{told} {tmp_path / 'steps-3.jsonl'}"
    names = [path.name for path in sorted(tmp_path.iterdir())]
    if count == 1:
        assert names == ["output-3.txt"]
        assert running.place(0) == f"in attempt 3 of the run {tmp_path.name}"
    else:
        assert names == [f"output-3.process-{process}.txt" for process in range(3)]
        assert running.place(1) == f"in attempt 3 of the run {tmp_path.name}, process 1 of 3"


def test_a_step_is_done_when_all_processes_have_come_to_it(tmp_path: Path) -> None:
    watched = script(tmp_path, 2, "true")
    assert watched.last_step() == -1
    log(process_log(watched.log, 0), 4, 5, 6)
    assert watched.last_step() == -1
    log(process_log(watched.log, 1), 4, 5)
    assert watched.last_step() == 5
    with Path(process_log(watched.log, 1)).open("ab") as file:
        file.write(b'{"epoch": 0, "of')
        file.flush()
        assert watched.last_step() == 5
    log(process_log(watched.log, 1), 6)
    assert watched.last_step() == 6
    whole, parts = watched.read_log()
    assert [one.position.step for one in whole] == [4, 5, 6]
    assert parts == []


def test_one_process_has_one_log(tmp_path: Path) -> None:
    watched = script(tmp_path, 1, "true")
    assert watched.read_log() == ([], [])
    log(watched.log, 0, 1)
    assert watched.last_step() == 1
    assert [one.position.step for one in watched.read_log()[0]] == [0, 1]


def test_saves_under_way_and_checkpoints_are_those_of_the_directory(tmp_path: Path) -> None:
    watched = script(tmp_path, 1, "true")
    assert (watched.saving(), watched.newest_checkpoint()) == ([], 0)
    for name in ("20", "40.regrain.orbax-checkpoint-tmp", "notes.orbax-checkpoint-tmp"):
        (watched.run_dir / name).mkdir(parents=True)
    assert (watched.saving(), watched.newest_checkpoint()) == ([40], 0)


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(DrillError, match="no-such-program cannot be started: No such file"),
        script(tmp_path, 2, "no-such-program"),
    ):
        raise AssertionError("not reached")
