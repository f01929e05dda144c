"""The drill's report: tables for the terminal, and a figure of steps over time, kills and replays."""

import pathlib
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

import checkpointing
from checkpointing import DrillReport
from checkpointing.proof.report import Attempt, Kill
from regrain.cli.console import console, safe, table


def show(report: DrillReport, out: pathlib.Path) -> None:
    """Print what happened at each kill, and the result of the comparison."""
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
    """Print how the other processes ended after one was killed."""
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
    """The ten leaves of the train state that are furthest from the reference's."""
    # A leaf without a distance comes first.
    furthest = sorted(
        report.leaf_differences,
        key=lambda one: (one.max_relative is not None, -(one.max_relative or 0)),
    )
    numbers = ("elements changed", "largest difference", "of the largest value")
    made = table(("leaf", *numbers), right=numbers)
    for one in furthest[:10]:
        distances = ("" if x is None else f"{x:.2g}" for x in (one.max_absolute, one.max_relative))
        made.add_row(safe(one.path), f"{one.changed:,} of {one.size:,}", *distances)
    if len(furthest) > 10:
        made.add_row(f"... {len(furthest) - 10} more, nearer, in report.json", "", "", "")
    return made


def table_of_kills(report: DrillReport) -> Table:
    """A row for each kill: what it hit, and how the run came back."""
    on = ("processes", "killed") if report.process_counts else ()
    headings = ("kill", "hit", *on, "steps done", "resumed at", "replayed", "back after")
    made = table(headings, right={*headings} - {"hit"})
    for number, kill in enumerate(report.kills, start=1):
        hit = f"save of step {kill.saving}" if kill.saving else kill.hit
        back = ["killed again", "", ""]
        if kill.resumed_at is not None and kill.resume_seconds is not None:
            seconds = f"{kill.resume_seconds:.1f} s"
            back = [f"step {kill.resumed_at}", f"{kill.replayed}", seconds]
        elif kill.checkpoint == report.num_steps:
            back = ["the end", "0", ""]
        killed = [str(kill.process_count), victims(kill)] if report.process_counts else []
        made.add_row(str(number), hit, *killed, str(kill.steps_done), *back)
    return made


def victims(kill: Kill) -> str:
    """The numbers of the processes that were killed, from 0."""
    all_of_them = 1 < kill.process_count == len(kill.processes)
    return "all" if all_of_them else ", ".join(map(str, kill.processes))


def table_of_differences(report: DrillReport) -> Table:
    """A row for each kind of difference, with both sides."""
    made = table(("differs", "where", "reference", "drilled"))
    for one in report.differences[:10]:
        note = f"\n({safe(one.note)})" if one.note else ""
        what, where, reference, drilled = map(
            safe, (one.what, one.where, one.reference, one.drilled)
        )
        made.add_row(what, where, reference, drilled + note)
    if len(report.differences) > 10:
        made.add_row("...", f"{len(report.differences) - 10} more in report.json", "", "")
    return made


def check(same: bool, what: str, verdict: str, failure: str = "DIFFERENT") -> None:
    """Print one line of the comparison."""
    console.print(f"[green]✓[/] {what}: {verdict}" if same else f"[bold red]✗ {what}: {failure}[/]")


def draw(report: DrillReport, out: pathlib.Path) -> None:
    """Draw steps over time: each attempt, its kill, and the steps it replayed."""
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
    """The batches that all processes of an attempt delivered."""
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
