"""The settings that define a stream of batches, and nothing else.

Settings that only affect speed (threads, prefetch) are arguments of `Pipeline.iterate`. They may change
from run to run and are not part of a checkpoint.
"""

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, Self, get_args

import numpy as np

from loader import order

FinalBatch = Literal["partial", "drop", "pad"]

BadRecord = Literal["raise", "mask"]

FINAL_BATCHES: Final[tuple[str, ...]] = get_args(FinalBatch)
BAD_RECORDS: Final[tuple[str, ...]] = get_args(BadRecord)
MAX_BATCH_SIZE: Final = 2**31 - 1
#: Python's TOML reader is quadratic in the parts of a dotted key: half a second at this size.
MAX_TOML_BYTES: Final = 1 << 14

_MISSING: Final = object()


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The settings that decide which records each batch holds. Immutable, and part of each checkpoint.

    Attributes:
      batch_size: records in a batch, 1 to 2**31 - 1.
      seed: seed of the shuffle, 0 to 2**32 - 1.
      final_batch: policy for the ``n mod batch_size`` last records of an epoch. ``"partial"``: a
        shorter batch. ``"drop"``: left out (`Pipeline.omitted_ids` lists them). ``"pad"``: a full
        batch whose empty slots are zero, with ``mask`` False. There is no default, because the
        choice changes an epoch's statistics.
      num_epochs: passes over the data; ``None`` for no end.
      shuffle: ``"feistel"``, ``"permutation"`` or ``"none"`` (see `epoch_order`).
      on_bad_record: policy for a record that cannot be read or transformed. ``"raise"``:
        `RecordReadError`. ``"mask"``: its slot is zero, with its ``id`` and ``mask`` False; no other
        record moves. A file that has changed is an error under both.
      skip: batches to leave out (a loss spike, a poisoned shard), as ranges ``(first, end)`` of batch
        numbers, without ``end``. A batch's number is ``epoch * steps_per_epoch + offset //
        batch_size``, whatever is left out. Steps count only delivered batches, so a step differs from
        its batch number after a skip or a change of batch size; `StepRecords` holds both.
      exclude: IDs of records to leave out (a deletion request). They are masked like bad records, and
        never read.
      record_keys: adds a field ``key``, uint32[batch, 2], for random augmentation. It depends only on
        seed, epoch and record ID (see `record_keys`), and is zero in slots without a record.

    Raises:
      TypeError, ValueError: at construction; one error that names every bad setting.
    """

    batch_size: int
    seed: int
    final_batch: FinalBatch
    num_epochs: int | None = 1
    shuffle: order.Shuffle = "feistel"
    on_bad_record: BadRecord = "raise"
    skip: tuple[tuple[int, int], ...] = ()
    exclude: tuple[int | str, ...] = ()
    record_keys: bool = False

    def __post_init__(self) -> None:
        problems = []
        for field in dataclasses.fields(self):
            value = _plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            problems += _problems(field.name, value)
        _raise_all(problems, "PipelineConfig")
        object.__setattr__(self, "skip", _merged(self.skip))
        object.__setattr__(self, "exclude", tuple(sorted(set(self.exclude))))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict of JSON values; `from_dict` is the inverse."""
        settings = dataclasses.asdict(self)
        return {
            **settings,
            "skip": [list(pair) for pair in self.skip],
            "exclude": list(self.exclude),
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a config from a mapping of names to values.

        Args:
          settings: the arguments of the config, as `to_dict` returns them.

        Raises:
          TypeError, ValueError: one error that names every unknown, missing and ill-typed key.
        """
        return cls._from_mapping(settings, "PipelineConfig")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Read a config from a TOML file of at most 16 KiB.

        The settings are in a table ``[pipeline]``, beside any other tables, or at the top level of a
        file without that table. TOML has no null: ``num_epochs = "none"`` means ``None``.

        Args:
          path: the file.

        Raises:
          OSError: the file cannot be read.
          TypeError, ValueError: not TOML, too large, or one error that names every unknown, missing
            and ill-typed key.
        """
        document = _read_toml(path)
        settings: Any = document
        if "pipeline" in document:
            stray = [key for key, value in document.items() if not isinstance(value, dict)]
            if stray or not isinstance(document["pipeline"], dict):
                names = ", ".join(map(repr, stray or ["pipeline"]))
                raise ValueError(
                    f"{os.fspath(path)}: {names} must be inside a table. Put pipeline settings "
                    "into [pipeline], and other settings into other tables"
                )
            settings = document["pipeline"]
        if settings.get("num_epochs") == "none":
            settings = {**settings, "num_epochs": None}
        return cls._from_mapping(settings, os.fspath(path))

    @classmethod
    def _from_mapping(cls, settings: Mapping[str, Any], origin: str) -> Self:
        if not isinstance(settings, Mapping):
            raise TypeError(f"{origin}: settings must be a mapping, not {type(settings).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        problems: list[tuple[type[Exception], str]] = [
            (ValueError, _unknown(key, settings[key], fields))
            for key in settings
            if key not in fields
        ]
        for name, field in fields.items():
            value = _plain(settings.get(name, _MISSING))
            if value is not _MISSING:
                problems += _problems(name, value)
            elif field.default is dataclasses.MISSING:
                problems.append((ValueError, f"{name!r} is missing: {_EXPECTED[name]}"))
        _raise_all(problems, origin)
        return cls(**settings)


_EXPECTED: Final = {
    "batch_size": f"an integer, 1 to {MAX_BATCH_SIZE}",
    "seed": f"an integer, 0 to {order.MAX_SEED}",
    "final_batch": f"one of {', '.join(map(repr, FINAL_BATCHES))}",
    "num_epochs": 'an integer of at least 1, or None ("none" in TOML) to run on',
    "shuffle": f"one of {', '.join(map(repr, order.SHUFFLES))}",
    "on_bad_record": f"one of {', '.join(map(repr, BAD_RECORDS))}",
    "skip": f"pairs of batch numbers (first, end) with 0 <= first < end <= {order.MAX_EPOCH}",
    "exclude": 'record IDs, all int64 or all strings, and none of them -1 or ""',
    "record_keys": "true or false",
}
_CHOICES: Final = {
    "final_batch": FINAL_BATCHES,
    "shuffle": order.SHUFFLES,
    "on_bad_record": BAD_RECORDS,
}
_RANGES: Final = {
    "batch_size": (1, MAX_BATCH_SIZE),
    "seed": (0, order.MAX_SEED),
    "num_epochs": (1, order.MAX_EPOCH),
}


def named_values(name: str, value: Any) -> dict[str, Any]:
    """Return the user's own settings as a dict.

    Args:
      name: the argument, as the user wrote it.
      value: an object with ``keys`` and ``[...]`` (not always a `Mapping`: ``ml_collections``' is not),
        pairs, or ``None`` for no settings.

    Raises:
      TypeError: any other value.
    """
    if value is None:
        return {}
    try:
        if hasattr(value, "keys"):
            return dict(value)
        entries = [] if isinstance(value, str) else list(value)
        # A string of two letters would pass for a pair.
        if not isinstance(value, str) and not any(isinstance(entry, str) for entry in entries):
            return dict(entries)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f'{name} must map names to values, such as {{"learning_rate": 0.1}}, not be {value!r:.80}'
    )


