"""The processes of a run: what all of them must have done, and found alike, before the run goes on.

JAX's own coordination service carries it, which every process has once `jax.distributed` is
initialized: a short text from each process to the first one, and its verdict back to all.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_MAX_TEXT: Final = 1000
#: Kinds of failure after which a run may go on in some way, the worse one last. All others are worse.
_MILDER: Final = ("StepDamagedError", "CheckpointMismatchError")


class ElsewhereError(RuntimeError):
    """Another process has failed at what all of them do together.

    Attributes:
      process: its number.
      kind: name of the type of its exception; ``""`` where it found something else than process 0.
    """

    def __init__(self, process: int, kind: str, text: str) -> None:
        self.process, self.kind = process, kind
        super().__init__(f"process {process}: {text}")


class Processes:
    """The processes that save and resume a run together; one alone has nothing to wait for.

    All of them call the same methods, in the same order.

    Args:
      index: number of this one.
      count: how many there are.
      client: JAX's own, of its coordination service (it has no public type); ``None`` for a process alone.
      timeout_s: seconds that one waits for the others.
    """

    def __init__(self, index: int, count: int, client: Any, timeout_s: float) -> None:
        self.index, self.count = index, count
        self._client = client
        self._timeout_s = timeout_s
        self._group = next(_groups) if client else 0
        self._numbers = itertools.count()
        #: What has gone wrong between the processes. No two of them can be taken to be at one place since.
        self._lost: RuntimeError | None = None

    @property
    def are_several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that does what is done once."""
        return self.index == 0

    @property
    def log_level(self) -> int:
        """For what all of them find alike: one line of it is enough."""
        return logging.INFO if self.is_first else logging.DEBUG

    def number(self) -> int:
        """The next number, for `together`; each process takes it at the same point of the program."""
        return next(self._numbers)

    def together(
        self,
        number: int,
        what: str,
        work: Callable[[], Result],
        same: Callable[[Result], Mapping[str, str]] | None = None,
    ) -> Result:
        """Does something on every process, and waits until all have done it.

        Args:
          number: from `number`.
          what: names it, once for each number; for the error too.
          work: what to do.
          same: of its result, what all processes must have in common: short texts by name.

        Returns:
          The result of ``work``.

        Raises:
          ElsewhereError: another process has failed, or its result differs from that of process 0.
          RuntimeError: not all of them came in time; from then on it is raised at once.
          Exception: what ``work`` has raised, where no other process has failed in a worse way.
        """
        if self._client is None:
            return work()
        try:
            result = work()
        except Exception as error:
            failure = {"kind": type(error).__name__, "text": str(error)[:_MAX_TEXT]}
            verdict = self._verdict(self._client, number, what, failure, None, asked=bool(same))
            if verdict["kind"] == failure["kind"]:
                raise
            raise ElsewhereError(**verdict) from error
        own = dict(same(result)) if same else None
        verdict = self._verdict(self._client, number, what, None, own, asked=bool(same))
        if verdict["kind"] is not None:
            raise ElsewhereError(**verdict)
        return result

    def exchange(self, number: int, name: str, own: Any, others: Iterable[int]) -> dict[int, Any]:
        """Publish a JSON value, and return those that other processes publish.

        It is part of the work of `together`, with the same number: every process publishes once.
        """
        place = f"regrain/{self._group}/{number}/{name}"
        milliseconds = max(1, int(1000 * self._timeout_s))
        self._client.key_value_set(f"{place}/{self.index}", json.dumps(own))
        return {
            other: json.loads(self._client.blocking_key_value_get(f"{place}/{other}", milliseconds))
            for other in others
        }

    def _verdict(
        self,
        client: Any,
        number: int,
        what: str,
        failure: Mapping[str, str] | None,
        own: Mapping[str, str] | None,
        *,
        asked: bool,
    ) -> dict[str, Any]:
        """Tells the others what came of it, if it is a failure, and waits for what that means for all.

        In the good case each process sends and receives a few hundred bytes, whatever their number.
        """
        if self._lost is not None:
            raise RuntimeError(str(self._lost)) from self._lost
        place = f"regrain/{self._group}/{number}/{what.replace(' ', '_')}"
        milliseconds = max(1, int(1000 * self._timeout_s))
        began = time.monotonic()
        try:
            if asked and self.is_first:
                client.key_value_set(f"{place}/first", json.dumps(own))
            elif own is not None:
                first = json.loads(client.blocking_key_value_get(f"{place}/first", milliseconds))
                failure = None if first is None else _difference(first, own)
            if failure is not None:
                client.key_value_set(f"{place}/failed/{self.index}", json.dumps(failure))
            client.wait_at_barrier(place, milliseconds)
            if self.is_first:
                failed = dict(client.key_value_dir_get(f"{place}/failed"))
                client.key_value_set(f"{place}/verdict", json.dumps(_worst(failed)))
                if number > 0:  # all have read those before the one of this number
                    client.key_value_delete(f"regrain/{self._group}/{number - 1}/")
            verdict: dict[str, Any] = json.loads(
                client.blocking_key_value_get(f"{place}/verdict", milliseconds)
            )
        except Exception as error:
            self._lost = RuntimeError(
                f"process {self.index} of {self.count} has waited {time.monotonic() - began:.1f} s for "
                f"the others to {what} too, and not all of them came: one has ended or hangs, or they "
                f"do not call the same methods. Start all of them again. JAX says: {error}"
            )
            raise self._lost from error
        return verdict


_groups: Final = itertools.count()


def _difference(first: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str] | None:
    """In what a process differs from the first one, as a failure."""
    different = [
        f"{name} is {own.get(name)}, and {first.get(name)} in process 0"
        for name in {**first, **own}
        if own.get(name) != first.get(name)
    ]
    if not different:
        return None
    text = f"is not at the same place of the same run: {'; '.join(different)}"
    return {"kind": "", "text": text[:_MAX_TEXT]}


def _worst(failed: Mapping[str, str]) -> dict[str, Any]:
    """The worst of what went wrong, by process; the first of those that are equally bad."""
    failures = {int(key.rpartition("/")[2]): json.loads(value) for key, value in failed.items()}
    if not failures:
        return {"process": 0, "kind": None, "text": ""}
    worst = max(sorted(failures), key=lambda process: _badness(failures[process]["kind"]))
    return {"process": worst, **failures[worst]}


def _badness(kind: str) -> int:
    return _MILDER.index(kind) if kind in _MILDER else len(_MILDER)
