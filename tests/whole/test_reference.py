"""The reference built from the docstrings: all public names are in it, documented, and linked."""

import builtins
import importlib
import inspect
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from scripts import reference

NAMES = [(module, name) for module in reference.DOCUMENTED for name in module.__all__]


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    """All files of the reference. A warning while they are made is an error, as everywhere here."""
    return reference.pages()


def entry(page: str, name: str) -> str:
    """What a page says of a name, up to the next one."""
    _, found, rest = page.partition(f'<section id="{name}">')
    assert found, f"{name} is missing"
    return rest.partition("</section>")[0]


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


def without_scripts(html: str) -> str:
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)


# --- what is in it --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", reference.DOCUMENTED, ids=lambda module: module.__name__)
def test_every_public_name_is_there_with_its_docstring(
    module: types.ModuleType, built: dict[str, str]
) -> None:
    page = built[f"{module.__name__.replace('.', '/')}.html"]
    bare = [name for name in module.__all__ if '"docstring"' not in entry(page, name)]
    assert bare == []


def test_sections_of_docstrings_are_rendered(built: dict[str, str]) -> None:
    iterate = built["loader.html"].partition('id="Pipeline.iterate"')[2]
    for section in ("Arguments:", "Raises:"):
        assert f"{section}</h6>" in iterate[:20_000]
    assert "Returns:</h6>" in entry(built["loader.html"], "masked_mean")
    assert "Attributes:</h6>" in entry(built["loader.html"], "Position")
    left = r"(Args|Arguments|Returns|Raises|Yields|Attributes):(?!</h6>)"
    for name, page in built.items():
        if name.endswith(".html"):
            assert not re.search(left, without_scripts(page)), name


def test_annotations_are_those_of_the_code(built: dict[str, str]) -> None:
    page = text_of(built["loader.html"])
    assert "np.ndarray[tuple[" not in page
    assert "_SupportsArray" not in page
    assert "grain._src" not in page
    assert "values: Any, mask: Any) -> Any" in page.replace("&gt;", ">")


def test_a_source_of_files_has_what_it_takes_from_others_as_its_own(built: dict[str, str]) -> None:
    shown = entry(built["loader.html"], "ParquetSource")
    assert 'id="ParquetSource.ids"' in shown
    assert 'id="ParquetSource.fingerprint"' in shown
    assert "read_file" not in shown


def test_pages_lead_to_each_other(built: dict[str, str]) -> None:
    assert '<a href="#PipelineConfig">PipelineConfig</a>' in built["loader.html"]
    assert 'href="checkpointing.html#Checkpoints"' in built["loader.html"]
    # Where the docstring says `Pipeline`, too.
    assert '<a href="loader.html#Mixture">loader.Mixture</a> of some' in re.sub(
        r"</?code>", "", built["checkpointing.html"]
    )
    assert 'href="../loader.html#Pipeline"' in built["checkpointing/testing.html"]
    assert 'href="checkpointing/testing.html"' in built["checkpointing.html"].replace("./", "")
    assert 'href="loader.html"' in built["index.html"]


def test_links_lead_somewhere(built: dict[str, str]) -> None:
    for name, page in built.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', without_scripts(page)):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            parts = (pathlib.PurePosixPath(name).parent / path).as_posix() if path else name
            target = re.sub(r"[^/]+/\.\./", "", parts).removeprefix("./")
            assert target in built, (name, link)
            assert not anchor or f'id="{anchor}"' in built[target], (name, link)


# --- what docstrings refer to ---------------------------------------------------------------------


def docstrings(module: types.ModuleType) -> Iterator[tuple[str, str]]:
    """Of a module, its public names, and their public members."""
    yield "", module.__doc__ or ""
    for name in module.__all__:
        value = getattr(module, name)
        if not getattr(value, "__module__", "").startswith(("loader", "checkpointing")):
            continue
        yield name, inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for member, of in inspect.getmembers(value):
                if not member.startswith("_") and (callable(of) or isinstance(of, property)):
                    yield f"{name}.{member}", inspect.getdoc(of) or ""


def is_there(name: str, near: str) -> bool:
    """Whether a public name, a member of one, or another package's name is called that."""
    first, *rest = name.removesuffix("()").split(".")
    for parts in ([first, *rest], [near, first, *rest]):
        for module in reference.DOCUMENTED:
            own = parts[1:] if parts[0] == module.__name__ else parts
            if own and own[0] in module.__all__ and has(getattr(module, own[0]), own[1:]):
                return True
    if first in ("loader", "checkpointing"):
        return name in ("loader", "checkpointing", "checkpointing.testing")
    if not rest:
        return hasattr(builtins, first)
    try:
        return has(importlib.import_module(first), rest)
    except ImportError:
        return False


def has(value: Any, members: list[str]) -> bool:
    for member in members:
        if member in getattr(value, "__annotations__", {}):
            return True
        if not hasattr(value, member):
            return False
        value = getattr(value, member)
    return True


def unknown_references(module: types.ModuleType) -> list[tuple[str, str]]:
    """Names in single backticks, which are links, that are nobody's."""
    return [
        (where, name)
        for where, text in docstrings(module)
        for name in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
        if not is_there(name, where.partition(".")[0])
    ]


@pytest.mark.parametrize("module", reference.DOCUMENTED, ids=lambda module: module.__name__)
def test_docstrings_refer_to_what_there_is(module: types.ModuleType) -> None:
    assert unknown_references(module) == []
    assert [where for where, text in docstrings(module) if not text.strip()] == []


def test_a_planted_reference_is_found() -> None:
    module = types.ModuleType(
        "planted", "See `gone`, `Pipeline.gone`, `Pipeline.iterate`, ``gone``."
    )
    vars(module)["__all__"] = []
    assert unknown_references(module) == [("", "gone"), ("", "Pipeline.gone")]


@pytest.mark.parametrize("module", reference.DOCUMENTED, ids=lambda module: module.__name__)
def test_the_overview_names_what_stands_on_the_page(module: types.ModuleType) -> None:
    """So that nobody has to find a function by its letter. Results stand where they come from."""
    named = set(re.findall(r"`(?:\w+\.)*(\w+)`", module.__doc__ or ""))
    functions = [name for name in module.__all__ if inspect.isroutine(getattr(module, name))]
    assert [name for name in functions if name not in named] == []


# --- the command ----------------------------------------------------------------------------------


def test_it_is_written_to_a_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "pages", lambda: {"index.html": "i", "a/b.html": "b"})
    done = CliRunner().invoke(reference.app, ["--out", str(tmp_path / "pages")])
    assert done.exit_code == 0
    assert done.stdout.strip() == str(tmp_path / "pages/index.html")
    assert (tmp_path / "pages/a/b.html").read_text() == "b"


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "pages", lambda: {"index.html": "i"})
    (tmp_path / "file").touch()
    done = CliRunner().invoke(reference.app, ["--out", str(tmp_path / "file/pages")])
    assert done.exit_code == 1
    assert "file/pages" in done.stderr
