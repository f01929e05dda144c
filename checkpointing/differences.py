"""Whether a checkpoint's stream is the one at hand, and what of it was changed with permission."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from checkpointing.errors import CheckpointMismatchError
from checkpointing.manifest import Identity, Manifest, package_versions
from checkpointing.storage.directory import StepDamagedError
from loader import Difference
from loader.identity.base import PlaceError, read_as
from loader.stream import Stream, StreamIterator


def check_allow(stream: Stream, allow: Any) -> frozenset[str]:
    """Check the names of differences that a user allows for a stream; return them.

    Raises:
      TypeError, ValueError: they are no set of names, or hold one that cannot change.
    """
    if isinstance(allow, str):
        raise TypeError(f'allow is a set of names: write allow={{"{allow}"}}')
    if not isinstance(allow, Collection):
        raise TypeError(f'allow is a set of names, such as {{"batch_size"}}, not {allow!r:.80}')
    unknown = set(allow) - stream.may_change
    if unknown:
        raise ValueError(
            f"allow can hold {sorted(stream.may_change)} for a {type(stream).__name__}, not {sorted(unknown)}: "
            "nothing else can change without making it another run"
        )
    return frozenset(allow)


def match(
    found: Manifest,
    identity: Identity,
    stream: Stream,
    where: str,
    allow: frozenset[str],
    iterate: Callable[..., StreamIterator],
) -> dict[str, list[Any]]:
    """Compare a checkpoint with what is at hand: identity, place and what comes next.

    Args:
      found: the checkpoint's manifest.
      identity: of what is at hand.
      stream: that at hand.
      where: names the run, for messages.
      allow: names of differences to go on with.
      iterate: makes an iterator over the stream.

    Returns:
      The differences that were allowed: by name, the values before and now.

    Raises:
      CheckpointMismatchError: all other differences.
      StepDamagedError: the checkpoint's place cannot be one of its stream.
      ValueError: the run cannot go on with an allowed change from this place.
    """
    place = f"{where} step {found.step}"
    differences = found.identity.diff(identity)
    allowed = {one.name for one in differences} & allow & stream.may_change
    differences = [one for one in differences if one.name not in allowed]
    if differences:
        raise CheckpointMismatchError(place, differences, _hint(stream, differences))
    before = read_as(identity.stream, found.identity.stream)
    try:
        differences = stream.diff_next(before, found.place, iterate)
    except PlaceError as error:
        raise StepDamagedError(f"its position is none of its stream: {error}") from error
    if differences:
        differences = [_with_packages(found, one) for one in differences]
        raise CheckpointMismatchError(place, differences, _hint(stream, differences))
    stream.check_change(before, found.place, place)
    return {name: [one.setting(name) for one in (before, identity.stream)] for name in allowed}


def _hint(stream: Stream, differences: list[Difference]) -> str:
    """The name of a difference that the user may allow."""
    if "batch_size" in stream.may_change:
        return "batch_size"
    return next((one.name for one in differences if one.name in stream.may_change), "")


def _with_packages(found: Manifest, difference: Difference) -> Difference:
    """The difference, with the packages that have changed since, if the order has moved."""
    moved = [
        f"{name} {version}"
        for name, version in found.packages.items()
        if package_versions().get(name) != version
    ]
    if not moved or not difference.note.endswith("the order has moved"):
        return difference
    return dataclasses.replace(difference, note=f"{difference.note} since {', '.join(moved)}")
