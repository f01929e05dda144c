"""Texts of rows, made anew for each batch until it is cheaper to look them up."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Texts = npt.NDArray[np.str_]

#: No more memory than this is taken.
_MAX_BYTES: Final = 32 << 20
#: Once a quarter of the texts has been made, the others follow.
_SHARE: Final = 4
_BLOCK_ROWS: Final = 1 << 14


class RememberedTexts:
    """What a function makes of rows, remembered where that takes little memory.

    As long as few have been asked for, nothing is made but those; so opening costs nothing, and neither
    does a look at one batch. From then on, all are looked up in a table.

    Args:
      make: from rows ``int64[k]``, each 0 to ``total - 1``, to ``str[k]``, always of one width; raises
        for other rows.
      total: how many rows there are.
      check: raises for other rows, too: a table would take those below 0 from its end.
    """

    def __init__(
        self, make: Callable[[Rows], Texts], total: int, check: Callable[[Rows], None]
    ) -> None:
        self._make, self._total, self._check = make, total, check
        self._asked = 0
        self._table: Texts | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes its own table, if it needs one."""
        return {**vars(self), "_asked": 0, "_table": None}

    def __call__(self, rows: Rows) -> Texts:
        """``str[k]`` of ``rows: int64[k]``: a fresh array."""
        if self._table is not None:
            self._check(rows)
            return self._table.take(rows)
        texts = self._make(rows)
        # Threads may count one another out, or make the table twice: then it comes later, or twice the same.
        self._asked += len(rows)
        enough = self._asked * _SHARE >= self._total
        if enough and self._total * texts.itemsize <= _MAX_BYTES:
            table = np.empty(self._total, texts.dtype)
            for start in range(0, self._total, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, self._total)
                table[start:stop] = self._make(np.arange(start, stop, dtype=np.int64))
            self._table = table
        return texts
