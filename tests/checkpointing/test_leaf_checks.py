"""A save of copies that differ, or of memory that is written to meanwhile, fails and names the leaf."""

import json
import pathlib
import textwrap
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpointing
import loader
from checkpointing.checksums import _checksum
from checkpointing.leaf_checks import LeafChecks, _sample
from checkpointing.train_state import _DTYPES
from tests.jax_processes import run_processes

PROGRAM = """
import json
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import checkpointing
from tests.checkpointing.test_leaf_checks import a_pipeline

mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))
explicit = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Explicit,))

def made(spec, shape, value, mesh=mesh):
    '''An array whose copy on each device is what `value(number of the device)` adds to its values.'''
    sharding = NamedSharding(mesh, spec)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = [jax.device_put(whole[index] + np.float32(value(device.id)), device)
             for device, index in sharding.addressable_devices_indices_map(shape).items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)

def outcome(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def saved(name, *states, template=None):
    '''Steps that a run which begins with the first of some states, and saves each of them, has.'''
    def run():
        with checkpointing.Checkpoints(f"{arguments[0]}/{name}", a_pipeline(), 1, 9, process_timeout_s=60) as checkpoints:
            batches = checkpoints.resume(states[0] if template is None else template).batches
            for state in states:
                next(batches)
                checkpoints.save(batches, state)
                checkpoints.wait()
            return checkpoints.steps()
    return outcome(run)

same, last = lambda device: 0, lambda device: device == max(one.id for one in jax.devices())
"""


def a_pipeline() -> loader.Pipeline:
    source = loader.ArraySource({"x": np.arange(8.0)})
    return loader.Pipeline(
        source, loader.PipelineConfig(4, seed=0, num_epochs=None, final_batch="drop")
    )


