"""A folder of a bucket of Google Cloud Storage: requests, tried again for a bounded time, with plain errors.

An object is known by its name in the folder; what lists and copies give and take are the client's own blobs.
"""

import contextlib
import errno
import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from checkpointing.storage.base import StorageUnavailableError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: No more than the connections that the client keeps open.
_THREADS: Final = 8
_MOST_RETRIES_S: Final = 120.0
_MOST_REQUEST_S: Final = 60.0
_MOST_CONNECT_S: Final = 10.0
_FIRST_DELAY_S: Final = 0.5
_NOT_FOUND: Final = 404
_PRECONDITION: Final = 412
_NO_SUCH_RANGE: Final = 416
_FORBIDDEN: Final = (401, 403)
_NOT_THERE: Final = "there is no such object, or no such bucket"


class BucketFolder:
    """A folder of a bucket, which is there as soon as there is an object in it.

    Args:
      bucket: its name.
      folder: its name in the bucket, which may have several parts.
      total_s: seconds for which a request is tried again, two minutes at most.

    Raises:
      ModuleNotFoundError: the extra ``gcs`` is not installed.
      PermissionError: there are no credentials.

    All methods raise FileNotFoundError where there is no such object, FileExistsError where there is
    another one than was to be expected, PermissionError, and `StorageUnavailableError` for all else that
    a store can answer, or leave unanswered.
    """

    def __init__(self, bucket: str, folder: str, total_s: float) -> None:
        self._client, retry = _client()
        self._bucket = self._client.bucket(bucket)
        self._address = f"gs://{bucket}/{folder}"
        self._prefix = f"{folder}/"
        self._total_s = min(total_s, _MOST_RETRIES_S)
        self._how = {
            "timeout": (min(self._total_s, _MOST_CONNECT_S), min(self._total_s, _MOST_REQUEST_S)),
            "retry": retry.with_timeout(self._total_s).with_delay(initial=_FIRST_DELAY_S),
        }

    def blob(self, name: str) -> Any:
        """An object of that name, whether there is one or not."""
        return self._bucket.blob(self._prefix + name)

    def matching(self, pattern: str) -> list[str]:
        """Names of the objects that match a pattern of the store's."""
        with self._telling("list", pattern):
            found = self._client.list_blobs(
                self._bucket,
                match_glob=self._prefix + pattern,
                fields="items(name),nextPageToken",
                **self._how,
            )
            return [self.name(blob) for blob in found]

    def delete_one(self, name: str, generation: int) -> None:
        """Deletes an object, if it is not another one of that name by now."""
        blob = self.blob(name)
        with (
            contextlib.suppress(FileNotFoundError, FileExistsError),
            self._telling("delete", name),
        ):
            blob.delete(if_generation_match=generation, **self._how)

    def folders(self) -> set[str]:
        """Names of the folders in it."""
        with self._telling("list", "all folders"):
            found = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix,
                delimiter="/",
                fields="prefixes,nextPageToken",
                **self._how,
            )
            return {
                name.removeprefix(self._prefix).removesuffix("/")
                for page in found.pages
                for name in page.prefixes
            }

    def listed(self, folder: str, inside: str = "") -> dict[str, Any]:
        """All objects of a folder whose names begin with ``inside``, by their names in it."""
        top = f"{self._prefix}{folder}/"
        with self._telling("list", folder):
            found = self._client.list_blobs(
                self._bucket,
                prefix=top + inside,
                fields="items(name,size,generation,crc32c,updated),nextPageToken",
                **self._how,
            )
            # Some tools make an empty object for a folder.
            return {b.name.removeprefix(top): b for b in found if not b.name.endswith("/")}

    def get(self, name: str, limit: int) -> bytes:
        """An object's first bytes, no more than one behind ``limit``."""
        blob = self.blob(name)
        with self._telling("read", name):
            try:
                data: bytes = blob.download_as_bytes(
                    start=0, end=limit, raw_download=True, checksum=None, **self._how
                )
            except Exception as error:
                if getattr(error, "code", None) == _NO_SUCH_RANGE:
                    return b""  # it is empty
                raise
        return data

    def put(self, name: str, data: bytes, *, new: bool = False) -> int:
        """Puts an object and returns its generation; a ``new`` one must not be there, or be the same."""
        blob = self.blob(name)
        only = {"if_generation_match": 0} if new else {}
        try:
            with self._telling("write", name):
                blob.upload_from_string(data, "application/octet-stream", **only, **self._how)
        except FileExistsError:
            # Of a request that has arrived, and whose answer has not, the second try finds the first one.
            if self.get(name, len(data)) != data:
                raise
        return blob.generation or 0

    def copy(self, blob: Any, name: str) -> None:
        """Has the store copy an object, as it was listed, to where there is none."""
        target = self.blob(name)
        token, again = None, True
        try:
            with self._telling("copy to", name):
                while again:
                    token, _, _ = target.rewrite(
                        blob,
                        token=token,
                        if_generation_match=0,
                        if_source_generation_match=blob.generation,
                        **self._how,
                    )
                    again = token is not None
        except FileExistsError:
            with self._telling("look at", name):  # as in _put
                target.reload(**self._how)
            if (target.size, target.crc32c) != (blob.size, blob.crc32c):
                raise

    def name(self, blob: Any) -> str:
        """Of an object, in the folder."""
        inside: str = blob.name.removeprefix(self._prefix)
        return inside

    def delete(self, blobs: Iterable[Any]) -> None:
        """Deletes objects, as far as they are there."""

        def delete(blob: Any) -> None:
            with contextlib.suppress(FileNotFoundError), self._telling("delete", self.name(blob)):
                blob.delete(**self._how)

        self.in_threads(delete, list(blobs))

    def describe(
        self,
        blobs: Collection[Any],
        sizes: Sequence[int] | None = None,
        read: Callable[[int], None] = lambda _: None,
    ) -> list[dict[str, Any]]:
        """Digests and sizes of objects, of which no more is read than they should have."""

        def describe(blob: Any, size: int) -> dict[str, Any]:
            digest = _Digest(size)
            name = self.name(blob)
            with self._telling("read", name):
                try:
                    # Where it was listed, that very one: else it would not be what is copied.
                    blob.download_to_file(
                        digest, raw_download=True, if_generation_match=blob.generation, **self._how
                    )
                except _TooLargeError:
                    pass
                except Exception as error:
                    if type(error).__name__ == "DataCorruption":
                        text = f"{name} does not match the store's own checksum"
                        raise ValueError(text) from error
                    raise
            read(size)
            return digest.described()

        own = [blob.size for blob in blobs] if sizes is None else sizes
        pairs = list(zip(blobs, own, strict=True))
        return self.in_threads(lambda pair: describe(*pair), pairs)

    def in_threads(
        self, work: Callable[[_Item], _Result], items: Collection[_Item]
    ) -> list[_Result]:
        """The result of work for each item, in order."""
        if len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(_THREADS, len(items)), "regrain-store") as pool:
            return list(pool.map(work, items))

    @contextlib.contextmanager
    def _telling(self, what: str, name: str) -> Iterator[None]:
        """Turns the errors of the client into those of an operating system."""
        try:
            yield
        except Exception as error:
            code = getattr(error, "code", None)
            where = f"{self._address}/{name}"
            if code == _NOT_FOUND:
                raise FileNotFoundError(errno.ENOENT, _NOT_THERE, where) from error
            if code == _PRECONDITION:
                raise FileExistsError(
                    errno.EEXIST, "another object has this name", where
                ) from error
            if code in _FORBIDDEN:
                text = f"to {what} it is not allowed: {error!s:.300}"
                raise PermissionError(errno.EACCES, text, where) from error
            if type(error) is ValueError:  # of `describe`; others are the client's
                raise
            text = f"to {what} it has failed, and was tried for {self._total_s:g} s"
            cause = error.__cause__ or error
            raise StorageUnavailableError(errno.EIO, f"{text}: {cause!s:.300}", where) from error


