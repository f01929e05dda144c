"""The benchmark works, says under which conditions, and leaves nothing behind, however it ends.

No test looks at how fast anything is.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.benchmarks import loading

pytestmark = pytest.mark.processes

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = ROOT / "scripts" / "benchmark.py"
#: Those that every environment has; the others have tests of their own.
CONTENDERS: Final = ("numpy take", "regrain", "grain per record", "grain per batch")


def command(*arguments: str | Path) -> list[str]:
    chosen = [part for name in CONTENDERS for part in ("--contender", name)]
    return [sys.executable, str(SCRIPT), "--only", "loading", *chosen, *map(str, arguments)]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One quick run over all workloads: its output, report, page, and what it left in TMPDIR."""
    folder, temporary = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("tmp")
    out, page = folder / "report.json", folder / "page.md"
    done = subprocess.run(
        command("--quick", "--json", out, "--markdown", page),
        cwd=ROOT,
        env=environment(temporary),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return {
        "stdout": done.stdout,
        "report": json.loads(out.read_text("utf-8")),
        "page": page.read_text("utf-8"),
        "left": list(temporary.iterdir()),
    }


def test_a_run_measures_each_contender_on_each_workload(run: dict[str, Any]) -> None:
    data = run["report"]["sections"]["loading"]["data"]
    assert tuple(data) == loading.WORKLOADS
    for name, outcome in data.items():
        assert tuple(outcome["windows"]) == CONTENDERS, name
        for windows in outcome["windows"].values():
            assert len(windows) == 2
            assert all(window["rate"] > 0 for window in windows)
    assert min(data["mapped-warm"]["resident"]) > 0.9
    for window in data["training"]["windows"]["regrain"]:
        assert 0 < window["wait"] < window["awaited"]


def test_a_run_holds_what_it_got_against_the_targets(run: dict[str, Any]) -> None:
    targets = {target["name"]: target for target in run["report"]["targets"]}
    assert len(targets) == 10
    assert targets["records: regrain / better bare gather"]["wanted"] == ">= 0.85"
    assert targets["records: regrain / fastest peer loader"]["wanted"] == ">= 5"
    assert targets["records: regrain / grain per record"]["wanted"] == ">= 150"
    for target in targets.values():
        assert target["section"] == "loading"
        assert target["met"] or target["why"]


def test_a_run_tells_everything_that_one_must_know(run: dict[str, Any]) -> None:
    report = run["report"]
    told = report["sections"]["loading"]["conditions"]
    for condition in (*loading.WORKLOADS, "processes", "windows", "clock", "left out", "check"):
        assert told[condition] in run["stdout"]
        assert told[condition] in run["page"]
    assert {"python", "regrain", "grain", "numpy", "jax"} <= set(report["versions"])
    assert report["machine"]["cores usable"] >= 1
    assert report["command"] in run["page"]
    assert report["command"].startswith("scripts/benchmark.py --only loading --contender")
    for text in (run["stdout"], run["page"]):
        assert "This was --quick: the figures mean nothing." in text


def test_a_run_leaves_no_file_behind(run: dict[str, Any]) -> None:
    assert run["left"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_all_its_processes_and_files(
    tmp_path: Path, number: signal.Signals
) -> None:
    started = subprocess.Popen(
        command("--workload", "records"),  # takes much longer than anybody waits here
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("bench-*/records/*.npy")):
        assert started.poll() is None
        time.sleep(0.01)
    os.killpg(started.pid, number)  # as a terminal does: everybody gets it
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 128 + number
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    wait_for_the_end_of_the_group(started.pid)


def wait_for_the_end_of_the_group(group: int) -> None:
    """Fails if somebody of a process group stays; multiprocessing's tracker ends a moment later."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("a process of the benchmark is still there")


def test_help_teaches() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for text in ("scripts/benchmark.py --quick", "--json", "--markdown", "Exit codes"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "speed"], 2, "'speed' is none of loading"),
        (["--workload", "words"], 2, "'words' is none of records, mapped-warm"),
        (["--contender", "me"], 2, "'me' is none of numpy fancy"),
        (["--mapped-gib", "0"], 2, "--mapped-gib"),
        (["--json", "gone/report.json"], 1, "there is no folder gone"),
        (["--markdown", "gone/page.md"], 1, "there is no folder gone"),
    ],
)
def test_a_refusal_comes_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == code
    assert message in capsys.readouterr().err
