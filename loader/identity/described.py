"""By what functions and objects are known from one run to the next: names, versions and plain values, never code."""

import dataclasses
import dis
import enum
import functools
import hashlib
import operator
import re
import types
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from loader.identity.fingerprint import dataset_digest

#: What is longer is told by a digest.
MAX_TEXT: Final = 200
#: As many values, and bytes of arrays, of one function or object are looked at.
MAX_VALUES: Final = 20_000
MAX_ARRAY_BYTES: Final = 1 << 26

_MAX_DEPTH: Final = 8
#: Each is told as Python writes it; a bool is an int too, and comes first.
_PLAIN: Final = (bool, int, float, complex, str, bytes, range, Decimal, Fraction)
#: What a data set of Grain's reads from, and how, is told where it stands in the chain.
_NO_TRANSFORMATIONS: Final = frozenset({"MapDataset", "IterDataset", "DatasetIterator"})
_GETTERS: Final = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
#: They make an object; what others assign changes while it runs.
_MAKE: Final = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})


def described(value: Any) -> dict[str, str]:
    """What is told of a function, or of an object that is called or is one of Grain's transformations.

    Under ``""`` stands its name (of an object that of its class; of a method, the object's first), the
    arguments of a `functools.partial`, and the attribute ``version``, if it has one. Of an object, or
    a method's object, there is an entry for each attribute that is not ``None``, by its name with a dot
    before it. Values are numbers, texts, truth values, members of enums, dtypes, classes, arrays (by
    digest), and lists, tuples, sets and dicts of these. Functions, partials, methods, dataclasses,
    Grain's transformations, and callable objects of which all can be told, are described in turn. Of
    anything else the class alone is told, in angle brackets: of 64 MiB of arrays and 20,000 values on,
    too.

    Attributes that methods assign after an object was made, such as counters, are left out, and so is
    what a `functools.cached_property` has looked up.
    """
    telling, value = _Telling(), _bare(value)
    method = _method(value)
    whose = value if method is None else value.__self__
    if method is not None and isinstance(whose, type):
        return {"": f"{whose.__qualname__}.{method}" + _version(value)}
    if isinstance(whose, (functools.partial, *_GETTERS)) or _is_function(whose) or _is_value(whose):
        return {"": telling.told(value)}
    name = _name(whose) + ("" if method is None else f".{method}")
    name += _version(whose) or _version(value)
    attributes = {f".{key}": telling.told(one) for key, one in _attributes(whose)}
    return {"": _short(name), **attributes}


def attributes_described(value: Any) -> dict[str, str]:
    """The attributes alone, by their names, of an object that is no function: see `described`."""
    telling = _Telling()
    return {key: telling.told(one) for key, one in _attributes(value)}


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object was made with, by name, sorted."""
    kind: Any = type(value)
    without = {*_changing(kind), "version"}
    own = _get(value, "__dict__")
    there = dict(own) if isinstance(own, dict) else {}
    for of in kind.__mro__:
        slots = vars(of).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                there[name] = _get(value, name)
    for name, one in sorted(there.items()):
        if one is not None and name not in without and not name.startswith("__"):
            yield name, one


def _get(value: Any, name: str) -> Any:
    """An attribute; ``None`` where there is none, or where looking it up fails, however it does."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 (it runs code of the user's)
        return None


