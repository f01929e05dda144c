"""How a train state is stored: a description of its leaves, and the arrays that Orbax writes for them.

Orbax refuses NumPy scalars and arrays of size zero, changes dtypes and drops weak types silently, and writes
some trees that it cannot read. So each leaf is described (the description goes into the manifest and is
compared at a resume), stored as a plain array, and converted back when it is restored.
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
#: The dtypes that TensorStore can hold, in the machine's byte order.
_DTYPES: Final = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)
#: Python's own numbers. `describe` uses these names, except "bool", which is a dtype too.
_NUMBERS: Final[dict[str, type]] = {"int": int, "float": float, "complex": complex}

_KEY_BYTES: Final = {"threefry2x32": 8, "rbg": 16, "unsafe_rbg": 16}
_NUMBER_BYTES: Final = {"int": 8, "float": 8, "complex": 16}


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The description of one leaf of a train state.

    Attributes:
      path: its keys, indices or attribute names as a JSON pointer (RFC 6901): ``/params/dense/0``.
      shape: of the array; of the array of keys for PRNG keys.
      dtype: of the array; ``"key"`` for PRNG keys; ``"int"``, ``"float"``, ``"bool"`` or ``"complex"``
        for Python's own numbers.
      prng: the PRNG implementation of keys; otherwise empty.
      weak: whether the array is weakly typed. This is restored but not compared, since a jitted step
        may change it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    prng: str = ""
    weak: bool = False

    @property
    def kind(self) -> str:
        """Dtype, PRNG implementation and shape as one text."""
        shape = f"[{','.join(map(str, self.shape))}]"
        return f"{self.dtype}{f'<{self.prng}>' if self.prng else ''}{shape}"

    @property
    def num_bytes(self) -> int | None:
        """Size of the values in memory; ``None`` for an unknown PRNG implementation."""
        if self.dtype == "key":
            one = _KEY_BYTES.get(self.prng)
        elif self.dtype in _DTYPES:
            one = np.dtype(self.dtype).itemsize
        else:
            one = _NUMBER_BYTES.get(self.dtype)
        return None if one is None else one * math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return the description as plain JSON values."""
        value = {"path": self.path, "shape": list(self.shape), "dtype": self.dtype}
        value |= {"prng": self.prng} if self.prng else {}
        return value | ({"weak": True} if self.weak else {})

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the result of `to_dict`; raise TypeError or KeyError for anything else."""
        spec = cls(
            value["path"],
            tuple(value["shape"]),
            value["dtype"],
            value.get("prng", ""),
            value.get("weak", False),
        )
        texts = all(isinstance(text, str) for text in (spec.path, spec.dtype, spec.prng))
        sides = all(type(side) is int and 0 <= side < 2**63 for side in spec.shape)
        if not texts or not sides or type(spec.weak) is not bool:
            raise TypeError(f"{value!r:.80} does not describe a leaf of a train state")
        return spec


def describe(train_state: Any) -> tuple[LeafSpec, ...]:
    """Describe every leaf of a train state, in the order of the tree.

    Raises:
      TypeError: a leaf is not an array, PRNG key or number, or two leaves are one Flax variable.
      ValueError: a key of the tree is not text that can be stored.
    """
    _check_not_shared(train_state)
    return tuple(_describe(path, leaf) for path, leaf in leaves_by_path(train_state).items())


def differing_kinds(
    before: Iterable[LeafSpec], now: Iterable[LeafSpec]
) -> dict[str, tuple[str | None, str | None]]:
    """Return the kinds of each leaf that is not what it was, by path; ``None`` if it is absent.

    A leaf may become what `jax.jit` makes of it: a Python number, or a NumPy value of 64 bits, becomes
    an array of the dtype that JAX is configured for.
    """
    befores, nows = ({leaf.path: leaf for leaf in leaves} for leaves in (before, now))
    return {
        path: (one.kind if one else None, other.kind if other else None)
        for path in {**befores, **nows}
        for one, other in [(befores.get(path), nows.get(path))]
        if one is None or other is None or other.kind not in (one.kind, _jitted(one).kind)
    }


def as_compared(saved: Iterable[LeafSpec], template: Iterable[LeafSpec]) -> tuple[LeafSpec, ...]:
    """Return the leaves of a template, with the saved leaf in place of each that accepts it.

    A leaf accepts what `jax.jit` makes of it, since the template is from before the first step. The shape
    of an array also accepts the Python number that `jax.eval_shape` makes such a shape of.
    """
    by_path = {leaf.path: leaf for leaf in saved}

    def one(leaf: LeafSpec) -> LeafSpec:
        other = by_path.get(leaf.path, leaf)
        became = other.kind == _jitted(leaf).kind
        was = other.dtype in _NUMBERS and leaf.kind == _jitted(other).kind
        return other if became or was else leaf

    return tuple(map(one, template))


def _jitted(leaf: LeafSpec) -> LeafSpec:
    """Describe the array that `jax.jit` makes of a leaf, with x64 as it is configured now."""
    if leaf.dtype in _NUMBERS:
        dtype: Any = jnp.result_type(_NUMBERS[leaf.dtype])
    elif leaf.dtype not in _DTYPES:  # a PRNG key, or what a stranger wrote
        return leaf
    else:
        dtype = jax.dtypes.canonicalize_dtype(np.dtype(leaf.dtype))
    return dataclasses.replace(leaf, dtype=_dtype_name(dtype))


def as_described(stored: np.ndarray[Any, Any], leaf: LeafSpec) -> np.ndarray[Any, Any]:
    """Return a stored array in the shape of its leaf; a PRNG key as its uint32 data.

    Raises:
      ValueError: shape or dtype are not those of the leaf.
    """
    shape, dtype = leaf.shape, leaf.dtype
    if leaf.dtype == "key":
        words = _KEY_BYTES[leaf.prng] // 4 if leaf.prng in _KEY_BYTES else stored.shape[-1]
        shape, dtype = (*shape, words), "uint32"
    elif leaf.dtype in _NUMBERS:
        dtype = str(np.asarray(_NUMBERS[leaf.dtype]()).dtype)
    expected = (1,) if 0 in leaf.shape else shape
    if stored.shape != expected or str(stored.dtype) != dtype:
        raise ValueError(
            f"{leaf.path or '/'} is {leaf.kind} in the manifest, and {stored.dtype}{list(stored.shape)} in the arrays"
        )
    return stored[:0].reshape(shape) if 0 in leaf.shape else stored


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, in the order of the tree.

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
            f"a key in {path!a} of the train state is no text: it holds half of a surrogate pair, which "
            "UTF-8 cannot encode. Rename it"
        ) from error


def is_abstract(train_state: Any) -> bool:
    """Return whether some leaf is only a shape and dtype."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(train_state))


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys, or its shape."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):  # most leaves; jnp.issubdtype is slow
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_arrays(leaves: Mapping[str, Any], *, several_processes: bool = False) -> dict[str, Any]:
    """Return the array to store for each leaf, by path. JAX's arrays are not copied.

    Args:
      leaves: from `leaves_by_path`.
      several_processes: convert arrays that are only on this process's devices to NumPy. Each process
        has such an array, and one of them is stored.

    Raises:
      ValueError: a leaf is an array that was deleted, or donated to a function.
    """
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"train state leaf {path} has been deleted or donated; save the train state that the "
                "update returned, not the one that it was given"
            )
    one = functools.partial(_to_array, several_processes=several_processes)
    return {path: one(leaf) for path, leaf in leaves.items()}


