"""The IDs of records in files: each rule, and what it refuses."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loader.sources.files import FileRows, FileSet
from loader.sources.identifiers import IdRule, Ids, make_ids

COUNTS = [3, 1, 12_345]


@pytest.fixture
def files(tmp_path: Path) -> FileSet:
    for name in ("a:1.bin", "ä.bin", "é/b.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    return FileSet.open(tmp_path, [".bin"])


def made(files: FileSet, rule: IdRule, column: Any = None) -> Ids:
    def read_column(name: str, number: int) -> Any:
        assert name == "name"
        return column[number]

    columns = [] if column is None else ["name"]
    rows = FileRows.of(files, COUNTS)
    return make_ids(rule, files, rows, columns=columns, read_column=read_column)


def test_file_and_row_name_each_record(files: FileSet) -> None:
    found = made(files, "file:row")(np.arange(sum(COUNTS)))
    assert found[:5].tolist() == ["a:1.bin:0", "a:1.bin:1", "a:1.bin:2", "ä.bin:0", "é/b.bin:0"]
    expected = [
        f"{name}:{row}" for name, n in zip(files.names, COUNTS, strict=True) for row in range(n)
    ]
    assert found.tolist() == expected
    assert len(set(found.tolist())) == len(found)


@pytest.mark.parametrize("row", [-1, sum(COUNTS), -(2**63)])
def test_a_row_that_is_not_there_has_no_name(files: FileSet, row: int) -> None:
    with pytest.raises(IndexError, match=f"rows run from 0 to {sum(COUNTS) - 1}"):
        made(files, "file:row")(np.array([3, row]))


def test_row_numbers_are_a_copy(files: FileSet) -> None:
    rows = np.array([5, 2])
    found = made(files, "row")(rows)
    assert found.tolist() == [5, 2]
    assert found is not rows


INTS = np.arange(sum(COUNTS), dtype=np.uint16)[::-1] + 7
CUTS = np.cumsum(COUNTS)[:-1]


@pytest.mark.parametrize("column", [INTS, INTS.astype("U6"), INTS.astype("U6").astype(object)])
def test_a_column_gives_the_ids_of_all_files(files: FileSet, column: npt.NDArray[Any]) -> None:
    parts = np.split(column, CUTS)
    rows = np.array([12_348, 0, 3, 4, 0])
    ids = made(files, "name", parts)
    assert ids(rows).tolist() == column[rows].tolist()
    assert pickle.loads(pickle.dumps(ids))(rows).tolist() == column[rows].tolist()
    pieces: list[Any] = [iter(np.array_split(part, 3)) for part in parts]
    assert made(files, "name", pieces).column == ids.column


def edited(row: int, value: Any, column: npt.NDArray[Any] = INTS) -> list[npt.NDArray[Any]]:
    column = column.astype(object if isinstance(value, str) else np.int64)
    column[row] = value
    return np.split(column, CUTS)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            edited(4, INTS[2]),
            rf"ID {INTS[2]} belongs to rows 2 and 4 \(file a:1\.bin, row 2; file é/b\.bin, row 0\)",
        ),
        (edited(5, -1), r"column 'name' of file é/b\.bin cannot be the IDs: row 1 has the ID -1"),
        (edited(5, "", INTS.astype("U6")), r"file é/b\.bin cannot be the IDs: row 1 has the ID ''"),
        (edited(5, "a\0", INTS.astype("U6")), r"file é/b\.bin holds, in row 1, .* a zero byte"),
        (edited(5, "a"), "int64"),
        (np.split(INTS.astype("f4"), CUTS), r"file a:1\.bin cannot be the IDs"),
        (
            np.split(
                np.where(np.arange(len(INTS)) == 5, np.uint64(1 << 63), INTS.astype("u8")), CUTS
            ),
            r"file é/b\.bin holds, in row 1, 9223372036854775808, which does not fit int64",
        ),
        ([INTS[:3].astype("U6"), INTS[3:4], INTS[4:]], "one kind"),
        ([INTS[:3], INTS[3:4], INTS[5:]], r"file é/b\.bin holds 12344 values, of 12345 records"),
    ],
)
def test_a_column_that_cannot_be_ids_is_refused(files: FileSet, column: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made(files, "name", column)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows // 2, "rows 0 and 1"),
        (lambda rows: rows - 1, "row 0 has the ID -1"),
        (lambda rows: rows * 0.5, "int64"),
        (lambda rows: rows[:1], "IDs of 12349 rows"),
    ],
)
def test_a_function_that_gives_no_ids_is_refused(
    files: FileSet, function: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made(files, function)


@pytest.mark.parametrize("rule", ["label", "", 3, None, ["name"]])
def test_a_rule_that_does_not_exist_is_refused(files: FileSet, rule: Any) -> None:
    with pytest.raises(ValueError, match="ids must be"):
        made(files, rule)


def test_the_digest_of_ids_is_theirs_alone(files: FileSet) -> None:
    assert made(files, lambda rows: rows * 2).column == made(files, lambda rows: 2 * rows).column
    rules: list[IdRule] = ["file:row", "row", lambda rows: rows + 1, lambda rows: rows.astype("U")]
    assert len({made(files, rule).column.digest for rule in rules}) == len(rules)


def test_rows_that_are_not_there_have_no_id_also_once_texts_are_remembered(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_bytes(b"x")
    found = FileSet.open(tmp_path, [""])
    ids = make_ids("file:row", found, FileRows.of(found, [2, 3]))
    for _ in range(3):
        assert ids(np.arange(5)).tolist() == ["a:0", "a:1", "b:0", "b:1", "b:2"]
        for row in (-1, 5):
            with pytest.raises(IndexError, match="rows run from 0 to 4"):
                ids(np.array([0, row]))
