"""What a fingerprint says of files: one digest of all, and marks that tell which of them differ.

A file's mark is of its name, size, number of records and digest. For more than 2,048 files a mark is of
two, four, ... of them, made of the marks of its halves, so that marks of single files, where somebody
still has them, can be compared with those of many.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from loader.identity.marks import Marked, changes_in_words

MAX_MARKS: Final = 2048

_MARK_HEX: Final = 12  # 48 bits: a mark only places a difference that the whole digest has shown
_MAX_READING_BYTES: Final = 1 << 14
_NAMED: Final = 8
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_MARKS: Final = re.compile(r"([0-9a-f]{12}){1,2048}")


class FileEntry(NamedTuple):
    """A file's name, size in bytes, number of records, and digest, 64 hex digits."""

    name: str
    size: int
    records: int
    digest: str


@dataclasses.dataclass(frozen=True)
class FileMarks:
    """Identity of the files of a data set, in order, and of how records are read from them.

    Attributes:
      num_files: how many files.
      digest: ``sha256:`` + 64 hex digits, over their entries.
      files_per_mark: files to a mark, a power of two.
      marks: 12 hex digits for each so many files, all in one string.
      reading: settings that decide what a record is; small JSON values.
      single: by name, a mark of each file, where they were looked at; neither compared nor stored.
    """

    num_files: int
    digest: str
    files_per_mark: int
    marks: str = dataclasses.field(repr=False)
    reading: Mapping[str, Any]
    single: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, entries: Iterable[FileEntry], reading: Mapping[str, Any]) -> Self:
        """From all files.

        Raises:
          TypeError, ValueError: the settings are no JSON, or more than 16 KiB of it.
        """
        settings = json.dumps(reading, sort_keys=True, allow_nan=False)
        if len(settings) > _MAX_READING_BYTES:
            raise ValueError(
                f"settings of {len(settings)} bytes are too large for a fingerprint; give their digest"
            )
        whole = hashlib.sha256()
        single, marks = {}, []
        for entry in entries:
            one = hashlib.sha256(json.dumps(entry).encode())
            whole.update(one.digest())
            marks.append(one.hexdigest()[:_MARK_HEX])
            single[entry.name] = marks[-1]
        per = 1
        while -(-len(marks) // per) > MAX_MARKS:
            per *= 2
        digest = "sha256:" + whole.hexdigest()
        text = "".join(coarser(marks, per))
        return cls(len(marks), digest, per, text, json.loads(settings), single)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, at most 40 KiB. `from_dict` is the inverse."""
        value = dataclasses.asdict(self)
        del value["single"]
        return value

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` wrote.

        Raises:
          KeyError, TypeError, ValueError: a value is missing or of the wrong kind.
        """
        counts = value["num_files"], value["files_per_mark"]
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(
                f"not a fingerprint: {counts} are not the numbers of files and of files to a mark"
            )
        digest, marks, reading = value["digest"], value["marks"], value["reading"]
        if not _DIGEST.fullmatch(digest) or not _MARKS.fullmatch(marks):
            raise ValueError("not a fingerprint: the digest and marks of files are not hex digits")
        if len(marks) // _MARK_HEX != -(-counts[0] // counts[1]) or counts[1] & (counts[1] - 1):
            raise ValueError(
                f"not a fingerprint: {len(marks) // _MARK_HEX} marks of {counts[1]} files do not cover {counts[0]} files"
            )
        if not isinstance(reading, Mapping):
            raise TypeError(f"{reading!r:.80} are no settings")
        return cls(counts[0], digest, counts[1], marks, dict(reading))

    def setting(self, name: str) -> str:
        """One of the settings, as text."""
        return json.dumps(self.reading[name]) if name in self.reading else "absent"

    def compared(
        self,
        other: "FileMarks",
        names: Sequence[str] | None = None,
        single: Sequence[str] | None = None,
    ) -> str:
        """Which files differ in ``other`` (now) from this one (then), as far as the marks tell.

        Args:
          other: the later one.
          names: of the files of ``other``; others are left unused, as where they are not known.
          single: marks of the single files of ``other``, from `marks_of`.
        """
        if self.digest == other.digest:
            return ""
        known = names if names is not None and len(names) == other.num_files else None
        per = max(self.files_per_mark, other.files_per_mark)
        marks = _split(other.marks)
        if single is not None and len(single) == other.num_files:
            per, marks = self.files_per_mark, coarser(single, self.files_per_mark)
        else:
            single = None
            marks = coarser(marks, per // other.files_per_mark)

        def mark_of(start: int, stop: int) -> str | None:
            return None if single is None else coarser(single[start:stop], per)[0]

        before = Marked(
            coarser(_split(self.marks), per // self.files_per_mark), per, self.num_files
        )
        after = Marked(marks, per, other.num_files)
        return changes_in_words(before, after, _FileNames(known, per), mark_of)


@dataclasses.dataclass(frozen=True)
class _FileNames:
    """Files by name, or by number if the names are not known."""

    names: Sequence[str] | None
    per: int
    thing: str = "file"
    edited: str = "edited"
    before_span: str = ""

    @property
    def chunks(self) -> str:
        return f"groups of {self.per} files"

    def some(self, places: Sequence[int], *, now: bool) -> str:
        few = ", ".join(self._name(place, now=now) for place in places[:_NAMED])
        return few + (", ..." if len(places) > _NAMED else "")

    def span(self, first: int, last: int, *, now: bool) -> str:
        one, other = self._name(first, now=now), self._name(last, now=now)
        return one if one == other else f"{one} to {other}"

    def _name(self, place: int, *, now: bool) -> str:
        return self.names[place] if now and self.names is not None else f"number {place}"


def marks_of(entries: Iterable[FileEntry]) -> list[str]:
    """A mark for each file, for `FileMarks.compared`."""
    return [hashlib.sha256(json.dumps(entry).encode()).hexdigest()[:_MARK_HEX] for entry in entries]


def coarser(marks: Sequence[str], times: int) -> list[str]:
    """Marks of so many times as many files each; ``times`` is a power of two."""
    found = list(marks)
    while times > 1:
        pairs = ("".join(found[i : i + 2]) for i in range(0, len(found), 2))
        found = [hashlib.sha256(pair.encode()).hexdigest()[:_MARK_HEX] for pair in pairs]
        times //= 2
    return found


def _split(marks: str) -> list[str]:
    return [marks[i : i + _MARK_HEX] for i in range(0, len(marks), _MARK_HEX)]
