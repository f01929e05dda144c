"""Checkpoints of a training run: save train state and stream together, resume only what matches.

Orbax writes the arrays of a step, where it looks for them; one rename (in an object store, one put), once
all else is written too, makes train state, iterator and manifest visible together. Several JAX processes
write one step: each its arrays, and the first one all that there is once (see `group`).
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # type: ignore[import-untyped]  # the paths of Orbax, which brings it
from jax.experimental import multihost_utils

from checkpointing.differences import check_allow, match
from checkpointing.errors import CheckpointDamagedError, CheckpointMismatchError
from checkpointing.manifest import (
    Identity,
    Manifest,
    package_versions,
)
from checkpointing.proof.step_log import OnBatch, step_log_of_environment
from checkpointing.quiet import quiet_the_layers_below
from checkpointing.storage.base import ITERATOR_ITEM, MANIFEST_ITEM, TRAIN_STATE_ITEM
from checkpointing.storage.directory import (
    RunDirectory,
    StepDamagedError,
    Verify,
    check_verify,
    directory_text,
)
from checkpointing.together.processes import ElsewhereError, Processes
from checkpointing.together.signals import StopRequest, stop_requests
from checkpointing.train_state import (
    Leaf,
    copies_in,
    describe,
    from_stored,
    is_abstract,
    pointer,
    step_of,
    stored_at,
    stored_templates,
    to_stored,
)
from loader import (
    Device,
    OnProgress,
    OnStats,
    Position,
    ReadOptions,
    watch_progress,
)
from loader.batching import as_integer
from loader.identity.base import Place
from loader.identity.differences import in_print
from loader.identity.json_form import json_settings, json_value
from loader.progress import bytes_text, seconds_text, things_text
from loader.sources import Verify as DataVerify
from loader.stream import Stream, StreamIterator

TrainState = TypeVar("TrainState")
_Result = TypeVar("_Result")

_log: Final = logging.getLogger(__name__)
#: What may be compressed and written at the same time; as in Orbax's standard handler.
_MAX_WRITING_GB: Final = 96
#: A file of arrays is at least so large, unless it is the last one; and no larger than by Orbax's default.
_FILE_BYTES: Final = 32 << 20
_MAX_FILE_BYTES: Final = 2 << 30
#: As many of the newest steps are told in an error.
_SHOWN_STEPS: Final = 4
_SHOWN_DIGITS: Final = 16
_BEGIN_SAVE: Final = "begin a save"
#: These start no thread any more once their exit has begun (python/cpython#113964), and to write takes some.
STARTS_NO_THREADS_AT_EXIT: Final = (3, 12) <= sys.version_info[:3] < (3, 12, 3)


@dataclasses.dataclass(frozen=True)
class Run(Generic[TrainState]):
    """What `Checkpoints.resume` gives.

    Attributes:
      train_state: restored, or the one that was passed in where there is no checkpoint.
      batches: the iterator, at ``position``.
      position: where the run goes on; `Position()` at the start.
    """

    train_state: TrainState
    batches: StreamIterator
    position: Position


class Checkpoints:
    """The checkpoints of one run, in a directory of their own. A context manager.

    Args:
      directory: made if it does not exist; one writer at a time. Or ``gs://bucket/...``, with the extra
        ``gcs``; there, the newest writer is the one.
      pipeline: the stream that the run trains on: a `Pipeline`, a `Mixture` of some, or a
        `GrainStream`, which is for one JAX process.
      save_every: `save` does something at multiples of this many steps.
      keep: how many of the newest checkpoints stay.
      run_config: settings of your own (learning rate, model size, ...) that must be the same at a
        resume, as JSON can hold them.
      process_timeout_s: under `jax.distributed`, seconds that a process waits for the others, which
        must all call the same methods in the same order. Longer than the slowest one takes to write
        its part of a checkpoint. In ``gs://`` one process alone, too, waits no longer than this for
        arrays to be written or read.

    Under `jax.distributed`, ``directory`` must be on storage that all processes share. The number of
    processes may be another one at each resume.

    Use it in a ``with`` statement, which waits for the save under way at its end. Without one, the
    interpreter's exit waits for it; on Python 3.12.0 to 3.12.2, where that is too late, each `save` does.

    Raises:
      TypeError, ValueError: a bad argument, such as an address of another kind as the directory.
      ModuleNotFoundError: the directory is in ``gs://``, and the extra ``gcs`` is not installed.
      OSError: the directory cannot be made or written, or another writer has it open.
      RuntimeError: another process could not open it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        pipeline: Stream,
        save_every: int,
        keep: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        process_timeout_s: float = 600.0,
    ) -> None:
        if not isinstance(pipeline, Stream):
            raise TypeError(
                "pipeline must be a Pipeline, a Mixture, or a GrainStream around a chain of Grain's data "
                f"sets, not {type(pipeline).__name__}"
            )
        self._save_every = _at_least_one("save_every", save_every)
        self._keep = _at_least_one("keep", keep)
        self._run_config = json_settings("run_config", run_config)
        pipeline.check_identity()  # what cannot be identified is an error here
        self._pipeline = pipeline
        if not isinstance(process_timeout_s, int | float | np.number) or not process_timeout_s > 0:
            raise ValueError(
                f"process_timeout_s must be seconds, more than 0, not {process_timeout_s!r}"
            )
        self._shown = directory_text(directory)
        quiet_the_layers_below()
        self._processes = _processes(process_timeout_s)
        if pipeline.single_process and self._processes.are_several:
            raise ValueError(pipeline.single_process)
        self._directory = _opened(directory, self._processes, process_timeout_s)
        self._writer = _Writer(self._directory, self._keep, self._processes, self._shown)
        self._resumed: _Resumed | None = None
        self._damaged: dict[int, str] = {}
        self._stop = StopRequest()
        self._stops = False
        #: Whether this process could not begin the last save, of several.
        self._failed_here = False
        self._closed = False
        self._opened_by = os.getpid()
        self._turn = threading.RLock()
        self._has_turn = False

    def __enter__(self) -> Self:
        self._writer.is_closed_in_time = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as lost:
            if error is None:
                raise
            # The loop's own error must not be hidden behind this one.
            error.add_note(f"While closing the checkpoints: {lost}")
            _log.error("%s", lost)

    def steps(self) -> list[int]:
        """Numbers of all steps in the directory, in rising order, damaged ones included."""
        return self._directory.steps()

    def resume(
        self,
        train_state: TrainState,
        *,
        allow: Collection[str] = (),
        verify: Verify = "full",
        verify_data: DataVerify = "cache",
        read_options: ReadOptions | None = None,
        workers: int = 0,
        device: Device | None = None,
        on_stats: OnStats | None = None,
        stats_every: int = 100,
        progress: OnProgress | None = None,
    ) -> Run[TrainState]:
        """Goes on from the newest checkpoint that is whole, if it belongs to this run; or starts.

        Args:
          train_state: any tree of arrays, PRNG keys and numbers: what a new run begins with, and
            otherwise the pattern for what is restored (structure, shapes, dtypes, shardings). It is
            not changed. Where a checkpoint exists, leaves may be `jax.ShapeDtypeStruct`.
          allow: names of differences to go on with; later manifests tell of the change.
            ``"batch_size"``: the run goes on at the same record. ``"skip"``: batches ahead are left
            out, or no longer. ``"exclude"``: records are left out from here on, or no longer. Of a
            mixture nothing can change. ``"grain_version"``, of a `GrainStream`: what comes next is
            compared, but not what comes after it.
          verify: ``"full"`` digests every file of the checkpoint; ``"manifest"`` trusts the content
            of the array files.
          verify_data: ``"cache"`` reads the data that a source keeps no digests of (``cache=True``), or
            that has changed; ``"full"`` reads all of it.
          read_options: as for `Pipeline.iterate`.
          workers: as for `Pipeline.iterate`.
          device: as for `Pipeline.iterate`.
          on_stats: as for `Pipeline.iterate`. Each process has its own.
          stats_every: as for `Pipeline.iterate`.
          progress: told how far the reading of data and checkpoint has come; see `loader.watch_progress`.

        Returns:
          The `Run`. The same records come next, in the same batches, as without the stop.

        Raises:
          CheckpointMismatchError: data, configuration or train state are not those of the
            checkpoint. An older checkpoint is never tried instead.
          CheckpointDamagedError: there are checkpoints, and none is whole.
          RuntimeError: a save in the background has failed, or a whole checkpoint cannot be read.
          TypeError, ValueError: a bad argument.
        """
        allowed = check_allow(self._pipeline, allow)
        check_verify(verify)
        self._check_open()
        iterate = functools.partial(
            self._pipeline.iterate,
            read_options=read_options,
            workers=workers,
            device=device,
            on_stats=on_stats,
            stats_every=stats_every,
        )
        iterate()  # what it refuses is refused before anything is read
        watching = contextlib.nullcontext() if progress is None else watch_progress(progress)
        with self._alone("resume"), watching:
            self.wait()
            try:
                return self._resume(
                    train_state,
                    allowed=allowed,
                    verify=verify,
                    verify_data=verify_data,
                    iterate=iterate,
                )
            except (CheckpointMismatchError, CheckpointDamagedError) as refusal:
                # It says all there is to know; the lines of our own frames would stand above it.
                raise refusal.with_traceback(None)  # noqa: B904 (it is the same one)

    def _resume(
        self,
        train_state: TrainState,
        allowed: frozenset[str],
        verify: Verify,
        verify_data: DataVerify,
        iterate: Callable[..., StreamIterator],
    ) -> Run[TrainState]:
        began = time.monotonic()
        identity, steps = self._agreed(train_state, verify_data)
        took = [f"data identified in {seconds_text(time.monotonic() - began)}"]
        self._damaged = {}
        check = self._directory.check
        share = (self._processes.index, self._processes.count)
        for step in reversed(steps):
            try:
                begun = time.monotonic()
                found = self._together("check a checkpoint", check, step, verify, share, same=_told)
                checked = time.monotonic() - begun
                changes = self._together("match it", self._match, found, identity, allowed, iterate)
                restored = self._together("restore it", self._restore, found, train_state, verify)
            except StepDamagedError as damage:
                self._damaged[step] = str(damage)
                _log.warning("%s step %d is damaged and was skipped: %s", self._shown, step, damage)
                continue
            run = self._begin(identity, restored, iterate, found, changes)
            took.append(f"{_files_of(found, verify)} in {seconds_text(checked)}")
            took.append(f"{seconds_text(time.monotonic() - began)} in all")
            self._tell_of_begin(found, run.batches, took)
            return run
        if self._damaged:
            raise CheckpointDamagedError(self._shown, self._damaged)
        if is_abstract(train_state):
            raise ValueError(
                f"{self._shown} holds no checkpoint, and the train state has shapes without "
                "values; pass the train state that the run begins with"
            )
        _check_step(train_state, 0, f"a new run in {self._shown}")
        run = self._begin(identity, train_state, iterate, None, {})
        self._tell_of_begin(None, run.batches, took)
        return run

    def save(self, batches: StreamIterator, train_state: Any, *, force: bool = False) -> bool:
        """Saves train state and position, in the background, at multiples of ``save_every`` steps.

        The step is the number of batches that ``batches`` has delivered. When this returns, the
        caller may overwrite, donate or delete everything it passed.

        Args:
          batches: the iterator from `resume`.
          train_state: after the last batch that ``batches`` delivered.
          force: save at this step, whatever ``save_every`` says (for the end of a run).

        Returns:
          Whether a save was begun. It is not where the step is no multiple of ``save_every``, or
          is saved already.

        Raises:
          RuntimeError: an earlier save in the background has failed (this one was begun all the
            same, unless there are several processes), or this one could not begin. Earlier
            checkpoints are intact. Of several processes each raises it at the next save that is
            due, or where it waits for the saves.
          TypeError, ValueError: ``batches`` is not from this run, or the train state is not one
            that could be resumed (other leaves than at `resume`, or another step).
          SystemExit: inside `stop_on_signals`, after a signal.
        """
        called = time.monotonic()
        resumed = self._check_batches(batches)
        position = batches.position
        step = position.step
        stopped_by = self._stop_signal(step)
        begun = False
        if force or stopped_by is not None or (step > 0 and step % self._save_every == 0):
            with self._alone("save"):
                begun = self._save(resumed, position, train_state, called)
        elif not self._processes.are_several:  # of whom one would raise it sooner than the others
            self._writer.raise_error()
        if stopped_by is not None:
            self.wait()
            _log.warning("%s: stopped by %s at step %d", self._shown, stopped_by.name, step)
            raise SystemExit(128 + stopped_by)
        return begun

    def _save(
        self, resumed: "_Resumed", position: Position, train_state: Any, called: float
    ) -> bool:
        """A save that is due, unless that step is saved already."""
        if self._processes.are_several:
            self._writer.settle()  # what the last save has come to is to be known to all of them, or none
        if position.step != self._writer.last_step:
            return self._begin_save(resumed, position, train_state, called)
        if not self._processes.are_several:
            self._writer.raise_error()
        return False

    def _begin_save(
        self, resumed: "_Resumed", position: Position, train_state: Any, called: float
    ) -> bool:
        number = self._processes.number()
        error = self._writer.wait()
        if self._processes.are_several and (error is not None or self._failed_here):
            # Of a save that fails on one process, that one raises the error at once, and the others
            # here. It may not be there any more, and if it is, it leaves this one out too.
            self._failed_here = False
            if error is not None:
                raise error
            return False
        try:
            self._begin_save_here(number, resumed, position, train_state, called)
        except Exception as now:
            if error is not None:
                now.add_note(f"Before it: {error}")
            if self._processes.are_several:
                self._failed_here = True
                self._writer.tell(number, now)
            raise
        if error is not None:
            raise error
        return True

    def _begin_save_here(
        self,
        number: int,
        resumed: "_Resumed",
        position: Position,
        train_state: Any,
        called: float,
    ) -> None:
        step = position.step
        leaves = describe(train_state)
        changed = list(_diff_leaves(resumed.identity.train_state, leaves))
        if changed:
            raise ValueError(
                f"the train state at step {step} is not like the one that was passed to resume, and "
                "could not be resumed: " + "; ".join(changed)
            )
        _check_step(train_state, step, f"the iterator of {self._shown}")
        if self._writer.last_step is not None and step < self._writer.last_step:
            raise ValueError(
                f"step {step} comes before step {self._writer.last_step}, which is saved already: the "
                "iterator was moved back. Go on from an older step in a directory of its own"
            )
        if self._processes.is_first:
            self._make_way(step)
        self._damaged.pop(step, None)
        stored = to_stored(train_state, several_processes=self._processes.are_several)
        identity = dataclasses.replace(resumed.identity, train_state=leaves)
        manifest = self._manifest(identity, resumed.history, resumed.batches)
        self._writer.begin(number, manifest, stored, self._damaged, called)

    def _manifest(
        self, identity: Identity, history: tuple[Mapping[str, Any], ...], batches: StreamIterator
    ) -> Manifest:
        """The manifest of a checkpoint at the place of an iterator."""
        place = batches.place()
        state = json_value(place.state, "the iterator's state")
        place = Place(place.position, place.ahead, state)
        return Manifest(place.position.step, place, identity, history, package_versions())

    @contextlib.contextmanager
    def stop_on_signals(
        self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
    ) -> Iterator[None]:
        """A context in which a signal ends the run at the next `save`, with that step saved.

        The `save` after the signal saves its step whatever ``save_every`` says, waits for the
        commit, and raises `SystemExit` with 128 plus the signal's number (143 for SIGTERM); so does the
        end of the context, where no `save` came. A second signal acts as it would have without it.

        Under `jax.distributed` a signal to one process is enough: all of them save and exit at a
        step that JAX has them agree on. For this each process must call `save` after each batch.
        Wherever it was sent, and whatever it was, they exit as for SIGTERM.

        Args:
          signals: which ones.

        Raises:
          ValueError: not called from the main thread; or there are several processes, and JAX's
            preemption service, by which they agree, is disabled.
        """
        several = self._processes.are_several
        if several and not jax.config.values["jax_enable_preemption_service"]:
            raise ValueError(
                "jax_enable_preemption_service is off: processes agree by it on the step to stop at. "
                "Leave it on, or go without stop_on_signals"
            )
        # JAX has taken SIGTERM; it is told of the others by it.
        own = [number for number in signals if not several or number != signal.SIGTERM]
        then = functools.partial(signal.raise_signal, signal.SIGTERM) if several else None
        try:
            with stop_requests(own, then) as self._stop:
                self._stops = True
                yield
            if self._stop.signal is not None:
                raise SystemExit(self._stop.exit_code)
        finally:
            self._stops = False
            self._stop = StopRequest()

    def _stop_signal(self, step: int) -> signal.Signals | None:
        """The signal that ends the run here, if there was one."""
        if not self._processes.are_several:
            return self._stop.signal
        stops = self._stops and multihost_utils.reached_preemption_sync_point(step)
        return signal.SIGTERM if stops else None

    def wait(self) -> None:
        """Waits until the save in the background is committed.

        Raises:
          RuntimeError: it has failed.
        """
        error = self._writer.wait()
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits for the save in the background and lets others open the directory. Safe to call again.

        Raises:
          RuntimeError: the save has failed.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            self._writer.close()
            self._directory.close()

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Keeps other threads out; what runs inside of this one, such as a signal handler, is refused."""
        with self._turn:
            if self._has_turn:
                raise RuntimeError(
                    f"{what} was called in the middle of a save or resume, by a signal handler or a "
                    "callback. Set a flag there and call it from the loop, or use stop_on_signals"
                )
            self._has_turn = True
            try:
                yield
            finally:
                self._has_turn = False

    def _check_open(self) -> None:
        if self._opened_by != os.getpid():
            raise RuntimeError(
                f"these checkpoints of {self._shown} were opened by process {self._opened_by}, of which "
                "this is a fork: only that one can save. Open Checkpoints in the process that trains"
            )
        if self._closed:
            raise ValueError(
                f"these checkpoints of {self._shown} are closed, and another run may be writing "
                "there; make another Checkpoints"
            )

    def _agreed(self, train_state: Any, verify_data: DataVerify) -> tuple[Identity, list[int]]:
        """What this run is, and all steps that there are, if every process finds the same."""

        def find() -> tuple[Identity, list[int]]:
            leaves = describe(train_state)
            return Identity.of(self._pipeline, self._run_config, leaves, verify_data), self.steps()

        def told(found: tuple[Identity, list[int]]) -> dict[str, str]:
            identity, steps = found
            newest = f"{steps[-_SHOWN_STEPS:]} ({len(steps)} of them)"
            with contextlib.closing(self._pipeline.iterate()) as start:
                return {"steps": newest, **_told(self._manifest(identity, (), start))}

        return self._together("resume", find, same=told)

    def _together(
        self,
        what: str,
        work: Callable[..., _Result],
        *arguments: Any,
        same: Callable[[_Result], Mapping[str, str]] | None = None,
    ) -> _Result:
        """Does something on every process; a checkpoint is damaged where any has found it to be."""
        number = self._processes.number()
        try:
            return self._processes.together(number, what, lambda: work(*arguments), same)
        except ElsewhereError as error:
            if error.kind == StepDamagedError.__name__:
                raise StepDamagedError(str(error)) from error
            raise

    def _match(
        self,
        found: Manifest,
        identity: Identity,
        allow: frozenset[str],
        iterate: Callable[..., StreamIterator],
    ) -> dict[str, list[Any]]:
        return match(found, identity, self._pipeline, self._shown, allow, iterate)

    def _restore(self, found: Manifest, train_state: TrainState, verify: Verify) -> TrainState:
        """A new train state from a checkpoint that has been checked."""
        try:
            path, leaves = self._directory.step_path(found.step), found.identity.train_state
            several = self._processes.are_several
            templates = stored_templates(train_state, several_processes=several)
            stored = _within(
                self._directory.timeout_s,
                "read the train state",
                lambda: _read_train_state(path, leaves, templates),
            )
            restored: TrainState = from_stored(stored, train_state, leaves)
        except Exception as error:
            if verify == "manifest" and not isinstance(error, TimeoutError):
                self._directory.check(found.step)  # which tells what is damaged, if it is that
            # Each byte is as it was written: the fault is not the step's, and an older one would
            # meet it too.
            raise RuntimeError(
                f"{self._shown} step {found.step} is whole, but its train state cannot be read: {error}"
            ) from error
        _check_step(restored, found.step, f"{self._shown} step {found.step}")
        return restored

    def _begin(
        self,
        identity: Identity,
        train_state: TrainState,
        iterate: Callable[..., StreamIterator],
        found: Manifest | None,
        changes: dict[str, list[Any]],
    ) -> Run[TrainState]:
        history = found.history if found else ()
        if found and changes:
            position = dataclasses.asdict(found.position)
            history = (*history, {"position": position, "changed": changes})
        batches = iterate(found.place.start if found else None, on_batch=self._step_log())
        self._resumed = _Resumed(identity, history, batches)
        self._writer.last_step = found.step if found else None
        return Run(train_state, batches, batches.position)

    def _tell_of_begin(
        self, found: Manifest | None, batches: StreamIterator, took: Sequence[str]
    ) -> None:
        """Logs where the run begins, what that stands on, and how long that has taken."""
        if found is None:
            what = f"a new run of {self._pipeline.describe()}"
        elif batches.is_at_end():
            what = f"the run is finished, at step {found.step}"
        else:
            what = f"resumed at step {found.step}"
            if batches.position.epoch or batches.position.offset:
                what += f", epoch {batches.position.epoch}, offset {batches.position.offset}"
        _log.log(self._processes.log_level, "%s: %s; %s", self._shown, what, ", ".join(took))

    def _step_log(self) -> OnBatch | None:
        return step_log_of_environment(
            self._processes.index if self._processes.are_several else None
        )

    def _check_batches(self, batches: StreamIterator) -> "_Resumed":
        self._check_open()
        if self._resumed is None:
            raise ValueError("call resume before save: it decides where the run goes on")
        if not isinstance(batches, StreamIterator):
            raise TypeError(
                f"batches must be the iterator that resume gave (run.batches), not a "
                f"{type(batches).__name__}: only it knows how far the run has come"
            )
        if batches is not self._resumed.batches:
            raise ValueError(
                "batches is not the iterator that the last resume gave, and its place would be saved "
                "with the train state: train on run.batches, not on an iterator of your own"
            )
        return self._resumed

    def _make_way(self, step: int) -> None:
        """Sets a damaged directory aside that stands where a step is to be saved."""
        if self._directory.holds(step):
            aside = self._directory.set_aside(step)
            path = self._directory.step_path(step)
            _log.warning("%s stood in the way of a save; it is now %s", path, aside)


def load(
    directory: str | os.PathLike[str], step: int | None = None, *, verify: Verify = "full"
) -> tuple[Manifest, dict[str, Any]]:
    """Reads a checkpoint without a pipeline, for inspection: checks it, and gives what it holds.

    Nothing in the directory changes, and a run may be writing to it meanwhile.

    Args:
      directory: of the run.
      step: its number; by default the newest step that is whole.
      verify: as for `Checkpoints.resume`.

    Returns:
      The manifest, and the train state as NumPy arrays by the path of their leaf; a PRNG key as its
      uint32 data.

    Raises:
      FileNotFoundError: there is no such step, or none at all.
      TypeError, ValueError: a bad argument, such as the directory of one step.
      CheckpointDamagedError: the step (or every step) is damaged.
      RuntimeError: a whole step cannot be read.
    """
    step = None if step is None else as_integer("a step", step)
    check_verify(verify)
    quiet_the_layers_below()
    where = RunDirectory(directory, write=False)
    steps = where.steps()
    if step is not None:
        if step not in steps:
            raise FileNotFoundError(f"{os.fspath(directory)} has no step {step}")
        steps = [step]
    reasons: dict[int, str] = {}
    for number in reversed(steps):
        try:
            manifest = where.check(number, verify)
            return manifest, _load(where, number, manifest.identity.train_state, verify)
        except StepDamagedError as damage:
            reasons[number] = str(damage)
    if not steps:
        raise FileNotFoundError(f"{os.fspath(directory)} has no steps")
    raise CheckpointDamagedError(os.fspath(directory), reasons)


@dataclasses.dataclass
class _Resumed:
    """What `save` has to know of the `resume` before it."""

    identity: Identity
    history: tuple[Mapping[str, Any], ...]
    batches: StreamIterator


class _Writer:
    """Writes steps, one at a time, in the background.

    The arrays are written by Orbax's handler, without Orbax's checkpointer around it. That one makes
    its directories either in the background, where one that cannot be made blocks the exit for 300 s,
    or in the foreground, for as long as the rest of the copy takes; and in both cases the threads that
    write take turns with the one that still copies.

    They need thread pools, which stop when the interpreter begins to exit. A save under way then is
    waited for first, also where nobody called `close`. Where that is too late, `begin` waits for it.
    """

    def __init__(
        self, directory: RunDirectory, keep: int, processes: Processes, shown: str
    ) -> None:
        self._directory = directory
        self._shown = shown
        self._keep = keep
        self._processes = processes
        # What the standard handler is made of; that one checks each leaf once more, which takes its time.
        self._handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=_MAX_WRITING_GB)
        # Alone, else it has all processes wait for each other at each save, for as long as that takes.
        alone = ocp.options.MultiprocessingOptions(
            active_processes={processes.index}, barrier_sync_key_prefix=f"regrain_{processes.index}"
        )
        self._orbax = ocp.Checkpointer(self._handler, multiprocessing_options=alone)
        _open_writers.add(self)
        # An event, since Thread.join takes a thread for ended when Ctrl-C interrupts it.
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        #: The step last saved or resumed from; None where that save has failed.
        self.last_step: int | None = None
        self._last_begun = -1
        #: Whether somebody waits for the last save before the interpreter's exit.
        self.is_closed_in_time = False
        self._is_forked = False

    def begin(
        self,
        number: int,
        manifest: Manifest,
        stored: Any,
        damaged: Collection[int],
        called: float,
    ) -> None:
        """Takes a copy of everything and begins to write it; no other save may be under way.

        Args:
          number: of the save, by which processes know it.
          manifest: without files.
          stored: the arrays.
          damaged: steps that are known to be.
          called: when the caller was asked to save, by `time.monotonic`.
        """
        step = manifest.step
        path = epath.Path(self._directory.unfinished_path(step)) / TRAIN_STATE_ITEM
        save = _Save(number, manifest, frozenset(damaged), _Arrays(path), called)
        self._idle.clear()
        try:
            if self._processes.is_first:
                self._directory.begin_step(step)
            self._start(save, stored)
        except BaseException as error:
            if not save.copied.is_open:
                save.arrays.gate.close()
                self._clean(step)
                self._idle.set()
            if isinstance(error, Exception):
                raise self._failed(step, error) from error
            raise
        if self._blocks:
            self._idle.wait()

    @property
    def _blocks(self) -> bool:
        """Whether a save is only over when it is written: where at the exit it could not be any more."""
        return STARTS_NO_THREADS_AT_EXIT and not self.is_closed_in_time

    def tell(self, number: int, error: Exception) -> None:
        """Has a save that could not begin here fail on the other processes too, if it has begun there."""

        def fail() -> None:
            raise error

        if number != self._last_begun:
            with contextlib.suppress(Exception):
                self._processes.together(number, _BEGIN_SAVE, fail)

    def _start(self, save: "_Save", stored: Any) -> None:
        gate = save.copied
        try:
            # This thread is started first, with nothing to do yet. To start it after the copy would let
            # it, and those that it wakes, go to work before this method returns.
            threading.Thread(target=self._finish, args=(save,), name="regrain-save").start()
            # Under a number of its own; under another save's it would wait for that one's directories.
            self._orbax.synchronize_next_awaitable_signal_operation_id()
            what = ocp.args.PyTreeSave(stored, ocdbt_target_data_file_size=_file_bytes(stored))
            save.writing = _run(self._handler.async_save(save.arrays, args=what))
            if self._processes.are_several:
                save.copies = copies_in(stored)
            self.last_step = save.manifest.step
            self._last_begun = save.number
            save.blocked_s = time.monotonic() - save.called
            gate.open()
        finally:
            gate.close()

    def settle(self) -> None:
        """Waits for the save under way."""
        self._idle.wait()

    def wait(self) -> Exception | None:
        """Waits for the save under way; returns the error that no call has told of yet, once."""
        self._idle.wait()
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raises the error of a save that has failed since the last call, without waiting."""
        if self._idle.is_set():
            error = self.wait()
            if error is not None:
                raise error

    def close(self) -> None:
        """Frees what Orbax holds; the save under way is waited for, also after a Ctrl-C elsewhere."""
        self._idle.wait()
        if not self._is_forked:
            self._orbax.close()

    def after_fork(self) -> None:
        """In a forked child: the save under way is its parent's, whose threads are not here."""
        self._is_forked = True
        self._idle = threading.Event()
        self._idle.set()

    def _finish(self, save: "_Save") -> None:
        if save.copied.wait():  # else it has not begun, and `begin` tells why
            try:
                self._commit(save)
            finally:
                save.arrays.gate.close()
                self._idle.set()

    def _commit(self, save: "_Save") -> None:
        step = save.manifest.step
        try:
            # Only then has the first process made the directory.
            together = functools.partial(self._processes.together, save.number)
            together(_BEGIN_SAVE, lambda: None, lambda _: save.told())
            save.arrays.gate.open()
            together("write a checkpoint", lambda: self._write(save))
            together("commit a checkpoint", lambda: self._commit_once(save))
        except Exception as error:  # noqa: BLE001 (whatever it is, the next call raises it)
            self._clean(step)
            self.last_step = None
            self._note(self._failed(step, error), error)
            return
        if self._processes.is_first:
            self._tell_of(save)
            self._delete_old(save)

    def _tell_of(self, save: "_Save") -> None:
        in_all = time.monotonic() - save.called
        _log.info(
            "%s: step %d saved: %s; the loop waited %s, %s in all",
            self._shown,
            save.manifest.step,
            _size_of(save.manifest),
            seconds_text(in_all if self._blocks else save.blocked_s),
            seconds_text(in_all),
        )

    def _write(self, save: "_Save") -> None:
        try:
            errors = _within(
                self._directory.timeout_s,
                "write the train state",
                lambda: [_error_of(writing) for writing in save.writing],
            )
        except TimeoutError:
            # Else its threads would keep the interpreter from its exit. Older ones cannot be cancelled.
            for writing in save.writing:
                getattr(writing, "cancel", lambda: None)()
            raise
        failed = [error for error in errors if error is not None]
        if failed:  # only now, when nobody writes any more where the step is to be removed
            raise failed[0]
        if self._processes.are_several:
            self._directory.seal_part(save.manifest.step, self._processes.index)

    def _commit_once(self, save: "_Save") -> None:
        if self._processes.is_first:
            finalize = functools.partial(self._handler.finalize, save.arrays.path)
            _within(self._directory.timeout_s, "finish the train state", finalize)
            step, about = save.manifest.step, save.about()
            save.manifest = self._directory.commit_step(step, save.manifest, about)

    def _clean(self, step: int) -> None:
        if self._processes.is_first:
            self._directory.clean_step(step)

    def _delete_old(self, save: "_Save") -> None:
        step = save.manifest.step
        begun = time.monotonic()
        try:
            deleted = self._directory.keep_newest(self._keep, save.damaged)
        except Exception as error:  # noqa: BLE001 (as above)
            what = (
                f"step {step} is saved in {self._directory.path}, but steps before it could not be"
            )
            self._note(RuntimeError(f"{what} deleted: {error}"), error)
            if self._processes.are_several:
                self._error = None  # no other process knows of it: it is logged, and stops nobody
            return
        if deleted:
            steps = f"step{'s' * (len(deleted) > 1)} {', '.join(map(str, deleted))}"
            took = seconds_text(time.monotonic() - begun)
            _log.info("%s: %s deleted in %s, %d stay", self._shown, steps, took, self._keep)

    def _note(self, error: RuntimeError, cause: Exception) -> None:
        """Keeps an error for the next call, and logs it in case that there is none."""
        error.__cause__ = cause
        _log.error("%s", error)
        self._error = error

    def _failed(self, step: int, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"the save of step {step} in {self._directory.path} has failed: {error}. Earlier "
            "checkpoints are intact, and the next save is independent of this one."
        )


