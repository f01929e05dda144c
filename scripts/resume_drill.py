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

import dataclasses
import os
import pathlib
import signal
import sys
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Final, NoReturn

import jax
import matplotlib as mpl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import checkpointing
import loader
from checkpointing import DrillReport
from checkpointing.drill_report import Attempt, Kill
from scripts.training.formats import FORMATS

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent
CONFIG: Final = ROOT / "configs" / "digits.toml"
ELASTIC_CONFIG: Final = ROOT / "configs" / "elastic.toml"
SAME, DIFFERENT, FAILED, INTERRUPTED = 0, 1, 2, 130

EXIT_CODES: Final = (
    "Exit codes: 0, no difference. 1, a difference. 2, wrong use, the training script failed by "
    "itself, one of its processes hung when another one was killed, or fewer kills landed than were "
    "asked for."
)
#: In which scripts/train.py tells the processes of a run about each other. The last two are in seconds.
JOINING: Final = (
    *("--coordinator", "{coordinator}"),
    *("--process-index", "{process_index}"),
    *("--process-count", "{process_count}"),
    *("--heartbeat-seconds", "10"),
    *("--patience-seconds", "60"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
notes = Console(highlight=False, stderr=True)


@app.command(epilog=EXIT_CODES)
def main(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: the training script to drill, with {run_dir} where it takes the directory "
            "of its checkpoints. By default scripts/train.py.",
            show_default=False,
        ),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="SIGKILLs that must land.")] = 6,
    seed: Annotated[int, typer.Option(help="Of the instants.")] = 0,
    out: Annotated[
        pathlib.Path,
        typer.Option(help="Folder for what the drill leaves; an old drill's is replaced."),
    ] = pathlib.Path("runs/drill"),
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Settings for scripts/train.py.",
            show_default="configs/digits.toml, or with --processes configs/elastic.toml",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Of the data of scripts/train.py, in place of that in its settings. Several, or all, "
            "are drilled one after another, and must give the same batches and the same end.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="How many JAX processes each attempt has, one number after another and over again. They "
            "run on the CPU, unless JAX_PLATFORMS says something else. A command of your own takes "
            "{coordinator}, {process_count} and {process_index} for jax.distributed.initialize.",
            show_default=False,
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that the other processes have to end by themselves when one was killed. Those "
            "that hang are killed, and count as a failure.",
        ),
    ] = 120,
    within: Annotated[
        float,
        typer.Option(
            min=0,
            help="Bound for differences of the final train state's floating-point numbers, as a share "
            "of the largest one in their leaf: sums over all processes may depend on how many there "
            "are. 0 stands for no difference of a bit.",
        ),
    ] = 0,
) -> None:
    """Kills a training script at random instants, resumes it, and compares it with a run never killed."""
    if command and (config or formats):
        option = "--config" if config else "--format"
        fail(f"{option} is for scripts/train.py. Give another command its settings in its own way.")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    # The training script takes the accelerator that it finds; the comparison needs none.
    jax.config.update("jax_platforms", "cpu")
    reports = {}
    try:
        counts = counts_of(processes)
        if counts:
            os.environ.setdefault(
                "JAX_PLATFORMS", "cpu"
            )  # of the processes, which cannot share another
        if counts and not command:
            check_shares(config or ELASTIC_CONFIG, counts)
        for name, arguments in commands(command, config, formats, elastic=bool(counts)).items():
            settings = Settings(kills, seed, counts, patience, within)
            reports[name] = drilled(arguments, out / name, settings, name)
    except KeyboardInterrupt:
        notes.print("[bold]Interrupted:[/] the runs were stopped, and there is no result.")
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, RuntimeError, OSError) as error:
        fail(str(error))
    except Exception as error:  # noqa: BLE001 (an exit with 1 would say that it found a difference)
        notes.print_exception()
        fail(f"a fault of the drill itself: {error!r}")
    alike = len(reports) < 2 or show_formats(reports, out)
    if not alike or any(report.differences for report in reports.values()):
        raise typer.Exit(DIFFERENT)
    done = all(report.complete and not report.hung for report in reports.values())
    raise typer.Exit(SAME if done else FAILED)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `checkpointing.run_drill` takes: see there."""

    kills: int
    seed: int
    processes: tuple[int, ...] = ()
    patience_seconds: float = 120
    within: float = 0


def counts_of(processes: str | None) -> tuple[int, ...]:
    """The numbers in a list such as ``2,4,1,3``.

    Raises:
      ValueError: something else.
    """
    if processes is None:
        return ()
    try:
        return tuple(map(int, processes.split(",")))
    except ValueError:
        raise ValueError(
            f"--processes takes numbers with commas between them, such as 2,4,1,3, not {processes!r}"
        ) from None


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


def drilled(command: list[str], out: pathlib.Path, settings: Settings, name: str) -> DrillReport:
    """Drills one command, and shows the result."""
    if name:
        console.rule(name, align="left", style="dim")
    report = checkpointing.run_drill(
        command,
        out,
        **dataclasses.asdict(settings),
        progress=lambda line: notes.print(f"[dim]{escape(line)}[/]"),
    )
    draw(report, out)
    show(report, out)
    return report


def fail(message: str) -> NoReturn:
    """Says why there is no result, and ends."""
    notes.print(f"[bold red]The drill has no result:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(FAILED)


def show(report: DrillReport, out: pathlib.Path) -> None:
    """Prints what happened at each kill, and what the comparison found."""
    console.print(table_of_kills(report))
    failed = {difference.what for difference in report.differences}
    stream = {"ids", "mask", "place", "sequence", "missing step", "extra step", "incomplete step"}
    state = report.final_states["reference"]
    runs = len(report.final_states) - 1
    at_step = f"step {state.step}" + (
        "" if state.step == report.num_steps else f" of {report.num_steps}"
    )
    check(not failed & stream, f"IDs and masks of all {report.num_steps} steps", "equal")
    check(
        "replay" not in failed,
        f"{report.replayed} replayed steps",
        "IDs and masks as in their first try",
    )
    check(
        not failed - stream - {"replay"},
        f"final train state, {state.num_leaves} leaves at {at_step}",
        f"equal within {report.within:g} of each leaf's largest value, not bit for bit"
        if report.leaf_differences
        else f"bit for bit equal\n  sha256 {state.sha256}",
    )
    if report.process_counts:
        show_processes(report)
    if report.leaf_differences:
        console.print(table_of_leaves(report))
    if report.differences:
        console.print(table_of_differences(report))
    if not report.complete:
        console.print(
            f"[bold yellow]Only {len(report.kills)} of {report.kills_asked} kills landed, in {runs} "
            "runs: the script ended before the others.[/] Have it train for longer, or ask for fewer."
        )
    console.print(
        f"{len(report.kills)} kills, seed {report.seed}, {report.seconds:.0f} s. "
        f"{out / 'report.json'}, {out / 'drill.png'}",
        soft_wrap=True,
    )


def show_processes(report: DrillReport) -> None:
    """Prints how the processes ended that were left when another one was killed."""
    left = [
        ending
        for attempt in report.attempts
        for ending in attempt.endings
        if ending.after_kill_seconds is not None and ending.cause != "killed"
    ]
    slowest = max((ending.after_kill_seconds or 0 for ending in left), default=0)
    check(
        not report.hung,
        f"{len(left)} processes that were left by a killed one",
        f"ended by themselves in {slowest:.1f} s",
        f"{report.hung} HUNG for {report.patience_seconds:g} s and were killed: give "
        "jax.distributed.initialize a shorter heartbeat_timeout_seconds, or the drill more --patience",
    )


def table_of_leaves(report: DrillReport) -> Table:
    """A row for each of the leaves of the train state that are furthest from the reference's."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("leaf", overflow="fold")
    for heading in ("elements changed", "largest difference", "of the largest value"):
        table.add_column(heading, justify="right")
    # Where a distance says nothing, nothing is further.
    furthest = sorted(
        report.leaf_differences,
        key=lambda one: (one.max_relative is not None, -(one.max_relative or 0)),
    )
    for one in furthest[:10]:
        numbers = ("" if x is None else f"{x:.2g}" for x in (one.max_absolute, one.max_relative))
        table.add_row(escape(one.path), f"{one.changed:,} of {one.size:,}", *numbers)
    if len(furthest) > 10:
        table.add_row(f"... {len(furthest) - 10} more, nearer, in report.json", "", "", "")
    return table


