"""Files that an Arrow table is memory-mapped from: whether they are what they were, sound, and which holds a row.

Arrow takes what such a file says of itself on trust: an offset that leads out of the data has it read
elsewhere in memory, end the program, or go on for hours. So offsets are looked at before they are used.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from loader.errors import DataChangedError
from loader.sources.extras import needed
from loader.sources.files import FileState

_CHECKED: Final = 4


class Stretch(NamedTuple):
    """Rows of a table that come from the same file; from several, where columns are side by side; or from none.

    Attributes:
      num_rows: how many.
      paths: of the files; none where the rows are in memory.
      first: the row in the file at which they begin; ``None`` where that is not known.
    """

    num_rows: int
    paths: tuple[str, ...]
    first: int | None


class ArrowFiles:
    """The files of a table: those that a read takes rows from are looked at, and a few more.

    Args:
      stretches: of the table, in order.
      others: files that all reads need.
    """

    def __init__(self, stretches: Sequence[Stretch], others: Sequence[str] = ()) -> None:
        self._stretches = list(stretches)
        self._starts = np.cumsum([0, *(one.num_rows for one in stretches)])
        paths = [path for one in stretches for path in one.paths]
        self._states = {
            path: FileState.of(os.stat(path))  # noqa: PTH116
            for path in dict.fromkeys([*others, *paths])
        }
        self._files, self._next = list(dict.fromkeys(paths)), 0
        self._others = [path for path in others if path not in paths]

    @classmethod
    def of(cls, table: Any, others: Sequence[str] = ()) -> Self:
        """From a table of ``datasets``."""
        rows = getattr(table, "blocks", None) or [[table]]
        return cls([_stretch(blocks) for blocks in rows], others)

    def __bool__(self) -> bool:
        """Whether there are any: a table may be in memory."""
        return bool(self._files)

    def check_others(self) -> None:
        """Checks that the files that all reads need are what they were.

        Raises:
          ValueError: as `check`.
        """
        for path in self._others:
            self._check(path)

    def check(self, rows: npt.NDArray[np.int64]) -> None:
        """Checks that the files of ``rows: int64[k]`` of the table are what they were, and a few more.

        To read what is memory-mapped and no longer there would end the program.

        Raises:
          ValueError: one has changed, or is gone; names it.
        """
        paths = set()
        if len(self._files) > _CHECKED:
            found = self._starts.searchsorted(rows, "right") - 1
            for number in set(found.tolist()):
                paths.update(self._stretches[number].paths)
        for _ in range(min(_CHECKED, len(self._files))):
            self._next = (self._next + 1) % len(self._files)
            paths.add(self._files[self._next])
        for path in paths:
            self._check(path)

    def _check(self, path: str) -> None:
        before = self._states[path]
        try:
            now = os.stat(path)  # noqa: PTH116
        except OSError as error:
            raise DataChangedError(
                f"file {path} of the data set is gone: {error.strerror}"
            ) from error
        if not before.is_of(now):
            raise DataChangedError(
                f"file {path} of the data set has changed: {before}; now {FileState.of(now)}. Records are no "
                "longer those that were loaded; load the data set again, and resume from a checkpoint"
            )

    def place(self, row: int) -> str:
        """Names the file that a row of the table stands in, and its row there; ``""`` if it is in memory."""
        number = int(self._starts.searchsorted(row, "right")) - 1
        if not 0 <= number < len(self._stretches) or not self._stretches[number].paths:
            return ""
        stretch = self._stretches[number]
        file = f"file {' or '.join(stretch.paths)}"
        if stretch.first is None:
            return file
        return f"{file}, row {stretch.first + row - int(self._starts[number])}"

    def in_brackets(self, row: int) -> str:
        """The same, to be put after something else."""
        place = self.place(row)
        return place and f" ({place})"


def _stretch(blocks: Sequence[Any]) -> Stretch:
    """From blocks of ``datasets``, whose columns are side by side."""
    files = [block for block in blocks if getattr(block, "path", None)]
    firsts = {_first_row(block) for block in files}
    paths = tuple(dict.fromkeys(os.fspath(block.path) for block in files))
    return Stretch(blocks[0].num_rows, paths, firsts.pop() if len(firsts) == 1 else None)


def _first_row(block: Any) -> int | None:
    """Where in its file a block begins: what was done to it since is written down, and may be a slice."""
    done = getattr(block, "replays", None) or []
    try:
        return sum(int(arguments[0]) for name, arguments, _ in done if name == "slice")
    except (IndexError, TypeError, ValueError):
        return None


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
                _check_arrow(path)
            elif path.endswith(".json"):
                json.loads(pathlib.Path(path).read_bytes())
        except Exception:  # noqa: BLE001 (whatever a damaged file has its parsers raise)
            return f"file {path}"
    return "one of its files"


def _check_arrow(path: str) -> None:
    """Raises for an Arrow file that cannot be read, of whatever kind the fault is."""
    pa = needed("pyarrow", "huggingface")
    with pa.memory_map(path) as mapped, pa.ipc.open_stream(mapped) as stream:
        needed("datasets", "huggingface").Features.from_arrow_schema(stream.schema)
        for _ in stream:
            pass
