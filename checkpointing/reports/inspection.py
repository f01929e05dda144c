"""What a run's directory holds, told without touching it: its steps and their health, what they are of, what changed.

Nothing here raises because of what stands in a step: a damaged one is an entry like the others.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal

from checkpointing.checkpoints import load
from checkpointing.differences import check_allow, match
from checkpointing.errors import CheckpointMismatchError
from checkpointing.manifest import Identity, Manifest
from checkpointing.storage.base import LeftOver, StepFiles, Writer
from checkpointing.storage.directory import (
    RunDirectory,
    StepDamagedError,
    Verify,
    check_verify,
    processes_in,
)
from loader import Difference, PipelineConfig, Position, dataset_digest
from loader.batching import as_integer
from loader.progress import Work
from loader.stream import Stream

Health = Literal["intact", "damaged", "unreadable"]

_NO_FILES: Final = StepFiles({}, 0, None, None)
#: Of a manifest, what is not of the stream and train state, but of a place in it and of who wrote it.
_OF_A_PLACE: Final = frozenset(
    {"step", "position", "state", "next", "history", "packages", "files"}
)


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step of a run's directory.

    Attributes:
      step: its number.
      health: ``"intact"``, as far as was asked for; ``"damaged"``, so that a resume passes over it; or
        ``"unreadable"``, for a reason that lies outside of it (permissions, say).
      reason: what is wrong, else empty.
      files: what it takes up, and when it was written.
      position: where the run goes on from it; ``None`` where its manifest cannot be read.
      num_processes: that wrote it; ``None`` where its files do not tell.
      packages: versions of what wrote it.
      identity: a digest of the stream and train state that it belongs to: the same text, the same
        stream and tree of arrays.
    """

    step: int
    health: Health
    reason: str
    files: StepFiles
    position: Position | None
    num_processes: int | None
    packages: Mapping[str, str]
    identity: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "step": self.step,
            "health": self.health,
            "reason": self.reason,
            "written": self.files.committed,
            "save_seconds": self.files.save_seconds,
            "bytes": dict(self.files.item_bytes),
            "num_files": self.files.num_files,
            "position": None if self.position is None else dataclasses.asdict(self.position),
            "num_processes": self.num_processes,
            "packages": dict(self.packages),
            "identity": self.identity or None,
        }


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What a run's directory holds.

    Attributes:
      directory: as it was given.
      verify: how closely steps were looked at.
      steps: in rising order.
      newest: manifest of the newest intact step among those looked at; ``None`` where there is none.
        Of all steps it is that from which a resume would go on.
      left_overs: what stands beside the steps and does not count as one.
      writer: who has the directory open for writing, as far as this machine can see.
    """

    directory: str
    verify: Verify
    steps: tuple[StepReport, ...]
    newest: Manifest | None
    left_overs: tuple[LeftOver, ...]
    writer: Writer | None

    @property
    def intact(self) -> bool:
        """Whether there are steps, and none of them is damaged or unreadable."""
        return bool(self.steps) and all(one.health == "intact" for one in self.steps)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run if it goes on as it is; ``None`` without end, or where that is not known."""
        if self.newest is None:
            return None
        try:
            derived = self.newest.identity.stream.derivation(self.newest.history, self.directory)
        except ValueError:
            return None
        return derived.total_steps

    def diff(self, other: "RunReport") -> list[Difference]:
        """Compare the newest intact steps of two runs: stream, settings, place, and train state bit for bit.

        Both train states are read, one after the other, and held in memory one at a time.

        Returns:
          All differences, with one for each leaf whose values differ; none if the steps are the same.

        Raises:
          ValueError: one of the runs has no intact step.
          OSError, RuntimeError, CheckpointDamagedError: as `load`, of one of the two steps.
        """
        before, now = _newest(self), _newest(other)
        found = before.identity.diff(now.identity)
        if before.position != now.position:
            found.append(Difference("position", str(before.position), str(now.position)))
        if before.files == now.files:  # by digest: copies of one step
            return found
        named = {one.name for one in found}
        digests, others = _leaf_digests(self), _leaf_digests(other)
        return found + [
            Difference(name, _short(digests[path]), _short(others[path]), "values")
            for path in digests
            if path in others and digests[path] != others[path]
            if (name := f"train_state{path}") not in named
        ]

    def diff_config(self, config: PipelineConfig) -> list[Difference]:
        """In what a config is not that of the newest intact step; the data are not looked at.

        Raises:
          ValueError: there is no intact step, or its stream has no config of its own.
        """
        before = _newest(self).identity
        now = dataclasses.replace(before, stream=before.stream.with_config(config))
        return before.diff(now)

    def diff_stream(self, stream: Stream, allow: Collection[str] = ()) -> list[Difference]:
        """What a resume of the newest intact step on a stream would refuse, but for the user's own.

        Data, config, order, transform and the IDs that come next are compared as
        `Checkpoints.resume` does it. Train state and ``run_config`` are not: they are not at hand.

        Args:
          stream: the `Pipeline`, `Mixture` or `GrainStream` that is to go on. Its data are read,
            where its source must do so to identify them.
          allow: as for `Checkpoints.resume`.

        Returns:
          All differences; none where it would go on.

        Raises:
          TypeError: it is no stream.
          ValueError: there is no intact step; ``allow`` holds something else than may change; what was
            trained on already is skipped.
        """
        if not isinstance(stream, Stream):
            raise TypeError(
                f"a stream is a Pipeline, a Mixture or a GrainStream, not a {type(stream).__name__}"
            )
        allowed = check_allow(stream, allow)
        found = _newest(self)
        now = Identity.of(stream, found.identity.run_config, found.identity.train_state)
        try:
            match(found, now, stream, self.directory, allowed, stream.iterate)
        except CheckpointMismatchError as error:
            return list(error.differences)
        except StepDamagedError as error:
            raise ValueError(f"{self.directory} step {found.step}: {error}") from error
        return []

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        newest = self.newest
        return {
            "directory": self.directory,
            "verify": self.verify,
            "intact": self.intact,
            "newest_intact": None if newest is None else newest.step,
            "total_steps": self.total_steps,
            "steps": [one.to_dict() for one in self.steps],
            "left_overs": [dataclasses.asdict(one) for one in self.left_overs],
            "writer": None if self.writer is None else dataclasses.asdict(self.writer),
            "changes": [] if newest is None else [dict(change) for change in newest.history],
            "stream": None if newest is None else _stream_dict(newest),
            "train_state": None if newest is None else _train_state_dict(newest.identity),
            "run_config": None if newest is None else dict(newest.identity.run_config),
            "packages": None if newest is None else dict(newest.packages),
        }


