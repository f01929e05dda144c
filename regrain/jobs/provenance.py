"""Tells which records a step of a run held, and in which steps a record came, from the run's directory."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

import checkpointing
import loader
from regrain.jobs.sources import source_of
from regrain.terminal import console, fail, print_json, safe

ANSWERED, ABSENT = 0, 1
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
MASKED: Final = (
    "on_bad_record is mask: a record that could not be read kept its slot, with mask False. Only reading "
    "it again tells which."
)
UNKNOWN_EXCLUDED: Final = "exclude leaves records out by their ID: without --source nothing tells whether these are among them."

Run = loader.Provenance | loader.MixtureProvenance


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked about a run.

    Attributes:
      steps: which records were in them?
      ids: when did the records of these IDs come?
      rows: the same for those in these rows of the source.
      epochs: in which, as ``FIRST:END``; ``None`` for the newest.
      part: of a mixture; else ``None``.
      source: ``module:function`` that returns the run's source.
      ahead: whether to answer for steps after the newest checkpoint.
    """

    steps: tuple[int, ...] = ()
    ids: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    epochs: str | None = None
    part: str | None = None
    source: str | None = None
    ahead: bool = False


def run(run_dir: str, asked: Asked, *, as_json: bool = False) -> int:
    """Answers what is asked about a run.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError, RuntimeError, MemoryError: why there is no answer.
    """
    part = asked.part
    chosen = None if asked.epochs is None else parse_epochs(asked.epochs)
    given = None if asked.source is None else source_of(asked.source)
    try:
        history: Run
        if part is None:
            history = checkpointing.provenance(run_dir, given, ahead=asked.ahead)
        else:
            sources = None if given is None else {part: given}
            history = checkpointing.mixture_provenance(run_dir, sources, ahead=asked.ahead)
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
    """Prints an answer for people."""
    show_run(answer)
    for one in answer["steps"]:
        show_step(one)
    for one in answer["records"]:
        show_record(one)


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


def describe(run_dir: str, found: loader.Provenance) -> dict[str, Any]:
    """The run itself, as plain values."""
    return {
        "run": run_dir,
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
        "batch": records.batch,
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
        f"[bold]{safe(answer['run'])}[/]: {done}, {answer['num_records']:,} records. {safe(known)}",
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
            safe("; ".join(f"{name} {a} -> {b}" for name, (a, b) in one["changed"].items())),
        )
    console.print(table)


def show_step(one: dict[str, Any]) -> None:
    """Prints the records of a step."""
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
    """The first of some values, in a line."""
    more = f" ... and {len(values) - SHOWN_SLOTS} more: see --json" * (len(values) > SHOWN_SLOTS)
    return " ".join(map(safe, values[:SHOWN_SLOTS])) + more


def show_record(one: dict[str, Any]) -> None:
    """Prints what became of a record in each epoch."""
    named = f"row {one['row']}" if one["id"] is None else f"ID {one['id']} (row {one['row']})"
    first, end = one["epochs"]
    so_far = "" if one["epochs_so_far"] is None else f"; {one['epochs_so_far']} so far"
    console.print(f"\n[bold]{safe(named)}[/]: epochs {first} to {end - 1}{so_far}", soft_wrap=True)
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
