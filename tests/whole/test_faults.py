"""No fault loses or changes anything without a word; and the harness that shows it sees planted faults.

The full harness is scripts/fault_drill.py: 200 kills and every cell of the corruption matrix.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Final

import pytest

import checkpointing
from checkpointing.storage.directory import RunDirectory
from scripts.faults import endings, kills, matrix, places, run
from scripts.faults.children import Outcome
from scripts.faults.conditions import CONDITIONS

# Orbax ends its event loop before all reads of a damaged file have come back to it.
reads_damage = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


def holds(condition: Callable[[pathlib.Path], Outcome], work: pathlib.Path) -> None:
    outcome = condition(work)
    if outcome.ok is None:
        pytest.skip(outcome.outcome)
    assert outcome.ok, outcome


# SIGKILL


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> kills.Reference:
    return kills.run_reference(tmp_path_factory.mktemp("reference"))


@pytest.mark.processes
def test_kills_at_random_instants_lose_nothing_and_repeat_nothing(
    reference: kills.Reference, tmp_path: pathlib.Path
) -> None:
    report = kills.kill_runs(tmp_path, 6, seed=3, reference=reference)
    assert report.faults == ()
    assert (report.lost, report.repeated, report.final_states_equal) == (0, 0, True)
    assert report.ok
    assert report.num_steps == run.NUM_STEPS
    assert {kill.aim for kill in report.kills} == set(kills.PHASES)
    assert sum(report.hits().values()) == len(report.kills) == 6


#: Planted faults: lines put before the end of run.py, a phase to aim at, and what is then found.
PLANTED: Final[dict[str, tuple[str, kills.Phase, str]]] = {
    "a step is skipped": (
        """
resume = checkpointing.Checkpoints.resume
def skip(self, state, **kwargs):
    found = resume(self, state, **kwargs)
    if found.position.step:
        found.train_state["step"] += 1
        later = self._pipeline.position(found.position.step + 1)
        found.batches.set_state({"epoch": later.epoch, "offset": later.offset, "step": later.step})
    return found
checkpointing.Checkpoints.resume = skip
""",
        "deleting",
        "and delivered steps",
    ),
    "a save is acknowledged that was not made": (
        "checkpointing.Checkpoints.save = lambda self, batches, state: False\n",
        "training",
        "was saved, and 0 is left",
    ),
    "an old step is deleted in place": (
        """
from checkpointing.storage.directory import RunDirectory
keep_newest = RunDirectory.keep_newest
def tear(self, count, damaged=()):
    if len(self.steps()) > count:
        (self.step_path(self.steps()[0]) / "manifest/metadata").unlink()
        (self.path / ".regrain-trash").mkdir()
        time.sleep(1)
    keep_newest(self, count, damaged)
