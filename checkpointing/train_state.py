"""A train state as Orbax can hold it exactly: what its leaves are, and how they go in and come out.

Orbax refuses NumPy scalars and arrays of size zero, changes dtypes and loses weak types without a
word, and writes trees that it cannot read. So leaves are described first (the description goes into
the manifest and is compared at a resume), stored as plain arrays, and brought back to what they were.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np

_WRAPPED: Final = "train_state"
_NUMBER_KEYS: Final = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
#: What TensorStore can hold, in the machine's byte order.
_DTYPES: Final = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)

_KEY_BYTES: Final = {"threefry2x32": 8, "rbg": 16, "unsafe_rbg": 16}
_NUMBER_BYTES: Final = {"int": 8, "float": 8, "complex": 16}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a train state.

    Attributes:
      path: the keys, indices or attribute names that lead to it, as a JSON pointer (RFC 6901):
        ``/params/dense/0``.
      shape: of the array; of the array of keys, for PRNG keys.
      dtype: of the array; ``"key"`` for PRNG keys; ``"int"``, ``"float"``, ``"bool"`` or ``"complex"``
        for Python's own numbers.
      prng: PRNG implementation of keys; empty for everything else.
      weak: whether the array is weakly typed, so that it yields to others in promotions. A state may
        begin weak and become strong; what was saved comes back, and nothing is refused for it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    prng: str = ""
    weak: bool = False

    @property
    def kind(self) -> str:
        """Everything but the path, as one text."""
        shape = f"[{','.join(map(str, self.shape))}]"
        return f"{self.dtype}{f'<{self.prng}>' if self.prng else ''}{shape}"

    @property
    def num_bytes(self) -> int | None:
        """Of its values in memory; ``None`` where that is not known here."""
        if self.dtype == "key":
            one = _KEY_BYTES.get(self.prng)
        elif self.dtype in _DTYPES:
            one = np.dtype(self.dtype).itemsize
        else:
            one = _NUMBER_BYTES.get(self.dtype)
        return None if one is None else one * math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        value = {"path": self.path, "shape": list(self.shape), "dtype": self.dtype}
        value |= {"prng": self.prng} if self.prng else {}
        return value | ({"weak": True} if self.weak else {})

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` wrote; TypeError or KeyError where it is something else."""
        shape, texts = value["shape"], (value["path"], value["dtype"], value.get("prng", ""))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{value!r:.80} does not describe a leaf")
        if not all(type(side) is int and side >= 0 for side in shape):
            raise TypeError(f"{shape!r:.80} is not a shape")
        if type(value.get("weak", False)) is not bool:
            raise TypeError(f"{value!r:.80} does not describe a leaf")
        return cls(texts[0], tuple(shape), texts[1], texts[2], value.get("weak", False))


def describe(train_state: Any) -> tuple[Leaf, ...]:
    """Every leaf of a train state, in the order of the tree.

    Raises:
      TypeError: a leaf is neither an array, nor a PRNG key, nor a number, or two leaves are one
        variable of Flax's; names it.
      ValueError: a key is no text that can be stored.
    """
    _check_not_shared(train_state)
    return tuple(_describe(path, leaf) for path, leaf in leaves_by_path(train_state).items())


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in the order of the tree.

    Raises:
      TypeError: two leaves have the same path (an attribute and a key of the same name, say), or
        paths that are the same to Orbax, which joins keys by dots: ``{"a.b": 1, "a": {"b": 2}}``.
      ValueError: a key cannot be encoded as UTF-8.
    """
    by_path: dict[str, Any] = {}
    taken: dict[str, str] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [_name(key) for key in keys]
        path = _joined(names)
        if not path.isascii():
            _check_text(path)
        other = taken.setdefault(".".join(names), path)
        if path in by_path or other != path:
            raise TypeError(
                f"the leaves {other} and {path} of the train state would be stored under one name; "
                "rename one of their keys"
            )
        by_path[path] = leaf
    return by_path


def _check_text(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a key in {path!a} of the train state is no text: it holds a half of a surrogate pair, which "
            "nothing can be stored under. Rename it"
        ) from error


def is_abstract(train_state: Any) -> bool:
    """Whether some leaf is a shape and dtype only."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(train_state))


