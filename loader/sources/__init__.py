"""Where records come from: the protocol, and the sources that implement it."""

from loader.sources.arrayrecord import ArrayRecordSource, write_array_record
from loader.sources.arrays import ArraySource
from loader.sources.digests import digest_files, merge_digests
from loader.sources.file_source import FileSource
from loader.sources.huggingface import HuggingFaceSource
from loader.sources.images import decode_image
from loader.sources.npy import NpySource
from loader.sources.npy_folder import write_npy
from loader.sources.parquet import ParquetSource
from loader.sources.protocol import (
    Field,
    RecordSource,
    Verify,
    check_source,
    fingerprint_of,
)
from loader.sources.records import decode_record, encode_record
from loader.sources.renamed import RenamedSource
from loader.sources.sequences import SequenceSource
from loader.sources.tokens import TokenSource

__all__ = [
    "ArrayRecordSource",
    "ArraySource",
    "Field",
    "FileSource",
    "HuggingFaceSource",
    "NpySource",
    "ParquetSource",
    "RecordSource",
    "RenamedSource",
    "SequenceSource",
    "TokenSource",
    "Verify",
    "check_source",
    "decode_image",
    "decode_record",
    "digest_files",
    "encode_record",
    "fingerprint_of",
    "merge_digests",
    "write_array_record",
    "write_npy",
]
