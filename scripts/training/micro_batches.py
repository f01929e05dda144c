"""Sums over a batch whose bits do not depend on how many devices share the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scripts.training.processes import DATA
from scripts.training.task import Batch


def check_micro_batches(number: int, mesh: Mesh) -> None:
    """Checks that devices can share micro-batches.

    Raises:
      ValueError: there are none, or they cannot be shared out equally.
    """
    if number < 1:
        raise ValueError(f"[train]: 'micro_batches' must be at least 1, not {number}")
    if number % mesh.size:
        raise ValueError(
            f"[train]: {number} micro_batches cannot be shared out equally among {mesh.size} devices: "
            f"use a multiple of {mesh.size}, or a number of processes that divides it"
        )


def sum_in_order(
    function: Callable[[Any, jax.Array, Batch], Any],
    number: int,
    mesh: Mesh,
    params: Any,
    key: jax.Array,
    batch: Batch,
) -> Any:
    """The sum of what a function gives for each micro-batch, a stretch of the batch, added up in turn.

    Floating-point sums depend on their order. Here neither the order nor the shapes with which the
    function is compiled know how many devices there are: each computes the micro-batches that it holds
    one by one, and gets those of all others. That costs ``number`` times the memory of a result, and
    its transfer; where a sum may be in any order, XLA's own is cheaper.

    Args:
      function: of the parameters, a PRNG key and a micro-batch; gives a tree of arrays.
      number: how many micro-batches there are; a multiple of the devices.
      mesh: the devices that share the batch.
      params: the same on all of them.
      key: from which each micro-batch gets a key of its own.
      batch: arrays with a leading axis of records, shared out along it.

    Raises:
      ValueError: the records cannot be divided into ``number`` equal micro-batches.
    """
    records = len(jax.tree.leaves(batch)[0])
    if records % number:
        raise ValueError(
            f"[train]: {number} micro_batches do not divide a batch of {records} records: use a "
            'number that does, and final_batch = "pad" or "drop", which make all batches equal'
        )

    first = {name: array[: records // number] for name, array in batch.items()}
    result = jax.eval_shape(function, params, key, first)
    _, unflatten = ravel_pytree(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
    )

    def of_share(params: Any, keys: jax.Array, share: Batch) -> jax.Array:
        micro_batches = {
            name: array.reshape(len(keys), records // number, *array.shape[1:])
            for name, array in share.items()
        }
        # Each result as one array, for one transfer.
        found: jax.Array = jax.lax.map(
            lambda one: ravel_pytree(function(params, *one))[0], (keys, micro_batches)
        )
        return found

    def of_shares(params: Any, keys: jax.Array, batch: Batch) -> jax.Array:
        # Of parameters that all devices have in common, a gradient would be added up over all of them.
        own = jax.lax.pcast(params, DATA, to="varying")
        return of_share(own, keys, batch)

    keys = jax.random.split(key, number)
    if mesh.size == 1:
        each = of_share(params, keys, batch)
    else:
        shared, on_all = PartitionSpec(DATA), PartitionSpec()
        share_out = jax.shard_map(
            of_shares, mesh=mesh, in_specs=(on_all, shared, shared), out_specs=shared
        )
        each = share_out(params, keys, dict(batch))
        each = jax.lax.with_sharding_constraint(each, NamedSharding(mesh, on_all))
    # Else the sum could be compiled together with what comes before it, which depends on the devices.
    each = jax.lax.optimization_barrier(each)
    total, _ = jax.lax.scan(lambda sum_, one: (sum_ + one, None), jnp.zeros_like(each[0]), each)
    return unflatten(total)
