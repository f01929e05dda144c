"""Columns of Arrow arrays as NumPy arrays of one dtype and shape a record: what Parquet and Hugging Face share.

Numbers, times and lists of one length are looked at where Arrow has them, without a copy; strings get
the width that their field has; binary values are decoded by a function, or get a width too.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.sources.columns import Where, field_like, text_needs_width
from loader.sources.decoding import Decode, decode_column, decoded
from loader.sources.extras import needed
from loader.sources.protocol import Field, check_field

#: A piece of a column: as NumPy has it, or, where a value in it is at fault or decoded, as Arrow has it.
Block = Any


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that becomes a field.

    Attributes:
      name: of both.
      field: what each value becomes.
      decode: from a binary value to its array; ``None`` where values are arrays already.
    """

    name: str
    field: Field
    decode: Decode | None = None

    @classmethod
    def of(
        cls,
        name: str,
        kind: Any,
        decode: Decode | None,
        given: Field | None,
        first: Callable[[], Any],
        where: Where,
    ) -> "Column":
        """From an Arrow type.

        Args:
          name: the column's.
          kind: its type.
          decode: for binary values, what decodes them.
          given: the field, where the caller says it.
          first: gives the first value, as an array of length 1, where the type tells too little.
          where: names the first record.

        Raises:
          TypeError, ValueError: values of the type have no fixed size, or are not what ``given`` says.
        """
        if decode is not None:
            if not is_binary(kind):
                raise ValueError(
                    f"column {name!r} is {kind}, not binary: there is nothing to decode"
                )
            if given is None:
                [value] = _binary_values(name, first(), where)
                given = field_like(name, decoded(f"column {name!r}", decode, value, where, 0))
            return cls(name, given, decode)
        leaf, sides = _leaf(kind)
        if None in sides:
            told = given is not None and len(given.shape) == len(sides)
            sides = given.shape if given and told else _sides_of_first(name, first(), where)
        shape = tuple(side for side in sides if side is not None)
        field = check_field(name, Field(_dtype(name, kind, leaf, given), shape))
        if given and (given.dtype != field.dtype or given.shape not in {(), field.shape}):
            raise ValueError(
                f"column {name!r} is {kind}, which reads as {field}, and fields "
                f"say {given.dtype}{list(given.shape)}"
            )
        return cls(name, field)

    def block(self, array: Any) -> Block:
        """A piece of the column, made ready for `pick`: a NumPy array of all its values, if there is one."""
        if self.decode is None:
            try:
                return to_numpy(self.name, array, self.field, _nowhere)
            except ValueError:
                pass  # some value is at fault; the others can still be read
        return without_views(array)

    def empty(self, count: int) -> npt.NDArray[Any]:
        """Room for values as `pick` gives them."""
        if self.decode is not None:
            return np.empty(count, object)
        return np.empty((count, *self.field.shape), self.field.dtype)

    def pick(self, block: Block, rows: npt.NDArray[np.int64], where: Where) -> npt.NDArray[Any]:
        """Some values of a piece, to be finished by `finish`.

        Raises:
          ValueError: one of them is null, or has another length than the others; names file and row.
        """
        if isinstance(block, np.ndarray):
            return block.take(rows, axis=0)
        return self.read(taken(block, rows), where)

    def read(self, array: Any, where: Where) -> npt.NDArray[Any]:
        """All values of an array: as `pick`."""
        if self.decode is None:
            return to_numpy(self.name, array, self.field, where)
        values = self.empty(len(array))
        values[:] = _binary_values(self.name, array, where)
        return values

    def finish(self, values: npt.NDArray[Any], where: Where, threads: int) -> npt.NDArray[Any]:
        """Values that were picked, decoded if they must be: the field's dtype[k, *shape].

        Raises:
          ValueError: one cannot be decoded, or is not what the field says; names file and row.
        """
        if self.decode is None:
            return values
        return decode_column(self.name, self.decode, self.field, values.tolist(), where, threads)


def is_binary(kind: Any) -> bool:
    """Whether values of a type are bytes, or have some, as the images of Hugging Face have."""
    pa = needed("pyarrow", "parquet")
    kind = _stored(kind)
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and is_binary(kind.field("bytes").type)
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def is_view(kind: Any) -> bool:
    """Whether values of a type are looked at where Arrow has them, without a copy."""
    pa = needed("pyarrow", "parquet")
    leaf, _ = _leaf(kind)
    return bool(
        pa.types.is_integer(leaf)
        or pa.types.is_floating(leaf)
        or pa.types.is_timestamp(leaf)
        or pa.types.is_duration(leaf)
    )


