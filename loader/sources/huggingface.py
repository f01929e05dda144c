"""Records of a Hugging Face data set: rows of its Arrow table, in memory or memory-mapped."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import ColumnDigest, Fingerprint, fingerprint
from loader.sources.arrow import Block, Column, in_one, is_view, taken, to_ids, without_views
from loader.sources.arrow_files import ArrowFiles, check_sound, file_at_fault
from loader.sources.columns import Where, check_fields, chosen_columns
from loader.sources.decoding import Decode, check_decoders, check_threads, name_of
from loader.sources.extras import needed
from loader.sources.files import FileRows, Group
from loader.sources.identifiers import IdRule, id_blocks, make_row_ids
from loader.sources.images import CHANNELS_OF_MODES, decode_image
from loader.sources.kept import KeptIds
from loader.sources.protocol import Field, field_list

_ID_ROWS: Final = 1 << 18


class HuggingFaceSource:
    """A `RecordSource` over a `datasets.Dataset`, in memory or loaded from disk, shuffled or selected.

    Values are read from the Arrow table, with the dtypes that it has: the data set's own format is not
    asked, and a transform of its own is refused. Columns are fields as those of `ParquetSource` are; a
    column of the feature ``Image`` is decoded by `decode_image`, in the mode that the feature names, unless
    ``decode`` has another function for it. With ``Image(decode=False)`` it stays bytes, so ``decode`` is needed.

    Its identity is its content: all records are read to tell it, on all cores, but not decoded. Neither
    the data set's own fingerprint would do, which is another one each time where a function cannot be
    hashed, nor the bytes of its files: what is selected, and in which order, does not stand in them.

    Args:
      dataset: the data set, or the folder that ``save_to_disk`` wrote.
      columns: which become fields; by default all but the one that ``ids`` names.
      decode: for binary columns and images, what makes arrays of their values. Functions are called by
        several threads.
      fields: dtype and per-record shape, where a column's type does not tell it: ``{"word": "U32"}``
        are up to 32 characters. By default lists and decoded values are as in the first record, before
        the data set was shuffled.
      ids: ``"row"``, a function of rows, or a column of integers or strings. Rows have other numbers
        when the data set is shuffled or filtered: a column stays with its record.
      threads: how many decode, where it takes time; by default one for each usable core. They end with
        the read.

    Raises:
      ModuleNotFoundError: datasets is not there: install the extra ``huggingface``.
      TypeError, ValueError: a bad argument, several splits, no record, a column that cannot be a field.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, Decode] | None = None,
        fields: Mapping[str, Any] | None = None,
        ids: IdRule = "row",
        threads: int | None = None,
    ) -> None:
        dataset = _checked(dataset)
        self._given = dataset, columns, decode, fields, ids, threads
        table = dataset.data.table
        wanted = chosen_columns(table.column_names, columns, ids)
        given = check_fields(fields, wanted)
        decoders = check_decoders(decode, wanted)
        decoders |= _image_decoders(dataset, [name for name in wanted if name not in decoders])
        self._threads, self._len = check_threads(threads), len(dataset)
        # A shuffled or selected data set has a list of rows before its table; nothing public tells it.
        mapped = dataset._indices  # noqa: SLF001
        paths = [entry["filename"] for entry in dataset.cache_files]
        self._files = ArrowFiles.of(dataset.data, paths)
        self._indices, first = None, 0
        if mapped is not None:
            self._indices = _Chunks.of("indices", mapped.column(0), ArrowFiles([]), 0)
            # Of those in the table, so that another order does not make them other fields.
            first = needed("pyarrow.compute", "huggingface").min(mapped.column(0)).as_py()
        self._columns = {
            name: _Chunks.of(
                name, table.column(name), self._files, first, decoders.get(name), given.get(name)
            )
            for name in wanted
        }
        self._fields = {name: chunks.column.field for name, chunks in self._columns.items()}
        self._ids = make_row_ids(
            ids,
            self._len,
            table.column_names,
            lambda name: self._id_blocks(name, table.column(name)),
            self._place,
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """So that it can be sent to another process: a data set on disk goes as its path."""
        return _reopened, (type(self), *self._given)

    def __len__(self) -> int:
        """How many records."""
        return self._len

    def __repr__(self) -> str:
        return f"HuggingFaceSource({self._len} records; {field_list(self._fields)})"

    @property
    def fields(self) -> Mapping[str, Field]:
        """Each field's dtype and per-record shape."""
        return self._fields

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        return self._ids(rows)

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape].

        Raises:
          IndexError: there is no such row.
          ValueError: a value is null, cannot be decoded or is not like the first, or a file of the data set
            has changed; names the row.
        """
        where = functools.partial(self._row_at, rows)
        return {
            name: self._columns[name].column.finish(values, where, self._threads)
            for name, values in self.stored(rows).items()
        }

    def stored(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """As `read`, but values that are decoded are still the bytes that they are stored as."""
        if rows.size and (rows.min() < 0 or rows.max() >= self._len):
            raise IndexError(f"rows run from 0 to {self._len - 1}, and these are {rows}")
        self._files.check_others()
        places, where = self._table_rows(rows), functools.partial(self._row_at, rows)
        self._files.check(places)
        located: dict[bytes, _Located] = {}
        found = {}
        for name, chunks in self._columns.items():
            if chunks.layout not in located:
                located[chunks.layout] = _Located(chunks.rows, places)
            found[name] = chunks.read(located[chunks.layout], where)
        return found

    def fingerprint(self) -> Fingerprint:
        """Reads all records, and digests them; of what is decoded, the bytes and how they are decoded."""
        decoders = {
            name: chunks.column.decode
            for name, chunks in self._columns.items()
            if chunks.column.decode is not None
        }
        if not decoders:
            return fingerprint(self)
        found = fingerprint(_StoredValues(self, decoders))
        columns = dict(found.columns)
        for name, decode in decoders.items():
            text = json.dumps([columns[name].digest, name_of(decode)])
            digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
            field = self._fields[name]
            columns[name] = ColumnDigest(str(field.dtype), field.shape, digest)
        # Marks are of what was digested, and a comparison would hold them against what is read.
        return dataclasses.replace(found, columns=columns, marks="")

    def _table_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the table that rows of the data set stand for."""
        if self._indices is None:
            return rows
        located = _Located(self._indices.rows, rows)
        found = self._indices.read(located, functools.partial(_row_of_indices, rows))
        return found.astype(np.int64)

    def _place(self, row: int) -> str:
        """The file that a row stands in, and its row there."""
        return self._files.place(int(self._table_rows(np.array([row], np.int64))[0]))

    def _row_at(self, rows: npt.NDArray[np.int64], place: int) -> str:
        """Names one of some rows, and the file that it stands in."""
        of_table = int(self._table_rows(rows[place : place + 1])[0])
        return f"row {rows[place]}{self._files.in_brackets(of_table)}"

    def _id_blocks(self, name: str, array: Any) -> Iterator[npt.NDArray[Any]]:
        """A column's values, in the order of the data set's rows; of others nothing is asked."""
        if self._indices is None:
            yield from self._stored_ids(name, array, None)
            return
        chosen = np.zeros(len(array), np.bool_)
        for rows in self._every_row():
            chosen[self._table_rows(rows)] = True
        kept = KeptIds(id_blocks(self._stored_ids(name, array, chosen), f"column {name!r}"))
        ranks = np.cumsum(chosen, dtype=np.int64) - 1
        for rows in self._every_row():
            yield kept.take(ranks[self._table_rows(rows)])

    def _stored_ids(
        self, name: str, array: Any, chosen: npt.NDArray[np.bool_] | None
    ) -> Iterator[npt.NDArray[Any]]:
        """A column's values in the order of the table: all, or those that are chosen."""
        start = 0
        for chunk in array.chunks:
            stop = start + len(chunk)
            rows = np.arange(start, stop)
            if chosen is not None:
                rows = rows[chosen[start:stop]]
            if len(rows):
                if self._files:
                    _check_chunk(self._files, name, chunk, start)
                some = chunk if len(rows) == len(chunk) else taken(chunk, rows - start)
                yield to_ids(name, some, functools.partial(self._row_of_table, rows))
            start = stop

    def _row_of_table(self, rows: npt.NDArray[np.int64], place: int) -> str:
        return f"row {rows[place]} of the table{self._files.in_brackets(int(rows[place]))}"

    def _every_row(self) -> Iterator[npt.NDArray[np.int64]]:
        for start in range(0, self._len, _ID_ROWS):
            yield np.arange(start, min(start + _ID_ROWS, self._len), dtype=np.int64)


