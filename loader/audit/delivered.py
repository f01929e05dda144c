"""A delivered batch, from wherever it comes, and whether its fields are those of its records."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.audit.keys import KeyCheck, shown_of
from loader.audit.reading import another_order
from loader.audit.report import Offender, Tally
from loader.identity.digests import without_padding
from loader.keys import KEY_FIELD
from loader.sources import RecordSource

#: Batches of a stream with a transform whose rows the source is asked for in two orders.
TRIED_BATCHES: Final = 64

_HANGS_ON_ORDER: Final = "the source gives another value when rows are asked for in another order"

Alignment = Callable[[dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Delivered:
    """A batch.

    Attributes:
      step: its number among those delivered.
      ids: int64[slots] or str[slots].
      mask: bool[slots]; ``None`` where only IDs are at hand.
      fields: all else that it holds.
      used: slots up to the last whose ID is not that of padding.
    """

    step: int
    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_] | None
    fields: Mapping[str, npt.NDArray[Any]]
    used: int

    @classmethod
    def of(cls, batch: Mapping[str, Any], step: int, *, masks: bool) -> "Delivered":
        """Takes a mapping that holds at least ``id`` and, unless only IDs are at hand, ``mask``.

        Raises:
          TypeError, ValueError: it is no batch.
        """
        if not isinstance(batch, Mapping) or "id" not in batch or (masks and "mask" not in batch):
            held = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                f"batch {step} must be a dict with at least id and mask, not hold {held}; an "
                "audit follows records by their IDs"
            )
        ids = np.asarray(batch["id"])
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iuU"):
            raise ValueError(
                f"id of batch {step} is {ids.dtype}{list(ids.shape)}; it must be one axis of "
                "integers or strings"
            )
        if ids.dtype.kind != "U":
            ids = ids.astype(np.int64)
        mask = None
        if masks:
            given = np.asarray(batch["mask"])
            mask = given.astype(np.bool_)
            if mask.shape != ids.shape or not np.array_equal(mask, given):
                raise ValueError(
                    f"mask of batch {step} is {given.dtype}{list(given.shape)}; for {len(ids)} IDs "
                    "it must be as many truth values"
                )
        fields = {n: np.asarray(v) for n, v in batch.items() if n not in ("id", "mask")}
        filled = np.flatnonzero(~is_padding(ids))
        return cls(step, ids, mask, fields, int(filled[-1]) + 1 if filled.size else 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.ids.nbytes + sum(field.nbytes for field in self.fields.values())


def is_padding(ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which slots have the ID of padding."""
    return np.asarray(ids == ("" if ids.dtype.kind == "U" else -1))


