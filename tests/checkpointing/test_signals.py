"""Signals: the step is saved once, and the exit code says which signal it was."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import checkpointing
import loader
from checkpointing.together.signals import stop_requests

_SCRIPT = """
import os, signal, sys
import numpy as np
import checkpointing, loader

source = loader.ArraySource({"x": np.arange(11.0)})
pipeline = loader.Pipeline(source, loader.PipelineConfig(4, 17, "pad", num_epochs=None))
with (
    checkpointing.Checkpoints(sys.argv[1], pipeline, save_every=1000, keep=3) as checkpoints,
    checkpoints.stop_on_signals(),
):
    run = checkpoints.resume({"sum": np.zeros(()), "step": 0})
    state = run.train_state
    for batch in run.batches:
        state = {"sum": state["sum"] + batch["x"].sum(), "step": state["step"] + 1}
        if state["step"] == run.position.step + 7:
            os.kill(os.getpid(), int(sys.argv[2]))
        checkpoints.save(run.batches, state)
        assert state["step"] < 10_000, "the signal was lost"
"""


def _run(directory: pathlib.Path, number: signal.Signals) -> int:
    command = [sys.executable, "-c", _SCRIPT, str(directory), str(int(number))]
    return subprocess.run(command, check=False, timeout=120).returncode


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_current_step_once_and_sets_the_exit_code(
    tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    assert _run(tmp_path, number) == 128 + number
    manifest, leaves = checkpointing.load(tmp_path)
    assert manifest.step == int(leaves["/step"]) == 7
    assert _run(tmp_path, number) == 128 + number
    manifest, leaves = checkpointing.load(tmp_path)
    assert manifest.step == int(leaves["/step"]) == 14
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "14", "7"]


def test_a_second_signal_acts_as_it_did_before() -> None:
    with stop_requests([signal.SIGINT]) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == signal.SIGINT
        assert request.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_at_the_end_of_the_context() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests([signal.SIGTERM]) as request:
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert request.signal is None


def test_the_context_is_refused_outside_the_main_thread(tmp_path: pathlib.Path) -> None:
    source = loader.ArraySource({"x": np.arange(11.0)})
    pipeline = loader.Pipeline(source, loader.PipelineConfig(4, 17, "pad"))
    errors: list[BaseException] = []

    def use() -> None:
        try:
            with checkpoints.stop_on_signals():
                pass
        except ValueError as error:
            errors.append(error)

    with checkpointing.Checkpoints(tmp_path, pipeline, save_every=1, keep=1) as checkpoints:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert "main thread" in str(errors[0])


def test_a_signal_after_the_last_save_still_ends_the_run(tmp_path: pathlib.Path) -> None:
    source = loader.ArraySource({"x": np.arange(11.0)})
    pipeline = loader.Pipeline(source, loader.PipelineConfig(4, 17, "pad"))
    with checkpointing.Checkpoints(tmp_path, pipeline, save_every=1, keep=1) as checkpoints:
        run = checkpoints.resume({"w": np.zeros(1)})
        next(run.batches)
        asked = []

        def stopped() -> None:
            with checkpoints.stop_on_signals():
                asked.append(checkpoints.stop_requested)
                os.kill(os.getpid(), signal.SIGTERM)
                asked.append(checkpoints.stop_requested)

        with pytest.raises(SystemExit) as caught:
            stopped()
        assert caught.value.code == 143
        assert asked == [False, True]
        assert not checkpoints.stop_requested
        assert checkpoints.save(run.batches, run.train_state)
