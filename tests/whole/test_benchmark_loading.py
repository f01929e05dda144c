"""Tables and targets are made from the windows as they should be."""

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import loading, report
from scripts.benchmarks.rounds import QUICK, Outcome
from scripts.benchmarks.section import Section, Table, at_least, unmeasured
from scripts.benchmarks.workloads import Workload, workloads


def workload(name: str) -> Workload:
    (found,) = (w for w in workloads(quick=True, mapped_gib=1, folder=Path()) if w.name == name)
    return found


def outcome(name: str, **rates: list[float]) -> Outcome:
    """Rates of contenders; an underscore stands for a blank."""
    windows = {who.replace("_", " "): [{"rate": r} for r in of] for who, of in rates.items()}
    settings = dict.fromkeys(windows, "as is")
    return Outcome(workload(name), settings=settings, windows=windows, absent={"ffcv": "away"})


def by_name(made: Outcome) -> dict[str, Any]:
    return {target.name: target for target in loading.targets(made)}


def test_the_names_of_the_workloads_are_those_that_the_command_line_knows() -> None:
    made = workloads(quick=True, mapped_gib=1, folder=Path())
    assert tuple(w.name for w in made) == loading.WORKLOADS == tuple(loading.TITLES)


def test_records_are_held_against_the_better_gather_the_fastest_peer_and_grain() -> None:
    made = by_name(
        outcome(
            "records",
            numpy_fancy=[80.0, 80.0, 80.0],
            numpy_take=[100.0, 100.0, 120.0],
            regrain=[90.0, 91.0, 90.0],
            grain_per_record=[1.0, 0.5, 0.5],
            grain_per_batch=[30.0, 30.0, 30.0],
        )
    )
    gather = made["records: regrain / better bare gather"]
    assert (gather.got, gather.met, gather.why) == (0.9, True, "")
    peer = made["records: regrain / fastest peer loader"]
    assert (peer.got, peer.met) == (3.0, False)
    assert "grain per batch (as is)" in peer.why
    assert "(numpy take) is only 3.3 times as fast" in peer.why
    assert made["records: regrain / grain per record"].got == 180.0
    slower = made["records: no contender but bare NumPy is faster (regrain / fastest)"]
    assert (slower.got, slower.met) == (3.0, True)


def test_a_faster_contender_is_named() -> None:
    made = by_name(outcome("images", regrain=[10.0, 10.0], SPDL=[20.0, 20.0]))
    (target,) = made.values()
    assert (target.got, target.met) == (0.5, False)
    assert target.why == "the fastest is SPDL (as is)"


def test_without_other_contenders_nothing_is_known_of_them() -> None:
    (target,) = by_name(outcome("tokens", regrain=[1.0], numpy_take=[2.0])).values()
    assert (target.got, target.met) == (None, None)


def test_without_ours_there_are_no_targets_and_no_ratios() -> None:
    made = outcome("records", numpy_take=[2e3, 4e3])
    assert loading.targets(made) == []
    assert loading.table(made).rows[0] == ["numpy take", "3.0", "2.5 - 3.5", "", "", "", "as is"]


def training() -> Outcome:
    def window(alone: float, awaited: float, wait: float, ahead: float) -> dict[str, float]:
        return {
            "turns": 5,
            "steps": 2,
            "alone": alone,
            "awaited": awaited,
            "wait": wait,
            "ahead": ahead,
            "rate": 1 / (awaited + ahead),
        }

    ours = [window(1.0, 2.0, 0.1, 1.0), window(0.95, 2.0, 0.1, 1.0)]
    theirs = [window(1.0, 2.0, 1.0, 2.0), window(1.0, 2.0, 1.0, 2.0)]
    windows = {"regrain": ours, "SPDL": theirs}
    return Outcome(workload("training"), settings=dict.fromkeys(windows, ""), windows=windows)


def test_training_waits_for_batches_in_two_kinds_of_loop() -> None:
    made = {name.partition(":")[2]: target for name, target in by_name(training()).items()}
    ahead = made[" data wait of a loop that asks a step ahead, share of the wall"]
    awaited = made[" data wait of a loop that awaits each step first, share of the wall"]
    assert ahead.got == pytest.approx(0.025)
    assert awaited.got == pytest.approx(0.05)
    assert (ahead.met, awaited.met) == (False, False)


def test_the_rows_of_a_table_are_as_long_as_its_head() -> None:
    for made in (outcome("records", regrain=[1.0], SPDL=[2.0]), training()):
        of = loading.table(made)
        assert {len(row) for row in of.rows} == {len(of.columns)}
    of = loading.table(training())
    assert of.rows[1] == ["SPDL", "50.0%", "50.0% - 50.0%", "50.0%", "50.0% - 50.0%", ""]
    of = loading.table(outcome("records", regrain=[4.0, 4.0], SPDL=[2.0, 8.0]))
    assert of.rows[1][3:6] == ["1.25", "0.88 - 1.62", "0.50 - 2.00"]
    assert of.rows[-1][0::6] == ["ffcv", "away"]


def test_the_state_of_the_page_cache_is_told() -> None:
    made = outcome("mapped-warm", regrain=[1.0])
    made.resident = [0.5, 0.75]
    text = loading.conditions([made], QUICK, "ext9 on a drum", 10**9)["mapped-warm"]
    for part in ("ext9 on a drum", "50.0% to 75.0% of it was in memory", "1% of the 0.9 GiB"):
        assert part in text
    made = outcome("mapped-warm", regrain=[1.0])
    text = loading.conditions([made], QUICK, "", 10**9)["mapped-warm"]
    assert "nobody tells how much of it was in memory" in text


# --- the whole report -----------------------------------------------------------------------------


def a_report(*, quick: bool) -> dict[str, Any]:
    def measure(*, quick: bool) -> Section:
        assert isinstance(quick, bool)
        targets = [at_least("speed", 0.5, 1, "slow | old"), unmeasured("size", "<= 1", "no ruler")]
        table = Table("A [table]", ("who", "rate"), [["we", "7"]])
        return Section("one", "One thing", {"air": "thin"}, [table], targets, {"windows": [7]})

    return report.report_of({"one": measure}, quick=quick, command="scripts/benchmark.py -x")


@pytest.mark.processes
def test_a_report_lists_the_targets_of_all_sections() -> None:
    made = a_report(quick=False)
    assert [(t["section"], t["name"], t["met"]) for t in made["targets"]] == [
        ("one", "speed", False),
        ("one", "size", None),
    ]
    assert made["sections"]["one"]["data"] == {"windows": [7]}


@pytest.mark.processes
def test_a_page_holds_tables_targets_conditions_and_the_command() -> None:
    page = report.markdown(a_report(quick=False))
    for line in (
        "    scripts/benchmark.py -x",
        "| speed | >= 1 | 0.5 | NO | slow / old |",
        "| size | <= 1 |  | not measured | no ruler |",
        "## One thing",
        "### A [table]",
        "| we | 7 |",
        "- **air**: thin",
        "## What these figures do not say",
    ):
        assert line in page.splitlines()
    assert "--quick" not in page


@pytest.mark.processes
def test_the_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(a_report(quick=True))
    shown = capsys.readouterr().out
    for text in ("A [table]", "we", "NO", "no ruler", "one, air: thin", "figures mean nothing"):
        assert text in shown