class _Telling:
    """Tells values as texts that are the same for equal values in every process."""

    def __init__(self) -> None:
        self._values, self._bytes = MAX_VALUES, MAX_ARRAY_BYTES
        #: Whether anything was met of which the class alone is told.
        self._unknown = False

    def told(self, value: Any, depth: int = 0, *, known: bool = False) -> str:
        """One value; of what is ``known`` to be of the chain itself, all that can be told."""
        self._values -= 1
        if depth > _MAX_DEPTH or self._values < 0:
            return self._class_of(value)
        try:
            text = self._plain(value)
            if text is None:
                text = self._several(value, depth + 1)
            if text is None:
                text = self._function(value, depth + 1, known)
        except Exception:  # noqa: BLE001 (to look at it runs code of the user's)
            text = None
        return self._class_of(value) if text is None else _short(text)

    def _class_of(self, value: Any) -> str:
        self._unknown = True
        return f"<{type(value).__qualname__}>"

    def _end(self) -> None:
        """Has nothing more be looked at. Else what is left would depend on the order of what was."""
        self._values, self._bytes = -1, -1

    def _plain(self, value: Any) -> str | None:
        if value is None or isinstance(value, np.dtype):
            return str(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name or repr(value.value)}"
        if isinstance(value, type):
            return value.__qualname__ + _version(value)
        if isinstance(value, re.Pattern):
            return f"re.compile({value.pattern!r}, {value.flags})"
        if isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array__"):
            return self._array(value)
        for kind in _PLAIN:
            if isinstance(value, kind):
                return kind.__repr__(value)  # a subclass may write an address
        return None

    def _array(self, value: Any) -> str | None:
        size = getattr(value, "nbytes", None)
        if type(size) is not int or isinstance(value, type):
            return None
        if size > self._bytes:
            shape = list(getattr(value, "shape", ()))
            self._unknown, self._bytes = True, -1
            return f"<{getattr(value, 'dtype', type(value).__qualname__)}{shape}>"
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"{value.dtype} {self._array(jax.random.key_data(value))}"
        if isinstance(value, np.ma.MaskedArray):
            return f"masked({self._array(value.data)}, {self._array(np.ma.getmaskarray(value))})"
        self._bytes -= size
        try:
            array = np.asarray(value)
            digest = dataset_digest(array)
        except Exception:  # noqa: BLE001 (an array of objects, or whatever another library raises)
            return None
        if array.shape == () and array.dtype.kind in "biufc" and array.dtype.itemsize <= 16:
            return f"{array.dtype}({array.item()!r})"
        return f"{array.dtype}{list(array.shape)} sha256:{digest[:16]}"

    def _several(self, value: Any, depth: int) -> str | None:
        if isinstance(value, slice):
            value = (value.start, value.stop, value.step)
        # Other mappings may be files or weak, and hold something else the next time.
        if not isinstance(value, list | tuple | set | frozenset | dict | types.MappingProxyType):
            return None
        kind, length = type(value).__qualname__, len(value)
        in_all = f"<{kind} of {length}>"
        if length > self._values:
            self._unknown = True
            return in_all
        if isinstance(value, list | tuple):
            return f"{kind}({', '.join([self.told(one, depth) for one in value])})"
        if isinstance(value, set | frozenset):
            told = sorted([self.told(one, depth) for one in value])
        else:
            told = sorted(
                [f"{self.told(key, depth)}: {self.told(one, depth)}" for key, one in value.items()]
            )
        if self._values < 0 or self._bytes < 0:  # which of them still fitted is a matter of chance
            self._unknown = True
            self._end()
            return in_all
        text = ", ".join(told)
        return f"{kind}({text})" if isinstance(value, set | frozenset) else f"{{{text}}}"

    def _function(self, value: Any, depth: int, known: bool) -> str | None:
        value = _bare(value)
        if isinstance(value, functools.partial):
            parts = [self.told(one, depth, known=True) for one in value.args]
            for name, one in sorted(value.keywords.items()):
                parts.append(f"{name}={self.told(one, depth, known=True)}")
            own = _version(value) if "version" in vars(value) else ""
            return f"{self.told(value.func, depth, known=True)}({', '.join(parts)}){own}"
        if isinstance(value, _GETTERS):
            reduced: Any = value.__reduce__()
            return f"{self.told(reduced[0], depth)}{self.told(reduced[1], depth)}"
        method = _method(value)
        if method is not None:
            return f"{self.told(value.__self__, depth, known=True)}.{method}"
        if _is_function(value):
            return _name(value) + _version(value)
        special = dataclasses.is_dataclass(value) or is_transformation(value)
        if not special and not callable(value):
            return None
        before, self._unknown = self._unknown, False
        parts = [f"{name}={self.told(one, depth)}" for name, one in _attributes(value)]
        if self._unknown and not (special or known):
            parts = []
        self._unknown |= before
        return _name(value) + (f"({', '.join(parts)})" if parts else "") + _version(value)


