"""What a stream is known by, where it stands and what comes next: the values that a checkpoint keeps of it."""

import abc
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from loader.batching import Position, Segment
from loader.identity.differences import Difference, in_print
from loader.identity.fingerprint import Fingerprint
from loader.identity.json_form import shallow
from loader.streams.turns import Turns

_NEXT_KINDS: Final = frozenset({"ids", "digest", "end", "error", "refused"})


class StreamIdentity(abc.ABC):
    """Everything about a stream that must be the same again at a resume.

    Attributes:
      kind: the kind of the stream, such as ``"pipeline"``.
      may_change: names of differences that a run can go on with, if the user allows them.
    """

    kind: str
    may_change: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The identity as plain JSON values, without its kind."""

    @classmethod
    @abc.abstractmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
          AttributeError, KeyError, TypeError, ValueError: it is something else.
        """

    @abc.abstractmethod
    def diff(self, now: Self) -> list[Difference]:
        """Return everything in which ``now`` differs from this identity, that of a checkpoint."""

    @property
    def title(self) -> str:
        """The kind of the stream in words, for messages."""
        return f"a {self.kind}"

    def setting(self, name: str) -> Any:
        """The value of a setting in ``may_change``."""
        return self.to_dict().get(name)

    def with_config(self, config: Any) -> "StreamIdentity":
        """The identity of the same stream under another `PipelineConfig`.

        Raises:
          ValueError: the stream has no such config.
        """
        del config
        raise ValueError(
            f"it is of {self.title}, which has no config of its own to compare with: compare with the stream itself"
        )

    def report(self) -> dict[str, Any]:
        """The identity as JSON values for people and scripts, without the marks of the data."""
        return self.to_dict()

    def derivation(self, history: Sequence[Mapping[str, Any]], where: str) -> "Derivation":
        """From what the batches of a run can be derived again, without the stream.

        Args:
          history: the changes on the way, as a manifest holds them.
          where: names the run, for messages.

        Raises:
          ValueError: they cannot be derived, or the changes do not lead to this identity.
        """
        del history
        raise ValueError(
            f"{where} is of {self.title}, whose order cannot be derived: iterate it again, or keep a step log"
        )


@dataclasses.dataclass(frozen=True)
class Derivation:
    """From what the batches of a run can be derived.

    Attributes:
      parts: by the name of a mixture's part, ``""`` for a pipeline: the segments of the run, and the data.
      turns: of a mixture; else ``None``.
    """

    parts: Mapping[str, tuple[list[Segment], Fingerprint]]
    turns: Turns | None = None

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run if nothing changes any more; ``None`` without end."""
        ends = []
        for name, (segments, _) in self.parts.items():
            last = segments[-1]
            if last.num_steps is not None:
                end = last.start.step + last.num_steps
                ends.append(end if self.turns is None else self.turns.step_of(name, end))
        return min(ends, default=None)


@dataclasses.dataclass(frozen=True)
class PlainIdentity(StreamIdentity):
    """The identity of a stream that is known by JSON values alone, or whose kind is not known here.

    Attributes:
      kind: the kind of the stream.
      values: by name, whatever decides the stream.
    """

    kind: str
    values: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The values."""
        return dict(self.values)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; the kind is in it too."""
        values = dict(shallow(value))
        return cls(typed(values.pop("kind"), str), values)

    def diff(self, now: "PlainIdentity") -> list[Difference]:
        """Compare value by value."""
        return list(diff_mappings("", self.values, now.values))


def diff_identities(before: StreamIdentity, now: StreamIdentity) -> list[Difference]:
    """Return everything in which a stream at hand differs from that of a checkpoint."""
    if before.kind != now.kind:
        return [Difference("stream", before.title, now.title)]
    return read_as(now, before).diff(now)


def read_as(now: StreamIdentity, before: StreamIdentity) -> StreamIdentity:
    """A checkpoint's identity in the class of that at hand, which is of the same kind."""
    if type(before) is type(now):
        return before
    return type(now).from_dict({"kind": before.kind, **before.to_dict()})


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What comes next in a stream.

    Attributes:
      kind: ``"ids"``; ``"digest"`` of an element without IDs; ``"end"``; ``"error"``, if the next
        element could not be made; ``"refused"``, if the stream does not take the place's state.
      ids: of up to 64 records, padding left out.
      digest: of the next element; or the error.
    """

    kind: str
    ids: tuple[int | str, ...] = ()
    digest: str = ""

    def diff(self, now: "Ahead", note: str = "") -> list[Difference]:
        """Compare with what comes next now.

        Args:
          now: what comes next.
          note: where in the stream.
        """
        if self == now or self.kind == "error":
            return []
        if self.kind == now.kind == "ids":
            return [_diff_ids(self.ids, now.ids)]
        name = "next_ids" if "ids" in (self.kind, now.kind) else "next_element"
        return [Difference(name, str(self), str(now), note)]

    def __str__(self) -> str:
        if self.kind == "ids":
            return str(list(self.ids[:4]))
        if self.kind == "end":
            return "the end"
        return self.digest if self.kind == "error" else f"no IDs, {self.digest}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"kind": self.kind, "ids": list(self.ids), "digest": self.digest}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
          KeyError, TypeError, ValueError: it is something else.
        """
        kind = value["kind"]
        if kind not in _NEXT_KINDS:
            raise ValueError(f"{kind!r:.40} is no kind of what comes next")
        ids = tuple(one if type(one) is int else str(typed(one, str)) for one in value["ids"])
        return cls(kind, ids, typed(value["digest"], str))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an iterator stands.

    Attributes:
      position: where the next batch begins.
      ahead: what comes next.
      state: the iterator's state as JSON values, if the position alone does not say where it stands.
    """

    position: Position
    ahead: Ahead
    state: Any = None

    @property
    def start(self) -> Any:
        """The argument with which the stream's ``iterate`` goes on there."""
        return self.position if self.state is None else self.state


