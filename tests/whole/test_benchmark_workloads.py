"""The benchmark's data is what it says, and nobody is measured who delivers something else."""

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from scripts.benchmarks import workloads
from scripts.benchmarks.contenders import numpy_take
from scripts.benchmarks.workloads import Data, Workload, check, make_data

Batch = dict[str, npt.NDArray[Any]]

RECORDS: Final = Workload("records", "records", 1000, "image", "uint8", (8,), 256)
WINDOWS: Final = Workload("tokens", "tokens", 90, "tokens", "int32", (16,), 32, 5, mapped=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(RECORDS, tmp_path)
    return tmp_path


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    folder = tmp_path / "windows"
    folder.mkdir()
    make_data(WINDOWS, folder)
    return folder


def test_the_workloads_are_those_of_the_project(tmp_path: Path) -> None:
    made = workloads.workloads(quick=False, mapped_gib=1, folder=tmp_path)
    assert [(w.batch_size, w.record_bytes, w.mapped) for w in made] == [
        (256, 784, False),
        (256, 3072, True),
        (64, 8192, True),
        (32, 150_528, True),
        (256, 3072, False),
    ]
    mapped = made[1]
    assert 0 < mapped.data_bytes <= workloads.GIB
    assert not mapped.whole_epochs


def test_the_mapped_file_is_larger_than_half_of_free_memory_if_nothing_caps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "free_memory", lambda: 10_000)
    assert 5_000 < workloads.mapped_bytes(1.0, tmp_path) < 6_000
    assert workloads.mapped_bytes(1000 / workloads.GIB, tmp_path) == 1000


def test_the_data_is_on_disk_as_numpy_knows_it(folder: Path) -> None:
    data = Data(RECORDS, folder)
    stored = np.load(folder / "image.npy")
    assert (stored.dtype, stored.shape) == (np.dtype("uint8"), (1000, 8))
    assert np.array_equal(data.arrays["image"], stored)
    assert data.arrays["label"].tolist() == list(range(1000))
    rows = [7, 3, 999]
    assert np.array_equal(data.read(rows)["image"], stored[rows])
    assert data.record(7)["label"] == 7


def test_windows_overlap_in_a_flat_file(windows: Path) -> None:
    data = Data(WINDOWS, windows)
    flat = np.load(windows / "tokens.npy")
    assert flat.shape == (89 * 5 + 16,)
    assert data.read(np.array([89, 2]))["tokens"].tolist() == [
        flat[445:461].tolist(),
        flat[10:26].tolist(),
    ]
    assert np.shares_memory(data.arrays["tokens"], data.flat)


def test_another_process_gets_the_files_and_not_their_content(folder: Path) -> None:
    data = Data(RECORDS, folder)
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).arrays["image"], data.arrays["image"])


def test_a_file_is_read_into_memory(windows: Path) -> None:
    workloads.read_through(WINDOWS, windows)
    assert workloads.resident_share(WINDOWS, windows) in (1.0, None)


def test_the_file_system_is_told(tmp_path: Path) -> None:
    assert workloads.file_system(tmp_path)


# --- the check of what is delivered ---------------------------------------------------------------


def twice(batch: Batch) -> Batch:
    return {name: np.concatenate([array[:1], array[:-1]]) for name, array in batch.items()}


FAULTS: Final[dict[str, tuple[Callable[[Batch], Batch], str]]] = {
    "a record twice, another never": (twice, "not each record once"),
    "labels reversed": (lambda b: {**b, "label": b["label"][::-1]}, "image is not that of its"),
    "a dtype": (lambda b: {**b, "label": b["label"].astype(np.int64)}, "label is int64"),
    "a label of nobody": (lambda b: {**b, "label": b["label"] + 1}, "labels that no record has"),
    "a record fewer": (lambda b: {name: a[1:] for name, a in b.items()}, "other sizes"),
    "a shape": (lambda b: {**b, "image": b["image"][:, :4]}, "image is uint8[256, 4]"),
    "sorted": (lambda b: {name: a[np.argsort(b["label"])] for name, a in b.items()}, "shuffled"),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(
    folder: Path, fault: Callable[[Batch], Batch], message: str
) -> None:
    workload = RECORDS
    if message == "shuffled":
        workload = dataclasses.replace(RECORDS, unit=1)
    data = Data(workload, folder)
    good: Iterator[Any] = numpy_take(data, None)
    assert message in "; ".join(check(map(fault, good), data))


def test_of_a_part_of_an_epoch_each_record_may_come_once(folder: Path) -> None:
    data = Data(dataclasses.replace(RECORDS, unit=2), folder)
    batches = numpy_take(data, None)
    assert check(batches, data) == []
    first = next(batches)
    assert "not each record once" in check(iter([first, first]), data)
