"""`regrain plot-order`: Draw the order of records in an epoch."""

import pathlib
from typing import Annotated, Final

import typer

from regrain.cli.console import running
from regrain.cli.options import INTERRUPTED, About, Config, Json

ABOUT: Final = About(
    {
        "regrain plot-order --config my.toml --num-records 1797 --out order.svg": "the first epoch",
        "regrain plot-order --config my.toml --num-records 1000000 --epoch 0 --epoch 1 --out order.png": "two epochs",
    },
    {
        0: "drawn",
        1: "the figure cannot be written",
        2: "the command or the config is wrong",
        **INTERRUPTED,
    },
)


def plot_order(
    config: Config,
    out: Annotated[
        pathlib.Path, typer.Option(metavar="FILE", help="Figure to write: .svg, .png or .pdf.")
    ],
    num_records: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Records in the data; by default num_records in the config's table [dataset].",
        ),
    ] = None,
    epoch: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=0, help="Epoch to draw, counted from 0; give it again for more."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draws the order of records in an epoch: position against ID, with the borders of the batches.

    Up to 10,000 records are points; more are a density, from at most about a million positions. The
    shaded strip is the final batch where it is not full. IDs are row numbers. The same command writes
    the same bytes.
    """
    with running("plot-order"):
        from regrain.cli import order_plot as job

        code = job.run(config, out, num_records, epoch or [0], as_json=as_json)
    raise typer.Exit(code)
