"""Digests of files: computed on all cores, by any number of workers, and kept for files that stay unchanged."""

import dataclasses
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from loader.sources.files import FileSet, FileState

_READ_BYTES: Final = 1 << 20

#: Where digests are kept: ``None``, nowhere; ``True``, beside the data; else a folder.
Cache = bool | str | os.PathLike[str] | None


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """A file's digest, 64 hex digits, and what the file system said of it while it was read."""

    state: FileState
    digest: str


#: By name, the digests of some files.
FileDigests = Mapping[str, FileDigest]


def digest_files(
    files: FileSet,
    numbers: Iterable[int] | None = None,
    *,
    known: FileDigests | None = None,
    threads: int | None = None,
) -> dict[str, FileDigest]:
    """Reads and digests some of a set's files.

    Args:
      files: the set.
      numbers: of the files; by default all. Several workers can each do some, see `merge`.
      known: digests of before. A file that is still what it was then is not read.
      threads: by default as many as there are cores.

    Returns:
      The digests, by name.

    Raises:
      ValueError: a file has changed since the set was opened, or while it was read.
      OSError: a file cannot be read.
    """
    known = known or {}
    wanted = range(len(files)) if numbers is None else list(numbers)
    found: dict[str, FileDigest] = {}
    unread = []
    for number in wanted:
        before = known.get(files.names[number])
        if before is not None and before.state == files.states[number]:
            files.check(number)
            found[files.names[number]] = before
        else:
            unread.append(number)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        digests = pool.map(lambda number: _digest(files, number), unread)
        found |= {files.names[n]: digest for n, digest in zip(unread, digests, strict=True)}
    return found


def merge(parts: Iterable[FileDigests]) -> dict[str, FileDigest]:
    """The digests of several parts in one.

    Raises:
      ValueError: two parts do not agree on a file.
    """
    merged: dict[str, FileDigest] = {}
    for part in parts:
        for name, digest in part.items():
            if merged.setdefault(name, digest).digest != digest.digest:
                raise ValueError(
                    f"file {name} was digested twice, and differently; it changed meanwhile"
                )
    return merged


def _digest(files: FileSet, number: int) -> FileDigest:
    with open(files.path(number), "rb", buffering=0) as file:  # noqa: PTH123 (of 10,000 files)
        _settle(os.fstat(file.fileno()))
        files.check(number, fd=file.fileno())
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
        files.check(number, fd=file.fileno())
    return FileDigest(files.states[number], digest.hexdigest())


def _settle(found: os.stat_result) -> None:
    """Waits until a later change of the file would have a later time: clocks of file systems tick."""
    age = time.time() - found.st_mtime
    if 0 <= age < 0.02:
        time.sleep(0.02 - age)
