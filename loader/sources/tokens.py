"""Windows of token ids from files of tokens, such as nanoGPT's ``.bin``.

Files are memory-mapped: opening one costs the same at any size, and a batch reads only the pages of
its own windows.
"""

import hashlib
import json
import mmap
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import ColumnDigest
from loader.sources.digests import Cache
from loader.sources.documents import borders_by_index, borders_by_token
from loader.sources.file_source import FileSource
from loader.sources.files import Data, FileRows, FileSet, Names
from loader.sources.numbered import NumberedNames
from loader.sources.open_files import OpenFiles
from loader.sources.protocol import Field
from loader.sources.read_ahead import ReadAhead
from loader.sources.remembered import RememberedTexts
from loader.sources.token_files import DTYPES, TokenFile, token_files
from loader.sources.windows import Windows

Rest = Literal["drop", "pad"]
WindowIds = Literal["file:offset", "row"]

_BATCH_DTYPES: Final = ("int32", "int64", *DTYPES)
_MAX_COUNT: Final = 1 << 62
_OFFSET_ID: Final = re.compile(r"(.+):(0|[1-9][0-9]{0,17})", re.DOTALL)


class TokenSource(FileSource):
    """A `RecordSource` of windows of ``window + 1`` tokens: the inputs, and the targets one token later.

    Windows begin at every ``stride`` tokens of a stretch: a document where documents are told apart,
    else a whole file. None crosses the end of its stretch. With the stride of a window, which is the
    default, each token but the first of its stretch is a target once in an epoch. With ``stride=1``
    there is a window at every offset, and a shuffled stream of them is one of windows at random
    offsets, none of which comes twice in an epoch (which is ``window`` times as long).

    The fields of a record are ``tokens``, ``int32[window + 1]``, and with ``rest="pad"`` ``length``,
    int32: how many of the tokens are there; those after them are 0, and are no targets.

    Args:
      data: a file, or a folder with files somewhere below.
      window: how many tokens a model is trained on at once, at least 1.
      dtype: of the files: ``"uint8"``, ``"uint16"`` or ``"uint32"``, little-endian. By default the dtype
        in a file's header, and uint16 for a file without one.
      stride: tokens from one window's start to the next one's; by default ``window``.
      documents: how documents are told apart. ``None``: they are not, as in nanoGPT. A token id: that
        of the last token of each document; all files are read once to find it. A suffix such as
        ``".idx"``: beside ``shard-0.bin`` stands ``shard-0.idx``, flat little-endian int64: the
        offset, in tokens, at which each document begins. The first is 0, none is smaller than the one
        before it, and the last may be the file's number of tokens. A document takes 24 bytes of memory.
      rest: what becomes of the tokens after the last full window of a stretch. ``"drop"``: they are in
        no window. ``"pad"``: they are in one that begins a stride later, and is not full; a single
        token, which has no target, is in none.
      vocabulary: how many token ids there are. Each batch's tokens are checked against it: nothing
        else tells that the files are of another dtype.
      batch_dtype: of the field ``tokens``: int32, int64, or one that files may have.
      ids: ``"file:offset"``, such as ``shard-0.bin:1048576``: the file's name relative to the folder,
        and where in it the window begins, in tokens. ``"row"``: int64, the number over all files,
        which costs less.
      header_bytes: bytes before the first token of each file. By default the headers of ``.npy`` files and
        of llm.c's ``.bin`` files are read, and other files are flat tokens from their first byte. With a
        number no header is read.
      suffix: how the names of the folder's files end.
      names: of the folder's files, in the order wanted, or a pattern such as ``"train-*"``; by default
        all, sorted, unless they are of several splits.
      split: a word of the names of the files to read, such as ``"train"``.
      cache: where digests of files are kept, as for other sources of files; by default nowhere.

    Raises:
      FileNotFoundError, OSError: a file is not there, or cannot be read.
      TypeError, ValueError: a bad argument; a file that is empty, is not a whole number of tokens, is of
        another format or holds no window; an index that does not fit its file. Names the file.
    """

    def __init__(
        self,
        data: Data,
        window: int,
        *,
        dtype: str | None = None,
        stride: int | None = None,
        documents: int | str | None = None,
        rest: Rest = "drop",
        vocabulary: int | None = None,
        batch_dtype: str = "int32",
        ids: WindowIds = "file:offset",
        header_bytes: int | None = None,
        suffix: str = ".bin",
        names: Names = None,
        split: str | None = None,
        cache: Cache = None,
    ) -> None:
        window = _at_least_one("window", window)
        stride = window if stride is None else _at_least_one("stride", stride)
        _one_of("rest", rest, ("drop", "pad"))
        _one_of("ids", ids, ("file:offset", "row"))
        if dtype is not None:
            _one_of("dtype", dtype, DTYPES)
        if header_bytes is not None:
            header_bytes = _at_least("header_bytes", header_bytes, 0)
        self._batch_dtype = np.dtype(_one_of("batch_dtype", batch_dtype, _BATCH_DTYPES))
        self._width, self._pad = window + 1, rest == "pad"

        files = FileSet.open(data, [suffix], names, split)
        layouts = token_files(files, dtype, header_bytes)
        self._dtype = layouts[0].dtype
        self._limit = _limit(vocabulary, self._dtype, self._batch_dtype)
        documents = _documents(documents, self._dtype, self._limit)
        self._maps = _Maps(files, layouts, window + 1)
        lengths = [one.length for one in layouts]
        borders, index_digest = [np.array([0, length], np.int64) for length in lengths], None
        if isinstance(documents, str):
            borders, index_digest = borders_by_index(files, lengths, documents)
        elif documents is not None:
            borders = borders_by_token(files, self._maps.tokens, documents)
        self._windows = Windows.of(borders, self._width, stride, pad=self._pad)
        _check_windows(files, lengths, self._windows.counts, 2 if self._pad else self._width)

        fields = {"tokens": Field(self._batch_dtype, (self._width,))}
        if self._pad:
            fields["length"] = Field(np.dtype(np.int32))
        reading = {
            "format": "tokens",
            "dtype": self._dtype.name,
            "window": window,
            "stride": stride,
            "header_bytes": header_bytes,
        }
        reading |= {"documents": documents, "index": index_digest, "rest": rest}
        super().__init__(
            files, self._windows.counts, fields, ids="row", reading=reading, cache=cache
        )
        if ids == "file:offset":
            self._ids = _OffsetIds(files, lengths, self.file_rows, self._windows)

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape].

        Raises:
          IndexError: there is no such row.
          ValueError: a file has changed, or a token id is not in the vocabulary; names the file.
        """
        if len(self.files) == 1 and rows.size and not self._pad:  # the least that a batch costs
            self.file_rows.check(rows)
            self.files.check(0, int(rows[0]))
            mapped = self._maps[0]
            mapped.ahead.advise(rows)
            found = mapped.windows[self._windows.offsets(rows)]
            tokens = found.view(self._dtype).reshape(len(rows), self._width)
            return {"tokens": self._checked(tokens, rows)}
        groups = self.file_rows.groups(rows)
        starts, left = self._windows.place(rows)
        lengths = np.minimum(left, self._width)
        tokens = np.zeros((len(rows), self._width), self._dtype)
        for group in groups:
            self.files.check(group.file, int(group.rows[0]))
            mapped = self._maps[group.file]
            mapped.ahead.advise(rows)
            places = group.places
            each = zip(
                places.tolist(), starts[places].tolist(), lengths[places].tolist(), strict=True
            )
            for slot, start, length in each:
                tokens[slot, :length] = mapped.tokens[start : start + length]
        made = {"tokens": self._checked(tokens, rows)}
        return made | {"length": lengths.astype(np.int32)} if self._pad else made

    def read_file(self, number: int, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of some rows of one file, ``int64[k]``, as ``FileSource.read_file`` has it."""
        return self.read(rows + self.file_rows.starts[number])

    def rows_of(self, ids: npt.NDArray[Any], /) -> npt.NDArray[np.int64]:
        """Rows ``int64[k]`` of ``ids: str[k]`` or ``int64[k]``; -1 where no window has the ID."""
        if isinstance(self._ids, _OffsetIds):
            return self._ids.rows_of(ids)
        if ids.dtype.kind not in "iu":
            return np.full(ids.shape, -1, np.int64)
        return np.where((ids >= 0) & (ids < len(self)), ids, -1).astype(np.int64)

    def _checked(self, tokens: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The tokens of some rows as a batch holds them, if all are in the vocabulary."""
        if self._limit is not None and tokens.max(initial=0) >= self._limit:
            slot, place = np.argwhere(tokens >= self._limit)[0].tolist()
            row = rows[slot : slot + 1]
            [file], [start] = self.file_rows.locate(row)[0], self._windows.offsets(row)
            raise ValueError(
                f"file {self.files.names[file]}, offset {start + place}: there is the "
                f"token id {tokens[slot, place]}, and ids end before {self._limit}; the file is "
                f"damaged, has another dtype than {self._dtype.name}, or a larger vocabulary"
            )
        return tokens.astype(self._batch_dtype, copy=False)


class _Map(NamedTuple):
    """A file's tokens, memory-mapped for as long as one of the arrays lives.

    Attributes:
      tokens: dtype[n].
      windows: void[n - width + 1], the bytes of ``width`` tokens from each offset on; empty if there are
        fewer. NumPy gathers them in two thirds of the time that windows with an axis of tokens take.
      ahead: whether the system reads ahead in the file.
    """

    tokens: npt.NDArray[Any]
    windows: npt.NDArray[Any]
    ahead: ReadAhead


class _Maps:
    """Maps of files, each of which keeps its file open."""

    def __init__(self, files: FileSet, layouts: Sequence[TokenFile], width: int) -> None:
        self._files, self._layouts, self._width = files, layouts, width
        self._kept = OpenFiles[_Map]()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that a source can be sent to another process, which maps the files itself."""
        return type(self), (self._files, self._layouts, self._width)

    def __getitem__(self, number: int) -> _Map:
        kept = self._kept.get(number)
        return self._make(number) if kept is None else kept

    def _make(self, number: int) -> _Map:
        tokens, memory = self._mapped(number)
        size = tokens.dtype.itemsize
        count, width = max(len(tokens) - self._width + 1, 0), self._width * size
        windows: npt.NDArray[Any] = np.ndarray(
            count, np.dtype((np.void, width)), tokens, 0, (size,)
        )
        made = _Map(tokens, windows, ReadAhead(memory, width))
        self._kept.put(number, made)
        return made

    def tokens(self, number: int) -> npt.NDArray[Any]:
        """A file's tokens, in a map of their own."""
        return self._mapped(number)[0]

    def _mapped(self, number: int) -> tuple[npt.NDArray[Any], mmap.mmap]:
        layout = self._layouts[number]
        with open(self._files.path(number), "rb") as file:  # noqa: PTH123 (of 10,000 files)
            self._files.check(number, fd=file.fileno())
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(memory, layout.dtype, layout.length, layout.start), memory


class _OffsetIds:
    """IDs of windows that name file and offset: one each, as one window begins at an offset."""

    def __init__(
        self, files: FileSet, lengths: Sequence[int], rows: FileRows, windows: Windows
    ) -> None:
        self._rows, self._windows = rows, windows
        self._names = NumberedNames(files.names, np.array(lengths))
        self._texts = RememberedTexts(self._made, len(rows), rows.check)
        self._numbers = {name: number for number, name in enumerate(files.names)}
        digest = hashlib.sha256(json.dumps(["file:offset", files.names, windows.stride]).encode())
        for array in (windows.counts, windows.firsts, windows.starts):
            digest.update(array.astype("<i8").data)
        self.column: Final = ColumnDigest("str", (), "sha256:" + digest.hexdigest())

    def __call__(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[np.str_]:
        return self._texts(rows)

    def _made(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.str_]:
        files, _ = self._rows.locate(rows)
        return self._names(files, self._windows.offsets(rows))

    def rows_of(self, ids: npt.NDArray[Any], /) -> npt.NDArray[np.int64]:
        return np.array([self._row_of(one) for one in ids.tolist()], np.int64)

    def _row_of(self, one: Any) -> int:
        parts = _OFFSET_ID.fullmatch(one) if isinstance(one, str) else None
        number = self._numbers.get(parts[1]) if parts else None
        return -1 if parts is None or number is None else self._windows.row(number, int(parts[2]))


def _check_windows(
    files: FileSet, lengths: Sequence[int], counts: npt.NDArray[np.int64], needed: int
) -> None:
    without = np.flatnonzero(counts == 0)
    if without.size:
        number = int(without[0])
        more = f", nor have {without.size - 1} other files" if without.size > 1 else ""
        raise ValueError(
            f"file {files.names[number]} of {lengths[number]} tokens has no stretch of the {needed} "
            f'that a window needs{more}; leave it out, take a smaller window, or rest="pad"'
        )


def _limit(vocabulary: int | None, dtype: np.dtype[Any], batch_dtype: np.dtype[Any]) -> int | None:
    """What all token ids must be smaller than; ``None`` where they are in any case."""
    limit = int(np.iinfo(batch_dtype).max) + 1
    if vocabulary is not None:
        limit = min(limit, _at_least_one("vocabulary", vocabulary))
    return limit if limit <= np.iinfo(dtype).max else None


def _documents(documents: Any, dtype: np.dtype[Any], limit: int | None) -> int | str | None:
    if documents is None or isinstance(documents, str):
        return documents
    if isinstance(documents, bool) or not isinstance(documents, int | np.integer):
        raise TypeError(f"documents must be a token id, a suffix or None, not {documents!r:.80}")
    end = np.iinfo(dtype).max + 1 if limit is None else limit
    if not 0 <= documents < end:
        raise ValueError(f"documents must be a token id from 0 to {end - 1}, not {documents}")
    return int(documents)


def _at_least_one(name: str, value: Any) -> int:
    return _at_least(name, value, 1)


def _at_least(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, not {value!r:.80}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if value > _MAX_COUNT:
        raise ValueError(f"{name} must be at most 2**62, and is larger")
    return int(value)


def _one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r:.80}"
        )
    return str(value)