def show_formats(reports: Mapping[str, DrillReport], out: pathlib.Path) -> bool:
    """Prints whether the runs that were never killed are the same in each format; returns it too."""
    streams = {name: stream_of(report, out / name) for name, report in reports.items()}
    states = {name: report.final_states["reference"] for name, report in reports.items()}
    first, *others = reports
    console.rule("all formats", align="left", style="dim")
    alike = True
    for what, found in (("IDs and masks of all steps", streams), ("final train state", states)):
        different = [name for name in others if found[name] != found[first]]
        alike = alike and not different
        check(not different, f"{what} in {', '.join(reports)}", "equal")
        for name in different:
            console.print(f"  not the same in {first} and {name}")
    return alike


def stream_of(report: DrillReport, out: pathlib.Path) -> list[Any]:
    """The batches of the run that was never killed: where each begins, its IDs and its mask."""
    (log,) = {attempt.log for attempt in report.attempts if attempt.run == "reference"}
    return [(one.position, one.ids, one.mask) for one in checkpointing.read_step_log(out / log)]


def table_of_kills(report: DrillReport) -> Table:
    """A row for each kill: what it hit, and how the run came back."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("kill", justify="right")
    table.add_column("hit")
    if report.process_counts:
        table.add_column("processes", justify="right")
        table.add_column("killed", justify="right")
    for heading in ("steps done", "resumed at", "replayed", "back after"):
        table.add_column(heading, justify="right")
    for number, kill in enumerate(report.kills, start=1):
        hit = f"save of step {kill.saving}" if kill.saving else kill.hit
        back = ["killed again", "", ""]
        if kill.resumed_at is not None and kill.resume_seconds is not None:
            seconds = f"{kill.resume_seconds:.1f} s"
            back = [f"step {kill.resumed_at}", f"{kill.replayed}", seconds]
        elif kill.checkpoint == report.num_steps:
            back = ["the end", "0", ""]
        killed = [str(kill.process_count), victims(kill)] if report.process_counts else []
        table.add_row(str(number), hit, *killed, str(kill.steps_done), *back)
    return table


def victims(kill: Kill) -> str:
    """The numbers of the processes that were killed, from 0."""
    all_of_them = 1 < kill.process_count == len(kill.processes)
    return "all" if all_of_them else ", ".join(map(str, kill.processes))


def table_of_differences(report: DrillReport) -> Table:
    """A row for each kind of difference, with both sides."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("differs", "where", "reference", "drilled"):
        table.add_column(heading, overflow="fold")
    for one in report.differences[:10]:
        note = f"\n({one.note})" if one.note else ""
        table.add_row(*map(escape, (one.what, one.where, one.reference, one.drilled + note)))
    if len(report.differences) > 10:
        table.add_row("...", f"{len(report.differences) - 10} more in report.json", "", "")
    return table