def _newest(report: RunReport) -> Manifest:
    if report.newest is None:
        raise ValueError(f"{report.directory} holds no intact step to compare with")
    return report.newest


def _leaf_digests(report: RunReport) -> dict[str, str]:
    """A digest of the values of each leaf in the newest intact step, by path."""
    _, leaves = load(report.directory, _newest(report).step, verify=report.verify)
    return {path: dataset_digest(leaf) for path, leaf in leaves.items()}


def _short(digest: str) -> str:
    return f"sha256:{digest[:12]}..."


def inspect_run(
    directory: str | os.PathLike[str],
    *,
    steps: Collection[int] | None = None,
    verify: Verify = "manifest",
) -> RunReport:
    """Tells what a run's directory holds. Nothing in it changes, and a run may be writing meanwhile.

    Args:
      directory: of the run.
      steps: numbers of those to look at; by default all.
      verify: ``"manifest"`` reads each step's manifest and iterator, and compares names and sizes of
        its other files; ``"full"`` digests all of them, as a resume does.

    Raises:
      FileNotFoundError: there is no such directory, or it has not one of ``steps``.
      OSError: the directory cannot be read.
      TypeError, ValueError: a bad argument, such as the directory of one step.
    """
    check_verify(verify)
    wanted = None if steps is None else _numbers(steps)
    run = RunDirectory(directory, write=False)
    there = run.steps()
    missing = sorted(set(wanted or ()) - set(there))
    if missing:
        held = ", ".join(map(str, there[-8:])) or "none"
        raise FileNotFoundError(
            f"{os.fspath(directory)} has no step {missing[0]}; the newest that it has: {held}"
        )
    chosen = there if wanted is None else wanted
    reports: list[StepReport] = []
    newest: Manifest | None = None
    with Work(f"check of {os.fspath(directory)}", len(chosen), "steps") as work:
        for step in chosen:  # which grows below
            looked_at = _look_at(run, step, verify)
            if looked_at is not None:
                report, manifest = looked_at
                reports.append(report)
                newest = manifest if report.health == "intact" else newest
            elif wanted is None:  # a run has deleted it, for a newer step
                chosen += [one for one in run.steps() if one > chosen[-1]]
            work.advance()
    left_overs = tuple(run.left_overs())
    return RunReport(os.fspath(directory), verify, tuple(reports), newest, left_overs, run.writer())


def _numbers(steps: Collection[int]) -> list[int]:
    if not isinstance(steps, Iterable):
        raise TypeError(
            f"steps lists numbers of steps, such as [{steps!r:.40}], and is {steps!r:.40}"
        )
    return sorted({as_integer("a step", step) for step in steps})


def _look_at(
    run: RunDirectory, step: int, verify: Verify
) -> tuple[StepReport, Manifest | None] | None:
    """One step, and its manifest where that can be read; ``None`` if it was deleted in the meantime."""
    health: Health = "intact"
    reason = ""
    manifest: Manifest | None = None
    try:
        manifest = run.check(step, verify)
    except StepDamagedError as damage:
        health, reason = "damaged", str(damage)
    except OSError as error:
        health, reason = "unreadable", str(error)
    if manifest is None and step not in run.steps():
        return None  # its writer has deleted it, as an old one
    if manifest is None:
        manifest = _said(run, step)
    try:
        files = run.step_files(step)
    except OSError:
        files = _NO_FILES
    report = StepReport(
        step,
        health,
        reason,
        files,
        None if manifest is None else manifest.position,
        None if manifest is None else processes_in(manifest),
        {} if manifest is None else manifest.packages,
        "" if manifest is None else _digest(manifest),
    )
    return report, manifest


def _said(run: RunDirectory, step: int) -> Manifest | None:
    """What a step that is not whole says of itself, if it still does."""
    try:
        return run.manifest(step)
    except (OSError, ValueError):
        return None


def _digest(manifest: Manifest) -> str:
    """Of all that a manifest says of the stream and train state, and not of a place in it."""
    identity = {
        name: value for name, value in manifest.to_dict().items() if name not in _OF_A_PLACE
    }
    text = json.dumps(identity, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _stream_dict(manifest: Manifest) -> dict[str, Any]:
    """What a stream is known by, without the marks of its data."""
    stream = manifest.identity.stream
    return {"kind": stream.kind, **stream.report()}


def _train_state_dict(identity: Identity) -> dict[str, Any]:
    leaves = [{**leaf.to_dict(), "bytes": leaf.num_bytes} for leaf in identity.train_state]
    return {
        "num_leaves": len(leaves),
        "bytes": _sum(leaf["bytes"] for leaf in leaves),
        "leaves": leaves,
    }


def _sum(sizes: Iterable[int | None]) -> int | None:
    """The sum, if all of them are known."""
    known = list(sizes)
    return None if None in known else sum(size for size in known if size is not None)
