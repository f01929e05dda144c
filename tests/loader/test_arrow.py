"""Arrow columns: each type is the field that it should be, without a copy where none is needed, or is refused."""

import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from loader import Field
from loader.sources.arrow import Column, in_one, is_binary, is_view, to_ids, to_numpy


def where(place: int) -> str:
    return f"file f, row {place}"


def column_of(array: Any, given: Field | None = None, decode: Any = None) -> Column:
    return Column.of("x", array.type, decode, given, lambda: array[:1], where)


def read(array: Any, given: Field | None = None) -> npt.NDArray[Any]:
    column = column_of(array, given)
    found = column.block(array)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape[1:]) == (column.field.dtype, column.field.shape)
    return found


def tensors(values: npt.NDArray[Any], permutation: list[int] | None = None) -> Any:
    kind = pa.fixed_shape_tensor(
        pa.from_numpy_dtype(values.dtype), values.shape[1:], permutation=permutation
    )
    flat = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values[0].size)
    return pa.ExtensionArray.from_storage(kind, flat)


CUBE: Final = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
WORDS: Final = ["", "é", "abc", "a"]
DAYS: Final = np.array(["2020-01-01", "1969-12-31", "2000-02-29", "1970-01-01"], "M8[D]")

KINDS: Final[dict[str, tuple[Any, npt.NDArray[Any]]]] = {
    **{
        str(dtype): (pa.array(np.arange(4, dtype=dtype)), np.arange(4, dtype=dtype))
        for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
    },
    "bool": (pa.array([True, False, True, True]), np.array([True, False, True, True])),
    "date": (pa.array(DAYS), DAYS),
    "time": (pa.array(DAYS.astype("M8[us]")), DAYS.astype("M8[us]")),
    "time of a zone": (
        pa.array(DAYS.astype("M8[s]")).cast(pa.timestamp("s", "Europe/Berlin")),
        DAYS.astype("M8[s]"),
    ),
    "duration": (pa.array((DAYS - DAYS[0]).astype("m8[s]")), (DAYS - DAYS[0]).astype("m8[s]")),
    "list of one length": (pa.array(CUBE[:, 0].tolist(), pa.list_(pa.float32())), CUBE[:, 0]),
    "large list": (pa.array(CUBE[:, 0].tolist(), pa.large_list(pa.float32())), CUBE[:, 0]),
    "list of lists": (pa.array(CUBE.tolist(), pa.list_(pa.list_(pa.float32()))), CUBE),
    "fixed-size list": (pa.array(CUBE[:, 0].tolist(), pa.list_(pa.float32(), 3)), CUBE[:, 0]),
    "fixed-size list of lists": (
        pa.array(CUBE.tolist(), pa.list_(pa.list_(pa.float32()), 2)),
        CUBE,
    ),
    "list of truth values": (
        pa.array([[True, False]] * 4, pa.list_(pa.bool_(), 2)),
        np.array([[True, False]] * 4),
    ),
    "fixed-size binary": (
        pa.array([b"ab\0", b"\0\0\0", b"xyz", b"\xff__"], pa.binary(3)),
        np.frombuffer(b"ab\0\0\0\0xyz\xff__", np.uint8).reshape(4, 3),
    ),
    "tensor": (tensors(CUBE), CUBE),
    "tensor stored in another order": (
        tensors(CUBE, [1, 0]),
        np.ascontiguousarray(CUBE.transpose(0, 2, 1)),
    ),
    "tensor of truth values": (tensors(CUBE > 9), CUBE > 9),
    "tensor of times": (tensors(CUBE.astype("M8[us]")), CUBE.astype("M8[us]")),
    "dictionary": (pa.array([7, 5, 7, 7]).dictionary_encode(), np.array([7, 5, 7, 7])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_every_kind_is_an_array(kind: str) -> None:
    array, wanted = KINDS[kind]
    for low, high in ((0, 4), (1, 3), (2, 2)):
        column, part = column_of(array), array[low:high]
        found = column.block(part)
        assert isinstance(found, np.ndarray)
        assert found.dtype == wanted.dtype == column.field.dtype
        np.testing.assert_array_equal(found, wanted[low:high])
        chosen = np.array([1, 0, 1])[: high - low + 1 if high > low else 0]
        for block in (found, part):  # as NumPy has it, and as Arrow has it
            picked = column.finish(column.pick(block, chosen, where), where, 1)
            np.testing.assert_array_equal(picked, wanted[low:high][chosen])


NOT_VIEWS: Final = ("bool", "date", "list of truth values", "tensor of truth values")


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (*NOT_VIEWS, "dictionary")])
def test_numbers_are_not_copied(kind: str) -> None:
    array, _ = KINDS[kind]
    assert is_view(array.type)
    assert np.shares_memory(read(array), read(array))


