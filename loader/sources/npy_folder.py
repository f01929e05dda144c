"""A folder with one ``.npy`` file for each field: what its description says, and how it is written.

The description, ``regrain.json``, stands beside the files:

    {"format": "regrain-npy", "version": 1, "num_records": 1797, "ids": "id.npy",
     "fields": {"image": {"file": "image.npy", "dtype": "uint8", "shape": [8, 8]}}}

``ids`` names a file of IDs, int64[n] or strings, or is ``"row"``.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt

from loader.identity.records import check_ids, read_fields, read_ids
from loader.progress import Work, counted
from loader.sources.files import check_one_split, checked_name
from loader.sources.new_paths import new_folder
from loader.sources.protocol import Field, RecordSource, check_source, is_extended

DESCRIPTION: Final = "regrain.json"
FORMAT: Final = "regrain-npy"
VERSION: Final = 1
ID_FILE: Final = "id.npy"
ROW_IDS: Final = "row"

_MAX_DESCRIPTION_BYTES: Final = 1 << 22
_BLOCK_BYTES: Final = 1 << 24
_BLOCK_IDS: Final = 1 << 18
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclasses.dataclass(frozen=True)
class NpyField:
    """A field's file, and, where a description tells, its dtype and per-record shape."""

    file: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class NpyFolder:
    """What a folder of ``.npy`` files holds.

    Attributes:
      fields: by name.
      id_file: the file of the IDs; ``None`` where they are row numbers.
      num_records: how many records; ``None`` where there is no description.
    """

    fields: Mapping[str, NpyField]
    id_file: str | None
    num_records: int | None

    @classmethod
    def load(cls, root: pathlib.Path) -> Self:
        """From the description in a folder; where there is none, from the names of its ``.npy`` files.

        Raises:
          FileNotFoundError: there is no such folder, or it holds neither.
          ValueError: the description cannot be read, or there is no field; names the file. Without a
            description, files of several splits.
        """
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {str(root)!r}")
        path = root / DESCRIPTION
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_DESCRIPTION_BYTES + 1)
        except FileNotFoundError:
            return cls._undescribed(root)
        try:
            if len(text) > _MAX_DESCRIPTION_BYTES:
                raise ValueError(f"it has more than {_MAX_DESCRIPTION_BYTES} bytes")
            return cls._parsed(json.loads(text))
        except KeyError as error:
            raise ValueError(f"file {path} is no description: it has no {error}") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"file {path} is no description: {error}") from error

    @classmethod
    def _parsed(cls, value: Any) -> Self:
        found = value["format"], value["version"]
        if found != (FORMAT, VERSION):
            raise ValueError(f"its format and version are {found!r:.80}, not {(FORMAT, VERSION)}")
        fields = {
            name: NpyField(checked_name(one["file"]), _text(one["dtype"]), _shape(one["shape"]))
            for name, one in value["fields"].items()
        }
        if not fields:
            raise ValueError("it names no field")
        ids = value["ids"]
        count = _count(value["num_records"])
        return cls(fields, None if ids == ROW_IDS else checked_name(ids), count)

    @classmethod
    def _undescribed(cls, root: pathlib.Path) -> Self:
        found = sorted(
            path.name for path in root.glob("*.npy") if not path.name.startswith((".", "_"))
        )
        if not found:
            raise FileNotFoundError(f"{str(root)!r} holds no {DESCRIPTION} and no .npy file")
        fields = {name.removesuffix(".npy"): NpyField(name) for name in found if name != ID_FILE}
        if not fields:
            raise ValueError(f"{str(root)!r} holds {ID_FILE} alone, and no field")
        check_one_split(fields, repr(str(root)), "move each to a folder of its own")
        return cls(fields, ID_FILE if ID_FILE in found else None, None)

    def text(self) -> str:
        """The description, as JSON."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "num_records": self.num_records,
                "ids": self.id_file or ROW_IDS,
                "fields": {name: dataclasses.asdict(one) for name, one in self.fields.items()},
            },
            indent=1,
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no dtype's name")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is no list of lengths")
    return tuple(map(_count, value))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r:.80} is no number from 1 on")
    return value


def write_npy(
    source: RecordSource,
    directory: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes all records of a source to a folder that `NpySource` reads.

    Some 16 MiB of records are read at a time. The folder is there when it is complete and on disk, or not
    at all.

    Args:
      source: where records come from.
      directory: the folder, which must not exist.
      progress: is told of each stretch of records how many were written.

    Raises:
      FileExistsError: there is something of that name.
      TypeError, ValueError: the source gives something else than its fields say, or an ID that
        padding uses.
      OSError: a file cannot be written.
    """
    fields = check_source(source)
    files = _file_names(fields)
    described = NpyFolder(
        {
            name: NpyField(files[name], str(field.dtype), field.shape)
            for name, field in fields.items()
        },
        None,
        len(source),
    )
    target = pathlib.Path(directory)
    with new_folder(target) as folder:
        id_dtype, rows_alone = _kind_of_ids(source)
        if not rows_alone:
            described = dataclasses.replace(described, id_file=ID_FILE)
            with _NpyFile(folder / ID_FILE, Field(id_dtype), len(source)) as file:
                blocks = _blocks_of_ids(source)
                for ids in counted(blocks, f"writing the IDs to {target.name!r}", len(source)):
                    file.write(ids.astype(id_dtype, copy=False))
        paths = {name: folder / files[name] for name in fields}
        with Work(f"writing the records to {target.name!r}", len(source), "records") as work:
            _write_fields(source, fields, paths, work, progress)
        _write_synced(folder / DESCRIPTION, described.text().encode())


