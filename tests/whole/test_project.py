"""What holds the project together: its layers, its public names, its wheel, its lock, its tree."""

import ast
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import types
import warnings
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import checkpointing.testing
import loader

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("loader", "checkpointing", "regrain")
#: What may import Grain.
RUNS_GRAIN = (
    "loader.stream",
    "loader.reading.iterator",
    "loader.streams.pipeline",
    "loader.streams.grain",
    "loader.sources",
)
#: Tools in the folder of the audit that are no part of it: they use the pipeline, and it uses neither.
BESIDE_THE_AUDIT = ("loader.audit.provenance", "loader.audit.determinism")
RUNTIME = {"grain", "jax", "numpy", "orbax-checkpoint"}


# --- layers -------------------------------------------------------------------------------------

#: The arrays of a step, and the coordination client.
OF_ORBAX = ("checkpointing.arrays", "checkpointing.undocumented")
#: What prints and draws is of the extra `cli`.
OF_THE_COMMAND_LINE = ("typer", "rich", "matplotlib")
#: Beside what they export, of the two libraries: how work and amounts are told, what is said of a stream
#: where a source is wanted, and types of what is returned.
OPEN_TO_COMMANDS = (
    *("loader", "loader.sources.new_paths", "loader.progress"),
    "loader.sources.source_or_stream",
    "loader.sources.extras",
    *("checkpointing", "checkpointing.testing", "checkpointing.proof.report"),
)
NUMPY_ALONE = (
    "loader.checks",
    "loader.identity.records",
    "loader.config",
    "loader.order",
    "loader.progress",
    "loader.sources.source_or_stream",
    "loader.splitmix",
    "loader.identity.fingerprint",
    "loader.identity.files",
    "loader.keys",
    "loader.identity.digests",
    "loader.identity.marks",
    "loader.reading.threads",
    "loader.identity.differences",
)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, wherever in it, whatever the spelling."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else ()
                base = ".".join((*above, *([module] if module else [])))
                for alias in names:
                    inner = root.joinpath(*base.split("."), alias.name)
                    is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                    yield f"{base}.{alias.name}" if is_module else base
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def forbidden(importer: str, module: str) -> bool:
    """Whether DESIGN's layers forbid that one module imports the other."""
    if importer in NUMPY_ALONE:
        return not (
            module.partition(".")[0] in sys.stdlib_module_names
            or within(module, "numpy", *NUMPY_ALONE)
        )
    if within(importer, "loader.audit") and importer not in BESIDE_THE_AUDIT:
        shared = ("loader.streams.pipeline", "loader.batching", *BESIDE_THE_AUDIT)
        if module == "loader" or within(module, *shared):
            return True
    if within(importer, "loader") and within(module, "checkpointing"):
        return True
    if within(importer, "regrain"):
        if within(module, "loader", "checkpointing") and module not in OPEN_TO_COMMANDS:
            return True
    elif within(module, "regrain", *OF_THE_COMMAND_LINE):
        return True
    if within(module, "grain"):
        return not within(importer, *RUNS_GRAIN)
    return within(module, "orbax") and importer not in OF_ORBAX


def forbidden_imports(root: Path) -> list[str]:
    """Every import under `root` that crosses the layers, as "importer -> module"."""
    return [
        f"{importer} -> {module}"
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
        for importer in [module_name(path, root)]
        for module in imports(path, root)
        if forbidden(importer, module)
    ]


def test_every_package_has_modules() -> None:
    for package in PACKAGES:
        modules = {path.name for path in (ROOT / package).glob("*.py")}
        assert "__init__.py" in modules
        assert len(modules) > 1


