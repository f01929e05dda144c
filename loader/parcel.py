"""What is sent to worker processes: pickled, with its large arrays once in memory that all of them map.

Nothing here is ever read from a file: a parcel is made by a process for those that it starts itself.
"""

import io
import itertools
import mmap
import os
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from loader.errors import DataChangedError
from loader.memory import aligned, new_memory

#: Arrays of at least so many bytes stand in memory that processes share.
SHARED_FROM_BYTES: Final = 1 << 16
_COMPARED_BYTES: Final = 1 << 16
#: The system writes less than 2 GiB at once.
_WRITTEN_BYTES: Final = 1 << 30
#: How a pickle names the main module: of a program, and of one that `multiprocessing` has spawned.
_MAIN_NAMES: Final = tuple(
    pickle.SHORT_BINUNICODE + bytes([len(name)]) + name for name in (b"__main__", b"__mp_main__")
)


class Parcel:
    """A pickled value and its large arrays, in memory without a name.

    Args:
      value: of any kind that can be pickled.

    Attributes:
      memory: its descriptor.
      sizes: bytes of the pickle, and of each array behind it.
      needs_main: whether something in it is defined in the program's main module.

    Raises:
      Exception: whatever keeps the value from being pickled; see `check_sendable`.
    """

    def __init__(self, value: Any) -> None:
        pickled, buffers = io.BytesIO(), list[memoryview]()
        _Pickler(pickled, buffers.append).dump(value)
        pieces = [pickled.getbuffer(), *buffers]
        self.needs_main = _names_main(pickled.getvalue())
        self.sizes = [len(piece) for piece in pieces]
        self.memory = new_memory("regrain-parcel")
        try:
            for piece, at in zip(pieces, _places(self.sizes), strict=True):
                _write(self.memory, piece, at)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the memory; who has mapped it keeps it."""
        os.close(self.memory)


def unpack(memory: int, sizes: Sequence[int]) -> Any:
    """The value of a `Parcel`. What a process writes into its arrays, it alone sees.

    Raises:
      Exception: whatever keeps the value from being unpickled.
    """
    places = _places(sizes)
    # Not copied as long as nobody writes to it.
    mapped = memoryview(mmap.mmap(memory, places[-1] + sizes[-1], access=mmap.ACCESS_COPY))
    pickled, *buffers = (mapped[at : at + size] for at, size in zip(places, sizes, strict=True))
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 (of the process that started this one)


def check_sendable(name: str, value: Any) -> None:
    """Checks that a value can be sent to worker processes.

    Args:
      name: of the value, for the message.
      value: what is to be sent. It is pickled into nothing: large arrays cost no time here.

    Raises:
      TypeError: it cannot; names the part of it that is at fault, and what to do.
    """
    if _fault(value) is None:
        return
    where, part, why = _culprit(name, value, set())
    raise TypeError(
        f"worker processes get a copy of the {name}, and {where}, {part!r:.100}, cannot be sent: {why}. "
        + _way_out(part)
    )


def _write(memory: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(memory, data[:_WRITTEN_BYTES], at)
        data, at = data[done:], at + done


class _Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


class _Pickler(pickle.Pickler):
    """Keeps large arrays out of the pickle, and maps from its file what is mapped from one."""

    def __init__(self, file: _Writable, take: Callable[[memoryview], None]) -> None:
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
        again = _mapping_of(value)
        if again is not None:
            return _mapped, again
        if type(value) is np.memmap or not (value.flags.c_contiguous or value.flags.f_contiguous):
            # NumPy would put these into the pickle.
            return np.asarray, (np.ascontiguousarray(value),)
        return NotImplemented


def _mapping_of(array: npt.NDArray[Any]) -> tuple[Any, ...] | None:
    """What `_mapped` makes an array of, if it is mapped from a file that is still there."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.mode == "c" or root.filename is None:
        return None
    low, high = np.lib.array_utils.byte_bounds(array)
    start = root.offset + low - np.lib.array_utils.byte_bounds(root)[0]
    whole = np.frombuffer(root.base, np.uint8)
    low_in_whole = low - whole.ctypes.data
    mapped = whole[low_in_whole : low_in_whole + high - low]
    try:
        found = os.stat(root.filename)  # noqa: PTH116
        again = np.memmap(root.filename, np.uint8, "r", start, (high - low,))
    except (OSError, ValueError):
        return None
    # Another file may have that name by now.
    ends = slice(0, _COMPARED_BYTES), slice(-_COMPARED_BYTES, None)
    if not _same_file(low, again.ctypes.data) or not all(
        np.array_equal(mapped[end], again[end]) for end in ends
    ):
        return None
    first = array.ctypes.data - low
    file = root.filename, (found.st_dev, found.st_ino)
    return *file, start, high - low, array.dtype, array.shape, array.strides, first