class _TooLargeError(Exception):
    """An object is larger than it should be."""


class _Digest:
    """A file that keeps nothing of what is written to it but its digest."""

    def __init__(self, limit: int) -> None:
        self._sha256 = hashlib.sha256()
        self._bytes, self._limit = 0, limit

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self._bytes += len(data)
        if self._bytes > self._limit:
            raise _TooLargeError
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def seek(self, _: int) -> None:
        """To begin again, which is all that a download does."""
        self._sha256, self._bytes = hashlib.sha256(), 0

    def described(self) -> dict[str, Any]:
        return {"sha256": self._sha256.hexdigest(), "bytes": self._bytes}


def _client() -> tuple[Any, Any]:
    """Google's client, and what it tries again."""
    try:
        from google.auth import exceptions  # noqa: PLC0415 (an extra, and slow to import)
        from google.cloud import storage  # noqa: PLC0415
        from google.cloud.storage import retry  # noqa: PLC0415
    except ImportError as error:
        raise _not_installed(error.name or "google.cloud.storage") from error
    # Orbax's, which would say nothing of it before a save.
    if importlib.util.find_spec("gcsfs") is None:
        raise _not_installed("gcsfs")
    try:
        return storage.Client(project=None), retry.DEFAULT_RETRY
    except exceptions.DefaultCredentialsError as error:
        raise PermissionError(
            errno.EACCES, f"checkpoints in gs:// need credentials: {error}"
        ) from error


def _not_installed(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"checkpoints in gs:// need the package {name}, which is not installed: "
        "pip install 'regrain[gcs]'",
        name=name,
    )
