"""The measurement of one workload: settings are tried, deliveries checked, windows timed in turn."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from scripts.benchmarks.contenders import CONTENDERS
from scripts.benchmarks.processes import Member
from scripts.benchmarks.workloads import Workload, read_through, resident_share

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Windows:
    """How long is measured.

    Attributes:
      rounds: windows of each contender.
      warmup: windows of each contender before those.
      seconds: a window is as many whole units as fill so much time.
      trial_seconds: the same for a setting's trial; ``None``: no trial, the first setting is used.
      steps: training steps in each loop of a window.
    """

    rounds: int
    warmup: int
    seconds: float
    trial_seconds: float | None
    steps: int


FULL: Final = Windows(rounds=11, warmup=1, seconds=0.4, trial_seconds=0.2, steps=100)
QUICK: Final = Windows(rounds=2, warmup=0, seconds=0.0, trial_seconds=None, steps=3)

#: Windows of a setting's trial, unless the first ones take so long that fewer must do.
TRIALS: Final = 3


@dataclasses.dataclass
class Outcome:
    """What came of a workload.

    Attributes:
      settings: for each contender that was measured the setting it was measured with.
      trials: for each contender records or steps per second of each setting tried.
      windows: for each contender the figures of each window, by name: ``rate`` in records per second;
        where it trains what `training.Trainer.window` returns.
      absent: why the others were not measured.
      resident: share of the data's file in memory, at the begin of each round.
    """

    workload: Workload
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    trials: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    windows: dict[str, list[dict[str, float]]] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    resident: list[float | None] = dataclasses.field(default_factory=list)

    def values(self, name: str, what: str = "rate") -> list[float]:
        """One figure of each of a contender's windows."""
        return [window[what] for window in self.windows[name]]


class Run:
    """The measurement of one workload.

    Args:
      outcome: gets all that is found out.
      members: the contenders' processes, by name.
      place: folder of the data.
      windows: how long is measured.
      say: is told what goes on.
    """

    def __init__(
        self,
        outcome: Outcome,
        members: dict[str, Member],
        place: Path,
        windows: Windows,
        say: Say,
    ) -> None:
        self._outcome, self._members, self._place, self._windows = outcome, members, place, windows
        self._workload = outcome.workload
        self._say = say
        #: Turns of a training step, once they are known.
        self._turns: int | None = None

    def measure(self) -> None:
        """Finds each contender's setting, checks what it delivers, and times it, in turn with the others."""
        if self._workload.mapped:
            read_through(self._workload, self._place)
        for name, member in self._members.items():
            self._outcome.settings[name] = self._best_setting(name, member)
        for name, member in self._members.items():
            self._say(f"checking {name}")
            self._open(name, member)
            if faults := member.ask("check"):
                raise RuntimeError(f"{name} delivered something else than the data: {faults}")
        for number in range(self._windows.warmup + self._windows.rounds):
            self._round(number)
        for member in self._members.values():
            member.ask("close")

    def _best_setting(self, name: str, member: Member) -> str:
        """The fastest of a contender's settings; the first one if there is no trial."""
        settings = CONTENDERS[name].fitting(self._workload)
        seconds = self._windows.trial_seconds
        if seconds is None or len(settings) == 1:
            return settings[0]
        rates = self._outcome.trials[name] = {}
        for setting in settings:
            self._say(f"trying {name}, {setting}")
            self._outcome.settings[name] = setting
            rates[setting] = self._trial(name, member, seconds)
        return max(rates, key=rates.__getitem__)

    def _trial(self, name: str, member: Member, seconds: float) -> float:
        """The best rate of a few windows, after one that warms up: what else runs only takes away."""
        self._open(name, member)
        self._window(member, 0.0)
        end = time.monotonic() + TRIALS * seconds
        rates = [self._window(member, seconds)["rate"]]
        while len(rates) < TRIALS and time.monotonic() < end:
            rates.append(self._window(member, seconds)["rate"])
        member.ask("close")
        return max(rates)

    def _round(self, number: int) -> None:
        """A window of each contender."""
        if self._workload.mapped:
            self._outcome.resident.append(resident_share(self._workload, self._place))
        for name, member in self._members.items():
            self._say(f"round {number + 1}, {name}")
            figures = self._window(member, self._windows.seconds)
            if number >= self._windows.warmup:
                self._outcome.windows.setdefault(name, []).append(figures)

    def _open(self, name: str, member: Member) -> None:
        member.ask(
            "open",
            workload=self._workload,
            folder=self._place,
            setting=self._outcome.settings[name],
        )

    def _window(self, member: Member, seconds: float) -> dict[str, float]:
        """A window's figures, as in `Outcome.windows`."""
        if not self._workload.trains:
            records, taken = member.ask("window", seconds=seconds)
            return {"rate": records / taken}
        steps = self._windows.steps
        figures: dict[str, float] = member.ask("train", steps=steps, turns=self._turns)
        self._turns = int(figures["turns"])
        records = 2 * steps * self._workload.batch_size
        return figures | {"rate": records / (figures["awaited"] + figures["ahead"])}
