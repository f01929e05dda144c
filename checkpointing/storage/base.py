"""What a step is made of, and what `RunDirectory` asks of the storage that it lies in.

There are two: a file system (`local_storage`) and an object store (`object_storage`).
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from checkpointing.manifest import Manifest
from loader import Position

MANIFEST_ITEM: Final = "manifest"
ITERATOR_ITEM: Final = "iterator"
TRAIN_STATE_ITEM: Final = "train_state"
ITEMS: Final = (TRAIN_STATE_ITEM, ITERATOR_ITEM, MANIFEST_ITEM)

#: Orbax's name for the file of a JSON item.
JSON_FILE: Final = "metadata"
MANIFEST_FILE: Final = f"{MANIFEST_ITEM}/{JSON_FILE}"
ITERATOR_FILE: Final = f"{ITERATOR_ITEM}/{JSON_FILE}"
#: Orbax's names for a step's own description of itself, and for a file that says that it is whole.
STEP_FILE: Final = "_CHECKPOINT_METADATA"
COMMIT_FILE: Final = "commit_success.txt"
#: Orbax's name for what one process writes of the arrays, and ours for what it then knows of its files.
PART_FOLDER: Final = "ocdbt.process_{}"
PART_FILE: Final = "part-{}.json"
#: Orbax's, of the name of a directory in which a step is written; and what ours end in, so that we remove
#: no other program's.
ORBAX_TMP_SUFFIX: Final = ".orbax-checkpoint-tmp"
TMP_SUFFIX: Final = f".regrain{ORBAX_TMP_SUFFIX}"
#: Ours, of the name under which a damaged step is kept.
ASIDE_SUFFIX: Final = ".set-aside-{}"
MOST_ASIDE: Final = 10_000
_UNFINISHED: Final = re.compile(rf".*{re.escape(ORBAX_TMP_SUFFIX)}(?:-[0-9a-f]+)?", re.DOTALL)
_SET_ASIDE: Final = re.compile(r"[0-9]+\.set-aside-[0-9]+")
#: Ours, of where steps are deleted.
TRASH: Final = ".regrain-trash"
MAX_ABOUT_BYTES: Final = 1 << 16

LeftOverKind = Literal["unfinished", "deleted", "set aside"]


@dataclasses.dataclass(frozen=True)
class StepFiles:
    """What a step's directory takes up, and when it was written.

    Attributes:
      item_bytes: bytes of the files of each item, and of those beside them under ``"other"``.
      num_files: how many there are.
      committed: seconds since 1970 when the step became whole, as Orbax's own file or else the time of
        the manifest's file tells; ``None`` where neither can be read.
      save_seconds: from the begin of its save until then; ``None`` where Orbax's file does not tell.
    """

    item_bytes: Mapping[str, int]
    num_files: int
    committed: float | None
    save_seconds: float | None


@dataclasses.dataclass(frozen=True)
class LeftOver:
    """What stands in a run's directory and does not count as a step.

    Attributes:
      name: in the directory.
      kind: ``"unfinished"``: of a save that is under way, or was killed. ``"deleted"``: old steps whose
        deletion is under way, or was killed. ``"set aside"``: a damaged step that stood in the way.
      bytes: of all files in it.
    """

    name: str
    kind: LeftOverKind
    bytes: int


@dataclasses.dataclass(frozen=True)
class Writer:
    """A process that has a run's directory open for writing.

    Attributes:
      process: its number in the system.
      holds_lock: whether it is seen to; else it was the last to open the directory and is alive, or has
        not closed it, and more cannot be told here.
      host: of an object store, the machine that the process is on.
    """

    process: int
    holds_lock: bool
    host: str = ""


class StorageUnavailableError(OSError):
    """The storage does not answer, or not as it should: nothing is known of what it holds."""


class Storage(Protocol):
    """Where the steps of one run lie; open to any number of readers, and to one writer.

    A file of a step is named by its path inside the step, with ``/`` between its parts.

    Attributes:
      path: of the run, to be shown.
      timeout_s: seconds after which Orbax is no longer waited for; ``None`` for ever.
    """

    path: Any
    timeout_s: float | None

    def is_one_step(self) -> bool:
        """Whether it is where one step lies, or an item of it, and not a run."""

    def open(self) -> None:
        """Becomes the writer, and removes what killed writers have left.

        Raises:
          OSError: it cannot be made or written, or another writer has it open.
        """

    def close(self) -> None:
        """Lets others write. Safe to call again."""

    def mark(self) -> str:
        """What the writer has left there: a text that no other run has.

        Raises:
          FileNotFoundError: there is no writer.
        """

    def steps(self) -> list[int]:
        """Numbers of all steps in rising order, whole or not."""

    def holds(self, step: int) -> bool:
        """Whether something stands where a step would be. Of the writer, and quick."""

    def step_path(self, step: int) -> str | os.PathLike[str]:
        """Where a step is, or would be; for Orbax."""

    def unfinished_path(self, step: int) -> str | os.PathLike[str]:
        """Where a step is while it is written, under a name that does not count as one; for Orbax."""

    def begin_step(self, step: int) -> None:
        """Makes the place where a step is to be written. Quick.

        Raises:
          FileNotFoundError: the directory was deleted or moved since it was opened.
        """

    def seal_part(self, step: int, process: int) -> None:
        """Digests what one of several processes has written of a step's train state.

        What it finds is left for `commit_step`, so that no process has to read the whole train state.
        """

    def commit_step(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        """Adds all else to a step whose train state is written, and makes it one, whole at once.

        Args:
          step: its number.
          manifest: without files, which are added.
          about: what Orbax wants to know of the step: JSON values.

        Returns:
          The manifest with files.
        """

    def clean_step(self, step: int) -> None:
        """Removes what a save that failed has left, as far as it can."""

    def sizes(self, step: int) -> dict[str, int | None]:
        """Bytes of all files of a step's items but the manifest; ``None`` for what is no regular file."""

    def read(self, step: int, name: str, limit: int) -> bytes:
        """A file of a step, if it is no larger than ``limit``.

        Raises:
          FileNotFoundError: it is not there.
          ValueError: it is larger, or no regular file, or the step is none.
        """

    def digests(
        self, step: int, sizes: Mapping[str, int], read: Callable[[int], None]
    ) -> dict[str, str]:
        """The sha256 of each of the files, which are read as a whole.

        Args:
          step: its number.
          sizes: by name, what size each must have.
          read: told the bytes of each file that was read.

        Raises:
          FileNotFoundError: one is not there.
          ValueError: one has another size, or is no regular file.
        """

    def step_files(self, step: int) -> StepFiles:
        """What a step takes up, and when it was written; of a damaged step, what there is."""

    def left_overs(self) -> list[LeftOver]:
        """What does not count as a step: saves and deletions that are under way or were killed."""

    def writer(self) -> Writer | None:
        """Who has it open for writing, as far as can be seen; nobody is kept from anything."""

    def set_aside(self, step: int) -> str:
        """Gives a step another name, that does not count as one, and returns it."""

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Deletes steps, each of which is whole or none at any instant; and what was left of others."""


def check_size(name: str, found: int | None, expected: int) -> None:
    """Raises ValueError if a file has another size; ``None`` is that of what is no regular file."""
    if found is None:
        raise ValueError(f"{name} is not a regular file")
    if found != expected:
        raise ValueError(f"{name} has {found} bytes instead of {expected}")


def save_times(about: bytes) -> tuple[float, float]:
    """When a step was committed, in seconds since 1970, and how many seconds its save took.

    Args:
      about: what `STEP_FILE` holds.

    Raises:
      ValueError, TypeError, KeyError, RecursionError: it does not tell.
    """
    told = json.loads(about)
    began, committed = told["init_timestamp_nsecs"], told["commit_timestamp_nsecs"]
    if not type(began) is type(committed) is int or not 0 < began <= committed < 2**63:
        raise ValueError(f"{began!r:.40} and {committed!r:.40} are no times")
    return committed / 1e9, (committed - began) / 1e9


def step_files(
    sizes: Mapping[str, int], committed: float | None, save_seconds: float | None
) -> StepFiles:
    """What all files of a step, by their sizes, take up."""
    item_bytes = dict.fromkeys((*ITEMS, "other"), 0)
    for name, size in sizes.items():
        item = name.partition("/")[0]
        item_bytes[item if item in ITEMS else "other"] += size
    return StepFiles(item_bytes, len(sizes), committed, save_seconds)


def left_over_kind(name: str) -> LeftOverKind | None:
    """Of what in a run's directory does not count as a step, and is ours: what it was."""
    if _UNFINISHED.fullmatch(name):
        return "unfinished"
    if _SET_ASIDE.fullmatch(name):
        return "set aside"
    return "deleted" if name == TRASH else None


def iterator_bytes(position: Position) -> bytes:
    """The iterator's state, as a step holds it."""
    return json.dumps(dataclasses.asdict(position)).encode()


def commit_bytes(step: int) -> bytes:
    """What `COMMIT_FILE` holds."""
    return f"step {step} is whole".encode()


def is_step(name: str) -> bool:
    """Whether that is the name of a step: its number, in its one spelling."""
    return name.isascii() and name.isdigit() and name == str(int(name))
