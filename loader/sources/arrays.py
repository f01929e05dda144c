"""Records held in arrays, in memory or memory-mapped."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import Fingerprint, fingerprint
from loader.identity.records import check_ids, check_unique
from loader.sources.protocol import Field, check_field, field_list


class ArraySource:
    """A `RecordSource` over arrays whose first axis is the record.

    Nothing is copied: memory-mapped arrays stay on disk, and a later change of an array is a change
    of the data.

    Args:
      fields: for each field's name an array ``dtype[n, *shape]``.
      ids: ``int64[n]`` or strings ``[n]``, unique; by default the row numbers. An ID should belong to
        the record wherever it stands: with row numbers, records that changed places cannot be told
        from records that were edited.

    Raises:
      TypeError, ValueError: no field, no record, fields or IDs of unequal lengths, an ID twice, an ID
        that padding uses (-1 or ""), a dtype of Python objects, a masked array.
    """

    def __init__(
        self, fields: Mapping[str, npt.ArrayLike], ids: npt.ArrayLike | None = None
    ) -> None:
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields must map names to arrays, not be {fields!r:.80}")
        if not fields:
            raise ValueError("fields must hold at least one array")
        self._arrays = {name: _array(f"field {name!r}", value) for name, value in fields.items()}
        self._fields = {
            name: check_field(name, Field(array.dtype, array.shape[1:]))
            for name, array in self._arrays.items()
        }
        lengths = {f"field {name!r}": len(array) for name, array in self._arrays.items()}
        self._ids = None if ids is None else _id_array(ids)
        if self._ids is not None:
            lengths["ids"] = len(self._ids)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"one record for each row is needed, but the lengths differ: {listed}")
        self._len = next(iter(lengths.values()))
        if self._len == 0:
            raise ValueError("the arrays hold no record: their first axis has length 0")
        if self._ids is not None:
            check_ids(self._ids)
            check_unique(self._ids)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process: NumPy's pickles of times and strings lose the byte order, and fields keep it."""
        vars(self).update(state)
        self._arrays = {
            name: array.astype(self._fields[name].dtype, copy=False)
            for name, array in self._arrays.items()
        }

    def __len__(self) -> int:
        """How many records."""
        return self._len

    def __repr__(self) -> str:
        return f"ArraySource({self._len} records; {field_list(self._fields)})"

    @property
    def fields(self) -> Mapping[str, Field]:
        """Each field's dtype and per-record shape."""
        return self._fields

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        if self._ids is None:
            return rows.copy()
        return self._ids.take(rows)

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape]."""
        return {name: array.take(rows, axis=0) for name, array in self._arrays.items()}

    def read_range(self, start: int, stop: int, /) -> dict[str, npt.NDArray[Any]]:
        """IDs, under ``"id"``, and all fields of the rows from ``start`` to ``stop``, without a copy.

        Returns:
          Arrays with a leading axis of ``stop - start``, which are only to be looked at.
        """
        rows = slice(start, stop)
        ids = np.arange(start, stop, dtype=np.int64) if self._ids is None else self._ids[rows]
        return {"id": ids, **{name: array[rows] for name, array in self._arrays.items()}}

    def fingerprint(self) -> Fingerprint:
        """Reads all records, as they are now, and digests them."""
        return fingerprint(self)


def _array(what: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, and its mask would be lost; fill it first")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{what} is not an array with one shape for all records: {error}"
        ) from error
    if array.ndim == 0:
        raise ValueError(f"{what} is the single value {array!r}; its first axis must be the record")
    return array


def _id_array(ids: npt.ArrayLike | Sequence[str]) -> npt.NDArray[Any]:
    """IDs as int64[n] or str[n], without ever changing one on the way."""
    array = _array("ids", ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one axis, not shape {list(array.shape)}")
    if array.size == 0:
        raise ValueError("ids must name at least one record")
    if array.dtype.kind in "iu":
        # NumPy makes integers of truth values among them.
        if isinstance(ids, Sequence) and any(isinstance(v, bool | np.bool_) for v in ids):
            raise TypeError("ids must be integers or strings, not truth values")
        if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"ID {array.max()} does not fit int64; use strings")
        return array.astype(np.int64)
    if array.dtype.kind == "U":
        # NumPy makes strings of mixed input, and drops zero bytes at a string's end.
        if not isinstance(ids, np.ndarray) and array.tolist() != list(ids):  # type: ignore[arg-type]
            raise TypeError(
                "ids must be all integers or all strings without a zero byte at the end"
            )
        return array.copy()
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array):
        return _id_array([str(value) for value in array])
    raise TypeError(f"ids must be integers or strings, not dtype {array.dtype}")
