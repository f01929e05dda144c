"""Checkpoints in gs://, on a store of this machine: whatever is killed, lost or slow, a step is whole or none."""

import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import orbax.checkpoint as ocp
import pytest
from packaging.version import Version

import checkpointing
from checkpointing import Checkpoints
from checkpointing.storage.base import StorageUnavailableError, Writer
from checkpointing.storage.directory import RunDirectory, StepDamagedError
from tests.checkpointing.test_checkpoints import (
    a_pipeline,
    a_state,
    bits,
    train,
    train_step,
    uninterrupted,
)
from tests.checkpointing.test_joint_checkpoints import TRAINING, lines
from tests.jax_processes import ROOT, run_processes
from tests.object_store import BUCKET, LOST, Request, Store, running_store

RUN = f"gs://{BUCKET}/runs/a"
FOLDER = "runs/a/"
#: Objects of a step that nothing of ours goes by once it is there.
FOR_ORBAX = {"_CHECKPOINT_METADATA", "commit_success.txt"}


@pytest.fixture
def store() -> Iterator[Store]:
    with running_store() as store:
        yield store


def opened(keep: int = 9, timeout_s: float = 30) -> Checkpoints:
    return Checkpoints(RUN, a_pipeline(), 1, keep, process_timeout_s=timeout_s)


def write(steps: int, keep: int = 9) -> None:
    """Trains from where the run is, with every step saved."""
    with opened(keep) as checkpoints:
        train(checkpoints, checkpoints.resume(a_state()), steps)


def test_a_run_goes_on_as_if_it_had_never_stopped(store: Store) -> None:
    expected = uninterrupted("pad")
    with opened(keep=2) as checkpoints:
        run = checkpoints.resume(a_state())
        assert run.position.step == 0
        trace, state = train(checkpoints, run, 3)
        assert not checkpoints.save(run.batches, state, force=True)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    with opened(keep=2) as checkpoints:
        run = checkpoints.resume(a_state())
        assert run.position.step == 3
        assert bits(run.train_state) == expected[2][1]
        trace += train(checkpoints, run)[0]
    assert trace == expected
    # Nothing is left but two whole steps, which everybody can read.
    last = len(expected)
    tops = {name.partition("/")[0] for name in store.names(FOLDER)}
    assert tops == {str(last - 1), str(last)}
    manifest, arrays = checkpointing.load(RUN)
    assert manifest.step == last
    assert arrays["/w"].tobytes() == state_of(expected[-1])
    told = checkpointing.provenance(RUN)
    assert told.records_at(0).rows.tolist() == [one - 100 for one in expected[0][0] if one != -1]
    manager = ocp.CheckpointManager(RUN)
    assert manager.all_steps() == [last - 1, last]
    only = ocp.args.Composite(
        iterator=ocp.args.JsonRestore(), train_state=ocp.args.StandardRestore()
    )
    restored = manager.restore(last - 1, args=only)
    assert restored["iterator"]["step"] == last - 1
    assert bits(restored["train_state"]["w"]) == {"": expected[-2][1]["['w']"]}
    manager.close()


def state_of(step: Any) -> bytes:
    data: bytes = step[1]["['w']"]
    return data[-16:]  # four numbers


