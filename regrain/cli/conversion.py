"""Writes the records of a data set, IDs and all, in another format, and compares what was written."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

import loader
from regrain.cli import convert_formats
from regrain.cli.console import console, notes, plain, print_json
from regrain.cli.fingerprint import ID
from regrain.cli.sources import opened_by

SAME, DIFFERENT = 0, 1

#: Advice of the sources that has an option of the same name.
_FIELD: Final = re.compile(
    r"""fields=\{(?P<quote>['"])(?P<name>.+?)(?P=quote): (?:"(?P<dtype>[^"]+)"|\(dtype, shape\))\}"""
)
_COLUMNS: Final = re.compile(r"\bcolumns=")
_SPLIT: Final = re.compile(r"\bsplit=\"(\w+)\"")


def run(
    given: loader.RecordSource,
    out: pathlib.Path,
    to: convert_formats.Name | None,
    *,
    check: bool = True,
    as_json: bool = False,
) -> int:
    """Writes all records of a source to a path that does not exist, and prints what it did.

    Args:
      given: the records.
      out: what is written.
      to: the format; ``None`` for that of the name.
      check: whether to read both afterwards, and compare.
      as_json: whether to print JSON.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError, MemoryError: why nothing was written.
    """
    began = time.monotonic()
    name = to or convert_formats.name_for(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} is there already; name another, or move it")
    convert_formats.FORMATS[name].write(given, out)
    made = convert_formats.FORMATS[name].read(out, given)
    differences, digest = compared(given, made) if check else ([], None)
    found = {
        "out": str(out),
        "format": name,
        "records": len(made),
        "bytes": bytes_of(out),
        "fields": {
            name: {"dtype": str(field.dtype), "shape": list(field.shape)}
            for name, field in made.fields.items()
        },
        "ids": "int64" if made.ids(np.zeros(1, np.int64)).dtype.kind == "i" else "str",
        "digest": digest,
        "differences": [
            {"name": one.name, "given": one.checkpoint, "written": one.now, "note": one.note}
            for one in differences
        ],
        "seconds": round(time.monotonic() - began, 3),
    }
    if as_json:
        print_json(found)
    elif differences:
        show_differences(found["differences"])
    else:
        show(found)
    return DIFFERENT if differences else SAME


@dataclasses.dataclass(frozen=True)
class Reading:
    """Settings of a source of files: see `loader.ParquetSource`."""

    columns: tuple[str, ...] | None = None
    fields: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
    split: str | None = None

    @classmethod
    def of(
        cls, columns: str | None, fields: Sequence[str] | None, split: str | None = None
    ) -> Self:
        """Parse the options --columns, --fields and --split.

        Raises:
          ValueError: a field is not NAME=DTYPE or NAME=DTYPE[SHAPE].
        """
        parsed = {}
        for text in fields or ():
            name, _, kind = text.rpartition("=")
            dtype, _, shape = kind.removesuffix("]").partition("[")
            try:
                sides = tuple(map(int, shape.split(","))) if shape else ()
                np.dtype(dtype)
            except (TypeError, ValueError):
                name, sides = "", ()
            if not name:
                raise ValueError(f"--fields takes NAME=DTYPE, such as word=U32, not {text!r:.80}")
            parsed[name] = (dtype, sides)
        return cls(tuple(columns.split(",")) if columns else None, parsed or None, split)

    def settings(self) -> dict[str, Any]:
        """The given settings by name, as a source takes them."""
        given = {"columns": self.columns, "fields": self.fields, "split": self.split}
        return {name: value for name, value in given.items() if value is not None}


@contextlib.contextmanager
def options_in_messages(data: pathlib.Path | None) -> Iterator[None]:
    """A context in which errors about files name the options of the command, not the arguments of a source."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error)
        told = _COLUMNS.sub("--columns ", _FIELD.sub(_as_option, text))
        told = _SPLIT.sub(r"--split \1", told)
        if data is None or told == text:
            raise
        raise ValueError(told) from error


def _as_option(found: re.Match[str]) -> str:
    return f"--fields {found['name']}={found['dtype'] or 'DTYPE[SHAPE]'}"


def opened(
    data: pathlib.Path | None,
    source: str | None,
    *,
    digits: bool,
    reading: Reading = Reading(),
) -> loader.RecordSource:
    """The one source that the command names.

    Raises:
      OSError, TypeError, ValueError: none is named, or more than one, or it cannot be opened.
    """
    settings = reading.settings()
    if settings and data is None:
        raise ValueError(
            "--columns, --fields and --split are for DATA: have the function of --source set them"
        )
    read = functools.partial(convert_formats.opened, **settings)
    return opened_by(read, "a file or a folder", data, source, with_digits=digits)


def compared(
    given: loader.RecordSource, made: loader.RecordSource
) -> tuple[list[loader.Difference], str | None]:
    """In what two sources differ; and the digest of all records, if it is in nothing."""
    before, after = loader.fingerprint(given), loader.fingerprint(made)
    differences = before.diff(after, made)
    return differences, None if differences else after.digest


def show_differences(differences: Any) -> None:
    """Prints in what the records that were written are others, for people."""
    notes.print("[bold red]regrain convert:[/] what was written reads as something else:")
    for one in differences:
        note = f"  ({one['note']})" if one["note"] else ""
        line = f"  {one['name']}  given {one['given']}  written {one['written']}{note}"
        notes.print(plain(line), markup=False, soft_wrap=True)


def bytes_of(path: pathlib.Path) -> int:
    """The size of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def show(found: dict[str, Any]) -> None:
    """Prints what was written, for people."""
    console.print(
        f"{plain(found['out'])}: {found['records']:,} records, {found['bytes']:,} bytes",
        markup=False,
        soft_wrap=True,
    )
    width = max(map(len, [*found["fields"], ID]))
    console.print(f"  {ID:{width}}  {found['ids']}", markup=False)
    for name, field in found["fields"].items():
        line = f"  {name:{width}}  {field['dtype']}{field['shape']}"
        console.print(plain(line), markup=False, soft_wrap=True)
    if found["digest"] is not None:
        console.print(f"read back as the same: {found['digest']}", markup=False, soft_wrap=True)
