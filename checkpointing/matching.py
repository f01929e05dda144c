"""Whether a checkpoint's stream is the one at hand, and what of it was changed with permission."""

import json
import logging
from collections.abc import Callable
from typing import Any, Final

from checkpointing.directory import StepDamagedError
from checkpointing.errors import CheckpointMismatchError
from checkpointing.manifest import (
    Identity,
    Manifest,
    Stream,
    config_with,
    next_ids,
    package_versions,
)
from loader import Difference, Mixture, Pipeline, Position
from loader.grain_stream import Ahead, GrainIterator, GrainStateError, GrainStream

_log: Final = logging.getLogger(__name__)


def match(
    found: Manifest,
    identity: Identity,
    stream: Stream,
    where: str,
    allow: frozenset[str],
    iterate: Callable[..., Any],
) -> dict[str, list[Any]]:
    """Compares a checkpoint with what is at hand: identity, position and next IDs.

    Args:
      found: the checkpoint's manifest.
      identity: of what is at hand.
      stream: that at hand.
      where: names the run, for messages.
      allow: names of differences to go on with.
      iterate: makes an iterator over the stream.

    Returns:
      Those that there are: by name, the values before and now.

    Raises:
      CheckpointMismatchError: all other differences.
      StepDamagedError: the checkpoint's position cannot be one of its stream.
      ValueError: what has been trained on is skipped.
    """
    differences = found.identity.diff(identity, stream)
    changes = {
        name: [_value(found.identity, name), _value(identity, name)]
        for name in allow
        if any(difference.name == name for difference in differences)
    }
    differences = [one for one in differences if one.name not in changes]
    place = f"{where} step {found.step}"
    if isinstance(stream, GrainStream):
        if not differences:
            differences = _diff_ahead(found, iterate)
        if differences:
            moved = any(one.name == "grain_version" for one in differences)
            raise CheckpointMismatchError(place, differences, "grain_version" if moved else "")
        return changes
    if differences:
        raise CheckpointMismatchError(place, differences)
    try:
        before = (
            stream if isinstance(stream, Mixture) else config_with(stream, found.identity.config)
        )
        before.grid.check(found.position)
    except ValueError as error:
        raise StepDamagedError(f"its position is none of its stream: {error}") from error
    differences = _diff_next_ids(found, next_ids(before, found.position))
    if differences:
        raise CheckpointMismatchError(place, differences)
    if isinstance(before, Pipeline) and isinstance(stream, Pipeline):
        _check_skip(place, found.position, before, stream)
        _tell_of_drops(where, found.position, before, stream)
    return changes


def _value(identity: Identity, name: str) -> Any:
    if name == "grain_version":
        return identity.chain.grain if identity.chain else None
    return identity.config.get(name)


def _diff_ahead(found: Manifest, iterate: Callable[..., Any]) -> list[Difference]:
    """Compares what comes next with what Grain gives from the checkpoint's state, by an iterator for this alone."""
    place = found.grain
    if place is None:
        return []
    state = json.dumps(place.state)
    batches: GrainIterator = iterate(found.start)
    try:
        ahead = batches.ahead()
    except GrainStateError as error:
        return [Difference("grain_state", state, "refused", str(error))]
    finally:
        batches.close()
    if place.next == "error":
        _log.warning(
            "step %d: the element behind it could not be made when it was saved (%s), so that it cannot "
            "be compared now",
            found.step,
            place.digest,
        )
        return []
    before = Ahead(place.next, found.next_ids, place.digest)
    if before == ahead:
        return []
    if before.kind == ahead.kind == "ids":
        return _diff_next_ids(found, ahead.ids)
    name = "next_ids" if "ids" in (before.kind, ahead.kind) else "next_element"
    return [
        Difference(
            name,
            _told(before),
            _told(ahead),
            f"of the element at step {found.step}, by Grain's state",
        )
    ]


def _told(ahead: Ahead) -> str:
    if ahead.kind == "ids":
        return str(list(ahead.ids[:4]))
    if ahead.kind == "end":
        return "the end"
    return ahead.digest if ahead.kind == "error" else f"no IDs, {ahead.digest}"


def _check_skip(where: str, position: Position, before: Pipeline, now: Pipeline) -> None:
    """Raises if batches that the run has passed already are newly skipped, or no longer."""
    cursor = now.grid.number(position)
    if now.config.batch_size != before.config.batch_size:
        passed = min(cursor, before.grid.number(position))
        same = now.config.skip == before.config.skip
        for first, end in now.config.skip:
            if end > passed and (same or first < cursor):
                raise ValueError(
                    f"skip has batches {first} to {end - 1}, counted in batches of "
                    f"{before.config.batch_size} records; counted in batches of "
                    f"{now.config.batch_size} they are other records. Change skip with it, to "
                    f'ranges from batch {cursor} on, and allow={{"batch_size", "skip"}}'
                )
        return
    old, new = (
        [(first, min(end, cursor)) for first, end in ranges if first < cursor]
        for ranges in (before.config.skip, now.config.skip)
    )
    if old != new:
        raise ValueError(
            f"{where} is at batch {cursor}, and skip changes before it, "
            f"from {old} to {new}: what has been trained on cannot be left out any more. Change "
            "skip ahead of it only, or go back to an older checkpoint, in a directory of its own"
        )


def _tell_of_drops(where: str, position: Position, before: Pipeline, now: Pipeline) -> None:
    """Logs how many records a new batch size leaves out of this epoch that the old one delivers."""
    offset = before.grid.normal(position).offset
    old, new = (one.grid.steps_after(offset) * one.config.batch_size for one in (before, now))
    if now.config.final_batch == "drop" and new < old:
        _log.warning(
            '%s: final_batch="drop" leaves out %d more records of this epoch with batches of %d '
            "than with batches of %d",
            where,
            old - new,
            now.config.batch_size,
            before.config.batch_size,
        )


def _diff_next_ids(found: Manifest, now: tuple[int | str, ...]) -> list[Difference]:
    if found.next_ids == now:
        return []
    place = next(
        (i for i, (a, b) in enumerate(zip(found.next_ids, now, strict=False)) if a != b),
        min(len(found.next_ids), len(now)),
    )
    wrote = ", ".join(
        f"{name} {version}"
        for name, version in found.packages.items()
        if package_versions().get(name) != version
    )
    return [
        Difference(
            "next_ids",
            str(list(found.next_ids[place : place + 4])),
            str(list(now[place : place + 4])),
            f"from record {place} after the cursor on: the order has moved"
            + (f" since {wrote}" if wrote else ""),
        )
    ]
