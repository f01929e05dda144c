"""Runs that go on with another number of JAX processes: killed, resumed, and of other batches."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import checkpointing
from checkpointing import (
    Checkpoints,
    DrillError,
    DrillReport,
    read_step_log,
    run_drill,
    step_log,
)
from checkpointing.proof.drill import _Instant, _with_victims
from checkpointing.proof.process import Programs, reserved_address
from checkpointing.proof.step_log import STEP_LOG_VARIABLE, process_log
from loader import ArraySource, Pipeline, PipelineConfig
from loader.reading.program import Program
from regrain.cli import drill as drill_job
from regrain.cli import drill_report
from scripts import resume_drill

ROOT: Final = Path(__file__).resolve().parents[2]
CLI: Final = (sys.executable, str(ROOT / "scripts" / "resume_drill.py"))
ELASTIC: Final = ROOT / "configs" / "elastic.toml"

# Real processes


@pytest.mark.processes
def test_a_run_on_other_numbers_of_processes_is_the_same(tmp_path: Path) -> None:
    settings = ELASTIC.read_text("utf-8").replace("num_epochs = 10", "num_epochs = 2")
    settings = settings.replace("hidden = 64", "hidden = 8").replace("every = 20", "every = 8")
    (tmp_path / "short.toml").write_text(settings, "utf-8")
    out = tmp_path / "out"
    options = ("--processes", "2,1", "--kills", "2", "--config", tmp_path / "short.toml")
    done = subprocess.run(
        [*CLI, *map(str, options), "--out", str(out)],
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "IDs and masks of all 76 steps: equal" in done.stdout
    assert "final train state, 14 leaves at step 76: bit for bit equal" in done.stdout
    assert "processes that were left by a killed one: ended by themselves in" in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["process_counts"] == [2, 1]
    assert report["same"]
    assert report["complete"]
    assert report["hung"] == 0
    reference, *attempts = report["attempts"]
    assert reference["process_count"] == 1
    assert [one["process_count"] for one in attempts] == [2, 1, 2][: len(attempts)]
    for kill in report["kills"]:
        (attempt,) = (one for one in attempts if one["number"] == kill["attempt"])
        killed = [one["process"] for one in attempt["endings"] if one["cause"] == "killed"]
        assert kill["processes"] == killed
        assert kill["process_count"] == len(attempt["endings"]) == attempt["process_count"]
        codes = {one["exit_code"] for one in attempt["endings"] if one["cause"] == "killed"}
        assert codes == {-signal.SIGKILL}
    assert {one["exit_code"] for one in attempts[-1]["endings"]} == {0}
    assert (out / "drill.png").read_bytes().startswith(b"\x89PNG")


#: Delivers batches up to a step, of a size of its own, and saves.
BATCHES: Final = """
import sys
import jax
address, index, count, run, size, until = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(index))
import numpy as np
import checkpointing, loader

source = loader.ArraySource({"x": np.arange(100)})
config = loader.PipelineConfig(int(size), 17, num_epochs=2, final_batch="pad")
state = {"w": np.zeros(1)}
with checkpointing.Checkpoints(run, loader.Pipeline(source, config), 1000, 3) as checkpoints:
    batches = checkpoints.resume(state, allow={"batch_size"}).batches
    while batches.position.step < int(until) and next(batches, None) is not None:
        pass
    checkpoints.save(batches, state, force=True)
