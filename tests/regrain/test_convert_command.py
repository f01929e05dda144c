"""The converter's command line: what it writes and says, and every refusal."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from typer.testing import CliRunner

import loader
from regrain.cli import conversion as job
from regrain.cli import convert_formats
from regrain.cli.app import app
from scripts import train

ROOT: Final = Path(__file__).resolve().parents[2]
X: Final = np.arange(20.0).reshape(10, 2)
NAMES: Final = np.array([f"r{i}" for i in range(10)])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a folder of its own as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["convert", *arguments])
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


def test_a_file_of_arrays_becomes_a_folder_with_the_same_records_and_ids() -> None:
    np.savez("a.npz", x=X, y=X[:, 0], id=NAMES)
    printed = call("a.npz", "--out", "a")
    memory = loader.ArraySource({"x": X, "y": X[:, 0]}, NAMES)
    assert loader.fingerprint(loader.NpySource("a")) == memory.fingerprint()
    assert f"read back as the same: {memory.fingerprint().digest}" in printed
    assert printed.startswith("a: 10 records, ")
    call("a", "--out", "b.v2", "--to", "npy")
    call("a", "--out", "b/")
    assert loader.NpySource("b.v2").fingerprint() == loader.NpySource("b").fingerprint()
    assert loader.NpySource("b").fingerprint() == loader.NpySource("a").fingerprint()


@pytest.mark.parametrize("name", ["npy", "array_record", "parquet"])
@pytest.mark.parametrize(
    "field",
    [
        np.array(["a\0b", "", "c"]),
        np.array([b"a\0b", b"", b"c"]),
        np.array([["a\0b", "c"], ["", "d"], ["e", "f\0g"]]),
        np.arange(3, dtype=">i4"),
        np.arange(6, dtype=">f8").reshape(3, 2),
    ],
    ids=["text", "bytes", "texts", "swapped numbers", "swapped arrays"],
)
def test_zeros_inside_and_the_order_of_bytes_are_kept(name: str, field: Any) -> None:
    np.savez("a.npz", x=field, id=np.array(["r\0a", "r\0b", "r"]))
    if field.dtype.byteorder == ">" and name == "parquet":  # which has one order alone
        told = call("a.npz", "--out", "out", "--to", name, code=2)
        assert "Parquet has nothing for field 'x'" in told
        return
    done = json.loads(call("a.npz", "--out", "out", "--to", name, "--json"))
    ids = np.array(["r\0a", "r\0b", "r"])
    assert done["digest"] == loader.ArraySource({"x": field}, ids).fingerprint().digest


STRINGS: Final = np.array([f"{i:03}\u00e9" for i in range(5)])
WRITTEN: Final = {"npy": "a", "array_record": "a.array_record", "parquet": "a.parquet"}
READ: Final = [*WRITTEN.values(), "a.npz", "saved"]


def write_every_format(fields: dict[str, Any], ids: Any) -> None:
    np.savez("a.npz", **fields, id=ids)
    for out in WRITTEN.values():
        call("a.npz", "--out", out, "--no-check")
    columns = {name: array.tolist() for name, array in fields.items()}
    script = (
        "import datasets, json, sys; datasets.disable_progress_bars();"
        "datasets.Dataset.from_dict(json.load(sys.stdin)).save_to_disk('saved')"
    )
    text = json.dumps(columns | {"id": ids.tolist()})
    subprocess.run([sys.executable, "-c", script], input=text, text=True, check=True)


@pytest.mark.processes
@pytest.mark.parametrize("ids", [np.arange(5) * 3 + 1, STRINGS])
def test_every_format_becomes_every_other_one(ids: Any) -> None:
    fields = {"x": np.arange(30.0).reshape(5, 3, 2), "y": np.arange(5) * 7}
    write_every_format(fields, ids)
    expected = loader.ArraySource(fields, ids).fingerprint().digest
    for before in READ:
        for number, (name, out) in enumerate(WRITTEN.items()):
            target = f"{number}-{before}-{out}"
            done = json.loads(call(before, "--out", target, "--to", name, "--json"))
            assert done["digest"] == expected, (before, name)
            assert done["format"] == name
            assert done["ids"] == ("str" if ids is STRINGS else "int64")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    "array",
    [np.arange(5, dtype=kind) for kind in ("u1", "i2", "u8", "f2", "f4")]
    + [np.arange(5) > 2, STRINGS, np.arange(5).astype("M8[ms]")],
    ids=lambda array: str(array.dtype),
)
def test_each_kind_of_field_comes_back(name: str, array: Any) -> None:
    np.savez("a.npz", x=array)
    done = json.loads(call("a.npz", "--out", WRITTEN[name], "--json"))
    assert done["digest"] == loader.ArraySource({"x": array}).fingerprint().digest


@pytest.mark.parametrize("kind", ["complex128", "datetime64[s]"])
def test_a_field_that_a_format_has_nothing_for_is_named_and_nothing_is_left(kind: str) -> None:
    np.savez("a.npz", x=np.arange(5).astype(kind))
    assert f"field 'x', {kind}" in call("a.npz", "--out", "a.parquet", code=2)
    assert [path.name for path in Path().iterdir()] == ["a.npz"]


def test_a_plain_folder_of_arrays_is_converted_too() -> None:
    Path("a").mkdir()
    np.save("a/x.npy", X)
    found = json.loads(call("a", "--out", "b", "--json"))
    assert found["ids"] == "int64"
    assert found["fields"] == {"x": {"dtype": "float64", "shape": [2]}}


def test_the_digits_are_those_of_the_training_script() -> None:
    found = json.loads(call("--digits", "--out", "digits", "--json"))
    assert found["digest"] == train.digits().fingerprint().digest
    assert found["records"] == 1797
    assert loader.fingerprint(loader.NpySource("digits")).digest == found["digest"]


def test_a_function_of_ones_own_is_converted() -> None:
    Path("convert_of_mine.py").write_text(
        "import loader, numpy as np\n"
        "def good(): return loader.ArraySource({'x': np.arange(3)}, ['a', 'b', 'c'])\n"
    )
    found = json.loads(
        call("--source", "convert_of_mine:good", "--out", "a", "--json", "--no-check")
    )
    assert found["digest"] is None
    assert loader.NpySource("a").ids(np.array([2, 0])).tolist() == ["c", "a"]


def test_what_reads_as_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez("a.npz", x=X)
    np.savez("b.npz", x=X + (np.arange(20).reshape(10, 2) == 4))
    right = convert_formats.FORMATS["npy"]

    def write_another(_source: Any, out: Path) -> None:
        right.write(job.opened(Path("b.npz"), None, digits=False), out)

    wrong = convert_formats.Format(write_another, right.read)
    monkeypatch.setitem(convert_formats.FORMATS, "npy", wrong)
    printed = call("a.npz", "--out", "a", code=1)
    assert "dataset.x" in printed
    assert "1 of 10 records differs: id 2" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "b"], "name one source"),
        (["a.npz", "--digits", "--out", "b"], "name one source"),
        (["none.npz", "--out", "b"], "none.npz"),
        (["a.npz", "--out", "there"], "there is there already"),
        (["a.npz", "--out", "there/none/b"], "not a directory"),
        (["there", "--out", "b"], "cannot be read as a .npz file"),
        (["empty", "--out", "b"], "empty holds no"),
        (["a.npz", "--out", "b", "--to", "csv"], "csv"),
        (["a.npz", "--out", "b.npz"], "b.npz ends in .npz, which is no format that is written"),
        (["--source", "nothing:here", "--out", "b"], "nothing"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_told_and_leaves_nothing(arguments: list[str], message: str) -> None:
    np.savez("a.npz", x=X)
    Path("there").write_text("no data")
    Path("empty").mkdir()
    assert message.lower() in call(*arguments, code=2).lower()
    assert sorted(path.name for path in Path().iterdir()) == ["a.npz", "empty", "there"]


@pytest.mark.processes
def test_it_runs_as_a_program(here: Path) -> None:
    np.savez("a.npz", x=X)
    command = [sys.executable, "-m", "regrain", "convert", "a.npz", "--out", "b"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("b: 10 records")
    assert done.stderr == ""


def words_in_parquet() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"word": ["a", "bcd"], "x": [1, 2], "other": [[], [2]]})
    pytest.importorskip("pyarrow.parquet").write_table(table, "words.parquet")


def test_advice_names_the_options_of_the_command() -> None:
    words_in_parquet()
    said = " ".join(call("words.parquet", "--columns", "word,x", "--out", "a", code=2).split())
    assert "--fields word=U32" in said
    assert "fields={" not in said
    said = " ".join(call("words.parquet", "--columns", "other", "--out", "a", code=2).split())
    assert "--fields other=DTYPE[SHAPE]" in said
    narrow = ("--columns", "word,x", "--fields", "word=U2")
    said = " ".join(call("words.parquet", *narrow, "--out", "a", code=2).split())
    assert "--fields word=U3" in said
    assert not Path("a").exists()
    call("words.parquet", "--columns", "word,x", "--fields", "word=U3", "--out", "a")
    made = loader.NpySource("a")
    assert made.read(np.arange(2))["word"].tolist() == ["a", "bcd"]
    assert set(made.fields) == {"word", "x"}


def test_one_split_of_a_folder_is_converted() -> None:
    words_in_parquet()
    Path("data").mkdir()
    for split in ("train", "test"):
        shutil.copy("words.parquet", f"data/{split}-00000-of-00001.parquet")
    reading = ("--columns", "word,x", "--fields", "word=U3")
    said = " ".join(call("data", *reading, "--out", "a", code=2).split())
    assert "--split train" in said
    assert "split=" not in said
    assert not Path("a").exists()
    call("data", *reading, "--split", "test", "--out", "a")
    assert len(loader.NpySource("a")) == 2
    np.savez("a.npz", x=X)
    assert "are for Parquet" in call("a.npz", "--split", "train", "--out", "b", code=2)


@pytest.mark.parametrize("text", ["word", "=U3", "word=", "word=nothing", "word=U3[a]"])
def test_a_field_that_is_no_name_and_dtype_is_refused(text: str) -> None:
    words_in_parquet()
    said = call("words.parquet", "--fields", text, "--out", "a", code=2)
    assert "--fields takes NAME=DTYPE" in said


def test_settings_of_columns_are_refused_where_nothing_uses_them() -> None:
    np.savez("a.npz", x=X)
    assert "are for Parquet" in call("a.npz", "--columns", "x", "--out", "b", code=2)
    assert "are for DATA" in call("--digits", "--columns", "x", "--out", "b", code=2)
    assert not Path("b").exists()


def test_a_field_has_a_dtype_and_a_shape() -> None:
    fields = job.Reading.of(None, ["a=b=uint8[28,28]", "c=U3"]).fields
    assert fields == {"a=b": ("uint8", (28, 28)), "c": ("U3", ())}
