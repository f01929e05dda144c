"""Mixtures: turns by weight, exact over any round; parts that are what they are alone."""

import collections
import itertools
import math
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import loader
from loader import ArraySource, Mixture, Pipeline, PipelineConfig, Position, ReadOptions, Turn

THREADS = ReadOptions(num_threads=3, prefetch_buffer_size=4)


def part(num_records: int, batch_size: int = 4, seed: int = 17, **settings: Any) -> Pipeline:
    settings = {"final_batch": "pad", "num_epochs": None, **settings}
    source = ArraySource({"x": np.arange(num_records, dtype=np.float32)})
    return Pipeline(source, PipelineConfig(batch_size, seed, **settings))


def web_and_code(**settings: Any) -> Mixture:
    parts = {"web": part(23, **settings), "code": part(10, 3, seed=5, **settings)}
    return Mixture(parts, {"web": 0.7, "code": 0.3})


weights_of = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(weights_of, st.integers(0, 300))
@example([1], 0)
@example([1, 1, 1], 2)
@example([40, 1], 39)
def test_shares_are_exact_over_any_round_and_within_one_at_any_step(
    weights: list[int], first: int
) -> None:
    names = [f"p{i:02}" for i in range(len(weights))]
    mixture = Mixture({name: part(9) for name in names}, dict(zip(names, weights, strict=True)))
    divisor = math.gcd(*weights)
    shares = {name: weight // divisor for name, weight in zip(names, weights, strict=True)}
    steps = sum(shares.values())
    assert mixture.round_steps == steps
    assert mixture.weights == shares
    turns = [mixture.turn(step) for step in range(first, first + steps)]
    assert collections.Counter(turn.part for turn in turns) == shares
    given_so_far: collections.Counter[str] = collections.Counter()
    for step in range(2 * steps):
        turn = mixture.turn(step)
        assert turn.step == given_so_far[turn.part]
        assert mixture.step_of(*turn) == step
        given_so_far[turn.part] += 1
        for name, weight in shares.items():
            assert abs(given_so_far[name] - Fraction((step + 1) * weight, steps)) < 1


def test_any_window_is_within_two_of_its_share() -> None:
    names, weights = "abcd", (13, 7, 2, 1)
    mixture = Mixture(dict.fromkeys(names, part(9)), dict(zip(names, weights, strict=True)))
    turns = [mixture.turn(step).part for step in range(3 * 23)]
    for low, high in itertools.combinations(range(len(turns)), 2):
        for name, weight in zip(names, weights, strict=True):
            share = Fraction((high - low) * weight, 23)
            assert abs(turns[low:high].count(name) - share) < 2


def test_turns_of_seven_to_three() -> None:
    turns = [web_and_code().turn(step) for step in range(10)]
    assert "".join(turn.part[0] for turn in turns) == "wwcwwcwwcw"
    assert turns[:4] == [Turn("web", 0), Turn("web", 1), Turn("code", 0), Turn("web", 2)]


def test_each_batch_is_the_parts_own_whatever_the_others_are() -> None:
    mixture = web_and_code()
    for step, batch in zip(range(60), mixture, strict=False):
        turn = mixture.turn(step)
        alone = mixture.parts[turn.part][turn.step]
        assert list(batch) == ["id", "mask", "part", "x"]
        assert batch["part"].dtype == np.int32
        assert set(batch.pop("part").tolist()) == {["code", "web"].index(turn.part)}
        for name, array in alone.items():
            np.testing.assert_array_equal(batch[name], array)
        np.testing.assert_array_equal(mixture.ids(step), alone["id"])
        np.testing.assert_array_equal(mixture[step]["id"], alone["id"])


def test_order_in_which_parts_are_given_does_not_matter() -> None:
    a, b = part(23), part(10)
    one = Mixture({"a": a, "b": b}, {"a": 2, "b": 5})
    other = Mixture({"b": b, "a": a}, {"b": 5, "a": 2})
    for step in range(30):
        assert one.turn(step) == other.turn(step)
        np.testing.assert_array_equal(one[step]["part"], other[step]["part"])


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ({"a": 0.7, "b": 0.3}, {"a": 7, "b": 3}),
        ({"a": 0.1, "b": 0.2}, {"a": 1, "b": 2}),
        ({"a": 2, "b": 4}, {"a": 1, "b": 2}),
        ({"a": Fraction(1, 3), "b": Fraction(1, 2)}, {"a": 2, "b": 3}),
        ({"a": 1e-3, "b": 1}, {"a": 1, "b": 1000}),
        ({"a": np.float64(0.5), "b": np.int64(1)}, {"a": 1, "b": 2}),
        ({"a": 10**400, "b": 2 * 10**400}, {"a": 1, "b": 2}),
        ({"a": 3 * 10**5000, "b": 10**5000}, {"a": 3, "b": 1}),
    ],
)
def test_weights_are_taken_as_they_are_written(
    weights: dict[str, Any], whole: dict[str, int]
) -> None:
    assert Mixture({"a": part(9), "b": part(9)}, weights).weights == whole


