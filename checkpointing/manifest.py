"""The manifest: the JSON item of a checkpoint that says which stream and which files it belongs to.

It is written as canonical JSON with a digest of itself, so that any change of any byte of it shows.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self, TypeAlias

from checkpointing.train_state import Leaf
from loader import (
    BatchIterator,
    Difference,
    Fingerprint,
    Mixture,
    Pipeline,
    PipelineConfig,
    Position,
    Turns,
)
from loader.fingerprint import read_ids
from loader.grain_chain import CHAIN_VERSION, GrainChain
from loader.grain_stream import GrainIterator, GrainStream
from loader.json_form import json_value, shallow
from loader.mixture import combined
from loader.sources import Verify as DataVerify
from loader.told_apart import in_print
from loader.transforms import transform_identity

#: What checkpoints can be made of, and its iterators.
Stream: TypeAlias = Pipeline | Mixture | GrainStream
Batches: TypeAlias = BatchIterator | GrainIterator

FORMAT_VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 16 << 20
NEXT_IDS: Final = 64
#: Names that `allow` may hold: differences that a run can go on with.
ALLOWABLE: Final = frozenset({"batch_size", "skip", "exclude", "grain_version"})

_NEXT_IDS_BYTES: Final = 16 << 10
_MAX_COUNT: Final = 2**62
_PACKAGES: Final = ("regrain", "grain", "orbax-checkpoint", "jax", "jaxlib", "numpy")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class StreamIdentity:
    """Which stream a pipeline gives.

    Attributes:
      fingerprint: of the data.
      config: `PipelineConfig.to_dict`.
      order_version: of the shuffle kind, see `loader.ORDER_VERSIONS`.
      transform: name and version; ``None`` without one.
      keys_version: of the records' keys, ``None`` where the batches have none.
    """

    fingerprint: Fingerprint
    config: Mapping[str, Any]
    order_version: int
    transform: Mapping[str, str] | None
    keys_version: int | None

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline, verify: DataVerify = "cache") -> "StreamIdentity":
        """The identity of what is at hand now. Reads the data where the source must, to digest it."""
        fingerprint = pipeline.fingerprint(verify=verify)
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(
                f"the source's fingerprint() gave a {type(fingerprint).__name__}, not a "
                "loader.Fingerprint; usually it is: return loader.fingerprint(self)"
            )
        known = pipeline.settings()
        return StreamIdentity(
            fingerprint,
            known["config"],
            known["order"]["version"],
            transform_identity(pipeline.transform),
            known["keys"]["version"] if "keys" in known else None,
        )

    def diff_stream(self, now: "StreamIdentity", source: Any) -> list[Difference]:
        """Everything in which ``now`` is another stream than this one, that of a checkpoint."""
        return [
            *self.fingerprint.diff(now.fingerprint, source),
            *_diff_mappings("", self.config, now.config),
            *_diff_values("order_version", self.order_version, now.order_version),
            *self._diff_keys(now),
            *_diff_mappings("transform.", self.transform or {}, now.transform or {}),
        ]

    def _diff_keys(self, now: "StreamIdentity") -> Iterable[Difference]:
        # Where one of both has no keys, the config says so.
        if self.keys_version is None or now.keys_version is None:
            return []
        return _diff_values("keys_version", self.keys_version, now.keys_version)

    def stream_to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        keys = {} if self.keys_version is None else {"keys": {"version": self.keys_version}}
        return {
            "fingerprint": self.fingerprint.to_dict(),
            "config": dict(self.config),
            "order": {"kind": self.config["shuffle"], "version": self.order_version},
            "transform": self.transform,
            **keys,
        }

    @classmethod
    def stream_from_dict(cls, value: Mapping[str, Any]) -> "StreamIdentity":
        """Reads what `stream_to_dict` wrote."""
        config = PipelineConfig.from_dict(value["config"]).to_dict()
        kind, version = value["order"]["kind"], value["order"]["version"]
        if kind != config["shuffle"]:
            raise ValueError("its config and its order disagree")
        if ("keys" in value) != config["record_keys"]:
            raise ValueError("its config and its keys disagree")
        transform = value["transform"]
        return StreamIdentity(
            Fingerprint.from_dict(value["fingerprint"]),
            config,
            _typed(version, int),
            None if transform is None else _texts(transform),
            _typed(value["keys"]["version"], int) if config["record_keys"] else None,
        )


@dataclasses.dataclass(frozen=True)
class Identity(StreamIdentity):
    """Which stream, and which train state: everything that must be the same again at a resume.

    Of a mixture, ``fingerprint`` is that of all parts together, ``config`` holds its weights, and
    ``order_version`` is that of its turns. Of a Grain chain, ``config`` is the user's own, and
    ``order_version`` that of how chains are described.

    Attributes:
      run_config: the user's own settings that must not change.
      train_state: path, shape, dtype and PRNG implementation of each leaf.
      parts: of a mixture, by name; else there are none.
      chain: of a Grain chain; else ``None``.
    """

    run_config: Mapping[str, Any]
    train_state: tuple[Leaf, ...]
    parts: Mapping[str, StreamIdentity] = dataclasses.field(default_factory=dict)
    chain: GrainChain | None = None

    @classmethod
    def of(
        cls,
        stream: Stream,
        run_config: Mapping[str, Any],
        train_state: Iterable[Leaf],
        verify: DataVerify = "cache",
    ) -> Self:
        """The identity of what is at hand now. Reads the data where the source must, to digest it."""
        leaves = tuple(train_state)
        if isinstance(stream, Mixture):
            parts = {name: cls.of_pipeline(part, verify) for name, part in stream.parts.items()}
            turns = stream.settings()["mixture"]
            return cls(
                combined({name: part.fingerprint for name, part in parts.items()}),
                {"weights": turns["weights"]},
                turns["version"],
                None,
                None,
                run_config,
                leaves,
                parts,
            )
        if isinstance(stream, GrainStream):
            return cls(
                stream.fingerprint(),
                json_value(stream.config, "config"),
                CHAIN_VERSION,
                None,
                None,
                run_config,
                leaves,
                chain=stream.chain,
            )
        one = cls.of_pipeline(stream, verify)
        return cls(**vars(one), run_config=run_config, train_state=leaves)

    def diff(self, now: "Identity", stream: Stream | None = None) -> list[Difference]:
        """Everything in which ``now`` differs from this identity, that of a checkpoint.

        With the stream of ``now`` at hand, records that differ are named by their IDs.
        """
        return [
            *self._diff_streams(now, stream),
            *_diff_mappings("run_config.", self.run_config, now.run_config),
            *_diff_mappings("train_state", _by_path(self.train_state), _by_path(now.train_state)),
        ]

    def _diff_streams(self, now: "Identity", stream: Stream | None) -> Iterable[Difference]:
        if _kind(self) != _kind(now):
            return [Difference("stream", _kind_of_stream(self), _kind_of_stream(now))]
        if self.chain is not None and now.chain is not None:
            return [
                *self.fingerprint.diff(now.fingerprint),
                *_diff_mappings("config.", self.config, now.config),
                *self.chain.diff(now.chain),
            ]
        if not self.parts:
            source = stream.source if isinstance(stream, Pipeline) else None
            return self.diff_stream(now, source)
        found = [
            *_diff_mappings("weights.", self.config["weights"], now.config["weights"]),
            *_diff_values("order_version", self.order_version, now.order_version),
        ]
        for name in self.parts.keys() & now.parts.keys():
            source = stream.parts[name].source if isinstance(stream, Mixture) else None
            found += [
                dataclasses.replace(difference, name=f"parts.{name}.{difference.name}")
                for difference in self.parts[name].diff_stream(now.parts[name], source)
            ]
        return sorted(found, key=lambda difference: difference.name)


def _kind(identity: Identity) -> str:
    return "chain" if identity.chain else "mixture" if identity.parts else "pipeline"


def _kind_of_stream(identity: Identity) -> str:
    if identity.chain:
        return "a chain of Grain's"
    return f"a mixture of {', '.join(identity.parts)}" if identity.parts else "one pipeline"


@dataclasses.dataclass(frozen=True)
class GrainPlace:
    """Where a Grain chain stands, beside the IDs that come next.

    Attributes:
      state: Grain's own, as JSON values.
      next: the kind of what is known of the next elements, see `loader.grain_stream.Ahead`.
      digest: of the next element, where it has no IDs; or why it could not be made.
    """

    state: Any
    next: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
      step: batches delivered; also the name of the step's directory.
      position: where the next batch begins.
      identity: which stream and train state.
      next_ids: IDs of up to 64 records that come next, padding left out.
      history: the changes that ``allow`` let through on the way, oldest first: the position at which
        each happened and, by name, the values before and after.
      packages: versions of what wrote it.
      files: by path inside the step's directory, the sha256 and size of every other file.
      grain: of a Grain chain, its place; else ``None``.
    """

    step: int
    position: Position
    identity: Identity
    next_ids: tuple[int | str, ...]
    history: tuple[Mapping[str, Any], ...]
    packages: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    grain: GrainPlace | None = None

    @property
    def start(self) -> Any:
        """With what its stream's ``iterate`` goes on there."""
        if self.grain is None:
            return self.position
        return {"step": self.step, "grain": self.grain.state}

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        identity = self.identity
        if identity.parts:
            stream = {
                "mixture": {**identity.config, "version": identity.order_version},
                "parts": {name: part.stream_to_dict() for name, part in identity.parts.items()},
            }
        elif identity.chain is not None and self.grain is not None:
            stream = {
                "fingerprint": identity.fingerprint.to_dict(),
                "chain": {**identity.chain.to_dict(), "config": dict(identity.config)},
                "grain": dataclasses.asdict(self.grain),
            }
        else:
            stream = identity.stream_to_dict()
        return {
            "format": FORMAT_VERSION,
            "step": self.step,
            "position": dataclasses.asdict(self.position),
            **stream,
            "run_config": dict(identity.run_config),
            "train_state": [leaf.to_dict() for leaf in identity.train_state],
            "next_ids": list(self.next_ids),
            "history": [dict(change) for change in self.history],
            "packages": dict(self.packages),
            "files": dict(self.files),
        }

    def to_bytes(self) -> bytes:
        """Canonical JSON, with ``sha256`` over all the rest of it.

        Raises:
          ValueError: it is larger than `from_bytes` may be given.
        """
        data = seal(self.to_dict())
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the manifest has {len(data)} bytes, and {MAX_MANIFEST_BYTES} are allowed; make "
                "run_config smaller"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote.

        Args:
          data: UTF-8 JSON, of at most 16 MiB.

        Raises:
          ValueError: it is not exactly that, says why.
        """
        try:
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError("it is no object")
            version = value.get("format")
            value.pop("sha256", None)
            sealed = seal(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the manifest is not JSON: {error}") from error
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"the manifest has format {version!r:.40}, and this version reads {FORMAT_VERSION}"
            )
        if sealed != data:
            raise ValueError("the manifest does not match its own sha256")
        try:
            return cls._from_dict(value)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the manifest lacks or mistypes a part: {error!r:.400}") from error

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        step, place = _typed(value["step"], int), value["position"]
        position = Position(place["epoch"], place["offset"], place["step"])
        if position.step != step:
            raise ValueError(f"it is of step {step}, its position of step {position.step}")
        if max(position.epoch, step) > _MAX_COUNT:
            raise ValueError(f"{position} is further than any run can come")
        return cls(
            step,
            position,
            _identity(value),
            tuple(_id(entry) for entry in value["next_ids"]),
            tuple(shallow(_typed(change, dict)) for change in value["history"]),
            _texts(value["packages"]),
            {_typed(path, str): _file(entry) for path, entry in value["files"].items()},
            _grain_place(value["grain"], position) if "chain" in value else None,
        )


def _identity(value: Mapping[str, Any]) -> Identity:
    run_config = shallow(_typed(value["run_config"], dict))
    leaves = tuple(Leaf.from_dict(leaf) for leaf in value["train_state"])
    if "chain" in value:
        return Identity(
            Fingerprint.from_dict(value["fingerprint"]),
            shallow(_typed(value["chain"]["config"], dict)),
            CHAIN_VERSION,
            None,
            None,
            run_config,
            leaves,
            chain=GrainChain.from_dict(value["chain"]),
        )
    if "parts" not in value:
        one = StreamIdentity.stream_from_dict(value)
        return Identity(**vars(one), run_config=run_config, train_state=leaves)
    parts = {
        _typed(name, str): StreamIdentity.stream_from_dict(part)
        for name, part in _typed(value["parts"], dict).items()
    }
    mixture = _typed(value["mixture"], dict)
    weights = {name: _typed(weight, int) for name, weight in mixture["weights"].items()}
    if list(weights) != list(parts) or Turns(weights).weights != weights:
        raise ValueError("its weights are not those of its parts")
    return Identity(
        combined({name: part.fingerprint for name, part in parts.items()}),
        {"weights": weights},
        _typed(mixture["version"], int),
        None,
        None,
        run_config,
        leaves,
        parts,
    )


def _grain_place(value: Mapping[str, Any], position: Position) -> GrainPlace:
    if position.epoch or position.offset:
        raise ValueError("of a Grain chain, a position is a step alone")
    kind = value["next"]
    if kind not in ("ids", "digest", "end", "error"):
        raise ValueError(f"{kind!r:.40} is no kind of what comes next")
    return GrainPlace(shallow(value["state"]), kind, _typed(value["digest"], str))


def check_identity(stream: Stream) -> None:
    """Raises TypeError or ValueError if a stream cannot be identified."""
    if isinstance(stream, GrainStream):
        json_value(stream.config, "config")
        return
    for part in stream.parts.values() if isinstance(stream, Mixture) else [stream]:
        transform_identity(part.transform)


def place_of(
    stream: Stream, position: Position, batches: Batches | None
) -> tuple[tuple[int | str, ...], GrainPlace | None]:
    """The IDs that come next, and what more there is to tell of an iterator's place; it does not move."""
    if not isinstance(stream, GrainStream):
        return next_ids(stream, position), None
    if not isinstance(batches, GrainIterator):
        return (), None
    ahead = batches.ahead()
    state = json_value(batches.get_state()["grain"], "Grain's state")
    return ahead.ids, GrainPlace(state, ahead.kind, ahead.digest)


