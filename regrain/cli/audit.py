"""`regrain audit`: Audit which records a stream delivers."""

import pathlib
from typing import Annotated, Final

import typer

from regrain.cli.console import running
from regrain.cli.options import INTERRUPTED, About, Config, Json, Source

ABOUT: Final = About(
    {
        "regrain audit --config my.toml --source my_data:my_source --out runs/audit": "your own records",
        "regrain audit --config my.toml --num-records 1000000 --out runs/audit": "IDs alone, without any data",
        "regrain audit --config my.toml --source my_data:my_source --step-log steps.jsonl --out runs/audit": "the batches that a run has logged",
    },
    {
        0: "clean",
        1: "findings",
        2: "wrong use, or something cannot be read or written",
        **INTERRUPTED,
    },
)


def audit(
    config: Config,
    out: Annotated[
        pathlib.Path, typer.Option(metavar="FOLDER", help="For audit.json and audit.html.")
    ],
    source: Source = None,
    num_records: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=2**63 - 1,
            help="Audit the IDs of so many row numbers, without any data.",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many, from the first on; by default all of the config."
        ),
    ] = None,
    step_log: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE", help="Audit the batches in a run's step log, as far as it came."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Audits which records a stream delivers, where, how often, and whether they are what they should be.

    The records are those of --source; without it, row numbers, which are their own IDs and hold
    nothing: as many as --num-records says, or num_records in a [dataset] table of the config (whose
    name may also be lesson or digits, for the data of the examples). They are audited as they come
    from the source, before any transform. With --step-log the batches are those that a run wrote to
    its log, the last delivery of each step. Steps beyond the end, steps logged again with another batch,
    positions that are not their step's, and lines in a sequence that no run with stops can have written
    are findings of order.
    """
    with running("audit"):
        from regrain.cli import audit_report as job

        code = job.run(
            config,
            out,
            source=source,
            num_records=num_records,
            epochs=epochs,
            step_log=step_log,
            as_json=as_json,
        )
    raise typer.Exit(code)
