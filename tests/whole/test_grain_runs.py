"""Runs on a Grain chain: saved, killed and resumed; refused where data, config, chain, state or Grain differ."""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import checkpointing
import loader
from checkpointing import CheckpointMismatchError, Checkpoints, Manifest, testing
from checkpointing.manifest import seal
from checkpointing.together.processes import Processes
from loader import ArraySource, Fingerprint, GrainStream
from loader.identity.base import Ahead
from loader.streams.chain_identity import ChainIdentity
from loader.streams.grain import element_digest
from tests.loader.test_grain_stream import (
    NO_THREADS,
    THREADS,
    chains,
    fails_once_at,
    is_even,
    jitter,
    record,
)

STEPS = 10
NUM_RECORDS = 60


def data(first: float = 0) -> Fingerprint:
    return loader.fingerprint(ArraySource({"x": np.arange(first, first + NUM_RECORDS)}))


def chain(
    *,
    seed: int = 3,
    batch_size: int = 4,
    count: int = NUM_RECORDS,
    noise: int = 1,
    change: Callable[[Any], Any] = record,
    options: Any = THREADS,
    keeps: bool = True,
) -> Any:
    dataset = (
        grain.MapDataset.range(count).shuffle(seed=seed).map(change).random_map(jitter, seed=noise)
    )
    dataset = dataset.repeat(2).filter(is_even) if keeps else dataset.repeat(2)
    return dataset.to_iter_dataset(options).batch(batch_size)


def stream(dataset: Any = None, first: float = 0, **config: Any) -> GrainStream:
    return GrainStream(
        chain() if dataset is None else dataset, fingerprint=data(first), config=config
    )


def state() -> dict[str, Any]:
    return {"w": jnp.zeros(3), "step": jnp.zeros((), jnp.int32)}


def train(
    directory: pathlib.Path,
    given: GrainStream,
    steps: int = STEPS,
    allow: Any = (),
    save_every: int = 1,
) -> list[str]:
    """Trains on some steps, saving each; what each delivered."""
    trace = []
    with Checkpoints(directory, given, save_every=save_every, keep=3) as checkpoints:
        run = checkpoints.resume(state(), allow=allow)
        train_state = run.train_state
        for _ in range(steps):
            batch = next(run.batches)
            leaf = batch["noise"] if isinstance(batch, dict) and "noise" in batch else np.ones(3)
            train_state = {
                "w": train_state["w"] * 0.5 + jnp.sum(leaf),
                "step": train_state["step"] + 1,
            }
            trace.append(element_digest(batch))
            checkpoints.save(run.batches, train_state)
        run.batches.close()
    return trace


def final(directory: pathlib.Path) -> tuple[Manifest, dict[str, bytes]]:
    manifest, leaves = checkpointing.load(directory)
    return manifest, {path: leaf.tobytes() for path, leaf in leaves.items()}


@pytest.mark.parametrize(
    "name", [None, "map", "mix", "packing", "no IDs", "records", "threads, each a share"]
)
def test_run_on_a_chain_resumes_exactly(tmp_path: pathlib.Path, name: str | None) -> None:
    make = chains()[name] if name else chain
    steps = min(STEPS, len(list(make())))
    whole = train(tmp_path / "whole", stream(make()), steps)
    pieces = [train(tmp_path / "pieces", stream(make()), part) for part in (1, 2, 0, steps - 4, 1)]
    assert [*itertools.chain(*pieces)] == whole
    assert whole == [element_digest(element) for element in itertools.islice(make(), steps)]
    (one, leaves), (other, other_leaves) = final(tmp_path / "whole"), final(tmp_path / "pieces")
    assert leaves == other_leaves
    assert one.place == other.place


@pytest.mark.parametrize("name", ["concatenated and split"])
def test_run_resumes_at_every_place_with_the_same_tail(tmp_path: pathlib.Path, name: str) -> None:
    make = chains()[name]
    expected = [element_digest(element) for element in make()]
    for step in range(len(expected)):
        with Checkpoints(tmp_path, stream(make()), save_every=1, keep=2) as checkpoints:
            run = checkpoints.resume({"w": jnp.zeros(1)})
            tail = stream(make()).iterate(json.loads(json.dumps(run.batches.get_state())))
            assert [element_digest(element) for element in tail] == expected[step:]
            assert element_digest(next(run.batches)) == expected[step]
            checkpoints.save(run.batches, run.train_state)