@pytest.mark.parametrize("read_options", [None, THREADS])
@pytest.mark.parametrize("start", [0, 1, 17, 10**12])
def test_iterator_resumes_anywhere(start: int, read_options: ReadOptions | None) -> None:
    mixture = web_and_code()
    batches = mixture.iterate(Position(step=start), read_options=read_options)
    for step in range(start, start + 12):
        assert batches.position == Position(step=step) == mixture.position(step)
        np.testing.assert_array_equal(next(batches)["id"], mixture.ids(step))
    state = batches.get_state()
    assert state == {"epoch": 0, "offset": 0, "step": start + 12}
    batches.set_state(mixture.iterate(Position(step=start)).get_state())
    np.testing.assert_array_equal(next(batches)["id"], mixture.ids(start))
    batches.close()


def test_mixture_on_a_device() -> None:
    mixture = web_and_code()
    batch = next(mixture.iterate(device=jax.devices("cpu")[0]))
    assert isinstance(batch["part"], jax.Array)
    assert isinstance(batch["x"], jax.Array)
    with pytest.raises(TypeError, match="must be a jax"):
        mixture.iterate(device="cpu")


def test_dataset_is_the_stream() -> None:
    mixture = web_and_code(num_epochs=2)
    assert len(mixture.dataset) == len(mixture)
    for step in range(len(mixture)):
        np.testing.assert_array_equal(mixture.dataset[step]["id"], mixture.ids(step))


def test_epochs_are_counted_for_each_part() -> None:
    mixture = web_and_code()
    assert mixture.delivered(0) == {"code": Position(), "web": Position()}
    # 7 of 10 steps are of web, with 6 batches to an epoch; 3 of code, with 4.
    assert mixture.delivered(10) == {"code": Position(0, 9, 3), "web": Position(1, 4, 7)}
    assert mixture.delivered(10**12) == {
        "code": mixture.parts["code"].position(3 * 10**11),
        "web": mixture.parts["web"].position(7 * 10**11),
    }


def test_mixture_ends_when_a_part_has_none_left() -> None:
    mixture = web_and_code(num_epochs=2)
    length = len(mixture)
    batches = list(mixture)
    assert len(batches) == length
    counts = collections.Counter(mixture.turn(step).part for step in range(length))
    assert counts["web"] == len(mixture.parts["web"]) == 12
    assert counts["code"] < len(mixture.parts["code"])
    assert mixture.delivered(length)["web"] == Position(2, 0, 12)
    with pytest.raises(IndexError, match=f"step {length} is not one of the {length} steps"):
        mixture.turn(length)
    with pytest.raises(IndexError):
        mixture.delivered(length + 1)
    assert list(mixture.iterate(Position(step=length))) == []


def test_mixture_without_end_has_no_length() -> None:
    with pytest.raises(TypeError, match="no length"):
        len(web_and_code())
    with pytest.raises(OverflowError, match="num_epochs is too large"):
        len(Mixture({"a": part(9, num_epochs=2**62)}, {"a": 1}))
    half = Mixture({"a": part(9), "b": part(8, 4, num_epochs=1)}, {"a": 3, "b": 1})
    # b has two batches; where its third would come, the mixture ends.
    assert "".join(half.turn(step).part for step in range(len(half))) == "aaabaaabaaa"


def test_fingerprint_is_that_of_the_parts() -> None:
    mixture = web_and_code()
    whole = mixture.fingerprint()
    for name, pipeline in mixture.parts.items():
        assert whole.columns[name].digest == pipeline.fingerprint().digest
    assert whole.num_records == 33
    assert loader.Fingerprint.from_dict(whole.to_dict()) == whole
    edited = Mixture({**mixture.parts, "code": part(11, 3, seed=5)}, mixture.weights)
    differences = whole.diff(edited.fingerprint())
    assert {difference.name for difference in differences} == {
        "dataset.num_records",
        "dataset.code",
    }


def test_bad_records_are_told_by_part() -> None:
    assert web_and_code().bad_records == {"code": {}, "web": {}}


