"""What is told of a Grain chain: whatever decides the stream, and nothing that differs between two processes."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

import grain
import numpy as np
import pytest
from grain import experimental

from loader.grain_chain import MAX_LINKS, GrainChain

NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
THREADS = grain.ReadOptions(num_threads=3, prefetch_buffer_size=7)


@dataclasses.dataclass
class Crop(grain.transforms.RandomMap):
    size: int = 3
    mask: Any = None

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element, rng.random()


class Flip(grain.transforms.Map):
    def __init__(self, version: str) -> None:
        self.version = version

    def map(self, element: Any) -> Any:
        return element


def scale(element: Any, by: Any = 1) -> Any:
    return element * by


def halve(element: Any) -> Any:
    return element / 2


def stack(elements: Any) -> Any:
    return np.stack(elements)


class Every(grain.MapDataset[Any]):
    """A data set of a user's."""

    def __init__(self, parent: Any, n: int, version: str = "1") -> None:
        super().__init__(parent)
        self.n, self.version = n, version

    def __len__(self) -> int:
        return len(self._parent) // self.n

    def __getitem__(self, index: Any) -> Any:
        return self._parent[index * self.n]


def base(count: int = 12) -> Any:
    return grain.MapDataset.range(count)


def chain(dataset: Any, version: str = "0.2.18") -> GrainChain:
    return GrainChain.of(dataset, version)


def names(before: Any, now: Any) -> set[str]:
    return {difference.name for difference in chain(before).diff(chain(now))}


def mixed(*weights: float) -> Any:
    return grain.MapDataset.mix([base(), base(9)], weights)


def packed(bins: int, length: int) -> Any:
    return experimental.FirstFitPackIterDataset(
        base().map(scale).to_iter_dataset(NO_THREADS),
        length_struct={"x": length},
        num_packing_bins=bins,
    )


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (base(), base(13), {"chain.1.RangeMapDataset.length", "chain.1.RangeMapDataset.original_len", "chain.1.RangeMapDataset.stop"}),
        (base().shuffle(seed=1), base().shuffle(seed=2), {"chain.2.ShuffleMapDataset.seed"}),
        (base().seed(1).shuffle(), base().seed(2).shuffle(), {"chain.2._WithSeedMapDataset.seed_rng_seed", "chain.3.ShuffleMapDataset.seed"}),
        (base().batch(3), base().batch(4), {"chain.2.BatchMapDataset.batch_size", "chain.2.BatchMapDataset.length"}),
        (base().batch(3), base().batch(3, drop_remainder=True), {"chain.2.BatchMapDataset.drop_remainder"}),
        (base().batch(3), base().batch(3, batch_fn=stack), {"chain.2.BatchMapDataset.batch_fn"}),
        (base().to_iter_dataset(NO_THREADS).batch(3), base().to_iter_dataset(NO_THREADS).batch(4), {"chain.3.BatchIterDataset.batch_size"}),
        (base().repeat(2), base().repeat(2, reseed_each_epoch=False), {"chain.2.RepeatMapDataset.reseed_each_epoch"}),
        (base()[::2], base()[1::2], {"chain.2.SliceMapDataset.start"}),
        (base().map(scale), base().map(halve), {"chain.2.MapMapDataset.transform"}),
        (base().map(functools.partial(scale, by=2)), base().map(functools.partial(scale, by=3)), {"chain.2.MapMapDataset.transform"}),
        (base().map(Flip("1")), base().map(Flip("2")), {"chain.2.MapMapDataset.transform"}),
        (base().seed(1).random_map(Crop(3)), base().seed(1).random_map(Crop(4)), {"chain.3.RandomMapMapDataset.transform"}),
        (base().random_map(Crop(), seed=1), base().random_map(Crop(), seed=2), {"chain.2.RandomMapMapDataset.rng_pool.seed"}),
        (base().to_iter_dataset(NO_THREADS).random_map(Crop(), seed=1), base().to_iter_dataset(NO_THREADS).random_map(Crop(), seed=2), {"chain.3.RandomMapIterDataset.seed"}),
        (base().filter(scale), base().filter(halve), {"chain.2.FilterMapDataset.filter_fn"}),
        (mixed(0.5, 0.5), mixed(0.3, 0.7), {"chain.3.MixedMapDataset.selection_map.proportions", "chain.3.MixedMapDataset.selection_map.length", "chain.3.MixedMapDataset.length"}),
        (packed(2, 8), packed(3, 9), {"chain.4.FirstFitPackIterDataset.num_packing_bins", "chain.4.FirstFitPackIterDataset.length_struct"}),
        (Every(base(), 2), Every(base(), 3), {"chain.2.Every.length"}),
        (Every(base(), 2), Every(base(), 2, "2"), {"chain.2.Every.version"}),
        (base().batch(3).map(scale), base().map(scale).batch(3), {"chain"}),
        (base().batch(3), base().batch(3).repeat(2), {"chain"}),
        (grain.MapDataset.source([1, 2, 3]), grain.MapDataset.source(np.arange(3)), {"chain.1.SourceMapDataset.source"}),
    ],
)  # fmt: skip
def test_whatever_decides_the_stream_is_a_difference_with_a_name(
    before: Any, now: Any, expected: set[str]
) -> None:
    assert names(before, before) == set()
    assert names(before, now) == expected


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (base().to_iter_dataset(NO_THREADS), base().to_iter_dataset(THREADS)),
        (
            base().to_iter_dataset(NO_THREADS),
            experimental.ThreadPrefetchIterDataset(base().to_iter_dataset(THREADS), prefetch_buffer_size=3),
        ),
        (
            base().to_iter_dataset(NO_THREADS),
            experimental.WithOptionsIterDataset(
                base().to_iter_dataset(NO_THREADS), experimental.DatasetOptions(filter_warn_threshold_ratio=0.1)
            ),
        ),
        (
            base().to_iter_dataset(NO_THREADS).mp_prefetch(grain.multiprocessing.MultiprocessingOptions(2, 1)),
            base().to_iter_dataset(THREADS).mp_prefetch(grain.multiprocessing.MultiprocessingOptions(2, 9)),
        ),
    ],
)  # fmt: skip
def test_what_is_about_speed_alone_is_none(before: Any, now: Any) -> None:
    assert names(before, now) == set()


