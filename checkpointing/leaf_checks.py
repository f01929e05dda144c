"""Checks of the leaves that a save writes: equal copies, and memory that nobody else writes to.

Copies: Orbax takes a part from each copy of a replicated array, so all copies must be equal. Devices
compute a checksum of each (see `checksums`), which is compared in the background. A leaf that every process
has on its own devices, or in NumPy, is compared by SHA-256.

Memory: on a CPU, a JAX array may share its memory with a NumPy array, and JAX does not show it. Each leaf is
sampled before `save` returns, and compared with its sample when it has been written.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from checkpointing import checksums
from checkpointing.together.processes import Processes
from checkpointing.train_state import is_key

_SAMPLED_VALUES: Final = 64
_SHOWN: Final = 4
_SHOWN_DIGITS: Final = 16
#: JAX packs these into fewer bits than NumPy, so that no memory is shared, and a view is a copy.
_PACKED: Final = frozenset(map(np.dtype, ("int2", "int4", "float4_e2m1fn")))


class LeafChecks:
    """The checks of one save, or of the train state that a run begins with.

    Args:
      leaves: the leaves of the train state by path.
      arrays: the array that is stored for each, from `to_arrays`.
    """

    def __init__(self, leaves: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self._checksums = checksums.start(
            {
                path: jax.random.key_data(leaf) if is_key(leaf) else leaf
                for path, leaf in leaves.items()
                if isinstance(leaf, jax.Array)
            }
        )
        self._samples: list[tuple[str, np.ndarray[Any, Any], bytes]] = []

    def check_copies(self, number: int, processes: Processes) -> None:
        """Raise ValueError if copies of a leaf differ between devices or processes.

        All processes call it, with the same number from `Processes.number`.
        """
        own: dict[int, dict[str, str]] | None = None
        theirs: dict[int, dict[str, str] | None] = {}
        try:
            own = self._digests(processes)
        finally:  # others wait for what this process publishes
            if processes.are_several:
                published = None if own is None else own.get(processes.index, {})
                others = [] if own is None else [one for one in own if one != processes.index]
                theirs = processes.exchange(number, "copies", published, others)
        for other, digests in theirs.items():
            if digests is not None:  # else that process raises its own error
                _check_equal(own[other], digests, processes.index, other)

    def take_samples(self) -> None:
        """Sample the leaves in a CPU's memory, once they have been computed."""
        self._samples = [
            (path, view, _sample(view))
            for path, array in self._arrays.items()
            if isinstance(array, jax.Array)
            for view in _host_views(array)
        ]
        # Devices may free the arrays that the caller drops.
        self._arrays = {
            path: one for path, one in self._arrays.items() if isinstance(one, np.ndarray)
        }

    def check_samples(self) -> None:
        """Raise ValueError if a leaf in a CPU's memory has changed since `take_samples`."""
        changed = [path for path, view, sample in self._samples if _sample(view) != sample]
        if changed:
            raise ValueError(
                f"train state leaf {_listed(changed)} changed while it was being written. It shares its "
                "memory with a NumPy array (by jax.device_put or DLPack) that was written to meanwhile. "
                "Copy it into JAX: jnp.array(x, copy=True)"
            )

    def _digests(self, processes: Processes) -> dict[int, dict[str, str]]:
        """Return a digest of each leaf, or shard, by the first process that has a copy of it."""
        digests: dict[int, dict[str, str]] = {}
        for one in self._checksums:
            for path, found in one.by_device().items():
                for name, devices, digest in _shards(path, one.arrays[path], found):
                    holders = {device.process_index for device in devices}
                    if len(holders) > 1:
                        digests.setdefault(min(holders), {})[name] = digest
        if processes.are_several:
            of_first = digests.setdefault(0, {})
            for path, array in self._arrays.items():
                if isinstance(array, np.ndarray):
                    of_first[path] = hashlib.sha256(
                        np.ascontiguousarray(array).tobytes()
                    ).hexdigest()
        return digests


def _check_equal(
    own: Mapping[str, str], theirs: Mapping[str, str], process: int, other: int
) -> None:
    differ = [name for name, digest in own.items() if theirs.get(name, digest) != digest]
    if not differ:
        return
    mine, other_one = (digests[differ[0]][:_SHOWN_DIGITS] for digests in (own, theirs))
    raise ValueError(
        f"train state leaf {_listed(differ)} differs between processes: its digest is {mine} in process "
        f"{process} and {other_one} in process {other}. A checkpoint holds one copy, so every process must "
        "have the same. For random numbers that differ between processes, keep one key in the train state "
        "and use jax.random.fold_in(key, jax.process_index())"
    )


def _shards(
    path: str, leaf: jax.ShapeDtypeStruct, found: Mapping[Any, str]
) -> Iterator[tuple[str, list[Any], str]]:
    """Yield name, devices and checksum of each shard; raise ValueError if its copies here differ."""
    devices_by_index: dict[tuple[Any, ...], list[Any]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        place = tuple(part.indices(side)[:2] for part, side in zip(index, leaf.shape, strict=True))
        devices_by_index.setdefault(place, []).append(device)
    for place, devices in devices_by_index.items():
        sides = ",".join(f"{start}:{stop}" for start, stop in place)
        name = path if len(devices_by_index) == 1 else f"{path}[{sides}]"
        here = [device for device in devices if device in found]
        different = [device for device in here if found[device] != found[here[0]]]
        if different:
            raise ValueError(
                f"train state leaf {name} is replicated, but {_listed(different)} hold other values than "
                f"{here[0]}. A checkpoint holds one copy, so all must be equal. Average what each device "
                "computes (jax.lax.pmean); for random numbers that differ between devices, keep one key in "
                "the train state and fold the device's number in where it is used; or shard the leaf"
            )
        if here:
            yield name, devices, found[here[0]]


def _listed(names: Sequence[Any]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(str, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _host_views(array: jax.Array) -> list[np.ndarray[Any, Any]]:
    """Return the memory of an array on CPU devices of this process, one view for each."""
    device: Any = next(iter(array.sharding.device_set))
    if device.platform != "cpu" or array.dtype in _PACKED:
        return []
    if array.sharding.num_devices == 1:
        return [np.asarray(array)]
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def _sample(view: np.ndarray[Any, Any]) -> bytes:
    """Return evenly spaced values of an array, the last one among them."""
    flat = view.ravel(order="K")  # a view, in whichever order the memory has it
    return flat[:: -max(1, flat.size // _SAMPLED_VALUES)].tobytes()
