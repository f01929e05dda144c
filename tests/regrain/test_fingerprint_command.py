"""The fingerprint's command line: what it prints, saves and compares, and every refusal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import loader
from regrain.cli import fingerprint as job
from regrain.cli.app import app
from scripts import train

ROOT: Final = Path(__file__).resolve().parents[2]
X: Final = np.arange(20.0).reshape(10, 2)
IDS: Final = np.arange(100, 110)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a folder of its own as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["fingerprint", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code != 2 else done.stderr


def save_folder(name: str, **arrays: Any) -> None:
    Path(name).mkdir()
    for field, array in arrays.items():
        np.save(f"{name}/{field}.npy", array)


def digest(**arrays: Any) -> str:
    ids = arrays.pop("id", None)
    return loader.ArraySource(arrays, ids).fingerprint().digest


def test_a_file_and_a_folder_of_the_same_arrays_have_the_fingerprint_of_the_source() -> None:
    names = np.array([f"r{i}" for i in range(10)])
    every: list[dict[str, Any]] = [{"x": X}, {"x": X, "id": IDS}, {"x": X, "y": X, "id": names}]
    for number, arrays in enumerate(every):
        np.savez(f"{number}.npz", **arrays)
        save_folder(str(number), **arrays)
        printed = call("print", f"{number}.npz")
        assert printed == call("print", str(number))
        assert printed.splitlines()[0] == f"{digest(**arrays)} 10 records"
        assert [line.split()[0] for line in printed.splitlines()[1:]] == sorted({"id", *arrays})


def test_a_folder_with_a_description_has_the_fingerprint_of_its_source() -> None:
    arrays = {"a b": X, "half": np.arange(10).astype(ml_dtypes.bfloat16)}
    loader.write_npy(loader.ArraySource(arrays, IDS), "data")
    np.save("data/stray.npy", X)
    found = loader.NpySource("data").fingerprint()
    assert call("print", "data").splitlines()[0] == f"{found.digest} 10 records"
    call("save", "a.json", "data")
    assert call("compare", "a.json", "data") == f"same: {found.digest}\n"


def test_the_digits_are_those_of_the_training_script(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = call("print", "--digits")
    assert printed.startswith(f"{train.digits().fingerprint().digest} 1,797 records\n")
    monkeypatch.chdir(ROOT)
    assert call("print", "--source", "scripts.train:digits") == printed


def test_what_is_saved_is_the_fingerprint_and_compares_as_the_same() -> None:
    np.savez("a.npz", x=X, id=IDS)
    found = loader.ArraySource({"x": X}, IDS).fingerprint()
    assert call("save", "a.json", "a.npz") == f"a.json: {found.digest}\n"
    assert loader.Fingerprint.from_dict(json.loads(Path("a.json").read_text())) == found
    assert call("compare", "a.json", "a.npz") == f"same: {found.digest}\n"
    assert sorted(path.name for path in Path().iterdir()) == ["a.json", "a.npz"]


def test_each_difference_is_a_line_with_both_values() -> None:
    np.savez("a.npz", x=X, y=X, gone=IDS, id=IDS)
    edited = X.copy()
    edited[3] = 0
    np.savez("b.npz", x=edited, y=X.astype("f4"), new=IDS, id=IDS)
    call("save", "a.json", "a.npz")
    first, *lines = call("compare", "a.json", "b.npz", code=1).splitlines()
    assert first == "different from a.json:"
    told = {line.split()[0]: line for line in lines}
    assert list(told) == ["dataset.gone", "dataset.new", "dataset.x", "dataset.y"]
    assert "now absent" in told["dataset.gone"]
    assert "before absent" in told["dataset.new"]
    assert "float64[2]" in told["dataset.y"]
    assert "float32[2]" in told["dataset.y"]
    np.savez("c.npz", x=edited, y=X, gone=IDS, id=IDS)
    (line,) = call("compare", "a.json", "c.npz", code=1).splitlines()[1:]
    assert line.split()[0] == "dataset.x"
    assert line.endswith("(1 of 10 records differs: id 103)")


@pytest.mark.parametrize("total", [10, 5001])
def test_appended_records_with_the_old_ones_unchanged_are_named_as_such(total: int) -> None:
    x = np.arange(total + 3)
    np.savez("a.npz", x=x[:total])
    np.savez("b.npz", x=x)
    call("save", "a.json", "a.npz")
    printed = call("compare", "a.json", "b.npz", code=1)
    assert f"the first {total} records are the same, and 3 were appended" in printed


def test_a_folder_is_read_from_disk_as_it_is_needed() -> None:
    save_folder("a", x=X)
    source = job.opened(Path("a"), None, digits=False)
    assert isinstance(job.folder_arrays(Path("a"))["x"], np.memmap)
    assert len(source) == 10


def test_records_in_files_are_known_by_the_files(here: Path) -> None:
    loader.write_npy(loader.ArraySource({"x": X, "y": X}), here / "data")
    Path("npy_of_mine.py").write_text("import loader\ndef npy(): return loader.NpySource('data')\n")
    call("save", "a.json", "--source", "npy_of_mine:npy")
    assert "in 2 files, by their bytes: sha256:" in call("print", "--source", "npy_of_mine:npy")
    np.save("data/y.npy", X + 1)
    (line,) = call("compare", "a.json", "--source", "npy_of_mine:npy", code=1).splitlines()[1:]
    assert line.split()[0] == "dataset.files"
    assert line.endswith("(1 of 2 files differs: y.npy)")


SOURCE: Final = """
import numpy as np
import loader
def good(): return loader.ArraySource({"x": np.arange(3)})
def bad(): return 3
def nothing(): pass
def a_pipeline(): return loader.Pipeline(good(), loader.PipelineConfig(1, seed=1, final_batch="drop"))
def a_mixture(): return loader.Mixture({"a": a_pipeline()}, {"a": 1})
def a_stream():
    import grain
    return loader.GrainStream(grain.MapDataset.range(3), fingerprint=loader.fingerprint(good()))
