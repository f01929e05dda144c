"""The files that a source reads: which they are, in which order, and whether they still are what they were.

Files are known by their names relative to a root, in POSIX form, so that moving the data to another
path changes nothing. Their order is fixed: sorted by name, or as the caller gave it.
"""

import dataclasses
import fnmatch
import itertools
import logging
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from loader.errors import DataChangedError
from loader.progress import Work

#: What a source takes as its data: one file, or a folder with files somewhere below.
Data = str | os.PathLike[str]

#: Which of a folder's files a source reads: their names, or a pattern of them; by default all.
Names = str | Sequence[str] | None

_MAX_DEPTH: Final = 64
_SHARD: Final = re.compile(r"-[0-9]+-of-[0-9]+$")
_NUMBERED: Final = re.compile(r"-([0-9]{1,9})-of-([0-9]{1,9})(?=\.|$)")
_MAX_SHARDS: Final = 1 << 20
_SPLITS: Final = frozenset({"train", "val", "valid", "validation", "dev", "test", "eval"})
_NOT_A_WORD: Final = re.compile(r"[^a-z]+")
#: A folder of a partitioned table, such as ``year=2026/``.
_PARTITION: Final = re.compile(r"(?:^|/)([^/=]+)=[^/]*(?=/)")
_TABLE_LOGS: Final = ("_delta_log", "_hudi", ".hoodie")
_log: Final = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FileState:
    """What the file system says of a file; another one means that its bytes may be others.

    Attributes:
      size: in bytes.
      mtime_ns: when its bytes were last changed, in nanoseconds.
      inode: its number in the file system; another one where it was replaced.
      ctime_ns: when anything about it was last changed. Only `is_exactly` looks at it: nobody can set
        it back, but a new link or other permissions move it too.
    """

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int = dataclasses.field(compare=False)

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """From what ``os.stat`` gives."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)

    def is_of(self, found: os.stat_result) -> bool:
        """Whether what ``os.stat`` gives is equal to this: once for each batch, so nothing is made for it."""
        return (
            found.st_mtime_ns == self.mtime_ns
            and found.st_size == self.size
            and found.st_ino == self.inode
        )

    def is_exactly(self, other: Self) -> bool:
        """Whether all of it is the same: then not even an edit that set the time back was made."""
        return self == other and self.ctime_ns == other.ctime_ns

    def __str__(self) -> str:
        return f"{self.size} bytes, mtime_ns {self.mtime_ns}, inode {self.inode}"


@dataclasses.dataclass(frozen=True, eq=False)
class FileSet:
    """Files below one folder, in a fixed order, as they were when they were looked at.

    Attributes:
      root: the folder; where it is does not matter to any file's name.
      names: of each file, relative to the root, with ``/`` between its parts; none comes twice.
      states: of each file, in the same order.
    """

    root: pathlib.Path
    names: tuple[str, ...]
    states: tuple[FileState, ...]

    @classmethod
    def open(
        cls,
        data: Data,
        suffixes: Sequence[str],
        names: Names = None,
        split: str | None = None,
    ) -> Self:
        """Looks at the files of a data set, and reads none of them.

        Args:
          data: a file, whatever its name, or a folder.
          suffixes: how the names of a folder's files end, such as ``[".parquet"]``; after it may stand
            which shard it is, as in ``x.parquet-00001-of-00008``. Files and folders whose names begin
            with a dot or an underscore are left out. Links are followed.
          names: of the files in the folder, in the order wanted; or a pattern such as ``"train-*"``, in
            which ``*`` stands for any text. By default all files, sorted.
          split: a word of the names of the files to read, such as ``"train"``.

        Raises:
          FileNotFoundError: there is no such file or folder.
          TypeError: the data, names or split are none.
          ValueError: no file is found, the files are of several splits or of partitions and neither names
            nor split chooses among them, a name leads out of the folder or comes twice, something is not a
            file, or links lead round in a circle.
          OSError: a file or folder cannot be looked at.
        """
        if not isinstance(data, str | os.PathLike):
            raise TypeError(
                f"data must be the path of a file or folder, not {data!r:.80}; several files of a folder are "
                "given as names"
            )
        if not isinstance(names, Iterable | None):
            raise TypeError(
                f"names must be a list of names of files, or a pattern, not {names!r:.80}"
            )
        if split is not None and (not isinstance(split, str) or not words_of(split)):
            raise TypeError(f'split must be a word such as "train", not {split!r:.80}')
        path = pathlib.Path(data).absolute()  # wherever the program changes to
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {str(path)!r}")
        if path.is_dir():
            root = path
            if names is None or isinstance(names, str):
                names = _found(path, suffixes, names, split)
            elif split is not None:
                raise ValueError("split and a list of names both choose files; give one of them")
        else:
            if names is not None or split is not None:
                raise ValueError(
                    f"{str(path)!r} is a file: names and split choose among a folder's"
                )
            root, names = path.parent, [path.name]
        checked = tuple(checked_name(name) for name in names)
        if not checked:
            raise ValueError("names holds no name of a file")
        _check_once(checked)
        states = []
        with Work(f"looking at the files in {root.name!r}", len(checked), "files") as work:
            for name in checked:
                states.append(_look_at(root, name))
                work.advance()
        return cls(root, checked, tuple(states))

    def __len__(self) -> int:
        """How many files."""
        return len(self.names)

    def path(self, number: int) -> str:
        """Where file ``number`` is now."""
        return f"{os.fspath(self.root)}/{self.names[number]}"

    def check(self, number: int, row: int | None = None, *, fd: int | None = None) -> None:
        """Checks that a file is what it was when the set was opened.

        Costs one call of the system, some 2 us. It sees what the file system tells: an edit changes a
        file's size or time.

        Args:
          number: of the file.
          row: in the file, of a record that is about to be read, for the message.
          fd: the file, opened; by default whatever is now at its path.

        Raises:
          DataChangedError: it has changed, or is gone; names the file and the row.
        """
        try:
            now = os.stat(self.path(number) if fd is None else fd)  # noqa: PTH116
        except OSError as error:
            self._raise(number, row, f"cannot be looked at any more ({error.strerror})")
        state = self.states[number]
        if not state.is_of(now):
            self._raise(number, row, f"has changed: {state}; now {FileState.of(now)}")

    def check_readable(self, number: int) -> None:
        """Checks that a file can be opened: where it cannot, what it holds is not to blame.

        Raises:
          OSError: it may not be read, or too many files are open; names it.
        """
        try:
            with open(self.path(number), "rb"):  # noqa: PTH123 (the path is a text)
                pass
        except OSError as error:
            raise OSError(
                error.errno, f"file {self.names[number]} cannot be read: {error.strerror}"
            ) from error

    def _raise(self, number: int, row: int | None, what: str) -> NoReturn:
        at = "" if row is None else f", row {row}"
        raise DataChangedError(
            f"file {self.names[number]}{at}: it {what}. Records are no longer those that were "
            "opened; open the source again, and resume from a checkpoint, which compares them"
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of one file, to be read in one call.

    Attributes:
      file: its number.
      rows: in the file, ``int64[m]``, rising.
      places: ``int64[m]``, where each of them stands among the rows that were asked for.
    """

    file: int
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class FileRows:
    """Which file holds a row.

    Attributes:
      starts: ``int64[num_files + 1]``: the first row of each file, and at the end how many rows there are.
    """

    starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, files: FileSet, counts: Sequence[int] | npt.NDArray[np.int64]) -> Self:
        """From how many records each file holds.

        Raises:
          ValueError: a file holds none, or there are more than an int64 can count; names the file.
        """
        counted = np.asarray(counts, np.int64)
        empty = np.flatnonzero(counted <= 0)
        if empty.size:
            more = f", and {empty.size - 1} more" if empty.size > 1 else ""
            raise ValueError(
                f"file {files.names[int(empty[0])]}{more} holds no record; leave it out, or mend it"
            )
        starts = np.zeros(len(counted) + 1, np.int64)
        np.cumsum(counted, out=starts[1:])
        if starts[-1] != sum(counted.tolist()):
            raise ValueError("the files hold more records than an int64 can count")
        return cls(starts)

    def __len__(self) -> int:
        """How many records, in all files."""
        return int(self.starts[-1])

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Records of each file, ``int64[num_files]``."""
        return np.diff(self.starts)

    def check(self, rows: npt.NDArray[np.int64]) -> None:
        """Checks that there are ``rows: int64[k]``.

        Raises:
          IndexError: there is no such row.
        """
        if rows.size == 0:
            return
        # Once a batch. Without a sign, what is below 0 is beyond all others; and where the largest is
        # NumPy tells in a fifth of the time that it takes to tell which it is.
        unsigned = rows.astype(np.uint64)
        if unsigned.item(unsigned.argmax()) >= len(self):
            raise IndexError(f"rows run from 0 to {len(self) - 1}, and these are {rows}")

    def locate(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For ``rows: int64[k]`` of the source, file numbers ``int64[k]`` and rows in them ``int64[k]``.

        Raises:
          IndexError: there is no such row.
        """
        self.check(rows)
        if len(self.starts) == 2:
            return np.zeros(rows.shape, np.int64), rows
        files = self.starts.searchsorted(rows, "right") - 1
        return files, rows - self.starts.take(files)

    def groups(self, rows: npt.NDArray[np.int64]) -> list[Group]:
        """``rows: int64[k]`` of the source, grouped by file.

        Raises:
          IndexError: there is no such row.
        """
        self.check(rows)
        by_row = np.argsort(rows, kind="stable")
        rising = rows[by_row]
        files = np.searchsorted(self.starts, rising, "right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(rows)]
        return [
            Group(file, rising[low:high] - self.starts[file], by_row[low:high])
            for low, high in itertools.pairwise(cuts)
            if low < high
            for file in [int(files[low])]
        ]


def checked_name(name: Any) -> str:
    """A file's name, as it may stand in a list of files, relative to a folder and inside it.

    Raises:
      ValueError: it is empty or absolute, leads out of the folder, or is no valid Unicode.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a file's name must be a string that is not empty, not {name!r:.200}")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise ValueError(
            f"{name!r:.200} is no name of a file inside the folder: it must be relative, with single "
            "slashes and without . and .."
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {name!r:.200} is not UTF-8; rename the file") from error
    return name


def words_of(name: str) -> frozenset[str]:
    """The words in a file's name: its runs of letters, in lower case."""
    return frozenset(_NOT_A_WORD.split(name.lower())) - {""}


def check_one_split(names: Iterable[str], where: str, how: str, chosen: str = "") -> None:
    """Checks that names are not of several splits, such as train and test.

    Names without such a word may be among them.

    Args:
      names: of files.
      where: the folder, for the message.
      how: to choose among them, for the message.
      chosen: the split that was chosen, whose words all names have.

    Raises:
      ValueError: names differ in the words that name splits; lists them.
    """
    examples: dict[frozenset[str], str] = {}
    for name in names:
        if words := (words_of(name) & _SPLITS) - words_of(chosen):
            examples.setdefault(words, name)
    if len(examples) > 1:
        found = ", ".join(f"{'/'.join(sorted(words))} ({name})" for words, name in examples.items())
        raise ValueError(
            f"{where} holds files of several splits: {found}. Read together, data that is held out would be "
            f"trained on; {how}"
        )


def _found(
    root: pathlib.Path, suffixes: Sequence[str], pattern: str | None, split: str | None
) -> list[str]:
    """The names of a folder's files, sorted."""
    where = repr(str(root))
    every = sorted(_below(root, "", tuple(suffixes), ()))
    if not every:
        raise ValueError(
            f"{where} holds no file {' or '.join(suffixes)} (names that begin with . or _ are left out)"
        )
    names = every
    if pattern is not None:
        names = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if split is not None:
        names = [name for name in names if words_of(split) <= words_of(name)]
    if not names:
        wanted = " and ".join(
            f"{kind} {value!r}" for kind, value in (("names", pattern), ("split", split)) if value
        )
        listed = ", ".join(every[:5]) + (f", and {len(every) - 5} more" if len(every) > 5 else "")
        raise ValueError(f"{where} holds no file for {wanted}; it holds {listed}")
    if pattern is None:
        check_one_split(
            names,
            where,
            'choose one, such as split="train", or give names, a list or a pattern; names="*" reads all',
            split or "",
        )
        _check_not_partitioned(where, names)
        _warn_of_log(root)
    _warn_of_missing(root, names)
    return names


def _check_not_partitioned(where: str, names: Sequence[str]) -> None:
    for name in names:
        if columns := _PARTITION.findall(name):
            raise ValueError(
                f"{where} is a partitioned table: the values of {' and '.join(map(repr, columns))} are in the names "
                f"of folders, as in {name}, which are not read. Write the column to the files, give the folder of "
                'one partition, or read all without the column: names="*"'
            )


def _warn_of_log(root: pathlib.Path) -> None:
    for log in _TABLE_LOGS:
        if (root / log).is_dir():
            _log.warning(
                "%s is a table with a log, %s, which is not read: files of older versions are read too. Give "
                "names, those of the version wanted",
                root,
                log,
            )


def _below(
    folder: pathlib.Path, prefix: str, suffixes: tuple[str, ...], above: tuple[tuple[int, int], ...]
) -> Iterator[str]:
    found = folder.stat()
    here = found.st_dev, found.st_ino
    if here in above or len(above) > _MAX_DEPTH:
        raise ValueError(f"links in {str(folder)!r} lead round in a circle")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "_")):
                continue
            if entry.is_dir():
                inner = folder / entry.name
                yield from _below(inner, f"{prefix}{entry.name}/", suffixes, (*above, here))
            elif _SHARD.sub("", entry.name).endswith(suffixes):
                yield prefix + entry.name


