"""`regrain drill`: kill a training script at random instants, resume it, and compare."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from regrain.cli.console import WRONG_USE, console, notes, print_json, running, safe
from regrain.cli.options import (
    INTERRUPTED,
    About,
    DrillOut,
    Json,
    Kills,
    Patience,
    Processes,
    Seed,
    Within,
)

if TYPE_CHECKING:
    from checkpointing import DrillReport

SAME, DIFFERENT = 0, 1
NO_RESULT: Final = WRONG_USE

ABOUT: Final = About(
    {
        "regrain drill --kills 10 -- python train.py {run_dir}": "kill your script ten times",
        "regrain drill --processes 2,4 -- python train.py {run_dir} {coordinator} {process_count} "
        "{process_index}": "on two and four JAX processes in turn",
    },
    {
        0: "no difference",
        1: "a difference",
        2: "wrong use, the script failed by itself, one of its processes hung after another was "
        "killed, or fewer kills landed than asked for",
        **INTERRUPTED,
    },
)


def drill(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The training script to drill, with {run_dir} where it takes the directory of its "
            "checkpoints.",
            show_default=False,
        ),
    ],
    kills: Kills = 6,
    seed: Seed = 0,
    out: DrillOut = pathlib.Path("runs/drill"),
    processes: Processes = None,
    patience: Patience = 120,
    within: Within = 0,
    as_json: Json = False,
) -> None:
    """Kill a training script at random instants, resume it, and compare it with a run never killed.

    The script must train from the batches of Checkpoints.resume and keep its checkpoints in
    {run_dir}; it needs no change. With --processes it gives {coordinator}, {process_count} and
    {process_index} to jax.distributed.initialize, in this order. The folder of --out gets
    report.json, drill.png, and the output and logs of every attempt.
    """
    with running("drill", on_the_cpu=False):
        settings = Settings(kills, seed, counts_of(processes), patience, within)
        code = run(command, out, settings, as_json=as_json)
    raise typer.Exit(code)


def run(
    command: Sequence[str], out: pathlib.Path, settings: "Settings", *, as_json: bool = False
) -> int:
    """Drill one command, and print the result.

    Args:
      command: the training script, with ``{run_dir}``.
      out: folder for the results.
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
    """A context that ends the program with a message if the drill has no result."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    import jax

    # The training script gets the accelerator; the comparison runs on the CPU.
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    except KeyboardInterrupt:
        notes.print("[bold]Interrupted:[/] the runs were stopped, and there is no result.")
        raise typer.Exit(130) from None
    except (ValueError, RuntimeError, OSError) as error:
        fail(str(error))
    except Exception as error:  # noqa: BLE001 (an exit with 1 would say that it found a difference)
        notes.print(traceback.format_exc(), markup=False, soft_wrap=True)
        fail(f"a fault of the drill itself: {error!r}")


def exit_code(reports: "Sequence[DrillReport]", *, alike: bool = True) -> int:
    """The exit code of some reports; ``alike`` is whether their runs are the same as each other."""
    if not alike or any(report.differences for report in reports):
        return DIFFERENT
    done = all(report.complete and not report.hung for report in reports)
    return SAME if done else NO_RESULT


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `checkpointing.run_drill`."""

    kills: int
    seed: int
    processes: tuple[int, ...] = ()
    patience_seconds: float = 120
    within: float = 0


def counts_of(processes: str | None) -> tuple[int, ...]:
    """The numbers in a list such as ``2,4,1,3``.

    Raises:
      ValueError: the text is no such list.
    """
    if processes is None:
        return ()
    try:
        return tuple(map(int, processes.split(",")))
    except ValueError:
        raise ValueError(
            f"--processes takes numbers separated by commas, such as 2,4,1,3, not {processes!r}"
        ) from None


def drilled(
    command: Sequence[str],
    out: pathlib.Path,
    settings: Settings,
    name: str = "",
    *,
    quiet: bool = False,
) -> "DrillReport":
    """Drill one command, draw the result, and print it unless ``quiet``."""
    import checkpointing
    from regrain.cli.drill_report import draw, show

    if settings.processes:  # on the CPU, since processes cannot share an accelerator
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if name:
        console.rule(name)
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
    """End the program with the reason why there is no result."""
    lines = "\n".join(safe(line, 4000) for line in message.splitlines())
    notes.print(f"[bold red]The drill has no result:[/] {lines}", soft_wrap=True)
    raise typer.Exit(NO_RESULT)
