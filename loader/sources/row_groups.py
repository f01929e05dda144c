"""Row groups of Parquet files: where they are, decoded when they are needed, and kept as far as memory is allowed."""

import collections
import itertools
import logging
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.progress import Work
from loader.reading.threads import Crew, in_order, usable_cores
from loader.sources.arrow import Block, Column, in_one
from loader.sources.columns import Where
from loader.sources.extras import needed
from loader.sources.files import FileRows, FileSet, Group

_log: Final = logging.getLogger(__name__)

#: Of footers as they are in their files; parsed, they take ten times as much memory.
_FOOTER_BYTES: Final = 1 << 23
_NANOSECONDS: Final = np.dtype("M8[ns]")

Blocks = dict[str, Block]


class RowGroups:
    """Row groups of all files, and what is decoded of them."""

    def __init__(
        self,
        files: FileSet,
        group_rows: Sequence[npt.NDArray[np.int64]],
        table: Mapping[str, Column],
        limit: int,
        threads: int,
    ) -> None:
        self._files, self._table, self._limit, self._threads = files, table, limit, threads
        rows = np.concatenate(group_rows)
        self._rows = FileRows(np.concatenate([[0], np.cumsum(rows)]))
        self._first = np.cumsum([0, *map(len, group_rows)])
        self._size = len(self._rows) * sum(
            column.field.dtype.itemsize * math.prod(column.field.shape) for column in table.values()
        )
        self._fits = self._size <= limit and all(not column.decode for column in table.values())
        if self._size > limit and not any(column.decode for column in table.values()):
            _log.warning(
                "the columns take %d MB decoded, of which cache_bytes keeps %d: in a shuffled order a batch "
                "decodes a row group for almost every record. Raise cache_bytes, or convert the data",
                self._size >> 20,
                limit >> 20,
            )
        self._footers = _Footers()
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[int, Blocks] = collections.OrderedDict()
        self._kept_bytes, self._missing = 0, int(np.count_nonzero(rows))
        self._decoding: dict[int, threading.Lock] = {}
        #: All values of each column, where all are kept: then a batch is one gather.
        self._whole: dict[str, npt.NDArray[Any]] | None = None

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that a source can be sent to another process, which decodes for itself."""
        firsts = self._first.tolist()
        rows = self._rows.counts
        parts = [rows[low:high] for low, high in itertools.pairwise(firsts)]
        return type(self), (self._files, parts, self._table, self._limit, self._threads)

    def read(self, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """All fields of some rows."""
        if self._missing == 0 and self._whole is not None:
            return {name: array.take(rows, axis=0) for name, array in self._whole.items()}
        groups = self._rows.groups(rows)
        made = {name: column.empty(len(rows)) for name, column in self._table.items()}
        missing = []
        for group in groups:
            blocks = self._find(group.file)
            if blocks is None:
                missing.append(group)
            else:
                self._fill(made, group, blocks)

        def decode(number: int, crew: Crew[None]) -> None:
            crew.check(number)
            group = missing[number]
            self._fill(made, group, self._decoded(group.file, int(group.rows[0])))

        in_order(decode, len(missing), min(self._threads, len(missing)))
        return {
            name: column.finish(
                made[name], lambda place: self._name(int(rows[place])), self._threads
            )
            for name, column in self._table.items()
        }

    def _fill(self, made: Mapping[str, npt.NDArray[Any]], group: Group, blocks: Blocks) -> None:
        first = int(self._rows.starts[group.file])
        for name, column in self._table.items():
            made[name][group.places] = column.pick(
                blocks[name], group.rows, lambda place: self._name(first + int(group.rows[place]))
            )

    def _find(self, number: int) -> Blocks | None:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
            return self._kept.get(number)

    def _decoded(self, number: int, row: int) -> Blocks:
        """A row group, decoded by one thread where several ask for it."""
        with self._lock:
            turn = self._decoding.setdefault(number, threading.Lock())
        with turn:
            try:
                blocks = self._find(number)
                if blocks is None:
                    blocks = self._decode(number, row)
                    self._keep(number, blocks)
            finally:
                with self._lock:
                    self._decoding.pop(number, None)
        return blocks

    def _keep(self, number: int, blocks: Blocks) -> None:
        with self._lock:
            self._kept[number] = blocks
            self._kept_bytes += _nbytes(blocks)
            self._missing -= _is_whole(blocks)
            while self._kept_bytes > self._limit:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= _nbytes(gone)
                self._missing += _is_whole(gone)

    def _decode(self, number: int, row: int) -> Blocks:
        """Decodes a row group; ``row`` is the one in it that is asked for."""
        file, place, row = self._place(number, row)
        names = list(self._table)
        metadata = self._footers.get(file)
        reader = opened(self._files, file, row, metadata=metadata)
        try:
            with reader:
                if metadata is None:
                    self._footers.keep(file, reader.metadata)
                table = reader.read_row_group(place, columns=names, use_threads=False)
            coarse = self._read_in_seconds(file, place, row, reader.metadata)
        except (OSError, pyarrow().ArrowException) as error:
            self._files.check(file, row)
            raise damaged(self._files, file, row, f"row group {place}", error) from error
        self._files.check(file, row)
        start, stop = self._rows.starts[number : number + 2].tolist()
        if len(table) != stop - start:
            raise ValueError(
                f"file {self._files.names[file]}, row {row}: row group {place} holds {len(table)} rows, and "
                f"the file says {stop - start}; it is damaged"
            )
        for name in coarse.column_names if coarse is not None else []:
            _check_int96(
                name, table.column(name), coarse.column(name), lambda at: self._name(start + at)
            )
        blocks = {}
        for name, column in self._table.items():
            blocks[name] = column.block(in_one(table.column(name).chunks))
        return self._placed(blocks, start, stop) if self._fits else blocks

    def _read_in_seconds(self, file: int, place: int, row: int, metadata: Any) -> Any:
        """Times of a row group that the file holds as INT96, in whole seconds; ``None`` if it has none."""
        nanoseconds = [name for name, one in self._table.items() if one.field.dtype == _NANOSECONDS]
        if not nanoseconds:
            return None
        kinds = [metadata.schema.column(number) for number in range(len(metadata.schema))]
        paths = [kind.path + "." for kind in kinds if kind.physical_type == "INT96"]
        names = [name for name in nanoseconds if any(path.startswith(name + ".") for path in paths)]
        if not names:
            return None
        unit = {"coerce_int96_timestamp_unit": "s"}
        with opened(self._files, file, row, metadata=metadata, **unit) as reader:
            return reader.read_row_group(place, columns=names, use_threads=False)

    def _placed(self, blocks: Blocks, start: int, stop: int) -> Blocks:
        """Moves a row group to its place among all."""
        with self._lock:
            if self._whole is None:
                self._whole = {
                    name: column.empty(len(self._rows)) for name, column in self._table.items()
                }
        placed = {}
        for name, block in blocks.items():
            placed[name] = block
            if isinstance(block, np.ndarray):
                placed[name] = self._whole[name][start:stop]
                placed[name][:] = block
        return placed

    def _place(self, group: int, row: int) -> tuple[int, int, int]:
        """A row group's file and number in it, and a row's number in the file."""
        file = int(np.searchsorted(self._first, group, "right")) - 1
        first = int(self._first[file])
        return file, group - first, row + int(self._rows.starts[group] - self._rows.starts[first])

    def _name(self, row: int) -> str:
        """The file and row of a row of the source."""
        [group], [place] = self._rows.locate(np.array([row], np.int64))
        file, _, place = self._place(int(group), int(place))
        return row_name(self._files, file, 0, place)


class _Footers:
    """Footers of files, kept once they are parsed: to parse a large one takes much longer than to read a row group.

    Files themselves are opened for each row group, so that no more are open than threads decode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._bytes = 0

    def get(self, number: int) -> Any:
        """The footer of a file, if it is kept."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
            return self._kept.get(number)

    def keep(self, number: int, metadata: Any) -> None:
        """Keeps a footer, and drops those that were used longest ago if there is no room."""
        with self._lock:
            if number not in self._kept:
                self._kept[number] = metadata
                self._bytes += metadata.serialized_size
            while self._bytes > _FOOTER_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].serialized_size


def _check_int96(name: str, times: Any, seconds: Any, where: Where) -> None:
    """Checks that INT96 times were not wrapped to other dates when they became 64 bits of nanoseconds.

    Args:
      name: the column's.
      times: the column in nanoseconds, as Arrow has it.
      seconds: the same in whole seconds, which reach all dates that INT96 has.
      where: names a row.
    """
    pc = needed("pyarrow.compute", "parquet")
    times, seconds = in_one(times.chunks), in_one(seconds.chunks)
    rows = np.arange(len(times))
    while pyarrow().types.is_nested(times.type):
        rows = rows[pc.list_parent_indices(times).to_numpy()]
        times, seconds = pc.list_flatten(times), pc.list_flatten(seconds)
    if seconds.type.unit != "s":  # a column of another name that only begins like an INT96 one
        return
    found = (
        times.drop_null().to_numpy().view(np.int64) // 10**9
    )  # NumPy's own cast is wrong near 1677
    wanted = seconds.drop_null().to_numpy()
    wrong = np.flatnonzero(found != wanted.view(np.int64))
    if wrong.size:
        rows = rows[times.is_valid().to_numpy(zero_copy_only=False)]
        raise ValueError(
            f"{where(int(rows[wrong[0]]))}: column {name!r} holds {wanted[wrong[0]]} as INT96, and 64 bits of "
            "nanoseconds reach from 1677 to 2262 only. Write the column again as TIMESTAMP_MICROS, or leave "
            "it out of columns"
        )


def footers(
    files: FileSet, kinds: Mapping[str, Any], names: Collection[str] | None = None
) -> list[npt.NDArray[np.int64]]:
    """Rows of each row group of each file, whose columns must be of the same types in all.

    Args:
      files: the files.
      kinds: by name, the type of each column that is read.
      names: which columns there may be; by default any.
    """

    def rows_of(number: int, _crew: Crew[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        with opened(files, number, 0) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        for name, kind in kinds.items():
            place = schema.get_field_index(name)
            found = schema.field(place).type if place >= 0 else "not there, or twice"
            if found != kind:
                raise ValueError(
                    f"file {files.names[number]}, row 0: column {name!r} is {found}, and in "
                    f"{files.names[0]} it is {kind}; all files must have the same columns"
                )
        extra = [] if names is None else [name for name in schema.names if name not in names]
        if extra:
            raise ValueError(
                f"file {files.names[number]}, row 0: it has {', '.join(map(repr, extra))}, a column that "
                f"{files.names[0]} has not; all files must have the same columns. List those that count as columns, and "
                "nobody looks at the others"
            )
        files.check(number)
        work.advance()
        return np.array(groups, np.int64)

    with Work(f"opening the files in {files.root.name!r}", len(files), "files") as work:
        return in_order(rows_of, len(files), 2 * usable_cores())


def opened(files: FileSet, number: int, row: int, **options: Any) -> Any:
    """Open a file to read a row of it, with options of `pyarrow.parquet.ParquetFile`.

    Raises:
      ValueError: it is no Parquet file, is cut, or has changed; names file and row.
      OSError: it cannot be read, whatever it holds; names it.
    """
    try:
        return needed("pyarrow.parquet", "parquet").ParquetFile(
            files.path(number), page_checksum_verification=True, **options
        )
    except (OSError, pyarrow().ArrowException) as error:
        files.check(number, row)
        files.check_readable(number)
        raise damaged(files, number, row, "it", error) from error


def damaged(files: FileSet, number: int, row: int, what: str, error: Exception) -> ValueError:
    """What to raise where a part of a file cannot be read."""
    return ValueError(
        f"file {files.names[number]}, row {row}: {what} cannot be read, the file is cut, damaged or no Parquet "
        f"file: {error}"
    )


def row_name(files: FileSet, number: int, start: int, place: int) -> str:
    """Names a row of a file, by its place after another one."""
    return f"file {files.names[number]}, row {start + place}"


def _is_whole(blocks: Blocks) -> bool:
    return all(isinstance(block, np.ndarray) for block in blocks.values())


def _nbytes(blocks: Blocks) -> int:
    return sum(int(block.nbytes) for block in blocks.values())


def pyarrow() -> Any:
    """The package, imported when it is first used."""
    return needed("pyarrow", "parquet")