def _is_function(value: Any) -> bool:
    """Whether it is a function, or stands for one, as what `jax.jit` or `functools.wraps` gives."""
    return isinstance(value, np.ufunc) or (
        callable(value) and isinstance(_get(value, "__qualname__"), str)
    )


def _bare(value: Any) -> Any:
    """The method, partial or object that a function stands for (`jax.jit` of it), if it stands for one."""
    found = value
    for _ in range(_MAX_DEPTH):
        inner = _get(found, "__wrapped__")
        if _method(found) is not None or inner is None:
            break
        found = inner
    return value if isinstance(found, types.FunctionType) else found


def _is_value(value: Any) -> bool:
    """Whether it is told by what it holds, such as a dict whose ``get`` is a function."""
    return isinstance(
        value, (*_PLAIN, re.Pattern, list, tuple, set, frozenset, dict, np.ndarray, type)
    )


def _method(value: Any) -> str | None:
    """The name of a method that is bound to an object or class; ``None`` of anything else."""
    owner = _get(value, "__self__")
    if owner is None or isinstance(owner, types.ModuleType):
        return None
    name = _get(value, "__name__")
    return name if isinstance(name, str) else None


def _name(value: Any) -> str:
    for name in (_get(value, "__qualname__"), _get(value, "__name__")):
        if isinstance(name, str):
            return name
    return type(value).__qualname__


def _version(value: Any) -> str:
    version = _get(value, "version")
    plain = isinstance(version, str | int | float | np.number | tuple | Fraction)
    return f" version {version}" if plain and str(version) else ""


def _short(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: MAX_TEXT // 2]}... sha256:{digest}"


def is_transformation(value: Any) -> bool:
    """Whether its class is one of Grain's or made from one, and none of a data set or an iterator."""
    kinds = [
        of.__name__ for of in type(value).__mro__ if of.__module__.partition(".")[0] == "grain"
    ]
    return bool(kinds) and not _NO_TRANSFORMATIONS.intersection(kinds)


@functools.lru_cache(maxsize=256)
def _changing(kind: type) -> frozenset[str]:
    """Names of attributes that change after an object of a class was made.

    Those that its methods assign, but for methods that begin with an underscore and that only
    ``__init__`` and its like call; and what it looks up once.
    """
    looked_up: set[str] = set()
    codes: dict[str, list[types.CodeType]] = {}
    for of in kind.__mro__:
        for name, member in vars(of).items():
            for function in _functions_of(member):
                codes.setdefault(name, []).extend(_all_codes(function.__code__))
            if isinstance(member, functools.cached_property):
                looked_up.add(name)
    run = [name for name in codes if name not in _MAKE and not _is_private(name)]
    for name in run:
        called = {used for code in codes[name] for used in code.co_names}
        run += [used for used in codes if used in called and used not in _MAKE and used not in run]
    return frozenset(looked_up.union(*(_assigned(codes[name]) for name in run)))


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    """The functions that a class's member is made of: a property's, and what a wrapper wraps."""
    parts = [member]
    if isinstance(member, property):
        parts = [member.fget, member.fset, member.fdel]
    elif isinstance(member, staticmethod | classmethod):
        parts = [member.__func__]
    for part in parts:
        for _ in range(_MAX_DEPTH):
            if isinstance(part, types.FunctionType):
                yield part
            part = _get(part, "__wrapped__")  # noqa: PLW2901 (the next one inside)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _all_codes(part)


def _assigned(codes: Iterable[types.CodeType]) -> set[str]:
    """Names of attributes, of whatever object, that some code assigns or deletes."""
    return {
        step.argval
        for code in codes
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_ATTR", "DELETE_ATTR")
    }
