"""The benchmark's section on worker processes: all ways give the same batches, and each is told of.

No test looks at how fast anything is.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from scripts.benchmarks import workers
from scripts.benchmarks.workers import ALONE, BATCH, GRAIN, JOBS, THREADS, WORKERS, Setting


def test_a_transform_makes_what_it_says() -> None:
    pytest.importorskip("PIL")
    source, transform, _ = JOBS["JPEG"]
    made = transform(source(3).read(np.arange(3)))
    assert (made["image"].shape, made["image"].dtype) == ((3, 224, 224, 3), np.uint8)
    source, transform, _ = JOBS["Python"]
    batch = source(3).read(np.arange(3))
    lengths = transform(batch)["lengths"]
    for counts, text in zip(lengths, batch["text"], strict=True):
        words = text.tobytes().split(b" ")[:-1]  # the last one has no end
        assert counts.tolist() == np.bincount([len(word) for word in words], minlength=64).tolist()


def given(label: int) -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": np.full(2, label)}


@pytest.mark.processes
def test_a_way_that_gives_something_else_is_an_error() -> None:
    ways = dict.fromkeys((ALONE, THREADS, *WORKERS, GRAIN), 1)
    workers.check({way: given(label) for way, label in ways.items()})
    for way in (THREADS, *WORKERS):
        with pytest.raises(RuntimeError, match=f"{way} gives other batches"):
            workers.check({name: given(2 if name == way else 1) for name in ways})


@pytest.mark.processes
def test_the_section_tells_of_every_job_and_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "QUICK", Setting(2 * BATCH, 2, 1))
    monkeypatch.setattr(workers, "JOBS", {"Python": JOBS["Python"]})
    monkeypatch.setattr(workers, "WORKERS", {"1 worker": 1})
    section = workers.measure(quick=True)
    times = json.loads(json.dumps(section.data, allow_nan=False))["microseconds_a_batch"]
    assert times["Python"].keys() == {ALONE, THREADS, "1 worker", GRAIN}
    assert all(len(of) == 2 and min(of) > 0 for of in times["Python"].values())
    assert [len(table.rows) for table in section.tables] == [4]