def _plain(value: Any) -> Any:
    """Return NumPy integers, booleans and strings as Python's, so that configs compare and serialise the same."""
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, list | tuple | range):
        return tuple(_plain(entry) for entry in value)
    if isinstance(value, np.ndarray | set | frozenset):
        return tuple(
            _plain(entry) for entry in (value.tolist() if hasattr(value, "tolist") else value)
        )
    return str(value) if isinstance(value, np.str_) else value


def _problems(name: str, value: Any) -> list[tuple[type[Exception], str]]:
    text = f"{name!r} must be {_EXPECTED[name]}, not {_shown(value)}"
    if name in ("skip", "exclude"):
        if not isinstance(value, tuple):
            return [(TypeError, text)]
        good = all(map(_is_range, value)) if name == "skip" else _are_ids(value)
        return [] if good else [(ValueError, text)]
    if name in _CHOICES:
        if not isinstance(value, str):
            return [(TypeError, text)]
        return [] if value in _CHOICES[name] else [(ValueError, text)]
    if name == "record_keys":
        return [] if isinstance(value, bool) else [(TypeError, text)]
    if value is None and name == "num_epochs":
        return []
    if isinstance(value, bool) or not isinstance(value, int):
        return [(TypeError, text)]
    low, high = _RANGES[name]
    return [] if low <= value <= high else [(ValueError, text)]


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and [type(end) for end in value] == [int, int]
        and 0 <= value[0] < value[1] <= order.MAX_EPOCH
    )


def _are_ids(value: tuple[Any, ...]) -> bool:
    kinds = {type(entry) for entry in value}
    if kinds <= {int}:
        return all(-(2**63) <= entry < 2**63 and entry != -1 for entry in value)
    return kinds == {str} and "" not in value


def _merged(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the same numbers as sorted ranges that neither overlap nor touch."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def _unknown(key: Any, value: Any, known: Iterable[str]) -> str:
    if isinstance(value, Mapping):
        return (
            f"{key!r} is not a setting. In a file with several tables, pipeline settings "
            "belong in the table [pipeline]"
        )
    return f"{key!r} is not a setting (known: {', '.join(known)})"


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"


def _raise_all(problems: list[tuple[type[Exception], str]], origin: str) -> None:
    if problems:
        kinds = {kind for kind, _ in problems}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        raise kind(f"{origin}: " + "; ".join(text for _, text in problems))


def _read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    with pathlib.Path(path).open("rb") as file:
        data = file.read(MAX_TOML_BYTES + 1)
    if len(data) > MAX_TOML_BYTES:
        raise ValueError(
            f"{os.fspath(path)} is larger than {MAX_TOML_BYTES} bytes, too large for a config"
        )
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are both
        raise ValueError(f"{os.fspath(path)} is not a TOML file: {error}") from error
