"""What a chain of Grain data sets is made of, as far as it can be told: classes, lengths and settings."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

import numpy as np

from loader.described import attributes_described, described, is_transformation
from loader.fingerprint import Difference
from loader.mixture import Mixture
from loader.pipeline import NumberedBatches, Pipeline
from loader.told_apart import in_print
from loader.transforms import transform_identity

#: Of how chains are described. One of version 1, which tells less, is compared as that tells it.
CHAIN_VERSION: Final = 2
#: As many of the last data sets are described; those before them by a digest.
MAX_LINKS: Final = 64

#: They change neither what is delivered nor the iterator's state.
_TRANSPARENT: Final = frozenset(
    {
        "ThreadPrefetchIterDataset",
        "WithOptionsIterDataset",
        "ProcessPrefetchIterDataset",
        "_LazyWorkerSliceIterDataset",
        "_MpContextIterDataset",
    }
)
#: One of them stands for each worker of `mp_prefetch` or `multithread_prefetch`.
_WORKERS: Final = frozenset({"ProcessPrefetchIterDataset", "_MpContextIterDataset"})
#: Attributes that are about speed, about other chains of the same data sets, or told elsewhere.
_NO_SETTINGS: Final = frozenset(
    {
        "buffer_size",
        "has_child",
        "iter_buffer_size",
        "make_iter_buffer_size",
        "num_make_iter_threads",
        "options",
        "parent_length",
        "parents",
        "prefetch_buffer_size",
        "read_options",
        "record_metrics",
        "worker_init_fn",
    }
)
_MAX_TEXT: Final = 200
_WHY_WORKERS: Final = (
    "Grain's state tells whose turn it is among its workers: with another number of them it would go on "
    "with other elements"
)


@dataclasses.dataclass(frozen=True)
class GrainChain:
    """The data sets that lead to a stream, from the sources to what is delivered.

    Attributes:
      links: for each data set its class, those it reads from (by number), and its settings.
      workers: processes or threads that each read a share of it; 0 without any.
      grain: the version of Grain.
      version: of how it is described.
      older: the links as version 1 tells them, of a chain that is at hand.
    """

    links: tuple[Mapping[str, Any], ...]
    workers: int
    grain: str
    version: int = CHAIN_VERSION
    older: tuple[Mapping[str, Any], ...] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def of(cls, dataset: Any, grain: str) -> Self:
        """Describes a `grain.MapDataset` or `grain.IterDataset`.

        Settings are the plain values (numbers, texts, and tuples or dicts of them) that an object of
        Grain's own classes was made with. Of functions and transformation objects, and of what a data set
        of a class of the user's was made with, `described` says what is told. Of a data set or source
        that is a `Pipeline` or a `Mixture`, it is what their own identity is made of.
        """
        links, workers = _links(dataset, _settings)
        older, _ = _links(dataset, _settings_of_version_1)
        return cls(links, workers, grain, older=older)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "version": self.version,
            "links": [dict(link) for link in self.links],
            "workers": self.workers,
            "grain": self.grain,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` wrote.

        Raises:
          KeyError, TypeError, ValueError: it is not that.
        """
        version = value["version"]
        if type(version) is not int or not 1 <= version <= CHAIN_VERSION:
            raise ValueError(
                f"version {version!r:.40} of a chain is not one of 1 to {CHAIN_VERSION}"
            )
        links = []
        for link in value["links"]:
            if type(link["class"]) is not str or type(link["settings"]) is not dict:
                raise TypeError(f"{link!r:.80} describes no data set")
            numbers = [number for number in link["from"] if type(number) is int]
            links.append({"class": link["class"], "from": numbers, "settings": link["settings"]})
        workers, grain = value["workers"], value["grain"]
        if type(workers) is not int or type(grain) is not str:
            raise TypeError("it has no number of workers, or no version of Grain")
        return cls(tuple(links), workers, grain, version)

    def diff(self, now: "GrainChain") -> list[Difference]:
        """Everything in which ``now`` differs from this chain, that of a checkpoint."""
        if self.version == 1 < now.version and now.older is not None:
            now = dataclasses.replace(now, links=now.older, version=1)
        found = []
        if self.grain != now.grain:
            found.append(
                Difference(
                    "grain_version", self.grain, now.grain, "Grain promises nothing across versions"
                )
            )
        if self.workers != now.workers:
            # The shares of the workers differ too, and are no news.
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


