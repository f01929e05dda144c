"""The identity of a data set in files: their names and bytes, how many records, which fields and IDs.

Bytes come in as a digest for each file, which any number of workers can compute and a cache can keep.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.identity.files import FileEntry, FileMarks
from loader.identity.fingerprint import ColumnDigest, Fingerprint
from loader.sources.digest_cache import cache_path, load_digests, store_digests
from loader.sources.digests import Cache, FileDigest, FileDigests, digest_files
from loader.sources.files import FileSet
from loader.sources.protocol import Field, Verify


@dataclasses.dataclass(frozen=True)
class FileIdentity:
    """What identifies a data set in files, but for the files' bytes.

    Attributes:
      files: the files.
      counts: records of each, ``int64[num_files]``.
      num_records: in all.
      fields: dtype and per-record shape of each field.
      ids: kind and digest of the IDs.
      reading: settings of the source that decide what a record is; small JSON values.
      cache: where digests of files are kept.
    """

    files: FileSet
    counts: Sequence[int] | npt.NDArray[np.int64]
    num_records: int
    fields: Mapping[str, Field]
    ids: ColumnDigest
    reading: Mapping[str, Any]
    cache: Cache

    def entries(self, verify: Verify, digests: FileDigests | None) -> list[FileEntry]:
        """What a fingerprint says of each file; see `FileSource.fingerprint`."""
        found = self._digests(verify, digests or {})
        every = zip(self.files.names, self.files.states, self.counts, strict=True)
        return [
            FileEntry(name, state.size, int(count), found[name].digest)
            for name, state, count in every
        ]

    def fingerprint(self, entries: Sequence[FileEntry]) -> Fingerprint:
        """The fingerprint, from an entry for each file."""
        marks = FileMarks.of(entries, self.reading)
        return Fingerprint.of_files(self.num_records, self.ids, self.fields, marks)

    def _digests(self, verify: Verify, given: FileDigests) -> dict[str, FileDigest]:
        """A digest of each file: given, kept from before, or computed now."""
        if verify not in ("cache", "full"):
            raise ValueError(f'verify must be "cache" or "full", not {verify!r}')
        for name, state in zip(self.files.names, self.files.states, strict=True):
            if name in given and given[name].state.size != state.size:
                raise ValueError(
                    f"file {name} has {state.size} bytes here, and {given[name].state.size} where it was "
                    "digested: it is not the same file"
                )
        path = cache_path(self.cache, self.files)
        known = load_digests(path) if path is not None and verify == "cache" else {}
        numbers = [number for number, name in enumerate(self.files.names) if name not in given]
        found = digest_files(self.files, numbers, known=known)
        if path is not None:
            store_digests(path, found)
        return {**found, **{name: given[name] for name in self.files.names if name in given}}
