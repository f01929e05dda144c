"""A stream of a kind that no module knows is saved, resumed and refused; one iterator is for one thread at a time."""

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import grain
import numpy as np
import numpy.typing as npt
import pytest

import checkpointing
from checkpointing import CheckpointDamagedError, CheckpointMismatchError, Checkpoints, testing
from checkpointing.manifest import Manifest, seal
from loader import ArraySource, Difference, GrainStream, Mixture, Pipeline, PipelineConfig, Position
from loader.identity.base import Ahead, Place, PlaceError, PlainIdentity, StreamIdentity
from loader.reading.stats import StreamStats
from loader.stream import Stream, StreamIterator

STEPS = 9


class Squares(Stream):
    """Batches without records: the squares of numbers that grow by a stride, until a limit."""

    may_change = frozenset({"limit"})

    def __init__(self, stride: int = 1, limit: int = STEPS) -> None:
        self.stride, self.limit = stride, limit

    def identity(self, *, verify: str = "cache") -> StreamIdentity:
        del verify
        return PlainIdentity("squares", {"stride": self.stride, "limit": self.limit})

    def iterate(self, start: Any = None, **_: Any) -> "SquaresIterator":
        iterator = SquaresIterator(self)
        if start is not None:
            iterator.set_state(start)
        return iterator

    def diff_next(self, before: Any, place: Place, iterate: Any) -> list[Difference]:
        del before
        try:
            now = iterate(place.start).place()
        except ValueError as error:
            raise PlaceError(str(error)) from error
        return place.ahead.diff(now.ahead)


