"""The IDs of records in files: from file and row, a column, or a function; unique, and checked to be.

An ID is an integer or a string that stays with its record. ``"file:row"``, such as
``train/0001.parquet:17``, is unique by construction, and stays when the data moves to another path or
files are added. ``"row"`` is the number over all files, which stays when files are added at the end.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import ColumnDigest
from loader.identity.records import check_ids, read_ids
from loader.progress import counted
from loader.sources.files import FileRows, FileSet
from loader.sources.kept import KeptIds
from loader.sources.numbered import NumberedNames
from loader.sources.remembered import RememberedTexts
from loader.sources.unique import scan_ids

FILE_ROW: Final = "file:row"
ROW: Final = "row"

Rows = npt.NDArray[np.int64]

#: How a source is told what its IDs are: ``"file:row"``, ``"row"``, a column's name, or from rows to IDs.
IdRule = str | Callable[[Rows], npt.ArrayLike]

#: From a column's name and a file's number, all values of the column in that file: one array with one
#: axis, or, where they are many, several after each other.
ReadColumn = Callable[[str, int], npt.NDArray[Any] | Iterable[npt.NDArray[Any]]]

_BLOCK_ROWS: Final = 1 << 18


def id_entry(rule: IdRule) -> str | None:
    """The name of the entry of a record, or of the column, that is its ID; ``None`` where none is."""
    return rule if isinstance(rule, str) and rule not in (ROW, FILE_ROW) else None


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
      The IDs, once checked: for that, those of a column or function are all read, in half a GiB of
      memory at any number.

    Raises:
      TypeError, ValueError: there is no such rule or column, or an ID is neither integer nor string,
        -1 or "", or comes twice; names the records.
    """

    def where(row: int) -> str:
        [file], [place] = rows.locate(np.array([row], np.int64))
        return f"file {files.names[file]}, row {place}"

    if callable(rule):
        return _FunctionIds(rule, len(rows))
    if rule == FILE_ROW:
        return _FileRowIds(files, rows)
    if rule == ROW:
        return _RowIds(len(rows))
    if isinstance(rule, str) and rule in columns and read_column is not None:
        return _ColumnIds(_column_blocks(rule, files, rows, read_column), len(rows), where)
    raise ValueError(
        f'ids must be "{FILE_ROW}", "{ROW}", a function of rows, or a column, one of '
        f"{', '.join(columns) or 'none here'}; not {rule!r:.80}"
    )


def make_row_ids(
    rule: IdRule,
    total: int,
    columns: Collection[str],
    read_column: Callable[[str], npt.NDArray[Any] | Iterable[npt.NDArray[Any]]],
    where: Callable[[int], str] | None = None,
) -> Ids:
    """As `make_ids`, for records that are in no files.

    Args:
      rule: ``"row"``, one of ``columns``, or a function of rows.
      total: how many records.
      columns: names of what the records have, which IDs may be.
      read_column: reads one of them.
      where: as for `scan_ids`.
    """
    if callable(rule):
        return _FunctionIds(rule, total)
    if rule == ROW:
        return _RowIds(total)
    if isinstance(rule, str) and rule in columns:
        return _ColumnIds(id_blocks(read_column(rule), f"column {rule!r}"), total, where)
    raise ValueError(
        f'ids must be "{ROW}", a function of rows, or a column, one of '
        f"{', '.join(columns) or 'none here'}; not {rule!r:.80}"
    )


def row_column(total: int) -> ColumnDigest:
    """What a fingerprint says of IDs that are row numbers."""
    return ColumnDigest("int64", (), _digest([ROW, total]))


class _RowIds:
    def __init__(self, total: int) -> None:
        self.column: Final = row_column(total)

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return rows.copy()


class _FileRowIds:
    def __init__(self, files: FileSet, rows: FileRows) -> None:
        self._rows, self._names = rows, NumberedNames(files.names, rows.counts)
        self._texts = RememberedTexts(self._made, len(rows), rows.check)
        self.column: Final = ColumnDigest(
            "str", (), _digest([FILE_ROW, files.names, rows.counts.tolist()])
        )

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return self._texts(rows)

    def _made(self, rows: Rows) -> npt.NDArray[np.str_]:
        return self._names(*self._rows.locate(rows))


class _FunctionIds:
    def __init__(self, function: Callable[[Rows], npt.ArrayLike], total: int) -> None:
        self._function, self._total = function, total
        self.column: Final = scan_ids(self._blocks, total)

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        for start in range(0, self._total, _BLOCK_ROWS):
            yield self(np.arange(start, min(start + _BLOCK_ROWS, self._total), dtype=np.int64))

    def ids(self, rows: Rows, /) -> Any:
        return self._function(rows)

    def __len__(self) -> int:
        return self._total

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return read_ids(self, rows)


class _ColumnIds:
    def __init__(
        self,
        blocks: Iterable[npt.NDArray[Any]],
        total: int,
        where: Callable[[int], str] | None = None,
    ) -> None:
        self._kept = KeptIds(counted(blocks, "reading the IDs", total))
        self.column: Final = scan_ids(self._kept.blocks, total, where=where)

    def __call__(self, rows: Rows, /) -> npt.NDArray[Any]:
        return self._kept.take(rows)


def _column_blocks(
    name: str, files: FileSet, rows: FileRows, read_column: ReadColumn
) -> Iterator[npt.NDArray[Any]]:
    """A column of all files, as IDs, checked where a file can be named."""
    kind = ""
    for number, count in enumerate(rows.counts.tolist()):
        found = read_column(name, number)
        where = f"column {name!r} of file {files.names[number]}"
        start = 0
        for block in id_blocks(found, where):
            if kind not in ("", block.dtype.kind):
                raise TypeError(
                    f"{where} is {block.dtype}, and in the files before it is not: IDs are of one kind"
                )
            kind = block.dtype.kind
            yield block
            start += len(block)
        if start != count:
            raise ValueError(f"{where} holds {start} values, of {count} records")


def id_blocks(
    found: npt.NDArray[Any] | Iterable[npt.NDArray[Any]], where: str
) -> Iterator[npt.NDArray[Any]]:
    """A column, or parts of it, as IDs: int64[k] or str[k], each checked to be one.

    Raises:
      TypeError, ValueError: one is none; names the column, as ``where``, and the row.
    """
    start = 0
    for given in [found] if isinstance(found, np.ndarray) else found:
        yield _as_ids(given, where, start)
        start += len(given)


def _as_ids(given: npt.NDArray[Any], where: str, start: int) -> npt.NDArray[Any]:
    ids = given
    if ids.dtype.kind == "O" and all(isinstance(value, str) for value in ids.flat):
        ids = ids.astype(np.str_)
        for place, (made, text) in enumerate(zip(ids.tolist(), given.tolist(), strict=True)):
            if made != text:
                raise ValueError(
                    f"{where} holds, in row {start + place}, the string {text!r:.80} with a zero byte at its "
                    "end, which NumPy drops"
                )
    if ids.dtype.kind == "u" and ids.size and ids.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{where} holds, in row {start + int(ids.argmax())}, {ids.max()}, which does not fit int64"
        )
    if ids.dtype.kind in "iu":
        ids = ids.astype(np.int64, copy=False)
    try:
        check_ids(ids, start)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where} cannot be the IDs: {error}") from error
    return ids


def _digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()
