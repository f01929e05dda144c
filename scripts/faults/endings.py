"""Faults of the process: errors, ends without `close`, signals, a clock that jumps, calls made twice."""

import pathlib
import signal
from typing import Final

from checkpointing.writer import STARTS_NO_THREADS_AT_EXIT
from scripts.faults import run
from scripts.faults.children import Ended, Outcome, newest_step, run_child, started
from scripts.faults.places import brief

#: Makes the disk slow, so that the save of step 3 is under way when the lines end.
_SAVING: Final = """
fsync = os.fsync
os.fsync = lambda descriptor: (time.sleep(0.02), fsync(descriptor))
checkpoints = open_checkpoints(place)
run = checkpoints.resume(first_state())
train(checkpoints, run, 3)
tell(in_flight=not os.path.exists(f"{place}/3"))
"""
#: The disk fails once, at the next sync of the save under way.
_FAILING_DISK: Final = """
fsync, failing = os.fsync, []
def fail_once(descriptor):
    if failing:
        raise OSError(failing.pop(), "Input/output error")
    fsync(descriptor)
os.fsync = fail_once
checkpoints = open_checkpoints(place)
run = checkpoints.resume(first_state())
state = train(checkpoints, run, 2)
checkpoints.wait()
failing.append(errno.EIO)
"""


def exception_in_the_loop(work: pathlib.Path) -> Outcome:
    """The training loop raises inside the context, with a save under way."""
    code = """
with open_checkpoints(place) as checkpoints:
    run = checkpoints.resume(first_state())
    train(checkpoints, run, 3)
    raise ValueError("of the loop")
"""
    ended = run_child(code, work / "run")
    step = newest_step(work / "run")
    ok = ended.exit_code == 1 and ended.last_line == "ValueError: of the loop" and step == 3
    outcome = f"exit code {ended.exit_code}, {ended.last_line}; step {step}, under way, is saved"
    return Outcome("an exception in the loop", "raise in the context", outcome, ok)


def exception_in_the_background(work: pathlib.Path) -> Outcome:
    """A save fails after `save` has returned."""
    code = f"""
{_FAILING_DISK}
state = train(checkpoints, run, 3, state)
state = update(state, next(run.batches))
try:
    checkpoints.save(run.batches, state)
except RuntimeError as error:
    tell(error=str(error))
checkpoints.close()
tell(names=names(place), newest=newest(place))
"""
    ended = run_child(code, work / "run")
    names, step = ended.seen.get("names"), ended.seen.get("newest")
    ok = ended.exit_code == 0 and "save of step 3" in ended.error and "has failed" in ended.error
    outcome = f"the next save raises ({brief(ended.error, work)}), and saves step {step}"
    return Outcome(
        "an exception in the background save",
        "a sync raises EIO",
        outcome,
        ok and step == 4 and names == ["1", "2", "4"][-run.KEEP :],
    )


def end_of_the_script(work: pathlib.Path) -> Outcome:
    """The interpreter comes to its end, and nobody has called `close`."""
    return _without_close("the interpreter's exit without close", "", 0, work)


def sys_exit(work: pathlib.Path) -> Outcome:
    """`sys.exit`, and nobody has called `close`."""
    return _without_close("sys.exit without close", "sys.exit(3)", 3, work)


def uncaught_exception(work: pathlib.Path) -> Outcome:
    """An exception ends the process, and nobody has called `close`."""
    return _without_close("an uncaught exception without close", "raise ValueError", 1, work)


def exit_with_a_failing_save(work: pathlib.Path) -> Outcome:
    """The save that is under way when the interpreter exits fails."""
    ended = run_child(_FAILING_DISK + "train(checkpoints, run, 3, state)", work / "run")
    step = newest_step(work / "run")
    said = "the save of step 3" in ended.errors and "has failed" in ended.errors
    ok = ended.exit_code is not None and said and step == 2
    outcome = (
        f"exit code {ended.exit_code}, says: {brief(ended.last_line, work)}; step {step} is intact"
    )
    return Outcome("a save that fails at the exit", "a sync raises EIO", outcome, ok)


def exit_after_a_failed_save(work: pathlib.Path) -> Outcome:
    """The error of a failed save ends the process, and nobody has called `close`."""
    code = f"""
{_FAILING_DISK}
state = train(checkpoints, run, 3, state)
tell(failing=time.monotonic())
checkpoints.wait()
"""
    ended = run_child(code, work / "run")
    seconds = ended.ended - ended.seen.get("failing", ended.ended)
    step = newest_step(work / "run")
    ok = ended.exit_code == 1 and "RuntimeError" in ended.last_line and step == 2
    outcome = f"exit code {ended.exit_code} after {seconds:.1f} s; step {step} is intact"
    return Outcome("exit after a failed save", "a sync raises EIO", outcome, ok)


