"""Faults of the place where checkpoints are kept: full, read-only, missing, a file, moved, shared, damaged."""

import contextlib
import os
import pathlib
from typing import Final

from scripts.faults.children import (
    Ended,
    Outcome,
    newest_step,
    run_child,
    started,
    tmpfs_wrapper,
)

_NO_MOUNT: Final = "skipped: nobody may mount a tmpfs in a namespace of this system"

_FILL: Final = """
    ballast = os.open(f"{place}/ballast", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(ballast, bytes(4096))
    except OSError as error:
        full = error.strerror
"""
_MAKE_ROOM: Final = """
    os.remove(f"{place}/ballast")
    os.close(ballast)
"""
_LIMIT: Final = """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    full = "no file over 256 bytes"
"""
_LIFT: Final = """
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
"""
#: Step 3 is saved without room, the others with it.
_SPACE: Final = """
directory = f"{place}/run"
with open_checkpoints(directory) as checkpoints:
    run = checkpoints.resume(first_state())
    state = train(checkpoints, run, 2)
    checkpoints.wait()
    # no room
    state = update(state, next(run.batches))
    failed = None
    try:
        checkpoints.save(run.batches, state)
        checkpoints.wait()
    except RuntimeError as error:
        failed = str(error)
    left, intact = names(directory), newest(directory)
    # room
    tell(full=full, error=failed, left=left, intact=intact)
    state = train(checkpoints, run, 5, state)
with open_checkpoints(directory) as checkpoints:
    run = checkpoints.resume(first_state())
    tell(resumed=run.position.step, equal=digest(run.train_state) == digest(state))
"""


def disk_full(work: pathlib.Path) -> Outcome:
    """The file system of the checkpoints has no byte left."""
    fault, how = "disk full during a save", "a tmpfs of 1 MB, filled to the last byte"
    if not tmpfs_wrapper():
        return Outcome(fault, how, _NO_MOUNT, None)
    code = _SPACE.replace("    # no room\n", _FILL).replace("    # room\n", _MAKE_ROOM)
    return _space(fault, how, run_child(code, work, wrapper=tmpfs_wrapper()), work)


def file_size_limit(work: pathlib.Path) -> Outcome:
    """No file may grow beyond a limit, as under `ulimit -f`."""
    code = _SPACE.replace("    # no room\n", _LIMIT).replace("    # room\n", _LIFT)
    ended = run_child(code, work)
    return _space("limit of file size during a save", "RLIMIT_FSIZE", ended, work)


def read_only(work: pathlib.Path) -> Outcome:
    """The directory may be read and not written."""
    wrapper = tmpfs_wrapper()
    how = "a tmpfs, mounted anew as read-only" if wrapper else "mode 0500"
    if not wrapper and os.geteuid() == 0:
        return Outcome("directory read-only", how, f"{_NO_MOUNT}, and root may write", None)
    close = (
        'subprocess.run(["mount", "-o", "remount,ro", place], check=True)'
        if wrapper
        else 'os.chmod(f"{place}/run", 0o500)'
    )
    code = f"""
with open_checkpoints(f"{{place}}/run") as checkpoints:
    train(checkpoints, checkpoints.resume(first_state()), 2)
{close}
tell(readable=newest(f"{{place}}/run"))
with open_checkpoints(f"{{place}}/run") as checkpoints:
    train(checkpoints, checkpoints.resume(first_state()), 4)
"""
    try:
        ended = run_child(code, work, wrapper=wrapper)
    finally:
        with contextlib.suppress(FileNotFoundError):
            (work / "run").chmod(0o700)
    readable = ended.seen.get("readable")
    named = "Read-only file system" in ended.error or "Permission denied" in ended.error
    outcome = f"refused: {brief(ended.error, work)}; step {readable} can be read"
    ok = ended.exit_code == 1 and named and readable == 2
    return Outcome("directory read-only", how, outcome, ok)


def missing(work: pathlib.Path) -> Outcome:
    """The directory does not exist, nor does its parent."""
    code = """
try:
    checkpointing.load(place)
except FileNotFoundError as error:
    tell(error=str(error), made=os.path.exists(place))
with open_checkpoints(place) as checkpoints:
    train(checkpoints, checkpoints.resume(first_state()), 2)
"""
    ended = run_child(code, work / "no" / "such" / "run")
    step = newest_step(work / "no" / "such" / "run")
    ok = ended.exit_code == 0 and step == 2 and ended.seen.get("made") is False
    outcome = f"made for a run, which saves step {step}; for reading: {brief(ended.error, work)}"
    return Outcome("directory missing", "a path without its parents", outcome, ok)


def a_file(work: pathlib.Path) -> Outcome:
    """A file stands where the directory should."""
    (work / "run").write_text("mine")
    ended = run_child("open_checkpoints(place)", work / "run")
    untouched = (work / "run").read_text() == "mine"
    ok = ended.exit_code == 1 and "NotADirectoryError" in ended.error and untouched
    outcome = f"{brief(ended.error, work)}; the file is {'as it was' if untouched else 'CHANGED'}"
    return Outcome("directory is a file", "a file of that name", outcome, ok)


