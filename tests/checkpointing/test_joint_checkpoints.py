"""Checkpoints of several JAX processes: one step for all, on any number of them, or no step at all."""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

import checkpointing
import loader
from tests.jax_processes import run_processes

pytestmark = pytest.mark.processes

#: A run of 15 steps of 24 records, whose train state has every kind of leaf.
TRAINING = """
import json, os, signal
import numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import checkpointing, loader
from tests.checkpointing.test_joint_checkpoints import a_pipeline

mesh = Mesh(np.array(jax.devices()), ("data",))
everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

def state():
    def global_leaves():
        return {"w": jnp.zeros((24, 3)), "sum": jnp.zeros(3), "key": jax.random.key(1), "weak": jnp.asarray(1.0) * 1,
                "step": jnp.zeros((), jnp.int32), "empty": jnp.zeros((0, 2))}
    places = {"w": split, "sum": everywhere, "key": everywhere, "weak": everywhere, "step": everywhere, "empty": everywhere}
    made = jax.jit(global_leaves, out_shardings=places)()
    return {"all": made, "local": jnp.zeros(2), "bound": jax.device_put(jnp.zeros(2), jax.local_devices()[0]),
            "numpy": np.zeros(3), "number": 0, "keys": jax.random.key(2)}

@jax.jit
def update(one, x):
    return {**one, "w": one["w"] + x, "sum": one["sum"] + x.sum(0), "key": jax.random.split(one["key"])[0], "step": one["step"] + 1}

def train(run_directory, until, each=lambda checkpoints, run, state: state, pipeline=None, **settings):
    seen = []
    pipeline = a_pipeline() if pipeline is None else pipeline
    with checkpointing.Checkpoints(run_directory, pipeline, 2, 3, process_timeout_s=30) as checkpoints:
        run = checkpoints.resume(state(), **settings)
        now = run.train_state
        for batch in run.batches:
            seen.append([run.batches.position.step, batch["id"].tolist()])
            x = loader.global_batch({"x": batch["x"]}, split)["x"]
            now = {"all": update(now["all"], x), "local": now["local"] + 1, "bound": now["bound"] + 1,
                   "numpy": now["numpy"] + 1, "number": now["number"] + 1, "keys": jax.random.split(now["keys"])[0]}
            now = each(checkpoints, run, now)
            checkpoints.save(run.batches, now)
            if run.batches.position.step == until:
                break
    return now, seen, run

def ended(state):
    host = lambda leaf: np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(leaf)).tolist()
    one = dict(state["all"])
    return {**{name: host(one[name]) for name in ("w", "sum", "step", "weak", "empty")},
            "key": host(jax.random.key_data(one["key"])), "keys": np.asarray(jax.random.key_data(state["keys"])).tolist(),
            **{name: np.asarray(state[name]).tolist() for name in ("local", "bound", "numpy", "number")},
            "weak_type": one["weak"].weak_type, "committed": [state["local"].committed, state["bound"].committed]}
"""


def a_pipeline(num_records: int = 100, batch_size: int = 24) -> loader.Pipeline:
    x = np.arange(3 * num_records, dtype=np.float32).reshape(num_records, 3)
    config = loader.PipelineConfig(batch_size, 17, num_epochs=3, final_batch="pad")
    return loader.Pipeline(loader.ArraySource({"x": x}), config)