class PlaceError(ValueError):
    """A place cannot be one of the stream."""


def _diff_ids(before: Sequence[int | str], now: Sequence[int | str]) -> Difference:
    place = next(
        (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
        min(len(before), len(now)),
    )
    was, comes = (str(list(ids[place : place + 4])) for ids in (before, now))
    return Difference(
        "next_ids", was, comes, f"from record {place} after the cursor on: the order has moved"
    )


def diff_mappings(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterable[Difference]:
    """Compare JSON values by name, nested mappings name by name."""
    for name, shown in in_print([*before, *now]).items():
        values = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if all(isinstance(value, Mapping) for value in values):
            yield from diff_mappings(f"{prefix}{shown}.", *values)
        else:
            yield from diff_values(prefix + shown, *values)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT: Final = _Absent()


def diff_values(name: str, before: Any, now: Any) -> Iterable[Difference]:
    """Compare two JSON values."""
    # As JSON, because 1, 1.0 and True are equal in Python and not the same setting.
    if before is _ABSENT or now is _ABSENT or canonical(before) != canonical(now):
        texts = str(before), str(now)
        # Quotes, which are left out elsewhere, set "" apart from nothing, and "1" from 1.
        if "" in texts or texts[0] == texts[1]:
            texts = repr(before), repr(now)
        yield Difference(name, *texts)


def canonical(value: Any) -> bytes:
    """A JSON value in its one spelling."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def typed(value: Any, kind: type) -> Any:
    """Return the value if it is of a type, and of no subclass.

    Raises:
      TypeError: it is not.
    """
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value


def texts(value: Any) -> dict[str, str]:
    """Return a dict of strings.

    Raises:
      TypeError: the value is something else.
    """
    return {typed(name, str): typed(text, str) for name, text in typed(value, dict).items()}


def data_report(fingerprint: Fingerprint) -> dict[str, Any]:
    """A data set's identity as JSON values, without its marks."""
    columns = {name: dataclasses.asdict(column) for name, column in fingerprint.columns.items()}
    files = fingerprint.files
    return {
        "digest": fingerprint.digest,
        "num_records": fingerprint.num_records,
        "columns": {
            name: {**column, "shape": list(column["shape"])} for name, column in columns.items()
        },
        "files": None if files is None else {"num_files": files.num_files, "digest": files.digest},
    }
