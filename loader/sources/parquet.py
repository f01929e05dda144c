"""Records in Parquet files: rows of row groups, which are decoded whole and kept."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.sources.arrow import Column, to_ids
from loader.sources.columns import check_fields, chosen_columns
from loader.sources.decoding import Decode, check_decoders, check_threads, name_of
from loader.sources.digests import Cache
from loader.sources.extras import needed
from loader.sources.file_source import FileSource
from loader.sources.files import Data, FileRows, FileSet, Names
from loader.sources.identifiers import IdRule
from loader.sources.row_groups import RowGroups, damaged, footers, opened, pyarrow, row_name


class ParquetSource(FileSource):
    """A `RecordSource` over Parquet files, whose columns are fields.

    Parquet can only decode a row group as a whole. Decoded ones are kept, up to ``cache_bytes``: a data
    set that fits is decoded once, and reading it then costs what reading NumPy arrays costs. One that
    does not should be read in an order that stays in a row group for long, or be converted to another
    format: in a shuffled order each record of a batch may have a row group decoded. (A warning says so.)

    Numbers, truth values, dates and times are fields as they are, times of a zone in UTC; INT96 times that
    do not fit 64 bits of nanoseconds (1677 to 2262) are refused, with the whole row group. Lists and
    tensors of one shape are arrays, fixed-size binary values ``uint8[n]``. Strings and lists need a
    width where their type says none; binary values are decoded.

    Args:
      data: a file, or a folder with files ``*.parquet`` somewhere below.
      columns: which become fields; by default all but the one that ``ids`` names, and no file may have
        others than the first. Where you list them, other columns are in no batch.
      decode: for binary columns, what makes arrays of their values, such as
        ``{"image": loader.decode_image}``. Functions are called by several threads, and known to
        checkpoints by name, arguments (of a ``functools.partial``) and attribute ``version``.
      fields: dtype and per-record shape, where a column's type does not tell it: ``{"word": "U32"}``
        are up to 32 characters. By default lists and decoded values are as in the first record.
      ids: ``"file:row"``, ``"row"``, a function of rows, or a column of integers or strings.
      names: of the folder's files, in the order wanted, or a pattern such as ``"train-*"``; by default
        all, sorted, unless they are of several splits.
      split: a word of the names of the files to read, such as ``"train"``.
      cache_bytes: how much memory decoded row groups may take.
      threads: how many decode; by default one for each usable core. They end with the read.
      cache: where digests of files are kept; by default nowhere.

    Raises:
      ModuleNotFoundError: pyarrow is not there: install the extra ``parquet``.
      FileNotFoundError, OSError: a file is not there, or cannot be read.
      TypeError, ValueError: a bad argument; a file that is no Parquet file, is cut, holds no record or
        other columns than the first one; a column that cannot be a field. Names file and column.
    """

    def __init__(
        self,
        data: Data,
        *,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, Decode] | None = None,
        fields: Mapping[str, Any] | None = None,
        ids: IdRule = "file:row",
        names: Names = None,
        split: str | None = None,
        cache_bytes: int = 1 << 30,
        threads: int | None = None,
        cache: Cache = None,
    ) -> None:
        needed("pyarrow.parquet", "parquet")
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise ValueError(f"cache_bytes must be a number of bytes, not {cache_bytes!r:.80}")
        files = FileSet.open(data, [".parquet"], names, split)
        with opened(files, 0, 0) as first:
            schema = first.schema_arrow
        wanted = chosen_columns(dict.fromkeys(schema.names), columns, ids)
        also = [ids] if isinstance(ids, str) and ids in schema.names else []
        for name in [*wanted, *also]:
            if schema.names.count(name) > 1:
                raise ValueError(
                    f"file {files.names[0]} has {schema.names.count(name)} columns named {name!r}; rename "
                    "them, or list the columns without it"
                )
        kinds = {name: schema.field(name).type for name in [*wanted, *also]}
        group_rows = footers(files, kinds, None if columns is not None else schema.names)
        counts = [int(rows.sum()) for rows in group_rows]
        FileRows.of(files, counts)  # refuses files without records, before the first one is read
        given, decoders = check_fields(fields, wanted), check_decoders(decode, wanted)
        table = {
            name: Column.of(
                name,
                kinds[name],
                decoders.get(name),
                given.get(name),
                functools.partial(_first_value, files, name),
                functools.partial(row_name, files, 0, 0),
            )
            for name in wanted
        }
        self._groups = RowGroups(files, group_rows, table, cache_bytes, check_threads(threads))
        super().__init__(
            files,
            counts,
            {name: column.field for name, column in table.items()},
            ids=ids,
            columns=schema.names,
            reading={
                "format": "parquet",
                "decode": {name: name_of(function) for name, function in sorted(decoders.items())},
            },
            cache=cache,
        )

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape].

        Raises:
          IndexError: there is no such row.
          ValueError: a record cannot be read or decoded, a value is null, or a file has changed that was
            not read before; names file and row.
        """
        return self._groups.read(rows)

    def read_file(self, number: int, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of some rows of one file, ``int64[k]``, as ``FileSource.read_file`` has it."""
        return self.read(rows + self.file_rows.starts[number])

    def read_column(self, name: str, number: int, /) -> Iterator[npt.NDArray[Any]]:
        """A column of integers or strings of one file, some values at a time."""
        row, file = 0, opened(self.files, number, 0)
        try:
            with file:
                for batch in file.iter_batches(columns=[name], use_threads=False):
                    where = functools.partial(row_name, self.files, number, row)
                    yield to_ids(name, batch.column(name), where)
                    row += len(batch)
        except (OSError, pyarrow().ArrowException) as error:
            raise damaged(self.files, number, row, f"column {name!r}", error) from error
        self.files.check(number, row)


def _first_value(files: FileSet, name: str) -> Any:
    with opened(files, 0, 0) as file:
        for batch in file.iter_batches(batch_size=1, columns=[name], use_threads=False):
            if len(batch):
                return batch.column(name)[:1]
    raise ValueError(f"file {files.names[0]} holds no record")
