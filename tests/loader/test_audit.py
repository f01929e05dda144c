"""The audit: every planted fault is found and named as what it is, and a clean stream has none."""

import ast
import dataclasses
import itertools
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loader
import loader.order
from loader import ArraySource, AuditReport, Pipeline, PipelineConfig, audit, audit_batches
from loader.audit import formula, rows
from loader.audit.formula import by_formula
from loader.audit.reading import another_order, ids_of
from loader.audit.rows import RowsOfIds

ROOT: Final = Path(__file__).resolve().parents[2]
Batch = dict[str, Any]
Batches = list[Batch]

SIZES: Final = {11: 4, 10_000: 96}  # 10,000 = 104 * 96 + 16
POLICIES: Final = ("pad", "partial", "drop")


def a_source(n: int, ids: str = "numbers") -> ArraySource:
    x = (np.arange(n) / 10).astype(np.float32)
    given = {
        "rows": None,
        "numbers": np.arange(n) * 3 + 100,
        "strings": [f"record-{i:06}" for i in range(n)],
    }[ids]
    return ArraySource({"x": x, "y": 2 * x - 1}, given)


def oracle(batch: Batch) -> Any:
    return np.isclose(batch["y"], 2 * batch["x"] - 1)


def a_config(n: int, **settings: Any) -> PipelineConfig:
    chosen = {"batch_size": SIZES[n], "seed": 17, "final_batch": "pad", "num_epochs": 3}
    return PipelineConfig(**{**chosen, **settings})


def stream(n: int, **settings: Any) -> tuple[ArraySource, PipelineConfig, Batches]:
    source, config = a_source(n), a_config(n, **settings)
    batches = [dict(batch) for batch in Pipeline(source, config)]
    return source, config, [{k: v.copy() for k, v in batch.items()} for batch in batches]


def audited(source: Any, config: PipelineConfig, batches: Batches) -> AuditReport:
    return audit_batches(batches, source, config, alignment=oracle)


def counts(report: AuditReport) -> dict[str, int]:
    return {finding.name: finding.count for finding in report.findings if finding.count}


def slot_of(batches: Batches, a: tuple[int, int], b: tuple[int, int]) -> None:
    """Puts the record in slot b into slot a as well."""
    for name in batches[0]:
        batches[a[0]][name][a[1]] = batches[b[0]][name][b[1]]


def swap(batches: Batches, a: tuple[int, int], b: tuple[int, int]) -> None:
    for name in batches[0]:
        one, other = batches[a[0]][name][a[1]].copy(), batches[b[0]][name][b[1]].copy()
        batches[a[0]][name][a[1]], batches[b[0]][name][b[1]] = other, one


# --- clean streams ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shuffle", loader.ORDER_VERSIONS)
@pytest.mark.parametrize("final_batch", POLICIES)
def test_a_clean_stream_has_no_finding(n: int, shuffle: str, final_batch: str) -> None:
    config = a_config(n, shuffle=shuffle, final_batch=final_batch)
    pipeline = Pipeline(a_source(n, "strings" if n == 11 else "numbers"), config)
    report = audit(pipeline, alignment=oracle)
    assert report.clean
    assert str(report).startswith("clean: ")
    rest = n % SIZES[n]
    assert report.left_out == ({"dropped": 3 * rest} if final_batch == "drop" else {})
    assert report.coverage.records == 3 * (n - rest * (final_batch == "drop"))
    assert report.coverage.compared == report.coverage.judged == report.coverage.records
    assert report.coverage.padding == 3 * (SIZES[n] - rest) * (final_batch == "pad")
    assert report.coverage.batches == len(pipeline)
    assert report.coverage.fields == ("x", "y")
    ids_only = audit(pipeline, ids_only=True)
    assert ids_only.clean
    assert ids_only.epochs == report.epochs
    assert [epoch.epoch for epoch in report.epochs] == [0, 1, 2]


RANGES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda p: (p[0], sum(p))), max_size=2
)


@given(
    n=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    final_batch=st.sampled_from(POLICIES),
    shuffle=st.sampled_from(list(loader.ORDER_VERSIONS)),
    ids=st.sampled_from(["rows", "numbers", "strings"]),
    num_epochs=st.integers(1, 3),
    skip=RANGES,
    exclude=st.sets(st.integers(0, 22), max_size=4),
)
def test_whatever_the_config_a_clean_stream_has_no_finding(
    n: int, batch_size: int, ids: str, exclude: set[int], **settings: Any
) -> None:
    source = a_source(n, ids)
    named = [source.ids(np.array([row]))[0].item() for row in exclude if row < n]
    config = PipelineConfig(batch_size, 5, exclude=tuple(named), **settings)
    try:
        pipeline = Pipeline(source, config)
    except ValueError:  # no batch at all
        return
    report = audit(pipeline, alignment=oracle)
    assert report.clean, str(report)
    assert audit(pipeline, ids_only=True).clean
    epochs = config.num_epochs or 0
    assert sum(report.left_out.values()) + report.coverage.records == epochs * n
    assert [epoch.epoch for epoch in report.epochs] == list(range(epochs))
    for epoch_count in report.epochs:
        assert sum(epoch_count.left_out.values()) + epoch_count.delivered == n
    for epoch in range(epochs):
        alone = audit(pipeline, range(epoch, epoch + 1))
        assert alone.clean, str(alone)


