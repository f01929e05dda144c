"""docs/scaling.md: what crosses the network, counted on one, two and four real processes, and on a store."""

import functools
import json
import math
import pathlib
import re
from typing import Any

import numpy as np
import pytest

import checkpointing
from tests.checkpointing.test_joint_checkpoints import TRAINING, a_pipeline
from tests.jax_processes import ROOT, run_processes
from tests.object_store import running_store

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


@pytest.mark.processes
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


def documented_requests() -> dict[str, tuple[Any, int]]:
    """The table of requests to a store in the page, by when: of this project, of n and k; and of Orbax."""
    text = (ROOT / "docs/scaling.md").read_text("utf-8")
    table = text.partition("| in a store, when")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\w[^|]*?) +\| ([\d +nk]+?) +\| +(\d+) \|", table, re.MULTILINE)

    def value(terms: str, sizes: dict[str, int]) -> int:
        products = [term.split() for term in terms.split(" + ")]
        return sum(math.prod(sizes.get(one) or int(one) for one in product) for product in products)

    return {name: (functools.partial(value, terms), int(orbax)) for name, terms, orbax in rows}


def test_requests_to_a_store_and_bytes_are_those_of_the_page() -> None:
    page = documented_requests()
    assert len(page) == 7
    big = np.random.default_rng(1).integers(0, 2**63, 1 << 17)  # a MiB that cannot be compressed
    keep = 2
    with running_store() as store:
        requests = store.requests

        counts: dict[
            int, int
        ] = {}  # of the objects of each step's train state, whose number differs

        def check(when: str, n: int = 0, m: int = 0, sent: int = 0, received: int = 0) -> None:
            ours, orbax = page[when]
            told = store.told()
            expected = ours(sizes={"n": n, "k": keep}) + m
            assert told["client"] == expected, (when, store.taken())
            assert told["tensorstore"] + told["gcsfs"] <= orbax, (when, store.taken())
            for way, size in (("sent", sent), ("received", received)):
                assert size <= told[way] <= 1.1 * size + (1 << 16), (when, way, told)
            requests.clear()

        for run in ("new", "again"):
            checkpoints = checkpointing.Checkpoints("gs://a-bucket/counted", a_pipeline(), 1, keep)
            check("open")
            state: Any = {"big": big, "small": np.zeros(3)}
            at = checkpoints.resume(state)
            n = 0
            if run == "new":
                check("resume, new run")
            else:
                n = len(checkpointing.load("gs://a-bucket/counted")[0].files) - 1
                requests.clear()
                at = checkpoints.resume(state)
                check("resume, from a checkpoint", n, received=2 * big.nbytes)
                at = checkpoints.resume(state, verify="manifest")
                check('resume, verify="manifest"', n, received=big.nbytes)
            for _ in range(keep + 1):
                next(at.batches)
                check("step")
                checkpoints.save(at.batches, state)
                checkpoints.wait()
                step = at.batches.position.step
                found = json.loads(store.read(f"counted/{step}/manifest/metadata"))
                n = counts[step] = len(found["files"]) - 1
                if step <= keep:  # nothing is deleted yet
                    requests.clear()
                    continue
                more = counts[step - keep] - n  # in the step that is deleted
                check("save", n, more, sent=big.nbytes, received=big.nbytes)
            checkpoints.close()
            check("close")
