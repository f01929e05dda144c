"""Compare a resumed run with the uninterrupted one: its batches and its final checkpoint."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from checkpointing.manifest import Manifest
from checkpointing.proof.step_log import Delivery, Part
from loader import dataset_digest
from loader.identity.differences import in_print
from loader.identity.digests import raw_bytes


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """A difference between a resumed run and the uninterrupted one.

    Attributes:
      what: ``"ids"``, ``"mask"``, ``"place"`` (epoch or offset), ``"replay"``, ``"sequence"``,
        ``"missing step"``, ``"extra step"``, ``"incomplete step"`` (not all processes delivered it, and
        all went on), ``"checkpoint"``, the path of a leaf of the train state, or the name of a field.
      where: the step (numbered from 0, as in `Pipeline.ids`) and the attempt.
      reference: the uninterrupted run's value; for a replay, that of the first time.
      drilled: the resumed run's value.
      note: how many more there are.
    """

    what: str
    where: str
    reference: str
    drilled: str
    note: str = ""

    def __post_init__(self) -> None:
        shown = in_print([self.reference, self.drilled])
        object.__setattr__(self, "reference", shown[self.reference])
        object.__setattr__(self, "drilled", shown[self.drilled])


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The batches of one attempt, in one process or several.

    Attributes:
      name: for messages.
      checkpoint: step of the newest checkpoint at its start; 0 without one.
      deliveries: the batches that all processes have delivered, in order, joined.
      parts: the batches that only some processes have delivered.
    """

    name: str
    checkpoint: int
    deliveries: Sequence[Delivery]
    parts: Sequence[Part] = ()


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """The distance of a leaf of a run's final train state from the uninterrupted run's.

    Attributes:
      run: the run with the state.
      path: of the leaf.
      changed: number of elements that are not bit for bit equal.
      size: number of elements.
      max_absolute: largest distance of two elements; ``None`` if it has no meaning: for integers and keys,
        NaN beside a number, infinities.
      max_relative: the same as a share of the largest finite absolute value in the reference's leaf.
    """

    run: str
    path: str
    changed: int
    size: int
    max_absolute: float | None
    max_relative: float | None

    def is_within(self, bound: float) -> bool:
        """Whether the distance is at most this share of the largest value; nothing is within 0."""
        return bound > 0 and self.max_relative is not None and self.max_relative <= bound


@dataclasses.dataclass(frozen=True)
class FinalState:
    """A run's newest checkpoint.

    Attributes:
      step: number of batches that it was trained on.
      num_leaves: number of leaves of the train state.
      sha256: over all leaves: path, dtype, shape and bytes.
    """

    step: int
    num_leaves: int
    sha256: str


def compare_streams(
    reference: Sequence[Delivery], stretches: Iterable[Stretch]
) -> list[RunDifference]:
    """Compare every batch of a resumed run with the uninterrupted run, and with its own first time.

    Args:
      reference: all batches of the uninterrupted run, in one process.
      stretches: the attempts of the resumed run, in order. A step counts as delivered if all processes of
        an attempt have delivered it. Parts must be their process's rows of the same batch, and may only
        come after the last batch that all have.

    Returns:
      The first difference of each kind, with the number of further steps that have it.
    """
    expected = {delivery.position.step: delivery for delivery in reference}
    first_tries: dict[int, Delivery] = {}
    found: dict[str, list[RunDifference]] = {}

    def add(differences: Iterable[RunDifference]) -> None:
        for one in differences:
            found.setdefault(one.what, []).append(one)

    for stretch in stretches:
        next_step = stretch.checkpoint
        for delivery in stretch.deliveries:
            step = delivery.position.step
            where = f"step {step}, {stretch.name}"
            if step != next_step:
                add([RunDifference("sequence", where, f"step {next_step} next", f"step {step}")])
            next_step = step + 1
            if step in expected:
                add(_diff_deliveries(where, expected[step], delivery))
            else:
                add([RunDifference("extra step", where, "absent", _ids(delivery.ids))])
            first = first_tries.setdefault(step, delivery)
            add(
                dataclasses.replace(one, what="replay", note=f"{one.what} of its first try differ")
                for one in list(_diff_deliveries(where, first, delivery))[:1]
            )
        for part in stretch.parts:
            add(_diff_part(stretch, part, expected.get(part.delivery.position.step)))
    add(
        RunDifference("missing step", f"step {step}", _ids(expected[step].ids), "never delivered")
        for step in sorted(expected.keys() - first_tries.keys())
    )
    return [_first(differences) for differences in found.values()]


