"""Sources: records come as they are, nothing large is copied, and what cannot work is refused."""

import dataclasses
import itertools
import pathlib
import tracemalloc
from typing import Any, Final

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from loader import ArraySource, Field, Fingerprint, RecordSource, fingerprint
from loader.sources import check_source
from loader.sources.protocol import check_field

Array = npt.NDArray[Any]

N: Final = 6


def rows(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


def ids_of(ids: Any, n: int = N) -> Array:
    return ArraySource({"x": np.zeros(n)}, ids).ids(np.arange(n))


# Reading

KINDS: Final[dict[str, Any]] = {
    "float32": np.arange(N, dtype=np.float32),
    "float16": np.arange(N, dtype=np.float16),
    "bfloat16": np.arange(N).astype(ml_dtypes.bfloat16),
    "float8": np.arange(N).astype(ml_dtypes.float8_e4m3fn),
    "bool": np.arange(N) % 2 == 0,
    "complex": np.arange(N) * 1j,
    "big-endian": np.arange(N, dtype=">f8"),
    "datetime": np.arange(N).astype("M8[ns]"),
    "timedelta": np.arange(N).astype("m8[D]"),
    "bytes": np.array([b"", b"a", b"bc", b"d", b"e", b"\xff"]),
    "text": np.array(["", "é", "abc", "d", "e", "f"]),
    "structured": np.array([(i, i / 2) for i in range(N)], [("a", "<i2"), ("b", ">f4", (2,))]),
    "many axes": np.arange(N * 24).reshape(N, 2, 3, 4),
    "columns of a matrix": np.arange(N * 6).reshape(N, 6)[:, ::2],
    "Fortran order": np.asfortranarray(np.arange(N * 6).reshape(N, 6)),
    "reversed": np.arange(N)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (N, 3)),
    "JAX": jnp.arange(N),
    "a list": [[i, i + 1] for i in range(N)],
    "a tuple of words": ("a", "bb", "c", "d", "e", "f"),
    "a range": range(N),
}


@pytest.mark.parametrize("kind", KINDS)
def test_field_of_every_kind_is_read_as_it_is(kind: str) -> None:
    values = np.asarray(KINDS[kind])
    source = ArraySource({"x": KINDS[kind]})
    assert source.fields == {"x": Field(values.dtype, values.shape[1:])}
    for chosen in (rows(3), rows(5, 0, 0, 2), rows(), np.arange(N)):
        found = source.read(chosen)["x"]
        assert type(found) is np.ndarray
        assert found.dtype == values.dtype
        assert found.shape == (len(chosen), *values.shape[1:])
        assert found.tobytes() == values[chosen].tobytes()


def test_what_is_read_is_fresh() -> None:
    x = np.arange(N)
    source = ArraySource({"x": x})
    source.read(np.arange(N))["x"][:] = -1
    np.testing.assert_array_equal(x, np.arange(N))


@pytest.mark.parametrize("ids", [np.arange(N), np.array(list("abcdef"))], ids=["integers", "text"])
def test_ids_stay_whatever_becomes_of_the_array_they_came_in(ids: Array) -> None:
    given_ids = ids.copy()
    source = ArraySource({"x": np.zeros(N)}, given_ids)
    source.ids(np.arange(N))[:] = ids[0]
    given_ids[:] = ids[0]
    np.testing.assert_array_equal(source.ids(np.arange(N)), ids)


def test_later_change_of_an_array_is_a_change_of_the_data() -> None:
    x = np.arange(N)
    source = ArraySource({"x": x})
    x[2] = 99
    assert source.read(rows(2))["x"].tolist() == [99]


def test_all_fields_come_in_one_read_in_their_order() -> None:
    source = ArraySource({"b": np.arange(N), "a": np.arange(N) * 2.0})
    found = source.read(rows(4, 1))
    assert list(found) == list(source.fields) == ["b", "a"]
    assert (found["b"].tolist(), found["a"].tolist()) == ([4, 1], [8.0, 2.0])


@pytest.mark.parametrize("row", [N, 10**12, -N - 1])
def test_row_that_is_none_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError):
        ArraySource({"x": np.arange(N)}).read(rows(row))


