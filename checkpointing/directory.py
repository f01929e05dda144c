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
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar

from checkpointing.manifest import MAX_MANIFEST_BYTES, Manifest
from loader import Position
from loader.parallel import usable_cores
from loader.progress import Work

Verify = Literal["full", "manifest"]

MANIFEST_ITEM: Final = "manifest"
ITERATOR_ITEM: Final = "iterator"
TRAIN_STATE_ITEM: Final = "train_state"
ITEMS: Final = (TRAIN_STATE_ITEM, ITERATOR_ITEM, MANIFEST_ITEM)

#: Orbax's name for the file of a JSON item.
JSON_FILE: Final = "metadata"
_MANIFEST_FILE: Final = f"{MANIFEST_ITEM}/{JSON_FILE}"
_ITERATOR_FILE: Final = f"{ITERATOR_ITEM}/{JSON_FILE}"
#: Orbax's names for a step's own description of itself, and for a file that says that it is whole.
_STEP_FILE: Final = "_CHECKPOINT_METADATA"
_COMMIT_FILE: Final = "commit_success.txt"
#: Orbax's name for what one process writes of the arrays, and ours for what it then knows of its files.
_PART_FOLDER: Final = "ocdbt.process_{}"
#: Orbax's names of what each process has left in a step, whether it had arrays to write or not.
_OF_A_PROCESS: Final = re.compile(
    rf"{TRAIN_STATE_ITEM}/(?:ocdbt\.|array_metadatas/)process_(\d{{1,9}})(?:/|$)"
)
_PART_FILE: Final = "part-{}.json"
#: Orbax's, of the name of a directory in which a step is written.
TMP_SUFFIX: Final = ".orbax-checkpoint-tmp"
_TRASH: Final = ".trash"
_LOCK: Final = ".lock"
_SET_ASIDE: Final = re.compile(r"\d+\.set-aside-\d+")
#: Where Linux lists who holds which lock.
_SYSTEM_LOCKS: Final = pathlib.Path("/proc/locks")
#: A step that cannot be read for one of these is not damaged: another try may well succeed.
_NOT_THE_STEPS_FAULT: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}
)
_MAX_ITERATOR_BYTES: Final = 4096
_MAX_MARK_BYTES: Final = 64
_MAX_ABOUT_BYTES: Final = 1 << 16
_SYNC_THREADS: Final = 8
_WORTH_A_CORE_BYTES: Final = 1 << 20

_Result = TypeVar("_Result")


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
    kind: Literal["unfinished", "deleted", "set aside"]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Writer:
    """A process that has a run's directory open for writing.

    Attributes:
      process: its number in the system.
      holds_lock: whether it is seen to; else it was the last to open the directory and is alive, and
        more cannot be told here.
    """

    process: int
    holds_lock: bool


class StepDamagedError(Exception):
    """A step's directory is not a whole checkpoint; the text says why."""