def compare_batches(
    where: str, reference: Mapping[str, Any], drilled: Mapping[str, Any]
) -> list[RunDifference]:
    """Compare two batches bit for bit.

    Args:
      where: the step, for messages.
      reference: the uninterrupted run's arrays with a leading batch axis, usually with ``id``.
      drilled: the resumed run's.

    Returns:
      A difference for each field that is not equal, IDs and masks first. It names the first slot that
      differs, and the reference's ID there.
    """
    names = dict.fromkeys(["id", "mask", *reference, *drilled])
    pairs = ((name, reference.get(name), drilled.get(name)) for name in names)
    ids = np.asarray(reference["id"]) if "id" in reference else None
    found = (_diff_field(name, where, ids, a, b) for name, a, b in pairs)
    return [difference for difference in found if difference is not None]


def compare_checkpoints(
    name: str,
    reference: tuple[Manifest, Mapping[str, Any]],
    drilled: tuple[Manifest, Mapping[str, Any]],
    within: float = 0.0,
) -> list[RunDifference]:
    """Compare two results of `load`: their place in the stream, and each leaf bit for bit.

    Args:
      name: of the drilled run.
      reference: the uninterrupted run's.
      drilled: the resumed one's.
      within: leaves of floating-point numbers may differ by this share of their largest absolute value.
    """
    (one, leaves), (other, other_leaves) = reference, drilled
    places = [
        ("position", one.position, other.position),
        ("next IDs", _ids(one.next_ids), _ids(other.next_ids)),
        ("next element", one.place.ahead.digest, other.place.ahead.digest),
    ]
    differences = [
        RunDifference("checkpoint", f"{what}, {name}", str(a), str(b))
        for what, a, b in places
        if a != b
    ]
    close = {
        one.path for one in leaf_differences(name, leaves, other_leaves) if one.is_within(within)
    }
    for path in {**leaves, **other_leaves}:
        if path not in close:
            differences += _diff_leaf(path, name, leaves.get(path), other_leaves.get(path))
    return differences


def leaf_differences(
    name: str, reference: Mapping[str, Any], drilled: Mapping[str, Any]
) -> list[LeafDifference]:
    """Distances of the leaves that two train states have in common and that are not equal.

    Args:
      name: of the drilled run.
      reference: the uninterrupted run's leaves by path, as from `load`.
      drilled: the resumed one's.
    """
    found = []
    for path in reference.keys() & drilled.keys():
        a, b = np.asarray(reference[path]), np.asarray(drilled[path])
        if a.dtype == b.dtype and a.shape == b.shape and a.tobytes() != b.tobytes():
            found.append(LeafDifference(name, path, _changed(a, b), a.size, *_distance(a, b)))
    return sorted(found, key=lambda one: one.path)


def final_state(manifest: Manifest, leaves: Mapping[str, Any]) -> FinalState:
    """The summary of a checkpoint, as from `load`."""
    lines = [f"{path}\0{dataset_digest(leaves[path])}\n" for path in sorted(leaves)]
    return FinalState(
        manifest.step, len(leaves), hashlib.sha256("".join(lines).encode()).hexdigest()
    )


def _diff_deliveries(where: str, reference: Delivery, drilled: Delivery) -> Iterator[RunDifference]:
    if reference.position != drilled.position:
        yield RunDifference("place", where, str(reference.position), str(drilled.position))
    for what, ours, theirs in (
        ("ids", reference.ids, drilled.ids),
        ("mask", reference.mask, drilled.mask),
    ):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            slot = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            slots = f"{where}, from slot {slot} on"
            yield RunDifference(what, slots, _ids(ours[slot:]), _ids(theirs[slot:]))


