"""A terminal is the program's: of the layers below it shows what is wrong, and no more."""

import importlib.util
import logging
import os
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest

import loader
from checkpointing import Checkpoints
from checkpointing.quiet import quiet_the_layers_below

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def shown() -> Iterator[list[str]]:
    """What a program would see that has had its own lines shown, with loggers as they are at first."""
    found: list[str] = []

    class Terminal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    loggers = [logging.getLogger(name) for name in ("absl", "jax", "")]
    before = [(logger.level, logger.filters[:]) for logger in loggers]
    for logger in loggers[:2]:
        logger.setLevel(logging.NOTSET)
        logger.filters.clear()
    terminal = Terminal()
    logging.root.addHandler(terminal)
    logging.root.setLevel(logging.INFO)
    yield found
    logging.root.removeHandler(terminal)
    for logger, (level, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.filters[:] = filters


def file_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(pathlib.Path(spec.submodule_search_locations[0], "somewhere", "below.py"))


def says(file: str, level: int = logging.INFO, logger: str = "absl") -> None:
    """Logs as a line of a file does, by the logger that absl gives to all."""
    found = logging.getLogger(logger)
    if found.isEnabledFor(level):
        found.handle(found.makeRecord(logger, level, file, 1, "said", (), None))


@pytest.mark.parametrize("package", ["orbax", "grain", "tensorstore", "etils"])
def test_a_layer_below_is_not_heard_but_for_what_is_wrong(package: str, shown: list[str]) -> None:
    says(file_of(package))
    assert shown == ["said"]
    quiet_the_layers_below()
    says(file_of(package))
    assert shown == ["said"]
    for level in (logging.WARNING, logging.ERROR, logging.CRITICAL):
        says(file_of(package), level)
    assert len(shown) == 4


def test_jax_is_not_heard_but_for_what_is_wrong(shown: list[str]) -> None:
    quiet_the_layers_below()
    says("xla_bridge.py", logging.INFO, "jax._src.xla_bridge")
    assert shown == []
    says("xla_bridge.py", logging.WARNING, "jax._src.xla_bridge")
    assert shown == ["said"]


def test_a_programs_own_lines_through_absl_are_shown(shown: list[str]) -> None:
    quiet_the_layers_below()
    says(str(ROOT / "grain" / "train.py"))
    says("train.py")
    logging.getLogger("absl").info("of this file")
    assert shown == ["said", "said", "of this file"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["absl", "jax"])
def test_whoever_has_asked_for_it_is_shown_it(name: str, moment: str, shown: list[str]) -> None:
    if moment == "before":
        logging.getLogger(name).setLevel(logging.INFO)
    quiet_the_layers_below()
    if moment == "after":
        logging.getLogger(name).setLevel(logging.INFO)
    says(file_of("orbax"), logger=name)
    assert shown == ["said"]


@pytest.mark.parametrize("name", ["absl", "jax._src.dispatch"])
def test_at_debug_all_is_shown(name: str, shown: list[str]) -> None:
    logging.root.setLevel(logging.DEBUG)
    quiet_the_layers_below()
    says(file_of("orbax"), logger=name)
    assert shown == ["said"]


def test_a_level_that_is_set_stays(shown: list[str]) -> None:
    logging.getLogger("jax").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    quiet_the_layers_below()
    quiet_the_layers_below()
    assert logging.getLogger("jax").level == logging.getLogger("absl").level == logging.ERROR
    assert len(logging.getLogger("absl").filters) == 1


# A run's own lines


def a_stream() -> loader.Pipeline:
    source = loader.ArraySource({"x": np.arange(40)})
    return loader.Pipeline(source, loader.PipelineConfig(4, 17, final_batch="pad", num_epochs=1))


def test_a_run_tells_where_it_begins_what_it_saves_and_what_it_deletes(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with Checkpoints(tmp_path / "run", a_stream(), 4, 1) as checkpoints:
            run = checkpoints.resume({"w": np.zeros(3)})
            for _ in run.batches:
                checkpoints.save(run.batches, run.train_state)
                checkpoints.wait()
    assert {record.name for record in caplog.records} == {
        "checkpointing.checkpoints",
        "checkpointing.writer",
    }
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    took = r"\d+(\.\d)? m?s"
    patterns = [
        rf"a new run of 40 records in batches of 4, 1 epoch, 10 steps; data identified in {took}",
        rf"step 4 saved: [\d.]+ kB in \d+ files; the loop waited {took}, {took} in all",
        rf"step 8 saved: [\d.]+ kB in \d+ files; the loop waited {took}, {took} in all",
        rf"step 4 deleted in {took}, 1 stay",
        rf"resumed at step 8, epoch 0, offset 32; data identified in {took}, [\d.]+ kB in \d+ files verified in {took}, {took} in all",
    ]
    assert len(caplog.messages) == len(patterns)
    for message, pattern in zip(caplog.messages, patterns, strict=True):
        assert re.fullmatch(f"{re.escape(str(tmp_path / 'run'))}: {pattern}", message), message


def test_resume_tells_how_far_reading_has_come(tmp_path: pathlib.Path) -> None:
    told: list[loader.Progress] = []
    for _ in range(2):
        told.clear()
        with Checkpoints(tmp_path, a_stream(), 1, 1) as checkpoints:
            run = checkpoints.resume({"w": np.zeros(3)}, progress=told.append)
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)
    ends = {one.what: one for one in told if one.ended}
    assert list(ends) == ["fingerprint of ArraySource", "check of step 1"]
    assert ends["fingerprint of ArraySource"].done == 40 * 16
    assert ends["check of step 1"].unit == "bytes"
    assert ends["check of step 1"].done == ends["check of step 1"].total


def test_resume_tells_of_the_stream(tmp_path: pathlib.Path) -> None:
    told: list[loader.StreamStats] = []
    with Checkpoints(tmp_path, a_stream(), 1, 1) as checkpoints:
        run = checkpoints.resume({"w": np.zeros(3)}, on_stats=told.append, stats_every=4)
        list(run.batches)
    assert [(stats.step, stats.records) for stats in told] == [(4, 16), (8, 16), (10, 8)]


# Terminals of whole programs

#: What most training scripts do, once with logging as it comes and once with its own lines shown.
SCRIPT = """
import logging
import sys
import types

if "shown" in sys.argv:
    logging.basicConfig(level=logging.INFO)

import jax.numpy as jnp
import numpy as np

import checkpointing
import loader

if "shown" not in sys.argv:
    importing_has_left = [logging.getLogger(name) for name in ("absl", "jax", "")]
    logging.getLogger("jax").handlers.clear()  # of its own, before JAX 0.10
    print([(one.level, one.filters, one.handlers) for one in importing_has_left])


def doubled(batch):
    return {**batch, "x": batch["x"] * 2}


def main(workers):
    source = loader.ArraySource({"x": np.arange(40.0)})
    config = loader.PipelineConfig(4, seed=17, final_batch="pad", num_epochs=workers + 1)
    pipeline = loader.Pipeline(source, config, doubled)
    with checkpointing.Checkpoints(f"run-{workers}", pipeline, save_every=4, keep=1) as checkpoints:
        run = checkpoints.resume({"w": jnp.zeros(3)}, workers=workers)
        for batch in run.batches:
            checkpoints.save(run.batches, {"w": run.train_state["w"] + batch["x"].sum()})
    print("trained", run.batches.position.step)


if __name__ == "__main__":
    main(workers=int(sys.argv[1]))
"""


def terminal_of(tmp_path: pathlib.Path, *arguments: str) -> tuple[list[str], list[str]]:
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.processes
def test_a_normal_run_shows_what_the_program_prints(tmp_path: pathlib.Path) -> None:
    untouched: object = [(0, [], []), (0, [], []), (logging.WARNING, [], [])]
    assert terminal_of(tmp_path, "0") == ([str(untouched), "trained 10"], [])


@pytest.mark.processes
def test_a_run_with_its_own_lines_shown_shows_ours_beside(tmp_path: pathlib.Path) -> None:
    printed, logged = terminal_of(tmp_path, "1", "shown")
    assert printed == ["trained 20"]
    found = [re.match(r"INFO:(loader|checkpointing)\.([\w.]+):", line) for line in logged]
    assert all(found), logged
    modules = [one[2] for one in found if one]
    assert modules.count("reading.workers") == 1
    assert modules.count("checkpoints") == 1
    assert modules.count("writer") >= 5 + 4  # five saves, and deletions


def test_a_module_that_a_program_has_put_together_keeps_nobody_from_opening(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stand-ins for packages in tests are: without a specification of where they come from."""
    monkeypatch.setitem(sys.modules, "tensorstore", types.ModuleType("tensorstore"))
    quiet_the_layers_below()
    says(file_of("orbax"))
    assert shown == []
