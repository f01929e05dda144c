"""Batches on accelerators: which fields go there, and how."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import numpy as np

from loader.batching import Batch
from loader.reading.processes import global_batch

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
    """The batch with its numbers and truth values on a device; begins the transfer.

    ``id`` stays a NumPy array, since JAX would cut its 64 bits to 32. Strings, times and structured fields
    stay too. Big-endian numbers get the machine's byte order. As wherever JAX is given an array, int64 and float64 become int32 and float32
    unless ``jax_enable_x64`` is set; JAX would also do so with integers that do not fit.

    Args:
      batch: NumPy arrays.
      device: where to.

    Returns:
      The same fields in the same order, as `jax.Array` where they moved. The transfer goes on in the
      background: JAX waits for it where the array is used.

    Raises:
      TypeError: JAX has no dtype for a field's numbers.
      ValueError: an integer does not fit the 32 bits that JAX has for it.
    """
    moving = {
        name: _in_bits_of_jax(name, _in_order_of_jax(name, array))
        for name, array in batch.items()
        if name != "id" and not _stays(array.dtype)
    }
    sharding = sharding_of(device)
    if sharding is not None:
        return {**batch, **global_batch(moving, sharding)}
    return {**batch, **jax.device_put(moving, device)}


def check_device(
    device: Any, sizes: set[int], dtypes: Mapping[str, np.dtype[Any]] = MappingProxyType({})
) -> None:
    """Checks that batches of some sizes and dtypes can be put on a device.

    Args:
      device: as for `Pipeline.iterate`.
      sizes: lengths of the batch axis that occur.
      dtypes: of the fields, as far as they are known before a batch is read.

    Raises:
      TypeError: it is neither a device nor a sharding, or JAX has no dtype for a field's numbers.
      ValueError: a sharding that cannot split an axis of such a length.
    """
    if not isinstance(device, jax.Device | jax.sharding.Sharding):
        raise TypeError(
            f"device must be a jax.Device (such as jax.devices()[0]) or a Sharding, not {device!r}"
        )
    for name, dtype in dtypes.items():
        if not _stays(dtype):
            _check_dtype(name, dtype)
    if isinstance(device, jax.Device):
        return
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


def _stays(dtype: np.dtype[Any]) -> bool:
    """Whether fields of a dtype stay on the host: strings, times and structures."""
    return dtype.kind in "USMm" or dtype.names is not None


def _in_order_of_jax(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, in the byte order of this machine."""
    _check_dtype(name, array.dtype)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    if not _is_jax_dtype(dtype.newbyteorder("=")):
        raise TypeError(
            f"field {name!r} has dtype {dtype}, and JAX {jax.__version__} has no arrays of this dtype: have a "
            "transform cast the field or leave it out, or put the batch on the device yourself"
        )


@functools.lru_cache
def _is_jax_dtype(dtype: np.dtype[Any]) -> bool:
    try:
        # Only a transfer shows it: some dtypes that JAX lists have no form on its devices.
        jax.device_put(np.zeros(1, dtype), jax.local_devices()[0])
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
