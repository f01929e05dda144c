"""A source whose fields have other names in batches."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from loader.identity.fingerprint import Fingerprint
from loader.sources.protocol import Field, RecordSource, Verify, fingerprint_of
from loader.sources.source_or_stream import check_is_no_stream


class RenamedSource:
    """A `RecordSource` with the records of another one, and other names for some of its fields.

    Args:
      source: the records.
      names: the new names, by the names in ``source``.

    Raises:
      TypeError, ValueError: a name is no string, no field of the source, or is there twice.
    """

    def __init__(self, source: RecordSource, names: Mapping[str, str]) -> None:
        check_is_no_stream(source)
        if not isinstance(names, Mapping) or not all(
            isinstance(name, str) and name for name in names.values()
        ):
            raise TypeError(
                f'rename maps names to names, such as {{"mask": "attention_mask"}}, not {names!r:.80}'
            )
        unknown = [name for name in names if name not in source.fields]
        if unknown:
            raise ValueError(
                f"rename names {unknown[0]!r}, which is none of the fields {', '.join(source.fields)}"
            )
        self._source, self._names = source, dict(names)
        self._fields = self._renamed(source.fields)
        if len(self._fields) < len(source.fields):
            raise ValueError(
                f"rename gives one name to two fields: {', '.join(map(self._name, source.fields))}"
            )

    def __len__(self) -> int:
        """How many records."""
        return len(self._source)

    def __repr__(self) -> str:
        return f"RenamedSource({self._source!r}, {self._names})"

    def __getattr__(self, name: str) -> Any:
        """Whatever else the source offers, such as ``rows_of``."""
        if name.startswith("_") or name == "read_range":
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def fields(self) -> Mapping[str, Field]:
        """Each field's dtype and per-record shape."""
        return self._fields

    def ids(self, rows: npt.NDArray[Any], /) -> npt.NDArray[Any]:
        """IDs of ``rows: int64[k]``: int64[k] or str[k]."""
        return self._source.ids(rows)

    def read(self, rows: npt.NDArray[Any], /) -> dict[str, npt.NDArray[Any]]:
        """All fields of ``rows: int64[k]``: for each a fresh array, dtype[k, *shape]."""
        return self._renamed(self._source.read(rows))

    def fingerprint(self, *, verify: Verify = "cache") -> Fingerprint:
        """The source's fingerprint with the new names."""
        found = fingerprint_of(self._source, verify)
        columns = self._renamed(found.columns)
        # A mark digests the columns in the order of their names.
        same_order = [self._name(name) for name in sorted(found.columns)] == sorted(columns)
        return dataclasses.replace(found, columns=columns, marks=found.marks if same_order else "")

    def _name(self, name: str) -> str:
        return self._names.get(name, name)

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._name(name): value for name, value in values.items()}