@pytest.mark.parametrize(
    ("parts", "weights", "error", "message"),
    [
        ([], {}, TypeError, "must map names to pipelines"),
        ({}, {}, ValueError, "at least one part"),
        ({"": part(9)}, {"": 1}, TypeError, "not empty, not ''"),
        ({3: part(9)}, {3: 1}, TypeError, "not 3"),
        ({"a": part(9).source}, {"a": 1}, TypeError, "must be a Pipeline, not ArraySource"),
        ({"a": part(9)}, {"b": 1}, ValueError, "there is none for 'a'; no part is 'b'$"),
        ({"a": part(9)}, {"a": 1, "b": 1}, ValueError, "nothing else: no part is 'b'$"),
        ({"a": part(9), "b": part(9)}, {"a": 1}, ValueError, "there is none for 'b'$"),
        ({"a": part(9)}, [1], TypeError, "weights must map"),
        ({"a": part(9)}, {"a": 0}, ValueError, "must be above 0, not 0"),
        ({"a": part(9)}, {"a": -0.5}, ValueError, "must be above 0"),
        ({"a": part(9)}, {"a": math.nan}, ValueError, "must be a number above 0, not nan"),
        ({"a": part(9)}, {"a": math.inf}, ValueError, "must be a number above 0, not inf"),
        ({"a": part(9)}, {"a": True}, TypeError, "must be a number, not True"),
        ({"a": part(9)}, {"a": "1"}, TypeError, "must be a number, not '1'"),
        ({"a": part(9), "b": part(9)}, {"a": 1, "b": 1e-7}, ValueError, "a round of 10000001"),
        ({"a": part(9), "b": part(9)}, {"a": 1, "b": 2**20}, ValueError, "a round of 1048577"),
        (
            {"a": part(9), "b": part(9)},
            {"a": 10**400, "b": 1},
            ValueError,
            "a round of more than 1000000000000000000 steps, from 'b', the smallest, to 'a'",
        ),
        ({"a": part(9), "b": part(9)}, {"a": 10**5000, "b": 1}, ValueError, "such weights need"),
        ({"a": part(9), "b": part(9)}, {"a": 1e-300, "b": 1}, ValueError, "from 'a', the small"),
        ({"a": part(9)}, {"a": -(10**5000)}, ValueError, "not less than -1000000000000000000"),
    ],
)
def test_wrong_arguments_are_named(
    parts: Any, weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Mixture(parts, weights)


def other_fields(*names: str, transform: Any = None) -> Pipeline:
    source = ArraySource(dict.fromkeys(names, np.zeros(9, np.float32)))
    return Pipeline(source, PipelineConfig(4, 1, "pad", 1), transform)


def test_parts_must_give_one_kind_of_batch() -> None:
    with pytest.raises(ValueError, match=r"part 'a' are .* and those of 'b' are"):
        Mixture({"a": part(9), "b": other_fields("y")}, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="has a field 'part'"):
        Mixture({"a": other_fields("part")}, {"a": 1})
    alike = other_fields("y", transform=lambda batch: {"x": batch["y"]})
    assert list(Mixture({"a": part(9), "b": alike}, {"a": 1, "b": 1})[1]) == [
        "id",
        "mask",
        "part",
        "x",
    ]


@pytest.mark.parametrize("position", [Position(1, 0, 3), Position(0, 4, 3), Position(step=15)])
def test_position_of_another_stream_is_refused(position: Position) -> None:
    mixture = Mixture({"a": part(9, num_epochs=1)}, {"a": 1})
    with pytest.raises(ValueError, match="belongs to"):
        mixture.iterate(position)


def test_unknown_parts_and_steps_are_named() -> None:
    mixture = web_and_code()
    with pytest.raises(KeyError, match="'news' is none of the parts code, web"):
        mixture.step_of("news", 0)
    for step in (-1, 2**63):
        with pytest.raises(IndexError):
            mixture.turn(step)
    for wrong in (1.5, "1", True, np.array([0])):
        for access in (
            mixture.turn,
            mixture.delivered,
            mixture.ids,
            lambda at: mixture.step_of("web", at),
        ):
            with pytest.raises(TypeError, match="a step is an integer, not"):
                access(wrong)  # type: ignore[arg-type]


# Audited


@pytest.mark.parametrize("ids_only", [False, True])
@pytest.mark.parametrize("num_epochs", [None, 2])
@pytest.mark.parametrize("final_batch", ["pad", "partial", "drop"])
def test_audit_of_a_mixture_is_clean(
    final_batch: str, num_epochs: int | None, ids_only: bool
) -> None:
    mixture = web_and_code(final_batch=final_batch, num_epochs=num_epochs)
    for steps in (None, 1, 13):
        report = loader.audit(mixture, steps=steps, ids_only=ids_only)
        assert report.clean, str(report)
        assert report.to_dict()["clean"]
        assert report.steps == steps or steps is None
        assert f"{report.steps} steps of a mixture: 0 came at another part's turn" in str(report)
        counts = collections.Counter(mixture.turn(step).part for step in range(report.steps))
        for name, part_report in report.parts.items():
            assert part_report.coverage.batches == counts[name]


def test_audit_by_default_comes_once_through_each_part() -> None:
    report = loader.audit(web_and_code())
    assert all(part_report.epochs[0].delivered for part_report in report.parts.values())
    assert report.parts["web"].epochs[0].delivered == 23
    assert report.parts["code"].epochs[0].delivered == 10


class Wrong(Mixture):
    """A mixture that delivers something else at a step."""

    def read(self, position: Position, *shard: Any) -> dict[str, Any]:
        # The turn of step 4 again, at step 5.
        return super().read(Position(step=4) if position.step == 5 else position, *shard)


def test_audit_finds_a_turn_that_is_another_parts() -> None:
    right = web_and_code()
    assert (right.turn(4).part, right.turn(5).part) == ("web", "code")
    report = loader.audit(Wrong(right.parts, right.weights), steps=20)
    assert not report.clean
    assert report.wrong_turns == 1
    assert report.turn_sample == ((5, "code", "web"),)
    assert "step 5 was code's turn, and web came" in str(report)
    assert not report.parts["code"].clean
    assert report.parts["web"].clean


def test_audit_finds_a_batch_that_comes_twice() -> None:
    right = Mixture({"a": part(23), "b": part(10)}, {"a": 9, "b": 1})
    assert right.turn(4).part == right.turn(5).part == "a"
    report = loader.audit(Wrong(right.parts, right.weights), steps=6)
    assert {"multiplicity", "omissions"} <= set(report.parts["a"].found)
    assert report.wrong_turns == 0


def test_audit_of_more_steps_than_there_are_is_refused() -> None:
    mixture = web_and_code(num_epochs=2)
    with pytest.raises(ValueError, match="steps is 18, and the mixture ends after 17"):
        loader.audit(mixture, steps=18)
    for steps in (0, -3):
        with pytest.raises(ValueError, match="at least 1"):
            loader.audit(mixture, steps=steps)
    with pytest.raises(TypeError, match="epochs is 2, but the parts of a mixture"):
        loader.audit(mixture, 2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="steps is 2, but it is for mixtures"):
        loader.audit(mixture.parts["web"], steps=2)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="IDs alone"):
        loader.audit(mixture, alignment=lambda batch: batch["mask"], ids_only=True)