def _diff_settings(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterable[Difference]:
    for key, shown in in_print([*before, *now]).items():
        a, b = (json.dumps(one[key]) if key in one else "absent" for one in (before, now))
        if a != b:
            texts = [str(one.get(key, "absent")) for one in (before, now)]
            # "1" is told from 1 by its quotes, which else are left out.
            yield Difference(f"{name}.{shown}", *(texts if texts[0] != texts[1] else (a, b)))


def _links(
    dataset: Any, settings: Callable[[Any], dict[str, Any]]
) -> tuple[tuple[Mapping[str, Any], ...], int]:
    links: list[dict[str, Any]] = []
    workers = _add(dataset, links, {}, settings)
    if len(links) > MAX_LINKS:
        kept = links[-MAX_LINKS:]
        rest = _digest(links[:-MAX_LINKS])
        more = {"count": len(links) - MAX_LINKS, "sha256": rest}
        links = [{"class": "...", "from": [], "settings": more}, *kept]
    return tuple(links), workers


def _add(
    dataset: Any,
    links: list[dict[str, Any]],
    numbers: dict[int, int],
    settings: Callable[[Any], dict[str, Any]],
) -> int:
    """Adds a data set behind those it reads from; returns how many workers there are."""
    if id(dataset) in numbers:
        return 0
    children, workers = _children(dataset)
    for child in children:
        workers += _add(child, links, numbers, settings)
    places = [numbers[id(child)] for child in children]
    if type(dataset).__name__ in _TRANSPARENT and _is_grains(dataset) and len(places) == 1:
        numbers[id(dataset)] = places[0]
        return workers
    links.append({"class": type(dataset).__name__, "from": places, "settings": settings(dataset)})
    numbers[id(dataset)] = len(links) - 1
    return workers


def _children(dataset: Any) -> tuple[list[Any], int]:
    """What a data set reads from, of several workers one; and how many workers they are."""
    children = list(getattr(dataset, "parents", ()))  # a user's class may not have called Grain's
    interleaved = vars(dataset).get("_datasets")
    if interleaved is None:
        return children, 0
    if hasattr(interleaved, "parents"):  # a data set of data sets
        return [*children, interleaved], 0
    interleaved = list(interleaved)
    first = interleaved[0] if interleaved else None
    if type(first).__name__ in _WORKERS and _is_grains(first):
        return [*children, first], len(interleaved)
    return [*children, *interleaved], 0


def _settings(dataset: Any) -> dict[str, Any]:
    settings = _length(dataset)
    if isinstance(dataset, NumberedBatches):
        return {**settings, **_numbered(dataset)}
    if not _is_grains(dataset):
        return {**settings, **_of_users(dataset)}
    for name, value in _attributes(dataset):
        if name == "source":
            settings[name] = type(value).__qualname__
            if isinstance(value, Pipeline | Mixture):
                settings.update(_named(name, _stream_settings(value)))
        elif (plain := _of_grains(name, value)) is not None:
            settings.update(plain)
        elif callable(value) or is_transformation(value) or type(value).__module__ != "builtins":
            settings.update(_function(name, value))
    if "transform" in settings:  # and not its method once more
        settings = {name: one for name, one in settings.items() if name.split(".")[0] != "map_fn"}
    return settings


def _settings_of_version_1(dataset: Any) -> dict[str, Any]:
    """As checkpoints have it that were written before attributes of objects were told."""
    settings = _length(dataset)
    if not _is_grains(dataset):
        version = getattr(dataset, "version", None)
        return settings if version is None else {**settings, "version": str(version)}
    for name, value in _attributes(dataset):
        if name == "source":
            settings[name] = type(value).__qualname__
        elif (plain := _of_grains(name, value)) is not None:
            settings.update(plain)
        elif callable(value) or type(value).__module__ != "builtins":
            settings[name] = _function_of_version_1(value)
    if "transform" in settings:
        settings.pop("map_fn", None)  # its method
    return settings


def _length(dataset: Any) -> dict[str, Any]:
    return {"length": len(dataset)} if hasattr(dataset, "__len__") else {}


def _of_grains(name: str, value: Any) -> dict[str, Any] | None:
    """Of a plain value, or an object of Grain's that is no function, what it holds; else ``None``."""
    if _is_plain(value):
        return {name: _json(value)}
    if not _is_grains(value) or callable(value) or isinstance(value, type):
        return None
    # Lists of theirs are what they keep meanwhile.
    plain = [(key, part) for key, part in _attributes(value) if _is_plain(part)]
    return {f"{name}.{key}": _json(part) for key, part in plain if not isinstance(part, list)}


def _of_users(dataset: Any) -> dict[str, Any]:
    """What a data set of a class of the user's was made with."""
    version = getattr(dataset, "version", None)
    settings = {} if version is None else {"version": str(version)}
    told = attributes_described(dataset)
    return settings | {
        name: one for name, one in told.items() if name.lstrip("_") not in _NO_SETTINGS
    }


def _numbered(dataset: NumberedBatches) -> dict[str, Any]:
    """What decides the batches of a stream of ours, and which of them these are."""
    if dataset.stream is None:
        return {}
    settings = _stream_settings(dataset.stream)
    if dataset.start.step or dataset.start.offset or dataset.start.epoch:
        settings["start"] = str(dataset.start)
    if dataset.shard.count > 1:
        settings["shard"] = str(dataset.shard)
    return settings


def _stream_settings(stream: Pipeline | Mixture) -> dict[str, Any]:
    settings = _flat("", stream.settings())
    parts = {"": stream} if isinstance(stream, Pipeline) else stream.parts
    for name, part in parts.items():
        if part.transform is not None:
            place = f"parts.{name}." if name else ""
            settings.update(_function(f"{place}transform", part.transform))
    return settings


def _flat(prefix: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found.update(_flat(f"{prefix}{name}.", value))
        else:
            found[prefix + name] = _json(value)
    return found


def _named(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in settings.items()}


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object was made with, by name: not what it has looked up since."""
    looked_up = {
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, functools.cached_property)
    }
    return [
        (name.lstrip("_"), one)
        for name, one in sorted(getattr(value, "__dict__", {}).items())
        if one is not None and name not in looked_up and name.lstrip("_") not in _NO_SETTINGS
    ]


def _is_grains(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.partition(".")[0] == "grain"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | np.bool_ | np.number) or value is None


def _json(value: Any) -> Any:
    """As JSON gives it back; a long text or list by its digest."""
    text = _text(value)
    return json.loads(text) if len(text) <= _MAX_TEXT else f"sha256:{_digest(value)}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda number: number.item())


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()


def _function(name: str, value: Any) -> dict[str, str]:
    """What is told of a function, a method or an object."""
    if isinstance(value, functools.partial) and _is_grains_function(value.func):
        value = value.func  # Grain's own way to tell its workers of shared memory
    return {name + key: text for key, text in described(value).items()}


def _function_of_version_1(value: Any) -> str:
    """Name and version of a function, a method's object or a transformation object, and a dataclass's fields."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, type):
        value = owner
    if isinstance(value, functools.partial) and _is_grains_function(value.func):
        value = value.func  # Grain's own way to tell its workers of shared memory
    fields = ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {
            field.name: _json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if _is_plain(getattr(value, field.name))
        }
        fields = f"({', '.join(f'{name}={part!r}' for name, part in plain.items())})"
    name, version = _name(value)
    return name + fields + (f" version {version}" if version else "")


def _name(value: Callable[..., Any]) -> tuple[str, str]:
    try:
        known = transform_identity(value) or {}
    except TypeError:  # an argument of a partial by which it cannot be recognised
        function: Any = value
        while isinstance(function, functools.partial):
            function = function.func
        known = transform_identity(function) or {}
        known["name"] += "(...)"
    name = known["name"]
    if len(name) > _MAX_TEXT:
        name = f"{name[: _MAX_TEXT // 2]}... sha256:{_digest(name)}"
    return name, known["version"]


def _is_grains_function(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "grain"
