"""Names without a promise: a new version that drops or changes one fails here. And there are no others."""

import ast
import importlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import pytest

from tests.jax_processes import run_processes

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
PACKAGES: Final = ("loader", "checkpointing", "regrain")
#: Whose names with an underscore are private. Those of the standard library are all others that it has.
LIBRARIES: Final = frozenset(
    {"orbax", "jax", "grain", "etils", "tensorstore", "numpy", *sys.stdlib_module_names}
)
#: Documented in spite of their underscore.
DOCUMENTED: Final = frozenset({"os._exit"})
ALLOWED: Final = frozenset({"threading._register_atexit"})


def test_work_before_pools_stop_may_still_use_one() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
from checkpointing.undocumented import before_pools_stop
pool = ThreadPoolExecutor(1)
before_pools_stop(lambda: print(pool.submit(lambda: "worked").result()))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr


def test_the_coordination_client_exchanges_texts_and_waits_for_all(tmp_path: pathlib.Path) -> None:
    """Each of its methods that `Processes` calls."""
    program = """
from checkpointing.undocumented import coordination_client
client = coordination_client()
client.key_value_set(f"texts/{index}", str(index))
client.wait_at_barrier("all", 60_000)
found = dict(client.key_value_dir_get("texts"))
other = client.blocking_key_value_get(f"texts/{1 - index}", 60_000)
client.wait_at_barrier("read", 60_000)
if index == 0:
    client.key_value_delete("texts/")
client.wait_at_barrier("deleted", 60_000)
print(sorted(key.rpartition("/")[2] for key in found), other, dict(client.key_value_dir_get("texts")))
"""
    ended = run_processes(program, 2, tmp_path)
    shown = [out.splitlines()[-1] for _, out, _ in ended]
    assert shown == ["['0', '1'] 1 {}", "['0', '1'] 0 {}"], ended[0][2][-2000:]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(source: str) -> Iterator[str]:
    """Private names of libraries that a module imports, or gets from a module that it imports."""
    modules: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(one.asname or one.name.partition(".")[0], one.name) for one in node.names]
            modules |= {
                as_: name if one.asname else as_
                for one, (as_, name) in zip(node.names, names, strict=True)
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [(one.asname or one.name, f"{node.module}.{one.name}") for one in node.names]
            modules |= dict(names)
        for _, name in names:
            if name.partition(".")[0] in LIBRARIES and any(map(is_private, name.split("."))):
                yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            dotted = dotted_name(node.value, modules)
            if dotted.partition(".")[0] in LIBRARIES:
                yield f"{dotted}.{node.attr}"


def dotted_name(node: ast.expr, modules: dict[str, str]) -> str:
    """Where a name comes from, such as ``etils.epath.Path``; of a call, what is called."""
    match node:
        case ast.Name(id=name):
            return modules.get(name, "")
        case ast.Attribute(value=value, attr=name):
            base = dotted_name(value, modules)
            return base and f"{base}.{name}"
        case ast.Call(func=ast.Name(id="type"), args=[made]):
            return dotted_name(made, modules)
        case ast.Call(func=called):
            return dotted_name(called, modules)
    return ""


def hidden_bases(source: str) -> Iterator[str]:
    """Base classes that have no name to import, such as ``type(epath.Path())``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from (ast.unparse(base) for base in node.bases if isinstance(base, ast.Call))


def sources() -> list[pathlib.Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_no_module_uses_private_names_of_libraries() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources()
        for name in [
            *private_names(path.read_text("utf-8")),
            *hidden_bases(path.read_text("utf-8")),
        ]
    }
    assert {one for one in found if one[1] not in DOCUMENTED} == {
        ("checkpointing/undocumented.py", name) for name in ALLOWED
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import threading\nthreading._register_atexit(f)", ["threading._register_atexit"]),
        ("from orbax.checkpoint._src import path", ["orbax.checkpoint._src.path"]),
        ("import jax as j\nj._src.distributed", ["jax._src"]),
        ("import jax\njax.Array._value", ["jax.Array._value"]),
        (
            "from concurrent import futures as f\nf.thread._shutdown",
            ["concurrent.futures.thread._shutdown"],
        ),
        ("import jax._src.core", ["jax._src.core"]),
        ("import queue\nqueue.Queue()._put", ["queue.Queue._put"]),
        ("import os\nos.fork().__class__\nself._own", []),
    ],
)
def test_private_names_are_found(source: str, found: list[str]) -> None:
    assert list(private_names(source)) == found


def test_base_classes_without_a_name_are_found() -> None:
    assert list(hidden_bases("class A(type(epath.Path())): pass\nclass B(A): pass")) == [
        "type(epath.Path())"
    ]


def test_the_modules_named_here_exist() -> None:
    assert all(isinstance(importlib.import_module(name), ModuleType) for name in PACKAGES)