_open_writers: Final = weakref.WeakSet[_Writer]()


def _finish_saves() -> None:
    """At the interpreter's exit: finishes what is under way, or says that it is lost."""
    for writer in list(_open_writers):
        error = writer.wait()
        if error is not None:
            _log.error("At exit: %s", error)


# The standard library's own hook for this moment (concurrent.futures ends its pools by it) has no
# public name; atexit comes after the pools have stopped.
threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]  # noqa: SLF001


def _leave_saves_to_the_parent() -> None:
    for writer in list(_open_writers):
        writer.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_saves_to_the_parent)


class _Save:
    """A save under way.

    Attributes:
      number: by which processes know it.
      manifest: without files, until they are written.
      damaged: steps that are known to be.
      arrays: where the train state goes.
      called: when the caller was asked to save, by `time.monotonic`.
      blocked_s: how long the caller had to wait.
      copied: opens when everything is.
      writing: what Orbax writes in the background; nothing before it has copied everything.
      copies: arrays of which every process has one of its own, and the first one writes it.
    """

    def __init__(
        self,
        number: int,
        manifest: Manifest,
        damaged: frozenset[int],
        arrays: "_Arrays",
        called: float,
    ) -> None:
        self.number = number
        self.manifest, self.damaged, self.arrays = manifest, damaged, arrays
        self.called, self.blocked_s = called, 0.0
        self.copied = _Gate()
        self.writing: Sequence[ocp.Future] = ()
        self.copies: dict[str, np.ndarray[Any, Any]] = {}
        self._begun_ns = time.time_ns()

    def told(self) -> dict[str, str]:
        """What all processes must save alike."""
        copies = {f"train_state{path}": _sha256(array) for path, array in self.copies.items()}
        return {**_told(self.manifest), **copies}

    def about(self) -> dict[str, Any]:
        """What Orbax keeps with a step: by it, its manager reads all items without being told their kinds."""
        return {
            "item_handlers": {
                TRAIN_STATE_ITEM: ocp.StandardCheckpointHandler.typestr(),
                ITERATOR_ITEM: ocp.JsonCheckpointHandler.typestr(),
                MANIFEST_ITEM: ocp.JsonCheckpointHandler.typestr(),
            },
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": self._begun_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": {},
        }


