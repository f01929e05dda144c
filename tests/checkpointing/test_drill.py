"""The drill finds nothing in a script that resumes exactly, and each fault that is planted in one."""

import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from checkpointing import DrillError, DrillReport, run_drill, step_log
from checkpointing.proof import drill
from checkpointing.proof.compare import FinalState
from checkpointing.proof.drill import _plan, _Rhythm
from checkpointing.proof.report import Attempt
from loader import Position
from scripts import resume_drill
from scripts.training.formats import FORMATS

ROOT: Final = Path(__file__).resolve().parents[2]
CLI: Final = (sys.executable, str(ROOT / "scripts" / "resume_drill.py"))

#: Trains 36 steps in NumPy and waits for each save, so that there is time for a kill.
SCRIPT: Final = """
import os, sys, time
import numpy as np
import checkpointing, loader

run_dir, fault = sys.argv[1:]
log = None
if fault == "order":
    log = checkpointing.step_log(os.environ.pop("REGRAIN_STEP_LOG"))
source = loader.ArraySource({"x": np.arange(22.0)}, ids=[f"record {i}" for i in range(22)])
config = loader.PipelineConfig(batch_size=4, seed=1, num_epochs=6, final_batch="pad")
state = {"weight": np.zeros(3), "momentum": np.zeros(3)}
with checkpointing.Checkpoints(run_dir, loader.Pipeline(source, config), 2, 3) as checkpoints:
    run = checkpoints.resume(state)
    state, position = run.train_state, run.position
    if fault == "fails at resume" and position.step:
        raise SystemExit("no more")
    if fault == "momentum" and position.step:
        state["momentum"] = np.zeros(3)
    if fault == "skip" and position.step:
        next(run.batches)
    if fault == "seek" and position.step:
        run.batches.set_state({**run.batches.get_state(), "step": position.step + 1})
    for batch in run.batches:
        if fault == "order":
            shuffled = np.random.default_rng(time.time_ns()).permutation(4)
            batch = {name: array[shuffled] for name, array in batch.items()}
            log(position, batch)
            position = run.batches.position
        weighted = (batch["x"] * batch["mask"])[:3] + np.sum(batch["x"] ** 2)
        state["momentum"] = 0.9 * state["momentum"] + 0.01 * weighted
        state["weight"] = state["weight"] - state["momentum"]
        if fault == "end" and run.batches.position.step == 36:
            state["weight"][1] = time.time_ns()
        checkpoints.save(run.batches, state)
        checkpoints.wait()
"""

BASH: Final = ("bash", "-c")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def command(script: Path, fault: str) -> list[str]:
    return [sys.executable, str(script), "{run_dir}", fault]


