"""Identify functions and objects from one run to the next: by names, versions and plain values, never by code."""

import dataclasses
import dis
import enum
import functools
import hashlib
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from loader.identity.fingerprint import dataset_digest

#: Longer texts are cut, and end with a digest.
MAX_TEXT: Final = 200
#: Limits of the values, and the bytes of arrays, that are described for one function or object.
MAX_VALUES: Final = 20_000
MAX_ARRAY_BYTES: Final = 1 << 26

_MAX_DEPTH: Final = 8
#: Described by ``repr``. A bool is an int too, and comes first.
_PLAIN: Final = (bool, int, float, complex, str, bytes, range, Decimal, Fraction)
#: Grain's data sets are described by their place in the chain.
_NO_TRANSFORMATIONS: Final = frozenset({"MapDataset", "IterDataset", "DatasetIterator"})
_GETTERS: Final = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
#: These methods make an object. Attributes that other methods assign change while it runs.
_MAKE: Final = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})


def transform_identity(transform: Callable[..., Any] | None) -> dict[str, str] | None:
    """Return the name and version of a transform, as a manifest holds them.

    The name is that of the function, or of the class of a callable object. A `functools.partial` adds its
    arguments, as `described` has them but without limits of size. The version is the attribute ``version``,
    if there is one.

    Raises:
      TypeError: an argument of a partial can only be described by its class.
    """
    if transform is None:
        return None
    version = str(getattr(transform, "version", ""))
    arguments = []
    while isinstance(transform, functools.partial):
        named = sorted(transform.keywords.items())
        for name, value in [*(("", value) for value in transform.args), *named]:
            describer = _Describer(sys.maxsize, sys.maxsize)
            text = describer.text(value, known=True)
            if describer.is_partial:
                raise TypeError(
                    f"the transform is a partial with the argument {value!r:.60} of type {type(value).__name__}, "
                    "by which it could not be recognised at a resume; use a function of its own, with a version"
                )
            arguments.append(f"{name}={text}" if name else text)
        version = version or str(getattr(transform.func, "version", ""))
        transform = transform.func
    name = getattr(transform, "__qualname__", type(transform).__qualname__)
    return {"name": name + (f"({', '.join(arguments)})" if arguments else ""), "version": version}


def described(value: Any) -> dict[str, str]:
    """Describe a function, a callable object or one of Grain's transformations.

    The entry ``""`` has its name (for an object the name of its class; for a method, the object's first),
    the arguments of a `functools.partial`, and the attribute ``version``, if there is one. An object, or a
    method's object, adds an entry for each attribute that is not ``None``: its name after a dot. Values are
    numbers, texts, booleans, enum members, dtypes, classes, arrays (by digest), and lists, tuples, sets and
    dicts of these. Functions, partials, methods, dataclasses, Grain's transformations, and callable objects
    that can be described as a whole, are described in turn. Any other object, or more than 64 MiB of arrays
    or 20,000 values, is described by its class alone, in angle brackets.

    Attributes that methods assign after an object was made, such as counters, are left out, and so are
    values of `functools.cached_property`.
    """
    describer, value = _Describer(), _bare(value)
    method = _method(value)
    whose = value if method is None else value.__self__
    if method is not None and isinstance(whose, type):
        return {"": f"{whose.__qualname__}.{method}" + _version(value)}
    if isinstance(whose, (functools.partial, *_GETTERS)) or _is_function(whose) or _is_value(whose):
        return {"": describer.text(value)}
    name = _name(whose) + ("" if method is None else f".{method}")
    name += _version(whose) or _version(value)
    attributes = {f".{key}": describer.text(one) for key, one in _attributes(whose)}
    return {"": _short(name), **attributes}


def attributes_described(value: Any) -> dict[str, str]:
    """Describe the attributes of an object that is not a function, by name; see `described`."""
    describer = _Describer()
    return {key: describer.text(one) for key, one in _attributes(value)}


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object was made with, sorted by name."""
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
    """Return an attribute, or ``None`` if it does not exist or its lookup fails."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 (it runs the user's code)
        return None


