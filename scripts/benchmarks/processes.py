"""A contender in a process of its own: what it does there when told, and how it is started and ended."""

import collections
import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from scripts.benchmarks.contenders import CONTENDERS
from scripts.benchmarks.workloads import LABEL, Batch, Data, Workload, check

#: Batches that are thrown away right before a window: what was read ahead while others were measured.
DISCARDED: Final = 8
#: Seconds that a process gets to end by itself, and again after SIGTERM.
_PATIENCE: Final = 10.0


class Stage:
    """What a contender's process does; each method is a command, its result the answer."""

    def __init__(self, name: str) -> None:
        self._contender = CONTENDERS[name]
        for module in self._contender.modules:
            importlib.import_module(module)
        self._data: Any = None
        self._batches: Iterator[Batch] = iter(())
        self._trainer: Any = None

    def ready(self) -> None:
        """Answers, once the imports are done."""

    def open(self, workload: Workload, folder: Path, setting: str) -> None:
        """Opens the data and makes the iterator."""
        device = None
        if workload.trains:
            from scripts.benchmarks import training

            self._trainer = self._trainer or training.Trainer()
            device = self._trainer.device
        self._data = Data(workload, folder)
        self._batches = self._contender.settings[setting](self._data, device)

    def check(self) -> list[str]:
        """Delivers a unit, and says in what it is not the data's."""
        faults = check(self._batches, self._data)
        gc.collect()
        gc.freeze()  # what the imports left is not to be gone through in some windows and not in others
        return faults

    def window(self, seconds: float) -> tuple[int, float]:
        """Delivers whole units for at least so long: records, and the seconds that they took."""
        return timed_window(self._batches, self._data.workload, seconds)

    def train(self, steps: int, turns: int | None) -> dict[str, float]:
        """A window of training: see `training.Trainer.window`."""
        _discard(self._batches)
        result: dict[str, float] = self._trainer.window(self._batches, steps, turns)
        return result

    def close(self) -> None:
        """Ends the iterator with its threads and workers, and lets go of the data."""
        batches, self._batches, self._data = self._batches, iter(()), None
        if close := getattr(batches, "close", None):
            close()
        del batches
        gc.unfreeze()
        gc.collect()


def timed_window(batches: Iterator[Batch], workload: Workload, seconds: float) -> tuple[int, float]:
    """Delivers whole units for at least so long: records, and the seconds that they took."""
    gc.collect()
    _discard(batches)
    records, units, taken = 0, 0, 0.0
    start = time.perf_counter()
    while not units or taken < seconds:
        for batch in itertools.islice(batches, workload.unit_batches):
            records += len(batch[LABEL])
        units += 1
        taken = time.perf_counter() - start
    if workload.whole_epochs and records != units * workload.num_records:
        raise RuntimeError(f"{units} epochs delivered {records} records")
    return records, taken


def _discard(batches: Iterator[Batch]) -> None:
    collections.deque(itertools.islice(batches, DISCARDED), maxlen=0)


def serve(name: str, connection: Connection) -> None:
    """Obeys until the other end is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    stage = Stage(name)
    with contextlib.suppress(EOFError), contextlib.closing(stage):
        while True:
            command, arguments = connection.recv()
            connection.send(getattr(stage, command)(**arguments))


class Member:
    """The benchmark's side of a contender's process.

    Args:
      name: of the contender.
      folder: for whatever it writes; exists.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, theirs), name=name)
        with _for_children(folder):
            self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            self._process.join(_PATIENCE)
            if self._process.exitcode is not None:
                break
        self._process.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Tells it to do something, and waits for the answer."""
        try:
            self._pipe.send((command, arguments))
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RuntimeError(
                f"the process of {self.name} ended in {command!r}; its error stands above"
            ) from None


@contextlib.contextmanager
def _for_children(folder: Path) -> Iterator[None]:
    """What a process inherits that is started here: files go to a folder, and Ctrl-C is not for it."""
    settings = {
        "TMPDIR": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",  # those of other loaders, which nobody here can mend
    }
    before = {name: os.environ.get(name) for name in settings}
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.signal(signal.SIGINT, handler)


class Crew:
    """Processes of contenders, started together and ended together.

    Args:
      folder: for whatever they write; exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._members: dict[str, Member] = {}

    def members(self, names: Sequence[str]) -> dict[str, Member]:
        """The processes of some contenders, all of them ready."""
        for name in names:
            if name not in self._members:
                self._members[name] = self._stack.enter_context(Member(name, self._folder))
        chosen = {name: self._members[name] for name in names}
        for member in chosen.values():
            member.ask("ready")
        return chosen

    def close(self) -> None:
        """Ends all of them."""
        self._members = {}
        self._stack.close()
