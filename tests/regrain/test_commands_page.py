"""docs/commands.md: its commands, options, exit codes and JSON are those of the program."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import checkpointing
from loader import ArraySource, Pipeline, PipelineConfig
from regrain.cli.app import ABOUT, app

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
SECTIONS: Final[dict[str, str]] = dict(
    re.findall(
        r"^## regrain ([\w-]+)\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
)
GROUP: Any = typer.main.get_command(app)
CONFIG: Final = '[pipeline]\nbatch_size = 4\nseed = 1\nfinal_batch = "pad"\n'


def rows(name: str, heading: str) -> list[tuple[str, str]]:
    """Both cells of each row of the table of that heading in the section of a command."""
    (table,) = re.findall(
        rf"^\| {heading} \| \|\n\|---\|---\|\n((?:\|.*\n)+)", SECTIONS[name], re.MULTILINE
    )
    return re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE)


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_each_command_has_a_section_and_a_row() -> None:
    assert list(SECTIONS) == [
        *("inspect", "drill", "audit", "provenance", "fingerprint", "convert", "plot-order")
    ]
    assert SECTIONS.keys() == GROUP.commands.keys()
    for name in SECTIONS:
        assert f"| [`regrain {name}`](#regrain-{name}) |" in PAGE.read_text("utf-8")


def taken_by(command: Any) -> Iterator[str]:
    """Options and arguments of a command, and of those in it, but for --help and --json, which all have."""
    for inner in getattr(command, "commands", {}).values():
        yield from taken_by(inner)
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        yield from [parameter.metavar] if is_argument else parameter.opts + parameter.secondary_opts


@pytest.mark.parametrize("name", SECTIONS)
def test_its_options_are_those_of_the_program(name: str) -> None:
    told = [
        option
        for cell, _ in rows(name, "option")
        for option in re.split(r" / | ", in_code(cell)[0])
        if option.startswith("--") and option != "--"
    ]
    told += [in_code(cell)[0] for cell, _ in rows(name, "option") if "--" not in cell[:3]]
    told += ["-- COMMAND..."] if "`-- COMMAND...`" in SECTIONS[name] else []
    assert len(set(told)) == len(told)
    assert set(told) == set(taken_by(GROUP.commands[name])) - {"--help", "-h", "--json"}


def test_exit_codes_follow_the_one_rule_of_the_page() -> None:
    codes = {name: set(about.exit_codes) for name, about in ABOUT.items()}
    assert codes.pop("inspect") == {0, 1, 2, 3, 130}
    assert all({0, 2, 130} <= rest <= {0, 1, 2, 130} for rest in codes.values()), codes
    (rule,) = re.findall(
        r"^- `--help` has examples.*?(?=^- )", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert set(re.findall(r"\b\d+\b", rule)) == {"0", "1", "2", "3", "130", "141"}


def found_in(value: Mapping[str, Any], told: set[str], prefix: str = "") -> Iterator[str]:
    """Names in a JSON document, as deep as the page goes into it."""
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if isinstance(inner, dict) and any(one.startswith(f"{path}.") for one in told):
            yield from found_in(inner, told, f"{path}.")
        elif isinstance(inner, list) and any(one.startswith(f"{path}[].") for one in told):
            assert inner, f"the test has no {path} to look at"
            for entry in inner:
                yield from found_in(entry, told, f"{path}[].")
        else:
            yield path


def documents(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each command prints with --json."""
    source = ArraySource({"x": np.arange(11.0)})
    inspected: dict[str, Any] = {}
    for size in (4, 5):
        pipeline = Pipeline(source, PipelineConfig(size, 1, "pad"))
        with checkpointing.Checkpoints(folder / "run", pipeline, 1, 9) as checkpoints:
            run = checkpoints.resume({"w": np.zeros(3)}, allow={"batch_size"})
            next(run.batches)
            checkpoints.save(run.batches, run.train_state)
            checkpoints.wait()
            (folder / "run" / "9.regrain.orbax-checkpoint-tmp").mkdir()
            inspected = call("inspect", folder / "run", "--config", folder / "c.toml", "--leaves")
    nothing = checkpointing.DrillReport((), 0, 1, (), (), 0, {}, (), {}, 0.0)
    np.savez(folder / "a.npz", x=np.arange(11.0))
    np.savez(folder / "b.npz", x=np.arange(11.0) + 1)
    config, out = ("--config", folder / "c.toml"), folder / "out"
    return {
        "inspect": [inspected],
        "drill": [nothing.to_dict()],
        "audit": [call("audit", *config, "--num-records", 11, "--out", out)],
        "provenance": [call("provenance", folder / "run", "--step", 1, "--id", 7)],
        "fingerprint": [
            call("fingerprint", "print", folder / "a.npz"),
            call("fingerprint", "save", folder / "a.json", folder / "a.npz"),
            call("fingerprint", "compare", folder / "a.json", folder / "b.npz"),
        ],
        "convert": [call("convert", folder / "a.npz", "--out", folder / "npy")],
        "plot-order": [call("plot-order", *config, "--num-records", 11, "--out", folder / "o.svg")],
    }


def call(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code in (0, 1), done.output
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_has_the_keys_that_the_page_tells(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    made = documents(tmp_path)
    assert made.keys() == SECTIONS.keys()
    for name, found in made.items():
        told = {key for cell, _ in rows(name, "JSON") for key in in_code(cell)}
        keys = {key for document in found for key in found_in(document, told)}
        assert keys == told, name