def to_stored(train_state: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the tree that Orbax writes: the train state with an array from `to_arrays` for each leaf."""
    tree = jax.tree.unflatten(jax.tree.structure(train_state), arrays.values())
    return _wrapped(_sortable(tree))


def as_saved(train_state: Any, saved: Iterable[LeafSpec]) -> Any:
    """Return the template with leaves of the saved kinds: an int32 array for Python's ``0``, say."""
    by_path = {leaf.path: leaf for leaf in saved}
    leaves = [
        _as_saved(leaf, _describe(path, leaf), by_path[path])
        for path, leaf in leaves_by_path(train_state).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(train_state), leaves)


def _as_saved(leaf: Any, now: LeafSpec, saved: LeafSpec) -> Any:
    if now.kind == saved.kind:
        return leaf
    if saved.dtype in _NUMBERS:
        return _NUMBERS[saved.dtype]()
    sharding = _sharding(leaf) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(saved.shape, np.dtype(saved.dtype), sharding=sharding)


def stored_templates(train_state: Any, *, several_processes: bool = False) -> dict[str, Any]:
    """Return a template of each stored array by its path in the stored tree.

    A template is a NumPy array, or a shape and dtype for one of JAX's. It has a sharding if the array
    is to be read onto devices directly: not for an uncommitted array, which JAX may move freely and
    which comes back uncommitted, nor for one that each of ``several_processes`` has on its own devices.
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


def from_stored(stored: Mapping[str, Any], template: Any, saved: Iterable[LeafSpec]) -> Any:
    """Build a train state like ``template`` from stored arrays.

    Args:
      stored: each array by the path of its leaf.
      template: the train state to build.
      saved: the description of the saved leaves.

    Raises:
      ValueError: an array has another shape or dtype than its template.
    """
    weak = {leaf.path for leaf in saved if leaf.weak}
    built = [
        _from_stored(leaf, stored[path], weak=path in weak)
        for path, leaf in leaves_by_path(template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), built)


def stored_at(path: str) -> str:
    """Return the path of a leaf's array in the stored tree."""
    return path or f"/{_WRAPPED}"


def _wrapped(tree: Any) -> Any:
    """Put a dict around a bare array or an empty tree, which Orbax does not store."""
    leaves = jax.tree.leaves(tree)
    if leaves and not jax.tree_util.all_leaves([tree]):
        return tree
    return {_WRAPPED: leaves[0] if leaves else np.zeros(1)}


def _sortable(tree: Any) -> Any:
    """Put a dict in place of each node that has both names and numbers below it.

    Orbax sorts the children of a node when it reads a tree, and cannot sort names among numbers. Flax's
    ``nnx.List`` is such a node: it has elements and a state of its own without leaves.
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
    """Return whether a type is a leaf, or a container with only names or only numbers below it."""
    return issubclass(kind, (jax.Array, np.ndarray, np.generic, dict, list, tuple, type(None)))


def _children(node: Any) -> list[tuple[Any, Any]]:
    """Return the direct children of a node with their keys; a leaf itself, without a key."""
    children: list[tuple[Any, Any]]
    children, _ = jax.tree_util.tree_flatten_with_path(node, lambda below: below is not node)
    return children


def _check_not_shared(train_state: Any) -> None:
    """Refuse a variable that Flax modules share: it would come back as two variables.

    In an ``nnx.State`` each variable holds its value once, so shared ones are fine there.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # then there are no variables
        return
    kinds, found = (nnx.Variable, nnx.State), dict[int, tuple[Any, ...]]()
    nodes, _ = jax.tree_util.tree_flatten_with_path(train_state, lambda n: isinstance(n, kinds))
    for keys, node in nodes:
        if isinstance(node, nnx.Variable) and found.setdefault(id(node), keys) is not keys:
            raise TypeError(
                f"{pointer(found[id(node)])} and {pointer(keys)} of the train state are one "
                f"nnx.{type(node).__name__}, and would come back as two. Save nnx.state(...) of the "
                "modules, which holds it once, and pass the restored state to nnx.update"
            )


def pointer(keys: tuple[Any, ...]) -> str:
    """Return a JAX key path as a JSON pointer."""
    return _joined(map(_name, keys))


def _joined(names: Iterable[str]) -> str:
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _describe(path: str, leaf: Any) -> LeafSpec:
    if is_key(leaf):
        return LeafSpec(path, tuple(leaf.shape), "key", _prng_name(leaf))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        dtype = _dtype_name(np.dtype(leaf.dtype))
        if dtype not in _DTYPES:
            raise TypeError(
                f"train state leaf {path} has dtype {dtype}, which a checkpoint cannot hold. Use one of "
                + ", ".join(sorted(_DTYPES))
            )
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"train state leaf {path} is a masked array, whose mask would be lost. Store data and mask as two leaves"
            )
        return LeafSpec(path, tuple(leaf.shape), dtype, weak=getattr(leaf, "weak_type", False))
    if type(leaf) in (bool, int, float, complex):
        if type(leaf) is int and not -(2**63) <= leaf < 2**63:
            raise TypeError(
                f"train state leaf {path} is {leaf}, which does not fit 64 bits. Store it as an array of smaller integers"
            )
        return LeafSpec(path, (), type(leaf).__name__)
    raise TypeError(
        f"train state leaf {path} is {leaf!r:.60} of type {type(leaf).__name__}; a checkpoint holds "
        "arrays, PRNG keys and numbers: keep functions and texts outside the train state"
    )


