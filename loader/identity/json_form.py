"""Python values as JSON: with the types of JSON, or so that the same types come back."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from loader.config import named_values

#: A value that is nested more deeply could exhaust the stack when it is compared or printed.
MAX_LEVELS: Final = 64
#: Its encoding may be nested somewhat more deeply.
_MAX_ENCODED_LEVELS: Final = MAX_LEVELS - 4


def to_json(value: Any) -> Any:
    """Return JSON values from which `from_json` makes an equal value of the same types.

    Numbers, strings, lists and dicts with strings as keys stay as they are. A tuple, bytes, a NumPy
    array or scalar, and any other dict become an object with one member, such as ``{"__tuple__": [1, 2]}``.

    Raises:
      TypeError: the value holds an object of another type, or NaN or infinity.
      ValueError: it is nested more than 60 levels deep.
    """
    return _encoded(value, _MAX_ENCODED_LEVELS)


def from_json(value: Any) -> Any:
    """Return the value that `to_json` encoded.

    Raises:
      ValueError: ``value`` does not come from `to_json`.
    """
    if type(value) is list:
        return [from_json(part) for part in value]
    if type(value) is not dict:
        return value
    if not _TAGS.keys() & value.keys():
        return {name: from_json(part) for name, part in value.items()}
    try:
        ((tag, content),) = value.items()
        return _TAGS[tag](content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{json.dumps(value)[:200]} encodes no value: {error}") from error


def json_value(value: Any, where: str) -> Any:
    """Return a deep copy of a value in the types of JSON: a tuple becomes a list.

    Raises:
      TypeError: JSON cannot hold it, or would change a key.
    """
    try:
        copy = shallow(json.loads(json.dumps(value, allow_nan=False, sort_keys=True)))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{where} must be a value that JSON can hold: {error}") from error
    _check_keys(value, where)
    return copy


def _check_keys(value: Any, where: str) -> None:
    """Raise for a key that is no string: JSON would make it one."""
    parts = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise TypeError(f"{where} must have strings as keys, not {list(value)!r:.80}")
        parts = tuple(value.values())
    for part in parts:
        _check_keys(part, where)


def json_settings(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a user's settings in the types of JSON; ``None`` stands for no settings.

    Raises:
      TypeError: they are no mapping, or JSON cannot hold them.
    """
    found: dict[str, Any] = json_value(named_values(name, value), name)
    return found


def shallow(value: Any, levels: int = MAX_LEVELS) -> Any:
    """Return the value, unless it is nested more than 64 levels deep.

    Raises:
      ValueError: it is.
    """
    if levels == 0:
        raise ValueError(f"it is nested more than {MAX_LEVELS} levels deep")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        shallow(part, levels - 1)
    return value


def _encoded(value: Any, levels: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float and np.isfinite(value):
        return value
    if levels == 0:
        raise ValueError(f"it is nested more than {_MAX_ENCODED_LEVELS} levels deep")
    if kind is list:
        return [_encoded(part, levels - 1) for part in value]
    if kind is tuple:
        return {"__tuple__": _encoded(list(value), levels - 1)}
    if kind is dict:
        if all(type(name) is str and name not in _TAGS for name in value):
            return {name: _encoded(part, levels - 1) for name, part in value.items()}
        return {"__dict__": _encoded([list(item) for item in value.items()], levels - 1)}
    if kind is bytes:
        return {"__bytes__": base64.b64encode(value).decode()}
    if kind is np.ndarray or isinstance(value, np.generic):
        return {"__numpy__": _encoded_array(value)}
    raise TypeError(f"it holds {value!r:.60} of type {kind.__name__}")


def _encoded_array(value: Any) -> list[Any]:
    shape = list(value.shape) if type(value) is np.ndarray else None
    content = [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]
    back: Any = None if value.dtype.hasobject else _array(content)
    if (
        type(back) is not type(value)
        or back.dtype != value.dtype
        or back.tobytes() != value.tobytes()
    ):
        raise TypeError(f"it holds {value!r:.60} of dtype {value.dtype}")
    return content


def _array(content: Any) -> Any:
    dtype, shape, text = content
    data = base64.b64decode(text, validate=True)
    sides = () if shape is None else tuple(shape)
    if any(type(side) is not int or side < 0 for side in sides):
        raise ValueError(f"{shape} is no shape")
    array = np.ndarray(sides, np.dtype(dtype), buffer=data).copy()
    return array[()] if shape is None else array


_TAGS: Final[dict[str, Callable[[Any], Any]]] = {
    "__tuple__": lambda content: tuple(map(from_json, content)),
    "__dict__": lambda content: {from_json(name): from_json(part) for name, part in content},
    "__bytes__": lambda content: base64.b64decode(content, validate=True),
    "__numpy__": _array,
}