# Provenance


@pytest.mark.parametrize("num_epochs", [None, 2])
def test_provenance_tells_each_step_and_each_record(num_epochs: int | None) -> None:
    mixture = web_and_code(num_epochs=num_epochs)
    steps = 30 if num_epochs is None else len(mixture)
    found = loader.provenance(mixture, steps)
    came: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for step in range(steps):
        records = found.records_at(step)
        batch = mixture[step]
        assert records.ids is not None
        assert (records.step, records.part) == (step, mixture.turn(step).part)
        assert records.ids.tolist() == batch["id"][batch["mask"]].tolist()
        for slot, record_id in enumerate(records.ids.tolist()):
            came.setdefault((mixture.turn(step).part, record_id), []).append((step, slot))
    for name, size in (("web", 23), ("code", 10)):
        for record_id in range(size):
            visits = found.steps_of(name, record_id)
            assert visits == found.steps_of_row(name, record_id)
            seen = [(v.step, v.slot) for v in visits if v.outcome == "delivered"]
            assert seen == came.get((name, record_id), [])
            assert {v.outcome for v in visits} <= {"delivered", "ahead"}
    with pytest.raises(IndexError, match=f"step {steps} is not one of the {steps} steps"):
        found.records_at(steps)


def test_provenance_of_what_the_mixture_never_reaches() -> None:
    mixture = web_and_code(num_epochs=2)
    found = loader.provenance(mixture)
    visits = [found.steps_of("code", record_id)[1] for record_id in range(10)]
    # Of code, one epoch and one more batch of 3 come.
    assert sorted(visit.outcome for visit in visits) == ["ahead"] * 7 + ["delivered"] * 3
    with pytest.raises(KeyError, match="none of the parts"):
        loader.provenance(mixture).steps_of("news", 3)
    with pytest.raises(ValueError, match="until is 18"):
        loader.provenance(mixture, 18)


def test_provenance_is_as_quick_far_away() -> None:
    mixture = Mixture({"a": part(10**6), "b": part(10**6)}, {"a": 1000, "b": 1})
    records = loader.provenance(mixture).records_at(10**15)
    assert records.part is not None
    assert mixture.step_of(*mixture.turn(10**15)) == 10**15
