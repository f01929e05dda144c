"""Values come back from JSON as they were, or are refused."""

import json
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from loader.identity.json_form import from_json, json_settings, json_value, to_json

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4),
    max_leaves=10,
)
keys = st.sampled_from(["__tuple__", "__numpy__", "__dict__", "a", 0, 1.5, None, b"k", ("a", 1)])
dtypes = st.sampled_from(["i1", ">i4", "u8", "f2", "f8", "c8", "?", "M8[s]", "U3", "S2"])
values = st.recursive(
    json_values
    | st.binary(max_size=4)
    | numpy_st.arrays(dtypes, numpy_st.array_shapes(min_dims=0, min_side=0, max_dims=2, max_side=3))
    | st.integers(0, 9).map(np.int64)
    | st.floats(width=32).map(np.float32),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(keys, parts, max_size=3)
    ),
    max_leaves=8,
)


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def shown(value: Any) -> Any:
    """A value with its types, as something to compare."""
    if isinstance(value, list | tuple):
        return type(value), [shown(part) for part in value]
    if isinstance(value, dict):
        return dict, sorted((repr(key), shown(part)) for key, part in value.items())
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    return type(value), repr(value)


@given(value=values)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    text = json.dumps(to_json(value), allow_nan=False)
    assert shown(from_json(json.loads(text))) == shown(value)


@given(value=json_values)
def test_what_json_holds_stays_as_it_is(value: Any) -> None:
    if "__" not in json.dumps(value):
        assert to_json(value) == value


@pytest.mark.parametrize(
    "value",
    [
        {1},
        object(),
        float("nan"),
        [{"a": (float("inf"),)}],
        np.array([None]),
        np.zeros(2, ml_dtypes.bfloat16),
        np.zeros(2, [("a", "i4")]),
        np.bytes_(b"a\0"),
        np.ma.masked_array([1, 2], [True, False]),
        True.__class__,
        types.SimpleNamespace(),
        type("Text", (str,), {})("a"),
        nested(1, 100),
        nested(1, 5000),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"it holds|levels deep"):
        to_json(value)


@pytest.mark.parametrize(
    "value",
    [
        {"__tuple__": 1},
        {"__tuple__": [], "a": 1},
        {"__dict__": [1]},
        {"__dict__": [[[], 1]]},
        {"__bytes__": "?"},
        {"__numpy__": ["O", [1], ""]},
        {"__numpy__": ["i4", [10**6], "AAAA"]},
        {"__numpy__": ["i4", [-1], "AAAA"]},
        [{"__numpy__": {}}],
    ],
)
def test_what_encodes_no_value_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="encodes no value"):
        from_json(value)


@given(value=st.dictionaries(st.text(), json_values))
def test_a_run_config_comes_back_from_json_as_it_is_and_shares_nothing(value: Any) -> None:
    found = json_value(value, "run_config")
    assert found == value
    assert json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)
    if value:
        assert found is not value


@pytest.mark.parametrize(
    "value",
    [
        {"a": np.int64(1)},
        {"a": np.zeros(2)},
        {"a": {1, 2}},
        {"a": b"x"},
        {"a": object()},
        {"a": float("nan")},
        {"a": float("inf")},
        {1: "a"},
        {None: 1},
        {"a": [{"b": {2: 0}}]},
        {"a": nested([], 100)},
        {"a": nested([], 5000)},
    ],
)
def test_a_run_config_that_json_cannot_give_back_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="run_config must"):
        json_value(value, "run_config")


def test_settings_are_any_mapping_or_pairs() -> None:
    class Config:  # as that of ml_collections, which is no Mapping
        def keys(self) -> list[str]:
            return ["a"]

        def __getitem__(self, name: str) -> list[int]:
            return {"a": [1]}[name]

    pairs: list[Any] = [[("a", [1])], (["a", [1]],)]
    for value in (Config(), types.MappingProxyType({"a": (1,)}), *pairs):
        assert json_settings("run_config", value) == {"a": [1]}
    empty: list[Any] = [None, (), {}]
    for value in empty:
        assert json_settings("run_config", value) == {}
    for wrong in ([1], "", "ab", ["ab"], 0, [(1, 2, 3)]):
        with pytest.raises(TypeError, match="run_config must map names to values, such as"):
            json_settings("run_config", wrong)
