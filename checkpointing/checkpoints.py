"""Checkpoints of a training run: save train state and stream together, resume only what matches.

Orbax writes the arrays of a step, where it looks for them; one rename (in an object store, one put), once
all else is written too, makes train state, iterator and manifest visible together. Several JAX processes
write one step: each its arrays, and the first one all that there is once (see `together.processes`).
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from checkpointing.arrays import read_arrays
from checkpointing.differences import check_allow, match
from checkpointing.errors import CheckpointDamagedError, CheckpointMismatchError
from checkpointing.leaf_checks import LeafChecks
from checkpointing.manifest import (
    Identity,
    Manifest,
    package_versions,
)
from checkpointing.proof.step_log import OnBatch, step_log_of_environment
from checkpointing.quiet import quiet_the_layers_below
from checkpointing.storage.directory import (
    RunDirectory,
    StepDamagedError,
    Verify,
    check_verify,
    shown,
)
from checkpointing.together.processes import ElsewhereError, Processes
from checkpointing.together.signals import StopRequest, stop_requests
from checkpointing.train_state import (
    LeafSpec,
    as_described,
    as_saved,
    check_begins_at_zero,
    check_step,
    describe,
    differing_kinds,
    from_stored,
    is_abstract,
    leaves_by_path,
    stored_at,
    stored_templates,
    to_arrays,
    to_stored,
)
from checkpointing.undocumented import coordination_client
from checkpointing.writer import Save, Writer, sha256_of, size_of
from loader import (
    Device,
    OnProgress,
    OnStats,
    Position,
    ReadOptions,
    watch_progress,
)
from loader.batching import as_integer
from loader.checks import integer
from loader.identity.base import Place
from loader.identity.differences import in_print
from loader.identity.json_form import json_settings, json_value
from loader.progress import seconds_text
from loader.sources import Verify as DataVerify
from loader.stream import Stream, StreamIterator

TrainState = TypeVar("TrainState")
_Result = TypeVar("_Result")

_log: Final = logging.getLogger(__name__)
#: As many of the newest steps are told in an error.
_SHOWN_STEPS: Final = 4
#: Numbers the calls at which processes can agree to stop: one series for each process, as in JAX.
_stop_checks: Final = itertools.count()


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
        self._save_every = integer("save_every", save_every, 1)
        self._keep = integer("keep", keep, 1)
        self._run_config = json_settings("run_config", run_config)
        pipeline.check_identity()  # what cannot be identified is an error here
        self._pipeline = pipeline
        if not isinstance(process_timeout_s, int | float | np.number) or not process_timeout_s > 0:
            raise ValueError(
                f"process_timeout_s must be seconds, more than 0, not {process_timeout_s!r}"
            )
        self._shown = shown(directory)
        quiet_the_layers_below()
        self._processes = _processes(process_timeout_s)
        if pipeline.single_process and self._processes.are_several:
            raise ValueError(pipeline.single_process)
        self._directory = _opened(directory, self._processes, process_timeout_s)
        self._writer = Writer(self._directory, self._keep, self._processes, self._shown)
        self._resumed: _Resumed | None = None
        self._damaged: dict[int, str] = {}
        self._stop = StopRequest()
        #: Whether signals are deferred, and whether all processes have agreed to stop.
        self._stops = self._stop_agreed = False
        self._closed = False
        self._opened_by = os.getpid()
        self._turn = threading.RLock()

    def __enter__(self) -> Self:
        self._writer.blocks = False
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
        with self._turn, jax.transfer_guard("allow"), watching:
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
        check_begins_at_zero(train_state, self._shown)
        self._check_copies(train_state)
        run = self._begin(identity, train_state, iterate, None, {})
        self._tell_of_begin(None, run.batches, took)
        return run

    def save(self, batches: StreamIterator, train_state: Any, *, force: bool = False) -> bool:
        """Saves train state and position, in the background, at multiples of ``save_every`` steps.

        The step is the number of batches that ``batches`` has delivered. When this returns, the
        caller may overwrite, donate or delete everything it passed, with one exception on the CPU: a JAX
        array may share its memory with a NumPy array (`jax.device_put` of an aligned one, DLPack). Do not
        write to that NumPy array until `wait` returns, or give JAX a copy. The save fails if a sample of
        the values, taken before this returns, has changed when the leaf has been written.

        A leaf that is replicated on several devices or processes must be equal on all of them. The save
        fails if their checksums, which are compared in the background, differ.

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
            that could be resumed (another step, or other leaves than at `resume`, apart from numbers that
            a jitted step made arrays). The first call checks the leaves, even if no save is due.
          SystemExit: inside `stop_on_signals`, after a signal.
        """
        called = time.monotonic()
        resumed = self._check_batches(batches)
        position = batches.position
        step = position.step
        if not resumed.are_leaves_checked:
            _check_leaves(resumed, train_state, step)
        stopped_by = self._stop_signal()
        begun = False
        if force or stopped_by is not None or (step > 0 and step % self._save_every == 0):
            with self._turn, jax.transfer_guard("allow"):
                begun = self._save(resumed, position, train_state, called)
        elif not self._processes.are_several:  # of whom one would raise it sooner than the others
            error = self._writer.error()
            if error is not None:
                raise error
        if stopped_by is not None:
            self.wait()
            _log.warning("%s: stopped by %s at step %d", self._shown, stopped_by.name, step)
            raise SystemExit(128 + stopped_by)
        return begun

    def _save(
        self, resumed: "_Resumed", position: Position, train_state: Any, called: float
    ) -> bool:
        """Save a step that is due, unless it is saved already."""
        step, writer = position.step, self._writer
        wait = step != writer.last_step or self._processes.are_several
        with _after(writer.wait() if wait else writer.error()):
            # Also after a wait: Ctrl-C may have interrupted a call that began this save.
            if step == writer.last_step:
                return False
            number = self._processes.number()
            prepare = functools.partial(
                self._prepare, number, resumed, position, train_state, called
            )
            try:
                save = self._processes.together(number, "begin a save", prepare, _told_of_save)
            except BaseException:
                if self._processes.is_first:
                    self._directory.clean_step(step)
                raise
            writer.begin(save)
        return True

    def _prepare(
        self,
        number: int,
        resumed: "_Resumed",
        position: Position,
        train_state: Any,
        called: float,
    ) -> Save:
        """Check that a step can be saved, and make room for it."""
        step = position.step
        leaves = _check_leaves(resumed, train_state, step)
        check_step(train_state, step, f"the iterator of {self._shown}")
        last = self._writer.last_step
        if last is not None and step < last:
            raise ValueError(
                f"step {step} comes before step {last}, which is saved already: the iterator was moved "
                "back. Go on from an older step in a directory of its own"
            )
        arrays, checks = self._arrays_of(train_state)
        stored = to_stored(train_state, arrays)
        identity = dataclasses.replace(resumed.identity, train_state=leaves)
        manifest = self._manifest(identity, resumed.history, resumed.batches)
        if self._processes.is_first:
            try:
                self._make_way(step)
                self._directory.begin_step(step)
            except OSError as error:
                raise self._writer.failed(step, error) from error
        self._damaged.pop(step, None)
        return Save(number, manifest, stored, checks, frozenset(self._damaged), called)

    def _arrays_of(self, train_state: Any) -> tuple[dict[str, Any], LeafChecks]:
        leaves = leaves_by_path(train_state)
        arrays = to_arrays(leaves, several_processes=self._processes.are_several)
        return arrays, LeafChecks(leaves, arrays)

    def _check_copies(self, train_state: Any) -> None:
        """Raise ValueError if copies of a leaf differ between devices or processes."""
        number = self._processes.number()

        def check() -> None:
            self._arrays_of(train_state)[1].check_copies(number, self._processes)

        self._processes.together(number, "compare the train state", check)

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
        """Return a context in which a signal ends the run at the next `save`, with that step saved.

        The first `save` after the signal saves its step, whatever ``save_every`` is, waits for the commit,
        and raises `SystemExit` with 128 plus the signal's number (143 for SIGTERM). The end of the context
        does too, if no `save` came before it. A second signal acts as it would without the context.

        Under `jax.distributed` a signal to one process is enough: all processes save and exit at the same
        `save`. They must call `save` and `stop_requested` equally often, though not at each step. They
        always exit as for SIGTERM.

        Args:
          signals: the signals to wait for.

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
            if self._stop_agreed:
                raise SystemExit(128 + signal.SIGTERM)
            if self._stop.signal is not None:
                raise SystemExit(self._stop.exit_code)
        finally:
            self._stops = self._stop_agreed = False
            self._stop = StopRequest()

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked the run to stop: the next `save` saves its step and exits.

        For loops that do not call `save` often: leave an evaluation early, or call `save` now. Always False
        outside `stop_on_signals`. Under `jax.distributed` all processes get the same answer, and all must
        ask equally often.
        """
        return self._stop_signal() is not None

    def _stop_signal(self) -> signal.Signals | None:
        """Return the signal that ends the run, if there was one."""
        if not self._processes.are_several:
            return self._stop.signal
        if self._stops and not self._stop_agreed:
            # JAX has all processes agree on a number that none has passed yet. Calls are counted, not
            # steps, because a loop may skip any step.
            self._stop_agreed = multihost_utils.reached_preemption_sync_point(next(_stop_checks))
        return signal.SIGTERM if self._stop_agreed else None

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

    def _check_is_outermost(self) -> None:
        """Refuse a call from a signal handler or a callback inside a save or a resume of this thread.

        The stack shows it. A flag would stay set if Ctrl-C came just before it is reset.
        """
        calls = {Checkpoints.save.__code__, Checkpoints.resume.__code__}
        frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code in calls)
        own = [frame for frame in frames if frame.f_locals.get("self") is self]
        if len(own) > 1:
            raise RuntimeError(
                f"{own[0].f_code.co_name} was called in the middle of a save or resume, by a signal handler or "
                "a callback. Set a flag there and call it from the loop, or use stop_on_signals"
            )

    def _check_open(self) -> None:
        self._check_is_outermost()
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
            train_state = as_saved(train_state, leaves)
            templates = stored_templates(train_state, several_processes=several)
            stored = read_arrays(path, templates, self._directory.timeout_s)
            stored = {leaf.path: stored[stored_at(leaf.path)] for leaf in leaves}
            restored: TrainState = from_stored(stored, train_state, leaves)
        except Exception as error:
            if verify == "manifest" and not isinstance(error, TimeoutError):
                self._directory.check(found.step)  # which tells what is damaged, if it is that
            # Each byte is as it was written: the fault is not the step's, and an older one would
            # meet it too.
            raise RuntimeError(
                f"{self._shown} step {found.step} is whole, but its train state cannot be read: {error}"
            ) from error
        check_step(restored, found.step, f"{self._shown} step {found.step}")
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
        identity = dataclasses.replace(identity, train_state=describe(train_state))
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
    run = RunDirectory(directory, write=False)

    def read(number: int) -> tuple[Manifest, dict[str, Any]]:
        manifest = run.check(number, verify)
        return manifest, _load(run, number, manifest.identity.train_state, verify)

    return run.newest(read, step)


@dataclasses.dataclass
class _Resumed:
    """What `save` has to know of the `resume` before it."""

    identity: Identity
    history: tuple[Mapping[str, Any], ...]
    batches: StreamIterator
    are_leaves_checked: bool = False


def _processes(timeout_s: float) -> Processes:
    """This process and those with which it shares its run."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return Processes(0, 1, None, timeout_s)
    return Processes(jax.process_index(), jax.process_count(), coordination_client(), timeout_s)


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