def _diff_field(
    name: str, where: str, ids: npt.NDArray[Any] | None, reference: Any, drilled: Any
) -> RunDifference | None:
    a, b = (None if value is None else np.asarray(value) for value in (reference, drilled))
    if a is None or b is None or a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        same = a is b is None
        return None if same else RunDifference(name, where, _kind(a), _kind(b))
    if a.dtype.kind in "SU":
        differs = (a != b).reshape(len(a), -1)  # the arrays may have different widths
    elif a.dtype != b.dtype:
        return RunDifference(name, where, _kind(a), _kind(b))
    else:
        differs = np.any(_bytes(a) != _bytes(b), axis=1).reshape(len(a), -1)
    slots = np.flatnonzero(differs.any(axis=1))
    if not slots.size:
        return None
    slot = int(slots[0])
    element = int(np.flatnonzero(differs[slot])[0])
    note = f"{len(slots):,} of {len(a):,} records differ"
    if a[slot].size > 1:
        place = ", ".join(map(str, np.unravel_index(element, a.shape[1:])))
        count = int(differs[slot].sum())
        note = (
            f"[{place}] of the record, {count:,} of whose {a[slot].size:,} elements differ; {note}"
        )
    before, after = (repr(array[slot].reshape(-1)[element].item()) for array in (a, b))
    if ids is not None and slot < len(ids):
        slot_and_id = f"slot {slot}, ID {ids[slot].item()!r}"
    else:
        slot_and_id = f"slot {slot}"
    return RunDifference(name, f"{where}, {slot_and_id}", before, after, note)


def _kind(array: npt.NDArray[Any] | None) -> str:
    return "absent" if array is None else f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _diff_part(stretch: Stretch, part: Part, expected: Delivery | None) -> Iterator[RunDifference]:
    """Faults of a batch that not all processes have delivered."""
    position = part.delivery.position
    where = f"step {position.step}, {stretch.name}, process {part.process} of {part.count}"
    if stretch.deliveries and position.step <= stretch.deliveries[-1].position.step:
        yield RunDifference("incomplete step", where, "all processes", "not all, and they went on")
    if expected is None:
        yield RunDifference("extra step", where, "absent", _ids(part.delivery.ids))
        return
    size = len(expected.ids)
    rows = slice(part.process * size // part.count, (part.process + 1) * size // part.count)
    share = dataclasses.replace(expected, ids=expected.ids[rows], mask=expected.mask[rows])
    yield from _diff_deliveries(where, share, part.delivery)


def _diff_leaf(path: str, name: str, reference: Any, drilled: Any) -> Iterator[RunDifference]:
    if reference is None or drilled is None:
        yield RunDifference(path, name, _leaf(reference), _leaf(drilled))
        return
    a, b = np.asarray(reference), np.asarray(drilled)
    if a.dtype != b.dtype or a.shape != b.shape:
        yield RunDifference(path, name, _leaf(a), _leaf(b))
    elif a.tobytes() != b.tobytes():
        note = f"{_changed(a, b):,} of {a.size:,} elements"
        yield RunDifference(path, name, _leaf(a), _leaf(b), note)


def _changed(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    return int(np.any(_bytes(a) != _bytes(b), axis=1).sum())


def _distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[float | None, float | None]:
    """Largest absolute distance of two leaves, and its share of the first one's largest value."""
    if not jnp.issubdtype(a.dtype, np.inexact):
        return None, None
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.all(np.isfinite(a) & np.isfinite(b) | same):
        return None, None
    absolute = float(np.max(np.abs(a[~same] - b[~same]), initial=0))
    largest = float(np.max(np.abs(a[np.isfinite(a)]), initial=0))
    return absolute, absolute / largest if largest else None


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of each element: uint8[size, itemsize]."""
    return np.frombuffer(raw_bytes(array), np.uint8).reshape(array.size, -1)


def _leaf(leaf: Any) -> str:
    if leaf is None:
        return "absent"
    array = np.asarray(leaf)
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype}[{shape}] sha256:{dataset_digest(array)[:12]}"


def _ids(ids: Sequence[int | str]) -> str:
    """The first few of them."""
    return ", ".join(map(str, ids[:6])) + (", ..." if len(ids) > 6 else "") or "none"


def _first(differences: list[RunDifference]) -> RunDifference:
    first, more = differences[0], len(differences) - 1
    if not more:
        return first
    note = "; ".join(filter(None, [first.note, f"and {more:,} more"]))
    return dataclasses.replace(first, note=note)
