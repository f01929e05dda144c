"""Records in a folder with one memory-mapped ``.npy`` file for each field."""

import dataclasses
import logging
import mmap
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loader.identity.files import marks_of
from loader.identity.fingerprint import ColumnDigest, Fingerprint
from loader.sources.columns import check_fields
from loader.sources.digest_cache import check_cache
from loader.sources.digests import Cache, FileDigests
from loader.sources.files import FileRows, FileSet
from loader.sources.identifiers import ROW, IdRule, Ids, make_ids
from loader.sources.identity import FileIdentity
from loader.sources.npy_folder import DESCRIPTION, NpyField, NpyFolder
from loader.sources.protocol import Field, Verify, check_field, field_list
from loader.sources.read_ahead import ReadAhead
from loader.sources.unique import scan_ids

_log: Final = logging.getLogger(__name__)

_BLOCK_ROWS: Final = 1 << 18


class NpySource:
    """A `RecordSource` over a folder with one ``.npy`` file for each field, as ``regrain convert`` writes it.

    Files are memory-mapped: opening reads no field, and a batch is one gather from each. Before it, the
    file is looked at: one that has changed is an error, not other data. A folder of ``.npy`` files
    without a description can be read too: each is a field named as the file, and ``id.npy`` the IDs.

    A file in Fortran order is read correctly but slowly, since each record is spread over the whole file;
    a warning names it.

    Args:
      directory: the folder.
      fields: the dtypes of files whose headers cannot name them: ``{"x": ml_dtypes.bfloat16}`` for a file
        that ``numpy.save`` wrote. A folder with a description needs none.
      ids: ``None``, the folder's own IDs; ``"row"``, the row number (int64); the name of a field of
        integers or strings; or a function from ``int64[k]`` rows to int64[k] or k strings.
      cache: where digests of files are kept, so that files that did not change are not read again to
        identify them: ``True``, beside the data, or a folder; by default nowhere.

    Raises:
      FileNotFoundError: there is no such folder, or a file of the description is not in it.
      TypeError, ValueError: a file is cut, is no ``.npy`` file, holds Python objects or no record, or is
        not what the description says; files of unequal lengths; IDs that are not unique. Names the file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        fields: Mapping[str, Any] | None = None,
        ids: IdRule | None = None,
        cache: Cache = None,
    ) -> None:
        self._open(directory, fields, ids, cache, None)

    def _open(
        self,
        directory: str | os.PathLike[str],
        fields: Mapping[str, Any] | None,
        ids: IdRule | None,
        cache: Cache,
        files: FileSet | None,
    ) -> None:
        self._given = directory, fields, ids, cache
        root = pathlib.Path(directory)
        folder = _with_dtypes(NpyFolder.load(root), fields)
        id_file = folder.id_file if ids is None else None
        names = [one.file for one in folder.fields.values()] + ([id_file] if id_file else [])
        self.files = files or FileSet.open(root, [".npy"], names)
        maps = [_Map(self.files, number, one) for number, one in enumerate(folder.fields.values())]
        self._maps = dict(zip(folder.fields, maps, strict=True))
        self._len = _common_length(self._maps, folder)
        self._fields = {
            name: check_field(name, Field(one.array.dtype, one.array.shape[1:]))
            for name, one in self._maps.items()
        }
        self._reads = [(name, one.prepare, one.array) for name, one in self._maps.items()]
        self._reading = {
            "format": "npy",
            "files": {name: one.file for name, one in folder.fields.items()},
        }
        self._cache = check_cache(cache)
        #: By name, a mark of each file as it was last digested: tells which of them differ.
        self.file_marks: Mapping[str, str] = {}
        self._ids = self._made_ids(ids, id_file)

    def _made_ids(self, ids: IdRule | None, id_file: str | None) -> Ids:
        if id_file is not None:
            return _MappedIds(_Map(self.files, len(self.files) - 1, NpyField(id_file)), self._len)
        if ids is None or ids == ROW or callable(ids):
            whole = FileRows(np.array([0, self._len], np.int64))
            return make_ids(ROW if ids is None else ids, self.files, whole)
        if isinstance(ids, str) and ids in self._maps:
            return _MappedIds(self._maps[ids], self._len)
        raise ValueError(
            f'ids must be None, for those of the folder, "{ROW}", a function of rows, or a field, one of '
            f"{', '.join(self._maps)}; not {ids!r:.80}"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """So that it can be sent to another process, which maps the files itself."""
        return _reopened, (type(self), *self._given, self.files)

    def __len__(self) -> int:
        """How many records."""
        return self._len

    def __repr__(self) -> str:
        return (
            f"NpySource({str(self.files.root)!r}: {self._len} records; {field_list(self._fields)})"
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
        """All fields of ``rows: int64[k]``, one gather each: a fresh array, dtype[k, *shape].

        Raises:
          IndexError: there is no such row.
          ValueError: a file has changed since it was opened; names it and the first row.
        """
        made = {}
        for name, prepare, array in self._reads:
            prepare(rows)
            made[name] = array.take(rows, 0)
        return made

    def fingerprint(
        self, *, verify: Verify = "cache", digests: FileDigests | None = None
    ) -> Fingerprint:
        """Identity of the data: the files' names and bytes, the fields and the IDs.

        Args:
          verify: ``"cache"`` reads the files that have changed since they were last digested, which are
            all where the source keeps no cache; ``"full"`` reads all.
          digests: of files that others have digested already, from `digest_files` and `merge_digests`;
            they are not read here, whatever ``verify`` says.

        Raises:
          OSError: a file cannot be read.
          ValueError: a file has changed since the source was opened, or a digest is of another one.
        """
        identity = FileIdentity(
            self.files,
            [self._len] * len(self.files),
            self._len,
            self._fields,
            self._ids.column,
            self._reading,
            self._cache,
        )
        entries = identity.entries(verify, digests)
        self.file_marks = dict(zip(self.files.names, marks_of(entries), strict=True))
        return identity.fingerprint(entries)


class _Map:
    """A ``.npy`` file's array, memory-mapped for as long as this lives.

    The file stays open as well: what the system says of it then is about the bytes that are mapped, also
    where another file has taken its name.
    """

    def __init__(self, files: FileSet, number: int, field: NpyField) -> None:
        self._files, self._number, self.name = files, number, files.names[number]
        self._fd = os.open(files.path(number), os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._size, self._mtime_ns = files.states[number].size, files.states[number].mtime_ns
        files.check(number, fd=self._fd)
        self.array, memory = _mapped(files, number, field)
        self._ahead = ReadAhead(memory, self.array[:1].nbytes)

    def prepare(self, rows: npt.NDArray[np.int64]) -> None:
        """To be called before rows are read: raises if the file has changed; advises on reading ahead."""
        found = os.fstat(self._fd)
        if found.st_mtime_ns != self._mtime_ns or found.st_size != self._size:
            self._files.check(self._number, int(rows[0]) if len(rows) else None, fd=self._fd)
        self._ahead.advise(rows)


class _MappedIds:
    """IDs in a memory-mapped array."""

    def __init__(self, ids: _Map, total: int) -> None:
        self._map, self._total = ids, total
        try:
            self.column: Final = scan_ids(self._blocks, total)
        except (TypeError, ValueError) as error:
            raise type(error)(f"file {ids.name} cannot be the IDs: {error}") from error

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        for start in range(0, self._total, _BLOCK_ROWS):
            yield self._as_ids(self._map.array[start : start + _BLOCK_ROWS])

    def __call__(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        self._map.prepare(rows)
        return self._as_ids(self._map.array.take(rows, 0))

    def _as_ids(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{values.max()} does not fit int64")
        return values.astype(np.int64, copy=False) if values.dtype.kind in "iu" else values


def _mapped(files: FileSet, number: int, field: NpyField) -> tuple[npt.NDArray[Any], mmap.mmap]:
    """The array in a file, and the memory that it is in."""
    name = files.names[number]
    _check_start(files.path(number), name)
    try:
        mapped = np.load(files.path(number), mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged header has Python's parsers raise all kinds of them
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"file {name} cannot be read as .npy, or is cut: {why}") from error
    size, needed = files.states[number].size, mapped.offset + mapped.nbytes
    if size != needed:
        raise ValueError(f"file {name} has {size} bytes, and its header tells of {needed}")
    files.check(number)
    array, memory = np.asarray(mapped), mapped.base
    if array.ndim == 0 or not len(array):
        raise ValueError(f"file {name} holds no record: its shape is {list(array.shape)}")
    if field.dtype is not None:
        array = _of_dtype(array, field.dtype)
    elif array.dtype.type is np.void and array.dtype.names is None:
        key = name.removesuffix(".npy")
        raise TypeError(
            f"file {name} holds raw bytes, {array.dtype}, the form in which NumPy saves bfloat16 and the other "
            f"dtypes of ml_dtypes. Name the dtype, such as fields={{{key!r}: ml_dtypes.bfloat16}}, or write "
            "the data with loader.write_npy, which keeps the name"
        )
    dtype, shape = str(array.dtype), array.shape[1:]
    wanted = field.dtype or dtype, shape if field.shape is None else field.shape
    if (dtype, shape) != wanted:
        raise ValueError(
            f"file {name} holds records {dtype}{list(shape)}, and {DESCRIPTION} (or fields) says "
            f"{wanted[0]}{list(wanted[1])}; one of both is of another data set"
        )
    if not array.flags.c_contiguous:
        _log.warning(
            "file %s is in Fortran order: the values of one record are spread over the whole file, and a "
            "shuffled batch may take 200 times as long. Write it once in C order: numpy.save(file, "
            "numpy.ascontiguousarray(array)), or regrain convert",
            name,
        )
    return array, memory


def _check_start(path: str, name: str) -> None:
    """Raises for what is no ``.npy`` file, of which NumPy would say that it might be unpickled."""
    magic = np.lib.format.MAGIC_PREFIX
    with open(path, "rb") as file:  # noqa: PTH123 (the path is a text)
        start = file.read(len(magic))
    if start != magic:
        archive = ", as an archive of several arrays does" if start.startswith(b"PK") else ""
        raise ValueError(
            f"file {name} cannot be read as .npy: it begins with {start!r}{archive}, and such a file with "
            f"{magic!r}; it is cut, damaged, or of another format"
        )


def _of_dtype(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """An array whose dtype a ``.npy`` file cannot name, such as bfloat16, which it holds as raw bytes."""
    if array.dtype.type is np.void and array.dtype.names is None and hasattr(ml_dtypes, dtype):
        known = np.dtype(getattr(ml_dtypes, dtype))
        if known.itemsize == array.dtype.itemsize:
            return array.view(known)
    return array


def _with_dtypes(folder: NpyFolder, fields: Mapping[str, Any] | None) -> NpyFolder:
    """The folder, with the dtypes that the caller names for files that cannot name theirs."""
    given = check_fields(fields, folder.fields)
    if given and folder.num_records is not None:
        raise ValueError(
            f"fields names dtypes for {', '.join(map(repr, given))}, and {DESCRIPTION} in the folder names them "
            "already; leave fields out"
        )
    named = {
        name: NpyField(folder.fields[name].file, str(field.dtype), field.shape or None)
        for name, field in given.items()
    }
    return dataclasses.replace(folder, fields={**folder.fields, **named})


def _common_length(maps: Mapping[str, _Map], folder: NpyFolder) -> int:
    lengths = {one.name: len(one.array) for one in maps.values()}
    if folder.num_records is not None:
        lengths[DESCRIPTION] = folder.num_records
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the numbers of records differ: {listed}; a file is of another data set")
    return next(iter(lengths.values()))


def _reopened(
    kind: type[NpySource],
    directory: str | os.PathLike[str],
    fields: Mapping[str, Any] | None,
    ids: IdRule | None,
    cache: Cache,
    files: FileSet,
) -> NpySource:
    made = kind.__new__(kind)
    made._open(directory, fields, ids, cache, files)  # noqa: SLF001 (a constructor)
    return made
