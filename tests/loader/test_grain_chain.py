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

import loader
import loader.streams.pipeline
from loader.reading.processes import Shard
from loader.streams.chain_identity import GrainChain
from loader.streams.grain_chain import MAX_LINKS, chain_of

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


class Add(grain.transforms.Map):
    def __init__(self, k: Any) -> None:
        self.k, self.seen = k, 0

    def map(self, element: Any) -> Any:
        self.seen += 1
        return element

    def twice(self, element: Any) -> Any:
        return element


class Below(grain.transforms.Filter):
    def __init__(self, most: int) -> None:
        self.most = most

    def filter(self, element: Any) -> bool:
        return bool(element < self.most)


def scale(element: Any, by: Any = 1) -> Any:
    return element * by


def halve(element: Any) -> Any:
    return element / 2


def stack(elements: Any) -> Any:
    return np.stack(elements)


class Every(grain.MapDataset[Any]):
    """A data set of a user's."""

    def __init__(self, parent: Any, n: int, version: str = "1", extra: Any = None) -> None:
        super().__init__(parent)
        self.n, self.version, self._extra = n, version, extra

    def __len__(self) -> int:
        return len(self._parent) // self.n

    def __getitem__(self, index: Any) -> Any:
        return self._parent[index * self.n]


def base(count: int = 12) -> Any:
    return grain.MapDataset.range(count)


def chain(dataset: Any, version: str = "0.2.18") -> GrainChain:
    return chain_of(dataset, version)


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
        (base().map(Add(1)), base().map(Add(2)), {"chain.2.MapMapDataset.transform.k"}),
        (base().map(Add(np.arange(3))), base().map(Add(np.ones(3))), {"chain.2.MapMapDataset.transform.k"}),
        (base().map(Add([Add(1)])), base().map(Add([Add(2)])), {"chain.2.MapMapDataset.transform.k"}),
        (base().map(Add(1).map), base().map(Add(1).twice), {"chain.2.MapMapDataset.transform"}),
        (base().to_iter_dataset(NO_THREADS).map(Add(1)), base().to_iter_dataset(NO_THREADS).map(Add(2)), {"chain.3.MapIterDataset.transform.k"}),
        (base().map(functools.partial(scale, by=Add(1))), base().map(functools.partial(scale, by=Add(2))), {"chain.2.MapMapDataset.transform"}),
        (base().map(functools.partial(Add(1).map)), base().map(functools.partial(Add(2).map)), {"chain.2.MapMapDataset.transform"}),
        (base().filter(Below(3)), base().filter(Below(4)), {"chain.2.FilterMapDataset.filter_fn.most"}),
        (base().batch(3, batch_fn=Add(1).map), base().batch(3, batch_fn=Add(2).map), {"chain.2.BatchMapDataset.batch_fn.k"}),
        (base().seed(1).random_map(Crop(3)), base().seed(1).random_map(Crop(4)), {"chain.3.RandomMapMapDataset.transform.size"}),
        (base().random_map(Crop(), seed=1), base().random_map(Crop(), seed=2), {"chain.2.RandomMapMapDataset.rng_pool.seed"}),
        (base().to_iter_dataset(NO_THREADS).random_map(Crop(), seed=1), base().to_iter_dataset(NO_THREADS).random_map(Crop(), seed=2), {"chain.3.RandomMapIterDataset.seed"}),
        (base().filter(scale), base().filter(halve), {"chain.2.FilterMapDataset.filter_fn"}),
        (mixed(0.5, 0.5), mixed(0.3, 0.7), {"chain.3.MixedMapDataset.selection_map.proportions", "chain.3.MixedMapDataset.selection_map.length", "chain.3.MixedMapDataset.length"}),
        (packed(2, 8), packed(3, 9), {"chain.4.FirstFitPackIterDataset.num_packing_bins", "chain.4.FirstFitPackIterDataset.length_struct"}),
        (Every(base(), 2), Every(base(), 3), {"chain.2.Every.length", "chain.2.Every.n"}),
        (Every(base(), 5), Every(base(), 6), {"chain.2.Every.n"}),
        (Every(base(), 2, extra=Add(1)), Every(base(), 2, extra=Add(2)), {"chain.2.Every._extra"}),
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
        lambda: Every(base().map(Add(1)), 2, extra=Add(1)).batch(1).map(Flip("1")).filter(Below(9)),
        lambda: a_mixture(web=a_pipeline(transform=Scale(2))).dataset.map(Add(1)),
        lambda: experimental.WindowShuffleIterDataset(
            base().to_iter_dataset(NO_THREADS), window_size=3, seed=1
        ),
    ]
    for make in makes:
        used = make()
        list(used)
        used.map(scale)
        assert chain(used) == chain(make())