def test_no_import_crosses_the_layers() -> None:
    assert forbidden_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("loader/a.py", "import checkpointing.manifest", "loader.a -> checkpointing.manifest"),
        ("loader/a.py", "from checkpointing import Checkpoints", "loader.a -> checkpointing"),
        ("loader/sources/a.py", "import checkpointing", "loader.sources.a -> checkpointing"),
        ("loader/a.py", "def f():\n    import grain", "loader.a -> grain"),
        ("loader/a.py", "import importlib\nimportlib.import_module('grain')", "loader.a -> grain"),
        ("loader/__init__.py", "from grain import MapDataset", "loader -> grain"),
        ("checkpointing/checkpoints.py", "import grain", "checkpointing.checkpoints -> grain"),
        ("checkpointing/proof/drill.py", "import orbax.checkpoint as ocp", "-> orbax.checkpoint"),
        ("loader/streams/grain_chain.py", "import grain", "loader.streams.grain_chain -> grain"),
        (
            "loader/streams/pipeline.py",
            "from orbax import checkpoint",
            "loader.streams.pipeline -> orbax",
        ),
        ("loader/config.py", "import jax", "loader.config -> jax"),
        ("loader/order.py", "from loader import audit", "loader.order -> loader.audit"),
        ("loader/order.py", "from . import audit", "loader.order -> loader.audit"),
        (
            "loader/identity/fingerprint.py",
            "from ..audit import f",
            "loader.identity.fingerprint -> loader.audit",
        ),
        (
            "loader/identity/fingerprint.py",
            "from loader import Pipeline",
            "loader.identity.fingerprint -> loader",
        ),
        (
            "loader/audit.py",
            "from .streams.pipeline import Pipeline",
            "loader.audit -> loader.streams.pipeline",
        ),
        ("loader/audit.py", "from loader import Pipeline", "loader.audit -> loader"),
        ("loader/audit.py", "import loader.batching", "loader.audit -> loader.batching"),
        ("loader/a.py", "import rich.table", "loader.a -> rich.table"),
        ("checkpointing/a.py", "from regrain import cli", "checkpointing.a -> regrain"),
        ("regrain/a.py", "from loader.audit import f", "regrain.a -> loader.audit"),
        ("regrain/a.py", "import grain", "regrain.a -> grain"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, source: str, found: str) -> None:
    for name in ("loader/audit.py", "loader/streams/pipeline.py", "loader/batching.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(source, "utf-8")
    (violation,) = forbidden_imports(tmp_path)
    assert violation.endswith(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("loader/streams/pipeline.py", "import grain\nfrom loader import order, audit"),
        ("loader/sources/a.py", "from grain.sources import ArrayRecordDataSource"),
        ("loader/config.py", "import tomllib\nimport numpy as np\nfrom loader import order"),
        ("loader/audit.py", "from loader import order\nfrom loader.config import PipelineConfig"),
        ("checkpointing/arrays.py", "import orbax.checkpoint\nimport loader"),
        ("regrain/cli/a.py", "import typer\nimport loader\nfrom regrain.cli import console"),
    ],
)
def test_an_import_along_the_layers_passes(tmp_path: Path, file: str, source: str) -> None:
    for name in ("loader/audit.py", "loader/order.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(source, "utf-8")
    assert forbidden_imports(tmp_path) == []


# --- importing has no effect --------------------------------------------------------------------

PROBE = """
import json, logging, sys, threading

class Recorder(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.INFO or record.name.startswith(("loader", "checkpointing")):
            effects.append("log: " + record.getMessage())

effects = []
logging.basicConfig(level=logging.DEBUG, handlers=[Recorder()])
exec(sys.argv[1])
from absl import flags
effects += ["thread: " + t.name for t in threading.enumerate() if t is not threading.main_thread()]
effects += ["absl flags parsed"] if flags.FLAGS.is_parsed() else []
print(json.dumps(effects))
"""


def effects_of(statement: str) -> list[str]:
    """What a statement does in a fresh interpreter besides returning; warnings are errors there.

    JAX is told to use a platform that does not exist, so that starting a backend raises.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, statement],
        env=os.environ | {"JAX_PLATFORMS": "none_at_all"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return [f"exit {done.returncode}", *done.stderr.splitlines()]
    *printed, effects = done.stdout.splitlines()
    return [*json.loads(effects), *(f"stdout: {p}" for p in printed), *done.stderr.splitlines()]


@pytest.mark.processes
def test_importing_has_no_effect() -> None:
    # JAX before 0.10 says at DEBUG, when it is imported, by what it will read files.
    found = effects_of("import loader, checkpointing")
    assert [effect for effect in found if "jax._src.path" not in effect] == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("statement", "effect"),
    [
        ("import jax; jax.devices()", "none_at_all"),
        (
            "threading.Thread(target=threading.Event().wait, daemon=True, name='t').start()",
            "thread: t",
        ),
        ("logging.getLogger('loader.streams.pipeline').debug('hello')", "log: hello"),
        ("logging.getLogger('absl').warning('hello')", "log: hello"),
        ("print('hello')", "stdout: hello"),
        ("print('hello', file=sys.stderr)", "hello"),
        ("import warnings; warnings.warn('hello')", "hello"),
        ("from absl import flags; flags.FLAGS.mark_as_parsed()", "absl flags parsed"),
    ],
)
def test_a_planted_effect_is_found(statement: str, effect: str) -> None:
    assert effect in "\n".join(effects_of(statement))


# --- public names -------------------------------------------------------------------------------


def faults_of_names(module: types.ModuleType) -> list[str]:
    """Public names that are missing, listed twice, or undocumented."""
    names = list(module.__all__)
    faults = [f"{name} is listed twice" for name in sorted(set(names)) if names.count(name) > 1]
    for name in names:
        if not hasattr(module, name):
            faults.append(f"{name} does not exist")
            continue
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            doc = value.__doc__ or ""
            # A dataclass without a docstring is given its own signature.
            if not doc.strip() or doc.startswith(f"{name}("):
                faults.append(f"{name} has no docstring")
    return faults


@pytest.mark.parametrize("module", [loader, checkpointing, checkpointing.testing])
def test_every_public_name_exists_and_is_documented(module: types.ModuleType) -> None:
    assert faults_of_names(module) == []


def test_a_planted_fault_of_names_is_found() -> None:
    module = types.ModuleType("planted")
    source = """
        from dataclasses import dataclass
        __all__ = ["Bare", "Value", "f", "f", "gone"]
        class Bare: pass
        @dataclass
        class Value: x: int
        def f(): "Documented."
    """
    exec(textwrap.dedent(source), vars(module))
    assert faults_of_names(module) == [
        "f is listed twice",
        "Bare has no docstring",
        "Value has no docstring",
        "gone does not exist",
    ]


# --- the wheel ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("regrain-*.whl")
    return built


@pytest.mark.processes
def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


@pytest.mark.processes
def test_the_wheel_needs_the_four_runtime_packages_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(path).decode())
    needed = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {re.split(r"[^\w.-]", requirement)[0] for requirement in needed} == RUNTIME
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.processes
def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport loader, checkpointing, regrain\n"
    code += "print(loader.__file__, checkpointing.__file__, regrain.__file__, sep='\\n')"
    command = [sys.executable, "-c", code, str(wheel)]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert all(line.startswith(str(wheel)) for line in done.stdout.splitlines())


@pytest.mark.processes
def test_the_wheel_brings_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert "regrain = regrain.__main__:main" in archive.read(path).decode()


# --- the locks ----------------------------------------------------------------------------------

#: Which versions the tests run with: the newest, and the oldest that pyproject.toml allows.
NEWEST, LOWEST = ROOT / "requirements.lock", ROOT / "requirements-lowest.lock"
LOCKS = (NEWEST, LOWEST)
PYTHONS = ("3.11", "3.12", "3.13")
#: Extras that are left out of the locks, since set-up would install gigabytes that no test needs.
UNLOCKED = {"bench"}
LOCK_ENTRY = re.compile(r"([a-z0-9-]+)==[\w.+!]+( ; [^\\]+?)?( --hash=sha256:[0-9a-f]{64})+")

both_locks = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
each_python = pytest.mark.parametrize("python", PYTHONS)


def lock_entries(text: str) -> list[str]:
    """Logical lines of a lock, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [line for line in joined.splitlines() if line.strip()]


def unhashed(text: str) -> list[str]:
    return [entry for entry in lock_entries(text) if not LOCK_ENTRY.fullmatch(entry)]


def on_linux(python: str) -> dict[str, str]:
    """What markers of requirements are judged by."""
    return {
        "implementation_name": "cpython",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.1",
        "python_version": python,
        "sys_platform": "linux",
    }


def locked_versions(text: str, python: str) -> dict[str, Version]:
    """What a lock installs on a Python, by name."""
    entries = [Requirement(entry.partition(" --hash")[0]) for entry in lock_entries(text)]
    return {
        entry.name: Version(next(iter(entry.specifier)).version)
        for entry in entries
        if entry.marker is None or entry.marker.evaluate(on_linux(python))
    }


def asked_for(project: dict[str, Any], python: str) -> dict[str, SpecifierSet]:
    """The ranges of the direct dependencies on a Python, by name."""
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras if name not in UNLOCKED)]
    ranges: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, itertools.chain.from_iterable(groups)):
        if requirement.marker is None or requirement.marker.evaluate(on_linux(python)):
            known = ranges.get(requirement.name, SpecifierSet())
            ranges[requirement.name] = known & requirement.specifier
    return ranges


