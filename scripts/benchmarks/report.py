"""The whole report: every section, the machine, the versions; as JSON, as tables, and as a page."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.benchmarks.section import Section

Report = dict[str, Any]

#: Distributions whose versions are told, where they are installed.
_PACKAGES: Final = (
    "regrain",
    "grain",
    "jax",
    "jaxlib",
    "numpy",
    "orbax-checkpoint",
    "tensorstore",
    "torch",
    "torchdata",
    "datasets",
    "pyarrow",
    "mosaicml-streaming",
    "spdl",
    "ffcv",
)
_WIDTH: Final = 132


def report_of(
    measures: Mapping[str, Callable[..., Section]],
    *,
    quick: bool,
    command: str,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measures each section, and puts everything that is known into one JSON-able dict.

    Args:
      measures: by the section's name, in the order of the report. The last one is measured first: the
        first one takes longest, and fills the page cache with files of its own.
      quick: whether all is tiny.
      command: that this is.
      keep: is given the report after each section, with those that are measured.
    """
    before, start = machine(), time.time()
    measured: dict[str, Any] = {}
    report: Report = {}
    for name in reversed(list(measures)):
        measured[name] = dataclasses.asdict(measures[name](quick=quick))
        sections = {known: measured[known] for known in measures if known in measured}
        report = _report(sections, before, start, quick=quick, command=command)
        keep(report)
    return report


def _report(
    sections: dict[str, Any], before: dict[str, Any], start: float, *, quick: bool, command: str
) -> Report:
    return {
        "format": 2,
        "command": command,
        "quick": quick,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(start)),
        "seconds": round(time.time() - start, 1),
        "machine": before | {"load average at the end": _load()},
        "versions": versions(),
        "targets": [
            {"section": name, **target}
            for name, section in sections.items()
            for target in section["targets"]
        ],
        "sections": sections,
    }


def machine() -> dict[str, Any]:
    """The machine, and how busy it is."""
    affinity = getattr(os, "sched_getaffinity", None)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores usable": len(affinity(0)) if affinity else os.cpu_count(),
        "last-level cache": _last_level_cache(),
        "memory": f"{memory / (1 << 30):.1f} GiB",
        "system": platform.platform(),
        "load average (1, 5, 15 min)": _load(),
    }


def _load() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _last_level_cache() -> str:
    """Size of the largest cache, where the system tells it."""
    found = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return found[-1].read_text("utf-8").strip() if found else "of unknown size"


def versions() -> dict[str, str]:
    """Versions of all that takes part and is installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# --- on the terminal ------------------------------------------------------------------------------


def show(report: Report) -> None:
    """Prints the tables, then the targets, then everything one must know to read them."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for section in report["sections"].values():
        for of in section["tables"]:
            console.print(_table(of["title"], of["columns"], of["rows"]))
    rows = list(_target_rows(report["targets"]))
    if rows:
        console.print(_table("targets", _TARGET_COLUMNS, rows))
    for name, section in report["sections"].items():
        for condition, text in section["conditions"].items():
            print(f"{name}, {condition}: {text}")
    for part in ("machine", "versions"):
        print(f"{part}: " + ", ".join(f"{name} {value}" for name, value in report[part].items()))
    if report["quick"]:
        print("This was --quick: the figures mean nothing.")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(title=escape(title), box=SIMPLE_HEAD, title_justify="left")
    for at, column in enumerate(columns):
        made.add_column(escape(column), justify="right" if at else "left")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


_TARGET_COLUMNS: Final = ("target", "wanted", "got", "met", "why")


def _target_rows(targets: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    words = {True: "yes", False: "NO", None: "not measured"}
    for target in targets:
        got = "" if target["got"] is None else f"{target['got']:.3g}"
        yield [target["name"], target["wanted"], got, words[target["met"]], target["why"]]


# --- as a page ------------------------------------------------------------------------------------

_INTRODUCTION: Final = """\
# Benchmarks

One run of `scripts/benchmark.py`, which measures and writes this page; no figure is written by hand. Below its tables,
each section says how it was measured. Ratios compare windows of the same round, and carry over to other machines better
than rates. Quartiles that lie far apart mean that the machine was busy.

    {command}
"""

_SILENCE: Final = """\
## What these figures do not say

- They are of one machine and one run. Memory, disk, cores and other programs change the rates, and less so the ratios.
- The loaders only gather raw records here. With decoding or augmentation, time goes there, and worker processes, which
  lose here, win.
- Other loaders do more than gather: they read formats of their own, stream from object stores, and shard over machines.
  They are not asked for what this loader adds: an order that resumes in constant time, and an ID for each record.
- Each contender has the fastest settings of one short trial; an expert may find faster ones.
- All data is in memory or in the page cache. Reads from disk are not measured: for loaders that keep the file mapped, a
  dropped cache turned out to be warm.
- One process reads. Several JAX processes, and devices other than the first, are not measured.
- Quartiles are of windows, not of single batches, so stalls do not show.
"""


def markdown(report: Report) -> str:
    """The results page."""
    parts = [_INTRODUCTION.format(command=report["command"])]
    if report["quick"]:
        parts.append("**This was --quick: the figures mean nothing.**\n")
    rows = list(_target_rows(report["targets"]))
    if rows:
        parts += ["## Targets\n", _markdown_table(_TARGET_COLUMNS, rows)]
    for section in report["sections"].values():
        parts += _markdown_section(section)
    parts += [_SILENCE, "## Machine and versions\n", _listed(report["machine"])]
    parts.append(", ".join(f"{name} {value}" for name, value in report["versions"].items()) + "\n")
    parts.append(f"Begun {report['started']}, took {report['seconds'] / 60:.0f} minutes.\n")
    return "\n".join(parts)


def _markdown_section(section: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {section['title']}\n"
    for of in section["tables"]:
        yield f"### {of['title']}\n"
        yield _markdown_table(of["columns"], of["rows"])
    yield "How it was measured:\n"
    yield _listed(section["conditions"])


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _listed(items: Mapping[str, Any]) -> str:
    return "".join(f"- **{name}**: {value}\n" for name, value in items.items())
