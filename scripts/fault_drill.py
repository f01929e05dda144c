"""Puts a small training run through faults, and reports whether anything was lost or changed without a word.

    python scripts/fault_drill.py                       # 20 kills, all damages, all conditions: minutes
    python scripts/fault_drill.py --kills 200           # the full run
    python scripts/fault_drill.py --only corruption     # one part of it
    python scripts/fault_drill.py --markdown            # the tables of the last report, for docs/faults.md

The folder of --out gets report.json, and nothing else stays.
"""

import contextlib
import dataclasses
import enum
import json
import os
import pathlib
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final, NoReturn

import jax
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.faults import matrix
from scripts.faults.conditions import CONDITIONS
from scripts.faults.kills import HarnessError, kill_runs

GOOD, BAD, FAILED, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES: Final = (
    "Exit codes: 0, nothing was lost or changed. 1, a fault lost or changed something. 2, wrong use, "
    "or the harness itself could not do its work."
)
REPORT: Final = "report.json"
#: Where one thing is wrong, much follows from it.
MAX_FAULTS: Final = 5
HEADINGS: Final = ("fault", "how", "outcome")

Report = dict[str, Any]
Rows = list[tuple[tuple[str, ...], bool | None]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
notes = Console(highlight=False, stderr=True)


class Part(enum.StrEnum):
    """What can be tried by itself."""

    KILLS = "kills"
    CORRUPTION = "corruption"
    CONDITIONS = "conditions"


@app.command(epilog=EXIT_CODES)
def main(
    kills: Annotated[int, typer.Option(min=1, help="SIGKILLs that must land.")] = 20,
    seed: Annotated[int, typer.Option(help="Of their instants.")] = 0,
    out: Annotated[
        pathlib.Path, typer.Option(help="Folder for report.json; the runs in it are removed.")
    ] = pathlib.Path("runs/faults"),
    only: Annotated[Part | None, typer.Option(help="Try this part alone.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Try nothing; print the report in --out as Markdown.")
    ] = False,
) -> None:
    """Kills a small training run, damages its checkpoints, and provokes what else can go wrong.

    KILLS: SIGKILL at random instants while it starts, trains, writes, commits and deletes; then the
    run is compared with one never killed. CORRUPTION: every file of a checkpoint, damaged in every way,
    resumed from. CONDITIONS: a full disk, two writers, exits without close, signals, and more.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    jax.config.update("jax_platforms", "cpu")
    try:
        if markdown:
            print_markdown(json.loads((out / REPORT).read_text("utf-8")))
            return
        report = try_parts([only] if only else list(Part), kills, seed, out)
        show(report)
        console.print(f"{report['seconds']:.0f} s. {out / REPORT}", soft_wrap=True)
    except KeyboardInterrupt:
        notes.print("[bold]Interrupted:[/] all runs were stopped and removed; there is no result.")
        raise typer.Exit(INTERRUPTED) from None
    except (HarnessError, OSError, ValueError) as error:
        fail(str(error))
    except Exception as error:  # noqa: BLE001 (an exit with 1 would say that data was lost)
        notes.print_exception()
        fail(f"a fault of the harness itself: {error!r}")
    raise typer.Exit(GOOD if report["ok"] else BAD)


def fail(message: str) -> NoReturn:
    """Says why there is no result, and ends."""
    notes.print(f"[bold red]There is no result:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(FAILED)


def try_parts(parts: list[Part], kills: int, seed: int, out: pathlib.Path) -> Report:
    """Tries some parts, and writes the report."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    report: Report = {"seed": seed, "system": f"{platform.system()} {platform.release()}"}
    tries: dict[Part, Callable[[pathlib.Path, Callable[[str], None]], tuple[Any, bool]]] = {
        Part.KILLS: lambda work, tell: try_kills(work, kills, seed, tell),
        Part.CORRUPTION: try_corruption,
        Part.CONDITIONS: try_conditions,
    }
    ok = True
    with console.status("") as status:
        for part in parts:
            with tempfile.TemporaryDirectory(prefix="work-", dir=out) as folder:
                work = pathlib.Path(folder).resolve()
                found, good = tries[part](work, lambda line: status.update(escape(line)))
            report[part.value] = found
            ok &= good
    report |= {"ok": ok, "seconds": time.monotonic() - began}
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report


def try_kills(
    work: pathlib.Path, kills: int, seed: int, tell: Callable[[str], None]
) -> tuple[Any, bool]:
    """SIGKILLs."""
    found = kill_runs(work, kills, seed, progress=tell)
    return {**dataclasses.asdict(found), "hits": found.hits()}, found.ok


def try_corruption(work: pathlib.Path, tell: Callable[[str], None]) -> tuple[Any, bool]:
    """The corruption matrix, for this library in both ways to verify, and for plain Orbax."""
    readers = [
        matrix.checkpoints_reader("full"),
        matrix.checkpoints_reader("manifest"),
        matrix.orbax_reader(),
    ]
    cells = []
    with quiet():
        for cell in matrix.corruption_matrix(work, readers):
            cells.append(cell)
            tell(f"{len(cells)} cells of the corruption matrix: {cell.where}, {cell.damage}")
    return [dataclasses.asdict(cell) for cell in cells], all(cell.ok for cell in cells)


def try_conditions(work: pathlib.Path, tell: Callable[[str], None]) -> tuple[Any, bool]:
    """Everything else, one after the other."""
    found = []
    for number, condition in enumerate(CONDITIONS, start=1):
        tell(f"condition {number} of {len(CONDITIONS)}: {condition.__doc__}")
        (work / condition.__name__).mkdir()
        found.append(condition(work / condition.__name__))
    return [dataclasses.asdict(one) for one in found], all(one.ok is not False for one in found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what the layers below write to stderr about each damaged file."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with pathlib.Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def kill_rows(report: Report) -> Rows:
    """One row for all kills, one for everything that was wrong."""
    found = report.get("kills")
    if not found:
        return []
    hits = ", ".join(f"{count} {phase}" for phase, count in found["hits"].items() if count)
    replayed = sum(kill["replayed"] for kill in found["kills"])
    equal = "equal" if found["final_states_equal"] else "DIFFERENT"
    outcome = (
        f"{found['lost']} records lost, {found['repeated']} repeated, {replayed} steps replayed; final "
        f"state of {found['runs']} runs bit for bit {equal}"
    )
    ok = not (found["lost"] or found["repeated"] or found["faults"]) and equal == "equal"
    rows: Rows = [((f"{len(found['kills'])} SIGKILLs", f"hit: {hits}", outcome), ok)]
    faults = found["faults"]
    rows += [(("after a kill", "", fault), False) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        rows.append((("", "", f"{len(faults) - MAX_FAULTS} more in {REPORT}"), False))
    return rows


def corruption_rows(report: Report) -> Rows:
    """A row for each kind of damage: what each reader made of it, over all files."""
    cells: list[dict[str, Any]] = report.get("corruption", [])
    rows: Rows = []
    for damage in dict.fromkeys(cell["damage"] for cell in cells):
        here = [cell for cell in cells if cell["damage"] == damage]
        by_reader = {
            reader: [cell for cell in here if cell["reader"] == reader]
            for reader in dict.fromkeys(cell["reader"] for cell in here)
        }
        texts = [counts(found) for found in by_reader.values()]
        size = str(len(next(iter(by_reader.values()))))
        rows.append(((damage, size, *texts), all(cell["ok"] for cell in here)))
    return rows


def counts(cells: Iterable[dict[str, Any]]) -> str:
    """How often each outcome came."""
    names = {
        matrix.OLDER_USED: "detected",
        matrix.REFUSED: "detected",
        matrix.IDENTICAL: "no effect",
        matrix.SAME_BYTES: "same bytes",
        matrix.NOT_LOOKED_AT: "not looked at",
    }
    found: dict[str, int] = {}
    for cell in cells:
        name = names.get(cell["outcome"], cell["outcome"])
        found[name] = found.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


def condition_rows(report: Report) -> Rows:
    """A row for each condition."""
    found = report.get("conditions", [])
    return [((one["fault"], one["how"], one["outcome"]), one["ok"]) for one in found]


def corruption_headings(report: Report) -> tuple[str, ...]:
    """What stands over the columns of `corruption_rows`."""
    readers = dict.fromkeys(cell["reader"] for cell in report.get("corruption", []))
    return ("damage", "tries", *readers)


def show(report: Report) -> None:
    """Prints the tables of a report."""
    tables = (
        (HEADINGS, kill_rows(report)),
        (corruption_headings(report), corruption_rows(report)),
        (HEADINGS, condition_rows(report)),
    )
    for headings, rows in tables:
        if rows:
            table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
            for heading in ("", *headings):
                table.add_column(heading, overflow="fold")
            for texts, ok in rows:
                mark = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "-"}[ok]
                table.add_row(mark, *map(escape, texts))
            console.print(table)
    verdict = "[green]nothing was lost or changed without a word[/]"
    console.print(verdict if report["ok"] else "[bold red]SOMETHING WAS LOST OR CHANGED[/]")


def print_markdown(report: Report) -> None:
    """Prints the tables of a report as they stand in docs/faults.md."""
    tables = (
        (HEADINGS, kill_rows(report) + condition_rows(report)),
        (corruption_headings(report), corruption_rows(report)),
    )
    for headings, rows in tables:
        if rows:
            lines = [headings, ["---"] * len(headings), *(texts for texts, _ in rows)]
            for line in lines:
                cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in line)
                print(f"| {' | '.join(cells)} |")
            print()


if __name__ == "__main__":
    app()
