"""A run's directory: what counts as a step, what is whole, who may write, and what is never touched."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import manifest as manifests
from checkpointing.manifest import MAX_MANIFEST_BYTES, Identity, Manifest, package_versions
from checkpointing.storage import local as storage
from checkpointing.storage.directory import RunDirectory, StepDamagedError
from checkpointing.storage.local import seal_step
from checkpointing.train_state import describe
from loader import ArraySource, Pipeline, PipelineConfig, Position
from loader.identity.base import Ahead, Place

PIPELINE = Pipeline(
    ArraySource({"x": np.arange(20)}), PipelineConfig(3, seed=1, final_batch="pad", num_epochs=9)
)
IDENTITY = Identity.of(PIPELINE, {}, describe({"w": np.zeros(2)}))
FILES = {
    "train_state/d/0": b"some values",
    "train_state/d/1": b"",
    "train_state/_METADATA": b"{}",
}
ABOUT = {"item_handlers": {"train_state": "arrays", "iterator": "json", "manifest": "json"}}


def write_step(run: pathlib.Path, step: int, iterator: bytes | None = None) -> pathlib.Path:
    """A step as it is committed, without Orbax; with another state of the iterator, if one is given."""
    path = run / str(step)
    seal(path, step)
    if iterator is not None:
        (path / "iterator/metadata").write_bytes(iterator)
        files = json.loads((path / "manifest/metadata").read_bytes())["files"]
        described = storage._describe(path / "iterator/metadata")
        rewrite(path, files={**files, "iterator/metadata": described})
    return path


def seal(path: pathlib.Path, step: int) -> None:
    """A step as it is before its commit."""
    write_arrays(path)
    seal_step(path, a_manifest(step), ABOUT)


def write_arrays(path: pathlib.Path) -> None:
    """What is there of a step when its arrays are written."""
    for name, data in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    for item in ("iterator", "manifest"):
        (path / item).mkdir()


def a_manifest(step: int) -> Manifest:
    place = Place(PIPELINE.position(step), Ahead("ids"))
    return Manifest(step, place, IDENTITY, (), package_versions())


def rewrite(step_path: pathlib.Path, **changes: Any) -> None:
    """Changes parts of a step's manifest, under a digest that holds."""
    path = step_path / "manifest/metadata"
    value = json.loads(path.read_bytes())
    del value["sha256"]
    path.write_bytes(manifests.seal({**value, **changes}))


