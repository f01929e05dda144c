"""Checkpoints that hold a stream's identity beside the train state, and resume only what matches.

- `Checkpoints.resume` gives a `Run`, and `Checkpoints.save` saves it. What differs from a checkpoint is a
  `CheckpointMismatchError`; where none is whole, that is a `CheckpointDamagedError`.
- `load` reads a checkpoint and its `Manifest` without a pipeline, `inspect_run` reports on a run directory,
  and `provenance` returns the records of each step.
- `run_drill` kills a training script again and again, and compares it with one that was not killed, in a
  `DrillReport`. A `step_log` has what each step delivered; `read_step_log` reads it.
- `checkpointing.testing` has assertions for a test suite of your own.
"""

import loader as _loader  # noqa: F401 (first: it keeps those below from setting up logging)

# isort: split
from checkpointing.checkpoints import Checkpoints, Run, load
from checkpointing.errors import CheckpointDamagedError, CheckpointMismatchError
from checkpointing.manifest import Manifest
from checkpointing.proof.drill import run_drill
from checkpointing.proof.process import DrillError
from checkpointing.proof.report import DrillReport
from checkpointing.proof.step_log import Delivery, read_step_log, step_log
from checkpointing.reports.history import provenance
from checkpointing.reports.inspection import RunReport, StepReport, inspect_run

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
    "provenance",
    "read_step_log",
    "run_drill",
    "step_log",
]
