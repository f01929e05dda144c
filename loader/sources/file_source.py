"""What all sources over files share: everything but how one file is opened and read."""

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.identity.files import marks_of
from loader.identity.fingerprint import ColumnDigest, Fingerprint
from loader.sources.digest_cache import check_cache
from loader.sources.digests import Cache, FileDigests
from loader.sources.files import FileRows, FileSet
from loader.sources.identifiers import IdRule, make_ids
from loader.sources.identity import FileIdentity
from loader.sources.protocol import Field, Verify, check_field, field_list


class FileSource(abc.ABC):
    """A `RecordSource` over files of one format. A subclass opens them, says what they hold, and reads.

    A subclass's ``__init__`` looks at its files (`FileSet.open`), finds out how many records and which
    fields they hold, and hands that on to this one. Then `read_file` reads some records of one file,
    and, where IDs may be a column, `read_column` a whole column of one.

    Args:
      files: the files.
      counts: how many records each holds, ``int64[num_files]``.
      fields: dtype and per-record shape of each field.
      ids: ``"file:row"`` (strings such as ``train/0001.parquet:17``), ``"row"`` (int64, over all
        files), a column's name, or a function from ``int64[k]`` rows to int64[k] or k strings.
      columns: what ``ids`` may name.
      reading: settings of the source that decide what a record is, beside the files: the format, a
        window's length, an image's size. Small JSON values. They are part of the fingerprint, and a
        resume names each that differs.
      cache: where digests of files are kept, so that files that did not change are not read again to
        identify them: ``True``, beside the data, or a folder; by default nowhere.

    Raises:
      TypeError, ValueError: a file without records, bad fields, IDs that are not unique.
    """

    def __init__(
        self,
        files: FileSet,
        counts: Sequence[int] | npt.NDArray[np.int64],
        fields: Mapping[str, Field],
        *,
        ids: IdRule,
        columns: Collection[str] = (),
        reading: Mapping[str, Any],
        cache: Cache = None,
    ) -> None:
        self.files = files
        self.file_rows = FileRows.of(files, counts)
        self._fields = {name: check_field(name, field) for name, field in fields.items()}
        self._ids = make_ids(
            ids, files, self.file_rows, columns=columns, read_column=self.read_column
        )
        self._reading, self._cache = dict(reading), check_cache(cache)
        #: By name, a mark of each file as it was last digested: tells which of them differ.
        self.file_marks: Mapping[str, str] = {}

    @abc.abstractmethod
    def read_file(
        self, number: int, rows: npt.NDArray[np.int64], /
    ) -> Mapping[str, npt.NDArray[Any]]:
        """All fields of some rows of one file; may be called by several threads.

        Call ``self.files.check(number, row)`` where a changed file would not be noticed otherwise.

        Args:
          number: of the file.
          rows: in the file, ``int64[k]``, rising; one may come several times.

        Returns:
          For each field a fresh array, dtype[k, *shape].

        Raises:
          ValueError, OSError: a record cannot be read; names file and row.
        """

    def read_column(
        self, name: str, number: int, /
    ) -> npt.NDArray[Any] | Iterable[npt.NDArray[Any]]:
        """All of a column of one file, one axis, or parts of it: for IDs. Only where ``columns`` are given."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many records."""
        return len(self.file_rows)

    def __repr__(self) -> str:
        count = f"{len(self)} records in {len(self.files)} files"
        return (
            f"{type(self).__name__}({str(self.files.root)!r}: {count}; {field_list(self._fields)})"
        )

    @property
    def fields(self) -> Mapping[str, Field]:
        """Each field's dtype and per-record shape."""
        return self._fields

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        return self._ids(rows)

    @property
    def id_column(self) -> ColumnDigest:
        """What the fingerprint says of the IDs, without reading the data."""
        return self._ids.column

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``, one read of each file: for each a fresh array, dtype[k, *shape]."""
        groups = self.file_rows.groups(rows)
        made = {
            name: np.empty((len(rows), *field.shape), field.dtype)
            for name, field in self._fields.items()
        }
        for group in groups:
            part = self.read_file(group.file, group.rows)
            for name, array in made.items():
                array[group.places] = part[name]
        return made

    def fingerprint(
        self, *, verify: Verify = "cache", digests: FileDigests | None = None
    ) -> Fingerprint:
        """Identity of the data: the files' names and bytes, the fields, the IDs, and how records are read.

        Args:
          verify: ``"cache"`` reads the files that have changed since they were last digested, which
            are all where the source keeps no cache; ``"full"`` reads all.
          digests: of files that others have digested already, from `digest_files` and `merge_digests`; they are
            not read here, whatever ``verify`` says.

        Raises:
          ValueError: a file has changed since the source was opened, or has another size where it was
            digested; names it.
          OSError: a file cannot be read.
        """
        identity = FileIdentity(
            self.files,
            self.file_rows.counts,
            len(self),
            self._fields,
            self._ids.column,
            self._reading,
            self._cache,
        )
        entries = identity.entries(verify, digests)
        self.file_marks = dict(zip(self.files.names, marks_of(entries), strict=True))
        return identity.fingerprint(entries)