def is_end(stream: Stream, batches: Batches) -> bool:
    """Whether an iterator has nothing more to deliver."""
    if isinstance(batches, GrainIterator):
        return batches.ahead().kind == "end"
    return not isinstance(stream, GrainStream) and stream.grid.is_end(batches.position)


def seal(value: Mapping[str, Any]) -> bytes:
    """A JSON object in canonical form, with a ``sha256`` over all its other members added."""
    digest = hashlib.sha256(_canonical(value)).hexdigest()
    return _canonical({**value, "sha256": digest})


def next_ids(stream: Pipeline | Mixture, position: Position) -> tuple[int | str, ...]:
    """IDs of the records delivered next from a position: at most 64, and 16 KiB of JSON."""
    found: list[int | str] = []
    size = 0
    while len(found) < NEXT_IDS and not stream.grid.is_end(position):
        pipeline, place = stream, position
        if isinstance(pipeline, Mixture):
            name, own = pipeline.turns.at(position.step)
            pipeline = pipeline.parts[name]
            place = pipeline.position(own)
        # A batch can hold millions of records; only its first ones are looked up.
        rows = pipeline.rows_at(place, limit=NEXT_IDS - len(found))
        for entry in read_ids(pipeline.source, rows).tolist():
            size += len(str(entry) if isinstance(entry, int) else _canonical(entry))
            if size > _NEXT_IDS_BYTES:
                return tuple(found)
            found.append(entry)
        position = stream.grid.after(position)
    return tuple(found)


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a stream passes through."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def config_with(pipeline: Pipeline, config: Mapping[str, Any]) -> Pipeline:
    """The same source and transform under the config of a checkpoint."""
    return Pipeline(pipeline.source, PipelineConfig.from_dict(config), pipeline.transform)