def to_stored(train_state: Any, *, several_processes: bool = False) -> Any:
    """The tree with each leaf as the array that is stored for it. Shares memory with JAX's arrays.

    Args:
      train_state: the tree.
      several_processes: then an array that is on devices of this process alone becomes one of
        NumPy's: each process has a copy, and one of them is stored.

    Raises:
      ValueError: a leaf is an array that was deleted, or donated to a function.
    """
    if any(map(_is_deleted, jax.tree.leaves(train_state))):
        gone = [path for path, leaf in leaves_by_path(train_state).items() if _is_deleted(leaf)]
        raise ValueError(
            f"train state leaf {gone[0]} has been deleted or donated; save the train state that the "
            "update returned, not the one that it was given"
        )
    one = functools.partial(_to_stored, several_processes=several_processes)
    return _wrapped(_sortable(jax.tree.map(one, train_state)))


def copies_in(stored: Any) -> dict[str, np.ndarray[Any, Any]]:
    """By their paths, the arrays in a stored tree of which each process has a copy of its own."""
    leaves = jax.tree_util.tree_flatten_with_path(stored)[0]
    return {pointer(keys): leaf for keys, leaf in leaves if isinstance(leaf, np.ndarray)}


def stored_templates(train_state: Any, *, several_processes: bool = False) -> dict[str, Any]:
    """By its path in the stored tree, what is stored: NumPy arrays, and JAX's as shapes and dtypes.

    An array that JAX may move between devices as it likes (it is not committed to one) has no
    sharding here, and comes back as free as it was; nor has one that ``several_processes`` have on
    devices of their own.
    """
    templates = {
        stored_at(path): _stored_template(leaf)
        for path, leaf in leaves_by_path(train_state).items()
    }
    if not several_processes:
        return templates
    return {
        path: jax.ShapeDtypeStruct(template.shape, template.dtype)
        if _is_local(template)
        else template
        for path, template in templates.items()
    }


def from_stored(stored: Mapping[str, Any], template: Any, leaves: tuple[Leaf, ...]) -> Any:
    """A train state like ``template`` from stored arrays.

    Args:
      stored: by the path of its leaf, each array.
      template: the train state to build.
      leaves: what was saved.

    Raises:
      ValueError: an array has another shape or dtype than it was asked for.
    """
    weak = {leaf.path for leaf in leaves if leaf.weak}
    built = [
        _from_stored(leaf, stored[path], weak=path in weak)
        for path, leaf in leaves_by_path(template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), built)


def stored_at(path: str) -> str:
    """Path in the stored tree of the array that belongs to a leaf."""
    return path or f"/{_WRAPPED}"


def _needs_wrapping(tree: Any) -> bool:
    return not jax.tree.leaves(tree) or jax.tree_util.all_leaves([tree])


def _wrapped(tree: Any) -> Any:
    """Orbax stores no bare array and no empty tree; these get a dict around them."""
    if not _needs_wrapping(tree):
        return tree
    return {_WRAPPED: next(iter(jax.tree.leaves(tree)), np.zeros(1))}


def _sortable(tree: Any) -> Any:
    """The tree with a dict for each node that has both names and numbers below it.

    Orbax sorts what is below a node when it reads a tree, and cannot sort names among numbers. Flax's
    ``nnx.List`` is such a node: beside its elements stands a state of its own, which has no leaf.
    """

    def sortable(node: Any) -> Any:
        if not _is_mixed(node):
            return node
        kept = [(keys, child) for keys, child in _children(node) if jax.tree.leaves(child)]
        return {_name(keys[0]): _sortable(child) for keys, child in kept}

    return jax.tree.map(sortable, tree, is_leaf=_is_mixed)


def _is_mixed(node: Any) -> bool:
    kind: Any = type(node)
    if _is_simple(kind):
        return False
    children = _children(node)
    return len({isinstance(keys[0], _NUMBER_KEYS) for keys, _ in children if keys}) == 2


