"""Digests of files, kept from one run to the next: as JSON, beside the data or in a folder of their own.

Nothing hangs on this file: what is missing from it, or does not fit the file at hand, is read again.
"""

import hashlib
import json
import logging
import os
import pathlib
import re
import stat
from typing import Any, Final

from loader.sources.digests import Cache, FileDigest, FileDigests
from loader.sources.files import FileSet, FileState
from loader.sources.new_paths import write_whole

FILE_NAME: Final = ".regrain-digests.json"

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 28
_MAX_FILES: Final = 1 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_log: Final = logging.getLogger(__name__)


def check_cache(cache: Any) -> Cache:
    """Checks what a caller says of where digests are kept; returns it.

    Raises:
      TypeError: it is neither a truth value, nor a folder, nor ``None``.
    """
    if cache is None or isinstance(cache, bool) or (isinstance(cache, str | os.PathLike) and cache):
        return cache
    raise TypeError(
        f"cache must be True, for beside the data, a folder, or None, not {cache!r:.80}"
    )


def cache_path(cache: Cache, files: FileSet) -> pathlib.Path | None:
    """The file in which the digests of a set are kept; ``None`` where they are not."""
    if cache is None or cache is False:
        return None
    if cache is True:
        return files.root / FILE_NAME
    root = hashlib.sha256(os.fsencode(files.root.resolve())).hexdigest()[:16]
    return pathlib.Path(cache) / f"{root}.json"


def load_digests(path: pathlib.Path) -> dict[str, FileDigest]:
    """The digests that a file keeps; none where it is missing, torn, too large or not ours."""
    try:
        with open(path, "rb", opener=_not_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no file")
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        return _parsed(json.loads(text))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("%s keeps no digests that can be used, so files are read: %s", path, error)
        return {}


def store_digests(path: pathlib.Path, digests: FileDigests) -> None:
    """Keeps digests, beside those that are there of other files. A failure is logged, no more."""
    try:
        before = load_digests(path)
        kept = {**before, **digests}
        if all(_same(before.get(name), found) for name, found in kept.items()):
            return
        if len(kept) > _MAX_FILES:
            kept = dict(digests)
        body = {
            name: [*_numbers(found.state), found.digest] for name, found in sorted(kept.items())
        }
        text = json.dumps({"version": _VERSION, "digest": _digest(body), "files": body})
        if len(text) <= _MAX_BYTES:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
    except OSError as error:
        _log.warning("digests cannot be kept in %s, so files will be read again: %s", path, error)


def _parsed(value: Any) -> dict[str, FileDigest]:
    if value["version"] != _VERSION:
        raise ValueError(f"version {value['version']!r} is not {_VERSION}")
    if value["digest"] != _digest(value["files"]):
        raise ValueError("its own digest does not hold")
    return {name: _entry(numbers, digest) for name, (*numbers, digest) in value["files"].items()}


def _entry(numbers: list[Any], digest: Any) -> FileDigest:
    if not all(type(number) is int for number in numbers) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{[*numbers, digest]!r:.200} are no numbers and digest of a file")
    return FileDigest(FileState(*numbers), digest)


def _not_waiting(path: str, flags: int) -> int:
    """Opens a file, for whose writer it does not wait if it is none."""
    return os.open(path, flags | os.O_NONBLOCK)


def _same(before: FileDigest | None, now: FileDigest) -> bool:
    return before is not None and before.state.is_exactly(now.state) and before == now


def _numbers(state: FileState) -> tuple[int, int, int, int]:
    return state.size, state.mtime_ns, state.inode, state.ctime_ns


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
