"""The language model of the drill: on all of its text, learning, and resumed exactly."""

import itertools
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import pytest

import loader
from checkpointing import run_drill
from scripts import train
from scripts.training import text
from scripts.training.task import settings_of

ROOT: Final = Path(__file__).resolve().parents[2]
CONFIG: Final = ROOT / "configs" / "text.toml"
TRAIN: Final = {"seed": 5, "width": 16, "heads": 2, "learning_rate": 0.01, "dropout": 0.1}
SETTINGS: Final = settings_of("train", TRAIN, text.Train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def source(folder: Path) -> loader.TokenSource:
    return text.text(16, folder)


# The data


def test_each_byte_of_each_module_is_a_target_once_but_the_first(
    source: loader.TokenSource,
) -> None:
    read = source.read(np.arange(len(source)))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = [(stdlib / f"{module}.py").read_bytes() for module in text.MODULES]
    expected = [
        [*document[1:], text.END]
        for number in range(text.NUM_FILES)
        for document in documents[number :: text.NUM_FILES]
    ]
    found = np.concatenate(
        [row[1:length] for row, length in zip(read["tokens"], read["length"], strict=True)]
    )
    assert np.array_equal(found, np.fromiter(itertools.chain(*expected), np.int32))
    assert 400_000 < len(found) < 2_000_000


def test_files_are_made_once_and_anew_where_they_are_missing(folder: Path) -> None:
    before = text.text(16, folder)
    names = {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}
    assert len(names) == text.NUM_FILES
    text.text(16, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.bin")} == names
    elsewhere = folder / "elsewhere"
    assert text.text(16, elsewhere).fingerprint() == before.fingerprint()


def test_another_text_is_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for line in ("import os\n", "import re\n"):
        stdlib = tmp_path / line[7:9]
        stdlib.mkdir()
        for module in text.MODULES[:3]:
            (stdlib / f"{module}.py").write_text(line * 9)
        monkeypatch.setattr(sysconfig, "get_paths", lambda at=stdlib: {"stdlib": str(at)})
        found.append(text.text(16, tmp_path / "prepared").fingerprint())
    assert found[0].diff(found[1])
    assert len(list((tmp_path / "prepared").glob("text-*"))) == 2


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no source text"):
        text.module_texts(tmp_path)


# The model


def batch(source: loader.TokenSource, real: int = 8) -> dict[str, Any]:
    read = source.read(np.arange(8))
    return {**read, "mask": np.arange(8) < real}


def test_it_learns_and_counts_its_steps(source: loader.TokenSource) -> None:
    state, step = text.init(SETTINGS, 16), text.make_train_step(SETTINGS)
    losses = []
    for _ in range(30):
        state, loss = step(state, batch(source))
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert int(state["step"]) == 30


def test_no_place_sees_what_follows_it(source: loader.TokenSource) -> None:
    params = text.init(SETTINGS, 16)["params"]
    tokens = source.read(np.arange(4))["tokens"][:, :-1]
    changed = tokens.copy()
    changed[:, 9:] = 0
    before, after = (np.asarray(text.forward(params, one, 2)) for one in (tokens, changed))
    assert np.array_equal(before[:, :9], after[:, :9])
    assert not np.array_equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("leaf", ["key", "mean", "square", "step"])
def test_all_of_the_state_has_an_effect(source: loader.TokenSource, leaf: str) -> None:
    """A checkpoint without one of them would not end in the same parameters."""
    step = text.make_train_step(SETTINGS)
    state, _ = step(text.init(SETTINGS, 16), batch(source))
    others = {"key": jax.random.key(99), "step": state["step"] + 3}
    other = others.get(leaf, jax.tree.map(lambda p: p + 1, state["params"]))
    after, changed = (step(one, batch(source))[0] for one in (state, {**state, leaf: other}))
    assert not np.array_equal(after["params"]["logits"], changed["params"]["logits"])


def test_padding_has_no_part_in_the_loss(source: loader.TokenSource) -> None:
    state, step, given = text.init(SETTINGS, 16), text.make_train_step(SETTINGS), batch(source, 5)
    given["length"] = np.array([17, 9, 2, 17, 12, 17, 1, 0], np.int32)
    _, loss = step(state, given)
    there = (np.arange(17) < given["length"][:, None]) & given["mask"][:, None]
    _, same = step(state, {**given, "tokens": np.where(there, given["tokens"], 7)})
    # Beyond a window's end there are no targets, and what is before sees nothing of it.
    np.testing.assert_allclose(float(loss), float(same), rtol=1e-5)
    _, other = step(state, {**given, "tokens": np.where(there, 7, given["tokens"])})
    assert abs(float(other) - float(loss)) > 0.01


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads 3 do not divide the width 16"):
        text.init(settings_of("train", {**TRAIN, "heads": 3}, text.Train), 16)


# The drill


def test_the_config_is_one_of_the_script() -> None:
    config = loader.PipelineConfig.from_toml(CONFIG)
    task = train.task_of(tomllib.loads(CONFIG.read_text("utf-8")))
    pipeline = loader.Pipeline(task.source, config, task.transform)
    assert 400 < len(pipeline) < 1000
    assert len(task.source) % config.batch_size, "padding would not be drilled"


def test_a_drill_finds_no_difference(tmp_path: Path) -> None:
    path, settings = tmp_path / "short.toml", CONFIG.read_text("utf-8")
    for name, value in [("batch_size", 256), ("num_epochs", 1), ("width", 8), ("save_every", 5)]:
        before = next(line for line in settings.splitlines() if line.startswith(f"{name} ="))
        settings = settings.replace(before, f"{name} = {value}")
    path.write_text(settings, "utf-8")
    command = [sys.executable, ROOT / "scripts" / "train.py", "{run_dir}", "--config", path]
    report = run_drill(list(map(str, command)), tmp_path / "out", kills=1)
    assert report.differences == ()
    assert report.complete
    assert 30 < report.num_steps < 100
