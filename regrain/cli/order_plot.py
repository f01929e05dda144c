"""Draws the order of records in an epoch: position against ID, with the borders of the batches.

Up to 10,000 records each record is a point; beyond that, colour shows how many records lie in each cell
of position and ID. The same settings give the same bytes, and a figure is written whole or not at all.
"""

import io
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import loader
from loader.sources.new_paths import write_whole
from regrain.cli.console import console, fail, print_json, safe

Rows = npt.NDArray[np.int64]

DRAWN, NOT_WRITTEN = 0, 1
SUFFIXES: Final = (".svg", ".png", ".pdf")
LINE_UP_TO: Final = 100
POINTS_UP_TO: Final = 10_000
SEPARATORS_UP_TO: Final = 100
CELLS: Final = 128
POSITIONS_A_COLUMN: Final = 8192
WHOLE_EPOCH_UP_TO: Final = 10**8
EPOCHS_UP_TO: Final = 16
PLAIN_NUMBERS_UP_TO: Final = 10**7
BLUE, GREY, SAND = "#0072b2", "#555555", "#f3e6c4"  # told apart in every form of colour blindness


def run(
    config: Path,
    out: Path,
    num_records: int | None,
    epochs: Sequence[int],
    *,
    as_json: bool = False,
) -> int:
    """Draws some epochs' orders into a file, and prints what it did.

    Args:
      config: TOML file with a table ``[pipeline]``.
      out: what is written.
      num_records: in the data; ``None`` for those of the config's table ``[dataset]``.
      epochs: numbers of those to draw.
      as_json: whether to print JSON.

    Returns:
      The exit code.

    Raises:
      OSError, TypeError, ValueError: the config or the arguments are wrong.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{out}: unknown suffix {out.suffix!r}; use {', '.join(SUFFIXES)}")
    pipeline = loader.PipelineConfig.from_toml(config)
    total = records_of(config) if num_records is None else num_records
    drawn = checked_epochs(pipeline, epochs, total)
    image = rendered(draw(config.name, pipeline, total, drawn), out.suffix.lower())
    try:
        write_whole(out, image)
    except OSError as error:
        message = f"{out} cannot be written: {error.strerror}; nothing was changed there"
        fail("plot-order", message, NOT_WRITTEN)
    if as_json:
        print_json({"out": str(out), "epochs": drawn, "num_records": total, "bytes": len(image)})
    else:
        names = ", ".join(map(str, drawn))
        console.print(f"{safe(out)}: epoch {names} of {total:,} records", soft_wrap=True)
    return DRAWN


def records_of(config: Path) -> int:
    """``num_records`` in the config's ``[dataset]`` table."""
    dataset: Any = tomllib.loads(config.read_text("utf-8")).get("dataset")
    if not isinstance(dataset, dict) or "num_records" not in dataset:
        raise ValueError(
            f"{config} does not say how many records there are; give --num-records, or put "
            "num_records into a table [dataset] of it"
        )
    value = dataset["num_records"]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{config}: num_records must be a positive integer, not {value!r}")
    return value


def checked_epochs(config: loader.PipelineConfig, epochs: Sequence[int], total: int) -> list[int]:
    """The epochs, if they can be drawn."""
    if config.num_epochs is not None and max(epochs) >= config.num_epochs:
        raise ValueError(
            f"epoch {max(epochs)} is beyond num_epochs = {config.num_epochs} of the config; "
            f"--epoch may be 0 to {config.num_epochs - 1}"
        )
    if len(epochs) > EPOCHS_UP_TO:
        raise ValueError(f"{len(epochs)} epochs do not fit a figure; give at most {EPOCHS_UP_TO}")
    if config.shuffle == "permutation" and total > WHOLE_EPOCH_UP_TO:
        raise ValueError(
            f'shuffle = "permutation" holds a whole epoch in memory, {8 * total:,} bytes for '
            f'{total:,} records; draw at most {WHOLE_EPOCH_UP_TO:,}, or use "feistel"'
        )
    return list(dict.fromkeys(epochs))


