"""What a run has seen, from its directory alone: its manifests tell the config, and each change on the way."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

import loader
from checkpointing.manifest import Manifest, package_versions
from checkpointing.storage.directory import RunDirectory
from loader import (
    Fingerprint,
    Mixture,
    MixtureProvenance,
    Pipeline,
    Provenance,
    RecordSource,
)
from loader.identity.base import Derivation
from loader.sources.identifiers import row_column
from loader.sources.source_or_stream import check_is_no_stream

#: Up to so many records all IDs are digested, a second's work, to see whether they are those of the run.
DIGEST_IDS_UP_TO: Final = 1 << 26

_Directory = str | os.PathLike[str]
_Ids = Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]


@overload
def provenance(run: Pipeline, *, until: SupportsIndex | None = None) -> Provenance: ...
@overload
def provenance(run: Mixture, *, until: SupportsIndex | None = None) -> MixtureProvenance: ...
@overload
def provenance(run: _Directory, sources: None = None, *, ahead: bool = False) -> Any: ...
@overload
def provenance(
    run: _Directory, sources: Mapping[str, RecordSource], *, ahead: bool = False
) -> MixtureProvenance: ...
@overload
def provenance(run: _Directory, sources: RecordSource, *, ahead: bool = False) -> Provenance: ...
def provenance(
    run: _Directory | Pipeline | Mixture,
    sources: RecordSource | Mapping[str, RecordSource] | None = None,
    *,
    ahead: bool = False,
    until: SupportsIndex | None = None,
) -> Provenance | MixtureProvenance:
    """Return the provenance of a run from its newest intact checkpoint, or of a stream.

    The rows are always derived, and the run may be writing meanwhile. IDs are derived if all are row
    numbers, which their digest in the checkpoint shows for up to 67,108,864 records. Other IDs need
    the source.

    Args:
      run: the run directory, or a stream whose config never changed.
      sources: the source of the run's records; of a mixture, the sources of some parts or all, by
        name. Only IDs are read.
      ahead: also answer for steps after the checkpoint, as they come if nothing changes.
      until: of a stream, the number of steps that were delivered. Default: all.

    Returns:
      A `Provenance`, with a segment for each change of the config; of a mixture, a
      `MixtureProvenance`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CheckpointDamagedError: no checkpoint is intact.
      TypeError: ``until`` with a directory; ``sources`` or ``ahead`` with a stream.
      ValueError: a source does not hold the run's records; there is no such part; this version
        cannot derive the run's order or its changes.
    """
    if not isinstance(run, str | os.PathLike):
        if sources is not None or ahead:
            raise TypeError("sources and ahead are for a run directory: a stream takes until alone")
        return loader.provenance(run, until)
    if until is not None:
        raise TypeError("until is for a stream: the checkpoint in a run directory has its step")
    manifest, derived, where = _derived(run)
    if derived.turns is not None:
        return _of_mixture(manifest, derived, where, sources, ahead=ahead)
    if isinstance(sources, Mapping):
        raise ValueError(f"{where} is of one pipeline: give its source, not sources by name")
    return _of_pipeline(manifest, derived, where, sources, ahead=ahead)


def _of_pipeline(
    manifest: Manifest, derived: Derivation, where: str, source: RecordSource | None, *, ahead: bool
) -> Provenance:
    segments, data = derived.parts[""]
    try:
        rows_only = Provenance(segments, manifest.position)
    except ValueError as error:
        raise ValueError(f"the history in {where} cannot be followed: {error!r}") from error
    ids, ids_from = _known_ids(data, source, where)
    whole = Provenance(segments, None, ids, ids_from)
    if ids is not None:
        _check_next_ids(manifest, whole, where)
    if ahead:
        return whole
    return Provenance(segments, rows_only.stop, ids, ids_from)


def _of_mixture(
    manifest: Manifest,
    derived: Derivation,
    where: str,
    sources: RecordSource | Mapping[str, RecordSource] | None,
    *,
    ahead: bool,
) -> MixtureProvenance:
    sources = {} if sources is None else sources
    turns: Any = derived.turns
    if not isinstance(sources, Mapping):
        raise ValueError(f"{where} is of a mixture: give the sources by the names of its parts")
    unknown = sorted(set(sources) - set(derived.parts))
    if unknown:
        raise ValueError(f"{where} has the parts {', '.join(derived.parts)}, not {unknown[0]!r}")
    counts = turns.before(manifest.step)
    found = {}
    for name, (segments, data) in derived.parts.items():
        ids, ids_from = _known_ids(data, sources.get(name), f"part {name!r} of {where}")
        stop = None if ahead else segments[-1].position(counts[name])
        found[name] = Provenance(segments, stop, ids, ids_from)
    step = None if ahead else manifest.step
    whole = MixtureProvenance(turns, found, step, derived.total_steps)
    if ahead and all(part.source is not None for part in found.values()):
        _check_next_ids(manifest, whole, where)
    return whole


def _derived(directory: str | os.PathLike[str]) -> tuple[Manifest, Derivation, str]:
    """The newest whole checkpoint, from what its batches can be derived, and its name for messages."""
    manifest = newest_manifest(directory)
    where = f"{os.fspath(directory)} step {manifest.step}"
    return manifest, manifest.identity.stream.derivation(manifest.history, where), where


def newest_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of the newest whole checkpoint in a directory.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CheckpointDamagedError: there are checkpoints, and none is whole.
    """
    run = RunDirectory(directory, write=False)
    return run.newest(lambda step: run.check(step, verify="manifest"))