class SquaresIterator(StreamIterator):
    def __init__(self, stream: Squares) -> None:
        super().__init__()
        self._stream, self._count = stream, 0

    @property
    def position(self) -> Position:
        return Position(0, 0, self._count)

    def __next__(self) -> dict[str, Any]:
        if self.is_at_end():
            raise StopIteration
        self._count += 1
        return {"x": np.full(2, (self._stream.stride * (self._count - 1)) ** 2)}

    def is_at_end(self) -> bool:
        return self._count >= self._stream.limit

    def place(self) -> Place:
        following = str((self._stream.stride * self._count) ** 2)
        ahead = Ahead("end") if self.is_at_end() else Ahead("digest", digest=following)
        return Place(self.position, ahead, self.get_state())

    def get_state(self) -> dict[str, int]:
        return {"count": self._count}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if not 0 <= state["count"] <= self._stream.limit:
            raise ValueError(f"there are {self._stream.limit} squares, not {state['count']}")
        self._count = state["count"]

    def stats(self) -> StreamStats:
        return StreamStats(self._count, self._count, None, 0, 0, 0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class NamedIdentity(StreamIdentity):
    """An identity that compares in a way of its own."""

    stride: int

    kind = "named squares"

    def to_dict(self) -> dict[str, Any]:
        return {"stride": self.stride}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        return cls(value["stride"])

    def diff(self, now: Self) -> list[Difference]:
        if self == now:
            return []
        before, after = (f"every {one.stride}." for one in (self, now))
        return [Difference("stride", before, after, "by its own words")]


class NamedSquares(Squares):
    def identity(self, *, verify: str = "cache") -> StreamIdentity:
        del verify
        return NamedIdentity(self.stride)


def train(directory: pathlib.Path, stream: Stream, steps: int, **options: Any) -> list[int]:
    found = []
    with Checkpoints(directory, stream, save_every=1, keep=2) as checkpoints:
        run = checkpoints.resume({"sum": np.zeros(2)}, **options)
        state = run.train_state
        for _ in range(steps):
            batch = next(run.batches, None)
            if batch is None:
                break
            state = {"sum": state["sum"] + batch["x"]}
            found.append(int(batch["x"][0]))
            checkpoints.save(run.batches, state)
    return found


@pytest.mark.parametrize("make", [Squares, NamedSquares])
def test_a_stream_of_a_fourth_kind_resumes_exactly(tmp_path: pathlib.Path, make: Any) -> None:
    whole = [step**2 for step in range(STEPS)]
    assert [
        *train(tmp_path, make(), 2),
        *train(tmp_path, make(), 0),
        *train(tmp_path, make(), 99),
    ] == whole
    manifest, leaves = checkpointing.load(tmp_path)
    assert manifest.place == Place(Position(0, 0, STEPS), Ahead("end"), {"count": STEPS})
    assert leaves["/sum"].tolist() == [sum(whole)] * 2
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    testing.assert_resumes_exactly(make, tmp_path / "trial")


def test_a_stream_of_a_fourth_kind_is_refused_with_all_differences(tmp_path: pathlib.Path) -> None:
    train(tmp_path, Squares(), 3)
    with pytest.raises(CheckpointMismatchError, match="nothing was restored") as caught:
        train(tmp_path, Squares(2, 12), 1)
    found = {one.name: (one.checkpoint, one.now) for one in caught.value.differences}
    assert found == {"stride": ("1", "2"), "limit": (str(STEPS), "12")}
    assert 'limit alone may change with allow={"limit"}' in str(caught.value)
    assert train(tmp_path, Squares(1, 12), 1, allow={"limit"}) == [9]
    assert checkpointing.load(tmp_path)[0].history[0]["changed"] == {"limit": [STEPS, 12]}
    with pytest.raises(ValueError, match=r"allow can hold \['limit'\] for a Squares"):
        train(tmp_path, Squares(1, 12), 1, allow={"batch_size"})
    with pytest.raises(
        CheckpointMismatchError, match=r"stream +checkpoint a squares +now a named squares"
    ):
        train(tmp_path, NamedSquares(1, 12), 1)


def test_an_identity_of_its_own_compares_itself(tmp_path: pathlib.Path) -> None:
    train(tmp_path, NamedSquares(), 3)
    with pytest.raises(CheckpointMismatchError) as caught:
        train(tmp_path, NamedSquares(2), 1)
    assert caught.value.differences == (
        Difference("stride", "every 1.", "every 2.", "by its own words"),
    )


class Moved(Squares):
    """The same identity, and other batches."""

    def iterate(self, start: Any = None, **_: Any) -> "SquaresIterator":
        iterator = super().iterate(start)
        iterator._stream = Squares(3, self.limit)
        return iterator


def test_what_comes_next_is_compared(tmp_path: pathlib.Path) -> None:
    train(tmp_path, Squares(), 3)
    with pytest.raises(
        CheckpointMismatchError, match=r"next_element +checkpoint no IDs, 9 +now no IDs, 81"
    ):
        train(tmp_path, Moved(), 1)


def test_a_place_that_is_none_of_the_stream_is_damage(tmp_path: pathlib.Path) -> None:
    train(tmp_path, Squares(), 1)
    path = tmp_path / "1/manifest/metadata"
    value = Manifest.from_bytes(path.read_bytes()).to_dict()
    path.write_bytes(seal({**value, "state": {"count": 99}}))
    with pytest.raises(CheckpointDamagedError, match="its position is none of its stream"):
        train(tmp_path, Squares(), 1)


def test_the_tools_take_a_stream_of_a_fourth_kind(tmp_path: pathlib.Path) -> None:
    for name, stride in (("a", 1), ("b", 2)):
        train(tmp_path / name, Squares(stride), 3)
    one, other = (checkpointing.inspect_run(tmp_path / name) for name in "ab")
    assert [difference.name for difference in one.diff(other)] == ["stride", "train_state/sum"]
    assert one.diff_stream(Squares()) == []
    assert one.total_steps is None
    assert one.to_dict()["stream"] == {"kind": "squares", "stride": 1, "limit": STEPS}
    with pytest.raises(ValueError, match="is of a squares, whose order cannot be derived"):
        checkpointing.provenance(tmp_path / "a")
    with pytest.raises(ValueError, match="a squares, which has no config of its own"):
        one.diff_config(PipelineConfig(2, 1, "pad"))


def test_a_stream_for_one_process_says_so() -> None:
    assert GrainStream.single_process.startswith("a GrainStream is for one JAX process")
    assert Pipeline.single_process == Mixture.single_process == Squares.single_process == ""


# One thread at a time.


class Waiting:
    """A source whose reads wait until they are let go."""

    def __init__(self) -> None:
        self.is_reading, self.may_go = threading.Event(), threading.Event()

    def __call__(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.is_reading.set()
        assert self.may_go.wait(60)
        return value


def iterators(waiting: Waiting) -> Iterator[tuple[str, StreamIterator]]:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": waiting(batch["x"])}

    source = ArraySource({"x": np.arange(12)})
    pipeline = Pipeline(source, PipelineConfig(4, 1, "pad"), transform)
    yield "pipeline", pipeline.iterate()
    yield "mixture", Mixture({"a": pipeline}, {"a": 1}).iterate()
    chain = (
        grain.MapDataset.range(12)
        .map(waiting)
        .batch(4)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
    yield "chain", GrainStream(chain, fingerprint=source.fingerprint()).iterate()


@pytest.mark.parametrize("kind", ["pipeline", "mixture", "chain"])
def test_two_threads_in_one_iterator_are_an_error(kind: str) -> None:
    waiting = Waiting()
    batches = dict(iterators(waiting))[kind]
    start = batches.get_state()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(next(batches)))
    thread.start()
    assert waiting.is_reading.wait(60)
    uses: list[Callable[[], Any]] = [lambda: next(batches), lambda: batches.set_state(start)]
    for use in uses:
        with pytest.raises(RuntimeError, match="two threads use this iterator at the same time"):
            use()
    waiting.may_go.set()
    thread.join()
    assert len(found) == batches.position.step == 1
    assert next(batches) is not None  # one after the other, any thread may
    batches.close()