"""


def run_batches(folder: Path, count: int, size: int, until: int, log: Path) -> None:
    with reserved_address() as address:
        programs = [
            Program(
                [sys.executable, "-c", BATCHES, address, *map(str, given)],
                folder / f"output-{count}-{index}",
                {STEP_LOG_VARIABLE: str(log), "JAX_PLATFORMS": "cpu"},
                0.001,
            )
            for index in range(count)
            for given in [(index, count, folder / "run", size, until)]
        ]
        with Programs(programs) as running:
            running.wait(120)
    codes = [program.exit_code for program in programs]
    assert codes == [0] * count, "\n".join(program.tail() for program in programs)


def test_batches_of_another_size_on_more_processes_repeat_and_lose_no_record(
    tmp_path: Path,
) -> None:
    run_batches(tmp_path, 2, 24, 3, tmp_path / "first")
    run_batches(tmp_path, 3, 9, 1000, tmp_path / "second")

    first = read_step_log(tmp_path / "first", 2)
    second = read_step_log(tmp_path / "second", 3)
    assert [one.position.step for one in first] == [0, 1, 2]
    assert [one.position.step for one in second] == list(range(3, 3 + 4 + 12))
    seen = Counter(
        (one.position.epoch, record)
        for one in first + second
        for record, there in zip(one.ids, one.mask, strict=True)
        if there
    )
    assert seen == Counter((epoch, record) for epoch in range(2) for record in range(100))

    manifest, _ = checkpointing.load(tmp_path / "run")
    (change,) = manifest.history
    assert change == {
        "position": {"epoch": 0, "offset": 72, "step": 3},
        "changed": {"batch_size": [24, 9]},
    }
    history = checkpointing.provenance(tmp_path / "run")
    for one in first + second:
        records = [record for record, there in zip(one.ids, one.mask, strict=True) if there]
        found = history.records_at(one.position.step)
        assert found.ids is not None
        assert found.ids.tolist() == records
    for record in (0, 42, 99):
        visits = [(visit.epoch, visit.step, visit.slot) for visit in history.steps_of(record)]
        assert visits == [
            (one.position.epoch, one.position.step, one.ids.index(record))
            for one in first + second
            if record in one.ids
        ]
        assert len(visits) == 2


# Scripts that only copy what such a run leaves, which takes no time


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 steps, its log, and the logs of two processes."""
    made = tmp_path_factory.mktemp("made")
    config = PipelineConfig(batch_size=4, seed=1, num_epochs=2, final_batch="pad")
    pipeline = Pipeline(ArraySource({"x": np.arange(22)}), config)
    logs = [
        pipeline.iterate(
            process_index=process,
            process_count=2,
            on_batch=step_log(process_log(made / "log", process)),
        )
        for process in range(2)
    ]
    for log in logs:
        list(log)
    with Checkpoints(made / "run", pipeline, 100, 1) as checkpoints:
        run = checkpoints.resume({"w": np.ones(3)})
        logged = step_log(made / "log")
        for step in range(len(pipeline)):
            logged(pipeline.position(step), pipeline[step])
            next(run.batches)
        checkpoints.save(run.batches, run.train_state, force=True)
    return made


def copying(made: Path, first: str, share: str) -> list[str]:
    """One process copies a whole run, once; of two each copies a share of the log, and hangs."""
    script = f"""
        if [ {{process_count}} = 1 ]; then
            [ -e "{{run_dir}}" ] && exit
            cp -r "{made}/run" "{{run_dir}}"
            cp "{made}/log" "$REGRAIN_STEP_LOG"
            exit
        fi
        {first}
        [ {{process_index}} = 0 ] && cp -r "{made}/run" "{{run_dir}}"
        cp "{made}/log.process-{share}" "$REGRAIN_STEP_LOG.process-{{process_index}}"
        tail -f /dev/null # {{coordinator}}
    """
    return ["bash", "-c", script]


def drill(
    made: Path, out: Path, first: str = "", share: str = "{process_index}", **more: Any
) -> DrillReport:
    command = copying(made, first, share)
    return run_drill(command, out, kills=1, processes=(2, 1), patience_seconds=0, **more)


