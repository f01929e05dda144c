"""Train states of every kind come back bit for bit, or are refused by name before anything is saved."""

import contextlib
import copy
import dataclasses
import datetime as dt
import pathlib
import re
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.version import Version

import checkpointing
import loader
from checkpointing.train_state import (
    _DTYPES,
    LeafSpec,
    describe,
    is_abstract,
    leaves_by_path,
    step_of,
    to_arrays,
)
from tests.jax_versions import PRNG_IMPLEMENTATIONS, has_prng

KEY_IMPLEMENTATIONS = [name for name in PRNG_IMPLEMENTATIONS if has_prng(name)]


class AdamState(NamedTuple):
    """As optax has them: fields in an order that is not that of the alphabet."""

    nu: Any
    count: Any
    mu: Any


class Stepped(NamedTuple):
    step: Any
    params: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node without names: its children are known by their numbers."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.first, self.second), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> "Pair":
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Numbered:
    """A node with numbers and names below it, one of them without a leaf, as Flax's lists are."""

    def __init__(self, *parts: Any, own: Any = ()) -> None:
        self.parts, self.own = parts, own

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        numbered = [(jax.tree_util.SequenceKey(i), part) for i, part in enumerate(self.parts)]
        return [(jax.tree_util.GetAttrKey("own"), self.own), *numbered], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Numbered":
        own, *parts = children
        return cls(*parts, own=own)


def a_pipeline() -> loader.Pipeline:
    source = loader.ArraySource({"x": np.arange(4.0)})
    return loader.Pipeline(source, loader.PipelineConfig(2, seed=0, final_batch="partial"))


def save(directory: pathlib.Path, train_state: Any) -> None:
    with checkpointing.Checkpoints(directory, a_pipeline(), save_every=1, keep=1) as checkpoints:
        run = checkpoints.resume(train_state)
        next(run.batches)
        assert checkpoints.save(run.batches, train_state)


def restore(directory: pathlib.Path, template: Any) -> Any:
    with checkpointing.Checkpoints(directory, a_pipeline(), save_every=1, keep=1) as checkpoints:
        run = checkpoints.resume(template)
        assert run.position.step == 1
        return run.train_state


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw(leaf: Any) -> bytes:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()