@pytest.mark.parametrize("others", [0, 1, 3])
def test_another_number_of_workers_is_told_as_that(others: int) -> None:
    def of(workers: int) -> Any:
        options = grain.multiprocessing.MultiprocessingOptions(workers)
        return base().batch(2).to_iter_dataset(NO_THREADS).mp_prefetch(options)

    (difference,) = chain(of(2)).diff(chain(of(others)))
    assert (difference.name, difference.checkpoint, difference.now) == ("workers", "2", f"{others}")
    assert "it would go on with other elements" in difference.note
    threads = experimental.multithread_prefetch(base().to_iter_dataset(NO_THREADS), 3, 1)
    assert chain(threads).workers == 3


def test_another_version_of_grain_is_a_difference() -> None:
    (difference,) = chain(base(), "0.2.18").diff(chain(base(), "0.3"))
    assert (difference.name, difference.checkpoint, difference.now) == ("grain_version", "0.2.18", "0.3")  # fmt: skip


def test_a_chain_that_was_iterated_is_the_same_one() -> None:
    makes: list[Any] = [
        lambda: base().seed(3).shuffle().random_map(Crop()).batch(2),
        lambda: base().to_iter_dataset(THREADS).seed(3).random_map(Crop()).batch(2),
        lambda: mixed(0.3, 0.7).batch(2),
        lambda: experimental.WindowShuffleIterDataset(
            base().to_iter_dataset(NO_THREADS), window_size=3, seed=1
        ),
    ]
    for make in makes:
        used = make()
        list(used)
        used.map(scale)
        assert chain(used) == chain(make())


def test_a_chain_is_described_alike_in_another_process(tmp_path: pathlib.Path) -> None:
    code = (
        "import json; from tests.test_grain_chain import *;"
        "print(json.dumps(chain(base().seed(3).shuffle().random_map(Crop(mask=object())).map(lambda e: e)"
        ".map(functools.partial(scale, by=object())).batch(2, batch_fn=Flip('1').map)).to_dict()))"
    )
    root = pathlib.Path(__file__).parent.parent
    found = [
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert found[0] == found[1]
    text = found[0].decode()
    assert " at 0x" not in text
    assert "scale(...)" in text
    assert "Flip version 1" in text
    assert "Crop(size=3)" in text


def test_a_chain_survives_json_and_is_bounded() -> None:
    many = grain.MapDataset.mix([base().map(scale).repeat(2) for _ in range(200)])
    for dataset in (base().shuffle(seed=1).batch(3), many, packed(2, 8)):
        made = chain(dataset)
        text = json.dumps(made.to_dict())
        assert GrainChain.from_dict(json.loads(text)) == made
        assert len(made.links) <= MAX_LINKS + 1
        assert len(text) < 32 << 10
    other = grain.MapDataset.mix(
        [base(13 if i == 0 else 12).map(scale).repeat(2) for i in range(200)]
    )
    assert {name for name in names(many, other) if name.startswith("chain.1.")} == {
        "chain.1.....sha256"
    }


class Alone(grain.MapDataset[Any]):
    """A data set of a user's who has forgotten Grain's own set-up, which Grain forgives."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return index


def test_a_data_set_without_grains_set_up_is_described() -> None:
    (link,) = chain(Alone()).links
    assert link == {"class": "Alone", "from": [], "settings": {"length": 3}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"version": True},
        {"links": 3},
        {"links": [{"class": 3, "settings": {}, "from": []}]},
        {"links": [{"class": "A", "settings": [], "from": []}]},
        {"workers": "2"},
        {"grain": 3},
    ],
)
def test_what_is_no_chain_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        GrainChain.from_dict({**chain(base()).to_dict(), **wrong})
