"""The identity of data: nothing that matters goes unseen, nothing that does not is seen."""

import copy
import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import loader
from loader import ArraySource, Field, Fingerprint, dataset_digest
from loader import fingerprint as identify
from loader.identity import records
from loader.identity.digests import Leaves
from loader.identity.fingerprint import (
    MAX_CHUNKS,
    ColumnDigest,
    default_chunk_records,
    leaves,
)
from loader.identity.records import check_unique

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

#: The module: its name in `loader` is the function's.
module: Final = __import__("sys").modules["loader.identity.fingerprint"]

#: As NumPy keeps them: without zeros at the end.
words = st.text("ab\0é", min_size=1, max_size=5).map(lambda word: word.rstrip("\0") or "a")

DTYPES: Final = ["<f4", ">f8", "<i8", "|u1", "|b1", "<c8", "<M8[ns]", "|S3", "<U3", "<f2"]


def digest(fields: Mapping[str, npt.ArrayLike], ids: npt.ArrayLike | None = None) -> str:
    return identify(ArraySource(fields, ids)).digest


def lesson_digest(*arrays: Array) -> str:
    """The lesson's own function, for any number of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.dtype).encode())
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def columns(min_records: int = 1) -> st.SearchStrategy[Arrays]:
    """One to three fields of any dtype and shape, over the same number of records."""

    def fields(n: int) -> st.SearchStrategy[Arrays]:
        shapes = nps.array_shapes(min_dims=0, max_dims=2, max_side=3)
        field = st.tuples(st.sampled_from(DTYPES), shapes).flatmap(
            lambda spec: nps.arrays(spec[0], (n, *spec[1]))
        )
        return st.dictionaries(st.sampled_from(["x", "y", "a b", "é"]), field, min_size=1)

    return st.integers(min_records, 6).flatmap(fields)


def flipped(array: Array, at: int, byte: int) -> Array:
    """A copy with one bit of one element's bytes another."""
    raw = bytearray(array.tobytes())
    raw[at * array.itemsize + byte % array.itemsize] ^= 1
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


# The lesson's formula


def test_what_is_no_source_is_said_to_be_none() -> None:
    with pytest.raises(TypeError, match=r"not list: .* SequenceSource\(records\)"):
        identify([{"x": 1}])  # type: ignore[arg-type]


@given(st.lists(nps.arrays(st.sampled_from(DTYPES), nps.array_shapes(min_dims=0, min_side=0))))
def test_dataset_digest_is_the_lessons_formula(arrays: list[Array]) -> None:
    assert dataset_digest(*arrays) == lesson_digest(*arrays)
    assert dataset_digest(*[array.T for array in arrays]) == lesson_digest(*[a.T for a in arrays])


def test_dataset_digest_of_the_lessons_data_is_the_lessons() -> None:
    features = (np.arange(11, dtype=np.int64) / 10).astype(np.float32)
    labels = (2 * features - 1).astype(np.float32)
    recorded = "1a81451a8fb32a1bf0ad6307ea19198153ab1603b37174c76c4d498e343e6892"
    assert dataset_digest(features, labels) == recorded


def test_dataset_digest_takes_lists_and_numbers_as_arrays() -> None:
    assert dataset_digest([1, 2], 3.0) == lesson_digest(np.array([1, 2]), np.array(3.0))
    assert dataset_digest() == hashlib.sha256().hexdigest()


@pytest.mark.parametrize(
    "array",
    [
        np.array([None]),
        np.array([object()]),
        np.zeros(1, [("a", "i4"), ("b", object)]),
        np.array(["a"], np.dtypes.StringDType()),
    ],
    ids=["none", "object", "structured", "variable strings"],
)
def test_dataset_digest_refuses_objects(array: Array) -> None:
    with pytest.raises(TypeError, match="no bytes of its own"):
        dataset_digest(np.zeros(3), array)


# What a fingerprint sees


