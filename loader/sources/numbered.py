"""Texts of a name and a number, such as ``train/0001.parquet:17``: few names, any number of numbers."""

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Texts = npt.NDArray[np.str_]

#: As many digits are made into text in one look at a table.
_FEW_DIGITS: Final = 3
_DIGITS: Final = 4
_FEW_HEADS: Final = 1 << 10
_MAX_HEADS: Final = 1 << 16
_INT64_DIGITS: Final = 19


class NumberedNames:
    """Makes ``name:number`` for each of some numbers, a whole batch at once.

    What stands before a number's last digits is made once for all numbers that have it in common: a
    batch then looks up this head and the digits, and puts them together. Digits are three or four, so
    that neither table is larger than what a core has at hand; where there would be more than 2**16
    heads, they are several times four, looked up four by four.

    Args:
      names: what comes before the colon.
      counts: ``int64[len(names)]``, at least 1: with each name go the numbers from 0 to one less.
    """

    def __init__(self, names: Sequence[str], counts: Int64) -> None:
        few = _num_heads(counts, 10**_FEW_DIGITS).sum() <= _FEW_HEADS
        self._digits, self._groups = _FEW_DIGITS if few else _DIGITS, 1
        while _num_heads(counts, 10 ** (self._digits * self._groups)).sum() > max(
            _MAX_HEADS, len(names)
        ):
            self._groups += 1
        self._span = 10 ** (self._digits * self._groups)
        heads = _num_heads(counts, self._span)
        self._firsts = np.cumsum(heads) - heads
        above = np.arange(heads.sum()) - self._firsts.repeat(heads)
        texts = np.array([f"{name}:" for name in names], np.str_).repeat(heads)
        longer = _with_digits(texts, above, _DIGITS, -(-_INT64_DIGITS // _DIGITS))
        whole = np.where(above == 0, texts, longer)
        self._heads: Texts = whole.astype(f"U{np.strings.str_len(whole).max()}")
        #: What is taken from a number leaves its last digits, and in front of them a 1 if there are others.
        self._shifts = np.maximum(above - 1, 0) * self._span

    def __call__(self, names: Int64, numbers: Int64) -> Texts:
        """``str[k]`` of the names at ``names: int64[k]`` and ``numbers: int64[k]``."""
        heads = numbers // self._span
        if len(self._firsts) > 1:
            heads += self._firsts.take(names)
        rest = numbers - self._shifts.take(heads)
        return _with_digits(self._heads.take(heads), rest, self._digits, self._groups)


def _num_heads(counts: Int64, span: int) -> Int64:
    heads: Int64 = (counts - 1) // span + 1
    return heads


def _with_digits(texts: Texts, numbers: Int64, digits: int, groups: int) -> Texts:
    """Puts the last ``digits * groups`` digits of ``numbers: int64[k]`` to ``texts: str[k]``.

    They keep the zeros in front where the number has one digit more, 1, and have none where it has not.
    """
    inner, last = _tables(digits)
    base = 10**digits
    for group in reversed(range(groups)):
        found = numbers // base**group if group else numbers
        if group < groups - 1:  # with a 1 in front where any other digits are there
            found = np.minimum(found, found % base + base)
        texts = np.strings.add(texts, (inner if group else last).take(found))
    return texts


@functools.cache
def _tables(digits: int) -> tuple[Texts, Texts]:
    """Texts of all groups of some digits: those that others follow, and the last of a number.

    At ``n`` stands how a number begins with these digits, and at ``n + 10**digits`` how it goes on with them.
    """
    alone = [str(number) for number in range(10**digits)]
    padded = [text.zfill(digits) for text in alone]
    return np.array(["", *alone[1:], *padded]), np.array(alone + padded)
