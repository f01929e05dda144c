"""The command `regrain`: its help teaches what it does, and comes, as completion does, without JAX."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

from regrain import __main__ as program
from regrain.cli import provenance as job
from regrain.cli.app import ABOUT, app

ROOT: Final = Path(__file__).resolve().parents[2]
#: What takes time to import, or is not needed to tell what there is.
HEAVY: Final = ("jax", "grain", "numpy", "orbax", "loader", "checkpointing", "rich", "matplotlib")


def commands_of(group: Any, *before: str) -> Iterator[tuple[str, Any]]:
    """Every command by its full name, a group's own name included."""
    for name, command in group.commands.items():
        full = (*before, name)
        yield " ".join(full), command
        if hasattr(command, "commands"):
            yield from commands_of(command, *full)


COMMANDS: Final = dict(commands_of(typer.main.get_command(app)))


def test_each_command_has_examples_and_exit_codes() -> None:
    assert list(COMMANDS) == [
        *("inspect", "drill", "audit", "provenance", "convert", "plot-order", "fingerprint"),
        *("fingerprint print", "fingerprint save", "fingerprint compare"),
    ]
    assert ABOUT.keys() == COMMANDS.keys()
    assert all(about.examples and about.exit_codes[130] for about in ABOUT.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_its_help_shows_them(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=100)
    assert done.exit_code == 0
    for example, purpose in ABOUT[name].examples.items():
        assert f"    # {purpose}\n    {example}\n" in done.stdout
    for code in ABOUT[name].exit_codes:
        assert f"\n    {code:3}  " in done.stdout


@pytest.mark.parametrize(
    "example", sorted({example for about in ABOUT.values() for example in about.examples})
)
def test_each_example_is_a_command_line(example: str) -> None:
    program_name, *arguments = shlex.split(example.partition(" | ")[0])
    assert program_name == "regrain"
    name = " ".join(arguments[:2]) if " ".join(arguments[:2]) in COMMANDS else arguments[0]
    COMMANDS[name].make_context(name, arguments[len(name.split()) :])


def imported(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """What the program prints, and which of the heavy modules it has imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "regrain", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split("|")[-1].strip() for line in done.stderr.splitlines()]
    assert "typer" in lines
    return done.stdout, {name for name in HEAVY if name in lines}


@pytest.mark.processes
def test_help_comes_without_what_the_work_needs() -> None:
    printed, heavy = imported("--help")
    assert heavy == set()
    assert "Kill a training script, resume it, and compare." in printed
    assert "..." not in printed.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("regrain ", {"inspect", "drill", "fingerprint", "plot-order"}),
        ("regrain inspect --", {"--step", "--json", "--verify"}),
        ("regrain inspect {run} --step ", {"100", "20"}),
    ],
    ids=["commands", "options", "steps"],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_offers_what_there_is(
    words: str, offered: set[str], shell: str, tmp_path: Path
) -> None:
    tmp_path /= "a folder"
    tmp_path.mkdir()
    for name in ("20", "100", "20.regrain.orbax-checkpoint-tmp", "²"):
        (tmp_path / name).mkdir()
    count = words.count(" ")
    words = words.replace("{run}", shlex.quote(str(tmp_path)))  # as one types it
    asked = {"_REGRAIN_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        asked |= {"COMP_WORDS": words, "COMP_CWORD": str(count)}
    else:
        asked |= {"_TYPER_COMPLETE_ARGS": words}
    done = CliRunner().invoke(app, [], prog_name="regrain", env=asked)
    found = set(done.stdout.split()) if shell == "bash" else set(done.stdout.split('"'))
    assert offered <= found
    assert "20.regrain.orbax-checkpoint-tmp" not in done.stdout


@pytest.mark.processes
def test_completion_comes_without_what_the_work_needs() -> None:
    asked = {"COMP_WORDS": "regrain inspect --le", "COMP_CWORD": "2"}
    printed, heavy = imported(_REGRAIN_COMPLETE="complete_bash", **asked)
    assert printed == "--leaves\n"
    assert heavy == set()


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_script_is_one_for_the_shell(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", shell], prog_name="regrain")
    assert {"bash": "complete -o default -F", "zsh": "#compdef regrain"}[shell] in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.stdout.startswith("regrain 0.")


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["inspect"], ["inspect", "run", "--verify", "some"], ["drill"], ["audit"]],
    ids=" ".join,
)
def test_wrong_use_ends_with_2_and_points_to_the_help(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Usage: " in done.stderr


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run", interrupted)
    done = CliRunner().invoke(app, ["provenance", "runs/x"])
    assert done.exit_code == 130
    assert "Traceback" not in done.output
    monkeypatch.setattr("regrain.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL


@pytest.mark.processes
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_what_prints_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from regrain.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "provenance", "runs/x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"regrain: {missing}")
    assert "pip install 'regrain[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
