"""Sequences: each record is the one that the sequence gives, and one that is not like the first is named."""

import itertools
from collections.abc import Mapping
from typing import Any, Final

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import loader
from loader import ArraySource, Field, RecordSource, SequenceSource

N: Final = 9
X: Final = np.random.default_rng(0).normal(size=(N, 2, 3)).astype("f4")
Y: Final = np.arange(N) * 10
WORDS: Final = [f"w{row}" for row in range(N)]
RECORDS: Final = [{"x": X[row], "y": int(Y[row]), "id": WORDS[row]} for row in range(N)]
ARRAYS: Final = ArraySource({"x": X, "y": Y}, WORDS)


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


class Fetching:
    """A sequence that also reads many records at once, as Grain's protocol has it."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> dict[str, Any]:
        return RECORDS[row]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.calls.append(rows)
        return [RECORDS[row] for row in rows]


SEQUENCES: Final[dict[str, Any]] = {
    "list": RECORDS,
    "tuple": tuple(RECORDS),
    "many at once": Fetching(),
    "Grain's map": grain.MapDataset.source(RECORDS),  # type: ignore[arg-type, unused-ignore]
}


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("rows", [[0], [], [N - 1, 0, 5, 5], list(range(N))])
def test_any_rows_are_read_as_the_sequence_gives_them(kind: str, rows: list[int]) -> None:
    source = SequenceSource(SEQUENCES[kind], ids="id")
    chosen = np.array(rows, np.int64)
    assert isinstance(source, RecordSource)
    assert source.fields == ARRAYS.fields
    assert_same(source.read(chosen), ARRAYS.read(chosen))
    assert source.ids(chosen).tolist() == [WORDS[row] for row in rows]


@pytest.mark.parametrize("kind", SEQUENCES)
def test_content_is_that_of_the_same_arrays(kind: str) -> None:
    assert SequenceSource(SEQUENCES[kind], ids="id").fingerprint() == ARRAYS.fingerprint()


def test_a_batch_is_one_call_where_there_is_one_for_many() -> None:
    sequence = Fetching()
    source = SequenceSource(sequence, columns=["y"])
    source.read(np.array([3, 1, 4]))
    assert sequence.calls == [[3, 1, 4]]


def test_records_may_be_arrays_alone() -> None:
    source = SequenceSource(list(X))
    assert source.fields == {"value": Field(X.dtype, (2, 3))}
    np.testing.assert_array_equal(source.read(np.array([4, 2]))["value"], X[[4, 2]])
    assert SequenceSource(range(5)).read(np.array([4, 2]))["value"].tolist() == [4, 2]
    assert SequenceSource(X).read(np.array([4]))["value"].shape == (1, 2, 3)


def test_jax_arrays_are_read() -> None:
    source = SequenceSource([{"x": jnp.arange(3) + row} for row in range(3)])
    assert source.read(np.array([2, 0]))["x"].tolist() == [[2, 3, 4], [0, 1, 2]]


def test_grains_own_sources_are_read() -> None:
    source = SequenceSource(grain.sources.RangeDataSource(10, 30, 5))
    assert source.read(np.array([3, 0]))["value"].tolist() == [25, 10]


def test_strings_need_a_width() -> None:
    with pytest.raises(ValueError, match=r"field 'id' holds strings|'id' cannot be a field"):
        SequenceSource(RECORDS)
    words = [{"word": word} for word in ("a", "abc", "")]
    with pytest.raises(
        ValueError, match=r"field 'word' holds strings, .* as fields=\{'word': \"U32\"\}"
    ):
        SequenceSource(words)
    assert SequenceSource(words, fields={"word": "U3"}).read(np.arange(3))["word"].tolist() == [
        "a",
        "abc",
        "",
    ]
    with pytest.raises(ValueError, match=r"row 1: field 'word' is <U3.*, and .* say <U2"):
        SequenceSource(words, fields={"word": "U2"}).read(np.array([0, 1]))


def test_what_is_read_is_fresh() -> None:
    records = [{"x": np.zeros(2)}]
    SequenceSource(records).read(np.zeros(1, np.int64))["x"][:] = 1
    assert records[0]["x"].tolist() == [0, 0]


UNLIKE: Final[list[tuple[Any, str]]] = [
    ({"x": np.zeros(3)}, r"row 1: field 'x' is float64\[3\], and .* say float64\[2\]"),
    ({"x": np.zeros(2, "f4")}, r"row 1: field 'x' is float32\[2\]"),
    ({"x": [0.0, 0.0, 0.0]}, r"row 1: field 'x' is float64\[3\]"),
    ({"y": np.zeros(2)}, r"row 1: the record has no 'x'; it has y"),
    (None, r"row 1 is None, not a dict of arrays or an array"),
    ([1, 2], r"row 1 is \[1, 2\], not a dict of arrays"),
]


@pytest.mark.parametrize(("record", "named"), UNLIKE, ids=itertools.count())
def test_a_record_unlike_the_first_is_named(record: Any, named: str) -> None:
    source = SequenceSource([{"x": np.zeros(2)}, record, {"x": np.ones(2)}])
    assert source.read(np.array([2, 0]))["x"].tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ValueError, match=named):
        source.read(np.array([0, 1]))


class Together(list[Any]):
    """Gives many records at once, too."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


def weighted(weight: float) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"key": f"r{row}", "x": np.float32(row)} for row in range(60)]
    records[50]["weight"] = np.float32(weight)
    return records


