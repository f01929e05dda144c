"""The README's code blocks run, in order, as one session; a text block after one is what it prints."""

import contextlib
import io
import pathlib
from typing import Any

import jax
import pytest
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

_README = pathlib.Path(__file__).parent.parent / "README.md"


def _run(example: Example) -> None:
    printed = io.StringIO()
    code = compile(example.parsed, f"{_README.name}:{example.line}", "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, example.namespace)
    example.namespace["printed"] = printed.getvalue()


def _compare(example: Example) -> None:
    assert example.namespace.pop("printed").rstrip() == example.parsed.rstrip(), (
        f"{_README.name}:{example.line} is not what the block above it prints"
    )


def _examples() -> Document:
    parsers = [CodeBlockParser("python", _run), CodeBlockParser("text", _compare)]
    return Sybil(parsers=parsers).parse(_README)


def test_every_block_of_the_readme_runs_and_prints_what_it_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document: Any = _examples()
    examples = list(document.examples())
    assert len(examples) > 5
    # A reader's JAX is as lenient as JAX comes; the strictness of the other tests is not for them.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for example in examples:
            example.evaluate()
