"""Leaves: those of one pass over the records, however many threads, pieces and parts make them."""

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from loader.identity import digests as module
from loader.identity.digests import ID_COLUMN, ColumnLeaves, Leaves, digest_rows

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

SECONDS: Final = 60  # longer than any thread waits here, but for a fault
PACKED: Final = np.dtype([("a", "<i2"), ("b", "S3"), ("c", "<f4", (2,))])
ALIGNED: Final = np.dtype([("a", "i1"), ("b", "f8"), ("c", [("d", "i1"), ("e", "i4")])], align=True)
#: All that there are, such as bfloat16.
OF_ML_DTYPES: Final[list[Any]] = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
DTYPES: Final[list[Any]] = ["<f4", ">f8", "|u1", "|b1", "<M8[ns]", "|S3", "<U3", ">U2", PACKED]

LAYOUTS: Final[list[Callable[[Array], Array]]] = [
    np.asarray,
    np.asfortranarray,
    lambda array: np.repeat(array, 2, axis=0)[::2],
]

texts = st.text(st.characters(), max_size=4).map(lambda text: text.rstrip("\0"))


def text_of(array: Array) -> bytes:
    parts = [f"{len(text)}:{text}".encode("utf-8", "surrogatepass") for text in array.flat]
    return b"".join(parts)