class _IdColumn:
    """IDs as a source without fields, so that they alone are digested."""

    fields: Final[Mapping[str, Any]] = {}

    def __init__(self, num_records: int, ids: _Ids) -> None:
        self._num_records, self.ids = num_records, ids

    def __len__(self) -> int:
        return self._num_records

    def read(self, _rows: npt.NDArray[np.int64], /) -> dict[str, Any]:
        return {}


def _known_ids(expected: Fingerprint, source: RecordSource | None, where: str) -> tuple[Any, str]:
    """What gives the IDs of a run, if anything does, and how that is known."""
    if source is not None:
        _check_source(expected, source, where)
        return source, "those of the source"
    row_numbers = _IdColumn(expected.num_records, lambda rows: rows)
    if expected.files is not None:
        known = expected.columns["id"] == row_column(expected.num_records)
    else:
        known = expected.columns["id"].dtype == "int64" and _have_digest(row_numbers, expected)
    if known:
        return row_numbers, "row numbers, as their digest in the checkpoint shows"
    return None, ""


def _check_source(expected: Fingerprint, source: RecordSource, where: str) -> None:
    """Raises if a source's IDs are not those of the run; they are read, and no record is."""
    check_is_no_stream(source)
    if len(source) != expected.num_records:
        raise ValueError(
            f"the source has {len(source)} records, and {where} is of {expected.num_records}: give "
            "the source of that run"
        )
    if expected.columns["id"].dtype == "unread":  # a revision, which takes no reading
        same = source.fingerprint().digest == expected.digest
    elif expected.files is not None:
        same = getattr(source, "id_column", None) == expected.columns["id"]
    else:
        column = _IdColumn(len(source), source.ids)
        same = len(source) > DIGEST_IDS_UP_TO or _have_digest(column, expected)
    if not same:
        raise ValueError(f"the source's IDs are not those of {where}: give the source of that run")


def _have_digest(ids: _IdColumn, expected: Fingerprint) -> bool:
    if len(ids) > DIGEST_IDS_UP_TO:
        return False
    found = loader.fingerprint(ids, chunk_records=expected.chunk_records)
    return found.columns["id"] == expected.columns["id"]


def _check_next_ids(manifest: Manifest, whole: Provenance | MixtureProvenance, where: str) -> None:
    """Raises if the order that is derived now is not the one in which the run goes on."""
    expected, step = manifest.next_ids, manifest.step
    found: list[int | str] = []
    while len(found) < len(expected) and (whole.num_steps is None or step < whole.num_steps):
        ids = whole.records_at(step, limit=len(expected) - len(found)).ids
        found += [] if ids is None else ids.tolist()
        step += 1
    if tuple(found) != expected:
        now = package_versions()
        moved = [f"{k} {v}" for k, v in manifest.packages.items() if now.get(k) != v]
        raise ValueError(
            f"{where} goes on with other IDs than are derived for it now: the order has moved"
            + (f" since {', '.join(moved)}" if moved else "")
        )
