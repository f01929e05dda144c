"""Where documents begin in flat files of tokens: by an index beside each file, or by their last token."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.progress import Work
from loader.sources.files import FileSet

Int64 = npt.NDArray[np.int64]

_SCANNED_TOKENS: Final = 1 << 22


def borders_by_token(
    files: FileSet, tokens_of: Callable[[int], npt.NDArray[Any]], last_token: int
) -> list[Int64]:
    """Borders of documents that end with a token; the last of a file may go without it.

    Args:
      files: the files.
      tokens_of: all tokens of a file, by its number; called by several threads.
      last_token: the token's id.

    Returns:
      For each file the offsets at which its documents begin, rising from 0, and its length.

    Raises:
      ValueError: the token is in no file.
    """

    def borders(number: int) -> Int64:
        tokens = tokens_of(number)
        ends = []
        for low in range(0, len(tokens), _SCANNED_TOKENS):
            piece = tokens[low : low + _SCANNED_TOKENS]
            ends.append(np.flatnonzero(piece == last_token) + (low + 1))
            work.advance(piece.nbytes)
        return np.concatenate([[0], *ends, [len(tokens)]])

    size = sum(state.size for state in files.states)
    with (
        Work(f"borders of documents in {files.root.name!r}", size, "bytes") as work,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        found = list(pool.map(borders, range(len(files))))
    if all(len(edges) == 2 for edges in found):
        raise ValueError(
            f"no document ends with the token id {last_token}: it is nowhere in {len(files)} files of "
            f"{str(files.root)!r}; give the id that ends documents, or the dtype of the files"
        )
    return found


def borders_by_index(
    files: FileSet, lengths: Sequence[int], suffix: str
) -> tuple[list[Int64], str]:
    """Borders of documents that an index beside each file lists: flat little-endian int64 offsets.

    Args:
      files: the files.
      lengths: of each, in tokens.
      suffix: of the indexes' names, in place of the files' own.

    Returns:
      Borders as above, and a digest of all indexes.

    Raises:
      FileNotFoundError, OSError: an index is not there, or cannot be read.
      ValueError: an index does not fit its file; names it, and the entry.
    """
    try:
        names = [pathlib.PurePosixPath(name).with_suffix(suffix).as_posix() for name in files.names]
    except ValueError:
        raise ValueError(f"documents must be a suffix such as '.idx', not {suffix!r}") from None
    if not suffix or not set(names).isdisjoint(files.names):
        raise ValueError(f"the suffix {suffix!r} of indexes is that of the files themselves")
    indexes = FileSet.open(files.root, [suffix], names)
    borders, digest = [], hashlib.sha256()
    for number, length in enumerate(lengths):
        data = pathlib.Path(indexes.path(number)).read_bytes()
        digest.update(hashlib.sha256(data).digest())
        borders.append(_borders_of(data, length, f"index {indexes.names[number]}"))
    return borders, digest.hexdigest()


def _borders_of(data: bytes, length: int, what: str) -> Int64:
    if len(data) % 8:
        raise ValueError(
            f"{what} holds {len(data)} bytes, which is no whole number of int64 offsets; it is cut, "
            "or something else"
        )
    offsets = np.frombuffer(data, "<i8").astype(np.int64)
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] != 0:
        raise ValueError(f"{what} begins with the offset {offsets[0]}; the first document is at 0")
    if falling.size:
        entry = int(falling[0]) + 1
        raise ValueError(
            f"{what}, entry {entry}: the offset {offsets[entry]} comes after {offsets[entry - 1]}; "
            "documents must stand in the order of the file"
        )
    if offsets[-1] > length:
        entry = int(np.searchsorted(offsets, length, "right"))
        raise ValueError(
            f"{what}, entry {entry}: the offset {offsets[entry]} is beyond the {length} tokens of the "
            "file; they do not belong together, or offsets are in bytes and not in tokens"
        )
    return np.append(offsets, length)
