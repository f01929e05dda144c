"""What runs in a worker process: it reads the batches that it is asked for, as long as somebody can ask.

It has one connection, to the process that started it. Through that come a `Task` and then `Request`s, and
back go `Answer`s; batches go through memory. When nobody holds the other end any more, however that came
about, the worker ends at once, whatever it is doing.
"""

import collections
import io
import multiprocessing.spawn
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import jax

from loader.batching import Batch, Position
from loader.memory import BatchMemory, Described, SharedNumber
from loader.parcel import unpack
from loader.processes import Shard

#: A record that was masked: its ID, its row, and why.
Masked = tuple[int | str, int, str]
#: Signals that may be sent to all processes of a program, and that are for the program to act on.
PROGRAM_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: Settings of JAX that decide what its functions return.
_JAX_SETTINGS: Final = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
#: The number of an answer that says why a worker cannot start.
NOT_STARTED: Final = -1
_here: Final = threading.Event()


class Task(NamedTuple):
    """What a worker is started with.

    Attributes:
      main: how the program's main module is imported, where the stream needs it; else empty.
      argv: the program's arguments.
      jax_settings: as `jax_settings` gives them.
      parcel: the descriptor of a `Parcel` of the stream.
      sizes: those of the parcel.
      shard: which share of each batch is read.
      memories: descriptors of the memory that batches are put into.
      answers: descriptor of a `SharedNumber`: one more than the number of the last answer.
    """

    main: Mapping[str, str]
    argv: Sequence[str]
    jax_settings: Mapping[str, Any]
    parcel: int
    sizes: Sequence[int]
    shard: Shard
    memories: Sequence[int]
    answers: int


class Request(NamedTuple):
    """A batch that is asked for.

    Attributes:
      number: counted up from 0.
      position: where the batch begins.
      memory: which of the memories it is put into.
      wanted_from: requests of lower numbers need no answer any more.
    """

    number: int
    position: Position
    memory: int
    wanted_from: int


class Failure(NamedTuple):
    """An exception, as far as it can be sent.

    Attributes:
      error: it, pickled; empty where it cannot be.
      text: its type and what it says.
      cause: the exception that it was raised from, pickled; empty where there is none, or it cannot be.
      cause_text: that one's type and what it says; empty where there is none.
      trace: where all of it was raised.
    """

    error: bytes
    text: str
    cause: bytes
    cause_text: str
    trace: str


class Answer(NamedTuple):
    """What came of a request; or why the start has failed, as number `NOT_STARTED`."""

    number: int
    result: Described | Failure
    masked: Sequence[Masked] = ()


class Stream(Protocol):
    """What a worker needs of a stream."""

    def read(self, position: Position, shard: Shard, note: Callable[[Masked], None], /) -> Batch:
        """A share of the batch at a position; tells of each record that is masked."""


def is_worker_process() -> bool:
    """Whether this process is a worker."""
    return _here.is_set()


def run(descriptor: int) -> NoReturn:
    """All that a worker process does."""
    _here.set()
    for number in (
        PROGRAM_SIGNALS
    ):  # a handler of our own, which programs started by a transform do not inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PROGRAM_SIGNALS)  # as the parent had them blocked
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # nothing is flushed when a worker ends
    connection = Connection(descriptor)
    try:
        _end_with_parent(descriptor)
        _work(connection)
    except (EOFError, OSError):
        os._exit(0)  # nobody is there any more
    except BaseException:  # noqa: BLE001 (none that a user can cause)
        traceback.print_exc()
        os._exit(1)


def jax_settings() -> dict[str, Any]:
    """What JAX is set to here, by name, where that decides what its functions return."""
    return {name: getattr(jax.config, name) for name in _JAX_SETTINGS if hasattr(jax.config, name)}


def failure_of(error: BaseException) -> Failure:
    """An exception, made ready to be sent to another process, whatever it is."""
    cause = error.__cause__
    return Failure(
        _sendable(error),
        _text(error),
        b"" if cause is None else _sendable(cause),
        "" if cause is None else _text(cause),
        "".join(traceback.format_exception(error)),
    )


def _end_with_parent(descriptor: int) -> None:
    """Has a thread end this process as soon as nobody holds the other end of a connection."""
    poll = select.poll()
    poll.register(descriptor, 0)  # tells of nothing but the hang-up

    def wait() -> None:
        poll.poll()
        os._exit(0)

    threading.Thread(target=wait, name="regrain-parent", daemon=True).start()


def _work(connection: "Connection[Any, Any]") -> NoReturn:
    task: Task = connection.recv()
    try:
        for name, value in task.jax_settings.items():
            jax.config.update(name, value)
        multiprocessing.spawn.prepare({"sys_argv": task.argv, **task.main})
        stream: Stream = unpack(task.parcel, task.sizes)
        os.close(task.parcel)
    except BaseException as error:  # noqa: BLE001 (whatever importing and unpickling may raise)
        connection.send(Answer(NOT_STARTED, failure_of(error)))
        os._exit(1)
    memories = [BatchMemory(descriptor) for descriptor in task.memories]
    answers = SharedNumber(task.answers)
    waiting = collections.deque[Request]()
    while True:
        while not waiting or connection.poll():
            waiting.append(connection.recv())
        request = waiting.popleft()
        if request.number >= (waiting or [request])[-1].wanted_from:
            connection.send(_answer(stream, task.shard, request, memories[request.memory]))
            answers.set(request.number + 1)


def _answer(stream: Stream, shard: Shard, request: Request, memory: BatchMemory) -> Answer:
    masked: list[Masked] = []
    result: Described | Failure
    try:
        result = memory.put(stream.read(request.position, shard, masked.append))
    except BaseException as error:  # noqa: BLE001 (whatever a source or a transform may raise)
        result = failure_of(error)
    return Answer(request.number, result, masked)


def _sendable(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        # Some can be pickled, and not be made again from that.
        again = pickle.loads(pickled)  # noqa: S301 (this process's own)
    except Exception:  # noqa: BLE001 (whatever classes raise that define how they are pickled)
        return b""
    return pickled if isinstance(again, BaseException) else b""


def _text(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
