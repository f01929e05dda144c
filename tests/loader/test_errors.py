"""Errors say what is wrong with both values, what follows, and what to do."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import checkpointing
import loader
from checkpointing import CheckpointDamagedError, CheckpointMismatchError
from checkpointing.errors import PLAIN_ORBAX
from loader import Difference


def test_a_mismatch_is_told_as_the_design_says() -> None:
    differences = [
        Difference(
            "dataset.y", "sha256:ab12...", "sha256:9f03...", "1 of 1797 records differs: id 7"
        ),
        Difference("batch_size", "256", "128"),
    ]
    error = CheckpointMismatchError("runs/digits step 1200", differences)
    assert error.differences == tuple(differences)
    assert str(error) == (
        "runs/digits step 1200 belongs to a different stream; nothing was restored.\n"
        "  dataset.y   checkpoint sha256:ab12...  now sha256:9f03...  (1 of 1797 records differs: id 7)\n"
        "  batch_size  checkpoint 256             now 128\n"
        "Use the data and config of that run, or start a new directory. batch_size alone may change "
        'with allow={"batch_size"}.'
    )  # fmt: skip


def test_a_difference_stays_on_its_line_whatever_it_holds() -> None:
    error = CheckpointMismatchError(
        "run step 1",
        [
            Difference("run_config.text", "a\nb", "\x1b[2J"),
            Difference("dataset.id", "x" * 10**6, "y" * 10**6, "id a\nb"),
            *(Difference(f"train_state/{i}", "float32[2]", "absent") for i in range(1000)),
        ],
    )
    lines = str(error).splitlines()
    assert len(lines) == 1 + 2 + 1000 + 1
    assert lines[1].split() == ["run_config.text", "checkpoint", r"'a\nb'", "now", r"'\x1b[2J'"]
    assert max(map(len, lines)) < 700
    assert sum(map(len, lines)) < 150_000
    assert error.differences[1].checkpoint == "x" * 10**6


def test_damage_is_told_step_by_step() -> None:
    reasons = {20: "manifest/metadata is missing", 10: "train_state/d/0 has 3 bytes instead of 5"}
    error = CheckpointDamagedError("runs/digits", reasons)
    assert error.reasons == reasons
    assert str(error) == (
        "no checkpoint in runs/digits is whole; nothing was restored.\n"
        "  step 20: manifest/metadata is missing\n"
        "  step 10: train_state/d/0 has 3 bytes instead of 5\n"
        "Bring the directory back from a copy, or, to begin again from the start, use a new one."
    )


def test_a_directory_of_plain_orbax_is_told_from_a_damaged_one() -> None:
    others = str(CheckpointDamagedError("run", {8: PLAIN_ORBAX}))
    assert others.startswith("no checkpoint in run was written by Checkpoints; nothing was")
    assert "Use a new directory." in others
    mixed = str(CheckpointDamagedError("run", {8: PLAIN_ORBAX, 7: "cut"}))
    assert mixed.startswith("no checkpoint in run is whole; nothing was restored.")


def test_what_an_error_holds_does_not_change_with_what_it_was_made_of() -> None:
    reasons = {1: "cut"}
    differences = [Difference("seed", "1", "2")]
    damaged, mismatch = (
        CheckpointDamagedError("run", reasons),
        CheckpointMismatchError("run", differences),
    )
    reasons.clear()
    differences.clear()
    assert damaged.reasons == {1: "cut"}
    assert [difference.name for difference in mismatch.differences] == ["seed"]


def test_the_errors_are_public_and_can_be_told_apart() -> None:
    assert {"CheckpointMismatchError", "CheckpointDamagedError"} <= set(checkpointing.__all__)
    assert issubclass(CheckpointMismatchError, ValueError)
    assert issubclass(CheckpointDamagedError, RuntimeError)
    assert not issubclass(CheckpointMismatchError, RuntimeError)
    assert not issubclass(CheckpointDamagedError, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointMismatchError("run step 3", [Difference("seed", "17", "18", "a note")]),
        CheckpointDamagedError("run", {3: "cut", 2: "gone"}),
        loader.RecordReadError(loader.Position(1, 4, 4), "r7", 7),
        loader.RecordReadError(loader.Position(1, 4, 4), None, None, "why", "advice"),
        loader.DataChangedError("file a"),
        loader.WorkerDiedError(loader.Position(1, 4, 4), -9),
    ],
)
def test_errors_reach_another_process_as_they_are(error: Exception) -> None:
    """Worker processes send their errors pickled; one that cannot be is lost, or hangs the parent."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    ("exit_code", "end", "hint"),
    [
        (-9, "was killed by SIGKILL", "memory ran out"),
        (-11, "was killed by SIGSEGV", ""),
        (-63, "was killed by signal 63", ""),
        (1, "ended with exit code 1", "Its output may say why"),
        (0, "ended with exit code 0", ""),
    ],
)
def test_the_end_of_a_worker_is_told(exit_code: int, end: str, hint: str) -> None:
    text = str(loader.WorkerDiedError(loader.Position(1, 4, 9), exit_code))
    assert text.startswith(
        f"a worker process {end} before it returned the batch at epoch 1, offset 4, step 9."
    )
    assert "Nothing is lost: the iterator stays at this batch, and the next call starts" in text
    assert hint in text
    assert bool(hint) == (not text.endswith("new workers."))


def test_values_that_print_alike_are_told_apart() -> None:
    error = CheckpointMismatchError(
        "run step 1",
        [
            Difference("transform.name", "caf\xe9", "cafe\u0301"),
            Difference("next_ids", "['caf\xe9']", "['cafe\u0301']"),
            Difference("run_config.long", "x" * 300 + "a", "x" * 300 + "b"),
            Difference("run_config.longer", "x" * 300, "x" * 301),
        ],
    )
    shown = [line.split()[2::2] for line in str(error).splitlines()[1:5]]
    assert shown[:2] == [["caf\\xe9", "cafe\\u0301"], ["['caf\\xe9']", "['cafe\\u0301']"]]
    assert shown[2] == ["..." + "x" * 20 + "a", "..." + "x" * 20 + "b"]
    assert shown[3] == ["..." + "x" * 20, "..." + "x" * 21]


def test_values_in_quotes_are_not_quoted_again() -> None:
    difference = Difference("name", "a b", "a  b")
    assert (difference.checkpoint, difference.now) == ("'a b'", "'a  b'")
    for again in (difference.shortened(20), dataclasses.replace(difference, name="other")):
        assert (again.checkpoint, again.now) == ("'a b'", "'a  b'")
    long = Difference("name", "a b" + "x" * 40, "a  b" + "x" * 40).shortened(20)
    assert (long.checkpoint, long.now) == ("'a b" + "x" * 13 + "...", "'a  b" + "x" * 12 + "...")
    # Here the whole values are told apart by their ends.
    cut = Difference("name", "a b  c" + "x" * 40, "a  b c" + "y" * 40).shortened(9)
    assert (cut.checkpoint, cut.now) == ("'a b  c...'", "'a  b c...'")


@given(st.text(max_size=99), st.text(max_size=99), st.text(max_size=9), st.integers(20, 40))
def test_shortened_values_that_differ_still_do(
    same: str, before: str, now: str, limit: int
) -> None:
    difference = Difference("name", same + before, same + now)
    short = difference.shortened(limit)
    assert (short.checkpoint == short.now) == (before == now)
    if len(difference.checkpoint) <= limit and len(difference.now) <= limit:
        assert short == difference
    assert len(short.checkpoint) <= 10 * limit + 2  # escaped, in quotes
