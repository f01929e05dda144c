"""Files that an Arrow table is memory-mapped from: whether they are what they were, sound, and which holds a row.

Arrow takes what such a file says of itself on trust: an offset that leads out of the data has it read
elsewhere in memory, end the program, or go on for hours. So offsets are looked at before they are used.
"""

import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from loader.sources.extras import needed
from loader.sources.files import FileState

_CHECKED: Final = 4


class ArrowFiles:
    """The files of a table, a few of which are looked at in each read.

    Args:
      paths: in the order of the table's rows.
      num_rows: of the table.
    """

    def __init__(self, paths: Sequence[str], num_rows: int) -> None:
        self._paths, self._num_rows = list(paths), num_rows
        self._states = [(path, FileState.of(os.stat(path))) for path in dict.fromkeys(paths)]  # noqa: PTH116
        self._next = 0

    def __bool__(self) -> bool:
        """Whether there are any: a table may be in memory."""
        return bool(self._paths)

    def check(self) -> None:
        """Checks that some of the files are what they were.

        Raises:
          ValueError: one has changed, or is gone; names it.
        """
        for _ in range(min(_CHECKED, len(self._states))):
            self._next = (self._next + 1) % len(self._states)
            path, before = self._states[self._next]
            try:
                now = FileState.of(os.stat(path))  # noqa: PTH116
            except OSError as error:
                raise ValueError(
                    f"file {path} of the data set is gone: {error.strerror}"
                ) from error
            if now != before:
                raise ValueError(
                    f"file {path} of the data set has changed: {before}; now {now}. Records are no longer "
                    "those that were loaded; load the data set again, and resume from a checkpoint"
                )

    def place(self, row: int) -> str:
        """Names the file that a row of the table stands in, and its row there; ``""`` where nothing tells."""
        for path, start, stop in self._stretches:
            if start <= row < stop:
                return f"file {path}, row {row - start}"
        return ""

    def in_brackets(self, row: int) -> str:
        """The same, to be put after something else."""
        place = self.place(row)
        return place and f" ({place})"

    @functools.cached_property
    def _stretches(self) -> list[tuple[str, int, int]]:
        """Each file, with the table's rows that it holds; none where they are not put together so."""
        try:
            counts = [_num_rows(path) for path in self._paths]
        except (OSError, needed("pyarrow", "huggingface").ArrowException):
            return []
        ends = list(itertools.accumulate(counts, initial=0))
        if ends[-1] != self._num_rows:
            return []
        return list(zip(self._paths, ends, ends[1:], strict=False))


def check_sound(array: Any, what: Callable[[], str]) -> None:
    """Checks that the offsets of an Arrow array lead nowhere but to its data; looks at no text.

    Args:
      array: from a file.
      what: names it.

    Raises:
      ValueError: they do not, so that no value of it can be read.
    """
    pa = needed("pyarrow", "huggingface")
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # As bytes, of which the offsets alone are looked at: each text is when it is read.
        array = array.view(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    try:
        array.validate(full=True)
    except pa.ArrowException as error:
        raise ValueError(f"{what()} is damaged, and none of it is read: {error}") from error


def file_at_fault(folder: str) -> str:
    """The file for which a data set in a folder cannot be loaded; ``"one of its files"`` if none is found."""
    paths = sorted(entry.path for entry in os.scandir(folder) if entry.is_file())
    for path in paths:
        try:
            if path.endswith(".arrow"):
                _num_rows(path, needed("datasets", "huggingface").Features.from_arrow_schema)
            elif path.endswith(".json"):
                json.loads(pathlib.Path(path).read_bytes())
        except Exception:  # noqa: BLE001 (whatever a damaged file has its parsers raise)
            return f"file {path}"
    return "one of its files"


def _num_rows(path: str, check_schema: Callable[[Any], object] | None = None) -> int:
    pa = needed("pyarrow", "huggingface")
    with pa.memory_map(path) as mapped, pa.ipc.open_stream(mapped) as stream:
        if check_schema is not None:
            check_schema(stream.schema)
        return sum(batch.num_rows for batch in stream)
