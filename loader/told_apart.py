"""What became of things between two lists of their marks: edited, moved, removed, inserted, appended."""

import bisect
from collections.abc import Sequence


def told_apart(before: Sequence[str], after: Sequence[str]) -> dict[str, list[int]]:
    """What became of the records, or files, between two lists of their marks, in n log n.

    Args:
      before: a mark for each; no two have the same.
      after: the same, later.

    Returns:
      Places of what was ``"edited"``, ``"moved"``, ``"inserted"`` and ``"appended"``, as they are
      numbered in ``after``, and ``"removed"``, as in ``before``. As few as possible are moved; a new mark
      counts as edited where an old one between the same two neighbours is gone.
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
