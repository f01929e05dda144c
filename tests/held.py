"""What a process holds, told before and after something that should leave nothing. For tests; on Linux."""

import collections
import gc
import pathlib
import threading
import time
from typing import Final

PROC: Final = pathlib.Path("/proc/self")


class Held:
    """What this process holds: threads, open files, memory that is shared, children."""

    def __init__(self) -> None:
        self.threads = {thread for thread in threading.enumerate() if thread.is_alive()}
        files = (_target(path) for path in (PROC / "fd").iterdir())
        self.files = collections.Counter(path for path in files if path)
        # Device, inode and name: memory that an earlier test gives back meanwhile has the same name.
        maps = (line.split(maxsplit=3)[-1] for line in (PROC / "maps").read_text().splitlines())
        self.memory = collections.Counter(
            entry for entry in maps if "/dev/shm/" in entry or "regrain" in entry
        )
        self.children = children()

    def more_than(self, before: "Held") -> list[str]:
        """What is there now and was not before; other tests may have ended something meanwhile."""
        return [
            *(thread.name for thread in self.threads - before.threads),
            *(self.files - before.files),
            *(self.memory - before.memory),
            *map(str, self.children - before.children),
        ]


def children() -> set[int]:
    """Processes that this one has started."""
    tasks = (PROC / "task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def settled(before: Held) -> list[str]:
    """What stays: what ends by itself is given some time to."""
    left = ["not counted"]
    for _ in range(200):
        gc.collect()
        left = Held().more_than(before)
        if not left:
            break
        time.sleep(0.05)
    return left


def _target(path: pathlib.Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the listing's own
        return ""
