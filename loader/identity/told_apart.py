"""What became of things between two lists of their marks; and texts that differ, and look alike."""

import collections
import unicodedata
from collections.abc import Iterable
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
