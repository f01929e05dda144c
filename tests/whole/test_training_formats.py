"""The drill's data in each format: the same stream, and files that are whole or not there."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import loader
from scripts.training import digits
from scripts.training.formats import FORMATS, in_format, parts_of
from scripts.training.prepared import prepared

ROOT: Final = Path(__file__).resolve().parents[2]
CONFIG: Final = ROOT / "configs" / "digits.toml"


@pytest.mark.parametrize("data_format", FORMATS)
def test_the_digits_are_the_same_stream_in_each_format(data_format: str, tmp_path: Path) -> None:
    memory = digits.digits()
    source = in_format("digits", data_format, memory, tmp_path)
    config = loader.PipelineConfig.from_toml(CONFIG)
    expected = loader.Pipeline(memory, config, digits.scale)
    found = loader.Pipeline(source, config, digits.scale)
    for step in range(expected.steps_per_epoch):
        before, after = expected[step], found[step]
        assert before.keys() == after.keys()
        for name in before:
            assert before[name].dtype == after[name].dtype
            assert np.array_equal(before[name], after[name])
    # By content, no format can be told from another one.
    assert loader.fingerprint(source) == memory.fingerprint()


def test_files_have_unequal_shares_and_all_of_the_records() -> None:
    parts = parts_of(digits.digits())
    assert len({len(part) for part in parts}) == len(parts) == 3
    ids = np.concatenate([part.ids(np.arange(len(part))) for part in parts])
    assert np.array_equal(ids, np.arange(1797))


def test_files_are_written_once_and_are_those_of_the_data(tmp_path: Path) -> None:
    one, other = (loader.ArraySource({"x": np.arange(9) + by}) for by in (0, 1))
    for source in (one, other, one, other):
        found = in_format("x", "npy", source, tmp_path)
        assert np.array_equal(found.read(np.arange(9))["x"], source.read(np.arange(9))["x"])
    assert len(list(tmp_path.glob("x-npy-*"))) == 2


def test_what_a_failed_or_killed_writer_leaves_is_not_taken_for_data(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        (path / "part").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        prepared("a", fails, tmp_path)
    assert not (tmp_path / "a").exists()
    path = prepared("a", lambda path: (path / "whole").touch(), tmp_path)
    assert path == tmp_path / "a"
    assert [one.name for one in path.iterdir()] == ["whole"]
    assert not list(tmp_path.glob(".a*"))


@pytest.mark.processes
def test_of_several_processes_one_writes(tmp_path: Path) -> None:
    code = """if True:
        import pathlib, sys
        from scripts.training.prepared import prepared
        root = pathlib.Path(sys.argv[1])
        def write(path):
            with (root / "log").open("a") as log:
                log.write("written\\n")
            (path / "whole").touch()
        assert (prepared("a", write, root) / "whole").exists()
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "written\n"
