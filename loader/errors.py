"""Errors that callers may want to catch while they read batches."""

import signal
from typing import Any, Final

from loader.batching import Position

_MEND: Final = (
    'repair the record and continue, or set on_bad_record="mask" to train without such records.'
)
#: For data that changed during the run.
PUT_BACK: Final = (
    'restore the data that the run began with; on_bad_record="mask" does not apply to changed data.'
)


class DataChangedError(ValueError):
    """A file has changed since its source was opened.

    Sources raise it when they read. The file may hold other records under the same IDs now, so
    ``on_bad_record="mask"`` does not mask them.
    """


class RecordReadError(RuntimeError):
    """A record cannot be read or transformed. ``__cause__`` is the original exception.

    Attributes:
      position: start of the batch. The iterator stays there.
      record_id: the record's ID, or ``None`` if no single record is at fault.
      row: the record's row in the source, or ``None``.
    """

    def __init__(
        self,
        position: Position,
        record_id: int | str | None,
        row: int | None,
        why: str = "",
        advice: str = _MEND,
    ) -> None:
        self.position, self.record_id, self.row = position, record_id, row
        self._said = why, advice
        what = "the batch" if row is None else f"record {record_id!r} (row {row})"
        super().__init__(
            f"{what} at {_place(position)} cannot be read or transformed{why and f' ({why})'}. The "
            f"iterator stays at this batch: {advice}"
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Let the error be sent to another process."""
        return type(self), (self.position, self.record_id, self.row, *self._said)


class WorkerDiedError(RuntimeError):
    """A worker process ended before it returned a batch. No record is lost or repeated.

    Attributes:
      position: start of the batch. The iterator stays there, and starts new workers at the next call.
      exit_code: exit code of the process; negative if a signal killed it.
    """

    def __init__(self, position: Position, exit_code: int) -> None:
        self.position, self.exit_code = position, exit_code
        super().__init__(
            f"a worker process {_end(exit_code)} before it returned the batch at {_place(position)}. "
            "Nothing is lost: the iterator stays at this batch, and the next call starts new workers."
            + _hint(exit_code)
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Let the error be sent to another process."""
        return type(self), (self.position, self.exit_code)


def _place(position: Position) -> str:
    return f"epoch {position.epoch}, offset {position.offset}, step {position.step}"


def _end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _hint(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            " If nobody sent the signal, the kernel did, because memory ran out. Use fewer workers or "
            "smaller batches."
        )
    return "" if exit_code <= 0 else " Its output may say why."
