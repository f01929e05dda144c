"""Write files and folders atomically: complete under their own name, or not there at all."""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Final

#: Errors of file systems without hard links.
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES}
)


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a folder to write to; rename it to ``target`` at the end, or remove it after an exception.

    Raises:
      FileExistsError: ``target`` exists, at the start or at the end.
    """
    _check_is_free(target, "folder")
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same number
    partial.mkdir(parents=True)
    try:
        yield partial
        sync(partial)
        # A rename replaces an empty folder and nothing else, so a folder made after this check loses nothing.
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
    """Yield a path to write a file to; rename it to ``target`` at the end, or remove it after an exception.

    Raises:
      FileExistsError: ``target`` exists, at the start or at the end.
    """
    _check_is_free(target, "file")
    partial = _partial(target)
    try:
        yield partial
        sync(partial)
        try:
            os.link(partial, target)  # unlike a rename, a link replaces nothing
        except OSError as error:
            _check_is_free(target, "file")
            if error.errno not in _NO_LINKS:
                raise
            partial.rename(target)
        sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Write a file under another name, then rename it to ``path``, replacing what is there.

    Raises:
      OSError: the file cannot be written; the error names ``path``, whose content is unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.write_bytes(data)
        sync(partial)
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
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
