"""Real JAX processes on this machine, for tests: as many as asked for, none of which outlives the test."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

#: Put before a program: JAX's runtime, the process's ``index`` and ``count``, and further ``arguments``.
PREAMBLE = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
index, count, port = map(int, sys.argv[1:4])
arguments = sys.argv[4:]
if count > 1:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, index, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20
    )
"""


def run_processes(
    program: str, count: int, *arguments: Any, devices_each: int = 1, timeout: float = 180
) -> list[tuple[int, str, str]]:
    """Runs a program in several JAX processes; returns exit code, output and error output of each.

    Args:
      program: what follows `PREAMBLE`.
      count: how many processes.
      arguments: for ``arguments``.
      devices_each: CPU devices of each.
      timeout: seconds for each to end in.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_each}",
        "PYTHONPATH": str(ROOT),
    }
    text = textwrap.dedent(PREAMBLE) + textwrap.dedent(program)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(index), str(count), str(port), *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    ended = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=timeout)
            ended.append((process.returncode, out, error))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended
