"""The example training script: resumable, exact, and its parts do what a checkpoint must hold."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import pytest

from checkpointing import read_step_log, run_drill
from loader import PipelineConfig
from scripts import train
from scripts.training import digits, lesson
from scripts.training.task import settings_of

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = ROOT / "scripts" / "train.py"
CONFIG: Final = ROOT / "configs" / "digits.toml"
TRAIN: Final = {"seed": 5, "hidden": 8, "learning_rate": 0.1, "momentum": 0.9, "noise": 0.1}
SETTINGS: Final = settings_of("train", TRAIN, digits.Train)


@pytest.fixture
def short_config(tmp_path: Path) -> Path:
    """The config of the drill with ten epochs in place of a hundred."""
    text = CONFIG.read_text("utf-8").replace("num_epochs = 100", "num_epochs = 10")
    path = tmp_path / "short.toml"
    path.write_text(text.replace("save_every = 100", "save_every = 10"), "utf-8")
    assert PipelineConfig.from_toml(path).num_epochs == 10
    return path


def run_train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_batch_size_does_not_divide_the_data() -> None:
    records = len(train.digits())
    assert records == 1797
    assert records % PipelineConfig.from_toml(CONFIG).batch_size


def test_a_drill_finds_no_difference(short_config: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "{run_dir}", "--config", str(short_config)]
    report = run_drill(command, tmp_path / "out", kills=2)
    assert report.differences == ()
    assert report.complete
    assert report.num_steps == 150
    assert report.final_states["reference"].step == 150


@pytest.mark.processes
def test_by_hand_it_logs_on_request_learns_and_may_be_run_again(
    short_config: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def run() -> list[str]:
        done = run_train(tmp_path / "run", "--config", short_config, "--log", log)
        return done.stdout.splitlines()

    first, again = run(), run()
    assert float(first[-1].split()[1]) > 0.9
    assert again == first[-1:]
    assert [one.position.step for one in read_step_log(log)] == list(range(150))


@pytest.mark.processes
def test_the_lesson_is_trained_too(tmp_path: Path) -> None:
    done = run_train(tmp_path / "run", "--config", ROOT / "configs" / "lesson.toml")
    assert [line.split()[1] for line in done.stdout.splitlines()[:-1]] == list("123456")
    assert done.stdout.splitlines()[-1].startswith("y = ")


# Settings


@pytest.mark.parametrize(
    ("tables", "data_format", "message"),
    [
        ({"data": {"kind": "zip"}}, None, r"\[data\]: 'kind' must be one of .* not 'zip'"),
        ({"data": {"format": "npy"}}, None, "'kind' must be one of .* not None"),
        ({"data": 3}, None, "'kind' must be one of"),
        ({"data": {"kind": "digits", "formt": "npy"}}, None, "'formt' is not a setting"),
        ({"data": {"kind": "digits", "format": 3}}, None, "'format' must be a string, not 3"),
        ({"data": {"kind": "digits", "format": "zip"}}, None, "'format' must be one of 'array',"),
        ({}, "zip", "'format' must be one of 'array', 'npy', .*, not 'zip'"),
        ({"data": {"kind": "text", "window": 8}}, "npy", "'format' is not a setting .*window"),
        ({"train": None}, None, r"\[train\] must be a table"),
        (
            {"train": {**TRAIN, "hiden": 8, "seed": True}},
            None,
            r"\[train\]: 'hiden' is not a setting .*; 'seed' must be an integer, not True",
        ),
        ({"train": {"seed": 1}}, None, "'hidden' is missing: an integer; .*'noise' is missing"),
    ],
)
def test_a_bad_setting_is_named(
    tables: dict[str, Any], data_format: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train.task_of({"train": TRAIN, **tables}, data_format)


def test_without_data_it_is_about_the_digits_in_memory() -> None:
    told = {"kind": "digits", "format": "array"}
    sources = [train.task_of({"train": TRAIN, **more}).source for more in ({}, {"data": told})]
    assert len(sources[0]) == 1797
    assert sources[0].fingerprint() == sources[1].fingerprint()


def test_a_number_may_be_written_as_an_integer() -> None:
    assert settings_of("train", {"learning_rate": 1}, lesson.Train).learning_rate == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("save_every", "safe_every", "[checkpoints]: 'safe_every' is not a setting"),
        ("batch_size", "batch", "'batch' is not a setting"),
        ("[data]", "[dta]\n[data]\nfold = 1", "[data]: 'fold' is not a setting"),
    ],
)
def test_the_command_line_names_the_file_and_the_setting(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(CONFIG.read_text("utf-8").replace(old, new, 1), "utf-8")
    done = run_train(tmp_path / "run", "--config", path)
    assert done.returncode == 2
    printed = "".join(line.strip("│ ") + " " for line in done.stderr.splitlines())
    assert "bad.toml" in printed.replace(" ", "")
    assert message.replace(" ", "") in printed.replace(" ", "")
    assert not (tmp_path / "run").exists()


# The digits


def batch(real: int) -> dict[str, Any]:
    read = train.digits().read(np.arange(8))
    images = digits.scale({"image": read["image"]})["image"]
    images[real:] = np.nan
    return {"image": images, "label": read["label"], "mask": np.arange(8) < real}


def test_a_step_counts_itself_and_uses_up_its_key() -> None:
    state = digits.init(SETTINGS)
    after, _ = digits.make_train_step(SETTINGS)(state, batch(8))
    assert int(after["step"]) == int(state["step"]) + 1 == 1
    assert np.any(jax.random.key_data(after["key"]) != jax.random.key_data(state["key"]))


@pytest.mark.parametrize("leaf", ["key", "momentum"])
def test_key_and_momentum_have_an_effect(leaf: str) -> None:
    """A checkpoint without one of them would not end in the same parameters."""
    state = digits.init(SETTINGS)
    others = {"key": jax.random.key(99), "momentum": jax.tree.map(lambda p: p + 1, state["params"])}
    step, given = digits.make_train_step(SETTINGS), batch(8)
    after, other = (step(one, given)[0] for one in (state, {**state, leaf: others[leaf]}))
    assert not np.array_equal(after["params"][0]["weights"], other["params"][0]["weights"])


def test_padding_has_no_part_in_the_loss() -> None:
    state, given = digits.init(SETTINGS), batch(5)
    step, mask = digits.make_train_step(SETTINGS), given["mask"]
    _, loss = step(state, given)
    images = np.where(mask[:, None, None], given["image"], 0)
    _, same = step(state, {**given, "image": images, "label": np.where(mask, given["label"], 9)})
    assert np.isfinite(loss)
    assert loss == same
