"""`regrain convert`: Write a data set in another format."""

import pathlib
from typing import Annotated, Final, Literal

import typer

from regrain.cli.console import running
from regrain.cli.options import INTERRUPTED, About, Digits, Json, Source

ABOUT: Final = About(
    {
        "regrain convert data.npz --out data/": "a file of arrays, as a folder of .npy files",
        "regrain convert data/ --out data.parquet": "the format by its suffix, or --to",
        "regrain convert --source my_data:my_source --out data/": "what a function returns",
    },
    {
        0: "written, and read back as the same",
        1: "what was written reads as something else",
        2: "wrong use, or something cannot be read or written",
        **INTERRUPTED,
    },
)


def convert(
    out: Annotated[
        pathlib.Path, typer.Option(metavar="PATH", help="What to write; it must not exist.")
    ],
    data: Annotated[
        pathlib.Path | None,
        typer.Argument(metavar="[DATA]", help="A file, or a folder of files."),
    ] = None,
    to: Annotated[
        Literal["npy", "array_record", "parquet"] | None,
        typer.Option(
            help="The format; by default as the suffix of OUT has it, and npy without one."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="The columns of Parquet, ArrayRecord or Hugging Face data that become fields; by default all.",
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DTYPE",
            help="The dtype of a column whose type does not show it, such as word=U32, or with a shape "
            "image=uint8[28,28]; repeat for more.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="The split to read from a folder that holds several, such as train, by the names of its files.",
        ),
    ] = None,
    digits: Digits = False,
    source: Source = None,
    check: Annotated[
        bool, typer.Option(help="Read both afterwards, and compare all records.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Write the records of a data set, with their IDs, in another format, and compare what was written.

    DATA is a .npz file, a folder of .npy files, Parquet or ArrayRecord files in a folder or alone, or
    a data set that Hugging Face's save_to_disk has written. An array, column or entry named id holds
    the IDs; without it they are the default IDs of the format's source. About 16 MiB of
    records are read at a time. OUT gets its name when it is complete; a name that is taken is refused.
    """
    with running("convert"):
        from regrain.cli import conversion as job

        reading = job.Reading.of(columns, fields, split)
        with job.options_in_messages(data):
            given = job.opened(data, source, digits=digits, reading=reading)
            code = job.run(given, out, to, check=check, as_json=as_json)
    raise typer.Exit(code)
