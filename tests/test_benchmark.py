"""The benchmark works, says under which conditions, and measures nobody who delivers something else.

No test looks at how fast anything is.
"""

import json
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPT: Final = ROOT / "scripts" / "benchmark.py"
NAMES: Final = ["numpy fancy", "numpy take", "regrain", "grain per record"]

Batch = dict[str, npt.NDArray[Any]]


def benchmark(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_run_gives_a_table_and_a_whole_report(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = benchmark("--quick", "--num-records", "1000", "--windows", "3", "--json", out)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(out.read_text("utf-8"))
    assert report["workload"] == {
        "num_records": 1000,
        "record_bytes": 784,
        "batch_size": 256,
        "epochs": 1,
        "windows": 3,
        "warmup": 1,
    }
    for name in NAMES:
        windows = report["windows_records_per_second"][name]
        summary = report["records_per_second"][name]
        assert len(windows) == 3
        assert 0 < summary["min"] <= summary["q1"] <= summary["median"]
        assert summary["median"] <= summary["q3"] <= summary["max"]
        assert summary["median"] == statistics.median(windows)
        assert name in done.stdout
        assert report["contenders"][name]
    assert list(report["ratios"]) == [f"regrain / {name}" for name in NAMES if name != "regrain"]
    assert report["bar"]["bare numpy, the better of two"] in NAMES[:2]
    assert set(report["versions"]) == {"python", "regrain", "grain", "numpy", "jax"}
    for condition in ("batch", "window", "clock", "left out", "storage", "cache", "threads"):
        assert report["conditions"][condition] in done.stdout
    assert report["machine"]["cores usable"] >= 1


def test_help_teaches_and_a_wrong_command_is_refused() -> None:
    done = benchmark("--help")
    assert done.returncode == 0
    for text in ("scripts/benchmark.py --quick", "--json", "Exit codes"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--windows", "1"], 2, "--windows"),
        (["--batch-size", "0"], 2, "--batch-size"),
        (["--json", "gone/report.json"], 1, "there is no folder gone"),
    ],
)
def test_a_refusal_comes_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == code
    assert message in capsys.readouterr().err


# --- the check of what is delivered ---------------------------------------------------------------


def workload_of(script: dict[str, Any]) -> Any:
    return script["Workload"](
        num_records=1000, record_bytes=8, batch_size=256, epochs=1, windows=2, warmup=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_delivers_each_record_once_in_each_epoch(
    script: dict[str, Any], name: str
) -> None:
    workload = workload_of(script)
    arrays = script["make_arrays"](workload)
    batches = script["CONTENDERS"][name](arrays, workload)
    assert [script["check"](batches, arrays, workload) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_shuffles_anew(script: dict[str, Any], name: str) -> None:
    workload = workload_of(script)
    batches = script["CONTENDERS"][name](script["make_arrays"](workload), workload)
    first, second = ([next(batches)["label"] for _ in range(4)] for _ in range(2))
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


def twice(batch: Batch) -> Batch:
    return {name: np.concatenate([array[:1], array[:-1]]) for name, array in batch.items()}


FAULTS: Final[dict[str, tuple[Callable[[Batch], Batch], str]]] = {
    "a record twice, another never": (twice, "not each record once"),
    "labels reversed": (lambda b: {**b, "label": b["label"][::-1]}, "with its own label"),
    "a dtype": (lambda b: {**b, "label": b["label"].astype(np.int64)}, "label is int64"),
    "a record fewer": (lambda b: {name: a[1:] for name, a in b.items()}, "other sizes"),
    "a shape": (lambda b: {**b, "image": b["image"][:, :4]}, "image is uint8[1000, 4]"),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(
    script: dict[str, Any], fault: Callable[[Batch], Batch], message: str
) -> None:
    workload = workload_of(script)
    arrays = script["make_arrays"](workload)
    good: Iterator[Batch] = script["CONTENDERS"]["numpy take"](arrays, workload)
    assert message in "; ".join(script["check"](map(fault, good), arrays, workload))


def test_ratios_are_taken_within_rounds(script: dict[str, Any]) -> None:
    rates = {"regrain": [10.0, 1.0, 4.0], "numpy take": [20.0, 2.0, 8.0]}
    (ratio,) = script["ratios"](rates).values()
    assert set(ratio.values()) == {0.5}
