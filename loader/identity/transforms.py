"""By what a transform is known to a checkpoint: a name, a version and plain arguments, never its code."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loader.identity.fingerprint import dataset_digest


def transform_identity(transform: Callable[..., Any] | None) -> dict[str, str] | None:
    """Name and version of a transform, as a manifest holds them.

    The name is that of the function, or of the class of a callable object; a `functools.partial`
    adds its arguments: arrays by their digest, functions by their name. The version is the attribute
    ``version``, if there is one.

    Raises:
      TypeError: a partial's argument cannot be told from others of its kind.
    """
    if transform is None:
        return None
    version = str(getattr(transform, "version", ""))
    arguments = []
    while isinstance(transform, functools.partial):
        arguments += [_argument(value) for value in transform.args]
        arguments += [
            f"{name}={_argument(value)}" for name, value in sorted(transform.keywords.items())
        ]
        version = version or str(getattr(transform.func, "version", ""))
        transform = transform.func
    name = getattr(transform, "__qualname__", type(transform).__qualname__)
    return {"name": name + (f"({', '.join(arguments)})" if arguments else ""), "version": version}


def _argument(value: Any) -> str:
    """A text that is the same for equal arguments in every process, and for no others."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_argument, value))})"
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        entries = (f"{name}: {_argument(value[name])}" for name in sorted(value))
        return f"{{{', '.join(entries)}}}"
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} sha256:{dataset_digest(array)[:12]}"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    raise TypeError(
        f"the transform is a partial with the argument {value!r:.60} of type {type(value).__name__}, by "
        "which it could not be recognised at a resume; use a function of its own, with a version"
    )
