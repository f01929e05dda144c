"""Records in ArrayRecord files, Grain's own format: random reads of whole records, each of them bytes."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.sources.array_record_readers import Readers, array_record
from loader.sources.columns import (
    Entries,
    Where,
    check_fields,
    chosen_columns,
    field_like,
    put,
    room,
    stacked,
)
from loader.sources.decoding import (
    Decode,
    check_decoders,
    check_threads,
    decoded,
    each,
    name_of,
)
from loader.sources.digests import Cache
from loader.sources.file_source import FileSource
from loader.sources.files import Data, FileRows, FileSet, Names
from loader.sources.identifiers import IdRule
from loader.sources.new_paths import new_file
from loader.sources.protocol import Field
from loader.sources.records import decode_record, encode_record, layout_of

#: From a record's bytes to its entries: the fields, and what ``ids`` may name.
DecodeRecord = Callable[[bytes], Mapping[str, Any]]

_COLUMN_ROWS: Final = 1 << 12


class ArrayRecordSource(FileSource):
    """A `RecordSource` over ArrayRecord files: one read of each file a batch, and each record decoded.

    A random read takes some 4 us a record of less than a kB, from files written with ``group_size:1``,
    as `write_array_record` writes them. In larger groups a read of one record decodes all of its group:
    a warning is logged.

    Args:
      data: a file, or a folder with files ``*.array_record`` or ``*.arrayrecord`` somewhere below;
        ``-00001-of-00008`` may follow. An open file takes 9 bytes of memory a record.
      decode: how a record's bytes become arrays. ``None``: it is one of `encode_record`, of which
        thousands are decoded at once. A mapping: as ``None``, and these of its entries, which are
        bytes, are decoded by functions: ``{"image": loader.decode_image}``. A function: from a
        record's bytes to a dict of arrays. Functions are called by several threads, and known to
        checkpoints by name, arguments (of a ``functools.partial``) and attribute ``version``.
      columns: which entries of a record are fields; by default all but the one that ``ids`` names, and
        no record may have others than the first. Where you list them, other entries are in no batch.
      fields: dtype and per-record shape of entries of which the first record does not tell it: where
        ``decode`` gives strings, ``{"word": "U32"}``. By default as in the first record.
      ids: ``"file:row"``, ``"row"``, a function of rows, or the name of an entry, for which all
        records are read at once.
      names: of the folder's files, in the order wanted, or a pattern such as ``"train-*"``; by default
        all, sorted, unless they are of several splits.
      split: a word of the names of the files to read, such as ``"train"``.
      threads: how many decode where it takes time; by default one for each usable core. They end with
        the read.
      cache: where digests of files are kept; by default nowhere.

    Raises:
      FileNotFoundError, OSError: a file is not there, or cannot be read.
      TypeError, ValueError: a bad argument; a file that is no ArrayRecord file, is cut or holds no
        record; a first record that cannot be decoded. Names the file and row.
    """

    def __init__(
        self,
        data: Data,
        *,
        decode: DecodeRecord | Mapping[str, Decode] | None = None,
        columns: Sequence[str] | None = None,
        fields: Mapping[str, Any] | None = None,
        ids: IdRule = "file:row",
        names: Names = None,
        split: str | None = None,
        threads: int | None = None,
        cache: Cache = None,
    ) -> None:
        files = FileSet.open(data, [".array_record", ".arrayrecord"], names, split)
        self._readers = Readers(files)
        self._decoding = _decoding(decode, check_threads(threads))
        counts = self._readers.counts()
        FileRows.of(files, counts)  # refuses files without records, before the first one is read
        where = functools.partial(_where, files, 0, [0])
        first = self._decoding.entries(self._readers.read(0, [0])[0], where, 0)
        self._entries = Entries.like(first, columns, ids)
        wanted = chosen_columns(first, columns, ids)
        known = check_fields(fields, wanted)
        for name in wanted:
            if name not in known:
                known[name] = _field_of(name, first[name], where)
        super().__init__(
            files,
            counts,
            {name: known[name] for name in wanted},
            ids=ids,
            columns=first,
            reading={"format": "array_record", "decode": self._decoding.identity},
            cache=cache,
        )

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape].

        Raises:
          IndexError: there is no such row.
          ValueError: a record cannot be read or decoded, is not like the first, has an entry that this
            one has not, or its file has changed; names file and row.
        """
        records = [b""] * len(rows)
        for group in self.file_rows.groups(rows):
            found = self._readers.read(group.file, group.rows.tolist())
            for place, record in zip(group.places.tolist(), found, strict=True):
                records[place] = record

        def where(place: int) -> str:
            [number], [row] = self.file_rows.locate(rows[place : place + 1])
            return f"file {self.files.names[number]}, row {row}"

        return self._decoding.decode(records, self._fields, self._entries, where)

    def read_file(self, number: int, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of some rows of one file, ``int64[k]``, as ``FileSource.read_file`` has it."""
        return self.read(rows + self.file_rows.starts[number])

    def read_column(self, name: str, number: int, /) -> Iterator[npt.NDArray[Any]]:
        """An entry of all records of a file, some at a time."""
        total = int(self.file_rows.counts[number])
        for start in range(0, total, _COLUMN_ROWS):
            rows = list(range(start, min(start + _COLUMN_ROWS, total)))
            records = self._readers.read(number, rows)
            where = functools.partial(_where, self.files, number, rows)
            yield self._decoding.column(name, records, self._entries, where)


def write_array_record(
    path: Data,
    records: Iterable[Mapping[str, npt.ArrayLike | bytes]],
    options: str = "group_size:1",
) -> None:
    """Writes records to an ArrayRecord file that `ArrayRecordSource` reads as it is.

    Args:
      path: of the file, usually ``*.array_record``. It is there when it is complete, and not before.
      records: as for `encode_record`.
      options: of ArrayRecord's writer. In groups of one record, random reads are fastest.

    Raises:
      TypeError, ValueError: a record that cannot be encoded, or none.
      FileExistsError: there is something of that name.
      OSError: the file cannot be written.
    """
    target = pathlib.Path(path)
    with new_file(target) as partial:
        writer = array_record().ArrayRecordWriter(str(partial), options)
        count = 0
        try:
            for record in records:
                writer.write(encode_record(record))
                count += 1
            if not count:
                raise ValueError(f"there is no record to write to {str(target)!r}")
            writer.close()
        except RuntimeError as error:
            raise OSError(f"{str(target)!r} cannot be written: {error}") from error
        finally:
            with contextlib.suppress(RuntimeError):
                writer.close()


class _Encoded:
    """How records of `encode_record` are decoded: at once, but for entries that functions decode."""

    def __init__(self, decoders: Mapping[str, Decode], threads: int) -> None:
        self._decoders, self._threads = dict(decoders), threads
        self.identity = {name: name_of(decode) for name, decode in sorted(decoders.items())}

    def entries(self, record: bytes, where: Where, place: int) -> dict[str, Any]:
        """All entries of one record."""
        found: dict[str, Any] = decoded("the record", decode_record, record, where, place)
        for name, decode in self._decoders.items():
            if not isinstance(found.get(name), bytes):
                raise ValueError(
                    f"{where(place)}: the record has no bytes named {name!r} to be decoded; it has "
                    f"{', '.join(found)}"
                )
            found[name] = decoded(f"field {name!r}", decode, found[name], where, place)
        return found

    def decode(
        self,
        records: Sequence[bytes],
        fields: Mapping[str, Field],
        known: Entries,
        where: Where,
    ) -> dict[str, npt.NDArray[Any]]:
        """Fields of some records, each an array dtype[k, *shape]."""
        made = self._at_once(records)
        if (
            made is not None
            and known.allow(made)
            and all(
                name in made
                and (made[name].dtype, made[name].shape[1:]) == (field.dtype, field.shape)
                for name, field in fields.items()
            )
        ):
            return {name: made[name] for name in fields}
        return _one_by_one(self.entries, records, fields, known, where, self._threads)

    def column(
        self, name: str, records: Sequence[bytes], known: Entries, where: Where
    ) -> npt.NDArray[Any]:
        """One entry of some records."""
        made = self._at_once(records)
        if made is not None and name in made and known.allow(made):
            return made[name]
        return _column(self.entries, name, records, known, where)

    def _at_once(self, records: Sequence[bytes]) -> dict[str, npt.NDArray[Any]] | None:
        if self._decoders or not records:
            return None
        with contextlib.suppress(ValueError):  # one by one, the record at fault is found
            return layout_of(records[0]).decode_all(records)
        return None


class _Decoded:
    """How records of any other kind are decoded: by a function, one by one."""

    def __init__(self, decode: DecodeRecord, threads: int) -> None:
        self._decode, self._threads = decode, threads
        self.identity = name_of(decode)

    def entries(self, record: bytes, where: Where, place: int) -> Mapping[str, Any]:
        """All entries of one record."""
        found = decoded("the record", self._decode, record, where, place)
        if not isinstance(found, Mapping) or not found:
            raise ValueError(
                f"{where(place)}: {self.identity} must give a dict of arrays, not {found!r:.80}"
            )
        return found

    def decode(
        self,
        records: Sequence[bytes],
        fields: Mapping[str, Field],
        known: Entries,
        where: Where,
    ) -> dict[str, npt.NDArray[Any]]:
        """Fields of some records, each an array dtype[k, *shape]."""
        return _one_by_one(self.entries, records, fields, known, where, self._threads)

    def column(
        self, name: str, records: Sequence[bytes], known: Entries, where: Where
    ) -> npt.NDArray[Any]:
        """One entry of some records."""
        return _column(self.entries, name, records, known, where)


_Entries = Callable[[bytes, Where, int], Mapping[str, Any]]


def _decoding(decode: Any, threads: int) -> _Encoded | _Decoded:
    if decode is None:
        return _Encoded({}, threads)
    if isinstance(decode, Mapping):
        return _Encoded(check_decoders(decode), threads)
    if callable(decode):
        return _Decoded(decode, threads)
    raise TypeError(
        "decode must be a function of a record's bytes, a mapping from entries to functions of theirs, or "
        f"None, not {decode!r:.80}"
    )


def _one_by_one(
    entries: _Entries,
    records: Sequence[bytes],
    fields: Mapping[str, Field],
    known: Entries,
    where: Where,
    threads: int,
) -> dict[str, npt.NDArray[Any]]:
    made = room(fields, len(records))

    def task(place: int) -> None:
        record = entries(records[place], where, place)
        known.check(record, where, place)
        put(made, fields, record, where, place)

    each(task, len(records), threads)
    return made


def _column(
    entries: _Entries, name: str, records: Sequence[bytes], known: Entries, where: Where
) -> npt.NDArray[Any]:
    found = [entries(record, where, place) for place, record in enumerate(records)]
    known.check_all(found, where)
    return stacked(name, found, where)


def _where(files: FileSet, number: int, rows: Sequence[int], place: int) -> str:
    return f"file {files.names[number]}, row {rows[place]}"


def _field_of(name: str, value: Any, where: Where) -> Field:
    if isinstance(value, bytes):
        raise ValueError(
            f"{where(0)}: {name!r} is bytes, which have no shape: decode them, decode={{{name!r}: "
            "loader.decode_image}, or list the columns without it"
        )
    try:
        return field_like(name, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where(0)}: {error}") from error
