"""Files and folders that are there when they are complete, and take the place of nothing."""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Final

#: With these a file system says that it has no second names for a file.
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES}
)


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write to, which has its own name once all went well, and is gone if not.

    Raises:
      FileExistsError: there is something of that name, or was made meanwhile.
    """
    _check_is_free(target, "folder")
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had this number
    partial.mkdir(parents=True)
    try:
        yield partial
        sync(partial)
        # A rename takes the place of an empty folder, and of nothing else: one that is made between this
        # check and the rename holds nothing that could be lost.
        _check_is_free(target, "folder")
        try:
            partial.rename(target)
        except OSError:
            _check_is_free(target, "folder")
            raise
        sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where a file is to be written, which has its own name once all went well, and is gone if not.

    Raises:
      FileExistsError: there is something of that name, or was made meanwhile.
    """
    _check_is_free(target, "file")
    partial = _partial(target)
    try:
        yield partial
        sync(partial)
        try:
            os.link(partial, target)  # unlike a rename, it replaces nothing
        except OSError as error:
            _check_is_free(target, "file")
            if error.errno not in _NO_LINKS:
                raise
            partial.rename(target)
        sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Has the system write a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def _check_is_free(target: pathlib.Path, kind: str) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{str(target)!r} is there already; name another {kind}, or move it")