def test_a_stream_without_end_is_audited_as_far_as_it_came() -> None:
    source, config = a_source(11), a_config(11, num_epochs=None)
    pipeline = Pipeline(source, config)
    assert [epoch.epoch for epoch in audit(pipeline).epochs] == [0]
    assert [epoch.epoch for epoch in audit(pipeline, range(5, 7)).epochs] == [5, 6]
    for count in range(8):
        report = audit_batches(itertools.islice(pipeline, count), source, config)
        assert report.clean, str(report)
        assert sum(epoch.delivered + epoch.ahead for epoch in report.epochs) % 11 == 0


def test_a_skip_of_many_epochs_costs_nothing() -> None:
    source = a_source(11)
    config = a_config(11, num_epochs=None, skip=[(4, 3 * 10**12 + 1)])
    batches = itertools.islice(Pipeline(source, config), 9)
    report = audit_batches(batches, source, config)
    assert report.clean, str(report)
    assert [epoch.epoch for epoch in report.epochs] == [0, 1, 10**12, 10**12 + 1]
    assert report.left_out == {"skipped": 7 + 11 * (10**12 - 2) + 4}
    assert len(report.left_out_sample["skipped"]) == 16


@pytest.mark.parametrize("skip", [((3, 6),), ((0, 6),), ((3, 9),), ((4, 30),)])
@pytest.mark.parametrize("final_batch", ["pad", "drop"])
def test_epochs_that_are_skipped_whole_are_counted(
    skip: tuple[tuple[int, int], ...], final_batch: str
) -> None:
    """Three epochs of three batches each."""
    size = 4 if final_batch == "pad" else 3
    config = a_config(11, batch_size=size, final_batch=final_batch, skip=skip)
    pipeline = Pipeline(a_source(11), config)
    report = audit(pipeline)
    assert report.clean
    skipped = dropped = 0
    for epoch in report.epochs:
        numbers = range(3 * epoch.epoch, 3 * epoch.epoch + 3)
        passed = [i % 3 for i in numbers if any(low <= i < high for low, high in skip)]
        here = sum(min(size, 11 - size * i) for i in passed)
        assert epoch.left_out.get("skipped", 0) == here
        skipped += here
        dropped += epoch.left_out.get("dropped", 0)
    assert len(report.epochs) == 3
    assert report.left_out["skipped"] == skipped > 0
    assert report.left_out.get("dropped", 0) == dropped == (6 if final_batch == "drop" else 0)
    assert report.left_out_sample["skipped"]


def test_a_batch_that_comes_again_behind_epochs_that_are_skipped_whole_is_found() -> None:
    source, config, batches = stream(11, batch_size=11, exclude=(100,), skip=((1, 3),))
    assert audited(source, config, batches).clean
    assert not audited(source, config, [*batches, *batches]).clean


def test_expected_omissions_are_told_apart() -> None:
    class Source(ArraySource):
        def read(self, rows: Any, /) -> dict[str, Any]:
            if np.isin(rows, [1, 2]).any():
                raise OSError("unreadable")
            return super().read(rows)

    source = Source({"x": np.arange(11.0)})
    config = a_config(11, exclude=(3, 4), skip=((0, 1),), on_bad_record="mask", final_batch="drop")
    pipeline = Pipeline(source, config)
    report = audit(pipeline)
    assert report.clean, str(report)
    assert report.left_out["skipped"] == 4
    assert report.left_out["dropped"] == 9
    ids = [pipeline.ids(step) for step in range(len(pipeline))]
    assert report.left_out["excluded"] == np.isin(ids, [3, 4]).sum()
    assert report.left_out["bad record"] == np.isin(ids, [1, 2]).sum()
    assert set(report.left_out_sample["excluded"]) <= {3, 4}
    assert sum(report.left_out.values()) + report.coverage.records == 33
    text = str(report)
    assert "left out as configured: " in text
    json.dumps(report.to_dict())


def test_a_transform_is_not_compared_and_that_is_said() -> None:
    pipeline = Pipeline(a_source(11), a_config(11), lambda batch: {"y": batch["y"] * 2})
    report = audit(pipeline)
    assert report.clean
    assert report.coverage.fields == ()
    assert report.coverage.compared == 0
    assert any("transform" in note for note in report.coverage.notes)
    report = audit(pipeline, alignment=lambda batch: batch["y"] < 0)
    assert report.found == ("alignment",)
    assert report.alignment.causes == {"the alignment function says no": 18}


# --- planted faults -----------------------------------------------------------------------------


def swapped(batches: Batches) -> None:
    swap(batches, (0, 1), (1, 2))