def one_pass(arrays: Mapping[str, Array], chunk_records: int) -> tuple[dict[str, bytes], str]:
    """By the format's definition: each column's leaves, and the marks."""
    total = len(arrays[ID_COLUMN])
    leaves: dict[str, list[bytes]] = {name: [] for name in arrays}
    for low in range(0, total, chunk_records):
        for name, array in arrays.items():
            chunk = array[low : low + chunk_records]
            ids_of_text = name == ID_COLUMN and chunk.dtype.kind == "U"
            leaf = hashlib.sha256(("str" if ids_of_text else str(array.dtype)).encode())
            leaf.update(str(chunk.shape).encode())
            leaf.update(text_of(chunk) if chunk.dtype.kind == "U" else chunk.tobytes())
            leaves[name].append(leaf.digest())
    marks = [
        hashlib.sha256(b"".join(leaves[name][i] for name in sorted(leaves))).hexdigest()[:12]
        for i in range(-(-total // chunk_records))
    ]
    return {name: b"".join(leaves[name]) for name in arrays}, "".join(marks)


def digested(
    arrays: Mapping[str, Array],
    chunk_records: int,
    *,
    start: int = 0,
    stop: int | None = None,
    piece_records: int = 4,
    threads: int = 1,
    read: Callable[[int, int], Mapping[str, Array]] | None = None,
) -> Leaves:
    return digest_rows(
        read or (lambda low, high: {name: array[low:high] for name, array in arrays.items()}),
        start,
        len(arrays[ID_COLUMN]) if stop is None else stop,
        chunk_records=chunk_records,
        kinds={
            name: (str(array.dtype), array.shape[1:])
            for name, array in arrays.items()
            if name != ID_COLUMN
        },
        piece_records=piece_records,
        threads=threads,
    )


@st.composite
def data(draw: st.DrawFn) -> Arrays:
    """IDs and none to three fields of any dtype and shape, also of no element, over some records."""
    n = draw(st.integers(1, 24))
    ids = nps.arrays(np.int64, n) | st.lists(texts, min_size=n, max_size=n).map(
        lambda names: np.array(names, "<U4")
    )
    shapes = nps.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)
    field = st.tuples(st.sampled_from(DTYPES), shapes).flatmap(
        lambda spec: nps.arrays(spec[0], (n, *spec[1]))
    )
    fields = draw(st.dictionaries(st.sampled_from(["x", "y", "a b", "é"]), field))
    layout = draw(st.sampled_from(LAYOUTS))
    return {ID_COLUMN: draw(ids), **{name: layout(array) for name, array in fields.items()}}


sizes = st.integers(1, 30)


@given(data(), sizes, sizes, st.integers(1, 8))
def test_leaves_are_those_of_one_pass(
    arrays: Arrays, chunk_records: int, piece_records: int, threads: int
) -> None:
    found = digested(arrays, chunk_records, piece_records=piece_records, threads=threads)
    columns, marks = one_pass(arrays, chunk_records)
    assert {name: column.digests for name, column in found.columns.items()} == columns
    assert found.marks == marks
    assert (found.start, found.stop, found.chunk_records) == (
        0,
        len(arrays[ID_COLUMN]),
        chunk_records,
    )
    for name, array in arrays.items():
        if name != ID_COLUMN:
            assert str(found.columns[name]) == f"{array.dtype}{list(array.shape[1:])}"


@pytest.mark.parametrize("threads", [1, 3])
def test_large_columns_are_shared_among_threads_and_have_the_same_leaves(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHARED_BYTES", 1)
    x = np.arange(60.0).reshape(5, 12)
    arrays = {ID_COLUMN: np.arange(5), "x": x, "y": -x, "z": x.astype("S4")}
    found = digested(arrays, 2, threads=threads)
    assert {name: column.digests for name, column in found.columns.items()} == one_pass(arrays, 2)[
        0
    ]


def filled(array: Array, byte: int) -> Array:
    """The same values, in memory that held something else before."""
    made = np.empty(array.shape, array.dtype)
    made.reshape(-1).view(np.uint8)[:] = byte
    put(made, array)
    return made


def put(into: Array, values: Array) -> None:
    """As an assignment, which may copy the bytes between values too, does not."""
    if into.dtype.names is not None:
        for name in into.dtype.names:
            put(into[name], values[name])
    elif into.dtype.type in (np.longdouble, np.clongdouble):
        np.add(values, 0, out=into)
    else:
        into[...] = values


EXTENDED: Final = np.dtype([("a", "u1"), ("b", np.longdouble)], align=True)
OF_PARTS: Final = np.dtype([("a", "u1"), ("b", ALIGNED, (2,))], align=True)


@pytest.mark.parametrize(
    "dtype", [np.longdouble, np.clongdouble, EXTENDED, ALIGNED, OF_PARTS], ids=str
)
def test_bytes_that_are_part_of_no_value_do_not_matter(dtype: Any) -> None:
    zeros = np.zeros((5, 2), dtype)
    values = filled(zeros, 0)
    found = digested({ID_COLUMN: np.arange(5), "x": values}, 2)
    for byte in (0, 255):
        other = filled(zeros, byte)
        assert (other.tobytes() != zeros.tobytes()) == (
            byte > 0 and module._padding(np.dtype(dtype)) is not None
        )
        assert digested({ID_COLUMN: np.arange(5), "x": other}, 2) == found
        assert bytes(module.raw_bytes(other)) == bytes(zeros.nbytes)
    changed = filled(zeros, 255)
    changed.reshape(-1).view(np.uint8)[0] ^= 1  # of a value
    assert digested({ID_COLUMN: np.arange(5), "x": changed}, 2).columns != found.columns


def test_each_byte_of_a_value_matters() -> None:
    values = np.array([1 / np.longdouble(3), -(np.longdouble(2) ** 99)], np.longdouble)
    used = np.finfo(np.longdouble).nmant // 8 + 3  # of sign, exponent and mantissa, on any machine
    orders: tuple[Literal["<", ">"], ...] = ("<", ">")
    for order in orders:
        array = values.astype(values.dtype.newbyteorder(order))
        found = bytes(module.raw_bytes(array))
        assert np.array_equal(np.frombuffer(found, array.dtype), array)
        size = array.dtype.itemsize
        for byte in range(used) if order == "<" else range(size - used, size):
            changed = array.copy()
            changed.view(np.uint8)[byte] ^= 1
            assert bytes(module.raw_bytes(changed)) != found


@pytest.mark.parametrize("dtype", [*DTYPES, *OF_ML_DTYPES], ids=str)
def test_of_other_dtypes_nothing_is_copied(dtype: Any) -> None:
    array = np.zeros(4, dtype)
    assert module.without_padding(array) is array


@pytest.mark.parametrize("dtype", OF_ML_DTYPES, ids=str)
def test_dtypes_of_other_packages_are_digested_by_their_bytes(dtype: Any) -> None:
    """Among them is one whose character is that of a clongdouble."""
    array = np.arange(256, dtype=np.uint8).view(dtype).reshape(4, -1)
    assert bytes(module.raw_bytes(array)) == array.tobytes() == bytes(range(256))
    found = digested({ID_COLUMN: np.arange(4), "x": array}, 2)
    head = f"{array.dtype}{(2, array.shape[1])}".encode()
    assert found.columns["x"].digests == b"".join(
        hashlib.sha256(head + array[low : low + 2].tobytes()).digest() for low in (0, 2)
    )
    fields = np.dtype([("a", "u1"), ("b", dtype)])
    assert bytes(module.raw_bytes(np.zeros(3, fields))) == bytes(3 * fields.itemsize)


def test_gaps_of_an_aligned_dtype_are_left_out() -> None:
    array = np.frombuffer(bytes(range(3 * ALIGNED.itemsize)), ALIGNED)
    other = array.copy()
    other.view(np.uint8)[1] ^= 255  # a byte between a and b
    assert array.tobytes() != other.tobytes()
    both = [digested({ID_COLUMN: np.arange(3), "x": x}, 2, threads=2) for x in (array, other)]
    assert both[0] == both[1]


def test_no_rows_have_no_leaves() -> None:
    found = digested({ID_COLUMN: np.arange(0), "x": np.zeros((0, 3))}, 4)
    assert found == Leaves(
        0, 0, 4, {"id": ColumnLeaves("", (), b""), "x": ColumnLeaves("float64", (3,), b"")}, ""
    )


# Text


@pytest.mark.parametrize("width", [1, 9, 10, 12, 64, 65, 101])
@pytest.mark.parametrize("letters", ["ab", "a\0", "é", "\ud800a", "a:1"])
def test_text_is_its_length_a_colon_and_its_utf_8(width: int, letters: str) -> None:
    rng = np.random.default_rng(width)
    names = ["".join(rng.choice(list(letters), rng.integers(width + 1))) for _ in range(50)]
    array = np.array(["a" * width, "", *names], f"<U{width}")
    for layout in (array, array[::-1].copy()[::-1], array.astype(f">U{width}")):
        data, borders = module._bytes_of(layout, [0, 1, 7, len(array)])
        parts = [bytes(data[low:high]) for low, high in itertools.pairwise(borders)]
        assert parts == [text_of(array[:1]), text_of(array[1:7]), text_of(array[7:])]


# Parts


@given(data(), st.integers(1, 5), st.sets(st.integers(1, 23)), st.randoms(use_true_random=False))
def test_parts_merge_to_the_whole(
    arrays: Arrays, chunk_records: int, cuts: set[int], rng: Any
) -> None:
    total = len(arrays[ID_COLUMN])
    borders = sorted({0, total, *(c * chunk_records for c in cuts if c * chunk_records < total)})
    parts = [
        digested(arrays, chunk_records, start=low, stop=high)
        for low, high in itertools.pairwise(borders)
    ]
    rng.shuffle(parts)
    assert Leaves.merge(parts) == digested(arrays, chunk_records)


def part(start: int, stop: int, chunk: int = 2, **columns: Array) -> Leaves:
    arrays = {ID_COLUMN: np.arange(9), "x": np.zeros(9), **columns}
    return digested(arrays, chunk, start=start, stop=stop)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no leaves to merge"),
        ([part(0, 4), part(6, 9)], "rows 6-8 do not follow on rows 0-3"),
        ([part(0, 4), part(2, 9)], "rows 2-8 do not follow on rows 0-3"),
        ([part(0, 4), part(0, 4)], "rows 0-3 do not follow on rows 0-3"),
        ([part(0, 3), part(3, 9)], "rows 3-8 do not follow on rows 0-2 where a chunk of 2 records"),
        ([part(0, 6), part(6, 9, 3)], "chunks of rows 0-5 have 2 records, those of rows 6-8 3"),
        (
            [part(0, 4), part(4, 9, x=np.zeros((9, 2)))],
            r"'x' is float64\[\] in rows 0-3 and float64\[2\] in rows 4-8",
        ),
        ([part(0, 4), part(4, 9, y=np.zeros(9))], "'y' is absent in rows 0-3"),
        ([part(0, 4, y=np.zeros(9)), part(4, 9)], r"'y' is .* and absent in rows 4-8"),
        (
            [part(0, 4), part(4, 9, id=np.arange(9).astype("U"))],
            r"'id' is int64\[\] .* and str\[\]",
        ),
    ],
    ids=itertools.count(),
)
def test_parts_that_do_not_belong_together_are_refused(parts: list[Leaves], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Leaves.merge(parts)


@pytest.mark.parametrize("chunk_records", [1, 4, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_ids_that_change_their_kind_are_refused(chunk_records: int, threads: int) -> None:
    numbers = np.arange(8)

    def read(low: int, high: int) -> Arrays:
        return {ID_COLUMN: numbers[low:high] if low < 4 else numbers[low:high].astype("U")}

    with pytest.raises(ValueError, match=r"are str|is int64\[\] in .* and str\[\] in"):
        digested({ID_COLUMN: numbers}, chunk_records, read=read, piece_records=2, threads=threads)


# Reading


class Failing:
    """Reads that fail at some rows, and tell of the first of them."""

    def __init__(self, *rows: int) -> None:
        self._rows = rows

    def __call__(self, low: int, high: int) -> Arrays:
        bad = [row for row in self._rows if low <= row < high]
        if bad:
            raise OSError(f"row {bad[0]} cannot be read")
        return {ID_COLUMN: np.arange(low, high)}


@given(st.sets(st.integers(0, 29), min_size=1), sizes, sizes, st.integers(1, 8))
def test_the_error_is_that_of_the_first_rows_that_cannot_be_read(
    rows: set[int], chunk_records: int, piece_records: int, threads: int
) -> None:
    with pytest.raises(OSError, match=f"^row {min(rows)} "):
        digested(
            {ID_COLUMN: np.arange(30)},
            chunk_records,
            read=Failing(*sorted(rows)),
            piece_records=piece_records,
            threads=threads,
        )


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("chunk_records", "piece_records"), [(4, 16), (16, 16), (256, 16), (1, 1)])
def test_what_is_held_is_a_piece_for_each_thread(
    threads: int, chunk_records: int, piece_records: int
) -> None:
    lock, held, most = threading.Lock(), [0], [0]

    def count(records: int) -> None:
        with lock:
            held[0] += records
            most[0] = max(most[0], held[0])

    def read(low: int, high: int) -> Arrays:
        ids, x = np.arange(low, high), np.zeros((high - low, 100))
        count(high - low)
        weakref.finalize(x, count, low - high)
        return {ID_COLUMN: ids, "x": x}

    arrays = {ID_COLUMN: np.arange(1000), "x": np.zeros((1000, 100))}
    found = digested(arrays, chunk_records, read=read, piece_records=piece_records, threads=threads)
    assert found == digested(arrays, chunk_records)
    assert held == [0]
    assert 0 < most[0] <= threads * piece_records


def test_while_one_thread_reads_another_one_reads_or_digests() -> None:
    """The second read comes while the first has not returned, and the other way round."""
    together = threading.Barrier(2)

    def read(low: int, high: int) -> Arrays:
        together.wait(SECONDS)
        return {ID_COLUMN: np.arange(low, high)}

    digested({ID_COLUMN: np.arange(8)}, 1, read=read, piece_records=1, threads=2)


def test_one_thread_reads_all_rows_in_order() -> None:
    read = []

    def noted(low: int, high: int) -> Arrays:
        read.append((threading.get_ident(), low, high))
        return {ID_COLUMN: np.arange(low, high)}

    digested({ID_COLUMN: np.arange(11)}, 2, read=noted, piece_records=4, threads=1)
    me = threading.get_ident()
    assert read == [(me, 0, 4), (me, 4, 8), (me, 8, 11)]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
