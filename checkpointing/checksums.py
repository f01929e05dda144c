"""A checksum of each copy of a replicated array, computed by the device that holds the copy.

One program for all arrays of a mesh reads the bytes once and returns 64 bits for each array and device,
without any communication, while the caller goes on. An array may be donated or deleted as soon as
`start` has returned.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: What murmur3's last step shifts and multiplies by: each 32 bits lead to others, and never two to the same.
_SHIFTS_AND_FACTORS: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))


class Checksums(NamedTuple):
    """The checksums of arrays on one mesh.

    Attributes:
      arrays: shape and sharding of each array, by name.
      values: uint32[devices, arrays, 2], each device's on that device.
    """

    arrays: dict[str, jax.ShapeDtypeStruct]
    values: jax.Array

    def by_device(self) -> dict[str, dict[Any, str]]:
        """Wait for the checksums; return them in hexadecimal by array and device of this process."""
        found: dict[str, dict[Any, str]] = {name: {} for name in self.arrays}
        for shard in self.values.addressable_shards:
            (sums,) = jax.device_get(shard.data)
            for name, (high, low) in zip(self.arrays, sums.tolist(), strict=True):
                found[name][shard.device] = f"{high:08x}{low:08x}"
        return found


def start(arrays: Mapping[str, jax.Array]) -> list[Checksums]:
    """Start to compute the checksums of those arrays that are replicated on some devices.

    Arrays that `jax.jit` returns, and those made for a `NamedSharding`, are covered, in the devices' own
    memory: not arrays offloaded to a host, nor those of no elements.
    """
    by_mesh: dict[Any, dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        sharding = array.sharding
        if isinstance(sharding, NamedSharding) and _is_replicated(array, sharding):
            by_mesh.setdefault(sharding.mesh, {})[name] = array
    return [_start(mesh, some) for mesh, some in by_mesh.items()]


def _is_replicated(array: jax.Array, sharding: NamedSharding) -> bool:
    if sharding.num_devices == 1 or not array.size:
        return False
    device: Any = next(iter(sharding.device_set))
    if sharding.memory_kind not in (None, device.default_memory().kind):
        return False
    distinct = array.size // math.prod(sharding.shard_shape(array.shape))
    return distinct < sharding.num_devices


def _start(mesh: Mesh, arrays: Mapping[str, jax.Array]) -> Checksums:
    shardings: list[Any] = [array.sharding for array in arrays.values()]
    specs = tuple(_shortest(sharding.spec) for sharding in shardings)
    # The caller may have another mesh set, and 64-bit arrays though x64 is off.
    with jax.set_mesh(mesh), jax.enable_x64(True):
        values = _checksums(mesh, specs, tuple(arrays.values()))
    kinds = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in arrays.items()
    }
    return Checksums(kinds, values)


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """Return an equal spec without None at its end, so that no program is compiled twice."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _checksums(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], arrays: tuple[jax.Array, ...]
) -> jax.Array:
    def on_each_device(parts: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([_checksum(part) for part in parts])[None]

    over_all = PartitionSpec(mesh.axis_names)
    return jax.shard_map(on_each_device, mesh=mesh, in_specs=(specs,), out_specs=over_all)(arrays)


def _checksum(array: jax.Array) -> jax.Array:
    """Return uint32[2]: sums over all values and their places, mixed, which any one change changes."""
    words = _words(array)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, side in enumerate(words.shape):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * np.uint32(side % 2**32) + index
    first = _mixed(words + _mixed(place))
    second = _mixed(first ^ np.uint32(0x9E3779B9))
    return jnp.stack([jnp.sum(one, dtype=jnp.uint32) for one in (first, second)])


def _mixed(words: jax.Array) -> jax.Array:
    for shift, factor in _SHIFTS_AND_FACTORS:
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words


def _words(array: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; values of 64 bits as two, on a further axis."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], -1)
    if array.dtype.itemsize >= 4:
        return lax.bitcast_convert_type(array, jnp.uint32)
    if array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.uint32)
    if array.dtype.itemsize == 2:
        return lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32)
    if "float4" in array.dtype.name:
        return lax.bitcast_convert_type(array, jnp.uint4).astype(jnp.uint32)
    return lax.bitcast_convert_type(array, jnp.uint8).astype(jnp.uint32)
