"""`regrain inspect`: what it prints of a run, whole or damaged, what it compares, and its exit codes."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any, Final

import grain
import numpy as np
import pytest
from typer.testing import CliRunner

import checkpointing
from checkpointing.storage.base import TMP_SUFFIX
from checkpointing.storage.directory import RunDirectory
from loader import ArraySource, GrainStream, Mixture, Pipeline, PipelineConfig
from regrain.cli import inspect as job
from regrain.cli.app import app

N: Final = 23
CONFIG: Final = """
[pipeline]
batch_size = 5
seed = 17
final_batch = "pad"
num_epochs = 4
"""
STREAMS: Final = f"""
import grain
import numpy as np
import loader
def a_pipeline(batch_size=5, seed=17):
    source = loader.ArraySource({{"x": np.arange({N})}})
    return loader.Pipeline(source, loader.PipelineConfig(batch_size, seed, "pad", num_epochs=4))
def smaller(): return a_pipeline(batch_size=4)
def other(): return a_pipeline(seed=18)
def fails(): raise RuntimeError("no disk")
def bad(): return 3
"""


def train(path: pathlib.Path, steps: int, **settings: Any) -> None:
    usual = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 4}
    pipeline = Pipeline(ArraySource({"x": np.arange(N)}), PipelineConfig(**{**usual, **settings}))
    with checkpointing.Checkpoints(path, pipeline, 2, 9, run_config={"rate": 0.5}) as checkpoints:
        run = checkpoints.resume({"w": np.zeros((2, 3), np.float32)}, allow={"batch_size"})
        for _ in range(steps):
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(path, 2)
    train(path, 2, batch_size=5)
    return path


@pytest.fixture
def run(trained: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of it in the current folder, to be damaged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(trained, tmp_path / "run")
    pathlib.Path("run.toml").write_text(CONFIG)
    pathlib.Path("streams_of_mine.py").write_text(STREAMS)
    return "run"


def call(*arguments: object, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def test_the_directory_of_a_step_is_told_from_that_of_a_run(run: str) -> None:
    newest = max(int(path.name) for path in pathlib.Path(run).iterdir() if path.name.isdigit())
    _, said = call(f"{run}/{newest}", code=2)
    wanted = (
        f"of one step, not the directory of a run: give that, {run} (this is its step {newest})"
    )
    assert wanted in " ".join(said.split())


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    printed, said = call(*arguments, "--json", code=code)
    assert said == ""
    answer: dict[str, Any] = json.loads(printed)
    return answer


def test_a_run_is_shown_with_its_steps_changes_and_identity(run: str) -> None:
    printed, said = call(run)
    assert said == ""
    words = " ".join(printed.split())
    assert "run: 2 intact (by manifests, names and sizes; --verify full digests all files)" in words
    assert "newest intact: step 4 of 20" in words
    for row in ("2 20", "4 20"):
        assert f" {row}" in words  # the number, and the year in which it was written
    assert "0, 8 intact" in words
    assert "0, 18 intact" in words
    assert "no process of this machine has it open for writing" in words
    assert "at step 2 (epoch 0, offset 8): batch_size 4 -> 5, as allowed" in words
    assert "data 23 records, sha256:" in words
    assert "x: int64[] sha256:" in words
    assert 'config batch_size 5, seed 17, final_batch "pad"' in words
    assert "order feistel, version 1" in words
    assert "transform none" in words
    assert "run_config rate 0.5" in words
    assert "train state 1 leaf, 24 B in memory" in words
    assert "written by" in words
    assert ", on 1 process" in words
    assert "\x1b" not in printed


def test_leaves_are_listed_if_they_are_asked_for(run: str) -> None:
    assert "/w float32 [2, 3] 24" in " ".join(call(run, "--leaves")[0].split())
    assert "/w" not in call(run)[0]
    assert as_json(run)["train_state"]["leaves"] is None
    (leaf,) = as_json(run, "--leaves")["train_state"]["leaves"]
    assert leaf == {"path": "/w", "shape": [2, 3], "dtype": "float32", "bytes": 24}


def test_a_damaged_step_is_a_row_and_exit_code_1(run: str) -> None:
    (pathlib.Path(run) / "4/manifest/metadata").write_bytes(b"{}")
    (pathlib.Path(run) / f"6{TMP_SUFFIX}").mkdir()
    words = " ".join(call(run, code=1)[0].split())
    assert "1 intact, 1 damaged" in words
    assert "- damaged" in words
    assert "step 4 is damaged: the manifest has format None" in words
    assert "newest intact: step 2" in words
    assert f"leftover: 6{TMP_SUFFIX}, 0 B: a save that is under way" in words
    answer = as_json(run, code=1)
    assert [one["health"] for one in answer["steps"]] == ["intact", "damaged"]
    assert (answer["intact"], answer["newest_intact"]) == (False, 2)
    assert call(run, "--step", 2)[0]
    call(run, "--step", 4, code=1)


def test_where_no_step_is_intact_it_says_so(run: str) -> None:
    for step in ("2", "4"):
        (pathlib.Path(run) / step / "iterator/metadata").unlink()
    printed, _ = call(run, code=1)
    assert "no step is intact: nothing can be resumed" in printed
    answer = as_json(run, code=1)
    assert answer["stream"] is answer["train_state"] is answer["newest_intact"] is None
    assert "no intact step to compare with" in call(run, "--config", "run.toml", code=2)[1]


def test_a_flipped_bit_needs_a_full_look(run: str) -> None:
    arrays = max(
        pathlib.Path(run, "4/train_state").rglob("d/*"), key=lambda one: one.stat().st_size
    )
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    call(run)
    assert "sha256" in call(run, "--verify", "full", code=1)[0]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["empty"], 3, "empty has no checkpoint: nothing was saved yet"),
        (["run", "--step", 9], 3, "run has no step 9; the newest that it has: 2, 4"),
        (["gone"], 2, "gone: No such file or directory"),
        (["run.toml"], 2, "run.toml: Not a directory"),
        (["run", "--config", "gone.toml"], 2, "gone.toml: No such file"),
        (["run", "--config", "bad.toml"], 2, "'batch' is not a setting"),
        (["run", "--diff", "gone"], 2, "gone: No such file or directory"),
        (["run", "--diff", "empty"], 2, "empty holds no intact step to compare with"),
        (
            ["run", "--diff", "run", "--config", "run.toml"],
            2,
            "give one of --config, --stream and --diff",
        ),
        (["run", "--allow", "batch_size"], 2, "--allow needs --stream"),
        (["run", "--stream", "streams_of_mine:fails"], 2, "RuntimeError: no disk"),
        (["run", "--stream", "streams_of_mine:bad"], 2, "not a int"),
        (["run", "--stream", "streams_of_mine"], 2, "--stream takes MODULE:FUNCTION"),
        (["run", "--stream", "streams_of_mine:other", "--allow", "seed"], 2, "allow can hold"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_refusal_is_a_line_and_an_exit_code(
    run: str, arguments: list[Any], code: int, said: str
) -> None:
    pathlib.Path("empty").mkdir()
    pathlib.Path("bad.toml").write_text(f"{CONFIG}batch = 1\n")
    message = " ".join(call(*arguments, code=code)[1].split())
    assert message.startswith("regrain inspect: ")
    assert said in message


@pytest.mark.parametrize(
    ("option", "value", "names"),
    [
        ("--config", "run.toml", []),
        ("--config", "other.toml", ["seed"]),
        ("--stream", "streams_of_mine:a_pipeline", []),
        ("--stream", "streams_of_mine:smaller", ["batch_size"]),
        ("--stream", "streams_of_mine:other", ["seed"]),
        ("--diff", "run", []),
    ],
)
def test_what_a_resume_would_refuse_is_told_before(
    run: str, option: str, value: str, names: list[str]
) -> None:
    pathlib.Path("other.toml").write_text(CONFIG.replace("17", "18"))
    told = as_json(run, option, value, code=1 if names else 0)["compared"]
    assert [one["name"] for one in told["differences"]] == names
    assert (told["kind"], told["with"]) == (option[2:].replace("diff", "run"), value)
    printed = call(run, option, value, code=1 if names else 0)[0]
    assert ("no difference" in printed) == (not names)
    if names == ["seed"]:
        assert "seed 17 18" in " ".join(printed.split())
    if told["not_compared"]:
        assert f"not compared: {', '.join(told['not_compared'])}" in printed


def test_another_run_with_other_weights_is_not_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs have one config, data and tree of leaves; what they have learnt differs."""
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline(ArraySource({"x": np.arange(N)}), PipelineConfig(4, 17, "pad"))
    for name, value in (("one", 1), ("two", 2)):
        with checkpointing.Checkpoints(tmp_path / name, pipeline, 1, 9) as checkpoints:
            batches = checkpoints.resume({"w": np.full(3, value), "b": np.zeros(1)}).batches
            next(batches)
            checkpoints.save(batches, {"w": np.full(3, value), "b": np.zeros(1)})
    (found,) = as_json("one", "--diff", "two", code=1)["compared"]["differences"]
    assert found["name"] == "train_state/w"
    printed = call("one", "--diff", "two", code=1)[0]
    assert "no difference" not in printed
    assert "train_state/w" in printed


