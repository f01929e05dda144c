"""The command line of provenance: answers from a run's directory alone, and every refusal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from typer.testing import CliRunner

import checkpointing
import loader
from loader import ArraySource, Pipeline, PipelineConfig
from regrain.cli import provenance as job
from regrain.cli.app import app

ROOT: Final = Path(__file__).resolve().parents[2]
N: Final = 23


def train(
    directory: Path, steps: int, ids: Any = None, **settings: Any
) -> list[tuple[list[Any], list[bool]]]:
    usual = {"batch_size": 4, "seed": 17, "final_batch": "pad", "num_epochs": 4}
    source = ArraySource({"x": np.arange(N)}, ids)
    pipeline = Pipeline(source, PipelineConfig(**{**usual, **settings}))
    seen = []
    with checkpointing.Checkpoints(directory, pipeline, 10**9, 100) as checkpoints:
        run = checkpoints.resume({"sum": np.zeros(())}, allow={"batch_size", "exclude"})
        for _ in range(steps):
            batch = next(run.batches)
            seen.append((batch["id"].tolist(), batch["mask"].tolist()))
        checkpoints.save(run.batches, run.train_state, force=True)
    return seen


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run whose batch size changed inside an epoch, and which left a record out later."""
    path = tmp_path_factory.mktemp("runs") / "changed"
    seen = train(path, 3) + train(path, 5, batch_size=5)
    return path, seen + train(path, 5, batch_size=5, exclude=[7])


def call(*arguments: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["provenance", *map(str, arguments)])
    assert done.exit_code == code, done.output
    assert (done.stderr == "") == (code == 0)
    return done.stdout if code == 0 else " ".join(done.stderr.split())


def test_every_step_and_every_record_as_json(changed: tuple[Path, list[Any]]) -> None:
    path, seen = changed
    steps = [option for step in range(len(seen)) for option in ("--step", step)]
    ids = [option for record_id in range(N) for option in ("--id", record_id)]
    answer = json.loads(call(path, *steps, *ids, "--epochs", "0:4", "--json"))
    assert (answer["num_steps"], answer["num_records"]) == (len(seen), N)
    came = {}
    for (ids_seen, mask), told in zip(seen, answer["steps"], strict=True):
        count = len(told["ids"])
        assert told["ids"] == told["rows"] == ids_seen[:count]
        assert told["excluded"] == [not kept for kept in mask[:count]]
        assert told["slots"] == len(ids_seen)
        size = 4 if told["step"] < 3 else 5
        assert told["batch"] == told["epoch"] * -(-N // size) + told["offset"] // size
        for slot, record_id in enumerate(told["ids"]):
            came[record_id, told["epoch"]] = (told["step"], slot, told["excluded"][slot])
    for record in answer["records"]:
        for visit in record["visits"]:
            place = came.get((record["id"], visit["epoch"]))
            assert (visit["outcome"] == "delivered") == (place is not None)
            if place:
                assert (visit["step"], visit["slot"], visit["excluded"]) == place
    assert sum(v["step"] is not None for r in answer["records"] for v in r["visits"]) == len(came)
    segments = [(s["first_step"], s["end_step"], s["changed"]) for s in answer["segments"]]
    assert segments == [
        (0, 3, {}),
        (3, 8, {"batch_size": [4, 5]}),
        (8, 13, {"exclude": [[], [7]]}),
    ]


def test_the_run_and_its_changes_are_printed(changed: tuple[Path, list[Any]]) -> None:
    printed = " ".join(call(changed[0]).split())
    assert "13 steps, 23 records. IDs: row numbers, as their digest" in printed
    assert "0 to 2 epoch 0, offset 0 4" in printed
    assert "3 to 7 epoch 0, offset 12 5 batch_size 4 -> 5" in printed
    assert "exclude [] -> [7]" in printed


def test_a_step_is_printed_with_its_place_and_all_its_ids(changed: tuple[Path, list[Any]]) -> None:
    path, seen = changed
    printed = call(path, "--step", 3, "--step", 5)
    assert "step 3: epoch 0, offset 12, 5 slots; batch 2, as skip counts\n" in printed
    assert "step 1: epoch 0, offset 4, 4 slots\n" in call(path, "--step", 1)
    assert "IDs   " + " ".join(map(str, seen[3][0])) + "\n" in printed
    assert "rows" not in printed
    step = next(step for step in range(8, len(seen)) if 7 in seen[step][0])
    slot = seen[step][0].index(7)
    printed = call(path, "--step", step)
    assert f"left out by exclude, with mask False: 7 (slot {slot})" in printed


def test_a_record_is_printed_with_a_line_for_each_epoch(changed: tuple[Path, list[Any]]) -> None:
    path, seen = changed
    printed = call(path, "--id", 7)
    assert "ID 7 (row 7): epochs 0 to 2; 3 so far" in printed
    steps = [step for step, (ids, _) in enumerate(seen) if 7 in ids]
    for epoch, step in enumerate(steps):
        assert f" {epoch} {step} {seen[step][0].index(7)} " in " ".join(printed.split())
    assert "left out by exclude: its slot came with mask False" in printed
    assert call(path, "--row", 7) == printed
    assert "epochs 1 to 1;" in call(path, "--id", 7, "--epochs", "1")


def test_padding_and_reasons_are_printed(tmp_path: Path) -> None:
    train(tmp_path / "a", 6, shuffle="none", on_bad_record="mask")
    printed = call(tmp_path / "a", "--step", 5)
    assert "4 slots, 1 of them padding" in printed
    assert "on_bad_record is mask" in printed
    train(tmp_path / "b", 5, shuffle="none", final_batch="drop", skip=((1, 2),))
    printed = call(tmp_path / "b", "--id", 4, "--id", 22)
    assert printed.count("left out by skip, with its batch") == 1
    assert printed.count("dropped: the last records did not fill a batch") == 1
    assert printed.count("not yet") == 2


def test_a_step_after_the_newest_checkpoint_is_told_if_asked_for(
    changed: tuple[Path, list[Any]],
) -> None:
    path, _ = changed
    message = call(path, "--step", 13, code=1)
    assert "step 13 is not done: 13 steps are done, numbered from 0. That is the newest" in message
    assert "step 13: epoch 2, offset" in call(path, "--step", 13, "--ahead")


TEXT_IDS: Final = [f"r{row}" for row in range(N)]
SOURCE: Final = f"""
import numpy as np
import loader
def text(): return loader.ArraySource({{"x": np.arange({N})}}, {TEXT_IDS})
def other(): return loader.ArraySource({{"x": np.arange({N})}})
"""


def test_ids_that_are_no_row_numbers_are_told_by_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("mine.py").write_text(SOURCE)
    seen = train(tmp_path / "run", 3, TEXT_IDS, exclude=["r3"])
    for unknown in ("7", "r7"):  # whether or not a record has this ID
        message = call("run", "--id", unknown, code=2)
        assert f"--id {unknown}: the run's IDs are not known" in message
        assert "give --source, or use --row" in message
    printed = call("run", "--step", 1)
    assert "IDs not known" in printed
    assert "rows  " + " ".join(r[1:] for r in seen[1][0]) + "\n" in printed
    assert "give --source to see whether" in printed
    printed = call("run", "--step", 1, "--id", "r7", "--source", "mine:text")
    assert "IDs   " + " ".join(seen[1][0]) + "\n" in printed
    assert "rows  " in printed
    assert "ID r7 (row 7)" in printed
    assert "no record has the ID '7'" in call("run", "--id", "7", "--source", "mine:text", code=1)
    assert "the source's IDs are not those" in call("run", "--source", "mine:other", code=2)
    assert "ModuleNotFoundError" in call("run", "--source", "gone:text", code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--id", "23"], 1, "no record has the ID 23"),
        (["--id", "x"], 1, "no record has the ID 'x': the IDs are integers"),
        (["--id", "1" * 5000], 1, "no record has the ID"),
        (["--row", "23"], 1, "row 23 is not one of the 23 rows"),
        (["--step", "99"], 1, "step 99 is not done"),
        (["--id", "7", "--epochs", "4:5"], 2, "epoch 4 is not one of the 4"),
        (["--id", "7", "--epochs", "a"], 2, "--epochs takes FIRST:END"),
        (["--id", "7", "--epochs", "3:3"], 2, "give 1 to 1,000,000"),
        (["--id", "7", "--epochs", "0:9999999999"], 2, "give 1 to 1,000,000"),
    ],
)
def test_a_refusal_says_why(
    changed: tuple[Path, list[Any]], arguments: list[str], code: int, message: str
) -> None:
    assert message in call(changed[0], *arguments, code=code)


