"""Drills a training script, shows what came of it, and draws it: steps over time, kills and replays."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import matplotlib as mpl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

import checkpointing
from checkpointing import DrillReport
from checkpointing.proof.report import Attempt, Kill
from regrain.terminal import WRONG_USE, console, notes, print_json, safe

SAME, DIFFERENT, INTERRUPTED = 0, 1, 130
NO_RESULT = WRONG_USE


def run(
    command: Sequence[str], out: pathlib.Path, settings: "Settings", *, as_json: bool = False
) -> int:
    """Drills one command, and prints what came of it.

    Args:
      command: the training script, with ``{run_dir}``.
      out: folder for what the drill leaves.
      settings: of the drill.
      as_json: whether to print the report as JSON.

    Returns:
      The exit code.
    """
    with without_result():
        report = drilled(command, out, settings, quiet=as_json)
    if as_json:
        print_json(report.to_dict())
    return exit_code([report])


@contextlib.contextmanager
def without_result() -> Iterator[None]:
    """A context in which a drill that comes to no result says why, and ends the program."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    # The training script takes the accelerator that it finds; the comparison needs none.
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    except KeyboardInterrupt:
        notes.print("[bold]Interrupted:[/] the runs were stopped, and there is no result.")
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, RuntimeError, OSError) as error:
        fail(str(error))
    except Exception as error:  # noqa: BLE001 (an exit with 1 would say that it found a difference)
        notes.print_exception()
        fail(f"a fault of the drill itself: {error!r}")


def exit_code(reports: Sequence[DrillReport], *, alike: bool = True) -> int:
    """The exit code that reports come to; ``alike`` is whether their runs are the same as each other."""
    if not alike or any(report.differences for report in reports):
        return DIFFERENT
    done = all(report.complete and not report.hung for report in reports)
    return SAME if done else NO_RESULT


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


def drilled(
    command: Sequence[str],
    out: pathlib.Path,
    settings: Settings,
    name: str = "",
    *,
    quiet: bool = False,
) -> DrillReport:
    """Drills one command, draws the result, and shows it, unless ``quiet``."""
    if settings.processes:  # on the CPU, since they cannot share anything else
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if name:
        console.rule(name, align="left", style="dim")
    report = checkpointing.run_drill(
        command,
        out,
        **dataclasses.asdict(settings),
        progress=lambda line: notes.print(f"[dim]{safe(line)}[/]"),
    )
    draw(report, out)
    if not quiet:
        show(report, out)
    return report


def fail(message: str) -> NoReturn:
    """Says why there is no result, and ends."""
    lines = "\n".join(safe(line, 4000) for line in message.splitlines())
    notes.print(f"[bold red]The drill has no result:[/] {lines}", soft_wrap=True)
    raise typer.Exit(NO_RESULT)


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
        f"{safe(out / 'report.json')}, {safe(out / 'drill.png')}",
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
        table.add_row(safe(one.path), f"{one.changed:,} of {one.size:,}", *numbers)
    if len(furthest) > 10:
        table.add_row(f"... {len(furthest) - 10} more, nearer, in report.json", "", "", "")
    return table


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
        note = f"\n({safe(one.note)})" if one.note else ""
        what, where, reference, drilled = map(
            safe, (one.what, one.where, one.reference, one.drilled)
        )
        table.add_row(what, where, reference, drilled + note)
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
