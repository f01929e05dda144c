"""Streams that are given where a source of records is wanted."""

from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

import loader
from loader.sources.source_or_stream import source_within


def test_a_source_is_no_stream() -> None:
    for given in (loader.ArraySource({"x": np.arange(8)}), [1], None):
        assert source_within(given) is None


def test_a_stream_is_no_source_though_it_has_what_a_source_has(tmp_path: Path) -> None:
    source = loader.ArraySource({"x": np.arange(8)})
    config = loader.PipelineConfig(4, seed=1, final_batch="drop")
    pipeline: Any = loader.Pipeline(source, config)
    mixture: Any = loader.Mixture({"a": pipeline}, {"a": 1})
    chain: Any = loader.GrainStream(
        grain.MapDataset.range(8), fingerprint=loader.fingerprint(source)
    )
    for stream, instead in (
        (pipeline, "use its .source"),
        (mixture, r"use the \.source of one of its \.parts"),
        (chain, "use the source that it reads from"),
    ):
        kind = type(stream).__name__
        for ask in (
            loader.fingerprint,
            lambda given: loader.Pipeline(given, config),
            lambda given: loader.audit_batches([], given, config),
            lambda given: loader.write_npy(given, tmp_path / "x"),
        ):
            with pytest.raises(TypeError, match=f"a {kind} is a stream of batches, .*: {instead}"):
                ask(stream)
