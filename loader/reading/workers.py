"""Worker processes that read batches ahead; none outlives its owner.

A batch is a function of its position, so positions are all that a worker needs. Request number i goes to
worker ``i % count``, and at most two requests to each worker are open. Grain's ``mp_prefetch`` and the
standard library's pools are not used: their parent waits for ever if a worker is killed while it sends,
their names in ``/dev/shm`` outlive a killed parent, and both leave a tracker process behind.
"""

import collections
import contextlib
import logging
import multiprocessing.spawn
import operator
import os
import pathlib
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Pipe
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np

from loader.batching import Batch, Position
from loader.errors import RecordReadError, WorkerDiedError
from loader.progress import bytes_text, things_text
from loader.reading.parcel import BatchMemory, Parcel, check_sendable, main_module, new_memory
from loader.reading.processes import Shard
from loader.reading.program import PROGRAM_SIGNALS, Program, kill_all, signals_held
from loader.reading.worker_process import (
    NOT_STARTED,
    PROGRAM,
    Answer,
    Failure,
    Masked,
    Request,
    Stream,
    Task,
    is_worker_process,
    jax_settings,
)

_log: Final = logging.getLogger(__name__)
#: Open requests to each worker: one that it reads, and one that it has read.
_OPEN_EACH: Final = 2
#: Time between two looks at a worker that gives no answer. If it has ended, its connection shows that at
#: once, unless another process has inherited the other end.
_LOOK_SECONDS: Final = 1.0
#: A worker that is stopped at this many looks in a row is logged.
_STOPPED_LOOKS: Final = 5
_END_SECONDS: Final = 5.0


class Grids(Protocol):
    """The places at which the batches of a stream begin and end."""

    def is_end(self, position: Position, /) -> bool:
        """Whether no batch begins there."""

    def after(self, position: Position, /) -> Position:
        """The place after the batch at a position."""


class WorkedStream(Stream, Protocol):
    """The part of a stream that `Workers` use."""

    @property
    def grid(self) -> Grids:
        """The places at which its batches begin and end."""

    def count_masked(self, position: Position, masked: Iterable[Masked], /) -> None:
        """Count masked records of the batch at a position, which a worker has read."""


class _Asked(NamedTuple):
    """An open request."""

    number: int
    position: Position