def told(program: str, count: int, devices_each: int, *arguments: Any) -> list[Any]:
    ended = run_processes(
        PROGRAM + textwrap.dedent(program), count, *arguments, devices_each=devices_each
    )
    for code, _, error in ended:
        assert code == 0, error[-4000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def test_copies_that_differ_between_devices_are_refused(tmp_path: pathlib.Path) -> None:
    program = """
    everywhere, in_part = made(P(), (4, 6), same), made(P("model"), (4, 6), same)
    found = {"devices": list(map(str, jax.devices()))}
    for name, spec, shape, where in (
        ("all", P(), (4, 6), mesh), ("scalar", P(), (), mesh), ("part", P("model"), (4, 6), mesh),
        ("explicit", P(), (5,), explicit), ("split", P(("data", "model")), (4, 6), mesh),
    ):
        good, bad = ({"w": everywhere, "a": {"b": made(spec, shape, how, where)}} for how in (same, last))
        found[name] = saved(name, good, good, bad)
        found[name + " at resume"] = saved(name + "-resume", bad)
    keys = [jax.random.fold_in(jax.random.key(1), device.id) for device in jax.devices()]
    keys = [jax.device_put(jax.random.key_data(key), device) for key, device in zip(keys, jax.devices())]
    keys = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), keys)
    found["keys"] = saved("keys", {"key": jax.random.wrap_key_data(keys)})
    with jax.set_mesh(explicit):
        found["another mesh set"] = saved("other", {"w": everywhere, "part": in_part})
    print(json.dumps(found))
    """
    (found,) = told(program, 1, 4, tmp_path)
    for name, shard in (("all", ""), ("scalar", ""), ("explicit", ""), ("part", "[2:4,0:6]")):
        differ = f"{found['devices'][3]} hold other values than {found['devices'][bool(shard)]}."
        assert f"train state leaf /a/b{shard} is replicated, but {differ}" in found[name]
        assert found[name].startswith("RuntimeError: the save of step 3")
        assert "pmean" in found[name]
        assert checkpointing.load(tmp_path / name)[0].step == 2
        assert found[f"{name} at resume"].startswith(f"ValueError: train state leaf /a/b{shard} is")
        with pytest.raises(FileNotFoundError):
            checkpointing.load(tmp_path / f"{name}-resume")
    assert found["split"] == [1, 2, 3]
    assert found["split at resume"] == [1]
    assert found["keys"].startswith("ValueError: train state leaf /key is replicated")
    assert "keep one key" in found["keys"]
    assert found["another mesh set"] == [1]


def test_copies_that_differ_between_processes_are_refused(tmp_path: pathlib.Path) -> None:
    program = """
    everywhere, in_part = made(P(), (4, 6), same), made(P("data"), (4, 6), same)
    good = {"global": everywhere, "part": in_part, "key": jax.random.key(1), "n": np.zeros(3)}
    bad = {
        "global": made(P(), (4, 6), lambda device: jax.process_index() == 1),
        "part": made(P("data"), (4, 6), lambda device: jax.process_index() == 3),  # as process 2 has it
        "key": jax.random.fold_in(jax.random.key(1), jax.process_index()),
        "n": np.zeros(3) + (jax.process_index() == 2),
    }
    found = {"good": saved("good", good, good)}
    for name, leaf in bad.items():
        found[name] = saved(name, good, {**good, name: leaf})
        found[name + " at resume"] = saved(name + "-resume", {**good, name: leaf})
    print(json.dumps(found))
    """
    every = told(program, 4, 1, tmp_path)
    places = {"global": ("/global", 1, 0), "part": ("/part[2:4,0:6]", 3, 2), "n": ("/n", 2, 0)}
    for name, (leaf, process, other) in {**places, "key": ("/key", 1, 0)}.items():
        for number, found in enumerate(every):
            assert found["good"] == [1, 2]
            for at in (name, f"{name} at resume"):
                assert f"train state leaf {leaf} differs between processes" in found[at]
                if name != "key" or number in (0, 1):
                    assert f"in process {process} and " in found[at]
                    assert f"in process {other}. A checkpoint holds one copy" in found[at]
                assert "jax.random.fold_in(key, jax.process_index())" in found[at]
            assert "the save of step 2" in found[name]
        assert checkpointing.load(tmp_path / name)[0].step == 1


def test_shapes_with_a_sharding_stand_for_keys_of_all_kinds(tmp_path: pathlib.Path) -> None:
    program = """
    kinds = [kind for kind in ("threefry2x32", "rbg", "unsafe_rbg")]
    places = {"split": P("data"), "whole": P()}
    shardings = {f"{kind} {name}": NamedSharding(mesh, spec) for kind in kinds for name, spec in places.items()}

    @functools.partial(jax.jit, out_shardings=shardings)
    def init():
        return {name: jax.random.split(jax.random.key(1, impl=name.split()[0]), 4) for name in shardings}

    def data(tree):
        whole = NamedSharding(mesh, P())
        return [np.asarray(jax.jit(jax.random.key_data, out_shardings=whole)(key)).tolist() for key in tree.values()]

    state = init()
    shapes = {name: jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=shardings[name]) for name, key in state.items()}
    with checkpointing.Checkpoints(arguments[0], a_pipeline(), 1, 9, process_timeout_s=60) as checkpoints:
        run = checkpoints.resume(state if arguments[1] == "save" else shapes)
        keys = run.train_state
        next(run.batches)
        checkpoints.save(run.batches, keys)
    alike = [keys[name].sharding.is_equivalent_to(shardings[name], 1) and keys[name].dtype == state[name].dtype for name in state]
    print(json.dumps([run.position.step, data(keys) == data(state), alike]))
    """
    program = "import functools\n" + textwrap.dedent(program)
    whole = [True, [True] * 6]
    assert told(program, 1, 4, tmp_path, "save") == [[0, *whole]]
    assert told(program, 2, 2, tmp_path, "resume") == [[1, *whole]] * 2
    assert told(program, 1, 2, tmp_path, "resume") == [[2, *whole]]


def aligned(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy where JAX needs none of its own."""
    raw = np.zeros(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer: np.ndarray[Any, Any] = raw[start : start + values.nbytes].view(values.dtype)
    buffer = buffer.reshape(values.shape)
    buffer[...] = values
    return buffer


@pytest.mark.parametrize("shared_by", [jax.device_put, jnp.from_dlpack])
def test_a_leaf_whose_numpy_buffer_is_written_to_after_save_is_not_saved(
    shared_by: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = aligned(np.arange(6000, dtype=np.float32).reshape(20, 300))
    state: dict[str, Any] = {"mine": jnp.arange(3), "a": {"b": shared_by(buffer)}}
    assert np.shares_memory(np.asarray(state["a"]["b"]), buffer)
    writes, check_copies = threading.Event(), LeafChecks.check_copies

    def wait_for_the_write(self: LeafChecks, *arguments: Any) -> None:
        check_copies(self, *arguments)
        assert writes.wait(60)

    with checkpointing.Checkpoints(tmp_path, a_pipeline(), save_every=1, keep=9) as checkpoints:
        run = checkpoints.resume(state)
        next(run.batches)
        checkpoints.save(run.batches, state)
        checkpoints.wait()
        monkeypatch.setattr(LeafChecks, "check_copies", wait_for_the_write)
        next(run.batches)
        assert checkpoints.save(run.batches, state)
        buffer += 1
        writes.set()
        with pytest.raises(
            RuntimeError, match=r"step 2 .* leaf /a/b changed while .*jnp.array\(x, cop"
        ):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        next(run.batches)
        assert checkpoints.save(run.batches, state)  # which is independent of it
    assert checkpointing.load(tmp_path)[1]["/a/b"].tobytes() == buffer.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(7.0),
        np.zeros((3, 0)),
        np.array(3.0),
        np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        np.arange(1000, dtype=np.int8),
    ],
)
def test_a_sample_holds_the_last_value_and_no_more_than_a_few(array: Any) -> None:
    before = _sample(array)
    assert len(before) <= 130 * array.itemsize
    if array.size:
        array[(-1,) * array.ndim] += 1
        assert _sample(array) != before


@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_a_checksum_changes_with_each_bit_and_place(dtype: str) -> None:
    with jax.enable_x64(True):
        values = np.array([0, 1, 0, 0, 0, 0], np.int8).reshape(2, 3).astype(jnp.dtype(dtype))
        others = [values, values.T, values.reshape(-1)[::-1].reshape(2, 3)]
        if values.dtype.itemsize > 1 or dtype in ("int8", "uint8") or "float8" in dtype:
            for bit in range(8 * values.dtype.itemsize):
                bits = values.copy().view(np.uint8)
                bits[1, -1 - bit // 8] ^= np.uint8(1 << bit % 8)
                others.append(bits.view(values.dtype))
        found = [jax.jit(_checksum)(jnp.asarray(other)).tolist() for other in others]
    assert len({tuple(pair) for pair in found}) == len(found)
