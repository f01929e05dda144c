"""What a source of records is: five members, which anyone can implement, and a sixth that is optional."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol, runtime_checkable

import ml_dtypes  # noqa: F401 (NumPy then finds bfloat16 and its like by name)
import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import Fingerprint
from loader.identity.records import dtype_and_shape
from loader.sources.source_or_stream import check_is_no_stream

#: What a fingerprint reads: ``"cache"``, what has changed since a source last digested it, which is all where
#: it keeps nothing; ``"full"``, all.
Verify = Literal["cache", "full"]

#: NumPy numbers its own dtypes below this, and those of other packages from here on.
_FIRST_EXTENDED: Final = 256


@dataclasses.dataclass(frozen=True)
class Field:
    """A field's dtype, and its shape in one record.

    Attributes:
      dtype: of the field's arrays.
      shape: without the batch axis: ``()`` for one number a record.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def field_list(fields: Mapping[str, Field]) -> str:
    """Fields, as a source's ``repr`` names them."""
    return ", ".join(f"{name}: {field}" for name, field in fields.items())


@runtime_checkable
class RecordSource(Protocol):
    """Random access to records: a length, their fields, and two vectorised reads.

    Rows run from 0 to ``len(source) - 1``. The same row must give the same record for as long as the
    source lives; what it gives is what its fingerprint says. ``ids`` and ``read`` are called from
    several threads at once.

    A source whose records stand in a row may also have ``read_range(start, stop)``: a dict of the IDs
    of these rows, under ``"id"``, and of all fields, as ``ids`` and ``read`` give them, but without a
    copy if there is none to be made: they are only looked at. A fingerprint is then cheaper. Where a
    class inherits it and has an ``ids`` or ``read`` of its own, these are what counts.
    """

    def __len__(self) -> int:
        """How many records: 1 to 2**63 - 1."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """Each field's name, with what has a ``dtype`` and a per-record ``shape``, or a pair of them."""
        ...

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k], unique over the source, never -1 or ""."""
        ...

    def read(self, rows: npt.NDArray[np.int64], /) -> Mapping[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]`` in one call: for each a fresh array, dtype[k, *shape]."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Identity of the content: usually ``return loader.fingerprint(self)``.

        One that keeps digests from before takes ``verify``, ``"cache"`` or ``"full"``: with this, all is read.
        """
        ...


def fingerprint_of(source: RecordSource, verify: Verify = "cache") -> Fingerprint:
    """A source's fingerprint, for which all is read where ``verify`` is ``"full"``.

    Raises:
      ValueError: ``verify`` is something else.
    """
    if verify not in ("cache", "full"):
        raise ValueError(f'verify must be "cache" or "full", not {verify!r:.80}')
    if verify == "full" and "verify" in inspect.signature(source.fingerprint).parameters:
        keeps: Any = source
        found: Fingerprint = keeps.fingerprint(verify=verify)
        return found
    return source.fingerprint()


def check_source(source: RecordSource) -> dict[str, Field]:
    """Checks what can be checked of a source without reading a record.

    Returns:
      Its fields, as `Field`.

    Raises:
      TypeError, ValueError: a member is missing, there is no record, or a field's name, dtype or
        shape cannot be batched; names what is wrong.
    """
    check_is_no_stream(source)
    missing = [
        name
        for name in ("__len__", "fields", "ids", "read", "fingerprint")
        if not hasattr(source, name)
    ]
    if missing:
        raise TypeError(
            f"{type(source).__name__} is not a RecordSource: it has no {', '.join(missing)}; "
            "for arrays in memory or memory-mapped use loader.ArraySource"
        )
    if len(source) < 1:
        raise ValueError("the source holds no record")
    if not isinstance(source.fields, Mapping):
        raise TypeError(f"fields must map names to dtypes and shapes, not {source.fields!r}")
    return {name: check_field(name, field) for name, field in source.fields.items()}


def check_field(name: str, field: Any) -> Field:
    """Checks a field's name, dtype and shape; returns it as `Field`."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"a field's name must be a string that is not empty, not {name!r}")
    if name == "id":
        raise ValueError(
            "a field cannot be named 'id': a batch holds its own; IDs are given as ids"
        )
    try:
        dtype, shape = dtype_and_shape(field)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"field {name!r} must have a dtype and a shape, not be {field!r}: {error}"
        ) from error
    if dtype.hasobject:
        raise TypeError(
            f"field {name!r} has dtype {dtype}: Python objects have no fixed size and no bytes to "
            "identify; encode them (numbers, fixed-width strings, or token arrays)"
        )
    if dtype.itemsize == 0 or min(shape, default=1) < 1:
        raise ValueError(
            f"field {name!r} holds nothing: dtype {dtype}, shape {list(shape)} a record"
        )
    check_dtype(f"field {name!r}", dtype)
    return Field(dtype, shape)


def check_dtype(what: str, dtype: np.dtype[Any]) -> None:
    """Checks that a dtype's name alone is enough to read its bytes again.

    Args:
      what: holds values of the dtype, for the message.
      dtype: without Python objects.

    Raises:
      TypeError: the dtype is raw bytes, of another package than NumPy and ml_dtypes, of ml_dtypes in the
        other byte order, or a structure with one of these or of ml_dtypes.
    """
    if dtype.names is not None:
        for member in dtype.names:
            base = dtype[member].base
            if base.names is None and is_extended(base):
                raise TypeError(
                    f"{what} has a member {member!r} of dtype {base}, which NumPy's text for the structure "
                    f"does not name; make it a field of its own"
                )
            check_dtype(f"{what}, member {member!r},", base)
    elif dtype.type is np.void:
        raise TypeError(
            f"{what} has dtype {dtype}, raw bytes of unknown meaning: .npy and .npz files hold bfloat16 and the "
            "other dtypes of ml_dtypes in this form. View the array as its real dtype, "
            "array.view(ml_dtypes.bfloat16), or as bytes, array[..., None].view(numpy.uint8)"
        )
    elif is_extended(dtype) and dtype.type.__module__ != "ml_dtypes":
        raise TypeError(
            f"{what} has dtype {dtype} of the package {dtype.type.__module__}, and only those of NumPy and "
            "ml_dtypes can be read back by name; cast the array"
        )
    elif is_extended(dtype) and not dtype.isnative:
        raise TypeError(
            f"{what} has dtype {dtype}, {dtype.type.__name__} in the other byte order, which files cannot "
            "name; cast the array, array.astype(array.dtype.type)"
        )


def is_extended(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is from another package than NumPy, such as those of ml_dtypes."""
    return not 0 <= dtype.num < _FIRST_EXTENDED
