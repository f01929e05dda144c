"""Figures are summed up as they should be, and a target says whether it is met."""

import pytest

from scripts.benchmarks.section import at_least, at_most, ratios, spread, summary, unmeasured


def test_a_summary_is_median_quartiles_and_range() -> None:
    assert summary([5.0, 1.0, 2.0, 4.0, 3.0]) == {
        "median": 3.0,
        "q1": 2.0,
        "q3": 4.0,
        "min": 1.0,
        "max": 5.0,
    }


def test_one_value_is_its_own_summary() -> None:
    assert set(summary([7.0]).values()) == {7.0}
    assert spread([7.0], ".1f") == ["7.0", "7.0 - 7.0", "7.0 - 7.0"]


def test_ratios_are_taken_within_rounds() -> None:
    assert ratios([10.0, 1.0, 4.0], [20.0, 2.0, 8.0]) == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_a_target_is_met_up_to_its_bound_and_tells_why_it_is_missed() -> None:
    met, missed = at_least("speed", 0.85, 0.85, "slow"), at_least("speed", 0.84, 0.85, "slow")
    assert (met.met, met.why, met.wanted) == (True, "", ">= 0.85")
    assert (missed.met, missed.why, missed.got) == (False, "slow", 0.84)
    assert (at_most("wait", 0.02, 0.02).met, at_most("wait", 0.021, 0.02).met) == (True, False)


def test_what_is_not_measured_is_neither_met_nor_missed() -> None:
    target = unmeasured("speed", ">= 5", "no contender installed")
    assert (target.got, target.met, target.why) == (None, None, "no contender installed")
