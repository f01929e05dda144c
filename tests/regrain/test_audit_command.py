"""The audit's command line: what it writes and prints, its exit codes, and its page in a real browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pytest
import typer

import checkpointing
import loader
from regrain.cli import audit_page, console, order_plot
from regrain.cli import audit_report as job

pytestmark = pytest.mark.processes

ROOT: Final = Path(__file__).resolve().parents[2]
LESSON: Final = ROOT / "configs" / "lesson.toml"
DIGITS: Final = ROOT / "configs" / "digits.toml"
PIPELINE: Final = '[pipeline]\nbatch_size = 64\nseed = 3\nfinal_batch = "drop"\nnum_epochs = 5\n'


def run(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "regrain", "audit", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def run_here(capsys: pytest.CaptureFixture[str], **arguments: Any) -> tuple[int, str, str]:
    """Runs the script in this process, which saves the time to import its libraries."""
    with pytest.raises(typer.Exit) as ended, console.running("audit"):
        raise typer.Exit(job.run(**arguments))
    printed = capsys.readouterr()
    return ended.value.exit_code, printed.out, printed.err


def a_log(path: Path, pipeline: loader.Pipeline, steps: int) -> Path:
    log = checkpointing.step_log(path)
    for _, _batch in zip(range(steps), pipeline.iterate(on_batch=log), strict=False):
        pass
    return path


def digits() -> loader.Pipeline:
    records = job.records_of(DIGITS, None, None)
    return loader.Pipeline(records.source, loader.PipelineConfig.from_toml(DIGITS))


def test_the_lesson_is_clean_and_all_of_it_is_covered(tmp_path: Path) -> None:
    done = run("--config", LESSON, "--out", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for text in ("clean", "membership", "alignment", "epochs 0 to 1", "22 deliveries", "x, y"):
        assert text in done.stdout
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["clean"]
    assert found["config"]["seed"] == 17
    assert [epoch["distinct"] for epoch in found["epochs"]] == [11, 11]
    assert found["coverage"]["judged"] == 22
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.html", "audit.json"]


def test_the_same_audit_writes_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        assert run_here(capsys, config=LESSON, out=tmp_path / name)[0] == 0
    for name in ("audit.html", "audit.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_the_digits_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run_here(capsys, config=DIGITS, out=tmp_path, epochs=3)
    assert code == 0
    assert "epochs 0 to 2: 5,391 deliveries of 1,797 records" in printed
    assert "image, label" in printed


def test_row_numbers_are_audited_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "many.toml"
    config.write_text(PIPELINE)
    code, printed, _ = run_here(
        capsys, config=config, out=tmp_path / "out", num_records=10**6, epochs=2
    )
    assert code == 0
    assert "1,000,000 records of row numbers" in printed
    assert "IDs alone" in printed
    page = (tmp_path / "out" / "audit.html").read_text()
    assert page.count("<image") == 2  # the density and its scale
    assert len(page) < 1 << 20


def test_records_that_are_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lesson.toml"
    config.write_text(PIPELINE.replace("64", "4") + "exclude = [3]\nskip = [[1, 2]]\n")
    code, printed, _ = run_here(capsys, config=config, out=tmp_path / "out")
    assert code == 0
    for cause in ("dropped, 15", "skipped, 4", "excluded, "):
        assert f"left out as configured: {cause}" in printed


def test_a_faulty_log_is_found_and_its_page_names_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = a_log(tmp_path / "steps.jsonl", digits(), 40)
    arguments: dict[str, Any] = {"config": DIGITS, "out": tmp_path / "out", "step_log": log}
    assert run_here(capsys, **arguments)[0] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    twice, never = lines[20]["ids"][4], lines[20]["ids"][5]
    lines[20]["ids"][5] = twice
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, printed, _ = run_here(capsys, **arguments)
    assert code == 1
    assert "found: multiplicity, omissions" in printed
    found = json.loads((tmp_path / "out" / "audit.json").read_text())["findings"]
    assert found["multiplicity"]["first"]["id"] == twice
    assert found["omissions"]["first"]["id"] == never
    assert found["omissions"]["first"]["step"] == 20
    page = (tmp_path / "out" / "audit.html").read_text()
    assert f"<td>{never}</td>" in page


def test_a_replayed_step_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a kill, a run delivers the steps since its checkpoint again."""
    log = a_log(tmp_path / "steps.jsonl", digits(), 20)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:15] + lines[10:]))
    code, printed, _ = run_here(capsys, config=DIGITS, out=tmp_path / "out", step_log=log)
    assert code == 0, printed