@functools.cache
def _is_simple(kind: type) -> bool:
    """Whether it is a kind of leaf, or of container with only names or only numbers below it."""
    return issubclass(kind, (jax.Array, np.ndarray, np.generic, dict, list, tuple, type(None)))


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The nodes and leaves right below a node; a leaf itself, without a key."""
    children: list[tuple[Any, Any]]
    children, _ = jax.tree_util.tree_flatten_with_path(node, lambda below: below is not node)
    return children


def _check_not_shared(train_state: Any) -> None:
    """A variable that modules of Flax share would come back as two, which the next update makes differ.

    In an ``nnx.State`` variables stand for their values, as arrays do elsewhere.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # then nobody has made any
        return
    kinds, found = (nnx.Variable, nnx.State), dict[int, tuple[Any, ...]]()
    nodes, _ = jax.tree_util.tree_flatten_with_path(train_state, lambda n: isinstance(n, kinds))
    for keys, node in nodes:
        if isinstance(node, nnx.Variable) and found.setdefault(id(node), keys) is not keys:
            raise TypeError(
                f"{pointer(found[id(node)])} and {pointer(keys)} of the train state are one "
                f"nnx.{type(node).__name__}, and would come back as two. Pass nnx.state(...) of what "
                "holds it, in which it is once, and what comes back to nnx.update"
            )


def pointer(keys: tuple[Any, ...]) -> str:
    """A path of JAX's as a JSON pointer."""
    return _joined(map(_name, keys))


def _joined(names: Iterable[str]) -> str:
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):  # by far most leaves, and JAX asks for longer
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _describe(path: str, leaf: Any) -> Leaf:
    if _is_key(leaf):
        return Leaf(path, tuple(leaf.shape), "key", _prng_name(leaf))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        dtype = _dtype_name(np.dtype(leaf.dtype))
        if dtype not in _DTYPES:
            raise TypeError(
                f"train state leaf {path} has dtype {dtype}, which a checkpoint cannot hold; it holds "
                + ", ".join(sorted(_DTYPES))
            )
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(f"train state leaf {path} is a masked array, whose mask would be lost")
        return Leaf(path, tuple(leaf.shape), dtype, weak=getattr(leaf, "weak_type", False))
    if type(leaf) in (bool, int, float, complex):
        if type(leaf) is int and not -(2**63) <= leaf < 2**63:
            raise TypeError(f"train state leaf {path} is {leaf}, which does not fit 64 bits")
        return Leaf(path, (), type(leaf).__name__)
    raise TypeError(
        f"train state leaf {path} is {leaf!r:.60} of type {type(leaf).__name__}; a checkpoint holds "
        "arrays, PRNG keys and numbers: keep functions and texts outside the train state"
    )


_dtype_name: Final = functools.cache(str)  # NumPy takes its time to name one


def _prng_name(leaf: Any) -> str:
    """Name of a key's PRNG implementation, as `jax.random.key` takes it: ``threefry2x32``, ``rbg``, ..."""
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    names: list[str] = []
    # JAX names the implementation of keys only, not of their shapes; under a trace the two are one.
    jax.eval_shape(lambda keys: names.append(str(jax.random.key_impl(keys))), leaf)
    return names[0]


def _to_stored(leaf: Any, *, several_processes: bool) -> Any:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if _is_odd_bool(leaf):
        leaf = np.asarray(leaf).view(np.uint8) != 0
    if not isinstance(leaf, jax.Array) or (several_processes and leaf.is_fully_addressable):
        leaf = np.array(leaf).view(_Copy)  # the caller may go on writing into its own
    return leaf if leaf.size else np.zeros(1, leaf.dtype)


def _is_odd_bool(leaf: Any) -> bool:
    """Whether some true values are other bytes than 1, which TensorStore writes and does not read.

    NumPy takes them over from buffers, and JAX, on a CPU, from NumPy.
    """
    if getattr(leaf, "dtype", None) != np.bool_:
        return False
    if isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable and all(one.platform == "cpu" for one in leaf.devices())
    ):
        return False
    return bool((np.asarray(leaf).view(np.uint8) > 1).any())


def _is_local(template: Any) -> bool:
    sharding = getattr(template, "sharding", None)
    return sharding is not None and sharding.is_fully_addressable


