"""Batches come out of memory as they went in, and the memory has no name."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loader.memory import BatchMemory, SharedNumber, new_memory


@pytest.fixture
def ends() -> Iterator[tuple[BatchMemory, BatchMemory]]:
    """The same memory, as two processes have it."""
    descriptor = new_memory("regrain-test")
    both = BatchMemory(descriptor), BatchMemory(os.dup(descriptor))
    yield both
    for one in both:
        one.close()


ARRAYS: dict[str, Any] = {
    "numbers": np.arange(12, dtype=np.int64).reshape(3, 4),
    "not a number": np.array([0x7FC00001, 0xFFC12345, 0], np.uint32).view(np.float32),
    "every second": np.arange(30, dtype=np.int16).reshape(3, 10)[:, ::2],
    "backwards": np.arange(6)[::-1],
    "columns first": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    "one for all": np.broadcast_to(np.float32(7), (3, 5)),
    "texts": np.array(["a", "läuft", ""]),
    "bytes": np.array([b"ab", b"", b"c"]),
    "truth": np.array([True, False, True]),
    "half": np.ones((3, 2), ml_dtypes.bfloat16),
    "days": np.array(["2001-01-01", "NaT", "1969-12-31"], "M8[D]"),
    "structured": np.array([(1, 2.0)] * 3, [("a", "i4"), ("b", ">f8")]),
    "nothing": np.empty((3, 0), np.float32),
}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def test_batch_comes_out_bit_for_bit(ends: tuple[BatchMemory, BatchMemory]) -> None:
    writer, reader = ends
    assert_same(reader.get(writer.put(ARRAYS)), ARRAYS)


@pytest.mark.parametrize("name", ARRAYS)
def test_what_comes_out_is_the_readers_own(
    ends: tuple[BatchMemory, BatchMemory], name: str
) -> None:
    writer, reader = ends
    (array,) = reader.get(writer.put({name: ARRAYS[name]})).values()
    assert array.flags.owndata
    assert array.flags.writeable
    writer.put({name: ARRAYS[name][:0]})
    writer.put({"other": np.full(1000, 0xAA, np.uint8)})
    assert array.tobytes() == ARRAYS[name].tobytes()


def test_batches_larger_and_smaller_follow_each_other(
    ends: tuple[BatchMemory, BatchMemory],
) -> None:
    writer, reader = ends
    for size in (0, 5, 70_000, 3, 200_000, 0, 70_000, 1):
        batch = {"x": np.arange(size), "y": np.arange(size, dtype=np.uint8)}
        assert_same(reader.get(writer.put(batch)), batch)


def test_batch_without_a_field_or_record(ends: tuple[BatchMemory, BatchMemory]) -> None:
    writer, reader = ends
    for batch in ({}, {"x": np.empty((0, 3))}):
        assert_same(reader.get(writer.put(batch)), batch)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a file in a folder, elsewhere")
def test_memory_is_in_no_folder() -> None:
    descriptor = new_memory("regrain-unnamed")
    os.ftruncate(descriptor, 1 << 16)
    assert not list(pathlib.Path("/dev/shm").glob("*regrain-unnamed*"))
    shown = str(pathlib.Path(f"/proc/self/fd/{descriptor}").readlink())
    assert shown == "/memfd:regrain-unnamed (deleted)"
    os.close(descriptor)


def test_elsewhere_it_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = new_memory("regrain-test")
    writer, reader = BatchMemory(descriptor), BatchMemory(os.dup(descriptor))
    assert os.fstat(descriptor).st_nlink == 0
    assert_same(reader.get(writer.put(ARRAYS)), ARRAYS)
    writer.close()
    reader.close()


def test_a_number_is_seen_at_the_other_end() -> None:
    descriptor = new_memory("regrain-number")
    writer, reader = SharedNumber(descriptor), SharedNumber(os.dup(descriptor))
    assert reader.get() == 0
    for value in (1, 2**40, -3):
        writer.set(value)
        assert reader.get() == value
    writer.close()
    reader.close()
    writer.set(5)
    assert reader.get() == 5


def test_closed_memory_is_free() -> None:
    memory = BatchMemory(new_memory("regrain-test"))
    memory.put({"x": np.ones(1 << 16)})
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.descriptor)
