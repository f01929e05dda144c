"""SplitMix64 as its authors have it."""

import numpy as np

from loader.splitmix import GOLDEN, mix, word


def test_it_is_the_generator_of_the_paper() -> None:
    """The first numbers from seed 1234567, as the authors' C code prints them."""
    words = np.arange(1, 6, dtype=np.uint64) * GOLDEN + word(1234567)
    mix(words)
    assert words.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_bits_are_flipped_between_the_halves() -> None:
    words = np.arange(100, dtype=np.uint64)
    plain, flipped = words.copy(), words.copy()
    mix(plain)
    mix(flipped, word(1))
    assert not np.any(plain == flipped)
    assert len(np.unique(flipped)) == 100
