"""Random augmentation that resumes: a record's key depends on seed, epoch and ID, and on nothing else."""

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loader
from checkpointing import CheckpointMismatchError, Checkpoints, load
from loader import ArraySource, Mixture, Pipeline, PipelineConfig, Position, ReadOptions
from loader.audit import keys as audit_keys

N, EPOCHS = 23, 3
IDS = np.arange(100, 100 + N)
NAMES = np.array([f"file-{i % 3}.bin:{i}" for i in range(N)])
Batch = dict[str, Any]


def a_pipeline(
    transform: Any = None, ids: Any = IDS, order: Any = slice(None), **settings: Any
) -> Pipeline:
    chosen: dict[str, Any] = {"batch_size": 4, "seed": 17, "final_batch": "pad"}
    chosen |= {"num_epochs": EPOCHS, "record_keys": True, **settings}
    x = np.arange(1.0, 2 * N + 1, dtype=np.float32).reshape(N, 2)
    return Pipeline(ArraySource({"x": x[order]}, ids[order]), PipelineConfig(**chosen), transform)


def walk(batches: loader.BatchIterator) -> Iterator[tuple[int, Batch]]:
    """Batches with their epochs."""
    while not batches.pipeline.grid.is_end(batches.position):
        epoch = batches.position.epoch
        yield epoch, next(batches)


def visits(batches: Iterable[tuple[int, Batch]]) -> dict[tuple[int, Any], tuple[int, int]]:
    """By epoch and ID, the keys of real records."""
    return {
        (epoch, name): tuple(key)
        for epoch, batch in batches
        for name, mask, key in zip(
            batch["id"].tolist(), batch["mask"], np.asarray(batch["key"]).tolist(), strict=True
        )
        if mask
    }


@functools.cache
def expected(kind: str = "int", seed: int = 17) -> dict[tuple[int, Any], tuple[int, int]]:
    ids = IDS if kind == "int" else NAMES
    return {
        (epoch, name): tuple(key)
        for epoch in range(EPOCHS)
        for name, key in zip(
            ids.tolist(), loader.record_keys(ids, seed, epoch).tolist(), strict=True
        )
    }


# What a key depends on


@given(
    batch_size=st.integers(1, N + 3),
    final_batch=st.sampled_from(["pad", "partial"]),
    shuffle=st.sampled_from(["feistel", "permutation", "none"]),
    order=st.permutations(range(N)),
    kind=st.sampled_from(["int", "str"]),
)
def test_a_key_depends_on_seed_epoch_and_id_alone(
    batch_size: int, final_batch: str, shuffle: str, order: list[int], kind: str
) -> None:
    pipeline = a_pipeline(
        ids=IDS if kind == "int" else NAMES,
        order=order,
        batch_size=batch_size,
        final_batch=final_batch,
        shuffle=shuffle,
    )
    assert visits(walk(iter(pipeline))) == expected(kind)


@given(epoch=st.integers(0, EPOCHS - 1), offset=st.integers(0, N - 1), batch_size=st.integers(1, 9))
def test_a_resume_anywhere_goes_on_with_the_same_keys(
    epoch: int, offset: int, batch_size: int
) -> None:
    start = Position(epoch, offset, 5)
    rest = visits(walk(a_pipeline(batch_size=batch_size).iterate(start)))
    assert rest.items() <= expected().items()
    assert len(rest) == N * (EPOCHS - epoch) - offset


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_process_has_the_keys_of_its_rows(count: int) -> None:
    shares = [a_pipeline().iterate(process_index=i, process_count=count) for i in range(count)]
    for whole, *parts in zip(a_pipeline(), *shares, strict=True):
        assert np.array_equal(np.concatenate([part["key"] for part in parts]), whole["key"])


@pytest.mark.parametrize(
    "settings",
    [
        {"read_options": ReadOptions(num_threads=3, prefetch_buffer_size=4)},
        {"device": jax.devices()[0]},
    ],
    ids=["threads", "device"],
)
def test_threads_and_devices_change_no_key(settings: Any) -> None:
    with contextlib.closing(a_pipeline().iterate(**settings)) as batches:
        assert visits(walk(batches)) == expected()


