"""A run's directory, wherever it lies: which steps it holds, whether they are whole, and which stay."""

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, TypeVar

from checkpointing.errors import PLAIN_ORBAX, CheckpointDamagedError
from checkpointing.manifest import MAX_MANIFEST_BYTES, Manifest
from checkpointing.storage.base import (
    ITEMS,
    ITERATOR_FILE,
    MANIFEST_FILE,
    MANIFEST_ITEM,
    MAX_ABOUT_BYTES,
    STEP_FILE,
    TRAIN_STATE_ITEM,
    LeftOver,
    StepFiles,
    Storage,
    StorageUnavailableError,
    Writer,
    check_size,
    is_step,
)
from checkpointing.storage.local import LocalStorage
from loader import Position
from loader.progress import Work

Verify = Literal["full", "manifest"]

_Result = TypeVar("_Result")

_log: Final = logging.getLogger(__name__)

#: A step that cannot be read for one of these is not damaged: another try may well succeed.
_NOT_THE_STEPS_FAULT: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}
)
_MAX_ITERATOR_BYTES: Final = 4096
#: As long a request to an object store is tried, of what a process waits for the others at most.
_STORE_TIMEOUT_S: Final = 600.0
#: Orbax's names of what each process has left in a step, whether it had arrays to write or not.
_OF_A_PROCESS: Final = re.compile(
    rf"{TRAIN_STATE_ITEM}/(?:ocdbt\.|array_metadatas/)process_(\d{{1,9}})(?:/|$)"
)
_ADDRESS: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
#: What pathlib makes of an address.
_LOST_SLASH: Final = re.compile(r"(gs|s3|az|abfs|hdfs|https?):/(?!/)")


class StepDamagedError(Exception):
    """A step's directory is not a whole checkpoint; the text says why."""


