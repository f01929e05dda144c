"""Fields get other names in batches, and nothing else about the records changes."""

import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

import loader
from checkpointing import CheckpointMismatchError, Checkpoints, testing
from loader import ArraySource, Fingerprint, Mixture, Pipeline, PipelineConfig, SequenceSource
from loader.sources import RecordSource, RenamedSource

N = 23
ARRAYS = {"tokens": np.arange(2 * N).reshape(N, 2), "mask": np.arange(N) % 3 == 0}
RENAME = {"mask": "attention_mask"}
CONFIG = PipelineConfig(4, 1, "pad", num_epochs=2)


def arrays() -> RecordSource:
    return ArraySource(ARRAYS, ids=np.arange(N) + 100)


def records() -> RecordSource:
    return SequenceSource(
        [{name: array[row] for name, array in ARRAYS.items()} for row in range(N)]
    )


def npy(folder: pathlib.Path) -> RecordSource:
    loader.write_npy(arrays(), folder / "npy")
    return loader.NpySource(folder / "npy")


@pytest.mark.parametrize("kind", ["arrays", "records", "npy"])
def test_a_field_named_mask_is_delivered_under_another_name(
    tmp_path: pathlib.Path, kind: str
) -> None:
    source = records() if kind == "records" else npy(tmp_path) if kind == "npy" else arrays()
    with pytest.raises(
        ValueError, match=r'a field cannot be named .mask. .*rename=\{"mask": "attention_mask"\}'
    ):
        Pipeline(source, CONFIG)
    pipeline = Pipeline(source, CONFIG, rename=RENAME)
    for batch in pipeline:
        there = batch["mask"]
        rows = batch["id"][there] - (100 if batch["id"].max() >= 100 else 0)
        assert np.array_equal(batch["attention_mask"][there], ARRAYS["mask"][rows])
        assert np.array_equal(batch["tokens"][there], ARRAYS["tokens"][rows])
        assert not batch["attention_mask"][~there].any()
    assert loader.audit(pipeline).clean
    testing.assert_resumes_exactly(pipeline, tmp_path / "runs", steps=6)


def test_another_name_is_another_stream(tmp_path: pathlib.Path) -> None:
    for number, rename in enumerate([RENAME, {"mask": "weights"}]):
        with Checkpoints(tmp_path, Pipeline(arrays(), CONFIG, rename=rename), 1, 1) as checkpoints:
            if number:
                with pytest.raises(CheckpointMismatchError) as caught:
                    checkpoints.resume({"w": np.zeros(1)})
                names = {one.name for one in caught.value.differences}
                assert names == {"dataset.attention_mask", "dataset.weights"}
            else:
                run = checkpoints.resume({"w": np.zeros(1)})
                next(run.batches)
                checkpoints.save(run.batches, run.train_state)


@pytest.mark.parametrize("name", ["attention_mask", "zzz", "a"])
def test_records_are_identified_as_if_they_had_these_names(name: str) -> None:
    renamed = RenamedSource(arrays(), {"mask": name})
    plain = ArraySource({"tokens": ARRAYS["tokens"], name: ARRAYS["mask"]}, ids=np.arange(N) + 100)
    assert renamed.fingerprint() == plain.fingerprint() or renamed.fingerprint().marks == ""
    assert renamed.fingerprint().digest == plain.fingerprint().digest
    assert renamed.fingerprint().diff(plain.fingerprint(), plain) == []


def test_a_renamed_source_is_sent_to_workers_and_keeps_what_else_its_source_has() -> None:
    class Known(ArraySource):
        def rows_of(self, ids: Any) -> Any:
            return ids - 100

    assert RenamedSource(Known(ARRAYS), RENAME).rows_of(np.array([103])).tolist() == [3]
    copy = pickle.loads(pickle.dumps(RenamedSource(arrays(), RENAME)))
    assert copy.fingerprint() == RenamedSource(arrays(), RENAME).fingerprint()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"mask": ""}, "rename maps names to names"),
        ({"mask": 1}, "rename maps names to names"),
        (["mask"], "rename maps names to names"),
        ({"Mask": "a"}, "rename names 'Mask', which is none of the fields tokens, mask"),
        ({"mask": "tokens"}, "one name to two fields: tokens, tokens"),
        ({"mask": "id"}, "cannot be named 'id'"),
    ],
)
def test_names_that_cannot_be_are_refused(names: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Pipeline(arrays(), CONFIG, rename=names)


def test_other_fields_of_a_batch_advise_to_rename_too() -> None:
    own = {"key": np.zeros(N), "part": np.zeros(N)}
    keyed = PipelineConfig(4, 1, "pad", record_keys=True)
    with pytest.raises(ValueError, match=r'rename=\{"key": '):
        Pipeline(ArraySource(own), keyed)
    assert "own_key" in Pipeline(ArraySource(own), keyed, rename={"key": "own_key"})[0]
    with pytest.raises(ValueError, match=r'rename=\{"part": '):
        Mixture({"a": Pipeline(ArraySource(own), CONFIG)}, {"a": 1})


class NoFields:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("source", [NoFields(), [1, 2], ArraySource, None])
def test_a_revision_of_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match="has no fields and length to identify"):
        Fingerprint.of_revision("2026-01", source)
