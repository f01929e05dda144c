"""Sums over micro-batches: the same bits on any number of devices, and the gradient of the whole batch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from scripts import train
from scripts.training import digits
from scripts.training.micro_batches import check_micro_batches, sum_in_order
from scripts.training.task import settings_of

ROOT: Final = Path(__file__).resolve().parents[2]
TRAIN: Final = {"seed": 5, "hidden": 8, "learning_rate": 0.1, "momentum": 0.9, "noise": 0.1}

#: Some steps with the first so many of twelve devices, and the bits of the state after them.
PROGRAM: Final = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import loader
from scripts.training import digits
from scripts.training.task import settings_of

settings = settings_of("train", json.loads(sys.argv[1]), digits.Train)
config = loader.PipelineConfig(48, 17, final_batch="pad")
pipeline = loader.Pipeline(digits.digits(), config, digits.scale)
last = len(pipeline) - 1  # some of its micro-batches are of padding alone
found = {}
for count in (1, 2, 3, 4, 12):
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    whole, shared = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    state = jax.jit(lambda: digits.init(settings), out_shardings=whole)()
    step = digits.make_train_step(settings, mesh)
    for number in (0, last, 1):
        batch = pipeline[number]
        del batch["id"]
        state, loss = step(state, loader.global_batch(batch, shared))
    leaves = [loss, *jax.tree.leaves(state["params"]), *jax.tree.leaves(state["momentum"])]
    found[count] = [np.asarray(leaf).tobytes().hex() for leaf in leaves]
print(json.dumps(found))
"""


@pytest.mark.processes
def test_bits_do_not_depend_on_the_number_of_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps({**TRAIN, "micro_batches": 12})],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=12"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert list(found) == ["1", "2", "3", "4", "12"]
    for count, bits in found.items():
        assert bits == found["1"], f"{count} devices"


@pytest.mark.parametrize("real", [24, 10, 1])
def test_the_gradient_is_that_of_the_whole_batch(real: int) -> None:
    read = train.digits().read(np.arange(24))
    images = digits.scale({"image": read["image"]})["image"]
    batch = {"image": images, "label": read["label"], "mask": np.arange(24) < real}
    found = {}
    for number in (1, 12):
        given: dict[str, Any] = {**TRAIN, "noise": 0, "micro_batches": number}
        settings = settings_of("train", given, digits.Train)
        state = digits.init(settings)
        found[number] = digits.make_train_step(settings)(state, batch)
    whole, parts = found[1], found[12]
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-5)
    for one, other in zip(
        jax.tree.leaves(parts[0]["momentum"]), jax.tree.leaves(whole[0]["momentum"]), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_each_micro_batch_has_a_key_of_its_own() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    draw = jax.jit(
        lambda key: sum_in_order(
            lambda params, key, batch: batch["row"] * jax.random.uniform(key),
            4,
            mesh,
            jnp.zeros(1),
            key,
            {"row": jnp.eye(4)},
        )
    )
    drawn = draw(jax.random.key(1))
    assert len(set(drawn.flatten().tolist())) == 4
    assert not np.array_equal(drawn, draw(jax.random.key(2)))


def test_what_cannot_be_shared_out_is_an_error() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(ValueError, match="'micro_batches' must be at least 1, not 0"):
        check_micro_batches(0, mesh)
    step = digits.make_train_step(settings_of("train", {**TRAIN, "micro_batches": 5}, digits.Train))
    batch = {"image": np.zeros((8, 8, 8), np.float32), "label": np.zeros(8, np.int32)}
    state = digits.init(settings_of("train", TRAIN, digits.Train))
    with pytest.raises(ValueError, match="5 micro_batches do not divide a batch of 8 records"):
        step(state, {**batch, "mask": np.ones(8, bool)})


def test_more_devices_than_divide_the_number_are_an_error() -> None:
    class OfFive:
        size = 5

    with pytest.raises(ValueError, match=r"12 micro_batches cannot be .* among 5 devices: .* of 5"):
        check_micro_batches(12, OfFive())  # type: ignore[arg-type]
