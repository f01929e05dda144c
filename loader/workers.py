"""Worker processes that read batches ahead, of which nothing outlives their owner.

A batch is a function of its position, so all that goes to a worker is a position. Batch i of those asked
for is read by worker ``i % count``, and at most two of each worker's wait to be fetched. The processes are
started by us, and not by Grain's ``mp_prefetch`` or a pool of the standard library: their queues have one
writer's end in the parent too, which waits for ever where a worker is killed while it sends; their names
in ``/dev/shm`` outlive a killed parent; and both leave a tracker process behind.
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
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Pipe
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np

from loader.amounts import bytes_text, things_text
from loader.batching import Batch, Position
from loader.errors import RecordReadError, WorkerDiedError
from loader.memory import BatchMemory, SharedNumber, new_memory
from loader.parcel import Parcel, check_sendable, main_module
from loader.processes import Shard
from loader.worker_process import (
    NOT_STARTED,
    PROGRAM_SIGNALS,
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
#: Batches that each worker has been asked for: one that it reads, and one that it has read.
_ASKED_OF_EACH: Final = 2
#: How often it is looked whether a worker is still there. It shows by itself, but for a connection that
#: another process has inherited.
_LOOK_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0
_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from loader.worker_process import run; run(int(sys.argv[1]))"
)


class Grids(Protocol):
    """Where the batches of a stream begin and end."""

    def is_end(self, position: Position, /) -> bool:
        """Whether no batch begins there."""

    def after(self, position: Position, /) -> Position:
        """The place behind the batch at a position."""


class WorkedStream(Stream, Protocol):
    """What `Workers` need of a stream."""

    @property
    def grid(self) -> Grids:
        """Where its batches begin and end."""

    def count_masked(self, position: Position, masked: Iterable[Masked], /) -> None:
        """Counts records of the batch at a position, which a worker has read, as masked."""


class Asked(NamedTuple):
    """A batch that was asked for."""

    number: int
    position: Position


class Workers:
    """Processes that read the batches of a stream ahead. They belong to one thread at a time.

    Args:
      stream: is copied to each of them, but for its large arrays, which they share.
      shard: which share of each batch is read.
      count: how many.

    Raises:
      OSError: a process cannot be started.
      Exception: whatever keeps the stream from being pickled.
    """

    def __init__(self, stream: WorkedStream, shard: Shard, count: int) -> None:
        self._stream = stream
        self._workers: Final[list[_Worker]] = []
        self._asked = collections.deque[Asked]()
        self._next_number = 0
        self._next_position = Position()
        # At the interpreter's exit too.
        self._end = weakref.finalize(self, _end, self._workers, os.getpid())
        _open.add(self)
        try:
            with contextlib.closing(Parcel(stream)) as parcel:
                for _ in range(count):
                    self._workers.append(_Worker(parcel, shard))
                _log.info(
                    "%s started, with %s of arrays to share: processes %s",
                    things_text(count, "worker"),
                    bytes_text(sum(parcel.sizes[1:])),
                    ", ".join(str(worker.process.pid) for worker in self._workers),
                )
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether they are: by `close`, or since this is a process forked from theirs."""
        return not self._end.alive

    def read(self, position: Position) -> Batch:
        """The batch at a position. It is there already if it follows the one last read.

        Raises:
          WorkerDiedError: a worker has ended by itself.
          RuntimeError: the workers cannot start.
          Exception: what reading the batch has raised. After any error there is nothing to do with these
            workers but `close`.
        """
        self.read_ahead(position)
        asked = self._asked[0]
        worker = self._workers[asked.number % len(self._workers)]
        answer = worker.answer(asked)
        self._stream.count_masked(position, answer.masked)
        if isinstance(answer.result, Failure):
            _raise(answer.result, position, worker.process.pid)
        batch = worker.memories[self._memory_of(asked.number)].get(answer.result)
        self._asked.popleft()
        self._ask()
        return batch

    def read_ahead(self, position: Position) -> None:
        """Has the batches from a position on read."""
        if not self._asked or self._asked[0].position != position:
            # Answers to what was asked for before are passed over, by their numbers.
            self._asked.clear()
            self._next_position = position
        self._ask()

    def _ask(self) -> None:
        """Asks for as many batches as workers may be asked for."""
        grid, most = self._stream.grid, _ASKED_OF_EACH * len(self._workers)
        while len(self._asked) < most and not grid.is_end(self._next_position):
            asked = Asked(self._next_number, self._next_position)
            self._asked.append(asked)
            self._next_number += 1
            self._next_position = grid.after(asked.position)
            request = Request(*asked, self._memory_of(asked.number), self._asked[0].number)
            self._workers[asked.number % len(self._workers)].send(request)

    @staticmethod
    def most_ready(count: int) -> int:
        """How many batches so many workers read ahead at most."""
        return _ASKED_OF_EACH * count

    def count_ready(self) -> int:
        """How many of the batches that come next are read. May be called from any thread."""
        answers = [worker.answers.get() for worker in self._workers]
        return sum(
            asked.number < answers[asked.number % len(answers)] for asked in list(self._asked)
        )

    def kill(self) -> None:
        """Kills the processes, which ends a `read` in another thread too."""
        if not self.is_closed:
            for worker in self._workers:
                worker.process.kill()

    def close(self) -> None:
        """Ends the processes and lets go of what they have read. Safe to call again."""
        self._end()

    def _memory_of(self, number: int) -> int:
        return number // len(self._workers) % _ASKED_OF_EACH


