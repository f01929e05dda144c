"""Several processes that train one model: how one joins the others, and what is on whose devices."""

import dataclasses
from collections.abc import Callable
from typing import Final, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import loader
from scripts.training.task import Batch, State

#: The axis along which a batch is shared out.
DATA: Final = "data"


def join(
    coordinator: str | None,
    index: int | None,
    count: int | None,
    heartbeat_seconds: int,
    patience_seconds: int,
) -> None:
    """Makes this process one of several, before it does anything else with JAX; or leaves it alone.

    Args:
      coordinator: host and port at which the first process is reached by the others.
      index: number of this one, from 0.
      count: how many there are. With 1, and where all three are ``None``, this one stays alone.
      heartbeat_seconds: a process without a sign of life for so long is taken for dead, and all end.
      patience_seconds: for the others to be there at the start, and to be done at the end.

    Raises:
      ValueError: some of the first three without the others, or a number out of range.
    """
    given = {"--coordinator": coordinator, "--process-index": index, "--process-count": count}
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing or index is None or count is None:
        raise ValueError(
            f"{' and '.join(missing)} missing: each of several processes needs "
            f"{', '.join(given)}; a process alone needs none of them"
        )
    if not 0 <= index < count:
        raise ValueError(
            f"--process-index is {index}, and --process-count {count}: processes are numbered from 0 "
            "to one less than their count"
        )
    if count > 1:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            initialization_timeout=patience_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=patience_seconds,
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is on which device: the train state whole on each of them, and of each batch a share.

    Attributes:
      mesh: all devices of all processes, those of each one together; of a process alone the first.
    """

    mesh: Mesh

    @classmethod
    def of_all_processes(cls) -> Self:
        """That of the processes that have joined."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        if jax.process_count() == 1:
            devices = devices[:1]
        return cls(Mesh(np.array(devices), (DATA,)))

    def init(self, make: Callable[[], State]) -> State:
        """The train state that a function makes."""
        state: State = (
            jax.jit(make, out_shardings=NamedSharding(self.mesh, PartitionSpec()))()
            if self._are_several
            else jax.jit(make)()
        )
        return state

    def batch(self, batch: Batch) -> Batch:
        """A batch of which this process gives its rows."""
        if not self._are_several:
            return batch
        return loader.global_batch(batch, NamedSharding(self.mesh, PartitionSpec(DATA)))

    def here(self, state: State) -> State:
        """This process's own copy of the train state."""
        if not self._are_several:
            return state
        copy: State = jax.tree.map(lambda array: array.addressable_data(0), state)
        return copy

    @property
    def _are_several(self) -> bool:
        return self.mesh.size > 1