class FieldCheck:
    """Compares what batches hold with what the source holds, and asks the user's alignment function.

    Attributes:
      compared: records whose fields were compared with the source's.
      judged: records that the user's function was applied to.
      tried: records that the source was asked for in two orders of rows, where a transform leaves
        nothing to compare with.
    """

    def __init__(
        self,
        source: RecordSource,
        alignment: Alignment | None,
        tally: Tally,
        keys: KeyCheck | None,
        *,
        transformed: bool,
    ) -> None:
        self._source = source
        self._alignment = alignment
        self._tally = tally
        self._keys = keys
        self._specs = {n: (np.dtype(f.dtype), tuple(f.shape)) for n, f in source.fields.items()}
        self._compare: bool | None = False if transformed else None
        self._to_try = TRIED_BATCHES if transformed else 0
        self.compared = self.judged = self.tried = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """Those that are compared."""
        return tuple(self._specs) if self._compare else ()

    def meet(self, batch: Delivered) -> None:
        """Learns by the first batch whether there are fields: a log of IDs and masks holds none."""
        if self._compare is None:
            self._compare = bool(batch.fields)

    def can_read(self, row: int) -> bool | None:
        """Whether the source can read a record that came masked; ``None`` where that settles nothing."""
        if not self._compare:
            return None
        try:
            self._source.read(np.array([row], np.int64))
        except Exception:  # noqa: BLE001 (whatever a source may raise)
            return False
        return True

    def check(
        self,
        batch: Delivered,
        epoch: int,
        rows: npt.NDArray[np.int64],
        live: npt.NDArray[np.bool_],
        empty: npt.NDArray[np.bool_],
    ) -> None:
        """Looks at one batch.

        Args:
          batch: delivered.
          epoch: to name in a finding.
          rows: int64[slots], of the records with the slots' IDs.
          live: bool[slots], slots that hold a record.
          empty: bool[slots], slots that must hold nothing but zeros.
        """
        faults: list[tuple[npt.NDArray[np.int64], str, str | None]] = []
        at = np.flatnonzero(live)
        if self._compare:
            faults += self._against_source(batch, rows, at)
            self.compared += len(at)
        elif self._to_try and batch.fields and len(at) > 1:
            faults += self._against_itself(rows, at)
            self._to_try -= 1
        keys = batch.fields.get(KEY_FIELD)
        # A transform of someone else's may have taken them out.
        if self._keys is not None and (self._compare or keys is not None):
            faults += self._keys.faults(keys, batch.ids, at, epoch)
        for name, field in batch.fields.items():
            full = np.flatnonzero(empty) if empty.any() and len(field) == len(empty) else at[:0]
            if full.size:
                full = full[_bytes(field[full]).any(axis=1)]
            faults.append((full, "a masked slot is not empty", name))
        if self._alignment is not None and at.size:
            faults.append((at[~self._judge(batch, at)], "the alignment function says no", None))
            self.judged += len(at)
        self._report(batch, epoch, [fault for fault in faults if fault[0].size])

    def _report(
        self,
        batch: Delivered,
        epoch: int,
        faults: list[tuple[npt.NDArray[np.int64], str, str | None]],
    ) -> None:
        if not faults:
            return
        causes: dict[str, int] = {}
        first: dict[int, tuple[str, str | None]] = {}
        for slots, cause, name in faults:
            named = cause if name is None else f"{name!r}: {cause}"
            causes[named] = causes.get(named, 0) + len(slots)
            for slot in slots.tolist():
                first.setdefault(slot, (cause, name))
        offenders = [
            Offender(epoch, batch.step, slot, batch.ids[slot].item(), cause, None, name)
            for slot, (cause, name) in sorted(first.items())
        ]
        self._tally.add_once(causes, len(first), offenders)

    def _against_source(
        self, batch: Delivered, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
    ) -> list[tuple[npt.NDArray[np.int64], str, str | None]]:
        known = {*self._specs, *([KEY_FIELD] if self._keys is not None else [])}
        shown = shown_of(at, batch.ids)
        faults: list[tuple[npt.NDArray[np.int64], str, str | None]] = [
            (shown, "no field of the source", name) for name in batch.fields if name not in known
        ]
        records: Mapping[str, npt.NDArray[Any]] = {}
        if at.size:
            at = at[another_order(rows[at])]
            records, unreadable = self._read(rows[at])
            faults.append((at[unreadable], "the source cannot read the record again", None))
            at = np.delete(at, unreadable)
        for name, (dtype, shape) in self._specs.items():
            field = batch.fields.get(name)
            if field is None:
                faults.append((shown, "missing", name))
            elif field.dtype != dtype or field.shape != (len(batch.ids), *shape):
                what = f"{field.dtype}{list(field.shape[1:])}, not {dtype}{list(shape)}"
                faults.append((shown, what, name))
            elif at.size:
                differs = _bytes(field[at]) != _bytes(np.asarray(records[name]))
                wrong = at[differs.any(axis=1)]
                faults.append((wrong, self._why(field, name, rows, at) if wrong.size else "", name))
        return faults

    def _against_itself(
        self, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
    ) -> list[tuple[npt.NDArray[np.int64], str, str | None]]:
        """Where the source gives fields as they were asked for by the pipeline, and others otherwise."""
        order = another_order(rows[at])
        try:
            asked, again = self._source.read(rows[at]), self._source.read(rows[at[order]])
            differs = {
                name: _bytes(np.asarray(asked[name])[order]) != _bytes(np.asarray(again[name]))
                for name in self._specs
            }
        except Exception:  # noqa: BLE001 (whatever a source may raise, and it may be a stand-in)
            return []
        self.tried += len(at)
        return [
            (np.sort(at[order[wrong.any(axis=1)]]), _HANGS_ON_ORDER, name)
            for name, wrong in differs.items()
        ]

    def _why(
        self,
        field: npt.NDArray[Any],
        name: str,
        rows: npt.NDArray[np.int64],
        at: npt.NDArray[np.int64],
    ) -> str:
        """Whether a wrong field is what the source gives when it is asked as the pipeline asked."""
        at = np.sort(at)
        with contextlib.suppress(Exception):  # whatever a source may raise
            again = np.asarray(self._source.read(rows[at])[name])
            if len(at) > 1 and np.array_equal(_bytes(field[at]), _bytes(again)):
                return _HANGS_ON_ORDER
        return "not the record's"

    def _read(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[Mapping[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
        """Fields of the rows that can be read, and the places of those that cannot."""
        try:
            return self._source.read(rows), np.empty(0, np.int64)
        except Exception:  # noqa: BLE001 (whatever a source may raise)
            bad = [i for i, row in enumerate(rows.tolist()) if not self.can_read(row)]
            good = np.delete(rows, bad)
            return (self._source.read(good) if good.size else {}), np.array(bad, np.int64)

    def _judge(self, batch: Delivered, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if self._alignment is None:
            return np.ones(len(at), np.bool_)
        mask = np.ones(len(at), np.bool_)
        fields = {name: field[at] for name, field in batch.fields.items()}
        verdict = np.asarray(self._alignment({"id": batch.ids[at], "mask": mask, **fields}))
        if verdict.dtype != np.bool_ or verdict.shape != mask.shape:
            raise ValueError(
                f"the alignment function returned {verdict.dtype}{list(verdict.shape)} for "
                f"{len(at)} records; it must return bool[{len(at)}], one truth value a record"
            )
        return verdict


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of each record: uint8[k, bytes]. So NaN equals itself, and 0.0 is not -0.0."""
    return np.ascontiguousarray(without_padding(array)).reshape(len(array), -1).view(np.uint8)
