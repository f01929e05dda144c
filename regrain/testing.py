"""Assertions for a test suite of your own; the same as `checkpointing.testing`."""

from checkpointing import testing as _testing
from checkpointing.testing import *  # noqa: F403

__all__ = _testing.__all__
