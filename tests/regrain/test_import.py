"""`import regrain` is the one import: every public name, on first use, and only ours."""

import subprocess
import sys
from pathlib import Path

import pytest

import checkpointing
import checkpointing.testing
import loader
import regrain
import regrain.testing

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, *, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds modules in ``folder`` first."""
    (folder / "script.py").write_text(f"import sys; sys.path.append({str(ROOT)!r})\n{code}")
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_regrain_has_each_public_name_of_its_layers() -> None:
    assert set(regrain.__all__) == {*loader.__all__, *checkpointing.__all__}
    for name in regrain.__all__:
        layer = checkpointing if name in checkpointing.__all__ else loader
        assert getattr(regrain, name) is getattr(layer, name)
    assert regrain.testing is sys.modules["regrain.testing"]
    assert regrain.testing.__all__ == checkpointing.testing.__all__
    assert set(dir(regrain)) >= {*regrain.__all__, "testing"}


def test_other_names_are_absent() -> None:
    for name in ("Pipelin", "_names", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"'regrain' has no attribute '{name}'"):
            getattr(regrain, name)


def test_names_are_imported_on_first_use(tmp_path: Path) -> None:
    code = "import regrain\nassert 'jax' not in sys.modules\nregrain.Pipeline\nassert 'jax' in sys.modules"
    done = run(code, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["loader", "checkpointing"])
@pytest.mark.parametrize("first", ["import regrain", "import {name}, regrain"])
def test_a_module_that_hides_a_layer_is_named(name: str, first: str, tmp_path: Path) -> None:
    hiding = tmp_path / f"{name}.py"
    hiding.write_text("Pipeline = 'of someone else'\n")
    done = run(f"{first.format(name=name)}\nprint(regrain.Pipeline)", folder=tmp_path)
    assert done.returncode == 1
    assert f"ImportError: regrain needs its package '{name}'" in done.stderr
    assert f"but Python finds {hiding} first" in done.stderr


def test_a_folder_without_code_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "loader").mkdir()
    done = run("import regrain\nprint(regrain.Pipeline.__name__)", folder=tmp_path)
    assert (done.stdout, done.stderr) == ("Pipeline\n", "")