def lines(ended: list[tuple[int, str, str]], code: int = 0) -> list[Any]:
    """What each process has printed as JSON."""
    for found, _, error in ended:
        assert found == code, error[-4000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def check_terminals(terminals: list[tuple[str, str]]) -> None:
    """Nothing is shown but lines of ours, and those by the first process alone."""
    for number, (out, error) in enumerate(terminals):
        # Of the CPU's stand-in for a network, in C++; of what the program itself prints there is one line.
        printed = [line for line in out.splitlines() if line and not line.startswith("[Gloo] Rank")]
        assert len(printed) == 1, out
        logged = error.splitlines()
        assert all(
            re.match(r"INFO:checkpointing\.(checkpoints|writer):", line) for line in logged
        ), error
        assert bool(logged) == (number == 0)


def test_a_run_goes_on_with_any_number_of_processes(tmp_path: pathlib.Path) -> None:
    shown = "import logging; logging.basicConfig(level=logging.INFO)\n"
    program = (
        shown
        + TRAINING
        + (
            "now, seen, run = train(arguments[0], int(arguments[1]))\n"
            'print(json.dumps({"seen": seen, "end": ended(now), "start": run.position.step}))\n'
        )
    )
    (expected,) = lines(run_processes(program, 1, tmp_path / "whole", 15))
    steps: dict[int, list[Any]] = {}
    found: list[Any] = []
    # It stops between two saves, so that some steps are done twice; "3" divides 24 like the others.
    for count, until, start in ((2, 5, 0), (3, 9, 4), (1, 15, 8)):
        processes = run_processes(program, count, tmp_path / "run", until)
        found = lines(processes)
        check_terminals([(out, error) for _, out, error in processes])
        for place, (step, _) in enumerate(found[0]["seen"]):
            ids = [record for one in found for record in one["seen"][place][1]]
            assert steps.setdefault(step, ids) == ids
        for one in found:
            assert one["start"] == start
            assert one["end"] == found[0]["end"]
    assert [[step, steps[step]] for step in sorted(steps)] == expected["seen"]
    assert found[0]["end"] == expected["end"]
    assert expected["end"]["committed"] == [False, True]
    # Anybody can look at it, on one process.
    manifest, arrays = checkpointing.load(tmp_path / "run")
    assert manifest.step == 14
    assert arrays["/all/w"].shape == (24, 3)
    assert not list((tmp_path / "run/14").glob("part-*"))


def test_batch_size_and_number_of_processes_change_together(tmp_path: pathlib.Path) -> None:
    program = TRAINING + (
        "pipeline = a_pipeline(batch_size=int(arguments[2]))\n"
        'update = jax.jit(lambda one, x: {**one, "step": one["step"] + 1})\n'
        'now, seen, _ = train(arguments[0], int(arguments[1]), pipeline=pipeline, allow={"batch_size"})\n'
        "print(json.dumps(seen))\n"
    )
    delivered: list[int] = []
    for count, until, size in ((2, 2, 24), (3, 5, 6), (1, 12, 16)):
        found = lines(run_processes(program, count, tmp_path, until, size))
        assert len({len(one) for one in found}) == 1
        for place, (step, _) in enumerate(found[0]):
            if step <= until - until % 2:  # what is behind the last save is delivered again
                delivered += [record for one in found for record in one[place][1] if record != -1]
    # Steps 1 and 2 of 24 records, 3 and 4 of 6, 5 to 12 of 16 (the epoch's last one shorter): one epoch and some.
    assert sorted(delivered[:100]) == list(range(100))
    manifest, _ = checkpointing.load(tmp_path)
    assert [change["changed"]["batch_size"] for change in manifest.history] == [[24, 6], [6, 16]]
    told = checkpointing.provenance(tmp_path, a_pipeline().source)
    by_step: list[Any] = [told.records_at(step).ids for step in range(manifest.step)]
    assert [record for ids in by_step for record in ids if record != -1] == delivered
    for record in (delivered[0], delivered[50], delivered[99]):
        steps = [visit.step for visit in told.steps_of(record, range(1))]
        assert steps == [next(step for step, ids in enumerate(by_step) if record in ids)]


SCENARIOS = """
def outcome(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"

def told(what, do):
    print(json.dumps([what, outcome(do)]), flush=True)

# Each does as many updates as the other: they add up over both, and would wait for each other in vain.
top = arguments[0]
more = 1 if index == 1 else 0
told("other data", lambda: train(f"{top}/data", 3, pipeline=a_pipeline(100 + more)))
told("nowhere", lambda: train(f"{top}/nowhere{more}", 3))

def unreadable():
    source = a_pipeline().source
    if more:
        source.fingerprint = lambda: 1 // 0
    return loader.Pipeline(source, a_pipeline().config)
told("unreadable", lambda: train(f"{top}/unreadable", 3, pipeline=unreadable()))

def differs(checkpoints, run, state):
    return {**state, "numpy": state["numpy"] + more}
told("other copies", lambda: train(f"{top}/copies", 3, differs))

def deleted(checkpoints, run, state):
    if more and run.batches.position.step == 4:
        state["local"].delete()
    return state
told("deleted", lambda: train(f"{top}/deleted", 4, deleted))

def skips(checkpoints, run, state):
    if more and run.batches.position.step == 4:
        next(run.batches)
        next(run.batches)
    return state
told("skips", lambda: train(f"{top}/skips", 4 + 2 * more, skips))

train(f"{top}/damaged", 5)
if index == 0:
    for step, cut in ((4, "train_state/_METADATA"),):
        path = f"{top}/damaged/{step}/{cut}"
        os.truncate(path, os.path.getsize(path) - 1)
def where():
    _, _, run = train(f"{top}/damaged", 3)
    print(json.dumps(["resumed at", run.position.step]), flush=True)
told("damaged", where)
told("mismatch", lambda: train(f"{top}/damaged", 7, pipeline=a_pipeline(100, 12)))
"""


def test_what_one_process_finds_wrong_ends_all_of_them_alike(tmp_path: pathlib.Path) -> None:
    found = []
    for code, out, error in run_processes(TRAINING + SCENARIOS, 2, tmp_path):
        assert code == 0, error[-4000:]
        found.append(dict(json.loads(line) for line in out.splitlines() if line.startswith('["')))
    first, second = found
    for one in found:
        assert one["other data"].startswith("ElsewhereError: process 1")
        assert "fingerprint is" in one["other data"]
        assert "leaf /numpy differs between processes" in one["other copies"]
        assert "step is 6, and 4 in process 0" in one["skips"]
        assert one["resumed at"] == 2
        assert one["mismatch"].startswith("CheckpointMismatchError")
        assert "batch_size  checkpoint 24  now 12" in one["mismatch"]
    assert "must be on storage that all processes share" in first["nowhere"]
    assert second["nowhere"].startswith("FileNotFoundError")
    assert second["unreadable"].startswith("ZeroDivisionError")
    assert first["unreadable"].startswith("ElsewhereError: process 1: integer division")
    assert second["deleted"].startswith("ValueError: train state leaf /local has been deleted")
    assert "process 1: train state leaf /local has been deleted" in first["deleted"]
    assert checkpointing.load(tmp_path / "deleted")[0].step == 2
    assert checkpointing.load(tmp_path / "skips")[0].step == 2
    for name in ("data", "copies"):
        with pytest.raises(FileNotFoundError, match="has no steps"):
            checkpointing.load(tmp_path / name)


def test_a_process_killed_in_a_save_leaves_the_step_before_and_ends_the_others(
    tmp_path: pathlib.Path,
) -> None:
    program = TRAINING + (
        "def kills(checkpoints, run, state):\n"
        "    if index == 1 and run.batches.position.step == 4:\n"
        "        checkpoints._writer.settle()  # else it is the save before that is killed\n"
        "        checkpoints._writer._arrays.finish = lambda begun: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return state\n"
        "train(arguments[0], 15, kills)\n"
    )
    (code, _, error), (killed, _, _) = run_processes(program, 2, tmp_path, timeout=60)
    assert killed == -9
    assert code != 0
    assert "JAX distributed service detected fatal errors" in error or "the save of step 4" in error
    assert checkpointing.load(tmp_path)[0].step == 2
    (found,) = lines(
        run_processes(
            TRAINING + "_, _, run = train(arguments[0], 6)\nprint(run.position.step)\n", 1, tmp_path
        )
    )
    assert found == 2


@pytest.mark.parametrize(
    ("sent", "saves_if", "multiple"),
    [
        ("SIGTERM", "True", 1),
        ("SIGINT", "batches.position.step % 5 == 0", 5),
        ("SIGTERM", "batches.position.step % 100_000 == 0 or self.stop_requested", 1),
    ],
    ids=["each step", "each fifth step", "when it must"],
)
def test_a_signal_to_one_process_stops_all_at_one_saved_step(
    tmp_path: pathlib.Path, sent: str, saves_if: str, multiple: int
) -> None:
    program = TRAINING + (
        "def signals(checkpoints, run, state):\n"
        "    if index == 1 and run.batches.position.step == 3:\n"
        f"        os.kill(os.getpid(), signal.{sent})\n"
        "    jax.block_until_ready(state)\n"
        "    return state\n"
        "checkpoints = checkpointing.Checkpoints\n"
        "enter = checkpoints.__enter__\n"
        "def entered(self):\n"
        "    self.stops = self.stop_on_signals()\n"
        "    self.stops.__enter__()\n"
        "    return enter(self)\n"
        "checkpoints.__enter__ = entered\n"
        "save = checkpoints.save\n"
        f"checkpoints.save = lambda self, batches, state: ({saves_if}) and save(self, batches, state)\n"
        "import time\n"
        "pipeline = loader.Pipeline(a_pipeline().source, loader.PipelineConfig(24, 17, num_epochs=None, final_batch='pad'))\n"
        "train(arguments[0], 100_000, signals, pipeline)\n"
    )
    ended = run_processes(program, 2, tmp_path, timeout=60)
    assert [code for code, _, _ in ended] == [143, 143], ended[0][2][-2000:]
    manifest, arrays = checkpointing.load(tmp_path)
    assert manifest.step >= 3
    assert manifest.step % multiple == 0
    assert arrays["/number"] == manifest.step