def _reopened(
    kind: type[HuggingFaceSource],
    dataset: Any,
    columns: Sequence[str] | None,
    decode: Mapping[str, Decode] | None,
    fields: Mapping[str, Any] | None,
    ids: IdRule,
    threads: int | None,
) -> HuggingFaceSource:
    return kind(dataset, columns=columns, decode=decode, fields=fields, ids=ids, threads=threads)


class _StoredValues:
    """A data set with a digest of its bytes for each value that would be decoded."""

    def __init__(self, source: HuggingFaceSource, decoded: Collection[str]) -> None:
        self._source, self._decoded = source, decoded
        self.ids = source.ids
        digest = Field(np.dtype(np.uint8), (hashlib.sha256().digest_size,))
        self.fields = {**source.fields, **dict.fromkeys(decoded, digest)}

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        found = self._source.stored(rows)
        for name in self._decoded:
            digests = b"".join(hashlib.sha256(value).digest() for value in found[name])
            found[name] = np.frombuffer(digests, np.uint8).reshape(len(rows), -1)
        return found


class _Chunks:
    """A column of the table, in chunks, with what has been looked at of them."""

    def __init__(self, column: Column, chunks: list[Any], files: ArrowFiles) -> None:
        self.column, self._chunks = column, [without_views(chunk) for chunk in chunks]
        self._files = files
        #: Which chunks are known to be sound; those in memory are.
        self._sound = [not files] * len(chunks)
        self.rows = FileRows(np.cumsum([0, *map(len, chunks)]))
        self.layout = self.rows.starts.tobytes()
        self._views = is_view(chunks[0].type) and column.decode is None
        self._blocks: dict[int, Block] = {}

    @classmethod
    def of(
        cls,
        name: str,
        array: Any,
        files: ArrowFiles,
        first: int,
        decode: Decode | None = None,
        given: Field | None = None,
    ) -> "_Chunks":
        """From a column of an Arrow table, whose row ``first`` is like all others that will be read."""
        chunks = [chunk for chunk in array.chunks if len(chunk)]
        rows = FileRows(np.cumsum([0, *map(len, chunks)]))
        [[number], [place]] = rows.locate(np.array([first], np.int64))

        def value() -> Any:
            if files:
                _check_chunk(files, name, chunks[number], int(rows.starts[number]))
            return chunks[number].slice(place, 1)

        where = f"row {first} of the table{files.in_brackets(first)}"
        return cls(
            Column.of(name, array.type, decode, given, value, lambda _: where), chunks, files
        )

    def read(self, located: "_Located", where: Where) -> npt.NDArray[Any]:
        """Values of some rows, to be finished by the column."""
        made = self.column.empty(len(located))
        if not self._views:
            self._read_copied(made, located.groups, where)
        elif located.spread:
            # For a row or two of each chunk, a loop is faster than gathers.
            for place, (number, row) in enumerate(located.pairs):
                block = self._block(number)
                if isinstance(block, np.ndarray):
                    made[place] = block[row]
                else:
                    made[place] = self.column.pick(block, np.array([row]), _at(where, [place]))[0]
        else:
            for group in located.groups:
                block, at = self._block(group.file), _at(where, group.places)
                made[group.places] = self.column.pick(block, group.rows, at)
        return made

    def _read_copied(self, made: npt.NDArray[Any], groups: list[Group], where: Where) -> None:
        """Reads values that NumPy has in another form than Arrow: put together first, converted at once."""
        if not groups:
            return
        # One value is sliced out for a tenth of the cost of taking it.
        found = [
            self._chunk(group.file).slice(int(group.rows[0]), 1)
            if len(group.rows) == 1
            else taken(self._chunk(group.file), group.rows)
            for group in groups
        ]
        places = np.concatenate([group.places for group in groups])
        made[places] = self.column.read(in_one(found), _at(where, places))

    def _block(self, number: int) -> Block:
        found = self._blocks.get(number)
        if found is None:
            found = self._blocks[number] = self.column.block(self._chunk(number))
        return found

    def _chunk(self, number: int) -> Any:
        """A chunk, looked at before it is first used."""
        if not self._sound[number]:
            name, start = self.column.name, int(self.rows.starts[number])
            _check_chunk(self._files, name, self._chunks[number], start)
            self._sound[number] = True
        return self._chunks[number]