def taken(array: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Some values of an Arrow array."""
    return without_views(array).take(needed("pyarrow", "parquet").array(rows))


def without_views(array: Any) -> Any:
    """An array of strings or bytes in a form of which Arrow can take some; any other as it is."""
    pa = needed("pyarrow", "parquet")
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(array.type) else array


def in_one(arrays: Sequence[Any]) -> Any:
    """Arrow arrays of one type as one array, also where they have more bytes than its offsets can count."""
    pa = needed("pyarrow", "parquet")
    if len(arrays) == 1:
        return arrays[0]
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowInvalid:
        kind = _large(arrays[0].type)
        if kind == arrays[0].type:
            raise
        return pa.concat_arrays([array.cast(kind) for array in arrays])


def _large(kind: Any) -> Any:
    """A type with offsets of 64 bits, for 2 GiB of strings or bytes and more."""
    pa = needed("pyarrow", "parquet")
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_large(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_field.with_type(_large(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_large(kind.value_type)), kind.list_size)
    return kind


def to_numpy(name: str, array: Any, field: Field, where: Where) -> npt.NDArray[Any]:
    """An Arrow array as a NumPy array, dtype[k, *shape], without a copy where there is none to be made.

    Raises:
      ValueError: a value is null, or longer or shorter than the field; names file and row.
    """
    flat, _ = _flat(name, array, field.shape, where)
    if field.dtype.kind in "US":
        values = _text(name, flat, field.dtype, math.prod(field.shape), where)
    else:
        values = (
            np.asarray(flat)
            if isinstance(flat, np.ndarray)
            else flat.to_numpy(zero_copy_only=False)
        )
    kind = array.type
    if isinstance(kind, needed("pyarrow", "parquet").FixedShapeTensorType) and kind.permutation:
        stored = values.reshape(len(array), *kind.shape)
        return stored.transpose(0, *(axis + 1 for axis in kind.permutation))
    return values.reshape(len(array), *field.shape)


def to_ids(name: str, array: Any, where: Where) -> npt.NDArray[Any]:
    """A column of integers or strings, to be IDs: integers[k] or an array of k Python strings.

    Raises:
      TypeError, ValueError: it holds something else, or a null; names file and row.
    """
    pa = needed("pyarrow", "parquet")
    array = _plain(array)
    _check_no_null(name, array, 1, where)
    if pa.types.is_integer(array.type):
        numbers: npt.NDArray[Any] = array.to_numpy()
        return numbers
    if _is_text(array):
        return _objects(name, array, 1, where)
    raise TypeError(f"IDs must be integers or strings, and column {name!r} is {array.type}")


def _leaf(kind: Any) -> tuple[Any, tuple[int | None, ...]]:
    """The type of a value's elements, and its axes; ``None`` is one of which the type says no length."""
    pa = needed("pyarrow", "parquet")
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation or range(len(kind.shape))
        return kind.value_type, tuple(kind.shape[axis] for axis in order)
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _leaf(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        leaf, sides = _leaf(kind.value_type)
        return leaf, (kind.list_size, *sides)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        leaf, sides = _leaf(kind.value_type)
        return leaf, (None, *sides)
    if pa.types.is_fixed_size_binary(kind):
        return pa.uint8(), (kind.byte_width,)
    return kind, ()


def _dtype(name: str, kind: Any, leaf: Any, given: Field | None) -> np.dtype[Any]:
    pa = needed("pyarrow", "parquet")
    if pa.types.is_string(leaf) or pa.types.is_large_string(leaf) or pa.types.is_string_view(leaf):
        if given is None or given.dtype.kind != "U":
            raise ValueError(text_needs_width(name))
        return given.dtype
    if is_binary(leaf) and not pa.types.is_struct(leaf):
        if given is None or given.dtype.kind != "S":
            raise ValueError(
                f"column {name!r} is {kind}, of no fixed size: decode it, decode={{{name!r}: "
                f'loader.decode_image}}, say how many bytes there may be, fields={{{name!r}: "S32"}}, or leave '
                "the column out"
            )
        return given.dtype
    dtype: np.dtype[Any] = pa.array([], leaf).to_numpy(zero_copy_only=False).dtype
    if dtype.hasobject:
        more = (
            ", which is binary inside: give what decodes it, as decode" if is_binary(kind) else ""
        )
        raise TypeError(
            f"column {name!r} is {kind}{more or ', which has no NumPy dtype: cast it to another type'}, or "
            "leave the column out"
        )
    return dtype


def _flat(
    name: str, array: Any, shape: tuple[int, ...] | None, where: Where
) -> tuple[Any, tuple[int, ...]]:
    """The elements of all values, one after another, and the shape that each value has of them."""
    pa = needed("pyarrow", "parquet")
    sides: list[int] = []
    each = 1
    while True:
        _check_no_null(name, array, each, where)
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            array = array.storage
        elif (plain := _plain(array)) is not array:
            array = plain
        elif pa.types.is_fixed_size_binary(kind):
            width, [_, data] = kind.byte_width, array.buffers()
            start, size = array.offset * width, len(array) * width
            return np.frombuffer(data, np.uint8, size, start), (*sides, width)
        elif pa.types.is_fixed_size_list(kind):
            sides.append(kind.list_size)
            array, each = array.flatten(), each * kind.list_size
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            wanted = None if shape is None else shape[len(sides)]
            side = _common_length(name, array, wanted, each, where)
            sides.append(side)
            array, each = array.flatten(), each * side
        else:
            return array, tuple(sides)


def _sides_of_first(name: str, first: Any, where: Where) -> tuple[int, ...]:
    """The shape that the first value has, and others must have too."""
    sides = _flat(name, first, None, where)[1]
    if 0 in sides:
        raise ValueError(
            f"{where(0)}: column {name!r} has an empty list, which does not tell the shape of a record: say "
            f"it, as fields={{{name!r}: (dtype, shape)}}, or leave the column out"
        )
    return sides


def _common_length(name: str, array: Any, wanted: int | None, each: int, where: Where) -> int:
    lengths = array.value_lengths().to_numpy()
    if wanted is None:
        wanted = int(lengths[0]) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != wanted)
    if wrong.size:
        raise ValueError(
            f"{where(int(wrong[0]) // each)}: column {name!r} has a list of {lengths[wrong[0]]} values, and "
            f"others of {wanted}; a field has one shape: pad the lists, or leave the column out"
        )
    return wanted


def _text(name: str, array: Any, dtype: np.dtype[Any], each: int, where: Where) -> npt.NDArray[Any]:
    """Strings or binary values, one axis, in the width of a dtype."""
    width = dtype.itemsize // (4 if dtype.kind == "U" else 1)
    lengths = _lengths(array)
    long = np.flatnonzero(lengths.to_numpy(zero_copy_only=False) > width)
    if long.size:
        place = int(long[0])
        raise ValueError(
            f"{where(place // each)}: column {name!r} has {lengths[place].as_py()} characters, and its "
            f'field {width}: give it more, fields={{{name!r}: "{dtype.kind}{lengths[place].as_py()}"}}'
        )
    made: npt.NDArray[Any] = _objects(name, array, each, where).astype(dtype)
    # NumPy takes zeros at the end for padding.
    lost = np.flatnonzero(np.strings.str_len(made) != lengths.to_numpy(zero_copy_only=False))
    if lost.size:
        raise ValueError(
            f"{where(int(lost[0]) // each)}: column {name!r} ends with a zero, which NumPy's "
            f"strings of dtype {dtype} cannot keep; encode it, as an array of numbers"
        )
    return made


def _objects(name: str, array: Any, each: int, where: Where) -> npt.NDArray[Any]:
    """Strings or binary values as Python has them, one axis."""
    try:
        made: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    except needed("pyarrow", "parquet").ArrowException as error:
        for place, value in enumerate(_stored_bytes(array)):
            try:
                value.decode()
            except UnicodeDecodeError as found:
                raise ValueError(
                    f"{where(place // each)}: column {name!r} holds {value!r:.80}, which is no text: {found}; "
                    "mend it, or store the column as binary"
                ) from error
        raise
    return made


def _stored_bytes(array: Any) -> list[bytes]:
    pa = needed("pyarrow", "parquet")
    large = pa.types.is_large_string(array.type)
    found: list[bytes] = array.view(pa.large_binary() if large else pa.binary()).to_pylist()
    return found


def _lengths(array: Any) -> Any:
    pc = needed("pyarrow.compute", "parquet")
    return pc.utf8_length(array) if _is_text(array) else pc.binary_length(array)


def _is_text(array: Any) -> bool:
    pa = needed("pyarrow", "parquet")
    return bool(pa.types.is_string(array.type) or pa.types.is_large_string(array.type))


def _binary_values(name: str, array: Any, where: Where) -> list[bytes]:
    pa = needed("pyarrow", "parquet")
    array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    if pa.types.is_struct(array.type):
        pc, whole = needed("pyarrow.compute", "parquet"), array
        array = pc.struct_field(whole, "bytes")
        if array.null_count and whole.type.get_field_index("path") >= 0:
            _check_no_path(name, array, pc.struct_field(whole, "path"), where)
    _check_no_null(name, array, 1, where)
    return list(array.to_pylist())


def _check_no_path(name: str, values: Any, paths: Any, where: Where) -> None:
    place = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
    path = paths[place].as_py()
    if path is not None:
        raise ValueError(
            f"{where(place)}: column {name!r} is null where the bytes should be, and names the file "
            f"{path!r:.200}; a data set's save_to_disk puts the bytes in: read what that has written"
        )


def _check_no_null(name: str, array: Any, each: int, where: Where) -> None:
    if array.null_count:
        place = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise ValueError(
            f"{where(place // each)}: column {name!r} is null, and an array has no place for that; fill it "
            "with a value, or leave the record out of the data"
        )


def _stored(kind: Any) -> Any:
    return (
        kind.storage_type
        if isinstance(kind, needed("pyarrow", "parquet").BaseExtensionType)
        else kind
    )


def _plain(array: Any) -> Any:
    """Values in the one of Arrow's forms that everything else here knows."""
    if needed("pyarrow", "parquet").types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    return without_views(array)


def _nowhere(place: int) -> str:
    return f"value {place}"
