"""What processes pass to each other comes out the same; large arrays go once, mapped files not at all; what cannot go is named."""

import functools
import io
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loader import ArraySource, Mixture, NpySource, Pipeline, PipelineConfig, write_npy
from loader.errors import DataChangedError
from loader.reading.parcel import (
    SHARED_FROM_BYTES,
    BatchMemory,
    Parcel,
    check_sendable,
    new_memory,
    unpack,
)

LARGE = 10 * SHARED_FROM_BYTES


def there_and_back(value: Any) -> tuple[Any, list[int]]:
    """A value as a worker gets it, and the sizes of its parcel."""
    parcel = Parcel(value)
    try:
        return unpack(parcel.memory, parcel.sizes), parcel.sizes
    finally:
        parcel.close()


# Arrays


def test_large_arrays_stand_beside_the_pickle() -> None:
    value = {"large": np.arange(LARGE), "again": np.ones(LARGE, np.uint8), "small": np.arange(9)}
    found, sizes = there_and_back(value)
    assert sizes[1:] == [8 * LARGE, LARGE]
    assert sizes[0] < 1000
    for name, array in value.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_array_that_is_there_twice_goes_once() -> None:
    array = np.arange(LARGE)
    found, sizes = there_and_back([array, array])
    assert sizes[1:] == [array.nbytes]
    assert found[0] is found[1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(2 * LARGE)[::2],
        np.arange(LARGE)[::-1],
        np.arange(4 * LARGE).reshape(-1, 4)[:, 1:3],
        np.asfortranarray(np.arange(2 * LARGE).reshape(2, -1)),
        np.array(["ab", "c"] * LARGE),
    ],
    ids=["every second", "backwards", "columns", "columns first", "texts"],
)
def test_arrays_of_any_layout_stand_beside_it(array: Any) -> None:
    found, sizes = there_and_back(array)
    assert sizes[0] < 1000
    assert sizes[1:] == [array.nbytes]
    np.testing.assert_array_equal(found, array, strict=True)


def test_what_one_process_writes_the_others_do_not_see() -> None:
    parcel = Parcel(np.zeros(LARGE))
    first, second = (unpack(parcel.memory, parcel.sizes) for _ in range(2))
    first[:] = 1
    assert not second.any()
    assert not unpack(parcel.memory, parcel.sizes).any()
    parcel.close()


def test_pipeline_comes_out_as_it_was_but_for_its_counts() -> None:
    source = ArraySource({"x": np.arange(LARGE)}, [f"r{i}" for i in range(LARGE)])
    pipeline = Pipeline(source, PipelineConfig(64, 3, "pad", exclude=("r5",)))
    next(pipeline.iterate())
    pipeline.count_masked(pipeline.position(0), [("r7", 7, "of the parent")])
    found, _ = there_and_back(pipeline)
    assert found.bad_records == {}
    for step in (0, 7, len(pipeline) - 1):
        for name, array in pipeline[step].items():
            np.testing.assert_array_equal(found[step][name], array, strict=True)


# Arrays mapped from files


@pytest.fixture
def mapped(tmp_path: pathlib.Path) -> Any:
    np.save(tmp_path / "a.npy", np.arange(4 * LARGE, dtype=np.int32).reshape(-1, 4))
    return np.load(tmp_path / "a.npy", mmap_mode="r")


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        np.asarray,
        lambda array: array[100:],
        lambda array: array[50:-7, 1:3],
        lambda array: np.asarray(array)[::-2],
        lambda array: array.T,
        lambda array: array.view(np.uint8)[3:],
    ],
    ids=["map", "array", "rows", "columns", "backwards", "transposed", "bytes"],
)
def test_mapped_arrays_are_mapped_again(mapped: Any, view: Any) -> None:
    found, sizes = there_and_back(view(mapped))
    assert len(sizes) == 1
    assert sizes[0] < 1000
    np.testing.assert_array_equal(found, np.asarray(view(mapped)), strict=True)