class RunDirectory:
    """A directory of steps, open to any number of readers and to one writer.

    Args:
      path: of a directory, made if it does not exist, with its parents; or ``gs://bucket/...``.
      write: whether to open it for writing; for reading, nothing is made, locked or cleaned.
      timeout_s: seconds after which an object store is taken for one that does not answer.

    Attributes:
      shown: the path as the text of messages.

    Raises:
      TypeError: it is no path.
      ValueError: it is an address of a kind that is not supported, or the directory of one step.
      ModuleNotFoundError: packages are not installed that it needs.
      OSError: it cannot be made or written, or another process (or object) has it open.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        write: bool = True,
        timeout_s: float = _STORE_TIMEOUT_S,
    ) -> None:
        self._storage = _storage_at(path, timeout_s)
        self.shown = shown(path)
        if self._storage.is_one_step():
            raise ValueError(_of_one_step(os.fspath(path)))
        if write:
            _check_name(os.fspath(path))
            self._storage.open()

    @property
    def path(self) -> Any:
        """Where it is: a path, or an address."""
        return self._storage.path

    @property
    def timeout_s(self) -> float | None:
        """Seconds after which Orbax is no longer waited for there; ``None`` for ever."""
        return self._storage.timeout_s

    def close(self) -> None:
        """Lets others open the directory. Safe to call again."""
        self._storage.close()

    def mark(self) -> str:
        """What its writer has left in it: a text that no other directory has.

        Raises:
          FileNotFoundError: no writer has opened this directory.
        """
        try:
            return self._storage.mark()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT,
                "process 0 has opened this directory, and it is not here; it must be on storage that "
                "all processes share",
                str(self.path),
            ) from error

    def steps(self) -> list[int]:
        """Numbers of all steps in rising order, whole or not."""
        return self._storage.steps()

    def newest(self, read: Callable[[int], _Result], step: int | None = None) -> _Result:
        """Read the newest intact step, beside a run that may save and delete steps meanwhile.

        A step that was deleted while it was read is not damaged: the steps are listed again.

        Args:
          read: reads one step; raises `StepDamagedError` if it is damaged.
          step: the only step to read, instead of the newest intact one.

        Raises:
          FileNotFoundError: there is no such step, or none at all.
          CheckpointDamagedError: the step (or every step) is damaged.
        """
        reasons: dict[int, str] = {}
        while True:
            steps = self.steps()
            left = [one for one in steps if one not in reasons and step in (None, one)]
            if not left:
                break
            try:
                return read(left[-1])
            except Exception as error:
                if left[-1] not in self.steps():
                    continue
                if not isinstance(error, StepDamagedError):
                    raise
                reasons[left[-1]] = str(error)
                if step is None:
                    _log.warning(
                        "%s step %d is damaged and was skipped: %s", self.shown, left[-1], error
                    )
        if reasons:
            raise CheckpointDamagedError(self.shown, reasons)
        held = ", ".join(map(str, steps[-8:])) or "none"
        what = "no steps" if step is None else f"no step {step}; its newest steps: {held}"
        raise FileNotFoundError(f"{self.shown} has {what}")

    def holds(self, step: int) -> bool:
        """Whether something stands where a step would be."""
        return self._storage.holds(step)

    def step_path(self, step: int) -> str | os.PathLike[str]:
        """Where a step is, or would be."""
        return self._storage.step_path(step)

    def unfinished_path(self, step: int) -> str | os.PathLike[str]:
        """Where a step is while it is written: under a name that does not count as one."""
        return self._storage.unfinished_path(step)

    def begin_step(self, step: int) -> None:
        """Makes the place where a step is to be written.

        Raises:
          FileNotFoundError: the directory was deleted or moved since it was opened.
        """
        self._storage.begin_step(step)

    def seal_part(self, step: int, process: int) -> None:
        """Digests what one of several processes has written of a step's train state."""
        self._storage.seal_part(step, process)

    def commit_step(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        """Adds all else to a step whose train state is written, and makes it one, whole at once.

        Args:
          step: its number.
          manifest: without files, which are added.
          about: what Orbax wants to know of the step: JSON values.

        Returns:
          The manifest with files.
        """
        return self._storage.commit_step(step, manifest, about)

    def clean_step(self, step: int) -> None:
        """Removes what a save of ``step`` that failed has left, so that it does not take up space."""
        self._storage.clean_step(step)

    def set_aside(self, step: int) -> str:
        """Renames a step so that it no longer counts as one, and returns its new name."""
        return self._storage.set_aside(step)

    def check(
        self, step: int, verify: Verify = "full", share: tuple[int, int] = (0, 1)
    ) -> Manifest:
        """Reads a step's manifest and checks the step against it.

        Args:
          step: its number.
          verify: ``"full"`` reads and digests every file; ``"manifest"`` reads the manifest and the
            iterator's state, and compares names and sizes of the other files.
          share: number ``i`` of ``n`` processes that check it together. The first compares names
            and sizes; of what is to be read, each reads its share.

        Raises:
          StepDamagedError: something does not hold; says what.
          OSError: it cannot be read, for a reason that lies outside of the step.
        """
        try:
            manifest = self._check(step, verify, share)
        except FileNotFoundError as error:
            missing = os.path.relpath(error.filename, self.step_path(step))
            if missing == MANIFEST_FILE and self._is_plain_orbax(step):
                raise StepDamagedError(PLAIN_ORBAX) from error
            raise StepDamagedError(
                f"{missing} is missing: the step was deleted in part, or is not a checkpoint"
            ) from error
        except (OSError, ValueError) as error:
            if isinstance(error, StorageUnavailableError):
                raise
            if isinstance(error, OSError) and error.errno in _NOT_THE_STEPS_FAULT:
                raise
            raise StepDamagedError(str(error)) from error
        return manifest

    def _is_plain_orbax(self, step: int) -> bool:
        """Whether a step describes itself as one that has never had a manifest."""
        try:
            about = json.loads(self._storage.read(step, STEP_FILE, MAX_ABOUT_BYTES))
            return MANIFEST_ITEM not in about["item_handlers"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return False

    def _check(self, step: int, verify: Verify, share: tuple[int, int]) -> Manifest:
        manifest = self.manifest(step)
        index, count = share
        if index == 0:
            _check_sizes(self._storage.sizes(step), manifest)
        if verify == "full":
            own = {
                _checked(name): manifest.files[name] for name in list(manifest.files)[index::count]
            }
            sizes = {name: entry["bytes"] for name, entry in own.items()}
            with Work(f"check of step {step}", sum(sizes.values()), "bytes") as work:
                digests = self._storage.digests(step, sizes, work.advance)
            for name, digest in digests.items():
                _check_digest(name, digest, own[name]["sha256"])
        iterator = self._storage.read(step, ITERATOR_FILE, _MAX_ITERATOR_BYTES)
        _check_iterator(iterator, manifest.position)
        return manifest

    def manifest(self, step: int) -> Manifest:
        """What a step says of itself, whatever else of it holds.

        Raises:
          OSError, ValueError: it cannot be read, or is no manifest of this step.
        """
        data = self._storage.read(step, MANIFEST_FILE, MAX_MANIFEST_BYTES)
        manifest = Manifest.from_bytes(data)
        if manifest.step != step:
            raise ValueError(f"it holds a checkpoint of step {manifest.step}")
        return manifest

    def step_files(self, step: int) -> StepFiles:
        """What a step takes up, and when it was written; of a damaged step, what there is.

        Raises:
          OSError: its directory cannot be read.
        """
        return self._storage.step_files(step)

    def left_overs(self) -> list[LeftOver]:
        """What does not count as a step: saves and deletions that are under way or were killed."""
        return self._storage.left_overs()

    def writer(self) -> Writer | None:
        """Who has the directory open for writing, as far as this machine can see; takes no lock."""
        return self._storage.writer()

    def keep_newest(self, count: int, damaged: Collection[int] = ()) -> list[int]:
        """Deletes all whole steps but the newest ``count``; returns which.

        Args:
          count: how many stay.
          damaged: steps known to be damaged; like those whose manifest does not hold, they are
            neither counted nor deleted.
        """
        whole = [step for step in self.steps() if step not in damaged and self._is_own(step)]
        self._storage.delete_steps(whole[:-count])
        return whole[:-count]

    def _is_own(self, step: int) -> bool:
        try:
            self.check(step, verify="manifest")
        except StepDamagedError:
            return False
        return True


def processes_in(manifest: Manifest) -> int | None:
    """How many processes have written a step, as its files tell; ``None`` where they do not."""
    found = {int(match[1]) for match in map(_OF_A_PROCESS.match, manifest.files) if match}
    return len(found) or None


def directory_text(path: str | os.PathLike[str]) -> str:
    """Return a path, or an address, as text.

    Raises:
      TypeError: it is neither.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(
            f"a run's directory is a path, or an address such as gs://bucket/name, as a string; not {path!r:.80}"
        )
    return text


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path for messages, with its control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in directory_text(path))


def check_verify(verify: Any) -> None:
    """Raises ValueError for what is no `Verify`."""
    if verify not in ("full", "manifest"):
        raise ValueError(f'verify must be "full" or "manifest", not {verify!r:.80}')


def _of_one_step(path: str) -> str:
    """What to say of the directory of one step, or of an item in it."""
    folder = path.rstrip("/")
    if os.path.basename(folder) in ITEMS:  # noqa: PTH119 (of an address too)
        folder = os.path.dirname(folder)  # noqa: PTH120 (as above)
    run, name = os.path.split(folder)
    what = f"{path} is of one step, not the directory of a run"
    if not is_step(name):
        return f"{what}: it holds steps under their numbers. Put this one into such a directory"
    return f"{what}: give that, {run or '.'} (this is its step {name})"


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path!a} cannot hold checkpoints: their arrays are written by names in UTF-8, and this one "
            "has bytes (or halves of a surrogate pair) that are none. Give the directory another name"
        ) from error


def _storage_at(path: str | os.PathLike[str], timeout_s: float) -> Storage:
    text = directory_text(path)
    if not text:
        raise ValueError("the directory of the checkpoints is an empty text; name one, or give '.'")
    if text.startswith("~"):
        raise ValueError(
            f"{text} begins with ~, which a shell replaces and Python does not: give os.path.expanduser(...) "
            "of it, or ./~... if that is the directory's name"
        )
    lost = _LOST_SLASH.match(text)
    if lost:
        raise ValueError(
            f"{text} was an address before pathlib took a slash out of it, and names a local directory "
            f'now: give it as a string, "{lost[1]}://..."'
        )
    address = _ADDRESS.match(text)
    if not address:
        return LocalStorage(path)
    if address[1] != "gs":
        raise ValueError(
            f"{text} is an address of a kind that is not supported: Orbax writes arrays to gs:// alone, "
            "of all object stores. Use gs://, or a directory on a disk or on a file system that all "
            "processes share, and copy whole steps from there"
        )
    from checkpointing.storage.objects import ObjectStorage  # noqa: PLC0415 (its packages are an extra)

    return ObjectStorage(text, timeout_s)


def _checked(name: str) -> str:
    """The name of a file of a step, which comes from a file."""
    parts = name.split("/")
    if parts[0] not in ITEMS or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r:.80} is no name of a file of a checkpoint")
    return name


def _check_sizes(sizes: dict[str, int | None], manifest: Manifest) -> None:
    missing = sorted(manifest.files.keys() - sizes.keys())
    if missing:
        raise ValueError(f"{missing[0]} is missing ({len(missing)} of {len(manifest.files)} files)")
    extra = sorted(sizes.keys() - manifest.files.keys())
    if extra:
        raise ValueError(f"{extra[0]} does not belong to it ({len(extra)} such files)")
    for name, entry in manifest.files.items():
        check_size(name, sizes[name], entry["bytes"])


def _check_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(f"{name} has sha256 {found[:12]}... instead of {expected[:12]}...")


def _check_iterator(data: bytes, position: Position) -> None:
    try:
        state = json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{ITERATOR_FILE} is nested too deeply") from error
    expected = {"epoch": position.epoch, "offset": position.offset, "step": position.step}
    if state != expected:
        raise ValueError(f"its iterator is at {state!r:.120}, its manifest at {expected}")
