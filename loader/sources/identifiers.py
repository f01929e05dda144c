"""The IDs of records in files: from file and row, a column, or a function; unique, and checked to be.

An ID is an integer or a string that stays with its record. ``"file:row"``, such as
``train/0001.parquet:17``, is unique by construction, and stays when the data moves to another path or
files are added. ``"row"`` is the number over all files, which stays when files are added at the end.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from loader.fingerprint import ColumnDigest, check_ids, check_unique, read_ids
from loader.sources.files import FileRows, FileSet

FILE_ROW: Final = "file:row"
ROW: Final = "row"

Rows = npt.NDArray[np.int64]

#: How a source is told what its IDs are: ``"file:row"``, ``"row"``, a column's name, or from rows to IDs.
IdRule = str | Callable[[Rows], npt.ArrayLike]

#: From a column's name and a file's number, all values of the column in that file, one axis.
ReadColumn = Callable[[str, int], npt.NDArray[Any]]

_BLOCK_ROWS: Final = 1 << 20


class Ids(Protocol):
    """The IDs of a source."""

    @property
    def column(self) -> ColumnDigest:
        """What a fingerprint says of them: ``int64`` or ``str``, no shape, and a digest."""
        ...

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        ...


def make_ids(
    rule: IdRule,
    files: FileSet,
    rows: FileRows,
    *,
    columns: Collection[str] = (),
    read_column: ReadColumn | None = None,
) -> Ids:
    """The IDs of the records in some files.

    Args:
      rule: ``"file:row"``, ``"row"``, one of ``columns``, or a function that takes ``int64[k]`` row
        numbers and gives int64[k] or k strings, always the same for a row.
      files: the files.
      rows: how many records each holds.
      columns: names of what the files hold for each record, which IDs may be.
      read_column: reads one of them from one file.

    Returns:
      The IDs, once checked: those of a column or function are all read for that.

    Raises:
      TypeError, ValueError: there is no such rule or column, or an ID is neither integer nor string,
        -1 or "", or comes twice; names the records.
    """
    if callable(rule):
        return _FunctionIds(rule, len(rows))
    if rule == FILE_ROW:
        return _FileRowIds(files, rows)
    if rule == ROW:
        return _RowIds(len(rows))
    if isinstance(rule, str) and rule in columns and read_column is not None:
        return _ColumnIds([read_column(rule, number) for number in range(len(files))])
    raise ValueError(
        f'ids must be "{FILE_ROW}", "{ROW}", a function of rows, or a column, one of '
        f"{', '.join(columns) or 'none here'}; not {rule!r:.80}"
    )


class _RowIds:
    def __init__(self, total: int) -> None:
        self.column: Final = ColumnDigest("int64", (), _digest([ROW, total]))

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return rows.copy()


class _FileRowIds:
    def __init__(self, files: FileSet, rows: FileRows) -> None:
        self._names, self._rows = files.names, rows
        self.column: Final = ColumnDigest(
            "str", (), _digest([FILE_ROW, *zip(files.names, rows.counts.tolist(), strict=True)])
        )

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        names = self._names
        files, places = (found.tolist() for found in self._rows.locate(rows))
        made = [f"{names[file]}:{place}" for file, place in zip(files, places, strict=True)]
        return np.array(made, np.str_)


class _FunctionIds:
    def __init__(self, function: Callable[[Rows], npt.ArrayLike], total: int) -> None:
        self._function, self._total = function, total
        blocks = [
            self(np.arange(start, min(start + _BLOCK_ROWS, total)))
            for start in range(0, total, _BLOCK_ROWS)
        ]
        self.column: Final = _checked(blocks)

    def ids(self, rows: Rows, /) -> Any:
        return self._function(rows)

    def __len__(self) -> int:
        return self._total

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return read_ids(self, rows)


class _ColumnIds:
    def __init__(self, parts: list[npt.NDArray[Any]]) -> None:
        every = np.concatenate(parts)
        self._ids = every.astype(np.int64) if every.dtype.kind in "iu" else every
        self.column: Final = _checked([self._ids])

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return self._ids.take(rows)


def _checked(blocks: Iterable[npt.NDArray[Any]]) -> ColumnDigest:
    every = np.concatenate(list(blocks))
    check_ids(every)
    check_unique(every)
    kind = "str" if every.dtype.kind == "U" else "int64"
    return ColumnDigest(kind, (), _digest(every.tolist()))


def _digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()
