"""Kills a training script at random instants, resumes it, and compares it with a run never killed.

    python scripts/resume_drill.py --kills 6                                # scripts/train.py
    python scripts/resume_drill.py --config configs/text.toml               # a language model
    python scripts/resume_drill.py --format parquet --format npy            # the data in other formats
    python scripts/resume_drill.py --processes 2,4,1,3                      # on several processes
    python scripts/resume_drill.py --kills 20 -- python mine.py {run_dir}   # your own script

The script must train from the batches of `Checkpoints.resume` and keep its checkpoints in {run_dir};
it needs no change. The folder of --out gets report.json, drill.png, and each run's output; with
several formats, a folder for each.

With --processes the first attempt of a run has that many processes, and each kill, of one of them or
of all, is followed by the next number, over and over again. The run without a kill has one. A script
of your own gives {coordinator}, {process_count} and {process_index} to jax.distributed.initialize, in
this order.
"""

import pathlib
import sys
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

import checkpointing
import loader
from checkpointing import DrillReport
from regrain.cli.console import console, print_json
from regrain.cli.drill import (
    ABOUT,
    Settings,
    counts_of,
    drilled,
    exit_code,
    fail,
    without_result,
)
from regrain.cli.drill_report import check
from regrain.cli.options import DrillOut, Json, Kills, Patience, Processes, Seed, Within
from scripts.training.formats import FORMATS

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent
CONFIG: Final = ROOT / "configs" / "digits.toml"
ELASTIC_CONFIG: Final = ROOT / "configs" / "elastic.toml"

#: In which scripts/train.py tells the processes of a run about each other. The last two are in seconds.
JOINING: Final = (
    *("--coordinator", "{coordinator}"),
    *("--process-index", "{process_index}"),
    *("--process-count", "{process_count}"),
    *("--heartbeat-seconds", "10"),
    *("--patience-seconds", "60"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(epilog=ABOUT.epilog())
def main(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="The training script to drill, with {run_dir} where it takes the directory of its "
            "checkpoints. By default scripts/train.py.",
            show_default=False,
        ),
    ] = None,
    kills: Kills = 6,
    seed: Seed = 0,
    out: DrillOut = pathlib.Path("runs/drill"),
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings for scripts/train.py.",
            show_default="configs/digits.toml, or with --processes configs/elastic.toml",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Of the data of scripts/train.py, in place of that in its settings. Several, or all, "
            "are drilled one after another, and must give the same batches and the same end.",
            show_default=False,
        ),
    ] = None,
    processes: Processes = None,
    patience: Patience = 120,
    within: Within = 0,
    as_json: Json = False,
) -> None:
    """Kills a training script at random instants, resumes it, and compares it with a run never killed."""
    if command and (config or formats):
        option = "--config" if config else "--format"
        fail(f"{option} is for scripts/train.py. Give another command its settings in its own way.")
    reports = {}
    with without_result():
        settings = Settings(kills, seed, counts_of(processes), patience, within)
        elastic = bool(settings.processes)
        if elastic and not command:
            check_shares(config or ELASTIC_CONFIG, settings.processes)
        for name, arguments in commands(command, config, formats, elastic=elastic).items():
            reports[name] = drilled(arguments, out / name, settings, name, quiet=as_json)
    alike = len(reports) < 2 or show_formats(reports, out, quiet=as_json)
    if as_json:
        told = {name: report.to_dict() for name, report in reports.items()}
        print_json(told if len(told) > 1 else told[next(iter(told))])
    raise typer.Exit(exit_code(list(reports.values()), alike=alike))


def check_shares(config: pathlib.Path, counts: tuple[int, ...]) -> None:
    """Checks that so many processes can share what scripts/train.py is to train.

    Raises:
      ValueError: some of them cannot; says which and why.
    """
    pipeline = loader.PipelineConfig.from_toml(config)
    train = tomllib.loads(config.read_text("utf-8")).get("train", {})
    problems = []
    shared = {"batch_size": pipeline.batch_size, "micro_batches": train.get("micro_batches", 1)}
    for name, number in shared.items():
        wrong = [count for count in dict.fromkeys(counts) if count > 0 and number % count]
        if wrong and number != 1:
            those = " or ".join(map(str, wrong))
            problems.append(
                f"{name} = {number} cannot be shared out equally among {those} processes"
            )
    if pipeline.final_batch == "partial" and max(counts) > 1:
        problems.append('final_batch = "partial" gives unequal batches, which cannot be shared out')
    if problems:
        raise ValueError(
            f"{config}: {'; '.join(problems)}. Use numbers that divide, or settings such as those of "
            "configs/elastic.toml"
        )


def commands(
    command: list[str] | None,
    config: pathlib.Path | None,
    formats: list[str] | None,
    *,
    elastic: bool = False,
) -> dict[str, list[str]]:
    """What is to be drilled, by the name of its folder in that of --out; one alone has no name."""
    train = [sys.executable, str(ROOT / "scripts" / "train.py"), "{run_dir}", "--config"]
    train.append(str(config or (ELASTIC_CONFIG if elastic else CONFIG)))
    train += JOINING if elastic else ()
    if not formats:
        return {"": command or train}
    every = list(dict.fromkeys(FORMATS if "all" in formats else formats))
    named = {one: [*train, "--format", one] for one in every}
    return named if len(named) > 1 else {"": named[every[0]]}


def show_formats(
    reports: Mapping[str, DrillReport], out: pathlib.Path, *, quiet: bool = False
) -> bool:
    """Whether the runs that were never killed are the same in each format; prints it, unless ``quiet``."""
    streams = {name: stream_of(report, out / name) for name, report in reports.items()}
    states = {name: report.final_states["reference"] for name, report in reports.items()}
    first, *others = reports
    if not quiet:
        console.rule("all formats")
    alike = True
    for what, found in (("IDs and masks of all steps", streams), ("final train state", states)):
        different = [name for name in others if found[name] != found[first]]
        alike = alike and not different
        if quiet:
            continue
        check(not different, f"{what} in {', '.join(reports)}", "equal")
        for name in different:
            console.print(f"  not the same in {first} and {name}")
    return alike


def stream_of(report: DrillReport, out: pathlib.Path) -> list[Any]:
    """The batches of the run that was never killed: where each begins, its IDs and its mask."""
    (log,) = {attempt.log for attempt in report.attempts if attempt.run == "reference"}
    return [(one.position, one.ids, one.mask) for one in checkpointing.read_step_log(out / log)]


if __name__ == "__main__":
    app()
