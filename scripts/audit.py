#!/usr/bin/env python
"""Audits a stream, and writes what was found: on the terminal, as audit.json, and as a page, audit.html.

    scripts/audit.py --config configs/lesson.toml --out runs/audit
    scripts/audit.py --config configs/digits.toml --out runs/audit
    scripts/audit.py --config my.toml --source my_data:my_source --out runs/audit
    scripts/audit.py --config my.toml --num-records 100000000 --out runs/audit     # IDs alone, no data
    scripts/audit.py --config configs/digits.toml --step-log steps.jsonl --out runs/audit

Run it with the environment active. The records are those of --source; without it, the lesson's or the
digits', where the config is theirs; else row numbers, which are their own IDs and hold nothing. They
are audited as they come from the source, before any transform. With --step-log the batches are those
that a run wrote to its log, the last delivery of each step.
"""

import dataclasses
import importlib.metadata
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import checkpointing
import loader
from scripts import audit_page, plot_order
from scripts.fingerprint import digits_source, source_of

CLEAN, FOUND, FAILED = 0, 1, 2
EXIT_CODES: Final = (
    "Exit codes: 0, clean. 1, findings. 2, wrong use, or something cannot be read or written."
)
#: Work that ends sooner needs no progress bar.
BAR_AFTER_SECONDS: Final = 2.0
SHOWN_OFFENDERS: Final = 5

