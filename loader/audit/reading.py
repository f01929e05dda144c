"""Reads a source in another order of rows than a stream did.

A source that sorts the rows it is asked for and does not put the records back, or whose answer hangs on
what it was asked before, gives the same wrong records to whoever asks in the same order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from loader.order import Rows
from loader.sources import RecordSource


def another_order(rows: Rows) -> npt.NDArray[np.int64]:
    """Places of ``rows: int64[k]`` in the order to read them in: int64[k].

    Rising rows, in which few sources can go wrong and all are fast; where they rise already, their
    second half first: still two runs in order.
    """
    if len(rows) > 1 and bool((rows[1:] > rows[:-1]).all()):
        return np.roll(np.arange(len(rows), dtype=np.int64), -(len(rows) // 2))
    return np.argsort(rows).astype(np.int64, copy=False)


def ids_of(
    source: RecordSource, rows: Rows, order: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[Any]:
    """IDs of rows, asked for in another order and put back: int64[k] or str[k].

    Args:
      source: asked.
      rows: int64[k].
      order: places of the rows as they are to be asked for; by default `another_order`.

    Raises:
      ValueError: the source gave another number of IDs.
    """
    order = another_order(rows) if order is None else order
    ids = np.asarray(source.ids(rows[order]))
    if len(ids) != len(rows):
        raise ValueError(
            f"the source gave {len(ids)} IDs for {len(rows)} rows: it must give one each"
        )
    back = np.empty_like(ids)
    back[order] = ids
    return back