def test_a_field_is_uint32_and_stands_before_the_sources() -> None:
    batch = a_pipeline()[0]
    assert list(batch) == ["id", "mask", "key", "x"]
    assert batch["key"].dtype == np.uint32
    assert batch["key"].shape == (4, 2)
    plain = a_pipeline(record_keys=False)[0]
    assert list(plain) == ["id", "mask", "x"]
    assert all(np.array_equal(plain[name], batch[name]) for name in plain)


def test_epochs_beyond_32_bits_and_another_seed_have_keys_of_their_own() -> None:
    pipeline = a_pipeline(num_epochs=None)
    far = next(pipeline.iterate(Position(2**32 + 1, 0, 0)))
    assert np.array_equal(far["key"], loader.record_keys(far["id"], 17, 2**32 + 1))
    assert not set(visits(walk(iter(a_pipeline(seed=18)))).values()) & set(expected().values())


# Slots without a record


class Broken(ArraySource):
    """Cannot read the records 103 and 111."""

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        if np.isin(IDS[rows], [103, 111]).any():
            raise OSError("unreadable")
        return super().read(rows)


def test_slots_without_a_record_have_key_zero_and_the_others_their_own() -> None:
    config = a_pipeline(exclude=[105], on_bad_record="mask").config
    seen = []
    for batch in Pipeline(Broken({"x": np.arange(N)}, IDS), config):
        assert not batch["key"][~batch["mask"]].any()
        assert batch["key"][batch["mask"]].any(axis=1).all()
        seen += batch["id"][~batch["mask"]].tolist()
    assert sorted(seen) == sorted([103, 105, 111, -1] * EPOCHS)
    found = visits(walk(iter(Pipeline(Broken({"x": np.arange(N)}, IDS), config))))
    assert found == {k: v for k, v in expected().items() if k[1] not in (103, 105, 111)}


def test_a_batch_without_any_record_has_keys_of_zero() -> None:
    first = a_pipeline(batch_size=2).ids(0)
    batch = a_pipeline(batch_size=2, exclude=first.tolist())[0]
    assert batch["key"].dtype == np.uint32
    assert batch["key"].tolist() == [[0, 0], [0, 0]]


def test_skipped_batches_move_no_key() -> None:
    found = visits(walk(iter(a_pipeline(skip=[(2, 5)], num_epochs=1))))
    assert len(found) == N - 12
    assert found.items() <= expected().items()


# Transforms


def jitter(batch: Batch) -> Batch:
    return {"x": batch["x"] + loader.uniforms(batch["key"], 2).astype(np.float32)}


def jitter_by_generators(batch: Batch) -> Batch:
    draws = [loader.rng(key).random(2, np.float32) for key in batch["key"]]
    return {"x": batch["x"] + np.array(draws)}


@pytest.mark.parametrize("transform", [jitter, jitter_by_generators])
def test_a_transform_augments_each_record_alike_in_batches_of_any_size(transform: Any) -> None:
    def augmented(**settings: Any) -> dict[tuple[int, int], list[float]]:
        found = {}
        for batch in a_pipeline(transform, final_batch="partial", **settings):
            for name, key, x in zip(batch["id"], batch["key"].tolist(), batch["x"], strict=True):
                (epoch,) = (e for e in range(EPOCHS) if expected()[e, int(name)] == tuple(key))
                found[epoch, int(name)] = x.tolist()
        return found

    one = augmented()
    assert len(one) == N * EPOCHS
    assert augmented(batch_size=7) == augmented(batch_size=1, shuffle="none") == one
    values = {epoch: np.array([one[epoch, i] for i in IDS.tolist()]) for epoch in range(EPOCHS)}
    assert not np.isin(values[0], values[1]).any()


