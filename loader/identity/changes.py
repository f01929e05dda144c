"""What a run may change at a resume: checks of ``skip`` and of the batch size at the place of a checkpoint."""

import logging
from typing import Final

from loader.batching import Position, Segment

_log: Final = logging.getLogger(__name__)


def check_skip(where: str, position: Position, before: Segment, now: Segment) -> None:
    """Check that no batches that the run has passed are newly skipped, or no longer.

    Args:
      where: names the checkpoint, for messages.
      position: the checkpoint's.
      before: the stream under the checkpoint's config.
      now: the stream as it is to go on.

    Raises:
      ValueError: such batches are.
    """
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


def log_drops(where: str, position: Position, before: Segment, now: Segment) -> None:
    """Log how many records of this epoch a new batch size leaves out that the old one delivers."""
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