@pytest.mark.processes
def test_processes_that_hang_are_ended_and_counted(made: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    report = drill(made, tmp_path, progress=lines.append)
    assert report.differences == ()
    assert report.complete
    (kill,) = report.kills
    assert (kill.process_count, kill.processes, kill.hit) == (2, (1,), "training")
    assert kill.steps_done == 12
    reference, killed, last = report.attempts
    assert [one.process_count for one in report.attempts] == [1, 2, 1]
    assert [(one.cause, one.exit_code) for one in killed.endings] == [
        ("given up", -signal.SIGKILL),
        ("killed", -signal.SIGKILL),
    ]
    assert [one.cause for one in (*reference.endings, *last.endings)] == ["itself", "itself"]
    assert report.hung == report.to_dict()["hung"] == 1
    assert json.loads((tmp_path / "report.json").read_text())["process_counts"] == [2, 1]
    assert any("1 of them by another kill, for they hung" in line for line in lines)


@pytest.mark.processes
def test_a_process_that_hangs_is_no_success(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = drill(made, tmp_path)
    drill_report.show(report, tmp_path)
    assert "1 HUNG for 0 s and were killed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.processes
def test_rows_of_another_process_are_found(made: Path, tmp_path: Path) -> None:
    ids, mask = drill(made, tmp_path, share="0").differences
    assert (ids.what, ids.note) == ("ids", "and 11 more")
    assert ids.where == "step 0, drilled-1, attempt 1, from slot 2 on"
    assert (mask.what, mask.note) == ("mask", "and 1 more")  # the last batch of each epoch
    assert mask.where == "step 5, drilled-1, attempt 1, from slot 2 on"


@pytest.mark.processes
def test_processes_that_take_each_others_rows_are_found(made: Path, tmp_path: Path) -> None:
    ids, mask = drill(made, tmp_path, share="$((1 - {process_index}))").differences
    assert (ids.what, mask.what) == ("ids", "mask")
    assert ids.where == "step 0, drilled-1, attempt 1, from slot 0 on"


@pytest.mark.processes
def test_a_process_that_fails_by_itself_is_named(made: Path, tmp_path: Path) -> None:
    first = "[ {process_index} = 1 ] && { echo the reason; exit 3; }"
    with pytest.raises(
        DrillError,
        match=r"exit code 3, in attempt 1 of the run drilled-1, process 1 of 2(.|\n)*the reason",
    ):
        drill(made, tmp_path, first)


@pytest.mark.parametrize(
    ("command", "counts", "message"),
    [
        (["{run_dir} {coordinator}"], (2,), r"has no \{process_index\} and no \{process_count\}"),
        (["{run_dir}"], (1,), r"has no \{coordinator\}"),
        (["{run_dir} {coordinator} {process_index} {process_count}"], (2, 0), "from 1 on, not 0"),
        (["{run_dir} {coordinator} {process_index} {process_count}"], ("2",), "not '2'"),
    ],
)
def test_a_wrong_use_is_refused_before_anything_runs(
    tmp_path: Path, command: list[str], counts: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_drill(command, tmp_path / "out", processes=counts)
    assert not (tmp_path / "out").exists()


# Whom a kill is for


@pytest.mark.parametrize("count", [1, 2, 4])
def test_kills_are_for_one_process_or_all(count: int) -> None:
    instants = [_Instant("training", step, 0.5) for step in range(60)]
    planned = _with_victims(instants, random.Random(3))
    assert [(one.aim, one.step, one.delay_seconds) for one in planned] == [
        ("training", step, 0.5) for step in range(60)
    ]
    found = Counter(one.processes(count) for one in planned)
    if count == 1:
        assert found == {(0,): 60}
        return
    assert found.pop(tuple(range(count))) == 20
    assert found[0,] == 20
    assert set(found) == {(process,) for process in range(count)}


# The command line


def test_several_processes_have_settings_that_they_can_share() -> None:
    command = resume_drill.commands(None, None, None, elastic=True)[""]
    assert str(ELASTIC) in command
    for placeholder in ("{coordinator}", "{process_index}", "{process_count}"):
        assert placeholder in command
    resume_drill.check_shares(ELASTIC, (1, 2, 3, 4, 6, 12))


@pytest.mark.parametrize(
    ("config", "counts", "message"),
    [
        ("digits", (2, 3, 4, 3, 5), r"batch_size = 128 cannot be .* among 3 or 5 processes\. Use"),
        ("elastic", (8,), r"elastic\.toml: micro_batches = 12 cannot .* among 8 processes\. Use"),
        ("elastic", (5,), "batch_size = 48 cannot .* 5 processes; micro_batches = 12 cannot"),
        ("lesson", (2,), 'final_batch = "partial" gives unequal batches'),
    ],
)
def test_a_number_that_does_not_divide_is_named_at_the_start(
    config: str, counts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resume_drill.check_shares(ROOT / "configs" / f"{config}.toml", counts)


@pytest.mark.parametrize("text", ["", "2,", "two", "2;3"])
def test_counts_are_numbers_with_commas(text: str) -> None:
    with pytest.raises(ValueError, match="numbers separated by commas, such as 2,4,1,3, not"):
        drill_job.counts_of(text)


def test_counts_are_read() -> None:
    assert drill_job.counts_of("2,4,1,3") == (2, 4, 1, 3)
    assert drill_job.counts_of(None) == ()
