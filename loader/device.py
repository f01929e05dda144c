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
    unless ``jax_enable_x64`` is set.

    Args:
      batch: NumPy arrays.
      device: where to.

    Returns:
      The same fields in the same order, as `jax.Array` where they moved. The transfer goes on in the
      background: JAX waits for it where the array is used.
    """
    moving = {
        name: array for name, array in batch.items() if name != "id" and _is_jax_dtype(array.dtype)
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
        except ValueError as error:
            raise ValueError(
                f"device, {device}, cannot hold a batch of {size} records: {error}. It must split "
                'the batch axis alone, into equal parts; final_batch="pad" makes all batches equal'
            ) from error


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