class RunDirectory:
    """A directory of steps, open to any number of readers and to one writer.

    Args:
      path: made if it does not exist, with its parents.
      write: whether to open it for writing; for reading, nothing is made, locked or cleaned.

    Raises:
      ValueError: it is an address of an object store, not a path.
      OSError: it cannot be made or written, or another process (or object) has it open.
    """

    def __init__(self, path: str | os.PathLike[str], *, write: bool = True) -> None:
        if "://" in os.fspath(path):
            raise ValueError(
                f"{os.fspath(path)} is an address, and checkpoints need a directory of a file system: "
                "a step becomes whole by a rename, which object stores do not have. Use a disk, or a "
                "file system that all processes share, and copy whole steps from there"
            )
        self.path = pathlib.Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100 (follows no link)
        self._release: Callable[[], Any] = lambda: None
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

    def mark(self) -> str:
        """What its writer has left in it: a text that no other directory has.

        Raises:
          FileNotFoundError: no writer has opened this directory.
        """
        try:
            return _read(self.path / _LOCK, _MAX_MARK_BYTES).decode("ascii", "replace")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT,
                "process 0 has opened this directory, and it is not here; it must be on storage that "
                "all processes share",
                str(self.path),
            ) from error

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

    def unfinished_path(self, step: int) -> pathlib.Path:
        """Where a step is while it is written: under a name that does not count as one."""
        return self.path / f"{step}{TMP_SUFFIX}"

    def make_step(self, step: int) -> None:
        """Makes the directory in which a step is written, with one in it for each item."""
        path = self.unfinished_path(step)
        with contextlib.suppress(FileNotFoundError):
            _remove(path)  # left by a save that failed
        path.mkdir()
        for item in ITEMS:
            (path / item).mkdir()

    def commit_step(self, step: int) -> None:
        """Gives a sealed step its name, by a rename that outlasts a power cut."""
        self.unfinished_path(step).rename(self.step_path(step))
        sync(self.path)

    def check(
        self, step: int, verify: Verify = "full", share: tuple[int, int] = (0, 1)
    ) -> Manifest:
        """Reads a step's manifest and checks the step against it.

        Args:
          step: its number.
          verify: ``"full"`` reads and digests every file; ``"manifest"`` reads the manifest and the
            iterator's state, and compares names and sizes of the other files.
          share: number ``i`` of ``n`` processes that check it together. The first compares the
            names; of what is to be read, each reads its share.

        Raises:
          StepDamagedError: something does not hold; says what.
          OSError: it cannot be read, for a reason that lies outside of the step.
        """
        path = self.step_path(step)
        try:
            manifest = self.manifest(step)
            if share[0] == 0:
                _check_names(dict(_files(path)), manifest)
            if verify == "full":
                _check_files(path, manifest, share, full=True)
            elif share[0] == 0:
                _check_files(path, manifest, (0, 1), full=False)
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

    def manifest(self, step: int) -> Manifest:
        """What a step says of itself, whatever else of it holds.

        Raises:
          OSError, ValueError: it cannot be read, or is no manifest of this step.
        """
        path = self.step_path(step)
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise ValueError("it is not a directory")
        manifest = Manifest.from_bytes(_read(path / _MANIFEST_FILE, MAX_MANIFEST_BYTES))
        if manifest.step != step:
            raise ValueError(f"it holds a checkpoint of step {manifest.step}")
        return manifest

    def step_files(self, step: int) -> StepFiles:
        """What a step takes up, and when it was written; of a damaged step, what there is.

        Raises:
          OSError: its directory cannot be read.
        """
        path = self.step_path(step)
        item_bytes = dict.fromkeys((*ITEMS, "other"), 0)
        sizes = dict(_sizes(path))
        for name, size in sizes.items():
            item = name.partition("/")[0]
            item_bytes[item if item in ITEMS else "other"] += size
        return StepFiles(item_bytes, len(sizes), *_times(path))

    def left_overs(self) -> list[LeftOver]:
        """What does not count as a step: saves and deletions that are under way or were killed."""
        found = []
        for path in sorted(self.path.iterdir()):
            kind: Any = (
                "unfinished"
                if path.name.endswith(TMP_SUFFIX)
                else "set aside"
                if _SET_ASIDE.fullmatch(path.name)
                else "deleted"
                if path.name == _TRASH
                else None
            )
            if kind is not None:
                found.append(LeftOver(path.name, kind, sum(size for _, size in _sizes(path))))
        return found

    def writer(self) -> Writer | None:
        """Who has the directory open for writing, as far as this machine can see; takes no lock."""
        try:
            process = int(_read(self.path / _LOCK, _MAX_MARK_BYTES).split(b" ")[0])
            inode = (self.path / _LOCK).stat().st_ino
        except (OSError, ValueError):
            return None
        try:
            held = _SYSTEM_LOCKS.read_text("ascii", "replace").splitlines()
        except OSError:
            return Writer(process, holds_lock=False) if _is_alive(process) else None
        # A line has a number, kind, manner and mode, then the process, the device with the inode, the range.
        locks = [line.split()[4:6] for line in held if "->" not in line]
        holders = [(lock[0], lock[-1].rpartition(":")[2]) for lock in locks if lock]
        seen = (str(process), str(inode)) in holders
        return Writer(process, holds_lock=True) if seen else None

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

    def keep_newest(self, count: int, damaged: Collection[int] = ()) -> list[int]:
        """Deletes all whole steps but the newest ``count``; returns which.

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
        return whole[:-count]

    def clean_step(self, step: int) -> None:
        """Removes what a save of ``step`` that failed has left, so that it does not take up space."""
        shutil.rmtree(self.unfinished_path(step), ignore_errors=True)

    def _is_own(self, step: int) -> bool:
        try:
            self.check(step, verify="manifest")
        except StepDamagedError:
            return False
        return True

    def _clean(self) -> None:
        """Removes what killed processes left: saves that never committed, and deletions half done."""
        for path in self.path.iterdir():
            if path.name.endswith(TMP_SUFFIX):
                _remove(path)
        self._empty_trash()

    def _empty_trash(self) -> None:
        shutil.rmtree(self.path / _TRASH, ignore_errors=True)


def processes_in(manifest: Manifest) -> int | None:
    """How many processes have written a step, as its files tell; ``None`` where they do not."""
    found = {int(match[1]) for match in map(_OF_A_PROCESS.match, manifest.files) if match}
    return len(found) or None


def _sizes(top: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Path and size of all that is in a directory, or of a file; what goes meanwhile is left out."""
    if not stat.S_ISDIR(top.lstat().st_mode):
        yield top.name, top.lstat().st_size
        return
    for folder, _, names in os.walk(top, followlinks=False):
        for name in names:
            path = pathlib.Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                yield path.relative_to(top).as_posix(), path.lstat().st_size


