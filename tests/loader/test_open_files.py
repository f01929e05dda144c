"""Files that stay open: as many as the process may have, over all sources together."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import loader
from loader.sources import open_files
from loader.sources.open_files import OpenFiles

FILES = 300

PROGRAM = """
import pathlib, resource, sys
import numpy as np
import loader
kind, sources, limit, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
make = {
    "tokens": lambda: loader.TokenSource(root, 3, ids="row"),
    "padded": lambda: loader.TokenSource(root, 3, ids="row", rest="pad"),
    "array_record": lambda: loader.ArrayRecordSource(root, ids="row"),
}[kind]
field = "x" if kind == "array_record" else "tokens"
made = [make() for _ in range(sources)]
for _ in range(2):
    for source in made:
        found = source.read(np.arange(len(source)))[field]
        assert found.reshape(len(source), -1)[:, 0].tolist() == list(range(300))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("sources", "limit"), [(5, 1024), (1, 256)])
@pytest.mark.parametrize("kind", ["tokens", "padded", "array_record"])
def test_many_files_are_read_at_a_small_limit(
    tmp_path: Path, kind: str, sources: int, limit: int
) -> None:
    for number in range(FILES):
        if kind == "array_record":
            records = [{"x": np.int64(number)}]
            loader.write_array_record(tmp_path / f"{number:03}.array_record", records)
        else:
            np.array([number, 1, 2, 3], "<u2").tofile(tmp_path / f"{number:03}.bin")
    subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(sources), str(limit), str(tmp_path)], check=True
    )


def test_sources_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    others = sum(map(len, open_files._owners))
    monkeypatch.setattr(open_files, "budget", lambda: others + 6)
    first, second = OpenFiles[str](), OpenFiles[str]()
    for number in range(6):
        first.put(number, "a")
    for number in range(3):
        second.put(number, "b")
    assert sum(map(len, open_files._owners)) <= others + 6
    assert second.get(2) == "b"
    second.drop(2)
    assert second.get(2) is None