@pytest.mark.parametrize("kind", [list, Together])
def test_an_entry_that_the_first_record_has_not_is_named(kind: Any) -> None:
    """Nobody would see it in a batch or a fingerprint, and a chain of Grain's reads it all the same."""
    with pytest.raises(
        ValueError,
        match=r"row 50, id 'r50': the record has 'weight', which the first record has not: that has 'key', 'x'\. "
        r".*list as columns those that count, and nobody looks at the others",
    ):
        SequenceSource(kind(weighted(2)), ids="key")
    source = SequenceSource(kind(weighted(2)), fields={"key": "U3"})
    assert source.read(np.array([0, 49]))["x"].tolist() == [0, 49]
    for read in (lambda: source.read(np.array([49, 50])), lambda: loader.fingerprint(source)):
        with pytest.raises(ValueError, match="row 50: the record has 'weight'"):
            read()


def test_where_columns_are_listed_nobody_looks_at_other_entries() -> None:
    one, other = (
        SequenceSource(weighted(weight), ids="key", columns=["x"]).fingerprint()
        for weight in (2, 5)
    )
    assert one == other


def test_a_record_without_its_id_and_with_something_else_is_none() -> None:
    class Changing(list[Any]):
        later = False

        def __getitem__(self, row: Any) -> Any:
            found = super().__getitem__(row)
            return {"x": found["x"], "other": 1} if self.later and row == 1 else found

    records = Changing({"key": row, "x": row} for row in range(3))
    source = SequenceSource(records, ids="key")
    records.later = True
    with pytest.raises(ValueError, match="row 1: the record has 'other'"):
        source.read(np.array([0, 1]))


def test_a_record_that_cannot_be_read_is_named() -> None:
    class Failing(list[Any]):
        def __getitem__(self, row: Any) -> Any:
            if row == 2:
                raise KeyError("lost")
            return super().__getitem__(row)

    source = SequenceSource(Failing(RECORDS), ids="row", columns=["y"])
    with pytest.raises(ValueError, match=r"row 2 cannot be read: KeyError: 'lost'"):
        source.read(np.array([1, 2]))


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ([2], "row 2 cannot be read: KeyError: 'lost'"),
        ([], "rows 1, 2 cannot be read together, .*'at"),
    ],
)
def test_records_that_cannot_be_read_together_are_named(lost: list[int], named: str) -> None:
    class Failing(Fetching):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row in lost:
                raise KeyError("lost")
            return super().__getitem__(row)

        def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
            raise KeyError("at once")

    with pytest.raises(ValueError, match=named):
        SequenceSource(Failing(), columns=["y"]).read(np.array([1, 2]))


def test_a_field_may_be_named_row() -> None:
    source = SequenceSource([{"row": 5, "x": 1}, {"row": 6, "x": 2}])
    assert source.read(np.array([1]))["row"].tolist() == [6]
    assert source.ids(np.array([1])).tolist() == [1]


def test_fewer_records_than_asked_for_are_refused() -> None:
    class Losing(Fetching):
        def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
            return super().__getitems__(rows)[1:]

    with pytest.raises(ValueError, match="gave 1 records for 2 rows"):
        SequenceSource(Losing(), columns=["y"]).read(np.array([1, 2]))


REFUSED: Final[list[tuple[Any, str]]] = [
    ([], "the sequence holds no record"),
    ("abc", "a sequence of records is needed, not str"),
    ({"x": X}, "a sequence of records is needed, not dict: .*use loader.ArraySource"),
    (iter(RECORDS), "a sequence of records is needed"),
    (7, "a sequence of records is needed"),
    ([{}], "columns must name at least one column"),
    ([{"x": None}], "field 'x' has dtype object"),
    ([(1, 2)], r"row 0 is \(1, 2\), not a dict of arrays"),
]


@pytest.mark.parametrize(("sequence", "named"), REFUSED, ids=itertools.count())
def test_what_holds_no_records_is_refused(sequence: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        SequenceSource(sequence)


def test_records_of_an_id_alone_are_refused_with_a_way_out() -> None:
    only = [{"key": key} for key in (5, 6, 7)]
    with pytest.raises(
        ValueError, match="hold nothing but 'key', their IDs: a source needs a field"
    ):
        SequenceSource(only, ids="key")
    assert SequenceSource(only, columns=["key"], ids="row").ids(np.arange(3)).tolist() == [0, 1, 2]


IDS: Final[list[tuple[list[Any], str]]] = [
    ([5, 6, 5], "ID 5 belongs to rows 0 and 2"),
    (["a", 5, "b"], "row 1: 'key' is int64|IDs are of one kind"),
    ([1.5, 2.5, 3.5], "cannot be the IDs"),
    ([1, -1, 2], "row 1 has the ID -1"),
    (["a", "b\0", "c"], "zero byte at its end"),
]


@pytest.mark.parametrize(("keys", "named"), IDS, ids=itertools.count())
def test_entries_that_are_no_ids_are_refused(keys: list[Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        SequenceSource([{"x": 1, "key": key} for key in keys], columns=["x"], ids="key")


def test_ids_may_be_a_function_of_rows() -> None:
    source = SequenceSource(range(5), ids=lambda rows: rows * 2 + 100)
    assert source.ids(np.array([3, 0])).tolist() == [106, 100]


def test_a_pipeline_delivers_them() -> None:
    config = loader.PipelineConfig(batch_size=4, seed=3, final_batch="pad", num_epochs=2)
    found = list(loader.Pipeline(SequenceSource(RECORDS, ids="id"), config))
    wanted = list(loader.Pipeline(ARRAYS, config))
    for batch, other in zip(found, wanted, strict=True):
        assert_same(batch, other)