def _times(step: pathlib.Path) -> tuple[float | None, float | None]:
    """When a step was committed, in seconds since 1970, and how many seconds its save took."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        about = json.loads(_read(step / _STEP_FILE, _MAX_ABOUT_BYTES))
        began, committed = about["init_timestamp_nsecs"], about["commit_timestamp_nsecs"]
        if type(began) is type(committed) is int and 0 < began <= committed < 2**63:
            return committed / 1e9, (committed - began) / 1e9
    with contextlib.suppress(OSError):
        return (step / _MANIFEST_FILE).lstat().st_mtime, None
    return None, None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:  # it is somebody else's
        return True
    except (OSError, OverflowError):
        return False
    return process > 0


def _remove(path: pathlib.Path) -> None:
    """Deletes a file, a link (and not what it points to), or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


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


def seal_part(path: pathlib.Path, process: int) -> None:
    """Syncs and digests what one of several processes has written of a step's train state.

    Only the machine that has written a file can sync it. What it finds is left for `seal_step`, so
    that no process has to read the whole train state.

    Args:
      path: the step's directory, under its temporary name.
      process: the number of this one.
    """
    own = path / TRAIN_STATE_ITEM / _PART_FOLDER.format(process)
    files = dict(_files_in(own, path)) if own.is_dir() else {}
    found = [
        (name, file.lstat().st_mtime_ns, described)
        for (name, file), described in zip(
            files.items(), _digested(_describe, files.values()), strict=True
        )
    ]
    if files:
        _in_threads(sync, [own, *own.rglob("*")], _SYNC_THREADS)
    (path / _PART_FILE.format(process)).write_text(json.dumps(found), "utf-8")


