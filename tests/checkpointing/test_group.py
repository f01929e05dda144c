"""What processes do together: all succeed and agree, or none goes on; threads stand for processes here."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from checkpointing.errors import CheckpointMismatchError
from checkpointing.storage.directory import StepDamagedError
from checkpointing.together.processes import ElsewhereError, Processes
from loader import Difference


class Service:
    """JAX's coordination service, as far as it is used."""

    def __init__(self, count: int) -> None:
        self.values: dict[str, str] = {}
        self._count = count
        self._barriers: dict[str, threading.Barrier] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values, "JAX refuses to set a key twice"
            self.values[key] = value
            self._changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in [name for name in self.values if name.startswith(key)]:
                del self.values[name]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise TimeoutError("DEADLINE_EXCEEDED")
            return self.values[key]

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        with self._changed:
            barrier = self._barriers.setdefault(barrier_id, threading.Barrier(self._count))
        try:
            barrier.wait(timeout_in_ms / 1000)
        except threading.BrokenBarrierError:
            raise TimeoutError("DEADLINE_EXCEEDED: Barrier timed out") from None


def group(count: int, timeout_s: float = 60.0) -> tuple[list[Processes], Service]:
    service = Service(count)
    processes = [Processes(index, count, service, timeout_s) for index in range(count)]
    for one in processes:
        one._group = 0  # they are in one process here, which numbers its groups
    return processes, service


def at_once(processes: list[Processes], work: Callable[[Processes], Any]) -> list[Any]:
    """What each process returns or raises."""

    def one(process: Processes) -> Any:
        try:
            return work(process)
        except Exception as error:  # noqa: BLE001 (what it is, is looked at)
            return error

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_each_gets_its_own_result_when_all_have_done_it() -> None:
    processes, _ = group(3)
    done: list[int] = []

    def work(process: Processes) -> int:
        def do() -> int:
            time.sleep(0.05 * process.index)
            done.append(process.index)
            return process.index * 10

        result = process.together(process.number(), "work", do, lambda _: {"a": "same"})
        assert sorted(done) == [0, 1, 2]
        return result

    assert at_once(processes, work) == [0, 10, 20]


def test_nothing_is_left_in_the_service_but_the_last_of_it() -> None:
    processes, service = group(2)
    for _ in range(5):
        at_once(processes, lambda one: one.together(one.number(), "work", lambda: None))
    assert {key.split("/")[2] for key in service.values} == {"4"}


def test_a_difference_is_an_error_everywhere_that_names_process_and_value() -> None:
    processes, _ = group(3)
    found = at_once(
        processes,
        lambda one: one.together(
            one.number(), "work", lambda: 0, lambda _: {"a": "1", "b": str(one.index == 2)}
        ),
    )
    for error in found:
        assert isinstance(error, ElsewhereError)
        assert (error.process, error.kind) == (2, "")
        assert "b is True, and False in process 0" in str(error)
        assert "a is" not in str(error)


def raising(errors: dict[int, Exception]) -> list[Any]:
    processes, _ = group(3)

    def work(one: Processes) -> None:
        def do() -> None:
            if one.index in errors:
                raise errors[one.index]

        one.together(one.number(), "work", do)

    return at_once(processes, work)


def test_the_process_that_fails_raises_its_own_error_and_the_others_tell_of_it() -> None:
    own = OSError("disk full")
    first, second, third = raising({1: own})
    assert second is own
    for error in (first, third):
        assert isinstance(error, ElsewhereError)
        assert (error.process, error.kind) == (1, "OSError")
        assert "process 1: disk full" in str(error)


def test_all_go_on_alike_after_the_worst_that_any_has_found() -> None:
    """One would try an older step, and another one end; then they would wait for each other in vain."""
    damaged = StepDamagedError("cut")
    mismatch = CheckpointMismatchError("run step 2", [Difference("seed", "1", "2")])
    first, second, third = raising({0: damaged, 2: mismatch})
    assert third is mismatch
    for error in (first, second):
        assert isinstance(error, ElsewhereError)
        assert (error.process, error.kind) == (2, "CheckpointMismatchError")
    lost = OSError("gone")
    first, second, third = raising({0: mismatch, 1: lost, 2: damaged})
    assert second is lost
    assert [error.kind for error in (first, third)] == ["OSError", "OSError"]
    errors = raising({0: damaged, 1: StepDamagedError("too")})
    assert [type(error).__name__ for error in errors[:2]] == ["StepDamagedError"] * 2


def test_one_that_does_not_come_is_an_error_in_bounded_time_and_from_then_on() -> None:
    processes, service = group(3, timeout_s=0.2)
    errors = at_once(processes[:2], lambda one: one.together(7, "save", lambda: None))
    for index, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        assert f"process {index} of 3 has waited" in str(error)
        assert "for the others to save too" in str(error)
    before = dict(service.values)
    again = at_once(processes[:2], lambda one: one.together(8, "save", lambda: None))
    assert [str(error) for error in again] == [str(error) for error in errors]
    assert service.values == before


def test_a_process_alone_asks_nobody() -> None:
    def never(_: Any) -> dict[str, str]:
        raise AssertionError

    alone = Processes(0, 1, None, 1.0)
    assert alone.together(alone.number(), "work", lambda: 5, never) == 5
    assert (alone.is_first, alone.are_several) == (True, False)
    with pytest.raises(ZeroDivisionError):
        alone.together(alone.number(), "work", lambda: 1 // 0)
