"""Keep the messages of the layers below off the terminal.

Under ``logging.basicConfig(level=logging.INFO)``, three saves print about fifty lines of Orbax. They go
through absl's logger, which programs use too, so the file that wrote a line decides. After a failed save,
which raises its own error, Orbax and its event loops print the same error up to three times more.
"""

import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Final

#: Packages whose lines through absl's logger are not shown below WARNING.
_BELOW: Final = ("orbax", "grain", "tensorstore", "etils")
#: Errors of an event loop that is closed, or was closed half made.
_OF_CLOSED_LOOPS: Final = ("Event loop is closed", "Invalid file descriptor: -1")
#: Loggers that belong to one of the layers, with all below them.
_OWN: Final = ("jax",)


def quiet_the_layers_below() -> None:
    """Hide lines of Orbax, Grain, TensorStore and JAX below WARNING. Safe to call again.

    Warnings and errors are shown, except for repetitions of a failed save's error. A level set on the
    logger (``logging.getLogger("absl").setLevel(logging.INFO)``), or DEBUG on the root logger, shows all.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, _LayersBelow) for one in logger.filters):
            logger.addFilter(_LayersBelow(logger))
    _hide_closed_loops()
    for name in _OWN:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET and logger.getEffectiveLevel() > logging.DEBUG:
            logger.setLevel(logging.WARNING)


class _LayersBelow(logging.Filter):
    """Drops lines of the packages below from a logger that programs share with them."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._folders = tuple(
            os.path.join(folder, "")  # noqa: PTH118 (a text, with a separator at its end)
            for name in _BELOW
            for folder in _folders_of(name)
        )

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        if (
            self._logger.level != logging.NOTSET
            or self._logger.getEffectiveLevel() <= logging.DEBUG
        ):
            return True
        if record.levelno < logging.WARNING:
            return not record.pathname.startswith(self._folders)
        # The save raises the error of a thread of Orbax, and of a write that nobody awaits any more.
        if "_SignalingThread.run() raised" in str(record.msg):
            return False
        error = record.exc_info[1] if record.exc_info else None
        return "was never retrieved" not in str(record.msg) or not self._is_below(error)

    def _is_below(self, error: BaseException | None) -> bool:
        frames = traceback.walk_tb(error.__traceback__ if error else None)
        return any(frame.f_code.co_filename.startswith(self._folders) for frame, _ in frames)


def _hide_closed_loops() -> None:
    """Hide errors of event loops that a failed save has closed while TensorStore was still writing."""
    show = sys.unraisablehook
    if getattr(show, "is_of_closed_loops", False):
        return

    def show_others(unraisable: "sys.UnraisableHookArgs") -> None:
        text = str(unraisable.exc_value)
        frames = traceback.walk_tb(unraisable.exc_traceback)
        is_of_a_loop = any("asyncio" in frame.f_code.co_filename for frame, _ in frames)
        if not (text in _OF_CLOSED_LOOPS and is_of_a_loop):
            show(unraisable)

    show_others.is_of_closed_loops = True  # type: ignore[attr-defined]
    sys.unraisablehook = show_others


def _folders_of(package: str) -> Iterable[str]:
    """Return the folders of a package; none if it is absent or was put together by the program."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return ()
    return spec.submodule_search_locations or () if spec is not None else ()
