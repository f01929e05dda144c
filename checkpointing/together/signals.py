"""Deferred signal handling: poll for a stop request between steps."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

_log: Final = logging.getLogger(__name__)


class StopRequest:
    """Whether a signal has asked the process to stop, and which.

    Attributes:
      signal: the signal that came; ``None`` as long as none has.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """What the process should exit with: 128 plus the signal's number, as shells report it."""
        return 128 + (self.signal or 0)


@contextlib.contextmanager
def stop_requests(
    signals: Sequence[signal.Signals], then: Callable[[], None] | None = None
) -> Iterator[StopRequest]:
    """Inside the context, the first signal only notes that it came; a second one acts as it did before.

    Args:
      signals: which ones.
      then: called when one has been noted.

    Raises:
      ValueError: not called from the main thread, to which Python delivers signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("signals come to the main thread; use this context there")
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        request.signal = signal.Signals(number)
        _restore()
        if then is not None:
            then()

    def _restore() -> None:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    for number in signals:
        signal.signal(number, note)
    try:
        yield request
    finally:
        _restore()