def test_a_change_that_will_be_allowed_is_no_difference(run: str) -> None:
    call(run, "--stream", "streams_of_mine:smaller", "--allow", "batch_size")


def test_an_open_writer_is_told_and_goes_on(run: str) -> None:
    pipeline = Pipeline(
        ArraySource({"x": np.arange(N)}), PipelineConfig(5, 17, "pad", num_epochs=4)
    )
    with checkpointing.Checkpoints(run, pipeline, 1, 9, run_config={"rate": 0.5}) as checkpoints:
        resumed = checkpoints.resume({"w": np.zeros((2, 3), np.float32)})
        assert "open for writing in process" in call(run)[0]
        next(resumed.batches)
        checkpoints.save(resumed.batches, resumed.train_state)
        checkpoints.wait()
        assert as_json(run)["newest_intact"] == 5


def test_what_stands_in_files_is_shown_and_does_nothing_else(run: str) -> None:
    """A manifest whose digest holds can have been written by anybody."""
    nasty = "[bold red]\x1b]0;owned\x07[/]\u202e\n"
    path = pathlib.Path(run) / "4/manifest/metadata"
    manifest = RunDirectory(run, write=False).manifest(4)
    stream: Any = manifest.identity.stream
    identity = dataclasses.replace(
        manifest.identity,
        stream=dataclasses.replace(stream, transform={"name": nasty, "version": nasty}),
        run_config={nasty: nasty},
        train_state=(
            dataclasses.replace(manifest.identity.train_state[0], path=nasty, dtype=nasty),
        ),
    )
    history: Any = (
        {"position": manifest.position, "changed": 7},
        {"position": {"step": 1, "epoch": 0, "offset": nasty}, "changed": {nasty: [nasty, 2]}},
    )
    history = ({"position": 3, "changed": {}}, history[1], {nasty: nasty})
    made = dataclasses.replace(
        manifest, identity=identity, history=history, packages={nasty: nasty * 1000}
    )
    path.write_bytes(made.to_bytes())
    printed, said = call(run, "--leaves", "--diff", run)
    assert said == ""
    for character in "\x1b\x07\u202e":
        assert character not in printed
    assert "[bold red]" in printed
    assert "which this version does not understand" in printed
    assert max(map(len, printed.splitlines())) < 2000
    (pathlib.Path(run) / f"{nasty.strip()[:12]}\x1b{TMP_SUFFIX}").mkdir()
    assert "\x1b" not in call(run)[0]