class _Describer:
    """Describes values by texts that are the same for equal values in every process."""

    def __init__(self, values: int = MAX_VALUES, array_bytes: int = MAX_ARRAY_BYTES) -> None:
        self._values, self._bytes = values, array_bytes
        #: Whether a value was described by its class alone.
        self._unknown = self._omitted = False

    @property
    def is_partial(self) -> bool:
        """Whether a value was described by its class alone, or without its attributes."""
        return self._unknown or self._omitted

    def text(self, value: Any, depth: int = 0, *, known: bool = False) -> str:
        """Describe a value; a ``known`` one, a part of the chain itself, as far as possible."""
        self._values -= 1
        if depth > _MAX_DEPTH or self._values < 0:
            return self._class_of(value)
        try:
            text = self._plain(value)
            if text is None:
                text = self._several(value, depth + 1)
            if text is None:
                text = self._function(value, depth + 1, known)
        except Exception:  # noqa: BLE001 (it runs the user's code)
            text = None
        return self._class_of(value) if text is None else _short(text)

    def _class_of(self, value: Any) -> str:
        self._unknown = True
        return f"<{type(value).__qualname__}>"

    def _end(self) -> None:
        """Describe nothing more, because the rest would depend on an order that is not fixed."""
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
            return f"{kind}({', '.join([self.text(one, depth) for one in value])})"
        if isinstance(value, set | frozenset):
            told = sorted([self.text(one, depth) for one in value])
        else:
            told = sorted(
                [f"{self.text(key, depth)}: {self.text(one, depth)}" for key, one in value.items()]
            )
        if (
            self._values < 0 or self._bytes < 0
        ):  # which of them were within the limit depends on their order
            self._unknown = True
            self._end()
            return in_all
        text = ", ".join(told)
        return f"{kind}({text})" if isinstance(value, set | frozenset) else f"{{{text}}}"

    def _function(self, value: Any, depth: int, known: bool) -> str | None:
        value = _bare(value)
        if isinstance(value, functools.partial):
            parts = [self.text(one, depth, known=True) for one in value.args]
            for name, one in sorted(value.keywords.items()):
                parts.append(f"{name}={self.text(one, depth, known=True)}")
            own = _version(value) if "version" in vars(value) else ""
            return f"{self.text(value.func, depth, known=True)}({', '.join(parts)}){own}"
        if isinstance(value, _GETTERS):
            reduced: Any = value.__reduce__()
            return f"{self.text(reduced[0], depth)}{self.text(reduced[1], depth)}"
        method = _method(value)
        if method is not None:
            return f"{self.text(value.__self__, depth, known=True)}.{method}"
        if _is_function(value):
            return _name(value) + _version(value)
        special = dataclasses.is_dataclass(value) or is_transformation(value)
        if not special and not callable(value):
            return None
        before, self._unknown = self._unknown, False
        parts = [f"{name}={self.text(one, depth)}" for name, one in _attributes(value)]
        if self._unknown and not (special or known):
            parts, self._omitted = [], True
        self._unknown |= before
        return _name(value) + (f"({', '.join(parts)})" if parts else "") + _version(value)


def _is_function(value: Any) -> bool:
    """Return whether a value is a function, or has its name, as with `jax.jit` or `functools.wraps`."""
    return isinstance(value, np.ufunc) or (
        callable(value) and isinstance(_get(value, "__qualname__"), str)
    )


def _bare(value: Any) -> Any:
    """Return the method, partial or object that a function wraps, as `jax.jit` does; else the function."""
    found = value
    for _ in range(_MAX_DEPTH):
        inner = _get(found, "__wrapped__")
        if _method(found) is not None or inner is None:
            break
        found = inner
    return value if isinstance(found, types.FunctionType) else found


def _is_value(value: Any) -> bool:
    """Return whether a value is described by its content, such as a dict whose ``get`` is the function."""
    return isinstance(
        value, (*_PLAIN, re.Pattern, list, tuple, set, frozenset, dict, np.ndarray, type)
    )


def _method(value: Any) -> str | None:
    """Return the name of a method that is bound to an object or class; else ``None``."""
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
    """Return whether a value's class derives from Grain, but not from a data set or an iterator."""
    kinds = [
        of.__name__ for of in type(value).__mro__ if of.__module__.partition(".")[0] == "grain"
    ]
    return bool(kinds) and not _NO_TRANSFORMATIONS.intersection(kinds)


@functools.lru_cache(maxsize=256)
def _changing(kind: type) -> frozenset[str]:
    """Return the names of attributes that change after an object of a class was made.

    These are cached properties, and attributes that methods assign. Methods that begin with an underscore
    and that only ``__init__`` and the like call do not count.
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
    """Yield the functions of a class's member: a property's, and those inside wrappers."""
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
    """Yield a function's code, and that of the functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _all_codes(part)


def _assigned(codes: Iterable[types.CodeType]) -> set[str]:
    """Return the names of attributes, of any object, that some code assigns or deletes."""
    return {
        step.argval
        for code in codes
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_ATTR", "DELETE_ATTR")
    }
