"""Readers of ArrayRecord files: opened when they are needed, a bounded number at a time, and checked."""

import logging
import re
import threading
from typing import Any, Final

from loader.progress import Work
from loader.reading.threads import Crew, in_order, usable_cores
from loader.sources.files import FileSet
from loader.sources.open_files import OpenFiles

_log: Final = logging.getLogger(__name__)

#: Neither read-ahead nor threads of its own, which reads of single records have no use for.
_OPTIONS: Final = "readahead_buffer_size:0,max_parallelism:0"


class Readers:
    """Readers of files, each of which keeps its file open."""

    def __init__(self, files: FileSet) -> None:
        self._files = files
        self._open = OpenFiles[Any]()
        self._lock, self._warned = threading.Lock(), False

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that a source can be sent to another process, which opens the files itself."""
        return type(self), (self._files,)

    def counts(self) -> list[int]:
        """How many records each file holds."""
        array_record()

        def count(number: int, _crew: Crew[int]) -> int:
            reader = self._opened(number, 0)
            found = reader.num_records()
            reader.close()
            work.advance()
            return int(found)

        what = f"opening the files in {self._files.root.name!r}"
        with Work(what, len(self._files), "files") as work:
            return in_order(count, len(self._files), 2 * usable_cores())

    def read(self, number: int, rows: list[int]) -> list[bytes]:
        """Records of one file, in one call."""
        reader = self._reader(number, rows[0])
        try:
            found: list[bytes] = reader.read(rows)
        except RuntimeError as error:
            self._open.drop(number)
            self._files.check(number, rows[0])
            row, why = self._failure(number, rows, error)
            raise ValueError(
                f"file {self._files.names[number]}, row {row}: it cannot be read, the file is damaged: {why}"
            ) from error
        self._files.check(number, rows[0])
        return found

    def _failure(
        self, number: int, rows: list[int], error: RuntimeError
    ) -> tuple[int, RuntimeError]:
        """The first row that cannot be read alone, and why."""
        for row in rows:
            try:
                self._opened(number, row).read([row])
            except RuntimeError as found:
                return row, found
        return rows[0], error

    def _reader(self, number: int, row: int) -> Any:
        reader = self._open.get(number)
        if reader is None:
            reader = self._opened(number, row)
            self._open.put(number, reader)
            with self._lock:
                self._warn_of_groups(number, reader)
        return reader

    def _opened(self, number: int, row: int) -> Any:
        reader = array_record().ArrayRecordReader(self._files.path(number), _OPTIONS)
        if not reader.ok():  # it says so, and no more, until something is read
            self._files.check(number, row)
            self._files.check_readable(number)
            raise ValueError(
                f"file {self._files.names[number]}, row {row}: it is no ArrayRecord file, is cut, or was "
                f"not closed by its writer: {_why(reader)}"
            )
        return reader

    def _warn_of_groups(self, number: int, reader: Any) -> None:
        size = re.search(r"group_size:(\d+)", reader.writer_options_string() or "")
        if size and size[1] != "1" and not self._warned:
            self._warned = True
            _log.warning(
                "file %s has %s records to a group, all of which are decoded to read one; write it with "
                "group_size:1 for random reads",
                self._files.names[number],
                size[1],
            )


def _why(reader: Any) -> str:
    try:
        reader.read([0])
    except (RuntimeError, IndexError) as error:
        return str(error)
    return "it cannot be opened"


def array_record() -> Any:
    """The module that reads and writes files; imported when it is first used."""
    from array_record.python import array_record_module  # noqa: PLC0415 (of the sources, one needs it)

    return array_record_module
