"""Processes that run a few lines of a training script under a fault, and what is seen of them from outside."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import checkpointing

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS: Final = 100.0

_PREAMBLE: Final = """
import errno, json, os, pathlib, resource, shutil, signal, subprocess, sys, time
import checkpointing
from scripts.faults.run import NUM_STEPS, digest, first_state, open_checkpoints, train, update

def tell(**seen):
    print(json.dumps(seen), flush=True)

def names(folder):
    return sorted(name for name in os.listdir(folder) if name != ".lock")

def newest(folder):
    return checkpointing.load(folder)[0].step

place = sys.argv[1]
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was seen of a fault.

    Attributes:
      fault: in a few words.
      how: how it was provoked.
      outcome: what was observed.
      ok: whether nothing was lost or changed without a word; ``None`` where it could not be tried.
    """

    fault: str
    how: str
    outcome: str
    ok: bool | None


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
      exit_code: negative for a signal; ``None`` where it hung and was killed.
      seen: what it told, the last of each name.
      errors: what it wrote to stderr.
      ended: on the system's monotonic clock.
    """

    exit_code: int | None
    seen: dict[str, Any]
    errors: str
    ended: float

    @property
    def last_line(self) -> str:
        """Of its errors: the exception, without its module."""
        lines = [line for line in self.errors.splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else "no error"

    @property
    def error(self) -> str:
        """The error that it told of, or the one that ended it."""
        return str(self.seen.get("error") or self.last_line)


class Child:
    """A running process."""

    def __init__(
        self, code: str, place: pathlib.Path | str, *, wrapper: Sequence[str] = (), log: str = ""
    ) -> None:
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(  # noqa: S603 (code of our own)
            [*wrapper, sys.executable, "-c", _PREAMBLE + code, str(place)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "REGRAIN_STEP_LOG": log},
        )

    def has_told(self, name: str) -> bool:
        """Waits until it tells something of this name; returns whether it did before it ended."""
        limit = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < limit:
            ended = self.process.poll() is not None
            if name in self._seen():
                return True
            if ended:
                break
            time.sleep(0.002)
        return False

    def wait(self) -> Ended:
        """Closes its input and waits for its end; kills it where it does not come to one."""
        exit_code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=LIMIT_SECONDS)
            exit_code = self.process.returncode
        ended = time.monotonic()
        self.kill()
        self._errors.seek(0)
        return Ended(exit_code, self._seen(), self._errors.read(), ended)

    def kill(self) -> None:
        """Ends it at once, if it has not ended yet."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it, and lets go of everything that was opened for it."""
        self.kill()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._output.close()
        self._errors.close()

    def _seen(self) -> dict[str, Any]:
        # A position of its own: the child writes through the same open file.
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), size, 0).decode()
        *lines, _ = text.split("\n")
        return {k: v for line in lines if line.startswith("{") for k, v in json.loads(line).items()}


@contextlib.contextmanager
def started(
    code: str, place: pathlib.Path | str, *, wrapper: Sequence[str] = (), log: str = ""
) -> Iterator[Child]:
    """A child that does not outlive the context."""
    child = Child(code, place, wrapper=wrapper, log=log)
    try:
        yield child
    finally:
        child.close()


def run_child(code: str, place: pathlib.Path | str, *, wrapper: Sequence[str] = ()) -> Ended:
    """Runs a few lines to their end."""
    with started(code, place, wrapper=wrapper) as child:
        return child.wait()


def newest_step(directory: pathlib.Path) -> int:
    """The newest whole step; 0 without one."""
    try:
        return checkpointing.load(directory)[0].step
    except (FileNotFoundError, checkpointing.CheckpointDamagedError):
        return 0


@functools.cache
def tmpfs_wrapper() -> tuple[str, ...]:
    """A command before a command: gives it a small file system of its own at its last argument.

    The mount lives in a namespace of the process and vanishes with it, however it ends. Empty where
    this system does not allow it.
    """
    mount = 'for folder; do :; done; mount -t tmpfs -o size=1m tmpfs "$folder" && exec "$@"'
    for flags in (["--mount"], ["--mount", "--user", "--map-root-user"]):
        if shutil.which("unshare"):
            wrapper = ("unshare", *flags, "sh", "-c", mount, "sh")
            with tempfile.TemporaryDirectory() as folder:
                command = [*wrapper, "test", "-d", folder]
                tried = subprocess.run(command, capture_output=True, check=False, timeout=60)  # noqa: S603
            if tried.returncode == 0:
                return wrapper
    return ()
