"""The step log: a JSON line for each batch that a run delivers.

A line is written with one call before its batch is delivered. However the process ends, each batch that was
trained on is in the log, and at most the last line is torn. Each of several processes logs its rows to a file
of its own; a batch counts as delivered if all of the files have it.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from loader import Position
from loader.streams.grain import element_digest, element_ids

#: The environment variable with the file to which `Checkpoints.resume` logs its batches.
STEP_LOG_VARIABLE: Final = "REGRAIN_STEP_LOG"

OnBatch = Callable[[Position, Any], None]


@dataclasses.dataclass(frozen=True)
class Delivery:
    """A batch in the log.

    Attributes:
      position: where the batch begins; its ``step`` is the batch's number, from 0.
      ids: IDs of all slots, padding included; the digest of a `GrainStream`'s element without IDs.
      mask: 1 for a slot that holds a record, else 0.
      seconds: time on the system's monotonic clock, which all processes of a machine share.
    """

    position: Position
    ids: tuple[int | str, ...]
    mask: tuple[int, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of one process of a batch that not all processes have logged.

    Attributes:
      process: its number.
      count: number of processes.
      delivery: its rows.
    """

    process: int
    count: int
    delivery: Delivery


def step_log(path: str | os.PathLike[str]) -> OnBatch:
    """A callback for `Pipeline.iterate` that appends a line to a file for each batch.

    Args:
      path: the file; made if it does not exist. A torn line at its end is ended first.

    Raises:
      OSError: the file cannot be opened; from the callback: it cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")

    def log(position: Position, batch: Any) -> None:
        ids = element_ids(batch)
        if ids is None:
            ids = [element_digest(batch)]
        mask = batch.get("mask") if isinstance(batch, Mapping) else None
        if mask is None or np.size(mask) != len(ids):
            mask = np.ones(len(ids), int)
        line = json.dumps(
            {
                **dataclasses.asdict(position),
                "ids": ids,
                "mask": np.asarray(mask).astype(int).reshape(-1).tolist(),
                "monotonic_s": time.monotonic(),
            }
        )
        data = f"{line}\n".encode()
        if os.write(descriptor, data) != len(data):
            raise OSError(f"{os.fspath(path)} took a line in part; its disk may be full")

    weakref.finalize(log, os.close, descriptor)
    return log


def step_log_of_environment(process: int | None = None) -> OnBatch | None:
    """The `step_log` of the file in the environment variable ``REGRAIN_STEP_LOG``, if it is set.

    Args:
      process: number of this process among several; each logs to its `process_log`.
    """
    path = os.environ.get(STEP_LOG_VARIABLE)
    if not path:
        return None
    return step_log(path if process is None else process_log(path, process))


def process_log(path: str | os.PathLike[str], process: int) -> str:
    """The file of one of several processes for a step log at ``path``."""
    return f"{os.fspath(path)}.process-{process}"


def read_step_log(path: str | os.PathLike[str], process_count: int = 1) -> list[Delivery]:
    """All batches in a log, in the order of the file. Torn lines are skipped.

    Args:
      path: of the step log.
      process_count: number of processes that have logged; with several, the batches that all of them
        have, joined.

    Raises:
      FileNotFoundError: there is no such file, of any process.
      ValueError: a whole line is not a step log's.
    """
    if process_count == 1:
        return _read(path)
    if not any(pathlib.Path(one).exists() for one in log_paths(path, process_count)):
        raise FileNotFoundError(
            f"none of {process_count} processes has logged to {os.fspath(path)}: there is no "
            f"{process_log(path, 0)}"
        )
    return joined(read_process_logs(path, process_count))[0]


def read_process_logs(path: str | os.PathLike[str], process_count: int) -> list[list[Delivery]]:
    """The batches that each process has logged; none for a process without a file.

    Raises:
      ValueError: a whole line is not a step log's.
    """
    paths = log_paths(path, process_count)
    return [_read(one) if pathlib.Path(one).exists() else [] for one in paths]


def log_paths(path: str | os.PathLike[str], process_count: int) -> list[str]:
    """The file of each process for a step log at ``path``."""
    if process_count == 1:
        return [os.fspath(path)]
    return [process_log(path, process) for process in range(process_count)]


def joined(logs: Sequence[Sequence[Delivery]]) -> tuple[list[Delivery], list[Part]]:
    """The batches that all processes have logged, and the parts of the other batches.

    Args:
      logs: the batches of each process, in order.

    Returns:
      The batches that all have logged, in the order of process 0 and with the time of the last process;
      and the parts that only some have. A killed run usually ends with some: one process was ahead.
    """
    by_place = [_by_place(log) for log in logs]
    whole = [place for place in by_place[0] if all(place in one for one in by_place)]
    deliveries = [_join([one.pop(place) for one in by_place]) for place in whole]
    parts = [
        Part(process, len(logs), delivery)
        for process, left in enumerate(by_place)
        for delivery in left.values()
    ]
    return deliveries, parts


def _by_place(log: Sequence[Delivery]) -> dict[tuple[Position, int], Delivery]:
    """Batches by their position and the number of earlier ones at the same position."""
    found: dict[tuple[Position, int], Delivery] = {}
    times: collections.Counter[Position] = collections.Counter()
    for delivery in log:
        found[delivery.position, times[delivery.position]] = delivery
        times[delivery.position] += 1
    return found


def _join(shares: Sequence[Delivery]) -> Delivery:
    return Delivery(
        shares[0].position,
        tuple(itertools.chain.from_iterable(share.ids for share in shares)),
        tuple(itertools.chain.from_iterable(share.mask for share in shares)),
        max(share.seconds for share in shares),
    )


def _read(path: str | os.PathLike[str]) -> list[Delivery]:
    with pathlib.Path(path).open("rb") as file:
        found = (parse_line(line, os.fspath(path)) for line in file)
        return [delivery for delivery in found if delivery is not None]


def parse_line(line: bytes, where: str) -> Delivery | None:
    """The batch of a line; ``None`` for a torn line.

    Raises:
      ValueError: a whole line that is not a step log's.
    """
    try:
        value = json.loads(line)
    except ValueError:  # no beginning of a JSON object is JSON itself
        return None
    try:
        position = Position(value["epoch"], value["offset"], value["step"])
        return Delivery(position, tuple(value["ids"]), tuple(value["mask"]), value["monotonic_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a step log: it holds the line {line[:80]!r}") from error