def drill_cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *map(str, arguments)],
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def good(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A drill of the script without a fault, through the command line: its folder and its output."""
    out = tmp_path_factory.mktemp("good")
    done = drill_cli("--kills", "2", "--out", out, "--", *command(script, "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


# A script that resumes exactly


@pytest.mark.processes
def test_a_script_that_resumes_exactly_has_no_difference(good: tuple[Path, str]) -> None:
    report = json.loads((good[0] / "report.json").read_text())
    assert report["differences"] == []
    assert report["same"]
    assert report["complete"]
    assert report["num_steps"] == 36
    assert len(report["kills"]) == report["kills_asked"] == 2
    reference, drilled = report["final_states"].values()
    assert reference == drilled
    assert reference["step"] == 36


@pytest.mark.processes
def test_the_report_tells_each_kill_as_it_was(good: tuple[Path, str]) -> None:
    out = good[0]
    report = json.loads((out / "report.json").read_text())
    attempts = {(one["run"], one["number"]): one for one in report["attempts"]}
    for kill in report["kills"]:
        killed = attempts[kill["run"], kill["attempt"]]
        after = attempts[kill["run"], kill["attempt"] + 1]
        assert (kill["hit"] == "start-up") == (killed["steps_done"] is None)
        assert (kill["hit"] == "save") == (kill["saving"] is not None)
        assert after["checkpoint"] == kill["checkpoint"] == kill["resumed_at"]
        assert kill["replayed"] == after["replayed"] == kill["steps_done"] - kill["checkpoint"]
        lines = (out / after["log"]).read_text().splitlines()
        assert json.loads(lines[0])["step"] == kill["resumed_at"]
    assert report["replayed"] == sum(kill["replayed"] for kill in report["kills"])


@pytest.mark.processes
def test_the_table_and_the_picture_are_made(good: tuple[Path, str]) -> None:
    out, printed = good
    assert "IDs and masks of all 36 steps: equal" in printed
    assert "final train state, 2 leaves at step 36: bit for bit equal" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()][:2] == ["1", "2"]
    assert (out / "drill.png").read_bytes().startswith(b"\x89PNG")


# Planted faults


def fault_report(script: Path, fault: str, out: Path) -> DrillReport:
    report = run_drill(command(script, fault), out, kills=1, seed=1)
    assert report.kills[0].checkpoint > 0, "the fault would not show: nothing was resumed"
    assert not report.to_dict()["same"]
    return report


def whats(report: DrillReport) -> list[str]:
    return [one.what for one in report.differences]


def test_an_order_that_depends_on_the_time_is_found(script: Path, tmp_path: Path) -> None:
    report = fault_report(script, "order", tmp_path)
    first = report.differences[0]
    assert first.what == "ids"
    assert "drilled-1, attempt 1" in first.where  # at step 0, unless the same came first by chance
    assert "record " in first.reference
    assert "record " in first.drilled
    assert "/weight" in whats(report)


def test_momentum_that_is_dropped_at_resume_is_found(script: Path, tmp_path: Path) -> None:
    report = fault_report(script, "momentum", tmp_path)
    assert sorted(whats(report)) == ["/momentum", "/weight"]


def test_a_batch_that_is_dropped_at_resume_is_found(script: Path, tmp_path: Path) -> None:
    """It is in the log, as it was delivered: only the state tells that nothing was trained on it."""
    report = fault_report(script, "skip", tmp_path)
    assert sorted(whats(report)) == ["/momentum", "/weight"]


def test_an_iterator_that_is_moved_after_resume_is_found(script: Path, tmp_path: Path) -> None:
    report = fault_report(script, "seek", tmp_path)
    step = report.kills[0].checkpoint
    found = {one.what: one for one in report.differences}
    assert found["sequence"].where == f"step {step + 1}, drilled-1, attempt 2"
    assert found["sequence"].reference == f"step {step} next"
    assert found["place"].where == f"step {step + 1}, drilled-1, attempt 2"
    assert {"ids", "/weight"} <= set(found)


@pytest.mark.processes
def test_a_difference_of_the_final_state_alone_is_found_by_the_command_line(
    script: Path, tmp_path: Path
) -> None:
    done = drill_cli("--kills", "1", "--out", tmp_path, "--", *command(script, "end"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "✓ IDs and masks of all 36 steps: equal" in done.stdout
    assert "✗ final train state" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    (found,) = report["differences"]
    assert (found["what"], found["note"]) == ("/weight", "1 of 3 elements")


# Formats


@pytest.mark.processes
def test_each_format_is_drilled_and_all_give_the_same(tmp_path: Path) -> None:
    lesson, config = (ROOT / "configs" / "lesson.toml").read_text("utf-8"), tmp_path / "lesson.toml"
    config.write_text(lesson.replace("num_epochs = 2", "num_epochs = 10"), "utf-8")
    formats = ("--format", "array", "--format", "npy")
    done = drill_cli("--kills", "1", "--config", config, "--out", tmp_path / "out", *formats)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("array", "npy"):
        report = json.loads((tmp_path / "out" / name / "report.json").read_text())
        assert report["same"]
        assert report["complete"]
        assert report["command"][-2:] == ["--format", name]
    assert done.stdout.count("IDs and masks of all 30 steps: equal") == 2
    assert "IDs and masks of all steps in array, npy: equal" in done.stdout
    assert "final train state in array, npy: equal" in done.stdout


@pytest.mark.parametrize("planted", ["nothing", "stream", "state"])
def test_a_format_that_gives_something_else_is_found(
    tmp_path: Path, planted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {}
    for name in ("array", "npy", "zip"):
        here = planted if name == "zip" else "nothing"
        reports[name] = fake_report("7" if here == "state" else "5")
        (tmp_path / name).mkdir()
        log = step_log(tmp_path / name / "steps.jsonl")
        log(Position(), {"id": np.array([3, 4 + (here == "stream")]), "mask": np.ones(2, bool)})
    assert resume_drill.show_formats(reports, tmp_path) == (planted == "nothing")
    printed = capsys.readouterr().out
    found = int(planted != "nothing")
    assert printed.count("DIFFERENT") == printed.count("not the same in array and zip") == found
    assert "array and npy" not in printed


def fake_report(sha256: str) -> DrillReport:
    attempt = Attempt("reference", 1, 0, 1, 0, 0.5, 0, 60, 0, "steps.jsonl")
    states = {"reference": FinalState(60, 3, sha256)}
    return DrillReport((), 0, 1, (), (attempt,), 60, states, (), {}, 1.0)


@pytest.mark.parametrize(
    ("given", "folders"),
    [(None, [""]), (["npy"], [""]), (["npy", "array", "npy"], ["npy", "array"])],
)
def test_several_formats_have_a_folder_each(given: list[str] | None, folders: list[str]) -> None:
    assert list(resume_drill.commands(None, None, given)) == folders


def test_all_formats_are_those_that_there_are() -> None:
    assert list(resume_drill.commands(None, None, ["all"])) == list(FORMATS)


# Scripts that cannot be drilled, and wrong use


def test_a_script_that_fails_after_a_kill_ends_the_drill_with_its_last_lines(
    script: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        DrillError, match=r"exit code 1, in attempt 2 of the run drilled-1(.|\n)*no more"
    ):
        run_drill(command(script, "fails at resume"), tmp_path, kills=1, seed=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("echo the reason; exit 3 # {run_dir}", r"exit code 3, in attempt 1(.|\n)*\| the reason"),
        ("kill -KILL $$ # {run_dir}", "exit code -9"),
        ("true {run_dir}", "delivered no batch"),
        ('cp "{log}" "$REGRAIN_STEP_LOG" # {run_dir}', "saved no checkpoint"),
        ('cat "{log}" "{log}" >"$REGRAIN_STEP_LOG" # {run_dir}', "did not deliver steps 0, 1, 2"),
        (
            """cp -r "{reference}/run" "{run_dir}"
            case "{run_dir}" in *reference*) cp "{log}" "$REGRAIN_STEP_LOG"; esac""",
            "ended before it could be killed",
        ),
    ],
)
def test_a_script_that_cannot_be_drilled_is_told_why(
    good: tuple[Path, str], tmp_path: Path, shell: str, message: str
) -> None:
    reference = good[0] / "reference"
    shell = shell.replace("{reference}", str(reference))
    shell = shell.replace("{log}", str(reference / "steps-1.jsonl"))
    with pytest.raises(DrillError, match=message):
        run_drill([*BASH, shell], tmp_path, kills=1)


@pytest.mark.processes
def test_kills_that_came_too_late_are_counted(good: tuple[Path, str], tmp_path: Path) -> None:
    """The script can be killed once; after that it ends before any kill, in this run and two more."""
    reference = good[0] / "reference"
    shell = f"""
        [ -e "{{run_dir}}" ] && exit
        cp -r "{reference}/run" "{{run_dir}}"
        case "{{run_dir}}" in
            *reference/run) cp "{reference}/steps-1.jsonl" "$REGRAIN_STEP_LOG" ;;
            *drilled-1/run) cp "{reference}/steps-1.jsonl" "$REGRAIN_STEP_LOG"; tail -f /dev/null ;;
        esac
    """
    lines: list[str] = []
    report = run_drill([*BASH, shell], tmp_path, kills=2, progress=lines.append)
    assert [kill.run for kill in report.kills] == ["drilled-1"]
    assert not report.complete
    assert list(report.final_states) == ["reference", "drilled-1", "drilled-2", "drilled-3"]
    # The run that was killed has delivered every step; the other two say nothing.
    assert whats(report) == ["missing step", "missing step"]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["python", "train.py"], 1), r"has no \{run_dir\}"),
        ((["python", "{run_dir}"], 0), "at least 1"),
    ],
)
def test_a_bad_argument_is_refused(
    tmp_path: Path, arguments: tuple[list[str], int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_drill(arguments[0], tmp_path / "out", kills=arguments[1])
    assert not (tmp_path / "out").exists()


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="no-such-program cannot be started: No such file"):
        run_drill(["no-such-program", "{run_dir}"], tmp_path)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty"):
        run_drill(["true", "{run_dir}"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="is a file"):
        run_drill(["true", "{run_dir}"], tmp_path / "thesis.txt")


def test_the_folder_of_a_drill_is_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DrillError, match="delivered no batch"):
            run_drill(["true", "{run_dir}"], tmp_path)
        (tmp_path / "report.json").write_text("{}")
        (tmp_path / "reference" / "run").mkdir()
        (tmp_path / "notes.txt").write_text("my own")
    with pytest.raises(DrillError, match="delivered no batch"):
        run_drill(["true", "{run_dir}"], tmp_path)
    assert not (tmp_path / "report.json").exists()
    assert not (tmp_path / "reference" / "run").exists()
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kills", "0"], "greater than or equal to 1"),
        (["--config", "x.toml", "--", "true", "{run_dir}"], "--config is for scripts/train.py"),
        (["--format", "npy", "--", "true", "{run_dir}"], "--format is for scripts/train.py"),
        (["--format", "zip"], "'format' must be one of"),
        (["--", "false", "{run_dir}"], "exit code 1"),
    ],
)
def test_the_command_line_ends_with_2_where_there_is_no_result(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = drill_cli("--out", tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stdout + done.stderr


@pytest.mark.processes
def test_help_states_the_exit_codes() -> None:
    done = drill_cli("--help")
    assert (
        "Exit codes:\n      0  no difference\n      1  a difference\n      2  wrong use"
        in done.stdout
    )


@pytest.mark.processes
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_drill_leaves_no_process_behind(
    tmp_path: Path, ending: signal.Signals, code: int
) -> None:
    """The script and a child of it hold the writing end of a pipe: its end tells that both are gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    shell = f"exec >{shlex.quote(str(pipe))}; tail -f /dev/null & echo {{run_dir}}; wait"
    arguments = [*CLI, "--out", str(tmp_path / "out"), "--", *BASH, shell]
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with (
        os.fdopen(descriptor) as reader,
        subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as drill,
    ):
        assert select.select([descriptor], [], [], 60)[0], "the script has not begun"
        os.set_blocking(descriptor, True)
        assert reader.readline().endswith("reference/run\n")
        drill.send_signal(ending)
        assert reader.read() == ""
        assert drill.wait() == code


