"""Writes checkpoints in the background, one at a time. The manifest comes last and commits the step."""

import dataclasses
import functools
import hashlib
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax

from checkpointing.arrays import ArrayWriter, description
from checkpointing.leaf_checks import LeafChecks
from checkpointing.manifest import Manifest
from checkpointing.storage.directory import RunDirectory
from checkpointing.together.processes import Processes
from checkpointing.undocumented import before_pools_stop
from loader.progress import bytes_text, seconds_text, things_text

_log: Final = logging.getLogger(__name__)
_SHOWN_DIGITS: Final = 16
#: These start no thread once their exit has begun (python/cpython#113964), and to write takes some.
STARTS_NO_THREADS_AT_EXIT: Final = (3, 12) <= sys.version_info[:3] < (3, 12, 3)

#: Holds one value that one thread puts and another gets. Both are single operations, which Ctrl-C cannot
#: leave half done, as it can with an event or a lock around several statements.
_Answer: TypeAlias = queue.SimpleQueue[RuntimeError | None]

_Job: TypeAlias = Callable[[], None]


@dataclasses.dataclass
class Save:
    """A save that is due.

    Attributes:
      number: the number of the save in `Processes`.
      manifest: without files until they are written.
      stored: the arrays, as `train_state.to_stored` gives them; ``None`` once they are copied.
      checks: the checks of its leaves.
      damaged: steps known to be damaged.
      called: when the caller asked for the save, by `time.monotonic`.
    """

    number: int
    manifest: Manifest
    stored: Any
    checks: LeafChecks
    damaged: frozenset[int]
    called: float
    blocked_s: float = 0.0
    began_ns: int = dataclasses.field(default_factory=time.time_ns)
    #: Gets ``None`` once the arrays are copied, or else the error.
    answer: _Answer = dataclasses.field(default_factory=queue.SimpleQueue)