class Workers:
    """Processes that read the batches of a stream ahead. They belong to one thread at a time.

    Args:
      stream: copied to each process, except for its large arrays, which are shared.
      shard: the share of each batch to read.
      count: number of processes.
      environment: variables to set in them.

    Raises:
      OSError: a process cannot be started.
      Exception: the stream cannot be pickled; see `check_workers`.
    """

    def __init__(
        self,
        stream: WorkedStream,
        shard: Shard,
        count: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._stream = stream
        self._workers: Final[list[_Worker]] = []
        self._asked = collections.deque[_Asked]()
        self._next_number = 0
        self._next_position = Position()
        # Also at the interpreter's exit.
        self._end = weakref.finalize(self, _end, self._workers, os.getpid())
        _open.add(self)
        try:
            with contextlib.closing(Parcel(stream)) as parcel:
                # Ctrl-C must not fall between a process's start and its entry in the list.
                with signals_held():
                    for _ in range(count):
                        self._workers.append(_Worker(parcel, shard, environment or {}))
                _log.info(
                    "%s started, with %s of arrays to share: processes %s",
                    things_text(count, "worker"),
                    bytes_text(sum(parcel.sizes[1:])),
                    ", ".join(str(worker.program.pid) for worker in self._workers),
                )
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or this process was forked from their owner."""
        return not self._end.alive

    def read(self, position: Position) -> Batch:
        """The batch at a position; it was read ahead if it follows the one last read.

        Raises:
          WorkerDiedError: a worker has ended by itself.
          RuntimeError: the workers cannot start.
          Exception: reading the batch raised it. After any error these workers can only be closed.
        """
        self.read_ahead(position)
        asked = self._asked[0]
        worker = self._workers[asked.number % len(self._workers)]
        answer = worker.answer(asked)
        self._stream.count_masked(position, answer.masked)
        if isinstance(answer.result, Failure):
            _raise(answer.result, position, worker.program.pid)
        batch = self._memory(asked).get(answer.result)
        self._asked.popleft()
        self._ask()
        return batch

    def read_ahead(self, position: Position) -> None:
        """Have the batches from a position on read."""
        if not self._asked or self._asked[0].position != position:
            # The numbers of earlier requests mark their answers as out of date.
            self._asked.clear()
            self._next_position = position
        self._ask()

    def _ask(self) -> None:
        """Send as many requests as may be open."""
        grid, most = self._stream.grid, self.most_ready(len(self._workers))
        while len(self._asked) < most and not grid.is_end(self._next_position):
            asked = _Asked(self._next_number, self._next_position)
            self._asked.append(asked)
            self._next_number += 1
            self._next_position = grid.after(asked.position)
            request = Request(*asked, self._slot(asked), self._asked[0].number)
            self._workers[asked.number % len(self._workers)].send(request)

    @staticmethod
    def most_ready(count: int) -> int:
        """Number of batches that this many workers read ahead at most."""
        return _OPEN_EACH * count

    def count_ready(self) -> int:
        """Number of the next batches that are read. May be called from any thread."""
        return sum(asked.number < self._memory(asked).number for asked in list(self._asked))

    def kill(self) -> None:
        """Kill the processes, which ends a `read` in another thread too."""
        if not self.is_closed:
            for worker in self._workers:
                worker.program.send_kill()

    def close(self) -> None:
        """End the processes and drop what they have read. Safe to call again."""
        self._end()

    def _slot(self, asked: _Asked) -> int:
        return asked.number // len(self._workers) % _OPEN_EACH

    def _memory(self, asked: _Asked) -> BatchMemory:
        return self._workers[asked.number % len(self._workers)].memories[self._slot(asked)]


class _Worker:
    """A worker process, its connection and its memory."""

    def __init__(self, parcel: Parcel, shard: Shard, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as undo:
            self.memories: Final[list[BatchMemory]] = []
            for _ in range(_OPEN_EACH):
                self.memories.append(BatchMemory(new_memory("regrain-batch")))
                undo.callback(self.memories[-1].close)
            memories = [memory.descriptor for memory in self.memories]
            self._connection, theirs = Pipe()
            undo.callback(self._connection.close)
            with theirs:
                passed = [theirs.fileno(), parcel.memory, *memories]
                self.program: Final = _started(passed, environment)
            undo.callback(self.program.kill)
            main = main_module() if parcel.needs_main else {}
            self._main: Final = next(iter(main.values()), "")
            task = Task(
                main, sys.argv, jax_settings(), parcel.memory, parcel.sizes, shard, memories
            )
            self.send(task)
            undo.pop_all()

    def send(self, message: Task | Request) -> None:
        """Send a message. If the process has ended, `answer` raises for that."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def answer(self, asked: _Asked) -> Answer:
        """Wait for the answer to a request; drop answers to earlier ones.

        Raises:
          WorkerDiedError: the process has ended.
          RuntimeError: it cannot start.
        """
        while True:
            try:
                self._wait_for_message()
                answer: Answer = self._connection.recv()
            except (EOFError, OSError):
                if self.program.is_running(_END_SECONDS):  # it has closed its connection only
                    self.program.kill()
                raise WorkerDiedError(asked.position, self.program.exit_code or 0) from None
            if isinstance(answer.result, Failure) and answer.number == NOT_STARTED:
                raise self._not_started(answer.result)
            if answer.number == asked.number:
                return answer

    def close(self) -> None:
        """Close this process's ends."""
        self._connection.close()
        for memory in self.memories:
            memory.close()

    def _wait_for_message(self) -> None:
        stopped = 0
        while not self._connection.poll(_LOOK_SECONDS):
            if not self.program.is_running():
                if self._connection.poll():  # it has answered, and then ended
                    return
                raise EOFError
            stopped = stopped + 1 if self.program.is_stopped() else 0
            if stopped == _STOPPED_LOOKS:
                _log.warning(
                    "worker process %d is stopped, and the next batch waits for it. Continue it with "
                    "kill -CONT %d, or kill it: the iterator then starts new workers",
                    self.program.pid,
                    self.program.pid,
                )

    def _not_started(self, failure: Failure) -> RuntimeError:
        if self._main:
            error = RuntimeError(
                f"a worker process cannot start: {failure.text}. For what the pipeline takes from it, it "
                f"imports the program's main module, {self._main}. Put all that the program does under "
                'if __name__ == "__main__":, so that this defines things and does nothing else, or '
                "define what the pipeline needs in a module of its own"
            )
        else:
            error = RuntimeError(
                f"a worker process cannot start: {failure.text}. Another process must be able to import and "
                "unpickle the pipeline and all its parts"
            )
        error.add_note(_trace(failure, self.program.pid))
        return error


def _started(passed: list[int], environment: Mapping[str, str]) -> Program:
    """A process that runs as this one does, but with JAX on the CPU.

    Args:
      passed: descriptors that it inherits; the first is its connection.
      environment: variables to set.
    """
    command = multiprocessing.spawn.get_command_line()
    interpreter = command[: command.index("-c")]
    by_kernel = threading.current_thread() is threading.main_thread()
    program = Program(
        [
            *interpreter,
            "-c",
            PROGRAM,
            *map(str, (passed[0], os.getpid(), int(by_kernel))),
            *(path or str(pathlib.Path.cwd()) for path in sys.path),
        ],
        None,
        {"JAX_PLATFORMS": "cpu", **environment},
        0.0,
        passed,
    )
    # Signals to all processes of a program are for the program to act on. The worker unblocks them when it
    # has handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PROGRAM_SIGNALS)
    try:
        return program.__enter__()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise(failure: Failure, position: Position, pid: int) -> NoReturn:
    """Raise a worker's exception, or an error with the same text if that could not be sent."""
    error, cause = _unpickled(failure.error), _unpickled(failure.cause)
    if error is None:
        error = RecordReadError(position, None, None, failure.text)
        cause = RuntimeError(failure.text)
    elif cause is None and failure.cause_text:
        cause = RuntimeError(failure.cause_text)
    error.add_note(_trace(failure, pid))
    raise error from cause


def _unpickled(pickled: bytes) -> BaseException | None:
    if not pickled:
        return None
    try:
        error = pickle.loads(pickled)  # noqa: S301 (of a process that this one has started)
    except Exception:  # noqa: BLE001 (classes define their own pickling, and raise anything)
        return None
    return error if isinstance(error, BaseException) else None


def _trace(failure: Failure, pid: int) -> str:
    return f"In worker process {pid}:\n{failure.trace}"


def _end(workers: "list[_Worker]", owner: int) -> None:
    """Kill workers and close their connections; in a process forked from their owner, only the latter."""
    with signals_held():
        if os.getpid() == owner:
            kill_all([worker.program for worker in workers])
        for worker in workers:
            worker.close()


_open: Final = weakref.WeakSet[Workers]()


def _let_go() -> None:
    """Close the connections in a forked process, or workers would not notice their owner's end."""
    for workers in list(_open):
        workers.close()


os.register_at_fork(after_in_child=_let_go)


def check_workers(count: Any, stream: Any) -> int:
    """Check that a number of worker processes can read a stream; returns the number.

    Args:
      count: number of processes; with 0 nothing else is checked.
      stream: what would be sent to them.

    Raises:
      TypeError: no number, or a stream that cannot be sent; names the part of it that is at fault.
      ValueError: a negative number.
      RuntimeError: this is a worker process itself.
    """
    if isinstance(count, bool | np.bool_) or not hasattr(count, "__index__"):
        raise TypeError(f"workers must be a number of processes, not {count!r}")
    number: int = operator.index(count)
    if number < 0:
        raise ValueError(f"workers must be 0, for none, or more, not {number}")
    if number and is_worker_process():
        raise RuntimeError(
            "this is a worker process, and would start workers of its own: either a transform does so, or "
            'a program without if __name__ == "__main__":, which each worker imports'
        )
    if number:
        check_sendable(type(stream).__name__.lower(), stream)
    return number