def assert_same(found: Any, expected: Any) -> None:
    """Bitwise equality, with structure, types, dtypes, shapes, weak types and PRNG implementations."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    assert structures[0] == structures[1]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        for name in ("shape", "dtype", "weak_type"):
            assert getattr(a, name, None) == getattr(b, name, None)
        assert raw(a) == raw(b)


def other(leaf: Any) -> Any:
    """A leaf of the same kind with another value, so that a restore that does nothing shows."""
    if is_key(leaf):
        data = jax.random.key_data(leaf)
        return jax.random.wrap_key_data(
            data ^ data.dtype.type(1), impl=str(jax.random.key_impl(leaf))
        )
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jnp.full(leaf.shape, leaf.dtype.type(9).item())
    if isinstance(leaf, jax.Array):
        return jnp.ones(leaf.shape, leaf.dtype)
    return np.ones(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf)(1)


NO_NAME = "a key without letters"
TREES: dict[str, Any] = {
    "nested dicts, lists and tuples": lambda: {
        "a": {"b": jnp.arange(3), "c": (jnp.full(2, 7, jnp.int8), [np.arange(2)])}
    },
    "a NamedTuple whose fields are not in the order of the alphabet": lambda: AdamState(
        jnp.arange(3.0), jnp.array([3]), {"z": jnp.arange(2.0), "a": jnp.arange(4.0)}
    ),
    "a dataclass": lambda: Layer(jnp.arange(3), {"of": Layer(jnp.arange(2), jnp.arange(5))}),
    "a node of one's own without names": lambda: Pair(jnp.arange(3), Pair(np.arange(2), 5)),
    "numbers and names below one node": lambda: {
        "a": Numbered(*(jnp.array([i]) for i in range(12))),
        "b": [Numbered(Numbered(np.arange(2), None), 5, own={"c": jnp.arange(3)})],
    },
    "None among leaves": lambda: {"a": None, "b": jnp.arange(2), "c": (None, jnp.arange(3))},
    "nothing but None": lambda: {"a": None},
    "None": lambda: None,
    "empty containers among leaves": lambda: {"a": {}, "b": (), "c": [], "d": jnp.arange(2)},
    "an empty tree": dict,
    "a bare jax array": lambda: jnp.arange(4),
    "a bare NumPy array": lambda: np.arange(4),
    "a bare number": lambda: 17,
    "a bare key": lambda: jax.random.key(3),
    "more than ten elements": lambda: [jnp.array([i]) for i in range(12)],
    "more than ten elements of a tuple": lambda: {"a": tuple(np.array([i]) for i in range(12))},
    "keys with / . ~ blanks and letters of all kinds": lambda: {
        name: jnp.array([i])
        for i, name in enumerate(["a/b", "c.d", "e~f", "~1", "ü∂ß", " ", "..", "../../x", "%2F"])
    },
    NO_NAME: lambda: {"": jnp.array([1]), "w": jnp.array([2])},
    "names that differ in / only": lambda: {"a/b": jnp.array([1]), "a": {"b": jnp.array([2])}},
    "integers as keys": lambda: {i: jnp.array([i]) for i in (1, 10, 2)},
    "texts of integers as keys": lambda: {str(i): jnp.array([i]) for i in (1, 10, 2)},
    "the name that we wrap with": lambda: {"train_state": jnp.arange(2)},
}

LEAVES: dict[str, Any] = {
    "NumPy 0-d": lambda: np.array(3.5),
    "NumPy without elements": lambda: np.zeros((0, 3), np.float32),
    "NumPy in Fortran's order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "NumPy with strides": lambda: np.arange(24).reshape(4, 6)[::-2, 1::2],
    "NumPy, read-only": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "NumPy bool": lambda: np.array([True, False]),
    "NumPy scalar float32": lambda: np.float32(1.5),
    "NumPy scalar nan": lambda: np.float64("nan"),
    "NumPy scalar int8": lambda: np.int8(-3),
    "NumPy scalar bool": lambda: np.bool_(True),
    "NumPy scalar complex": lambda: np.complex64(complex(-0.0, 1)),
    "NumPy scalar 2**64 - 1": lambda: np.uint64(2**64 - 1),
    "int": lambda: 5,
    "int 2**63 - 1": lambda: 2**63 - 1,
    "int -2**63": lambda: -(2**63),
    "bool": lambda: False,
    "float": lambda: 0.1,
    "float inf": lambda: float("-inf"),
    "float nan": lambda: float("nan"),
    "float -0.0": lambda: -0.0,
    "float, subnormal": lambda: 5e-324,
    "complex": lambda: complex(float("nan"), -0.0),
    "jax without elements": lambda: jnp.zeros((2, 0), jnp.int8),
    "jax 0-d": lambda: jnp.array(3, jnp.int32),
    "jax float32 nan, inf, -0.0, subnormal": lambda: jnp.array([np.nan, np.inf, -0.0, 1e-45]),
    "jax weak float": lambda: jnp.asarray(2.0),
    "jax weak int": lambda: jnp.asarray(2),
    "jax weak array": lambda: jnp.full((2, 3), 3.0),
    "jax weak complex": lambda: jnp.asarray(2j),
    "key array": lambda: jax.random.split(jax.random.key(0), (2, 3)),
    "key array without elements": lambda: jax.random.split(jax.random.key(0), 0),
    "raw key": lambda: jax.random.PRNGKey(3),
    **{
        f"key {name}": (lambda name=name: jax.random.key(3, impl=name))
        for name in KEY_IMPLEMENTATIONS
    },
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_with_its_structure(name: str, tmp_path: pathlib.Path) -> None:
    train_state = TREES[name]()
    if name == NO_NAME and Version(version("orbax-checkpoint")) < Version("0.12.1"):
        with pytest.raises(RuntimeError, match=r"the save of step 1 .* has failed"):
            save(tmp_path, train_state)
        return
    save(tmp_path, train_state)
    assert_same(restore(tmp_path, jax.tree.map(other, train_state)), train_state)
    _, leaves = checkpointing.load(tmp_path)
    assert {path: raw(leaf) for path, leaf in leaves.items()} == {
        path: raw(leaf) for path, leaf in leaves_by_path(train_state).items()
    }


@pytest.fixture(scope="module")
def saved_leaves(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("leaves")
    save(directory, {name: make() for name, make in LEAVES.items()})
    return directory


def test_each_leaf_comes_back_as_what_it_was(saved_leaves: pathlib.Path) -> None:
    expected = {name: make() for name, make in LEAVES.items()}
    assert_same(restore(saved_leaves, jax.tree.map(other, expected)), expected)


def test_restored_numpy_arrays_can_be_written(saved_leaves: pathlib.Path) -> None:
    expected = {name: make() for name, make in LEAVES.items()}
    for leaf in jax.tree.leaves(restore(saved_leaves, expected)):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 0


def test_load_gives_each_leaf_in_its_shape_and_dtype(saved_leaves: pathlib.Path) -> None:
    manifest, leaves = checkpointing.load(saved_leaves)
    described = {leaf.path: leaf for leaf in manifest.identity.train_state}
    assert leaves.keys() == described.keys()
    for name, make in LEAVES.items():
        leaf, found = make(), leaves[f"/{name.replace('/', '~1')}"]
        assert raw(leaf) == raw(found)
        if not is_key(leaf):
            assert np.shape(leaf) == np.shape(found)
            assert np.asarray(leaf).dtype == np.asarray(found).dtype


@pytest.mark.parametrize("kind", [jnp, np])
def test_every_dtype_that_is_accepted_comes_back(kind: Any, tmp_path: pathlib.Path) -> None:
    wide = {"int64", "uint64", "float64", "complex128"}  # JAX has none of these by default
    names = sorted(_DTYPES - wide if kind is jnp else _DTYPES)
    expected = {
        name: kind.asarray(np.array([0, 1], np.int8).astype(jnp.dtype(name))) for name in names
    }
    assert all(leaf.dtype.name == name for name, leaf in expected.items())
    save(tmp_path, expected)
    zeros = {name: kind.zeros(2, leaf.dtype) for name, leaf in expected.items()}
    assert_same(restore(tmp_path, zeros), expected)


def test_a_train_state_can_be_asked_for_by_shapes_alone(tmp_path: pathlib.Path) -> None:
    def init() -> dict[str, Any]:
        return {
            "w": jnp.arange(3.0),
            "none": jnp.zeros((0, 3), jnp.int8),
            "weak": jnp.asarray(2.0),
            "weak array": jnp.full(3, 2),
            "raw": jax.random.PRNGKey(3),
            "no keys": jax.random.split(jax.random.key(1), 0),
            "keys": {name: jax.random.key(1, impl=name) for name in KEY_IMPLEMENTATIONS},
        }

    save(tmp_path, init())
    shapes = jax.eval_shape(init)
    assert is_abstract(shapes)
    assert_same(restore(tmp_path, shapes), init())


def test_a_train_state_under_64_bits_comes_back(tmp_path: pathlib.Path) -> None:
    with jax.enable_x64(True):
        expected = {
            "a": jnp.array([1 / 3, 2.0**-1074]),
            "weak": jnp.asarray(1 / 3),
            "b": jnp.asarray(2**62),
        }
        assert expected["a"].dtype == np.float64
        save(tmp_path, expected)
        assert_same(restore(tmp_path, jax.tree.map(other, expected)), expected)


def test_64_bits_come_back_where_jax_has_32(tmp_path: pathlib.Path) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with jax.enable_x64(True):
        jax_arrays = {
            "free": jnp.array([0.1, 1e300]),
            "committed": jax.device_put(jnp.array([2**40 + 1]), place),
            "none": jnp.zeros((0, 2)),
        }
    expected = {"a": np.array([0.1, 1e300]), "none": np.zeros((3, 0)), "jax": jax_arrays}
    save(tmp_path, expected)
    assert_same(restore(tmp_path, expected), expected)

    def shape(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    in_numpy: Any = jax.tree.map(np.asarray, expected)
    assert_same(restore(tmp_path, jax.tree.map(shape, expected)), in_numpy)
    found = restore(tmp_path, jax.tree.map(lambda leaf: shape(leaf, place), expected))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert_same(jax.tree.map(np.asarray, found), in_numpy)


def test_true_values_of_other_bytes_than_1_come_back_as_true(tmp_path: pathlib.Path) -> None:
    odd = np.frombuffer(bytes([2, 0, 1, 255]), np.bool_)
    state = {"numpy": odd, "scalar": odd[0], "jax": jnp.asarray(odd), "point": odd[3:].reshape(())}
    save(tmp_path, state)
    # NumPy's own `!=` of such values compares bytes.
    found = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), restore(tmp_path, state))
    assert found == {
        "numpy": [True, False, True, True],
        "scalar": True,
        "jax": [True, False, True, True],
        "point": True,
    }


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        ("adam", "'adam' of type str"),
        (b"adam", "of type bytes"),
        (object(), "of type object"),
        (max, "builtin_function"),
        (lambda: 0, "of type function"),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "of type datetime"),
        (2**63, "9223372036854775808, which does not fit 64 bits"),
        (-(2**63) - 1, "which does not fit 64 bits"),
        (np.array([object()]), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([b"a"]), "dtype |S1"),
        (np.array(["2026-01-02"], "datetime64[D]"), "dtype datetime64[D]"),
        (np.timedelta64(3, "s"), "dtype timedelta64[s]"),
        (np.zeros(2, "V8"), "dtype |V8"),
        (np.zeros(2, [("a", "i4")]), "dtype [('a', '<i4')]"),
        (np.longdouble(1), f"dtype {np.dtype(np.longdouble)}"),
        (np.arange(3, dtype=">f4"), "dtype >f4"),
        (np.zeros(2, jnp.uint4), "dtype uint4"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "masked array"),
    ],
)
def test_a_leaf_that_cannot_be_stored_is_named_at_resume(
    leaf: Any, what: str, tmp_path: pathlib.Path
) -> None:
    with checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=1, keep=1) as checkpoints:
        with pytest.raises(TypeError, match="train state leaf /opt/a~1b ") as caught:
            checkpoints.resume({"ok": jnp.zeros(2), "opt": {"a/b": leaf}})
        assert what in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"\ud800": jnp.zeros(2)}, r"'/\ud800'"),
        ({"ok": 0, "opt": [{"a\udc80b": 1.0}]}, r"'/opt/0/a\udc80b'"),
    ],
)
def test_a_key_that_is_no_text_is_named_at_resume(
    tree: Any, path: str, tmp_path: pathlib.Path
) -> None:
    with checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=1, keep=1) as checkpoints:
        message = f"a key in {re.escape(path)} of the train state is no text"
        with pytest.raises(ValueError, match=message):
            checkpoints.resume(tree)
        assert checkpoints.resume({"\u00e9\U0001f600\0": jnp.zeros(2)}).position.step == 0


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a.b": np.arange(1), "a": {"b": np.arange(2)}}, "/a/b and /a.b"),
        ({"": {"b": np.arange(1)}, ".b": np.arange(2)}, "//b and /.b"),
        ({"a": [np.arange(1)], "a.0": np.arange(2)}, "/a/0 and /a.0"),
    ],
)
def test_names_that_would_overwrite_each_other_are_refused(tree: Any, paths: str) -> None:
    with pytest.raises(TypeError, match=f"leaves {paths} .* one name; rename"):
        describe(tree)


def test_a_leaf_is_described_by_path_shape_dtype_and_prng() -> None:
    tree = {
        "a/b": {"c~d": [jnp.zeros((2, 3), jnp.bfloat16), 1.5]},
        "key": jax.random.split(jax.random.key(0, impl="rbg"), 4),
        "n": Layer(np.uint8(3), True),
    }
    leaves = describe(tree)
    assert {leaf.path: leaf.kind for leaf in leaves} == {
        "/a~1b/c~0d/0": "bfloat16[2,3]",
        "/a~1b/c~0d/1": "float[]",
        "/key": "key<rbg>[4]",
        "/n/weight": "uint8[]",
        "/n/bias": "bool[]",
    }
    assert [LeafSpec.from_dict(leaf.to_dict()) for leaf in leaves] == list(leaves)


def test_shapes_are_described_as_the_arrays_that_they_stand_for() -> None:
    def init() -> Any:
        keys = {name: jax.random.key(1, impl=name) for name in KEY_IMPLEMENTATIONS}
        return {"w": jnp.zeros((2, 3)), "keys": keys}

    assert describe(jax.eval_shape(init)) == describe(init())


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"path": "/a", "shape": [2]},
        {"path": 1, "shape": [2], "dtype": "int32"},
        {"path": "/a", "shape": [2], "dtype": None},
        {"path": "/a", "shape": [2], "dtype": "int32", "prng": 1},
        {"path": "/a", "shape": [-1], "dtype": "int32"},
        {"path": "/a", "shape": [2.0], "dtype": "int32"},
        {"path": "/a", "shape": [True], "dtype": "int32"},
        {"path": "/a", "shape": "12", "dtype": "int32"},
        {"path": "/a", "shape": 2, "dtype": "int32"},
        "text",
        None,
    ],
)
def test_a_description_of_something_else_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, KeyError)):
        LeafSpec.from_dict(value)


@pytest.mark.parametrize(
    ("train_state", "step"),
    [
        ({"step": 7}, 7),
        ({"step": np.int32(7)}, 7),
        ({"step": jnp.array(7)}, 7),
        (AdamState(jnp.zeros(1), jnp.array(7), None), None),
        ({"opt": {"step": 7}}, None),
        ({"step": 7.0}, None),
        ({"step": np.arange(2)}, None),
        ({"step": jax.random.key(7)}, None),
        ({"step": jax.ShapeDtypeStruct((), jnp.int32)}, None),
        ({"step": True}, None),
        ({"step": [7]}, None),
        ({"step": {"": 7}}, None),
        ({"step": None}, None),
        (Stepped(7, {"step": 8}), 7),
        ([7], None),
        (np.arange(3), None),
        (7, None),
        (None, None),
    ],
)
def test_the_train_states_own_step_is_an_integer_named_step_at_its_top(
    train_state: Any, step: int | None
) -> None:
    assert step_of(train_state) == step


#: Values that `jax.jit` makes arrays of other kinds.
CHANGED_BY_JIT: dict[str, Any] = {
    "int": 3,
    "float": 0.1,
    "complex": 1j,
    "bool": True,
    "NumPy scalar int64": np.int64(-3),
    "NumPy scalar uint64": np.uint64(3),
    "NumPy scalar float64": np.float64(0.1),
    "NumPy int64": np.arange(3),
    "NumPy float64": np.linspace(0, 1, 4).reshape(2, 2),
    "NumPy complex128": np.array([0.1 + 1j]),
    "NumPy bool": np.array([True]),
}


@pytest.mark.parametrize("x64", [False, True])
def test_what_jit_makes_of_a_leaf_is_the_same_leaf(x64: bool, tmp_path: pathlib.Path) -> None:
    begin = CHANGED_BY_JIT
    with (
        jax.enable_x64(x64),
        checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=1, keep=1) as checkpoints,
    ):
        jitted = jax.jit(lambda state: state)(begin)
        run = checkpoints.resume(begin)
        next(run.batches)
        assert checkpoints.save(run.batches, jitted)
        for template in (begin, jitted, jax.eval_shape(lambda: begin)):
            run = checkpoints.resume(template)
            assert run.position.step == 1
            for name, leaf in run.train_state.items():
                assert np.asarray(leaf).dtype == jitted[name].dtype
                assert raw(leaf) == raw(jitted[name])
                if isinstance(leaf, jax.Array):
                    assert leaf.weak_type == jitted[name].weak_type
        next(run.batches)
        assert checkpoints.save(run.batches, jitted)


def test_python_numbers_that_were_saved_come_back_for_shapes_of_arrays(
    tmp_path: pathlib.Path,
) -> None:
    numbers = {"int": 3, "float": 0.1, "complex": 1j, "bool": True}
    save(tmp_path, numbers)
    found = restore(tmp_path, jax.eval_shape(lambda: numbers))
    assert_same({**found, "bool": bool(found["bool"])}, numbers)


OTHER_LEAVES: dict[str, tuple[Any, Any]] = {
    "a narrower array": (jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)),
    "an int that becomes a float": (3, 3.0),
    "an array that becomes an int": (jnp.array(3), 3),
    "64 bits that become 32 in NumPy's hands as another kind": (np.int64(3), np.float32(3)),
    "another shape": (jnp.zeros(2), jnp.zeros(3)),
    "a leaf more": ({"a": 1}, {"a": 1, "b": 2}),
}


@pytest.mark.parametrize("name", OTHER_LEAVES)
def test_other_leaves_are_refused_at_the_first_call_of_save(
    name: str, tmp_path: pathlib.Path
) -> None:
    before, after = OTHER_LEAVES[name]
    with checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=9, keep=1) as checkpoints:
        run = checkpoints.resume({"x": before})
        next(run.batches)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"at step 1 is not like .* /x(/b)? was .* and is"):
                checkpoints.save(run.batches, {"x": after})
        assert not checkpoints.save(run.batches, {"x": before})


def test_leaves_are_checked_once_where_no_save_is_due(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[Any] = []

    def counted(state: Any) -> Any:
        described.append(state)
        return describe(state)

    monkeypatch.setattr("checkpointing.checkpoints.describe", counted)
    with checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=9, keep=1) as checkpoints:
        for _ in range(2):
            run = checkpoints.resume({"x": 0})
            described.clear()
            for step in (1, 2):
                next(run.batches)
                assert not checkpoints.save(run.batches, {"x": step})
                assert described == [{"x": 1}]


def test_an_array_of_64_bits_is_not_restored_as_one_of_32(tmp_path: pathlib.Path) -> None:
    with jax.enable_x64(True):
        save(tmp_path, {"w": jnp.array([0.1])})
    with pytest.raises(checkpointing.CheckpointMismatchError, match=r"float64\[1\] .*float32\[1\]"):
        restore(tmp_path, {"w": jnp.array([0.1])})


def test_a_new_run_begins_at_step_0_and_the_error_helps_a_fine_tune(tmp_path: pathlib.Path) -> None:
    with checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=1, keep=1) as checkpoints:
        with pytest.raises(
            ValueError, match=r"is 500, and a new run .* begins at step 0"
        ) as caught:
            checkpoints.resume({"step": jnp.array(500)})
        assert "To fine-tune, set it to 0" in str(caught.value)


@pytest.mark.parametrize("how", ["context", "config"])
def test_a_transfer_guard_of_the_program_does_not_stop_a_save_or_resume(
    how: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: make() for name, make in LEAVES.items()}
    if how == "config":
        jax.config.update("jax_transfer_guard", "disallow")
    try:
        with jax.transfer_guard("disallow") if how == "context" else contextlib.nullcontext():
            save(tmp_path, expected)
            found = restore(tmp_path, expected)
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                jnp.asarray(np.arange(3))  # the guard is still there
    finally:
        jax.config.update("jax_transfer_guard", None)
    assert_same(found, expected)


def test_numpy_arrays_are_copied_for_a_save_and_not_once_more_by_orbax() -> None:
    own: dict[str, Any] = {
        "c": np.arange(12.0).reshape(3, 4),
        "f": np.asfortranarray(np.eye(3)),
        "n": np.int8(3),
    }
    own["view"] = own["c"][::2, 1:]
    stored = to_arrays(own)
    assert all(copy.deepcopy(leaf) is leaf for leaf in stored.values())
    before = {name: leaf.tolist() for name, leaf in own.items()}
    for name in ("c", "f", "view"):
        assert not np.shares_memory(stored[name], own[name])
        own[name][:] = -1
    assert {name: leaf.tolist() for name, leaf in stored.items()} == before