class Writer:
    """Writes steps in a thread of its own, in the order in which saves are begun.

    Ctrl-C reaches the main thread alone. So an interrupted `begin` or `wait` leaves a save that goes on to
    its end, and nothing that a later call would wait for in vain.

    Args:
      directory: of the run, open for writing in the first process.
      keep: number of the newest checkpoints that stay.
      processes: those that write a step together.
      shown: name of the directory in log lines.
    """

    def __init__(
        self, directory: RunDirectory, keep: int, processes: Processes, shown: str
    ) -> None:
        self._directory, self._keep = directory, keep
        self._processes, self._shown = processes, shown
        self._arrays = ArrayWriter(processes.index, directory.timeout_s)
        #: The step last saved or resumed from; ``None`` if that save has failed.
        self.last_step: int | None = None
        #: Whether `begin` returns only when the step is committed.
        self.blocks = STARTS_NO_THREADS_AT_EXIT
        #: Failed steps: a write that was under way may bring back a directory after it was removed.
        self._failed_steps: set[int] = set()
        self._errors: queue.SimpleQueue[RuntimeError] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._opened_by = os.getpid()
        self._is_closed = False
        self._thread = threading.Thread(
            target=_work_off, args=(self._jobs,), name="regrain-save", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        _open_writers.add(self)

    def begin(self, save: Save) -> None:
        """Begin a save, and wait until its arrays are copied. No other save may be under way.

        Raises:
          RuntimeError: the arrays could not be copied.
        """
        self._jobs.put(functools.partial(self._save, save))
        error = save.answer.get()
        if self.blocks:
            self.settle()
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait for the save under way. In a forked child there is none: it is the parent's."""
        if not self._is_closed and self._opened_by == os.getpid():
            done: _Answer = queue.SimpleQueue()
            self._jobs.put(lambda: done.put(None))
            done.get()

    def wait(self) -> RuntimeError | None:
        """Wait for the save under way; return an error that no call has raised yet, once."""
        self.settle()
        return self.error()

    def error(self) -> RuntimeError | None:
        """Return the error of a save that has failed since the last call, without waiting."""
        try:
            return self._errors.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Wait for the save under way, and free what Orbax holds."""
        self.settle()
        self._is_closed = True
        self._end()
        if self._opened_by == os.getpid():
            self._thread.join()
            self._arrays.close()
            self._clean()

    def _save(self, save: Save) -> None:
        """Write and commit a step. Runs in the writer's thread, and raises nothing."""
        step, is_copied = save.manifest.step, False

        def copy() -> Sequence[Any]:
            nonlocal is_copied
            begun = self._arrays.begin(self._directory.unfinished_path(step), save.stored)
            save.checks.take_samples()
            save.stored = None  # devices may free what the caller drops
            is_copied, self.last_step = True, step
            save.blocked_s = time.monotonic() - save.called
            save.answer.put(None)
            return begun

        def write(begun: Sequence[Any]) -> None:
            try:
                save.checks.check_copies(save.number, self._processes)
            finally:
                self._arrays.finish(begun)
            save.checks.check_samples()
            if self._processes.are_several:
                self._directory.seal_part(step, self._processes.index)

        together = functools.partial(self._processes.together, save.number)
        try:
            # Whatever jax_transfer_guard says, a save is meant to transfer.
            with jax.transfer_guard("allow"):
                begun = together("copy the train state", copy)
                together("write a checkpoint", lambda: write(begun))
                together("commit a checkpoint", lambda: self._commit(save))
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self.last_step = None
            self._failed_steps.add(step)
            self._clean()
            failed = self.failed(step, error)
            if is_copied:
                self._note(failed)
            else:
                save.answer.put(failed)
            return
        self._clean()
        self._failed_steps.clear()
        if self._processes.is_first:
            self._log_save(save)
            self._delete_old(save)

    def _clean(self) -> None:
        if self._processes.is_first:
            for step in self._failed_steps:
                self._directory.clean_step(step)

    def _commit(self, save: Save) -> None:
        if self._processes.is_first:
            step = save.manifest.step
            self._arrays.merge(self._directory.unfinished_path(step))
            about = description(save.began_ns)
            save.manifest = self._directory.commit_step(step, save.manifest, about)

    def _log_save(self, save: Save) -> None:
        in_all = time.monotonic() - save.called
        _log.info(
            "%s: step %d saved: %s; the loop waited %s, %s in all",
            self._shown,
            save.manifest.step,
            size_of(save.manifest),
            seconds_text(in_all if self.blocks else save.blocked_s),
            seconds_text(in_all),
        )

    def _delete_old(self, save: Save) -> None:
        begun = time.monotonic()
        try:
            deleted = self._directory.keep_newest(self._keep, save.damaged)
        except Exception as error:  # noqa: BLE001 (the next call raises it)
            failed = RuntimeError(
                f"step {save.manifest.step} is saved in {self._shown}, but steps before it could "
                f"not be deleted: {error}"
            )
            failed.__cause__ = error
            # Of several processes no other one has this error, which must not stop one of them alone.
            self._note(failed, is_raised=not self._processes.are_several)
            return
        if deleted:
            steps = f"step{'s' * (len(deleted) > 1)} {', '.join(map(str, deleted))}"
            took = seconds_text(time.monotonic() - begun)
            _log.info("%s: %s deleted in %s, %d stay", self._shown, steps, took, self._keep)

    def _note(self, error: RuntimeError, *, is_raised: bool = True) -> None:
        """Log an error, in case there is no next call, and keep it for that call."""
        _log.error("%s", error)
        if is_raised:
            self._errors.put(error)

    def failed(self, step: int, error: BaseException) -> RuntimeError:
        """Return the error of a save."""
        failed = RuntimeError(
            f"the save of step {step} in {self._shown} has failed: {error}. Earlier "
            "checkpoints are intact, and the next save is independent of this one."
        )
        failed.__cause__ = error
        return failed


def _work_off(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the writer


_open_writers: Final = weakref.WeakSet[Writer]()


def _finish_saves() -> None:
    for writer in list(_open_writers):
        error = writer.wait()
        if error is not None:
            _log.error("At exit: %s", error)


before_pools_stop(_finish_saves)


def size_of(manifest: Manifest) -> str:
    """Return the size of a checkpoint's files in words."""
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return f"{bytes_text(size)} in {things_text(len(manifest.files), 'file')}"


def sha256_of(data: bytes) -> str:
    """Return a short digest for messages between processes."""
    return hashlib.sha256(data).hexdigest()[:_SHOWN_DIGITS]
