"""Many IDs: none twice, whatever their order, their kind and the memory there is."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.sources import unique
from loader.sources.unique import Blocks, scan_ids


def blocks_of(ids: npt.NDArray[Any], size: int = 100) -> Blocks:
    return lambda: (ids[start : start + size] for start in range(0, len(ids), size))


INTS = np.random.default_rng(0).permutation(3000) * 5 - 2
TEXTS = np.array([f"r{number}" for number in INTS])


@pytest.mark.parametrize("ids", [INTS, TEXTS, np.sort(INTS), np.sort(TEXTS)])
@pytest.mark.parametrize("key_bytes", [8, 1000, 1 << 20])
def test_unique_ids_pass_in_any_memory(ids: npt.NDArray[Any], key_bytes: int) -> None:
    key_bytes = max(key_bytes, 8 * len(ids) // 20)
    scan_ids(blocks_of(ids), len(ids), key_bytes=key_bytes)


@pytest.mark.parametrize("ids", [INTS, TEXTS])
@pytest.mark.parametrize("passes", [1, 2, 7])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2999), (99, 100), (1234, 2345)])
def test_an_id_that_comes_twice_is_named_with_both_rows(
    ids: npt.NDArray[Any], passes: int, first: int, second: int
) -> None:
    planted = ids.copy()
    planted[second] = planted[first]
    with pytest.raises(ValueError, match=f"ID {planted[first].item()!r} .* {first} and {second};"):
        scan_ids(blocks_of(planted), len(ids), key_bytes=8 * len(ids) // passes)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)))
def test_texts_are_found_twice_if_and_only_if_they_are(texts: list[str]) -> None:
    ids = np.array(texts, np.str_)
    if len(set(texts)) == len(texts):
        if texts:
            scan_ids(blocks_of(ids, 3), len(ids))
        return
    with pytest.raises(ValueError, match="belongs to rows"):
        scan_ids(blocks_of(ids, 3), len(ids))


def test_all_ids_the_same_are_found_at_once_in_little_memory() -> None:
    with pytest.raises(ValueError, match="rows 0 and 1"):
        scan_ids(blocks_of(np.full(100_000, 7)), 100_000, key_bytes=10_000)


def test_texts_with_equal_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique, "_LOOKED_UP", 3)
    monkeypatch.setattr(
        unique, "_keys", lambda ids: np.array([len(text) for text in ids.tolist()], np.uint64)
    )
    ids = np.array(["b", "a", "dd", "cc", "fff", "eee", "hhhh", "gggg", "iiiii"])
    scan_ids(blocks_of(ids, 2), len(ids))
    ids[8] = "gggg"
    with pytest.raises(ValueError, match="'gggg' belongs to rows 7 and 8"):
        scan_ids(blocks_of(ids, 2), len(ids))


def test_keys_of_texts_do_not_depend_on_the_width_and_differ() -> None:
    wide = TEXTS.astype("U50")
    assert unique._keys(TEXTS).tolist() == unique._keys(wide).tolist()
    assert len(set(unique._keys(TEXTS).tolist())) == len(TEXTS)


@pytest.mark.parametrize("ids", [INTS, TEXTS])
def test_the_digest_depends_on_ids_and_their_order_alone(ids: npt.NDArray[Any]) -> None:
    found = scan_ids(blocks_of(ids), len(ids))
    assert scan_ids(blocks_of(ids, 7), len(ids)) == found
    assert scan_ids(blocks_of(ids[::-1]), len(ids)) != found
    assert found.dtype == ("str" if ids is TEXTS else "int64")


def test_texts_that_run_together_in_the_same_bytes_have_another_digest() -> None:
    first, second = np.array(["ab", "c"]), np.array(["a", "bc"])
    assert scan_ids(blocks_of(first), 2) != scan_ids(blocks_of(second), 2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[1, 2], [3, -1]], "row 3 has the ID -1"),
        ([["a", "b"], ["", "c"]], "row 2 has the ID ''"),
        ([[1, 2], ["a"]], "integers in some rows and strings in others, from row 2"),
        ([[1.5]], "must be int64"),
        ([[1, 2, 3]], "3 IDs of 4 records"),
    ],
)
def test_what_is_no_id_is_refused(parts: list[list[Any]], message: str) -> None:
    def blocks() -> Iterator[npt.NDArray[Any]]:
        yield from map(np.array, parts)

    with pytest.raises((TypeError, ValueError), match=message):
        scan_ids(blocks, 4)
