"""Show how two texts differ, even if they look equal in print."""

import copy
import dataclasses
import unicodedata
from collections.abc import Iterable
from typing import Final

#: Characters of these categories are invisible, or shown as any other of their category.
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs"})
#: How much of the common start of two long texts is shown.
_BEFORE: Final = 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between two sides.

    Attributes:
      name: such as ``dataset.y`` or ``batch_size``.
      checkpoint: the value of the first side, usually a checkpoint's, as text.
      now: the value of the second side. If the two values look equal, such as an accent composed in two
        ways, both are shown in ASCII.
      note: a remark, such as which records differ; else empty.
    """

    name: str
    checkpoint: str
    now: str
    note: str = ""

    def __post_init__(self) -> None:
        shown = in_print([self.checkpoint, self.now])
        object.__setattr__(self, "checkpoint", shown[self.checkpoint])
        object.__setattr__(self, "now", shown[self.now])

    def shortened(self, limit: int) -> "Difference":
        """Return the same with both values cut to ``limit`` characters that include the first difference."""
        before, now = self.checkpoint, self.now
        if before != now and _cut(before, limit) == _cut(now, limit):
            pairs = enumerate(zip(before, now, strict=False))
            differs = next((i for i, (a, b) in pairs if a != b), min(len(before), len(now)))
            first = max(0, differs - min(_BEFORE, limit // 4))
            before, now = f"...{before[first:]}", f"...{now[first:]}"
        before, now = _cut(before, limit), _cut(now, limit)
        if not _look_equal(
            _look(self.checkpoint), _look(self.now)
        ):  # else they are escaped already
            shown = in_print([before, now])
            before, now = shown[before], shown[now]
        short = copy.copy(self)
        object.__setattr__(short, "checkpoint", before)
        object.__setattr__(short, "now", now)
        return short


def in_print(texts: Iterable[str]) -> dict[str, str]:
    """Return each text as it is printed, so that no two different texts look equal.

    Texts that look equal have their characters outside of ASCII escaped, and are quoted if they differ in
    spaces or control characters. Texts look equal if they differ in the composition of accents, in
    invisible characters, in spaces, or in letters of different scripts.
    """
    looks = {text: _look(text) for text in texts}
    odd = [text for text, look in looks.items() if text != look or not text.isascii()]
    alike: dict[str, str] = {}
    for one in odd:
        for other, look in looks.items():
            if one != other and _look_equal(looks[one], look):
                alike |= {text: _escaped(text) for text in (one, other)}
    still_equal = len(set(map(_look, alike.values()))) < len(alike)
    if still_equal and not all(map(_is_quoted, alike)):
        alike = {text: ascii(text) for text in alike}
    shown = {text: alike.get(text, text) for text in looks}
    if len(set(shown.values())) < len(shown):  # one text is the escaped form of another
        return {text: ascii(text) for text in looks}
    return shown


def _escaped(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _is_quoted(text: str) -> bool:
    """Return whether quotes already show the ends of a text without invisible characters."""
    return text.isascii() and text.isprintable() and len(text) > 1 and text[0] == text[-1] in "'\""


def _look(text: str) -> str:
    """Return a text without its invisible characters, with single spaces and composed accents."""
    if not (text.isascii() and text.isprintable()):
        visible = (c for c in text if c.isspace() or not _is_invisible(c))
        text = unicodedata.normalize("NFKC", "".join(visible))
    return " ".join(text.split())


def _is_invisible(c: str) -> bool:
    return (
        unicodedata.category(c) in _INVISIBLE or "\ufe00" <= c <= "\ufe0f"
    )  # the variation selectors


def _look_equal(one: str, other: str) -> bool:
    """Return whether two looks are equal, if letters of different scripts count as equal."""
    return len(one) == len(other) and all(
        a == b or (not (a + b).isascii() and _script(a) != _script(b))
        for a, b in zip(one, other, strict=True)
    )


def _script(c: str) -> str:
    """Return the first word of a character's name, such as LATIN or CYRILLIC."""
    return unicodedata.name(c, "").partition(" ")[0]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