class _Arrays:
    """The folder of a step's arrays, as a path that Orbax's threads have to wait for.

    Else they would begin to write while the copy is made, and take turns with the thread that makes
    it. What they ask for are the members of Orbax's protocol ``PathAwaitingCreation``.
    """

    def __init__(self, path: epath.Path) -> None:
        self.path, self.gate = path, _Gate()

    def __truediv__(self, name: str) -> epath.Path:
        return self.path / name

    async def await_creation(self) -> epath.Path:
        if not self.gate.wait():
            raise asyncio.CancelledError
        return _Ready(self.path)


class _Ready(type(epath.Path())):  # type: ignore[misc]
    """A path that need not be waited for, and that can be.

    Orbax's threads share the place from which one reads `_Arrays`, waits, and puts this there instead.
    Another one that has found `_Arrays` there may find this when it looks again to wait for it.
    """

    async def await_creation(self) -> Self:
        return self


class _Gate:
    """Where threads wait for a copy to be made."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._decided.set()

    def close(self) -> None:
        """Sends all of them away, unless it is open."""
        self._decided.set()

    def wait(self) -> bool:
        """Whether there is something to be done."""
        self._decided.wait()
        return self.is_open


def _processes(timeout_s: float) -> Processes:
    """This process and those with which it shares its run."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return Processes(0, 1, None, timeout_s)
    client = ocp.multihost.get_jax_distributed_client()
    return Processes(jax.process_index(), jax.process_count(), client, timeout_s)


