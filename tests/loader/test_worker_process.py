"""Whatever a transform raises can be sent, if need be as text; a program is no worker."""

import pickle
import threading
from typing import Any

import pytest

from loader.reading.worker_process import failure_of, is_worker_process


class WithLock(Exception):  # noqa: N818
    """An exception that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class WithTwo(Exception):  # noqa: N818
    """An exception that can be pickled, and not be made again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class WithNoText(Exception):  # noqa: N818
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Disguised(Exception):  # noqa: N818
    """An exception that is made again as something else."""

    def __reduce__(self) -> Any:
        return int, (3,)


class Unwilling(Exception):  # noqa: N818
    """An exception that raises while it is pickled."""

    def __reduce__(self) -> Any:
        raise KeyError("unwilling")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 (KeyboardInterrupt among them)
        return caught


@pytest.mark.parametrize("error", [ValueError("a", 3), KeyError("k"), KeyboardInterrupt("now")])
def test_what_can_be_sent_is_sent(error: BaseException) -> None:
    failure = failure_of(raised(error, OSError(5, "no")))
    again, cause = pickle.loads(failure.error), pickle.loads(failure.cause)
    assert (type(again), again.args) == (type(error), error.args)
    assert (type(cause), cause.args) == (OSError, (5, "no"))
    assert "in raised\n" in failure.trace
    assert failure.cause_text == "OSError: [Errno 5] no"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WithLock("of a lock"), "WithLock: of a lock"),
        (WithTwo("of", " two"), "WithTwo: of two"),
        (WithNoText(), "WithNoText: <exception str() failed>"),
        (Disguised("as a number"), "Disguised: as a number"),
        (Unwilling("to be pickled"), "Unwilling: to be pickled"),
    ],
)
def test_what_cannot_be_sent_is_told(error: Exception, text: str) -> None:
    if not isinstance(error, WithNoText):
        failure = failure_of(raised(error))
        assert (failure.error, failure.cause, failure.cause_text) == (b"", b"", "")
        assert failure.text.endswith(text)
        assert text in failure.trace
    failure = failure_of(raised(ValueError("of it"), error))
    assert str(pickle.loads(failure.error)) == "of it"
    assert failure.cause_text.endswith(text)
    assert all(isinstance(part, str | bytes) for part in failure)


def test_a_program_is_no_worker() -> None:
    assert not is_worker_process()
