"""The data that a process and its workers pass to each other: the stream one way, batches the other.

Both use memory without a name, reached by descriptors alone. It is freed when the last process that has it
ends, however it ends, and nothing is left in ``/dev/shm``. The stream is pickled by the process that starts
the workers and unpickled by these workers only; nothing here is read from a file.
"""

import io
import itertools
import math
import mmap
import os
import pathlib
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.batching import Batch
from loader.errors import DataChangedError

#: Arrays of at least this many bytes are shared instead of copied to each worker.
SHARED_FROM_BYTES: Final = 1 << 16
_COMPARED_BYTES: Final = 1 << 16
#: Systems write less than 2 GiB at once.
_WRITTEN_BYTES: Final = 1 << 30
_ALIGNMENT: Final = 64
_INT64: Final = np.dtype(np.int64)
#: How a pickle names the main module: of a program, and of a process spawned by `multiprocessing`.
_MAIN_NAMES: Final = tuple(
    pickle.SHORT_BINUNICODE + bytes([len(name)]) + name for name in (b"__main__", b"__mp_main__")
)

#: A field of a batch in a `BatchMemory`: its name, dtype, shape and place.
Described = list[tuple[str, np.dtype[Any], tuple[int, ...], int]]


def new_memory(label: str) -> int:
    """Descriptor of new, empty memory, which the caller closes.

    Args:
      label: shown by tools such as ``lsof``.
    """
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create(label)
    with tempfile.TemporaryFile() as file:  # its name is removed at once
        return os.dup(file.fileno())


class BatchMemory:
    """Memory for one batch at a time, written by one process and read by another.

    Args:
      descriptor: of the memory; both processes have the same memory.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        if os.fstat(descriptor).st_size < _ALIGNMENT:
            os.ftruncate(descriptor, _ALIGNMENT)
        # Aligned, so it is never read half written. Other threads read it while `_mapped` is replaced.
        self._number = np.ndarray((), _INT64, mmap.mmap(descriptor, _ALIGNMENT))
        # It keeps the size of the largest batch so far, and stays mapped: new pages cost more than a copy.
        self._mapped: mmap.mmap | None = None
        self._size = 0

    @property
    def number(self) -> int:
        """A number that the writer sets and the reader sees at once; 0 at first."""
        return int(self._number)

    @number.setter
    def number(self, value: int) -> None:
        self._number[()] = value

    def put(self, batch: Batch) -> Described:
        """Copy a batch here, over the one before; returns the arguments of `get`."""
        described: Described = []
        end = _ALIGNMENT
        for name, array in batch.items():
            described.append((name, array.dtype, array.shape, end))
            end = _aligned(end + array.nbytes)
        if end > self._size:
            os.ftruncate(self.descriptor, end)
        for name, dtype, shape, at in described:
            self._view(end, dtype, shape, at)[...] = batch[name]
        return described

    def get(self, described: Described) -> Batch:
        """A copy of the batch that was put here."""
        end = max((at + _bytes(dtype, shape) for _, dtype, shape, at in described), default=0)
        return {
            name: self._view(end, dtype, shape, at).copy() for name, dtype, shape, at in described
        }

    def close(self) -> None:
        """Close the descriptor; ``number`` stays readable."""
        self._mapped = None
        os.close(self.descriptor)

    def _view(
        self, end: int, dtype: np.dtype[Any], shape: tuple[int, ...], at: int
    ) -> npt.NDArray[Any]:
        """An array in the first ``end`` bytes of the memory."""
        if _bytes(dtype, shape) == 0:
            return np.empty(shape, dtype)
        if self._mapped is None or end > self._size:
            self._mapped, self._size = mmap.mmap(self.descriptor, end), end
        return np.ndarray(shape, dtype, self._mapped, at)


class Parcel:
    """A pickled value and its large arrays, in memory without a name.

    Args:
      value: anything that can be pickled.

    Attributes:
      memory: its descriptor.
      sizes: bytes of the pickle, and of each array after it.
      needs_main: whether something in it is defined in the program's main module.

    Raises:
      Exception: the value cannot be pickled; see `check_sendable`.
    """

    def __init__(self, value: Any) -> None:
        pickled, buffers = _pickled(value)
        self.needs_main = _names_main(pickled)
        pieces = [memoryview(pickled), *buffers]
        self.sizes = [len(piece) for piece in pieces]
        self.memory = new_memory("regrain-parcel")
        try:
            for piece, at in zip(pieces, _places(self.sizes), strict=True):
                _write(self.memory, piece, at)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor; processes that have mapped the memory keep it."""
        os.close(self.memory)


