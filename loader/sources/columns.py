"""What becomes of the columns of records: which are fields, of which dtype and shape, and whether values are like that.

All sources take ``columns``, ``fields`` and ``ids`` in the same way, and say the same of a wrong value.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from loader.sources.identifiers import id_entry
from loader.sources.protocol import Field, check_field

#: Names the file and row of one of the records that are read together.
Where = Callable[[int], str]

_LOOKS: Final = operator.attrgetter("dtype", "shape", "__class__")


@dataclasses.dataclass(frozen=True)
class Entries:
    """Which entries a record may have.

    Attributes:
      names: those of the first record; ``None``, any, where a caller lists columns.
      of_id: the one that is the ID, if one is.
    """

    names: frozenset[str] | None = None
    of_id: str | None = None

    @classmethod
    def like(cls, first: Collection[str], columns: Any, ids: Any) -> Self:
        """From the first record's, and ``columns`` and ``ids`` as a source is given them."""
        return cls(frozenset(first) if columns is None else None, id_entry(ids))

    def allow(self, names: Collection[str]) -> bool:
        """Whether these are what each record has, or any would do."""
        return self.names is None or self.names == set(names)

    def check_all(self, records: Sequence[Mapping[str, Any]], where: Where) -> None:
        """As `check`, of several records."""
        names = self.names
        if names is not None:
            for place, record in enumerate(records):
                if record.keys() != names:  # at some 0.1 us each
                    self.check(record, where, place)

    def check(self, record: Mapping[str, Any], where: Where, place: int) -> None:
        """Checks that a record has no entry that the first one has not, which nobody would ever see.

        One that lacks a field is found where that is read.

        Raises:
          ValueError: it has; names file, row, ID and entries.
        """
        if self.names is None or record.keys() == self.names:
            return
        extra = [name for name in record if name not in self.names]
        if extra and record.keys() >= self.names - {self.of_id}:
            whose = (
                f", id {_plain(record[self.of_id])!r:.80}"
                if self.of_id is not None and self.of_id in record
                else ""
            )
            raise ValueError(
                f"{where(place)}{whose}: the record has {', '.join(map(repr, extra))}, which the first record has "
                f"not: that has {', '.join(map(repr, sorted(self.names, key=str)))}. All records of a source have the same "
                "fields: give all of them to each, or list as columns those that count, and nobody looks at "
                "the others"
            )


def chosen_columns(there: Collection[str], columns: Any, ids: Any) -> list[str]:
    """Names of what becomes a field: those that a caller lists, or all but the one that is the ID.

    A column that only has the name of a rule, ``row``, is a field like any other.

    Raises:
      TypeError, ValueError: the list is none, names one twice or one that is not there, or nothing is
        left.
    """
    if columns is None:
        of_ids = id_entry(ids)
        columns = [name for name in there if name != of_ids]
        if "id" in columns:
            raise ValueError(
                "'id' cannot be a field: a batch holds its own. Take it as the IDs, ids='id', or list the columns "
                "without it"
            )
        if not columns and of_ids in there:
            raise ValueError(
                f"the records hold nothing but {of_ids!r}, their IDs: a source needs a field beside them. If that "
                'column is data too, list it as one, and number the records: columns=[...], ids="row"'
            )
    chosen: list[str] = [] if not isinstance(columns, Iterable) else list(columns)
    if (
        isinstance(columns, str)
        or not isinstance(columns, Iterable)
        or not all(isinstance(name, str) for name in chosen)
    ):
        raise TypeError(f"columns must be a list of names, not {columns!r:.80}")
    check_known("columns", chosen, there)
    if len(set(chosen)) < len(chosen) or not chosen:
        raise ValueError(f"columns must name at least one column, and none twice: {chosen!r:.200}")
    return chosen


def check_fields(fields: Mapping[str, Any] | None, wanted: Collection[str]) -> dict[str, Field]:
    """Fields as a caller gives them: of each a `Field`, a pair of dtype and shape, or a dtype.

    Raises:
      TypeError, ValueError: one is none of these, or not among those that are wanted.
    """
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise TypeError(f"fields must map names to dtypes and shapes, not be {fields!r:.80}")
    check_known("fields", fields, wanted)
    return {
        name: check_field(name, np.dtype(field) if isinstance(field, str | type) else field)
        for name, field in fields.items()
    }


