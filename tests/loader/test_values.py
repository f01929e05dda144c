"""By what functions and objects are known: all that can be told of them, alike in every process, and nothing that moves."""

import collections.abc
import dataclasses
import enum
import functools
import logging
import operator
import pathlib
import random
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loader.identity.values import (
    MAX_ARRAY_BYTES,
    MAX_TEXT,
    MAX_VALUES,
    attributes_described,
    described,
)


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Size(NamedTuple):
    height: int
    width: int


@dataclasses.dataclass
class Settings:
    rate: float
    lock: Any = None


class Add(grain.transforms.Map):
    """As Grain's own examples have it."""

    def __init__(self, k: Any) -> None:
        self.k = k

    def map(self, element: Any) -> Any:
        return element + self.k

    def other(self, element: Any) -> Any:
        return element - self.k

    @classmethod
    def make(cls, element: Any) -> Any:
        return cls(element)


class More(Add):
    pass


class Called:
    """A callable object without a base class."""

    def __init__(self, k: Any, *others: Any) -> None:
        self._k, self._others = k, others

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given, self._k, self._others


class Slotted:
    __slots__ = ("k", "later")

    def __init__(self, k: Any) -> None:
        self.k = k

    def __call__(self, element: Any) -> Any:
        return element


def function(element: Any, **_: Any) -> Any:
    return element


def decorated(element: Any, **_: Any) -> Any:
    return element


decorated.version = "3"  # type: ignore[attr-defined]


def wrapping(inner: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(*given: Any) -> Any:
        return inner(*given)

    return wrapper


PAIRS: list[tuple[Any, Any]] = [
    (1, 2),
    (1, 1.0),
    (1, True),
    (1, "1"),
    (0.0, -0.0),
    ("a", b"a"),
    (1j, 2j),
    (Mode.FAST, Mode.SLOW),
    (np.dtype("f4"), np.dtype("f8")),
    (np.float32, np.float64),
    (jnp.bfloat16, jnp.float16),
    (np.float32(1), np.float64(1)),
    (np.arange(3), np.arange(3.0)),
    (np.arange(5000), np.arange(5000)[::-1]),
    (jnp.arange(3), jnp.arange(1, 4)),
    (jax.random.key(1), jax.random.key(2)),
    (jax.random.key(1), jax.random.key(1, impl="rbg")),
    (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[True, False])),
    (np.array("2020", "M8[s]"), np.array("2021", "M8[s]")),
    ([1, [2]], [1, [3]]),
    ((1, 2), [1, 2]),
    ((1, 2), (2, 1)),
    ({1, 2}, {1, 3}),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({1: "a"}, {"1": "a"}),
    (Size(1, 2), Size(2, 1)),
    (range(3), range(4)),
    (slice(3), slice(4)),
    (Fraction(1, 3), Fraction(1, 4)),
    (Decimal("1.0"), Decimal("1.1")),
    ("x" * 5000 + "a", "x" * 5000 + "b"),
    (list(range(5000)), [*range(4999), 0]),
    (Settings(1), Settings(2)),
    ([Add(1), Called(2)], [Add(1), Called(3)]),
    (Add(1), More(1)),
    (Add(1), Add(2)),
    (Add(1).map, Add(1).other),
    (functools.partial(function, k=1), functools.partial(function, k=2)),
    (functools.partial(Add(1).map, 1), functools.partial(Add(2).map, 1)),
    ({"a": 1}.get, {"a": 2}.get),
    (operator.itemgetter("a"), operator.itemgetter("b")),
    (operator.attrgetter("a"), operator.itemgetter("a")),
    (operator.methodcaller("a", 1, b=2), operator.methodcaller("a", 1, b=3)),
    (re.compile("a").sub, re.compile("b").sub),
    (jax.jit(Add(1).map), jax.jit(Add(2).map)),
    (jax.jit(Called(1)), jax.jit(Called(2))),
    (jax.jit(functools.partial(function, k=1)), jax.jit(functools.partial(function, k=2))),
    (wrapping(Add(1).map), wrapping(Add(2).map)),
    (re.compile("a"), re.compile("a", re.IGNORECASE)),
    (function, decorated),
    (np.add, np.subtract),
    (abs, len),
    (Add.make, More.make),
    (object(), threading.Lock()),
]  # fmt: skip


HOLD: list[Callable[[Any], Any]] = [
    Add,
    Called,
    Slotted,
    lambda value: Called(1, [value]),
    lambda value: functools.partial(function, value),
    lambda value: functools.partial(function, k=value),
    lambda value: functools.partial(Called(value), 1),
    lambda value: functools.partial(functools.partial, Called(value)),
    lambda value: Add(value).map,
    lambda value: Add(Add(Settings(1, value))),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=range(len(PAIRS)))
