"""A contender's process obeys, says when it fails, and is gone at the end."""

import contextlib
import itertools
import os
import signal
from pathlib import Path

import pytest

from scripts.benchmarks.processes import Crew, Member, timed_window
from scripts.benchmarks.rounds import QUICK, Outcome, Run
from scripts.benchmarks.workloads import Workload, make_data

pytestmark = pytest.mark.processes

WORKLOAD = Workload("records", "records", 600, "image", "uint8", (8,), 256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(WORKLOAD, tmp_path)
    return tmp_path


def test_a_process_opens_checks_measures_and_closes(folder: Path) -> None:
    with contextlib.closing(Crew(folder)) as crew:
        (member,) = crew.members(["numpy take"]).values()
        assert crew.members(["numpy take"]) == {"numpy take": member}
        for _ in range(2):
            member.ask("open", workload=WORKLOAD, folder=folder, setting="")
            assert member.ask("check") == []
            records, seconds = member.ask("window", seconds=0.001)
            assert records % WORKLOAD.num_records == 0 < records
            assert seconds >= 0.001
            member.ask("close")
        process = member._process
        pid = process.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_fails_in_a_process_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = folder / "gone"
    with (
        Member("numpy take", folder) as member,
        pytest.raises(RuntimeError, match="the process of numpy take ended in 'open'"),
    ):
        member.ask("open", workload=WORKLOAD, folder=gone, setting="")
    assert "FileNotFoundError" in capfd.readouterr().err


def test_a_killed_process_is_named(folder: Path) -> None:
    with Member("numpy take", folder) as member:
        member.ask("ready")
        assert member._process.pid is not None
        os.kill(member._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="numpy take ended"):
            member.ask("ready")


def test_a_process_does_not_end_at_ctrl_c_by_itself(folder: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with Member("numpy take", folder) as member:
        assert member._process.pid is not None
        os.kill(member._process.pid, signal.SIGINT)
        member.ask("ready")
    assert signal.getsignal(signal.SIGINT) is handler
    assert os.environ.get("TMPDIR") != str(folder)


def test_who_delivers_something_else_is_not_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Member("numpy take", folder) as member:
        ask = member.ask
        monkeypatch.setattr(
            member, "ask", lambda what, **given: ["no"] if what == "check" else ask(what, **given)
        )
        run = Run(Outcome(WORKLOAD), {"numpy take": member}, folder, QUICK, lambda _: None)
        with pytest.raises(RuntimeError, match="numpy take delivered something else than the data"):
            run.measure()


def test_an_epoch_of_another_length_is_an_error() -> None:
    batches = itertools.cycle([{"label": range(256)}, {"label": range(256)}, {"label": range(87)}])
    with pytest.raises(RuntimeError, match="1 epochs delivered 599 records"):
        timed_window(batches, WORKLOAD, 0.0)