class _Copy(np.ndarray[Any, Any]):
    """A copy that nobody else has. Orbax copies NumPy arrays too, which would take the time twice."""

    def __deepcopy__(self, memo: Any, /) -> Self:
        return self


def _stored_template(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and 0 in leaf.shape:
        return np.zeros(1, np.uint32 if _is_key(leaf) else leaf.dtype)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        sharding = _sharding(leaf)
        if sharding is not None and not sharding.is_fully_replicated:
            sharding = jax.random.key_data(leaf).sharding
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        # What JAX would narrow is read as NumPy has it.
        sharding = None if _is_narrowed(leaf.dtype) else _sharding(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return np.asarray(leaf)


def _is_narrowed(dtype: np.dtype[Any]) -> bool:
    """Whether JAX makes 32 bits of such an array's 64: as it does unless ``jax_enable_x64`` is set."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def _sharding(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return leaf.sharding


def _from_stored(leaf: Any, stored: Any, *, weak: bool) -> Any:
    expected = _stored_template(leaf)
    if stored.shape != expected.shape or stored.dtype != expected.dtype:
        raise ValueError(
            f"an array came back as {stored.dtype}{list(stored.shape)} instead of "
            f"{expected.dtype}{list(expected.shape)}"
        )
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        stored = jnp.asarray(stored) if data.size else jnp.zeros(data.shape, data.dtype)
        return _placed(jax.random.wrap_key_data(stored, impl=_prng_name(leaf)), leaf)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if not _is_narrowed(leaf.dtype):
            return _from_stored_array(leaf, stored, weak=weak)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            # Of NumPy's arrays too, this is the shape; and JAX has no arrays like it.
            return np.zeros(leaf.shape, leaf.dtype) if 0 in leaf.shape else stored
        with jax.enable_x64(True):
            return _from_stored_array(leaf, stored, weak=weak)
    if isinstance(leaf, np.ndarray):
        return stored.reshape(leaf.shape) if leaf.size else np.zeros(leaf.shape, leaf.dtype)
    return stored[()] if isinstance(leaf, np.generic) else type(leaf)(stored[()])


def _from_stored_array(leaf: Any, stored: Any, *, weak: bool) -> jax.Array:
    array = jnp.zeros(leaf.shape, leaf.dtype) if 0 in leaf.shape else jnp.asarray(stored)
    return _placed(_weak(array) if weak else array, leaf)


def _weak(array: jax.Array) -> jax.Array:
    """The same values as a weakly typed array: in later promotions it then counts as it did before."""
    python_zero = {"i": 0, "f": 0.0, "c": 0j, "b": False}[array.dtype.kind]
    if jnp.full((), python_zero).dtype != array.dtype:
        return array

    # Compiled, since the array may be on devices of other processes too.
    def weakened(values: jax.Array) -> jax.Array:
        return jnp.full(values.shape, python_zero).at[...].set(values)

    weak: jax.Array = jax.jit(weakened)(array)
    return _at(weak, array.sharding) if array.committed else weak


def _placed(array: jax.Array, leaf: Any) -> jax.Array:
    """The array where the leaf is that it stands for, if that is bound to a place."""
    sharding = _sharding(leaf)
    if sharding is None or (array.committed and array.sharding == sharding):
        return array
    return _at(array, sharding)


def _at(array: jax.Array, sharding: Any) -> jax.Array:
    # device_put does not put keys on the devices of several processes.
    placed: jax.Array = (
        jax.device_put(array, sharding)
        if sharding.is_fully_addressable
        else jax.jit(lambda values: values, out_shardings=sharding)(array)
    )
    return placed


def step_of(train_state: Any) -> int | None:
    """The train state's own count of steps: an integer named ``step`` at its top, if it has one."""
    top = jax.tree_util.tree_flatten_with_path(
        train_state, is_leaf=lambda node: node is not train_state
    )[0]
    leaf = next((part for keys, part in top if pointer(keys) == "/step"), None)
    if not jax.tree_util.all_leaves([leaf]):
        return None
    if isinstance(leaf, jax.ShapeDtypeStruct) or _is_key(leaf):
        return None
    array = np.asarray(leaf)
    return int(array) if array.ndim == 0 and array.dtype.kind in "iu" else None