def test_whatever_is_held_is_told(one: Any, other: Any) -> None:
    for hold in HOLD:
        assert described(hold(one)) == described(hold(one))
        assert described(hold(one)) != described(hold(other))


FUNCTIONS = [pair for pair in PAIRS if callable(pair[0]) and not isinstance(pair[0], type)]


@pytest.mark.parametrize(("one", "other"), FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions_methods_and_objects_are_told_apart(one: Any, other: Any) -> None:
    assert described(one) == described(one) != described(other)


def test_an_attribute_has_a_line_of_its_own() -> None:
    found = described(Called(3, Mode.SLOW, object(), np.float32(2), None))
    assert found == {
        "": "Called",
        "._k": "3",
        "._others": "tuple(Mode.SLOW, <object>, float32(2.0), None)",
    }
    assert described(Add(None)) == {"": "Add"}
    assert described(Add("a").other) == {"": "Add.other", ".k": "'a'"}
    assert described(Add.make) == {"": "Add.make"}
    assert described(decorated) == {"": "decorated version 3"}
    assert described(functools.partial(decorated, Called(2), by=Add(1))) == {
        "": "decorated version 3(Called(_k=2, _others=tuple()), by=Add(k=1))"
    }
    versioned = Add(1)
    versioned.version = 2
    assert described(versioned) == {"": "Add version 2", ".k": "1"}


def test_what_stands_for_a_function_is_told_as_one() -> None:
    """And not by what JAX keeps of it, such as the file and line where it stands."""

    @functools.lru_cache
    def kept(element: Any) -> Any:
        return element

    class Retried:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)
            self.tries = 0

        def __call__(self, element: Any) -> Any:
            return element

    place = f"{test_what_stands_for_a_function_is_told_as_one.__name__}.<locals>."
    assert described(jax.jit(decorated)) == {"": "decorated version 3"}
    assert described(functools.partial(jax.jit(decorated), k=1)) == {"": "decorated version 3(k=1)"}
    assert described(wrapping(decorated)) == {"": "decorated version 3"}
    assert described(kept) == {"": f"{place}kept"}
    assert described(Retried(decorated)) == {"": "decorated version 3"}
    assert described(Add(jax.jit(function)))[".k"] == "function"


class Counting(grain.transforms.Map):
    """Keeps all sorts of things while it runs."""

    kept: ClassVar[list[int]] = []

    def __init__(self, k: int) -> None:
        self.k, self.seen, self.noted = k, 0, ""
        self.rng, self.lock, self.random = (
            np.random.default_rng(),
            threading.Lock(),
            random.Random(),
        )
        self._table: Any = None
        self._prepare()

    def _prepare(self) -> None:
        self.prepared = self.k + 1

    def _note(self, element: Any) -> None:
        self.noted = str(element)

    @functools.cached_property
    def looked_up(self) -> int:
        return 7

    def map(self, element: Any) -> Any:
        self.seen += 1
        self._note(element)
        if self._table is None:
            self._table = np.arange(self.looked_up)
        with self.lock:
            return element + self.rng.random() + self.random.random()


def test_what_changes_while_an_object_runs_is_left_out() -> None:
    one = Counting(1)
    before = described(one)
    one.map(1)
    assert described(one) == before == described(Counting(1))
    assert before == {
        "": "Counting",
        ".k": "1",
        ".lock": "<lock>",
        ".prepared": "2",
        ".random": "<Random>",
        ".rng": "<Generator>",
    }


def test_of_an_object_in_an_object_all_is_told_or_the_class_alone() -> None:
    """Another library's, say, of which nobody knows what it keeps."""
    assert described(Add(Called(1)))[".k"] == "Called(_k=1, _others=tuple())"
    assert described(Add(Called(1, object())))[".k"] == "Called"
    assert described(Add(Settings(1, object())))[".k"] == "Settings(lock=<object>, rate=1)"
    assert described(Add(pathlib.Path("a")))[".k"] == "<PosixPath>"


def test_what_is_large_is_told_by_size_or_digest() -> None:
    large = np.zeros(MAX_ARRAY_BYTES + 8, np.uint8)
    assert described(Add(large))[".k"] == f"<uint8[{MAX_ARRAY_BYTES + 8}]>"
    assert described(Add([0] * (MAX_VALUES + 1)))[".k"] == f"<list of {MAX_VALUES + 1}>"
    for value in ("x" * 10**6, b"x" * 10**6, [1] * 10**4, dict.fromkeys(range(1000), "x")):
        assert len(described(Add(value))[".k"]) <= MAX_TEXT


