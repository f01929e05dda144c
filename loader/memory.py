"""Memory without a name, by which processes hand batches to each other.

It is known by a descriptor alone, so it ends with the last process that has it, however that ends:
there is nothing in ``/dev/shm`` to be left behind, nor is its size limited by what is mounted there.
"""

import math
import mmap
import os
import tempfile
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.batching import Batch

#: A field of a batch in such memory: its name, dtype, shape and place.
Described = list[tuple[str, np.dtype[Any], tuple[int, ...], int]]

_INT64: Final = np.dtype(np.int64)
#: Where arrays may begin, as NumPy's fastest loops want it.
ALIGNMENT: Final = 64


def new_memory(label: str) -> int:
    """A descriptor of new, empty memory, which the caller closes.

    Args:
      label: what tools such as ``lsof`` show.
    """
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create(label)
    with tempfile.TemporaryFile() as file:  # its name is gone before anybody could see it
        return os.dup(file.fileno())


class BatchMemory:
    """A place in memory for one batch at a time, written by one process and read by another.

    Args:
      descriptor: of the memory; the same memory in both processes.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        # It stays as large as the largest batch so far, and mapped: fresh pages cost more than a copy.
        self._mapped: mmap.mmap | None = None
        self._size = 0

    def put(self, batch: Batch) -> Described:
        """Copies the arrays of a batch here, over what was here; returns what `get` needs."""
        described: Described = []
        end = 0
        for name, array in batch.items():
            described.append((name, array.dtype, array.shape, end))
            end = aligned(end + array.nbytes)
        if end > self._size:
            os.ftruncate(self.descriptor, end)
        for name, dtype, shape, at in described:
            self._view(end, dtype, shape, at)[...] = batch[name]
        return described

    def get(self, described: Described) -> Batch:
        """The batch that was put here: arrays of this process's own."""
        end = max((at + _bytes(dtype, shape) for _, dtype, shape, at in described), default=0)
        return {
            name: self._view(end, dtype, shape, at).copy() for name, dtype, shape, at in described
        }

    def close(self) -> None:
        """Lets go of the memory, and of the descriptor."""
        self._mapped = None
        os.close(self.descriptor)

    def _view(
        self, end: int, dtype: np.dtype[Any], shape: tuple[int, ...], at: int
    ) -> npt.NDArray[Any]:
        """An array in the memory, of which at least ``end`` bytes are needed."""
        if _bytes(dtype, shape) == 0:
            return np.empty(shape, dtype)
        if self._mapped is None or end > self._size:
            self._mapped, self._size = mmap.mmap(self.descriptor, end), end
        return np.ndarray(shape, dtype, self._mapped, at)


class SharedNumber:
    """A number in such memory: one process sets it, and another one sees it at once, without a call.

    Args:
      descriptor: of the memory; the same memory in both processes.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        os.ftruncate(descriptor, _INT64.itemsize)
        # Aligned, so that it is never seen half written.
        self._value = np.ndarray((), _INT64, mmap.mmap(descriptor, _INT64.itemsize))

    def set(self, value: int) -> None:
        """Writes it."""
        self._value[()] = value

    def get(self) -> int:
        """Reads it; 0 where nothing was written."""
        return int(self._value)

    def close(self) -> None:
        """Lets go of the descriptor; the number stays readable here."""
        os.close(self.descriptor)


def aligned(size: int) -> int:
    """The first place from ``size`` on where an array may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