_dtype_name: Final = functools.cache(str)  # slow in NumPy


def _prng_name(leaf: Any) -> str:
    """Return the name of a key's PRNG implementation as `jax.random.key` takes it: ``"rbg"``, say."""
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    names: list[str] = []
    # key_impl takes no ShapeDtypeStruct, only keys and their tracers.
    jax.eval_shape(lambda keys: names.append(str(jax.random.key_impl(keys))), leaf)
    return names[0]


def _to_array(leaf: Any, *, several_processes: bool) -> Any:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if _is_odd_bool(leaf):
        leaf = np.asarray(leaf).view(np.uint8) != 0
    if not isinstance(leaf, jax.Array) or (several_processes and leaf.is_fully_addressable):
        leaf = np.array(leaf).view(_Copy)  # the caller may go on writing into its own
    return leaf if leaf.size else np.zeros(1, leaf.dtype)


def _is_odd_bool(leaf: Any) -> bool:
    """Return whether some true values are bytes other than 1, which TensorStore writes but cannot read.

    NumPy takes them from buffers, and JAX on a CPU takes them from NumPy.
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
    """A copy that only we hold: Orbax's own copy of it would be a second one, so it gets the same array."""

    def __deepcopy__(self, memo: Any, /) -> Self:
        return self


def _stored_template(leaf: Any) -> Any:
    if 0 in np.shape(leaf):
        return np.zeros(1, np.uint32 if is_key(leaf) else leaf.dtype)
    if is_key(leaf):
        # Without a sharding: keys are small. Each process reads all of them and takes its own.
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        # Arrays that JAX would narrow are read into NumPy.
        sharding = None if _is_narrowed(leaf.dtype) else _sharding(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return np.asarray(leaf)


def _is_narrowed(dtype: np.dtype[Any]) -> bool:
    """Return whether JAX converts this dtype from 64 to 32 bits, because ``jax_enable_x64`` is off."""
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
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        stored = jnp.asarray(stored) if data.size else jnp.zeros(data.shape, data.dtype)
        return _placed(jax.random.wrap_key_data(stored, impl=_prng_name(leaf)), leaf)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if not _is_narrowed(leaf.dtype):
            return _from_stored_array(leaf, stored, weak=weak)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            # JAX makes no such arrays now, so this is the shape of one of NumPy's.
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
    """Return the same values as a weakly typed array, which takes part in promotions as before."""
    python_zero = {"i": 0, "f": 0.0, "c": 0j, "b": False}[array.dtype.kind]
    if jnp.full((), python_zero).dtype != array.dtype:
        return array

    # Compiled, since the array may also be on devices of other processes.
    def weakened(values: jax.Array) -> jax.Array:
        return jnp.full(values.shape, python_zero).at[...].set(values)

    weak: jax.Array = jax.jit(weakened)(array)
    return _at(weak, array.sharding) if array.committed else weak


def _placed(array: jax.Array, leaf: Any) -> jax.Array:
    """Move the array to the devices of its template, if that is committed to some."""
    sharding = _sharding(leaf)
    if sharding is None or (array.committed and array.sharding == sharding):
        return array
    return _at(array, sharding)


def _at(array: jax.Array, sharding: Any) -> jax.Array:
    # device_put cannot put keys on devices of several processes.
    placed: jax.Array = (
        jax.device_put(array, sharding)
        if sharding.is_fully_addressable
        else jax.jit(lambda values: values, out_shardings=sharding)(array)
    )
    return placed


def step_of(train_state: Any) -> int | None:
    """Return the train state's own count of steps, if it has an integer named ``step`` at its top."""
    top = jax.tree_util.tree_flatten_with_path(
        train_state, is_leaf=lambda node: node is not train_state
    )[0]
    leaf = next((part for keys, part in top if pointer(keys) == "/step"), None)
    if not jax.tree_util.all_leaves([leaf]):
        return None
    if isinstance(leaf, jax.ShapeDtypeStruct) or is_key(leaf):
        return None
    array = np.asarray(leaf)
    return int(array) if array.ndim == 0 and array.dtype.kind in "iu" else None


def check_begins_at_zero(train_state: Any, where: str) -> None:
    """Raise ValueError if a train state that a new run begins with counts other steps than 0."""
    own = step_of(train_state)
    if own:
        raise ValueError(
            f"the train state's own step is {own}, and a new run in {where} begins at step 0: step counts "
            "the batches of this run. To fine-tune, set it to 0 (train_state.replace(step=0) in Flax). To "
            "go on with a schedule, keep that count under another name, or in the optimizer's state"
        )


def check_step(train_state: Any, step: int, what: str) -> None:
    """Raise ValueError if the train state's own step is another one than that of the iterator."""
    own = step_of(train_state)
    if own is not None and own != step:
        raise ValueError(
            f"the train state's own step is {own}, and {what} is at step {step}: they do not belong "
            "together. Save after each update with the iterator that fed it (no read-ahead in "
            "between). If it counts something other than batches, give it another name than step"
        )
