"""Describe a chain of Grain data sets: classes, lengths and settings."""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from loader.identity.values import attributes_described, described, is_transformation
from loader.reading.iterator import NumberedBatches
from loader.stream import Stream
from loader.streams.chain_identity import GrainChain

#: So many of the last data sets are described; those before them by a digest.
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


def chain_of(dataset: Any, grain: str) -> GrainChain:
    """Describe a `grain.MapDataset` or `grain.IterDataset`.

    Settings are the plain values (numbers, strings, and tuples or dicts of them) that an object of Grain's
    own classes was made with. `described` describes functions, transformation objects, and the data sets
    of a user's classes. A data set or source that is a stream is described by what identifies it.

    Args:
      dataset: the chain.
      grain: the version of Grain.
    """
    links: list[dict[str, Any]] = []
    workers = _add(dataset, links, {})
    if len(links) > MAX_LINKS:
        rest = {"count": len(links) - MAX_LINKS, "sha256": _digest(links[:-MAX_LINKS])}
        links = [{"class": "...", "from": [], "settings": rest}, *links[-MAX_LINKS:]]
    return GrainChain(tuple(links), workers, grain)


def _add(dataset: Any, links: list[dict[str, Any]], numbers: dict[int, int]) -> int:
    """Add a data set behind those it reads from; return how many workers there are."""
    if id(dataset) in numbers:
        return 0
    children, workers = _children(dataset)
    for child in children:
        workers += _add(child, links, numbers)
    places = [numbers[id(child)] for child in children]
    if type(dataset).__name__ in _TRANSPARENT and _is_grains(dataset) and len(places) == 1:
        numbers[id(dataset)] = places[0]
        return workers
    links.append({"class": type(dataset).__name__, "from": places, "settings": _settings(dataset)})
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
            if isinstance(value, Stream):
                settings.update(_named(name, _stream_settings(value)))
        elif (plain := _of_grains(name, value)) is not None:
            settings.update(plain)
        elif callable(value) or is_transformation(value) or type(value).__module__ != "builtins":
            settings.update(_function(name, value))
    if "transform" in settings:  # and not its method once more
        settings = {name: one for name, one in settings.items() if name.split(".")[0] != "map_fn"}
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


def _stream_settings(stream: Stream) -> dict[str, Any]:
    settings = _flat("", stream.settings())
    for name, transform in stream.transforms().items():
        settings.update(_function(name, transform))
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


def _is_grains_function(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "grain"
