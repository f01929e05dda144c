"""The identity of records in files: what a fingerprint covers, and what a comparison says of the files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import checkpointing
import loader
from loader.sources.digest_cache import cache_path, load_digests, store_digests
from loader.sources.digests import Cache, FileDigest
from loader.sources.file_source import FileSource
from loader.sources.files import FileSet
from loader.sources.identifiers import IdRule


class ByteSource(FileSource):
    """Each byte of each file is a record."""

    def __init__(
        self, root: Path, ids: IdRule = "file:row", scale: int = 1, cache: Cache = None
    ) -> None:
        files = FileSet.open(root, [".bin"])
        counts = [state.size for state in files.states]
        fields = {"value": loader.Field(np.dtype("u1"))}
        reading = {"format": "bytes", "scale": scale}
        super().__init__(files, counts, fields, ids=ids, reading=reading, cache=cache)

    def read_file(self, number: int, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        return {"value": np.fromfile(self.files.path(number), np.uint8)[rows]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(12):
        path = tmp_path / "data" / f"train/{number:04}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number] * (number + 1)))
    return tmp_path / "data"


def write(root: Path, name: str, data: bytes) -> None:
    (root / name).write_bytes(data)


def added(root: Path) -> None:
    for name in ("train/0012.bin", "train/0013.bin", "zz.bin"):
        write(root, name, b"new")


DIFFERENCES: dict[str, tuple[Callable[[Path], Any], dict[str, str]]] = {
    "added": (
        added,
        {
            "num_records": "",
            "files": "the first 12 files are the same, and 3 were appended: "
            "train/0012.bin, train/0013.bin, zz.bin",
            "id": "",
        },
    ),
    "edited": (
        lambda root: write(root, "train/0007.bin", bytes(8)),
        {"files": "1 of 12 files differs: train/0007.bin"},
    ),
    "removed": (
        lambda root: (root / "train/0007.bin").unlink(),
        {"num_records": "", "files": "1 removed: number 7", "id": ""},
    ),
    "renamed": (
        lambda root: (root / "train/0011.bin").rename(root / "train/0012.bin"),
        {"files": "1 of 12 files differs: train/0012.bin", "id": ""},
    ),
    "touched": (lambda root: os.utime(root / "train/0003.bin", (1, 1)), {}),
    "moved": (lambda root: root.rename(root.with_name("moved")).rename(root), {}),
}


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_comparison_says_what_became_of_the_files(root: Path, change: str) -> None:
    before = ByteSource(root).fingerprint()
    do, told = DIFFERENCES[change]
    do(root)
    source = ByteSource(root)
    now = source.fingerprint()
    found = before.diff(now, source)
    assert {one.name.removeprefix("dataset."): one.note for one in found} == told
    assert (now == before) == (told == {})


@pytest.mark.parametrize(
    ("now", "names"),
    [
        (lambda root: ByteSource(root, scale=2), {"dataset.reading.scale": ("1", "2")}),
        (lambda root: ByteSource(root, "row"), {"dataset.id": ("str[]", "int64[]")}),
    ],
)
def test_other_settings_are_told_and_the_files_are_the_same(
    root: Path, now: Any, names: dict[str, tuple[str, str]]
) -> None:
    source = now(root)
    found = ByteSource(root).fingerprint().diff(source.fingerprint(), source)
    assert {one.name: (one.checkpoint, one.now) for one in found} == names


def test_records_in_files_and_in_memory_are_not_compared_field_by_field(root: Path) -> None:
    source = ByteSource(root)
    every = np.arange(len(source))
    memory = loader.ArraySource(source.read(every), source.ids(every))
    for before, now in ((source, memory), (memory, source)):
        (one,) = before.fingerprint().diff(now.fingerprint(), now)
        assert one.name == "dataset.files"
        assert "absent" in {one.checkpoint, one.now}
    assert loader.fingerprint(source) == memory.fingerprint()


def test_a_fingerprint_of_files_goes_through_json(root: Path) -> None:
    found = ByteSource(root).fingerprint()
    value = json.loads(json.dumps(found.to_dict()))
    assert loader.Fingerprint.from_dict(value) == found
    for key, other in (("num_files", 11), ("marks", ""), ("reading", {"format": "x"})):
        with pytest.raises(ValueError, match="not a fingerprint"):
            loader.Fingerprint.from_dict(value | {"files": value["files"] | {key: other}})


def test_a_fingerprint_of_records_is_written_as_before() -> None:
    found = loader.ArraySource({"x": np.arange(3)}).fingerprint()
    assert set(found.to_dict()) == {
        "version",
        "digest",
        "num_records",
        "columns",
        "chunk_records",
        "marks",
    }


def pipeline_of(root: Path, ids: IdRule = "file:row") -> loader.Pipeline:
    config = loader.PipelineConfig(batch_size=8, seed=1, final_batch="pad", num_epochs=2)
    return loader.Pipeline(ByteSource(root, ids), config)


def train(run: Path, pipeline: loader.Pipeline, steps: int) -> list[Any]:
    ids = []
    with checkpointing.Checkpoints(run, pipeline, save_every=1, keep=2) as checkpoints:
        state = checkpoints.resume({"w": jnp.zeros(3)})
        for _, batch in zip(range(steps), state.batches, strict=False):
            ids.append(batch["id"].tolist())
            checkpoints.save(state.batches, state.train_state)
    return ids


def test_a_run_is_resumed_where_the_data_has_moved(root: Path, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", pipeline_of(root), 9)
    first = train(tmp_path / "run", pipeline_of(root), 4)
    moved = root.rename(tmp_path / "elsewhere")
    assert first + train(tmp_path / "run", pipeline_of(moved), 5) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("added", "the first 12 files are the same, and 3 were appended: train/0012.bin"),
        ("edited", "1 of 12 files differs: train/0007.bin"),
    ],
)
def test_a_resume_tells_added_files_from_edited_ones(
    root: Path, tmp_path: Path, change: str, message: str
) -> None:
    train(tmp_path / "run", pipeline_of(root), 2)
    DIFFERENCES[change][0](root)
    with pytest.raises(checkpointing.CheckpointMismatchError) as refused:
        train(tmp_path / "run", pipeline_of(root), 2)
    assert message in str(refused.value)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_resume_reads_all_data_where_it_is_told_to(
    root: Path, tmp_path: Path, *, mixed: bool
) -> None:
    def pipeline() -> Any:
        config = loader.PipelineConfig(batch_size=8, seed=1, final_batch="pad")
        one = loader.Pipeline(ByteSource(root, cache=True), config)
        return loader.Mixture({"one": one}, {"one": 1}) if mixed else one

    train(tmp_path / "run", pipeline(), 2)
    changed_behind_the_cache(root, "train/0007.bin")
    with checkpointing.Checkpoints(
        tmp_path / "run", pipeline(), save_every=1, keep=2
    ) as checkpoints:
        state = {"w": jnp.zeros(3)}
        assert checkpoints.resume(state).position.step == 2
        with pytest.raises(
            checkpointing.CheckpointMismatchError, match=r"1 of 12 files differs: train/0007\.bin"
        ):
            checkpoints.resume(state, verify_data="full")
        with pytest.raises(checkpointing.CheckpointMismatchError):
            checkpoints.resume(state)  # what was read is in the cache now
        verify: Any = "all"
        with pytest.raises(ValueError, match='verify must be "cache" or "full", not \'all\''):
            checkpoints.resume(state, verify_data=verify)


def changed_behind_the_cache(root: Path, name: str) -> None:
    """Edits a file, and makes the cache say that it was read so."""
    files = FileSet.open(root, [".bin"])
    path = cache_path(True, files)
    assert path is not None
    before = load_digests(path)[name]
    write(root, name, bytes(before.state.size))
    state = FileSet.open(root, [".bin"]).states[files.names.index(name)]
    store_digests(path, {name: FileDigest(state, before.digest)})


def test_a_source_that_keeps_nothing_needs_to_know_nothing_of_verify(root: Path) -> None:
    config = loader.PipelineConfig(batch_size=8, seed=1, final_batch="pad")
    pipeline = loader.Pipeline(loader.ArraySource({"x": np.arange(9)}), config)
    assert pipeline.fingerprint(verify="full") == pipeline.fingerprint()
    assert pipeline_of(root).fingerprint(verify="full") == pipeline_of(root).fingerprint()


def test_a_runs_directory_tells_what_its_steps_held(root: Path, tmp_path: Path) -> None:
    source = pipeline_of(root).source
    ids = train(tmp_path / "named", pipeline_of(root), 3)
    history = checkpointing.provenance(tmp_path / "named", sources=source)
    assert history.records_at(2).ids.tolist() == ids[2]  # type: ignore[union-attr]
    numbers = train(tmp_path / "numbered", pipeline_of(root, "row"), 3)
    history = checkpointing.provenance(tmp_path / "numbered")
    assert history.records_at(2).ids.tolist() == numbers[2]
    (root / "zz.bin").write_bytes(b"new")
    with pytest.raises(ValueError, match="the source"):
        checkpointing.provenance(tmp_path / "named", sources=ByteSource(root))
    (root / "zz.bin").unlink()
    (root / "train/0011.bin").rename(root / "zz.bin")
    with pytest.raises(ValueError, match="IDs are not those"):
        checkpointing.provenance(tmp_path / "named", sources=ByteSource(root))