@pytest.mark.parametrize("kind", NOT_VIEWS)
def test_what_numpy_has_in_another_form_is_told(kind: str) -> None:
    assert not is_view(KINDS[kind][0].type)


TEXTS: Final = {
    "string": pa.array(WORDS),
    "large string": pa.array(WORDS, pa.large_string()),
    "string view": pa.array(WORDS, pa.string_view()),
    "dictionary": pa.array(WORDS).dictionary_encode(),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_strings_have_the_width_that_their_field_has(kind: str) -> None:
    assert read(TEXTS[kind], Field(np.dtype("U3"))).tolist() == WORDS
    with pytest.raises(ValueError, match=r"field 'x' holds strings, .* as fields=\{'x': \"U32\"\}"):
        column_of(TEXTS[kind])
    column = column_of(TEXTS[kind], Field(np.dtype("U2")))
    picked = column.pick(column.block(TEXTS[kind]), np.array([1, 0]), where)
    assert picked.tolist() == ["é", ""]
    with pytest.raises(
        ValueError, match=r"row 1: column 'x' has 3 characters, and its field 2: .*\"U3\""
    ):
        column.pick(column.block(TEXTS[kind]), np.array([0, 2]), where)


def test_lists_of_strings_have_a_shape_and_a_width() -> None:
    array = pa.array([["a", "bc"], ["", "é"]])
    for shape in ((), (2,)):
        assert read(array, Field(np.dtype("U2"), shape)).tolist() == array.to_pylist()


def test_bytes_are_read_in_a_width_or_decoded() -> None:
    array = pa.array([b"abc", b"", b"\0a"])
    assert read(array, Field(np.dtype("S3"))).tolist() == [b"abc", b"", b"\0a"]
    with pytest.raises(
        ValueError, match=r"decode=\{'x': loader.decode_image\}.*fields=\{'x': \"S32\"\}"
    ):
        column_of(array)
    column = column_of(array, decode=len)
    assert column.field == Field(np.dtype(np.int64))
    assert column.finish(column.pick(array, np.array([2, 0]), where), where, 1).tolist() == [2, 3]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)])
def test_bytes_of_every_form_are_decoded(kind: Any) -> None:
    array = pa.array([b"a\0", b"\0\0"], kind)
    assert is_binary(kind)
    column = column_of(array, Field(np.dtype("S8")), lambda value: value.hex().encode())
    found = column.finish(column.pick(array, np.array([1, 0]), where), where, 1)
    assert found.tolist() == [b"0000", b"6100"]


def test_images_as_hugging_face_has_them_are_decoded() -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    array = pa.array(
        [{"bytes": b"abc", "path": None}, {"bytes": None, "path": "a.png"}, None], kind
    )
    column = column_of(array, decode=len)
    assert column.finish(column.pick(array, np.array([0]), where), where, 1).tolist() == [3]
    for row in (1, 2):
        with pytest.raises(ValueError, match=r"row 0: column 'x' is null"):
            column.pick(array, np.array([row]), where)
    with pytest.raises(TypeError, match=r"which is binary inside: give what decodes it"):
        column_of(array)


