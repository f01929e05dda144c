"""Amounts as people read them: three digits, and a unit that fits."""

import pytest

from loader.progress import bytes_text, count_text, seconds_text, things_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (3_140_000_000, "3.14 GB"),
        (5e15, "5.00 PB"),
        (5e18, "5000 PB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (9_999, "9,999"), (10_000, "10.0k"), (1_234_567, "1.23M"), (4e9, "4.00G")],
)
def test_counts(count: float, text: str) -> None:
    assert count_text(count) == text


def test_things_are_one_or_several() -> None:
    assert things_text(1, "file") == "1 file"
    assert things_text(0, "file") == "0 files"
    assert things_text(2, "batch") == "2 batches"
    assert things_text(2, "epoch") == "2 epochs"
    assert things_text(2, "process") == "2 processes"
    assert things_text(12_345, "record") == "12.3k records"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0042, "4 ms"),
        (1.26, "1.3 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (125, "2 min 5 s"),
        (12_000, "3 h 20 min"),
        (0.9996, "1.0 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
