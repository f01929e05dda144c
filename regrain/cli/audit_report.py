"""Audits a stream, and writes what was found: on the terminal, as audit.json, and as a page, audit.html."""

import dataclasses
import importlib.metadata
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

import loader
from loader.sources.new_paths import write_whole
from regrain.cli import audit_page, logged, order_plot
from regrain.cli.console import console, print_json, safe
from regrain.cli.sources import digits, lesson, source_of

CLEAN, FOUND = 0, 1

Alignment = Callable[[dict[str, Any]], Any]


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


def run(
    config: Path,
    out: Path,
    *,
    source: str | None = None,
    num_records: int | None = None,
    epochs: int | None = None,
    step_log: Path | None = None,
    as_json: bool = False,
) -> int:
    """Audits a stream, writes audit.json and audit.html, and prints what was found.

    Args:
      config: TOML file with a table ``[pipeline]``.
      out: folder for both files.
      source: ``module:function`` that returns the records.
      num_records: how many row numbers to audit in place of records.
      epochs: how many, from the first on; ``None`` for all of the config.
      step_log: of a run, whose batches are audited.
      as_json: whether to print the content of audit.json.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError, RuntimeError, MemoryError: why there is no result.
    """
    settings = loader.PipelineConfig.from_toml(config)
    records = records_of(config, source, num_records)
    pipeline = loader.Pipeline(records.source, settings)
    report = audited(pipeline, records, epochs, step_log)
    out.mkdir(parents=True, exist_ok=True)
    page = audit_page.page(title(config, records, step_log), pipeline, report)
    write_whole(out / "audit.html", page.encode())
    found = to_dict(config, settings, records, step_log, report)
    write_whole(out / "audit.json", f"{json.dumps(found, indent=1)}\n".encode())
    if as_json:
        print_json(found)
    else:
        show(title(config, records, step_log), records.source, report)
        console.print(f"written: {safe(out / 'audit.html')}, audit.json", soft_wrap=True)
    return CLEAN if report.clean else FOUND


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
        return Records(digits(), "the digits")
    return Records(RowNumbers(order_plot.records_of(config)), "row numbers", ids_only=True)


def lesson_alignment(batch: dict[str, Any]) -> Any:
    """Whether y = 2 x - 1, for each record of a batch."""
    return np.isclose(batch["y"], 2 * batch["x"] - 1, atol=1e-7)


def audited(
    pipeline: loader.Pipeline, records: Records, epochs: int | None, step_log: Path | None
) -> loader.AuditReport:
    """The report, on the batches of a pipeline or of a log."""
    if step_log is not None:
        return logged.audit_log(step_log, pipeline, epochs)
    return loader.audit(pipeline, epochs, records.alignment, ids_only=records.ids_only)


def to_dict(
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


def show(what: str, source: loader.RecordSource, report: loader.AuditReport) -> None:
    """Prints the report."""
    console.print(f"[bold]{safe(what)}[/]", soft_wrap=True)
    verdict = (
        "[green]clean[/]" if report.clean else f"[bold red]found: {', '.join(report.found)}[/]"
    )
    console.print(verdict)
    table = Table(box=SIMPLE_HEAD)
    for heading in ("finding", "count", "causes", "first"):
        table.add_column(heading, justify="right" if heading == "count" else "left")
    for finding in report.findings:
        style = "red" if finding.count else "dim"
        first = audit_page.first_of(source, finding)
        table.add_row(
            finding.name,
            f"{finding.count:,}",
            safe(causes(finding.causes)),
            safe(first),
            style=style,
        )
    console.print(table)
    for line in audit_page.covered(source, report):
        console.print(safe(line), soft_wrap=True)


def causes(counts: Any) -> str:
    """Each cause with its count."""
    return ", ".join(f"{cause} {count:,}" for cause, count in counts.items())