@pytest.mark.parametrize("ending", ["a\0", "\0"])
def test_strings_that_numpy_would_shorten_are_refused(ending: str) -> None:
    for array, dtype in ((pa.array([ending]), "U4"), (pa.array([ending.encode()]), "S4")):
        with pytest.raises(ValueError, match=r"row 0: column 'x' ends with a zero"):
            to_numpy("x", array, Field(np.dtype(dtype)), where)


NULLS: Final[list[tuple[Any, int]]] = [
    (pa.array([1, None, 3]), 1),
    (pa.array([True, False, None]), 2),
    (pa.array([None, "a"]), 0),
    (pa.array([[1, 2], None]), 1),
    (pa.array([[1, 2], [3, None]]), 1),
    (pa.array([[[1, 2], [3, 4]], [[5, 6], None]]), 1),
    (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), 1),
    (pa.array([b"ab", None], pa.binary(2)), 1),
    (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int64(), [2]),
            pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        ),
        1,
    ),
    (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int64(), [2]),
            pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2)),
        ),
        1,
    ),
    (pa.array([7, None]).dictionary_encode(), 1),
]


@pytest.mark.parametrize(("array", "row"), NULLS, ids=itertools.count())
def test_a_null_is_named_and_the_others_are_read(array: Any, row: int) -> None:
    field = Field(np.dtype("U2")) if array.type == pa.string() else None
    good = [place for place in range(len(array)) if place != row]
    column = Column.of("x", array.type, None, field, lambda: array.take(pa.array(good[:1])), where)
    block = column.block(array)
    assert len(column.pick(block, np.array(good), where)) == len(good)
    with pytest.raises(ValueError, match=r"row 1: column 'x' is null"):
        column.pick(block, np.array([good[0], row]), where)
    with pytest.raises(ValueError, match=rf"file f, row {row}: column 'x' is null"):
        to_numpy("x", array, column.field, where)


RAGGED: Final[list[tuple[Any, str]]] = [
    (pa.array([[1, 2], [3], [4, 5]]), "row 1: column 'x' has a list of 1 values, and others of 2"),
    (pa.array([[[1], [2]], [[3], [4]], [[5, 6], [7]]]), "row 2: column 'x' has a list of 2 values"),
    (pa.array([[[1]], [[2], [3]]]), "row 1: column 'x' has a list of 2 values, and others of 1"),
]


@pytest.mark.parametrize(("array", "named"), RAGGED, ids=itertools.count())
def test_a_list_of_another_length_is_named(array: Any, named: str) -> None:
    column = column_of(array)
    block = column.block(array)
    assert len(column.pick(block, np.array([0]), where)) == 1
    with pytest.raises(ValueError, match=named):
        column.pick(block, np.arange(len(array)), where)


@pytest.mark.parametrize(
    "kind",
    [
        pa.null(),
        pa.decimal128(5, 2),
        pa.time32("s"),
        pa.struct([("a", pa.int32())]),
        pa.map_(pa.string(), pa.int32()),
        pa.list_(pa.struct([("a", pa.int32())]), 2),
        pa.list_view(pa.int32()),
    ],
    ids=str,
)
def test_types_without_an_array_are_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"column 'x' is .*which has no NumPy dtype: cast it"):
        Column.of("x", kind, None, None, lambda: pa.array([], kind), where)


REFUSED: Final[list[tuple[Any, Field | None, Any, str]]] = [
    (pa.array([1]), Field(np.dtype("i4")), None, r"reads as int64\[\], and fields say int32\[\]"),
    (pa.array([1]), Field(np.dtype("i8"), (2,)), None, r"and fields say int64\[2\]"),
    (
        pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
        Field(np.dtype("i8"), (3,)),
        None,
        r"say int64\[3\]",
    ),
    (pa.array(["a"]), Field(np.dtype("S3")), None, "holds strings, and the longest is not known"),
    (pa.array([b"a"]), Field(np.dtype("U3")), None, "of no fixed size"),
    (pa.array([1]), None, len, "is int64, not binary: there is nothing to decode"),
    (pa.array([b"a"]), None, bytes.decode, "field 'x' holds strings"),
]


