"""The figure of an order: what is drawn, byte for byte the same each time, and every refusal."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import loader
from regrain.__main__ import main
from regrain.cli import order_plot

ROOT: Final = Path(__file__).resolve().parents[2]
LESSON: Final = ROOT / "configs" / "lesson.toml"
SVG: Final = "{http://www.w3.org/2000/svg}"
BLUE, GREY, SAND = "#0072b2", "#555555", "#f3e6c4"
PIPELINE: Final = '[pipeline]\nbatch_size = 64\nseed = 3\nfinal_batch = "pad"\n'


def plot(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "regrain", "plot-order", *map(str, arguments)]
    # A terminal's width and colours are no part of what is tested.
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def plot_here(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command in this process, which saves the time to import its libraries."""
    monkeypatch.setattr(sys, "argv", ["regrain", "plot-order", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def parsed(out: Path) -> ET.Element:
    assert [path.name for path in out.parent.glob("*order*")] == [out.name]
    return ET.parse(out).getroot()


def panel(figure: ET.Element, epoch: int) -> ET.Element:
    (found,) = figure.iterfind(f".//{SVG}g[@id='epoch-{epoch}']")
    return found


def markers(of: ET.Element) -> list[tuple[float, float]]:
    """Places of the points, in the figure's own units."""
    uses = [use for use in of.iter(f"{SVG}use") if BLUE in use.get("style", "")]
    return [(float(use.get("x", "")), float(use.get("y", ""))) for use in uses]


def verticals(of: ET.Element) -> list[float]:
    """Where the dotted borders stand, in the figure's own units."""
    paths = [path for path in of.iter(f"{SVG}path") if f"stroke: {GREY}" in path.get("style", "")]
    assert all("stroke-dasharray" in path.get("style", "") for path in paths)
    return [float(re.split(r"\s+", path.get("d", ""))[1]) for path in paths]


def strips(of: ET.Element) -> int:
    return sum(f"fill: {SAND}" in path.get("style", "") for path in of.iter(f"{SVG}path"))


def lines(of: ET.Element) -> int:
    return sum(f"stroke: {BLUE}" in path.get("style", "") for path in of.iter(f"{SVG}path"))


@pytest.mark.processes
def test_the_figure_of_the_lesson(tmp_path: Path) -> None:
    out = tmp_path / "order.svg"
    done = plot("--config", LESSON, "--epoch", "0", "--epoch", "1", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    figure = parsed(out)
    for epoch in (0, 1):
        order = loader.epoch_order(11, 17, epoch, "permutation")
        x, y = np.array(markers(panel(figure, epoch))).T
        # Heights fall as IDs rise: downwards is the positive direction of an SVG.
        height = (y.max() - y) / (y.max() - y.min()) * 10
        np.testing.assert_allclose(height, order, atol=1e-3)
        position = (x - x[0]) / (x[-1] - x[0]) * 10
        np.testing.assert_allclose(position, range(11), atol=1e-3)
        borders = (np.array(verticals(panel(figure, epoch))) - x[0]) / (x[-1] - x[0]) * 10
        np.testing.assert_allclose(borders, [3.5, 7.5], atol=1e-3)
        assert lines(panel(figure, epoch)) == 1
        assert strips(panel(figure, epoch)) == 1


def test_records_that_fill_their_batches_have_no_strip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "order.svg"
    assert plot_here(monkeypatch, "--config", LESSON, "--num-records", "12", "--out", out) == 0
    figure = parsed(out)
    assert strips(panel(figure, 0)) == 0
    assert len(verticals(panel(figure, 0))) == 2


def test_more_records_are_points_without_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = tmp_path / "digits.toml", tmp_path / "order.svg"
    config.write_text(PIPELINE + "[dataset]\nnum_records = 1797\n")
    assert plot_here(monkeypatch, "--config", config, "--out", out) == 0
    figure = panel(parsed(out), 0)
    assert len(markers(figure)) == 1797
    assert len(verticals(figure)) == 28
    assert lines(figure) == 0
    assert strips(figure) == 1


@pytest.mark.parametrize("num_records", [10**6, 2**63])
def test_many_records_are_a_density(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_records: int
) -> None:
    config, out = tmp_path / "many.toml", tmp_path / "order.svg"
    config.write_text(PIPELINE)
    arguments = ("--config", config, "--num-records", str(num_records), "--out", out)
    assert plot_here(monkeypatch, *arguments) == 0
    figure = panel(parsed(out), 0)
    assert len(list(figure.iter(f"{SVG}image"))) == 1
    assert not markers(figure)
    assert not verticals(figure)
    assert out.stat().st_size < 1 << 20


@pytest.mark.parametrize("shuffle", loader.ORDER_VERSIONS)
def test_the_density_counts_every_record(shuffle: str) -> None:
    config = loader.PipelineConfig(64, 3, "pad", shuffle=shuffle)  # type: ignore[arg-type]
    counts = order_plot.density(order_plot.order_of(config, 20_000, 0), 20_000)
    np.testing.assert_allclose(counts.sum(axis=0), len(counts))
    np.testing.assert_allclose(counts.sum(axis=1), len(counts), rtol=0.01)
    diagonal = np.trace(counts) / counts.sum()
    assert diagonal > 0.9 if shuffle == "none" else diagonal < 0.1


@pytest.mark.processes
@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_command_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    assert plot("--config", LESSON, "--out", first).returncode == 0
    assert plot_here(monkeypatch, "--config", LESSON, "--out", second) == 0
    start = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("config", "arguments", "code", "message"),
    [
        (PIPELINE, ["--out", "a.jpg"], 2, "unknown suffix '.jpg'; use .svg, .png, .pdf"),
        (PIPELINE, ["--out", "a.svg"], 2, "give --num-records, or put num_records into a table"),
        (PIPELINE + "[dataset]\nnum_records = 0", [], 2, "must be a positive integer, not 0"),
        (PIPELINE, ["--num-records", "0"], 2, "--num-records"),
        (PIPELINE, ["--num-records", "9", "--epoch", "1"], 2, "beyond num_epochs = 1"),
        (PIPELINE + 'shuffle = "permutation"', ["--num-records", "1" + "0" * 12], 2, '"feistel"'),
        (PIPELINE + "batch = 1", ["--num-records", "9"], 2, "'batch' is not a setting"),
        (None, [], 2, "No such file or directory"),
        (PIPELINE, ["--num-records", "9", "--out", "gone/a.svg"], 1, "cannot be written"),
        (PIPELINE, ["--num-records", "9", "--out", "folder.svg"], 1, "cannot be written"),
    ],
)
def test_a_refusal_says_why_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str | None,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "folder.svg").mkdir()
    if config is not None:
        (tmp_path / "a.toml").write_text(config)
    before = sorted(tmp_path.iterdir())
    out = [] if "--out" in arguments else ["--out", "a.svg"]
    monkeypatch.chdir(tmp_path)
    assert plot_here(monkeypatch, "--config", "a.toml", *arguments, *out) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.processes
@pytest.mark.parametrize(("out", "code"), [("a.jpg", 2), ("gone/a.svg", 1)])
def test_a_refusal_is_an_exit_code_and_one_line(tmp_path: Path, out: str, code: int) -> None:
    done = plot("--config", LESSON, "--out", out, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.startswith(f"regrain plot-order: {out}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.processes
def test_help_teaches() -> None:
    done = plot("--help")
    assert done.returncode == 0
    for text in ("--num-records 1797 --out order.svg", "Exit codes", "[dataset]"):
        assert text in done.stdout
