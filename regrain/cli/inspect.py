"""`regrain inspect`: show the steps in a run's directory, and compare the run with a config, a stream or a run."""

import dataclasses
import datetime as dt
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from regrain.cli.console import MAX_TEXT, console, fail, plain, print_json, running, safe, table
from regrain.cli.options import INTERRUPTED, About, Json, RunDir

if TYPE_CHECKING:
    from rich.table import Table

    from checkpointing import RunReport
    from loader import Difference, Position
INTACT, FOUND, NO_STEP = 0, 1, 3
#: Differences shown without --json.
SHOWN_DIFFERENCES: Final = 100

_STYLES: Final = {"intact": "green", "damaged": "bold red", "unreadable": "bold yellow"}
_LEFT_OVERS: Final = {
    "unfinished": "a save that is under way, or was killed; the next writer removes it",
    "deleted": "old steps being deleted; the next save removes them",
    "set aside": "a damaged step that was in the way of a save; delete it when you no longer need it",
}
_NOT_COMPARED: Final = {
    "run": [],
    "config": ["data", "transform", "train_state", "run_config"],
    "stream": ["train_state", "run_config"],
}

ABOUT: Final = About(
    {
        "regrain inspect runs/digits": "steps, their health, their identity, what changed",
        "regrain inspect runs/digits --verify full": "digest every file, as a resume does",
        "regrain inspect runs/digits --step 1200 --leaves": "one step, and each array of its train state",
        "regrain inspect runs/digits --config configs/digits.toml": "would this config resume the run?",
        "regrain inspect runs/digits --stream my_data:make_pipeline": "would this pipeline, data and all?",
        "regrain inspect runs/digits --diff runs/other": "how another run differs, leaves included",
        "regrain inspect runs/digits --json | jq .newest_intact": "for a machine",
    },
    {
        0: "every inspected step is intact, and nothing that was compared differs",
        1: "a step is damaged or cannot be read, or something that was compared differs",
        2: "wrong use, or the directory, config or stream cannot be read",
        3: "there is no step, or not the one asked for",
        **INTERRUPTED,
    },
)


def _steps(context: typer.Context) -> list[str]:
    """Complete --step with the steps in RUN_DIR."""
    # Before the option has a value, the argument is not parsed yet.
    run_dir = context.params.get("run_dir") or next(iter(context.args), None)
    if run_dir is None:
        return []
    try:
        names = [path.name for path in pathlib.Path(run_dir).iterdir()]
    except OSError:
        return []
    return sorted((name for name in names if name.isascii() and name.isdigit()), key=int)


