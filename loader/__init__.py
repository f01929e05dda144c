"""A stream of batches for JAX training loops that is a pure function of data and configuration.

A `Pipeline` is made of a source and a `PipelineConfig`. `Pipeline.iterate` gives a `BatchIterator`, whose
place is a `Position`; `checkpointing.Checkpoints` saves and resumes it. `Mixture` is several pipelines in
turn, and `GrainStream` a chain of Grain's own data sets.

- Sources: `ArraySource`, `NpySource`, `ArrayRecordSource`, `ParquetSource`, `HuggingFaceSource`,
  `TokenSource`, `SequenceSource`; one of your own is a `RecordSource`, with a `Field` for each field.
  `write_npy`, `write_array_record` and `encode_record` write records, `decode_image` and `decode_record`
  read them.
- Order: `epoch_order` and its inverse, `position_of`; their versions are `ORDER_VERSIONS`.
- Identity of data: `fingerprint` makes a `Fingerprint`, whose `Fingerprint.diff` gives each `Difference`;
  `digest_files` and `merge_digests` share the work. `dataset_digest` is one digest of some arrays.
- Batches: `masked_mean` over records that are there; `global_batch` over processes; `Device`,
  `ReadOptions`.
- Random numbers: `record_keys`, `uniforms` and `rng`.
- How it goes: `BatchIterator.stats` gives `StreamStats`; who wants to be told is an `OnStats`.
  `watch_progress` tells an `OnProgress` of the `Progress` of long work, such as fingerprints and audits.
- Checks of a stream: `audit`, `audit_batches`, `provenance` and `check_transform`.
- What may be raised while batches are read: `RecordReadError`, also where a source raises
  `DataChangedError`; `WorkerDiedError`; `GrainStateError`.
"""

from loader.audit import (
    AuditReport,
    Finding,
    MixtureReport,
    Offender,
    audit,
    audit_batches,
)
from loader.audit.determinism import Change, TransformReport, check_transform
from loader.audit.provenance import (
    MixtureProvenance,
    Provenance,
    StepRecords,
    Visit,
    provenance,
)
from loader.batching import Position, Segment, masked_mean
from loader.config import PipelineConfig
from loader.errors import DataChangedError, RecordReadError, WorkerDiedError
from loader.identity.differences import Difference
from loader.identity.fingerprint import Fingerprint, dataset_digest, fingerprint
from loader.keys import record_keys, rng, uniforms
from loader.order import ORDER_VERSIONS, epoch_order, position_of
from loader.progress import OnProgress, Progress, watch_progress
from loader.reading.devices import Device
from loader.reading.iterator import BatchIterator, ReadOptions
from loader.reading.processes import global_batch
from loader.reading.stats import OnStats, StreamStats
from loader.sources import (
    ArrayRecordSource,
    ArraySource,
    Field,
    HuggingFaceSource,
    NpySource,
    ParquetSource,
    RecordSource,
    SequenceSource,
    TokenSource,
    decode_image,
    decode_record,
    digest_files,
    encode_record,
    merge_digests,
    write_array_record,
    write_npy,
)
from loader.streams.grain import GrainIterator, GrainStateError, GrainStream
from loader.streams.mixture import Mixture
from loader.streams.pipeline import Pipeline
from loader.streams.turns import Turn, Turns

__all__ = [
    "ORDER_VERSIONS",
    "ArrayRecordSource",
    "ArraySource",
    "AuditReport",
    "BatchIterator",
    "Change",
    "DataChangedError",
    "Device",
    "Difference",
    "Field",
    "Finding",
    "Fingerprint",
    "GrainIterator",
    "GrainStateError",
    "GrainStream",
    "HuggingFaceSource",
    "Mixture",
    "MixtureProvenance",
    "MixtureReport",
    "NpySource",
    "Offender",
    "OnProgress",
    "OnStats",
    "ParquetSource",
    "Pipeline",
    "PipelineConfig",
    "Position",
    "Progress",
    "Provenance",
    "ReadOptions",
    "RecordReadError",
    "RecordSource",
    "Segment",
    "SequenceSource",
    "StepRecords",
    "StreamStats",
    "TokenSource",
    "TransformReport",
    "Turn",
    "Turns",
    "Visit",
    "WorkerDiedError",
    "audit",
    "audit_batches",
    "check_transform",
    "dataset_digest",
    "decode_image",
    "decode_record",
    "digest_files",
    "encode_record",
    "epoch_order",
    "fingerprint",
    "global_batch",
    "masked_mean",
    "merge_digests",
    "position_of",
    "provenance",
    "record_keys",
    "rng",
    "uniforms",
    "watch_progress",
    "write_array_record",
    "write_npy",
]
