"""Shows what a run's directory holds, and in what a config, a stream or another run is something else."""

import dataclasses
import datetime as dt
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

import checkpointing
import loader
from checkpointing import RunReport
from loader import Difference
from loader.amounts import bytes_text
from regrain.jobs.sources import made_by
from regrain.terminal import MAX_TEXT, console, fail, plain, print_json, safe

INTACT, FOUND, NO_STEP = 0, 1, 3

_STYLES: Final = {"intact": "green", "damaged": "bold red", "unreadable": "bold yellow"}
_LEFT_OVERS: Final = {
    "unfinished": "of a save that is under way, or was killed; the next writer removes it",
    "deleted": "old steps on their way out; the next save removes them",
    "set aside": "a damaged step that stood in the way of a save; delete it when you are done with it",
}
_NOT_COMPARED: Final = {
    "run": [],
    "config": ["data", "transform", "train_state", "run_config"],
    "stream": ["train_state", "run_config"],
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked about a run's directory.

    Attributes:
      steps: numbers of those to look at; all if there are none.
      verify: how closely, as `checkpointing.inspect_run` has it.
      leaves: whether to list the train state's.
      config: a TOML file to compare with.
      stream: ``module:function`` that returns a stream to compare with.
      allow: names of changes that are no difference to the stream.
      diff: another run's directory to compare with.
      as_json: whether to print JSON.
    """

    steps: tuple[int, ...] = ()
    verify: Literal["full", "manifest"] = "manifest"
    leaves: bool = False
    config: pathlib.Path | None = None
    stream: str | None = None
    allow: tuple[str, ...] = ()
    diff: str | None = None
    as_json: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a run was compared with, and the outcome.

    Attributes:
      kind: ``"run"``, ``"config"`` or ``"stream"``.
      other: its name, as it was given.
      differences: all that there are.
    """

    kind: str
    other: str
    differences: tuple[Difference, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "kind": self.kind,
            "with": self.other,
            "not_compared": _NOT_COMPARED[self.kind],
            "differences": [
                {"name": one.name, "run": one.checkpoint, "other": one.now, "note": one.note}
                for one in self.differences
            ],
        }


def run(run_dir: str, asked: Asked) -> int:
    """Prints what a run's directory holds.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError: the directory cannot be read, or what is asked cannot be answered.
    """
    if sum(one is not None for one in (asked.config, asked.stream, asked.diff)) > 1:
        raise ValueError("--config, --stream and --diff each compare; give one of them")
    if asked.allow and asked.stream is None:
        raise ValueError("--allow is for --stream: it names changes that a resume on it will allow")
    report = inspected(run_dir, asked)
    if not report.steps:
        if asked.as_json:
            print_json(answer_of(report, asked, None))
        else:
            show_beside(report)
        fail(
            "inspect", f"{run_dir} holds no step: nothing was saved yet, or it is no run's", NO_STEP
        )
    comparison = compared(report, asked)
    if asked.as_json:
        print_json(answer_of(report, asked, comparison))
    else:
        show(report, asked, comparison)
    differs = comparison is not None and bool(comparison.differences)
    return INTACT if report.intact and not differs else FOUND


def inspected(run_dir: str, asked: Asked) -> RunReport:
    """The report on a directory."""
    try:
        return checkpointing.inspect_run(run_dir, steps=asked.steps or None, verify=asked.verify)
    except FileNotFoundError as error:
        if error.errno is not None:  # it is the directory that is not there
            raise
        fail("inspect", str(error), NO_STEP)


def compared(report: RunReport, asked: Asked) -> Comparison | None:
    """What the run was to be compared with, and the outcome."""
    if asked.config is not None:
        config = loader.PipelineConfig.from_toml(asked.config)
        return Comparison("config", str(asked.config), tuple(report.diff_config(config)))
    if asked.stream is not None:
        stream = made_by("--stream", asked.stream)
        found = report.diff_stream(stream, asked.allow)
        return Comparison("stream", asked.stream, tuple(found))
    if asked.diff is not None:
        other = checkpointing.inspect_run(asked.diff)
        return Comparison("run", asked.diff, tuple(report.diff(other)))
    return None


def answer_of(report: RunReport, asked: Asked, comparison: Comparison | None) -> dict[str, Any]:
    """All that is known, as plain JSON values."""
    answer = report.to_dict()
    if answer["train_state"] is not None and not asked.leaves:
        answer["train_state"] = {**answer["train_state"], "leaves": None}
    return {**answer, "compared": None if comparison is None else comparison.to_dict()}


def show(report: RunReport, asked: Asked, comparison: Comparison | None) -> None:
    """Prints a report for people."""
    show_summary(report)
    console.print(table_of_steps(report))
    for one in report.steps:
        if one.reason:
            style = _STYLES[one.health]
            console.print(
                f"[{style}]step {one.step} is {one.health}[/]: {safe(one.reason)}", soft_wrap=True
            )
    show_beside(report)
    changes = list(changes_of(report))
    if changes:
        console.print("\n[bold]changed on the way[/]")
        for place, change in changes:
            console.print(f"  {safe(place)}: {safe(change)}", soft_wrap=True)
    if report.newest is not None:
        show_identity(report)
    if asked.leaves and report.newest is not None:
        console.print()
        console.print(table_of_leaves(report.to_dict()["train_state"]["leaves"]))
    if comparison is not None:
        show_comparison(comparison)


def show_summary(report: RunReport) -> None:
    """Prints what the steps come to, in a line or two."""
    total = sum(sum(one.files.item_bytes.values()) for one in report.steps)
    counts = {
        health: sum(one.health == health for one in report.steps)
        for health in ("intact", "damaged", "unreadable")
    }
    told = ", ".join(
        f"[{_STYLES[health]}]{count} {health}[/]" for health, count in counts.items() if count
    )
    looked = (
        "all files digested"
        if report.verify == "full"
        else "by manifests, names and sizes; --verify full digests all files"
    )
    console.print(
        f"[bold]{safe(report.directory)}[/]: {told} ({looked}), {size(total)}", soft_wrap=True
    )
    if report.newest is None:
        console.print("[bold red]no step is intact: there is nothing to resume from[/]")
        return
    step, end = report.newest.step, report.total_steps
    of_all = "" if end is None else f" of {end:,}"
    state = ", the end of the run" if step == end else ""
    console.print(f"newest intact: step {step:,}{of_all}{state}", soft_wrap=True)


def table_of_steps(report: RunReport) -> Table:
    """A row for each step."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in ("step", "written", "train\nstate", "iterator", "manifest"):
        table.add_column(heading, justify="left" if heading == "written" else "right", no_wrap=True)
    for heading in ("epoch,\noffset", "health"):
        table.add_column(heading, no_wrap=True)
    for one in report.steps:
        items = one.files.item_bytes
        place = one.position
        table.add_row(
            str(one.step),
            when(one.files.committed),
            *(size(items.get(item)) for item in ("train_state", "iterator", "manifest")),
            place_of(place),
            f"[{_STYLES[one.health]}]{one.health}[/]",
        )
    return table


def place_of(position: loader.Position | None) -> str:
    """Epoch and offset; mixtures and chains of Grain's have steps alone."""
    if position is None or (position.step > 0 and (position.epoch, position.offset) == (0, 0)):
        return "-"
    return f"{position.epoch}, {position.offset}"


def when(seconds: float | None) -> str:
    """A time as the clock on the wall has it."""
    if seconds is None:
        return "-"
    try:
        moment = dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return "-"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def show_beside(report: RunReport) -> None:
    """Prints what stands beside the steps, and who is writing."""
    for one in report.left_overs:
        console.print(
            f"left over: {safe(one.name)}, {size(one.bytes)}: {_LEFT_OVERS[one.kind]}",
            soft_wrap=True,
        )
    writer = report.writer
    if writer is None:
        console.print("no process of this machine is seen to have it open for writing")
    elif writer.holds_lock:
        console.print(f"[bold]open for writing[/] in process {writer.process}")
    elif writer.host:
        console.print(
            f"process {writer.process} of {safe(writer.host)} has opened it for writing and not closed it; "
            "whether it is alive cannot be seen",
            soft_wrap=True,
        )
    else:
        console.print(
            f"process {writer.process}, the last to open it for writing, is alive; whether it still has "
            "it open cannot be seen here",
            soft_wrap=True,
        )


def changes_of(report: RunReport) -> Iterator[tuple[str, str]]:
    """What was changed at resumes: where, and what. First what was allowed, then who wrote what."""
    for change in report.newest.history if report.newest is not None else ():
        try:
            place, changed = change["position"], change["changed"]
            step, epoch, offset = (place[name] for name in ("step", "epoch", "offset"))
            for name, (before, after) in changed.items():
                what = f"{name} {_value(before)} -> {_value(after)}, as allowed"
                yield f"at step {step} (epoch {epoch}, offset {offset})", what
        except (KeyError, TypeError, ValueError, AttributeError):
            yield "somewhere", f"{_value(change)}, which this version does not understand"
    known = [one for one in report.steps if one.position is not None]
    for one, following in itertools.pairwise(known):
        found = [
            f"{name} {one.packages.get(name, 'absent')} -> {following.packages.get(name, 'absent')}"
            for name in {**one.packages, **following.packages}
            if one.packages.get(name) != following.packages.get(name)
        ]
        if one.num_processes != following.num_processes:
            found.append(f"processes {one.num_processes} -> {following.num_processes}")
        if found:
            yield f"between steps {one.step} and {following.step}", ", ".join(found)


def _value(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False), 120)


