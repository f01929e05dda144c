"""Small runs whose checkpoints are kept in tests/data, as the oldest supported packages wrote them.

    .cache/versions/3.11-lowest/bin/python -m tests.old_checkpoints

writes those of the packages that it runs with into a folder named by them. scripts/test_versions makes that
environment. A run is stopped after `STOPPED` batches; beside its directory, expected.json has the train state
that it saved there, and what each of the batches that follow held.
"""

import importlib.metadata
import itertools
import json
import logging
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np

import checkpointing
import loader
from checkpointing.train_state import leaves_by_path

DATA: Final = pathlib.Path(__file__).parent / "data"
EXPECTED: Final = "expected.json"
PACKAGES: Final = ("grain", "jax", "numpy", "orbax-checkpoint")
STOPPED: Final = 3
FOLLOWING: Final = 7
RUN_CONFIG: Final = {"lr": 0.1, "layers": [4, 2], "name": "ü"}


class OldRun(NamedTuple):
    """What a kept run is made of: the same things then and now."""

    stream: Callable[[], Any]
    train_state: Callable[[], Any]


def halved(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**batch, "x": batch["x"] / 2}


halved.version = "3"  # type: ignore[attr-defined]


def integers() -> loader.Pipeline:
    """IDs that need 64 bits, keys of records, padding, our own order."""
    source = loader.ArraySource(
        {
            "x": np.arange(22, dtype=np.float32).reshape(11, 2) / 7,
            "label": np.arange(11, dtype=np.int8),
        },
        ids=np.arange(11) * 3 + 2**60,
    )
    return loader.Pipeline(
        source,
        loader.PipelineConfig(
            4, 17, final_batch="pad", num_epochs=None, record_keys=True, exclude=(2**60 + 9,)
        ),
    )


def strings() -> loader.Pipeline:
    """IDs of many widths, a transform, shorter last batches, NumPy's order."""
    source = loader.ArraySource(
        {"x": np.arange(10.0)}, ids=[f"r{'ü' * (row % 4)}{row}" for row in range(10)]
    )
    return loader.Pipeline(
        source,
        loader.PipelineConfig(
            4, 2**32 - 1, final_batch="partial", num_epochs=None, shuffle="permutation"
        ),
        halved,
    )


def a_part(seed: int, count: int) -> loader.Pipeline:
    source = loader.ArraySource({"x": np.arange(count, dtype=np.uint16)})
    config = loader.PipelineConfig(3, seed, final_batch="drop", num_epochs=None)
    return loader.Pipeline(source, config)


def mixture() -> loader.Mixture:
    parts = {"web": a_part(1, 20), "code": a_part(2, 7)}
    return loader.Mixture(parts, weights={"web": 0.7, "code": 0.3})


def chain() -> loader.GrainStream:
    records = [{"id": row, "x": row / 8} for row in range(13)]
    return loader.GrainStream(
        grain.MapDataset.source(records).shuffle(seed=5).repeat(3).batch(3),
        fingerprint=loader.fingerprint(loader.SequenceSource(records, ids="id")),
        config={"kept": True},
    )


def every_kind() -> Any:
    """Leaves of every kind that train states have."""
    return {
        "params": {
            "f32": jnp.asarray(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)),
            "bf16": jnp.asarray(np.arange(-2, 3) / 3, jnp.bfloat16),
            "f16": jnp.asarray([np.nan, np.inf, -0.0], jnp.float16),
            "f8": jnp.asarray([0.5, -448.0], jnp.float8_e4m3fn),
            "c64": jnp.asarray([1 - 2j], jnp.complex64),
        },
        "opt": (
            jnp.asarray([-7, 7], jnp.int8),
            [jnp.asarray([2**32 - 1], jnp.uint32), jnp.asarray([True, False])],
            jnp.zeros((0, 2), jnp.float32),
        ),
        "weak": jnp.asarray(2.5),
        "numpy": np.array([1 / 3, 5e-324]),
        "numpy scalar": np.int64(-(2**62)),
        "rate": 0.1,
        "count": 2**40,
        "done": False,
        "key": jax.random.key(7, impl="threefry2x32"),
        "keys": jax.random.wrap_key_data(jnp.arange(8, dtype=jnp.uint32).reshape(2, 4), impl="rbg"),
        "raw key": jnp.asarray([1, 2], jnp.uint32),
        "step": jnp.asarray(STOPPED, jnp.int32),
    }


def weights() -> Any:
    return {"w": jnp.arange(4, dtype=jnp.float32), "key": jax.random.key(7, impl="threefry2x32")}


RUNS: Final = {
    "integers": OldRun(integers, every_kind),
    "strings": OldRun(strings, weights),
    "mixture": OldRun(mixture, weights),
    "chain": OldRun(chain, weights),
}


def versions() -> dict[str, str]:
    """Of the packages at hand."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def told(array: Any) -> dict[str, Any]:
    """An array or number to its last bit, as JSON."""
    kind = type(array).__name__
    if jnp.issubdtype(getattr(array, "dtype", np.dtype(bool)), jax.dtypes.prng_key):
        kind, array = f"key {jax.random.key_impl(array)}", jax.random.key_data(array)
    elif isinstance(array, jax.Array):
        kind = "weak jax.Array" if array.weak_type else "jax.Array"
    values = np.asarray(array)
    values = values.astype(values.dtype.newbyteorder("<"))
    return {
        "kind": kind,
        "dtype": str(values.dtype).lstrip("<"),
        "shape": list(values.shape),
        "bytes": values.tobytes().hex(),
    }


def told_state(train_state: Any) -> dict[str, Any]:
    return {path: told(leaf) for path, leaf in leaves_by_path(train_state).items()}


def told_batches(batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `FOLLOWING` batches hold; their IDs once more, to be read by people."""
    some = list(itertools.islice(batches, FOLLOWING))
    return [
        {
            "ids": batch["id"].tolist(),
            **{name: told(np.asarray(array)) for name, array in batch.items()},
        }
        for batch in some
    ]


def write(folder: pathlib.Path, run: OldRun) -> None:
    """Trains a run up to where it is stopped, and tells what would have followed."""
    state = run.train_state()
    # Not a step of its own before the first batch: the state of a new run is at step 0.
    start = {**state, "step": jnp.zeros((), jnp.int32)} if "step" in state else state
    options: dict[str, Any] = {"save_every": STOPPED, "keep": 1, "run_config": RUN_CONFIG}
    with checkpointing.Checkpoints(folder / "run", run.stream(), **options) as checkpoints:
        batches = checkpoints.resume(start).batches
        for _ in range(STOPPED):
            next(batches)
        checkpoints.save(batches, state)
        checkpoints.wait()
        expected = {
            "packages": versions(),
            "train_state": told_state(state),
            "batches": told_batches(batches),
        }
    (folder / "run" / ".lock").unlink()  # of the process that wrote it
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n", "utf-8")


def main() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    name = "_".join(f"{package.partition('-')[0]}-{one}" for package, one in versions().items())
    folder = DATA / name
    if folder.exists():
        sys.exit(f"{folder} is there already, and what it holds stays")
    for run_name, run in RUNS.items():
        write(folder / run_name, run)
    print(folder)  # noqa: T201


if __name__ == "__main__":
    main()
