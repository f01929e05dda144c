"""The examples, as a reader runs them: they resume bit for bit, and print nothing but their own lines."""

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

import checkpointing
import loader

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "examples"

#: Runs an example that saves at one step, has this on disk, and is killed at another.
KILLED: Final = """
import os, runpy, signal, sys
import checkpointing

saved, killed, *sys.argv = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
save = checkpointing.Checkpoints.save

def save_or_die(checkpoints, batches, state, *, force=False):
    if batches.position.step == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = save(checkpoints, batches, state, force=force or batches.position.step == saved)
    if batches.position.step == saved:
        checkpoints.wait()
    return begun

checkpointing.Checkpoints.save = save_or_die
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Steps(NamedTuple):
    """At which steps a run saves, is killed, and ends."""

    saved: int
    killed: int
    end: int


#: The language model evaluates at step 50, which is to come between batches of the resumed run.
TRAINED: Final = {
    "plain_jax": Steps(4, 7, 12),
    "flax_nnx": Steps(4, 7, 12),
    "flax_linen": Steps(4, 7, 12),
    "equinox_mlp": Steps(4, 7, 12),
    "token_lm": Steps(45, 48, 52),
}
OWN_LINE: Final = re.compile(r"(step \d+: )?(loss|accuracy|perplexity) \d+\.\d+( on [\w ]+)?")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A reader's: JAX is as lenient as it comes. What one run of an example compiles, the next has."""
    strict = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {
        **{name: value for name, value in os.environ.items() if name not in strict},
        "PYTHONPATH": str(ROOT),
        # Before 0.10, XLA complains of what it reads from there.
        **(cache if jax.__version_info__ >= (0, 10) else {}),
    }


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def differing_leaves(one: pathlib.Path, other: pathlib.Path) -> set[str]:
    """Paths of the leaves of two runs' newest checkpoints that are not the same bits."""
    (manifest, a), (other_manifest, b) = (checkpointing.load(run) for run in (one, other))
    assert manifest.position == other_manifest.position
    return {path for path in a.keys() | b.keys() if raw(a.get(path)) != raw(b.get(path))}


def raw(leaf: Any) -> tuple[Any, ...] | None:
    return None if leaf is None else (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes())


@pytest.mark.processes
@pytest.mark.parametrize("name", TRAINED)
def test_a_killed_run_goes_on_and_ends_as_one_that_was_not(
    name: str, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    steps, whole, stopped = TRAINED[name], tmp_path / "whole", tmp_path / "stopped"
    example = [sys.executable, str(FOLDER / f"{name}.py")]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    env = environment
    reference = run(*example, str(whole), str(steps.end))
    assert (reference.returncode, reference.stderr) == (0, "")
    lines = reference.stdout.splitlines()
    assert all(OWN_LINE.fullmatch(line) for line in lines)
    assert len(lines) == 1 + (steps.end > 50)

    killer = [example[0], "-c", KILLED, str(steps.saved), str(steps.killed)]
    killed = run(*killer, example[1], str(stopped), str(steps.end))
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, "")

    log = tmp_path / "steps.jsonl"
    env = {**environment, "REGRAIN_STEP_LOG": str(log)}
    resumed = run(*example, str(stopped), str(steps.end))
    assert (resumed.returncode, resumed.stderr) == (0, "")
    seen = [delivery.position.step for delivery in checkpointing.read_step_log(log)]
    assert seen == list(range(steps.saved, steps.end))
    assert resumed.stdout == reference.stdout
    assert differing_leaves(whole, stopped) == set()


# What each shows


def loaded(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def printed(run: Callable[[], Any]) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), lenient():
        run()
    return text.getvalue().splitlines()


class Flax(NamedTuple):
    """Runs of the example: one of 9 steps, with what it printed, and one stopped after 5."""

    train: Callable[[str, int], None]
    whole: pathlib.Path
    printed: list[str]
    stopped: pathlib.Path


@pytest.fixture(scope="module")
def flax(tmp_path_factory: pytest.TempPathFactory) -> Flax:
    train = loaded("flax_nnx")["main"]
    whole, stopped = (tmp_path_factory.mktemp("flax") / name for name in ("whole", "stopped"))
    lines = printed(lambda: train(str(whole), 9))
    printed(lambda: train(str(stopped), 5))
    return Flax(train, whole, lines, stopped)


PARTS: Final[dict[str, tuple[Any, set[str]]]] = {
    "nothing": (nnx.Nothing(), set()),
    "batch statistics": (nnx.BatchStat, {"/0/norm/mean/value", "/0/norm/var/value"}),
    "RNG streams": (nnx.RngState, {"/2/dropout/count/value", "/0/hidden/kernel/value"}),
    "parameters": (nnx.Param, {"/0/hidden/kernel/value", "/0/logits/bias/value"}),
    "optimizer state": (nnx.PathContains("opt_state"), {"/1/opt_state/0/count/value"}),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_run_of_nnx_that_is_resumed_without_a_part_of_its_state_ends_differently(
    part: str, flax: Flax, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out, differ = PARTS[part]
    resume = checkpointing.Checkpoints.resume

    def resume_without(self: checkpointing.Checkpoints, train_state: Any) -> Any:
        run = resume(self, train_state)
        restored = nnx.filter_state(run.train_state, nnx.Not(left_out))
        begun = nnx.filter_state(train_state, left_out)
        return dataclasses.replace(run, train_state=nnx.merge_state(restored, begun))

    run = shutil.copytree(flax.stopped, tmp_path / "run")
    monkeypatch.setattr(checkpointing.Checkpoints, "resume", resume_without)
    lines = printed(lambda: flax.train(str(run), 9))
    differing = differing_leaves(flax.whole, run)
    assert differ <= differing
    assert bool(differ) == bool(differing)
    # To drop batch statistics is seen in the evaluation alone, which takes them.
    assert (lines == flax.printed) == (part == "nothing")


def test_perplexity_is_that_of_all_targets_however_they_are_batched() -> None:
    example = loaded("token_lm")
    held_out = example["pipeline_of"](["csv.py"], seed=0, shuffle="none")
    key = jax.random.key(0)
    params = {name: jax.random.normal(key, shape) for name, shape in example["SHAPES"].items()}
    config = dataclasses.replace(held_out.config, batch_size=100, final_batch="partial")
    with lenient():
        found = example["perplexity"](params, held_out)
        again = example["perplexity"](params, held_out)
        elsewhere = example["perplexity"](params, loader.Pipeline(held_out.source, config))
        results = [example["losses_of"](params, batch) for batch in held_out]
        of_means = np.exp(np.mean([loader.masked_mean(*result) for result in results]))
    assert found == again  # the stream begins anew each time
    assert elsewhere == pytest.approx(found, rel=1e-4)
    assert of_means != pytest.approx(found, rel=1e-4)


def test_the_tour_prints_what_it_says() -> None:
    source = (FOLDER / "tour.py").read_text("utf-8")
    assert printed(lambda: loaded("tour")) == re.findall("^# -> (.*)$", source, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_read_in_a_minute(path: pathlib.Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) < 80
    assert any(f"python examples/{path.name}" in line for line in lines[:9])
