"""Run the blocks of the README and of each page of docs/, in order.

Python blocks share one session. A text block is the output of the block or command before it. A block whose first line is
a comment with a file's name becomes that file. In shell blocks and workflows, the commands that begin with python run.
"""

import contextlib
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import jax
import pytest
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

from tests.object_store import running_store

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Stand-ins for modules that pages use and the environment lacks.
STAND_INS = pathlib.Path(__file__).resolve().parents[1] / "stand_ins"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _run(example: Example) -> None:
    named = re.match(r"# (\S+\.py)\n", example.parsed)
    if named:
        file = pathlib.Path(named[1])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(example.parsed, "utf-8")
        return
    printed = io.StringIO()
    code = compile(example.parsed, f"{pathlib.Path(example.path).name}:{example.line}", "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, example.namespace)
    example.namespace["printed"] = printed.getvalue()


def _compare(example: Example) -> None:
    assert example.namespace.pop("printed").rstrip() == example.parsed.rstrip(), (
        f"{example.path}:{example.line} differs from the output of the block above it"
    )


def _command(example: Example) -> None:
    commands = re.findall(r"^(?: *- run: )?(python .*)$", example.parsed, re.MULTILINE)
    assert commands, f"{example.path}:{example.line} has no command to run"
    for command in commands:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": shlex.quote(f"--basetemp={pathlib.Path.cwd() / 'pytest'}"),
            "DRILL_KILLS": "1",  # docs/testing.md: one kill is enough here
        }
        arguments = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        example.namespace["printed"] = done.stdout


def _examples(page: pathlib.Path) -> Document:
    languages = {"python": _run, "text": _compare, "sh": _command, "yaml": _command}
    parsers = [CodeBlockParser(language, evaluate) for language, evaluate in languages.items()]
    return Sybil(parsers=parsers).parse(page)


def test_the_readme_is_a_page_of_blocks() -> None:
    assert len(list(_examples(PAGES[0]).examples())) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_and_prints_the_text_of_the_page(
    page: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.syspath_prepend(tmp_path)
    document: Any = _examples(page)
    # Readers have JAX's defaults, not the strictness of the other tests.
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name)
    # The page on object stores uses a local one.
    store = running_store() if page.stem == "scaling" else contextlib.nullcontext()
    with store, jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for example in document.examples():
            example.evaluate()
    # An exception of a callback is logged and does not end the run.
    assert [
        text for text in caplog.messages if re.match("on_(stats|progress) has failed", text)
    ] == []


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "differs from the output"),
        ("```sh\npython -c 'raise SystemExit(3)'\n```\n", "raise SystemExit"),
        ("```yaml\n- run: python absent.py\n```\n", "absent.py"),
        ("```sh\nls\n```\n", "no command to run"),
    ],
)
def test_a_wrong_block_is_found(
    blocks: str, error: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(blocks)
    document: Any = _examples(page)
    with pytest.raises(AssertionError, match=error):  # noqa: PT012
        for example in document.examples():
            example.evaluate()