def relative_path(work: pathlib.Path) -> Outcome:
    """The path is relative, and the process changes its directory meanwhile."""
    (work / "b").mkdir()
    code = """
os.chdir(place)
with open_checkpoints("a/run") as checkpoints:
    run = checkpoints.resume(first_state())
    state = train(checkpoints, run, 2)
    os.chdir("b")
    train(checkpoints, run, 4, state)
"""
    ended = run_child(code, work)
    step, strays = newest_step(work / "a/run"), list((work / "b").iterdir())
    ok = ended.exit_code == 0 and step == 4 and not strays
    outcome = f"step {step} is in the first place; in the second: {strays or 'nothing'}"
    return Outcome("a relative path", "os.chdir between two saves", outcome, ok)


def strange_path(work: pathlib.Path) -> Outcome:
    """The path has blanks, letters beyond ASCII, and characters that mean something in other places."""
    directory = work / "läuft gut ∂ ☃ $HOME %s {x} *"
    ended = run_child(_UNTIL.format(2), directory)
    again = run_child(_UNTIL.format(4), directory)
    step = newest_step(directory)
    ok = ended.exit_code == again.exit_code == 0 and again.seen.get("began") == 2 and step == 4
    outcome = f"saved, resumed at step {again.seen.get('began')}, saved until step {step}"
    return Outcome("a path with blanks and non-ASCII", f"a folder {directory.name!r}", outcome, ok)


def moved_away(work: pathlib.Path) -> Outcome:
    """The directory disappears in the middle of a run, and a file takes its place."""
    code = """
with open_checkpoints(place) as checkpoints:
    run = checkpoints.resume(first_state())
    state = train(checkpoints, run, 2)
    checkpoints.wait()
    os.rename(place, place + " elsewhere")
    pathlib.Path(place).write_text("mine")
    tell(failing=time.monotonic())
    train(checkpoints, run, 4, state)
"""
    ended = run_child(code, work / "run")
    seconds = ended.ended - ended.seen.get("failing", ended.ended)
    step = newest_step(work / "run elsewhere")
    ok = ended.exit_code == 1 and "has failed" in ended.errors and step == 2
    outcome = (
        f"exit code {ended.exit_code}, {seconds:.1f} s after the fault: "
        f"{brief(ended.last_line, work)}; step {step} is intact"
    )
    return Outcome("a save cannot begin", "the directory is replaced by a file", outcome, ok)


def two_writers(work: pathlib.Path) -> Outcome:
    """A second process opens the directory that a first one writes to."""
    with started(_HOLD, work / "run") as first:
        ready = first.has_told("ready")
        second = run_child(_UNTIL.format(6), work / "run")
        ended = first.wait()
    step = newest_step(work / "run")
    refused = second.exit_code == 1 and "BlockingIOError" in second.error
    ok = ready and refused and ended.exit_code == 0 and step == 4
    outcome = (
        f"the second is refused at once: {brief(second.error, work)}; "
        f"the first goes on to step {step}"
    )
    return Outcome("two writers in one directory", "two processes", outcome, ok)


def lock_of_a_killed_process(work: pathlib.Path) -> Outcome:
    """The process that held the lock was killed."""
    with started(_HOLD, work / "run") as first:
        ready = first.has_told("ready")
        first.kill()
    left = (work / "run/.lock").exists()
    ended = run_child(_UNTIL.format(4), work / "run")
    began, step = ended.seen.get("began"), newest_step(work / "run")
    ok = ready and left and ended.exit_code == 0 and began == 2 and step == 4
    outcome = f"the next one opens it, resumes at step {began} and saves until step {step}"
    return Outcome("a lock left by a killed process", "SIGKILL to the holder", outcome, ok)


def damaged_step_in_the_way(work: pathlib.Path) -> Outcome:
    """The newest step is damaged, so the run comes to the same step again."""
    run_child(_UNTIL.format(3), work / "run")
    (work / "run/3/iterator/metadata").write_bytes(b"")
    ended = run_child(_UNTIL.format(4), work / "run")
    began, names = ended.seen.get("began"), ended.seen.get("names")
    ok = ended.exit_code == 0 and began == 2 and names == ["3", "3.set-aside-1", "4"]
    outcome = f"resumed at step {began}; afterwards there are {', '.join(names or [])}"
    return Outcome("a damaged step in the way", "a file of step 3 emptied", outcome, ok)


_UNTIL: Final = """
with open_checkpoints(place) as checkpoints:
    run = checkpoints.resume(first_state())
    tell(began=run.position.step)
    train(checkpoints, run, {0})
tell(names=names(place))
"""
_HOLD: Final = """
with open_checkpoints(place) as checkpoints:
    run = checkpoints.resume(first_state())
    state = train(checkpoints, run, 2)
    checkpoints.wait()
    tell(ready=True)
    sys.stdin.read()
    train(checkpoints, run, 4, state)
"""


def brief(text: str, work: pathlib.Path) -> str:
    """A message without the folder of this harness, cut short."""
    text = text.replace(f"{work}/", "").replace(str(work), ".")
    return text if len(text) <= 150 else f"{text[:147]}..."


def _space(fault: str, how: str, ended: Ended, work: pathlib.Path) -> Outcome:
    seen = ended.seen
    if ended.exit_code != 0 or not seen.get("error"):
        return Outcome(fault, how, f"exit code {ended.exit_code}: {ended.last_line}", ok=False)
    whole = seen["intact"] == 2 and seen["left"] == ["1", "2"]
    ok = whole and seen["resumed"] == 5 and seen["equal"]
    outcome = (
        f"{brief(seen['error'], work)}; step {seen['intact']} is intact; with "
        f"room again, saved until step {seen['resumed']}"
    )
    return Outcome(fault, f"{how} ({seen.get('full')})", outcome, ok)
