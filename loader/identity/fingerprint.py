"""The identity of a data set: a digest of its IDs, field names, dtypes, shapes and bytes, in order.

A fingerprint is a small tree. Its leaf is the digest of one column (the IDs, or a field) over one
chunk of records, by the formula of `dataset_digest`. Upwards, a column's digest is that of its
leaves, and the whole digest that of all columns with their names, dtypes and shapes. Sideways, a
chunk's leaves over all columns give the chunk's mark: the marks are what lets a later comparison
say *which* records differ. There are at most 2,048 of them, so a fingerprint has a bounded size for
any number of records, and for up to 2,048 records a mark is one record.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from loader.identity.differences import Difference, in_print
from loader.identity.digests import ID_COLUMN, MARK_HEX, Leaves, digest_rows, raw_bytes
from loader.identity.files import FileMarks
from loader.identity.marks import Marked, changes_in_words
from loader.identity.records import (
    Field,
    Readable,
    check_unique,
    dtype_and_shape,
    has_ranges,
    reader_of,
)
from loader.progress import Work
from loader.reading.threads import usable_cores
from loader.sources.source_or_stream import check_is_no_stream

FINGERPRINT_VERSION: Final = 1
MAX_CHUNKS: Final = 2048

#: What a thread reads at a time, at least and at most, and in between as many pieces as even out the
#: threads' shares. Each piece costs some 30 us under Python's lock.
_READ_BYTES: Final = 1 << 20, 1 << 22
_PIECES: Final = 32
_UNIQUE_UP_TO: Final = 1 << 22
_COMPARED_UP_TO: Final = 1 << 17
_NAMED: Final = 8
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


_IdsOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class ColumnDigest:
    """Identity of one column: its dtype and per-record shape as text, and ``sha256:`` + 64 hex digits."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Identity of a data set.

    Attributes:
      num_records: how many records.
      columns: by name, the IDs (under ``"id"``) and each field.
      chunk_records: records to a mark.
      marks: 12 hex digits for each chunk, all in one string; empty where there are none.
      files: for records in files, their identity; ``None`` for others. Columns then say what the IDs
        are, and of fields their dtype and shape; the records themselves are covered by the files' bytes.
      digest: ``sha256:`` + 64 hex digits, over everything but the marks.
      ids: the IDs of all records, int64[num_records] or str[num_records], where they were read and a mark
        is one record; else ``None``. They name records in `diff`, and are neither compared nor stored.
    """

    num_records: int
    columns: Mapping[str, ColumnDigest]
    chunk_records: int
    # 24 KB of digits at the most, which would hide all else.
    marks: str = dataclasses.field(repr=False)
    files: FileMarks | None = None
    ids: npt.NDArray[Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Digest of the whole data set. Two data sets are the same if and only if it is equal."""
        columns = [
            [name, column.dtype, list(column.shape), column.digest]
            for name, column in sorted(self.columns.items())
        ]
        covered = [FINGERPRINT_VERSION, self.num_records, self.chunk_records, columns]
        if self.files is not None:
            covered.append([self.files.num_files, self.files.digest, self.files.reading])
        return _sha256(json.dumps(covered, sort_keys=True))

    @classmethod
    def of_revision(cls, revision: str, source: Readable) -> Self:
        """Identity by a name that the data's owner never reuses, for data too large to be read.

        It covers the revision's name, the number of records, and the fields' names, dtypes and
        shapes, but no content: only as good as the promise that a revision never changes.

        Args:
          revision: the name, such as that of a release or a commit.
          source: a `RecordSource`, of which length and fields are asked for, and no record.

        Raises:
          TypeError: ``source`` is no source.
          ValueError: an empty name, or none.
        """
        if not isinstance(revision, str) or not revision:
            raise ValueError(f"revision must be a name, not {revision!r}")
        if not isinstance(getattr(source, "fields", None), Mapping) or not hasattr(
            source, "__len__"
        ):
            what = (
                f"the class {source.__name__}"
                if isinstance(source, type)
                else f"a {type(source).__name__}"
            )
            raise TypeError(
                f"{what} has no fields and length to identify: give the source itself, a RecordSource with "
                'fields such as {"x": loader.Field(dtype, shape)}'
            )
        specs = {ID_COLUMN: ("unread", ())} | {
            name: (str(dtype_and_shape(field)[0]), dtype_and_shape(field)[1])
            for name, field in source.fields.items()
        }
        columns = {
            name: ColumnDigest(dtype, shape, _sha256(json.dumps(["revision", revision, name])))
            for name, (dtype, shape) in specs.items()
        }
        return cls(len(source), columns, max(1, len(source)), "")

    @classmethod
    def of_files(
        cls,
        num_records: int,
        ids: ColumnDigest,
        fields: Mapping[str, Field],
        files: FileMarks,
    ) -> Self:
        """Identity of records in files, by their bytes.

        Args:
          num_records: how many records, in all files.
          ids: kind and digest of the IDs.
          fields: dtype and per-record shape of each field.
          files: the files.
        """
        columns = {ID_COLUMN: ids}
        for name, field in fields.items():
            dtype, shape = dtype_and_shape(field)
            digest = _sha256(json.dumps(["files", name, str(dtype), shape]))
            columns[name] = ColumnDigest(str(dtype), shape, digest)
        return cls(num_records, columns, num_records, "", files)

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; at most 24 KiB and some 150 bytes a field. `from_dict` is the inverse.

        Settings of how records are read from files come on top, at most 16 KiB.
        """
        value = {
            "version": FINGERPRINT_VERSION,
            "digest": self.digest,
            "num_records": self.num_records,
            "columns": {
                name: {"dtype": column.dtype, "shape": list(column.shape), "digest": column.digest}
                for name, column in self.columns.items()
            },
            "chunk_records": self.chunk_records,
            "marks": self.marks,
        }
        return value if self.files is None else value | {"files": self.files.to_dict()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` wrote.

        Raises:
          ValueError: another version, a value of the wrong kind, or a digest that does not hold.
        """
        try:
            if _count(value["version"]) != FINGERPRINT_VERSION:
                raise ValueError(
                    f"fingerprint version {value['version']!r} is not {FINGERPRINT_VERSION}"
                )
            columns = {
                _text(name): ColumnDigest(
                    _text(column["dtype"]),
                    tuple(_count(side) for side in column["shape"]),
                    _text(column["digest"], _DIGEST),
                )
                for name, column in value["columns"].items()
            }
            made = cls(
                _count(value["num_records"]),
                columns,
                _count(value["chunk_records"]),
                _text(value["marks"], re.compile(r"([0-9a-f]{12}){0,2048}")),
                FileMarks.from_dict(value["files"]) if "files" in value else None,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a fingerprint: {error!r}") from error
        if made.digest != value.get("digest"):
            raise ValueError("not a fingerprint: its digest does not hold")
        if made.chunk_records == 0 or (
            made.marks and len(_chunks(made)) != -(-made.num_records // made.chunk_records)
        ):
            raise ValueError(
                f"not a fingerprint: {len(_chunks(made))} marks of {made.chunk_records} records "
                f"each do not cover {made.num_records} records"
            )
        return made

    def diff(self, other: "Fingerprint", source: Readable | None = None) -> list[Difference]:
        """How ``other`` (the data now) differs from this one (the data of a checkpoint).

        Args:
          other: the later fingerprint.
          source: the data of ``other``; with it, differing records are named by their IDs, and so
            they are where ``other`` has ``ids``.

        Returns:
          One `Difference` for the number of records, the IDs and each field that differs; empty if
          and only if the digests are equal. Names begin with ``dataset.``. The note names records that
          were edited, moved, removed, inserted and appended, or above 2,048 records the rows among which
          they are. If the number of records differs, it has the note; the digests then do not show in
          which field a record was edited. Records in files have one `Difference` for all files, whose note
          does the same for files, and one for each setting of how they are read.
        """
        if self.digest == other.digest:
            return []
        found = []
        words = self._in_words(other, source)
        if self.num_records != other.num_records:  # then columns differ in any case
            counts = str(self.num_records), str(other.num_records)
            found.append(Difference("dataset.num_records", *counts, words))
            words = ""
        several = sum(self.columns.get(name) != c for name, c in other.columns.items()) > 1
        if several and words and "; " not in words and not words.startswith("the same"):
            words += " in some field"
        found += self._file_differences(other, source)
        comparable = (self.files is None) == (other.files is None)
        names = in_print({*self.columns, *other.columns})
        for name in sorted(names, key=lambda name: (name != "id", name)):
            before, after = self.columns.get(name), other.columns.get(name)
            label = f"dataset.{names[name]}"
            if before is None or after is None:
                found.append(Difference(label, _brief(before), _brief(after)))
            elif (before.dtype, before.shape) != (after.dtype, after.shape):
                found.append(Difference(label, _kind(before), _kind(after)))
            elif before.digest != after.digest and comparable:
                found.append(Difference(label, _brief(before), _brief(after), words))
        return found

    def _file_differences(self, other: "Fingerprint", source: object) -> list[Difference]:
        before, after = self.files, other.files
        if before is None or after is None:
            note = "records in files are known by the files' bytes, and others by their own"
            pair = _brief(before), _brief(after)
            return [] if before is after else [Difference("dataset.files", *pair, note)]
        found = []
        if before.digest != after.digest:
            marks: Mapping[str, str] = getattr(source, "file_marks", None) or after.single
            note = before.compared(after, list(marks), list(marks.values()))
            found.append(Difference("dataset.files", _brief(before), _brief(after), note))
        for key in sorted({*before.reading, *after.reading}):
            was, now = before.setting(key), after.setting(key)
            if was != now:
                found.append(Difference(f"dataset.reading.{key}", was, now))
        return found

    def _marks_of(self, other: "Fingerprint", source: Readable | None) -> list[str] | None:
        """The other's marks, of as many records each as this fingerprint's; ``None`` if nothing tells."""
        if not self.marks or not other.marks or _kinds(self) != _kinds(other):
            return None  # a mark is of all fields: with another field, every one of them differs
        if self.chunk_records == other.chunk_records:
            return _chunks(other)
        if source is None:
            return None
        stop = other.num_records
        if stop > self.chunk_records * _COMPARED_UP_TO:
            stop = min(stop, self.num_records)
        return _chunks(leaves(source, self.chunk_records, stop=stop))

    def _in_words(self, other: "Fingerprint", source: Readable | None) -> str:
        """Which records differ, as far as the marks tell."""
        marks = self._marks_of(other, source)
        if marks is None:
            return ""

        def mark_of(start: int, stop: int) -> str | None:
            if source is None or start % self.chunk_records:
                return None
            return leaves(source, self.chunk_records, start, stop).marks

        before = Marked(_chunks(self), self.chunk_records, self.num_records)
        after = Marked(marks, self.chunk_records, other.num_records)
        # Only the old ID could show whether an edited record is still the same one.
        edited = "edited" if self.columns["id"] == other.columns["id"] else "edited or replaced"
        return changes_in_words(before, after, _RecordNames(other, source, edited), mark_of)


@dataclasses.dataclass(frozen=True)
class _RecordNames:
    """Records by ID if these are known, else by row."""

    of: Fingerprint
    source: Readable | None
    edited: str
    thing: str = "record"
    chunks: str = "chunks"
    before_span: str = "rows "

    def some(self, places: Sequence[int], *, now: bool) -> str:
        ids_of = _lookup(self.of, self.source) if now else None
        if ids_of is not None:
            ids = ids_of(np.array(places[:_NAMED], np.int64)).tolist()
            return "id " + ", ".join(map(str, ids)) + (", ..." if len(places) > _NAMED else "")
        breaks = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
        spans = [
            str(places[low]) if high == low + 1 else f"{places[low]}-{places[high - 1]}"
            for low, high in itertools.pairwise([0, *breaks, len(places)])
        ]
        rows = "row " if len(places) == 1 else "rows "
        return rows + ", ".join(spans[:_NAMED]) + (", ..." if len(spans) > _NAMED else "")

    def span(self, first: int, last: int, *, now: bool) -> str:
        del now
        return str(first) if first == last else f"{first}-{last}"


def _lookup(of: Fingerprint, source: Readable | None) -> _IdsOf | None:
    """From rows to IDs, by the source or by what its fingerprint has kept; ``None`` if neither tells."""
    if source is not None:
        return source.ids
    return None if of.ids is None else of.ids.take


def dataset_digest(*arrays: npt.ArrayLike) -> str:
    """SHA-256 over each array's dtype, shape and bytes, in turn.

    The formula of the lesson "Design an input pipeline": for each array, ``str(dtype)``,
    ``str(shape)`` and the bytes in C order. Bytes of an element that are part of no value (of a
    `numpy.longdouble`, say) count as zeros.

    Args:
      *arrays: arrays of any dtype but object.

    Returns:
      64 hex digits.

    Raises:
      TypeError: an array of Python objects, whose bytes are addresses and identify nothing.
    """
    digest = hashlib.sha256()
    for given in arrays:
        array = np.asarray(given)
        if array.dtype.hasobject:
            raise TypeError(
                f"an array of dtype {array.dtype} has no bytes of its own to digest; "
                "give it a fixed dtype"
            )
        digest.update(str(array.dtype).encode())
        digest.update(str(array.shape).encode())
        digest.update(raw_bytes(array))
    return digest.hexdigest()


def fingerprint(
    source: Readable, *, chunk_records: int | None = None, workers: int | None = None
) -> Fingerprint:
    """Reads a whole source and digests it, on all cores.

    Args:
      source: a `RecordSource`.
      chunk_records: records to a mark; by default the smallest power of two that gives at most
        2,048 marks.
      workers: how many threads read and digest, which changes nothing but the time; with 1 it is the
        calling thread, which reads all rows in order. By default one for each usable core, or, if
        the source has no ``read_range``, two, as one may wait for what it reads. None is left on
        return.

    Returns:
      Its `Fingerprint`. Memory is bounded: each thread holds some 4 MiB, or one record, at a time.

    Raises:
      ValueError: the source gives something else than its ``fields`` say, an ID that padding uses
        (-1 or ""), integers and strings as IDs, or, among up to 4,194,304 records, an ID twice.
      TypeError: it is no source.
      Exception: any that the source raises; of several, that of the first rows.
    """
    check_is_no_stream(source)
    if not hasattr(source, "fields") or not hasattr(source, "read"):
        raise TypeError(
            f"source must be a RecordSource, such as an ArraySource, not {type(source).__name__}: a sequence of "
            "records is one as SequenceSource(records), and arrays are as ArraySource"
        )
    total = len(source)
    chunk = default_chunk_records(total) if chunk_records is None else chunk_records
    ids: dict[int, npt.NDArray[Any]] | None = {} if total <= _UNIQUE_UP_TO else None
    found = leaves(source, chunk, workers=workers, ids=ids)
    every = np.concatenate([ids[start] for start in sorted(ids)]) if ids else None
    if every is not None:
        check_unique(every)
    columns = {
        name: ColumnDigest(
            column.dtype, column.shape, "sha256:" + hashlib.sha256(column.digests).hexdigest()
        )
        for name, column in found.columns.items()
    }
    return Fingerprint(total, columns, chunk, found.marks, ids=every if chunk == 1 else None)


def leaves(
    source: Readable,
    chunk_records: int,
    start: int = 0,
    stop: int | None = None,
    *,
    workers: int | None = None,
    ids: dict[int, npt.NDArray[Any]] | None = None,
) -> Leaves:
    """Reads and digests some rows of a source; `Leaves.merge` puts several such parts together.

    Args:
      source: a `RecordSource`.
      chunk_records: records to a mark.
      start: the first row, a multiple of ``chunk_records``.
      stop: one past the last row, a multiple too or the number of records; ``None`` is that number.
      workers: as for `fingerprint`.
      ids: takes the IDs up, by the first of the rows that they were read with.

    Raises:
      ValueError: as `fingerprint`, but for an ID that is there twice; no chunk begins at ``start``.
      Exception: as `fingerprint`.
    """
    if chunk_records < 1:
        raise ValueError(f"chunk_records must be at least 1, not {chunk_records}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if start % chunk_records:
        raise ValueError(f"row {start} is not where a chunk of {chunk_records} records begins")
    specs = {name: dtype_and_shape(field) for name, field in source.fields.items()}
    stop = len(source) if stop is None else stop
    record_bytes = 8 + sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs.values())
    ranged = has_ranges(source)
    piece = min(max((stop - start) * record_bytes // _PIECES, _READ_BYTES[0]), _READ_BYTES[1])
    piece_records = max(1, piece // record_bytes)
    read = reader_of(source, specs, piece_records)

    def read_and_keep(low: int, high: int) -> Mapping[str, npt.NDArray[Any]]:
        arrays = read(low, high)
        if ids is not None:
            ids[low] = arrays[ID_COLUMN]
        work.advance((high - low) * record_bytes)
        return arrays

    what = f"fingerprint of {type(source).__name__.lstrip('_')}"
    with Work(what, (stop - start) * record_bytes, "bytes") as work:
        return digest_rows(
            read_and_keep,
            start,
            stop,
            chunk_records=chunk_records,
            kinds={name: (str(dtype), shape) for name, (dtype, shape) in specs.items()},
            piece_records=piece_records,
            threads=workers or usable_cores() * (1 if ranged else 2),
        )


def default_chunk_records(num_records: int) -> int:
    """Records to a mark: the smallest power of two that gives at most `MAX_CHUNKS` of them."""
    return 1 << max(0, (-(-num_records // MAX_CHUNKS) - 1).bit_length())


def _chunks(of: Fingerprint | Leaves) -> list[str]:
    return [of.marks[i : i + MARK_HEX] for i in range(0, len(of.marks), MARK_HEX)]


def _sha256(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _brief(of: ColumnDigest | FileMarks | None) -> str:
    return "absent" if of is None else of.digest[:19] + "..."


def _kind(column: ColumnDigest) -> str:
    return f"{column.dtype}{list(column.shape)}"


def _kinds(of: Fingerprint) -> dict[str, str]:
    return {name: _kind(column) for name, column in of.columns.items()}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _text(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
        raise TypeError(f"{value!r:.80} is not the text expected there")
    return value
