"""`regrain fingerprint`: print, save and compare the identity of a data set."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any, Final

import typer

from regrain.cli.console import MAX_TEXT, console, plain, print_json, running, safe
from regrain.cli.options import INTERRUPTED, About, Data, Digits, FingerprintFile, Json, Source

if TYPE_CHECKING:
    import numpy.typing as npt

    import loader

SAME, DIFFERENT = 0, 1
ID: Final = "id"
#: The description in a folder written by `loader.write_npy`.
_DESCRIPTION: Final = "regrain.json"
#: A saved fingerprint has at most 24 KiB and about 150 bytes a field.
MAX_JSON_BYTES: Final = 1 << 22

_CODES: Final = {
    2: "wrong use, or the data or the file cannot be read or written",
    **INTERRUPTED,
}
ABOUT: Final = About(
    {
        "regrain fingerprint save before.json data/": "keep the identity of a folder of .npy files",
        "regrain fingerprint compare before.json data/": "what differs now?",
    },
    {
        0: "done, and for compare no difference",
        1: "compare has found a difference",
        **_CODES,
    },
)
ABOUT_PRINT: Final = About(
    {
        "regrain fingerprint print data.npz": "a file of arrays, one for each field",
        "regrain fingerprint print --source my_data:my_source": "what a function returns",
    },
    {0: "done", **_CODES},
)
ABOUT_SAVE: Final = About(
    {
        "regrain fingerprint save before.json data/": "a folder of .npy files, memory-mapped",
    },
    {0: "done", **_CODES},
)
ABOUT_COMPARE: Final = About(
    {
        "regrain fingerprint compare before.json data/": "is it still the same?",
    },
    {0: "no difference", 1: "a difference", **_CODES},
)


app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.command("print", epilog=ABOUT_PRINT.epilog())
def print_command(
    data: Data = None, digits: Digits = False, source: Source = None, as_json: Json = False
) -> None:
    """Print the digest of the data, and its fields."""
    with running("fingerprint"):
        code = show(opened(data, source, digits=digits), as_json=as_json)
    raise typer.Exit(code)


@app.command("save", epilog=ABOUT_SAVE.epilog())
def save_command(
    file: FingerprintFile,
    data: Data = None,
    digits: Digits = False,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """Save the fingerprint of the data in FILE, for compare."""
    with running("fingerprint"):
        code = save(file, opened(data, source, digits=digits), as_json=as_json)
    raise typer.Exit(code)


@app.command("compare", epilog=ABOUT_COMPARE.epilog())
def compare_command(
    file: FingerprintFile,
    data: Data = None,
    digits: Digits = False,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """Compare the data with the fingerprint in FILE, and name the differences."""
    with running("fingerprint"):
        before = loaded(file)
        code = compare(file, before, opened(data, source, digits=digits), as_json=as_json)
    raise typer.Exit(code)


def show(source: "loader.RecordSource", *, as_json: bool = False) -> int:
    """Print the digest of the data, and a line for each column. Return the exit code."""
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


def save(file: pathlib.Path, source: "loader.RecordSource", *, as_json: bool = False) -> int:
    """Save the fingerprint of the data in a file. Return the exit code."""
    from loader.sources.new_paths import write_whole

    found = source.fingerprint()
    write_whole(file, f"{json.dumps(found.to_dict(), indent=1)}\n".encode())
    if as_json:
        print_json({"file": str(file), **to_dict(found)})
    else:
        console.print(f"{safe(file)}: {found.digest}", soft_wrap=True)
    return SAME


def compare(
    file: pathlib.Path,
    before: "loader.Fingerprint",
    source: "loader.RecordSource",
    *,
    as_json: bool = False,
) -> int:
    """Compare the data with a saved fingerprint, and name the differences. Return the exit code."""
    found = source.fingerprint()
    differences = before.diff(found, source)
    if as_json:
        listed = [
            {"name": one.name, "before": one.checkpoint, "now": one.now, "note": one.note}
            for one in differences
        ]
        print_json({"same": not listed, "differences": listed, **to_dict(found)})
    elif not differences:
        console.print(f"same: {found.digest}", markup=False, soft_wrap=True)
    else:
        console.print(f"[bold red]different[/] from {safe(file)}:", soft_wrap=True)
        for line in lines(differences):
            console.print(line, markup=False, soft_wrap=True)
    return DIFFERENT if differences else SAME


def to_dict(found: "loader.Fingerprint") -> dict[str, Any]:
    """The printed part of a fingerprint as plain JSON values."""
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


def opened(data: pathlib.Path | None, source: str | None, *, digits: bool) -> "loader.RecordSource":
    """Open the one source that the command names.

    Raises:
      OSError, TypeError, ValueError: not exactly one is named, or it cannot be opened.
    """
    from regrain.cli.sources import opened_by

    return opened_by(of_arrays, "a .npz file or a folder", data, source, with_digits=digits)


def of_arrays(data: pathlib.Path) -> "loader.RecordSource":
    """The arrays of a .npz file or of a folder of .npy files; a described folder as `NpySource`.

    Raises:
      OSError, ValueError: they cannot be read, or none holds a field.
    """
    import loader

    if (data / _DESCRIPTION).is_file():
        return loader.NpySource(data)
    arrays = folder_arrays(data) if data.is_dir() else npz_arrays(data)
    ids = arrays.pop(ID, None)
    if not arrays:
        raise ValueError(f"{data} has no array besides the IDs: a data set needs one field or more")
    return loader.ArraySource(arrays, ids)


def folder_arrays(folder: pathlib.Path) -> "dict[str, npt.NDArray[Any]]":
    """The arrays of a folder's .npy files, by name; they stay on disk."""
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise ValueError(f"{folder} has no .npy file")
    return {path.stem: read_array(path) for path in paths}


def read_array(path: pathlib.Path) -> "npt.NDArray[Any]":
    """A .npy file's array, memory-mapped."""
    import numpy as np

    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return array


def npz_arrays(path: pathlib.Path) -> "dict[str, npt.NDArray[Any]]":
    """The arrays of a .npz file, by name."""
    import zipfile
    import zlib

    import numpy as np

    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is not an archive of named arrays")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as a .npz file: {error}") from error


def lines(differences: "list[loader.Difference]") -> list[str]:
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


def loaded(file: pathlib.Path) -> "loader.Fingerprint":
    """Read a fingerprint written by `save`.

    Raises:
      OSError, ValueError: the file cannot be read, or holds something else.
    """
    import loader

    with file.open("rb") as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{file} is larger than {MAX_JSON_BYTES} bytes: not a fingerprint")
    try:
        return loader.Fingerprint.from_dict(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a saved fingerprint: {error}") from error
