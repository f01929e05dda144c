import pickle
import threading

import numpy as np
import pytest

from loader.sources import remembered
from loader.sources.remembered import RememberedTexts, Rows, Texts

TOTAL = 1000


def anything(rows: Rows) -> None:
    """A check that lets all rows pass."""


class Named:
    """Makes texts, and counts how many."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, rows: Rows) -> Texts:
        self.made += len(rows)
        return np.array([f"name:{row}" for row in rows.tolist()], "U12")


def test_texts_are_the_same_before_and_after_they_are_remembered() -> None:
    make = Named()
    texts = RememberedTexts(make, TOTAL, anything)
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = rng.integers(0, TOTAL, 100)
        found = texts(rows)
        assert found.dtype == "U12"
        assert found.tolist() == [f"name:{row}" for row in rows.tolist()]
    assert make.made == TOTAL // 4 // 100 * 100 + 100 + TOTAL  # not again at any later call


def test_a_look_at_a_few_makes_a_few() -> None:
    make = Named()
    RememberedTexts(make, TOTAL, anything)(np.array([3, 5]))
    assert make.made == 2


def test_more_than_the_memory_for_them_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MAX_BYTES", TOTAL * 48 - 1)
    make = Named()
    texts = RememberedTexts(make, TOTAL, anything)
    for _ in range(3):
        texts(np.arange(TOTAL))
    assert make.made == 3 * TOTAL


def test_what_is_given_is_the_callers_own() -> None:
    texts = RememberedTexts(Named(), 4, anything)
    for _ in range(3):
        found = texts(np.arange(4))
        assert found.tolist() == ["name:0", "name:1", "name:2", "name:3"]
        found[:] = "changed"


def test_what_is_remembered_is_not_sent_to_another_process() -> None:
    texts = RememberedTexts(Named(), TOTAL, anything)
    few = len(pickle.dumps(texts))
    texts(np.arange(TOTAL))
    copy = pickle.loads(pickle.dumps(texts))
    assert len(pickle.dumps(texts)) <= few + 8
    assert copy(np.array([7])).tolist() == ["name:7"]


def test_threads_get_what_one_would_get() -> None:
    texts, wrong = RememberedTexts(Named(), TOTAL, anything), []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            rows = rng.integers(0, TOTAL, 8)
            if texts(rows).tolist() != [f"name:{row}" for row in rows.tolist()]:
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