@pytest.mark.parametrize(("array", "given", "decode", "named"), REFUSED, ids=itertools.count())
def test_a_field_that_the_column_is_not_is_refused(
    array: Any, given: Field | None, decode: Callable[[bytes], Any] | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        column_of(array, given, decode)


def test_a_field_that_the_column_is_may_be_given() -> None:
    array = pa.array([[1, 2], [3, 4]])
    assert column_of(array, Field(np.dtype("i8"), (2,))).field == column_of(array).field
    column = column_of(array, Field(np.dtype("i8"), (3,)))
    block = column.block(array)
    with pytest.raises(ValueError, match=r"row 0: column 'x' has a list of 2 .*, and others of 3"):
        column.pick(block, np.array([0]), where)


MANY: Final[list[Any]] = [
    [b"ab", b"c"],
    ["ab", "c"],
    [{"bytes": b"ab", "path": "p"}, {"bytes": b"c", "path": None}],
    [["a", "b"], ["c", "d"]],
]


@pytest.mark.parametrize("values", MANY, ids=itertools.count())
def test_more_bytes_than_offsets_can_count_are_put_together(
    values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pa.concat_arrays

    def overflowing(arrays: Any) -> Any:
        """As it is where there are more than 2 GiB."""
        if not any(large in str(arrays[0].type) for large in ("large_string", "large_binary")):
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return whole(arrays)

    monkeypatch.setattr(pa, "concat_arrays", overflowing)
    found = in_one([pa.array(values[:1]), pa.array(values[1:])])
    assert found.to_pylist() == values
    with pytest.raises(pa.ArrowInvalid):
        in_one([pa.array([1]), pa.array([2])])


@pytest.mark.parametrize(
    "values", [[[], [1]], [[[]], [[1]]], [[], [[1]]], [[[], []], [[1], [2]]]], ids=str
)
def test_a_first_list_that_is_empty_tells_no_shape(values: Any) -> None:
    with pytest.raises(ValueError, match=r"file f, row 0: column 'x' has an empty list, .*fields="):
        column_of(pa.array(values))


def broken(kind: Any) -> Any:
    """Three texts, of which the middle one is none."""
    ends = pa.array([0, 1, 2, 3], pa.int64() if kind == pa.large_string() else pa.int32())
    data = pa.py_buffer(b"a\xffb")
    return pa.Array.from_buffers(kind, 3, [None, ends.buffers()[1], data])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_a_text_that_is_none_is_named_and_the_others_are_read(kind: Any) -> None:
    array = broken(kind)
    column = column_of(array, Field(np.dtype("U4")))
    block = column.block(array)
    assert column.pick(block, np.array([2, 0]), where).tolist() == ["b", "a"]
    with pytest.raises(ValueError, match=r"row 1: column 'x' holds b'.xff', which is no text"):
        column.pick(block, np.array([2, 1]), where)
    with pytest.raises(ValueError, match=r"file f, row 1: column 'x' holds b'.xff', which is no"):
        to_ids("x", array, where)
    pairs = pa.FixedSizeListArray.from_arrays(
        pa.concat_arrays([array[:1], array[2:], array[:2]]), 2
    )
    with pytest.raises(ValueError, match=r"file f, row 1: column 'x' holds b'.xff', which is no"):
        to_numpy("x", pairs, Field(np.dtype("U4"), (2,)), where)


def test_ids_are_integers_or_strings() -> None:
    assert to_ids("x", pa.array([3, 1], pa.uint8()), where).tolist() == [3, 1]
    for array in TEXTS.values():
        assert to_ids("x", array, where).tolist() == WORDS
    with pytest.raises(
        TypeError, match=r"IDs must be integers or strings, and column 'x' is double"
    ):
        to_ids("x", pa.array([1.5]), where)
    with pytest.raises(ValueError, match=r"row 1: column 'x' is null"):
        to_ids("x", pa.array([1, None]), where)