def test_a_directory_without_a_whole_checkpoint_is_named(tmp_path: Path) -> None:
    assert "has no steps" in call(tmp_path, code=2)
    assert "gone" in call(tmp_path / "gone", code=2)
    train(tmp_path, 2)
    (tmp_path / "2/manifest/metadata").write_text("{}")
    assert "no checkpoint in" in call(tmp_path, code=2)


def test_of_many_epochs_the_newest_are_shown(tmp_path: Path) -> None:
    train(tmp_path, 300, batch_size=N, num_epochs=None)
    (record,) = json.loads(call(tmp_path, "--id", 7, "--json"))["records"]
    assert (record["epochs"], record["epochs_so_far"]) == ([200, 300], 300)
    assert [visit["step"] for visit in record["visits"]] == list(range(200, 300))
    ahead = json.loads(call(tmp_path, "--id", 7, "--ahead", "--json"))["records"]
    assert (ahead[0]["epochs"], ahead[0]["epochs_so_far"]) == ([0, 100], None)


def test_a_vast_step_is_shown_in_part(
    changed: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SHOWN_SLOTS", 2)
    assert "... and 2 more: see --json" in call(changed[0], "--step", 0)


@pytest.mark.processes
def test_the_digits_run_is_told_without_its_training_script(tmp_path: Path) -> None:
    """As a program, on a run of scripts/train.py's data and config, whose IDs are row numbers."""
    from scripts import train as training

    pipeline = Pipeline(
        training.digits(), PipelineConfig.from_toml(training.CONFIG), training.scale
    )
    with checkpointing.Checkpoints(tmp_path, pipeline, 100, 1) as checkpoints:
        run = checkpoints.resume({"w": np.zeros(3)})
        run.batches.set_state({"epoch": 80, "offset": 128, "step": 1201})
        checkpoints.save(run.batches, run.train_state, force=True)
    command = [sys.executable, "-m", "regrain", "provenance", str(tmp_path)]
    done = subprocess.run(
        [*command, "--step", "1200", "--id", "7", "--json"],
        cwd=tmp_path,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["steps"][0]["ids"] == pipeline.ids(1200).tolist()
    told = [visit["step"] for visit in answer["records"][0]["visits"]]
    order = [loader.position_of(7, 1797, 17, epoch) for epoch in range(81)]
    steps: list[int | None] = [epoch * 15 + place // 128 for epoch, place in enumerate(order)]
    if order[80] >= 128:
        steps[80] = None
    assert told == steps