def lower_bound(versions: SpecifierSet) -> Version:
    return max(Version(one.version) for one in versions if one.operator == ">=")


def project_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def not_the_lowest(project: dict[str, Any], lock: str, python: str) -> dict[str, tuple[str, str]]:
    """Lower bounds that are not the version in a lock: by name, the bound and that version."""
    locked = locked_versions(lock, python)
    return {
        name: (str(lower_bound(versions)), str(locked[name]))
        for name, versions in asked_for(project, python).items()
        if lower_bound(versions) != locked[name]
    }


@both_locks
def test_every_entry_of_a_lock_has_hashes(lock: Path) -> None:
    text = lock.read_text("utf-8")
    assert len(lock_entries(text)) > len(RUNTIME)
    assert unhashed(text) == []


def test_a_planted_entry_without_hash_is_found() -> None:
    planted = (
        "a==1 \\\n    --hash=sha256:" + "0" * 64 + "\nb==2 ; python_version < '3'\n    # via a\n"
    )
    assert unhashed(planted) == ["b==2 ; python_version < '3'"]


@both_locks
@each_python
def test_a_lock_holds_every_direct_dependency_within_its_range(lock: Path, python: str) -> None:
    locked = locked_versions(lock.read_text("utf-8"), python)
    ranges = asked_for(project_table(), python)
    assert set(ranges) > RUNTIME
    assert {name: str(locked[name]) for name in ranges if locked[name] not in ranges[name]} == {}