def swapped_far(batches: Batches) -> None:
    swap(batches, (0, 1), (len(batches) // 3 - 1, 0))


def one_twice_and_one_never(batches: Batches) -> None:
    slot_of(batches, (1, 2), (0, 1))


def one_early_and_again(batches: Batches) -> None:
    slot_of(batches, (0, 1), (1, 2))


def reversed_in_a_batch(batches: Batches) -> None:
    batches[1] = {name: value[::-1] for name, value in batches[1].items()}


def a_batch_missing(batches: Batches) -> None:
    del batches[1]


def a_batch_twice(batches: Batches) -> None:
    batches.insert(1, batches[1])


def a_batch_of_another_place_twice(batches: Batches) -> None:
    batches[1] = batches[0]


def batches_swapped(batches: Batches) -> None:
    batches[0], batches[1] = batches[1], batches[0]


def first_batch_missing(batches: Batches) -> None:
    del batches[0]


def last_batch_of_all_missing(batches: Batches) -> None:
    del batches[-1]


def last_batch_of_all_twice(batches: Batches) -> None:
    batches.append(batches[-1])


def last_batch_of_an_epoch_twice(batches: Batches) -> None:
    batches.insert(len(batches) // 3, batches[len(batches) // 3 - 1])


def a_foreign_id(batches: Batches) -> None:
    batches[1]["id"][2] = 7


def a_foreign_batch_more(batches: Batches) -> None:
    batches.insert(2, {**batches[2], "id": np.arange(len(batches[2]["id"]))})


def a_mask_off_by_one(batches: Batches) -> None:
    last = batches[len(batches) // 3 - 1]
    last["mask"] = np.roll(last["mask"], -1)


def a_mask_one_short(batches: Batches) -> None:
    last = batches[len(batches) // 3 - 1]
    last["mask"][last["mask"].sum() - 1] = False


def a_pad_slot_counted(batches: Batches) -> None:
    last = batches[len(batches) // 3 - 1]
    last["mask"][last["mask"].sum()] = True


def all_pad_slots_counted(batches: Batches) -> None:
    batches[len(batches) // 3 - 1]["mask"][:] = True


def a_record_masked(batches: Batches) -> None:
    batches[0]["mask"][1] = False


def labels_apart(batches: Batches) -> None:
    batches[1]["y"] = batches[1]["y"][::-1]


def one_bit_of_one_field(batches: Batches) -> None:
    batches[1]["x"].view(np.uint32)[2] ^= 1


def a_field_missing(batches: Batches) -> None:
    for batch in batches:
        batch["z"] = batch.pop("x")
        batch["x"] = batch["y"]


def another_dtype(batches: Batches) -> None:
    for batch in batches:
        batch["y"] = batch["y"].astype(np.float64)


def padding_not_empty(batches: Batches) -> None:
    batches[-1]["x"][-1] = 1


def a_record_short(batches: Batches) -> None:
    batches[1] = {name: value[:-1] for name, value in batches[1].items()}


def an_epoch_order_again(batches: Batches) -> None:
    size = len(batches) // 3
    batches[size : 2 * size] = batches[:size]


Plant = Callable[[Batches], None]
PLANTS: Final[list[tuple[Plant, dict[str, Any]]]] = [
    (swapped, {"order": 2}),
    (swapped_far, {"order": 2}),
    (one_twice_and_one_never, {"multiplicity": 1, "omissions": 1}),
    (one_early_and_again, {"multiplicity": 1, "omissions": 1}),
    (reversed_in_a_batch, {"order": "batch"}),
    (a_batch_missing, {"omissions": "batch"}),
    (a_batch_twice, {"multiplicity": "batch"}),
    (a_batch_of_another_place_twice, {"multiplicity": "batch", "omissions": "batch"}),
    (batches_swapped, {"order": "batch"}),
    (first_batch_missing, {"omissions": "batch"}),
    (last_batch_of_all_missing, {"omissions": "rest"}),
    (last_batch_of_all_twice, {"multiplicity": "rest"}),
    (last_batch_of_an_epoch_twice, {"multiplicity": "rest"}),
    (a_foreign_id, {"membership": 1, "omissions": 1}),
    (a_foreign_batch_more, {"membership": "batch"}),
    (a_mask_off_by_one, {"membership": 1, "omissions": 1}),
    (a_mask_one_short, {"omissions": 1}),
    (a_pad_slot_counted, {"membership": 1}),
    (all_pad_slots_counted, {"membership": "padding"}),
    (a_record_masked, {"omissions": 1}),
    (labels_apart, {"alignment": "batch"}),
    (one_bit_of_one_field, {"alignment": 1}),
    (a_field_missing, {"alignment": "all"}),
    (another_dtype, {"alignment": "all"}),
    (padding_not_empty, {"alignment": 1}),
    (a_record_short, {"omissions": 1}),
    (an_epoch_order_again, {"order": "most"}),
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("plant", "expected"), PLANTS)
def test_a_planted_fault_is_named_as_what_it_is(
    plant: Plant, expected: dict[str, Any], n: int
) -> None:
    source, config, batches = stream(n)
    assert audited(source, config, batches).clean
    plant(batches)
    report = audited(source, config, batches)
    size, rest = SIZES[n], n % SIZES[n]
    amounts = {"batch": size, "rest": rest, "padding": size - rest}
    amounts |= {"all": 3 * n}
    found = counts(report)
    if expected == {"order": "most"}:
        assert set(found) == {"order"}
        assert n // 2 <= found["order"] <= n
    else:
        assert found == {name: amounts.get(v, v) for name, v in expected.items()}, str(report)
    assert not report.clean
    assert set(report.found) == set(expected)
    for finding in report.findings:
        assert (finding.first is None) == (finding.count == 0)
        assert len(finding.sample) == min(finding.count, 16)
        assert list(finding.sample) == sorted(finding.sample, key=lambda o: (o.step, o.place))
    json.dumps(report.to_dict())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_another_epochs_or_seeds_order_is_a_finding_of_order_alone(n: int, seed: int) -> None:
    source, config = a_source(n), a_config(n, final_batch="partial")
    pipeline = Pipeline(source, config)
    confused = Pipeline(source, a_config(n, seed=17 + 1 + seed, final_batch="partial"))
    assert audited(source, config, list(confused)).found == ("order",)
    for a, b in ((0, 1), (1, 2)):
        # Seed + epoch: each epoch has the order of the next.
        per_epoch = pipeline.steps_per_epoch
        epochs = [list(pipeline)[e * per_epoch : (e + 1) * per_epoch] for e in range(3)]
        report = audited(
            source, a_config(n, final_batch="partial", num_epochs=2), epochs[a] + epochs[b]
        )
        assert report.found == (("order",) if a else ())


@pytest.mark.parametrize("n", SIZES)
def test_another_seeds_order_under_drop_is_a_finding_of_order_alone(n: int) -> None:
    """Though other records are dropped than should be."""
    source, config = a_source(n), a_config(n, final_batch="drop")
    confused = Pipeline(source, a_config(n, final_batch="drop", seed=18))
    assert audited(source, config, list(confused)).found == ("order",)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("expected", POLICIES)
@pytest.mark.parametrize("delivered", POLICIES)
def test_another_final_batch_is_a_finding_of_omissions(
    n: int, expected: str, delivered: str
) -> None:
    source = a_source(n)
    config = a_config(n, final_batch=expected)
    batches = list(Pipeline(source, a_config(n, final_batch=delivered)))
    report = audited(source, config, batches)
    assert report.found == (() if delivered == expected else ("omissions",)), str(report)
    if delivered != expected:
        rest = n % SIZES[n]
        assert report.omissions.count == 3 * (rest if "drop" in (delivered, expected) else 1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("final_batch", ["pad", "partial"])
def test_batches_across_an_epochs_end_are_a_finding_of_order(n: int, final_batch: str) -> None:
    source = a_source(n)
    config = a_config(n, final_batch=final_batch)
    whole = list(Pipeline(source, a_config(n, final_batch="partial")))
    flat = {name: np.concatenate([batch[name] for batch in whole]) for name in whole[0]}
    size = SIZES[n]
    batches = [
        {name: value[low : low + size] for name, value in flat.items()}
        for low in range(0, 3 * n, size)
    ]
    report = audited(source, config, batches)
    assert report.found == ("order",), str(report)
    first = report.order.first
    assert first is not None
    assert (first.epoch, first.step, first.place) == (0, n // size, n % size)
    assert report.order.causes["the epoch's end is crossed"] == 2


@pytest.mark.parametrize("n", SIZES)
def test_an_excluded_record_that_is_delivered_does_not_belong(n: int) -> None:
    source, _, batches = stream(n)
    config = a_config(n, exclude=(103,))
    report = audited(source, config, batches)
    assert counts(report) == {"membership": 3}
    assert report.membership.causes == {"an excluded record is delivered": 3}
    assert report.membership.first is not None
    assert report.membership.first.id == 103


@pytest.mark.parametrize("n", SIZES)
def test_an_excluded_record_that_is_masked_but_not_emptied_is_found(n: int) -> None:
    source, _, _ = stream(n)
    config = a_config(n, exclude=(103,))
    batches = [dict(batch) for batch in Pipeline(source, config)]
    for batch in batches:
        batch["y"][batch["id"] == 103] = 2
    report = audited(source, config, batches)
    assert counts(report) == {"alignment": 3}


@pytest.mark.parametrize("n", SIZES)
def test_a_skipped_batch_that_is_delivered_is_a_finding_of_omissions(n: int) -> None:
    source, _, batches = stream(n)
    report = audited(source, a_config(n, skip=((1, 2),)), batches)
    assert counts(report) == {"omissions": SIZES[n]}
    assert report.omissions.first is not None
    assert report.omissions.first.cause == "came, though skipped"


@pytest.mark.parametrize("n", SIZES)
def test_a_batch_that_is_skipped_in_the_wrong_epoch_is_found(n: int) -> None:
    source, config = a_source(n), a_config(n, skip=((1, 2),))
    per_epoch = -(-n // SIZES[n])
    wrong = Pipeline(source, a_config(n, skip=((per_epoch + 1, per_epoch + 2),)))
    report = audited(source, config, list(wrong))
    assert counts(report) == {"omissions": 2 * SIZES[n]}


def test_a_record_masked_as_bad_that_can_be_read_is_an_omission() -> None:
    source, config, batches = stream(11, on_bad_record="mask")
    batches[0]["mask"][1] = False
    report = audited(source, config, batches)
    assert counts(report) == {"omissions": 1}
    assert report.left_out == {}
    ids = [{"id": batch["id"], "mask": batch["mask"]} for batch in batches]
    report = audit_batches(ids, source, config)
    assert report.clean
    assert report.left_out == {"bad record": 1}
    assert any("was not tried" in note for note in report.coverage.notes)


# Masked slots have places too: a batch of nothing else is a step, and moves those behind it.


@pytest.mark.parametrize("ids_only", [False, True])
@pytest.mark.parametrize(
    ("picked", "found"),
    [
        ([1, 0, 2, 3, 4, 5], {"order": 1}),
        ([0, 2, 3, 4, 5, 1], {"order": 1}),
        ([0, 1, 1, 2, 3, 4, 5], {"multiplicity": 1}),
        ([1, 0, 1, 2, 3, 4, 5], {"multiplicity": 1}),
        ([0, 1, 1, 1, 1, 2, 3, 4, 5], {"multiplicity": 3}),
        ([0, 1, 2, 3, 4, 5, 1], {"multiplicity": 1}),
        ([0, 2, 3, 4, 5], {"omissions": 1}),
    ],
)
def test_a_batch_of_an_excluded_record_that_is_moved_or_repeated_is_found(
    picked: list[int], found: dict[str, int], *, ids_only: bool
) -> None:
    source = ArraySource({"x": np.arange(6.0)})
    config = PipelineConfig(1, 4, "pad", 1, shuffle="none", exclude=(1,))
    batches = [dict(batch) for batch in Pipeline(source, config)]
    if ids_only:
        batches = [{"id": batch["id"], "mask": batch["mask"]} for batch in batches]
    assert audit_batches(batches, source, config).clean
    report = audit_batches([batches[i] for i in picked], source, config)
    assert counts(report).items() >= found.items(), str(report)
    (name,) = found
    assert any("masked" in cause for cause in getattr(report, name).causes) == (name != "omissions")
    finding = getattr(report, name)
    assert finding.first is not None
    assert finding.first.id == 1


def test_excluded_and_bad_records_in_each_others_slots_are_found() -> None:
    class Source(ArraySource):
        def read(self, rows: Any, /) -> Any:
            if np.isin(rows, [2, 3]).any():
                raise OSError("unreadable")
            return super().read(rows)

    source = Source({"x": np.arange(8.0)})
    config = PipelineConfig(4, 4, "pad", 1, shuffle="none", on_bad_record="mask")
    for exclude, a, b in (((0, 1), 0, 1), ((), 2, 3)):
        config = dataclasses.replace(config, exclude=exclude)
        batches = [{k: v.copy() for k, v in batch.items()} for batch in Pipeline(source, config)]
        assert not batches[0]["mask"][[a, b]].any()
        assert audit_batches(batches, source, config).clean
        swap(batches, (0, a), (0, b))
        report = audit_batches(batches, source, config)
        assert counts(report) == {"order": 2}
        assert report.order.causes == {"in another place, masked": 2}
        assert report.order.first is not None
        assert (report.order.first.id, report.order.first.place) == (b, a)


@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("at", [0, 2, 3, 9])
def test_a_batch_without_a_record_too_much_is_found(at: int, slots: int) -> None:
    source, config, batches = stream(11)
    more = {name: np.zeros_like(field[:slots]) for name, field in batches[0].items()}
    batches.insert(at, {**more, "id": np.full(slots, -1)})
    report = audited(source, config, batches)
    assert counts(report) == {"membership": 1}
    assert report.membership.first is not None
    assert report.membership.first.step == at


@pytest.mark.parametrize("fault", ["missing", "dtype", "more", "key"])
def test_a_batch_of_masked_slots_alone_has_the_fields_of_all(fault: str) -> None:
    source = ArraySource({"x": np.arange(6.0)})
    config = PipelineConfig(1, 4, "pad", 1, exclude=(1,), record_keys=True)
    batches = [dict(batch) for batch in Pipeline(source, config)]
    (masked,) = (batch for batch in batches if not batch["mask"].any())
    if fault == "missing":
        del masked["x"]
    elif fault == "dtype":
        masked["x"] = masked["x"].astype(np.float32)
    elif fault == "more":
        masked["y"] = np.zeros(1)
    else:
        del masked["key"]
    assert counts(audit_batches(batches, source, config)) == {"alignment": 1}


@pytest.mark.parametrize("n", SIZES)
def test_the_first_offender_is_named_with_its_place(n: int) -> None:
    source, config, batches = stream(n)
    per_epoch = len(batches) // 3
    due = batches[per_epoch + 1]["id"][2].item()
    slot_of(batches, (per_epoch + 1, 2), (per_epoch, 3))
    again = batches[per_epoch]["id"][3].item()
    report = audited(source, config, batches)
    first = report.multiplicity.first
    assert first is not None
    assert (first.epoch, first.step, first.place) == (1, per_epoch + 1, 2)
    assert (first.id, first.expected) == (again, due)
    missing = report.omissions.first
    assert missing is not None
    assert (missing.epoch, missing.step, missing.place) == (1, per_epoch + 1, 2)
    assert missing.id == due
    assert f"ID {due}" in str(report)
    assert [epoch.omitted for epoch in report.epochs] == [0, 1, 0]
    assert [epoch.again for epoch in report.epochs] == [0, 1, 0]


def test_ids_of_another_kind_do_not_belong() -> None:
    source, config, batches = stream(11)
    for batch in batches:
        batch["id"] = batch["id"].astype(str)
    report = audited(source, config, batches)
    assert report.found == ("membership", "omissions")
    assert report.omissions.count == 33


def test_many_faults_at_once_are_each_counted() -> None:
    source, config, batches = stream(10_000)
    swapped(batches)
    slot_of(batches, (5, 2), (4, 1))
    batches[10]["id"][7] = 3
    labels = batches[20]["y"]
    labels[[3, 4]] = labels[[4, 3]]
    batches[30]["mask"][9] = False
    report = audited(source, config, batches)
    assert counts(report) == {
        "membership": 1,
        "multiplicity": 1,
        "omissions": 3,
        "order": 2,
        "alignment": 2,
    }


@given(data=st.data())
def test_a_shuffled_stream_keeps_its_books(data: st.DataObject) -> None:
    """Whatever comes in whatever order, what is due either came or is said not to have come."""
    source, config, batches = stream(11, num_epochs=2)
    picked = data.draw(st.lists(st.sampled_from(range(len(batches))), max_size=9))
    report = audited(source, config, [batches[i] for i in picked])
    for epoch in report.epochs:
        assert epoch.distinct + epoch.omitted == 11
        assert epoch.delivered - epoch.distinct == epoch.again
    assert report.clean == (picked == list(range(len(batches))))
    assert report.coverage.records == sum(int(batches[i]["mask"].sum()) for i in picked)


# --- sources that answer by the order of the rows they are asked for ----------------------------


class Sorting(ArraySource):
    """Asks a library for rising rows, as HDF5 wants them, and does not put the records back."""

    sorts: tuple[str, ...] = ("read",)

    def read(self, rows: Any, /) -> Any:
        return super().read(np.sort(rows) if "read" in self.sorts else rows)

    def ids(self, rows: Any, /) -> Any:
        return super().ids(np.sort(rows) if "ids" in self.sorts else rows)


class Stale(ArraySource):
    """Answers some requests with what it read last."""

    last: Any = None

    def read(self, rows: Any, /) -> Any:
        if self.last is None or rows[0] % 3 or len(rows) != len(self.last["x"]):
            self.last = super().read(rows)
        return {name: field.copy() for name, field in self.last.items()}


class SortingItems:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, row: int) -> Any:
        return {"x": row}

    def __getitems__(self, rows: Any) -> Any:
        return [{"x": row} for row in sorted(rows)]


@pytest.mark.parametrize("kind", ["array", "strings", "items"])
def test_a_source_that_sorts_its_rows_and_does_not_put_them_back_is_found(kind: str) -> None:
    x = np.arange(11)
    made: dict[str, Callable[[], Any]] = {
        "array": lambda: Sorting({"x": x}),
        "strings": lambda: Sorting({"x": x}, [f"record-{i:06}" for i in range(11)]),
        "items": lambda: loader.SequenceSource(SortingItems()),
    }
    source = made[kind]()
    config = a_config(11)
    report = audit(Pipeline(source, config))
    assert report.found == ("alignment",)
    (cause,) = report.alignment.causes
    assert "when rows are asked for in another order" in cause
    right = np.concatenate([batch["id"][batch["mask"]] for batch in Pipeline(source, config)])
    came = np.concatenate([batch["x"][batch["mask"]] for batch in Pipeline(source, config)])
    truth = np.asarray(source.ids(x)).tolist()
    wrong = sum(truth.index(i) != value for i, value in zip(right.tolist(), came, strict=True))
    assert report.alignment.count == wrong > 0
    assert audit_batches(list(Pipeline(source, config)), source, config).found == ("alignment",)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("sorts", [("ids",), ("ids", "read")])
def test_a_source_that_sorts_its_ids_is_found(sorts: tuple[str, ...], n: int) -> None:
    source = Sorting({"x": np.arange(n)})
    source.sorts = sorts
    report = audit(Pipeline(source, a_config(n)))
    assert set(report.found) == {"order", "alignment"}
    assert audit(Pipeline(source, a_config(n)), ids_only=True).found == ("order",)


def test_a_source_that_sorts_its_rows_is_found_behind_a_transform() -> None:
    def transform(batch: Batch) -> Batch:
        return {**batch, "x": batch["x"] * 2}

    report = audit(Pipeline(Sorting({"x": np.arange(11)}), a_config(11), transform))
    assert report.found == ("alignment",)
    assert report.coverage.compared == 0
    report = audit(Pipeline(ArraySource({"x": np.arange(11)}), a_config(11), transform))
    assert report.clean
    assert "the source was asked for 33 records in two orders of rows" in report.coverage.notes
    report = audit(Pipeline(Sorting({"x": np.arange(11)}), a_config(11), transform), ids_only=True)
    assert report.clean
    assert not any("two orders" in note for note in report.coverage.notes)


@pytest.mark.parametrize("shuffle", ["feistel", "none"])
def test_a_source_that_answers_with_what_it_read_last_is_found(shuffle: str) -> None:
    source = Stale({"x": np.arange(11)})
    assert audit(Pipeline(source, a_config(11, shuffle=shuffle))).found == ("alignment",)


@given(st.lists(st.integers(0, 99), max_size=20))
def test_rows_are_read_again_in_another_order_and_put_back(rows: list[int]) -> None:
    given_rows = np.array(rows, np.int64)
    order = another_order(given_rows)
    assert sorted(order.tolist()) == list(range(len(rows)))
    read = given_rows[order].tolist()
    assert read != rows or len(rows) < 2 or rows == sorted(rows) != sorted(set(rows))
    assert read == sorted(rows) or rows == sorted(rows)
    source = ArraySource({"x": np.arange(100)}, np.arange(100) * 3)
    assert ids_of(source, given_rows).tolist() == [3 * row for row in rows]


def test_a_source_that_gives_another_number_of_ids_is_named() -> None:
    class Short(ArraySource):
        def ids(self, rows: Any, /) -> Any:
            return super().ids(rows)[: max(1, len(rows) - 1)]

    batches = list(Pipeline(a_source(11, "rows"), a_config(11)))
    with pytest.raises(ValueError, match="gave 3 IDs for 4 rows"):
        audit_batches(batches, Short({"x": np.arange(11)}), a_config(11))


# --- the order, once more -----------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", loader.ORDER_VERSIONS)
@pytest.mark.parametrize("n", [1, 2, 11, 4096, 4097, 65_537, 10**6, 2**40 + 1, 2**63])
def test_the_slow_formula_gives_the_order(shuffle: str, n: int) -> None:
    if shuffle == "permutation" and n > 10**6:
        return
    positions = [0, n // 3, n // 2, n - 1]
    for seed, epoch in ((0, 0), (17, 3), (2**32 - 1, 2**40)):
        fast = [int(loader.epoch_order(n, seed, epoch, shuffle, at, at + 1)[0]) for at in positions]
        assert by_formula(n, seed, epoch, shuffle, positions) == fast


@pytest.mark.parametrize("n", [11, 10_000])
def test_a_fault_in_the_vectorised_order_is_a_finding_of_order(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline and the audit both take the wrong order, and agree; the formula does not."""
    monkeypatch.setattr(loader.order, "mix", lambda words: None)
    monkeypatch.setattr(loader.order, "_ROUNDS", 4)
    loader.order._exact_permutation.cache_clear()
    loader.order._network.cache_clear()
    try:
        report = audit(Pipeline(a_source(n), a_config(n)))
    finally:
        loader.order._exact_permutation.cache_clear()
        loader.order._network.cache_clear()
    assert report.found == ("order",)
    assert set(report.order.causes) == {"not what the formula says"}
    assert report.order.first is not None
    assert report.order.first.expected != report.order.first.id


def test_an_order_that_is_no_permutation_is_a_finding_of_multiplicity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(n: int, seed: int, epoch: int, shuffle: str, start: int, stop: int) -> Any:
        return np.maximum(np.arange(start, stop), 1)

    monkeypatch.setattr(formula, "epoch_order", faulty)
    source, config = a_source(11), a_config(11, shuffle="none", num_epochs=1)
    ids = np.append(np.maximum(np.arange(11), 1) * 3 + 100, -1)
    batches = [{"id": part, "mask": part >= 0} for part in ids.reshape(3, 4)]
    report = audit_batches(batches, source, config)
    assert report.found == ("multiplicity", "omissions", "order")
    assert report.multiplicity.count == 1
    assert report.multiplicity.first is not None
    assert report.multiplicity.first.id == 103
    assert report.omissions.first is not None
    assert report.omissions.first.id == 100


# --- from IDs to rows ---------------------------------------------------------------------------


@given(
    ids=st.lists(
        st.integers(-(2**63), 2**63 - 1).filter(lambda i: i != -1), min_size=1, unique=True
    )
)
def test_rows_of_integer_ids_are_found(ids: list[int]) -> None:
    source = ArraySource({"x": np.arange(len(ids))}, np.array(ids))
    wanted = np.array([*ids, -1])
    assert RowsOfIds(source).rows(wanted).tolist() == [*range(len(ids)), -1]


@given(ids=st.lists(st.text("abcd€", min_size=1), min_size=1, unique=True))
def test_rows_of_string_ids_are_found(ids: list[str]) -> None:
    source = ArraySource({"x": np.arange(len(ids))}, ids)
    assert RowsOfIds(source).rows(np.array([*ids, "x"])).tolist() == [*range(len(ids)), -1]


def test_rows_are_found_though_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_hashes", lambda ids: np.zeros(len(ids), np.int64))
    found = RowsOfIds(a_source(11, "strings"))
    assert found.rows(np.array(["record-000007", "nobody"])).tolist() == [7, -1]


def test_a_source_may_find_rows_itself_and_is_not_trusted() -> None:
    class Source(ArraySource):
        def rows_of(self, ids: Any) -> Any:
            return np.where(ids == 106, 3, (ids - 100) // 3)

    source = Source({"x": np.arange(11)}, np.arange(11) * 3 + 100)
    found = RowsOfIds(source)
    assert found.rows(np.array([100, 103, 106, 107, 5_000])).tolist() == [0, 1, -1, -1, -1]
    assert found._index is None


# --- memory, layers, misuse ---------------------------------------------------------------------


class Virtual:
    """Records that are their row numbers, held nowhere."""

    def __init__(self, n: int) -> None:
        self._n = n

    fields: Final = {"x": loader.Field(np.dtype(np.int64))}

    def __len__(self) -> int:
        return self._n

    def ids(self, rows: Any, /) -> Any:
        return np.array(rows)

    def read(self, rows: Any, /) -> Any:
        raise AssertionError("an audit of IDs alone reads no record")

    def fingerprint(self) -> Any:
        raise AssertionError("an audit takes no fingerprint")


@pytest.mark.parametrize("with_faults", [False, True])
def test_memory_is_about_a_byte_a_record_for_two_epochs(*, with_faults: bool) -> None:
    n = 4_000_000
    source = Virtual(n)
    config = PipelineConfig(4096, 3, "partial", 2)
    pipeline = Pipeline(source, config)

    def batches() -> Any:
        for step in range(len(pipeline)):
            ids = pipeline.ids(step)
            yield {"id": ids[::-1] if with_faults and step % 100 == 0 else ids, "mask": ids >= 0}

    tracemalloc.start()
    try:
        report = audit_batches(batches(), source, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.found == (("order",) if with_faults else ())
    assert peak < 3 * n + 2**24


def test_ids_alone_are_audited_without_reading() -> None:
    report = audit(Pipeline(Virtual(1000), PipelineConfig(64, 3, "pad", 2)), ids_only=True)
    assert report.clean
    assert not report.coverage.masks
    assert any("IDs alone" in note for note in report.coverage.notes)


def test_progress_is_told() -> None:
    told: list[int] = []
    audit(
        Pipeline(Virtual(200_000), PipelineConfig(64, 3, "drop")),
        ids_only=True,
        progress=told.append,
    )
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == 200_000


def test_the_audit_shares_no_code_with_the_pipeline() -> None:
    allowed = {
        *(
            "loader.config",
            "loader.keys",
            "loader.identity.digests",
            "loader.order",
            "loader.progress",
        ),
        "loader.sources",
    }
    taken = {
        "loader.identity.digests": {"without_padding"},
        "loader.config": {"PipelineConfig"},
        "loader.keys": {"KEY_FIELD", "check_key_field", "record_keys"},
        "loader.order": {"Rows", "epoch_order", "position_of"},
        "loader.progress": {"Work"},
    }
    beside = {
        "provenance.py",
        "determinism.py",
    }  # tools for people, which the audit does not import
    for path in (p for p in (ROOT / "loader" / "audit").glob("*.py") if p.name not in beside):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert all(a.name.partition(".")[0] not in {"loader", "grain"} for a in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                module = node.module or ""
                if module.startswith("loader") and not module.startswith("loader.audit"):
                    assert module in allowed
                    names = {alias.name for alias in node.names}
                    assert names <= taken.get(module, names)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros(3)}, "at least id and mask"),
        ({"id": np.zeros(3)}, "at least id and mask"),
        ([1, 2], "at least id and mask"),
        ({"id": np.zeros(3), "mask": np.ones(3)}, "integers or strings"),
        ({"id": np.zeros((3, 1), int), "mask": np.ones(3)}, "integers or strings"),
        ({"id": np.zeros(3, int), "mask": np.ones(4)}, "as many truth values"),
        ({"id": np.zeros(3, int), "mask": np.full(3, 0.5)}, "as many truth values"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit_batches([batch], a_source(11), a_config(11))


@pytest.mark.parametrize(
    ("epochs", "error", "message"),
    [
        (0, ValueError, "at least one"),
        (range(2, 2), ValueError, "at least one"),
        (range(0, 3, 2), ValueError, "at least one"),
        (4, ValueError, "beyond the 3"),
        (True, TypeError, "number or a range"),
        ("1", TypeError, "integer"),
    ],
)
def test_epochs_that_are_none_are_refused(epochs: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        audit(Pipeline(a_source(11), a_config(11)), epochs)


def test_an_alignment_function_that_is_none_is_refused() -> None:
    pipeline = Pipeline(a_source(11), a_config(11))
    with pytest.raises(ValueError, match=re.escape("must return bool[4]")):
        audit(pipeline, alignment=lambda batch: True)
    with pytest.raises(ValueError, match="IDs alone"):
        audit(pipeline, alignment=oracle, ids_only=True)


# --- another loader -----------------------------------------------------------------------------


def test_grains_own_shuffle_serves_one_record_twice_and_one_never() -> None:
    n = 65_537
    shuffled = grain.MapDataset.range(n).shuffle(seed=17)
    ids = np.array([shuffled[i] for i in range(n)])
    config = PipelineConfig(256, 17, "partial")
    batches = [
        {"id": ids[low : low + 256], "mask": np.ones(len(ids[low : low + 256]), bool)}
        for low in range(0, n, 256)
    ]
    report = audit_batches(batches, Virtual(n), config)
    assert report.multiplicity.count == report.omissions.count == 1
    assert report.membership.count == 0
    (twice,) = np.flatnonzero(np.bincount(ids) == 2)
    assert report.omissions.first is not None
    assert report.omissions.first.id == n - 1
    assert report.multiplicity.first is not None
    assert report.multiplicity.first.id == twice


def test_epochs_may_be_a_number_a_range_or_a_list_in_a_row() -> None:
    source = loader.ArraySource({"x": np.arange(11)})
    pipeline = loader.Pipeline(source, loader.PipelineConfig(4, 17, "pad", 3))
    for epochs in (2, range(2), [0, 1], (0, 1)):
        report = loader.audit(pipeline, epochs=epochs)
        assert report.clean
        assert len(report.epochs) == 2
    with pytest.raises(ValueError, match="in a row"):
        loader.audit(pipeline, epochs=[0, 2])
