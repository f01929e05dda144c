"""Compare two lists of marks, which are short digests of records or files in order, and put the changes in words."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

_SPANS: Final = 4


class Names(Protocol):
    """How the things that have marks are named in messages."""

    @property
    def thing(self) -> str:
        """In the singular, such as ``"record"``."""
        ...

    @property
    def edited(self) -> str:
        """The word for a thing whose mark has changed."""
        ...

    @property
    def chunks(self) -> str:
        """The name of a mark of several things, in the plural."""
        ...

    @property
    def before_span(self) -> str:
        """A word before the places of things that follow each other; may be empty."""
        ...

    def some(self, places: Sequence[int], *, now: bool) -> str:
        """Name the first few of some things, in the later list (``now``) or the earlier one."""
        ...

    def span(self, first: int, last: int, *, now: bool) -> str:
        """Name things that follow each other."""
        ...


@dataclasses.dataclass(frozen=True)
class Marked:
    """Marks of things in order.

    Attributes:
      marks: one for each ``per`` things; no two are the same. They may cover only the first things.
      per: things to a mark.
      total: how many things there are.
    """

    marks: Sequence[str]
    per: int
    total: int

    @property
    def borders(self) -> list[int]:
        """The place where each mark begins, and the total."""
        count = len(self.marks)
        starts = [place * self.per for place in range(count)]
        covered = min(count * self.per, self.total)
        return [*starts, covered] if covered == self.total else [*starts, covered, self.total]


class _Hunk(NamedTuple):
    """Things from ``low`` to ``high``, in whose place those from ``low_now`` to ``high_now`` stand later."""

    low: int
    high: int
    low_now: int
    high_now: int

    @property
    def more(self) -> int:
        return (self.high_now - self.low_now) - (self.high - self.low)


def changes_in_words(
    before: Marked,
    after: Marked,
    names: Names,
    mark_of: Callable[[int, int], str | None] = lambda _start, _stop: None,
) -> str:
    """Which things were edited, moved, removed, inserted and appended; empty if no mark tells.

    Args:
      before: the earlier marks.
      after: the later ones, of as many things each.
      names: of the things.
      mark_of: a mark of later things from one place to another, if it can be computed. With it the things
        of an earlier mark that covers fewer than ``per`` are compared after things were appended.
    """
    if before.per == 1 == after.per and len(after.marks) == after.total:
        return _each(told_apart(before.marks, after.marks), before.total, after.total, names)
    hunks = list(_hunks(before, after))
    if hunks and (last := hunks[-1]).high == before.total < after.total:
        there = before.total - last.low
        if (
            0 < there < before.per
            and mark_of(last.low_now, last.low_now + there) == before.marks[-1]
        ):
            hunks[-1] = last._replace(low=last.high, low_now=last.low_now + there)
    return _several(hunks, before, after, names)


def _each(changes: dict[str, list[int]], before: int, after: int, names: Names) -> str:
    """Words for changes of single things."""
    found = {kind: places for kind, places in changes.items() if places}
    kinds = set(found)
    if kinds == {"moved"}:
        return f"the same {names.thing}s in another order"
    if kinds == {"appended"} or (kinds == {"removed"} and found["removed"][0] == after):
        return _ending(min(before, after), after - before, names)
    if kinds == {"edited"}:
        places = found["edited"]
        verb = "differs" if len(places) == 1 else "differ"
        return f"{len(places)} of {before} {names.thing}s {verb}: {names.some(places, now=True)}"
    return "; ".join(
        f"{len(places)} {names.edited if kind == 'edited' else kind}: "
        + names.some(places, now=kind != "removed")
        for kind, places in found.items()
    )


def _several(hunks: list[_Hunk], before: Marked, after: Marked, names: Names) -> str:
    """Words for changes where a mark is of several things."""
    if not hunks:
        return ""
    last = hunks[-1]
    if len(hunks) == 1 and last.more and (last.high, last.high_now) == (before.total, after.total):
        if last.low == last.high or last.low_now == last.high_now:
            return _ending(last.low, last.more, names)
        if last.low == 0:
            return ""
        rest, rest_now = before.total - last.low, after.total - last.low_now
        return (
            f"the first {last.low} {names.thing}s are the same; after them {rest} became {rest_now}"
        )
    parts = []
    if edited := [hunk for hunk in hunks if not hunk.more]:
        count = sum(-(-(hunk.high - hunk.low) // before.per) for hunk in edited)
        of = f"in {count} of {len(before.marks)} {names.chunks}"
        parts.append(f"{of}: {_spans(edited, names)}")
    for kind, those in (
        ("removed", [hunk for hunk in hunks if hunk.low_now == hunk.high_now]),
        ("inserted", [hunk for hunk in hunks if hunk.low == hunk.high != before.total]),
        ("appended", [hunk for hunk in hunks if hunk.low == hunk.high == before.total]),
    ):
        if those:
            count = sum(abs(hunk.more) for hunk in those)
            parts.append(f"{count} {kind}: {_spans(those, names, now=kind != 'removed')}")
    for hunk in hunks:
        if hunk.more and hunk.low < hunk.high and hunk.low_now < hunk.high_now:
            fewer = "more" if hunk.more > 0 else "fewer"
            where = names.span(hunk.low, hunk.high - 1, now=False)
            parts.append(f"{abs(hunk.more)} {fewer} in {names.before_span}{where}")
    return "; ".join(parts)


def _spans(hunks: list[_Hunk], names: Names, *, now: bool = True) -> str:
    ends = [(h.low_now, h.high_now - 1) if now else (h.low, h.high - 1) for h in hunks]
    spans = ", ".join(names.span(first, last, now=now) for first, last in ends[:_SPANS])
    more = f" and {len(ends) - _SPANS} more" if len(ends) > _SPANS else ""
    return names.before_span + spans + more


def _ending(same: int, more: int, names: Names) -> str:
    """Words for things that were only appended, or only removed from the end."""
    verb = "was" if abs(more) == 1 else "were"
    first = f"first {names.thing} is" if same == 1 else f"first {same} {names.thing}s are"
    end = "appended" if more > 0 else "removed from the end"
    places = range(same, same + abs(more))
    return f"the {first} the same, and {abs(more)} {verb} {end}: {names.some(places, now=more > 0)}"


def _hunks(before: Marked, after: Marked) -> Iterator[_Hunk]:
    """What stands between the marks that both lists have in the same order."""
    was = {mark: place for place, mark in enumerate(before.marks)}
    # A mark of fewer things, at an end, is never one of full marks, so it needs no care.
    common = [(was[mark], place) for place, mark in enumerate(after.marks) if mark in was]
    stayed = [common[i] for i in _longest_rising([place for place, _ in common])]
    borders, borders_now = before.borders, after.borders
    low = low_now = 0
    for high, high_now in [*stayed, (len(borders) - 1, len(borders_now) - 1)]:
        hunk = _Hunk(borders[low], borders[high], borders_now[low_now], borders_now[high_now])
        if hunk.low < hunk.high or hunk.low_now < hunk.high_now:
            yield hunk
        low, low_now = high + 1, high_now + 1


def told_apart(before: Sequence[str], after: Sequence[str]) -> dict[str, list[int]]:
    """Classify the changes between two lists of marks, in n log n.

    Args:
      before: a mark for each thing; no two are the same.
      after: the same, later.

    Returns:
      Places of things ``"edited"``, ``"moved"``, ``"inserted"`` and ``"appended"`` in ``after``, and of
      things ``"removed"`` in ``before``. As few as possible are moved. A new mark counts as edited if an
      old one between the same two neighbours is gone.
    """
    was = {mark: row for row, mark in enumerate(before)}
    common = [(was[mark], row) for row, mark in enumerate(after) if mark in was]
    stayed = [common[i] for i in _longest_rising([row for row, _ in common])]
    left, kept = {row for _, row in common}, {row for row, _ in common}
    found: dict[str, list[int]] = {
        kind: [] for kind in ("edited", "moved", "removed", "inserted", "appended")
    }
    found["moved"] = sorted(left - {row for _, row in stayed})
    low, low_after = 0, 0
    for high, high_after in [*stayed, (len(before), len(after))]:
        gone = [row for row in range(low, high) if row not in kept]
        new = [row for row in range(low_after, high_after) if row not in left]
        pairs = min(len(gone), len(new))
        found["edited"] += new[:pairs]
        found["removed"] += gone[pairs:]
        found["inserted" if high < len(before) else "appended"] += new[pairs:]
        low, low_after = high + 1, high_after + 1
    return found


def _longest_rising(values: list[int]) -> list[int]:
    """Places of a longest strictly rising subsequence, in n log n.

    The algorithm of Fredman, "On computing the length of longest increasing subsequences", 1975.
    """
    ends: list[int] = []  # ends[k]: the smallest value that k + 1 rising ones end in, so far
    places: list[int] = []
    previous: list[int] = []
    for place, value in enumerate(values):
        length = bisect.bisect_left(ends, value)
        previous.append(places[length - 1] if length else -1)
        ends[length : length + 1] = [value]
        places[length : length + 1] = [place]
    found = []
    place = places[-1] if places else -1
    while place >= 0:
        found.append(place)
        place = previous[place]
    return found[::-1]
