"""IDs kept in little memory come back as they went in."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.sources import kept
from loader.sources.kept import KeptIds

TEXTS = st.text(st.characters(exclude_categories=[]), min_size=1).filter(
    lambda text: not text.endswith("\0")  # NumPy drops zeros at the end
)


@given(st.lists(st.lists(TEXTS, max_size=5), min_size=1, max_size=4), st.randoms())
def test_texts_come_back_one_by_one_and_in_blocks(parts: list[list[str]], rng: Any) -> None:
    every = [text for part in parts for text in part]
    found = KeptIds(np.array(part, np.str_) for part in parts if part)
    assert len(found) == len(every)
    assert [text for block in found.blocks() for text in block.tolist()] == every
    rows = [rng.randrange(len(every)) for _ in range(7)] if every else []
    if rows:
        assert found.take(np.array(rows)).tolist() == [every[row] for row in rows]


@pytest.mark.parametrize("limit", [0, 1 << 26])
@pytest.mark.parametrize(
    "ids", [np.arange(-5, 1000) * 7, np.array([f"n\u00e4me/{i}" for i in range(1000)])]
)
def test_on_disk_and_in_memory_they_are_the_same(
    monkeypatch: pytest.MonkeyPatch, limit: int, ids: Any
) -> None:
    monkeypatch.setattr(kept, "_IN_MEMORY_BYTES", limit)
    monkeypatch.setattr(kept, "_BLOCK_CHARACTERS", 256)
    found = KeptIds([ids[:300], ids[300:301], ids[301:]])
    rows = np.array([999, 0, 1, 300, 300, 42])
    for one in (found, pickle.loads(pickle.dumps(found))):
        assert one.take(rows).tolist() == ids[rows].tolist()
        assert np.concatenate(list(one.blocks())).tolist() == ids.tolist()
