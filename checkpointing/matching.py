"""Whether a checkpoint's stream is the one at hand, and what of it was changed with permission."""

import logging
from typing import Any, Final

from checkpointing.directory import StepDamagedError
from checkpointing.errors import CheckpointMismatchError
from checkpointing.manifest import Identity, Manifest, config_with, next_ids, package_versions
from loader import Difference, Mixture, Pipeline, Position

_log: Final = logging.getLogger(__name__)


def match(
    found: Manifest,
    identity: Identity,
    stream: Pipeline | Mixture,
    where: str,
    allow: frozenset[str],
) -> dict[str, list[Any]]:
    """Compares a checkpoint with what is at hand: identity, position and next IDs.

    Args:
      found: the checkpoint's manifest.
      identity: of what is at hand.
      stream: that at hand.
      where: names the run, for messages.
      allow: names of differences to go on with.

    Returns:
      Those that there are: by name, the values before and now.

    Raises:
      CheckpointMismatchError: all other differences.
      StepDamagedError: the checkpoint's position cannot be one of its stream.
      ValueError: what has been trained on is skipped.
    """
    differences = found.identity.diff(identity, stream)
    changes = {
        name: [found.identity.config.get(name), identity.config[name]]
        for name in allow
        if any(difference.name == name for difference in differences)
    }
    differences = [one for one in differences if one.name not in changes]
    place = f"{where} step {found.step}"
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
