"""Texts of a name and a number, such as ``train/0001.parquet:17``: few names, any number of numbers."""

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Texts = npt.NDArray[np.str_]

_DIGITS: Final = 4  # that are made into text in one look at a table
_BASE: Final = 10**_DIGITS
_MAX_HEADS: Final = 1 << 16


class NumberedNames:
    """Makes ``name:number`` for each of some numbers, a whole batch at once.

    What stands before a number's last four digits is made once for all numbers that have it in common:
    a batch then looks up both and puts them together. Where there would be more than 2**16 of these
    heads, they stand before the last eight digits, or twelve.

    Args:
      names: what comes before the colon.
      counts: ``int64[len(names)]``, at least 1: with each name go the numbers from 0 to one less.
    """

    def __init__(self, names: Sequence[str], counts: Int64) -> None:
        self._groups = 1
        while _num_heads(counts, _BASE**self._groups).sum() > max(_MAX_HEADS, len(names)):
            self._groups += 1
        self._span = _BASE**self._groups
        heads = _num_heads(counts, self._span)
        self._firsts = np.cumsum(heads) - heads
        above = np.arange(heads.sum()) - self._firsts.repeat(heads)
        texts = np.array([f"{name}:" for name in names], np.str_).repeat(heads)
        self._heads: Texts = np.where(above == 0, texts, _with_digits(texts, above, 5))
        #: What is taken from a number leaves its last digits, and in front of them a 1 if there are others.
        self._shifts = np.maximum(above - 1, 0) * self._span

    def __call__(self, names: Int64, numbers: Int64) -> Texts:
        """``str[k]`` of the names at ``names: int64[k]`` and ``numbers: int64[k]``."""
        heads = numbers // self._span
        if len(self._firsts) > 1:
            heads += self._firsts.take(names)
        return _with_digits(
            self._heads.take(heads), numbers - self._shifts.take(heads), self._groups
        )


def _num_heads(counts: Int64, span: int) -> Int64:
    heads: Int64 = (counts - 1) // span + 1
    return heads


def _with_digits(texts: Texts, numbers: Int64, groups: int) -> Texts:
    """Puts the last ``4 * groups`` digits of ``numbers: int64[k]`` to ``texts: str[k]``.

    They keep the zeros in front where the number has a digit more, 1, and have none where it has not.
    """
    inner, last = _tables()
    for group in reversed(range(groups)):
        found = numbers // _BASE**group if group else numbers
        if group < groups - 1:
            found = np.minimum(found, found % _BASE + _BASE)
        texts = np.strings.add(texts, (inner if group else last).take(found))
    return texts


@functools.cache
def _tables() -> tuple[Texts, Texts]:
    """Texts of all groups of digits: those that others follow, and the last of a number.

    At ``digits`` stands what begins a number, and at ``digits + 10**4`` what comes behind other digits.
    """
    alone = [str(number) for number in range(_BASE)]
    padded = [text.zfill(_DIGITS) for text in alone]
    return np.array(["", *alone[1:], *padded]), np.array(alone + padded)
