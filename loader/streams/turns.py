"""Whose turn it is: a function of the step alone, that gives each part exactly its share.

Weights are made whole numbers without a common divisor; their sum is a *round*, after which the turns
repeat.
"""

import heapq
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: The turns of a round are kept: 13 bytes a step.
MAX_ROUND: Final = 1 << 20
MAX_PARTS: Final = 256
#: Numbers beyond it are not written out: one of thousands of digits cannot be.
_SHOWN: Final = 10**18
#: Changing whose turn a step is means a new number here.
TURNS_VERSION: Final = 1


class Turn(NamedTuple):
    """Whose turn a step is.

    Attributes:
      part: its name.
      step: the number of the part's own batch, counted from 0.
    """

    part: str
    step: int


class Turns:
    """The turns of parts, by weight.

    Args:
      weights: by name, numbers above 0; 0.7 is taken for 7/10, as it is written.

    Attributes:
      weights: as whole numbers, by name in alphabetical order.

    Raises:
      TypeError, ValueError: a weight that is no number above 0; none, or more than 256; a round of
        more than 1,048,576 steps.
    """

    def __init__(self, weights: Mapping[str, float | Fraction]) -> None:
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights must map the parts' names to numbers, not be {weights!r:.80}")
        if not 1 <= len(weights) <= MAX_PARTS:
            raise ValueError(f"a mixture has 1 to {MAX_PARTS} parts, not {len(weights)}")
        self.weights: Final = _whole_weights(weights)
        self.names: Final = tuple(self.weights)
        shares = np.array(list(self.weights.values()), np.int64)
        self._turns, self._earlier = _round(shares)
        self._places = [np.flatnonzero(self._turns == part) for part in range(len(shares))]

    def __len__(self) -> int:
        """Steps in a round."""
        return len(self._turns)

    def at(self, step: int) -> Turn:
        """Whose turn a step is."""
        rounds, place = divmod(step, len(self))
        name = self.names[self._turns[place]]
        return Turn(name, rounds * self.weights[name] + int(self._earlier[place]))

    def step_of(self, part: str, own: int) -> int:
        """The step at which a part's turn number ``own`` comes, from 0: the inverse of `at`."""
        rounds, place = divmod(own, self.weights[part])
        return rounds * len(self) + int(self._places[self.names.index(part)][place])

    def before(self, step: int) -> dict[str, int]:
        """How many turns each part has had before a step."""
        rounds, place = divmod(step, len(self))
        return {
            name: rounds * weight + int(np.searchsorted(self._places[part], place))
            for part, (name, weight) in enumerate(self.weights.items())
        }


def _whole_weights(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    fractions = {name: _fraction(name, weights[name]) for name in sorted(weights)}
    common = math.lcm(*(weight.denominator for weight in fractions.values()))
    whole = {name: int(weight * common) for name, weight in fractions.items()}
    divisor = math.gcd(*whole.values())
    whole = {name: weight // divisor for name, weight in whole.items()}
    steps = sum(whole.values())
    if steps > MAX_ROUND:
        long = steps >= _SHOWN
        given = "such weights" if long else f"weights {dict(weights)!s:.200}"
        count = f"more than {_SHOWN}" if long else str(steps)
        raise ValueError(
            f"{given} need a round of {count} steps, from {min(whole, key=whole.__getitem__)!r}, the "
            f"smallest, to {max(whole, key=whole.__getitem__)!r}, and {MAX_ROUND} are the most; round "
            "them, or give whole numbers"
        )
    return whole


def _fraction(name: str, weight: Any) -> Fraction:
    if isinstance(weight, bool | np.bool_) or not isinstance(
        weight, int | float | Fraction | np.integer | np.floating
    ):
        raise TypeError(f"the weight of {name!r} must be a number, not {weight!r}")
    if isinstance(weight, Fraction):
        fraction = weight
    elif isinstance(weight, int | np.integer):
        fraction = Fraction(int(weight))
    elif not math.isfinite(weight):
        raise ValueError(f"the weight of {name!r} must be a number above 0, not {weight!r}")
    else:
        fraction = Fraction(str(weight))  # 0.7 as it is written, not as it is stored
    if fraction <= 0:
        shown = repr(weight) if fraction > -_SHOWN else f"less than -{_SHOWN}"
        raise ValueError(
            f"the weight of {name!r} must be above 0, not {shown}; leave the part out instead"
        )
    return fraction


def _round(weights: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """The turns of a round, and how many turns of the same part come before each.

    Part k's turn number j may come from step ``floor(j * W / w_k)`` on and has to come before step
    ``ceil((j + 1) * W / w_k)``, where W is the sum of the weights. To take the one that has to come
    first, of those that may, meets all of them, since the weights fill the round exactly (Baruah,
    Cohen, Plaxton and Varvel, "Proportionate progress", Algorithmica 1996). So no part is ever a
    whole turn ahead of its share, or behind it.
    """
    total = int(weights.sum())
    turns, earlier = np.empty(total, np.uint8), np.empty(total, np.int32)
    waiting: list[tuple[int, int, int]] = []  # first step, part, number
    ready: list[tuple[int, int, int]] = []  # step before which it has to come, part, number
    for part in range(len(weights)):
        heapq.heappush(waiting, (0, part, 0))
    for step in range(total):
        while waiting and waiting[0][0] <= step:
            _, part, number = heapq.heappop(waiting)
            deadline = -(-(number + 1) * total // int(weights[part]))
            heapq.heappush(ready, (deadline, part, number))
        _, part, number = heapq.heappop(ready)
        turns[step], earlier[step] = part, number
        if number + 1 < weights[part]:
            heapq.heappush(waiting, ((number + 1) * total // int(weights[part]), part, number + 1))
    return turns, earlier
