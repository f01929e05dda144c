"""The one import: every public name of the layers `loader` and `checkpointing`.

Names are imported on first use, so `import regrain` alone costs nothing.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointing import *  # noqa: F403
    from loader import *  # type: ignore[no-redef]  # noqa: F403  (`checkpointing.provenance` takes streams too)

_LAYERS = ("loader", "checkpointing")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({public for layer in _layers() for public in layer.__all__})
    if name == "testing":
        return importlib.import_module("regrain.testing")
    if not name.startswith("_"):
        # Checkpointing first: a name in both layers does more there.
        for layer in reversed(_layers()):
            if name in layer.__all__:
                return getattr(layer, name)
    raise AttributeError(f"module 'regrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__"), "testing"]


def _layers() -> list[ModuleType]:
    for name in _LAYERS:
        _check_not_hidden(name)
    return [importlib.import_module(name) for name in _LAYERS]


def _check_not_hidden(name: str) -> None:
    """Raise ImportError if another module called ``name`` comes first on the path."""
    ours = Path(__file__).parent.parent / name
    known = sys.modules.get(name)
    spec = known.__spec__ if known else importlib.util.find_spec(name)
    found = getattr(known, "__file__", None) or (spec.origin if spec else None)
    if found is None or Path(found).resolve().parent != ours.resolve():
        raise ImportError(
            f"regrain needs its package {name!r} in {ours}, but Python finds {found or 'none'} first. "
            f"Rename that file or folder, or start Python where it is not on the path.",
            name=name,
            path=found,
        )
