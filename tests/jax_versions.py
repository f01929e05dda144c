"""What tests ask of JAX that some of its supported versions lack."""

from typing import Final

import jax

#: By which keys can be made; the last three have come after JAX 0.10.0.
PRNG_IMPLEMENTATIONS: Final = (
    *("threefry2x32", "rbg", "unsafe_rbg"),
    *("philox2x32", "philox4x32", "threefry4x32"),
)


def has_prng(name: str) -> bool:
    """Whether this JAX has an implementation of keys."""
    try:
        jax.random.key(0, impl=name)
    except ValueError:
        return False
    return True
