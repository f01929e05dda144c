"""The corruption matrix: every file of a step, damaged in every way, and what a resume makes of it.

A resume may restore exactly what was saved, use the older step, or refuse. Anything else is silent
corruption. The same damaged directories are given to plain Orbax, to show what it lets through.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

import checkpointing
from scripts.faults import run

#: The steps of the run whose newest one is damaged.
OLDER: Final = 2
NEWEST: Final = 3

IDENTICAL: Final = "without effect, restored identical"
OLDER_USED: Final = "detected, older step used"
REFUSED: Final = "detected, error"
NO_FALLBACK: Final = "ERROR, THOUGH AN OLDER STEP IS WHOLE"
OTHER_ERROR: Final = "ERROR OF ANOTHER KIND"
DIFFERENT: Final = "SILENTLY DIFFERENT"
#: Array content that `verify="manifest"` does not look at, by contract.
NOT_LOOKED_AT: Final = "different; not looked at, by contract"
SAME_BYTES: Final = "not applicable, same bytes"
GOOD: Final = frozenset({IDENTICAL, OLDER_USED, REFUSED, NOT_LOOKED_AT, SAME_BYTES})

FileDamage = Callable[[pathlib.Path, pathlib.Path], None]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a resume gives: its step, where the stream is, what comes next, and all bits by leaf."""

    step: int
    position: Mapping[str, int]
    next_ids: tuple[Any, ...]
    leaves: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A way to resume.

    Attributes:
      name: for the report.
      read: from the directory of a run to what it restores.
      refusals: errors by which it may say that nothing whole is there.
      contents_checked: whether it promises to look at the content of array files.
      judged: whether a bad outcome is a fault of this library.
    """

    name: str
    read: Callable[[pathlib.Path], Restored]
    refusals: tuple[type[Exception], ...]
    contents_checked: bool = True
    judged: bool = True


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that can happen to the newest step.

    Attributes:
      where: the file or item in the step's directory; ``"the step"`` for all of it.
      damage: what happens to it.
    """

    where: str
    damage: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fault, and what a reader made of it.

    Attributes:
      where: as in `Fault`.
      damage: as in `Fault`.
      older_step: whether there was an older step to fall back to.
      reader: its name.
      outcome: one of the texts above.
      detail: the error, or what was different.
      ok: whether the outcome is good, or the reader is not ours.
    """

    where: str
    damage: str
    older_step: bool
    reader: str
    outcome: str
    detail: str
    ok: bool


def write_run(directory: pathlib.Path) -> dict[int, Restored]:
    """Saves two steps, and tells what a resume at each must give: from memory, not from the disk."""
    expected = {}
    with run.open_checkpoints(directory) as checkpoints:
        begun = checkpoints.resume(run.first_state())
        state = begun.train_state
        for step in (1, OLDER, NEWEST):
            state = run.train(checkpoints, begun, step, state)
            ids = run.a_pipeline().ids(step)
            expected[step] = Restored(step, begun.batches.get_state(), tuple(ids), _bits(state))
    return expected


def faults_of(directory: pathlib.Path) -> list[Fault]:
    """Every fault that the newest step of a run can have."""
    step = directory / str(NEWEST)
    # By size, because data files have random names.
    paths = sorted(step.rglob("*"), key=lambda path: (path.parent, path.stat().st_size, path.name))
    files = [str(path.relative_to(step)) for path in paths if path.is_file()]
    items = sorted(path.name for path in step.iterdir() if path.is_dir())
    return [
        *(Fault(file, damage) for file in files for damage in FILE_DAMAGES),
        *(Fault(item, damage) for item in items for damage in FOLDER_DAMAGES),
        *(Fault("the step", damage) for damage in STEP_DAMAGES),
    ]


def sample(faults: Sequence[Fault], seed: int) -> list[Fault]:
    """A third of the faults, and then as many more as it takes to have each place and damage once."""
    shuffled = random.Random(seed).sample(faults, len(faults))  # noqa: S311 (a sample, no secrets)
    chosen = shuffled[: len(faults) // 3]
    for fault in shuffled[len(chosen) :]:
        if fault.where not in {one.where for one in chosen} or fault.damage not in {
            one.damage for one in chosen
        }:
            chosen.append(fault)
    return chosen


def corruption_matrix(
    folder: pathlib.Path,
    readers: Sequence[Reader],
    choose: Callable[[list[Fault]], Iterable[Fault]] = lambda faults: faults,
) -> Iterator[Cell]:
    """Damages copies of a run and has each reader resume from them.

    Args:
      folder: empty; what it holds afterwards is of no use.
      readers: what to try.
      choose: from all faults those to try.
    """
    expected = write_run(folder / "whole")
    copy = folder / "damaged"
    for fault in choose(faults_of(folder / "whole")):
        for older_step in (True, False):
            for reader in readers:
                shutil.copytree(folder / "whole", copy, ignore=shutil.ignore_patterns(".lock"))
                size_kept = _break(copy, fault)
                if not older_step:
                    _remove_older(copy)
                outcome, detail = (
                    (SAME_BYTES, "")
                    if size_kept is None
                    else _outcome(reader, copy, expected, older_step=older_step)
                )
                arrays = fault.where.startswith("train_state/") and size_kept
                if outcome == DIFFERENT and arrays and not reader.contents_checked:
                    outcome = NOT_LOOKED_AT
                ok = outcome in GOOD or not reader.judged
                yield Cell(fault.where, fault.damage, older_step, reader.name, outcome, detail, ok)
                shutil.rmtree(copy)
                shutil.rmtree(folder / "elsewhere", ignore_errors=True)


def checkpoints_reader(verify: Any) -> Reader:
    """`Checkpoints.resume`, as a training script calls it."""

    def read(directory: pathlib.Path) -> Restored:
        with run.open_checkpoints(directory, save_every=1000) as checkpoints:
            resumed = checkpoints.resume(run.first_state(), verify=verify)
            position = resumed.batches.get_state()
            ids = next(resumed.batches)["id"]
            return Restored(position["step"], position, tuple(ids), _bits(resumed.train_state))

    refusals = (checkpointing.CheckpointDamagedError, checkpointing.CheckpointMismatchError)
    return Reader(f'verify="{verify}"', read, refusals, contents_checked=verify == "full")


def orbax_reader() -> Reader:
    """Orbax by itself: its newest step, train state and iterator, without our manifest."""
    import orbax.checkpoint as ocp  # noqa: PLC0415 (only who asks for plain Orbax needs it)

    items = ocp.args.Composite(
        train_state=ocp.args.StandardRestore(run.first_state()), iterator=ocp.args.JsonRestore()
    )

    def read(directory: pathlib.Path) -> Restored:
        with ocp.CheckpointManager(directory) as manager:
            step = manager.latest_step()
            restored = manager.restore(step, args=items)
        # Grain's iterators take the state that they are given.
        batches = run.a_pipeline().iterate()
        batches.set_state(restored["iterator"])
        position = batches.get_state()
        return Restored(step, position, tuple(next(batches)["id"]), _bits(restored["train_state"]))

    return Reader("plain Orbax", read, (Exception,), judged=False)


def _outcome(
    reader: Reader, directory: pathlib.Path, expected: Mapping[int, Restored], *, older_step: bool
) -> tuple[str, str]:
    newest = max(int(path.name) for path in directory.iterdir() if path.name.isdigit())
    try:
        restored = reader.read(directory)
    except reader.refusals as error:
        # Plain Orbax never falls back by itself.
        outcome = NO_FALLBACK if older_step and reader.judged else REFUSED
        return outcome, " ".join(str(error).split())[:300]
    except Exception as error:  # noqa: BLE001 (whatever comes is what the table must tell of)
        return OTHER_ERROR, repr(error)[:300]
    step = restored.step
    if restored != expected.get(step):
        wrong = expected.get(NEWEST if step not in expected else step, restored)
        return DIFFERENT, _difference(restored, wrong)
    return (IDENTICAL, "") if step == newest else (OLDER_USED, f"step {step} in place of {newest}")


def _difference(restored: Restored, expected: Restored) -> str:
    if restored.position != expected.position:
        found, wanted = dict(restored.position), dict(expected.position)
        return f"step {restored.step} at position {found} in place of {wanted}"
    leaves = [name for name, bits in expected.leaves.items() if restored.leaves.get(name) != bits]
    return f"other values in {', '.join(leaves) or 'the next IDs'}"


def _bits(state: Mapping[str, Any]) -> dict[str, bytes]:
    arrays = {name: np.asarray(leaf) for name, leaf in state.items()}
    return {name: f"{a.dtype}{a.shape}".encode() + a.tobytes() for name, a in arrays.items()}


def _remove_older(directory: pathlib.Path) -> None:
    """Leaves the damaged step alone."""
    steps = sorted((path for path in directory.iterdir() if path.name.isdigit()), key=_number)
    for step in steps[:-1]:
        shutil.rmtree(step)


def _number(path: pathlib.Path) -> int:
    return int(path.name)


def _break(directory: pathlib.Path, fault: Fault) -> bool | None:
    """Damages the newest step; returns whether the size has stayed, ``None`` where nothing changed."""
    step, older = directory / str(NEWEST), directory / str(OLDER)
    if fault.damage in STEP_DAMAGES:
        STEP_DAMAGES[fault.damage](step, older)
        return False
    path = step / fault.where
    if fault.damage in FOLDER_DAMAGES:
        FOLDER_DAMAGES[fault.damage](path, older / fault.where)
        return False
    before = path.read_bytes()
    FILE_DAMAGES[fault.damage](path, _twin(path, step, older))
    if fault.damage not in ("removed", _LINKED) and path.read_bytes() == before:
        return None
    return path.exists() and path.stat().st_size == len(before)


def _twin(path: pathlib.Path, step: pathlib.Path, older: pathlib.Path) -> pathlib.Path:
    """The older step's file with the same role. Data files have random names: there, the size tells."""
    twin = older / path.relative_to(step)
    if twin.exists():
        return twin
    rank = _by_size(path.parent).index(path)
    found = _by_size(twin.parent)
    return found[min(rank, len(found) - 1)]


