"""A run's directory on disk: which steps it holds, whether they are whole, and how they come and go.

Steps are directories named by their number, as Orbax names them. Nothing here is deleted but old
steps of our own, and those are renamed out of the way first: a kill at any instant leaves either a
whole step or none.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import stat
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Final, Literal

from checkpointing.manifest import MAX_MANIFEST_BYTES, Manifest
from loader import Position

Verify = Literal["full", "manifest"]

MANIFEST_ITEM: Final = "manifest"
ITERATOR_ITEM: Final = "iterator"
TRAIN_STATE_ITEM: Final = "train_state"
ITEMS: Final = (TRAIN_STATE_ITEM, ITERATOR_ITEM, MANIFEST_ITEM)

#: Orbax's name for the file of a JSON item.
JSON_FILE: Final = "metadata"
_MANIFEST_FILE: Final = f"{MANIFEST_ITEM}/{JSON_FILE}"
_ITERATOR_FILE: Final = f"{ITERATOR_ITEM}/{JSON_FILE}"
_TMP_SUFFIX: Final = ".orbax-checkpoint-tmp"
_TRASH: Final = ".trash"
_LOCK: Final = ".lock"
#: A step that cannot be read for one of these is not damaged: another try may well succeed.
_NOT_THE_STEPS_FAULT: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}
)
_MAX_ITERATOR_BYTES: Final = 4096


class StepDamagedError(Exception):
    """A step's directory is not a whole checkpoint; the text says why."""


class RunDirectory:
    """A directory of steps, open to any number of readers and to one writer.

    Args:
      path: made if it does not exist, with its parents.
      write: whether to open it for writing; for reading, nothing is made, locked or cleaned.

    Raises:
      OSError: it cannot be made or written, or another process (or object) has it open.
    """

    def __init__(self, path: str | os.PathLike[str], *, write: bool = True) -> None:
        self.path = pathlib.Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100 (follows no link)
        if write:
            self._open_for_writing()

    def _open_for_writing(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(self.path / _LOCK)
        except FileExistsError as error:
            raise NotADirectoryError(
                errno.ENOTDIR, "checkpoints need a directory, and this is a file", str(self.path)
            ) from error
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _unlock, descriptor)
        _open_locks.add(self._release)
        try:
            self._clean()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others open the directory. Safe to call again."""
        self._release()
        _open_locks.discard(self._release)

    def check_is_there(self) -> None:
        """Raises FileNotFoundError if the directory was deleted or moved since it was opened."""
        try:
            same = os.path.samestat((self.path / _LOCK).stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            raise FileNotFoundError(
                errno.ENOENT,
                "the directory of these checkpoints was deleted or moved while they were open; what is "
                "saved now would be found by nobody",
                str(self.path),
            )

    def steps(self) -> list[int]:
        """Numbers of all steps in rising order: whatever has a number as its name, whole or not."""
        with os.scandir(self.path) as entries:
            return sorted(
                int(entry.name)
                for entry in entries
                if entry.name.isascii()
                and entry.name.isdigit()
                and entry.name == str(int(entry.name))
            )

    def step_path(self, step: int) -> pathlib.Path:
        """Where a step is, or would be."""
        return self.path / str(step)

    def check(self, step: int, verify: Verify = "full") -> Manifest:
        """Reads a step's manifest and checks the step against it.

        Args:
          step: its number.
          verify: ``"full"`` reads and digests every file; ``"manifest"`` reads the manifest and the
            iterator's state, and compares names and sizes of the other files.

        Raises:
          StepDamagedError: something does not hold; says what.
          OSError: it cannot be read, for a reason that lies outside of the step.
        """
        path = self.step_path(step)
        try:
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise ValueError("it is not a directory")
            manifest = Manifest.from_bytes(_read(path / _MANIFEST_FILE, MAX_MANIFEST_BYTES))
            if manifest.step != step:
                raise ValueError(f"it holds a checkpoint of step {manifest.step}")
            files = dict(_files(path))
            _check_names(files, manifest)
            for name, entry in manifest.files.items():
                _check_file(name, files[name], entry, full=verify == "full")
            _check_iterator(path / _ITERATOR_FILE, manifest.position)
        except FileNotFoundError as error:
            missing = os.path.relpath(error.filename, path)
            raise StepDamagedError(
                f"{missing} is missing: the step was deleted in part, or is not a checkpoint"
            ) from error
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_THE_STEPS_FAULT:
                raise
            raise StepDamagedError(str(error)) from error
        return manifest

    def set_aside(self, step: int) -> pathlib.Path:
        """Renames a step's directory so that it no longer counts as one, and returns its new path."""
        for number in range(1, 10_000):
            target = self.path / f"{step}.set-aside-{number}"
            if not os.path.lexists(target):
                self.step_path(step).rename(target)
                sync(self.path)
                return target
        raise FileExistsError(
            f"{self.path} holds 10,000 directories of step {step} that were set aside"
        )

    def keep_newest(self, count: int, damaged: Collection[int] = ()) -> None:
        """Deletes all whole steps but the newest ``count``.

        Args:
          count: how many stay.
          damaged: steps known to be damaged; like those whose manifest does not hold, they are
            neither counted nor deleted.
        """
        whole = [step for step in self.steps() if step not in damaged and self._is_own(step)]
        for step in whole[:-count]:
            trash = self.path / _TRASH
            if trash.is_symlink():
                trash.unlink()  # what it points to is not ours
            trash.mkdir(exist_ok=True)
            self.step_path(step).rename(trash / str(step))
        self._empty_trash()

    def clean_step(self, step: int) -> None:
        """Removes what a save of ``step`` that failed has left, so that it does not take up space."""
        shutil.rmtree(self.path / f"{step}{_TMP_SUFFIX}", ignore_errors=True)

    def _is_own(self, step: int) -> bool:
        try:
            self.check(step, verify="manifest")
        except StepDamagedError:
            return False
        return True

    def _clean(self) -> None:
        """Removes what killed processes left: saves that never committed, and deletions half done."""
        for path in self.path.iterdir():
            if path.name.endswith(_TMP_SUFFIX):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        self._empty_trash()

    def _empty_trash(self) -> None:
        shutil.rmtree(self.path / _TRASH, ignore_errors=True)


