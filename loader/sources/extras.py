"""Optional packages: import one where it is used, and name the extra that installs it."""

import importlib
from typing import Any, Final

#: The extra that installs a package, by the name of its module.
EXTRAS: Final = {
    "matplotlib": "cli",
    "pyarrow": "parquet",
    "datasets": "huggingface",
    "PIL": "images",
    "sklearn": "examples",
    "gcsfs": "gcs",
}


def missing(module: str, extra: str) -> str:
    """The message for a package that is not installed."""
    package = module.partition(".")[0]
    return f"the package {package} is not installed: pip install 'regrain[{extra}]'"


def needed(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Raises:
      ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing(module, extra), name=error.name) from error
