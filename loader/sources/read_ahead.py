"""Whether the system reads ahead in memory-mapped files: around records that come in order, and no others."""

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

#: As much as Linux reads around a place in a file that is asked for.
_READ_AHEAD_BYTES: Final = 128 << 10


class ReadAhead:
    """Advises the system on a map of a file, as records are read from it.

    What it reads around a small record from anywhere is not asked for before it is forgotten again, where
    the data is larger than memory: it only takes the disk's time.

    Args:
      memory: the map.
      record_bytes: of one record.
    """

    def __init__(self, memory: mmap.mmap, record_bytes: int) -> None:
        self._memory = memory
        self._matters = record_bytes < _READ_AHEAD_BYTES and hasattr(mmap, "MADV_RANDOM")
        self._scattered = False

    def advise(self, rows: npt.NDArray[np.int64]) -> None:
        """Has the system read ahead, or not, as these rows are the next to be read."""
        count = len(rows)
        if not self._matters or count < 2:
            return
        scattered = bool(rows[-1] - rows[0] != count - 1)
        if scattered is not self._scattered:
            self._scattered = scattered
            self._memory.madvise(mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL)
