"""What a chain of Grain data sets is known by: the data sets, the version of Grain, the user's data and settings."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Self

from loader.identity.base import StreamIdentity, data_report, diff_mappings, typed
from loader.identity.differences import Difference, in_print
from loader.identity.fingerprint import Fingerprint
from loader.identity.json_form import shallow

_WHY_WORKERS: Final = (
    "Grain's state holds whose turn it is among its workers: with another number of them it would go on "
    "with other elements"
)


@dataclasses.dataclass(frozen=True)
class GrainChain:
    """The data sets of a chain, from the sources to what is delivered.

    Attributes:
      links: for each data set its class, those it reads from (by number), and its settings.
      workers: processes or threads that each read a share of it; 0 without any.
      grain: the version of Grain.
    """

    links: tuple[Mapping[str, Any], ...]
    workers: int
    grain: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "links": [dict(link) for link in self.links],
            "workers": self.workers,
            "grain": self.grain,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
          KeyError, TypeError, ValueError: it is not that.
        """
        links = []
        for link in value["links"]:
            settings = shallow(typed(link["settings"], dict))
            numbers = [number for number in link["from"] if type(number) is int]
            links.append(
                {"class": typed(link["class"], str), "from": numbers, "settings": settings}
            )
        return cls(tuple(links), typed(value["workers"], int), typed(value["grain"], str))

    def diff(self, now: "GrainChain") -> list[Difference]:
        """Return everything in which ``now`` differs from this chain, that of a checkpoint."""
        found = []
        if self.grain != now.grain:
            note = "Grain promises nothing across versions"
            found.append(Difference("grain_version", self.grain, now.grain, note))
        if self.workers != now.workers:
            # The shares of the workers differ too, which says no more.
            found.append(Difference("workers", str(self.workers), str(now.workers), _WHY_WORKERS))
            return found
        shapes = [[(link["class"], link["from"]) for link in one.links] for one in (self, now)]
        if shapes[0] != shapes[1]:
            before, after = (" > ".join(link["class"] for link in one.links) for one in (self, now))
            first = next(
                (i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b),
                min(map(len, shapes)),
            )
            return [*found, Difference("chain", before, after, f"from number {first + 1} on")]
        for number, (link, other) in enumerate(zip(self.links, now.links, strict=True), start=1):
            name = f"chain.{number}.{link['class']}"
            found += _diff_settings(name, link["settings"], other["settings"])
        return found


@dataclasses.dataclass(frozen=True)
class ChainIdentity(StreamIdentity):
    """What a `GrainStream` is known by.

    Attributes:
      fingerprint: of the data, as the user gave it.
      config: the user's own settings.
      chain: the data sets.
    """

    fingerprint: Fingerprint
    config: Mapping[str, Any]
    chain: GrainChain

    kind = "chain"
    may_change: ClassVar = frozenset({"grain_version"})

    @property
    def title(self) -> str:
        """As every identity has it."""
        return "a chain of Grain's"

    def setting(self, name: str) -> Any:
        """The version of Grain."""
        del name
        return self.chain.grain

    def diff(self, now: Self) -> list[Difference]:
        """Return everything in which ``now`` is another chain than this one, that of a checkpoint."""
        return [
            *self.fingerprint.diff(now.fingerprint),
            *diff_mappings("config.", self.config, now.config),
            *self.chain.diff(now.chain),
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "fingerprint": self.fingerprint.to_dict(),
            "config": dict(self.config),
            "chain": self.chain.to_dict(),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(
            Fingerprint.from_dict(value["fingerprint"]),
            shallow(typed(value["config"], dict)),
            GrainChain.from_dict(value["chain"]),
        )

    def report(self) -> dict[str, Any]:
        """As every identity has it."""
        return {
            "data": data_report(self.fingerprint),
            "config": dict(self.config),
            "chain": self.chain.to_dict(),
        }


def _diff_settings(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterable[Difference]:
    for key, shown in in_print([*before, *now]).items():
        a, b = (json.dumps(one[key]) if key in one else "absent" for one in (before, now))
        if a != b:
            texts = [str(one.get(key, "absent")) for one in (before, now)]
            # Quotes, which are left out elsewhere, set "1" apart from 1.
            yield Difference(f"{name}.{shown}", *(texts if texts[0] != texts[1] else (a, b)))
