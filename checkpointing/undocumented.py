"""The two names that no library documents and a checkpoint cannot do without; a test of each fails if it goes."""

import threading
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp


def before_pools_stop(work: Callable[[], None]) -> None:
    """Call ``work`` when the interpreter begins to exit, while thread pools still take work.

    Orbax writes with thread pools. The standard library stops them before it joins threads and before it
    runs `atexit`, so that a save which ends in either of those fails. Pools use this hook themselves.
    """
    threading._register_atexit(work)  # type: ignore[attr-defined]  # noqa: SLF001


def coordination_client() -> Any:
    """Return the client of JAX's coordination service, which every process of `jax.distributed` has.

    What JAX and Orbax document over it waits without a limit, or reports no reason of another process.
    """
    return ocp.multihost.get_jax_distributed_client()
