"""Checkpoints that hold a stream's identity beside the train state, and resume only what matches."""

import loader as _loader  # noqa: F401 (first: it keeps those below from setting up logging)

# isort: split
from checkpointing.checkpoints import Checkpoints, Run, load
from checkpointing.drill import run_drill
from checkpointing.drill_report import DrillError, DrillReport
from checkpointing.errors import CheckpointDamagedError, CheckpointMismatchError
from checkpointing.history import mixture_provenance, provenance
from checkpointing.inspection import RunReport, StepReport, inspect_run
from checkpointing.manifest import Manifest
from checkpointing.step_log import Delivery, read_step_log, step_log

__all__ = [
    "CheckpointDamagedError",
    "CheckpointMismatchError",
    "Checkpoints",
    "Delivery",
    "DrillError",
    "DrillReport",
    "Manifest",
    "Run",
    "RunReport",
    "StepReport",
    "inspect_run",
    "load",
    "mixture_provenance",
    "provenance",
    "read_step_log",
    "run_drill",
    "step_log",
]
