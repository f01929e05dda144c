"""A Grain chain as a stream: its place survives stops and errors, and looking ahead moves nothing."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
import pytest
from grain import experimental

import loader
from loader import ArraySource, Fingerprint, GrainStateError, GrainStream
from loader.identity.base import Ahead
from loader.stream import NEXT_IDS
from loader.streams.grain import (
    AHEAD_ELEMENTS,
    MAX_STATE_BYTES,
    element_digest,
    element_ids,
)

NUM_RECORDS = 41
DATA: Fingerprint = loader.fingerprint(ArraySource({"x": np.arange(NUM_RECORDS)}))
THREADS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def records(first: int = 0, count: int = NUM_RECORDS) -> grain.MapDataset[Any]:
    return grain.MapDataset.range(first, first + count).map(record)


#: Records that cannot be read at the first try.
UNREADABLE_ONCE: set[int] = set()


def read(number: int) -> int:
    if number in UNREADABLE_ONCE:
        UNREADABLE_ONCE.remove(number)
        raise OSError(f"no record {number}")
    return number


def record(number: int) -> dict[str, Any]:
    number = read(number)
    return {"id": number, "x": np.full(2, number, np.float32)}


def jitter(element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**element, "noise": rng.random(3)}


def documents(first: int = 0, count: int = 37) -> grain.IterDataset[Any]:
    return grain.MapDataset.range(first, first + count).map(document).to_iter_dataset(NO_THREADS)


def document(number: int) -> dict[str, Any]:
    number = read(number)
    return {"t": np.full(number % 5 + 1, number, np.int32)}


class Twice(experimental.FlatMapTransform):
    """Makes two elements of each."""

    max_fan_out = 2

    def flat_map(self, element: dict[str, Any]) -> list[dict[str, Any]]:
        return [element, {**element, "x": -element["x"]}]


def is_even(element: dict[str, Any]) -> bool:
    return bool(element["id"] % 2 == 0)


def without_id(element: dict[str, Any]) -> Any:
    return element["x"]


def chains() -> dict[str, Callable[[], Any]]:
    """Chains of most kinds that Grain has, each with some thirty elements at most."""
    return {
        "map": lambda: records().shuffle(seed=3).batch(4).repeat(3),
        "map, partial batches": lambda: records().batch(4, drop_remainder=False),
        "records": lambda: records().shuffle(seed=3),
        "map, threads": lambda: (
            records().shuffle(seed=3).batch(4).repeat(2).to_iter_dataset(THREADS)
        ),
        "filter": lambda: (
            records().shuffle(seed=3).repeat(2).filter(is_even).to_iter_dataset(THREADS).batch(3)
        ),
        "filter behind": lambda: records().to_iter_dataset(THREADS).filter(is_even).batch(3),
        "random_map": lambda: records().seed(7).shuffle().random_map(jitter).batch(4),
        "random_map behind": lambda: (
            records().to_iter_dataset(THREADS).batch(4).seed(9).random_map(jitter)
        ),
        "mix": lambda: grain.MapDataset.mix([records(), records(100)], [0.3, 0.7]).batch(4),
        "mix behind": lambda: grain.IterDataset.mix(
            [records().to_iter_dataset(THREADS), records(100).to_iter_dataset(THREADS)], [1, 2]
        ).batch(4),
        "window": lambda: experimental.WindowShuffleIterDataset(
            records().to_iter_dataset(NO_THREADS), window_size=5, seed=1
        ).batch(4),
        "packing": lambda: (
            experimental.FirstFitPackIterDataset(
                records().map(lambda one: {"tokens": np.full(one["id"] % 4 + 1, one["id"])}).to_iter_dataset(NO_THREADS),
                length_struct={"tokens": 8},
                num_packing_bins=3,
            ).batch(2)
        ),
        "packing, best fit": lambda: experimental.BestFitPackIterDataset(
            documents(), length_struct={"t": 8}, num_packing_bins=3
        ),
        "concatenated and split": lambda: experimental.ConcatThenSplitIterDataset(
            documents(), length_struct={"t": 8}
        ),
        "concatenated, split and mixed": lambda: grain.IterDataset.mix(
            {
                name: experimental.ConcatThenSplitIterDataset(documents(first), length_struct={"t": 8})
                for name, first in (("b", 0), ("a", 100))
            },
            {"b": 1, "a": 2},
        ),
        "flat_map": lambda: experimental.FlatMapIterDataset(
            records().to_iter_dataset(NO_THREADS), Twice()
        ),
        "repeat, zip and limit": lambda: experimental.LimitIterDataset(
            experimental.ZipIterDataset([
                experimental.RepeatIterDataset(documents(count=9), num_epochs=2), documents()
            ]), 15
        ),
        "cache": lambda: experimental.CacheIterDataset(documents()),
        "rebatch": lambda: experimental.RebatchIterDataset(
            records().batch(3).to_iter_dataset(NO_THREADS), 4, drop_remainder=False
        ),
        "interleave": lambda: experimental.InterleaveIterDataset(
            [records(100 * i, 7).to_iter_dataset(NO_THREADS) for i in range(4)], cycle_length=2
        ).batch(3),
        "thread prefetch": lambda: experimental.ThreadPrefetchIterDataset(
            records().batch(4).to_iter_dataset(NO_THREADS), prefetch_buffer_size=2
        ),
        "threads, each a share": lambda: experimental.multithread_prefetch(
            records().batch(4).to_iter_dataset(NO_THREADS), num_threads=2, buffer_size=2
        ),
        "no IDs": lambda: records().map(without_id).batch(4),
    }  # fmt: skip


def stream(dataset: Any) -> GrainStream:
    return GrainStream(dataset, fingerprint=DATA)


def marks(elements: Any) -> list[str]:
    return [element_digest(element) for element in elements]


@pytest.mark.parametrize("name", chains())
def test_stream_goes_on_exactly_from_every_step(name: str) -> None:
    chain = chains()[name]
    expected = marks(chain())
    assert len(expected) >= 5
    assert len(set(expected)) == len(expected)
    batches = stream(chain()).iterate()
    states = []
    for step in range(len(expected)):
        states.append(json.loads(json.dumps(batches.get_state())))
        assert batches.position.step == step
        assert element_digest(next(batches)) == expected[step]
    assert next(batches, None) is None
    states.append(batches.get_state())
    for step, state in enumerate(states):
        with contextlib.closing(stream(chain()).iterate(state)) as other:
            assert marks(other) == expected[step:]


@pytest.mark.parametrize("name", chains())
def test_looking_ahead_moves_nothing_and_makes_nothing_twice(name: str) -> None:
    chain = chains()[name]
    expected, states = marks(chain()), []
    plain = stream(chain()).iterate()
    for _ in expected:
        states.append(plain.get_state())
        next(plain)
    batches = stream(chain()).iterate()
    other_ids = element_ids(next(iter(chain())))
    for step, mark in enumerate(expected):
        ahead = batches.ahead()
        assert batches.get_state() == states[step]
        other = stream(chain()).iterate(states[step])
        assert other.ahead() == ahead
        assert ahead.kind == ("digest" if other_ids is None else "ids")
        if ahead.kind == "digest":
            assert ahead.digest == mark
        element = next(batches)
        assert element_digest(element) == mark
        if ahead.kind == "ids":
            ids = element_ids(element, NEXT_IDS)
            assert ids is not None
            assert list(ahead.ids[: len(ids)]) == ids
        other.close()
    assert batches.ahead() == Ahead("end")
    assert next(batches, None) is None


@pytest.mark.parametrize(
    ("size", "elements"), [(1, AHEAD_ELEMENTS), (16, 4), (20, 4), (64, 1), (100, 1)]
)
def test_no_more_is_read_ahead_than_64_ids_ask_for(size: int, elements: int) -> None:
    made = []

    def count(batch: dict[str, Any]) -> dict[str, Any]:
        made.append(batch)
        return batch

    dataset = records(0, 2000).batch(size).map(count)
    batches = stream(dataset).iterate(read_options=NO_THREADS)
    next(batches)
    del made[:]
    ahead = batches.ahead()
    assert batches.ahead() is ahead
    assert len(made) == elements
    assert ahead.ids == tuple(range(size, size + min(NEXT_IDS, size * elements)))
    assert [next(batches)["id"][0] for _ in range(elements)] == [
        size * number for number in range(1, elements + 1)
    ]
    assert len(made) == elements


def fails_once_at(number: int, failures: int = 1) -> Callable[[Any], Any]:
    left = [failures]

    def fail(element: Any) -> Any:
        if number in np.atleast_1d(element["id"]) and left[0]:
            left[0] -= 1
            raise ValueError(f"no record {number}")
        return element

    return fail


@pytest.mark.parametrize("options", [NO_THREADS, THREADS])
@pytest.mark.parametrize("batch_last", [True, False])
@pytest.mark.parametrize("look", [True, False])
def test_after_an_exception_the_same_element_comes_next(
    options: Any, batch_last: bool, look: bool
) -> None:
    def chain(function: Callable[[Any], Any]) -> Any:
        if batch_last:
            return records().map(function).to_iter_dataset(options).batch(4)
        return records().batch(4).map(function).to_iter_dataset(options)

    expected = marks(chain(lambda element: element))
    batches = stream(chain(fails_once_at(22, failures=2))).iterate()
    assert marks(itertools.islice(batches, 5)) == expected[:5]
    before = batches.get_state()
    if look:
        assert batches.ahead() == Ahead("error", digest="ValueError: no record 22")
    for _ in range(1 if look else 2):
        with pytest.raises(ValueError, match="no record 22") as caught:
            next(batches)
        assert "This is of step 5. The iterator stays there" in caught.value.__notes__[-1]
        assert batches.get_state() == before
        assert batches.position.step == 5
    assert marks(batches) == expected[5:]


@pytest.mark.parametrize("name", ["concatenated and split", "packing, best fit", "flat_map"])
def test_after_an_exception_at_any_place_nothing_is_lost_or_repeated(name: str) -> None:
    expected = marks(chains()[name]())
    for number in range(NUM_RECORDS):
        UNREADABLE_ONCE.add(number)
        batches, found, errors = stream(chains()[name]()).iterate(), [], []
        while True:
            try:
                found += marks([next(batches)])
            except OSError as error:
                errors.append(str(error))
            except StopIteration:
                break
        assert found == expected
        assert errors == [f"no record {number}"][: number not in UNREADABLE_ONCE]
        UNREADABLE_ONCE.clear()


def test_an_error_behind_the_next_element_is_raised_in_its_turn() -> None:
    dataset = records().batch(4).map(fails_once_at(10, failures=10**6))
    batches = stream(dataset).iterate(read_options=THREADS)
    assert batches.ahead().ids == tuple(range(8))
    assert next(batches)["id"].tolist() == [0, 1, 2, 3]
    assert next(batches)["id"].tolist() == [4, 5, 6, 7]
    for _ in range(3):
        with pytest.raises(ValueError, match="no record 10"):
            next(batches)
        assert batches.get_state() == {"step": 2, "grain": {"next_index": 2}}


def test_what_a_callback_refuses_is_not_delivered() -> None:
    seen: list[int] = []

    def refuse(position: loader.Position, element: Any) -> None:
        seen.append(position.step)
        if len(seen) == 3:
            raise OSError("disk full")

    batches = stream(records().batch(4)).iterate(on_batch=refuse)
    next(batches)
    second = next(batches)["id"].tolist()
    with pytest.raises(OSError, match="disk full"):
        next(batches)
    assert batches.position.step == 2
    assert next(batches)["id"][0] == second[-1] + 1
    assert seen == [0, 1, 2, 2]


def test_iterator_can_be_moved_to_any_place_and_back() -> None:
    batches = stream(chains()["packing"]()).iterate()
    states = [batches.get_state()]
    expected = []
    for element in batches:
        expected.append(element_digest(element))
        states.append(batches.get_state())
    for step in (3, 0, len(expected), 1):
        batches.set_state(states[step])
        batches.ahead()
        assert marks(batches) == expected[step:]


@pytest.mark.parametrize(
    "state", [{}, {"next_index": 3}, {"step": 1}, {"step": -1, "grain": {}}, 3, {"step": 1, "grain": {}, "x": 0}]
)  # fmt: skip
def test_a_state_of_something_else_is_refused_and_moves_nothing(state: Any) -> None:
    batches = stream(records().batch(4)).iterate()
    next(batches)
    before = batches.get_state()
    with pytest.raises((ValueError, TypeError), match=r"state holds step and grain|position"):
        batches.set_state(state)
    assert batches.get_state() == before
    assert next(batches)["id"][0] == 4


@pytest.mark.parametrize("state", [{"next_index": 99}, {"next_index": -1}, {"index": 1}, [], None])
def test_a_state_that_grain_refuses_is_an_error_of_its_own(state: Any) -> None:
    batches = stream(records().batch(4)).iterate({"step": 3, "grain": state})
    for ask in (batches.ahead, lambda: next(batches)):
        with pytest.raises(GrainStateError, match="Grain does not take its own state"):
            ask()


#: The states of their own with which a `StatefulIterator` was restored.
RESTORED: list[Any] = []


class Stateful(grain.IterDataset[Any]):
    """A data set of a user's, with a state that it chooses."""

    def __init__(self, parent: Any, state: Any) -> None:
        super().__init__(parent)
        self._own_state = state

    def __iter__(self) -> Any:
        return StatefulIterator(self._parent.__iter__(), self._own_state)


