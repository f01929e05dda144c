#!/usr/bin/env python
"""Prints, saves and compares the fingerprint of a data set: which fields, and which records, have changed.

    scripts/fingerprint.py print data.npz                       a file of arrays, one for each field
    scripts/fingerprint.py save before.json data/               a folder of .npy files, memory-mapped
    scripts/fingerprint.py compare before.json data/            what differs now
    scripts/fingerprint.py print --digits                       scikit-learn's digits, as in scripts/train.py
    scripts/fingerprint.py print --source my_module:my_source   what a function returns

Run it with the environment active. The first axis of an array is the record; an array named id holds
the IDs (integers or strings), which else are row numbers. Nothing is unpickled. The same fingerprint
is in the manifest of each checkpoint.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import loader

SAME, DIFFERENT, FAILED = 0, 1, 2
EXIT_CODES: Final = (
    "Exit codes: 0, done, and for compare no difference. 1, compare found a difference. 2, wrong use, "
    "or the data or the file cannot be read or written."
)
ID: Final = "id"
#: A saved fingerprint has at most 24 KiB and some 150 bytes a field.
MAX_JSON_BYTES: Final = 1 << 22
BAR_AFTER_SECONDS: Final = 2.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
notes = Console(highlight=False, stderr=True)

Data = Annotated[
    pathlib.Path | None,
    typer.Argument(help="A .npz file, or a folder of .npy files: an array for each field."),
]
Digits = Annotated[bool, typer.Option("--digits", help="scikit-learn's digits.")]
Source = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="A function that returns a loader.RecordSource."),
]
File = Annotated[pathlib.Path, typer.Argument(help="JSON file of a fingerprint.")]


@app.callback(epilog=EXIT_CODES)
def main() -> None:
    """Prints, saves and compares the fingerprint of a data set."""


@app.command("print", epilog=EXIT_CODES)
def print_(data: Data = None, digits: Digits = False, source: Source = None) -> None:
    """Prints the digest of the data, and its fields."""
    with failures():
        show(digested(opened(data, source, digits=digits)))


@app.command(epilog=EXIT_CODES)
def save(file: File, data: Data = None, digits: Digits = False, source: Source = None) -> None:
    """Saves the fingerprint of the data in FILE, for compare."""
    with failures():
        found = digested(opened(data, source, digits=digits))
        write(file, json.dumps(found.to_dict(), indent=1) + "\n")
        console.print(f"{file}: {found.digest}", markup=False, soft_wrap=True)


@app.command(epilog=EXIT_CODES)
def compare(file: File, data: Data = None, digits: Digits = False, source: Source = None) -> None:
    """Compares the data with the fingerprint in FILE, and names what differs."""
    with failures():
        before = loaded(file)
        now = opened(data, source, digits=digits)
        found = digested(now)
        differences = before.diff(found, now)
    if not differences:
        console.print(f"same: {found.digest}", markup=False, soft_wrap=True)
        return
    console.print(f"[bold red]different[/] from {escape(str(file))}:", soft_wrap=True)
    for line in lines(differences):
        console.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(DIFFERENT)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """A context in which what is wrong with the command or the data ends the program."""
    try:
        yield
    except OSError as error:
        fail(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except (TypeError, ValueError, MemoryError) as error:
        fail(str(error) or repr(error))


def fail(message: str) -> NoReturn:
    """Ends the program with a message on stderr."""
    notes.print(f"[bold red]fingerprint.py:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(FAILED)


def opened(data: pathlib.Path | None, source: str | None, *, digits: bool) -> loader.RecordSource:
    """The one source that the command names.

    Raises:
      OSError, TypeError, ValueError: none is named, or more than one, or it cannot be opened.
    """
    if (data is not None) + (source is not None) + digits != 1:
        raise ValueError("name one source: a .npz file or a folder, or --digits, or --source")
    if source is not None:
        return source_of(source)
    if data is None:
        return digits_source()
    arrays = folder_arrays(data) if data.is_dir() else npz_arrays(data)
    ids = arrays.pop(ID, None)
    if not arrays:
        raise ValueError(f"{data} holds no array of a field")
    return loader.ArraySource(arrays, ids)


def source_of(text: str) -> loader.RecordSource:
    """The source that ``module:function`` returns; modules are found as by Python in the current folder.

    Raises:
      ValueError: there is no such module or function, it fails, or it returns no source.
    """
    module, _, function = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(
            f"--source takes MODULE:FUNCTION, such as my_data:my_source, not {text!r:.80}"
        )
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (a string, as all of sys.path)
        sys.path.insert(0, here)
    try:
        source: Any = getattr(importlib.import_module(module), function)()
    except Exception as error:
        raise ValueError(f"--source {text}: {type(error).__name__}: {error}") from error
    if not isinstance(source, loader.RecordSource):
        raise ValueError(
            f"--source {text} returns a {type(source).__name__}, which is no loader.RecordSource"
        )
    return source


def digits_source() -> loader.RecordSource:
    """The data of scripts/train.py."""
    from scripts import train  # noqa: PLC0415 (it imports JAX and scikit-learn)

    return train.digits()


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
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no .npz file that can be read: {error}") from error


class _Watched:
    """A source that tells how many of its records have been read."""

    def __init__(self, source: loader.ArraySource, tell: Callable[[int], None]) -> None:
        self._source, self._tell, self.fields = source, tell, source.fields

    def __len__(self) -> int:
        return len(self._source)

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        return self._source.ids(rows)

    def read(self, rows: npt.NDArray[np.int64], /) -> Mapping[str, npt.NDArray[Any]]:
        records = self._source.read(rows)
        self._tell(len(rows))
        return records

    def read_range(self, start: int, stop: int, /) -> Mapping[str, npt.NDArray[Any]]:
        records = self._source.read_range(start, stop)
        self._tell(stop - start)
        return records

    def fingerprint(self) -> loader.Fingerprint:
        return loader.fingerprint(self)


def digested(source: loader.RecordSource) -> loader.Fingerprint:
    """A source's own fingerprint; with a bar on a terminal, where reading takes more than two seconds."""
    # What a subclass reads, and how, is its own.
    if not notes.is_terminal or type(source) is not loader.ArraySource:
        return source.fingerprint()
    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with contextlib.ExitStack() as shown:
        progress = Progress(*columns, console=notes, transient=True)
        task = progress.add_task("reading", total=len(source))
        one_at_a_time = threading.Lock()  # several threads read

        def tell(count: int) -> None:
            progress.advance(task, count)
            with one_at_a_time:
                if time.monotonic() - began > BAR_AFTER_SECONDS and not progress.live.is_started:
                    shown.enter_context(progress)

        return _Watched(source, tell).fingerprint()


def show(found: loader.Fingerprint) -> None:
    """Prints a fingerprint: its digest, and a line for each column."""
    kinds = {name: f"{c.dtype}{list(c.shape)}" for name, c in found.columns.items()}
    names, widths = (max(map(len, texts)) for texts in (kinds, kinds.values()))
    console.print(found.digest, f"{found.num_records:,} records", soft_wrap=True)
    for name, kind in kinds.items():
        line = f"  {name:{names}}  {kind:{widths}}  {found.columns[name].digest}"
        console.print(line, markup=False, soft_wrap=True)
    if found.files is not None:
        line = f"  in {found.files.num_files:,} files, by their bytes: {found.files.digest}"
        console.print(line, markup=False, soft_wrap=True)


def lines(differences: list[loader.Difference]) -> list[str]:
    """A line for each difference, in columns."""
    names, befores, nows = (
        max(len(getattr(one, column)) for one in differences)
        for column in ("name", "checkpoint", "now")
    )
    return [
        f"  {one.name:{names}}  before {one.checkpoint:{befores}}  now {one.now:{nows}}"
        + (f"  ({one.note})" if one.note else "")
        for one in differences
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


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file whole: under another name first, then in one step under its own."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    app()