def _opened(path: str | os.PathLike[str], processes: Processes, timeout_s: float) -> RunDirectory:
    """The run's directory, which the first process opens for writing, and all others find."""
    if not processes.are_several:
        return RunDirectory(path, timeout_s=timeout_s)
    number = processes.number()
    opened = processes.together(
        number,
        "open the directory",
        lambda: RunDirectory(path, write=processes.is_first, timeout_s=timeout_s),
    )
    try:
        processes.together(
            number, "find the directory", opened.mark, lambda mark: {"directory": mark}
        )
    except BaseException:
        opened.close()
        raise
    return opened


def _read_train_state(
    step_path: str | os.PathLike[str], leaves: tuple[Leaf, ...], templates: Mapping[str, Any]
) -> dict[str, Any]:
    """The stored arrays of a step by the path of their leaf: JAX's where a template has a sharding."""
    path = epath.Path(step_path) / TRAIN_STATE_ITEM

    def how(keys: tuple[Any, ...], _: Any) -> ocp.RestoreArgs:
        sharding = getattr(templates.get(pointer(keys)), "sharding", None)
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=sharding)

    # Not by Orbax's checkpointer, at whose end each process waits for all others, for ever.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        saved = jax.tree_util.tree_map_with_path(how, handler.metadata(path).tree)
        what = ocp.args.PyTreeRestore(restore_args=saved)
        tree = handler.restore(path, args=what)
    finally:
        handler.close()
    arrays = {pointer(keys): array for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return {leaf.path: arrays[stored_at(leaf.path)] for leaf in leaves}


def _load(
    directory: RunDirectory, step: int, leaves: tuple[Leaf, ...], verify: Verify
) -> dict[str, Any]:
    """As NumPy arrays: the devices that the run had may not be here."""
    path = directory.step_path(step)
    try:
        stored = _within(
            directory.timeout_s, "read the train state", lambda: _read_train_state(path, leaves, {})
        )
    except TimeoutError:
        raise
    except Exception as error:
        if verify == "manifest":
            directory.check(step)  # as in Checkpoints.resume
        raise RuntimeError(
            f"{directory.path} step {step} is whole, but its train state cannot be read: {error}"
        ) from error
    return {
        leaf.path: stored[leaf.path][:0].reshape(leaf.shape)
        if 0 in leaf.shape
        else stored[leaf.path]
        for leaf in leaves
    }


def _size_of(manifest: Manifest) -> str:
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return f"{bytes_text(size)} in {things_text(len(manifest.files), 'file')}"


def _files_of(manifest: Manifest, verify: Verify) -> str:
    """What a check of a checkpoint has looked at."""
    what = "" if verify == "full" else "names and sizes of "
    return f"{what}{_size_of(manifest)} verified"


def _told(manifest: Manifest) -> dict[str, str]:
    """What all processes must have in common, in few words."""
    parts = manifest.to_dict()
    return {
        "step": str(parts.pop("step")),
        **{name: _sha256_of(json.dumps(part).encode()) for name, part in parts.items()},
    }


def _sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_SHOWN_DIGITS]


