"""Any sequence of steps, saves, kills, damage, edits and resumes continues as an unbroken run does.

Hypothesis drives a run beside a model of it. The model is the stream's formula: the IDs of each step, and
the train state that they add up to.
"""

import contextlib
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import checkpointing
import loader

RECORDS, KEEP = 23, 3
IDS = np.arange(100, 100 + RECORDS)
START = {"total": np.zeros((), np.int32), "seen": np.zeros(RECORDS, np.int32)}


def pipeline(seed: int, final_batch: Any, label: int = 0) -> loader.Pipeline:
    labels = np.arange(RECORDS) % 5
    labels[7] += label
    config = loader.PipelineConfig(4, seed, final_batch, num_epochs=None)
    return loader.Pipeline(loader.ArraySource({"y": labels}, ids=IDS), config)


def updated(train_state: Any, ids: Any) -> Any:
    """A train state that depends on which records came, how often, and in which order."""
    rows = ids[ids >= 0] - IDS[0]
    seen = train_state["seen"].copy()
    np.add.at(seen, rows, 1)
    total = (int(train_state["total"]) * 31 + int(rows @ np.arange(1, len(rows) + 1))) % 10007
    return {"total": np.array(total, np.int32), "seen": seen}


class AnySequence(RuleBasedStateMachine):
    """A run and its model.

    ``whole`` holds the steps that are committed and undamaged, ``begun`` all that may be on disk.
    """

    @initialize(seed=st.integers(0, 9), final_batch=st.sampled_from(["partial", "drop", "pad"]))
    def begin(self, seed: int, final_batch: str) -> None:
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.directories = 0
        self.stream = pipeline(seed, final_batch)
        self.edited = pipeline(seed, final_batch, label=1)
        self.model = [START]
        self.whole: set[int] = set()
        self.begun: set[int] = set()
        self.use_another_directory()
        self.resume()

    def use_another_directory(self) -> None:
        self.directories += 1
        self.directory = self.root / str(self.directories)

    def state_after(self, step: int) -> Any:
        while len(self.model) <= step:
            self.model.append(updated(self.model[-1], self.stream.ids(len(self.model) - 1)))
        return self.model[step]

    def resume(self) -> None:
        self.checkpoints = checkpointing.Checkpoints(self.directory, self.stream, 1, KEEP)
        try:
            run = self.checkpoints.resume(START)
        except checkpointing.CheckpointDamagedError:
            assert not self.whole
            self.checkpoints.close()
            self.begun = set()
            self.use_another_directory()  # as the error advises
            self.checkpoints = checkpointing.Checkpoints(self.directory, self.stream, 1, KEEP)
            run = self.checkpoints.resume(START)
        self.batches, self.train_state = run.batches, run.train_state
        self.step = self.saved = run.position.step
        assert self.step in self.begun | {0}
        assert self.step >= max(self.whole, default=0)
        for name, value in self.state_after(self.step).items():
            assert np.array_equal(self.train_state[name], value)
        self.whole |= {self.step} - {0}

    def close(self) -> None:
        self.checkpoints.close()
        self.commit()

    def commit(self) -> None:
        on_disk = {int(path.name) for path in self.directory.iterdir() if path.name.isdecimal()}
        assert not self.saved or self.saved in on_disk
        self.whole = (self.whole | {self.saved}) & on_disk

    @rule(steps=st.integers(1, 7))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = next(self.batches)["id"]
            assert np.array_equal(ids, self.stream.ids(self.step))
            self.train_state = updated(self.train_state, ids)
            self.step += 1

    @rule(wait=st.booleans())
    def save(self, wait: bool) -> None:
        if self.step == 0:
            return
        is_new = self.step > self.saved
        assert self.checkpoints.save(self.batches, self.train_state, force=True) == is_new
        if is_new and self.saved:
            self.whole.add(self.saved)  # a save waits for the one before it
        self.saved = self.step
        self.begun.add(self.step)
        if wait:
            self.checkpoints.wait()
            self.commit()

    @rule()
    def stop_and_resume(self) -> None:
        self.close()
        self.resume()

    @rule()
    def kill_and_resume(self) -> None:
        """Continue from a copy of the disk that is made while a save may be under way."""
        killed, old = self.checkpoints, self.directory
        newest = max(self.whole, default=0)
        self.use_another_directory()
        shutil.copytree(
            old, self.directory, copy_function=copied_if_there, ignore_dangling_symlinks=True
        )
        killed.close()
        self.whole = {newest} - {0}
        self.resume()

    @rule(
        newest=st.integers(0, KEEP - 1),
        file=st.integers(0, 30),
        place=st.floats(0, 1, exclude_max=True),
        how=st.sampled_from(["flip", "cut", "remove"]),
    )
    def damage_and_resume(self, newest: int, file: int, place: float, how: str) -> None:
        """Damage one file of a step, which may then only be used with its own content."""
        self.close()
        if self.whole:
            step = sorted(self.whole)[-1 - newest % len(self.whole)]
            files = sorted(p for p in (self.directory / str(step)).rglob("*") if p.is_file())
            damage(files[file % len(files)], place, how)
            self.whole -= {step}
        self.resume()

    @rule()
    def edit_and_resume(self) -> None:
        """Data that has changed is refused; the run's own data is not."""
        self.close()
        if self.whole:
            other = checkpointing.Checkpoints(self.directory, self.edited, 1, KEEP)
            refused = pytest.raises(
                checkpointing.CheckpointMismatchError, match=r"dataset\.y.*id 107"
            )
            with other, refused:
                other.resume(START)
        self.resume()

    def teardown(self) -> None:
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
            shutil.rmtree(self.root)


def damage(file: pathlib.Path, place: float, how: str) -> None:
    """Flip a bit, cut the file there, or remove it."""
    content = bytearray(file.read_bytes())
    bit = int(place * 8 * len(content))
    if how == "remove":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: bit // 8])
    elif content:
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)


def copied_if_there(source: str, target: str) -> None:
    """Copy a file, unless it was renamed or removed meanwhile, as it may be in a killed run."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(
    settings.get_profile(settings.get_current_profile_name()),
    max_examples=50,
    stateful_step_count=20,
)
