#!/usr/bin/env python
"""Builds the reference of all public names, from their docstrings: HTML pages that link to each other.

    python scripts/reference.py                  # runs/reference/index.html
    python scripts/reference.py --out pages

Run it with the environment active, from anywhere. Exit codes: 0 written; 1 a folder or file cannot be
written; 2 wrong use.
"""

import ast
import inspect
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import jinja2
import numpy.typing as npt
import pdoc.doc
import pdoc.render
import pdoc.render_helpers
import typer

import checkpointing
import checkpointing.testing
import loader

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENTED: Final = (loader, checkpointing, checkpointing.testing)
FOOTER: Final = "From the docstrings of regrain. How to use it: README.md and docs/."

OF_TYPING: Final = r"(?<![\w.])(?:typing|collections\.abc)\."
#: How annotations are written in the code, by a pattern of how Python spells them out.
WRITTEN: Final = (
    (r"numpy\.ndarray\[tuple\[Any, \.\.\.\], numpy\.dtype\[([^][]*)\]\]", r"NDArray[\1]"),
    (r"grain\._src\.python\.dataset\.dataset\.", "grain."),
    (r"grain\._src\.python\.options\.", "grain."),
    (r"jaxlib\.\w+\.Sharding\b", "jax.sharding.Sharding"),
    (r"jaxlib\.\w+\.", "jax."),
    (r"\bnumpy\.", "np."),
    (r"\bbuiltins\.|~", ""),
)
#: What only a class of a format has to have.
HOOKS: Final = ("read_file", "read_column")
#: What differs from pdoc's own page.
#: Fields of a dataclass stand in its docstring, under Attributes; what a class has from one that is not
#: public is shown as its own.
PAGE: Final = """\
{% extends "default/module.html.jinja2" %}
{% block attribution %}{% endblock %}
{% block nav_submodules %}
    <h2>Modules</h2>
    <ul>{% for name in all_modules %}<li>{{ (name, "") | link }}</li>{% endfor %}</ul>
{% endblock %}
{% macro nav_members(members) %}
    <ul class="memberlist">
    {% for m in members if m.name != "__init__" and is_public(m) | trim %}
        <li>
            <a class="{{ m.kind }}" href="#{{ m.qualname }}">{{ m.name }}</a>
            {% if m.kind == "class" %}{{ nav_members(m.own_members) }}{% endif %}
        </li>
    {% endfor %}
    </ul>
{% endmacro %}
{% macro docstring(doc) %}
    {% if doc.docstring %}
        <div class="docstring">
            {{- doc.docstring | qualified(module.modulename) | to_markdown | to_html
                | linkify(namespace=doc.qualname, shorten=False) -}}
        </div>
    {% endif %}
{% endmacro %}
{% macro is_public(doc) %}
    {% if doc.name not in hooks and (doc.kind != "variable" or doc.docstring) %}{{ default_is_public(doc) }}{% endif %}
{% endmacro %}
{% macro annotation(var) %}
    {% if var.annotation_str %}<span class="annotation">{{ var.annotation_str | written | escape | linkify }}</span>{% endif %}
{% endmacro %}
{% macro bases(cls) %}
    {% for base in cls.bases if not base[0].startswith(("loader.", "checkpointing.")) %}
        {% if loop.first %}<wbr>({% endif %}<span class="base">{{ base[:2] | link(text=base[2] | written) }}</span>
        {%- if loop.last %}){% else %}, {% endif %}
    {% endfor %}
{% endmacro %}
{% macro inherited(cls) %}
    {% for base, members in cls.inherited_members.items() if base[0].startswith(("loader.", "checkpointing.")) %}
        {% for m in members if m.name != "__init__" and is_public(m) | trim %}
            <div id="{{ m.qualname }}" class="classattr">{{ member(m) }}</div>
        {% endfor %}
    {% endfor %}
{% endmacro %}
"""