def test_what_holds_itself_is_told() -> None:
    loop: list[Any] = []
    loop.append(loop)
    one = Add(loop)
    one.me = one
    assert set(described(one)) == {"", ".k", ".me"}


class Hostile:
    """Raises wherever it is asked."""

    nbytes = 8

    def __array__(self, *_: Any) -> Any:
        raise RuntimeError("no array")


def test_what_cannot_be_read_is_told_by_its_class() -> None:
    key = jax.random.key(1)
    for value in (Hostile(), np.array([object()]), key):
        assert described(Add(value))[".k"] == described(Add(value))[".k"]
    assert described(Add(Hostile()))[".k"] == "<Hostile>"
    assert described(Add(np.array([object()])))[".k"] == "<ndarray>"


@pytest.mark.processes
def test_all_of_it_is_the_same_in_another_process() -> None:
    code = (
        "from tests.loader.test_values import *;"
        "print([described(hold(value)) for hold in HOLD for pair in PAIRS for value in pair])"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    found = [
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert found[0] == found[1]
    assert b" at 0x" not in found[0]


class Given:
    """As a data set of the user's: no function, made with whatever it needs."""

    def __init__(self, **given: Any) -> None:
        for name, one in given.items():
            self.__dict__[name] = one


class Refusing:
    """Of which nothing can be looked up."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(f"{name} is gone")


class Shelf(collections.abc.Mapping[str, int]):
    """A mapping that is no dict, such as a cache on a disk: it may hold something else the next time."""

    def __init__(self, **held: int) -> None:
        self._held = held

    def __getitem__(self, key: str) -> int:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def test_of_an_objects_attributes_the_same_is_told_as_of_a_transformations() -> None:
    logger = logging.getLogger("a.name")
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    given: dict[str, Any] = {
        "path": pathlib.Path("a/b"),
        "logger": logger,
        "data": [grain.MapDataset.range(3)],
        "shelf": Shelf(),
        "huge": 10**5000,
        "odd": Refusing(),
        "loop": loop,
        "frozen": types.MappingProxyType({"a": 1}),
        "complex": np.complex64(1j),
        "day": np.datetime64("2026-01-02"),
        "rows": slice(1, 9),
        "jax": jnp.arange(3),
        "k": 1,
        "_k": 2,
        "fine": Add(3),
    }
    told = attributes_described(Given(**given))
    assert told == {
        name: described(Add(one))[".k"] for name, one in given.items() if name != "fine"
    } | {"fine": "Add(k=3)"}
    logger.isEnabledFor(logging.INFO)  # it keeps what it has looked up
    given |= {"path": pathlib.Path("c"), "shelf": Shelf(a=1), "data": [grain.MapDataset.range(4)]}
    assert attributes_described(Given(**given)) == told
    changes = {
        "jax": jnp.arange(4),
        "day": np.datetime64("2026-01-03"),
        "rows": slice(1, 8),
        "frozen": types.MappingProxyType({"a": 2}),
        "k": 3,
        "_k": 3,
        "fine": Add(4),
    }
    for name, one in changes.items():
        now = attributes_described(Given(**{**given, name: one}))
        assert {key for key in told if now[key] != told[key]} == {name}


def test_what_no_longer_fits_does_not_depend_on_an_order() -> None:
    pairs = [(f"a{i}", f"b{i}") for i in range(MAX_VALUES // 3)]
    arrays = [np.full(MAX_ARRAY_BYTES // 3, i, np.uint8) for i in range(4)]
    for held, kind in (
        ([dict.fromkeys(pairs, 0), dict.fromkeys(reversed(pairs), 0)], "dict"),
        ([dict(enumerate(arrays)), dict(reversed(list(enumerate(arrays))))], "dict"),
    ):
        one, other = (attributes_described(Given(a=each, b=[1], c=arrays[0])) for each in held)
        assert one == other
        assert one["a"] == f"<{kind} of {len(held[0])}>"


class Wrapped(Add):
    """Its attributes change in a setter, and in what a wrapper does."""

    def __init__(self, k: Any) -> None:
        super().__init__(k)
        self.kept = self.calls = 0

    @property
    def value(self) -> int:
        return self.kept

    @value.setter
    def value(self, value: int) -> None:
        self.kept = value

    def counted(method: Any) -> Any:  # noqa: N805 (a decorator inside of the class)
        @functools.wraps(method)
        def wrapper(self: Any, element: Any) -> Any:
            self.calls += 1
            return method(self, element)

        return wrapper

    @counted
    def map(self, element: Any) -> Any:
        return element


def test_what_setters_and_wrappers_change_is_left_out() -> None:
    one = Wrapped(1)
    one.value = 5
    one.map(1)
    assert described(one) == described(Wrapped(1)) == {"": "Wrapped", ".k": "1"}