def test_lines_that_a_run_cannot_have_written_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = a_log(tmp_path / "steps.jsonl", digits(), 20)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    wrong = {**lines[10], "ids": lines[10]["ids"][::-1]}
    log.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines[:10], wrong, *lines[10:]]))
    arguments: dict[str, Any] = {"config": DIGITS, "out": tmp_path / "out", "step_log": log}
    code, printed, _ = run_here(capsys, **arguments)
    assert code == 1
    assert "found: order" in printed
    found = json.loads((tmp_path / "out" / "audit.json").read_text())["findings"]["order"]
    assert found["causes"] == {"logged again with another batch": 1}
    assert "logged again with another batch" in (tmp_path / "out" / "audit.html").read_text()


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (PIPELINE, [], "give --num-records"),
        (PIPELINE + "batch = 1\n", ["--num-records", "9"], "'batch' is not a setting"),
        (PIPELINE, ["--num-records", "9", "--source", "a:b"], "give one of them"),
        (PIPELINE, ["--source", "nobody:here"], "ModuleNotFoundError"),
        (PIPELINE, ["--num-records", "9"], "batch_size 64 is larger than the 9 records"),
        (PIPELINE, ["--num-records", "99", "--epochs", "6"], "go beyond the 5"),
        (PIPELINE, ["--num-records", "99", "--step-log", "gone"], "No such file"),
        (PIPELINE, ["--num-records", "99", "--step-log", "/dev/null"], "holds no whole line"),
        (None, [], "No such file"),
    ],
)
def test_wrong_use_says_why_and_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: str | None,
    arguments: list[str],
    message: str,
) -> None:
    path = tmp_path / "a.toml"
    if config is not None:
        path.write_text(config)
    options: dict[str, Any] = {
        name.lstrip("-").replace("-", "_"): value
        for name, value in zip(arguments[::2], arguments[1::2], strict=True)
    }
    for name, kind in (("num_records", int), ("epochs", int), ("step_log", Path)):
        if name in options:
            options[name] = kind(options[name])
    code, _, said = run_here(capsys, config=path, out=tmp_path / "out", **options)
    assert code == 2
    assert message in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_wrong_use(tmp_path: Path) -> None:
    assert run("--config", LESSON, "--out", tmp_path, "--fast").returncode == 2


# --- the page -----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Everything of a page that a browser could follow, and the IDs that it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.outside.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                if (value or "").startswith("#"):
                    self.references.append((value or "")[1:])
                elif not (value or "").startswith("data:"):
                    self.outside.append(f"{tag} {name}={value}")
            self.references += re.findall(r"url\(#(.*?)\)", value or "")


def a_report(**settings: Any) -> tuple[loader.Pipeline, loader.AuditReport]:
    source = loader.ArraySource({"x": np.arange(11.0)}, [f"<b>&{i}</b>" for i in range(11)])
    config = loader.PipelineConfig(**{"batch_size": 4, "seed": 1, "final_batch": "pad", **settings})
    pipeline = loader.Pipeline(source, config)
    return pipeline, loader.audit(pipeline)


def test_the_page_asks_for_nothing_and_its_references_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "many.toml"
    config.write_text(PIPELINE)
    for settings in ({"config": LESSON}, {"config": config, "num_records": 10**5}):
        assert run_here(capsys, out=tmp_path / "out", **settings)[0] == 0
        page = Page((tmp_path / "out" / "audit.html").read_text())
        assert page.outside == []
        assert len(set(page.ids)) == len(page.ids)
        assert set(page.references) <= set(page.ids)


def test_ids_are_text_on_the_page_and_nothing_else() -> None:
    pipeline, _ = a_report()
    batches = [dict(batch) for batch in pipeline]
    batches[0]["id"] = batches[0]["id"].copy()
    batches[0]["id"][0] = "<script>"
    report = loader.audit_batches(batches, pipeline.source, pipeline.config)
    assert report.found == ("membership", "omissions")
    page = audit_page.page("<i>", pipeline, report)
    assert "<script>" not in page
    assert "<b>&" not in page
    assert "&lt;script&gt;" in page
    assert "Audit of &lt;i&gt;" in page


