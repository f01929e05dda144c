"""By what a transform is known: its name, its version, and what the arguments of a partial hold."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from loader.identity.values import transform_identity


def double(batch: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    return {"x": batch["x"] * 2}


class Scale:
    def __init__(self, version: Any = None) -> None:
        if version is not None:
            self.version = version

    def __call__(self, *given: Any, **_: Any) -> dict[str, Any]:
        return {"x": given[-1]["x"]}


def test_a_transform_is_known_by_its_name_and_version() -> None:
    assert transform_identity(None) is None
    assert transform_identity(double) == {"name": "double", "version": ""}
    assert transform_identity(Scale()) == {"name": "Scale", "version": ""}
    assert transform_identity(Scale(2)) == {"name": "Scale", "version": "2"}
    assert transform_identity(Scale(version="2a")) != transform_identity(Scale(2))
    assert transform_identity(functools.partial(Scale(7), 1, b=[2])) == {
        "name": "Scale(1, b=list(2))",
        "version": "7",
    }
    assert transform_identity(functools.partial(double, a=1)) != transform_identity(
        functools.partial(double, a=2)
    )


class Holding(Scale):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def _module_level(batch: Any) -> Any:
    return batch


def test_a_partial_is_known_by_what_its_arguments_hold() -> None:
    def name(**arguments: Any) -> str:
        identity = transform_identity(functools.partial(_module_level, **arguments))
        assert identity is not None
        return identity["name"]

    large = np.arange(3000.0)
    other = large.copy()
    other[1500] += 1e-9
    assert name(k=large) == name(k=large.copy()) != name(k=other)
    assert name(f=_module_level) == "_module_level(f=_module_level)"
    assert name(k={"b": 1, "a": (2, "x")}) == name(k={"a": (2, "x"), "b": 1})
    assert name(k=np.dtype("f4")) != name(k=np.dtype("f8"))
    assert name(k=np.zeros(1 << 27, np.uint8)) != name(k=np.ones(1 << 27, np.uint8))
    for unknown in (object(), [object()], [Holding(object())]):
        with pytest.raises(TypeError, match="could not be recognised at a resume"):
            name(k=unknown)