def names(path: pathlib.Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def opened(path: pathlib.Path) -> RunDirectory:
    return RunDirectory(path, write=False)


# What is a step.


def test_a_step_is_whatever_has_a_number_as_its_name_in_rising_order(run: pathlib.Path) -> None:
    for name in (
        "10",
        "9",
        "0",
        "00",
        "07",
        "-1",
        "+1",
        "1.0",
        "x",
        "²",
        "١",
        "1 ",
        "5.set-aside-1",
    ):
        (run / name).mkdir()
    (run / "3").write_text("a file")
    (run / "4").symlink_to(run / "9")
    (run / "5").symlink_to("nowhere")
    assert opened(run).steps() == [0, 3, 4, 5, 9, 10]


def test_a_whole_step_is_whole(run: pathlib.Path) -> None:
    write_step(run, 4)
    manifest = opened(run).check(4)
    assert opened(run).check(4, "manifest") == manifest
    assert (manifest.step, manifest.position) == (4, PIPELINE.position(4))
    assert manifest.files["train_state/d/0"] == {
        "sha256": hashlib.sha256(b"some values").hexdigest(),
        "bytes": 11,
    }
    assert manifest.files.keys() == FILES.keys() | {"iterator/metadata"}


# Each damage is found, and said.


def empty(step: pathlib.Path) -> None:
    for path in step.rglob("*"):
        if path.is_file():
            path.unlink()


def replace_by_link(path: pathlib.Path) -> None:
    run = next(folder for folder in path.parents if folder.name == "run")
    path.rename(run / "the-original")
    path.symlink_to(run / "the-original")


def replace_by_folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "emptied": (empty, "manifest/metadata is missing"),
    "a file too many": (lambda step: (step / "train_state/d/2").write_bytes(b""), "train_state/d/2 does not belong to it"),
    "a file too few": (lambda step: (step / "train_state/d/1").unlink(), r"train_state/d/1 is missing \(1 of 4 files\)"),
    "no iterator": (lambda step: (step / "iterator").rename(step / "elsewhere"), "iterator is missing"),
    "no train state": (lambda step: (step / "train_state").rename(step / "elsewhere"), "train_state is missing"),
    "no manifest": (lambda step: (step / "manifest").rename(step / "elsewhere"), "manifest/metadata is missing"),
    "a file renamed": (lambda step: (step / "train_state/d/1").rename(step / "train_state/d/3"), "train_state/d/1 is missing"),
    "a link to a folder": (lambda step: (step / "train_state/more").symlink_to(step), "train_state/more"),
    "a link as a file": (lambda step: replace_by_link(step / "train_state/d/0"), "train_state/d/0 is not a regular file"),
    "a link as the iterator": (lambda step: replace_by_link(step / "iterator/metadata"), "iterator/metadata is not a regular file"),
    "a link as the manifest": (lambda step: replace_by_link(step / "manifest/metadata"), "symbolic link"),
    "a link as a folder": (lambda step: replace_by_link(step / "train_state/d"), "train_state/d/0 is missing"),
    "a link as an item": (lambda step: replace_by_link(step / "train_state"), "train_state is a symbolic link"),
    "a link as the manifest's item": (lambda step: replace_by_link(step / "manifest"), "manifest is a symbolic link"),
    "a link as the step": (replace_by_link, "not a directory"),
    "a file as the step": (lambda step: (step.rename(step.with_name("x")), step.write_bytes(b"")), "not a directory"),
    "a folder as the manifest": (lambda step: replace_by_folder(step / "manifest/metadata"), "(?i)is a directory|regular"),
    "a folder as a file": (lambda step: replace_by_folder(step / "train_state/d/0"), "train_state/d/0 is missing"),
    "a pipe as the manifest": (lambda step: replace_by_pipe(step / "manifest/metadata"), "metadata is not a regular file"),
    "a pipe as the iterator": (lambda step: replace_by_pipe(step / "iterator/metadata"), "is not a regular file"),
    "a pipe as a file": (lambda step: replace_by_pipe(step / "train_state/d/0"), "is not a regular file"),
    "a manifest without end": (lambda step: os.truncate(step / "manifest/metadata", 1 << 40), f"metadata is larger than {MAX_MANIFEST_BYTES}"),
    "a file without end": (lambda step: os.truncate(step / "train_state/d/0", 1 << 40), "train_state/d/0 has 1099511627776 bytes instead of 11"),
    "one byte": (lambda step: (step / "train_state/d/0").write_bytes(b"some valuez"), "train_state/d/0 has sha256"),
    "a .. in a name": (lambda step: rewrite(step, files={"../../x": {"sha256": "0" * 64, "bytes": 1}}), r"\.\./\.\./x is missing"),
    "a name from the root": (lambda step: rewrite(step, files={"/etc/passwd": {"sha256": "0" * 64, "bytes": 1}}), "/etc/passwd is missing"),
    "another step": (lambda step: rewrite(step, step=5, position=dataclasses.asdict(PIPELINE.position(5))), "it holds a checkpoint of step 5"),
    "another position": (lambda step: rewrite(step, position={"epoch": 0, "offset": 9, "step": 4}), "its iterator is at .* its manifest at"),
    "a position that is none": (lambda step: rewrite(step, position={"epoch": -1, "offset": 0.5, "step": 4}), "lacks or mistypes"),
    "a position beyond any run": (lambda step: rewrite(step, step=2**63 - 1, position={"epoch": 1, "offset": 0, "step": 2**63 - 1}), "further than any run"),
    "an epoch beyond any run": (lambda step: rewrite(step, position={"epoch": 2**63 - 1, "offset": 0, "step": 4}), "further than any run"),
    "another format": (lambda step: rewrite(step, format=2), "format 2, and this version reads 1"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_and_named(damage: str, run: pathlib.Path) -> None:
    break_it, message = DAMAGES[damage]
    break_it(write_step(run, 4))
    with pytest.raises(StepDamagedError, match=message) as caught:
        opened(run).check(4)
    assert len(str(caught.value)) < 1000


def descriptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are digested from now on, as they come."""
    read: list[str] = []
    describe = storage._describe

    def told(path: pathlib.Path) -> dict[str, Any]:
        read.append(str(path))
        return describe(path)

    monkeypatch.setattr(storage, "_describe", told)
    return read


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_by_one_of_several_that_share_the_check(
    damage: str, run: pathlib.Path
) -> None:
    DAMAGES[damage][0](write_step(run, 4))
    caught = []
    for index in range(3):
        try:
            opened(run).check(4, share=(index, 3))
        except StepDamagedError as error:
            caught.append(str(error))
    assert caught


def test_each_file_is_read_by_one_of_those_that_share_the_check(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(run, 4)
    read = descriptions(monkeypatch)
    manifests = [opened(run).check(4, share=(index, 3)) for index in range(3)]
    assert manifests == [manifests[0]] * 3
    assert sorted(read) == sorted(str(run / "4" / name) for name in manifests[0].files)
    read.clear()
    for index in range(3):
        opened(run).check(4, "manifest", share=(index, 3))
    assert read == []


@pytest.mark.parametrize(
    "name", ["../x", "train_state/../../x", "/etc/passwd", "train_state//x", "."]
)
def test_no_name_leads_out_of_the_step(name: str, run: pathlib.Path) -> None:
    step = write_step(run, 4)
    file = {"sha256": "0" * 64, "bytes": 1}
    rewrite(step, files={"!": file, name: file})
    with pytest.raises(StepDamagedError, match="is no name of a file of a checkpoint"):
        opened(run).check(4, share=(1, 2))


def test_what_each_process_has_digested_of_its_own_is_not_read_once_more(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = run / "4"
    own = {f"train_state/ocdbt.process_{i}/d/{i}": bytes([i]) * 100 for i in range(3)}
    for name, data in {**FILES, **own}.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_bytes(data)
    for item in ("iterator", "manifest"):
        (step / item).mkdir()
    synced: list[str] = []
    monkeypatch.setattr(storage, "sync", lambda path: synced.append(path.name))
    for process in range(4):  # the last one has written nothing
        storage.seal_part(step, process)
    assert {"0", "1", "2"} <= set(synced)
    # This one is written once more afterwards.
    (step / "train_state/ocdbt.process_1/d/1").write_bytes(b"longer" * 100)
    read = descriptions(monkeypatch)
    synced.clear()
    seal_step(step, a_manifest(4), ABOUT)
    assert [name for name in read if "ocdbt.process" in name] == [
        str(step / "train_state/ocdbt.process_1/d/1")
    ]
    assert "2" not in synced
    assert "1" in synced
    found = opened(run).check(4)
    assert found.files.keys() == FILES.keys() | own.keys() | {"iterator/metadata"}
    assert not list(step.glob("part-*"))


@pytest.mark.parametrize("verify", ["full", "manifest"])
def test_an_empty_and_a_foreign_directory_are_not_checkpoints(
    verify: Any, run: pathlib.Path
) -> None:
    (run / "4").mkdir()
    with pytest.raises(
        StepDamagedError, match=r"manifest/metadata is missing: .* not a checkpoint"
    ):
        opened(run).check(4, verify)
    (run / "4/params.npz").write_bytes(b"theirs")
    with pytest.raises(StepDamagedError, match="manifest/metadata is missing"):
        opened(run).check(4, verify)
    assert names(run) == ["4", "4/params.npz"]


def test_only_the_content_of_array_files_is_left_out_by_verify_manifest(run: pathlib.Path) -> None:
    step = write_step(run, 4)
    (step / "train_state/d/0").write_bytes(b"other value")
    assert opened(run).check(4, "manifest").step == 4
    (step / "iterator/metadata").write_bytes(
        (step / "iterator/metadata").read_bytes().replace(b"12", b"15")
    )
    with pytest.raises(StepDamagedError, match="its iterator is at"):
        opened(run).check(4, "manifest")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=8,
)
states = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(json_values, st.integers(-1, 12)) for name in ("epoch", "offset", "step")
    },
)


@given(
    data=st.binary()
    | st.binary(min_size=4000, max_size=5000)
    | st.one_of(states, json_values).map(json.dumps).map(str.encode)
)
def test_an_iterator_state_of_a_stranger_is_the_manifests_or_is_refused(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("run", numbered=True)
    write_step(run, 4, data)
    try:
        opened(run).check(4)
    except StepDamagedError as damage:
        assert len(str(damage)) < 600  # noqa: PT017
    else:
        assert json.loads(data) == dataclasses.asdict(PIPELINE.position(4))


@pytest.mark.parametrize("depth", [100, *range(900, 1010, 2), 2000])
def test_an_iterator_state_nested_to_any_depth_is_refused(depth: int, run: pathlib.Path) -> None:
    write_step(run, 4, b"[" * depth + b"]" * depth)
    with pytest.raises(StepDamagedError, match=r"its iterator is at|nested too deeply"):
        opened(run).check(4)


def test_a_step_beyond_what_can_be_counted_is_no_checkpoint(run: pathlib.Path) -> None:
    write_step(run, 4).rename(run / ("9" * 200))
    number = opened(run).steps()[0]
    with pytest.raises(StepDamagedError, match="it holds a checkpoint of step 4"):
        opened(run).check(number)


# Who may write.


def test_a_directory_is_made_with_its_parents_wherever_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("a/b/c", "with blanks and ünicode ∂/☃", tmp_path / "x" / ".." / "y"):
        made = RunDirectory(path)
        assert made.path == pathlib.Path(os.path.normpath(tmp_path / path))
        assert made.path.is_dir()
        made.close()
        made.close()


@pytest.mark.parametrize("at", ["file", "file/below"])
def test_a_file_in_the_place_of_the_directory_is_an_error_that_says_so(
    at: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="need a directory, and this is a file") as caught:
        RunDirectory(tmp_path / at)
    assert caught.value.filename == str(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("at", ["link", "link/below"])
def test_a_link_in_the_place_of_the_directory_is_called_one(
    at: str, tmp_path: pathlib.Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone")
    with pytest.raises(NotADirectoryError, match="a symbolic link to gone, where there is nothing"):
        RunDirectory(tmp_path / at)
    (tmp_path / "file").write_text("mine")
    link.unlink()
    link.symlink_to("file")
    with pytest.raises(NotADirectoryError, match="this is a symbolic link to file: "):
        RunDirectory(tmp_path / at)
    link.unlink()
    (tmp_path / "gone").mkdir()
    link.symlink_to("gone")
    RunDirectory(tmp_path / at).close()
    assert names(tmp_path / "gone") == ([".lock"] if at == "link" else ["below", "below/.lock"])


@pytest.mark.parametrize("path", [b"run", 3, None, ["run"]])
def test_what_is_no_path_is_refused_as_one(path: Any) -> None:
    for write in (True, False):
        with pytest.raises(TypeError, match=r"a run's directory is a path, or an address .* not "):
            RunDirectory(path, write=write)


@pytest.mark.parametrize("name", ["\ud800", "caf\udce9"])
def test_a_name_by_which_no_arrays_can_be_written_is_refused(
    name: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=r"cannot hold checkpoints: .* names in UTF-8"):
        RunDirectory(tmp_path / name)
    assert names(tmp_path) == []


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("item", ["", "/", "/train_state", "/manifest"])
def test_the_directory_of_a_step_is_not_taken_for_that_of_a_run(
    item: str, run: pathlib.Path, *, write: bool
) -> None:
    step = write_step(run, 3)
    before = sorted(step.rglob("*"))
    parent = f"is of one step, not the directory of a run: give that, {run} (this is its step 3)"
    with pytest.raises(ValueError, match=re.escape(parent)):
        RunDirectory(f"{step}{item}", write=write)
    assert sorted(step.rglob("*")) == before
    copy = shutil.copytree(step, run / "best")
    with pytest.raises(ValueError, match=r"is of one step, .* Put this one into such a directory"):
        RunDirectory(copy, write=write)
    (step / "manifest/metadata").unlink()  # of a damaged one what Orbax says of it is left
    with pytest.raises(ValueError, match="is of one step"):
        RunDirectory(step, write=write)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/run", "s3://bucket/run is an address of a kind that is not supported"),
        ("hdfs://host/run", "hdfs://host/run is an address of a kind that is not supported"),
        (pathlib.Path("gs://bucket/run"), 'give it as a string, "gs://...'),
        (str(pathlib.Path("gs://bucket/run")), 'give it as a string, "gs://...'),
    ],
)
def test_an_address_that_is_not_supported_is_no_directory(
    address: Any, message: str, write: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        RunDirectory(address, write=write)
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_committed_while_left_overs_are_looked_at_is_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "1.regrain.orbax-checkpoint-tmp"
    unfinished.mkdir()
    listed = pathlib.Path.iterdir

    def committed(path: pathlib.Path) -> Any:
        found = list(listed(path))
        unfinished.rename(tmp_path / "1")
        return iter(found)

    monkeypatch.setattr(pathlib.Path, "iterdir", committed)
    assert RunDirectory(tmp_path, write=False).left_overs() == []


def test_reading_makes_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "none").steps()
    write_step(tmp_path, 4)
    (tmp_path / "5.regrain.orbax-checkpoint-tmp").mkdir()
    before = names(tmp_path)
    opened(tmp_path).check(4)
    assert names(tmp_path) == before


def test_the_second_writer_of_a_process_is_refused_and_the_next_one_is_not(
    run: pathlib.Path,
) -> None:
    first = RunDirectory(run)
    with pytest.raises(BlockingIOError, match=f"open for writing in process {os.getpid()};"):
        RunDirectory(run)
    assert opened(run).steps() == []
    first.close()
    RunDirectory(run).close()


def test_a_writer_that_is_forgotten_lets_go(run: pathlib.Path) -> None:
    first = RunDirectory(run)
    del first
    RunDirectory(run).close()


def hold(run: pathlib.Path) -> "subprocess.Popen[str]":
    """A process that has the directory open, until its input ends."""
    code = textwrap.dedent(
        """
        import sys
        from checkpointing.storage.directory import RunDirectory
        held = RunDirectory(sys.argv[1])
        print("held", flush=True)
        sys.stdin.read()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.processes
def test_a_second_process_is_refused_at_once_and_a_killed_one_does_not_block(
    run: pathlib.Path,
) -> None:
    (run / "3.regrain.orbax-checkpoint-tmp").mkdir()
    with hold(run) as process:
        (run / "5.regrain.orbax-checkpoint-tmp").mkdir()
        with pytest.raises(
            BlockingIOError, match=f"in process {process.pid}; two writers .* close"
        ):
            RunDirectory(run)
        # The refused one has touched nothing of what the first one writes.
        assert names(run) == [".lock", "5.regrain.orbax-checkpoint-tmp"]
        process.send_signal(signal.SIGKILL)
    RunDirectory(run).close()
    assert names(run) == [".lock"]


def test_a_lock_that_is_a_link_does_not_overwrite_what_it_points_to(
    run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "precious").write_text("precious")
    (run / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"in its place is a symbolic link to .*precious: .*\.lock"):
        RunDirectory(run)
    assert (tmp_path / "precious").read_text() == "precious"


OPEN_FILES = pathlib.Path("/proc/self/fd")


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a directory", pathlib.Path.mkdir),
        ("a named pipe", os.mkfifo),
        ("a symbolic link to gone, where there is nothing", lambda path: path.symlink_to("gone")),
    ],
)
def test_what_stands_in_the_place_of_the_lock_is_named(
    kind: str, make: Callable[[pathlib.Path], Any], run: pathlib.Path
) -> None:
    make(run / ".lock")
    before = names(OPEN_FILES) if OPEN_FILES.is_dir() else None
    with pytest.raises(OSError, match=rf"the lock .* in its place is {kind}: .* Move it away, or"):
        RunDirectory(run)
    assert before is None or len(names(OPEN_FILES)) == len(before)
    assert names(run) == [".lock"]
    assert RunDirectory(run, write=False).writer() is None