def _by_size(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(
        (one for one in folder.iterdir() if one.is_file()), key=lambda p: p.stat().st_size
    )


def _flip(path: pathlib.Path, place: float) -> None:
    """Flips the lowest bit of one byte: a digit becomes another digit, a letter another letter."""
    data = bytearray(path.read_bytes())
    if data:
        data[round(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def _move_and_link(path: pathlib.Path, older: pathlib.Path) -> None:
    """Replaces something by a symbolic link to it."""
    del older
    elsewhere = next(p for p in path.parents if p.name == "damaged").with_name("elsewhere")
    elsewhere.mkdir()
    shutil.move(path, elsewhere / "target")
    path.symlink_to(elsewhere / "target")


def _replace_folder(path: pathlib.Path, other: pathlib.Path | None) -> None:
    shutil.rmtree(path)
    if other is None:
        path.mkdir()
    else:
        shutil.copytree(other, path)


def _replace_by_file(path: pathlib.Path, older: pathlib.Path) -> None:
    del older
    shutil.rmtree(path)
    path.write_bytes(b"")


def _append(path: pathlib.Path, twin: pathlib.Path) -> None:
    del twin
    with path.open("ab") as file:
        file.write(b"\0")


_LINKED: Final = "replaced by a link to it"
FILE_DAMAGES: Final[dict[str, FileDamage]] = {
    "byte flipped at the start": lambda path, _: _flip(path, 0.0),
    "byte flipped in the middle": lambda path, _: _flip(path, 0.5),
    "byte flipped at the end": lambda path, _: _flip(path, 1.0),
    "cut in half": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "a byte appended": _append,
    "emptied": lambda path, _: os.truncate(path, 0),
    "zero-filled": lambda path, _: _fill(path),
    "removed": lambda path, _: path.unlink(),
    "replaced by another step's": lambda path, twin: _copy(twin, path),
    _LINKED: _move_and_link,
}
FOLDER_DAMAGES: Final[dict[str, FileDamage]] = {
    "item removed": lambda path, _: shutil.rmtree(path),
    "item emptied": lambda path, _: _replace_folder(path, None),
    "item replaced by another step's": _replace_folder,
    "item replaced by a link to it": _move_and_link,
}
STEP_DAMAGES: Final[dict[str, FileDamage]] = {
    "step emptied": lambda step, _: _replace_folder(step, None),
    "step replaced by a file": _replace_by_file,
    "step replaced by another one": _replace_folder,
    "step replaced by a link to it": _move_and_link,
    "step copied to another number": lambda step, _: _copy_step(step),
}


def _fill(path: pathlib.Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        target.unlink()
    shutil.copyfile(source, target)


def _copy_step(step: pathlib.Path) -> None:
    shutil.copytree(step, step.with_name("7"))
