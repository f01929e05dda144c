"""Where records come from: the protocol, and the sources that implement it."""

from loader.sources.arrays import ArraySource
from loader.sources.file_source import FileSource
from loader.sources.npy import NpySource
from loader.sources.protocol import RESERVED_FIELDS, Field, RecordSource, check_source
from loader.sources.tokens import TokenSource

__all__ = [
    "RESERVED_FIELDS",
    "ArraySource",
    "Field",
    "FileSource",
    "NpySource",
    "RecordSource",
    "TokenSource",
    "check_source",
]