def _unlock(descriptor: int) -> None:
    # Closing alone does not unlock as long as a forked child has the file open too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


_open_locks: Final[set[Any]] = set()


def _close_locks_after_fork() -> None:
    """A forked child holds its parent's locks too, and would keep them when the parent dies."""
    for release in _open_locks:
        held = release.detach()
        if held is not None:
            os.close(held[2][0])  # to unlock it would take it from the parent
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks_after_fork)


def seal_step(path: pathlib.Path, manifest: Manifest) -> None:
    """Finishes a step that is written but not yet committed: adds its files to its manifest, and syncs.

    Args:
      path: the step's directory, under its temporary name.
      manifest: without files.
    """
    files = {name: _describe(file) for name, file in _files(path)}
    manifest_path = path / _MANIFEST_FILE
    manifest_path.write_bytes(dataclasses.replace(manifest, files=files).to_bytes())
    for name in [*files, _MANIFEST_FILE]:
        sync(path / name)
    for folder, _, _ in os.walk(path, topdown=False):
        sync(pathlib.Path(folder))


def sync(path: pathlib.Path) -> None:
    """Has the system write a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_committed(path: pathlib.Path) -> None:
    """Syncs what Orbax writes after a step is sealed, and the rename that committed it."""
    for file in path.iterdir():
        if file.is_file():
            sync(file)
    sync(path)
    sync(path.parent)


def _lock(path: pathlib.Path) -> int:
    """Takes the lock, which is held for as long as the descriptor that it returns is open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"these checkpoints are open for writing in process {holder or 'unknown'}; two "
                "writers would destroy each other's steps: close the other one, or use another "
                "directory",
                str(path.parent),
            ) from None
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _files(step: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """All files of a step's items but the manifest: path inside the step, and path."""
    for item in ITEMS:
        if (step / item).is_symlink():
            raise ValueError(f"{item} is a symbolic link")
        for folder, _, names in os.walk(step / item, onerror=_raise, followlinks=False):
            for name in sorted(names):
                path = pathlib.Path(folder, name)
                inside = path.relative_to(step).as_posix()
                if inside != _MANIFEST_FILE:
                    yield inside, path


def _raise(error: OSError) -> None:
    raise error


def _describe(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "bytes": file.tell()}


def _check_names(files: dict[str, pathlib.Path], manifest: Manifest) -> None:
    missing = sorted(manifest.files.keys() - files.keys())
    if missing:
        raise ValueError(f"{missing[0]} is missing ({len(missing)} of {len(manifest.files)} files)")
    extra = sorted(files.keys() - manifest.files.keys())
    if extra:
        raise ValueError(f"{extra[0]} does not belong to it ({len(extra)} such files)")


def _check_file(name: str, path: pathlib.Path, entry: Any, *, full: bool) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if status.st_size != entry["bytes"]:
        raise ValueError(f"{name} has {status.st_size} bytes instead of {entry['bytes']}")
    if full:
        found = _describe(path)["sha256"]
        if found != entry["sha256"]:
            raise ValueError(
                f"{name} has sha256 {found[:12]}... instead of {entry['sha256'][:12]}..."
            )


def _check_iterator(path: pathlib.Path, position: Position) -> None:
    try:
        state = json.loads(_read(path, _MAX_ITERATOR_BYTES))
    except RecursionError as error:
        raise ValueError(f"{_ITERATOR_FILE} is nested too deeply") from error
    expected = {"epoch": position.epoch, "offset": position.offset, "step": position.step}
    if state != expected:
        raise ValueError(f"its iterator is at {state!r:.120}, its manifest at {expected}")


def _read(path: pathlib.Path, limit: int) -> bytes:
    """A regular file's bytes, if it is no larger than ``limit``."""
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        file = stack.enter_context(open(descriptor, "rb"))  # noqa: PTH123 (a descriptor, no path)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name} is larger than {limit} bytes")
    return data