# How steps come and go.


def test_opening_removes_what_killed_saves_and_deletions_left_and_nothing_else(
    run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("precious")
    for left in (
        "7.regrain.orbax-checkpoint-tmp/iterator",
        ".regrain-trash/3/iterator",
        ".regrain-trash/1",
    ):
        (run / left).mkdir(parents=True)
    (run / ".regrain-trash/link").symlink_to(tmp_path / "precious")
    # Another program may be at work under the last ones: plain Orbax writes so.
    stay = ["1", "12", "4.set-aside-1", "notes", "x.tmp", "x.regrain.orbax-checkpoint-tmp"]
    stay += [".trash", "2.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-17f0"]
    for name in stay:
        (run / name).mkdir()
    (run / "8.regrain.orbax-checkpoint-tmp").symlink_to(tmp_path / "precious")
    (run / "9.regrain.orbax-checkpoint-tmp").write_text("a file")
    RunDirectory(run).close()
    assert sorted(path.name for path in run.iterdir()) == sorted([".lock", *stay])
    assert (tmp_path / "precious/file").read_text() == "precious"


def test_a_directory_in_which_nothing_may_be_made_is_refused_at_once(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory(run).close()
    # Who runs the tests may be root, who may write everywhere.
    asked = []

    def access(path: pathlib.Path, mode: int, *, effective_ids: bool) -> bool:
        asked.append(effective_ids)
        return path != run or not mode & os.W_OK

    known = {access} if os.access in os.supports_effective_ids else set()
    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(os, "supports_effective_ids", known)
    with pytest.raises(PermissionError, match="nothing may be written in the directory"):
        RunDirectory(run)
    monkeypatch.setattr(os, "supports_effective_ids", set())
    with pytest.raises(PermissionError, match="nothing may be written in the directory"):
        RunDirectory(run)
    assert asked == [bool(known), False]
    monkeypatch.undo()
    RunDirectory(run).close()  # it has not stayed locked


@pytest.mark.parametrize(("path", "told"), [("", "is an empty text"), ("~/run", "begins with ~")])
def test_a_path_that_names_no_directory_is_refused(
    path: str, told: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (True, False):
        with pytest.raises(ValueError, match=told):
            RunDirectory(path, write=write)
    assert list(tmp_path.iterdir()) == []


def test_a_trash_that_is_a_link_takes_no_step_elsewhere(
    run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / ".regrain-trash").symlink_to(tmp_path / "elsewhere")
    for step in (1, 2):
        write_step(run, step)
    writer = RunDirectory(run)
    writer.keep_newest(1)
    writer.close()
    assert names(tmp_path / "elsewhere") == []
    assert opened(run).steps() == [2]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_whole_steps_are_kept_and_what_is_not_whole_is_not_counted(
    keep: int, run: pathlib.Path
) -> None:
    for step in (1, 2, 3, 5, 8, 10):
        write_step(run, step)
    (run / "4").mkdir()
    (run / "6").symlink_to(run / "5")
    (run / "7").write_bytes(b"a file")
    (run / "8/train_state/d/0").unlink()
    writer = RunDirectory(run)
    writer.keep_newest(keep, damaged=[10])
    writer.close()
    whole = [step for step in (1, 2, 3, 5) if step in (1, 2, 3, 5)[-keep:]]
    assert opened(run).steps() == sorted([*whole, 4, 6, 7, 8, 10])
    for step in whole:
        opened(run).check(step)


def test_a_kill_while_old_steps_are_deleted_leaves_whole_steps_only(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write_step(run, step)

    class KilledError(BaseException):
        pass

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        """Gets halfway, and is killed."""
        for found in sorted(pathlib.Path(path).rglob("metadata")):
            found.unlink()
        if pathlib.Path(path).exists():
            raise KilledError

    writer = RunDirectory(run)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(KilledError):
            writer.keep_newest(1)
    writer.close()
    assert opened(run).steps() == [3]
    opened(run).check(3)
    RunDirectory(run).close()
    assert not (run / ".regrain-trash").exists()


def test_setting_aside_renames_and_never_overwrites(run: pathlib.Path) -> None:
    writer = RunDirectory(run)
    for number in (1, 2, 3):
        (run / "5").mkdir()
        (run / "5/mark").write_text(str(number))
        assert writer.set_aside(5) == f"5.set-aside-{number}"
    (run / "5").write_text("a file")
    assert (run / writer.set_aside(5)).read_text() == "a file"
    (run / "5").symlink_to("nowhere")
    assert (run / writer.set_aside(5)).is_symlink()
    writer.close()
    assert [(run / f"5.set-aside-{number}/mark").read_text() for number in (1, 2, 3)] == [
        "1",
        "2",
        "3",
    ]
    assert opened(run).steps() == []


def test_sealing_syncs_every_file_and_every_folder(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[pathlib.Path] = []
    monkeypatch.setattr(storage, "sync", synced.append)
    step = write_step(run, 4)
    assert sorted(synced) == sorted([step, *step.rglob("*")])
    assert {"_CHECKPOINT_METADATA", "commit_success.txt"} < {path.name for path in synced}


def test_a_file_that_cannot_be_synced_is_an_error_of_sealing(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(path: pathlib.Path) -> None:
        if path.name == "_METADATA":
            raise OSError(5, "planned")

    monkeypatch.setattr(storage, "sync", sync)
    with pytest.raises(OSError, match="planned"):
        write_step(run, 4)


def test_a_step_gets_its_name_when_it_is_committed_and_the_name_is_synced(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunDirectory(run)
    writer.begin_step(4)
    assert names(run / "4.regrain.orbax-checkpoint-tmp") == ["iterator", "manifest", "train_state"]
    (run / "4.regrain.orbax-checkpoint-tmp/train_state/stray").write_bytes(
        b"left by a save that failed"
    )
    writer.begin_step(4)
    unfinished = pathlib.Path(writer.unfinished_path(4))
    shutil.rmtree(unfinished)
    write_arrays(unfinished)
    assert writer.steps() == []
    synced: list[tuple[pathlib.Path, list[int]]] = []
    monkeypatch.setattr(storage, "sync", lambda path: synced.append((path, writer.steps())))
    writer.commit_step(4, a_manifest(4), ABOUT)
    writer.close()
    assert synced[-1] == (run, [4])
    assert all(steps == [] for _, steps in synced[:-1])
    assert (unfinished, []) in synced
    assert opened(run).check(4).step == 4


def test_what_stands_where_a_step_is_to_be_committed_is_not_destroyed(run: pathlib.Path) -> None:
    writer = RunDirectory(run)
    for step in (4, 5, 6):
        write_arrays(pathlib.Path(writer.unfinished_path(step)))
    (run / "4/theirs").mkdir(parents=True)
    (run / "5").write_text("theirs")
    (run / "6").symlink_to("theirs")
    for step in (4, 5, 6):
        with pytest.raises(OSError, match="irectory"):
            writer.commit_step(step, a_manifest(step), ABOUT)
    writer.close()
    assert (run / "4/theirs").is_dir()
    assert (run / "5").read_text() == "theirs"
    assert (run / "6").is_symlink()


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_files_are_digested_and_checked_the_same_on_any_number_of_cores(
    cores: int, run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_WORTH_A_CORE_BYTES", 1)
    monkeypatch.setattr(storage, "usable_cores", lambda: cores)
    values = {f"train_state/d/{i}": bytes([i]) * (20 - i) * 1000 for i in range(20)}
    monkeypatch.setitem(globals(), "FILES", {**FILES, **values})
    step = write_step(run, 4)
    manifest = opened(run).check(4)
    for name, data in {**FILES, **values}.items():
        digest = hashlib.sha256(data).hexdigest()
        assert manifest.files[name] == {"sha256": digest, "bytes": len(data)}
    for name in ("train_state/d/7", "train_state/d/13"):
        (step / name).write_bytes(b"x" + values[name][1:])
    with pytest.raises(StepDamagedError, match="train_state/d/13 has sha256"):
        opened(run).check(
            4
        )  # in the order of the manifest, whichever thread is the first to find one
    assert opened(run).check(4, "manifest") == manifest


def test_a_position_is_written_as_the_iterators_state() -> None:
    state = PIPELINE.iterate(PIPELINE.position(4)).get_state()
    assert state == dataclasses.asdict(Position(**state))


_FORKING = """
import os, sys, time
from checkpointing.storage.directory import RunDirectory
directory = RunDirectory(sys.argv[1])
if os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(os.getpid(), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
def test_a_forked_child_that_outlives_the_writer_does_not_keep_the_lock(
    tmp_path: pathlib.Path,
) -> None:
    command = [sys.executable, "-c", _FORKING, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as writer:
        try:
            assert writer.communicate(timeout=60)[0].strip()
            assert writer.returncode == -signal.SIGKILL
            RunDirectory(tmp_path / "run").close()
        finally:
            os.killpg(writer.pid, signal.SIGKILL)


@pytest.mark.processes
def test_a_closed_directory_can_be_opened_though_a_child_was_forked(tmp_path: pathlib.Path) -> None:
    program = """
import os, sys
from checkpointing.storage.directory import RunDirectory
for _ in range(20):
    directory = RunDirectory(sys.argv[1])
    if (child := os.fork()) == 0:
        os._exit(0)
    directory.close()
    RunDirectory(sys.argv[1]).close()
    os.waitpid(child, 0)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
