"""What became of things between two lists of their marks; and texts that differ, and look alike."""

import bisect
import collections
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

#: Greek and Cyrillic letters that look like Latin ones, and the same number of these.
_LIKE_LATIN: Final = (
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf\u03bd\u03f2"
    "\u0410\u0412\u0415\u0405\u0406\u0408\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425"
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u0501\u051b\u051d"
)
_LATIN: Final = "ABEZHIKMNOPTYXovcABESIJKMHOPCTYXaeopcyxsijhdqw"
_LOOKS: Final = str.maketrans(
    dict(zip(_LIKE_LATIN, _LATIN, strict=True))
    | dict.fromkeys(map(chr, range(0xFE00, 0xFE10)))  # which choose among the looks of a character
)
#: Characters of these categories cannot be seen, or are shown as any other of them.
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs"})


def in_print(texts: Iterable[str]) -> dict[str, str]:
    """How to print each of some texts, so that no two that differ look alike.

    Returns:
      Each text by itself; but of those that look alike (composed and decomposed accents, letters of
      other scripts, characters that cannot be seen, spaces), all that is not ASCII as escapes, in
      quotes where that is not enough. Two that were made so stay as they are.
    """
    alike = collections.defaultdict[str, list[str]](list)
    for text in dict.fromkeys(texts):
        alike[_look(text)].append(text)
    shown: dict[str, str] = {}
    for group in alike.values():
        if len(group) == 1:
            shown[group[0]] = group[0]
            continue
        escaped = [text.encode("ascii", "backslashreplace").decode() for text in group]
        if len(set(map(_look, escaped))) < len(group) and not all(map(_is_quoted, group)):
            escaped = [ascii(text) for text in group]
        shown.update(zip(group, escaped, strict=True))
    if len(set(shown.values())) < len(shown):  # one of them is what another one is escaped to
        return {text: ascii(text) for text in shown}
    return shown


def look_alike(one: str, other: str) -> bool:
    """Whether two texts cannot be told apart, or by their spaces alone."""
    return _look(one) == _look(other)


def _is_quoted(text: str) -> bool:
    """Whether quotes already show where a text begins and ends, and nothing in it is unseen."""
    return text.isascii() and text.isprintable() and len(text) > 1 and text[0] == text[-1] in "'\""


def _look(text: str) -> str:
    """What is to be seen of a text."""
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    seen = (c for c in text if c.isspace() or unicodedata.category(c) not in _UNSEEN)
    plain = unicodedata.normalize("NFKC", "".join(seen)).translate(_LOOKS)
    return " ".join(plain.split())


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