def test_a_run_is_inspected_as_in_a_directory(store: Store) -> None:
    with opened() as checkpoints:
        train(checkpoints, checkpoints.resume(a_state()), 2)
        checkpoints.wait()
        report = checkpointing.inspect_run(RUN, verify="full")
        assert report.writer == Writer(os.getpid(), holds_lock=False, host=socket.gethostname())
    assert [(one.step, one.health) for one in report.steps] == [(1, "intact"), (2, "intact")]
    files = report.steps[1].files
    sizes = {name: len(store.read(f"{FOLDER}2/{name}")) for name in store.names(f"{FOLDER}2/")}
    assert files.num_files == len(sizes)
    assert sum(files.item_bytes.values()) == sum(sizes.values())
    assert files.item_bytes["iterator"] == sizes["iterator/metadata"]
    assert files.save_seconds
    store.write(f"{FOLDER}3.regrain.orbax-checkpoint-tmp-0a1b2c/train_state/x", b"12")
    store.write(f"{FOLDER}2.set-aside-1/x", b"345")
    store.write(f"{FOLDER}.regrain-trash/1", json.dumps({}).encode())
    store.remove(f"{FOLDER}2/_CHECKPOINT_METADATA")
    store.remove(f"{FOLDER}2/iterator/metadata")
    report = checkpointing.inspect_run(RUN)
    assert report.writer is None
    assert [one.health for one in report.steps] == ["intact", "damaged"]
    assert report.steps[1].files.committed is not None
    assert report.steps[1].files.save_seconds is None
    first = sum(len(store.read(f"{FOLDER}1/{name}")) for name in store.names(f"{FOLDER}1/"))
    assert {(one.name, one.kind, one.bytes) for one in report.left_overs} == {
        (".regrain-trash", "deleted", first),
        ("2.set-aside-1", "set aside", 3),
        ("3.regrain.orbax-checkpoint-tmp-0a1b2c", "unfinished", 2),
    }


def test_names_of_any_kind_are_no_matter(store: Store) -> None:
    # Before 0.12, Orbax makes an URL of a name, as if it were one already.
    percent = "50%" if Version(version("orbax-checkpoint")) >= Version("0.12") else "50"
    run = f"gs://{BUCKET}/an employee's/{percent}/\u00e4+b=1 & c/run"
    for step in (1, 2):
        with Checkpoints(run, a_pipeline(), 1, 1, process_timeout_s=30) as checkpoints:
            found = checkpoints.resume(a_state())
            assert found.position.step == step - 1
            train(checkpoints, found, 1)
    assert {name.split("/")[4] for name in store.names()} == {"2"}


# What is damaged.


