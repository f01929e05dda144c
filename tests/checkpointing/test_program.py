"""Of a program that is run in a context, nothing outlives the context, whatever ends that and when."""

import contextlib
import os
import pathlib
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from loader.reading.program import Program, signals_held

pytestmark = pytest.mark.processes

#: Both the program and a child of it hold the writing end of the pipe, and listen to no signal.
SHELL = "trap '' INT TERM HUP; exec 3>{pipe}; sleep 600 & echo printed; echo begun >&3; wait"


@pytest.fixture
def pipe(tmp_path: pathlib.Path) -> Iterator[int]:
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def shell(tmp_path: pathlib.Path) -> Program:
    script = SHELL.format(pipe=shlex.quote(str(tmp_path / "pipe")))
    return Program(["bash", "-c", script], tmp_path / "output", {}, 0.001)


def wait_until_begun(pipe: int) -> None:
    assert select.select([pipe], [], [], 60)[0], "the program has not begun"
    os.set_blocking(pipe, True)
    while os.read(pipe, 1) != b"\n":
        pass


def is_gone(pipe: int) -> bool:
    """Whether nobody is left who could write into the pipe; waits for it."""
    os.set_blocking(pipe, True)
    while os.read(pipe, 100):
        pass
    return True


def python(tmp_path: pathlib.Path, code: str, **environment: str) -> Program:
    return Program([sys.executable, "-c", code], tmp_path / "output", environment, 0.001)


def test_a_program_has_its_output_its_environment_and_its_exit_code(
    tmp_path: pathlib.Path,
) -> None:
    code = "import os, sys; print('ü', os.environ['A'], 'PATH' in os.environ); sys.exit('stop')"
    with python(tmp_path, code, A="1") as program:
        while program.is_running():
            assert program.exit_code is None
        assert program.exit_code == 1
        assert program.started < program.ended
        assert not program.kill()
    assert program.tail() == "  | ü 1 True\n  | stop"
    assert program.tail(1) == "  | stop"


def test_a_kill_ends_the_program_and_its_children(tmp_path: pathlib.Path, pipe: int) -> None:
    with shell(tmp_path) as program:
        wait_until_begun(pipe)
        assert program.is_running()
        assert program.kill()
        assert is_gone(pipe)
        assert not program.is_running()
        assert not program.kill()
    assert program.exit_code == -signal.SIGKILL
    assert program.tail() == "  | printed"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, None])
def test_the_end_of_the_context_ends_the_program_and_its_children(
    error: type[BaseException] | None, tmp_path: pathlib.Path, pipe: int
) -> None:
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt), shell(tmp_path):
        wait_until_begun(pipe)
        if error:
            raise error
    assert is_gone(pipe)


def test_a_child_that_outlives_the_program_does_not_outlive_the_context(
    tmp_path: pathlib.Path, pipe: int
) -> None:
    script = f"exec 3>{shlex.quote(str(tmp_path / 'pipe'))}; sleep 600 & echo begun >&3"
    with Program(["bash", "-c", script], tmp_path / "output", {}, 0.001) as program:
        while program.is_running():
            pass
        assert program.exit_code == 0
        wait_until_begun(pipe)
        assert not program.kill()
    assert is_gone(pipe)


def test_a_signal_while_the_program_starts_leaves_no_process(
    tmp_path: pathlib.Path, pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come when the process is there and nobody knows of it yet."""

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            wait_until_begun(pipe)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), shell(tmp_path):
        raise AssertionError("not reached")
    assert is_gone(pipe)


def test_a_signal_while_the_program_is_killed_leaves_no_process(
    tmp_path: pathlib.Path, pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.killpg

    def killpg(group: int, number: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(group, number)

    with shell(tmp_path) as program:
        wait_until_begun(pipe)
        monkeypatch.setattr(os, "killpg", killpg)
        with pytest.raises(KeyboardInterrupt):
            program.kill()
        assert is_gone(pipe)
        monkeypatch.undo()


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="this system does not report it")
def test_a_program_that_is_stopped_is_seen_until_it_goes_on(
    tmp_path: pathlib.Path, pipe: int
) -> None:
    with shell(tmp_path) as program:
        wait_until_begun(pipe)
        assert not program.is_stopped()
        os.kill(program.pid, signal.SIGSTOP)
        while not program.is_stopped():
            assert program.is_running()
        assert program.is_stopped()
        os.kill(program.pid, signal.SIGCONT)
        while program.is_stopped():
            assert program.is_running()
        program.kill()
        assert not program.is_stopped()
    assert not shell(tmp_path).is_stopped()


def test_a_program_that_is_not_there_is_an_error(tmp_path: pathlib.Path) -> None:
    program = Program([str(tmp_path / "none")], tmp_path / "output", {}, 0.001)
    with pytest.raises(FileNotFoundError), program:
        raise AssertionError("not reached")
    assert program.exit_code is None
    assert not program.is_running()
    assert not program.kill()
    assert program.tail() == "  | (none)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_done_while_signals_are_held_is_done_to_its_end(number: signal.Signals) -> None:
    class ToldError(Exception):
        pass

    def tell(number: int, _: object) -> None:
        raise ToldError(number)

    done = []

    def work() -> None:
        with signals_held():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            done.append(True)

    before = signal.signal(number, tell)
    try:
        with pytest.raises(ToldError, match=str(int(number))):
            work()
        assert signal.getsignal(number) is tell
    finally:
        signal.signal(number, before)
    assert done


def test_an_error_while_signals_are_held_is_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), signals_held():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_that_are_ignored_or_left_to_the_system_are_not_held() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals_held():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_other_threads_have_no_signals_to_hold() -> None:
    done = []

    def work() -> None:
        with signals_held():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
