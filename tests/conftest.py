"""Settings for every test: JAX on the CPU and strict, Hypothesis without deadlines."""

import os
import signal
import sys
from collections.abc import Iterator

# In the environment rather than through jax.config: JAX reads it when it is first imported, so
# this imports nothing, starts no backend, and holds in the subprocesses that tests start too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import pytest
from hypothesis import HealthCheck, settings

# The time of one example says more about the machine's load than about the code.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples every time: a change is judged by what it did, not by which examples came up.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(autouse=True)
def _modules_of_one_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test has written is not the next test's, which may call its own the same."""
    before = set(sys.modules)
    yield
    written = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(written):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A command that a test calls ends, as a program does, with Ctrl-C as the system has it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def quiet_datasets() -> Iterator[None]:
    """No progress bars of Hugging Face, nor the thread that watches them."""
    import datasets

    watched = datasets.utils.tqdm.monitor_interval
    datasets.utils.tqdm.monitor_interval = 0
    datasets.disable_progress_bars()
    yield
    datasets.utils.tqdm.monitor_interval = watched
