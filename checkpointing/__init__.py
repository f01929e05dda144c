"""Checkpoints that hold a stream's identity beside the train state, and resume only what matches."""

from checkpointing.checkpoints import Checkpoints, Run, load
from checkpointing.errors import CheckpointDamagedError, CheckpointMismatchError
from checkpointing.manifest import Manifest

__all__ = [
    "CheckpointDamagedError",
    "CheckpointMismatchError",
    "Checkpoints",
    "Manifest",
    "Run",
    "load",
]
