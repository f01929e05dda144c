"""Every contender delivers each record once in each epoch, shuffled anew."""

import contextlib
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import pytest

from scripts.benchmarks import peers
from scripts.benchmarks.contenders import CONTENDERS
from scripts.benchmarks.workloads import Data, Workload, check, make_data

# Other loaders' warnings are theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

WORKLOADS: Final = {
    "records": Workload("records", "records", 600, "image", "uint8", (8, 3), 256),
    "windows": Workload("tokens", "tokens", 90, "tokens", "int32", (16,), 32, 5, mapped=True),
    "part": Workload("mapped", "mapped", 600, "image", "uint8", (8,), 64, mapped=True, unit=3),
}


def settings_of(contender: str) -> list[str]:
    """All but those with worker processes, which take seconds to start."""
    settings = CONTENDERS[contender].settings
    return [s for s in settings if not s.endswith(("=1", "=2", "=4", "=8", "processes"))] + [
        s for s in settings if s.startswith("concurrency")
    ]


CASES: Final = [
    pytest.param(
        name,
        setting,
        id=f"{name}-{setting}",
        marks=pytest.mark.skipif(
            not all(map(importlib.util.find_spec, (m.split(".")[0] for m in made.modules))),
            reason="not installed",
        ),
    )
    for name, made in CONTENDERS.items()
    for setting in settings_of(name)
]


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_each_record_comes_once_in_each_epoch_and_elsewhere_in_the_next(
    tmp_path: Path, name: str, setting: str, workload: Workload
) -> None:
    if CONTENDERS[name].absence(workload) or setting not in CONTENDERS[name].fitting(workload):
        pytest.skip("takes no part")
    make_data(workload, tmp_path)
    data = Data(workload, tmp_path)
    batches: Any = CONTENDERS[name].settings[setting](data, None)
    with contextlib.closing(batches):
        whole = dataclasses.replace(workload, unit=None)
        data.workload = whole
        assert [check(batches, data) for _ in range(2)] == [[], []]
        first, second = (labels(batches, whole.epoch_batches) for _ in range(2))
    assert not np.array_equal(first, second)


def labels(batches: Any, count: int) -> Any:
    return np.concatenate([np.asarray(next(batches)["label"]) for _ in range(count)])


@pytest.mark.parametrize("name", ["regrain", "grain per batch"])
def test_who_can_delivers_on_the_device(tmp_path: Path, name: str) -> None:
    workload = WORKLOADS["records"]
    make_data(workload, tmp_path)
    device = jax.devices()[0]
    for setting in settings_of(name):
        batches: Any = CONTENDERS[name].settings[setting](Data(workload, tmp_path), device)
        with contextlib.closing(batches):
            for _ in range(workload.epoch_batches):
                assert isinstance(next(batches)["image"], jax.Array)


def test_who_is_not_installed_gets_a_word() -> None:
    missing = dataclasses.replace(CONTENDERS["SPDL"], packages=("no-such-distribution",))
    assert missing.absence(WORKLOADS["records"]) == "not installed"
    assert missing.install


def test_who_cannot_take_part_is_left_out() -> None:
    streaming = CONTENDERS["MosaicML Streaming"]
    assert streaming.absence(WORKLOADS["part"]) == "left out"
    assert "two copies" in streaming.apart["mapped"]


def test_a_setting_that_rewrites_all_data_needs_whole_epochs() -> None:
    datasets = CONTENDERS["Hugging Face datasets"]
    assert set(datasets.rewrites) < set(datasets.settings)
    assert datasets.fitting(WORKLOADS["records"]) == list(datasets.settings)
    assert not set(datasets.rewrites) & set(datasets.fitting(WORKLOADS["part"]))


@pytest.mark.parametrize(("jax_is_there", "method"), [(True, "forkserver"), (False, "fork")])
def test_workers_are_forked_but_not_from_jaxs_threads(
    monkeypatch: pytest.MonkeyPatch, jax_is_there: bool, method: str
) -> None:
    if not jax_is_there:
        monkeypatch.delitem(sys.modules, "jax")
    settings = peers.worker_settings(2)
    assert settings["multiprocessing_context"].get_start_method() == method
    assert settings["num_workers"] == 2
    assert peers.worker_settings(0) == {"num_workers": 0}