def test_a_transform_may_leave_the_key_out_and_not_change_it() -> None:
    def changes(batch: Batch) -> Batch:
        return {**batch, "key": batch["key"] + np.uint32(1)}

    def writes(batch: Batch) -> Batch:
        batch["key"][0] = 1
        return batch

    assert np.array_equal(a_pipeline(jitter)[3]["key"], a_pipeline()[3]["key"])
    with pytest.raises(loader.RecordReadError, match="the transform changed 'key': it belongs"):
        a_pipeline(changes)[0]
    with pytest.raises(loader.RecordReadError, match="read-only"):
        a_pipeline(writes)[0]
    own = a_pipeline(lambda batch: {"key": batch["x"][:, 0]}, record_keys=False)[0]
    assert own["key"].shape == (4,)


def test_a_record_at_fault_is_found_under_its_own_key() -> None:
    """A batch that fails is tried record by record: each is augmented as in a whole one."""

    def fails_sometimes(batch: Batch) -> Batch:
        if (loader.uniforms(batch["key"], 1) < 0.1).any():
            raise ValueError("drew less than 0.1")
        return batch

    unlucky = {
        (epoch, name)
        for (epoch, name), key in expected().items()
        if loader.uniforms(np.array([key], np.uint32), 1)[0, 0] < 0.1
    }
    assert 0 < len(unlucky) < 20
    pipeline = a_pipeline(fails_sometimes, on_bad_record="mask")
    assert expected().keys() - visits(walk(iter(pipeline))).keys() == unlucky