def inspect(
    run_dir: RunDir,
    step: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=0,
            autocompletion=_steps,
            help="Inspect only this step; repeat for more.",
        ),
    ] = None,
    verify: Annotated[
        Literal["manifest", "full"],
        typer.Option(
            help="manifest: read each step's manifest, and compare names and sizes of its other "
            "files. full: digest all files."
        ),
    ] = "manifest",
    leaves: Annotated[
        bool,
        typer.Option("--leaves", help="List the train state's leaves: shape, dtype, bytes."),
    ] = False,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Would this config resume the run? Compares the [pipeline] table of a TOML file, but "
            "not data, transform, train state and run_config.",
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Would this stream resume the run? A function without arguments that returns the "
            "Pipeline, Mixture or GrainStream. Compares everything that a resume compares, but for "
            "train state and run_config.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --stream: a change that the resume will allow, such as batch_size; repeat for more.",
        ),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER_RUN",
            help="How does the newest intact step of another run differ? Compares stream, settings, place and "
            "train state, each leaf bit for bit.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the steps in a run's directory, their health, their stream and settings, and what changed.

    Nothing is written, locked or cleaned up, and a run may be writing meanwhile. A damaged step is a
    row like the others, with the reason. --config, --stream and --diff list every difference that
    would stop a resume, before it is tried.
    """
    with running("inspect"):
        asked = Asked(
            steps=tuple(step or ()),
            verify=verify,
            leaves=leaves,
            config=config,
            stream=stream,
            allow=tuple(allow or ()),
            diff=diff,
            as_json=as_json,
        )
        code = run(run_dir, asked)
    raise typer.Exit(code)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of the command.

    Attributes:
      steps: the steps to inspect; all if empty.
      verify: as for `checkpointing.inspect_run`.
      leaves: whether to list the leaves of the train state.
      config: a TOML file to compare with.
      stream: ``module:function`` that returns a stream to compare with.
      allow: differences from the stream to leave out, as for a resume.
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
    """The outcome of comparing a run with something else.

    Attributes:
      kind: ``"run"``, ``"config"`` or ``"stream"``.
      other: its name, as given.
      differences: all of them.
    """

    kind: str
    other: str
    differences: "tuple[Difference, ...]"

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
    """Inspect a run's directory and print the answer.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError: the directory cannot be read, or the options are wrong.
    """
    if sum(one is not None for one in (asked.config, asked.stream, asked.diff)) > 1:
        raise ValueError("give one of --config, --stream and --diff")
    if asked.allow and asked.stream is None:
        raise ValueError(
            "--allow needs --stream: it names differences that a resume on the stream will allow"
        )
    report = inspected(run_dir, asked)
    if not report.steps:
        if asked.as_json:
            print_json(answer_of(report, asked, None))
        else:
            show_beside(report)
        fail(
            "inspect",
            f"{run_dir} has no checkpoint: nothing was saved yet, or it is not the directory of a run",
            NO_STEP,
        )
    comparison = compared(report, asked)
    if asked.as_json:
        print_json(answer_of(report, asked, comparison))
    else:
        show(report, asked, comparison)
    differs = comparison is not None and bool(comparison.differences)
    return INTACT if report.intact and not differs else FOUND


def inspected(run_dir: str, asked: Asked) -> "RunReport":
    """The report on a directory."""
    import checkpointing

    try:
        return checkpointing.inspect_run(run_dir, steps=asked.steps or None, verify=asked.verify)
    except FileNotFoundError as error:
        if error.errno is not None:  # the directory is missing, not a step
            raise
        fail("inspect", str(error), NO_STEP)


def compared(report: "RunReport", asked: Asked) -> Comparison | None:
    """Compare the run with a config, a stream or another run, if asked to."""
    import checkpointing
    import loader
    from regrain.cli.sources import made_by

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


def answer_of(report: "RunReport", asked: Asked, comparison: Comparison | None) -> dict[str, Any]:
    """The whole answer as plain JSON values."""
    answer = report.to_dict()
    if answer["train_state"] is not None and not asked.leaves:
        answer["train_state"] = {**answer["train_state"], "leaves": None}
    return {**answer, "compared": None if comparison is None else comparison.to_dict()}


def show(report: "RunReport", asked: Asked, comparison: Comparison | None) -> None:
    """Print a report for people."""
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
        console.print("\n[bold]changes[/]")
        for place, change in changes:
            console.print(f"  {safe(place)}: {safe(change)}", soft_wrap=True)
    if report.newest is not None:
        show_identity(report)
    if asked.leaves and report.newest is not None:
        console.print()
        console.print(table_of_leaves(report.to_dict()["train_state"]["leaves"]))
    if comparison is not None:
        show_comparison(comparison)


def show_summary(report: "RunReport") -> None:
    """Print how many steps there are, and which is the newest."""
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
        console.print("[bold red]no step is intact: nothing can be resumed[/]")
        return
    step, end = report.newest.step, report.total_steps
    of_all = "" if end is None else f" of {end:,}"
    state = ", the end of the run" if step == end else ""
    console.print(f"newest intact: step {step:,}{of_all}{state}", soft_wrap=True)


def table_of_steps(report: "RunReport") -> "Table":
    """A row for each step."""
    numbers = ("step", "train\nstate", "iterator", "manifest")
    made = table(
        ("step", "written", *numbers[1:], "epoch,\noffset", "health"),
        (
            (
                str(one.step),
                when(one.files.committed),
                *(
                    size(one.files.item_bytes.get(n))
                    for n in ("train_state", "iterator", "manifest")
                ),
                place_of(one.position),
                f"[{_STYLES[one.health]}]{one.health}[/]",
            )
            for one in report.steps
        ),
        right=numbers,
    )
    for column in made.columns:
        column.no_wrap = True
    return made


def place_of(position: "Position | None") -> str:
    """Epoch and offset; mixtures and Grain chains only have steps."""
    if position is None or (position.step > 0 and (position.epoch, position.offset) == (0, 0)):
        return "-"
    return f"{position.epoch}, {position.offset}"


def when(seconds: float | None) -> str:
    """A time in the local time zone."""
    if seconds is None:
        return "-"
    try:
        moment = dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return "-"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def show_beside(report: "RunReport") -> None:
    """Print leftovers beside the steps, and the process that is writing."""
    for one in report.left_overs:
        console.print(
            f"leftover: {safe(one.name)}, {size(one.bytes)}: {_LEFT_OVERS[one.kind]}",
            soft_wrap=True,
        )
    writer = report.writer
    if writer is None:
        console.print("no process of this machine has it open for writing, as far as can be seen")
    elif writer.holds_lock:
        console.print(f"[bold]open for writing[/] in process {writer.process}")
    elif writer.host:
        console.print(
            f"process {writer.process} of {safe(writer.host)} opened it for writing and has not closed it; "
            "whether that process is alive is not known here",
            soft_wrap=True,
        )
    else:
        console.print(
            f"process {writer.process}, the last to open it for writing, is alive; whether it still has "
            "it open is not known here",
            soft_wrap=True,
        )


def changes_of(report: "RunReport") -> Iterator[tuple[str, str]]:
    """Changes at resumes: the place and the change. First allowed changes, then packages and processes."""
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


def show_identity(report: "RunReport") -> None:
    """Print the stream, settings and train state of the newest intact step."""
    told = report.to_dict()
    stream = told["stream"]
    console.print(f"\n[bold]identity of step {told['newest_intact']}[/]")
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
    """Print the identity of a pipeline."""
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
    """Print the identity of a data set."""
    files = data["files"]
    in_files = "" if files is None else f", in {files['num_files']:,} files"
    line("data", f"{data['num_records']:,} records{in_files}, {data['digest']}")
    for name, column in data["columns"].items():
        line("", f"  {name}: {column['dtype']}{column['shape']} {column['digest']}")


def size(num_bytes: int | None) -> str:
    """A number of bytes for people."""
    from loader.progress import bytes_text

    return "?" if num_bytes is None else bytes_text(num_bytes)


def line(name: str, text: object) -> None:
    """Print one line of an identity."""
    console.print(f"  {name:11}  {safe(text, 1000)}", soft_wrap=True)


def settings(values: Mapping[str, Any]) -> str:
    """Settings on a line."""
    return ", ".join(f"{plain(name, 80)} {_value(value)}" for name, value in values.items())


def table_of_leaves(leaves: Sequence[Mapping[str, Any]]) -> "Table":
    """A row for each leaf of the train state."""
    rows = []
    for leaf in leaves:
        prng = f" ({leaf['prng']})" if "prng" in leaf else ""
        weak = ", weak" if leaf.get("weak") else ""
        num_bytes = "?" if leaf["bytes"] is None else f"{leaf['bytes']:,}"
        kind = f"{leaf['dtype']}{prng}{weak}"
        rows.append((safe(leaf["path"]), safe(kind), safe(leaf["shape"]), num_bytes))
    return table(("leaf", "dtype", "shape", "bytes"), rows, right=("bytes",))


def show_comparison(comparison: Comparison) -> None:
    """Print the differences between the run and something else."""
    console.print(f"\n[bold]compared with {comparison.kind} {safe(comparison.other)}[/]")
    if not comparison.differences:
        console.print("[green]no difference[/]")
    else:
        shown = comparison.differences[:SHOWN_DIFFERENCES]
        rows = (
            tuple(map(safe, (one.name, one.checkpoint, one.now, one.note)))
            for one in (difference.shortened(MAX_TEXT) for difference in shown)
        )
        console.print(table(("differs", "this run", comparison.kind, "remark"), rows))
        if more := len(comparison.differences) - len(shown):
            console.print(f"... and {more:,} more differences: see --json")
    if skipped := _NOT_COMPARED[comparison.kind]:
        console.print(f"not compared: {', '.join(skipped)}", style="dim")