def test_source_of_mapped_arrays_sends_no_data(mapped: Any, tmp_path: pathlib.Path) -> None:
    source = ArraySource({"x": mapped})
    write_npy(source, tmp_path / "npy")
    for one in (source, NpySource(tmp_path / "npy")):
        found, sizes = there_and_back(one)
        assert sum(sizes) < 10_000
        np.testing.assert_array_equal(found.read(np.array([3, 9]))["x"], mapped[[3, 9]])


def test_file_replaced_or_gone_is_not_mapped_again(mapped: Any, tmp_path: pathlib.Path) -> None:
    wanted = np.array(mapped)
    for change in ("other", "gone", "short"):
        if change == "gone":
            (tmp_path / "a.npy").unlink()
        else:
            np.save(tmp_path / "b.npy", wanted[:9] if change == "short" else wanted + 1)
            (tmp_path / "b.npy").rename(tmp_path / "a.npy")
        found, sizes = there_and_back(mapped)
        assert sizes[1:] == [wanted.nbytes]
        np.testing.assert_array_equal(found, wanted, strict=True)


def test_file_with_the_same_ends_in_place_of_the_mapped_one_is_not_mapped(
    mapped: Any, tmp_path: pathlib.Path
) -> None:
    wanted = np.array(mapped)
    other = wanted.copy()
    other[len(other) // 2] += 1
    np.save(tmp_path / "b.npy", other)
    (tmp_path / "a.npy").rename(tmp_path / "kept.npy")
    (tmp_path / "b.npy").rename(tmp_path / "a.npy")
    found, sizes = there_and_back(mapped)
    np.testing.assert_array_equal(found, wanted, strict=True)
    assert sizes[1:] == [wanted.nbytes]


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_file_replaced_after_it_was_sent_is_an_error(
    mapped: Any, tmp_path: pathlib.Path, change: str
) -> None:
    parcel = Parcel(mapped)
    if change == "gone":
        (tmp_path / "a.npy").unlink()
    else:
        np.save(tmp_path / "b.npy", np.array(mapped))
        (tmp_path / "b.npy").rename(tmp_path / "a.npy")
    with pytest.raises(DataChangedError, match=r"a\.npy', of a memory-mapped array, "):
        unpack(parcel.memory, parcel.sizes)
    parcel.close()


def test_private_changes_of_a_mapped_array_are_sent(mapped: Any, tmp_path: pathlib.Path) -> None:
    private = np.load(tmp_path / "a.npy", mmap_mode="c")
    private[1000] = 9
    found, _ = there_and_back(private)
    np.testing.assert_array_equal(found, np.asarray(private), strict=True)


# What cannot be sent


def a_pipeline(transform: Any = None, source: Any = None) -> Pipeline:
    return Pipeline(
        source or ArraySource({"x": np.arange(9)}), PipelineConfig(4, 3, "pad"), transform
    )


class Opening(ArraySource):
    """A source that holds something more."""

    def __init__(self, held: Any) -> None:
        super().__init__({"x": np.arange(9)})
        self.held = held


class Given:
    """A transform with something in it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def top_level(batch: dict[str, Any], more: int = 0) -> dict[str, Any]:
    return batch


@pytest.fixture
def open_file(tmp_path: pathlib.Path) -> Iterator[io.TextIOWrapper]:
    with (tmp_path / "open").open("w") as file:
        yield file


def test_what_can_be_sent_passes() -> None:
    for transform in (None, top_level, functools.partial(top_level, more=3), Given([1])):
        check_sendable("pipeline", a_pipeline(transform))


def test_lambda_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        check_sendable("pipeline", a_pipeline(lambda batch: batch))
    text = str(caught.value)
    assert "pipeline.transform, <function test_lambda_is_named.<locals>.<lambda>" in text
    assert "Define it with def or class at the top level of a module (no lambda)" in text


def test_local_function_in_a_partial_is_named() -> None:
    def inner(batch: Any) -> Any:
        return batch

    with pytest.raises(TypeError, match=r"pipeline\.transform, <function .*inner"):
        check_sendable("pipeline", a_pipeline(functools.partial(inner)))


def test_open_file_in_a_source_is_named(open_file: Any) -> None:
    with pytest.raises(TypeError) as caught:
        check_sendable("pipeline", a_pipeline(source=Opening(open_file)))
    text = str(caught.value)
    assert "pipeline.source.held, <_io.TextIOWrapper name=" in text
    assert "leave it out in __getstate__, and open it again when it is first used" in text


@pytest.mark.parametrize(
    ("held", "where"),
    [
        ([1, threading.Lock()], r"held\[1\]"),
        ({"lock": threading.Lock()}, r"held\['lock'\]"),
        ({"a": ({"b": [Given(threading.Lock())]},)}, r"held\['a'\]\[0\]\['b'\]\[0\]\.held"),
        ((i for i in "ab"), "held"),
    ],
)
def test_the_innermost_part_is_named(held: Any, where: str) -> None:
    with pytest.raises(TypeError, match=rf"pipeline\.transform\.{where}, <"):
        check_sendable("pipeline", a_pipeline(Given(held)))


def test_part_of_a_mixture_is_named() -> None:
    mixture = Mixture({"a": a_pipeline(), "b": a_pipeline(Given(sys))}, {"a": 1, "b": 1})
    with pytest.raises(TypeError, match=r"mixture\._parts\['b'\]\.transform\.held, <module 'sys'"):
        check_sendable("mixture", mixture)


def test_object_that_holds_itself_is_no_endless_search() -> None:
    given = Given(None)
    given.held = [given, threading.Lock()]
    with pytest.raises(TypeError, match=r"transform\.held\[1\], <unlocked"):
        check_sendable("pipeline", a_pipeline(given))


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="counts by /proc")
def test_checking_does_not_touch_the_data() -> None:
    def resident_pages() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1])

    zeros = np.zeros(1 << 30, np.uint8)  # in no memory as long as nobody looks
    before = resident_pages()
    check_sendable("pipeline", a_pipeline(source=ArraySource({"x": zeros})))
    assert (resident_pages() - before) * os.sysconf("SC_PAGE_SIZE") < 64 << 20


# The main module

PROGRAM = """
    import sys
    import numpy as np
    import loader
    from loader.reading.parcel import Parcel, check_sendable

    def here(batch): return batch

    source = loader.ArraySource({"x": np.arange(4), "text": np.array(["__main__"] * 4)})
    for transform in (None, here):
        pipeline = loader.Pipeline(source, loader.PipelineConfig(2, 1, "pad"), transform)
        try:
            check_sendable("pipeline", pipeline)
            print(Parcel(pipeline).needs_main)
        except TypeError as error:
            print(error)
"""


@pytest.mark.processes
def test_main_module_is_needed_where_something_is_from_there(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["False", "True"]


@pytest.mark.processes
def test_what_is_from_a_program_without_a_file_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "False"
    assert "pipeline.transform, <function here" in second
    assert "a notebook, a prompt, python -c" in second
    assert "at the top level of a module" in second


# Memory for batches


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


def test_a_number_is_seen_at_the_other_end(ends: tuple[BatchMemory, BatchMemory]) -> None:
    writer, reader = ends
    assert reader.number == 0
    for value in (1, 2**40, -3):
        writer.number = value
        assert reader.number == value
        assert_same(reader.get(writer.put(ARRAYS)), ARRAYS)
    assert reader.number == -3


def test_number_of_closed_memory_stays_readable() -> None:
    descriptor = new_memory("regrain-test")
    writer, reader = BatchMemory(descriptor), BatchMemory(os.dup(descriptor))
    writer.close()
    reader.close()
    writer.number = 5
    assert reader.number == 5


def test_closed_memory_is_free() -> None:
    memory = BatchMemory(new_memory("regrain-test"))
    memory.put({"x": np.ones(1 << 16)})
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.descriptor)
