#!/usr/bin/env python
"""Measures this loader beside bare NumPy and other loaders, and holds the figures against the targets.

    scripts/benchmark.py                               all of it, half an hour
    scripts/benchmark.py --quick                       under a minute: whether it works, no figures
    scripts/benchmark.py --only loading                one section; may be repeated
    scripts/benchmark.py --only loading --workload records --contender regrain --contender "numpy take"
    scripts/benchmark.py --json results.json           everything that was measured, too
    scripts/benchmark.py --markdown BENCHMARKS.md      the results page, too

Run it with the environment active, on a machine that does nothing else. Contenders that are not
installed get a word in the tables; pip install '.[bench]' installs those that can be.

Files go to a temporary folder (TMPDIR says where), which is removed at the end, also after Ctrl-C.

Exit codes: 0 measured, whatever came of the targets; 1 a contender delivered something else, failed,
or a file cannot be written; 2 the command is wrong; 130 and 143 ended by SIGINT and SIGTERM.
"""

import functools
import importlib
import json
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

#: Modules of scripts.benchmarks, in the order of the report. They are imported when they are run, so
#: that a contender's process, which imports this file, gets no more than it asks for.
SECTIONS: Final = (
    "loading",
    "formats",
    "workers",
    "orders",
    "resuming",
    "saving",
    "fingerprints",
)


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny and short: the figures mean nothing.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"A section: {', '.join(SECTIONS)}.")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="A workload of the section loading.")
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="A contender of the section loading.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Windows of each contender of the section loading.")
    ] = None,
    mapped_gib: Annotated[
        float | None,
        typer.Option(min=0.01, help="At most so large is the memory-mapped file; 16 by default."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File for the whole report, as JSON.")
    ] = None,
    markdown_path: Annotated[
        Path | None, typer.Option("--markdown", help="File for the results page.")
    ] = None,
) -> None:
    """Measure this loader beside bare NumPy and other loaders, and hold the figures against the targets.

    \b
    scripts/benchmark.py                           all of it, half an hour
    scripts/benchmark.py --quick                   under a minute: whether it works, no figures
    scripts/benchmark.py --only loading            one section; may be repeated
    scripts/benchmark.py --json results.json       everything that was measured, too
    scripts/benchmark.py --markdown BENCHMARKS.md  the results page, too

    Contenders run in processes of their own and take turns. Compare ratios, not rates: those change
    with the machine. If the quartiles lie far apart, the machine was busy: run it again.

    Exit codes: 0 measured, whatever came of the targets; 1 a contender delivered something else,
    failed, or a file cannot be written; 2 the command is wrong.
    """  # noqa: D301 (\b keeps Click from joining the lines of the examples)
    for path in (json_path, markdown_path):
        if path is not None and not path.parent.is_dir():
            fail(f"{path} cannot be written: there is no folder {path.parent}")
    names = chosen("--only", only, SECTIONS)
    measures = {name: measure_of(name, workload, contender, rounds, mapped_gib) for name in names}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from scripts.benchmarks import report  # noqa: PLC0415 (as the sections)

    try:

        def keep(measured: dict[str, Any]) -> None:
            if json_path is not None:
                json_path.write_text(json.dumps(measured, indent=2) + "\n", "utf-8")
            if markdown_path is not None:
                markdown_path.write_text(report.markdown(measured), "utf-8")

        command = shlex.join(command_line())
        report.show(report.report_of(measures, quick=quick, command=command, keep=keep))
    except (OSError, RuntimeError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; nothing is left behind", code=128 + signal.SIGINT)


def measure_of(
    name: str,
    workloads: list[str] | None,
    contenders: list[str] | None,
    rounds: int | None,
    mapped_gib: float | None,
) -> Callable[..., Any]:
    """A section's ``measure``; that of loading with what was chosen of it."""
    module = importlib.import_module(f"scripts.benchmarks.{name}")
    measure: Callable[..., Any] = module.measure
    if name != "loading":
        return measure
    options = module.Options(
        chosen("--workload", workloads, module.WORKLOADS),
        chosen("--contender", contenders, tuple(module.CONTENDERS)),
        rounds,
        module.MAPPED_GIB if mapped_gib is None else mapped_gib,
    )
    return functools.partial(measure, options=options)


def chosen(option: str, names: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names that were asked for, in the order of all; all, if none was."""
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return tuple(name for name in known if not names or name in names)


def command_line() -> list[str]:
    """The command that this is, as one types it in the root of the project."""
    return ["scripts/benchmark.py", *sys.argv[1:]]


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the program with a message on stderr."""
    print(f"benchmark.py: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    app()
