"""Programs that run together: how each ended is known, whoever was killed, and none is left behind."""

import os
import pathlib
import signal
import socket
import subprocess
from typing import Any

import pytest

from checkpointing.proof.process import Programs, reserved_address
from loader.reading.program import Program

pytestmark = pytest.mark.processes


def group(tmp_path: pathlib.Path, *scripts: str) -> Programs:
    """Shells, each in the folder, where they meet by files."""
    return Programs(
        [
            Program(["bash", "-c", f"cd '{tmp_path}'; {script}"], tmp_path / f"{i}.txt", {}, 0.001)
            for i, script in enumerate(scripts)
        ]
    )


def wait_for(path: pathlib.Path, running: Programs) -> None:
    while not path.exists():
        assert running.is_running(), "it has ended too soon"


HANG = "trap '' TERM; touch begun-{}; tail -f /dev/null"
#: Ends with 3 when the file is there.
UNTIL = "touch begun-{}; until [ -e over ]; do sleep 0.01; done; exit 3"


def test_each_ends_in_its_own_way(tmp_path: pathlib.Path) -> None:
    with group(tmp_path, "exit 0", "exit 4", "kill -9 $$") as running:
        running.wait(60)
        assert not running.is_running()
        assert sorted(running.failed) == [1, 2]
        assert running.killed_at is None
        endings = running.endings()
    assert [one.exit_code for one in endings] == [0, 4, -signal.SIGKILL]
    assert {one.cause for one in endings} == {"itself"}
    assert {one.after_kill_seconds for one in endings} == {None}
    assert running.started <= min(program.ended for program in running.programs)
    assert running.ended == max(program.ended for program in running.programs)


def test_the_first_to_fail_comes_first(tmp_path: pathlib.Path) -> None:
    with group(tmp_path, UNTIL.format(0), "exit 5") as running:
        wait_for(tmp_path / "begun-0", running)
        while not running.failed:
            running.is_running()
        assert running.failed == [1]
        (tmp_path / "over").touch()
        running.wait(60)
        assert running.failed == [1, 0]


def test_others_end_after_a_kill_and_those_that_hang_are_given_up(tmp_path: pathlib.Path) -> None:
    with group(tmp_path, UNTIL.format(0), HANG.format(1), HANG.format(2)) as running:
        for number in range(3):
            wait_for(tmp_path / f"begun-{number}", running)
        assert running.kill([1])
        assert not running.kill([1]), "it is dead already"
        assert running.is_running()
        (tmp_path / "over").touch()
        while running.programs[0].exit_code is None:
            running.is_running()
        running.wait(0)
        endings = running.endings()
    assert [(one.process, one.exit_code, one.cause) for one in endings] == [
        (0, 3, "itself"),
        (1, -signal.SIGKILL, "killed"),
        (2, -signal.SIGKILL, "given up"),
    ]
    assert all(one.after_kill_seconds is not None for one in endings)


def test_a_kill_that_comes_too_late_is_none(tmp_path: pathlib.Path) -> None:
    with group(tmp_path, "exit 0", UNTIL.format(1)) as running:
        while running.programs[0].exit_code is None:
            running.is_running()
        assert not running.kill([0])
        assert running.killed_at is None
        assert running.kill([0, 1])
        assert [one.cause for one in running.endings()] == ["itself", "killed"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_none_outlives_the_context(
    tmp_path: pathlib.Path, error: type[BaseException] | None
) -> None:
    def run() -> None:
        with group(tmp_path, HANG.format(0), HANG.format(1)) as running:
            for number in range(2):
                wait_for(tmp_path / f"begun-{number}", running)
                pids.append(running.programs[number]._process.pid)  # type: ignore[union-attr]
            if error:
                raise error

    pids: list[int] = []
    if error:
        with pytest.raises(error):
            run()
    else:
        run()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


def test_where_one_cannot_start_none_is_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    first = group(tmp_path, HANG.format(0)).programs[0]
    broken = Program([str(tmp_path / "none")], tmp_path / "output", {}, 0.001)
    with pytest.raises(FileNotFoundError), Programs([first, broken]):
        raise AssertionError("not reached")
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_signal_between_two_kills_spares_nobody(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.killpg
    with group(tmp_path, HANG.format(0), HANG.format(1)) as running:
        for number in range(2):
            wait_for(tmp_path / f"begun-{number}", running)

        def killpg(process_group: int, number: int) -> None:
            if number == signal.SIGKILL:
                os.kill(os.getpid(), signal.SIGINT)
            real(process_group, number)

        monkeypatch.setattr(os, "killpg", killpg)
        with pytest.raises(KeyboardInterrupt):
            running.kill([0, 1])
        monkeypatch.undo()
        assert [program.exit_code for program in running.programs] == [-signal.SIGKILL] * 2


def test_a_reserved_address_is_for_servers_that_share_their_port() -> None:
    with reserved_address() as address, reserved_address() as other:
        assert address != other
        host, port = address.split(":")
        place = (host, int(port))
        with socket.socket() as alone, pytest.raises(OSError, match="in use"):
            alone.bind(place)
        with socket.socket() as server, socket.socket() as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(place)
            server.listen()
            client.connect(place)
            server.accept()[0].close()
