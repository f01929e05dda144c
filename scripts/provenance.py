#!/usr/bin/env python
"""Tells which records a step of a run held, and in which steps a record came, from the run's directory.

    scripts/provenance.py runs/digits --step 1200             which records were in a step
    scripts/provenance.py runs/digits --id 7                  when a record came, in each epoch
    scripts/provenance.py runs/digits --row 7 --epochs 3:9    the same by row, in some epochs
    scripts/provenance.py runs/digits                         the run: its steps, and what changed when

Run it with the environment active. It needs neither the training script nor the data, and replays
nothing. Steps are counted from 0 over all epochs: step N is the one after which N + 1 are done.

Where IDs are something else than row numbers, the data has to tell them:
--source my_module:my_source names a function without arguments that returns the source.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import checkpointing
import loader
from scripts.fingerprint import source_of

ANSWERED, ABSENT, FAILED = 0, 1, 2
EXIT_CODES: Final = (
    "Exit codes: 0, answered. 1, the run has no such step, row or ID. 2, wrong use, or the run cannot "
    "be read or followed."
)
#: Without --epochs, so many of the newest are answered for.
NEWEST_EPOCHS: Final = 100
MAX_EPOCHS: Final = 10**6
#: Without --json, so many slots of a step are shown.
SHOWN_SLOTS: Final = 4096

LEFT_OUT: Final = "left out by exclude: its slot came with mask False"
OUTCOMES: Final = {
    "delivered": "delivered",
    "skipped": "left out by skip, with its batch",
    "dropped": "dropped: the last records filled no batch",
    "ahead": "not yet",
}
UNKNOWN_EXCLUDED: Final = "exclude leaves records out by their ID: without --source nothing tells whether these are among them."

Run = loader.Provenance | loader.MixtureProvenance

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
notes = Console(highlight=False, stderr=True)


@app.command(epilog=EXIT_CODES)
def main(
    run_dir: Annotated[pathlib.Path, typer.Argument(help="Directory of the run's checkpoints.")],
    step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Which records were in it? Give it again for more."),
    ] = None,
    record_id: Annotated[
        list[str] | None, typer.Option("--id", help="When did the record of this ID come?")
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(min=0, help="As --id, for the record in a row of the source."),
    ] = None,
    epochs: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:END",
            help="For --id and --row: in these epochs, END not included. By default the newest 100.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a run on a mixture: which part is asked about."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="What returns the run's source, for its IDs; of a mixture, that of the part.",
        ),
    ] = None,
    ahead: Annotated[
        bool,
        typer.Option("--ahead", help="Answer also for steps after the newest checkpoint."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tells which records a step held, and in which steps a record came, from a run's directory alone.

    Without --step, --id and --row: how far the run has come, and what was changed on the way.
    """
    try:
        chosen = None if epochs is None else parse_epochs(epochs)
        given = None if source is None else source_of(source)
        run: Run
        if part is None:
            run = checkpointing.provenance(run_dir, given, ahead=ahead)
        else:
            sources = None if given is None else {part: given}
            run = checkpointing.mixture_provenance(run_dir, sources, ahead=ahead)
        found = asked_about(run, part)
        rows = [found.row_of(an_id(found, text)) for text in record_id or []] + (row or [])
        answer = {
            **describe(run_dir, found),
            "steps": [describe_step(run.records_at(number)) for number in step or []],
            "records": [describe_record(run, part, number, chosen) for number in rows],
        }
    except (IndexError, KeyError) as error:
        fail(f"{run_dir}: {error.args[0]}" + hint(error), ABSENT)
    except (OSError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        fail(str(error) or repr(error), FAILED)
    if as_json:
        print(json.dumps(answer))
        return
    show_run(answer)
    for one in answer["steps"]:
        show_step(one)
    for one in answer["records"]:
        show_record(one)
    if found.segments[-1].config.on_bad_record == "mask" and (answer["steps"] or rows):
        console.print(
            "on_bad_record is mask: a record that could not be read kept its slot, with mask False. "
            "Only reading it again tells which.",
            style="dim",
        )


def fail(message: str, code: int) -> NoReturn:
    """Ends the program with a message on stderr."""
    notes.print(f"[bold red]provenance.py:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def hint(error: Exception) -> str:
    """What to do about a step that no checkpoint covers yet."""
    if "is not done" not in str(error):
        return ""
    return ". That is the newest checkpoint; --ahead tells what comes if the run goes on as it is"


def parse_epochs(text: str) -> range:
    """The epochs that ``FIRST:END``, or a single number, stands for."""
    first, colon, end = text.partition(":")
    try:
        epochs = range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        raise ValueError(f"--epochs takes FIRST:END, such as 3:9, not {text!r:.40}") from None
    if not 0 < len(epochs) <= MAX_EPOCHS:
        raise ValueError(f"--epochs {text} are {len(epochs)} epochs; give 1 to {MAX_EPOCHS:,}")
    return epochs


def asked_about(run: Run, part: str | None) -> loader.Provenance:
    """The provenance of the run, or of the part of its mixture that is asked about."""
    if isinstance(run, loader.Provenance):
        return run
    if part not in run.parts:
        raise KeyError(f"the run has the parts {', '.join(run.parts)}, not {part!r}")
    return run.parts[part]


def an_id(found: loader.Provenance, text: str) -> int | str:
    """An ID as the run's source has it: an integer, unless its IDs are strings."""
    if found.has_text_ids:
        return text
    try:
        return int(text)
    except ValueError:
        raise KeyError(f"no record has the ID {text!r:.80}: the IDs are integers") from None


def describe(run_dir: pathlib.Path, found: loader.Provenance) -> dict[str, Any]:
    """The run itself, as plain values."""
    return {
        "run": str(run_dir),
        "num_records": found.num_records,
        "num_steps": found.num_steps,
        "ids": found.ids_from or None,
        "segments": list(describe_segments(found)),
    }


def describe_segments(found: loader.Provenance) -> Iterator[dict[str, Any]]:
    """Each stretch of the run under one config: its steps, where it begins, and what was changed."""
    ends = [segment.start.step for segment in found.segments[1:]]
    before: dict[str, Any] = {}
    for segment, end in zip(found.segments, [*ends, found.num_steps], strict=True):
        config = segment.config.to_dict()
        yield {
            "first_step": segment.start.step,
            "end_step": end,
            "start": dataclasses.asdict(segment.start),
            "changed": {
                name: [before[name], config[name]]
                for name in before
                if before[name] != config[name]
            },
            "config": config,
        }
        before = config


def describe_step(records: loader.StepRecords) -> dict[str, Any]:
    """A step as plain values: a row, an ID and whether it was left out for each of the first slots."""
    return {
        "step": records.step,
        "part": records.part,
        "epoch": records.epoch,
        "offset": records.offset,
        "slots": records.slots,
        "rows": records.rows.tolist(),
        "ids": None if records.ids is None else records.ids.tolist(),
        "excluded": None if records.excluded is None else records.excluded.tolist(),
    }


def describe_record(run: Run, part: str | None, row: int, epochs: range | None) -> dict[str, Any]:
    """A record as plain values: its ID, and what became of it in each epoch."""
    found = asked_about(run, part)
    known = found.epochs
    if epochs is None:
        epochs = range(NEWEST_EPOCHS) if known is None else known[-NEWEST_EPOCHS:]
    if isinstance(run, loader.Provenance):
        visits = run.steps_of_row(row, epochs)
    else:
        visits = run.steps_of_row(part or "", row, epochs)
    return {
        "row": row,
        "id": found.id_of(row),
        "epochs": [epochs.start, epochs.stop],
        "epochs_so_far": None if known is None else len(known),
        "visits": [dataclasses.asdict(visit) for visit in visits],
    }


def show_run(answer: dict[str, Any]) -> None:
    """Prints how far the run has come, and its segments."""
    steps, ids = answer["num_steps"], answer["ids"]
    done = "without end" if steps is None else f"{steps:,} steps"
    known = f"IDs: {ids}" if ids else "IDs not known: give --source, or ask by --row"
    console.print(
        f"[bold]{escape(answer['run'])}[/]: {done}, {answer['num_records']:,} records. {escape(known)}",
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("steps", "begins at", "batch size", "changed"):
        table.add_column(heading)
    for one in answer["segments"]:
        first, end, start = one["first_step"], one["end_step"], one["start"]
        table.add_row(
            f"{first} on"
            if end is None
            else f"{first} to {end - 1}"
            if end > first
            else "none yet",
            f"epoch {start['epoch']}, offset {start['offset']}",
            str(one["config"]["batch_size"]),
            escape("; ".join(f"{name} {a} -> {b}" for name, (a, b) in one["changed"].items())),
        )
    console.print(table)


def show_step(one: dict[str, Any]) -> None:
    """Prints the records of a step."""
    rows, ids, slots = one["rows"], one["ids"], one["slots"]
    of_part = "" if one["part"] is None else f"part {escape(one['part'])}, "
    padded = f", {slots - len(rows)} of them padding" if slots > len(rows) else ""
    console.print(
        f"\n[bold]step {one['step']}[/]: {of_part}epoch {one['epoch']}, offset {one['offset']}, "
        f"{slots} slots{padded}"
    )
    if ids is not None:
        console.print(f"IDs   {shown(ids)}", soft_wrap=True)
    if ids != rows:
        console.print(f"rows  {shown(rows)}", soft_wrap=True)
    if one["excluded"] is None:
        console.print(UNKNOWN_EXCLUDED, style="dim", soft_wrap=True)
    elif any(one["excluded"]):
        out = [f"{ids[i]} (slot {i})" for i, gone in enumerate(one["excluded"]) if gone]
        console.print(f"left out by exclude, with mask False: {shown(out)}", soft_wrap=True)


def shown(values: list[Any]) -> str:
    """The first of some values, in a line."""
    more = f" ... and {len(values) - SHOWN_SLOTS} more: see --json" * (len(values) > SHOWN_SLOTS)
    return escape(" ".join(map(str, values[:SHOWN_SLOTS]))) + more


def show_record(one: dict[str, Any]) -> None:
    """Prints what became of a record in each epoch."""
    named = f"row {one['row']}" if one["id"] is None else f"ID {one['id']} (row {one['row']})"
    first, end = one["epochs"]
    so_far = "" if one["epochs_so_far"] is None else f"; {one['epochs_so_far']} so far"
    console.print(
        f"\n[bold]{escape(named)}[/]: epochs {first} to {end - 1}{so_far}", soft_wrap=True
    )
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("epoch", "step", "slot"):
        table.add_column(heading, justify="right")
    table.add_column("what became of it")
    for visit in one["visits"]:
        came = visit["outcome"] == "delivered"
        table.add_row(
            str(visit["epoch"]),
            str(visit["step"]) if came else "-",
            str(visit["slot"]) if came else "-",
            LEFT_OUT if came and visit["excluded"] else OUTCOMES[visit["outcome"]],
        )
    console.print(table)
    if any(visit["excluded"] is None for visit in one["visits"] if visit["step"] is not None):
        console.print(UNKNOWN_EXCLUDED, style="dim", soft_wrap=True)


if __name__ == "__main__":
    app()
