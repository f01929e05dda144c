"""Nothing grows and nothing is left: memory over epochs; threads, files and shared memory after use."""

import gc
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
import pytest

import loader
from loader import ArraySource, BatchIterator, Mixture, Pipeline, PipelineConfig, ReadOptions
from loader.order import _AHEAD_FROM
from tests.held import PROC, Held, settled

linux = pytest.mark.skipif(not PROC.exists(), reason="counts by /proc")

WAYS: Final = ("plain", "threads", "device", "device and threads", "permutation", "mixture")


def iterate(way: str, arrays: dict[str, Any]) -> BatchIterator:
    """An iterator over 20 epochs and more, in one of the ways to have one."""
    shuffle: Any = "permutation" if way == "permutation" else "feistel"
    config = PipelineConfig(256, 17, "pad", None, shuffle)
    parts = {name: Pipeline(ArraySource(arrays), config) for name in "ab"}
    stream = Mixture(parts, {"a": 2, "b": 1}) if way == "mixture" else parts["a"]
    threads = ReadOptions(num_threads=3, prefetch_buffer_size=4) if "threads" in way else None
    device = jax.devices("cpu")[0] if "device" in way else None
    return stream.iterate(read_options=threads, device=device)


def resident_bytes() -> int:
    return int((PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(way: str) -> int:
    """Bytes by which the resident memory of this process grows from the third epoch to the twentieth."""
    n = 32_768
    arrays: dict[str, Any] = {"x": np.zeros((n, 256), np.uint8), "y": np.arange(n)}
    arrays["x"][:] = 1  # touched, so that it is resident before anything is counted
    batches = iterate(way, arrays)
    measured = []
    for _ in range(20):
        for _ in range(n // 256):
            next(batches)
        gc.collect()
        measured.append(resident_bytes())
    batches.close()
    return max(measured[3:]) - measured[2]


@pytest.mark.processes
@linux
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_flat_over_twenty_epochs(way: str) -> None:
    """In a process of its own: what other tests have left does not count."""
    # 8 MB of data come by in each epoch; the order of one is a quarter of a megabyte.
    assert (
        int(printed_by(f"import tests.checkpointing.test_leaks as t; print(t.growth({way!r}))"))
        < 2 << 20
    )


def printed_by(code: str) -> str:
    """What a Python process of its own prints."""
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.processes
@linux
def test_growth_would_be_seen() -> None:
    code = (
        "import numpy as np, tests.checkpointing.test_leaks as t; before = t.resident_bytes(); "
        "kept = np.ones(16 << 20, np.uint8); print(t.resident_bytes() - before)"
    )
    assert int(printed_by(code)) > 8 << 20


def closed(batches: BatchIterator) -> None:
    batches.close()


def closed_twice(batches: BatchIterator) -> None:
    batches.close()
    batches.close()


def dropped(batches: BatchIterator) -> None:
    del batches


def moved(batches: BatchIterator) -> None:
    batches.set_state(batches.get_state())
    next(batches)
    batches.close()


@pytest.fixture
def arrays() -> dict[str, Any]:
    return {"x": np.zeros((_AHEAD_FROM, 4), np.uint8), "y": np.arange(_AHEAD_FROM)}


@linux
@pytest.mark.parametrize("end", [closed, closed_twice, dropped, moved])
@pytest.mark.parametrize("way", WAYS)
def test_iterator_leaves_nothing(
    way: str, end: Callable[[BatchIterator], None], arrays: dict[str, Any]
) -> None:
    next(iterate(way, arrays)).clear()  # what is made once for the whole process
    before = Held()
    for _ in range(5):
        batches = iterate(way, arrays)
        for _ in range(130 if way == "permutation" else 3):
            next(batches)
        end(batches)
        del batches
    assert settled(before) == []


@linux
def test_what_an_iterator_would_leave_is_seen(tmp_path: pathlib.Path) -> None:
    before = Held()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left")
    thread.start()
    with (tmp_path / "open").open("w"):
        assert Held().more_than(before) == ["left", str(tmp_path / "open")]
    stop.set()
    thread.join()
    assert Held().more_than(before) == []


@linux
def test_fingerprint_and_audit_leave_nothing(arrays: dict[str, Any]) -> None:
    pipeline = Pipeline(ArraySource(arrays), PipelineConfig(256, 17, "pad", 1))
    pipeline.fingerprint()
    before = Held()
    pipeline.fingerprint()
    assert loader.audit(pipeline).clean
    assert settled(before) == []


@pytest.mark.processes
def test_threads_end_with_the_process(tmp_path: pathlib.Path) -> None:
    """Iterators that nobody closes do not keep a program from ending."""
    code = textwrap.dedent(
        """
        import numpy as np, loader, tests.checkpointing.test_leaks as t
        arrays = {"x": np.zeros((1 << 17, 4), np.uint8), "y": np.arange(1 << 17)}
        kept = [t.iterate(way, arrays) for way in t.WAYS]
        for batches in kept:
            next(batches)
        print("done")
        """
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
