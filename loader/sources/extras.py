"""Packages that one format alone needs: imported when it is used, and named where they are missing."""

import importlib
from typing import Any


def needed(module: str, extra: str) -> Any:
    """Imports a module that one of the project's extras brings.

    Raises:
      ModuleNotFoundError: it is not there; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs the package {module.partition('.')[0]}, which is not installed: "
            f"pip install '.[{extra}]' in a checkout of regrain",
            name=error.name,
        ) from error
