"""What pipelines and mixtures of them are known by, and how any stream's identity is read again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from loader.batching import Position, Segment
from loader.config import PipelineConfig
from loader.identity.base import (
    Derivation,
    PlainIdentity,
    StreamIdentity,
    data_report,
    diff_mappings,
    diff_values,
    texts,
    typed,
)
from loader.identity.differences import Difference
from loader.identity.fingerprint import ColumnDigest, Fingerprint
from loader.order import ORDER_VERSIONS
from loader.streams.chain_identity import ChainIdentity
from loader.streams.turns import TURNS_VERSION, Turns


@dataclasses.dataclass(frozen=True)
class PipelineIdentity(StreamIdentity):
    """What a `Pipeline` is known by.

    Attributes:
      fingerprint: of the data.
      config: `PipelineConfig.to_dict`.
      order_version: of the shuffle kind, see `loader.ORDER_VERSIONS`.
      transform: name and version; ``None`` without one.
      keys_version: of the records' keys, ``None`` if the batches have none.
      source: the records, if they are at hand: to name those that differ.
    """

    fingerprint: Fingerprint
    config: Mapping[str, Any]
    order_version: int
    transform: Mapping[str, str] | None
    keys_version: int | None
    source: Any = dataclasses.field(default=None, compare=False, repr=False)

    kind = "pipeline"
    may_change: ClassVar = frozenset({"batch_size", "skip", "exclude"})

    @property
    def title(self) -> str:
        """As every identity has it."""
        return "one pipeline"

    def setting(self, name: str) -> Any:
        """A value of the config."""
        return self.config.get(name)

    def with_config(self, config: PipelineConfig) -> "PipelineIdentity":
        """The identity of the same data and transform under another config."""
        version = ORDER_VERSIONS[config.shuffle]
        return dataclasses.replace(self, config=config.to_dict(), order_version=version)

    def diff(self, now: Self) -> list[Difference]:
        """Everything in which ``now`` is another stream than this one, that of a checkpoint."""
        versions = self.keys_version, now.keys_version
        keys = [] if None in versions else diff_values("keys_version", *versions)
        return [
            *self.fingerprint.diff(now.fingerprint, now.source),
            *diff_mappings("", self.config, now.config),
            *diff_values("order_version", self.order_version, now.order_version),
            *keys,  # if only one of the two has keys, the config shows it
            *diff_mappings("transform.", self.transform or {}, now.transform or {}),
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        keys = {} if self.keys_version is None else {"keys": {"version": self.keys_version}}
        return {
            "fingerprint": self.fingerprint.to_dict(),
            "config": dict(self.config),
            "order": self._order,
            "transform": self.transform,
            **keys,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        config = PipelineConfig.from_dict(value["config"]).to_dict()
        kind, version = value["order"]["kind"], value["order"]["version"]
        if kind != config["shuffle"]:
            raise ValueError("its config and its order disagree")
        if ("keys" in value) != config["record_keys"]:
            raise ValueError("its config and its keys disagree")
        transform = value["transform"]
        return cls(
            Fingerprint.from_dict(value["fingerprint"]),
            config,
            typed(version, int),
            None if transform is None else texts(transform),
            typed(value["keys"]["version"], int) if config["record_keys"] else None,
        )

    def report(self) -> dict[str, Any]:
        """As every identity has it."""
        return {
            "data": data_report(self.fingerprint),
            "config": dict(self.config),
            "order": self._order,
            "transform": None if self.transform is None else dict(self.transform),
            "keys_version": self.keys_version,
        }

    def derivation(self, history: Sequence[Mapping[str, Any]], where: str) -> Derivation:
        """As every identity has it."""
        kind, version = self.config["shuffle"], self.order_version
        if version != ORDER_VERSIONS[kind]:
            raise ValueError(
                f"{where} follows the order {kind!r} version {version}, and this version of the library "
                f"derives version {ORDER_VERSIONS[kind]}: use the one that wrote it"
            )
        try:
            segments = self._segments(history)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the history in {where} cannot be followed: {error!r}") from error
        return Derivation({"": (segments, self.fingerprint)})

    def _segments(self, history: Sequence[Mapping[str, Any]]) -> list[Segment]:
        """The stretches of a run between the changes on its way."""
        config, segments = dict(self.config), []
        for change in reversed(history):
            place = change["position"]
            start = Position(place["epoch"], place["offset"], place["step"])
            segments.append(self._segment(config, start))
            for name, (before, after) in change["changed"].items():
                if name not in self.may_change or config[name] != after:
                    raise ValueError(f"{name} is {config.get(name)!r} behind a change to {after!r}")
                config[name] = before
        return [*segments, self._segment(config, Position())][::-1]

    def _segment(self, config: Mapping[str, Any], start: Position) -> Segment:
        return Segment(self.fingerprint.num_records, PipelineConfig.from_dict(dict(config)), start)

    @property
    def _order(self) -> dict[str, Any]:
        return {"kind": self.config["shuffle"], "version": self.order_version}


@dataclasses.dataclass(frozen=True)
class MixtureIdentity(StreamIdentity):
    """What a `Mixture` is known by.

    Attributes:
      parts: the identities of the pipelines, by name.
      weights: as whole numbers, by name.
      turns_version: of how the weights decide the turns.
    """

    parts: Mapping[str, PipelineIdentity]
    weights: Mapping[str, int]
    turns_version: int

    kind = "mixture"

    @property
    def title(self) -> str:
        """As every identity has it."""
        return f"a mixture of {', '.join(self.parts)}"

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the data of all parts together."""
        return combined({name: part.fingerprint for name, part in self.parts.items()})

    def diff(self, now: Self) -> list[Difference]:
        """Everything in which ``now`` is another mixture than this one, that of a checkpoint."""
        found = [
            *diff_mappings("weights.", self.weights, now.weights),
            *diff_values("turns_version", self.turns_version, now.turns_version),
        ]
        for name in self.parts.keys() & now.parts.keys():
            found += [
                dataclasses.replace(one, name=f"parts.{name}.{one.name}")
                for one in self.parts[name].diff(now.parts[name])
            ]
        return sorted(found, key=lambda difference: difference.name)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "weights": dict(self.weights),
            "turns_version": self.turns_version,
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        parts = {
            typed(name, str): PipelineIdentity.from_dict(part)
            for name, part in typed(value["parts"], dict).items()
        }
        weights = {name: typed(weight, int) for name, weight in value["weights"].items()}
        if list(weights) != list(parts) or Turns(weights).weights != weights:
            raise ValueError("its weights are not those of its parts")
        return cls(parts, weights, typed(value["turns_version"], int))

    def report(self) -> dict[str, Any]:
        """As every identity has it."""
        return {
            "data": data_report(self.fingerprint),
            "weights": dict(self.weights),
            "turns_version": self.turns_version,
            "parts": {name: part.report() for name, part in self.parts.items()},
        }

    def derivation(self, history: Sequence[Mapping[str, Any]], where: str) -> Derivation:
        """As every identity has it."""
        del history  # nothing of a mixture can change
        if self.turns_version != TURNS_VERSION:
            raise ValueError(
                f"{where} follows the turns of version {self.turns_version}, and this version of the "
                f"library derives version {TURNS_VERSION}: use the one that wrote it"
            )
        parts = {
            name: part.derivation((), f"part {name!r} of {where}").parts[""]
            for name, part in self.parts.items()
        }
        return Derivation(parts, Turns(self.weights))


def combined(parts: Mapping[str, Fingerprint]) -> Fingerprint:
    """One fingerprint for several data sets: a column for each, whose digest is that of the whole set."""
    total = sum(part.num_records for part in parts.values())
    columns = {
        name: ColumnDigest("part", (part.num_records,), part.digest) for name, part in parts.items()
    }
    return Fingerprint(total, columns, total, "")


_KINDS: Final[Mapping[str, type[StreamIdentity]]] = {
    one.kind: one for one in (PipelineIdentity, MixtureIdentity, ChainIdentity)
}


def read_identity(value: Any) -> StreamIdentity:
    """Read the identity of a stream from JSON values, its kind among them.

    Raises:
      AttributeError, KeyError, TypeError, ValueError: the values are no identity.
    """
    return _KINDS.get(typed(value["kind"], str), PlainIdentity).from_dict(value)
