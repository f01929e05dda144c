"""SplitMix64's arithmetic on 64-bit words: integers only, so that no library upgrade can change it.

The order and the record keys are built on it, each with its own version. A change here changes both.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
from numpy import bitwise_xor, multiply, right_shift

Words = npt.NDArray[np.uint64]


def word(value: int | np.uint64) -> Words:
    """Return uint64[()], which NumPy handles in half the time of a scalar."""
    return np.array(value, np.uint64)


# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of
# Stafford's mix 13: the increment, and the multipliers and shifts of the finaliser.
GOLDEN: Final = word(0x9E3779B97F4A7C15)
MIX_1: Final = word(0xBF58476D1CE4E5B9)
_MIX_2: Final = word(0x94D049BB133111EB)
_U27, _U30, _U31 = word(27), word(30), word(31)
_NONE: Final = word(0)


def mix(words: Words, flipped: Words = _NONE) -> None:
    """Apply the finaliser in place: a bijection in which every output bit depends on every input bit.

    Args:
      words: uint64[...].
      flipped: uint64[()], the bits to flip between its two halves.
    """
    shifted = right_shift(words, _U30)
    bitwise_xor(words, shifted, words)
    multiply(words, MIX_1, words)
    right_shift(words, _U27, shifted)
    bitwise_xor(words, shifted, words)
    bitwise_xor(words, flipped, words)
    multiply(words, _MIX_2, words)
    right_shift(words, _U31, shifted)
    bitwise_xor(words, shifted, words)
