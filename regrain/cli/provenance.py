"""`regrain provenance`: show which records a step held, and in which steps a record came."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from regrain.cli.console import console, fail, print_json, running, safe, table
from regrain.cli.options import INTERRUPTED, About, Json, RunDir

if TYPE_CHECKING:
    import loader

    Run: TypeAlias = loader.Provenance | loader.MixtureProvenance

ANSWERED, ABSENT = 0, 1
#: Without --epochs, a record's visits are shown in this many of the newest epochs.
NEWEST_EPOCHS: Final = 100
MAX_EPOCHS: Final = 10**6
#: Without --json, this many slots of a step are shown.
SHOWN_SLOTS: Final = 4096

LEFT_OUT: Final = "left out by exclude: its slot came with mask False"
OUTCOMES: Final = {
    "delivered": "delivered",
    "skipped": "left out by skip, with its batch",
    "dropped": "dropped: the last records did not fill a batch",
    "ahead": "not yet",
}
MASKED: Final = (
    "on_bad_record is mask: an unreadable record kept its slot, with mask False. Which records these were "
    "is found by reading them again."
)
UNKNOWN_EXCLUDED: Final = (
    "exclude leaves records out by their ID: give --source to see whether these are among them."
)

ABOUT: Final = About(
    {
        "regrain provenance runs/digits --step 1200": "which records were in a step?",
        "regrain provenance runs/digits --id 7": "when did a record come, in each epoch?",
        "regrain provenance runs/digits --row 7 --epochs 3:9": "the same by row, in some epochs",
        "regrain provenance runs/digits": "how many steps are done, and what was changed when?",
    },
    {
        0: "answered",
        1: "the run has no such step, row or ID",
        2: "wrong use, or the run cannot be read or followed",
        **INTERRUPTED,
    },
)


def provenance(
    run_dir: RunDir,
    step: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Which records were in it? Counted from 0 over all epochs. Repeat for more.",
        ),
    ] = None,
    record_id: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="When did the record of this ID come?"),
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=0, help="The same for the record in a row of the source."),
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
        typer.Option(metavar="NAME", help="For a run on a mixture: the part."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns the run's source, for IDs that are not row numbers; of a "
            "mixture, the source of the part.",
        ),
    ] = None,
    ahead: Annotated[
        bool,
        typer.Option("--ahead", help="Also show steps after the newest checkpoint."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which records a step held, and in which steps a record came, from a run's directory alone.

    Without --step, --id and --row: the number of steps so far, and the changes at resumes. It needs
    neither the training script nor the data, and replays nothing. Steps are counted from 0.
    """
    with running("provenance"):
        asked = Asked(
            steps=tuple(step or ()),
            ids=tuple(record_id or ()),
            rows=tuple(row or ()),
            epochs=epochs,
            part=part,
            source=source,
            ahead=ahead,
        )
        code = run(run_dir, asked, as_json=as_json)
    raise typer.Exit(code)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of the command.

    Attributes:
      steps: steps whose records to show.
      ids: IDs of records whose steps to show.
      rows: the same by row of the source.
      epochs: the epochs, as ``FIRST:END``; ``None`` for the newest.
      part: of a mixture; else ``None``.
      source: ``module:function`` that returns the run's source.
      ahead: whether to show steps after the newest checkpoint.
    """

    steps: tuple[int, ...] = ()
    ids: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    epochs: str | None = None
    part: str | None = None
    source: str | None = None
    ahead: bool = False


def run(run_dir: str, asked: Asked, *, as_json: bool = False) -> int:
    """Answer the questions about a run, and print the answers.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError, RuntimeError, MemoryError: why there is no answer.
    """
    import checkpointing
    from regrain.cli.sources import source_of

    part = asked.part
    chosen = None if asked.epochs is None else parse_epochs(asked.epochs)
    given = None if asked.source is None else source_of(asked.source)
    try:
        sources = given if part is None or given is None else {part: given}
        history: Run = checkpointing.provenance(run_dir, sources, ahead=asked.ahead)
        found = asked_about(history, part)
        rows = [*(found.row_of(an_id(found, text)) for text in asked.ids), *asked.rows]
        answer = {
            **describe(run_dir, found),
            "steps": [describe_step(history.records_at(number)) for number in asked.steps],
            "records": [describe_record(history, part, number, chosen) for number in rows],
        }
    except (IndexError, KeyError) as error:
        fail("provenance", f"{run_dir}: {error.args[0]}" + hint(error), ABSENT)
    if as_json:
        print_json(answer)
    else:
        show(answer)
        if found.segments[-1].config.on_bad_record == "mask" and (answer["steps"] or rows):
            console.print(MASKED, style="dim")
    return ANSWERED


def show(answer: dict[str, Any]) -> None:
    """Print the answers for people."""
    show_run(answer)
    for one in answer["steps"]:
        show_step(one)
    for one in answer["records"]:
        show_record(one)


def hint(error: Exception) -> str:
    """Advice for a step that no checkpoint covers yet."""
    if "is not done" not in str(error):
        return ""
    return ". That is the newest checkpoint; --ahead shows later steps, as they come if nothing changes"


def parse_epochs(text: str) -> range:
    """The epochs in ``FIRST:END``, or in a single number."""
    first, colon, end = text.partition(":")
    try:
        epochs = range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        raise ValueError(f"--epochs takes FIRST:END, such as 3:9, not {text!r:.40}") from None
    if not 0 < len(epochs) <= MAX_EPOCHS:
        raise ValueError(f"--epochs {text} are {len(epochs)} epochs; give 1 to {MAX_EPOCHS:,}")
    return epochs


def asked_about(run: "Run", part: str | None) -> "loader.Provenance":
    """The provenance of the run, or of one part of its mixture."""
    import loader

    if isinstance(run, loader.Provenance):
        if part is not None:
            raise ValueError(f"--part {part}: the run is of one pipeline and has no parts")
        return run
    if part is None:
        raise ValueError(f"the run is of a mixture of {', '.join(run.parts)}: give --part")
    if part not in run.parts:
        raise KeyError(f"the run has the parts {', '.join(run.parts)}, not {part!r}")
    return run.parts[part]


def an_id(found: "loader.Provenance", text: str) -> int | str:
    """An ID of the type that the run's source has.

    Raises:
      KeyError: the text is no such ID.
      ValueError: the run's IDs are not known.
    """
    if found.source is None:
        raise ValueError(
            f"--id {text}: the run's IDs are not known, since its checkpoints hold only their digest; "
            "give --source, or use --row"
        )
    if found.has_text_ids:
        return text
    try:
        return int(text)
    except ValueError:
        raise KeyError(f"no record has the ID {text!r:.80}: the IDs are integers") from None


def describe(run_dir: str, found: "loader.Provenance") -> dict[str, Any]:
    """The run itself, as plain values."""
    return {
        "run": run_dir,
        "num_records": found.num_records,
        "num_steps": found.num_steps,
        "ids": found.ids_from or None,
        "segments": list(describe_segments(found)),
    }


def describe_segments(found: "loader.Provenance") -> Iterator[dict[str, Any]]:
    """Each segment of the run: its steps, the place where it begins, and what was changed there."""
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


def describe_step(records: "loader.StepRecords") -> dict[str, Any]:
    """A step as plain values: row, ID and exclusion of each record."""
    return {
        "step": records.step,
        "batch": records.batch,
        "part": records.part,
        "epoch": records.epoch,
        "offset": records.offset,
        "slots": records.slots,
        "rows": records.rows.tolist(),
        "ids": None if records.ids is None else records.ids.tolist(),
        "excluded": None if records.excluded is None else records.excluded.tolist(),
    }


def describe_record(run: "Run", part: str | None, row: int, epochs: range | None) -> dict[str, Any]:
    """A record as plain values: its ID, and its outcome in each epoch."""
    import loader

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
    """Print the number of steps so far, and the segments."""
    steps, ids = answer["num_steps"], answer["ids"]
    done = "without end" if steps is None else f"{steps:,} steps"
    known = f"IDs: {ids}" if ids else "IDs not known: give --source, or use --row"
    console.print(
        f"[bold]{safe(answer['run'])}[/]: {done}, {answer['num_records']:,} records. {safe(known)}",
        soft_wrap=True,
    )
    made = table(("steps", "begins at", "batch size", "changed"))
    for one in answer["segments"]:
        first, end, start = one["first_step"], one["end_step"], one["start"]
        made.add_row(
            f"{first} on"
            if end is None
            else f"{first} to {end - 1}"
            if end > first
            else "none yet",
            f"epoch {start['epoch']}, offset {start['offset']}",
            str(one["config"]["batch_size"]),
            safe("; ".join(f"{name} {a} -> {b}" for name, (a, b) in one["changed"].items())),
        )
    console.print(made)


def show_step(one: dict[str, Any]) -> None:
    """Print the records of a step."""
    rows, ids, slots = one["rows"], one["ids"], one["slots"]
    of_part = "" if one["part"] is None else f"part {safe(one['part'])}, "
    padded = f", {slots - len(rows)} of them padding" if slots > len(rows) else ""
    number = f"; batch {one['batch']}, as skip counts" if one["batch"] != one["step"] else ""
    console.print(
        f"\n[bold]step {one['step']}[/]: {of_part}epoch {one['epoch']}, offset {one['offset']}, "
        f"{slots} slots{padded}{number}"
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
    """The first values on a line."""
    more = f" ... and {len(values) - SHOWN_SLOTS} more: see --json" * (len(values) > SHOWN_SLOTS)
    return " ".join(map(safe, values[:SHOWN_SLOTS])) + more


def show_record(one: dict[str, Any]) -> None:
    """Print the outcome of a record in each epoch."""
    named = f"row {one['row']}" if one["id"] is None else f"ID {one['id']} (row {one['row']})"
    first, end = one["epochs"]
    so_far = "" if one["epochs_so_far"] is None else f"; {one['epochs_so_far']} so far"
    console.print(f"\n[bold]{safe(named)}[/]: epochs {first} to {end - 1}{so_far}", soft_wrap=True)
    numbers = ("epoch", "step", "slot")
    made = table((*numbers, "outcome"), right=numbers)
    for visit in one["visits"]:
        came = visit["outcome"] == "delivered"
        made.add_row(
            str(visit["epoch"]),
            str(visit["step"]) if came else "-",
            str(visit["slot"]) if came else "-",
            LEFT_OUT if came and visit["excluded"] else OUTCOMES[visit["outcome"]],
        )
    console.print(made)
    if any(visit["excluded"] is None for visit in one["visits"] if visit["step"] is not None):
        console.print(UNKNOWN_EXCLUDED, style="dim", soft_wrap=True)
