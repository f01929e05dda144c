"""What a drill's report says in sum, and that it is plain JSON."""

import io
import json
from typing import Any

from rich.console import Console

from checkpointing import DrillReport
from checkpointing.proof.compare import FinalState, LeafDifference, RunDifference
from checkpointing.proof.process import Cause, Ending
from checkpointing.proof.report import Attempt, Kill
from regrain.cli.drill_report import table_of_differences


def attempt(number: int, replayed: int, *causes: Cause) -> Attempt:
    endings = tuple(Ending(i, -9, cause, 0.5) for i, cause in enumerate(causes))
    counted = {"process_count": len(causes), "endings": endings}
    return Attempt("drilled-1", number, 0, 1, 0, 0.5, 0, 60, replayed, "steps.jsonl", **counted)  # type: ignore[arg-type]


KILL = Kill("drilled-1", 1, "save", "save", 20, 30, 10, process_count=2, processes=(1,))


def report(**more: Any) -> DrillReport:
    attempts = (
        attempt(1, 0, "given up", "killed"),
        attempt(2, 20, "killed", "killed"),
        attempt(3, 7, "given up", "killed", "itself"),
    )
    given: dict[str, Any] = {
        "command": ("python", "{run_dir}"),
        "seed": 0,
        "kills_asked": 2,
        "kills": (KILL, KILL),
        "attempts": attempts,
        "num_steps": 60,
        "final_states": {"reference": FinalState(60, 3, "5f")},
        "differences": (),
        "packages": {},
        "seconds": 1.0,
        "process_counts": (2, 3),
    }
    return DrillReport(**{**given, **more})


def test_replays_and_processes_that_hung_are_summed_up() -> None:
    assert report().replayed == 27
    assert report().hung == 2
    assert report(attempts=(attempt(1, 0, "itself"),)).hung == 0


def test_it_is_complete_where_all_kills_have_landed() -> None:
    assert report().complete
    assert not report(kills_asked=3).complete


def test_it_is_plain_json() -> None:
    differences = (RunDifference("ids", "step 0", "1", "2"),)
    leaves = (LeafDifference("drilled-1", "/w", 1, 2, 0.5, None),)
    found = report(differences=differences, leaf_differences=leaves, within=0.1).to_dict()
    read = json.loads(json.dumps(found, allow_nan=False))
    assert (read["same"], read["complete"], read["hung"]) == (False, True, 2)
    assert read["process_counts"] == [2, 3]
    assert read["kills"][0]["processes"] == [1]
    assert read["attempts"][2]["endings"][0] == {
        "process": 0,
        "exit_code": -9,
        "cause": "given up",
        "after_kill_seconds": 0.5,
    }
    assert read["leaf_differences"] == [
        {
            "run": "drilled-1",
            "path": "/w",
            "changed": 1,
            "size": 2,
            "max_absolute": 0.5,
            "max_relative": None,
        }
    ]
    assert report().to_dict()["same"]


def test_a_note_of_a_difference_stands_on_a_line_of_its_own_and_cannot_end_one() -> None:
    one = RunDifference("ids", "step 0", "[red]1", "2", "and\nmore")
    table = table_of_differences(report(differences=(one,)))
    printed = io.StringIO()
    Console(width=120, file=printed, color_system=None).print(table)
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert lines[2] == ["ids", "step", "0", "[red]1", "2"]
    assert lines[3] == [r"(and\nmore)"]
