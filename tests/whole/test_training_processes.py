"""How a process joins others, and what it puts where; real processes are in test_elastic.py."""

from typing import Any

import jax
import numpy as np
import pytest

from scripts.training.processes import Layout, join


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("127.0.0.1:1", None, None), "--process-index and --process-count missing"),
        ((None, 0, 2), "--coordinator missing: each of several processes needs --coordinator, "),
        (("127.0.0.1:1", 2, 2), "--process-index is 2, and --process-count 2"),
        (("127.0.0.1:1", -1, 2), "--process-index is -1"),
        (("127.0.0.1:1", 0, 0), "--process-count 0"),
    ],
)
def test_wrong_numbers_are_refused(given: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join(*given, 10, 10)


@pytest.mark.parametrize("given", [(None, None, None), ("127.0.0.1:1", 0, 1)])
def test_a_process_alone_joins_nobody(given: tuple[Any, Any, Any]) -> None:
    join(*given, 10, 10)
    assert not jax.distributed.is_initialized()


def test_a_process_alone_leaves_all_where_jax_puts_it() -> None:
    layout = Layout.of_all_processes()
    assert layout.mesh.devices.tolist() == jax.devices()[:1]
    state = layout.init(lambda: {"key": jax.random.key(1)})
    assert not state["key"].committed
    batch = {"x": np.zeros(3)}
    assert layout.batch(batch) is batch
    assert layout.here(state) is state
