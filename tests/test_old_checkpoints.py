"""What the oldest supported packages have saved is resumed by those at hand: the same bits, the same stream."""

import json
import pathlib
import re
import shutil
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpointing
from checkpointing.manifest import FORMAT_VERSION
from tests.old_checkpoints import (
    DATA,
    EXPECTED,
    FOLLOWING,
    PACKAGES,
    RUN_CONFIG,
    RUNS,
    STOPPED,
    told_batches,
    told_state,
)

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = sorted(path for path in DATA.iterdir() if path.is_dir())


def expected_of(kept: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((kept / EXPECTED).read_text("utf-8"))
    return found


def resumed(run: pathlib.Path, name: str, **options: Any) -> checkpointing.Checkpoints:
    settings: dict[str, Any] = {"save_every": 1, "keep": 2, "run_config": RUN_CONFIG}
    return checkpointing.Checkpoints(run, RUNS[name].stream(), **settings | options)


def other_values(state: Any) -> Any:
    """As a resume takes it where it does not look at values: nothing in it is what was saved."""

    def other(leaf: Any) -> Any:
        if jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
            return jax.random.wrap_key_data(
                data + data.dtype.type(1), impl=jax.random.key_impl(leaf)
            )
        if isinstance(leaf, jax.Array):
            return leaf if leaf.weak_type else jnp.zeros(leaf.shape, leaf.dtype)
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)(0)

    return {**jax.tree.map(other, state), **({"step": state["step"]} if "step" in state else {})}


def test_there_is_one_of_the_lowest_lock() -> None:
    """Of the versions that Python 3.11 gets."""
    lock = (ROOT / "requirements-lowest.lock").read_text("utf-8")
    lowest = {
        package: re.findall(rf"^{package}==([\d.]+)", lock, re.MULTILINE)[0] for package in PACKAGES
    }
    assert lowest in [expected_of(folder / "integers")["packages"] for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_kind_of_run_is_kept_of_each(folder: pathlib.Path) -> None:
    assert {path.name for path in folder.iterdir()} == set(RUNS)
    packages = expected_of(folder / "integers")["packages"]
    for name in RUNS:
        manifest, _ = checkpointing.load(folder / name / "run")
        assert {package: manifest.packages[package] for package in PACKAGES} == packages
        assert manifest.to_dict()["format"] == FORMAT_VERSION


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_old_checkpoint_is_resumed_to_the_bit_and_goes_on(
    folder: pathlib.Path, name: str, tmp_path: pathlib.Path
) -> None:
    kept, run = folder / name, tmp_path / "run"
    shutil.copytree(kept / "run", run)
    expected = expected_of(kept)
    state = RUNS[name].train_state()
    assert told_state(other_values(state)) != expected["train_state"]
    # Grain promises nothing across versions, and we have to be told that it may be another one.
    allow = {"grain_version"} if name == "chain" else set()
    with resumed(run, name) as checkpoints:
        found = checkpoints.resume(other_values(state), allow=allow)
        assert found.position.step == STOPPED
        assert told_state(found.train_state) == expected["train_state"]
        following = told_batches(found.batches)
        assert [one["ids"] for one in following] == [one["ids"] for one in expected["batches"]]
        assert following == expected["batches"]
        assert len(following) == FOLLOWING
        state = found.train_state
        if "step" in state:
            state = {**state, "step": jnp.asarray(STOPPED + FOLLOWING, jnp.int32)}
        checkpoints.save(found.batches, state)
        checkpoints.wait()
        assert checkpoints.steps() == [STOPPED, STOPPED + FOLLOWING]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_chain_of_another_grain_is_refused_by_that_name_alone(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    old = expected_of(folder / "chain")["packages"]["grain"]
    if old == grain.__version__:
        pytest.skip(f"this is the Grain that wrote it, {old}")
    shutil.copytree(folder / "chain" / "run", tmp_path / "run")
    with (
        resumed(tmp_path / "run", "chain") as checkpoints,
        pytest.raises(checkpointing.CheckpointMismatchError) as caught,
    ):
        checkpoints.resume(RUNS["chain"].train_state())
    (difference,) = caught.value.differences
    assert (difference.name, difference.checkpoint, difference.now) == (
        "grain_version",
        old,
        grain.__version__,
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_kept_file_that_git_has_changed_is_found(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """As line endings would be, were these files texts to it."""
    run = tmp_path / "run"
    shutil.copytree(folder / "integers" / "run", run)
    path = run / str(STOPPED) / "iterator" / "metadata"
    path.write_bytes(path.read_bytes() + b"\r\n")
    with (
        resumed(run, "integers") as checkpoints,
        pytest.raises(checkpointing.CheckpointDamagedError),
    ):
        checkpoints.resume(RUNS["integers"].train_state())


def test_git_takes_none_of_them_for_a_text() -> None:
    attributes = (ROOT / ".gitattributes").read_text("utf-8").splitlines()
    assert "tests/data/** binary linguist-generated=true" in attributes


def test_kept_files_are_small() -> None:
    sizes = [path.stat().st_size for path in DATA.rglob("*") if path.is_file()]
    assert sum(sizes) < 100_000 * len(FOLDERS)