def check(same: bool, what: str, verdict: str, failure: str = "DIFFERENT") -> None:
    """Prints one line of the comparison."""
    console.print(f"[green]✓[/] {what}: {verdict}" if same else f"[bold red]✗ {what}: {failure}[/]")


def draw(report: DrillReport, out: pathlib.Path) -> None:
    """Draws steps over time: each attempt, where it was killed, and what it replayed."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        axes = figure.subplots()
        runs = list(dict.fromkeys(attempt.run for attempt in report.attempts))
        began = {attempt.run: attempt.began for attempt in reversed(report.attempts)}
        # The reference and the first drilled run begin together; further runs follow.
        begins = {run: began[run] - began[runs[min(1, i)]] for i, run in enumerate(runs)}
        draw_attempts(axes, report, out, begins)
        draw_kills(axes, report, begins)
        verdict = "no difference" if not report.differences else "DIFFERENT"
        counts = ", ".join(map(str, report.process_counts))
        on = f" on {counts} processes (×) in turn" if counts else ""
        axes.set_title(
            f"{len(report.kills)} kills{on}, {report.replayed} steps replayed: {verdict}",
            loc="left",
        )
        axes.set_xlabel("seconds since the run began")
        axes.set_ylabel("steps done")
        axes.set_ylim(-0.03 * report.num_steps, 1.12 * report.num_steps)
        axes.set_xlim(left=0)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        figure.legend(
            legend.values(), legend.keys(), loc="outside lower left", ncols=6, frameon=False
        )
        figure.savefig(out / "drill.png", dpi=130)


def deliveries_of(attempt: Attempt, out: pathlib.Path) -> list[checkpointing.Delivery]:
    """The batches that all processes of an attempt have delivered."""
    try:
        return checkpointing.read_step_log(out / attempt.log, attempt.process_count)
    except FileNotFoundError:
        return []


def draw_attempts(
    axes: Axes, report: DrillReport, out: pathlib.Path, begins: dict[str, float]
) -> None:
    """A line for each attempt, from its start over its first batch to its last one."""
    done = dict.fromkeys(begins, 0)
    for attempt in report.attempts:
        first = next(one for one in report.attempts if one.run == attempt.run)
        start = begins[attempt.run] + attempt.began - first.began
        deliveries = deliveries_of(attempt, out)
        reference = attempt.run == "reference"
        colour, label = ("0.65", "never killed") if reference else ("C0", "killed and resumed")
        ready = start + (
            attempt.seconds if attempt.first_batch_seconds is None else attempt.first_batch_seconds
        )
        waiting: dict[str, Any] = {"color": colour, "linewidth": 1.2, "linestyle": (0, (1, 2))}
        axes.plot(
            [start, ready],
            [attempt.checkpoint] * 2,
            **waiting,
            label="" if reference else "starting up",
        )
        if report.process_counts:
            axes.annotate(
                f"×{attempt.process_count}",
                (start, attempt.checkpoint),
                (1, -10),
                textcoords="offset points",
                color=colour,
                fontsize=8,
            )
        if deliveries:
            origin = deliveries[0].seconds - ready
            times = [one.seconds - origin for one in deliveries]
            steps = [one.position.step + 1 for one in deliveries]
            axes.plot(times, steps, color=colour, linewidth=1.8, label=label, solid_capstyle="butt")
            again = sum(step <= done[attempt.run] for step in steps)
            axes.plot(
                times[:again],
                steps[:again],
                color="C1",
                linewidth=5,
                label="replayed",
                alpha=0.9,
                zorder=3,
            )
            done[attempt.run] = max(done[attempt.run], steps[-1])


def draw_kills(axes: Axes, report: DrillReport, begins: dict[str, float]) -> None:
    """A cross at each kill, and the fall from there to the checkpoint."""
    for number, kill in enumerate(report.kills, start=1):
        first = next(one for one in report.attempts if one.run == kill.run)
        attempt = next(
            one for one in report.attempts if (one.run, one.number) == (kill.run, kill.attempt)
        )
        time = begins[kill.run] + attempt.began - first.began + kill.seconds
        level = attempt.checkpoint if attempt.steps_done is None else attempt.steps_done
        axes.plot([time, time], [level, kill.checkpoint], color="C3", linewidth=0.8)
        axes.plot(
            time, level, "X", color="C3", markersize=9, zorder=4, label="SIGKILL", linestyle=""
        )
        if len(kill.processes) < kill.process_count:
            ended = time + attempt.seconds - kill.seconds
            axes.plot(
                [time, ended],
                [kill.checkpoint] * 2,
                color="C3",
                linewidth=1.2,
                linestyle=(0, (1, 2)),
                label="the other processes end",
            )
        hit = f"save of {kill.saving}" if kill.saving else kill.hit
        axes.annotate(
            f"{number}: {hit}" if len(report.kills) <= 12 else str(number),
            (time, level),
            (-4, 8),
            textcoords="offset points",
            ha="left" if kill.hit == "start-up" else "right",
            fontsize=9,
        )


if __name__ == "__main__":
    app()