Alignment = Callable[[dict[str, Any]], Any]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
notes = Console(highlight=False, stderr=True)


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """A source of any size that holds nothing: a record's ID is its row number."""

    num_records: int

    def __len__(self) -> int:
        return self.num_records

    @property
    def fields(self) -> dict[str, loader.Field]:
        """None."""
        return {}

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """The rows themselves: int64[k]."""
        return np.array(rows)

    def rows_of(self, ids: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """The IDs themselves: int64[k]."""
        return ids

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """Nothing, for any rows."""
        del rows
        return {}

    def fingerprint(self) -> loader.Fingerprint:
        """There is no content to identify."""
        raise NotImplementedError("row numbers have no content")


@dataclasses.dataclass(frozen=True)
class Records:
    """What is audited.

    Attributes:
      source: the records.
      name: for people.
      alignment: an oracle of the data, if it has one.
      ids_only: whether there is nothing to read.
    """

    source: loader.RecordSource
    name: str
    alignment: Alignment | None = None
    ids_only: bool = False


@app.command(epilog=EXIT_CODES)
def main(
    config: Annotated[Path, typer.Option(help="TOML file with a [pipeline] table.")],
    out: Annotated[Path, typer.Option(help="Folder for audit.json and audit.html.")],
    source: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="What returns the source of the records."),
    ] = None,
    num_records: Annotated[
        int | None,
        typer.Option(min=1, help="Audit the IDs of so many row numbers, without any data."),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="How many, from the first on; by default all of the config."),
    ] = None,
    step_log: Annotated[
        Path | None,
        typer.Option(help="Audit the batches in a run's step log, as far as it came."),
    ] = None,
) -> None:
    """Audits which records a stream delivers, where, how often, and whether they are what they should be."""
    try:
        settings = loader.PipelineConfig.from_toml(config)
        records = records_of(config, source, num_records)
        pipeline = loader.Pipeline(records.source, settings)
        report = audited(pipeline, records, epochs, step_log)
        out.mkdir(parents=True, exist_ok=True)
        page = audit_page.page(title(config, records, step_log), pipeline, report)
        plot_order.write(out / "audit.html", page.encode())
        text = json.dumps(as_json(config, settings, records, step_log, report), indent=1)
        plot_order.write(out / "audit.json", f"{text}\n".encode())
    except (OSError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        fail(str(error) or repr(error))
    show(title(config, records, step_log), report)
    console.print(f"written: {escape(str(out / 'audit.html'))}, audit.json", soft_wrap=True)
    raise typer.Exit(CLEAN if report.clean else FOUND)


def fail(message: str) -> NoReturn:
    """Ends the program with a message on stderr."""
    notes.print(f"[bold red]audit.py:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(FAILED)


def title(config: Path, records: Records, step_log: Path | None) -> str:
    """What is audited, in a line."""
    log = "" if step_log is None else f", as logged in {step_log.name}"
    return f"{config.name}: {len(records.source):,} records of {records.name}{log}"


def records_of(config: Path, source: str | None, num_records: int | None) -> Records:
    """The records that a command is about."""
    if source is not None and num_records is not None:
        raise ValueError("--source and --num-records both say which records; give one of them")
    if source is not None:
        return Records(source_of(source), source)
    if num_records is not None:
        return Records(RowNumbers(num_records), "row numbers", ids_only=True)
    dataset: Any = tomllib.loads(config.read_text("utf-8")).get("dataset", {})
    name = dataset.get("name", config.stem) if isinstance(dataset, dict) else config.stem
    if name == "lesson":
        return Records(lesson(), "the lesson", lesson_alignment)
    if name == "digits":
        return Records(digits_source(), "the digits")
    return Records(RowNumbers(plot_order.records_of(config)), "row numbers", ids_only=True)


def lesson() -> loader.ArraySource:
    """The lesson's eleven records: x = ID / 10 and y = 2 x - 1."""
    x = (np.arange(11) / 10).astype(np.float32)
    return loader.ArraySource({"x": x, "y": 2 * x - 1})


def lesson_alignment(batch: dict[str, Any]) -> Any:
    """Whether y = 2 x - 1, for each record of a batch."""
    return np.isclose(batch["y"], 2 * batch["x"] - 1, atol=1e-7)


def audited(
    pipeline: loader.Pipeline, records: Records, epochs: int | None, step_log: Path | None
) -> loader.AuditReport:
    """The report, with a progress bar on a terminal if it takes long."""
    if step_log is not None:
        deliveries = {line.position.step: line for line in checkpointing.read_step_log(step_log)}
        batches = (
            {"id": np.array(line.ids), "mask": np.array(line.mask)}
            for _, line in sorted(deliveries.items())
        )
        settings = dataclasses.replace(pipeline.config, num_epochs=None)
        with_bar = progress(sum(len(line.ids) for line in deliveries.values()))
        for tell in with_bar:
            return loader.audit_batches(
                batches, records.source, settings, epochs=epochs, progress=tell
            )
    steps = pipeline.steps_per_epoch * (epochs or pipeline.config.num_epochs or 1)
    for tell in progress(steps * pipeline.config.batch_size):
        return loader.audit(
            pipeline, epochs, records.alignment, ids_only=records.ids_only, progress=tell
        )
    raise AssertionError("unreachable")


def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Once, a function to tell how many slots are done."""
    bar = Progress(
        TextColumn("auditing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("slots"),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    task = bar.add_task("audit", total=total)
    begun = time.monotonic()

    def tell(done: int) -> None:
        bar.update(task, completed=done)
        if time.monotonic() - begun > BAR_AFTER_SECONDS and not bar.disable:
            bar.start()

    try:
        yield tell
    finally:
        bar.stop()


def as_json(
    config: Path,
    settings: loader.PipelineConfig,
    records: Records,
    step_log: Path | None,
    report: loader.AuditReport,
) -> dict[str, Any]:
    """All that is known, as JSON can hold it."""
    return {
        "config": {"file": config.name, **settings.to_dict()},
        "records": records.name,
        "step_log": None if step_log is None else step_log.name,
        "order_version": loader.ORDER_VERSIONS[settings.shuffle],
        "versions": {name: importlib.metadata.version(name) for name in ("regrain", "numpy")},
        **report.to_dict(),
    }


def show(what: str, report: loader.AuditReport) -> None:
    """Prints the report."""
    console.print(f"[bold]{escape(what)}[/]", soft_wrap=True)
    verdict = (
        "[green]clean[/]" if report.clean else f"[bold red]found: {', '.join(report.found)}[/]"
    )
    console.print(verdict)
    table = Table(box=SIMPLE_HEAD)
    for heading in ("finding", "count", "causes", "first"):
        table.add_column(heading, justify="right" if heading == "count" else "left")
    for finding in report.findings:
        style = "red" if finding.count else "dim"
        first = "" if finding.first is None else str(finding.first)
        table.add_row(
            finding.name,
            f"{finding.count:,}",
            escape(causes(finding.causes)),
            escape(first),
            style=style,
        )
    console.print(table)
    for line in audit_page.covered(report):
        console.print(escape(line), soft_wrap=True)


def causes(counts: Any) -> str:
    """Each cause with its count."""
    return ", ".join(f"{cause} {count:,}" for cause, count in counts.items())


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    app()
