"""Windows cover the tokens that they should, stay inside their stretches, and are found again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.sources.windows import Windows, num_windows

#: For each file, the sizes of its stretches.
FILES = st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=5), min_size=1, max_size=4)
WIDTHS = st.integers(2, 9)


def borders(files: list[list[int]]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.cumsum([0, *sizes], dtype=np.int64) for sizes in files]


def laid(
    files: list[list[int]], width: int, stride: int, *, pad: bool
) -> list[tuple[int, int, int, int]]:
    """All windows: file, offset, how many tokens, and the end of its stretch, in the order of rows."""
    windows = Windows.of(borders(files), width, stride, pad=pad)
    numbers = np.repeat(np.arange(len(files)), windows.counts)
    starts, left = windows.place(np.arange(len(numbers)))
    assert windows.offsets(np.arange(len(numbers))).tolist() == starts.tolist()
    sizes = np.minimum(left, width)
    return list(
        zip(
            numbers.tolist(),
            starts.tolist(),
            sizes.tolist(),
            (starts + left).tolist(),
            strict=True,
        )
    )


@given(FILES, WIDTHS)
def test_with_the_stride_of_a_window_each_token_is_a_target_once(
    files: list[list[int]], width: int
) -> None:
    targets = [
        (file, offset)
        for file, start, size, _ in laid(files, width, width - 1, pad=True)
        for offset in range(start + 1, start + size)
    ]
    expected = [
        (file, offset)
        for file, edges in enumerate(borders(files))
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        for offset in range(start + 1, stop)
    ]
    assert targets == expected


@given(FILES, WIDTHS)
def test_without_padding_a_stretch_loses_less_than_a_window(
    files: list[list[int]], width: int
) -> None:
    found = laid(files, width, width - 1, pad=False)
    assert all(size == width for _, _, size, _ in found)
    covered = {(file, stop): start + width for file, start, _, stop in found}
    for file, edges in enumerate(borders(files)):
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            end = covered.get((file, stop), start + 1) if start < stop else stop
            assert stop - end < width - 1 or stop == start


@given(FILES, WIDTHS, st.integers(1, 12), st.booleans())
def test_a_window_begins_at_each_stride_of_its_stretch_and_ends_in_it(
    files: list[list[int]], width: int, stride: int, pad: bool
) -> None:
    expected = []
    for file, edges in enumerate(borders(files)):
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            seen = start
            for offset in range(start, stop, stride):
                size = min(width, stop - offset)
                if size == width or (pad and size >= 2 and seen < stop):
                    expected.append((file, offset, size, stop))
                    seen = offset + size
    assert laid(files, width, stride, pad=pad) == expected


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), WIDTHS)
def test_a_stride_of_one_gives_every_offset_once(lengths: list[int], width: int) -> None:
    found = laid([[length] for length in lengths], width, 1, pad=False)
    assert [(file, start) for file, start, _, _ in found] == [
        (file, start) for file, length in enumerate(lengths) for start in range(length - width + 1)
    ]


@given(FILES, WIDTHS, st.integers(1, 12), st.booleans())
def test_a_row_is_found_by_file_and_offset_and_nothing_else_is(
    files: list[list[int]], width: int, stride: int, pad: bool
) -> None:
    windows = Windows.of(borders(files), width, stride, pad=pad)
    rows = {
        (file, start): row
        for row, (file, start, _, _) in enumerate(laid(files, width, stride, pad=pad))
    }
    for file, sizes in enumerate(files):
        for offset in range(-1, sum(sizes) + 3):
            assert windows.row(file, offset) == rows.get((file, offset), -1)


@pytest.mark.parametrize(
    ("size", "drop", "pad"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (5, 1, 1), (6, 1, 2), (9, 2, 2), (10, 2, 3)],
)
def test_the_number_of_windows_of_five_tokens(size: int, drop: int, pad: int) -> None:
    sizes = np.array([size])
    assert num_windows(sizes, 5, 4, pad=False).tolist() == [drop]
    assert num_windows(sizes, 5, 4, pad=True).tolist() == [pad]


def test_ten_to_the_twelve_tokens_are_laid_by_formula() -> None:
    windows = Windows.of([np.array([0, 10**12]), np.array([0, 5])], 5, 1, pad=False)
    assert windows.counts.tolist() == [10**12 - 4, 1]
    assert [part.tolist() for part in windows.place(np.array([10**12 - 5, 10**12 - 4]))] == [
        [10**12 - 5, 0],
        [5, 5],
    ]
    assert windows.row(0, 10**12 - 5) == 10**12 - 5
    assert windows.row(0, 10**12 - 4) == -1