def cut(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return bytes([*data[:-1], data[-1] ^ 1])


def longer(data: bytes) -> bytes:
    return data + b"\0" * 1000


def test_each_object_that_is_not_as_it_was_is_found(store: Store) -> None:
    write(1)
    names = [name for name in store.names(f"{FOLDER}1/") if name not in FOR_ORBAX]
    assert len(names) > 5
    run = RunDirectory(RUN, write=False)
    for name in names:
        whole = store.read(f"{FOLDER}1/{name}")
        for damage in (cut, flipped, longer, None):
            store.remove(f"{FOLDER}1/{name}")
            if damage:
                store.write(f"{FOLDER}1/{name}", damage(whole))
            caught = []
            for index in (0, 1):
                try:
                    run.check(1, share=(index, 2))
                except StepDamagedError as error:
                    caught.append(str(error))
            assert caught, (name, damage)
            if damage is not flipped or not name.startswith("train_state"):
                with pytest.raises(StepDamagedError):
                    run.check(1, "manifest")
        store.write(f"{FOLDER}1/{name}", whole)
    assert run.check(1).step == 1
    store.write(f"{FOLDER}1/train_state/more", b"")
    with pytest.raises(StepDamagedError, match="train_state/more does not belong to it"):
        run.check(1, "manifest")


@pytest.mark.parametrize("missing", ["manifest/metadata", "train_state/manifest.ocdbt"])
def test_a_damaged_step_is_skipped_and_set_aside(
    missing: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    write(2)
    store.remove(f"{FOLDER}2/{missing}")
    with caplog.at_level(logging.WARNING), opened() as checkpoints:
        assert checkpoints.steps() == [1, 2]
        run = checkpoints.resume(a_state())
        assert run.position.step == 1
        assert f"step 2 is damaged and was skipped: {missing} is missing" in caplog.text
        train(checkpoints, run, 1)
        checkpoints.wait()
    assert RunDirectory(RUN, write=False).check(2).step == 2
    aside = store.names(f"{FOLDER}2.set-aside-1/")
    assert len(aside) > 5
    assert missing not in aside
    assert RunDirectory(RUN, write=False).steps() == [1, 2]


def test_what_is_not_of_the_run_is_not_touched(store: Store) -> None:
    theirs = [f"{FOLDER}{name}" for name in ("2/theirs", "7/theirs", "notes.txt", "x/1/y", "12")]
    theirs += ["runs/a", "runs/ab/1/manifest/metadata"]
    for name in theirs:
        store.write(name, b"theirs")
    with opened(keep=1) as checkpoints:
        run = checkpoints.resume(a_state())
        assert checkpoints.steps() == []
        _, state = train(checkpoints, run, 1)
        checkpoints.save(run.batches, train_step(state, next(run.batches)))
        with pytest.raises(RuntimeError, match="there is something else than what was put here"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
    left = {name for name in store.names() if not name.startswith(f"{FOLDER}1/")}
    assert left == set(theirs)
    assert {store.read(name) for name in theirs} == {b"theirs"}


# Kills.

#: Waits for a word, and then trains in a child: to import all of it takes longer than to be killed. Nothing
#: of JAX is started before.
CHILDREN = """
import os, sys
import checkpointing, checkpointing.storage.objects, google.cloud.storage, gcsfs, pytest, hypothesis
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        from tests.checkpointing.test_object_storage import write
        write(int(line), keep=1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

#: Which request of the save of step 2, after which step 1 is deleted, a process is killed at.
INSTANTS: dict[str, Callable[[Request], bool]] = {
    "arrays are written": lambda one: one.by == "tensorstore" and one.kind == "put",
    "it is copied": lambda one: one.kind == "copy",
    "the manifest is put": lambda one: one.name == f"{FOLDER}2/manifest/metadata" and one.kind == "put",
    "Orbax's mark is put": lambda one: one.name == f"{FOLDER}2/commit_success.txt" and one.kind == "put",
    "what was copied is deleted": lambda one: one.kind == "delete" and one.by == "client" and "2.regrain" in one.name,
    "the manifest is deleted": lambda one: one.kind == "delete" and one.name == f"{FOLDER}1/manifest/metadata",
    "the rest is deleted": lambda one: one.kind == "delete" and f"{FOLDER}1/train_state" in one.name,
}  # fmt: skip


@pytest.fixture(scope="module")
def killed_at() -> Iterator[Callable[[Store, Callable[[Request], bool]], None]]:
    """Trains two steps in a process that is killed when it asks for something, before it is done."""
    # Of another process's environment the store is not known yet: the fixture of it comes later.
    with running_store():
        command = [sys.executable, "-c", CHILDREN]
        python_path = {"PYTHONPATH": str(ROOT)}
        children = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **python_path},
        )
    assert children.stdin
    assert children.stdout
    given, answered = children.stdin, children.stdout

    def kill(store: Store, instant: Callable[[Request], bool]) -> None:
        known, child, begun = threading.Event(), 0, False

        def fails(request: Request) -> int | None:
            nonlocal begun
            begun |= "/2.regrain" in request.name
            if not begun or not instant(request):
                return None
            assert known.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            return 500

        store.fails = fails
        given.write("2\n")
        given.flush()
        child = int(answered.readline())
        known.set()
        assert int(answered.readline()) == -signal.SIGKILL
        store.fails = lambda _: None

    yield kill
    given.close()
    assert children.wait(60) == 0
    answered.close()


@pytest.mark.processes
@pytest.mark.parametrize("instant", INSTANTS)
def test_a_process_that_is_killed_in_a_save_leaves_a_run_that_goes_on_exactly(
    instant: str, killed_at: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    killed_at(store, INSTANTS[instant])
    step = 1 + (list(INSTANTS).index(instant) > list(INSTANTS).index("the manifest is put"))
    with caplog.at_level(logging.WARNING), opened(keep=1) as checkpoints:
        assert "was left open by process" in caplog.text
        run = checkpoints.resume(a_state())
        assert run.position.step == step
        assert "damaged" not in caplog.text
        whole = checkpoints.steps()
        tops = {name.partition("/")[0] for name in store.names(FOLDER)}
        assert tops == {*map(str, whole), ".writer"}
        assert ocp.CheckpointManager(RUN).all_steps() == whole
        trace, _ = train(checkpoints, run, 1)
    assert trace == uninterrupted("pad")[step : step + 1]
    assert {name.partition("/")[0] for name in store.names(FOLDER)} == {str(step + 1)}


# Two writers.


def test_the_newest_writer_is_the_one(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with opened() as old:
        run = old.resume(a_state())
        _, state = train(old, run, 1)
        old.wait()
        with caplog.at_level(logging.WARNING), opened() as new:
            assert f"was left open by process {os.getpid()} on " in caplog.text
            taken = new.resume(a_state())
            assert taken.position.step == 1
            old.save(run.batches, train_step(state, next(run.batches)))
            with pytest.raises(
                RuntimeError, match="another writer has taken these checkpoints over"
            ):
                old.wait()
            assert new.steps() == [1]
            train(new, taken, 2)
            new.wait()
            assert new.steps() == [1, 2, 3]
    assert [RunDirectory(RUN, write=False).check(step).step for step in (1, 2, 3)] == [1, 2, 3]
    assert not [name for name in store.names(FOLDER) if ".orbax" in name or ".writer" in name]


@pytest.mark.parametrize("at", ["list", "copy", "3/iterator", "3/manifest"])
def test_a_writer_that_wakes_up_in_its_commit_spoils_no_step_of_another_one(
    at: str, store: Store
) -> None:
    write(2)
    asleep, wake = threading.Event(), threading.Event()

    def sleeps(request: Request) -> None:
        found = request.kind == "put" and at in request.name
        if at in ("list", "copy"):  # of what is to be removed, or what is written
            found = request.kind == at and (at == "copy" or request.name == f"{FOLDER}3/")
        if found and not asleep.is_set():
            asleep.set()
            assert wake.wait(60)

    with opened() as old:
        run = old.resume(a_state())
        store.fails = sleeps
        train(old, run, 1)
        assert asleep.wait(60)
        with opened() as new:  # which has the same step to save
            train(new, new.resume(a_state()), 1)
            new.wait()
            wake.set()
            with pytest.raises(
                RuntimeError, match="another writer has taken these checkpoints over"
            ):
                old.wait()
            assert new.steps() == [1, 2, 3]
    assert RunDirectory(RUN, write=False).check(3).step == 3
    with opened() as checkpoints:
        assert bits(checkpoints.resume(a_state()).train_state) == uninterrupted("pad")[2][1]


# A store that fails.


# Google's client leaves the answer to a download that failed for the garbage collector to close.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
def test_a_store_that_fails_now_and_then_is_asked_again(store: Store) -> None:
    failed: set[tuple[str, str, str]] = set()
    lock = threading.Lock()

    def fails(request: Request) -> int | None:
        # Each kind of request of each client once; of this one's, the answer of each kind is lost too.
        ways = {"503": 503, "lost": LOST} if request.by == "client" else {"503": 503}
        if request.by == "gcsfs" and request.kind != "put":
            return None
        with lock:
            for way, status in ways.items():
                key = request.by, request.kind, way
                if key not in failed:
                    failed.add(key)
                    return status
        return None

    store.fails = fails
    with opened(keep=1) as checkpoints:
        trace, _ = train(checkpoints, checkpoints.resume(a_state()), 2)
        checkpoints.wait()
        assert checkpoints.steps() == [2]
    assert trace == uninterrupted("pad")[:2]
    kinds = {kind for by, kind, _ in failed if by == "client"}
    assert kinds >= {"bucket", "list", "get", "put", "copy", "delete"}
    store.fails = lambda _: None
    assert RunDirectory(RUN, write=False).check(2).step == 2


def test_a_put_or_copy_whose_answer_is_lost_is_known_for_ones_own(store: Store) -> None:
    lost: list[str] = []

    def fails(request: Request) -> int | None:
        new = request.kind == "copy" or (
            request.kind == "put" and request.name.startswith(f"{FOLDER}1/")
        )
        if request.by == "client" and new and request.kind not in lost:
            lost.append(request.kind)
            return LOST
        return None

    store.fails = fails
    write(1)
    assert sorted(lost) == ["copy", "put"]
    assert RunDirectory(RUN, write=False).check(1).step == 1


def test_a_store_that_falls_silent_is_an_error_in_bounded_time(store: Store) -> None:
    with opened(timeout_s=2) as checkpoints:
        run = checkpoints.resume(a_state())
        _, state = train(checkpoints, run, 1)
        checkpoints.wait()
        store.silent.set()
        state = train_step(state, next(run.batches))
        checkpoints.save(run.batches, state)
        with pytest.raises(RuntimeError, match=r"the save of step 2 .* the store does not answer"):
            checkpoints.wait()
        with pytest.raises(StorageUnavailableError, match="to list it has failed"):
            checkpoints.steps()
        store.silent.clear()
        checkpoints.save(run.batches, train_step(state, next(run.batches)))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
        # What cannot be reached is not taken for damaged.
        store.fails = lambda one: 403 if one.kind == "get" and "3/" in one.name else None
        with pytest.raises(PermissionError, match="not allowed"):
            checkpoints.resume(a_state())

        def falls_silent(request: Request) -> None:
            if request.by == "tensorstore":
                store.silent.set()

        store.fails = falls_silent
        with pytest.raises(
            RuntimeError, match=r"step 3 is whole, but .* the store does not answer"
        ):
            checkpoints.resume(a_state())
        store.silent.clear()


def test_what_orbax_may_not_read_is_not_taken_for_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(2)

    def forbidden(*_: Any) -> None:
        raise ValueError("PERMISSION_DENIED")  # as TensorStore says it

    with opened() as checkpoints:
        # Not by the store: what TensorStore still has under way then reaches an event loop of Orbax's that is closed.
        monkeypatch.setattr("checkpointing.checkpoints.read_arrays", forbidden)
        with pytest.raises(RuntimeError, match="step 2 is whole, but its train state cannot be"):
            checkpoints.resume(a_state(), verify="manifest")
        for verify in ("full", "manifest"):
            with pytest.raises(RuntimeError, match="step 2 is whole, but its train state cannot"):
                checkpointing.load(RUN, verify=verify)


@pytest.mark.parametrize("answer", [b"<html>a proxy's page</html>", b"["])
def test_an_answer_that_is_none_of_a_store_is_not_taken_for_damage(
    answer: bytes, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    run = RunDirectory(RUN, write=False)

    def listed(*_: Any, **__: Any) -> None:
        json.loads(answer)

    monkeypatch.setattr("google.cloud.storage.Client.list_blobs", listed)
    with pytest.raises(StorageUnavailableError, match="to list it has failed"):
        run.check(1)


@pytest.mark.parametrize(
    ("name", "text"),
    [(".regrain-trash/notes.txt", b"x"), (".regrain-trash/1", b"x"), (".writer", b"[" * 4000)],
)
def test_what_is_no_note_of_ours_keeps_nobody_from_opening(
    name: str, text: bytes, store: Store
) -> None:
    write(1)
    store.write(FOLDER + name, text)
    with opened() as checkpoints:
        assert checkpoints.steps() == [1]
        assert RunDirectory(RUN, write=False).left_overs() is not None
    assert (FOLDER + name in store.names()) == name.startswith(".regrain-trash")


def test_a_step_that_is_whole_is_saved_though_orbaxs_mark_fails(store: Store) -> None:
    store.fails = lambda one: 403 if one.kind == "put" and "commit_success" in one.name else None
    write(1)
    assert RunDirectory(RUN, write=False).check(1).step == 1
    store.fails = lambda _: None
    opened().close()
    assert ocp.CheckpointManager(RUN).all_steps() == [1]


def test_what_fails_to_open_leaves_no_writer(store: Store) -> None:
    store.fails = lambda one: 403 if one.kind == "list" else None
    with pytest.raises(PermissionError, match="to list it is not allowed"):
        RunDirectory(RUN)
    assert store.names() == []


def test_a_deletion_that_is_finished_at_the_start_leaves_nothing_in_the_way(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    write(2)
    # Step 2 was set aside, and its writer killed.
    found = {one: int(store.storage.objects[BUCKET][FOLDER + one]["generation"])
             for one in store.names(FOLDER) if one.startswith("2/")}  # fmt: skip
    note = {name.removeprefix("2/"): generation for name, generation in found.items()}
    store.write(f"{FOLDER}.regrain-trash/2", json.dumps(note).encode())
    write(1)
    assert "stood in the way" not in caplog.text
    assert RunDirectory(RUN, write=False).steps() == [1, 2]


# What is needed.


@pytest.mark.parametrize("missing", ["google.cloud.storage", "gcsfs"])
def test_what_is_not_installed_is_named_with_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "gcsfs":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    for find in (opened, lambda: checkpointing.load(RUN)):
        with pytest.raises(
            ModuleNotFoundError, match=rf"{missing}, .* pip install 'regrain\[gcs\]'"
        ):
            find()


@pytest.mark.parametrize(
    "address",
    [
        "gs://",
        "gs://b",
        "gs://bucket",
        "gs://bucket/",
        "gs://bucket//a",
        "gs://bucket/*",
        "gs://bucket/a%20b",
        "gs://bucket/a;b",
        "gs://bucket/./a",
        "gs://bucket/a/..",
        "gs://B/a",
    ],
)
def test_an_address_that_cannot_be_one_of_a_run_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is no address for checkpoints: give gs://bucket/name"):
        RunDirectory(address, write=False)


@pytest.mark.parametrize("item", ["", "/", "/train_state", "/manifest/"])
def test_the_address_of_a_step_is_not_taken_for_that_of_a_run(item: str, store: Store) -> None:
    write(2)
    for mode in (True, False):
        with pytest.raises(ValueError, match=rf"is of one step, .*: give that, {RUN} "):
            RunDirectory(f"{RUN}/2{item}", write=mode)
    # A run may be named by a number, or as an item is.
    for address in (f"{RUN}/7{item}", f"{RUN}{item}", f"gs://{BUCKET}/7{item}"):
        assert isinstance(RunDirectory(address, write=False).steps(), list)


def test_a_bucket_that_is_not_there_is_an_error(store: Store) -> None:
    for write in (True, False):
        with pytest.raises(FileNotFoundError, match="no such bucket"):
            RunDirectory("gs://no-such-bucket/a", write=write).steps()


@pytest.mark.processes
def test_importing_the_package_imports_nothing_of_it() -> None:
    program = (
        "import sys, checkpointing\n"
        "print([one for one in ('gcsfs', 'fsspec', 'google.cloud.storage', 'requests') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.processes
def test_two_processes_save_and_resume_together_in_the_store_as_on_a_disk(
    store: Store, tmp_path: pathlib.Path
) -> None:
    program = TRAINING + (
        "found = []\n"
        "for where in arguments:\n"
        "    train(where, 3)\n"
        "    now, seen, run = train(where, 5)\n"
        '    found.append({"seen": seen, "end": ended(now), "start": run.position.step})\n'
        "print(json.dumps(found))\n"
    )
    for in_store, on_disk in lines(run_processes(program, 2, RUN, tmp_path / "run")):
        assert in_store == on_disk
        assert in_store["start"] == 2
    assert {name.partition("/")[0] for name in store.names(FOLDER)} == {"2", "4"}
    manifest, arrays = checkpointing.load(RUN)
    expected, theirs = checkpointing.load(tmp_path / "run")
    assert bits(arrays) == bits(theirs)
    assert manifest.next_ids == expected.next_ids
    assert any("ocdbt.process_1/d/" in name for name in manifest.files)
