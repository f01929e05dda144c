"""IDs of many records in little memory: integers, or strings as UTF-8, in a temporary file where they are many."""

import io
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

_IN_MEMORY_BYTES: Final = 1 << 26
_BLOCK_CHARACTERS: Final = 1 << 22
_INT64: Final = np.dtype(np.int64)


class KeptIds:
    """IDs, kept in the order in which they came.

    Args:
      blocks: arrays ``int64[k]`` or ``str[k]``, all of one kind.
    """

    def __init__(self, blocks: Iterable[npt.NDArray[Any]]) -> None:
        self._data, self._ends = _Spool(), _Spool()
        self._texts, self._count, self._longest, end = False, 0, 1, 0
        for block in blocks:
            self._count += len(block)
            if block.dtype.kind == "i":
                self._data.write(np.ascontiguousarray(block, np.int64))
                continue
            self._texts = True
            data, lengths = encoded(block)
            ends = np.cumsum(lengths) + end
            end = int(ends[-1]) if len(ends) else end
            self._longest = max(self._longest, int(lengths.max(initial=0)))
            self._data.write(data)
            self._ends.write(ends)
        self._bytes = self._data.array(np.dtype(np.uint8 if self._texts else np.int64))
        self._stops = self._ends.array(_INT64)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that they can be sent to another process."""
        return type(self), (list(self.blocks()),)

    def __len__(self) -> int:
        """How many."""
        return self._count

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All of them, in order: arrays int64[k] or str[k]."""
        end, step = 0, max(1, _BLOCK_CHARACTERS // self._longest)
        for start in range(0, self._count, step):
            stop = min(start + step, self._count)
            if not self._texts:
                yield np.frombuffer(self._data.read(8 * start, 8 * stop), np.int64)
                continue
            stops = np.frombuffer(self._ends.read(8 * start, 8 * stop), np.int64)
            data = np.frombuffer(self._data.read(end, int(stops[-1])), np.uint8)
            yield _together(data, np.diff(stops, prepend=end))
            end = int(stops[-1])

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Those of ``rows: int64[k]``: int64[k] or str[k]."""
        if not self._texts:
            return self._bytes.take(rows)
        stops = self._stops.take(rows)
        starts = np.where(rows == 0, 0, self._stops.take(rows - 1, mode="wrap"))
        return _apart(self._bytes, starts, stops - starts)


def encoded(texts: npt.NDArray[np.str_]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Strings as UTF-8.

    Args:
      texts: ``str[k]``.

    Returns:
      Their bytes, one string after the other: ``uint8[m]``; and each one's length in bytes, ``int64[k]``.
    """
    width = texts.dtype.itemsize // 4
    points = np.ascontiguousarray(texts).view(np.uint32).reshape(len(texts), width)
    if not points.size or points.max() < 128:
        lengths = np.strings.str_len(texts).astype(np.int64)
        return points[np.arange(width) < lengths[:, None]].astype(np.uint8), lengths
    parts = [text.encode("utf-8", "surrogatepass") for text in texts.tolist()]
    return np.frombuffer(b"".join(parts), np.uint8), np.array([*map(len, parts)], np.int64)


def _together(data: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.str_]:
    """The inverse of `encoded`."""
    width = max(1, int(lengths.max(initial=0)))
    if data.max(initial=0) < 128:
        points = np.zeros((len(lengths), width), np.uint32)
        points[np.arange(width) < lengths[:, None]] = data
        return points.view(f"U{width}").reshape(len(lengths))
    whole = data.tobytes()
    stops = np.cumsum(lengths).tolist()
    parts = (
        whole[stop - length : stop] for stop, length in zip(stops, lengths.tolist(), strict=True)
    )
    return np.array([part.decode("utf-8", "surrogatepass") for part in parts], np.str_)


def _apart(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.str_]:
    """Strings that stand anywhere in the bytes."""
    places = np.arange(max(1, int(lengths.max(initial=0))))
    inside = places < lengths[:, None]
    return _together(data.take((starts[:, None] + places)[inside]), lengths)


class _Spool:
    """Bytes that are written once, one after the other, and then read anywhere."""

    def __init__(self) -> None:
        self._memory = io.BytesIO()
        self._disk: IO[bytes] | None = None

    def write(self, array: npt.NDArray[Any]) -> None:
        (self._disk or self._memory).write(array.data)
        if self._disk is None and self._memory.tell() > _IN_MEMORY_BYTES:
            self._disk = tempfile.TemporaryFile(prefix="regrain-ids-")  # noqa: SIM115 (lives on)
            weakref.finalize(self, self._disk.close)
            self._disk.write(self._memory.getbuffer())
            self._memory = io.BytesIO()

    def read(self, start: int, stop: int) -> bytes:
        file = self._disk or self._memory
        file.seek(start)
        return file.read(stop - start)

    def array(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if self._disk is None:
            return np.frombuffer(self._memory.getbuffer(), dtype)
        self._disk.flush()
        return np.asarray(np.memmap(self._disk, dtype, "r"))