class StatefulIterator(grain.DatasetIterator[Any]):
    def __init__(self, parent: Any, state: Any) -> None:
        super().__init__(parent)
        self._own_state = state

    def __next__(self) -> Any:
        return next(self._parent)

    def get_state(self) -> Any:
        return {"parent": self._parent.get_state(), "own": self._own_state}

    def set_state(self, state: Any) -> None:
        RESTORED.append(state["own"])
        self._parent.set_state(state["parent"])


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({1, 2}, "it holds {1, 2} of type set"),
        ([{"a": {2: object}}], "of type type"),
        (np.array([None]), "of dtype object"),
        (float("nan"), "it holds nan of type float"),
        (types.MappingProxyType({}), "of type mappingproxy"),
        ("x" * MAX_STATE_BYTES, "are allowed"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused_at_once(state: Any, error: str) -> None:
    dataset = Stateful(records().batch(4).to_iter_dataset(NO_THREADS), state)
    with pytest.raises(GrainStateError, match=error):
        next(stream(dataset).iterate())


@pytest.mark.parametrize(
    "own", [(1, "a"), {1: (2, [3])}, np.int64(3), np.arange(3), b"\0", {"__tuple__": [1]}, [(), {}]]
)
def test_a_state_keeps_the_types_of_its_values(own: Any) -> None:
    def iterate(state: Any = None) -> Any:
        chain = Stateful(records().batch(4).to_iter_dataset(NO_THREADS), own)
        return stream(chain).iterate(state)

    batches = iterate()
    next(batches)
    other = iterate(json.loads(json.dumps(batches.get_state())))
    assert next(other)["id"].tolist() == next(batches)["id"].tolist()
    (back,) = {id(one): one for one in RESTORED}.values()
    del RESTORED[:]
    assert type(back) is type(own)
    assert repr(back) == repr(own)


def test_a_state_of_plain_grain_is_taken_with_its_tuples() -> None:
    make = chains()["concatenated and split"]
    expected, plain = marks(make()), iter(make())
    for step in range(len(expected)):
        state = {"step": step, "grain": plain.get_state()}
        assert marks(stream(make()).iterate(state)) == expected[step:]
        next(plain)


def test_read_options_are_for_a_map_dataset() -> None:
    dataset = records().batch(4)
    for options in (None, NO_THREADS, THREADS):
        assert marks(stream(dataset).iterate(read_options=options)) == marks(dataset)
    with pytest.raises(ValueError, match=r"read_options are for a grain\.MapDataset"):
        stream(dataset.to_iter_dataset(THREADS)).iterate(read_options=THREADS)
    with pytest.raises(TypeError, match="must be a ReadOptions"):
        stream(dataset).iterate(read_options=3)
    with pytest.raises(ValueError, match="workers is up to the chain"):
        stream(dataset).iterate(workers=2)


def test_config_may_be_any_mapping_or_pairs() -> None:
    class Config:  # as that of ml_collections, which is no Mapping
        def keys(self) -> list[str]:
            return ["a"]

        def __getitem__(self, name: str) -> int:
            return {"a": 1}[name]

    pairs: list[Any] = [Config(), types.MappingProxyType({"a": 1}), [("a", 1)], {"a": 1}.items()]
    for config in pairs:
        assert GrainStream(records(), fingerprint=DATA, config=config).config == {"a": 1}
    for config in (None, (), {}):
        assert GrainStream(records(), fingerprint=DATA, config=config).config == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dataset": [1, 2]}, "not a list"),
        (
            {"dataset": iter([1])},
            "of an iterator, give the data set, and of a DataLoader, write it as",
        ),
        ({"fingerprint": "abc"}, "by loader.fingerprint"),
        ({"config": {"a": object()}}, "JSON can hold"),
        ({"config": [1]}, r"config must map names to values, .*, not be \[1\]"),
        ({"config": {"a": {1: 2}}}, "must have strings as keys"),
        ({"config": {"a": float("inf")}}, "JSON can hold"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: str) -> None:
    given = {"dataset": records(), "fingerprint": DATA, **arguments}
    with pytest.raises(TypeError, match=error):
        GrainStream(given.pop("dataset"), **given)


def test_closed_iterator_says_so() -> None:
    batches = stream(records().batch(4)).iterate(read_options=THREADS)
    batches.start_prefetch()
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(ValueError, match="this iterator is closed"):
        next(batches)


@dataclasses.dataclass
class Opaque:
    value: int


def test_ids_and_digests_of_elements() -> None:
    assert element_ids({"id": np.array([3, 4])}) == [3, 4]
    assert element_ids({"id": 7}) == [7]
    assert element_ids({"id": np.array(["a", "b"])}, 1) == ["a"]
    assert element_ids({"id": ["a", 3]}) == ["a", "3"]
    assert element_ids({"id": np.array(["a", "b"], object)}) == ["a", "b"]
    assert element_ids({"id": np.array([0.5])}) is None
    assert element_ids({"id": b"a"}) is None
    assert element_ids({"x": 1}) is None
    assert element_ids((1, 2)) is None
    x = {"a": np.arange(3), "b": ("text", 1.5)}
    assert element_digest(x) == element_digest({"b": ("text", 1.5), "a": np.arange(3)})
    others: list[Any] = [
        {**x, "a": np.arange(3).astype(np.int32)},
        {**x, "a": np.arange(3)[None]},
        {**x, "a": np.array([0, 1, 3])},
        {**x, "b": ("texu", 1.5)},
        {**x, "b": ["text", 1.5]},
        {"c": x["a"], "b": x["b"]},
    ]
    digests = {element_digest(other) for other in [x, *others]}
    assert len(digests) >= len(others)  # a list and a tuple have the same leaves
    assert element_digest(Opaque(1)) == element_digest(Opaque(2)) != element_digest(1)


WORKERS = """
import json, os, sys
import grain
from absl import flags
import loader, numpy as np
from loader.streams.grain import element_digest

class FailsOnce:
    # Fails for one batch, in whichever process, as long as a file is there.

    def __init__(self, path):
        self.path = path

    def __call__(self, batch):
        if 17 in batch["id"] and os.path.exists(self.path):
            os.unlink(self.path)
            raise ValueError("no record 17")
        return batch

def chain(workers, path="none"):
    dataset = grain.MapDataset.range(40).shuffle(seed=3).map(lambda i: {"id": i, "x": np.full(9, i)}).batch(4)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(0, 0)).map(FailsOnce(path))
    return dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(workers, 2))

if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    data = loader.Fingerprint.of_revision("1", loader.ArraySource({"x": np.arange(40)}))
    stream = loader.GrainStream(chain(2), fingerprint=data)
    batches = stream.iterate()
    expected, states, aheads = [], [], []
    for step in range(10):
        if step in (0, 3, 7):
            aheads.append(batches.ahead())
            states.append(json.loads(json.dumps(batches.get_state())))
        expected.append(next(batches)["id"].tolist())
    assert next(batches, None) is None
    batches.close()
    for state, ahead in zip(states, aheads):
        batches = stream.iterate(state)
        assert batches.ahead() == ahead
        assert [batch["id"].tolist() for batch in batches] == expected[state["step"]:], state
        batches.close()
    open(sys.argv[1], "w").close()
    batches = loader.GrainStream(chain(2, sys.argv[1]), fingerprint=data).iterate()
    found, errors = [], []
    while len(found) < 10:
        try:
            found.append(next(batches)["id"].tolist())
        except ValueError as error:
            errors.append(str(error))
    batches.close()
    assert (found, errors) == (expected, ["no record 17"]), (found, errors)
    left_open = stream.iterate()
    next(left_open)
    left_open.ahead()
    print(json.dumps([stream.chain.workers, sorted(sum(expected, []))]))
"""


@pytest.mark.processes
def test_worker_processes_of_grain_go_on_exactly(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(textwrap.dedent(WORKERS), "utf-8")
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "fail")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2, list(range(40))]
    # What is left in the middle is closed while Python can still let go of shared memory.
    assert "Exception ignored" not in done.stderr
