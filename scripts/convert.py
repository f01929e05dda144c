#!/usr/bin/env python
"""Writes the records of a data set, IDs and all, in another format, and compares what was written.

    scripts/convert.py data.npz --out data/                        a file of arrays, as a folder of .npy files
    scripts/convert.py data/ --out data.parquet                    the format as the name has it, or --to
    scripts/convert.py --digits --out digits/                      scikit-learn's digits, as in scripts/train.py
    scripts/convert.py --source my_module:my_source --out data/    what a function returns

Run it with the environment active. Data is a .npz file, a folder of .npy files, Parquet or ArrayRecord
files in a folder or alone, or a data set that Hugging Face's save_to_disk has written. An array, column
or entry named id holds the IDs; without it they are those that the format's source makes by default.

Some 16 MiB of records are read at a time. What is written is there under its name when it is complete,
or not at all; a name that is taken is refused. Afterwards both are read and compared, record by record,
unless --no-check says otherwise.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import loader
from scripts import convert_formats
from scripts.fingerprint import ID, digits_source, source_of

DIFFERENT, FAILED = 1, 2
EXIT_CODES: Final = (
    "Exit codes: 0, written, and read back as the same. 1, what was written reads as something else. 2, "
    "wrong use, or something cannot be read or written."
)
BAR_AFTER_SECONDS: Final = 2.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
notes = Console(highlight=False, stderr=True)


@app.command(epilog=EXIT_CODES)
def main(
    out: Annotated[pathlib.Path, typer.Option(help="What to write; it must not exist.")],
    data: Annotated[
        pathlib.Path | None,
        typer.Argument(help="A file, or a folder of files."),
    ] = None,
    to: Annotated[
        convert_formats.Name | None,
        typer.Option(help="The format; by default as the suffix of OUT has it, or npy."),
    ] = None,
    digits: Annotated[bool, typer.Option("--digits", help="scikit-learn's digits.")] = False,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="A function that returns a loader.RecordSource."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Read both afterwards, and compare all records.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was done as one line of JSON.")
    ] = False,
) -> None:
    """Writes the records of a data set, IDs and all, in another format."""
    began = time.monotonic()
    with failures():
        given = opened(data, source, digits=digits)
        name = to or convert_formats.name_for(out)
        if out.exists() or out.is_symlink():
            raise ValueError(f"{out} is there already; name another, or move it")
        with bar("writing", len(given)) as progress:
            convert_formats.FORMATS[name].write(given, out, progress)
        made = convert_formats.FORMATS[name].read(out, given)
        digest = same_digest(given, made) if check else None
    fields = loader.sources.check_source(made)
    found = {
        "out": str(out),
        "format": name,
        "records": len(made),
        "bytes": bytes_of(out),
        "fields": {
            name: {"dtype": str(field.dtype), "shape": list(field.shape)}
            for name, field in fields.items()
        },
        "ids": "int64" if made.ids(np.zeros(1, np.int64)).dtype.kind == "i" else "str",
        "digest": digest,
        "seconds": round(time.monotonic() - began, 3),
    }
    if as_json:
        console.print(json.dumps(found), markup=False, soft_wrap=True)
    else:
        show(found)


def opened(data: pathlib.Path | None, source: str | None, *, digits: bool) -> loader.RecordSource:
    """The one source that the command names.

    Raises:
      OSError, TypeError, ValueError: none is named, or more than one, or it cannot be opened.
    """
    if (data is not None) + (source is not None) + digits != 1:
        raise ValueError("name one source: a file or a folder, or --digits, or --source")
    if source is not None:
        return source_of(source)
    if data is None:
        return digits_source()
    return convert_formats.opened(data)


def same_digest(given: loader.RecordSource, made: loader.RecordSource) -> str:
    """The digest of all records, which is that of both sources; ends the program where it is not."""
    before, after = loader.fingerprint(given), loader.fingerprint(made)
    if differences := before.diff(after, made):
        notes.print("[bold red]convert.py:[/] what was written reads as something else:")
        for one in differences:
            note = f"  ({one.note})" if one.note else ""
            line = f"  {one.name}  given {one.checkpoint}  written {one.now}{note}"
            notes.print(line, markup=False, soft_wrap=True)
        raise typer.Exit(DIFFERENT)
    return after.digest


def bytes_of(path: pathlib.Path) -> int:
    """The size of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def show(found: dict[str, Any]) -> None:
    """Prints what was written, for people."""
    console.print(
        f"{found['out']}: {found['records']:,} records, {found['bytes']:,} bytes",
        markup=False,
        soft_wrap=True,
    )
    width = max(map(len, [*found["fields"], ID]))
    console.print(f"  {ID:{width}}  {found['ids']}", markup=False)
    for name, field in found["fields"].items():
        line = f"  {name:{width}}  {field['dtype']}{field['shape']}"
        console.print(line, markup=False, soft_wrap=True)
    if found["digest"] is not None:
        console.print(f"read back as the same: {found['digest']}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes counts of records; on a terminal they move a bar, after two seconds."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with contextlib.ExitStack() as shown:
        progress = Progress(*columns, console=notes, transient=True)
        task = progress.add_task(what, total=total)

        def tell(count: int) -> None:
            progress.advance(task, count)
            late = time.monotonic() - began > BAR_AFTER_SECONDS
            if late and notes.is_terminal and not progress.live.is_started:
                shown.enter_context(progress)

        yield tell


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
    notes.print(f"[bold red]convert.py:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(FAILED)


if __name__ == "__main__":
    app()