@each_python
def test_lower_bounds_are_the_versions_that_the_lowest_lock_tests(python: str) -> None:
    assert not_the_lowest(project_table(), LOWEST.read_text("utf-8"), python) == {}


def test_a_planted_bound_that_nothing_tests_is_found() -> None:
    project = project_table()
    wrong = [r.replace("jax>=0.8.2", "jax>=0.8.1") for r in project["dependencies"]]
    assert wrong != project["dependencies"]
    found = not_the_lowest(
        {**project, "dependencies": wrong}, LOWEST.read_text("utf-8"), PYTHONS[0]
    )
    assert found == {"jax": ("0.8.1", "0.8.2")}


def test_pythons_are_those_that_the_classifiers_name() -> None:
    project = project_table()
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert tuple(named) == PYTHONS
    assert project["requires-python"] == f">={PYTHONS[0]}"
    assert f"pythons=({' '.join(PYTHONS)})" in (ROOT / "scripts/test_versions").read_text("utf-8")


@each_python
def test_the_page_on_versions_tells_what_the_locks_hold(python: str) -> None:
    """Rows of its table: package, the oldest version, the newest, and the range."""
    page = (ROOT / "docs/versions.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.+?) \|$", page, re.MULTILINE))
    lowest, newest = (locked_versions(lock.read_text("utf-8"), python) for lock in (LOWEST, NEWEST))
    for name in RUNTIME | {"pyarrow", "datasets", "pillow", "gcsfs"}:
        oldest, latest = rows[name].split(" | ")
        assert str(lowest[name]) in re.findall(r"[\d.]+\d", oldest), name
        assert latest == str(newest[name]), name