def test_length_and_fields_are_told() -> None:
    source = ArraySource({"x": np.zeros((N, 2), np.float32), "y": np.arange(N)})
    assert len(source) == N
    assert repr(source) == "ArraySource(6 records; x: float32[2], y: int64[])"


# Memory maps


def test_memory_map_is_never_copied_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.bin"
    n, width = 4096, 4096  # 16 MiB
    with path.open("wb") as file:
        file.truncate(n * width)
    mapped = np.memmap(path, np.uint8, "r", shape=(n, width))
    tracemalloc.start()
    try:
        source = ArraySource({"x": mapped, "t": mapped[:, :7].T.T}, np.arange(n))
        found = source.read(rows(0, n - 1, 77))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found["x"].shape == (3, width)
    assert peak < 1 << 20
    assert np.shares_memory(source._arrays["x"], mapped)


def test_memory_map_that_may_only_be_read_is_read(tmp_path: pathlib.Path) -> None:
    values = np.arange(N * 2, dtype=">i4").reshape(N, 2)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArraySource({"x": mapped})
    found = source.read(rows(5, 1))["x"]
    assert type(found) is np.ndarray
    assert found.flags.writeable
    np.testing.assert_array_equal(found, values[[5, 1]])
    assert source.fingerprint() == ArraySource({"x": values}).fingerprint()


# IDs


def test_ids_are_the_row_numbers_where_none_are_given() -> None:
    found = ids_of(None)
    assert found.dtype == np.int64
    assert found.tolist() == list(range(N))


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1).filter(lambda i: i != -1), unique=True, min_size=1)
)
def test_integer_ids_come_back_as_they_were_given(ids: list[int]) -> None:
    for form in (ids, tuple(ids), np.array(ids, np.int64)):
        found = ids_of(form, len(ids))
        assert found.dtype == np.int64
        assert found.tolist() == ids


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda word: not word.endswith("\0")
)


@given(st.lists(words, unique=True, min_size=1))
def test_text_ids_come_back_as_they_were_given(ids: list[str]) -> None:
    for form in (ids, tuple(ids), np.array(ids), np.array(ids, object)):
        found = ids_of(form, len(ids))
        assert found.dtype.kind == "U"
        assert found.tolist() == ids


@given(nps.arrays(st.sampled_from(["i1", "u1", ">i2", "u4", ">u8", "i8"]), 5, unique=True))
def test_ids_of_every_integer_dtype_keep_their_values(ids: Array) -> None:
    if (ids > np.iinfo(np.int64).max).any():
        with pytest.raises(ValueError, match="does not fit int64"):
            ids_of(ids, 5)
    elif (ids == -1).any():
        with pytest.raises(ValueError, match="has the ID -1"):
            ids_of(ids, 5)
    else:
        assert ids_of(ids, 5).tolist() == ids.tolist()