def fails(): raise RuntimeError("no disk")
def leaves(): raise SystemExit(0)
value = 3
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one source"),
        (["a.npz", "--digits"], "name one source"),
        (["gone.npz"], "gone.npz: No such file"),
        (["empty"], "empty has no .npy file"),
        (["ids"], "ids has no array besides the IDs"),
        (["single.npy"], "it is not an archive of named arrays"),
        (["objects.npz"], "cannot be read as a .npz file"),
        (["objects"], "cannot be read"),
        (["text.npz"], "cannot be read as a .npz file"),
        (["cut.npz"], "cannot be read as a .npz file"),
        (["worn.npz"], "cannot be read as a .npz file: Error"),
        (["uneven.npz"], "the lengths differ"),
        (["twice.npz"], "belongs to rows"),
        (["--source", "mine"], "takes MODULE:FUNCTION"),
        (["--source", "mine:f()"], "takes MODULE:FUNCTION"),
        (["--source", "mine:__import__('os')"], "takes MODULE:FUNCTION"),
        (["--source", "not_there:f"], "ModuleNotFoundError"),
        (["--source", "mine:gone"], "AttributeError"),
        (["--source", "mine:fails"], "RuntimeError: no disk"),
        (["--source", "mine:leaves"], "SystemExit: 0"),
        (["--source", "mine:value"], "not callable"),
        (["--source", "mine:nothing"], "returns a NoneType, which is no source of records"),
        (
            ["--source", "mine:a_pipeline"],
            "returns a Pipeline, which is no source of records (loader.RecordSource): return its .source",
        ),
        (["--source", "mine:a_mixture"], "returns a Mixture, which is no source of records"),
        (["--source", "mine:a_mixture"], "return the .source of one of its .parts"),
        (["--source", "mine:a_stream"], "return the source that it reads from"),
        (
            ["--source", "mine:bad"],
            "returns a int, which is no source of records (loader.RecordSource): arrays are one",
        ),
    ],
)
def test_what_cannot_be_opened_is_refused_with_a_reason(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.py").write_text(SOURCE)
    np.savez("a.npz", x=X)
    Path("empty").mkdir()
    save_folder("ids", id=IDS)
    np.save("single.npy", X)
    np.savez("objects.npz", x=np.array([{}, 2], object))
    save_folder("objects", x=np.array([{}, 2], object))
    Path("text.npz").write_text("hello")
    Path("cut.npz").write_bytes(Path("a.npz").read_bytes()[:-30])
    np.savez_compressed("worn.npz", x=np.arange(1000) ** 2)
    worn = bytearray(Path("worn.npz").read_bytes())
    worn[400:600] = b"\xff" * 200
    Path("worn.npz").write_bytes(worn)
    np.savez("uneven.npz", x=X, y=X[1:])
    np.savez("twice.npz", x=X, id=IDS // 2)
    before = sorted(Path().iterdir())
    assert message in " ".join(call("save", "out.json", *arguments, code=2).split())
    assert message in " ".join(call("print", *arguments, code=2).split())
    assert [path for path in sorted(Path().iterdir()) if path.name != "__pycache__"] == before
    assert "3 records" in call("print", "--source", "mine:good")


def test_an_edited_label_and_removed_records_are_both_named() -> None:
    x, y = np.arange(40), np.arange(40) % 10
    np.savez("before.npz", x=x, label=y)
    y[7] = 99
    np.savez("after.npz", x=x[:30], label=y[:30])
    call("save", "one.json", "before.npz")
    printed = " ".join(call("compare", "one.json", "after.npz", code=1).split())
    assert "before 40 now 30 (1 edited or replaced: id 7; 10 removed: rows 30-39)" in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is not a saved fingerprint"),
        (b"[]", "is not a saved fingerprint"),
        (b"{}", "is not a saved fingerprint"),
        (b"\xff", "is not a saved fingerprint"),
        (b"[" * 100_000, "is not a saved fingerprint"),
        (b" " * (job.MAX_JSON_BYTES + 1), "is larger than"),
    ],
    ids=["absent", "empty", "list", "object", "no text", "deep", "large"],
)
def test_a_file_that_is_no_fingerprint_is_refused(content: bytes | None, message: str) -> None:
    np.savez("a.npz", x=X)
    if content is not None:
        Path("a.json").write_bytes(content)
    assert message in call("compare", "a.json", "a.npz", code=2)


def test_a_file_that_cannot_be_written_is_named_and_nothing_stays() -> None:
    np.savez("a.npz", x=X)
    Path("folder.json").mkdir()
    assert "fingerprint: folder.json: Is a" in call("save", "folder.json", "a.npz", code=2)
    assert "fingerprint: gone/a.json: No such" in call("save", "gone/a.json", "a.npz", code=2)
    assert sorted(path.name for path in Path().iterdir()) == ["a.npz", "folder.json"]


@pytest.mark.processes
def test_it_runs_as_a_program() -> None:
    np.savez("a.npz", x=X)
    command = [sys.executable, "-m", "regrain", "fingerprint"]
    done = subprocess.run([*command, "print", "a.npz"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(digest(x=X))
