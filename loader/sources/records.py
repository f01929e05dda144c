"""One record as bytes: a header that describes its fields, and their bytes, one after another.

    b"REC1"   2 bytes: length of the header, little-endian   header   bytes of each field, in its order

The header is JSON without blanks: for each field's name, its dtype and shape, as in
``{"x":["<f4",[8,8]],"y":["<i4",[]]}``. The dtype is NumPy's text for it (``<U5`` are 5 characters, 4
bytes each), the bytes those of the array in C order. Bytes that have a length of their own, such as
those of an image file, are ``["bytes",[1234]]``. Nothing is ever unpickled.

Records of the same fields have the same header and length, so that thousands are decoded at once.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.sources.protocol import Field, check_dtype, is_extended

_MAGIC: Final = b"REC1"
_HEADER: Final = len(_MAGIC) + 2
_BYTES: Final = "bytes"

#: A field's value in one record: an array, or bytes that have a length of their own.
Value = npt.NDArray[Any] | bytes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each field's bytes are in a record.

    Attributes:
      start: magic, length and header, as they stand in each record of this layout.
      fields: by name, dtype (``None`` for bytes of a length of their own) and shape.
      size: bytes of a record.
    """

    start: bytes
    fields: Mapping[str, tuple[np.dtype[Any] | None, tuple[int, ...]]]
    size: int

    def decode(self, record: bytes) -> dict[str, Value]:
        """One record of this layout."""
        found: dict[str, Value] = {}
        at = len(self.start)
        for name, (dtype, shape) in self.fields.items():
            end = at + math.prod(shape) * (1 if dtype is None else dtype.itemsize)
            if dtype is None:
                found[name] = bytes(record[at:end])
            else:
                found[name] = np.ndarray(shape, dtype, record, at)
            at = end
        return found

    def decode_all(self, records: Sequence[bytes]) -> dict[str, npt.NDArray[Any]] | None:
        """Records of this layout at once, for each field an array [k, *shape]; ``None`` if some are not."""
        if any(len(record) != self.size for record in records):
            return None
        table = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), self.size)
        at = len(self.start)
        if (table[:, :at] != np.frombuffer(self.start, np.uint8)).any():
            return None
        found = {}
        for name, (dtype, shape) in self.fields.items():
            if dtype is None:
                return None
            end = at + math.prod(shape) * dtype.itemsize
            found[name] = table[:, at:end].copy().view(dtype).reshape(-1, *shape)
            at = end
        return found


def encode_record(record: Mapping[str, npt.ArrayLike | bytes]) -> bytes:
    """A record as bytes, for a file of records such as ArrayRecord's; `decode_record` is the inverse.

    Args:
      record: for each field's name an array, number or string, or bytes of any length, such as those
        of an image file. All records of a data set should have the same fields in the same order,
        dtypes and shapes: strings as arrays of one width, ``np.array("cat", "U8")``.

    Raises:
      TypeError, ValueError: no field, a name that is no string, a dtype that has no bytes of its own
        (objects) or no short name (structured ones), a mask or a string's last zero, which would be lost.
    """
    if not isinstance(record, Mapping) or not record:
        raise TypeError(f"a record must map names to arrays, not be {record!r:.80}")
    header: dict[str, tuple[str, list[int]]] = {}
    parts = []
    for name, value in record.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a field's name must be a string that is not empty, not {name!r:.80}")
        if isinstance(value, bytes | bytearray):
            header[name] = (_BYTES, [len(value)])
            parts.append(bytes(value))
        else:
            _check_kept(name, value)
            array = np.asarray(value)
            header[name] = (_text_of(name, array.dtype), list(array.shape))
            parts.append(array.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) >= 1 << 16:
        raise ValueError(f"the fields' names, dtypes and shapes take {len(text)} bytes, of 65,535")
    return b"".join([_MAGIC, len(text).to_bytes(2, "little"), text, *parts])


def decode_record(record: bytes) -> dict[str, Value]:
    """The fields of a record that `encode_record` made: arrays, and bytes where bytes were given.

    Raises:
      ValueError: it is none, or one that is cut.
    """
    return layout_of(record).decode(record)


def layout_of(record: bytes) -> Layout:
    """Where the fields of a record are.

    Raises:
      ValueError: its bytes are none that `encode_record` made, or not all of them.
    """
    if record[: len(_MAGIC)] != _MAGIC or len(record) < _HEADER:
        raise ValueError(
            f"{len(record)} bytes that begin with {bytes(record[:12])!r} are no record that "
            "loader.encode_record made; give the function that decodes them, as decode"
        )
    length = int.from_bytes(record[len(_MAGIC) : _HEADER], "little")
    layout = _parsed(bytes(record[: _HEADER + length]))
    if layout.size != len(record):
        raise ValueError(
            f"the record has {len(record)} bytes, and its header describes {layout.size}; it is cut, or "
            "something was written after it"
        )
    return layout


@functools.lru_cache(maxsize=64)
def _parsed(start: bytes) -> Layout:
    fields = {}
    size = len(start)
    try:
        for name, (text, sides) in json.loads(start[_HEADER:]).items():
            shape = tuple(_side(side) for side in sides)
            dtype = None if text == _BYTES else _dtype_of(text)
            if dtype is None and len(shape) != 1:
                raise ValueError("bytes have one length")
            fields[name] = (dtype, shape)
            size += math.prod(shape) * (1 if dtype is None else dtype.itemsize)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"the record's header {start[_HEADER:]!r:.200} cannot be understood: {error}"
        ) from error
    return Layout(start, fields, size)


def fields_of(layout: Layout) -> dict[str, Field]:
    """The fields of a layout whose dtype and shape are in it."""
    return {
        name: Field(dtype, shape)
        for name, (dtype, shape) in layout.fields.items()
        if dtype is not None
    }


def _check_kept(name: str, value: Any) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"field {name!r} is a masked array, and its mask would be lost; fill it first"
        )
    if isinstance(value, str) and value.endswith("\0"):
        raise ValueError(
            f"field {name!r} is a string that ends with a zero, which NumPy would drop; give its bytes"
        )


def _text_of(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.hasobject or dtype.names is not None:
        raise TypeError(
            f"field {name!r} has dtype {dtype}, which cannot be encoded: split it into fields of numbers, "
            "fixed-width strings or bytes"
        )
    check_dtype(f"field {name!r}", dtype)
    return dtype.name if is_extended(dtype) else dtype.str


def _dtype_of(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no dtype")
    dtype = np.dtype(text)
    # NumPy understands much more than a dtype's own name: lists of fields, shapes, Python objects.
    if dtype.hasobject or dtype.names or dtype.subdtype or text not in {dtype.str, dtype.name}:
        raise ValueError(f"{text!r} is no dtype that a record may have")
    return dtype


def _side(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no length")
    return value