RunDirectory.keep_newest = tear
""",
        "deleting",
        "deleted in part, or is not a checkpoint, in a directory named 1",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("planted", PLANTED)
def test_the_harness_finds_a_planted_fault(
    planted: str, reference: kills.Reference, tmp_path: pathlib.Path
) -> None:
    lines, phase, found = PLANTED[planted]
    source = pathlib.Path(run.__file__).read_text("utf-8")
    script = tmp_path / "planted.py"
    script.write_text(source.replace("if __name__", f"{lines}\nif __name__"), "utf-8")
    command = (sys.executable, str(script))
    report = kills.kill_runs(
        tmp_path, 1, seed=1, command=command, phases=[phase], reference=reference
    )
    assert not report.ok
    assert any(found in fault for fault in report.faults), report.faults
    assert report.lost > 0 or planted != "a step is skipped"


@pytest.mark.processes
def test_a_run_that_fails_without_a_kill_is_no_result(tmp_path: pathlib.Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('gone')")
    with pytest.raises(kills.HarnessError, match=r"fails without a kill:\n.*gone"):
        kills.kill_runs(tmp_path, 1, 0, command=command)


# Damage


def test_every_file_and_every_damage_is_in_the_matrix_and_in_each_sample(
    tmp_path: pathlib.Path,
) -> None:
    matrix.write_run(tmp_path / "run")
    faults = matrix.faults_of(tmp_path / "run")
    files = {"_CHECKPOINT_METADATA", "commit_success.txt", "iterator/metadata", "manifest/metadata"}
    assert files <= {fault.where for fault in faults}
    assert len({fault.where for fault in faults if fault.where.startswith("train_state/")}) > 5
    for seed in range(5):
        sample = matrix.sample(faults, seed)
        assert len(sample) < len(faults) / 2
        assert {fault.where for fault in sample} == {fault.where for fault in faults}
        assert {fault.damage for fault in sample} == {fault.damage for fault in faults}
        assert sample == matrix.sample(faults, seed)


@reads_damage
def test_no_damage_of_any_file_changes_anything_without_a_word(tmp_path: pathlib.Path) -> None:
    readers = [matrix.checkpoints_reader("full"), matrix.checkpoints_reader("manifest")]
    cells = list(matrix.corruption_matrix(tmp_path, readers, lambda f: matrix.sample(f, 0)))
    assert [cell for cell in cells if not cell.ok] == []
    full = {cell.outcome for cell in cells if cell.reader == 'verify="full"'}
    assert full <= {matrix.OLDER_USED, matrix.REFUSED, matrix.IDENTICAL, matrix.SAME_BYTES}
    assert {matrix.OLDER_USED, matrix.REFUSED, matrix.IDENTICAL} <= full


def flips_and_mixed_items(faults: list[matrix.Fault]) -> list[matrix.Fault]:
    """Flips in the files that hold arrays, and a train state or iterator of another step."""
    flip, mix = "byte flipped in the middle", "item replaced by another step's"
    arrays = [one for one in faults if one.damage == flip and "process_0/d/" in one.where]
    items = [one for one in faults if one.damage == mix and one.where != "manifest"]
    return arrays + items


@reads_damage
def test_plain_orbax_lets_damage_through_that_is_found_here(tmp_path: pathlib.Path) -> None:
    readers = [matrix.checkpoints_reader("full"), matrix.orbax_reader()]
    cells = list(matrix.corruption_matrix(tmp_path, readers, flips_and_mixed_items))
    different = [cell for cell in cells if cell.outcome == matrix.DIFFERENT]
    assert {cell.reader for cell in different} == {"plain Orbax"}
    assert {cell.damage for cell in different} == {
        "byte flipped in the middle",
        "item replaced by another step's",
    }


def test_the_matrix_sees_a_library_that_does_not_verify(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = RunDirectory.check

    def trust(self: RunDirectory, step: int, *_: object, **__: object) -> checkpointing.Manifest:
        return check(self, step, "manifest")

    monkeypatch.setattr(RunDirectory, "check", trust)
    cells = matrix.corruption_matrix(
        tmp_path, [matrix.checkpoints_reader("full")], flips_and_mixed_items
    )
    bad = [cell for cell in cells if not cell.ok]
    assert {cell.outcome for cell in bad} == {matrix.DIFFERENT}
    assert {cell.detail for cell in bad} == {"other values in weights"}


# Disks and directories


@pytest.mark.processes
def test_a_full_disk_fails_one_save_with_a_clear_error_and_no_other(tmp_path: pathlib.Path) -> None:
    holds(places.disk_full, tmp_path)


@pytest.mark.processes
def test_a_limit_of_file_size_fails_one_save_with_a_clear_error_and_no_other(
    tmp_path: pathlib.Path,
) -> None:
    holds(places.file_size_limit, tmp_path)


@pytest.mark.processes
def test_a_read_only_directory_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    holds(places.read_only, tmp_path)


@pytest.mark.processes
def test_a_missing_directory_is_made_for_writing_and_named_for_reading(
    tmp_path: pathlib.Path,
) -> None:
    holds(places.missing, tmp_path)


def test_a_file_in_place_of_the_directory_is_refused_and_stays(tmp_path: pathlib.Path) -> None:
    holds(places.a_file, tmp_path)


def test_a_relative_path_means_the_same_directory_after_a_change_of_directory(
    tmp_path: pathlib.Path,
) -> None:
    holds(places.relative_path, tmp_path)


def test_a_path_may_have_blanks_and_letters_of_any_language(tmp_path: pathlib.Path) -> None:
    holds(places.strange_path, tmp_path)


def test_a_second_writer_is_refused_at_once_and_the_first_goes_on(tmp_path: pathlib.Path) -> None:
    holds(places.two_writers, tmp_path)


def test_a_lock_left_by_a_killed_process_does_not_block(tmp_path: pathlib.Path) -> None:
    holds(places.lock_of_a_killed_process, tmp_path)


def test_a_run_saves_over_a_damaged_step_in_its_way(tmp_path: pathlib.Path) -> None:
    holds(places.damaged_step_in_the_way, tmp_path)


# Processes


def test_a_clock_that_jumps_back_neither_deletes_nor_resumes_the_wrong_step(
    tmp_path: pathlib.Path,
) -> None:
    holds(endings.clock_jumps_back, tmp_path)


def test_an_exception_in_the_loop_is_raised_and_the_save_under_way_is_finished(
    tmp_path: pathlib.Path,
) -> None:
    holds(endings.exception_in_the_loop, tmp_path)


def test_an_exception_in_the_background_save_is_raised_by_the_next_which_saves(
    tmp_path: pathlib.Path,
) -> None:
    holds(endings.exception_in_the_background, tmp_path)


def test_the_interpreters_exit_finishes_the_save_under_way(tmp_path: pathlib.Path) -> None:
    holds(endings.end_of_the_script, tmp_path)


def test_sys_exit_finishes_the_save_under_way_and_keeps_its_code(tmp_path: pathlib.Path) -> None:
    holds(endings.sys_exit, tmp_path)


def test_an_uncaught_exception_finishes_the_save_under_way(tmp_path: pathlib.Path) -> None:
    holds(endings.uncaught_exception, tmp_path)


def test_a_save_that_fails_at_the_exit_is_said_to_be_lost(tmp_path: pathlib.Path) -> None:
    holds(endings.exit_with_a_failing_save, tmp_path)


def test_a_process_ends_after_a_save_that_failed(tmp_path: pathlib.Path) -> None:
    holds(endings.exit_after_a_failed_save, tmp_path)


def test_a_process_ends_after_a_save_that_could_not_begin(tmp_path: pathlib.Path) -> None:
    holds(places.moved_away, tmp_path)


def test_a_second_save_at_one_step_does_nothing(tmp_path: pathlib.Path) -> None:
    holds(endings.save_twice, tmp_path)


def test_a_finished_run_resumes_at_its_end_and_changes_nothing(tmp_path: pathlib.Path) -> None:
    holds(endings.finished_run, tmp_path)


def test_sigterm_saves_the_current_step_once_and_exits_with_143(tmp_path: pathlib.Path) -> None:
    holds(endings.sigterm, tmp_path)


def test_sigint_saves_the_current_step_once_and_exits_with_130(tmp_path: pathlib.Path) -> None:
    holds(endings.sigint, tmp_path)


def test_every_condition_of_the_harness_is_a_test_here() -> None:
    text = pathlib.Path(__file__).read_text("utf-8")
    names = [f"{one.__module__.rpartition('.')[2]}.{one.__name__}" for one in CONDITIONS]
    assert [name for name in names if f"holds({name}, tmp_path)" not in text] == []