def _load(
    directory: RunDirectory, step: int, leaves: tuple[LeafSpec, ...], verify: Verify
) -> dict[str, Any]:
    """Read the leaves as NumPy arrays, since the run's devices may be absent here."""
    path = directory.step_path(step)
    try:
        stored = read_arrays(path, {}, directory.timeout_s)
    except TimeoutError:
        raise
    except Exception as error:
        if verify == "manifest":
            directory.check(step)  # as in Checkpoints.resume
        raise RuntimeError(
            f"{directory.shown} step {step} is whole, but its train state cannot be read: {error}"
        ) from error
    try:
        return {leaf.path: as_described(stored[stored_at(leaf.path)], leaf) for leaf in leaves}
    except (KeyError, ValueError) as error:
        raise StepDamagedError(f"its arrays are not those of its manifest: {error}") from error


def _files_of(manifest: Manifest, verify: Verify) -> str:
    """What a check of a checkpoint has looked at."""
    what = "" if verify == "full" else "names and sizes of "
    return f"{what}{size_of(manifest)} verified"


@contextlib.contextmanager
def _after(earlier: RuntimeError | None) -> Iterator[None]:
    """Raise the error of an earlier save at the end, or name it in a new error."""
    try:
        yield
    except Exception as error:
        if earlier is not None:
            error.add_note(f"Before it: {earlier}")
        raise
    if earlier is not None:
        raise earlier


def _told_of_save(save: Save) -> dict[str, str]:
    return _told(save.manifest)


def _told(manifest: Manifest) -> dict[str, str]:
    """Digest each part of a manifest that all processes must share."""
    parts = manifest.to_dict()
    parts |= parts.pop("stream")
    return {
        "step": str(parts.pop("step")),
        **{name: sha256_of(json.dumps(part).encode()) for name, part in parts.items()},
    }


def _check_leaves(resumed: _Resumed, train_state: Any, step: int) -> tuple[LeafSpec, ...]:
    """Return the leaves of a train state to be saved, which must be those of the resumed one."""
    leaves = describe(train_state)
    changed = differing_kinds(resumed.identity.train_state, leaves)
    if changed:
        shown = in_print(changed)
        differences = "; ".join(
            f"{shown[path]} was {before or 'absent'} and is {now or 'absent'}"
            for path, (before, now) in changed.items()
        )
        raise ValueError(
            f"the train state at step {step} is not like the one from resume, and could not be resumed: "
            f"{differences}. Pass resume a train state with the leaves that the update returns"
        )
    resumed.are_leaves_checked = True
    return leaves
