"""Records as bytes: what goes in comes out, and bytes that are no record are told from those that are."""

import json
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from loader import decode_record, encode_record
from loader.sources.records import layout_of

KINDS: Final[dict[str, Any]] = {
    "a number": 3,
    "a float": 2.5,
    "a truth value": True,
    "float32": np.arange(6, dtype="f4").reshape(2, 3),
    "big-endian": np.arange(3, dtype=">i2"),
    "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
    "float8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "text": np.array("cät", "U8"),
    "a Python string": "word",
    "bytes of a fixed width": np.array(b"abc", "S5"),
    "a time": np.array("2020-01-02", "M8[s]"),
    "complex": np.array([1j, 2.0]),
    "transposed": np.arange(6).reshape(2, 3).T,
    "none of a length": np.zeros((0, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_every_kind_comes_back(kind: str) -> None:
    value = KINDS[kind]
    found = decode_record(encode_record({"before": np.int8(1), "x": value, "after": b"z"}))
    assert list(found) == ["before", "x", "after"]
    array = found["x"]
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.asarray(value).dtype
    assert array.shape == np.shape(value)
    assert array.tobytes() == np.asarray(value).tobytes()


@given(st.binary())
def test_bytes_of_any_length_come_back(value: bytes) -> None:
    found = decode_record(encode_record({"image": value, "y": 1}))
    assert found["image"] == value
    assert found["y"] == 1


fields = st.dictionaries(
    st.text(min_size=1, max_size=5),
    nps.arrays(
        st.sampled_from(["i1", "<u2", ">f4", "f8", "?", "U3", "M8[us]"]),
        nps.array_shapes(min_dims=0, max_dims=3, max_side=3),
    ),
    min_size=1,
    max_size=4,
)


@given(fields, st.integers(1, 5))
def test_records_of_the_same_fields_are_decoded_at_once(
    record: dict[str, npt.NDArray[Any]], count: int
) -> None:
    encoded = [encode_record(record)] * count
    found = layout_of(encoded[0]).decode_all(encoded)
    assert found is not None
    assert list(found) == list(record)
    for name, value in record.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == (count, *value.shape)
        assert found[name].tobytes() == value.tobytes() * count


@pytest.mark.parametrize(
    "other", [{"x": np.int64(1)}, {"y": np.int32(1)}, {"x": np.int32(1), "y": np.int32(1)}]
)
def test_records_of_other_fields_are_not_decoded_at_once(other: Any) -> None:
    first, second = encode_record({"x": np.int32(1)}), encode_record(other)
    assert layout_of(first).decode_all([first, second]) is None


def test_bytes_that_have_a_length_of_their_own_are_not_decoded_at_once() -> None:
    record = encode_record({"x": b"abc"})
    assert layout_of(record).decode_all([record]) is None


def test_the_encoding_is_what_its_page_says() -> None:
    header = b'{"x":["<f4",[2]],"y":["bytes",[3]]}'
    record = encode_record({"x": np.array([1, 2], "<f4"), "y": b"abc"})
    body = np.array([1, 2], "<f4").tobytes() + b"abc"
    assert record == b"REC1" + len(header).to_bytes(2, "little") + header + body


BAD_RECORDS: Final[list[tuple[Any, str]]] = [
    ({}, "must map names to arrays"),
    ([1, 2], "must map names to arrays"),
    ({"": 1}, "a field's name must be a string"),
    ({3: 1}, "a field's name must be a string"),
    ({"x": None}, "'x' has dtype object"),
    ({"x": np.array([None])}, "'x' has dtype object"),
    ({"x": np.zeros(2, [("a", "i4")])}, "'x' has dtype .*which cannot be encoded"),
    ({"x": np.array("a", np.dtypes.StringDType())}, "'x' has dtype StringDType"),
    ({"x": np.ma.masked_array([1, 2], [True, False])}, "'x' is a masked array"),
    ({"x": np.ma.masked}, "'x' is a masked array"),
]


@pytest.mark.parametrize(("record", "named"), BAD_RECORDS)
def test_what_has_no_bytes_of_its_own_is_refused(record: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        encode_record(record)


def test_a_zero_at_the_end_of_a_string_is_not_dropped() -> None:
    with pytest.raises(ValueError, match="'x' is a string that ends with a zero"):
        encode_record({"x": "a\0"})
    assert decode_record(encode_record({"x": b"a\0", "y": "a\0b"})) == {"x": b"a\0", "y": "a\0b"}


def test_a_header_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="of 65,535"):
        encode_record({f"{number:06}": 1 for number in range(5000)})


def with_header(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"REC1" + len(text).to_bytes(2, "little") + text + bytes(8)


BAD_BYTES: Final[list[tuple[bytes, str]]] = [
    (b"", "0 bytes that begin with b'' are no record"),
    (b"REC1", "4 bytes that begin with"),
    (b"\x89PNG\r\n\x1a\n and more", "are no record that loader.encode_record made"),
    (with_header({"x": ["<i8", [2]]}), "has 33 bytes, and its header describes 41; it is cut"),
    (with_header({"x": ["<i4", []]}), "something was written after it"),
    (with_header(b"{"), "cannot be understood"),
    (with_header(b"\xff"), "cannot be understood"),
    (with_header([1]), "cannot be understood"),
    (with_header({"x": "<i8"}), "cannot be understood"),
    (with_header({"x": ["O", []]}), "is no dtype that a record may have"),
    (with_header({"x": ["i4,i4", []]}), "is no dtype that a record may have"),
    (with_header({"x": ["(2,)i4", []]}), "is no dtype that a record may have"),
    (with_header({"x": [["a", "i8"], []]}), "is no dtype"),
    (with_header({"x": ["nothing", []]}), "cannot be understood"),
    (with_header({"x": ["<i8", [-1]]}), "-1 is no length"),
    (with_header({"x": ["<i8", [1.0]]}), "1.0 is no length"),
    (with_header({"x": ["<i8", [True]]}), "True is no length"),
    (with_header({"x": ["bytes", [2, 4]]}), "bytes have one length"),
]


@pytest.mark.parametrize(("data", "named"), BAD_BYTES, ids=range(len(BAD_BYTES)))
def test_bytes_that_are_no_record_are_told_from_those_that_are(data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        decode_record(data)


def test_a_record_that_is_cut_anywhere_is_refused() -> None:
    record = encode_record({"x": np.arange(3), "y": b"abc"})
    for stop in range(len(record)):
        with pytest.raises(ValueError, match=r"are no record|it is cut|cannot be understood"):
            decode_record(record[:stop])


@given(st.binary(max_size=64), st.integers(0, 2**16 - 1))
def test_no_bytes_raise_anything_but_a_value_error(data: bytes, length: int) -> None:
    record = b"REC1" + length.to_bytes(2, "little") + data
    with pytest.raises(ValueError, match="record"):
        decode_record(record)