def test_manifest_holds_chain_config_state_and_next_ids(tmp_path: pathlib.Path) -> None:
    train(tmp_path, stream(mixed="half"), 3)
    manifest, _ = final(tmp_path)
    known = manifest.identity.stream
    assert isinstance(known, ChainIdentity)
    assert known.fingerprint == data()
    assert known.config == {"mixed": "half"}
    assert known.chain == stream().chain
    assert known.chain.grain == grain.__version__
    assert manifest.place.ahead.kind == "ids"
    rest = itertools.islice(chain(), 3, None)
    ids = [entry for batch in rest for entry in batch["id"].tolist()]
    assert manifest.next_ids == tuple(ids[:32])  # eight batches of four
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert len(manifest.to_bytes()) < 64 << 10


def test_threads_and_read_ahead_may_change(tmp_path: pathlib.Path) -> None:
    whole = [element_digest(element) for element in itertools.islice(chain(), STEPS)]
    pieces = [
        train(tmp_path, stream(chain(options=options)), 5) for options in (THREADS, NO_THREADS)
    ]
    assert [*itertools.chain(*pieces)] == whole


def test_end_is_saved_and_found_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = grain.MapDataset.range(8).map(record).batch(4)
    train(tmp_path, stream(dataset), 2)
    manifest, _ = final(tmp_path)
    assert manifest.place.ahead == Ahead("end")
    with caplog.at_level(logging.INFO), Checkpoints(tmp_path, stream(dataset), 1, 3) as checkpoints:
        run = checkpoints.resume(state())
        assert next(run.batches, None) is None
    assert "the run is finished, at step 2" in caplog.text


def other_worker_count() -> Any:
    options = grain.multiprocessing.MultiprocessingOptions(2)
    return chain().mp_prefetch(options)


