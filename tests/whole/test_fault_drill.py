"""The fault drill's command line: what it reports, how it ends, and that it leaves nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from scripts import fault_drill
from scripts.faults import matrix
from scripts.faults.conditions import CONDITIONS

ROOT: Final = Path(__file__).resolve().parents[2]
CLI: Final = (sys.executable, str(ROOT / "scripts" / "fault_drill.py"))
LIMIT_SECONDS: Final = 300


def environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "140", "NO_COLOR": "1"}


def drill(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )


@pytest.mark.processes
def test_kills_are_reported_and_nothing_else_stays(tmp_path: Path) -> None:
    done = drill("--only", "kills", "--kills", "1", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "0 records lost, 0 repeated" in done.stdout
    assert "nothing was lost or changed" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]
    report = json.loads((tmp_path / "out/report.json").read_text("utf-8"))
    assert report["ok"] is True
    assert len(report["kills"]["kills"]) == sum(report["kills"]["hits"].values()) == 1
    assert (report["kills"]["lost"], report["kills"]["repeated"]) == (0, 0)
    markdown = drill("--markdown", "--out", tmp_path / "out")
    assert markdown.returncode == 0
    lines = markdown.stdout.strip().splitlines()
    assert lines[:2] == ["| fault | how | outcome |", "| --- | --- | --- |"]
    assert lines[2].startswith("| 1 SIGKILLs | hit: 1 ")


def cell(**changes: Any) -> dict[str, Any]:
    usual = {"where": "iterator", "damage": "item removed", "older_step": True, "detail": ""}
    return {**usual, "reader": "r", "outcome": matrix.OLDER_USED, "ok": True, **changes}


def a_report(**parts: Any) -> dict[str, Any]:
    return {"ok": True, "seconds": 1.0, **parts}


def test_the_table_of_damages_counts_the_outcomes_of_each_reader(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells = [
        cell(),
        cell(outcome=matrix.REFUSED, older_step=False),
        cell(reader="plain", outcome=matrix.DIFFERENT),
        cell(reader="plain", outcome=matrix.IDENTICAL),
        cell(damage="a | b", outcome=matrix.DIFFERENT, ok=False),
    ]
    report = a_report(corruption=cells)
    rows = fault_drill.corruption_rows(report)
    assert rows == [
        (("item removed", "2", "2 detected", "1 SILENTLY DIFFERENT, 1 no effect"), True),
        (("a | b", "1", "1 SILENTLY DIFFERENT"), False),
    ]
    fault_drill.print_markdown(report)
    printed = capsys.readouterr().out
    assert "| damage | tries | r | plain |\n| --- | --- | --- | --- |\n" in printed
    assert "| a \\| b | 1 | 1 SILENTLY DIFFERENT |" in printed


def test_the_first_faults_after_kills_are_shown_and_the_others_counted() -> None:
    kills = {"kills": [], "hits": {}, "lost": 1, "repeated": 0, "runs": 1}
    kills |= {"final_states_equal": False, "faults": [f"fault {i}" for i in range(8)]}
    rows = fault_drill.kill_rows(a_report(kills=kills))
    assert [texts[2] for texts, ok in rows[1:] if not ok] == [
        *(f"fault {i}" for i in range(5)),
        "3 more in report.json",
    ]
    assert "1 records lost" in rows[0][0][2]
    assert "DIFFERENT" in rows[0][0][2]
    assert rows[0][1] is False


def test_a_fault_that_changed_something_ends_with_1_and_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = matrix.Cell("f", "removed", True, "r", matrix.DIFFERENT, "", ok=False)
    monkeypatch.setattr(matrix, "corruption_matrix", lambda *_: iter([bad]))
    with pytest.raises(SystemExit) as ended:
        fault_drill.app(["--only", "corruption", "--out", str(tmp_path)])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "SILENTLY DIFFERENT" in printed
    assert "SOMETHING WAS LOST OR CHANGED" in printed
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["ok"] is False


def test_a_condition_that_could_not_be_tried_is_said_and_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts.faults.children import Outcome

    def skipped(work: Path) -> Outcome:
        return Outcome("disk full", "a tmpfs", "skipped: no mount", None)

    monkeypatch.setattr(fault_drill, "CONDITIONS", (skipped,))
    with pytest.raises(SystemExit) as ended:
        fault_drill.app(["--only", "conditions", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "skipped: no mount" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kills", "0"], "--kills"),
        (["--only", "floods"], "--only"),
        (["--nope"], "--nope"),
        (["--markdown", "--out", "nowhere"], "nowhere/report.json"),
        (["--only", "kills", "--out", "file"], "file"),
    ],
)
def test_wrong_use_ends_with_2_and_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    done = drill(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.processes
def test_help_tells_of_the_parts_and_the_exit_codes() -> None:
    done = drill("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for word in ("KILLS:", "CORRUPTION:", "CONDITIONS:", "Exit codes: 0,", "--markdown"):
        assert word in text


def test_every_condition_says_what_it_is() -> None:
    assert len({condition.__name__ for condition in CONDITIONS}) == len(CONDITIONS)
    assert all(condition.__doc__ for condition in CONDITIONS)


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                number = int(path.parent.name)
                found += [number, *children(number)]
    return found


@contextlib.contextmanager
def running(out: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [*CLI, "--only", "kills", "--kills", "50", "--out", str(out)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_drill_leaves_no_process_and_no_file(
    ending: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running(tmp_path) as process:
        limit = time.monotonic() + LIMIT_SECONDS
        while not list(tmp_path.glob("work-*/reference/run/*")) and time.monotonic() < limit:
            time.sleep(0.01)
        below = children(process.pid)
        assert below
        process.send_signal(ending)
        assert process.wait(LIMIT_SECONDS) == code
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []
