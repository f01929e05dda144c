r"""Trains a small model in plain JAX, and can be stopped at any time, in any way.

    python scripts/train.py runs/digits                                # a classifier of images
    python scripts/train.py runs/text --config configs/text.toml       # a language model
    python scripts/train.py runs/parquet --format parquet              # images from Parquet files

Run it again: it goes on from the newest checkpoint in the directory, and ends in the same train state,
bit for bit, as if it had not been stopped. The models and their data are in scripts/training/.

On several processes, which may be more or fewer each time; each of them is started with its number:

    for i in 0 1; do
      python scripts/train.py runs/elastic --config configs/elastic.toml \
        --coordinator 127.0.0.1:1234 --process-index $i --process-count 2 &
    done; wait
"""

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Final

import jax
import typer

import checkpointing
import loader
from scripts.training import digits as digits_task
from scripts.training import lesson as lesson_task
from scripts.training import text as text_task
from scripts.training.digits import digits, scale
from scripts.training.processes import Layout, join
from scripts.training.task import Task, settings_of

__all__ = ["digits", "scale"]  # for other scripts

CONFIG: Final = pathlib.Path(__file__).parent.parent / "configs" / "digits.toml"
TASKS: Final = {"digits": digits_task.task, "lesson": lesson_task.task, "text": text_task.task}


@dataclasses.dataclass(frozen=True)
class Saving:
    """The table ``[checkpoints]``: steps from one save to the next, and how many checkpoints stay."""

    save_every: int
    keep: int


def main(
    run_dir: Annotated[pathlib.Path, typer.Argument(help="Directory of the run's checkpoints.")],
    config: Annotated[
        pathlib.Path,
        typer.Option(help="TOML file of all settings.", show_default="configs/digits.toml"),
    ] = CONFIG,
    data_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="Of the data, in place of that in [data].", show_default=False
        ),
    ] = None,
    log: Annotated[pathlib.Path | None, typer.Option(help="Append each step's IDs here.")] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Of several processes, where the others reach the first one: any free port of it.",
            show_default=False,
        ),
    ] = None,
    process_index: Annotated[
        int | None,
        typer.Option(help="Number of this one of several, from 0.", show_default=False),
    ] = None,
    process_count: Annotated[
        int | None,
        typer.Option(
            help="How many processes there are; they divide the batch size.", show_default=False
        ),
    ] = None,
    heartbeat_seconds: Annotated[
        int,
        typer.Option(
            min=1, help="A process without a sign of life for so long is given up, and all end."
        ),
    ] = 100,
    patience_seconds: Annotated[
        int,
        typer.Option(
            min=1, help="For the other processes: to start, to write their part of a checkpoint."
        ),
    ] = 300,
) -> None:
    """Trains to the end, from the newest checkpoint in RUN_DIR or from the start."""
    try:
        join(coordinator, process_index, process_count, heartbeat_seconds, patience_seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if log:
        os.environ["REGRAIN_STEP_LOG"] = str(log)  # Checkpoints.resume looks for it
    settings = tomllib.loads(config.read_text("utf-8"))
    try:
        task = task_of(settings, data_format)
        saving = settings_of("checkpoints", settings.get("checkpoints"), Saving)
        pipeline = loader.Pipeline(
            task.source, loader.PipelineConfig.from_toml(config), task.transform
        )
    except ValueError as error:
        raise typer.BadParameter(f"{config}: {error}") from error

    layout, is_first = Layout.of_all_processes(), jax.process_index() == 0
    with checkpointing.Checkpoints(
        run_dir,
        pipeline,
        saving.save_every,
        saving.keep,
        run_config=settings["train"],
        process_timeout_s=patience_seconds,
    ) as checkpoints:
        run = checkpoints.resume(layout.init(task.init))
        state = run.train_state
        for batch in run.batches:
            del batch["id"]  # JAX takes no strings
            state, loss = task.train_step(state, layout.batch(batch))
            if checkpoints.save(run.batches, state) and is_first:
                print(f"step {run.batches.position.step:5}  loss {loss:.4f}", flush=True)
        checkpoints.save(run.batches, state, force=True)
    if is_first:
        print(task.summary(layout.here(state)))


def task_of(settings: Mapping[str, Any], data_format: str | None = None) -> Task:
    """The task that a config file's tables ``[data]`` and ``[train]`` describe.

    Args:
      settings: the file's tables. Without ``[data]`` it is about the digits.
      data_format: in place of the format in ``[data]``.

    Raises:
      ValueError: a setting is unknown, missing or wrong; names it.
    """
    data = settings.get("data", {"kind": "digits"})
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in TASKS:
        raise ValueError(
            f"[data]: 'kind' must be one of {', '.join(map(repr, TASKS))}, not {kind!r}"
        )
    if data_format is not None:
        data = {**data, "format": data_format}
    return TASKS[kind](data, settings.get("train"))


if __name__ == "__main__":
    typer.run(main)
