"""A training loop whose step takes 2 ms, and how much longer a loader makes it."""

import time
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from scripts.benchmarks.workloads import Batch

STEP_SECONDS: Final = 0.002
#: A product of so small matrices stays in one thread, and leaves other cores to the loader.
_SIZE: Final = 64
_TRIED_TURNS: Final = 200
_TRIALS: Final = 50


@jax.jit
def step(state: jax.Array, batch: dict[str, jax.Array], turns: int) -> jax.Array:
    """Reads the whole batch, then computes for as long as ``turns`` says: state f32[64, 64]."""
    mean = jnp.mean(batch["image"], dtype=jnp.float32)

    def turn(_: int, value: jax.Array) -> jax.Array:
        return jnp.tanh(value @ value * 0.01 + mean)

    end: jax.Array = jax.lax.fori_loop(0, turns, turn, state)
    return end


class Trainer:
    """Trains on batches, on the first device that JAX has."""

    def __init__(self) -> None:
        self.device = jax.devices()[0]
        self._state = jax.device_put(jnp.ones((_SIZE, _SIZE), jnp.float32), self.device)

    def window(self, batches: Iterator[Batch], steps: int, turns: int | None) -> dict[str, float]:
        """Three loops of ``steps`` steps: over one batch, over batches awaited, over batches ahead.

        Args:
          batches: what feeds the second and the third loop.
          steps: of each loop.
          turns: of each step; ``None``: as many as take 2 ms, which are looked for first.

        Returns:
          ``turns`` and ``steps``; in seconds: ``alone``, the loop over one batch that is on the device;
          ``awaited``, the loop that waits for each step before it asks for a batch, and ``wait``, how
          long it then waited until that was on the device; ``ahead``, the loop that asks for a batch
          while the step before is computed, and waits for the step before that.
        """
        batch = self._on_device(next(batches))
        turns = self._calibrated(batch) if turns is None else turns
        self._ahead(iter([batch] * 3), 3, turns)
        alone = self._ahead(iter([batch] * steps), steps, turns)
        awaited, wait = self._awaited(batches, steps, turns)
        ahead = self._ahead(batches, steps, turns)
        return {
            "turns": turns,
            "steps": steps,
            "alone": alone,
            "awaited": awaited,
            "wait": wait,
            "ahead": ahead,
        }

    def _calibrated(self, batch: dict[str, jax.Array]) -> int:
        """Turns that make a step of 2 ms."""
        step(self._state, batch, _TRIED_TURNS).block_until_ready()
        seconds = [self._ahead(iter([batch]), 1, _TRIED_TURNS) for _ in range(_TRIALS)]
        base = [self._ahead(iter([batch]), 1, 0) for _ in range(_TRIALS)]
        least = float(np.median(base))
        each = (float(np.median(seconds)) - least) / _TRIED_TURNS
        return max(1, round((STEP_SECONDS - least) / each))

    def _on_device(self, batch: Batch) -> dict[str, jax.Array]:
        """The fields on the device; who has put them there already pays nothing here."""
        image: Any = batch["image"]
        if isinstance(image, jax.Array):
            return {"image": image, "label": batch["label"]}
        moved: dict[str, jax.Array] = jax.device_put(
            {"image": np.asarray(image), "label": np.asarray(batch["label"])}, self.device
        )
        return moved

    def _awaited(self, batches: Iterator[Batch], steps: int, turns: int) -> tuple[float, float]:
        state, wait = self._state, 0.0
        start = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = jax.block_until_ready(self._on_device(next(batches)))
            wait += time.perf_counter() - asked
            state = step(state, batch, turns).block_until_ready()
        return time.perf_counter() - start, wait

    def _ahead(self, batches: Iterator[Batch], steps: int, turns: int) -> float:
        state = before = self._state
        start = time.perf_counter()
        for _ in range(steps):
            before, state = state, step(state, self._on_device(next(batches)), turns)
            before.block_until_ready()
        state.block_until_ready()
        return time.perf_counter() - start
