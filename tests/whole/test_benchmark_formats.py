"""The benchmark's section on formats: each bare loop reads the same records, and each part is told.

No test looks at how fast anything is.
"""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.benchmarks import formats
from scripts.benchmarks.formats import BARE, FORMATS, IDS, OURS, RECORDS, Setting

TINY = Setting(400, 2, 2)
ARROW = "Parquet, left as Arrow data"
EXTRAS = {"Parquet": "pyarrow", ARROW: "pyarrow", "Hugging Face": "datasets"}


def skip_without(name: str) -> None:
    if name in EXTRAS and importlib.util.find_spec(EXTRAS[name]) is None:
        pytest.skip(f"{EXTRAS[name]} is not installed")


def as_arrays(name: str, found: Any) -> dict[str, Any]:
    """What a bare loop gives, as the fields that it reads."""
    if name == ARROW:
        return {
            "image": np.stack(found["image"].to_numpy()),
            "label": found["label"].to_numpy(),
        }
    return {"tokens": found} if isinstance(found, np.ndarray) else dict(found)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "ArrayRecord"])
def test_a_bare_loop_reads_the_records_of_the_source(name: str, tmp_path: Path) -> None:
    skip_without(name)
    with FORMATS[name](tmp_path, TINY.num_records) as one:
        rows = np.array([5, 3, len(one.source) - 1, 3])
        ours, bare = one.source.read(rows), as_arrays(name, one.bare(rows))
        assert ours.keys() == bare.keys()
        for field, array in ours.items():
            assert np.array_equal(array, bare[field])


def test_the_bare_loop_of_array_record_reads_the_bytes_that_are_decoded(tmp_path: Path) -> None:
    with FORMATS["ArrayRecord"](tmp_path, TINY.num_records) as one:
        rows = np.array([5, 3, 399])
        found: Any = one.bare(rows)
        images = one.source.read(rows)["image"]
        for record, image in zip(found, images, strict=True):
            assert image.tobytes() in record


def test_the_section_tells_of_every_format_and_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        name: make
        for name, make in FORMATS.items()
        if name not in EXTRAS or importlib.util.find_spec(EXTRAS[name])
    }
    monkeypatch.setattr(formats, "FORMATS", known)
    monkeypatch.setattr(formats, "QUICK", TINY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    section = formats.measure(quick=True)
    assert list(tmp_path.iterdir()) == []
    data = json.loads(json.dumps(section.data, allow_nan=False))["microseconds_a_batch"]
    assert data.keys() == known.keys()
    for of in data.values():
        assert of.keys() == {OURS, BARE, RECORDS, IDS}
        assert all(len(times) == TINY.rounds and min(times) > 0 for times in of.values())
    assert [len(table.rows) for table in section.tables] == [len(known)] * 2
    for table in section.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [target.name.split(":")[0] for target in section.targets] == list(known)
    assert all(section.conditions[f"bare loop, {name}"] for name in known)


def test_the_rest_is_what_the_source_does_not_take() -> None:
    times = {OURS: [10.0, 12.0, 11.0], RECORDS: [5.0], IDS: [2.0], BARE: [6.0]}
    assert formats.rest(times) == 4.0