class _Located:
    """Where some rows are in the chunks of a column."""

    def __init__(self, chunks: FileRows, rows: npt.NDArray[np.int64]) -> None:
        self._chunks, self._rows = chunks, rows
        self._numbers, self._places = chunks.locate(rows)
        self.spread = np.count_nonzero(np.diff(np.sort(self._numbers))) * 3 > len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The rows of each chunk."""
        return self._chunks.groups(self._rows)

    @functools.cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Of each row, the chunk, and its number in it."""
        return list(zip(self._numbers.tolist(), self._places.tolist(), strict=True))


def _checked(dataset: Any) -> Any:
    datasets = needed("datasets", "huggingface")
    if isinstance(dataset, str | os.PathLike):
        dataset = _loaded(datasets, os.fspath(dataset))
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"this holds several splits: give one of them, such as dataset[{next(iter(dataset), 'train')!r}]"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"a datasets.Dataset or its folder is needed, not {type(dataset).__name__}; one that is "
            "streamed has no random access: download it first"
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the data set has a transform of its own, which would not be applied here: give "
            "dataset.with_format(None), and the transform to loader.Pipeline"
        )
    if len(dataset) == 0:
        raise ValueError("the data set holds no record")
    return dataset


def _loaded(datasets: Any, folder: str) -> Any:
    try:
        return datasets.load_from_disk(folder)
    except Exception as error:
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) is not None:
            raise  # it names the file that is not there, or may not be read
        raise ValueError(
            f"the data set in {folder!r} cannot be loaded, {file_at_fault(folder)} is cut or damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def _image_decoders(dataset: Any, names: Iterable[str]) -> dict[str, Decode]:
    """What decodes the columns of images, by the mode that each column's feature names."""
    decoders: dict[str, Decode] = {}
    for name in names:
        feature = dataset.features[name]
        if not isinstance(feature, needed("datasets", "huggingface").Image) or not feature.decode:
            continue
        if feature.mode is None:
            decoders[name] = decode_image
        elif feature.mode in CHANNELS_OF_MODES:
            shape = None, None, CHANNELS_OF_MODES[feature.mode]
            decoders[name] = functools.partial(decode_image, shape=shape)
        else:
            raise ValueError(
                f"column {name!r} has the feature Image(mode={feature.mode!r:.80}), and loader.decode_image converts "
                f"to {', '.join(CHANNELS_OF_MODES)} only: give a function that decodes the column, as decode, or cast the "
                "column to datasets.Image()"
            )
    return decoders


def _row_of_indices(rows: npt.NDArray[np.int64], place: int) -> str:
    return f"row {rows[place]}"


def _check_chunk(files: ArrowFiles, name: str, chunk: Any, start: int) -> None:
    """Raises for a chunk of a column, which begins at a row of the table, whose offsets are damaged."""
    stop = start + len(chunk) - 1
    check_sound(
        chunk,
        lambda: f"column {name!r}, rows {start} to {stop} of the table{files.in_brackets(start)},",
    )


def _at(where: Where, places: Sequence[int] | npt.NDArray[np.int64]) -> Where:
    return lambda place: where(int(places[place]))
