"""docs/scaling.md: what crosses the network, counted on one, two and four real processes."""

import json
import pathlib
import re
from typing import Any

import pytest

from tests.jax_processes import ROOT, run_processes
from tests.test_joint_checkpoints import TRAINING

#: Counts what each process asks of JAX's coordination service, between the calls of the user.
COUNTING = """
import collections
import orbax.checkpoint as ocp

class Counting:
    def __init__(self, client):
        self.client, self.calls, self.sent, self.received = client, collections.Counter(), 0, 0

    def __getattr__(self, name):
        method = getattr(self.client, name)
        def counted(*arguments, **settings):
            found = method(*arguments, **settings)
            self.calls[name] += 1
            self.sent += sum(len(one) for one in arguments if isinstance(one, str))
            self.received += len(found) if isinstance(found, str) else sum(len(k) + len(v) for k, v in found or ())
            return found
        return counted

    def taken(self):
        found = {"calls": sum(self.calls.values()), "by name": dict(self.calls), "bytes": self.sent + self.received}
        self.calls, self.sent, self.received = collections.Counter(), 0, 0
        return found

found = {}
if count > 1:
    client = Counting(ocp.multihost.get_jax_distributed_client())
    ocp.multihost.get_jax_distributed_client = lambda: client
    taken = client.taken
else:
    taken = lambda: {"calls": 0, "by name": {}, "bytes": 0}

def run(name, until):
    with checkpointing.Checkpoints(arguments[0], a_pipeline(), 2, 3, process_timeout_s=60) as checkpoints:
        found[f"{name}: open"] = taken()
        at = checkpoints.resume(state())
        found[f"{name}: resume"] = taken()
        now = at.train_state
        for batch in at.batches:
            x = loader.global_batch({"x": batch["x"]}, split)["x"]
            now = {**now, "all": update(now["all"], x)}
            begun = checkpoints.save(at.batches, now)
            checkpoints.wait()
            found[f"{name}: {'save' if begun else 'step'} {at.batches.position.step}"] = taken()
            if at.batches.position.step == until:
                break
    found[f"{name}: close"] = taken()

run("new", 4)
run("resumed", 7)
print(json.dumps(found))
"""


def documented() -> dict[str, Any]:
    """The table of calls in the page: calls of each process, and of process 0 besides."""
    text = (ROOT / "docs/scaling.md").read_text("utf-8")
    rows = re.findall(r"^\| (\w[^|]*?) +\| +(\d+) \| +(\d+) \| +([\d,]+) \|", text, re.MULTILINE)
    return {
        name: (int(each), int(first), int(size.replace(",", "")))
        for name, each, first, size in rows
    }


@pytest.mark.parametrize("count", [1, 2, 4])
def test_calls_and_bytes_are_those_of_the_page(count: int, tmp_path: pathlib.Path) -> None:
    page = documented()
    assert set(page) == {
        "open",
        "resume, new run",
        "resume, from a checkpoint",
        "step",
        "save",
        "close",
    }
    ended = run_processes(TRAINING + COUNTING, count, tmp_path)
    for index, (code, out, error) in enumerate(ended):
        assert code == 0, error[-3000:]
        for name, found in json.loads(out.splitlines()[-1]).items():
            run, what = name.split(": ")
            kind = what.partition(" ")[0]
            if kind == "resume":
                kind += ", new run" if run == "new" else ", from a checkpoint"
            each, first, size = page[kind]
            calls = 0 if count == 1 else each + (first if index == 0 else 0)
            assert found["calls"] == calls, (name, found)
            assert found["bytes"] <= size * (count > 1), (name, found)
