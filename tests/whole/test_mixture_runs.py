"""Runs on a mixture: saved, killed and resumed as those on a pipeline; refused where a part differs."""

import itertools
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import checkpointing
import regrain
from checkpointing import CheckpointMismatchError, Checkpoints, Manifest
from loader import ArraySource, Mixture, Pipeline, PipelineConfig
from loader.streams.identities import MixtureIdentity
from regrain.cli.app import app

STEPS = 23


def source(num_records: int, first: float = 0) -> ArraySource:
    return ArraySource(
        {"x": np.arange(first, first + num_records, dtype=np.float32)},
        ids=np.arange(num_records) + 100,
    )


def mixture(
    *, weights: dict[str, float] | None = None, first: float = 0, seed: int = 17, **parts: Any
) -> Mixture:
    web = Pipeline(source(23, first), PipelineConfig(4, seed, "pad", None))
    code = Pipeline(source(10), PipelineConfig(3, 5, "pad", None))
    return Mixture({"web": web, "code": code, **parts}, weights or {"web": 0.7, "code": 0.3})


def state() -> dict[str, Any]:
    return {"w": jnp.zeros(3), "step": jnp.zeros((), jnp.int32)}


def train(directory: pathlib.Path, stream: Mixture, steps: int) -> list[tuple[int, list[int]]]:
    """Trains on some steps, saving each; what each delivered."""
    trace = []
    with Checkpoints(directory, stream, save_every=1, keep=3) as checkpoints:
        run = checkpoints.resume(state())
        train_state = run.train_state
        for _ in range(steps):
            batch = next(run.batches)
            total = jnp.sum(batch["x"], where=batch["mask"])
            train_state = {
                "w": train_state["w"] * 0.5 + total,
                "step": train_state["step"] + 1,
            }
            trace.append((int(batch["part"][0]), batch["id"].tolist()))
            checkpoints.save(run.batches, train_state)
    return trace


def final(directory: pathlib.Path) -> tuple[Manifest, dict[str, bytes]]:
    manifest, leaves = checkpointing.load(directory)
    return manifest, {path: leaf.tobytes() for path, leaf in leaves.items()}


def test_run_on_a_mixture_resumes_exactly(tmp_path: pathlib.Path) -> None:
    whole = train(tmp_path / "whole", mixture(), STEPS)
    pieces = [train(tmp_path / "pieces", mixture(), steps) for steps in (1, 9, 0, 7, 6)]
    assert [*itertools.chain(*pieces)] == whole
    assert final(tmp_path / "pieces")[1] == final(tmp_path / "whole")[1]
    batches = itertools.islice(mixture(), STEPS)
    assert whole == [(int(batch["part"][0]), batch["id"].tolist()) for batch in batches]


def test_manifest_holds_each_part(tmp_path: pathlib.Path) -> None:
    train(tmp_path, mixture(), 3)
    manifest, _ = final(tmp_path)
    parts = mixture().parts
    known = manifest.identity.stream
    assert isinstance(known, MixtureIdentity)
    assert list(known.parts) == ["code", "web"]
    for name, part in known.parts.items():
        assert part.fingerprint == parts[name].fingerprint()
        assert part.config == parts[name].config.to_dict()
    assert known.weights == {"code": 3, "web": 7}
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.next_ids[:3] == tuple(mixture().ids(3).tolist()[:3])


def one_more() -> Pipeline:
    return Pipeline(source(9), PipelineConfig(3, 5, "pad", None))


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"weights": {"web": 0.6, "code": 0.4}}, {"weights.code", "weights.web"}),
        ({"first": 1}, {"parts.web.dataset.x"}),
        ({"seed": 18}, {"parts.web.seed"}),
        (
            {"code": Pipeline(source(10), PipelineConfig(2, 5, "pad", None))},
            {"parts.code.batch_size"},
        ),
        (
            {"news": one_more(), "weights": {"web": 7, "code": 3, "news": 1}},
            {"weights.news"},
        ),
    ],
)
def test_run_on_another_mixture_is_refused(
    tmp_path: pathlib.Path, changed: dict[str, Any], names: set[str]
) -> None:
    train(tmp_path, mixture(), 3)
    with pytest.raises(CheckpointMismatchError) as caught:
        train(tmp_path, mixture(**changed), 1)
    assert {difference.name for difference in caught.value.differences} == names
    assert "may change with allow" not in str(caught.value)


def test_mixture_and_pipeline_are_told_apart(tmp_path: pathlib.Path) -> None:
    train(tmp_path, mixture(), 3)
    with (
        Checkpoints(tmp_path, mixture().parts["web"], 1, 3) as checkpoints,
        pytest.raises(CheckpointMismatchError, match=r"a mixture of code, web .*now one pipeline"),
    ):
        checkpoints.resume(state())