@pytest.mark.processes
def test_a_chain_is_described_alike_in_another_process(tmp_path: pathlib.Path) -> None:
    code = (
        "import json; from tests.loader.test_grain_chain import *;"
        "print(json.dumps(chain(base().seed(3).shuffle().random_map(Crop(mask=object())).map(lambda e: e)"
        ".map(functools.partial(scale, by=object())).batch(2, batch_fn=Flip('1').map)).to_dict()))"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    found = [
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert found[0] == found[1]
    text = found[0].decode()
    assert " at 0x" not in text
    assert "scale(by=<object>)" in text
    assert "Flip.map version 1" in text
    assert '"transform": "Crop", "transform.mask": "<object>", "transform.size": "3"' in text


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


class Scale:
    """A pipeline's transform."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] * self.by}


def a_pipeline(count: int = 400, transform: Any = None, **settings: Any) -> loader.Pipeline:
    config = {"batch_size": 8, "seed": 1, "final_batch": "pad", "num_epochs": 2, **settings}
    source = loader.ArraySource({"x": np.arange(float(count))})
    return loader.Pipeline(source, loader.PipelineConfig(**config), transform)


def a_mixture(web: loader.Pipeline, books: int = 1) -> loader.Mixture:
    return loader.Mixture({"web": web, "books": a_pipeline(24)}, {"web": 2, "books": books})


#: What a pipeline's identity is made of, each with what it is called.
STREAMS: list[tuple[dict[str, Any], set[str]]] = [
    ({"seed": 2}, {"config.seed"}),
    ({"batch_size": 7}, {"config.batch_size", "length"}),
    ({"final_batch": "partial"}, {"config.final_batch"}),
    ({"num_epochs": 3}, {"config.num_epochs", "length"}),
    ({"shuffle": "permutation"}, {"config.shuffle", "order.kind"}),
    ({"skip": [(70, 80)]}, {"config.skip", "length"}),
    ({"exclude": [300, 301]}, {"config.exclude"}),
    ({"on_bad_record": "mask"}, {"config.on_bad_record"}),
    ({"record_keys": True}, {"config.record_keys", "keys.version"}),
    ({"transform": Scale(3)}, {"transform.by"}),
    ({"transform": None}, {"transform", "transform.by"}),
    ({"transform": functools.partial(Scale(2), object())}, {"transform", "transform.by"}),
]


@pytest.mark.parametrize(("change", "expected"), STREAMS, ids=range(len(STREAMS)))
def test_batches_of_ours_are_known_as_their_stream_is(
    change: dict[str, Any], expected: set[str]
) -> None:
    """However they came into a chain of Grain's."""
    before = a_pipeline(transform=Scale(2))
    now = a_pipeline(**{"transform": Scale(2), **change})
    assert names(before.dataset.map(scale), before.dataset.map(scale)) == set()
    found = names(before.dataset.map(scale), now.dataset.map(scale))
    assert found - {"chain.2.MapMapDataset.length"} == {
        f"chain.1.NumberedBatches.{name}" for name in expected
    }
    source = grain.MapDataset.source
    found = {name for name in names(source(before), source(now)) if ".source." in name}
    assert found == {f"chain.1.SourceMapDataset.source.{name}" for name in expected - {"length"}}
    if "record_keys" in change:
        return  # which both parts of a mixture have, or none
    found = names(a_mixture(before).dataset, a_mixture(now).dataset)
    assert found - {"chain.1.NumberedBatches.length"} == {
        f"chain.1.NumberedBatches.parts.web.{name}" for name in expected - {"length"}
    }


def test_batches_of_ours_from_another_place_or_share_are_others() -> None:
    pipeline, mixture = a_pipeline(), a_mixture(a_pipeline())
    later = pipeline.batches_from(pipeline.position(3))
    assert "chain.1.NumberedBatches.start" in names(pipeline.dataset, later)
    half = pipeline.batches_from(loader.Position(), Shard(1, 2))
    assert names(pipeline.dataset, half) == {"chain.1.NumberedBatches.shard"}
    assert names(mixture.dataset, a_mixture(a_pipeline(), 2).dataset) >= {
        "chain.1.NumberedBatches.mixture.weights.web"
    }


def test_a_pipeline_in_a_chain_has_the_versions_of_its_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = chain(a_pipeline(record_keys=True).dataset)
    monkeypatch.setattr(loader.streams.pipeline, "KEYS_VERSION", 2)
    monkeypatch.setattr(loader.streams.pipeline, "ORDER_VERSIONS", {"feistel": 2})
    found = {one.name for one in before.diff(chain(a_pipeline(record_keys=True).dataset))}
    assert found == {f"chain.1.NumberedBatches.{name}.version" for name in ("keys", "order")}


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