def _same_file(first: int, second: int) -> bool:
    """Whether two addresses are mapped from one file, by the kernel's list; true on systems without one."""
    try:
        lines = pathlib.Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return True
    files: dict[int, tuple[str, str]] = {}
    for line in lines:  # such as "7f0000000000-7f0000001000 r--s 00000000 08:01 1234 /data/x.npy"
        extent, _, _, device, inode = line.split(maxsplit=5)[:5]
        start, stop = (int(address, 16) for address in extent.split("-"))
        files |= {one: (device, inode) for one in (first, second) if start <= one < stop}
    return files.get(first) == files.get(second)


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
    """An array over ``length`` bytes of a file from ``start`` on, its first element ``first`` bytes in.

    Raises:
      DataChangedError: another file has that name by now, or none.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (NumPy maps an open file)
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != identity:
                raise DataChangedError(
                    f"file {os.fspath(path)!r}, of a memory-mapped array, was replaced: this process would read "
                    "other records than the one that has the old file open. Open the source again, and resume "
                    "from a checkpoint, which compares them"
                )
            extent = np.memmap(file, np.uint8, "r", start, (length,))
    except FileNotFoundError as error:
        raise DataChangedError(
            f"file {os.fspath(path)!r}, of a memory-mapped array, is gone; put it back, or open the source again"
        ) from error
    return np.ndarray(shape, dtype, extent, first, strides)


def _places(sizes: Sequence[int]) -> list[int]:
    """Where pieces of so many bytes begin."""
    return [0, *itertools.accumulate(map(aligned, sizes[:-1]))]


# --- what cannot be sent --------------------------------------------------------------------------


def _names_main(pickled: Any) -> bool:
    return any(name in pickled for name in _MAIN_NAMES)


class _Nowhere:
    """A file for a pickle that nobody needs."""

    def __init__(self) -> None:
        self.names_main = False

    def write(self, data: Any) -> None:
        # A name comes in one piece: the pickler cuts what it writes between two instructions alone.
        self.names_main = self.names_main or _names_main(bytes(data))


def _fault(value: Any) -> str | None:
    """Why a value cannot be sent, if it cannot."""
    nowhere = _Nowhere()
    try:
        _Pickler(nowhere, lambda _: None).dump(value)
    except Exception as error:  # noqa: BLE001 (whatever classes raise that define how they are pickled)
        return f"{type(error).__name__}: {error}"
    if nowhere.names_main and not main_module():
        return (
            "it is defined in a program that no other process can import (a notebook, a prompt, "
            "python -c, or the __main__ of a package)"
        )
    return None


def main_module() -> dict[str, str]:
    """What `multiprocessing.spawn.prepare` imports the program's main module by; empty if nothing can."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        # It leaves a package's __main__ alone.
        runs_at_once = name == "__main__" or name.endswith(".__main__")
        return {} if runs_at_once else {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"init_main_from_path": str(pathlib.Path(path).absolute())}


def _culprit(name: str, value: Any, seen: set[int]) -> tuple[str, Any, str]:
    """The innermost part of a value that cannot be sent: how one gets to it, the part, and why."""
    seen.add(id(value))
    for part_name, part in _parts(name, value):
        if id(part) not in seen and _fault(part) is not None:
            return _culprit(part_name, part, seen)
    return name, value, _fault(value) or "it changes while it is pickled"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What pickle goes on with, by how one gets to it."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, types.FunctionType | type | np.ndarray):
        try:
            reduced = value.__reduce_ex__(5)
        except Exception:  # noqa: BLE001 (then it is the value itself that is at fault)
            return
        if isinstance(reduced, str):
            return
        _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        for part in _flat(state):
            if isinstance(part, dict):
                yield from ((f"{name}.{key}", inner) for key, inner in part.items())
            else:
                yield name, part
        yield from ((name, part) for part in arguments)
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(items or ()))
        yield from ((f"{name}[{key!r}]", part) for key, part in pairs or ())


def _flat(state: Any) -> tuple[Any, ...]:
    """A state is one thing, or a tuple, such as of those in ``__dict__`` and those in slots."""
    return state if isinstance(state, tuple) else (state,)


def _way_out(part: Any) -> str:
    if isinstance(part, types.FunctionType | type):
        return "Define it with def or class at the top level of a module (no lambda), and import it from there."
    return (
        "What is open or running belongs to one process: let its owner leave it out in __getstate__, "
        "and open it again when it is first used."
    )
