"""What a run has seen, from its directory alone: compared with what the run itself was given."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

import checkpointing
import loader
from checkpointing import CheckpointDamagedError
from checkpointing.manifest import Manifest
from checkpointing.reports import history
from loader import ArraySource, Field, Fingerprint, Pipeline, PipelineConfig, Position
from loader.identity.base import Ahead

N: Final = 23
ALLOW: Final = {"batch_size", "skip", "exclude"}
TEXT_IDS: Final = [f"record {row}" for row in range(N)]


def a_source(ids: Any = None) -> ArraySource:
    return ArraySource({"x": np.arange(1.0, N + 1)}, ids)


def a_config(**settings: Any) -> PipelineConfig:
    usual = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 4}
    return PipelineConfig(**{**usual, **settings})


def train(
    directory: pathlib.Path,
    source: Any,
    config: PipelineConfig,
    steps: int | None = None,
    **how: Any,
) -> list[tuple[Position, list[Any], list[bool]]]:
    """Trains some steps, or to the end, and saves the last one; returns what came."""
    seen: list[Any] = []
    with checkpointing.Checkpoints(directory, Pipeline(source, config), 10**9, 100) as checkpoints:
        run = checkpoints.resume({"sum": np.zeros(())}, **how)
        while steps is None or len(seen) < steps:
            begin = run.batches.position
            batch = next(run.batches, None)
            if batch is None:
                break
            seen.append((begin, batch["id"].tolist(), batch["mask"].tolist()))
        checkpoints.save(run.batches, run.train_state, force=True)
    return seen


def test_the_number_that_is_told_of_a_step_is_that_by_which_skip_leaves_it_out(
    tmp_path: pathlib.Path,
) -> None:
    """After a batch was left out, and the batch size was changed inside an epoch."""
    source, run = a_source(), tmp_path / "run"
    train(run, source, a_config(skip=[(1, 2)]), 3)
    train(run, source, a_config(batch_size=5, skip=[(4, 5)]), 2, allow=ALLOW)
    found = checkpointing.provenance(run, ahead=True)
    asked = found.records_at(8)
    assert asked.batch != 8
    expected = [found.records_at(step).rows.tolist() for step in range(5, found.num_steps or 0)]
    expected.remove(asked.rows.tolist())
    without = a_config(batch_size=5, skip=[(4, 5), (asked.batch, asked.batch + 1)])
    seen = train(run, source, without, allow=ALLOW)
    assert [[n for n in ids if n >= 0] for _, ids, _ in seen] == expected


def test_a_stream_is_not_taken_for_the_source_of_a_run(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "run", a_source(), a_config(), 3)
    pipeline: Any = Pipeline(a_source(), a_config())
    with pytest.raises(TypeError, match=r"a Pipeline is a stream of batches, .*: use its \.source"):
        checkpointing.provenance(tmp_path / "run", pipeline)


def check(found: loader.Provenance, seen: Sequence[Any], padding: Any, num_epochs: int) -> None:
    """Compares every step, and every record in every epoch, with what came."""
    assert found.num_steps == len(seen)
    came = {}
    for step, (position, ids, mask) in enumerate(seen):
        records = found.records_at(step)
        assert records.ids is not None
        assert records.excluded is not None
        assert Position(records.epoch, records.offset, step) == position
        count = len(records.rows)
        assert records.ids.tolist() == ids[:count]
        assert ids[count:] == [padding] * (records.slots - count)
        assert (~records.excluded).tolist() == mask[:count]
        came.update({(ids[i], position.epoch): (step, i, not mask[i]) for i in range(count)})
    every = {row: found.steps_of(found.id_of(row), range(num_epochs)) for row in range(N)}  # type: ignore[arg-type]
    told = {
        (found.id_of(row), visit.epoch): (visit.step, visit.slot, visit.excluded)
        for row, visits in every.items()
        for visit in visits
        if visit.outcome == "delivered"
    }
    assert told == came


@pytest.mark.parametrize("ids", [None, TEXT_IDS], ids=["row numbers", "text"])
@pytest.mark.parametrize("final_batch", ["pad", "partial", "drop"])
@pytest.mark.parametrize("shuffle", ["feistel", "permutation", "none"])
def test_a_run_that_changed_on_the_way_is_told_from_its_directory(
    tmp_path: pathlib.Path, shuffle: Any, final_batch: Any, ids: Any
) -> None:
    """The batch size changes inside an epoch, twice; then batches ahead and records are left out."""
    source = a_source(ids)
    settings: dict[str, Any] = {"shuffle": shuffle, "final_batch": final_batch, "num_epochs": 3}
    gone = [0, 7, 9] if ids is None else [ids[0], ids[7], ids[9]]
    small = {**settings, "batch_size": 2}
    plan = [
        (a_config(**settings), 2),
        (a_config(**settings, batch_size=3), 3),
        (a_config(**small), 3),
        (a_config(**small, skip=((14, 16),), exclude=gone), 5),
        (a_config(**small, skip=((14, 16),), exclude=gone[:1]), None),
    ]
    seen: list[Any] = []
    found = None
    for number, (config, steps) in enumerate(plan):
        seen += train(tmp_path, source, config, steps, allow=ALLOW)
        found = checkpointing.provenance(tmp_path, None if ids is None else source)
        assert [segment.config for segment in found.segments] == [c for c, _ in plan[: number + 1]]
        check(found, seen, -1 if ids is None else "", 3)
    assert found is not None
    starts = [segment.start for segment in found.segments]
    assert [(start.epoch, start.offset) for start in starts[:3]] == [(0, 0), (0, 8), (0, 17)]
    whole = checkpointing.provenance(tmp_path, None if ids is None else source, ahead=True)
    assert (whole.num_steps, whole.stop) == (len(seen), None)


def test_what_comes_next_is_told_if_asked_for(tmp_path: pathlib.Path) -> None:
    config = a_config(num_epochs=None)
    done = train(tmp_path, a_source(), config, 5)
    found = checkpointing.provenance(tmp_path)
    assert (found.num_steps, found.stop, found.epochs) == (5, Position(0, 20, 5), range(1))
    with pytest.raises(IndexError, match="step 5 is not done: 5 steps are done"):
        found.records_at(5)
    ahead = checkpointing.provenance(tmp_path, ahead=True)
    assert (ahead.num_steps, ahead.stop) == (None, None)
    check(found, done, -1, 3)
    for position, ids, _ in train(tmp_path, a_source(), config, 9):
        records = ahead.records_at(position.step)
        assert records.ids is not None
        assert records.ids.tolist() == ids[: len(records.rows)]


@pytest.mark.parametrize(
    "ids", [np.arange(N) + 1, np.arange(N)[::-1], [str(row) for row in range(N)]]
)
def test_ids_that_are_no_row_numbers_need_the_source(tmp_path: pathlib.Path, ids: Any) -> None:
    seen = train(tmp_path, a_source(ids), a_config(), 2)
    found = checkpointing.provenance(tmp_path)
    assert (found.source, found.ids_from, found.records_at(0).ids) == (None, "", None)
    with pytest.raises(ValueError, match="give the source of the records, or ask by row"):
        found.steps_of(7)
    assert found.steps_of_row(found.records_at(1).rows[2])[0].step == 1
    told = checkpointing.provenance(tmp_path, a_source(ids))
    assert told.ids_from == "those of the source"
    check(told, seen, "" if isinstance(ids, list) else -1, 1)


def test_row_numbers_are_known_by_their_digest_alone(tmp_path: pathlib.Path) -> None:
    train(tmp_path, a_source(), a_config(), 1)
    assert checkpointing.provenance(tmp_path).ids_from.startswith("row numbers, as their digest")


@pytest.mark.parametrize("num_records", [1, 2048, 2049, 100_000])
def test_row_numbers_are_known_whatever_the_number_of_records(
    tmp_path: pathlib.Path, num_records: int
) -> None:
    source = ArraySource({"x": np.zeros(num_records, np.uint8)})
    train(tmp_path, source, a_config(), 1)
    found = checkpointing.provenance(tmp_path)
    assert found.steps_of(0)[0].epoch == 0
    almost = np.arange(num_records)
    almost[-1] += 1
    train(
        tmp_path / "b", ArraySource({"x": np.zeros(num_records, np.uint8)}, almost), a_config(), 1
    )
    assert checkpointing.provenance(tmp_path / "b").source is None


class Vast:
    """10**12 records that are computed, known by the name of their revision."""

    fields: Final = {"x": Field(np.dtype(np.int64))}

    def __init__(self, revision: str = "v1", shift: int = 0) -> None:
        self._revision, self._shift = revision, shift

    def __len__(self) -> int:
        return 10**12

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        return rows + self._shift

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, Any]:
        return {"x": rows}

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of_revision(self._revision, self)


def test_a_trillion_records_are_told_by_row_alone_and_by_id_with_their_source(
    tmp_path: pathlib.Path,
) -> None:
    seen = train(tmp_path, Vast(), a_config(), 3)
    found = checkpointing.provenance(tmp_path)
    assert found.records_at(2).rows.tolist() == seen[2][1]
    (visit,) = found.steps_of_row(seen[2][1][3])
    assert (visit.step, visit.slot) == (2, 3)
    with pytest.raises(ValueError, match="give the source"):
        found.steps_of(7)
    (visit,) = checkpointing.provenance(tmp_path, Vast()).steps_of(seen[2][1][3])
    assert (visit.step, visit.slot) == (2, 3)
    with pytest.raises(ValueError, match="the source's IDs are not those of"):
        checkpointing.provenance(tmp_path, Vast("v2"))


def test_the_source_of_another_run_is_refused(tmp_path: pathlib.Path) -> None:
    train(tmp_path, a_source(TEXT_IDS), a_config(), 1)
    with pytest.raises(ValueError, match=r"the source has 22 records, and .* is of 23"):
        checkpointing.provenance(tmp_path, ArraySource({"x": np.zeros(22)}, TEXT_IDS[:22]))
    for other in (TEXT_IDS[::-1], [*TEXT_IDS[:-1], "x"], None):
        with pytest.raises(ValueError, match="the source's IDs are not those of"):
            checkpointing.provenance(tmp_path, a_source(other))


def test_the_newest_whole_checkpoint_tells(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        train(tmp_path, a_source(), a_config(), 2)
    manifest = tmp_path / "4/manifest/metadata"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    before = sorted(tmp_path.rglob("*"))
    assert checkpointing.provenance(tmp_path).num_steps == 2
    (tmp_path / "2/manifest/metadata").unlink()
    with pytest.raises(CheckpointDamagedError) as caught:
        checkpointing.provenance(tmp_path)
    assert set(caught.value.reasons) == {2, 4}
    assert set(before) - set(tmp_path.rglob("*")) == {tmp_path / "2/manifest/metadata"}


def test_a_directory_without_checkpoint_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no steps"):
        checkpointing.provenance(tmp_path)
    with pytest.raises(FileNotFoundError, match="gone"):
        checkpointing.provenance(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []


def rewrite(directory: pathlib.Path, **changes: Any) -> None:
    """Gives the checkpoint another manifest, sealed as any."""
    path = directory / "2/manifest/metadata"
    manifest = Manifest.from_bytes(path.read_bytes())
    if "order_version" in changes:
        known: Any = manifest.identity.stream
        known = dataclasses.replace(known, order_version=changes.pop("order_version"))
        changes["identity"] = dataclasses.replace(manifest.identity, stream=known)
    if "next_ids" in changes:
        ahead = Ahead("ids", changes.pop("next_ids"))
        changes["place"] = dataclasses.replace(manifest.place, ahead=ahead)
    path.write_bytes(dataclasses.replace(manifest, **changes).to_bytes())


CHANGE: Final = {
    "position": {"epoch": 0, "offset": 4, "step": 1},
    "changed": {"batch_size": [4, 4]},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order_version": 99}, "version 99, and this version of the library derives version 1"),
        ({"next_ids": (1, 2, 3), "packages": {"numpy": "0.1"}}, r"moved since numpy 0\.1"),
        ({"history": ({},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "changed": {"batch_size": [4, 5]}},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "changed": {"seed": [4, 17]}},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "changed": {"batch_size": [0, 4]}},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "changed": {"batch_size": 3}},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "changed": []},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "position": {"epoch": 0}},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "position": 3},)}, "cannot be followed"),
        ({"history": ({**CHANGE, "changed": {"batch_size": [3, 4]}},)}, "cannot be followed"),
    ],
)
def test_what_this_version_cannot_derive_is_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    train(tmp_path, a_source(), a_config(), 2)
    rewrite(tmp_path)
    rewrite(tmp_path, history=(CHANGE,))
    assert len(checkpointing.provenance(tmp_path).segments) == 2
    rewrite(tmp_path, **{"history": (), **changes})
    with pytest.raises(ValueError, match=message):
        checkpointing.provenance(tmp_path)


def test_more_ids_than_can_be_digested_are_not_guessed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, a_source(), a_config(), 1)
    monkeypatch.setattr(history, "DIGEST_IDS_UP_TO", N - 1)
    assert checkpointing.provenance(tmp_path).source is None
    assert checkpointing.provenance(tmp_path, a_source()).steps_of(3)
    with pytest.raises(ValueError, match="goes on with other IDs than are derived"):
        checkpointing.provenance(tmp_path, a_source(np.arange(N) + 1))