BAD_IDS: Final[list[tuple[Any, type[Exception], str]]] = [
    ([1, 2, 1], ValueError, "ID 1 belongs to rows 0 and 2"),
    (["a", "b", "b"], ValueError, "ID 'b' belongs to rows 1 and 2"),
    ([5, -1, 6], ValueError, "row 1 has the ID -1, which marks an empty slot"),
    (["a", "b", ""], ValueError, "row 2 has the ID '', which marks an empty slot"),
    (np.array([1, 2**63, 3], np.uint64), ValueError, "ID 9223372036854775808 does not fit int64"),
    ([1, 2], ValueError, "lengths differ: field 'x' 3, ids 2"),
    ([1, 2, 3, 4], ValueError, "lengths differ: field 'x' 3, ids 4"),
    ([], ValueError, "ids must name at least one record"),
    ([[1], [2], [3]], ValueError, r"one axis, not shape \[3, 1\]"),
    ([[1], [2, 3], [4]], ValueError, "ids is not an array with one shape"),
    (7, ValueError, "ids is the single value"),
    ("abc", ValueError, "ids is the single value"),
    ({1, 2, 3}, ValueError, "ids is the single value"),
    (iter([1, 2, 3]), ValueError, "ids is the single value"),
    ([1.0, 2.0, 3.0], TypeError, "not dtype float64"),
    ([1, 2, 2.5], TypeError, "not dtype float64"),
    ([1, 2, 2**64], TypeError, "not dtype object"),
    ([True, False, True], TypeError, "not dtype bool"),
    ([0, True, 2], TypeError, "not truth values"),
    ([1, 2, "3"], TypeError, "all integers or all strings"),
    (["a", "b\0", "c"], TypeError, "zero byte at the end"),
    (np.array(["a", "b\0", "c"], object), TypeError, "zero byte at the end"),
    (np.array(["a", 2, None], object), TypeError, "not dtype object"),
    (np.array([1, 2, 3], object), TypeError, "not dtype object"),
    ([b"a", b"b", b"c"], TypeError, r"not dtype \|S1"),
    (np.array(["a", "b", "c"], np.dtypes.StringDType()), TypeError, "not dtype StringDType"),
    (np.arange(3).astype("M8[s]"), TypeError, r"not dtype datetime64\[s\]"),
    (np.arange(3) * 1j, TypeError, "not dtype complex128"),
    (np.ma.array([1, 2, 3], mask=[False, True, False]), TypeError, "ids is a masked array"),
]


@pytest.mark.parametrize(("ids", "kind", "named"), BAD_IDS, ids=itertools.count())
def test_bad_ids_are_an_error_that_names_them(ids: Any, kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        ids_of(ids, 3)


# Fields that cannot be

BAD_FIELDS: Final[list[tuple[Any, type[Exception], str]]] = [
    (None, TypeError, "fields must map names to arrays"),
    ({}, ValueError, "fields must hold at least one array"),
    ([np.zeros(3)], TypeError, "fields must map names to arrays"),
    (np.zeros(3), TypeError, "fields must map names to arrays"),
    ({"x": np.zeros(3), "y": np.zeros(4)}, ValueError, "lengths differ: field 'x' 3, field 'y' 4"),
    ({"x": np.zeros(0)}, ValueError, "the arrays hold no record"),
    ({"x": []}, ValueError, "the arrays hold no record"),
    ({"x": np.zeros((3, 0))}, ValueError, r"'x' holds nothing: dtype float64, shape \[0\]"),
    ({"x": np.zeros((3, 2, 0))}, ValueError, "'x' holds nothing"),
    ({"x": np.zeros(3, "V0")}, ValueError, "'x' holds nothing"),
    ({"x": 3.0}, ValueError, "field 'x' is the single value"),
    ({"x": "abc"}, ValueError, "field 'x' is the single value"),
    ({"x": None}, ValueError, "field 'x' is the single value"),
    ({"x": {"y": np.zeros(3)}}, ValueError, "field 'x' is the single value"),
    ({"x": [[1, 2], [3], []]}, ValueError, "'x' is not an array with one shape for all records"),
    ({"x": [None, None, None]}, TypeError, "'x' has dtype object"),
    ({"x": np.array([[1], [2, 3]], object)}, TypeError, "'x' has dtype object"),
    ({"x": np.zeros(3, [("a", object)])}, TypeError, "'x' has dtype .*Python objects"),
    ({"x": np.array(["a"], np.dtypes.StringDType())}, TypeError, "'x' has dtype StringDType"),
    ({"x": np.ma.array([1, 2, 3], mask=[False, True, False])}, TypeError, "'x' is a masked array"),
    ({"": np.zeros(3)}, TypeError, "a string that is not empty, not ''"),
    ({3: np.zeros(3)}, TypeError, "a string that is not empty, not 3"),
    ({"id": np.zeros(3)}, ValueError, "named 'id'"),
]


@pytest.mark.parametrize(("fields", "kind", "named"), BAD_FIELDS, ids=itertools.count())
def test_bad_fields_are_an_error_that_names_them(
    fields: Any, kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        ArraySource(fields)


# The protocol


def test_array_source_is_a_record_source() -> None:
    assert isinstance(ArraySource({"x": np.zeros(3)}), RecordSource)


@dataclasses.dataclass
class Minimal:
    """The smallest source: squares of their row numbers."""

    num_records: int = 5

    @property
    def fields(self) -> dict[str, Field]:
        return {"square": Field(np.dtype(np.int64))}

    def __len__(self) -> int:
        return self.num_records

    def ids(self, rows: npt.NDArray[np.int64], /) -> Array:
        return rows + 1

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, Array]:
        return {"square": rows**2}

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self)


