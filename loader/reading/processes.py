"""The rows of each batch that a JAX process reads, and the global arrays that all processes make together.

The stream is global: an iterator's state and the batches do not depend on the number of processes. Process p of P
reads rows ``p * B / P`` to ``(p + 1) * B / P`` of each batch.
"""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np

from loader.config import PipelineConfig


@dataclasses.dataclass(frozen=True)
class Shard:
    """A share of each batch: number ``index`` of ``count`` equal shares, in order."""

    index: int = 0
    count: int = 1


WHOLE: Final = Shard()


def shard_of_process(
    process_index: Any, process_count: Any, sharding: "jax.sharding.Sharding | None" = None
) -> Shard:
    """The requested share, by default this process's own.

    Args:
      process_index: number of the process; by default this process's under `jax.distributed`, and without
        that the whole batch.
      process_count: number of processes.
      sharding: of the global batch, if it is known. By default this process's share is then the one that
        its devices hold, which other processes may hold too.

    Raises:
      TypeError, ValueError: one without the other, not integers, or out of range.
    """
    several = jax.distributed.is_initialized()
    held = _shard_of_sharding(sharding) if several and sharding is not None else None
    if process_index is None and process_count is None:
        if not several:
            return WHOLE
        return held or Shard(jax.process_index(), jax.process_count())
    if process_index is None or process_count is None:
        raise ValueError("give process_index and process_count both, or neither")
    for name, value in (("process_index", process_index), ("process_count", process_count)):
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, not {value!r}")
    shard = Shard(operator.index(process_index), operator.index(process_count))
    if not 0 <= shard.index < shard.count:
        raise ValueError(
            f"process_index is {shard.index}, and process_count {shard.count}: processes are "
            "numbered from 0 to one less than their count"
        )
    if held not in (None, shard):
        raise ValueError(
            f"share {shard.index} of {shard.count} of each batch is asked for, and the devices of "
            f"this process hold share {held.index} of {held.count}, by {sharding}"
        )
    return shard


def check_shard(config: PipelineConfig, shard: Shard) -> None:
    """Check that each batch of a stream can be divided into equal shares.

    Raises:
      ValueError: it cannot; says why and what to do.
    """
    if shard.count == 1:
        return
    if config.final_batch == "partial":
        raise ValueError(
            f'final_batch="partial" gives an epoch\'s last batch fewer rows, which {shard.count} '
            "processes cannot share out equally, and all have to call the training step with equal "
            'shapes. Use "pad" (the same records, with a mask) or "drop"'
        )
    if config.batch_size % shard.count:
        raise ValueError(
            f"batch_size {config.batch_size} cannot be shared out equally among {shard.count} "
            f"processes: use a multiple of {shard.count}, or a number of processes that divides it"
        )


def global_batch(batch: Mapping[str, Any], sharding: jax.sharding.Sharding) -> dict[str, Any]:
    """The global `jax.Array` of each field, from this process's rows.

    Args:
      batch: fields with a leading axis of this process's rows, of dtypes that JAX has.
      sharding: of the global batch; it splits the batch axis only, over any axes of the mesh.

    Returns:
      The fields as global arrays with the leading axis of the whole batch.

    Raises:
      ValueError: this process's devices do not hold consecutive rows, or another number of rows.
    """
    shard = _shard_of_sharding(sharding)
    return {
        name: jax.make_array_from_process_local_data(
            sharding, array, (len(array) * shard.count, *array.shape[1:])
        )
        for name, array in batch.items()
    }


def _shard_of_sharding(sharding: jax.sharding.Sharding) -> Shard:
    """The share of a batch that this process's devices hold; other processes may hold it too."""
    size = _SIZE_THAT_DIVIDES * len(sharding.device_set)
    held = {
        (rows[0].start or 0, size if rows[0].stop is None else rows[0].stop)
        for rows in sharding.addressable_devices_indices_map((size,)).values()
        if rows is not None
    }
    if not held:
        raise ValueError(
            f"none of the devices of {sharding} is one of process {jax.process_index()}, which would have "
            "no rows of any batch: use a mesh with devices of every process"
        )
    first, end = min(start for start, _ in held), max(stop for _, stop in held)
    rows = end - first
    if sum(stop - start for start, stop in held) != rows or size % rows or first % rows:
        raise ValueError(
            f"the devices of process {jax.process_index()} hold rows of a batch that are no equal "
            f"share in a row, by {sharding}: order the mesh so that each process's devices stand "
            "together along the batch axis"
        )
    return Shard(first // rows, size // rows)


_SIZE_THAT_DIVIDES: Final = 1 << 10