def clock_jumps_back(work: pathlib.Path) -> Outcome:
    """The clock of the process jumps back by a day, twice; the files' times run backwards."""
    code = """
import datetime
now, now_ns, back = time.time, time.time_ns, 0
time.time = lambda: now() - back
time.time_ns = lambda: now_ns() - back * 10**9
class Earlier(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - datetime.timedelta(seconds=back)
datetime.datetime = Earlier
state = first_state()
with open_checkpoints(place, keep=4) as checkpoints:
    run = checkpoints.resume(state)
    for step in (2, 4, 6):
        state = train(checkpoints, run, step, state)
        checkpoints.wait()
        back += 86400
for name in names(place):
    os.utime(f"{place}/{name}", (10**9 - int(name), 10**9 - int(name)))
tell(names=names(place))
"""
    ended = run_child(code, work / "run")
    again = run_child(_FINISH, work / "run")
    names, began = ended.seen.get("names"), again.seen.get("began")
    ok = ended.exit_code == 0 and names == ["3", "4", "5", "6"] and began == 6
    outcome = f"steps {', '.join(names or [])} are kept; resumed at step {began}"
    how = "time.time, time_ns and datetime moved, mtimes reversed"
    return Outcome("the clock jumps back", how, outcome, ok and _is_finished(again))


def save_twice(work: pathlib.Path) -> Outcome:
    """`save` is called again at the same step."""
    code = """
with open_checkpoints(place) as checkpoints:
    run = checkpoints.resume(first_state())
    state = train(checkpoints, run, 2)
    again = [checkpoints.save(run.batches, state), checkpoints.save(run.batches, state, force=True)]
    checkpoints.wait()
    again.append(checkpoints.save(run.batches, state, force=True))
tell(again=again, names=names(place), newest=newest(place))
"""
    ended = run_child(code, work / "run")
    again, names, step = (ended.seen.get(name) for name in ("again", "names", "newest"))
    ok = again == [False] * 3 and names == ["1", "2"] and step == 2
    outcome = f"returns {again}; steps {', '.join(names or [])}, the newest is whole"
    return Outcome("save twice at one step", "with force and without", outcome, ok)


def finished_run(work: pathlib.Path) -> Outcome:
    """A run that has come to its end is resumed."""
    first = run_child(_FINISH, work / "run")
    before = _content(work / "run")
    again = run_child(_FINISH, work / "run")
    unchanged = _content(work / "run") == before
    began = again.seen.get("began")
    ok = _is_finished(first) and _is_finished(again) and began == run.NUM_STEPS and unchanged
    outcome = (
        f"begins at step {began} of {run.NUM_STEPS}, delivers nothing, same train state, files "
        f"{'unchanged' if unchanged else 'CHANGED'}"
    )
    return Outcome("resume of a finished run", "the script is run again", outcome, ok)


def sigterm(work: pathlib.Path) -> Outcome:
    """SIGTERM from outside, at any instant."""
    return _signal(signal.SIGTERM, work)


def sigint(work: pathlib.Path) -> Outcome:
    """SIGINT from outside, at any instant."""
    return _signal(signal.SIGINT, work)


_FINISH: Final = """
with open_checkpoints(place, save_every=1000) as checkpoints:
    run = checkpoints.resume(first_state())
    tell(began=run.position.step)
    state = train(checkpoints, run, NUM_STEPS)
    tell(more=next(run.batches, None) is not None, digest=digest(state))
    checkpoints.save(run.batches, state, force=True)
"""
_SLOW: Final = """
with open_checkpoints(place, save_every=1000) as checkpoints, checkpoints.stop_on_signals():
    run = checkpoints.resume(first_state())
    state = run.train_state
    for batch in run.batches:
        state = update(state, batch)
        tell(steps=run.batches.position.step)
        if run.batches.position.step == 3:
            tell(ready=True)
        time.sleep(0.05)
        checkpoints.save(run.batches, state)
"""


def _without_close(fault: str, last: str, code: int, work: pathlib.Path) -> Outcome:
    ended = run_child(_SAVING + last, work / "run")
    step, in_flight = newest_step(work / "run"), ended.seen.get("in_flight")
    # On a Python of which this is true, each save outside of `with` waits until it is written.
    ok = ended.exit_code == code and step == 3 and in_flight is not STARTS_NO_THREADS_AT_EXIT
    waited = "waited for" if STARTS_NO_THREADS_AT_EXIT else "NOT UNDER WAY"
    outcome = f"exit code {ended.exit_code}; step {step}, {'under way' if in_flight else waited}, is saved"
    return Outcome(fault, last or "the last line of the script", outcome, ok)


def _signal(number: signal.Signals, work: pathlib.Path) -> Outcome:
    with started(_SLOW, work / "run") as child:
        ready = child.has_told("ready")
        child.process.send_signal(number)
        ended = child.wait()
    trained, names = ended.seen.get("steps"), sorted(path.name for path in (work / "run").iterdir())
    again = run_child(_FINISH, work / "run")
    once = names == [".lock", str(trained)] and newest_step(work / "run") == run.NUM_STEPS
    began = again.seen.get("began")
    ok = ready and ended.exit_code == 128 + number and once and began == trained
    outcome = (
        f"exit code {ended.exit_code}; trained {trained} steps, saved {', '.join(names[1:])}; resumed "
        f"at step {began}, same end: {'yes' if _is_finished(again) else 'NO'}"
    )
    return Outcome(number.name, "sent from outside", outcome, ok and _is_finished(again))


def _is_finished(ended: Ended) -> bool:
    """Whether a run came to its end, and to the train state of a run without checkpoints."""
    state = run.first_state()
    for batch in run.a_pipeline():
        state = run.update(state, batch)
    seen = ended.seen
    return ended.exit_code == 0 and seen["more"] is False and seen["digest"] == run.digest(state)


def _content(directory: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
