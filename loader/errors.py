"""What callers may want to catch while batches are read."""

import signal
from typing import Any, Final

from loader.batching import Position

_MEND: Final = (
    'mend the record and go on, or set on_bad_record="mask" to train without such records.'
)
#: Where the data has changed under the run.
PUT_BACK: Final = 'put back the data that the run began with; on_bad_record="mask" is not for this.'


class DataChangedError(ValueError):
    """A file is no longer what it was when its source was opened.

    A source raises it where it reads. What it holds now are other records under the same IDs, so none of
    them is masked, whatever ``on_bad_record`` says.
    """


class RecordReadError(RuntimeError):
    """A record cannot be read or transformed; the cause is the exception that it was raised from.

    Attributes:
      position: where the batch begins that it belongs to. The iterator stays there.
      record_id: its ID; ``None`` where no single record is at fault.
      row: its row in the source; ``None`` where no single record is at fault.
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
        """So that the error can be sent to another process."""
        return type(self), (self.position, self.record_id, self.row, *self._said)


class WorkerDiedError(RuntimeError):
    """A worker process has ended before it gave a batch. No record is lost or repeated by that.

    Attributes:
      position: where the batch begins. The iterator stays there, and starts workers anew when it is
        asked again.
      exit_code: of the process, the negative number of a signal that killed it.
    """

    def __init__(self, position: Position, exit_code: int) -> None:
        self.position, self.exit_code = position, exit_code
        super().__init__(
            f"a worker process {_end(exit_code)} before it gave the batch at {_place(position)}. The "
            "iterator stays at this batch: nothing is lost, and the next call starts workers anew."
            + _hint(exit_code)
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """So that the error can be sent to another process."""
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
            " If nobody sent the signal, it was the kernel, for want of memory: fewer workers or smaller "
            "batches need less."
        )
    return "" if exit_code <= 0 else " What it printed may say why."