@given(columns(), st.data())
def test_every_single_bit_is_seen(fields: Arrays, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    array = fields[name]
    at = data.draw(st.integers(0, array.size - 1))
    if array.dtype.kind == "U":
        changed = array.copy()
        changed.reshape(-1)[at] = "%" if array.reshape(-1)[at] != "%" else "&"
    else:
        changed = flipped(array, at, data.draw(st.integers(0, 31)))
    assert digest(fields) != digest({**fields, name: changed})


@given(columns(), st.data())
def test_every_rename_is_seen(fields: Arrays, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    assert digest(fields) != digest({key + "2" * (key == name): fields[key] for key in fields})


@given(columns(min_records=2), st.data())
def test_every_reorder_of_records_is_seen(fields: Arrays, data: st.DataObject) -> None:
    n = len(next(iter(fields.values())))
    rows = np.array(
        data.draw(st.permutations(range(n)).filter(lambda rows: rows != list(range(n))))
    )
    ids = np.arange(n) + 100
    moved = {name: array[rows] for name, array in fields.items()}
    assert digest(fields, ids) != digest(moved, ids[rows])
    assert digest(fields, ids) != digest(fields, ids[rows])


@given(columns(), st.data())
def test_every_change_of_an_id_is_seen(fields: Arrays, data: st.DataObject) -> None:
    n = len(next(iter(fields.values())))
    ids = np.arange(n)
    changed = ids.copy()
    changed[data.draw(st.integers(0, n - 1))] = data.draw(st.integers(n, 2**63 - 1))
    assert digest(fields, ids) != digest(fields, changed)


@given(columns())
def test_one_record_more_or_less_is_seen(fields: Arrays) -> None:
    more = {name: np.concatenate([array, array[-1:]]) for name, array in fields.items()}
    assert digest(fields) != digest(more)


def test_order_of_fields_does_not_matter() -> None:
    x, y, z = np.arange(3.0), np.arange(3), np.ones((3, 2))
    found = {
        digest(dict(order)) for order in itertools.permutations([("x", x), ("y", y), ("z", z)])
    }
    assert len(found) == 1
    swapped = ArraySource({"z": z, "x": x, "y": y})
    assert identify(swapped) == identify(ArraySource({"x": x, "y": y, "z": z}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(4, np.int32), np.zeros(4, np.float32)),
        (np.zeros(4, np.int32), np.zeros(4, np.uint32)),
        (np.zeros(4, "<i4"), np.zeros(4, ">i4")),
        (np.zeros(4, np.float16), np.zeros(4, ml_dtypes.bfloat16)),
        (np.zeros(4, "M8[s]"), np.zeros(4, "M8[ms]")),
        (np.zeros(4, "M8[s]"), np.zeros(4, "m8[s]")),
        (np.zeros(4, "S4"), np.zeros(4, np.int32)),
        (np.zeros((4, 6)), np.zeros((4, 2, 3))),
        (np.zeros((4, 2, 3)), np.zeros((4, 3, 2))),
        (np.zeros((4, 1)), np.zeros(4)),
        (np.zeros(4), -np.zeros(4)),
        (np.array([["a\0b", "c"]]), np.array([["a", "b\0c"]])),
        (np.array([["a", ""]]), np.array([["", "a"]])),
        (np.array([["1:a", ""]]), np.array([["", "1:a"]])),
        (np.array(["\ud800"]), np.array(["\ud801"])),
        (np.zeros(4, [("a", "i4")]), np.zeros(4, [("b", "i4")])),
        (np.zeros(4, [("a", "i4"), ("b", "i4")]), np.zeros(4, [("b", "i4"), ("a", "i4")])),
    ],
    ids=itertools.count(),
)
def test_change_of_dtype_shape_or_division_is_seen(before: Array, after: Array) -> None:
    assert digest({"x": before}) != digest({"x": after})


def test_values_cannot_move_between_columns_unseen() -> None:
    a, b = np.arange(3), np.arange(3, 6)
    assert digest({"x": a, "y": b}) != digest({"x": b, "y": a})
    assert digest({"x": a}, b) != digest({"x": b}, a)
    assert digest({"x": a}) != digest({"x": a, "y": a})


def test_ids_of_text_and_of_integers_are_told_apart() -> None:
    x = np.zeros(2)
    assert digest({"x": x}, [1, 2]) != digest({"x": x}, ["1", "2"])
    assert digest({"x": x}, ["a\0b", "c"]) != digest({"x": x}, ["a", "b\0c"])


# What it does not see


@given(columns())
def test_copies_of_any_layout_have_one_fingerprint(fields: Arrays) -> None:
    first = identify(ArraySource(fields))
    layouts: list[Callable[[Array], Array]] = [
        np.copy,
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: array[::-1].copy()[::-1],
    ]
    for layout in layouts:
        laid = {name: layout(array) for name, array in fields.items()}
        assert identify(ArraySource(laid)) == first


def test_memory_map_has_the_fingerprint_of_the_array(tmp_path: pathlib.Path) -> None:
    array = np.random.default_rng(0).random((50, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", array)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    assert identify(ArraySource({"x": mapped})) == identify(ArraySource({"x": array}))


def test_gaps_of_an_aligned_structured_dtype_do_not_matter() -> None:
    aligned = np.dtype([("a", "i1"), ("b", "f8"), ("c", [("d", "i1"), ("e", "f8")])], align=True)
    arrays = []
    for filler in (0, 255):
        array = np.frombuffer(bytearray([filler]) * (3 * aligned.itemsize), aligned)
        array["a"], array["b"], array["c"]["d"], array["c"]["e"] = 1, 2, 3, 4
        arrays.append(array)
    assert arrays[0].tobytes() != arrays[1].tobytes()
    assert digest({"x": arrays[0]}) == digest({"x": arrays[1]})
    arrays[1]["c"]["e"][2] = 5
    assert digest({"x": arrays[0]}) != digest({"x": arrays[1]})


def test_width_in_which_numpy_stores_ids_does_not_matter() -> None:
    ids = np.array(["a", "b"], "<U1")
    assert digest({"x": ids}, ids) == digest({"x": ids}, ids.astype("<U9"))
    assert digest({"x": ids}, [7, 8]) == digest({"x": ids}, np.array([7, 8], ">u2"))


def test_fingerprint_is_of_the_content_now() -> None:
    x = np.arange(4.0)
    source = ArraySource({"x": x})
    before = source.fingerprint()
    assert source.fingerprint() == before
    x[2] += 1
    assert source.fingerprint() != before
    x[2] -= 1
    assert source.fingerprint() == before


# The tree, and reading in blocks

PINNED_INTEGERS: Final = "sha256:918a43595280ea2145f250b82ff8ee08151f12144eab25b1b260560695cd3783"
PINNED_TEXT: Final = "sha256:89ad80b21ea18939721d4f6d0dab58c90a645fb1cb111497bdf95e78f9c0af0e"

FIXED: Final[Arrays] = {
    "x": np.arange(22, dtype="<f4").reshape(11, 2),
    "y": np.arange(11, dtype="|u1"),
    "text": np.array([f"é{i}" for i in range(11)], "<U4"),
}


def test_digest_of_a_fixed_data_set_is_pinned() -> None:
    """A change of this is a new FINGERPRINT_VERSION: every checkpoint holds one."""
    assert module.FINGERPRINT_VERSION == 1
    assert digest(FIXED, np.arange(11) * 3) == PINNED_INTEGERS
    assert digest(FIXED, [f"r{i}" for i in range(11)]) == PINNED_TEXT


def test_leaf_is_the_lessons_digest_of_its_chunk() -> None:
    x, ids = np.arange(20.0).reshape(10, 2), np.arange(10)
    found = identify(ArraySource({"x": x}, ids), chunk_records=4)
    stretches = [slice(0, 4), slice(4, 8), slice(8, 10)]
    leaves = [bytes.fromhex(lesson_digest(x[part])) for part in stretches]
    assert found.columns["x"].digest == "sha256:" + hashlib.sha256(b"".join(leaves)).hexdigest()
    marks = [
        hashlib.sha256(bytes.fromhex(lesson_digest(ids[part])) + leaf).hexdigest()[:12]
        for part, leaf in zip(stretches, leaves, strict=True)
    ]
    assert found.marks == "".join(marks)


@pytest.mark.parametrize("chunk_records", [1, 3, 4, 100])
@pytest.mark.parametrize("read_bytes", [1, 25, 100, 333, 1 << 24])
def test_size_of_the_reads_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, read_bytes: int, chunk_records: int
) -> None:
    source = ArraySource(FIXED, np.arange(11) * 3)
    wanted = identify(source, chunk_records=chunk_records)
    monkeypatch.setattr(module, "_READ_BYTES", (read_bytes, read_bytes))
    assert identify(source, chunk_records=chunk_records) == wanted


@given(st.integers(1, 2**40))
def test_chunks_are_as_small_as_the_number_of_marks_allows(num_records: int) -> None:
    chunk = default_chunk_records(num_records)
    assert chunk.bit_count() == 1
    assert -(-num_records // chunk) <= MAX_CHUNKS
    assert chunk == 1 or -(-num_records // (chunk // 2)) > MAX_CHUNKS


@pytest.mark.parametrize("chunk_records", [0, -1])
def test_chunk_of_no_record_is_refused(chunk_records: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, not {chunk_records}"):
        identify(ArraySource(FIXED), chunk_records=chunk_records)


@pytest.mark.parametrize("num_records", [1, 2048, 2049, 5000])
def test_size_as_json_is_bounded(num_records: int) -> None:
    fields: Arrays = {"image": np.zeros((num_records, 3), np.uint8), "y": np.zeros(num_records)}
    found = identify(ArraySource({**fields, "z": np.zeros(num_records, bool)}))
    assert len(found.marks) == 12 * -(-num_records // found.chunk_records)
    assert len(json.dumps(found.to_dict())) < 30 * 1024


def test_memory_is_bounded_by_the_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = 1 << 18
    monkeypatch.setattr(module, "_READ_BYTES", (read_bytes, read_bytes))
    monkeypatch.setattr(module, "_UNIQUE_UP_TO", 0)
    source = ArraySource({"x": np.zeros((1 << 15, 256), np.uint8)})  # 8 MiB
    identify(source)
    tracemalloc.start()
    try:
        identify(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * read_bytes


# Threads, and reading without a copy


class Plain:
    """A source's records, read by `ids` and `read` alone."""

    def __init__(self, source: ArraySource) -> None:
        self._source, self.fields = source, source.fields

    def __len__(self) -> int:
        return len(self._source)

    def ids(self, rows: npt.NDArray[np.int64]) -> Array:
        return self._source.ids(rows)

    def read(self, rows: npt.NDArray[np.int64]) -> Arrays:
        return self._source.read(rows)


@given(columns(), st.booleans(), st.integers(1, 8), st.integers(1, 7), st.integers(1, 200))
def test_fingerprint_does_not_depend_on_threads_or_on_how_records_are_read(
    fields: Arrays, text_ids: bool, workers: int, chunk_records: int, read_bytes: int
) -> None:
    n = len(next(iter(fields.values())))
    source = ArraySource(fields, [f"r{i}" for i in range(n)] if text_ids else None)
    wanted = identify(source, chunk_records=chunk_records, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_READ_BYTES", (read_bytes, read_bytes))
        for of in (source, Plain(source)):
            assert identify(of, chunk_records=chunk_records, workers=workers) == wanted
            assert identify(of, chunk_records=chunk_records) == wanted


def test_parts_merge_to_the_whole_fingerprint() -> None:
    source = ArraySource(FIXED)
    parts = [leaves(source, 4, *rows) for rows in [(8, None), (0, 4), (4, 8)]]
    assert Leaves.merge(parts) == leaves(source, 4)
    assert Leaves.merge(parts).marks == identify(source, chunk_records=4).marks
    with pytest.raises(ValueError, match="row 3 is not where a chunk of 4 records begins"):
        leaves(source, 4, 3)


@pytest.mark.parametrize("workers", [0, -1])
def test_no_worker_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"workers must be at least 1, not {workers}"):
        identify(ArraySource(FIXED), workers=workers)


@pytest.mark.parametrize("workers", [None, 1, 2, 7])
def test_no_thread_is_left(workers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", (1, 1))
    before = set(threading.enumerate())
    identify(ArraySource(FIXED), workers=workers)
    with pytest.raises(ValueError, match="did not read"):
        identify(Broken(read=lambda _: {}), workers=workers)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("workers", [None, 1, 2, 7])
def test_an_error_is_that_of_the_first_record(
    workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", (1, 1))

    class Bad(ArraySource):
        def ids(self, rows: npt.NDArray[np.int64], /) -> Array:
            return np.where(rows == 5, -1, rows)

        def read(self, rows: npt.NDArray[np.int64], /) -> Arrays:
            if rows[0] >= 3:
                raise OSError(f"row {rows[0]}")
            return super().read(rows)

    with pytest.raises(OSError, match="row 3"):
        identify(Bad(FIXED), workers=workers)


def test_an_array_source_is_read_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise AssertionError

    x, ids = np.arange(12).reshape(6, 2), np.arange(6) + 10
    source = ArraySource({"x": x}, ids)
    wanted = identify(source)
    monkeypatch.setattr(ArraySource, "read", fail)
    monkeypatch.setattr(ArraySource, "ids", fail)
    assert identify(source) == wanted
    assert np.shares_memory(source.read_range(2, 4)["x"], x)
    assert source.read_range(2, 4)["id"].tolist() == [12, 13]
    assert ArraySource({"x": x}).read_range(2, 4)["id"].tolist() == [2, 3]


@pytest.mark.parametrize("member", ["read", "ids"])
def test_a_class_that_reads_in_its_own_way_is_read_in_that_way(member: str) -> None:
    class Own(ArraySource):
        pass

    def own(self: Own, rows: npt.NDArray[np.int64], /) -> Any:
        return {"x": rows * 2} if member == "read" else rows + 7

    x, ids = np.arange(6), np.arange(6) + 10
    assert identify(Own({"x": x}, ids)) == identify(ArraySource({"x": x}, ids))
    setattr(Own, member, own)
    changed = ArraySource({"x": x * 2}, ids) if member == "read" else ArraySource({"x": x}, x + 7)
    assert identify(Own({"x": x}, ids)) == identify(changed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": np.zeros(3)}, "the IDs under 'id' among them, not {'x'"),
        ([np.zeros(3)], "must give a dict of arrays"),
        (None, "must give a dict of arrays, .* not None"),
        ({"id": np.arange(3)}, "did not read 'x'"),
        ({"id": np.arange(3), "x": np.zeros(2)}, r"'x' reads as float64\[2\] for 3 rows"),
        ({"id": np.arange(2), "x": np.zeros(3)}, r"int64\[2\] as the IDs of 3 rows"),
        ({"id": np.arange(3) - 1, "x": np.zeros(3)}, "row 0 has the ID -1"),
    ],
    ids=itertools.count(),
)
def test_a_range_that_is_not_what_the_source_says_is_refused(given: Any, message: str) -> None:
    class Own(ArraySource):
        def read_range(self, start: int, stop: int, /) -> Any:
            return given

    with pytest.raises(ValueError, match=message):
        identify(Own({"x": np.zeros(3)}))


def test_ids_that_are_numbers_here_and_text_there_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", (1, 1))
    mixed = Broken(ids=lambda ids: ids if ids[0] < 12 else ids.astype("U"))
    with pytest.raises(ValueError, match=r"'id' is int64\[\] in rows 1-1 and str\[\] in rows 2-2"):
        identify(mixed)


# To a dict and back


@given(columns(), st.booleans())
def test_fingerprint_survives_json(fields: Arrays, text_ids: bool) -> None:
    n = len(next(iter(fields.values())))
    found = identify(ArraySource(fields, [f"r{i}" for i in range(n)] if text_ids else None))
    again = Fingerprint.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert again.digest == found.digest
    assert again.diff(found) == []


def made() -> dict[str, Any]:
    plain: dict[str, Any] = identify(ArraySource(FIXED)).to_dict()
    return copy.deepcopy(plain)


def each(path: str, *values: Any) -> list[tuple[str, Any]]:
    return [(path, value) for value in values]


TAMPERED: Final = [
    *each("version", 0, 2, "1", None, True, 1.0),
    *each("digest", None, "", "sha256:" + "0" * 64, 3),
    *each("num_records", 12, -11, 11.0, "11", True, None),
    *each("chunk_records", 2, 0, -1, 1.0, "1", None),
    *each("marks", None, "0", "0" * 12, "g" * 132, "0" * 12 * 2049, 5, []),
    *each("columns", {}, [], None, "id", {"id": 3}, {3: {}}),
    *each("columns.x", None, [], {}, "x"),
    *each("columns.x.dtype", "float64", 3, None),
    *each("columns.x.shape", [3], [2, 1], [], "2", [2.0], [True], [-2], None),
    *each("columns.x.digest", "sha256:" + "0" * 64, "", "x", None, 0),
    *each("columns.y.digest", "SHA256:" + "0" * 64, "sha256:" + "0" * 65),
    *each("columns.new", {"dtype": "int64", "shape": [], "digest": "sha256:" + "0" * 64}),
]


@pytest.mark.parametrize(("path", "value"), TAMPERED, ids=itertools.count())
def test_each_tampered_value_is_refused(path: str, value: Any) -> None:
    plain = made()
    *above, last = path.split(".")
    holder = plain
    for key in above:
        holder = holder[key]
    holder[last] = value
    with pytest.raises(ValueError, match="fingerprint"):
        Fingerprint.from_dict(plain)


def test_marks_only_place_a_difference() -> None:
    plain = made()
    plain["marks"] = "0" * len(plain["marks"])
    other = Fingerprint.from_dict(plain)
    assert other.diff(identify(ArraySource(FIXED))) == []


@pytest.mark.parametrize("key", made())
def test_each_missing_value_is_refused(key: str) -> None:
    plain = made()
    del plain[key]
    with pytest.raises(ValueError, match="not a fingerprint"):
        Fingerprint.from_dict(plain)


@pytest.mark.parametrize("value", [None, 3, "x", [], [1], {}])
def test_what_is_no_fingerprint_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not a fingerprint"):
        Fingerprint.from_dict(value)


# Identity by revision


class Virtual:
    """A source of 10**12 records that are computed."""

    fields: Final = {"x": Field(np.dtype(np.float32), (2,))}

    def __init__(self, num_records: int = 10**12) -> None:
        self.num_records = num_records

    def __len__(self) -> int:
        return self.num_records

    def ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        raise AssertionError

    def read(self, rows: npt.NDArray[np.int64]) -> Arrays:
        raise AssertionError


def test_revision_is_an_identity_without_a_read() -> None:
    found = Fingerprint.of_revision("2026-11", Virtual())
    assert found.num_records == 10**12
    assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert Fingerprint.of_revision("2026-11", Virtual()) == found


def test_another_revision_or_size_is_another_identity() -> None:
    found = Fingerprint.of_revision("2026-11", Virtual())
    later = Fingerprint.of_revision("2026-12", Virtual())
    assert [entry.name for entry in found.diff(later)] == ["dataset.id", "dataset.x"]
    larger = Fingerprint.of_revision("2026-11", Virtual(10**12 + 1))
    assert [entry.name for entry in found.diff(larger)] == ["dataset.num_records"]


@pytest.mark.parametrize("revision", ["", None, 3, b"a"])
def test_revision_must_be_a_name(revision: Any) -> None:
    with pytest.raises(ValueError, match="revision must be a name"):
        Fingerprint.of_revision(revision, Virtual())


# Differences


def differences(
    before: ArraySource, after: ArraySource, *, with_source: bool = True
) -> dict[str, tuple[str, str, str]]:
    found = identify(before).diff(identify(after), after if with_source else None)
    return {entry.name: (entry.checkpoint, entry.now, entry.note) for entry in found}


def test_same_data_has_no_difference() -> None:
    assert differences(ArraySource(FIXED), ArraySource(copy.deepcopy(FIXED))) == {}


def test_difference_is_empty_if_and_only_if_digests_are_equal() -> None:
    found = identify(ArraySource(FIXED))
    columns = dict(found.columns)
    variants = [
        dataclasses.replace(found, num_records=12, ids=None),
        dataclasses.replace(found, columns={**columns, "x": ColumnDigest("f8", (), "sha256:0")}),
        dataclasses.replace(found, columns={"id": columns["id"]}),
    ]
    for other in variants:
        assert other.digest != found.digest
        assert found.diff(other)
        assert other.diff(found)


def test_added_removed_retyped_and_reshaped_fields_are_named() -> None:
    zeros = np.zeros((3, 4))
    before = ArraySource({"gone": zeros, "type": zeros, "shape": zeros, "same": zeros})
    after = ArraySource(
        {"new": zeros, "type": zeros.astype("f4"), "shape": zeros.reshape(3, 2, 2), "same": zeros}
    )
    found = differences(before, after)
    assert list(found) == ["dataset.gone", "dataset.new", "dataset.shape", "dataset.type"]
    assert found["dataset.gone"][1] == "absent"
    assert found["dataset.new"][0] == "absent"
    assert found["dataset.type"][:2] == ("float64[4]", "float32[4]")
    assert found["dataset.shape"][:2] == ("float64[4]", "float64[2, 2]")


@given(st.sets(st.integers(0, 11), min_size=1))
def test_changed_records_are_named_by_their_ids(changed: set[int]) -> None:
    y, ids = np.arange(12), np.arange(12) + 100
    now = y.copy()
    now[list(changed)] += 50
    found = differences(ArraySource({"y": y}, ids), ArraySource({"y": now}, ids))
    assert list(found) == ["dataset.y"]
    before, after, note = found["dataset.y"]
    assert before != after
    assert before.startswith("sha256:")
    verb = "records differs" if len(changed) == 1 else "records differ"
    listed = ", ".join(str(row + 100) for row in sorted(changed)[:8])
    assert note.startswith(f"{len(changed)} of 12 {verb}: id {listed}")
    assert note.endswith(", ...") == (len(changed) > 8)


def test_changed_records_are_named_without_a_source_too_where_their_ids_were_read() -> None:
    """As a chain of Grain's gives a fingerprint, and no source; one that was stored has rows alone."""
    x = np.arange(5)
    before, after = (identify(ArraySource({"x": data}, x + 10)) for data in (x, x * (x < 4)))
    stored = Fingerprint.from_dict(json.loads(json.dumps(after.to_dict())))
    assert [one.note for one in before.diff(after)] == ["1 of 5 records differs: id 14"]
    assert [one.note for one in before.diff(stored)] == ["1 of 5 records differs: row 4"]
    assert stored == after
    assert stored.ids is None


def test_ids_are_kept_for_names_alone() -> None:
    few, many = (identify(ArraySource({"x": np.arange(count)})) for count in (2048, 2049))
    assert few.ids is not None
    assert few.ids.tolist() == list(range(2048))
    assert many.ids is None


def test_text_ids_are_named_as_they_are() -> None:
    names = [f"r{i}" for i in range(5)]
    before, after = (ArraySource({"x": np.arange(5) == k}, names) for k in (9, 3))
    assert differences(before, after)["dataset.x"][2] == "1 of 5 records differs: id r3"


def test_last_record_that_can_be_named_is_the_2048th() -> None:
    x = np.zeros(MAX_CHUNKS, np.uint8)
    note = differences(ArraySource({"x": x}), ArraySource({"x": np.arange(2048) == 2047}))
    assert note["dataset.x"][:2] == ("uint8[]", "bool[]")
    changed = x.copy()
    changed[-1] = 1
    found = differences(ArraySource({"x": x}), ArraySource({"x": changed}))
    assert found["dataset.x"][2] == "1 of 2048 records differs: id 2047"


def test_above_2048_records_the_chunks_are_named() -> None:
    x = np.zeros(5000, np.uint8)
    changed = x.copy()
    changed[[8, 9, 4999]] = 1
    found = differences(ArraySource({"x": x}), ArraySource({"x": changed}))
    assert found["dataset.x"][2] == "in 2 of 1250 chunks: rows 8-11, 4996-4999"
    changed[::100] = 1
    note = differences(ArraySource({"x": x}), ArraySource({"x": changed}))["dataset.x"][2]
    assert note.startswith("in 52 of 1250 chunks: rows 0-3, 8-11, 100-103, 200-203 and 48 more")


@pytest.mark.parametrize(("before", "after"), [(5000, 5001), (2000, 5000), (5000, 2000)])
def test_another_number_of_records_is_named_and_the_common_ones_are_compared(
    before: int, after: int
) -> None:
    """The numbers of records may call for chunks of other sizes: those of the checkpoint count."""
    x = np.zeros(5001, np.uint8)
    changed = x.copy()
    changed[8] = 1
    found = differences(ArraySource({"x": x[:before]}), ArraySource({"x": changed[:after]}))
    assert found["dataset.num_records"][:2] == (str(before), str(after))
    assert set(found) == {"dataset.num_records", "dataset.id", "dataset.x"}
    note = found["dataset.num_records"][2]
    assert "id 8" in note or "8-11" in note
    assert found["dataset.x"][2] == ""


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (11, 13, "the first 11 records are the same, and 2 were appended: id 11, 12"),
        (13, 11, "the first 11 records are the same, and 2 were removed from the end: rows 11-12"),
        (
            5000,
            5003,
            "the first 5000 records are the same, and 3 were appended: id 5000, 5001, 5002",
        ),
        (5001, 5003, "the first 5001 records are the same, and 2 were appended: id 5001, 5002"),
        (5003, 5001, "the first 5000 records are the same; after them 3 became 1"),
        (2048, 2049, "the first 2048 records are the same, and 1 was appended: id 2048"),
    ],
)
def test_records_added_at_the_end_or_gone_from_it_are_told_from_edited_ones(
    before: int, after: int, note: str
) -> None:
    x = np.arange(5003)
    found = differences(ArraySource({"x": x[:before]}), ArraySource({"x": x[:after]}))
    assert found["dataset.num_records"][2] == note
    edited = x.copy()
    edited[3] = -1
    found = differences(ArraySource({"x": x[:before]}), ArraySource({"x": edited[:after]}))
    edit = found["dataset.num_records"][2]
    assert "id 3" in edit or "rows 0-3" in edit or "rows 2-3" in edit
    assert "the first 1" not in edit
    assert any(word in edit for word in ("appended", "removed", "more in", "fewer in"))


def picked(rows: list[int], edited: tuple[int, ...] = (), total: int = 12) -> ArraySource:
    """Some of the records, in some order; a record's ID is 100 plus its number."""
    x = np.arange(total)
    x[list(edited)] += 50
    return ArraySource({"x": x[rows]}, np.arange(100, 100 + total)[rows])


WHOLE: Final = list(range(8))


@pytest.mark.parametrize(
    ("after", "note"),
    [
        (picked([0, 1, 2, 5, 6, 7]), "2 removed: rows 3-4"),
        (picked([0, 1, 2, 9, 3, 4, 5, 6, 7]), "1 inserted: id 109"),
        (picked([9, *WHOLE]), "1 inserted: id 109"),
        (picked(WHOLE[1:]), "1 removed: row 0"),
        (picked([*WHOLE, 8, 9], (3,)), "1 edited or replaced: id 103; 2 appended: id 108, 109"),
        (picked(WHOLE[:6], (3,)), "1 edited or replaced: id 103; 2 removed: rows 6-7"),
        (picked([0, 2, 3, 1, 4, 5, 6, 7]), "{same}"),
        (picked([7, 1, 2, 3, 4, 5, 6, 0]), "{same}"),
        (
            picked([7, 1, 2, 3, 4, 5, 6, 0], (4,)),
            "1 edited or replaced: id 104; 2 moved: id 107, 100",
        ),
        (picked([1, 2, 3, 4, 5, 6, 7, 0, 8]), "1 moved: id 100; 1 appended: id 108"),
        (picked([0, 1, 9, 3, 4, 5, 6, 7]), "1 of 8 records differs: id 109 in some field"),
        (picked(WHOLE, (3, 4)), "2 of 8 records differ: id 103, 104"),
    ],
)
def test_edited_moved_removed_inserted_and_appended_records_are_told_apart(
    after: ArraySource, note: str
) -> None:
    found = differences(picked(WHOLE), after)
    note = note.format(same="the same records in another order")
    if "dataset.num_records" in found:
        assert found.pop("dataset.num_records")[2] == note
        note = ""
    assert {found[name][2] for name in found} == {note}


@pytest.mark.parametrize(
    ("edited", "left_out", "note"),
    [
        ([7], range(4990, 5000), "in 1 of 1250 chunks: rows 4-7; 10 fewer in rows 4988-4999"),
        ([7], range(4992, 5000), "in 1 of 1250 chunks: rows 4-7; 8 removed: rows 4992-4999"),
        ([7], range(800, 1000), "in 1 of 1250 chunks: rows 4-7; 200 removed: rows 800-999"),
        (
            [4003],
            [*range(400, 408), *range(800, 1000)],
            "in 1 of 1250 chunks: rows 3792-3795; 208 removed: rows 400-407, 800-999",
        ),
        ([], range(500, 510), "the first 500 records are the same; after them 4500 became 4490"),
        ([7], range(500, 510), "in 1 of 1250 chunks: rows 4-7; 10 fewer in rows 500-4999"),
    ],
)
@pytest.mark.parametrize("with_source", [True, False])
def test_an_edit_and_removed_stretches_are_both_named_where_a_mark_is_of_several(
    edited: list[int], left_out: Iterable[int], note: str, with_source: bool
) -> None:
    rows = np.setdiff1d(np.arange(5000), list(left_out))
    y = np.arange(5000) % 10
    before = ArraySource({"x": np.arange(5000), "y": y}, np.arange(5000))
    y = np.where(np.isin(np.arange(5000), edited), 99, y)
    after = ArraySource({"x": rows, "y": y[rows]}, rows)
    found = differences(before, after, with_source=with_source)
    assert found["dataset.num_records"][2] == note


def test_inserted_stretches_are_named_where_a_mark_is_of_several() -> None:
    ids = np.arange(5000)
    more = np.insert(ids, 400, np.arange(6000, 6008))
    more = np.append(more, [7000, 7001, 7002])
    found = differences(ArraySource({"x": ids}, ids), ArraySource({"x": more}, more))
    note = "8 inserted: rows 400-407; 3 appended: rows 5008-5010"
    assert found["dataset.num_records"][2] == note


def test_records_are_not_blamed_for_a_field_that_came_or_went() -> None:
    x = np.arange(3)
    before, after = ArraySource({"x": x, "y": x}), ArraySource({"x": x[::-1], "z": x})
    assert {note for _, _, note in differences(before, after).values()} == {""}


def test_without_a_source_rows_are_told_apart() -> None:
    found = differences(picked(WHOLE), picked([9, *WHOLE[:4], *WHOLE[5:]]), with_source=False)
    assert found["dataset.x"][2] == "1 removed: row 4; 1 inserted: id 109"


def test_a_source_that_grew_vastly_is_compared_as_far_as_the_old_one_went() -> None:
    read = []

    class Grown(Virtual):
        def ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            read.append(int(rows.max()))
            return rows

        def read(self, rows: npt.NDArray[np.int64]) -> Arrays:
            return {"x": np.zeros((len(rows), 2), np.float32)}

    before, grown = identify(Grown(100)), Grown()
    columns = {**before.columns, "x": ColumnDigest("float32", (2,), "sha256:0")}
    now = Fingerprint(10**12, columns, 1 << 29, "0" * 12)
    (first, *_) = before.diff(now, grown)
    more = 10**12 - 100
    assert first.note.startswith(f"the first 100 records are the same, and {more} were appended: ")
    assert max(read) == 107  # the IDs of the first eight appended records


def test_records_are_not_blamed_on_one_field_where_several_differ() -> None:
    x, y = np.zeros(3), np.zeros(3)
    before = ArraySource({"x": x, "y": y})
    found = differences(before, ArraySource({"x": np.eye(3)[0], "y": np.eye(3)[1]}))
    assert {note for _, _, note in found.values()} == {
        "2 of 3 records differ: id 0, 1 in some field"
    }


def test_a_revision_is_told_from_content() -> None:
    source = ArraySource({"x": np.arange(3)})
    found = Fingerprint.of_revision("v1", source).diff(identify(source), source)
    assert [(entry.name, entry.checkpoint, entry.now) for entry in found[:1]] == [
        ("dataset.id", "unread[]", "int64[]")
    ]


def test_ids_come_first_among_the_differences() -> None:
    x = np.arange(3)
    found = differences(ArraySource({"a": x}, x), ArraySource({"a": x + 1}, x + 10))
    assert list(found) == ["dataset.id", "dataset.a"]


# Sources that are not what they say


class Broken:
    """A sound source of 4 records, but for what is given."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self.fields = {"x": Field(np.dtype(np.float32), (2,)), "y": Field(np.dtype(np.int64))}

    def __len__(self) -> int:
        return 4

    def ids(self, rows: npt.NDArray[np.int64]) -> Any:
        change = self._changes.get("ids")
        return rows + 10 if change is None else change(rows + 10)

    def read(self, rows: npt.NDArray[np.int64]) -> Any:
        sound = {"x": np.zeros((len(rows), 2), np.float32), "y": rows * 2}
        change = self._changes.get("read")
        return sound if change is None else change(sound)


BROKEN: Final[list[tuple[str, Callable[[Any], Any], str]]] = [
    ("ids", lambda ids: ids[:-1], r"int64\[3\] as the IDs of 4 rows"),
    ("ids", lambda ids: ids[:, None], r"int64\[4, 1\] as the IDs of 4 rows"),
    ("ids", lambda ids: ids.astype(np.uint64), r"uint64\[4\] as the IDs"),
    ("ids", lambda ids: ids / 2, r"float64\[4\] as the IDs"),
    ("ids", lambda ids: ids.astype(object), r"object\[4\] as the IDs"),
    ("ids", lambda ids: ids.astype("S"), r"\|S\d+\[4\] as the IDs"),
    ("ids", lambda _: 7, r"int64\[\] as the IDs"),
    ("ids", lambda _: None, r"object\[\] as the IDs"),
    ("ids", lambda ids: ids - 12, "row 1 has the ID -1"),
    ("ids", lambda _: np.array(["a", "b", "", "d"]), "row 2 has the ID ''"),
    ("ids", lambda ids: ids // 2, "ID 5 belongs to rows 0 and 1"),
    ("ids", lambda _: np.array(["a", "b", "c", "b"]), "ID 'b' belongs to rows 1 and 3"),
    ("read", lambda fields: {"x": fields["x"]}, "did not read 'y'"),
    ("read", lambda _: {}, "did not read 'x', 'y'"),
    ("read", lambda fields: list(fields.values()), "must read as a dict of arrays, not list"),
    ("read", lambda _: None, "must read as a dict of arrays, not NoneType"),
    ("read", lambda fields: {**fields, "y": fields["y"][:3]}, r"'y' reads as int64\[3\] for 4"),
    ("read", lambda fields: {**fields, "y": fields["y"] / 2}, r"'y' reads as float64\[4\]"),
    ("read", lambda fields: {**fields, "x": fields["x"].T}, r"'x' reads as float32\[2, 4\]"),
    ("read", lambda fields: {**fields, "x": fields["x"].astype(">f4")}, r"'x' reads as >f4"),
    ("read", lambda fields: {**fields, "y": None}, r"'y' reads as object\[\]"),
]


@pytest.mark.parametrize(("member", "change", "named"), BROKEN, ids=itertools.count())
def test_source_that_is_not_what_it_says_is_an_error_that_names_it(
    member: str, change: Callable[[Any], Any], named: str
) -> None:
    identify(Broken())
    with pytest.raises(ValueError, match=named):
        identify(Broken(**{member: change}))


def test_lists_are_taken_as_arrays() -> None:
    listed = Broken(
        ids=lambda ids: ids.tolist(), read=lambda fields: {**fields, "y": fields["y"].tolist()}
    )
    assert identify(listed) == identify(Broken())


def test_further_fields_that_a_source_reads_are_no_part_of_it() -> None:
    assert identify(Broken(read=lambda fields: {**fields, "z": fields["y"]})) == identify(Broken())


@given(st.lists(st.integers(-50, 50), min_size=1), st.randoms(use_true_random=False))
def test_duplicates_are_found_wherever_they_stand(values: list[int], rng: random.Random) -> None:
    rng.shuffle(values)
    unique = list(dict.fromkeys(values))
    check_unique(np.array(unique))
    with pytest.raises(ValueError, match=r"ID -?\d+ belongs to rows \d+ and \d+ \(1 such"):
        check_unique(np.array([*unique, rng.choice(unique)]))


@given(st.lists(words, min_size=1), st.randoms(use_true_random=False), st.booleans())
def test_texts_that_stand_twice_are_found(
    values: list[str], rng: random.Random, by_chance: bool
) -> None:
    rng.shuffle(values)
    unique = list(dict.fromkeys(values))
    with pytest.MonkeyPatch.context() as patch:
        if by_chance:
            patch.setattr(records, "_MULTIPLIER", np.uint64(0))  # the same for the same last letter
        for dtype in ("<U5", ">U5"):
            check_unique(np.array(unique, dtype))
            with pytest.raises(ValueError, match=r"ID '.*' belongs to rows \d+ and \d+ \(1 such"):
                check_unique(np.array([*unique, rng.choice(unique)], dtype))


def test_public_names_are_of_this_module() -> None:
    assert loader.fingerprint is module.fingerprint
    assert loader.dataset_digest is module.dataset_digest


def test_a_fingerprint_can_be_read_where_it_is_printed() -> None:
    printed = repr(identify(ArraySource({"x": np.arange(2000)})))
    assert len(printed) < 500
    assert "int64" in printed


PINNED_GAPS: Final = "sha256:3e5b4dd0605a30972bef6ec374f4eeb7bc3358314050af0dcbc7e5fdfbc4fa81"
PINNED_EXTENDED: Final = "sha256:55cf463dcd9f8aceb41779aec9e899a6fc4f0e3496273577930be2b550a8c07b"


def test_digest_of_gaps_and_zeroed_padding_is_pinned() -> None:
    """As it was before padding was taken for zeros."""
    parts = [("c", "u1"), ("d", "<f8")]
    gaps = np.dtype([("a", "<i2"), ("b", parts), ("e", "u1", (3,))], align=True)
    x = np.zeros(3, gaps)
    x["a"], x["b"]["c"], x["b"]["d"], x["e"] = [1, 2, 3], 7, 0.5, 9
    assert digest({"x": x}) == PINNED_GAPS
    if np.dtype(np.longdouble).str == "<f16" and np.finfo(np.longdouble).nmant == 63:  # as on x86
        assert digest({"x": np.zeros(3, np.longdouble)}) == PINNED_EXTENDED


def test_equal_long_doubles_of_different_computations_are_the_same_data() -> None:
    ones = np.ones(9, np.longdouble)
    found = digest({"x": ones})
    assert digest({"x": np.sqrt(ones)}) == digest({"x": np.arange(9) * 0 + ones}) == found
    assert loader.dataset_digest(ones) == loader.dataset_digest(np.sqrt(ones))
    assert digest({"x": ones * 2}) != found