def _warn_of_missing(root: pathlib.Path, names: Sequence[str]) -> None:
    """Warns where names such as ``x-00001-of-00008.parquet`` tell of files that are not there."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if of := _NUMBERED.search(name):
            place = name[: of.start()], of[2], name[of.end() :]
            found.setdefault(place, set()).add(int(of[1]))
    for (before, of_all, after), numbers in found.items():
        total = int(of_all)
        first = int(total in numbers and 0 not in numbers)  # some count from 1
        missing = sorted(set(range(first, first + min(total, _MAX_SHARDS))) - numbers)
        if missing and len(numbers) < total:
            _log.warning(
                "%s: %d of the %d files %s-*-of-%s%s are there; missing is %s%s. The data set is what is there: "
                "give names, if that is meant",
                root,
                len(numbers),
                total,
                before,
                of_all,
                after,
                f"{before}-{missing[0]:0{len(of_all)}}-of-{of_all}{after}",
                "" if len(missing) == 1 else f", and {len(missing) - 1} more",
            )


def _check_once(names: tuple[str, ...]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"file {twice} is named twice; its records would be too")


def _look_at(root: pathlib.Path, name: str) -> FileState:
    try:
        found = os.stat(f"{os.fspath(root)}/{name}")  # noqa: PTH116 (of 10,000 files)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {name!r} in {str(root)!r}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name!r} in {str(root)!r} is not a file")
    if found.st_size == 0:
        raise ValueError(f"file {name} in {str(root)!r} is empty; leave it out, or mend it")
    return FileState.of(found)