def double(batch: Any) -> Any:
    return {**batch, "x": 2 * batch["x"]}


def test_mixtures_and_chains_are_told_by_what_they_are_made_of(tmp_path: pathlib.Path) -> None:
    source = ArraySource({"x": np.arange(N)})
    config = PipelineConfig(4, 17, "pad", num_epochs=None, record_keys=True)
    parts = {"web": Pipeline(source, config, double), "code": Pipeline(source, config)}
    chain = grain.MapDataset.source([{"id": i} for i in range(N)]).shuffle(seed=1).batch(4)
    streams: dict[str, Any] = {
        "mixture": Mixture(parts, {"web": 2, "code": 1}),
        "chain": GrainStream(chain, fingerprint=source.fingerprint(), config={"seed": 1}),
    }
    (tmp_path / "c.toml").write_text(CONFIG)
    for name, stream in streams.items():
        with checkpointing.Checkpoints(tmp_path / name, stream, 1, 9) as checkpoints:
            run = checkpoints.resume({"w": np.zeros(3)})
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)
    words = " ".join(call(tmp_path / "mixture")[0].split())
    assert "mixture code 1, web 2 part code data 23 records" in words
    assert "transform double, no version record keys version" in words
    words = " ".join(call(tmp_path / "chain")[0].split())
    assert "chain SourceMapDataset > ShuffleMapDataset > BatchMapDataset config seed 1" in words
    for kind in ("chain", "mixture"):  # they have steps, and no place in an epoch
        assert "0, 0" not in call(tmp_path / kind)[0]
    printed = call(tmp_path / "chain", "--diff", tmp_path / "mixture", code=1)[0]
    assert "stream a chain of Grain's a mixture of code, web" in " ".join(printed.split())
    assert (
        "is of a chain of Grain's"
        in call(tmp_path / "chain", "--config", tmp_path / "c.toml", code=2)[1]
    )


@pytest.mark.parametrize("seconds", [None, 0.0, -1e30, 1e30, float("nan")])
def test_any_time_can_be_told(seconds: float | None) -> None:
    assert (job.when(seconds) == "-") == (seconds != 0.0)


@pytest.mark.processes
def test_it_runs_as_a_program_on_a_directory_that_cannot_be_written(trained: pathlib.Path) -> None:
    """The files stay as they are, with the times at which they were changed."""
    before = {path: path.stat().st_mtime_ns for path in [trained, *trained.rglob("*")]}
    command = [sys.executable, "-m", "regrain", "inspect", str(trained), "--verify", "full"]
    trained.chmod(0o555)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    trained.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["newest_intact"] == 4
    assert {path: path.stat().st_mtime_ns for path in [trained, *trained.rglob("*")]} == before