INDEX: Final = """\
{% extends "default/index.html.jinja2" %}
{% block title %}regrain: reference{% endblock %}
{% block content %}
    <header class="pdoc"><input type="search" placeholder="Search..." aria-label="search box"></header>
    <main class="pdoc">
        <h1>regrain: reference</h1>
        {% for name, module in all_modules.items() %}
            <h2><a href="{{ name.replace(".", "/") }}.html">{{ name }}</a></h2>
            <p>{{ module.docstring.splitlines()[0] }}</p>
        {% endfor %}
    </main>
    {% include "search.html.jinja2" %}
{% endblock %}
"""
STYLE: Final = """\
.pdoc .signature.pdoc-code, .pdoc .signature.pdoc-code .param { white-space: pre-wrap; }
.pdoc .inherited .attr.function a:after { content: none; }
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = ROOT / "runs" / "reference",
) -> None:
    """Build the reference of all public names as HTML pages, from their docstrings.

    Exit codes: 0 written; 1 a folder or file cannot be written; 2 wrong use.
    """
    try:
        write(pages(), out)
    except OSError as error:
        typer.echo(f"reference: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(out / "index.html"))


def pages() -> dict[str, str]:
    """All files of the reference, by their names in its folder."""
    pdoc.render.configure(docformat="google", footer_text=FOOTER, show_source=False)
    environment = pdoc.render.env
    environment.loader = jinja2.ChoiceLoader(
        [
            jinja2.DictLoader(
                {"module.html.jinja2": PAGE, "index.html.jinja2": INDEX, "custom.css": STYLE}
            ),
            environment.loader or jinja2.BaseLoader(),
        ]
    )
    environment.globals["hooks"] = HOOKS
    environment.filters["format_signature"] = formatted_signature
    environment.filters["written"] = written
    environment.filters["qualified"] = qualified
    modules = {module.__name__: documented(module) for module in DOCUMENTED}
    found = {
        f"{name.replace('.', '/')}.html": pdoc.render.html_module(module, modules)
        for name, module in modules.items()
    }
    found["index.html"] = pdoc.render.html_index(modules)
    found["search.js"] = pdoc.render.search_index(modules)
    return found


def write(files: Mapping[str, str], out: Path) -> None:
    """Writes files below a folder, which is made."""
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def documented(module: types.ModuleType) -> pdoc.doc.Module:
    """A module's public names; constants have their docstrings from the modules that they come from."""
    made = pdoc.doc.Module(module)
    origins = {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, member in made.members.items():
        if isinstance(member, pdoc.doc.Variable) and not member.docstring:
            origin = pdoc.doc.Module.from_name(str(origins[name]))
            member.docstring = origin.members[name].docstring
    return made


class _Written:
    """An annotation that is shown as a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def formatted_signature(signature: inspect.Signature, *, colon: bool) -> Any:
    """The form that pdoc gives a signature, with annotations as they are written in the code."""
    empty = inspect.Parameter.empty
    parameters = [
        parameter
        if parameter.annotation is empty
        else parameter.replace(annotation=_annotation(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    returned = signature.return_annotation
    if returned is not empty:
        returned = _annotation(returned)
    short = type(signature)(parameters, return_annotation=returned)
    return pdoc.render_helpers.format_signature(short, colon)


def _annotation(annotation: Any) -> _Written:
    return _Written(written(inspect.formatannotation(annotation)))


def written(text: str) -> str:
    """An annotation as it is written in the code, public names by their public modules."""
    text = re.sub(r"\bNoneType\b", "None", re.sub(OF_TYPING, "", text))
    members = ARRAY_LIKE.removeprefix("Union[").removesuffix("]")
    text = text.replace(f"Union[{members}, None]", "ArrayLike | None")
    text = text.replace(ARRAY_LIKE, "ArrayLike")
    for pattern, short in WRITTEN:
        text = re.sub(pattern, short, text)
    return re.sub(r"\b(?:loader|checkpointing)(?:\.\w+)+", lambda match: _public(match[0]), text)


def qualified(text: str, module: str) -> str:
    """A docstring in which another module's names, in single backticks, have that module's name before them."""
    own = set(next(one.__all__ for one in DOCUMENTED if one.__name__ == module))

    def longer(match: re.Match[str]) -> str:
        first = match[1].partition(".")[0]
        of = next((one for one in DOCUMENTED if first in one.__all__ and first not in own), None)
        return f"`{of.__name__}.{match[1]}`" if of else match[0]

    return re.sub(r"(?<!`)`([\w.]+)`(?!`)", longer, text)


def _public(name: str) -> str:
    """``loader.batching.Position`` as ``loader.Position``; the last part alone of what is not public."""
    last = name.rpartition(".")[2]
    for module in DOCUMENTED:
        if last in module.__all__:
            return f"{module.__name__}.{last}"
    return last


#: The union that `numpy.typing.ArrayLike` stands for.
ARRAY_LIKE: Final = re.sub(OF_TYPING, "", repr(npt.ArrayLike))


if __name__ == "__main__":
    app()