def test_nothing_of_a_mixture_can_be_allowed_to_change(tmp_path: pathlib.Path) -> None:
    train(tmp_path, mixture(), 3)
    other = mixture(code=Pipeline(source(10), PipelineConfig(2, 5, "pad", None)))
    with (
        Checkpoints(tmp_path, other, 1, 3) as checkpoints,
        pytest.raises(ValueError, match=r"allow can hold \[\] for a Mixture, not \['batch_size'\]"),
    ):
        checkpoints.resume(state(), allow={"batch_size"})


def test_provenance_of_a_run_on_a_mixture(tmp_path: pathlib.Path) -> None:
    trace = train(tmp_path, mixture(), STEPS)
    sources = {name: part.source for name, part in mixture().parts.items()}
    for given in (None, sources):
        found = checkpointing.provenance(tmp_path, given)
        assert found.num_steps == STEPS
        for step, (part, ids) in enumerate(trace):
            records = found.records_at(step)
            assert records.part == ["code", "web"][part]
            if given is None:
                assert records.ids is None
                assert (records.rows + 100).tolist() == [i for i in ids if i != -1]
            else:
                assert records.ids is not None
                assert records.ids.tolist() == [i for i in ids if i != -1]
        with pytest.raises(IndexError):
            found.records_at(STEPS)
    ahead = checkpointing.provenance(tmp_path, sources, ahead=True)
    next_ids = ahead.records_at(STEPS).ids
    assert next_ids is not None
    assert next_ids.tolist() == [i for i in mixture().ids(STEPS).tolist() if i != -1]
    steps = [step for step, (part, ids) in enumerate(trace) if part == 1 and 107 in ids]
    visits = ahead.steps_of("web", 107, range(3))
    assert [visit.step for visit in visits][: len(steps)] == steps


@pytest.mark.parametrize("wrong", [{"news": source(3)}, source(23), {"web": source(22)}])
def test_wrong_sources_are_refused(tmp_path: pathlib.Path, wrong: Any) -> None:
    train(tmp_path, mixture(), 3)
    with pytest.raises(ValueError, match=r"by the names of its parts|has the parts|records"):
        checkpointing.provenance(tmp_path, wrong)


def test_provenance_refuses_sources_of_the_other_kind_of_run(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "mixture", mixture(), 3)
    code, _, error = answer(str(tmp_path / "mixture"))
    assert code == 2
    assert "is of a mixture of code, web: give --part" in error
    pipeline = mixture().parts["web"]
    with Checkpoints(tmp_path / "one", pipeline, 1, 3) as checkpoints:
        run = checkpoints.resume(state())
        checkpoints.save(run.batches, run.train_state, force=True)
    with pytest.raises(ValueError, match="is of one pipeline: give its source"):
        checkpointing.provenance(tmp_path / "one", {"web": pipeline.source})
    code, _, error = answer(str(tmp_path / "one"), "--part", "web")
    assert code == 2
    assert "--part web: the run is of one pipeline" in error


def test_one_provenance_takes_a_directory_or_a_stream(tmp_path: pathlib.Path) -> None:
    trace = train(tmp_path, mixture(), STEPS)
    for found in (regrain.provenance(tmp_path), regrain.provenance(mixture(), until=STEPS)):
        parts = [found.records_at(step).part for step in range(STEPS)]
        assert parts == [["code", "web"][part] for part, _ in trace]
    part = regrain.provenance(mixture().parts["web"], until=3)
    assert part.num_steps == 3
    with pytest.raises(TypeError, match="until is for a stream"):
        regrain.provenance(tmp_path, until=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="sources and ahead are for a run directory"):
        regrain.provenance(mixture(), ahead=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="for a Pipeline or a Mixture, not for int"):
        regrain.provenance(3)  # type: ignore[call-overload]


def answer(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["provenance", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_script_answers_for_a_part(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = train(tmp_path / "run", mixture(), STEPS)
    (tmp_path / "mine.py").write_text(
        "import numpy as np, loader\n"
        "def web(): return loader.ArraySource({'x': np.arange(23.0)}, ids=np.arange(23) + 100)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    step = next(step for step, (part, _) in enumerate(trace) if part == 1)
    record_id = trace[step][1][2]
    asked = ("--step", str(step), "--id", str(record_id), "--json")
    code, out, _ = answer(str(tmp_path / "run"), "--part", "web", "--source", "mine:web", *asked)
    assert code == 0
    found = json.loads(out)
    assert found["steps"][0]["part"] == "web"
    assert found["steps"][0]["ids"] == trace[step][1]
    assert found["records"][0]["visits"][0]["step"] == step
    code, out, _ = answer(str(tmp_path / "run"), "--part", "code", "--step", "0")
    assert code == 0
    assert "step 0: part web, epoch 0" in out
    code, _, error = answer(str(tmp_path / "run"))
    assert code == 2
    assert "is of a mixture of code, web" in error
    code, _, error = answer(str(tmp_path / "run"), "--part", "news")
    assert code == 1
    assert "has the parts code, web, not 'news'" in error
