"""The keys of delivered records once more: all of them by `record_keys`, some by a slow formula."""

import collections
import hashlib
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.audit.formula import GOLDEN, MASK, mix
from loader.keys import KEY_FIELD, record_keys

#: Records of an epoch whose keys are derived a second time.
SAMPLED_KEYS: Final = 256


def key_by_formula(record_id: int | str, seed: int, epoch: int) -> tuple[int, int]:
    """The two halves of a record's key in an epoch, in plain integers."""
    message = struct.pack("<QQQ", 1, seed, epoch)
    digest = hashlib.blake2b(message, digest_size=16, person=b"regrain.keys").digest()
    before, between = struct.unpack("<2Q", digest)
    if isinstance(record_id, str):
        places = enumerate(record_id, start=1)
        word = sum(ord(one) * mix(place * GOLDEN & MASK) for place, one in places)
    else:
        word = record_id
    key = mix(word * GOLDEN + before & MASK, between)
    return key & 2**32 - 1, key >> 32


def shown_of(at: npt.NDArray[np.int64], ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Slots to name where a field is at fault as a whole: those with a record, else the first."""
    return at if at.size else np.arange(min(1, len(ids)), dtype=np.int64)


class KeyCheck:
    """Compares keys that were delivered with those of their records.

    Attributes:
      checked: records whose key was derived by the slow formula too.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sampled: collections.Counter[int] = collections.Counter()
        self.checked = 0

    def faults(
        self, keys: Any, ids: npt.NDArray[Any], at: npt.NDArray[np.int64], epoch: int
    ) -> list[tuple[npt.NDArray[np.int64], str, str]]:
        """Slots whose key is not that of their record, with the cause and the field.

        Args:
          keys: the batch's field; ``None`` where it has none.
          ids: of the batch.
          at: slots that hold a record.
          epoch: that they belong to.
        """
        if keys is None:
            return [(shown_of(at, ids), "missing", KEY_FIELD)]
        if keys.dtype != np.uint32 or keys.shape != (len(ids), 2):
            what = f"{keys.dtype}{list(keys.shape[1:])}, not uint32[2]"
            return [(shown_of(at, ids), what, KEY_FIELD)]
        differs = (keys[at] != record_keys(ids[at], self._seed, epoch)).any(axis=1)
        some = at[: SAMPLED_KEYS - self._sampled[epoch]]
        self._sampled[epoch] += len(some)
        self.checked += len(some)
        formula = [key_by_formula(one, self._seed, epoch) for one in ids[some].tolist()]
        wrong = (keys[some] != np.array(formula, np.uint32).reshape(-1, 2)).any(axis=1)
        return [
            (at[differs], "not the record's in this epoch", KEY_FIELD),
            (some[wrong & ~differs[: len(some)]], "not what the formula says", KEY_FIELD),
        ]