CHANGES: dict[str, tuple[Callable[[], GrainStream], set[str]]] = {
    "seed": (lambda: stream(chain(seed=4)), {"chain.2.ShuffleMapDataset.seed"}),
    "batch size": (lambda: stream(chain(batch_size=8)), {"chain.8.BatchIterDataset.batch_size"}),
    "random_map's seed": (
        lambda: stream(chain(noise=2)),
        {"chain.4.RandomMapMapDataset.rng_pool.seed"},
    ),
    "content": (lambda: stream(first=1), {"dataset.x"}),
    "config": (lambda: stream(mixed="half"), {"config.mixed"}),
    "function": (lambda: stream(chain(change=is_even)), {"chain.3.MapMapDataset.transform"}),
    "no filter": (lambda: stream(chain(keeps=False)), {"chain"}),
    "workers": (lambda: stream(other_worker_count()), {"workers"}),
    "two things": (
        lambda: stream(chain(seed=4, batch_size=8), first=1),
        {"dataset.x", "chain.2.ShuffleMapDataset.seed", "chain.8.BatchIterDataset.batch_size"},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_run_on_another_chain_is_refused_with_names(tmp_path: pathlib.Path, name: str) -> None:
    train(tmp_path, stream(), 3)
    before = snapshot(tmp_path)
    make, names = CHANGES[name]
    with pytest.raises(CheckpointMismatchError, match="nothing was restored") as caught:
        train(tmp_path, make(), 1)
    assert {difference.name for difference in caught.value.differences} == names
    assert "may change with allow" not in str(caught.value)
    assert snapshot(tmp_path) == before


def batches_of_ours(**settings: Any) -> GrainStream:
    source = ArraySource({"x": np.arange(400)})
    config = {"batch_size": 8, "seed": 1, "final_batch": "pad", "num_epochs": 2, **settings}
    pipeline = loader.Pipeline(source, loader.PipelineConfig(**config))
    return GrainStream(pipeline.dataset.map(as_it_is), fingerprint=source.fingerprint())


def as_it_is(element: Any) -> Any:
    return element


@pytest.mark.parametrize(
    "change", [{"exclude": [300, 301]}, {"on_bad_record": "mask"}, {"record_keys": True}]
)
def test_a_change_behind_the_next_ids_of_a_pipeline_in_a_chain_is_refused(
    tmp_path: pathlib.Path, change: dict[str, Any]
) -> None:
    train(tmp_path, batches_of_ours(), 3)
    train(tmp_path, batches_of_ours(), 1)
    [name] = change
    with pytest.raises(
        CheckpointMismatchError, match=rf"chain\.1\.NumberedBatches\.config\.{name}"
    ):
        train(tmp_path, batches_of_ours(**change), 1)


class Plus(grain.transforms.Map):  # type: ignore[misc, unused-ignore]
    """As Grain's own examples have it, and counting."""

    def __init__(self, k: float) -> None:
        self.k, self.seen = k, 0

    def map(self, element: Any) -> Any:
        self.seen += 1
        return {**element, "x": element["x"] + self.k}


def test_an_attribute_of_a_transformation_is_compared_and_a_counter_is_not(
    tmp_path: pathlib.Path,
) -> None:
    plus = Plus(1)
    train(tmp_path, stream(chain().map(plus)), 3)
    assert plus.seen > 0
    train(tmp_path, stream(chain().map(plus)), 1)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"chain\.9\.MapIterDataset\.transform\.k +checkpoint 1 +now 2",
    ):
        train(tmp_path, stream(chain().map(Plus(2))), 1)


def snapshot(directory: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_records_that_differ_are_named_by_their_ids(tmp_path: pathlib.Path) -> None:
    def given(changed: float) -> GrainStream:
        records = [{"id": f"r{row}", "x": np.float32(row)} for row in range(60)]
        records[7]["x"] = np.float32(changed)
        source = loader.SequenceSource(records, ids="id")
        return GrainStream(
            grain.MapDataset.source(records).batch(4), fingerprint=loader.fingerprint(source)
        )

    train(tmp_path, given(7), 3)
    with pytest.raises(CheckpointMismatchError, match="1 of 60 records differs: id r7"):
        train(tmp_path, given(8), 1)


def test_length_of_the_data_is_compared(tmp_path: pathlib.Path) -> None:
    train(tmp_path, stream(), 3)
    with pytest.raises(
        CheckpointMismatchError, match=r"chain\.1\.RangeMapDataset\.length .* 60 .*now 62"
    ):
        train(tmp_path, stream(chain(count=62)), 1)


def test_chains_pipelines_and_mixtures_are_told_apart(tmp_path: pathlib.Path) -> None:
    pipeline = loader.Pipeline(
        ArraySource({"x": np.arange(60)}), loader.PipelineConfig(4, 1, "pad")
    )
    train(tmp_path / "chain", stream(), 3)
    with (
        Checkpoints(tmp_path / "chain", pipeline, 1, 3) as checkpoints,
        pytest.raises(
            CheckpointMismatchError,
            match=r"stream +checkpoint a chain of Grain's .*now one pipeline",
        ),
    ):
        checkpoints.resume(state())
    with Checkpoints(tmp_path / "one", pipeline, 1, 3) as checkpoints:
        run = checkpoints.resume({"w": jnp.zeros(3)})
        next(run.batches)
        checkpoints.save(run.batches, run.train_state)
    with (
        Checkpoints(tmp_path / "one", stream(), 1, 3) as checkpoints,
        pytest.raises(
            CheckpointMismatchError, match=r"stream +checkpoint one pipeline .*now a chain"
        ),
    ):
        checkpoints.resume({"w": jnp.zeros(3)})


def rewritten(directory: pathlib.Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes a step's manifest anew, sealed, as another version or a wrong program might have."""
    path = directory / str(step) / "manifest" / "metadata"
    value = json.loads(path.read_bytes())
    value.pop("sha256")
    change(value)
    path.write_bytes(seal(value))


def test_state_of_another_grain_is_refused_unless_allowed(tmp_path: pathlib.Path) -> None:
    whole = train(tmp_path / "whole", stream(), 6)
    train(tmp_path / "run", stream(), 3)
    rewritten(tmp_path / "run", 3, lambda value: value["stream"]["chain"].update(grain="0.2.10"))
    with pytest.raises(
        CheckpointMismatchError, match=r"grain_version +checkpoint 0\.2\.10"
    ) as caught:
        train(tmp_path / "run", stream(), 1)
    assert 'grain_version alone may change with allow={"grain_version"}' in str(caught.value)
    assert train(tmp_path / "run", stream(), 3, allow={"grain_version"}) == whole[3:]
    manifest, _ = final(tmp_path / "run")
    (change,) = manifest.history
    assert change["changed"] == {"grain_version": ["0.2.10", grain.__version__]}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"next_index": 999}, r"grain_state .*now refused .*IndexError"),
        ({}, r"grain_state .*now refused .*KeyError"),
        ("x", r"grain_state .*now refused"),
    ],
)
def test_a_state_that_grain_does_not_take_is_refused(
    tmp_path: pathlib.Path, wrong: Any, text: str
) -> None:
    train(tmp_path, stream(), 3)
    rewritten(tmp_path, 3, lambda value: value["state"].update(grain=wrong))
    with pytest.raises(CheckpointMismatchError, match=re.compile(text, re.DOTALL)):
        train(tmp_path, stream(), 1)


def moved(value: dict[str, Any]) -> None:
    value["state"]["grain"]["next_index"] += 1