# The instants


RHYTHM: Final = _Rhythm(5.0, 2.0, 0.01, 0.05, 290, 300)


@pytest.mark.parametrize("kills", [1, 2, 6, 20])
def test_instants_are_spread_over_the_whole_run(kills: int) -> None:
    plan = _plan(kills, RHYTHM, random.Random(3))
    for i, instant in enumerate(plan):
        assert i * 300 // kills <= max(instant.step, 290 if instant.aim == "save" else 0)
        assert instant.step <= (i + 1) * 300 // kills
    aims = [instant.aim for instant in plan]
    assert aims.count("save") * 2 >= kills - 1
    assert kills < 3 or set(aims) == {"save", "training", "start-up"}


def test_instants_are_those_of_the_seed() -> None:
    plans: list[Any] = [_plan(6, RHYTHM, random.Random(seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_a_folder_in_which_a_drill_is_under_way_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with drill._prepared(out):
        (out / "reference").mkdir()
        with pytest.raises(ValueError, match="another drill is under way"):
            run_drill(["true", "{run_dir}"], out)
        assert (out / "reference").is_dir()


def test_only_a_drills_own_runs_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with drill._prepared(out):
        for name in ("drilled-1", "drilled-notes", "reference"):
            (out / name).mkdir()
    with drill._prepared(out):
        assert sorted(path.name for path in out.iterdir()) == [".regrain-drill", "drilled-notes"]
