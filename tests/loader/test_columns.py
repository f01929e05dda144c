"""Columns: which are fields, of which dtype and shape, and what is said of a value that is not like the others."""

import itertools
from typing import Any

import numpy as np
import pytest

from loader import Field
from loader.sources.columns import (
    check_fields,
    checked,
    chosen_columns,
    field_like,
    gathered,
    put,
    room,
    stacked,
)

BYTE = Field(np.dtype(np.uint8), (2,))


def where(place: int) -> str:
    return f"file f, row {place}"


def test_fields_are_given_as_dtypes_pairs_or_fields() -> None:
    found = check_fields({"a": "U3", "b": np.dtype("i4"), "c": ("f4", (2,)), "d": BYTE}, "abcd")
    assert found == {
        "a": Field(np.dtype("U3")),
        "b": Field(np.dtype("i4")),
        "c": Field(np.dtype("f4"), (2,)),
        "d": BYTE,
    }
    assert check_fields(None, "ab") == {}


def test_columns_are_those_listed_or_all_but_the_ids() -> None:
    assert chosen_columns(["a", "b", "c"], None, "b") == ["a", "c"]
    assert chosen_columns(["a", "b", "c"], None, "row") == ["a", "b", "c"]
    assert chosen_columns(["a", "b", "c"], ("c", "b"), "b") == ["c", "b"]
    assert chosen_columns(["a", "b", "c"], (name for name in "cb"), "b") == ["c", "b"]


@pytest.mark.parametrize("rule", ["row", "file:row"])
def test_a_column_named_as_a_rule_is_a_field(rule: str) -> None:
    assert chosen_columns(["a", rule], None, rule) == ["a", rule]


@pytest.mark.parametrize(
    "value", [np.ma.masked_array([1, 2], [True, False], "u1"), np.ma.masked], ids=["one", "all"]
)
def test_a_mask_is_not_lost(value: Any) -> None:
    field = Field(value.dtype, value.shape)
    plain = {"x": np.zeros(field.shape, field.dtype)}
    with pytest.raises(TypeError, match="field 'x' is a masked array"):
        field_like("x", value)
    for read in (gathered, lambda name, _, records, where: stacked(name, records, where)):
        with pytest.raises(ValueError, match=r"file f, row 1: .*'x' is a masked array"):
            read("x", field, [plain, {"x": value}], where)
    with pytest.raises(ValueError, match="file f, row 1: field 'x' is a masked array"):
        put(room({"x": field}, 2), {"x": field}, {"x": value}, where, 1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: chosen_columns(["a"], ["b"], "row"), "columns names 'b', and there is 'a'"),
        (lambda: chosen_columns(["a"], ["a", "a"], "row"), "none twice"),
        (lambda: chosen_columns(["a"], [], "row"), "at least one column"),
        (lambda: chosen_columns(["a"], None, "a"), "hold nothing but 'a', their IDs"),
        (lambda: chosen_columns(["a"], "a", "row"), "columns must be a list of names"),
        (lambda: chosen_columns(["a"], 3, "row"), "columns must be a list of names, not 3"),
        (lambda: chosen_columns(["a"], [3], "row"), "columns must be a list of names"),
        (lambda: chosen_columns(["a", "id"], None, "row"), "'id' cannot be a field: .*ids='id'"),
        (lambda: check_fields({"b": "i4"}, ["a"]), "fields names 'b', and there is 'a'"),
        (lambda: check_fields(["a"], ["a"]), "fields must map names"),  # type: ignore[arg-type]
        (lambda: check_fields({"a": "O"}, ["a"]), "'a' has dtype object"),
    ],
    ids=itertools.count(),
)
def test_what_names_nothing_is_refused(call: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        call()


def test_a_string_alone_does_not_tell_how_long_others_are() -> None:
    with pytest.raises(ValueError, match=r'as fields=\{\'word\': "U32"\}'):
        field_like("word", "cat")
    assert field_like("word", np.array("cat", "U8")) == Field(np.dtype("U8"))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ([np.array([1, 2], "u1"), np.array([3, 4], "u1")], BYTE),
        ([1, 2, 3], Field(np.dtype(np.int64))),
        ([np.float32(1), np.float32(2)], Field(np.dtype("f4"))),
        (["a", "abc"], Field(np.dtype("U3"))),
        ([[1.0, 2.0], np.array([3.0, 4.0])], Field(np.dtype("f8"), (2,))),
        ([], BYTE),
    ],
    ids=itertools.count(),
)
def test_a_field_is_gathered_from_records_at_once_or_one_by_one(
    values: list[Any], field: Field
) -> None:
    records = [{"x": value} for value in values]
    found = gathered("x", field, records, where)
    assert (found.dtype, found.shape) == (field.dtype, (len(values), *field.shape))
    assert [one.tolist() for one in found] == [np.asarray(value).tolist() for value in values]
    made = room({"x": field}, len(values))
    for place, record in enumerate(records):
        put(made, {"x": field}, record, where, place)
    assert made["x"].tobytes() == found.tobytes()


def test_a_wrong_value_is_named() -> None:
    records = [{"x": np.zeros(2, "u1")}, {"x": np.zeros(3, "u1")}]
    with pytest.raises(
        ValueError, match=r"file f, row 1: field 'x' is uint8\[3\], and .* say uint8\[2\]"
    ):
        gathered("x", BYTE, records, where)
    with pytest.raises(ValueError, match=r"file f, row 1: the record has no 'x'; it has y"):
        gathered("x", BYTE, [records[0], {"y": 1}], where)
    assert checked("x", BYTE, records[0]["x"], where, 0) is records[0]["x"]
    for text, dtype in (("a\0", "U3"), (b"a\0", "S3")):
        with pytest.raises(ValueError, match="file f, row 1: field 'x' ends with a zero"):
            gathered("x", Field(np.dtype(dtype)), [{"x": text[:1]}, {"x": text}], where)


def test_entries_that_are_ids_keep_all_they_have() -> None:
    def ids(*values: Any) -> Any:
        return stacked("key", [{"key": value} for value in values], where)

    assert ids("a", "b\0").tolist() == ["a", "b\0"]
    assert ids(3, np.int32(4)).tolist() == [3, 4]
    with pytest.raises(
        ValueError, match=r"row 1: 'key' is <U1\[\], and in file f, row 0 it is int64"
    ):
        ids(1, "a")
    with pytest.raises(ValueError, match=r"row 1: 'key' is int64\[2\]"):
        ids(1, [1, 2])
