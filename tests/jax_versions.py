"""What tests ask of JAX that its supported versions name differently, or that some of them lack."""

from typing import Any, Final

import jax

#: By which keys can be made; the last three have come after JAX 0.6.
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


def enable_x64(enabled: bool) -> Any:
    """The context of 64 bits, `jax.enable_x64`; before it, that of ``jax.experimental``."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    from jax.experimental import enable_x64 as before  # type: ignore[attr-defined]

    return before(enabled)
