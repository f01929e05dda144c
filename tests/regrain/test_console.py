"""What commands print with: nothing that a file holds moves the terminal, and each error is a line and a code."""

import io
import logging
import sys

import pytest
import typer
from rich.console import Console
from rich.text import Text

import loader
from regrain.cli import console, rich_console


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("two\nlines\r", r"two\nlines\r"),
        ("right\u202eleft", r"right\u202eleft"),
        ("lone \ud800", r"lone \ud800"),
        ("läuft ∂", "läuft ∂"),
        (17, "17"),
        ("x" * 500, "x" * 397 + "..."),
    ],
    ids=["escape", "lines", "direction", "surrogate", "letters", "number", "long"],
)
def test_a_value_is_one_line_that_can_only_be_shown(value: object, shown: str) -> None:
    assert console.plain(value) == shown
    assert Text.from_markup(console.safe(value)).plain == shown


def test_markup_is_text() -> None:
    assert Text.from_markup(console.safe("[red]no[/] [link=x]")).plain == "[red]no[/] [link=x]"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "gone"), "gone: No such file"),
        (OSError("the disk is tired"), "the disk is tired"),
        (ValueError("a\nb\x1b"), "a\nb\\x1b"),
        (MemoryError(), "MemoryError()"),
        (ModuleNotFoundError("x", name="matplotlib.pyplot"), "pip install 'regrain[cli]'"),
        (ModuleNotFoundError("x", name="pyarrow"), "pip install 'regrain[parquet]'"),
    ],
    ids=["file", "system", "lines", "memory", "matplotlib", "pyarrow"],
)
def test_what_is_wrong_is_told_on_stderr_and_ends_with_2(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, console.running("audit"):
        raise error
    assert ended.value.exit_code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("regrain audit: ")
    assert said in printed.err


@pytest.mark.parametrize(
    "fault", [ModuleNotFoundError("x", name="mine"), AssertionError("x"), KeyError("x")]
)
def test_a_fault_of_the_program_is_told_as_such_and_is_no_answer(
    fault: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, console.running("audit"):
        raise fault
    assert ended.value.exit_code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Traceback")
    assert f"regrain audit: a fault of the command itself: {fault!r}\n" in printed.err


def test_an_exit_of_the_commands_own_stays_as_it_is() -> None:
    with pytest.raises(typer.Exit) as ended, console.running("audit"):
        raise typer.Exit(3)
    assert ended.value.exit_code == 3


def test_warnings_of_the_library_are_told_and_others_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with console.running("audit"):
        logging.getLogger("checkpointing.reports.history").warning("step 3 is \x1b damaged")
        logging.getLogger("checkpointing.reports.history").info("hello")
        logging.getLogger("absl").warning("hello")
    assert capsys.readouterr().err == "regrain audit: step 3 is \\x1b damaged\n"
    assert not any(isinstance(one, console._Warnings) for one in logging.getLogger().handlers)


@pytest.mark.parametrize(
    ("after_seconds", "is_terminal", "shown"),
    [(-1.0, True, True), (-1.0, False, False), (1e9, True, False)],
)
def test_a_bar_comes_on_a_terminal_for_long_work_only(
    after_seconds: float, is_terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich_console, "BAR_AFTER_SECONDS", after_seconds)
    written = io.StringIO()
    notes = Console(file=written, force_terminal=is_terminal, width=120)
    monkeypatch.setattr(console.notes, "rich", notes)
    with console.running("fingerprint"):
        source = loader.ArraySource({"x": [1, 2, 3]})
        source.fingerprint()
    text = written.getvalue()
    assert ("fingerprint of ArraySource" in text) == shown
    assert shown or text == ""


def test_json_is_one_line_of_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"ä": "\x1b"})
    assert capsys.readouterr().out == '{"\\u00e4": "\\u001b"}\n'


def test_output_that_is_no_terminals_is_wide_unless_columns_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    made = rich_console.console_of(stderr=False)
    assert made.width == 200
    monkeypatch.setenv("COLUMNS", "60")
    assert rich_console.console_of(stderr=False).width == 60


def test_a_name_is_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console.console.print(console.safe("runs:100:x"))
    console.console.print("runs:100:x", markup=False)
    assert capsys.readouterr().out == "runs:100:x\n" * 2


def test_what_others_print_is_not_among_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with console.running("inspect"):
        print("from the user's own function")  # noqa: T201
        console.print_json(3)
    console.console.print("after it")
    printed = capsys.readouterr()
    assert printed.out == "3\nafter it\n"
    assert printed.err == "from the user's own function\n"
