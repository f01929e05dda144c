"""The formats of `regrain convert`: how a data set is found out and opened, and how one is written.

To add a format: a function that writes all records of a source, and one that opens what it wrote, in
`FORMATS`; and, if it has a suffix of its own, a line in `opened`.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

import loader
from loader.progress import Work
from loader.sources.new_paths import new_file
from regrain.cli.fingerprint import ID, npz_arrays

Name = Literal["npy", "array_record", "parquet"]

_BLOCK_BYTES: Final = 1 << 24
#: Parquet decodes a row group as a whole: a small one costs less at random.
_ROW_GROUP_BYTES: Final = 1 << 20
#: Arrow drops the count of a unit such as ``10ms``, and Parquet has no seconds.
_PARQUET_UNITS: Final = {("ms", 1), ("us", 1), ("ns", 1)}


@dataclasses.dataclass(frozen=True)
class Format:
    """A format that records are written in.

    Attributes:
      write: all records of a source, to a path that does not exist.
      read: opens what was written, with the IDs and fields of the source.
    """

    write: Callable[[loader.RecordSource, pathlib.Path], None]
    read: Callable[[pathlib.Path, loader.RecordSource], loader.RecordSource]


def opened(path: pathlib.Path, **reading: Any) -> loader.RecordSource:
    """The data set in a file or folder, whose format its name or content tells.

    Raises:
      OSError, TypeError, ValueError: it cannot be opened, or is of no known format.
    """
    if path.is_dir() and (path / "state.json").exists():
        if "split" in reading:
            raise ValueError(
                f"--split is for Parquet and ArrayRecord files, and {path} is one saved data set"
            )
        return _with_ids(loader.HuggingFaceSource, path, reading)
    if _holds(path, "*.parquet*"):
        return _with_ids(loader.ParquetSource, path, reading)
    if _holds(path, "*.array_record*") or _holds(path, "*.arrayrecord*"):
        return _with_ids(loader.ArrayRecordSource, path, reading)
    if reading:
        raise ValueError(
            f"--columns, --fields and --split are for Parquet, ArrayRecord and Hugging Face data, and {path} is none of these"
        )
    if path.is_dir() and list(path.glob("*.npy")):
        return loader.NpySource(path)
    if path.is_dir():
        raise ValueError(f"{path} holds no regrain.json, no .npy, .parquet or .array_record file")
    arrays = npz_arrays(path)
    ids = arrays.pop(ID, None)
    return loader.ArraySource(arrays, ids)


def name_for(path: pathlib.Path) -> Name:
    """The format that a name to be written has by its suffix; ``"npy"`` without one.

    Raises:
      ValueError: it has another suffix, as a file in a format that is none of these would.
    """
    if path.suffix in (".array_record", ".arrayrecord"):
        return "array_record"
    if path.suffix not in ("", ".parquet"):
        raise ValueError(
            f"{path} ends in {path.suffix}, which is no format that is written: name a .parquet or "
            ".array_record file, or a folder without a suffix; or give --to"
        )
    return "parquet" if path.suffix else "npy"


def _holds(path: pathlib.Path, pattern: str) -> bool:
    return next(path.rglob(pattern), None) is not None if path.is_dir() else path.match(pattern)


def _with_ids(
    source: Callable[..., loader.RecordSource], path: pathlib.Path, reading: dict[str, Any]
) -> loader.RecordSource:
    """A source with the IDs of the column ``id``; where there is none, with its usual ones."""
    try:
        return source(path, ids=ID, **reading)
    except ValueError as error:
        try:
            return source(path, **reading)
        except ValueError:
            raise error from None


def _write_npy(source: loader.RecordSource, path: pathlib.Path) -> None:
    loader.write_npy(source, path)


def _read_npy(path: pathlib.Path, _source: loader.RecordSource) -> loader.RecordSource:
    return loader.NpySource(path)


def _write_array_record(source: loader.RecordSource, path: pathlib.Path) -> None:
    def records() -> Iterator[dict[str, Any]]:
        for columns in _blocks(source, _BLOCK_BYTES, path.name):
            for row in range(len(columns[ID])):
                # With the dots a number stays an array, and keeps the order of its bytes.
                yield {name: column[row, ...] for name, column in columns.items()}

    loader.write_array_record(path, records())


def _read_array_record(path: pathlib.Path, source: loader.RecordSource) -> loader.RecordSource:
    return loader.ArrayRecordSource(path, ids=ID, columns=list(source.fields), fields=source.fields)


def _write_parquet(source: loader.RecordSource, path: pathlib.Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(name: str, array: npt.NDArray[Any]) -> Any:
        if array.dtype.kind in "Mm" and np.datetime_data(array.dtype) not in _PARQUET_UNITS:
            raise TypeError(f"Parquet has no times as those of field {name!r}, {array.dtype}")
        flat = np.ascontiguousarray(array).reshape(-1)
        try:
            if flat.dtype.kind in "US":  # of which Arrow takes the part before a zero byte
                made = pa.array(
                    flat.tolist(), pa.string() if flat.dtype.kind == "U" else pa.binary()
                )
            else:
                made = pa.array(flat)
        except (pa.ArrowException, TypeError) as error:
            raise TypeError(
                f"Parquet has nothing for field {name!r}, {array.dtype}: {error}"
            ) from error
        for size in reversed(array.shape[1:]):
            made = pa.FixedSizeListArray.from_arrays(made, size)
        return made

    with new_file(path) as partial, contextlib.ExitStack() as opened_file:
        writer: Any = None
        for columns in _blocks(source, _ROW_GROUP_BYTES, path.name):
            table = pa.table({name: column(name, array) for name, array in columns.items()})
            if writer is None:
                writer = opened_file.enter_context(pq.ParquetWriter(partial, table.schema))
            writer.write_table(table)


def _read_parquet(path: pathlib.Path, source: loader.RecordSource) -> loader.RecordSource:
    return loader.ParquetSource(path, ids=ID, fields=source.fields)


#: By the name that --to takes.
FORMATS: Final[dict[Name, Format]] = {
    "npy": Format(_write_npy, _read_npy),
    "array_record": Format(_write_array_record, _read_array_record),
    "parquet": Format(_write_parquet, _read_parquet),
}


def _blocks(
    source: loader.RecordSource, block_bytes: int, name: str
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """All records, some at a time: the IDs, and the fields."""
    record_bytes = sum(
        field.dtype.itemsize * math.prod(field.shape) for field in source.fields.values()
    )
    step = max(1, block_bytes // (8 + record_bytes))
    with Work(f"writing the records to {name!r}", len(source), "records") as work:
        for start in range(0, len(source), step):
            rows = np.arange(start, min(start + step, len(source)), dtype=np.int64)
            yield {ID: source.ids(rows), **source.read(rows)}
            work.advance(len(rows))
