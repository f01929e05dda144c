"""Files that a task makes for itself, once: in .cache/data of the checkout, whole or not at all."""

import fcntl
import pathlib
import shutil
from collections.abc import Callable
from typing import Final

#: As all of .cache, this folder can be deleted at any time; what is missing is made again.
FOLDER: Final = pathlib.Path(__file__).resolve().parents[2] / ".cache" / "data"


def prepared(
    name: str, write: Callable[[pathlib.Path], None], folder: pathlib.Path = FOLDER
) -> pathlib.Path:
    """The folder ``name``, made by ``write`` if it is not there.

    A name must say all that decides the content: what is there is not made again. Of several
    processes one makes it and the others wait; what a killed one has left is cleared away.
    """
    path = folder / name
    if path.is_dir():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_dir():
            unfinished = folder / f".{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            write(unfinished)
            unfinished.rename(path)
    return path
