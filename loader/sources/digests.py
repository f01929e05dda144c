"""Digests of files: on all cores, by any number of workers, and only of files that have changed.

A file's digest is the sha256 of its bytes; of a file of more than 64 MiB, that of the sha256 of each
piece of 64 MiB, so that several cores can work on one file. (Which of both it is follows from the
size, which every use of a digest covers too.)
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from loader.progress import Work
from loader.reading.threads import Crew, in_order, usable_cores
from loader.sources.files import FileSet, FileState

PIECE_BYTES: Final = 1 << 26

#: Where digests are kept: ``None`` or ``False``, nowhere; ``True``, beside the data; else a folder.
Cache = bool | str | os.PathLike[str] | None

_READ_BYTES: Final = 1 << 18  # what is read stays in a core's own cache until it is digested
#: File systems keep times in steps, of up to 10 ms on Linux: two changes in one step have the same time.
_TICK_SECONDS: Final = 0.02


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
    """Reads and digests some of a set's files; 256 KiB of memory a thread.

    Args:
      files: the set: a source's ``files``.
      numbers: of the files; by default all. Several workers can each do some: `merge_digests` puts their
        parts together, and a source's ``fingerprint(digests=...)`` takes them.
      known: digests of before. A file of which the file system says the same as then is not read.
      threads: by default as many as there are cores.

    Returns:
      The digests, by name.

    Raises:
      ValueError: a file has changed since the set was opened, or while it was read; names it.
      OSError: a file cannot be read.
    """
    wanted = range(len(files)) if numbers is None else list(numbers)
    found = {}
    unread = []
    for number in wanted:
        name, state = files.names[number], files.states[number]
        before = (known or {}).get(name)
        if before is not None and before.state.is_exactly(state):
            files.check(number)
            found[name] = before
        else:
            unread.append(number)
    pieces = [
        (number, start)
        for number in unread
        for start in range(0, files.states[number].size, PIECE_BYTES)
    ]

    def digest(task: int, crew: Crew[bytes]) -> bytes:
        crew.check(task)
        number, start = pieces[task]
        found = _digest_piece(files, number, start)
        work.advance(min(PIECE_BYTES, files.states[number].size - start))
        return found

    size = sum(files.states[number].size for number in unread)
    what = f"digests of {len(unread)} of {len(files)} files in {files.root.name!r}"
    with Work(what, size, "bytes") as work:
        digests = in_order(digest, len(pieces), threads or usable_cores())
    by_number: dict[int, list[bytes]] = {}
    for (number, _), piece in zip(pieces, digests, strict=True):
        by_number.setdefault(number, []).append(piece)
    for number, parts in by_number.items():
        whole = parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()
        found[files.names[number]] = FileDigest(files.states[number], whole.hex())
    return found


def merge_digests(parts: Iterable[FileDigests]) -> dict[str, FileDigest]:
    """The digests of several parts in one.

    Raises:
      ValueError: two parts do not agree on a file; names it.
    """
    merged: dict[str, FileDigest] = {}
    for part in parts:
        for name, found in part.items():
            if merged.setdefault(name, found).digest != found.digest:
                raise ValueError(
                    f"file {name} was digested twice, and differently: it changed meanwhile, or two "
                    "workers see different files"
                )
    return merged


def _digest_piece(files: FileSet, number: int, start: int) -> bytes:
    digest = hashlib.sha256()
    stop = min(start + PIECE_BYTES, files.states[number].size)
    with _opened(files, number) as file:
        if start == 0:
            _let_time_pass(os.fstat(file.fileno()))
        file.seek(start)
        buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
        while start < stop and (count := file.readinto(buffer[: stop - start])):
            digest.update(buffer[:count])
            start += count
        files.check(number, fd=file.fileno())
    return digest.digest()


@contextlib.contextmanager
def _opened(files: FileSet, number: int) -> Iterator[Any]:
    try:
        with open(files.path(number), "rb", buffering=0) as file:  # noqa: PTH123 (of 10,000 files)
            yield file
    except OSError as error:
        raise OSError(
            error.errno, f"file {files.names[number]} cannot be read: {error.strerror}"
        ) from error


def _let_time_pass(found: os.stat_result) -> None:
    """Waits until a later change of the file is sure to have a later time than its last one."""
    age = time.time() - max(found.st_mtime, found.st_ctime)
    if 0 <= age < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS - age)
