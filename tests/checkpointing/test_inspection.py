"""What a run's directory is said to hold: compared with what was done to it, and with what a resume does."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpointing
import loader
from checkpointing import CheckpointMismatchError, inspect_run
from checkpointing.storage import local as local_storage
from checkpointing.storage.base import TMP_SUFFIX, Writer
from checkpointing.storage.directory import RunDirectory, processes_in
from loader import ArraySource, Mixture, Pipeline, PipelineConfig

N: Final = 23
STATE: Final = {"sum": np.zeros(3, np.float32), "n": 0}


def a_pipeline(x: Any = None, transform: Any = None, **settings: Any) -> Pipeline:
    usual = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 4}
    source = ArraySource({"x": np.arange(N) if x is None else x})
    return Pipeline(source, PipelineConfig(**{**usual, **settings}), transform)


def train(path: pathlib.Path, stream: Any, steps: int, **how: Any) -> None:
    """Trains some steps, and saves each second one and the last."""
    with checkpointing.Checkpoints(path, stream, 2, 100, run_config={"rate": 0.5}) as checkpoints:
        run = checkpoints.resume(STATE, **how)
        for _ in range(steps):
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)
        checkpoints.save(run.batches, run.train_state, force=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of steps 2, 4 and 5, whose batch size was changed after step 2."""
    path = tmp_path_factory.mktemp("runs") / "run"
    train(path, a_pipeline(), 2)
    train(path, a_pipeline(batch_size=5), 3, allow={"batch_size"})
    return path


