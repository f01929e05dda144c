"""The system reads ahead where records come in order, and only there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.sources import RecordSource

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="nobody tells of the advice"
)


def npy(folder: Path) -> RecordSource:
    np.save(folder / "small.npy", np.zeros((3000, 100), np.uint8))
    np.save(folder / "large.npy", np.zeros((3000, 1 << 17), np.uint8))
    return loader.NpySource(folder)


def tokens(folder: Path) -> RecordSource:
    np.arange(60_000, dtype=np.uint16).tofile(folder / "small.bin")
    return loader.TokenSource(folder, window=16)


def several_files(folder: Path) -> RecordSource:
    tokens(folder)
    np.arange(500, dtype=np.uint16).tofile(folder / "zero.bin")
    return loader.TokenSource(folder, window=16)


def advised(folder: Path) -> set[str]:
    """Names of the mapped files around which nothing is read ahead."""
    found, name = set(), ""
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        if str(folder) in line:
            name = Path(line).name
        elif line.startswith("VmFlags") and name:
            found |= {name} if "rr" in line.split() else set()
            name = ""
    return found


@pytest.mark.parametrize("opened", [npy, tokens, several_files])
def test_advice_follows_the_rows(opened: Callable[[Path], RecordSource], tmp_path: Path) -> None:
    source = opened(tmp_path)
    source.read(np.arange(3))
    assert advised(tmp_path) == set()
    source.read(np.array([5, 900, 2]))
    assert {name.partition(".")[0] for name in advised(tmp_path)} == {"small"}
    source.read(np.array([7]))  # a single one tells nothing
    assert {name.partition(".")[0] for name in advised(tmp_path)} == {"small"}
    source.read(np.arange(40, 60))
    assert advised(tmp_path) == set()
