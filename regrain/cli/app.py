"""The program `regrain`: its commands, and the option --version."""

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from regrain.cli import audit, convert, drill, fingerprint, inspect, plot_order, provenance
from regrain.cli.options import About

# Plain help: the same on a terminal, in a pipe and in the docs.
app = typer.Typer(
    name="regrain",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Inspect, check and test training runs and their data.\n\n"
    "regrain COMMAND --help shows the options of a command, with examples.",
)

#: The end of each command's help.
ABOUT: Final[Mapping[str, About]] = {
    "inspect": inspect.ABOUT,
    "drill": drill.ABOUT,
    "audit": audit.ABOUT,
    "provenance": provenance.ABOUT,
    "fingerprint": fingerprint.ABOUT,
    "fingerprint print": fingerprint.ABOUT_PRINT,
    "fingerprint save": fingerprint.ABOUT_SAVE,
    "fingerprint compare": fingerprint.ABOUT_COMPARE,
    "convert": convert.ABOUT,
    "plot-order": plot_order.ABOUT,
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regrain {importlib.metadata.version('regrain')}")
        raise typer.Exit


@app.callback()
def top(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Nothing: each command does its own work."""


_COMMANDS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "inspect": (
        inspect.inspect,
        "Show the steps in a run's directory, and whether they are intact.",
    ),
    "drill": (drill.drill, "Kill a training script, resume it, and compare."),
    "audit": (audit.audit, "Audit which records a stream delivers, where and how often."),
    "provenance": (
        provenance.provenance,
        "Show which records a step held, and when a record came.",
    ),
    "convert": (convert.convert, "Write a data set in another format, and compare."),
    "plot-order": (plot_order.plot_order, "Draw the order of records in an epoch."),
}
for _name, (_command, _summary) in _COMMANDS.items():
    app.command(_name, short_help=_summary, epilog=ABOUT[_name].epilog())(_command)
app.add_typer(
    fingerprint.app,
    name="fingerprint",
    short_help="Print, save and compare the identity of a data set.",
    help="Print, save and compare the fingerprint of a data set: which fields, and which records, "
    "have changed.\n\nThe first axis of an array is the record. An array named id holds the IDs "
    "(integers or strings); without it they are row numbers. Nothing is unpickled. The same fingerprint is "
    "in the manifest of each checkpoint.",
    epilog=ABOUT["fingerprint"].epilog(),
)
