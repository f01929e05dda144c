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
from typing import Any, Final, Self

from checkpointing.train_state import LeafSpec, as_compared
from loader import Difference, Position
from loader.identity.base import (
    Ahead,
    Place,
    StreamIdentity,
    canonical,
    diff_identities,
    diff_mappings,
    texts,
    typed,
)
from loader.identity.json_form import shallow
from loader.sources import Verify as DataVerify
from loader.stream import Stream
from loader.streams.identities import read_identity

FORMAT_VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 16 << 20

_MAX_COUNT: Final = 2**62
_PACKAGES: Final = ("regrain", "grain", "orbax-checkpoint", "jax", "jaxlib", "numpy")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which stream, and which train state: everything that must be the same again at a resume.

    Attributes:
      stream: what the stream is known by.
      run_config: the user's own settings that must not change.
      train_state: path, shape, dtype and PRNG implementation of each leaf.
    """

    stream: StreamIdentity
    run_config: Mapping[str, Any]
    train_state: tuple[LeafSpec, ...]

    @classmethod
    def of(
        cls,
        stream: Stream,
        run_config: Mapping[str, Any],
        train_state: Iterable[LeafSpec],
        verify: DataVerify = "cache",
    ) -> Self:
        """The identity of what is at hand now. Reads the data if the source must, to identify them."""
        return cls(stream.identity(verify=verify), run_config, tuple(train_state))

    def diff(self, now: "Identity") -> list[Difference]:
        """Return everything in which ``now`` differs from this identity, that of a checkpoint.

        Records that differ are named by their IDs, if the source of ``now`` is at hand.
        """
        return [
            *diff_identities(self.stream, now.stream),
            *diff_mappings("run_config.", self.run_config, now.run_config),
            *diff_mappings(
                "train_state",
                _by_path(self.train_state),
                _by_path(as_compared(self.train_state, now.train_state)),
            ),
        ]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
      step: batches delivered; also the name of the step's directory.
      place: where the stream goes on, and what comes next there.
      identity: which stream and train state.
      history: the changes that ``allow`` let through on the way, oldest first: the position at which
        each happened and, by name, the values before and after.
      packages: versions of what wrote it.
      files: by path inside the step's directory, the sha256 and size of every other file.
    """

    step: int
    place: Place
    identity: Identity
    history: tuple[Mapping[str, Any], ...]
    packages: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self.place.position

    @property
    def next_ids(self) -> tuple[int | str, ...]:
        """IDs of up to 64 records that come next, padding left out."""
        return self.place.ahead.ids

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        stream = self.identity.stream
        return {
            "format": FORMAT_VERSION,
            "step": self.step,
            "position": dataclasses.asdict(self.position),
            "state": self.place.state,
            "next": self.place.ahead.to_dict(),
            "stream": {"kind": stream.kind, **stream.to_dict()},
            "run_config": dict(self.identity.run_config),
            "train_state": [leaf.to_dict() for leaf in self.identity.train_state],
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
        step, place = typed(value["step"], int), value["position"]
        position = Position(place["epoch"], place["offset"], place["step"])
        if position.step != step:
            raise ValueError(f"it is of step {step}, its position of step {position.step}")
        if max(position.epoch, step) > _MAX_COUNT:
            raise ValueError(f"{position} is further than any run can come")
        identity = Identity(
            read_identity(value["stream"]),
            shallow(typed(value["run_config"], dict)),
            tuple(LeafSpec.from_dict(leaf) for leaf in value["train_state"]),
        )
        return cls(
            step,
            Place(position, Ahead.from_dict(value["next"]), shallow(value["state"])),
            identity,
            tuple(shallow(typed(change, dict)) for change in value["history"]),
            texts(value["packages"]),
            {typed(path, str): _file(entry) for path, entry in value["files"].items()},
        )


def seal(value: Mapping[str, Any]) -> bytes:
    """A JSON object in canonical form, with a ``sha256`` over all its other members added."""
    digest = hashlib.sha256(canonical(value)).hexdigest()
    return canonical({**value, "sha256": digest})


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


def _by_path(leaves: Iterable[LeafSpec]) -> dict[str, str]:
    return {leaf.path: leaf.kind for leaf in leaves}


def _file(value: Any) -> dict[str, Any]:
    if set(typed(value, dict)) != {"sha256", "bytes"} or typed(value["bytes"], int) < 0:
        raise TypeError(f"{value!r:.80} does not describe a file")
    if not _SHA256.fullmatch(typed(value["sha256"], str)):
        raise TypeError(f"{value['sha256']!r:.80} is not a sha256")
    return dict(value)