def show_identity(report: RunReport) -> None:
    """Prints what the newest intact step is of."""
    told = report.to_dict()
    stream = told["stream"]
    console.print(f"\n[bold]what step {told['newest_intact']} is of[/]")
    if stream["kind"] == "mixture":
        line("mixture", settings(stream["weights"]))
        for name, part in stream["parts"].items():
            console.print(f"  [bold]part {safe(name)}[/]")
            show_pipeline(part)
    elif stream["kind"] == "chain":
        show_data(stream["data"])
        links = " > ".join(str(link.get("class")) for link in stream["chain"]["links"])
        line("chain", links)
        line("config", settings(stream["config"]) or "none")
    elif stream["kind"] == "pipeline":
        show_pipeline(stream)
    else:
        known = {name: value for name, value in stream.items() if name != "kind"}
        line(stream["kind"], settings(known))
    line("run_config", settings(told["run_config"]) or "none")
    state = told["train_state"]
    leaves = "1 leaf" if state["num_leaves"] == 1 else f"{state['num_leaves']:,} leaves"
    line("train state", f"{leaves}, {size(state['bytes'])} in memory")
    (count,) = (one.num_processes for one in report.steps if one.step == told["newest_intact"])
    by = {None: "", 1: ", on 1 process"}.get(count, f", on {count} processes")
    packages = ", ".join(f"{name} {text}" for name, text in told["packages"].items())
    line("written by", packages + by)