class _NpyFile:
    """A ``.npy`` file that is written from its start to its end."""

    def __init__(self, path: pathlib.Path, field: Field, length: int) -> None:
        self._file: IO[bytes] = path.open("xb")
        # NumPy cannot name a dtype of ml_dtypes: the header says raw bytes, and the description the rest.
        dtype = (
            np.dtype((np.void, field.dtype.itemsize)) if is_extended(field.dtype) else field.dtype
        )
        header = np.lib.format.header_data_from_array_1_0(np.empty((0, *field.shape), dtype))
        header["shape"] = (length, *field.shape)
        np.lib.format.write_array_header_2_0(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, array: npt.NDArray[Any]) -> None:
        """The next records."""
        self._file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _write_fields(
    source: RecordSource,
    fields: Mapping[str, Field],
    paths: Mapping[str, pathlib.Path],
    work: Work,
    progress: Callable[[int], None] | None,
) -> None:
    specs = {name: (field.dtype, field.shape) for name, field in fields.items()}
    record_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs.values())
    step = max(1, _BLOCK_BYTES // record_bytes)
    with contextlib.ExitStack() as opened:
        files = {
            name: opened.enter_context(_NpyFile(paths[name], field, len(source)))
            for name, field in fields.items()
        }
        for start in range(0, len(source), step):
            rows = np.arange(start, min(start + step, len(source)), dtype=np.int64)
            records = read_fields(source, rows, specs)
            for name, file in files.items():
                file.write(records[name])
            work.advance(len(rows))
            if progress is not None:
                progress(len(rows))


def _blocks_of_ids(source: RecordSource) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(source), _BLOCK_IDS):
        rows = np.arange(start, min(start + _BLOCK_IDS, len(source)), dtype=np.int64)
        ids = read_ids(source, rows)
        check_ids(ids, start)
        yield ids


def _kind_of_ids(source: RecordSource) -> tuple[np.dtype[Any], bool]:
    """The dtype that holds all IDs, and whether they are the row numbers."""
    dtype: np.dtype[Any] | None = None
    start, rows_alone = 0, True
    for ids in counted(_blocks_of_ids(source), "looking at the IDs", len(source)):
        if dtype is not None and ids.dtype.kind != dtype.kind:
            raise ValueError(f"IDs are {dtype} in some rows and {ids.dtype} in others")
        dtype = ids.dtype if dtype is None else np.promote_types(dtype, ids.dtype)
        numbers = np.arange(start, start + len(ids))
        rows_alone = rows_alone and ids.dtype.kind == "i" and bool((ids == numbers).all())
        start += len(ids)
    return np.dtype(np.int64) if dtype is None else dtype, rows_alone


def _file_names(fields: Mapping[str, Field]) -> dict[str, str]:
    """A file's name for each field: the field's own where every file system takes it."""
    found: dict[str, str] = {}
    taken = {ID_FILE}
    for number, name in enumerate(fields):
        file = f"{name}.npy"
        if not _PLAIN_NAME.fullmatch(name) or file.lower() in taken:
            file = f"field-{number}.npy"
        taken.add(file.lower())
        found[name] = file
    return found


def _write_synced(path: pathlib.Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
