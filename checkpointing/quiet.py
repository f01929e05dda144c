"""What the layers below say of their own work, kept from a terminal that is there for the program's.

A program that has its own lines shown, by ``logging.basicConfig(level=logging.INFO)``, is shown some fifty
lines of Orbax's for each three saves. They go through absl's one logger, which programs use too, so that it
cannot be set to a level: lines are told apart by the file that they are written in.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable
from typing import Final

#: Packages whose lines through absl's logger are not shown below WARNING.
_BELOW: Final = ("orbax", "grain", "tensorstore", "etils")
#: Loggers that belong to one of the layers, with all below them.
_OWN: Final = ("jax",)


def quiet_the_layers_below() -> None:
    """Keeps lines of Orbax, Grain, TensorStore and JAX below WARNING from being shown. Safe to call again.

    Warnings and errors come through. So does everything where the program has asked for it: by a level
    of its own on the logger (``logging.getLogger("absl").setLevel(logging.INFO)``), before this or later, or
    by the level DEBUG on the root logger.
    """
    absl = logging.getLogger("absl")
    if not any(isinstance(one, _LayersBelow) for one in absl.filters):
        absl.addFilter(_LayersBelow(absl))
    for name in _OWN:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET and logger.getEffectiveLevel() > logging.DEBUG:
            logger.setLevel(logging.WARNING)


class _LayersBelow(logging.Filter):
    """Drops what packages below say through a logger that is not theirs alone."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._folders = tuple(
            os.path.join(folder, "")  # noqa: PTH118 (a text, with a separator at its end)
            for name in _BELOW
            for folder in _folders_of(name)
        )

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        return (
            record.levelno >= logging.WARNING
            or not record.pathname.startswith(self._folders)
            or self._logger.level != logging.NOTSET
            or self._logger.getEffectiveLevel() <= logging.DEBUG
        )


def _folders_of(package: str) -> Iterable[str]:
    """Where the files of a package are; nowhere, if there is none, or one that a program has put together."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return ()
    return spec.submodule_search_locations or () if spec is not None else ()
