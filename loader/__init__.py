"""A stream of batches for JAX training loops that is a pure function of data and configuration."""

from loader.audit import (
    AuditReport,
    Finding,
    MixtureReport,
    Offender,
    audit,
    audit_batches,
    audit_mixture,
)
from loader.batching import Position, Segment, masked_mean
from loader.config import PipelineConfig
from loader.determinism import Change, TransformReport, check_transform
from loader.device import Device
from loader.errors import RecordReadError, WorkerDiedError
from loader.fingerprint import Difference, Fingerprint, dataset_digest, fingerprint
from loader.grain_stream import GrainIterator, GrainStateError, GrainStream
from loader.keys import record_keys, rng, uniforms
from loader.mixture import Mixture
from loader.order import ORDER_VERSIONS, epoch_order, position_of
from loader.pipeline import BatchIterator, Pipeline, ReadOptions
from loader.processes import global_batch
from loader.progress import OnProgress, Progress, watch_progress
from loader.provenance import (
    MixtureProvenance,
    Provenance,
    StepRecords,
    Visit,
    mixture_provenance,
    provenance,
)
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
from loader.stats import OnStats, StreamStats
from loader.turns import Turn, Turns

__all__ = [
    "ORDER_VERSIONS",
    "ArrayRecordSource",
    "ArraySource",
    "AuditReport",
    "BatchIterator",
    "Change",
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
    "audit_mixture",
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
    "mixture_provenance",
    "position_of",
    "provenance",
    "record_keys",
    "rng",
    "uniforms",
    "watch_progress",
    "write_array_record",
    "write_npy",
]