def field_like(name: str, value: Any) -> Field:
    """The field that one record's value is of.

    Raises:
      TypeError, ValueError: its dtype or shape cannot be batched; or it is a string, which tells
        nothing of how long others are.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(_masked(f"field {name!r}"))
    array = np.asarray(value)
    if array.dtype.kind in "US" and not isinstance(value, np.ndarray):
        raise ValueError(text_needs_width(name, array.dtype.kind))
    return check_field(name, Field(array.dtype, array.shape))


def text_needs_width(name: str, kind: str = "U") -> str:
    """What to say of a column of strings whose longest is not known."""
    return (
        f"field {name!r} holds strings, and the longest is not known: say how many characters there "
        f'may be, as fields={{{name!r}: "{kind}32"}}, or leave the column out'
    )


def checked(name: str, field: Field, value: Any, where: Where, place: int) -> npt.NDArray[Any]:
    """A value of a field, as an array; a string may be narrower than the field.

    Raises:
      ValueError: it has another dtype or shape than the field, a mask, or a zero at a string's end; names
        file and row.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{where(place)}: {_masked(f'field {name!r}')}")
    if isinstance(value, str | bytes) and value[-1:] in {"\0", b"\0"}:
        raise ValueError(
            f"{where(place)}: field {name!r} ends with a zero, which NumPy's strings cannot keep; encode it, "
            "as an array of numbers"
        )
    array = np.asarray(value)
    dtype = array.dtype
    if array.shape == field.shape and (
        dtype == field.dtype
        or (dtype.kind == field.dtype.kind in "US" and dtype.itemsize <= field.dtype.itemsize)
    ):
        return array
    raise ValueError(
        f"{where(place)}: field {name!r} is {dtype}{list(array.shape)}, and the records before it, or "
        f"fields, say {field}; all records of a source have the same fields"
    )


def room(fields: Mapping[str, Field], count: int) -> dict[str, npt.NDArray[Any]]:
    """An array for each field, dtype[count, *shape], to be filled by `put`."""
    return {name: np.empty((count, *field.shape), field.dtype) for name, field in fields.items()}


def put(
    made: Mapping[str, npt.NDArray[Any]],
    fields: Mapping[str, Field],
    record: Mapping[str, Any],
    where: Where,
    place: int,
) -> None:
    """Puts the fields of a record into their place.

    Raises:
      ValueError: one is not there, or has another dtype or shape; names file and row.
    """
    for name, field in fields.items():
        made[name][place] = checked(name, field, _entry(record, name, where, place), where, place)


def gathered(
    name: str, field: Field, records: Sequence[Mapping[str, Any]], where: Where
) -> npt.NDArray[Any]:
    """One field of several records: its dtype[k, *shape].

    Raises:
      ValueError: one is not there, or has another dtype or shape; names file and row.
    """
    values = [_entry(record, name, where, place) for place, record in enumerate(records)]
    try:
        alike = bool(values) and all(
            (dtype, shape) == (field.dtype, field.shape) and not issubclass(kind, np.ma.MaskedArray)
            for dtype, shape, kind in set(map(_LOOKS, values))
        )
    except AttributeError:
        alike = False
    if alike:  # the usual case, at the cost of looking at each
        return np.stack(values) if field.shape else np.array(values, field.dtype)
    made = np.empty((len(values), *field.shape), field.dtype)
    for place, value in enumerate(values):
        made[place] = checked(name, field, value, where, place)
    return made


def stacked(name: str, records: Sequence[Mapping[str, Any]], where: Where) -> npt.NDArray[Any]:
    """An entry of several records, to be IDs: one array; strings as Python's, which keep all they have.

    Raises:
      ValueError: one is not there, or of another kind or shape than the others; names file and row.
    """
    values = [_entry(record, name, where, place) for place, record in enumerate(records)]
    if all(isinstance(value, str) for value in values):
        return np.array(values, object)
    for place, value in enumerate(values):
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError(f"{where(place)}: {_masked(repr(name))}")
    arrays = [np.asarray(value) for value in values]
    first = arrays[0]
    for place, array in enumerate(arrays):
        if (array.dtype.kind, array.shape) != (first.dtype.kind, first.shape):
            raise ValueError(
                f"{where(place)}: {name!r} is {array.dtype}{list(array.shape)}, and in {where(0)} it is "
                f"{first.dtype}{list(first.shape)}; IDs are of one kind"
            )
    return np.stack(arrays)


def check_known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Checks that an argument names nothing that is not there.

    Raises:
      ValueError: it does.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"{what} names {', '.join(map(repr, unknown))}, and there is {', '.join(map(repr, known))}"
        )


def _plain(value: Any) -> Any:
    """A number of NumPy's, or an array of one, as Python prints it."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _masked(what: str) -> str:
    return f"{what} is a masked array, and its mask would be lost; fill it first"


def _entry(record: Mapping[str, Any], name: str, where: Where, place: int) -> Any:
    if name not in record:
        raise ValueError(
            f"{where(place)}: the record has no {name!r}; it has {', '.join(map(str, record))}"
        )
    return record[name]
