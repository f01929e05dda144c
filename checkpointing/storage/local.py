"""A run's directory on a file system: how steps come and go there, and who may write.

Nothing here is deleted but old steps of our own, and those are renamed out of the way first: a kill
at any instant leaves either a whole step or none.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from checkpointing.manifest import MAX_MANIFEST_BYTES, Manifest
from checkpointing.storage.base import (
    ASIDE_SUFFIX,
    COMMIT_FILE,
    ITEMS,
    ITERATOR_FILE,
    MANIFEST_FILE,
    MAX_ABOUT_BYTES,
    MOST_ASIDE,
    PART_FILE,
    PART_FOLDER,
    STEP_FILE,
    TMP_SUFFIX,
    TRAIN_STATE_ITEM,
    TRASH,
    LeftOver,
    StepFiles,
    Writer,
    check_size,
    commit_bytes,
    is_step,
    iterator_bytes,
    left_over_kind,
    save_times,
    step_files,
)
from loader.reading.threads import usable_cores
from loader.sources.new_paths import sync

_LOCK: Final = ".lock"
_MAX_MARK_BYTES: Final = 64
#: Where Linux lists who holds which lock.
_SYSTEM_LOCKS: Final = pathlib.Path("/proc/locks")
_SYNC_THREADS: Final = 8
_WORTH_A_CORE_BYTES: Final = 1 << 20

_Result = TypeVar("_Result")


class LocalStorage:
    """A `Storage` on a file system with POSIX locks and atomic renames.

    Args:
      path: of the directory.
    """

    timeout_s: float | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100 (follows no link)
        self._release: Callable[[], Any] = lambda: None

    def is_one_step(self) -> bool:
        """By a manifest, or Orbax's description of a step, in it."""
        step = self.path.parent if self.path.name in ITEMS else self.path
        return any(os.path.lexists(step / name) for name in (MANIFEST_FILE, STEP_FILE))

    def open(self) -> None:
        """Makes the directory with its parents, locks it, and removes what killed writers have left."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(self.path / _LOCK)
        except (FileExistsError, NotADirectoryError) as error:
            raise _no_directory(self.path) from error
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _unlock, descriptor)
        _open_locks.add(self._release)
        try:
            self._clean()
            if not _may_write(self.path):  # else the first save would find out
                raise PermissionError(
                    errno.EACCES, "nothing may be written in the directory", str(self.path)
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others open the directory."""
        self._release()
        _open_locks.discard(self._release)

    def mark(self) -> str:
        """What the writer has left in the lock."""
        return _read(self.path / _LOCK, _MAX_MARK_BYTES).decode("ascii", "replace")

    def steps(self) -> list[int]:
        """Whatever has a number as its name."""
        with os.scandir(self.path) as entries:
            return sorted(int(entry.name) for entry in entries if is_step(entry.name))

    def holds(self, step: int) -> bool:
        """Whether there is anything of that name."""
        return os.path.lexists(self.step_path(step))

    def step_path(self, step: int) -> pathlib.Path:
        """A directory named by the number."""
        return self.path / str(step)

    def unfinished_path(self, step: int) -> pathlib.Path:
        """A directory named so that Orbax too takes it for one that is being written."""
        return self.path / f"{step}{TMP_SUFFIX}"

    def begin_step(self, step: int) -> None:
        """Makes the directory in which a step is written, with one in it for each item."""
        self._check_is_there()
        path = self.unfinished_path(step)
        with contextlib.suppress(FileNotFoundError):
            _remove(path)  # left by a save that failed
        path.mkdir()
        for item in ITEMS:
            (path / item).mkdir()

    def seal_part(self, step: int, process: int) -> None:
        """Only the machine that has written a file can sync it; so each does."""
        seal_part(self.unfinished_path(step), process)

    def commit_step(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        """Gives a step its name, by a rename that outlasts a power cut."""
        sealed = seal_step(self.unfinished_path(step), manifest, about)
        self.unfinished_path(step).rename(self.step_path(step))
        sync(self.path)
        return sealed

    def clean_step(self, step: int) -> None:
        """So that it does not take up space."""
        shutil.rmtree(self.unfinished_path(step), ignore_errors=True)

    def sizes(self, step: int) -> dict[str, int | None]:
        """By the names that a walk finds; links are not followed."""
        return {name: _size(path) for name, path in _files(self._step(step))}

    def read(self, step: int, name: str, limit: int) -> bytes:
        """Follows no link."""
        return _read(self._step(step) / name, limit)

    def digests(
        self, step: int, sizes: Mapping[str, int], read: Callable[[int], None]
    ) -> dict[str, str]:
        """On all cores."""
        names = {self._step(step) / name: name for name in sizes}
        for file, name in names.items():
            check_size(name, _size(file), sizes[name])

        def digest(file: pathlib.Path) -> str:
            found: str = _describe(file)["sha256"]
            read(sizes[names[file]])
            return found

        return dict(zip(sizes, _digested(digest, names), strict=True))

    def step_files(self, step: int) -> StepFiles:
        """By a walk."""
        path = self.step_path(step)
        return step_files(dict(_sizes(path)), *_times(path))

    def left_overs(self) -> list[LeftOver]:
        """By their names."""
        found = []
        for path in sorted(self.path.iterdir()):
            kind = left_over_kind(path.name)
            if kind is not None:
                with contextlib.suppress(FileNotFoundError):  # a save was committed, say
                    size = sum(size for _, size in _sizes(path))
                    found.append(LeftOver(path.name, kind, size))
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

    def set_aside(self, step: int) -> str:
        """By a rename."""
        for number in range(1, MOST_ASIDE):
            target = self.path / f"{step}{ASIDE_SUFFIX.format(number)}"
            if not os.path.lexists(target):
                self.step_path(step).rename(target)
                sync(self.path)
                return target.name
        raise FileExistsError(
            f"{self.path} holds {MOST_ASIDE:,} directories of step {step} that were set aside"
        )

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Renames them out of the way first."""
        for step in steps:
            trash = self.path / TRASH
            if trash.is_symlink():
                trash.unlink()  # what it points to is not ours
            trash.mkdir(exist_ok=True)
            self.step_path(step).rename(trash / str(step))
        self._empty_trash()

    def _check_is_there(self) -> None:
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

    def _step(self, step: int) -> pathlib.Path:
        path = self.step_path(step)
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise ValueError("it is not a directory")
        return path

    def _clean(self) -> None:
        """Removes what killed processes left: saves that never committed, and deletions half done."""
        for path in self.path.iterdir():
            # Of another name it is another program's, which may be at work.
            step, suffix, rest = path.name.partition(TMP_SUFFIX)
            if is_step(step) and suffix and not rest:
                _remove(path)
        self._empty_trash()

    def _empty_trash(self) -> None:
        shutil.rmtree(self.path / TRASH, ignore_errors=True)


def _sizes(top: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Path and size of all that is in a directory, or of a file; what goes meanwhile is left out."""
    status = top.lstat()
    if not stat.S_ISDIR(status.st_mode):
        yield top.name, status.st_size
        return
    for folder, _, names in os.walk(top, followlinks=False):
        for name in names:
            path = pathlib.Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                yield path.relative_to(top).as_posix(), path.lstat().st_size


def _times(step: pathlib.Path) -> tuple[float | None, float | None]:
    """When a step was committed, in seconds since 1970, and how many seconds its save took."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return save_times(_read(step / STEP_FILE, MAX_ABOUT_BYTES))
    with contextlib.suppress(OSError):
        return (step / MANIFEST_FILE).lstat().st_mtime, None
    return None, None


def _may_write(directory: pathlib.Path) -> bool:
    """Whether files can be made in it by whom this process acts for, which need not be who started it."""
    effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=effective)


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
    own = path / TRAIN_STATE_ITEM / PART_FOLDER.format(process)
    files = dict(_files_in(own, path)) if own.is_dir() else {}
    found = [
        (name, file.lstat().st_mtime_ns, described)
        for (name, file), described in zip(
            files.items(), _digested(_describe, files.values()), strict=True
        )
    ]
    if files:
        _in_threads(sync, [own, *own.rglob("*")], _SYNC_THREADS)
    (path / PART_FILE.format(process)).write_text(json.dumps(found), "utf-8")


def _take_parts(path: pathlib.Path, files: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    """What `seal_part` has left: by its name, each file that is as it was then."""
    taken: dict[str, Any] = {}
    for left in path.glob(PART_FILE.format("*")):
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
    (path / ITERATOR_FILE).write_bytes(iterator_bytes(manifest.position))
    files = dict(_files(path))
    taken = _take_parts(path, files)
    rest = {name: file for name, file in files.items() if name not in taken}
    found = dict(zip(rest, _digested(_describe, rest.values()), strict=True)) | taken
    sealed = dataclasses.replace(manifest, files={name: found[name] for name in files})
    (path / MANIFEST_FILE).write_bytes(sealed.to_bytes())
    (path / STEP_FILE).write_text(json.dumps(about), "utf-8")
    (path / COMMIT_FILE).write_bytes(commit_bytes(manifest.step))
    synced = {files[name] for name in taken}
    written = [path, *(file for file in path.rglob("*") if file not in synced)]
    # Together they cost little more than one by itself: the disk has to settle for each batch of them.
    _in_threads(sync, written, _SYNC_THREADS)
    return sealed


def _lock(path: pathlib.Path) -> int:
    """Takes the lock, which is held for as long as the descriptor that it returns is open."""
    how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, how, 0o666)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise _no_lock(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_lock(path)
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


def _no_lock(path: pathlib.Path) -> OSError:
    """What to raise where something else stands in the place of the lock."""
    return OSError(
        errno.EINVAL,
        f"the lock of these checkpoints is a file, and in its place is {_kind(path)}: whoever put it there, "
        "it is not ours. Move it away, or use another directory",
        str(path),
    )


def _no_directory(path: pathlib.Path) -> OSError:
    """What to raise where something else stands in the place of the directory, or of one above it."""
    first = next(place for place in (path, *path.parents) if os.path.lexists(place))
    return NotADirectoryError(
        errno.ENOTDIR, f"checkpoints need a directory, and this is {_kind(first)}", str(first)
    )


def _kind(path: pathlib.Path) -> str:
    """What stands at a path."""
    if path.is_symlink():
        target = f"a symbolic link to {os.readlink(path)}"  # noqa: PTH115 (as it is written)
        return target if path.exists() else f"{target}, where there is nothing"
    kinds = {"a file": path.is_file, "a directory": path.is_dir, "a named pipe": path.is_fifo}
    return next((kind for kind, is_it in kinds.items() if is_it()), "a socket or a device")


def _files(step: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """All files of a step's items but the manifest: path inside the step, and path."""
    for item in ITEMS:
        if (step / item).is_symlink():
            raise ValueError(f"{item} is a symbolic link")
        yield from _files_in(step / item, step)


def _files_in(top: pathlib.Path, step: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    for folder, folders, names in os.walk(top, onerror=_raise, followlinks=False):
        links = [name for name in folders if pathlib.Path(folder, name).is_symlink()]
        for name in sorted(names + links):
            path = pathlib.Path(folder, name)
            inside = path.relative_to(step).as_posix()
            if inside != MANIFEST_FILE:
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


def _size(path: pathlib.Path) -> int | None:
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _describe(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "bytes": file.tell()}


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