@pytest.mark.parametrize("name", ["no IDs", "map"])
def test_a_state_of_another_place_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    make = chains()[name]
    train(tmp_path, stream(make()), 3)
    rewritten(tmp_path, 3, moved)
    text = (
        r"next_ids +checkpoint \[" if name == "map" else "next_element +checkpoint no IDs, sha256:"
    )
    with pytest.raises(CheckpointMismatchError, match=text):
        train(tmp_path, stream(make()), 1)


def test_what_a_function_does_now_is_seen_in_the_next_elements(tmp_path: pathlib.Path) -> None:
    def of(offset: int) -> Any:
        def move(number: int) -> Any:
            return {"id": number + offset}

        return grain.MapDataset.range(40).map(move).batch(4)

    train(tmp_path, stream(of(0)), 3)
    with pytest.raises(CheckpointMismatchError, match=r"next_ids .*\[12, 13, 14, 15\] .*\[13, 14"):
        train(tmp_path, stream(of(1)), 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value["next"].update(kind="something"),
        lambda value: value["state"].pop("grain"),
        lambda value: value["next"].update(digest=3),
        lambda value: value["position"].update(offset=3),
        lambda value: value["stream"]["chain"].update(links=3),
        lambda value: value.update(state=None),
        lambda value: value["state"].update(step=2),
        lambda value: value["state"].update(grain={"__tuple__": 1}),
    ],
    ids=["next", "state", "digest", "position", "links", "no state", "step", "encoding"],
)
def test_a_damaged_manifest_is_skipped_for_an_older_one(
    tmp_path: pathlib.Path,
    damage: Callable[[dict[str, Any]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = train(tmp_path, stream(), 3)
    rewritten(tmp_path, 3, damage)
    assert train(tmp_path, stream(), 1) == whole[2:]
    assert "step 3 is damaged and was skipped" in caplog.text


def test_a_flipped_byte_of_the_state_is_damage(tmp_path: pathlib.Path) -> None:
    whole = train(tmp_path, stream(), 3)
    path = tmp_path / "3" / "manifest" / "metadata"
    path.write_bytes(path.read_bytes().replace(b'"next_index":', b'"next_indey":', 1))
    assert train(tmp_path, stream(), 1) == whole[2:]


@pytest.mark.parametrize("catch", [True, False])
def test_after_an_exception_the_last_good_place_is_saved(
    tmp_path: pathlib.Path, catch: bool
) -> None:
    dataset = grain.MapDataset.range(40).map(record).map(fails_once_at(14, 2)).batch(4)
    with Checkpoints(tmp_path, stream(dataset), save_every=100, keep=3) as checkpoints:
        run = checkpoints.resume({"w": jnp.zeros(3)})
        for _ in range(3):
            next(run.batches)
        if catch:
            with pytest.raises(ValueError, match="no record 14"):
                next(run.batches)
        checkpoints.save(run.batches, run.train_state, force=True)
    manifest, _ = final(tmp_path)
    assert manifest.step == 3
    assert manifest.place.ahead.kind == "error"
    assert manifest.place.state == {"step": 3, "grain": {"next_index": 3}}
    with Checkpoints(tmp_path, stream(dataset), save_every=100, keep=3) as checkpoints:
        run = checkpoints.resume({"w": jnp.zeros(3)})
        with contextlib.suppress(ValueError):
            assert next(run.batches)["id"].tolist() == [12, 13, 14, 15]


def test_a_next_element_that_cannot_be_made_any_more_is_a_difference(
    tmp_path: pathlib.Path,
) -> None:
    failures = fails_once_at(14, 0)
    train(tmp_path, stream(grain.MapDataset.range(40).map(record).map(failures).batch(4)), 3)
    failing = fails_once_at(14, 99)
    with pytest.raises(CheckpointMismatchError, match=r"next_ids .*now ValueError: no record 14"):
        train(tmp_path, stream(grain.MapDataset.range(40).map(record).map(failing).batch(4)), 1)


def test_step_log_holds_ids_or_digests(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, plain in (("map", False), ("no IDs", True)):
        path = tmp_path / f"{plain}.log"
        monkeypatch.setenv("REGRAIN_STEP_LOG", str(path))
        train(tmp_path / str(plain), stream(chains()[name]()), 3)
        expected = [*itertools.islice(chains()[name](), 3)]
        lines = checkpointing.read_step_log(path)
        assert [line.position.step for line in lines] == [0, 1, 2]
        marks = [(element_digest(one),) if plain else tuple(one["id"].tolist()) for one in expected]
        assert [line.ids for line in lines] == marks
        assert [line.mask for line in lines] == [(1,) * len(mark) for mark in marks]


def test_provenance_of_a_chain_says_that_it_cannot_be_derived(tmp_path: pathlib.Path) -> None:
    train(tmp_path, stream(), 3)
    with pytest.raises(ValueError, match="is of a chain of Grain's, whose order cannot be derived"):
        checkpointing.provenance(tmp_path)


def test_options_of_the_chain_are_not_those_of_a_resume(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, stream(), 1, 3) as checkpoints:
        with pytest.raises(ValueError, match="read_options are for"):
            checkpoints.resume(state(), read_options=THREADS)
        with pytest.raises(ValueError, match="workers is up to the chain"):
            checkpoints.resume(state(), workers=2)


def test_a_config_that_no_manifest_can_hold_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    deep: Any = 0
    for _ in range(80):
        deep = [deep]
    with pytest.raises(TypeError, match=r"config must .* nested more than"):
        Checkpoints(tmp_path, stream(deep=deep), 1, 3)


def test_several_jax_processes_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = Processes(0, 2, None, 1.0)
    monkeypatch.setattr(checkpointing.checkpoints, "_processes", lambda _: several)
    with pytest.raises(ValueError, match="a GrainStream is for one JAX process"):
        Checkpoints(tmp_path, stream(), 1, 3)
    assert not list(tmp_path.iterdir())


def test_identity_is_that_of_each_stream(tmp_path: pathlib.Path) -> None:
    given = stream(a=1)
    assert given.fingerprint(verify="full") == data()
    assert dataclasses.asdict(given.chain)["workers"] == 0
    assert repr(given).startswith("GrainStream(RangeMapDataset > ShuffleMapDataset")


@pytest.mark.parametrize("name", [None, "no IDs", "packing", "random_map behind", "records"])
def test_assertion_for_test_suites_passes_what_resumes(
    tmp_path: pathlib.Path, name: str | None
) -> None:
    make = chains()[name] if name else chain
    testing.assert_resumes_exactly(lambda: stream(make()), tmp_path, steps=8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plain", [True, False])
def test_assertion_finds_a_counter_in_a_function(tmp_path: pathlib.Path, plain: bool) -> None:
    def make() -> GrainStream:
        calls = itertools.count()

        def counted(element: Any) -> Any:
            x = element["x"] + next(calls)
            return x if plain else {**element, "x": x}

        return stream(
            grain.MapDataset.range(40).map(record).map(counted).batch(4).to_iter_dataset(NO_THREADS)
        )

    text = "next_element" if plain else r"step \d, slot 0, ID \d+: 'x'"
    with pytest.raises(AssertionError, match=text):
        testing.assert_resumes_exactly(make, tmp_path, steps=8)


def test_assertions_that_derive_the_order_refuse_a_chain() -> None:
    checks: list[Any] = [testing.assert_deterministic, testing.assert_covers_epoch]
    for check in checks:
        with pytest.raises(TypeError, match="the order of a GrainStream cannot be derived"):
            check(stream)


#: Waits for each save, so that there is time for a kill.
SCRIPT = """
import sys
import grain, numpy as np
import checkpointing, loader

run_dir, kind = sys.argv[1:]
dataset = grain.MapDataset.range(70).seed(5).shuffle()
dataset = dataset.map(lambda i: {"id": i, "x": np.float64(i)} if kind == "ids" else np.float64(i))
dataset = dataset.repeat(2).to_iter_dataset(grain.ReadOptions(1, 2)).batch(4)
data = loader.Fingerprint.of_revision("1", loader.ArraySource({"x": np.arange(70)}))
state = {"w": np.zeros(3)}
with checkpointing.Checkpoints(run_dir, loader.GrainStream(dataset, fingerprint=data), 2, 3) as checkpoints:
    run = checkpoints.resume(state)
    state = run.train_state
    for batch in run.batches:
        x = batch["x"] if kind == "ids" else batch
        state = {"w": 0.9 * state["w"] + x[:3]}
        checkpoints.save(run.batches, state)
        checkpoints.wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ids", "digests"])
def test_drill_of_a_script_on_a_chain_finds_no_difference(
    tmp_path: pathlib.Path, kind: str
) -> None:
    script = tmp_path / "theirs.py"
    script.write_text(SCRIPT, "utf-8")
    root = pathlib.Path(__file__).resolve().parents[2]
    drill = [sys.executable, str(root / "scripts" / "resume_drill.py"), "--kills", "2"]
    command = ["--out", str(tmp_path / "out"), "--", sys.executable, str(script), "{run_dir}", kind]
    done = subprocess.run(
        [*drill, *command],
        env=os.environ | {"PYTHONPATH": str(root), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert (report["same"], report["num_steps"], len(report["kills"])) == (True, 35, 2)
