"""Batches on accelerators: which fields go there, and how."""

import functools
from typing import Any, TypeAlias

import jax
import numpy as np

from loader.batching import Batch
from loader.processes import global_batch

Device: TypeAlias = jax.Device | jax.sharding.Sharding
"""Where batches can be delivered: one device, or a sharding that splits the batch axis over some."""


def sharding_of(device: Device | None) -> "jax.sharding.Sharding | None":
    """The sharding of a batch over the devices of several processes, if that is what is asked for."""
    if (
        isinstance(device, jax.sharding.Sharding)
        and jax.distributed.is_initialized()
        and not device.is_fully_addressable
    ):
        return device
    return None


def to_device(batch: Batch, device: Device) -> Batch:
    """The batch with those of its fields on a device that JAX has a dtype for; begins the transfer.

    ``id`` stays a NumPy array, since JAX would cut its 64 bits to 32, and so do strings, times and
    structured fields. As wherever JAX is given an array, int64 and float64 become int32 and float32
    unless ``jax_enable_x64`` is set; JAX would also do so with integers that do not fit.

    Args:
      batch: NumPy arrays.
      device: where to.

    Returns:
      The same fields in the same order, as `jax.Array` where they moved. The transfer goes on in the
      background: JAX waits for it where the array is used.

    Raises:
      ValueError: an integer does not fit the 32 bits that JAX has for it.
    """
    moving = {
        name: _in_bits_of_jax(name, array)
        for name, array in batch.items()
        if name != "id" and _is_jax_dtype(array.dtype)
    }
    sharding = sharding_of(device)
    if sharding is not None:
        return {**batch, **global_batch(moving, sharding)}
    return {**batch, **jax.device_put(moving, device)}


def check_device(device: Any, sizes: set[int]) -> None:
    """Checks that batches of some sizes can be put on a device.

    Args:
      device: as for `Pipeline.iterate`.
      sizes: lengths of the batch axis that occur.

    Raises:
      TypeError: it is neither a device nor a sharding.
      ValueError: a sharding that cannot split an axis of such a length.
    """
    if isinstance(device, jax.Device):
        return
    if not isinstance(device, jax.sharding.Sharding):
        raise TypeError(
            f"device must be a jax.Device (such as jax.devices()[0]) or a Sharding, not {device!r}"
        )
    for size in sorted(sizes):
        try:
            device.shard_shape((size,))
        except (IndexError, ValueError) as error:  # the former where it splits another axis
            raise ValueError(
                f"device, {device}, cannot hold a batch of {size} records: {error}. It must split "
                'the batch axis alone, into equal parts; final_batch="pad" makes all batches equal'
            ) from error


def _in_bits_of_jax(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array; 64-bit integers as JAX has them, if it has them in fewer bits."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
        return array
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    lost = narrow != array
    if lost.any():
        raise ValueError(
            f"field {name!r} holds {array[lost][0]}, which does not fit {narrow.dtype}: unless jax_enable_x64 is "
            f"set, JAX has no {array.dtype}. Set it, or have a transform leave the field out or cast it"
        )
    return narrow


@functools.lru_cache
def _is_jax_dtype(dtype: np.dtype[Any]) -> bool:
    if not dtype.isnative:  # some versions of JAX have a dtype for it, and none takes the array
        return False
    try:
        # What jax_enable_x64 narrows counts too, and is no reason for a warning.
        jax.dtypes.result_type(jax.dtypes.canonicalize_dtype(dtype))
    except TypeError:
        return False
    return True
