"""Checks of arguments, shared by everything that takes them."""

import operator
from typing import Any

import numpy as np


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as an int.

    Args:
      name: the argument, as the user wrote it.
      value: any kind of integer; booleans are refused.
      low: the least value allowed.
      high: the greatest value allowed.

    Raises:
      TypeError: ``value`` is not an integer.
      ValueError: it is out of range.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r:.80}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"{low} to {power(high)}"
        raise ValueError(f"{name} must be {bounds}, not {number}")
    return number


def power(number: int) -> str:
    """Return a large number as text, by its power of two if it is one, or one less."""
    for exact, suffix in ((number, ""), (number + 1, " - 1")):
        if exact >= 1 << 31 and exact & (exact - 1) == 0:
            return f"2**{exact.bit_length() - 1}{suffix}"
    return str(number)
