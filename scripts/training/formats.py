"""The same records in each format: written once, and read back through the format's own source."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

import loader
from regrain.cli import convert_formats
from scripts.training.prepared import FOLDER, prepared

_FILES: Final = 3  # of a format that has several, so that a batch comes from more than one


def in_format(
    name: str, data_format: str, source: loader.RecordSource, folder: pathlib.Path = FOLDER
) -> loader.RecordSource:
    """Some records in a format, with the IDs, fields and order that they have.

    Args:
      name: of the data set, for the name of its files.
      data_format: one of `FORMATS`; ``"array"`` is the source itself.
      source: the records; few enough for memory.
      folder: where files are written, if they are not there.

    Raises:
      ModuleNotFoundError: the format's own library is not there.
      ValueError: there is no such format.
    """
    if data_format not in FORMATS:
        choices = ", ".join(map(repr, FORMATS))
        raise ValueError(f"[data]: 'format' must be one of {choices}, not {data_format!r}")
    if data_format == "array":
        return source
    write, read = _FORMATS[data_format]
    digest = source.fingerprint().digest.removeprefix("sha256:")[:16]
    path = prepared(f"{name}-{data_format}-{digest}", functools.partial(write, source), folder)
    return read(path)


def parts_of(source: loader.RecordSource) -> list[loader.ArraySource]:
    """The records of each file: unequal numbers of them, in their order."""
    cuts = [len(source) * (2**number - 1) // (2**_FILES - 1) for number in range(_FILES + 1)]
    rows = [np.arange(low, high) for low, high in itertools.pairwise(cuts)]
    return [loader.ArraySource(source.read(part), source.ids(part)) for part in rows]


def _write_npy(source: loader.RecordSource, path: pathlib.Path) -> None:
    loader.write_npy(source, path / "records")


def _write_files(
    name: convert_formats.Name, source: loader.RecordSource, path: pathlib.Path
) -> None:
    for number, part in enumerate(parts_of(source)):
        file = path / f"part-{number}.{name}"
        convert_formats.FORMATS[name].write(part, file)


def _write_hugging_face(source: loader.RecordSource, path: pathlib.Path) -> None:
    import datasets  # noqa: PLC0415 (of an extra)

    datasets.disable_progress_bars()
    rows = np.arange(len(source))
    made = datasets.Dataset.from_dict({"id": source.ids(rows), **source.read(rows)})
    made.save_to_disk(path / "records", num_shards=_FILES)


_Write = Callable[[loader.RecordSource, pathlib.Path], None]
_Read = Callable[[pathlib.Path], loader.RecordSource]

_FORMATS: Final[Mapping[str, tuple[_Write, _Read]]] = {
    "npy": (_write_npy, lambda path: loader.NpySource(path / "records")),
    "arrayrecord": (
        functools.partial(_write_files, "array_record"),
        lambda path: loader.ArrayRecordSource(path, ids="id"),
    ),
    "parquet": (
        functools.partial(_write_files, "parquet"),
        lambda path: loader.ParquetSource(path, ids="id"),
    ),
    "huggingface": (
        _write_hugging_face,
        lambda path: loader.HuggingFaceSource(path / "records", ids="id"),
    ),
}

#: What a table ``[data]`` may have as its format.
FORMATS: Final = ("array", *_FORMATS)
