"""The example training script: resumable, exact, and its parts do what a checkpoint must hold."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import pytest

from checkpointing import read_step_log, run_drill
from loader import PipelineConfig

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPT: Final = ROOT / "scripts" / "train.py"
CONFIG: Final = ROOT / "configs" / "digits.toml"
TRAIN: Final = {"seed": 5, "hidden": 8, "learning_rate": 0.1, "momentum": 0.9, "noise": 0.1}


@pytest.fixture(scope="module")
def train() -> dict[str, Any]:
    """The script's functions by name."""
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def short_config(tmp_path: Path) -> Path:
    """The config of the drill with ten epochs in place of a hundred."""
    text = CONFIG.read_text("utf-8").replace("num_epochs = 100", "num_epochs = 10")
    path = tmp_path / "short.toml"
    path.write_text(text.replace("save_every = 100", "save_every = 10"), "utf-8")
    assert PipelineConfig.from_toml(path).num_epochs == 10
    return path


def test_the_batch_size_does_not_divide_the_data(train: dict[str, Any]) -> None:
    records = len(train["digits"]())
    assert records == 1797
    assert records % PipelineConfig.from_toml(CONFIG).batch_size


def test_a_drill_finds_no_difference(short_config: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "{run_dir}", "--config", str(short_config)]
    report = run_drill(command, tmp_path / "out", kills=2)
    assert report.differences == ()
    assert report.complete
    assert report.num_steps == 150
    assert report.final_states["reference"].step == 150


def test_by_hand_it_logs_on_request_learns_and_may_be_run_again(
    short_config: Path, tmp_path: Path
) -> None:
    options = ["--config", str(short_config), "--log", str(tmp_path / "log")]

    def run() -> str:
        command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    first, again = run().splitlines(), run().splitlines()
    assert float(first[-1].split()[1]) > 0.9
    assert again == first[-1:]
    assert [one.position.step for one in read_step_log(tmp_path / "log")] == list(range(150))


def batch(train: dict[str, Any], real: int) -> tuple[Any, ...]:
    source = train["digits"]()
    read = source.read(np.arange(8))
    images = train["scale"]({"image": read["image"]})["image"]
    images[real:] = np.nan
    return images, read["label"], np.arange(8) < real


def test_a_step_counts_itself_and_uses_up_its_key(train: dict[str, Any]) -> None:
    state = train["init"](TRAIN)
    after, _ = train["make_train_step"](TRAIN)(state, *batch(train, 8))
    assert int(after["step"]) == int(state["step"]) + 1 == 1
    assert np.any(jax.random.key_data(after["key"]) != jax.random.key_data(state["key"]))


@pytest.mark.parametrize("leaf", ["key", "momentum"])
def test_key_and_momentum_have_an_effect(train: dict[str, Any], leaf: str) -> None:
    """A checkpoint without one of them would not end in the same parameters."""
    state = train["init"](TRAIN)
    others = {"key": jax.random.key(99), "momentum": jax.tree.map(lambda p: p + 1, state["params"])}
    step, given = train["make_train_step"](TRAIN), batch(train, 8)
    after, other = (step(one, *given)[0] for one in (state, {**state, leaf: others[leaf]}))
    assert not np.array_equal(after["params"][0]["weights"], other["params"][0]["weights"])


def test_padding_has_no_part_in_the_loss(train: dict[str, Any]) -> None:
    state = train["init"](TRAIN)
    images, labels, mask = batch(train, 5)
    step = train["make_train_step"](TRAIN)
    _, loss = step(state, images, labels, mask)
    other_labels = np.where(mask, labels, 9)
    _, same = step(state, np.where(mask[:, None, None], images, 0), other_labels, mask)
    assert np.isfinite(loss)
    assert loss == same
