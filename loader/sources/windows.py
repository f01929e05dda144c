"""Where windows of tokens stand in flat files: a row's file offset, and the inverse, by formula.

A stretch is a run of tokens that windows stay inside: a document, or a whole file. Windows begin at
every ``stride`` tokens of it, as long as they are full; with padding, one more holds what is left.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def num_windows(sizes: Int64, width: int, stride: int, *, pad: bool) -> Int64:
    """How many windows of ``width`` tokens begin in stretches of ``sizes: int64[s]`` tokens: int64[s].

    With ``pad``, a stretch has a last window that is not full where at least two tokens (an input
    and its target) are left for it, one of them in no window before it.
    """
    full = np.maximum((sizes - width) // stride + 1, 0)
    if not pad:
        return full
    begin = full * stride
    seen = np.where(full > 0, begin - stride + width, 0)
    return full + ((begin + 1 < sizes) & (seen < sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """The windows of some files, in their order.

    Attributes:
      stride: tokens from one window's start to the next one's in a stretch.
      counts: ``int64[num_files]``, how many windows each file has.
      cuts: ``int64[num_files + 1]``, which stretches are each file's; those without a window are left out.
      firsts: ``int64[s]``, the number of each stretch's first window, over all files: its row.
      starts: ``int64[s]``, the offset of each stretch in its file, in tokens.
      sizes: ``int64[s]``, how many tokens each stretch has.
    """

    stride: int
    counts: Int64
    cuts: Int64
    firsts: Int64
    starts: Int64
    sizes: Int64

    @classmethod
    def of(cls, borders: Sequence[Int64], width: int, stride: int, *, pad: bool) -> Self:
        """Lays windows.

        Args:
          borders: for each file the offsets at which its stretches begin, rising from 0, and at the
            end how many tokens it has. Stretches may be empty.
          width: tokens of a window.
          stride: as above.
          pad: whether what is left at the end of a stretch is in a window.
        """
        kept, cuts, counts = [], [0], []
        for edges in borders:
            sizes = np.diff(edges)
            windows = num_windows(sizes, width, stride, pad=pad)
            there = np.flatnonzero(windows)
            kept.append((windows[there], edges[there], sizes[there]))
            cuts.append(cuts[-1] + there.size)
            counts.append(int(windows.sum()))
        each, starts, sizes = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        firsts = np.cumsum(each) - each
        return cls(stride, np.array(counts), np.array(cuts), firsts, starts, sizes)

    @functools.cached_property
    def _only_start(self) -> int | None:
        """Where the stretch begins if there is one, as in the usual file without documents."""
        return int(self.starts[0]) if len(self.starts) == 1 else None

    def offsets(self, rows: Int64) -> Int64:
        """The offsets in their files at which the windows ``rows: int64[k]`` begin: int64[k]."""
        if self._only_start is None:
            return self.place(rows)[0]
        begins = rows * self.stride
        return begins + self._only_start if self._only_start else begins

    def place(self, rows: Int64) -> tuple[Int64, Int64]:
        """As `offsets`; and how many tokens the windows' stretches have from there on, int64[k]."""
        at = self.firsts.searchsorted(rows, "right") - 1
        gone = (rows - self.firsts[at]) * self.stride
        return self.starts[at] + gone, self.sizes[at] - gone

    def row(self, file: int, offset: int) -> int:
        """The row of the window that begins at an offset of a file; -1 where none does."""
        low, high = self.cuts[file], self.cuts[file + 1]
        at = low + int(np.searchsorted(self.starts[low:high], offset, "right")) - 1
        if at < low:
            return -1
        number, off = divmod(offset - int(self.starts[at]), self.stride)
        row = int(self.firsts[at]) + number
        end = int(self.firsts[at + 1]) if at + 1 < len(self.firsts) else int(self.counts.sum())
        return row if off == 0 and row < end else -1