@pytest.fixture
def run(trained: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


def tree(path: pathlib.Path) -> dict[str, Any]:
    """All that stands in a directory, and when it was changed."""
    return {
        str(one): (one.lstat().st_mtime_ns, one.lstat().st_size) for one in sorted(path.rglob("*"))
    }


def test_it_tells_what_was_done(trained: pathlib.Path) -> None:
    report = inspect_run(trained, verify="full")
    assert [one.step for one in report.steps] == [2, 4, 5]
    assert report.intact
    assert report.newest is not None
    assert report.newest.step == 5
    assert report.left_overs == ()
    assert report.writer is None
    places = [dataclasses.astuple(one.position or loader.Position()) for one in report.steps]
    assert places == [(0, 8, 2), (0, 18, 4), (1, 0, 5)]
    assert [one.num_processes for one in report.steps] == [1, 1, 1]
    first, second, third = (one.identity for one in report.steps)
    assert first != second == third
    told = report.to_dict()
    assert json.loads(json.dumps(told)) == told
    place = {"epoch": 0, "offset": 8, "step": 2}
    assert told["changes"] == [{"position": place, "changed": {"batch_size": [4, 5]}}]
    assert told["run_config"] == {"rate": 0.5}
    assert told["stream"]["data"]["digest"] == a_pipeline().fingerprint().digest
    assert told["train_state"]["bytes"] == 3 * 4 + 8
    # Two batches of four, three of five with what is left of the epoch, and three epochs of five.
    assert report.total_steps == 2 + 3 + 3 * 5
    read = sum(file.lstat().st_size for file in (trained / "5").rglob("*") if file.is_file())
    assert sum(report.steps[2].files.item_bytes.values()) == read
    assert report.steps[2].files.committed is not None
    assert abs(report.steps[2].files.committed - (trained / "5").stat().st_mtime) < 60


def test_the_total_is_where_the_run_ends(tmp_path: pathlib.Path) -> None:
    train(tmp_path, a_pipeline(), 2)
    train(tmp_path, a_pipeline(batch_size=5), 1, allow={"batch_size"})
    foretold = inspect_run(tmp_path).total_steps
    with checkpointing.Checkpoints(
        tmp_path, a_pipeline(batch_size=5), 10**9, 9, run_config={"rate": 0.5}
    ) as checkpoints:
        batches = checkpoints.resume(STATE).batches
        for _ in batches:
            pass
        assert batches.position.step == foretold


def flipped(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced(run: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(run / "4")
    return run / "4"


def largest(run: pathlib.Path, step: int) -> pathlib.Path:
    return max((run / str(step) / "train_state").rglob("d/*"), key=lambda one: one.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "reason", "known"),
    [
        (lambda run: flipped(run / "4/manifest/metadata"), "manifest", False),
        (lambda run: (run / "4/manifest/metadata").write_bytes(b""), "manifest", False),
        (lambda run: (run / "4/manifest/metadata").unlink(), "is missing", False),
        (lambda run: (run / "4/iterator/metadata").write_text("[1]"), "bytes instead of", True),
        (lambda run: largest(run, 4).unlink(), "is missing", True),
        (lambda run: shutil.rmtree(run / "4/train_state"), "missing", True),
        (lambda run: replaced(run).write_text(""), "directory", False),
        (lambda run: replaced(run).symlink_to("5"), "directory", False),
        (
            lambda run: shutil.copytree(run / "2", replaced(run)),
            "holds a checkpoint of step 2",
            False,
        ),
        (lambda run: replaced(run).mkdir(), "missing", False),
    ],
    ids=[
        *(
            "bit of the manifest",
            "manifest emptied",
            "manifest removed",
            "iterator",
            "array removed",
        ),
        *("item removed", "a file", "a link", "another step", "emptied"),
    ],
)
def test_a_damaged_step_is_an_entry_with_its_reason(
    run: pathlib.Path, damage: Callable[[pathlib.Path], Any], reason: str, known: bool
) -> None:
    damage(run)
    before = tree(run)
    report = inspect_run(run)
    assert tree(run) == before
    assert [one.health for one in report.steps] == ["intact", "damaged", "intact"]
    assert reason in report.steps[1].reason
    assert (report.steps[1].position is not None) == known
    assert not report.intact
    assert report.newest is not None
    assert report.newest.step == 5
    json.dumps(report.to_dict())


def test_a_flipped_bit_is_found_where_all_files_are_digested(run: pathlib.Path) -> None:
    flipped(largest(run, 5))
    assert inspect_run(run).intact
    report = inspect_run(run, verify="full")
    assert [one.health for one in report.steps] == ["intact", "intact", "damaged"]
    assert "sha256" in report.steps[2].reason
    assert report.newest is not None
    assert report.newest.step == 4


def test_what_does_not_count_as_a_step_is_told_apart(run: pathlib.Path) -> None:
    (run / f"6{TMP_SUFFIX}").mkdir()
    (run / f"6{TMP_SUFFIX}" / "half").write_bytes(b"12345")
    (run / ".regrain-trash" / "1").mkdir(parents=True)
    (run / "4").rename(run / "4.set-aside-1")
    (run / "notes.txt").write_text("mine")
    (run / "007").mkdir()
    report = inspect_run(run)
    assert [one.step for one in report.steps] == [2, 5]
    found = {one.name: (one.kind, one.bytes) for one in report.left_overs}
    assert found.pop("4.set-aside-1")[0] == "set aside"
    assert found == {".regrain-trash": ("deleted", 0), f"6{TMP_SUFFIX}": ("unfinished", 5)}
    assert report.intact


def test_a_step_that_is_deleted_meanwhile_is_not_called_damaged(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: Any = RunDirectory.check

    def check(self: RunDirectory, step: int, *how: Any) -> Any:
        if step == 2:
            shutil.rmtree(run / "2")
        return looked(self, step, *how)

    monkeypatch.setattr(RunDirectory, "check", check)
    assert [one.step for one in inspect_run(run).steps] == [4, 5]


def test_a_step_that_may_not_be_read_is_not_called_damaged(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: RunDirectory, step: int, *_how: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self.step_path(step)))

    monkeypatch.setattr(RunDirectory, "check", check)
    report = inspect_run(run, steps=[5])
    assert report.steps[0].health == "unreadable"
    assert "Permission denied" in report.steps[0].reason
    assert not report.intact


def test_its_writer_is_seen_and_not_disturbed(run: pathlib.Path) -> None:
    with checkpointing.Checkpoints(run, a_pipeline(batch_size=5), 1, 9):
        assert inspect_run(run).writer == Writer(os.getpid(), holds_lock=True)
    assert inspect_run(run).writer is None


@pytest.mark.processes
def test_without_a_list_of_locks_a_writer_is_told_by_its_life(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_storage, "_SYSTEM_LOCKS", run / "nowhere")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for holder, found in (
        (os.getpid(), Writer(os.getpid(), holds_lock=False)),
        (gone.pid, None),
        (-1, None),
        (10**30, None),
    ):
        (run / ".lock").write_text(f"{holder} abc")
        assert inspect_run(run).writer == found
    (run / ".lock").write_text("x" * 30)
    assert inspect_run(run).writer is None


@pytest.mark.parametrize(
    "about",
    [
        "",
        "[]",
        "{}",
        '{"init_timestamp_nsecs": "1"}',
        "[" * 10_000,
        '{"commit_timestamp_nsecs": 1}',
    ],
)
def test_times_are_those_of_the_file_where_orbax_tells_none(run: pathlib.Path, about: str) -> None:
    (run / "5/_CHECKPOINT_METADATA").write_text(about)
    (report,) = inspect_run(run, steps=[5]).steps
    assert report.files.save_seconds is None
    assert report.files.committed == (run / "5/manifest/metadata").stat().st_mtime


def test_the_number_of_processes_is_that_of_the_files(trained: pathlib.Path) -> None:
    manifest = RunDirectory(trained, write=False).check(5)
    entry = next(iter(manifest.files.values()))
    names = [f"train_state/array_metadatas/process_{i}" for i in range(3)]
    several = dataclasses.replace(manifest, files=dict.fromkeys(names, entry))
    assert processes_in(several) == 3
    assert processes_in(dataclasses.replace(manifest, files={"process_9": entry})) is None


def test_only_the_steps_that_are_asked_for_are_looked_at(trained: pathlib.Path) -> None:
    told: list[loader.Progress] = []
    with loader.watch_progress(told.append):
        report = inspect_run(trained, steps=[4, 2])
    assert [one.step for one in report.steps] == [2, 4]
    assert (told[-1].done, told[-1].total, told[-1].unit) == (2, 2, "steps")
    with pytest.raises(FileNotFoundError, match="has no step 7; the newest that it has: 2, 4, 5"):
        inspect_run(trained, steps=[7])
    with pytest.raises(ValueError, match="verify must be"):
        inspect_run(trained, verify="all")  # type: ignore[arg-type]


def test_a_directory_without_steps_is_not_intact(tmp_path: pathlib.Path) -> None:
    report = inspect_run(tmp_path)
    assert (report.steps, report.intact, report.newest, report.total_steps) == (
        (),
        False,
        None,
        None,
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="holds no intact step"):
        report.diff_config(a_pipeline().config)
    with pytest.raises(FileNotFoundError):
        inspect_run(tmp_path / "gone")


# --- would this go on? --------------------------------------------------------------------------

EDITED: Final = np.where(np.arange(N) == 7, 99, np.arange(N))


def double(batch: Any) -> Any:
    return {**batch, "x": 2 * batch["x"]}


@pytest.mark.parametrize(
    ("stream", "names"),
    [
        (lambda: a_pipeline(batch_size=5), []),
        (a_pipeline, ["batch_size"]),
        (lambda: a_pipeline(batch_size=5, seed=18), ["seed"]),
        (lambda: a_pipeline(EDITED, batch_size=5), ["dataset.x"]),
        (lambda: a_pipeline(None, double, batch_size=5), ["transform.name", "transform.version"]),
        (lambda: Mixture({"a": a_pipeline(num_epochs=None)}, {"a": 1}), ["stream"]),
    ],
    ids=["the same", "batch size", "seed", "data", "transform", "mixture"],
)
def test_a_stream_is_refused_as_a_resume_refuses_it(
    run: pathlib.Path, stream: Callable[[], Any], names: list[str]
) -> None:
    before = tree(run)
    differences = inspect_run(run).diff_stream(stream())
    assert tree(run) == before
    assert [one.name for one in differences] == names
    with checkpointing.Checkpoints(run, stream(), 1, 9, run_config={"rate": 0.5}) as checkpoints:
        try:
            checkpoints.resume(STATE)
            refused: list[Any] = []
        except CheckpointMismatchError as error:
            refused = list(error.differences)
    assert differences == refused


def test_a_change_that_is_allowed_is_no_difference(trained: pathlib.Path) -> None:
    report = inspect_run(trained)
    assert report.diff_stream(a_pipeline(), {"batch_size"}) == []
    with pytest.raises(ValueError, match="allow can hold"):
        report.diff_stream(a_pipeline(), {"seed"})
    with pytest.raises(TypeError, match="a stream is a Pipeline"):
        report.diff_stream(a_pipeline().source)  # type: ignore[arg-type]


def test_a_config_is_compared_without_the_data(trained: pathlib.Path) -> None:
    report = inspect_run(trained)
    assert report.diff_config(a_pipeline(batch_size=5).config) == []
    other = a_pipeline(shuffle="none", num_epochs=None).config
    found = {one.name: (one.checkpoint, one.now) for one in report.diff_config(other)}
    assert found == {
        "batch_size": ("5", "4"),
        "num_epochs": ("4", "None"),
        "shuffle": ("feistel", "none"),
    }


def test_two_runs_are_compared_by_their_newest_intact_steps(
    trained: pathlib.Path, run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert inspect_run(trained).diff(inspect_run(run)) == []
    flipped(run / "5/manifest/metadata")
    (place,) = inspect_run(trained).diff(inspect_run(run))
    assert (place.name, "step=5" in place.checkpoint, "step=4" in place.now) == (
        "position",
        True,
        True,
    )
    first, second = inspect_run(trained).diff(inspect_run(run, steps=[2]))
    assert (first.name, first.checkpoint, first.now) == ("batch_size", "5", "4")
    assert second.name == "position"


def test_two_runs_whose_leaves_differ_are_not_the_same(tmp_path: pathlib.Path) -> None:
    """Each leaf is compared by its values, whatever files hold it; the config is the same."""
    state = {f"w{i}": jnp.full(50, i, jnp.float32) for i in range(6)} | {"key": jax.random.key(3)}
    other = {**state, "w2": state["w2"].at[7].add(1), "key": jax.random.key(4)}
    reports = []
    for name, train_state in (("a", state), ("b", other), ("c", state)):
        with checkpointing.Checkpoints(tmp_path / name, a_pipeline(), 1, 9) as checkpoints:
            run = checkpoints.resume(train_state)
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)
        reports.append(inspect_run(tmp_path / name))
    a, b, c = reports
    found = a.diff(b)
    assert [one.name for one in found] == ["train_state/key", "train_state/w2"]
    assert all(one.checkpoint != one.now and one.note == "values" for one in found)
    assert a.diff(c) == []


def test_a_leaf_of_another_kind_is_named_once(tmp_path: pathlib.Path) -> None:
    for name, leaf in (("a", np.zeros(3)), ("b", np.zeros(4))):
        with checkpointing.Checkpoints(tmp_path / name, a_pipeline(), 1, 9) as checkpoints:
            run = checkpoints.resume({"w": leaf, "same": 1})
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)
    (found,) = inspect_run(tmp_path / "a").diff(inspect_run(tmp_path / "b"))
    assert (found.name, found.checkpoint, found.now) == (
        "train_state/w",
        "float64[3]",
        "float64[4]",
    )


def test_parts_of_a_mixture_are_told_and_compared(tmp_path: pathlib.Path) -> None:
    for name, x in (("a", None), ("b", EDITED)):
        parts = {"x": a_pipeline(x, num_epochs=None), "y": a_pipeline(num_epochs=None, seed=3)}
        train(tmp_path / name, Mixture(parts, {"x": 1, "y": 2}), 2)
    a, b = inspect_run(tmp_path / "a"), inspect_run(tmp_path / "b")
    told = a.to_dict()["stream"]
    assert (told["kind"], list(told["parts"])) == ("mixture", ["x", "y"])
    assert told["parts"]["y"]["config"]["seed"] == 3
    assert a.total_steps is None
    assert [one.name for one in a.diff(b)] == ["parts.x.dataset.x"]
    with pytest.raises(ValueError, match="is of a mixture"):
        a.diff_config(a_pipeline().config)


def test_the_bytes_of_leaves_are_those_of_their_values() -> None:
    leaves = {
        "float32[2,3]": 24,
        "bfloat16[3]": 6,
        "int[]": 8,
        "bool[5]": 5,
        "key<threefry2x32>[2]": 16,
        "key<mine>[]": None,
        "object[3]": None,
        "float64[0,3]": 0,
    }
    for text, expected in leaves.items():
        kind, _, shape = text.rstrip("]").partition("[")
        dtype, _, prng = kind.rstrip(">").partition("<")
        sides = tuple(int(side) for side in shape.split(",") if side)
        from checkpointing.train_state import LeafSpec

        assert LeafSpec("/x", sides, dtype, prng).num_bytes == expected