def _canonical(value: Any) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def _diff_mappings(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterable[Difference]:
    for name, shown in in_print([*before, *now]).items():
        values = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if all(isinstance(value, Mapping) for value in values):
            yield from _diff_mappings(f"{prefix}{shown}.", *values)
        else:
            yield from _diff_values(prefix + shown, *values)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT: Final = _Absent()


def _diff_values(name: str, before: Any, now: Any) -> Iterable[Difference]:
    # As JSON, because 1, 1.0 and True are equal in Python and not the same setting.
    if before is _ABSENT or now is _ABSENT or _canonical(before) != _canonical(now):
        texts = str(before), str(now)
        # "" and "1" are told from nothing and from 1 by their quotes, which else are left out.
        if "" in texts or texts[0] == texts[1]:
            texts = repr(before), repr(now)
        yield Difference(name, *texts)


def _by_path(leaves: Iterable[Leaf]) -> dict[str, str]:
    return {leaf.path: leaf.kind for leaf in leaves}


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value


def _texts(value: Any) -> dict[str, str]:
    return {_typed(name, str): _typed(text, str) for name, text in _typed(value, dict).items()}


def _id(value: Any) -> int | str:
    return value if type(value) is int else str(_typed(value, str))


def _file(value: Any) -> dict[str, Any]:
    if set(_typed(value, dict)) != {"sha256", "bytes"} or _typed(value["bytes"], int) < 0:
        raise TypeError(f"{value!r:.80} does not describe a file")
    if not _SHA256.fullmatch(_typed(value["sha256"], str)):
        raise TypeError(f"{value['sha256']!r:.80} is not a sha256")
    return dict(value)