def show_pipeline(told: Mapping[str, Any]) -> None:
    """Prints what a pipeline is known by."""
    show_data(told["data"])
    line("config", settings(told["config"]))
    line("order", f"{told['order']['kind']}, version {told['order']['version']}")
    transform = told["transform"]
    version = "" if transform is None else transform.get("version", "")
    line(
        "transform",
        "none"
        if transform is None
        else f"{transform.get('name')}, " + (f"version {version}" if version else "no version"),
    )
    if told["keys_version"] is not None:
        line("record keys", f"version {told['keys_version']}")


def show_data(data: Mapping[str, Any]) -> None:
    """Prints by what a data set is known."""
    files = data["files"]
    in_files = "" if files is None else f", in {files['num_files']:,} files"
    line("data", f"{data['num_records']:,} records{in_files}, {data['digest']}")
    for name, column in data["columns"].items():
        line("", f"  {name}: {column['dtype']}{column['shape']} {column['digest']}")


def size(num_bytes: int | None) -> str:
    """A number of bytes for people."""
    return "?" if num_bytes is None else bytes_text(num_bytes)


def line(name: str, text: object) -> None:
    """Prints one thing that a stream is known by."""
    console.print(f"  {name:11}  {safe(text, 1000)}", soft_wrap=True)


def settings(values: Mapping[str, Any]) -> str:
    """Settings in a line."""
    return ", ".join(f"{plain(name, 80)} {_value(value)}" for name, value in values.items())


def table_of_leaves(leaves: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each leaf of the train state."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("leaf", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("bytes", justify="right")
    for leaf in leaves:
        prng = f" ({leaf['prng']})" if "prng" in leaf else ""
        weak = ", weak" if leaf.get("weak") else ""
        num_bytes = "?" if leaf["bytes"] is None else f"{leaf['bytes']:,}"
        table.add_row(
            safe(leaf["path"]), safe(f"{leaf['dtype']}{prng}{weak}"), safe(leaf["shape"]), num_bytes
        )
    return table


def show_comparison(comparison: Comparison) -> None:
    """Prints in what the run differs from something else."""
    skipped = ", ".join(_NOT_COMPARED[comparison.kind])
    console.print(f"\n[bold]compared with {comparison.kind} {safe(comparison.other)}[/]")
    if not comparison.differences:
        console.print("[green]no difference[/]")
    else:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
        for heading in ("differs", "this run", comparison.kind, "remark"):
            table.add_column(heading, overflow="fold")
        for one in (difference.shortened(MAX_TEXT) for difference in comparison.differences):
            table.add_row(*map(safe, (one.name, one.checkpoint, one.now, one.note)))
        console.print(table)
    if skipped:
        console.print(f"not compared: {skipped}", style="dim")