def unpack(memory: int, sizes: Sequence[int]) -> Any:
    """The value of a `Parcel`. A process's writes into its arrays stay its own.

    Raises:
      Exception: the value cannot be unpickled.
    """
    places = _places(sizes)
    # Pages are shared until this process writes to them.
    mapped = memoryview(mmap.mmap(memory, places[-1] + sizes[-1], access=mmap.ACCESS_COPY))
    pickled, *buffers = (mapped[at : at + size] for at, size in zip(places, sizes, strict=True))
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 (of the process that started this one)


def check_sendable(name: str, value: Any) -> None:
    """Check that a value can be sent to worker processes, without a copy of its large arrays.

    Args:
      name: of the value, for the message.
      value: what is to be sent.

    Raises:
      TypeError: it cannot; the message names the part at fault, and what to do.
    """
    if _fault(value) is None:
        return
    where, part, why = _culprit(name, value, set())
    if isinstance(part, types.FunctionType | type):
        way_out = (
            "Define it with def or class at the top level of a module (no lambda), and import it from "
            "there."
        )
    else:
        way_out = (
            "What is open or running belongs to one process: let its owner leave it out in __getstate__, "
            "and open it again when it is first used."
        )
    raise TypeError(
        f"worker processes get a copy of the {name}, and {where}, {part!r:.100}, cannot be sent: {why}. "
        + way_out
    )


def main_module() -> dict[str, str]:
    """The argument with which `multiprocessing.spawn.prepare` imports the main module; empty if it cannot."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        # `prepare` does not import the __main__ of a package.
        runs_at_once = name == "__main__" or name.endswith(".__main__")
        return {} if runs_at_once else {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"init_main_from_path": str(pathlib.Path(path).absolute())}


# --- pickling -------------------------------------------------------------------------------------


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the large arrays beside it."""
    pickled, buffers = io.BytesIO(), list[memoryview]()
    _Pickler(pickled, buffers.append).dump(value)
    return pickled.getvalue(), buffers


class _Pickler(pickle.Pickler):
    """Keeps large arrays out of the pickle; arrays mapped from a file are sent as its name."""

    def __init__(self, file: io.BytesIO, take: Callable[[memoryview], None]) -> None:
        def is_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if len(view) < SHARED_FROM_BYTES:
                return True
            take(view)
            return False

        super().__init__(file, protocol=5, buffer_callback=is_in_pickle)

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (np.ndarray, np.memmap) or value.nbytes < SHARED_FROM_BYTES:
            return NotImplemented
        mapping = _mapping_of(value)
        if mapping is not None:
            return _mapped, mapping
        if type(value) is np.memmap or not (value.flags.c_contiguous or value.flags.f_contiguous):
            # NumPy would put these into the pickle.
            return np.asarray, (np.ascontiguousarray(value),)
        return NotImplemented