def _take_parts(path: pathlib.Path, files: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    """What `seal_part` has left: by its name, each file that is as it was then."""
    taken: dict[str, Any] = {}
    for left in path.glob(_PART_FILE.format("*")):
        for name, changed_ns, described in json.loads(_read(left, MAX_MANIFEST_BYTES)):
            status = files[name].lstat()
            if (status.st_mtime_ns, status.st_size) == (changed_ns, described["bytes"]):
                taken[name] = described
        left.unlink()
    return taken


def seal_step(path: pathlib.Path, manifest: Manifest, about: Mapping[str, Any]) -> Manifest:
    """Finishes a step whose train state is written, but which is not committed yet, and syncs it.

    Args:
      path: the step's directory, under its temporary name.
      manifest: without files, which are added.
      about: what Orbax wants to know of the step: JSON values.

    Returns:
      The manifest with files.
    """
    position = json.dumps(dataclasses.asdict(manifest.position))
    (path / _ITERATOR_FILE).write_text(position, "utf-8")
    files = dict(_files(path))
    taken = _take_parts(path, files)
    rest = {name: file for name, file in files.items() if name not in taken}
    found = dict(zip(rest, _digested(_describe, rest.values()), strict=True)) | taken
    sealed = dataclasses.replace(manifest, files={name: found[name] for name in files})
    (path / _MANIFEST_FILE).write_bytes(sealed.to_bytes())
    (path / _STEP_FILE).write_text(json.dumps(about), "utf-8")
    (path / _COMMIT_FILE).write_text(f"step {manifest.step} is whole", "utf-8")
    synced = {files[name] for name in taken}
    written = [path, *(file for file in path.rglob("*") if file not in synced)]
    # Together they cost little more than one by itself: the disk has to settle for each batch of them.
    _in_threads(sync, written, _SYNC_THREADS)
    return sealed


def sync(path: pathlib.Path) -> None:
    """Has the system write a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: pathlib.Path) -> int:
    """Takes the lock, which is held for as long as the descriptor that it returns is open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").partition(" ")[0]
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
    os.pwrite(descriptor, f"{os.getpid()} {secrets.token_hex(16)}".encode(), 0)
    return descriptor


def _files(step: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """All files of a step's items but the manifest: path inside the step, and path."""
    for item in ITEMS:
        if (step / item).is_symlink():
            raise ValueError(f"{item} is a symbolic link")
        yield from _files_in(step / item, step)


def _files_in(top: pathlib.Path, step: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    for folder, _, names in os.walk(top, onerror=_raise, followlinks=False):
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            inside = path.relative_to(step).as_posix()
            if inside != _MANIFEST_FILE:
                yield inside, path


def _digested(
    work: Callable[[pathlib.Path], _Result], files: Collection[pathlib.Path]
) -> list[_Result]:
    """The result of work for each file, on as many cores as there are files worth one."""
    large = sum(path.lstat().st_size >= _WORTH_A_CORE_BYTES for path in files)
    return _in_threads(work, files, min(large, usable_cores()))


def _in_threads(
    work: Callable[[pathlib.Path], _Result], files: Collection[pathlib.Path], threads: int
) -> list[_Result]:
    """The result of work for each file in order, or the error of the first that fails."""
    if threads < 2:
        return [work(file) for file in files]
    with ThreadPoolExecutor(threads, "regrain-files") as pool:
        return list(pool.map(work, files))


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


def _check_size(name: str, path: pathlib.Path, entry: Any) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is not a regular file")
    if status.st_size != entry["bytes"]:
        raise ValueError(f"{name} has {status.st_size} bytes instead of {entry['bytes']}")


def _check_files(
    step: pathlib.Path, manifest: Manifest, share: tuple[int, int], *, full: bool
) -> None:
    index, count = share
    files = {name: _inside(step, name) for name in list(manifest.files)[index::count]}
    for name, path in files.items():
        _check_size(name, path, manifest.files[name])
    sizes = {path: manifest.files[name]["bytes"] for name, path in files.items()}
    with Work(f"check of step {manifest.step}", full * sum(sizes.values()), "bytes") as work:

        def describe(path: pathlib.Path) -> dict[str, Any]:
            described = _describe(path)
            work.advance(sizes[path])
            return described

        digested = _digested(describe, files.values()) if full else []
    for name, found in zip(files, digested, strict=full):
        expected, digest = manifest.files[name]["sha256"], found["sha256"]
        if digest != expected:
            raise ValueError(f"{name} has sha256 {digest[:12]}... instead of {expected[:12]}...")


def _inside(step: pathlib.Path, name: str) -> pathlib.Path:
    """Path of a file of a step, whose name comes from a file."""
    parts = name.split("/")
    if parts[0] not in ITEMS or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r:.80} is no name of a file of a checkpoint")
    return step.joinpath(*parts)


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
