"""Settings for every test: JAX on the CPU and strict, Hypothesis without deadlines.

A test that starts a process carries the marker `processes`: `scripts/test --quick` leaves it out, and there a
test that starts one without the marker fails.
"""

import multiprocessing.process
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

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


class _Guard:
    """Refuses processes in a run that leaves out the tests marked `processes`."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        self.pid = os.getpid()
        self.refused = ""

    def refuse(self, what: str) -> None:
        # A forked child inherits the hook, but is no test.
        if self.item is None or os.getpid() != self.pid:
            return
        self.refused = (
            f"{self.item.nodeid} starts a process ({what}) without the marker that says so, so that "
            "`scripts/test --quick` would wait for it. Put @pytest.mark.processes on the test, or "
            "`pytestmark = pytest.mark.processes` in a module where most tests start one"
        )
        pytest.fail(self.refused)


_guard = _Guard()
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _STARTS:
        _guard.refuse(event)


_start = multiprocessing.process.BaseProcess.start


def _start_guarded(process: multiprocessing.process.BaseProcess) -> None:
    _guard.refuse("multiprocessing")  # whose start method "spawn" raises no audit event
    _start(process)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "not processes":
        return
    sys.addaudithook(_audit)
    multiprocessing.process.BaseProcess.start = _start_guarded  # type: ignore[assignment,method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _guard.item = item
    _guard.refused = ""
    try:
        return (yield)
    finally:
        _guard.item = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """A test fails, too, if the code that it runs swallowed the refusal."""
    yield
    if _guard.refused:
        pytest.fail(_guard.refused)


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