def test_a_pipeline_gives_the_generator_of_a_record() -> None:
    pipeline = a_pipeline(ids=NAMES)
    batch = next(pipeline.iterate(Position(2, 4, 0)))
    for name, key in zip(batch["id"].tolist(), batch["key"], strict=True):
        assert pipeline.rng(name, 2).random() == loader.rng(key).random()
        assert pipeline.rng(name, 1).random() != loader.rng(key).random()
    with pytest.raises(ValueError, match="epoch must be 0 to"):
        pipeline.rng(NAMES[0], -1)
    with pytest.raises(TypeError, match="int64 or strings"):
        pipeline.rng(1.5, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("record_keys", [True, False])
def test_a_source_with_a_field_of_that_name_is_refused_where_keys_are_asked_for(
    record_keys: bool,
) -> None:
    source = ArraySource({"key": np.arange(8), "x": np.arange(8)})
    config = PipelineConfig(4, 1, "pad", record_keys=record_keys)
    if record_keys:
        for use in (Pipeline, lambda source, config: loader.audit_batches([], source, config)):
            with pytest.raises(ValueError, match=r"a field 'key', and record_keys=True .* Rename"):
                use(source, config)
    else:
        assert Pipeline(source, config)[0]["key"].shape == (4,)


# Mixtures


def test_each_part_of_a_mixture_has_the_keys_of_its_own_seed() -> None:
    parts = {"a": a_pipeline(num_epochs=None), "b": a_pipeline(seed=18, num_epochs=None)}
    mixture = Mixture(parts, {"a": 2, "b": 1})
    for name, seed in (("a", 17), ("b", 18)):
        own = [(mixture.step_of(name, i), parts[name].position(i)) for i in range(6 * EPOCHS)]
        batches = ((position.epoch, mixture[step]) for step, position in own)
        assert visits(batches) == expected(seed=seed)
    assert loader.audit(mixture).clean


def test_parts_with_and_without_keys_cannot_be_mixed() -> None:
    parts = {"a": a_pipeline(), "b": a_pipeline(record_keys=False)}
    with pytest.raises(ValueError, match="record_keys is True in part 'a', and False in 'b'"):
        Mixture(parts, {"a": 2, "b": 1})


# Audit


def test_an_audit_derives_the_keys_again() -> None:
    report = loader.audit(a_pipeline(ids=NAMES, exclude=NAMES[3:5].tolist(), skip=[(2, 4)]))
    assert report.clean, str(report)
    assert report.coverage.fields == ("x",)
    keys = report.coverage.records
    assert f"{keys} keys of records were derived a second time" in str(report)


def copies() -> list[Batch]:
    return [{name: array.copy() for name, array in batch.items()} for batch in a_pipeline()]


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("fault", ["swapped", "of another epoch", "padding", "dtype", "missing"])
def test_an_audit_finds_keys_that_are_not_the_records(fault: str, transformed: bool) -> None:
    pipeline, batches = a_pipeline(), copies()
    if fault == "swapped":
        batches[7]["key"][[1, 2]] = batches[7]["key"][[2, 1]]
        count, place, cause = 2, (1, 7, 1), "'key': not the record's in this epoch"
    elif fault == "of another epoch":
        batches[7]["key"] = loader.record_keys(batches[7]["id"], 17, 0)
        count, place, cause = 4, (1, 7, 0), "'key': not the record's in this epoch"
    elif fault == "padding":
        batches[5]["key"][3] = 1
        count, place, cause = 1, (0, 5, 3), "'key': a masked slot is not empty"
    elif fault == "dtype":
        batches[7]["key"] = batches[7]["key"].astype(np.int64)
        count, place, cause = 4, (1, 7, 0), "'key': int64[2], not uint32[2]"
    else:
        del batches[7]["key"]
        count, place, cause = 4, (1, 7, 0), "'key': missing"
    report = loader.audit_batches(
        batches, pipeline.source, pipeline.config, transformed=transformed
    )
    if fault == "missing" and transformed:
        assert report.clean  # what another's transform does with the keys is its own affair
        return
    assert report.found == ("alignment",)
    assert report.alignment.count == count
    assert report.alignment.causes == {cause: count}
    first = report.alignment.first
    assert first is not None
    assert (first.epoch, first.step, first.place, first.field) == (*place, "key")


def test_an_audit_finds_keys_where_none_are_due() -> None:
    pipeline = a_pipeline(record_keys=False)
    report = loader.audit_batches(copies(), pipeline.source, pipeline.config)
    assert report.alignment.causes == {"'key': no field of the source": N * EPOCHS}


def test_an_audit_of_a_log_of_ids_asks_for_no_keys() -> None:
    pipeline = a_pipeline()
    batches = [{"id": batch["id"], "mask": batch["mask"]} for batch in pipeline]
    assert loader.audit_batches(batches, pipeline.source, pipeline.config).clean
    assert loader.audit(pipeline, ids_only=True).clean


def test_a_fault_in_the_code_that_makes_keys_is_found_by_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pipeline and the audit's own block-wise derivation share that code."""

    def faulty(ids: Any, seed: int, epoch: int) -> Any:
        keys = loader.record_keys(ids, seed, epoch)
        keys[ids == 107] ^= np.uint32(1)
        return keys

    monkeypatch.setattr("loader.streams.pipeline.record_keys", faulty)
    monkeypatch.setattr(audit_keys, "record_keys", faulty)
    report = loader.audit(a_pipeline())
    assert report.found == ("alignment",)
    assert report.alignment.causes == {"'key': not what the formula says": EPOCHS}
    first = report.alignment.first
    assert first is not None
    assert (first.id, first.field) == (107, "key")


# Checkpoints


def state() -> dict[str, Any]:
    return {"w": jnp.zeros(2), "n": jnp.zeros((), jnp.int32)}


@jax.jit
def train_step(train_state: dict[str, Any], batch: Batch) -> dict[str, Any]:
    def shift(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.roll(x, jax.random.bernoulli(key).astype(jnp.int32)) + jax.random.normal(
            key, (2,)
        )

    x = jax.vmap(shift)(jax.random.wrap_key_data(batch["key"]), batch["x"])
    mean = jax.vmap(loader.masked_mean, (1, None))(x, batch["mask"])
    return {"w": train_state["w"] * 0.9 + mean, "n": train_state["n"] + 1}


def train(
    directory: pathlib.Path, pipeline: Any, steps: int, **allow: Any
) -> list[tuple[int, Batch]]:
    delivered = []
    with Checkpoints(directory, pipeline, save_every=1, keep=2) as checkpoints:
        run = checkpoints.resume(state(), **allow)
        train_state = run.train_state
        for epoch, batch in itertools.islice(walk(run.batches), steps):
            delivered.append((epoch, batch))
            train_state = train_step(train_state, batch)
            checkpoints.save(run.batches, train_state)
    return delivered


def final(directory: pathlib.Path) -> dict[str, bytes]:
    return {path: leaf.tobytes() for path, leaf in load(directory)[1].items()}


def test_training_with_augmentation_ends_in_the_same_bits_after_any_stops(
    tmp_path: pathlib.Path,
) -> None:
    train(tmp_path / "whole", a_pipeline(jitter), 100)
    for steps in (1, 6, 4, 100):
        train(tmp_path / "stopped", a_pipeline(jitter), steps)
    assert final(tmp_path / "stopped") == final(tmp_path / "whole")
    train(tmp_path / "other", a_pipeline(jitter, seed=18), 100)
    assert final(tmp_path / "other") != final(tmp_path / "whole")


def test_another_batch_size_at_a_resume_augments_each_record_as_before(
    tmp_path: pathlib.Path,
) -> None:
    batches = train(tmp_path, a_pipeline(), 8)
    batches += train(tmp_path, a_pipeline(batch_size=7), 100, allow={"batch_size"})
    assert visits(batches) == expected()


@pytest.mark.parametrize("before", [True, False])
def test_keys_that_come_or_go_at_a_resume_are_refused_by_name(
    tmp_path: pathlib.Path, before: bool
) -> None:
    train_plain = functools.partial(_save_once, tmp_path)
    train_plain(a_pipeline(record_keys=before))
    with pytest.raises(CheckpointMismatchError) as caught:
        train_plain(a_pipeline(record_keys=not before))
    (difference,) = caught.value.differences
    assert (difference.name, difference.checkpoint, difference.now) == (
        *("record_keys", str(before), str(not before)),
    )


def _save_once(directory: pathlib.Path, pipeline: Any) -> int:
    with Checkpoints(directory, pipeline, save_every=1, keep=2) as checkpoints:
        run = checkpoints.resume({"w": np.zeros(2)})
        next(run.batches)
        checkpoints.save(run.batches, run.train_state)
        return run.position.step


def test_another_version_of_the_keys_is_refused_by_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_once(tmp_path, a_pipeline())
    assert _save_once(tmp_path, a_pipeline()) == 1
    monkeypatch.setattr("loader.streams.pipeline.KEYS_VERSION", 2)
    with pytest.raises(CheckpointMismatchError, match=r"keys_version +checkpoint 1 +now 2"):
        _save_once(tmp_path, a_pipeline())


def test_a_mixtures_parts_name_their_keys(tmp_path: pathlib.Path) -> None:
    def mixture(**settings: Any) -> Mixture:
        parts = {"a": a_pipeline(**settings), "b": a_pipeline(seed=18, **settings)}
        return Mixture(parts, {"a": 2, "b": 1})

    _save_once(tmp_path, mixture())
    assert _save_once(tmp_path, mixture()) == 1
    with pytest.raises(CheckpointMismatchError) as caught:
        _save_once(tmp_path, mixture(record_keys=False))
    names = {difference.name for difference in caught.value.differences}
    assert names == {"parts.a.record_keys", "parts.b.record_keys"}


def test_a_fingerprint_and_an_order_are_those_without_keys() -> None:
    keyed, plain = a_pipeline(), a_pipeline(record_keys=False)
    assert keyed.fingerprint() == plain.fingerprint()
    for step in range(len(plain)):
        assert np.array_equal(keyed.ids(step), plain.ids(step))


def test_settings_with_keys_survive_a_dict_and_a_file(tmp_path: pathlib.Path) -> None:
    config = a_pipeline().config
    assert PipelineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path = tmp_path / "run.toml"
    path.write_text('batch_size = 4\nseed = 17\nfinal_batch = "pad"\nrecord_keys = true\n')
    made = PipelineConfig.from_toml(path)
    assert made == dataclasses.replace(config, num_epochs=1)