def draw(name: str, config: loader.PipelineConfig, total: int, epochs: list[int]) -> Figure:
    """One panel for each epoch, one above the other."""
    mpl.rcdefaults()  # the user's own style would make other bytes of the same command
    figure, panels = plt.subplots(
        len(epochs),
        figsize=(8, 1.2 + 3.6 * len(epochs)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(f"Order of {total:,} records in {name}\n{describe(config, total)}", fontsize=11)
    panel: Axes
    for panel, epoch in zip(panels[:, 0], epochs, strict=True):
        draw_epoch(panel, config, total, epoch)
        panel.set(title=f"epoch {epoch}", ylabel="example ID (row number)")
        if total <= PLAIN_NUMBERS_UP_TO:
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.yaxis.set_major_formatter("{x:,.0f}")
    panels[-1, 0].set_xlabel("position in epoch")
    return figure


def describe(config: loader.PipelineConfig, total: int) -> str:
    """The settings behind the figure, in a line."""
    full = total // config.batch_size
    sampled = "; positions sampled" if total > CELLS * POSITIONS_A_COLUMN else ""
    return (
        f"shuffle {config.shuffle}, seed {config.seed}; {full:,} full batches of "
        f"{config.batch_size:,}, final_batch {config.final_batch}{sampled}"
    )


def draw_epoch(panel: Axes, config: loader.PipelineConfig, total: int, epoch: int) -> list[str]:
    """Draw one epoch's order and batch borders, and return what was drawn, for a caption."""
    panel.set_gid(f"epoch-{epoch}")
    order = order_of(config, total, epoch)
    if total <= POINTS_UP_TO:
        draw_points(panel, order(0, total))
        drawn = "each record is a point"
    else:
        draw_density(panel, order, total)
        drawn = "colour is the density of records"
    return [drawn, *draw_borders(panel, config, total)]


def order_of(config: loader.PipelineConfig, total: int, epoch: int) -> Callable[[int, int], Rows]:
    """The rows from one position to another. A permutation is made once: each call makes all of it."""
    if config.shuffle == "permutation":
        whole = loader.epoch_order(total, config.seed, epoch, config.shuffle)
        return lambda start, stop: whole[start:stop]
    return lambda start, stop: loader.epoch_order(
        total, config.seed, epoch, config.shuffle, start, stop
    )


def draw_points(panel: Axes, rows: Rows) -> None:
    """A point for each record; a line through few of them, to follow the sequence."""
    few = len(rows) <= LINE_UP_TO
    panel.plot(
        rows,
        color=BLUE,
        marker="o",
        linestyle="-" if few else "none",
        linewidth=1,
        markersize=6 if few else max(1.2, 120 / math.sqrt(len(rows))),
        markeredgewidth=0,
    )
    if len(rows) <= 20:
        panel.set(xticks=range(len(rows)), yticks=range(len(rows)))
    panel.grid(color="0.92")


def show_density(panel: Axes, counts: Any, total: int) -> Any:
    """The picture of a density, float[cells, cells], over positions and IDs from 0 to ``total``."""
    return panel.imshow(
        counts,
        cmap="cividis",
        vmin=0,
        vmax=max(2, counts.max()),
        extent=(-0.5, total - 0.5, -0.5, total - 0.5),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )


def draw_density(panel: Axes, order: Callable[[int, int], Rows], total: int) -> None:
    """Records in each cell of position and ID, relative to an even spread."""
    counts = density(order, total)
    image = show_density(panel, counts, total)
    panel.figure.colorbar(image, ax=panel, label="records in a cell\n(1 = evenly spread)")


def density(order: Callable[[int, int], Rows], total: int) -> npt.NDArray[np.float64]:
    """Share of records in each cell, as a multiple of an even spread: float64[ID cell, position cell].

    A column holds the first positions of its stretch of the epoch, so memory and time are bounded.
    Cells are as many as leave each some 64 records, but for columns that are sampled.
    """
    cells = min(CELLS, math.isqrt(total // 64))
    counts = np.empty((cells, cells))
    for column in range(cells):
        start, stop = column * total // cells, (column + 1) * total // cells
        rows = order(start, min(stop, start + POSITIONS_A_COLUMN))
        at = np.minimum(rows / total * cells, cells - 1).astype(np.int64)
        counts[:, column] = np.bincount(at, minlength=cells) * (cells / len(rows))
    return counts


def draw_borders(panel: Axes, config: loader.PipelineConfig, total: int) -> list[str]:
    """Draw dotted batch borders if there is room, and a strip for a final batch that is not full."""
    size = config.batch_size
    drawn: list[str] = []
    if size < total <= SEPARATORS_UP_TO * size:
        for border in range(size, total, size):
            panel.axvline(border - 0.5, color=GREY, linestyle=":", linewidth=1)
        drawn.append("dotted lines are batch borders")
    left = total % size
    end = total - left + size if left and config.final_batch == "pad" else total
    if left:
        panel.axvspan(total - left - 0.5, end - 0.5, color=SAND, linewidth=0, zorder=0)
        panel.set_title(final_batch_note(config, left), loc="right", fontsize=9, color=GREY)
        what = "the records that are dropped" if config.final_batch == "drop" else "the final batch"
        drawn.append(f"the shaded strip is {what}")
    panel.set_xlim(-0.5, end - 0.5)
    return drawn


def final_batch_note(config: loader.PipelineConfig, left: int) -> str:
    """What becomes of the last records of an epoch, which do not fill a batch."""
    if config.final_batch == "drop":
        return f"left out at the end: {left:,} records"
    empty = f", {config.batch_size - left:,} empty slots" if config.final_batch == "pad" else ""
    return f"final batch: {left:,} records{empty}"


def rendered(figure: Figure, suffix: str) -> bytes:
    """The figure as a file's bytes, without anything that differs from run to run."""
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "regrain"}):
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=dates.get(suffix))
    return buffer.getvalue()