@both_locks
def test_a_lock_says_how_it_was_made(lock: Path) -> None:
    command = lock.read_text("utf-8").splitlines()[1].lstrip("# ")
    assert command.startswith("uv pip compile ")
    assert command in " ".join((ROOT / "CONTRIBUTING.md").read_text("utf-8").split())
    assert set(re.findall(r"--extra (\S+)", command)) == (
        set(project_table()["optional-dependencies"]) - UNLOCKED
    )


# --- the tree -----------------------------------------------------------------------------------

# Written so that no pattern matches itself.
INDEX_ADDRESS = re.compile(
    r"""
    py[p]i\.(org|io) | python[h]osted | conda\.an[a]conda
    | https?://\S*/(simple|packages)/
    | (?<!emit-)(index-u[r]l|find-l[i]nks)[ =]+['"]?(https?|file):
    | \[\[?tool\.uv\.i[n]dex
    """,
    re.VERBOSE,
)


def tracked_files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    return [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]


@pytest.mark.processes
def test_no_tracked_file_names_a_package_index() -> None:
    named = [
        name
        for name in tracked_files()
        if INDEX_ADDRESS.search((ROOT / name).read_text("utf-8", errors="ignore"))
    ]
    assert named == []


@pytest.mark.processes
def test_there_are_no_other_locks() -> None:
    locks = {name for name in tracked_files() if name.endswith(".lock")}
    assert locks <= {lock.name for lock in LOCKS}


@pytest.mark.parametrize(
    "planted",
    [
        "https://" + "py" + "pi.org/project/x",
        "--extra-index-" + "url=https://host/",
        "find-" + "links = 'file:///wheels'",
        "https://host.example/" + "simple/",
        "[[tool.uv." + "index]]",
    ],
)
def test_a_planted_index_address_is_found(planted: str) -> None:
    assert INDEX_ADDRESS.search(planted)


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    [
        *("scripts/setup", "scripts/test", "scripts/test_versions", "scripts/drill"),
        ".ci/run",
    ],
)
def test_the_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.processes
def test_setup_leaves_an_environment_that_it_has_not_made(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv").mkdir()
    for script in ("scripts/setup", "scripts/environment"):
        (tmp_path / script).write_bytes((ROOT / script).read_bytes())
    (tmp_path / "requirements.lock").write_text("")
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\nprompt = mine\n")
    command = ["bash", str(tmp_path / "scripts/setup")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert ".venv is an environment that was not made here. Move it away" in done.stderr
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["pyvenv.cfg"]


# --- the settings of these tests ----------------------------------------------------------------


def test_jax_is_strict_here() -> None:
    ones = jnp.ones((2, 3), "float32")
    with pytest.raises(ValueError, match="promotion"):
        ones + jnp.ones((2, 3), "int32")
    with pytest.raises(ValueError, match="rank_promotion"):
        ones + jnp.ones(3, "float32")


def test_warnings_are_errors_here() -> None:
    with pytest.raises(UserWarning, match="hello"):
        warnings.warn("hello", stacklevel=1)


@pytest.mark.processes
@pytest.mark.parametrize("package", ["loader", "checkpointing"])
def test_importing_leaves_the_root_logger_to_the_program(package: str) -> None:
    """Grain's import gives it a handler, after which the program's own basicConfig does nothing."""
    program = f"import logging, {package}; print(len(logging.root.handlers), logging.root.level)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "30"]
