"""Prints, saves and compares the fingerprint of a data set: which fields, and which records, have changed."""

import dataclasses
import json
import pathlib
import zipfile
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import loader
from regrain.jobs.sources import opened_by
from regrain.jobs.whole_file import write_whole
from regrain.terminal import MAX_TEXT, console, plain, print_json, safe

SAME, DIFFERENT = 0, 1
ID: Final = "id"
#: Of a folder that `loader.write_npy` has written.
_DESCRIPTION: Final = "regrain.json"
#: A saved fingerprint has at most 24 KiB and some 150 bytes a field.
MAX_JSON_BYTES: Final = 1 << 22


def show(source: loader.RecordSource, *, as_json: bool = False) -> int:
    """Prints the digest of the data, and a line for each column. Returns the exit code."""
    found = source.fingerprint()
    if as_json:
        print_json(to_dict(found))
        return SAME
    kinds = {plain(name): f"{c.dtype}{list(c.shape)}" for name, c in found.columns.items()}
    names, widths = (max(map(len, texts)) for texts in (kinds, kinds.values()))
    console.print(found.digest, f"{found.num_records:,} records", soft_wrap=True)
    for (name, kind), column in zip(kinds.items(), found.columns.values(), strict=True):
        line = f"  {name:{names}}  {kind:{widths}}  {column.digest}"
        console.print(line, markup=False, soft_wrap=True)
    if found.files is not None:
        line = f"  in {found.files.num_files:,} files, by their bytes: {found.files.digest}"
        console.print(line, markup=False, soft_wrap=True)
    return SAME


def save(file: pathlib.Path, source: loader.RecordSource, *, as_json: bool = False) -> int:
    """Saves the fingerprint of the data in a file. Returns the exit code."""
    found = source.fingerprint()
    write_whole(file, f"{json.dumps(found.to_dict(), indent=1)}\n".encode())
    if as_json:
        print_json({"file": str(file), **to_dict(found)})
    else:
        console.print(f"{safe(file)}: {found.digest}", soft_wrap=True)
    return SAME


def compare(
    file: pathlib.Path,
    before: loader.Fingerprint,
    source: loader.RecordSource,
    *,
    as_json: bool = False,
) -> int:
    """Compares the data with a saved fingerprint, and names what differs. Returns the exit code."""
    found = source.fingerprint()
    differences = before.diff(found, source)
    if as_json:
        told = [
            {"name": one.name, "before": one.checkpoint, "now": one.now, "note": one.note}
            for one in differences
        ]
        print_json({"same": not told, "differences": told, **to_dict(found)})
    elif not differences:
        console.print(f"same: {found.digest}", markup=False, soft_wrap=True)
    else:
        console.print(f"[bold red]different[/] from {safe(file)}:", soft_wrap=True)
        for line in lines(differences):
            console.print(line, markup=False, soft_wrap=True)
    return DIFFERENT if differences else SAME


def to_dict(found: loader.Fingerprint) -> dict[str, Any]:
    """What is printed of a fingerprint, as plain JSON values."""
    columns = {
        name: {"dtype": column.dtype, "shape": list(column.shape), "digest": column.digest}
        for name, column in found.columns.items()
    }
    files = None
    if found.files is not None:
        files = {"num_files": found.files.num_files, "digest": found.files.digest}
    return {
        "digest": found.digest,
        "num_records": found.num_records,
        "columns": columns,
        "files": files,
    }


def opened(data: pathlib.Path | None, source: str | None, *, digits: bool) -> loader.RecordSource:
    """The one source that the command names.

    Raises:
      OSError, TypeError, ValueError: none is named, or more than one, or it cannot be opened.
    """
    return opened_by(of_arrays, "a .npz file or a folder", data, source, with_digits=digits)


def of_arrays(data: pathlib.Path) -> loader.RecordSource:
    """The arrays of a .npz file, or of a folder of .npy files; with its description, as `NpySource` reads it.

    Raises:
      OSError, ValueError: they cannot be read, or none is of a field.
    """
    if (data / _DESCRIPTION).is_file():
        return loader.NpySource(data)
    arrays = folder_arrays(data) if data.is_dir() else npz_arrays(data)
    ids = arrays.pop(ID, None)
    if not arrays:
        raise ValueError(f"{data} holds no array of a field")
    return loader.ArraySource(arrays, ids)


def folder_arrays(folder: pathlib.Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a folder's .npy files, by name; they stay on disk."""
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise ValueError(f"{folder} holds no .npy file")
    return {path.stem: read_array(path) for path in paths}


def read_array(path: pathlib.Path) -> npt.NDArray[Any]:
    """A .npy file's array, memory-mapped."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return array


def npz_arrays(path: pathlib.Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz file, by name."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no archive of named arrays")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is no .npz file that can be read: {error}") from error


def lines(differences: list[loader.Difference]) -> list[str]:
    """A line for each difference, in columns."""
    rows = [
        [plain(text) for text in dataclasses.astuple(one.shortened(MAX_TEXT))]
        for one in differences
    ]
    names, befores, nows = (max(len(row[column]) for row in rows) for column in range(3))
    return [
        f"  {name:{names}}  before {before:{befores}}  now {now:{nows}}"
        + (f"  ({note})" if note else "")
        for name, before, now, note in rows
    ]


def loaded(file: pathlib.Path) -> loader.Fingerprint:
    """The fingerprint that `save` has written to a file.

    Raises:
      OSError, ValueError: it cannot be read, or is none.
    """
    with file.open("rb") as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{file} is larger than {MAX_JSON_BYTES} bytes: not a fingerprint")
    try:
        return loader.Fingerprint.from_dict(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no saved fingerprint: {error}") from error