class _Worker:
    """A worker process, and what leads to it.

    Args:
      parcel: of the stream.
      shard: which share of each batch is read.
    """

    def __init__(self, parcel: Parcel, shard: Shard) -> None:
        with contextlib.ExitStack() as undo:
            self.memories: Final = [_memory(undo) for _ in range(_ASKED_OF_EACH)]
            self.answers: Final = SharedNumber(new_memory("regrain-answers"))
            undo.callback(self.answers.close)
            self.connection, theirs = Pipe()
            undo.callback(self.connection.close)
            with theirs:
                memories = [memory.descriptor for memory in self.memories]
                passed = [theirs.fileno(), parcel.memory, *memories, self.answers.descriptor]
                self.process: Final = _started(passed)
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            main = main_module() if parcel.needs_main else {}
            self._main: Final = next(iter(main.values()), "")
            sizes, settings = parcel.sizes, jax_settings()
            answers = self.answers.descriptor
            self.send(
                Task(main, sys.argv, settings, parcel.memory, sizes, shard, memories, answers)
            )
            undo.pop_all()

    def send(self, message: Task | Request) -> None:
        """Sends it something. If it is gone, that shows when its answer is waited for."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def answer(self, asked: Asked) -> Answer:
        """Waits for what comes of a request; answers to earlier ones are passed over.

        Raises:
          WorkerDiedError: the process has ended.
          RuntimeError: it cannot start.
        """
        while True:
            try:
                self._wait_for_message()
                answer: Answer = self.connection.recv()
            except (EOFError, OSError):
                raise WorkerDiedError(asked.position, self._exit_code()) from None
            if isinstance(answer.result, Failure) and answer.number == NOT_STARTED:
                raise self._not_started(answer.result)
            if answer.number == asked.number:
                return answer

    def close(self, *, owned: bool) -> None:
        """Lets go of it, and if it is this process's own, waits for its end."""
        self.connection.close()
        for memory in self.memories:
            memory.close()
        self.answers.close()
        if owned:
            # Longer than that, it is the system that does not come back to it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)

    def _wait_for_message(self) -> None:
        ended = False
        while not self.connection.poll(0 if ended else _LOOK_SECONDS):
            if ended:
                raise EOFError
            ended = self.process.poll() is not None

    def _exit_code(self) -> int:
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it has closed the connection, and nothing else
            self.process.kill()
            return self.process.wait()

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
                f"a worker process cannot start: {failure.text}. What the pipeline is made of must be "
                "such that another process can import and unpickle it"
            )
        error.add_note(_trace(failure, self.process.pid))
        return error


def _memory(undo: contextlib.ExitStack) -> BatchMemory:
    memory = BatchMemory(new_memory("regrain-batch"))
    undo.callback(memory.close)
    return memory


def _started(passed: Sequence[int]) -> "subprocess.Popen[bytes]":
    """A process that runs as this one does, on JAX's CPU backend, should it use JAX at all.

    Args:
      passed: descriptors that it gets; the first is its connection.
    """
    command = multiprocessing.spawn.get_command_line()
    interpreter = command[: command.index("-c")]
    # A signal to all processes of the program, such as from Ctrl-C, is for the program to act on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PROGRAM_SIGNALS)
    try:
        return subprocess.Popen(  # noqa: S603 (Python itself)
            [
                *interpreter,
                "-c",
                _PROGRAM,
                str(passed[0]),
                *(path or str(pathlib.Path.cwd()) for path in sys.path),
            ],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            pass_fds=passed,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise(failure: Failure, position: Position, pid: int) -> NoReturn:
    """Raises what a worker has raised, or, where that cannot be sent, an error that says the same."""
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
    except Exception:  # noqa: BLE001 (whatever classes raise that define how they are made again)
        return None
    return error if isinstance(error, BaseException) else None


def _trace(failure: Failure, pid: int) -> str:
    return f"In worker process {pid}:\n{failure.trace}"


def _end(workers: "list[_Worker]", owner: int) -> None:
    """Ends workers: from a process that was forked from their owner, lets go of them."""
    owned = os.getpid() == owner
    for worker in workers if owned else ():
        worker.process.kill()
    for worker in workers:
        worker.close(owned=owned)


_open: Final = weakref.WeakSet[Workers]()


def _let_go() -> None:
    """In a forked process: else workers would not see that their owner has ended before it."""
    for workers in list(_open):
        workers.close()


os.register_at_fork(after_in_child=_let_go)


def check_workers(count: Any, stream: Any) -> int:
    """Checks that a stream can be read by so many worker processes; returns how many.

    Args:
      count: how many; 0 is none, for which nothing else is checked.
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
