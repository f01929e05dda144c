"""Where a command's records come from: a function of the user's, or data to try commands on."""

import importlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import loader
from loader.sources.source_or_stream import source_within


def made_by(option: str, text: str) -> Any:
    """What ``module:function`` returns; modules are found as by Python in the current folder.

    Args:
      option: that was given, for messages.
      text: its value.

    Raises:
      ValueError: there is no such module or function, or it fails.
    """
    module, _, function = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(
            f"{option} takes MODULE:FUNCTION, such as my_data:my_source, not {text!r:.80}"
        )
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (a string, as all of sys.path)
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), function)()
    except (
        Exception,
        SystemExit,
    ) as error:  # whose exit code would be taken for the command's answer
        raise ValueError(f"{option} {text}: {type(error).__name__}: {error}") from error


def source_of(text: str) -> loader.RecordSource:
    """The source that ``module:function`` returns.

    Raises:
      ValueError: as `made_by`; or it returns no source.
    """
    source = made_by("--source", text)
    within = source_within(source)
    if within is not None or not isinstance(source, loader.RecordSource):
        instead = (
            f"return {within}"
            if within is not None
            else "arrays are one as loader.ArraySource, a sequence as loader.SequenceSource"
        )
        raise ValueError(
            f"--source {text} returns a {type(source).__name__}, which is no source of records "
            f"(loader.RecordSource): {instead}"
        )
    checked: loader.RecordSource = source
    return checked


def opened_by(
    open_data: Callable[[pathlib.Path], loader.RecordSource],
    what: str,
    data: pathlib.Path | None,
    source: str | None,
    *,
    with_digits: bool,
) -> loader.RecordSource:
    """The one source that a command names: data, ``--source`` or ``--digits``.

    Args:
      open_data: opens the data.
      what: may be given as the data, for messages.
      data: a file or folder.
      source: ``module:function``.
      with_digits: whether ``--digits`` is given.

    Raises:
      OSError, TypeError, ValueError: none is named, or more than one, or it cannot be opened.
    """
    if (data is not None) + (source is not None) + with_digits != 1:
        raise ValueError(f"name one source: {what}, or --digits, or --source")
    if source is not None:
        return source_of(source)
    return digits() if data is None else open_data(data)


def digits() -> loader.ArraySource:
    """Scikit-learn's images, uint8[1797, 8, 8], and their labels; a record's ID is its number."""
    from sklearn.datasets import load_digits

    data = load_digits()
    fields = {"image": data.images.astype(np.uint8), "label": data.target.astype(np.int32)}
    return loader.ArraySource(fields, ids=np.arange(len(data.images)))


def lesson() -> loader.ArraySource:
    """The lesson's eleven records: x = ID / 10 and y = 2 x - 1."""
    x = (np.arange(11) / 10).astype(np.float32)
    return loader.ArraySource({"x": x, "y": 2 * x - 1})