def _mapping_of(array: npt.NDArray[Any]) -> tuple[Any, ...] | None:
    """Arguments of `_mapped` for an array mapped from a file that is still the one of its name."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.mode == "c" or root.filename is None:
        return None
    low, high = np.lib.array_utils.byte_bounds(array)
    start = root.offset + low - np.lib.array_utils.byte_bounds(root)[0]
    whole = np.frombuffer(root.base, np.uint8)
    if not _is_file_of(whole.ctypes.data, root.filename):
        return None
    low_in_whole = low - whole.ctypes.data
    mapped = whole[low_in_whole : low_in_whole + high - low]
    try:
        found = os.stat(root.filename)  # noqa: PTH116 (it may be bytes)
        again = np.memmap(root.filename, np.uint8, "r", start, (high - low,))
    except (OSError, ValueError):
        return None
    # Where the system does not show its mappings, another file of that name shows in its ends at most.
    ends = slice(0, _COMPARED_BYTES), slice(-_COMPARED_BYTES, None)
    if not all(np.array_equal(mapped[end], again[end]) for end in ends):
        return None
    first = array.ctypes.data - low
    file = root.filename, (found.st_dev, found.st_ino)
    return *file, start, high - low, array.dtype, array.shape, array.strides, first


def _is_file_of(address: int, path: str | os.PathLike[str]) -> bool:
    """Whether the memory at an address is mapped from a file; True on systems without ``/proc``."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return True
    for line in maps.splitlines():
        low, _, high = line.partition(" ")[0].partition("-")
        if int(low, 16) <= address < int(high, 16):
            # The path follows the file when it is renamed, and ends in " (deleted)" when it is gone.
            shown = line.split(maxsplit=5)[5:]
            try:
                return bool(shown) and pathlib.Path(shown[0]).samefile(path)
            except OSError:
                return False
    return False


def _mapped(
    path: str | os.PathLike[str],
    identity: tuple[int, int],
    start: int,
    length: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
) -> npt.NDArray[Any]:
    """Map an array over ``length`` bytes of a file from ``start`` on, its first element ``first`` bytes in.

    Raises:
      DataChangedError: the file was replaced or removed after it was sent.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (NumPy maps an open file)
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != identity:
                raise DataChangedError(
                    f"file {os.fspath(path)!r}, of a memory-mapped array, was replaced: this process would read "
                    "other records than the process that has the old file open. Open the source again, and "
                    "resume from a checkpoint, which compares them"
                )
            extent = np.memmap(file, np.uint8, "r", start, (length,))
    except FileNotFoundError as error:
        raise DataChangedError(
            f"file {os.fspath(path)!r}, of a memory-mapped array, is gone; restore it, or open the source again"
        ) from error
    return np.ndarray(shape, dtype, extent, first, strides)


def _write(memory: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(memory, data[:_WRITTEN_BYTES], at)
        data, at = data[done:], at + done


def _places(sizes: Sequence[int]) -> list[int]:
    """Offsets of pieces of these sizes."""
    return [0, *itertools.accumulate(map(_aligned, sizes[:-1]))]


def _aligned(size: int) -> int:
    """The first place from ``size`` on where NumPy's fastest loops may start."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


# --- what cannot be sent --------------------------------------------------------------------------


def _names_main(pickled: bytes) -> bool:
    return any(name in pickled for name in _MAIN_NAMES)


def _fault(value: Any) -> str | None:
    """Why a value cannot be sent, if it cannot."""
    try:
        pickled, _ = _pickled(value)
    except Exception as error:  # noqa: BLE001 (classes define their own pickling, and raise anything)
        return f"{type(error).__name__}: {error}"
    if _names_main(pickled) and not main_module():
        return (
            "it is defined in a program that no other process can import (a notebook, a prompt, "
            "python -c, or the __main__ of a package)"
        )
    return None


def _culprit(name: str, value: Any, seen: set[int]) -> tuple[str, Any, str]:
    """The innermost part of a value that cannot be sent: the expression for it, the part, and why."""
    seen.add(id(value))
    for part_name, part in _parts(name, value):
        if id(part) not in seen and _fault(part) is not None:
            return _culprit(part_name, part, seen)
    return name, value, _fault(value) or "it changes while it is pickled"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value that are pickled with it, each after the expression for it."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, types.FunctionType | type | np.ndarray):
        try:
            reduced = value.__reduce_ex__(5)
        except Exception:  # noqa: BLE001 (the value itself is at fault)
            return
        if isinstance(reduced, str):
            return
        _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        # The state of a class with slots is two of them: __dict__ and slots.
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                yield from ((f"{name}.{key}", inner) for key, inner in part.items())
            else:
                yield name, part
        yield from ((name, part) for part in arguments)
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(items or ()))
        yield from ((f"{name}[{key!r}]", part) for key, part in pairs or ())