def _sha256(array: np.ndarray[Any, Any]) -> str:
    return _sha256_of(np.ascontiguousarray(array).tobytes())


def _file_bytes(stored: Any) -> int:
    """How large the files of arrays are to be: small, so that all cores have some of them to digest.

    An array larger than that would be cut up, into parts whose sides divide its own: a long one whose
    length is a prime number, into its single values. So no file is to be smaller than the largest array.
    """
    largest: int = max(leaf.nbytes for leaf in jax.tree.leaves(stored))
    return min(max(_FILE_BYTES, largest), _MAX_FILE_BYTES)


def _within(timeout_s: float | None, what: str, work: Callable[[], _Result]) -> _Result:
    """Does something that may wait for a store which does not answer, and that cannot be told how long.

    Raises:
      TimeoutError: it has not come to an end; where it waits is a thread that keeps nobody from exiting.
    """
    if timeout_s is None:
        return work()
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            done.set_exception(error)

    threading.Thread(target=run, name="regrain-store", daemon=True).start()
    try:
        return done.result(timeout_s)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(
            f"to {what} has taken more than {timeout_s:g} s: the store does not answer, or is slower than "
            "process_timeout_s allows for"
        ) from None


def _error_of(future: ocp.Future) -> Exception | None:
    """What something in the background has failed with, once it is over."""
    try:
        future.result()
    except Exception as error:  # noqa: BLE001 (whatever it is, the save has failed)
        return error
    return None


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine to its end; in a notebook, whose thread runs an event loop already, in another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_run_here, work).result()


def _run_here(work: Coroutine[Any, Any, _Result]) -> _Result:
    # Not asyncio.run, which meddles with the handler of SIGINT.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def _check_step(train_state: Any, step: int, what: str) -> None:
    own = step_of(train_state)
    if own is not None and own != step:
        raise ValueError(
            f"the train state's own step is {own}, and {what} is at step {step}: they do not belong "
            "together. Save after each update with the iterator that fed it (no read-ahead in "
            "between); a counter of something else than batches needs another name than step"
        )


def _diff_leaves(before: tuple[Leaf, ...], now: tuple[Leaf, ...]) -> list[str]:
    befores = {leaf.path: leaf.kind for leaf in before}
    nows = {leaf.path: leaf.kind for leaf in now}
    return [
        f"{shown} was {befores.get(path, 'absent')} and is {nows.get(path, 'absent')}"
        for path, shown in in_print([*befores, *nows]).items()
        if befores.get(path) != nows.get(path)
    ]


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return int(value)