def test_class_of_a_user_is_a_record_source_without_inheriting_anything() -> None:
    source = Minimal()
    assert isinstance(source, RecordSource)
    assert check_source(source) == {"square": Field(np.dtype(np.int64))}
    arrays = ArraySource({"square": np.arange(5) ** 2}, np.arange(5) + 1)
    assert source.fingerprint() == arrays.fingerprint()


@pytest.mark.parametrize("member", ["__len__", "fields", "ids", "read", "fingerprint"])
def test_each_missing_member_is_named(member: str) -> None:
    members = {name: value for name, value in vars(Minimal).items() if name != member}
    lacking: Any = type("Lacking", (), members)()
    lacking.num_records = 5
    with pytest.raises(TypeError, match=f"Lacking is not a RecordSource: it has no {member};"):
        check_source(lacking)


def test_all_missing_members_come_in_one_error() -> None:
    wrong: Any = object()
    with pytest.raises(TypeError, match="it has no __len__, fields, ids, read, fingerprint"):
        check_source(wrong)


def test_source_of_no_record_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no record"):
        check_source(Minimal(0))


@dataclasses.dataclass
class Shaped:
    """What a field of a user may be: anything with a dtype and a shape."""

    dtype: Any = np.float32
    shape: Any = (2,)


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        (Shaped(), Field(np.dtype(np.float32), (2,))),
        (Shaped("<f4", [2]), Field(np.dtype(np.float32), (2,))),
        (Shaped(np.dtype(">i4"), ()), Field(np.dtype(">i4"), ())),
        (Shaped(shape=np.array([2, 3])), Field(np.dtype(np.float32), (2, 3))),
        (np.zeros((2, 3)), Field(np.dtype(np.float64), (2, 3))),
    ],
    ids=itertools.count(),
)
def test_anything_with_a_dtype_and_a_shape_is_a_field(field: Any, wanted: Field) -> None:
    assert check_field("x", field) == wanted


@pytest.mark.parametrize(
    ("field", "kind", "named"),
    [
        (None, TypeError, "'x' must have a dtype and a shape, not be None"),
        (np.float32, TypeError, "'x' must have a dtype and a shape"),
        (("f4",), TypeError, "'x' must have a dtype and a shape"),
        (("f4", 2), TypeError, "'x' must have a dtype and a shape"),
        (("no dtype", ()), TypeError, "'x' must have a dtype and a shape"),
        (Shaped("no dtype"), TypeError, "'x' must have a dtype and a shape"),
        (Shaped(shape=2), TypeError, "'x' must have a dtype and a shape"),
        (Shaped(shape=(2.5,)), TypeError, "'x' must have a dtype and a shape"),
        (Shaped(shape=(None, 2)), TypeError, "'x' must have a dtype and a shape"),
        (Shaped(object), TypeError, "'x' has dtype object"),
        (Shaped("U0"), ValueError, "'x' holds nothing: dtype <U0"),
        (Shaped(shape=(3, 0)), ValueError, r"'x' holds nothing: .* shape \[3, 0\]"),
        (Shaped(shape=(-1, -2)), ValueError, r"'x' holds nothing: .* shape \[-1, -2\]"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_field_is_an_error_that_names_it(
    field: Any, kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        check_field("x", field)


@pytest.mark.parametrize("field", [("f4", (2,)), (np.dtype("f4"), [2]), np.zeros(2, "f4")])
def test_a_field_may_be_a_pair_or_anything_with_dtype_and_shape(field: Any) -> None:
    assert check_field("x", field) == Field(np.dtype("f4"), (2,))


def test_a_dtype_alone_is_a_field_of_single_values() -> None:
    assert check_field("x", np.dtype("f4")) == Field(np.dtype("f4"), ())
