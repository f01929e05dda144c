"""The program of a worker process: it reads the batches that its owner requests, until the owner is gone.

Messages go through one connection: a `Task`, then `Request`s; an `Answer` comes back for each request. The
batches go through shared memory (see `parcel`). A worker ends at once, whatever it is doing, when nobody
holds the other end of its connection.
"""

import collections
import io
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import jax

from loader.batching import Batch, Position
from loader.reading.parcel import BatchMemory, Described, unpack
from loader.reading.processes import Shard
from loader.reading.program import PROGRAM_SIGNALS

#: The first lines that a worker runs. They come before its imports, which take a second or two: a worker
#: whose owner ends meanwhile has to end too. The kernel kills it even if it is stopped or holds Python's
#: lock, but does so at the end of the *thread* that started it: only the main thread requests that.
PROGRAM: Final = """
import sys
sys.path[:] = sys.argv[4:]
descriptor, owner, by_kernel = map(int, sys.argv[1:4])
import os, select, threading
if by_kernel and sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != owner:
    os._exit(0)
poll = select.poll()
poll.register(descriptor, 0)  # reports the hang-up only
def end_with_owner():
    poll.poll()
    os._exit(0)
threading.Thread(target=end_with_owner, name="regrain-owner", daemon=True).start()
from loader.reading.worker_process import run
run(descriptor)
"""
#: JAX's settings that change what its functions return.
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

#: A masked record: its ID, its row, and why.
Masked = tuple[int | str, int, str]


class Stream(Protocol):
    """The part of a stream that a worker uses."""

    def read(self, position: Position, shard: Shard, note: Callable[[Masked], None], /) -> Batch:
        """A share of the batch at a position; calls ``note`` for each masked record."""


class Task(NamedTuple):
    """What a worker is started with.

    Attributes:
      main: how to import the program's main module; empty if the stream needs nothing from it.
      argv: the program's arguments.
      jax_settings: see `jax_settings`.
      parcel: descriptor of a `Parcel` of the stream.
      sizes: of that parcel.
      shard: the share of each batch to read.
      memories: descriptors of the `BatchMemory` of each slot.
    """

    main: Mapping[str, str]
    argv: Sequence[str]
    jax_settings: Mapping[str, Any]
    parcel: int
    sizes: Sequence[int]
    shard: Shard
    memories: Sequence[int]


class Request(NamedTuple):
    """A request for a batch.

    Attributes:
      number: counted from 0.
      position: where the batch begins.
      memory: index of the memory for it.
      wanted_from: requests with lower numbers need no answer any more.
    """

    number: int
    position: Position
    memory: int
    wanted_from: int


class Failure(NamedTuple):
    """An exception, as far as it can be sent.

    Attributes:
      error: the pickled exception; empty if it cannot be pickled.
      text: its type and message.
      cause: its pickled cause; empty if there is none, or it cannot be pickled.
      cause_text: type and message of the cause; empty if there is none.
      trace: the traceback.
    """

    error: bytes
    text: str
    cause: bytes
    cause_text: str
    trace: str


class Answer(NamedTuple):
    """The result of a request; with number `NOT_STARTED` the reason why the worker cannot start."""

    number: int
    result: Described | Failure
    masked: Sequence[Masked] = ()


def is_worker_process() -> bool:
    """Whether this process is a worker."""
    return _here.is_set()


def jax_settings() -> dict[str, Any]:
    """JAX's settings here, by name, that change what its functions return."""
    return {name: getattr(jax.config, name) for name in _JAX_SETTINGS if hasattr(jax.config, name)}


def run(descriptor: int) -> NoReturn:
    """The whole life of a worker process, after its imports."""
    _here.set()
    for number in PROGRAM_SIGNALS:
        # A Python handler: SIG_IGN would be inherited by programs that a transform starts.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PROGRAM_SIGNALS)  # the owner had them blocked
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # nothing is flushed when a worker ends
    try:
        _work(Connection(descriptor))
    except (EOFError, OSError):
        os._exit(0)  # the owner is gone
    except BaseException:  # noqa: BLE001 (a fault of ours)
        traceback.print_exc()
        os._exit(1)


def _work(connection: "Connection[Any, Any]") -> NoReturn:
    task: Task = connection.recv()
    try:
        for name, value in task.jax_settings.items():
            jax.config.update(name, value)
        multiprocessing.spawn.prepare({"sys_argv": task.argv, **task.main})
        stream: Stream = unpack(task.parcel, task.sizes)
        os.close(task.parcel)
    except BaseException as error:  # noqa: BLE001 (imports and unpickling run any code)
        connection.send(Answer(NOT_STARTED, failure_of(error)))
        os._exit(1)
    memories = [BatchMemory(descriptor) for descriptor in task.memories]
    waiting = collections.deque[Request]()
    while True:
        while not waiting or connection.poll():
            waiting.append(connection.recv())
        request = waiting.popleft()
        if request.number >= (waiting or [request])[-1].wanted_from:
            memory = memories[request.memory]
            connection.send(_answer(stream, task.shard, request, memory))
            memory.number = request.number + 1


def _answer(stream: Stream, shard: Shard, request: Request, memory: BatchMemory) -> Answer:
    masked: list[Masked] = []
    result: Described | Failure
    try:
        result = memory.put(stream.read(request.position, shard, masked.append))
    except BaseException as error:  # noqa: BLE001 (sources and transforms raise anything)
        result = failure_of(error)
    return Answer(request.number, result, masked)


def failure_of(error: BaseException) -> Failure:
    """A `Failure` of any exception."""
    cause = error.__cause__
    return Failure(
        _sendable(error),
        _text(error),
        b"" if cause is None else _sendable(cause),
        "" if cause is None else _text(cause),
        "".join(traceback.format_exception(error)),
    )


def _sendable(error: BaseException) -> bytes:
    """The pickled exception; empty if it cannot be pickled, or unpickled again."""
    try:
        pickled = pickle.dumps(error)
        again = pickle.loads(pickled)  # noqa: S301 (this process's own)
    except Exception:  # noqa: BLE001 (classes define their own pickling, and raise anything)
        return b""
    return pickled if isinstance(again, BaseException) else b""


def _text(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