def test_a_page_of_many_epochs_stays_small() -> None:
    before = plt.get_fignums()
    pipeline, report = a_report(num_epochs=300)
    page = audit_page.page("many", pipeline, report)
    assert page.count("<svg") == 1
    assert page.count("<tr") == 6  # a heading and five findings
    assert len(page) < 1 << 20
    assert plt.get_fignums() == before


CAPTIONED: Final = {
    "dotted lines": "dotted lines are batch borders",
    "strip": "the shaded strip is",
    "marks": "marks at the upper edge",
    "points": "each record is a point",
    "density": "colour is the density",
}


@pytest.mark.parametrize(
    ("n", "size", "final_batch", "fault", "drawn"),
    [
        (12, 4, "pad", False, {"points", "dotted lines"}),
        (11, 4, "pad", True, {"points", "dotted lines", "strip", "marks"}),
        (11, 4, "drop", False, {"points", "dotted lines", "strip"}),
        (11, 11, "pad", False, {"points"}),
        (404, 4, "pad", False, {"points"}),
        (10_001, 10_001, "pad", False, {"density"}),
    ],
)
def test_the_caption_names_only_what_is_drawn(
    n: int, size: int, final_batch: Any, fault: bool, drawn: set[str]
) -> None:
    pipeline = loader.Pipeline(
        loader.ArraySource({"x": np.arange(n)}), loader.PipelineConfig(size, 1, final_batch, 1)
    )
    batches = [dict(batch) for batch in pipeline]
    if fault:
        batches[0]["id"] = batches[0]["id"][::-1]
    report = loader.audit_batches(batches, pipeline.source, pipeline.config)
    page = audit_page.page("a page", pipeline, report)
    caption = page[page.index("<figcaption>") :]
    assert {what for what, words in CAPTIONED.items() if words in caption} == drawn
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert ("stroke-dasharray: 1," in svg) == ("dotted lines" in drawn)
    assert (order_plot.SAND in svg) == ("strip" in drawn)
    assert (audit_page.RED in svg) == ("marks" in drawn)
    assert ("<image" in svg) == ("density" in drawn)


def test_records_are_shown_with_the_names_that_their_source_has_for_them() -> None:
    class Named(loader.ArraySource):
        def name(self, record_id: int) -> str:
            if not 0 <= record_id < len(self):
                raise KeyError(record_id)
            return f"part-{record_id // 4}.parquet:{record_id % 4}"

    source = Named({"x": np.arange(11)})
    pipeline = loader.Pipeline(source, loader.PipelineConfig(4, 1, "pad", 1, exclude=(9,)))
    batches = [{name: field.copy() for name, field in batch.items()} for batch in pipeline]
    slot = 0 if batches[0]["id"][0] != 9 else 1
    gone = batches[0]["id"][slot].item()
    batches[0]["id"][slot] = 99
    page = audit_page.page(
        "a page", pipeline, loader.audit_batches(batches, source, pipeline.config)
    )
    assert f"ID {gone} (part-{gone // 4}.parquet:{gone % 4})" in page
    assert "<td>99</td>" in page
    assert "excluded, 1 (ID 9 (part-2.parquet:1))" in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a chromium on the PATH")
def test_a_browser_shows_the_page_without_an_error_or_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(capsys, config=LESSON, out=tmp_path)[0] == 0
    page = tmp_path / "audit.html"
    broken = tmp_path / "broken.html"
    text = page.read_text()
    broken.write_text(text.replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    shot = tmp_path / "shot.png"
    log = browse(page, tmp_path, shot)
    assert "CONSOLE" not in log
    assert shot.stat().st_size > 10_000
    log = browse(broken, tmp_path, shot)
    assert "CONSOLE" in log  # what is asked for is refused, and seen


def browse(page: Path, folder: Path, shot: Path) -> str:
    """Opens a page in a headless browser and draws it; returns the browser's log."""
    quiet = "disable-gpu disable-quic no-first-run disable-background-networking"
    quiet += " disable-component-update disable-sync no-sandbox enable-logging=stderr"
    done = subprocess.run(
        [
            "chromium",
            "--headless",
            *(f"--{flag}" for flag in quiet.split()),
            f"--user-data-dir={folder / 'profile'}",
            f"--screenshot={shot}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr
