"""A run's directory in an object store, ``gs://``: what is atomic there is one put, and a lock there is none.

A step is written under a name of its own, that tells its writer too, and copied by the store to its
final one, object by object, none of which may be there before. The manifest comes last: a step without
it is none. What is deleted is noted first, and what a kill leaves half done the next writer finishes.

In place of a lock there is an object that names the writer. Who opens the run puts a new one, and whoever
finds that it is not his own any more writes and deletes nothing from then on.
"""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from checkpointing.manifest import MAX_MANIFEST_BYTES, Manifest
from checkpointing.storage import (
    ASIDE_SUFFIX,
    COMMIT_FILE,
    ITEMS,
    ITERATOR_FILE,
    MANIFEST_FILE,
    MAX_ABOUT_BYTES,
    MOST_ASIDE,
    PART_FILE,
    PART_FOLDER,
    STEP_FILE,
    TMP_SUFFIX,
    TRAIN_STATE_ITEM,
    TRASH,
    LeftOver,
    StepFiles,
    StorageUnavailableError,
    Writer,
    check_size,
    commit_bytes,
    is_step,
    iterator_bytes,
    left_over_kind,
    save_times,
    step_files,
)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_log: Final = logging.getLogger(__name__)

_WRITER: Final = ".writer"
_ADDRESS: Final = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])((?:/[^/]+)+?)/*")
#: What stands for other characters where a store, or Orbax, looks for names by a pattern.
_PATTERN: Final = re.compile(r"[*?{}\[\]\\#\x00-\x1f]")
#: No more than the connections that the client keeps open.
_THREADS: Final = 8
_MOST_RETRIES_S: Final = 120.0
_MOST_REQUEST_S: Final = 60.0
_MOST_CONNECT_S: Final = 10.0
_FIRST_DELAY_S: Final = 0.5
_MAX_WRITER_BYTES: Final = 4096
_TOKEN_CHARACTERS: Final = 12
#: For TensorStore, which would wait without end for an answer: the share of a byte a second is none at all.
_TENSORSTORE: Final = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
}


class ObjectStorage:
    """A `Storage` in Google Cloud Storage.

    Args:
      address: ``gs://bucket/...``, not the bucket itself.
      timeout_s: seconds after which Orbax is no longer waited for. A request is tried again for a half of
        it, and for two minutes at most.

    Raises:
      ValueError: it is no such address.
      ModuleNotFoundError: the extra ``gcs`` is not installed.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        parsed = _ADDRESS.fullmatch(address)
        if parsed is None or _PATTERN.search(address):
            raise ValueError(
                f"{address} is no address for checkpoints: give gs://bucket/name, with at least one name "
                "behind the bucket, and none of * ? { } [ ] \\ # in it"
            )
        client, retry = _client()
        self.path = f"gs://{parsed[1]}{parsed[2]}"
        self.timeout_s: float | None = timeout_s
        self._prefix = parsed[2].removeprefix("/") + "/"
        self._client = client
        self._bucket = client.bucket(parsed[1])
        total_s = min(timeout_s / 2, _MOST_RETRIES_S)
        self._how = {
            "timeout": (min(total_s, _MOST_CONNECT_S), min(total_s, _MOST_REQUEST_S)),
            "retry": retry.with_timeout(total_s).with_delay(initial=_FIRST_DELAY_S),
        }
        self._total_s = total_s
        #: Of this writer, or of the one that a reader works with.
        self._token = ""
        #: Of the object that names this writer; 0 where this is none.
        self._generation = 0
        #: Steps that the writer knows to be there.
        self._known: set[int] = set()
        for name, value in _TENSORSTORE.items():
            os.environ.setdefault(name, value)

    def open(self) -> None:
        """Takes the run over from whoever had it, and finishes what killed writers have left half done."""
        before = self._writer()
        self._token = secrets.token_hex(16)
        about = {
            "token": self._token,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "opened": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._generation = self._put(_WRITER, json.dumps(about).encode())
        if before:
            _log.warning(
                "%s was left open by %s, or is open there still, which then can save nothing more",
                self.path,
                _shown(before),
            )
        self._known = set(self.steps())
        for name in self._folders():
            step, suffix, _ = name.partition(TMP_SUFFIX)
            if suffix and is_step(step):
                self._remove_unfinished(int(step), name)
        self._finish_deletions()

    def close(self) -> None:
        """Takes the name of the writer away, if it is this one's still."""
        if not self._generation:
            return
        generation, self._generation = self._generation, 0
        try:
            self._delete_as_noted(_WRITER, generation)
        except OSError as error:  # the next writer takes it over all the same
            _log.warning("%s could not be closed: %s", self.path, error)

    def mark(self) -> str:
        """The writer's token."""
        found = self._writer()
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no writer has opened it", self.path)
        self._token = str(found["token"])
        return self._token

    def steps(self) -> list[int]:
        """Those that have a manifest, or the mark that Orbax goes by."""
        pattern = f"{self._prefix}*/{{{MANIFEST_FILE},{COMMIT_FILE}}}"
        with self._telling("list", "all steps"):
            found = list(
                self._client.list_blobs(
                    self._bucket,
                    match_glob=pattern,
                    fields="items(name),nextPageToken",
                    **self._how,
                )
            )
        names = {self._name(blob).partition("/")[0] for blob in found}
        return sorted(int(name) for name in names if is_step(name))

    def holds(self, step: int) -> bool:
        """As far as this writer knows, who asks nobody: a save must not wait for that."""
        return step in self._known

    def step_path(self, step: int) -> str:
        """The final address, where plain Orbax looks too."""
        _forget_listings()
        return f"{self.path}/{step}"

    def unfinished_path(self, step: int) -> str:
        """An address that no other writer uses."""
        _forget_listings()
        return f"{self.path}/{self._unfinished(step)}"

    def begin_step(self, step: int) -> None:
        """Nothing: there are no directories, and who the writer is will be asked before the commit."""

    def seal_part(self, step: int, process: int) -> None:
        """What is digested is read from the store: nobody else knows what has arrived there."""
        unfinished = self._unfinished(step)
        own = self._list(unfinished, f"{TRAIN_STATE_ITEM}/{PART_FOLDER.format(process)}/")
        found = dict(zip(own, self._describe(own.values()), strict=True))
        part = [(name, own[name].generation, described) for name, described in found.items()]
        self._put(f"{unfinished}/{PART_FILE.format(process)}", json.dumps(part).encode())

    def commit_step(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        """Has the store copy what is written to its final address, and puts the manifest last."""
        try:
            return self._commit(step, manifest, about)
        except (FileNotFoundError, FileExistsError):
            self._check_writer()  # which tells why, if it is another one by now
            raise

    def _commit(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        written = self._list(self._unfinished(step))
        files = {name: blob for name, blob in written.items() if _is_item(name)}
        iterator = iterator_bytes(manifest.position)
        described = {**self._described(files, self._parts(written)), ITERATOR_FILE: _of(iterator)}
        sealed = dataclasses.replace(manifest, files=described)
        data = sealed.to_bytes()  # an error before anything is copied, if it is too large

        self._check_writer()
        self._remove_copies(step, {*files, ITERATOR_FILE, STEP_FILE})
        self._in_threads(lambda name: self._copy(files[name], f"{step}/{name}"), files)
        self._put(f"{step}/{ITERATOR_FILE}", iterator, new=True)
        self._put(f"{step}/{STEP_FILE}", json.dumps(about).encode(), new=True)
        self._check_copies(step, files, iterator)
        self._check_writer()
        self._put(f"{step}/{MANIFEST_FILE}", data, new=True)
        self._known.add(step)
        self._put(f"{step}/{COMMIT_FILE}", commit_bytes(step))
        try:
            self._delete(written.values())
        except OSError as error:
            _log.warning(
                "%s: what step %d was copied from is left there: %s", self.path, step, error
            )
        return sealed

    def _described(
        self, files: Mapping[str, Any], parts: Mapping[tuple[str, int], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Digests and sizes of files: those that a part tells of as they are now, and those of the rest."""
        known = {name: parts.get((name, blob.generation)) for name, blob in files.items()}
        rest = [name for name, described in known.items() if described is None]
        found = dict(zip(rest, self._describe([files[name] for name in rest]), strict=True))
        return {name: described or found[name] for name, described in known.items()}

    def clean_step(self, step: int) -> None:
        """Also what it has left at the final address, if nobody else has come to write there."""
        try:
            self._remove_unfinished(step, self._unfinished(step))
        except OSError as error:
            _log.warning("%s: what step %d has left is there still: %s", self.path, step, error)

    def sizes(self, step: int) -> dict[str, int | None]:
        """By a listing."""
        return {
            name: int(blob.size)
            for name, blob in self._list(str(step)).items()
            if _is_item(name) and name != MANIFEST_FILE
        }

    def read(self, step: int, name: str, limit: int) -> bytes:
        """No more than a byte behind the limit is asked for."""
        data = self._get(f"{step}/{name}", limit)
        if len(data) > limit:
            raise ValueError(f"{name} is larger than {limit} bytes")
        return data

    def digests(
        self, step: int, sizes: Mapping[str, int], read: Callable[[int], None]
    ) -> dict[str, str]:
        """In one request each, whose answer the client also compares with the store's own checksum."""
        blobs = [self._bucket.blob(f"{self._prefix}{step}/{name}") for name in sizes]
        found = self._describe(blobs, [*sizes.values()], read)
        for (name, size), one in zip(sizes.items(), found, strict=True):
            check_size(name, one["bytes"], size)
        return {name: one["sha256"] for name, one in zip(sizes, found, strict=True)}

    def step_files(self, step: int) -> StepFiles:
        """By a listing."""
        found = self._list(str(step))
        sizes = {name: int(blob.size) for name, blob in found.items()}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            return step_files(sizes, *save_times(self._get(f"{step}/{STEP_FILE}", MAX_ABOUT_BYTES)))
        manifest = found.get(MANIFEST_FILE)
        return step_files(sizes, manifest.updated.timestamp() if manifest else None, None)

    def left_overs(self) -> list[LeftOver]:
        """By a listing of each."""
        found = []
        for name in sorted(self._folders()):
            kind = left_over_kind(name)
            if kind == "deleted":  # there are but notes; what they are of is where it was
                steps = {step: self._list(step) for step in self._list(name)}
                size = sum(int(blob.size) for blobs in steps.values() for blob in blobs.values())
                found.append(LeftOver(name, kind, size))
            elif kind is not None:
                size = sum(int(blob.size) for blob in self._list(name).values())
                found.append(LeftOver(name, kind, size))
        return found

    def writer(self) -> Writer | None:
        """The one that has opened it last, and has not closed it: whether it is alive, nobody can see."""
        found = self._writer()
        if found is None or type(found.get("process")) is not int:
            return None
        return Writer(found["process"], holds_lock=False, host=str(found.get("host", "")))

    def set_aside(self, step: int) -> str:
        """By copies that the store makes; then the step is deleted."""
        self._check_writer()
        taken = self._folders()
        numbers = (f"{step}{ASIDE_SUFFIX.format(number)}" for number in range(1, MOST_ASIDE))
        name = next((name for name in numbers if name not in taken), None)
        if name is None:
            raise FileExistsError(
                f"{self.path} holds {MOST_ASIDE:,} copies of step {step} that were set aside"
            )
        files = self._list(str(step))
        self._in_threads(lambda inner: self._copy(files[inner], f"{name}/{inner}"), files)
        self._delete_step(step, files)
        return name

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Notes what there is to delete first, so that the next writer can finish it."""
        if steps:
            self._check_writer()
        for step in steps:
            self._delete_step(step, self._list(str(step)))
        self._finish_deletions()

    def _unfinished(self, step: int) -> str:
        return f"{step}{TMP_SUFFIX}-{self._token[:_TOKEN_CHARACTERS]}"

    def _writer(self) -> dict[str, Any] | None:
        """What the writer's object says; None without one."""
        try:
            found = json.loads(self._get(_WRITER, _MAX_WRITER_BYTES))
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        return found if isinstance(found, dict) and "token" in found else {"token": ""}

    def _check_writer(self) -> None:
        """Raises BlockingIOError if another writer has taken this run over."""
        found = self._writer()
        if found is None or found["token"] != self._token:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"another writer has taken these checkpoints over ({_shown(found)}), and this one can save "
                "and delete nothing there any more. A run has one writer: end this process; or end the "
                "other one, and start this one again",
                self.path,
            )

    def _parts(self, written: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
        """What `seal_part` has left, by name and generation."""
        taken = {}
        for name, blob in written.items():
            if name.startswith(PART_FILE.partition("{}")[0]):
                for inner, generation, described in json.loads(
                    self._get(self._name(blob), MAX_MANIFEST_BYTES)
                ):
                    taken[inner, generation] = described
        return taken

    def _check_copies(self, step: int, files: Mapping[str, Any], iterator: bytes) -> None:
        """Raises FileExistsError if there is anything else at a step's final address than what was put."""
        expected = {name: (blob.size, blob.crc32c) for name, blob in files.items()}
        found = {
            name: (blob.size, blob.crc32c)
            for name, blob in self._list(str(step)).items()
            if name != STEP_FILE
        }
        size = found.pop(ITERATOR_FILE, (None,))[0]
        if found != expected or size != len(iterator):
            raise FileExistsError(
                errno.EEXIST,
                "there is something else than what was put here: another writer's, or not this run's",
                self.step_path(step),
            )

    def _remove_copies(self, step: int, names: Collection[str]) -> None:
        """Removes what was left at a step's final address by a commit that did not come to its end."""
        found = self._list(str(step))
        if MANIFEST_FILE not in found:
            self._delete(blob for name, blob in found.items() if name in names)
        elif COMMIT_FILE not in found:  # it lacks but Orbax's own mark
            self._put(f"{step}/{COMMIT_FILE}", commit_bytes(step))

    def _remove_unfinished(self, step: int, name: str) -> None:
        """Removes what an unfinished save has left; its copies first, which are known by what they are of."""
        written = self._list(name)
        with contextlib.suppress(BlockingIOError):
            self._check_writer()
            self._remove_copies(step, {*written, ITERATOR_FILE, STEP_FILE})
        self._delete(written.values())

    def _delete_step(self, step: int, found: Mapping[str, Any]) -> None:
        note = {name: blob.generation for name, blob in found.items()}
        self._put(f"{TRASH}/{step}", json.dumps(note).encode())
        self._known.discard(step)
        self._delete_noted(step, note)

    def _delete_noted(self, step: int, note: Mapping[str, int]) -> None:
        # What Orbax goes by, then what we go by, and only then what they stand for.
        for name in (COMMIT_FILE, MANIFEST_FILE):
            if name in note:
                self._delete_as_noted(f"{step}/{name}", note[name])
        rest = [name for name in note if name not in (COMMIT_FILE, MANIFEST_FILE)]
        self._in_threads(lambda name: self._delete_as_noted(f"{step}/{name}", note[name]), rest)
        self._delete([self._bucket.blob(f"{self._prefix}{TRASH}/{step}")])

    def _finish_deletions(self) -> None:
        for name in self._list(TRASH):
            note = json.loads(self._get(f"{TRASH}/{name}", MAX_MANIFEST_BYTES))
            self._check_writer()
            self._delete_noted(int(name), note)

    def _delete_as_noted(self, name: str, generation: int) -> None:
        """Deletes an object, if it is not another one of that name by now."""
        blob = self._bucket.blob(self._prefix + name)
        with (
            contextlib.suppress(FileNotFoundError, FileExistsError),
            self._telling("delete", name),
        ):
            blob.delete(if_generation_match=generation, **self._how)

    def _folders(self) -> set[str]:
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

    def _list(self, folder: str, inside: str = "") -> dict[str, Any]:
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

    def _get(self, name: str, limit: int) -> bytes:
        """An object's first bytes, no more than one behind ``limit``."""
        blob = self._bucket.blob(self._prefix + name)
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

    def _put(self, name: str, data: bytes, *, new: bool = False) -> int:
        """Puts an object and returns its generation; a ``new`` one must not be there, or be the same."""
        blob = self._bucket.blob(self._prefix + name)
        only = {"if_generation_match": 0} if new else {}
        try:
            with self._telling("write", name):
                blob.upload_from_string(data, "application/octet-stream", **only, **self._how)
        except FileExistsError:
            # Of a request that has arrived, and whose answer has not, the second try finds the first one.
            if self._get(name, len(data)) != data:
                raise
        return blob.generation or 0

    def _copy(self, blob: Any, name: str) -> None:
        """Has the store copy an object, as it was listed, to where there is none."""
        target = self._bucket.blob(self._prefix + name)
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

    def _name(self, blob: Any) -> str:
        inside: str = blob.name.removeprefix(self._prefix)
        return inside

    def _delete(self, blobs: Iterable[Any]) -> None:
        def delete(blob: Any) -> None:
            with contextlib.suppress(FileNotFoundError), self._telling("delete", self._name(blob)):
                blob.delete(**self._how)

        self._in_threads(delete, list(blobs))

    def _describe(
        self,
        blobs: Collection[Any],
        sizes: Sequence[int] | None = None,
        read: Callable[[int], None] = lambda _: None,
    ) -> list[dict[str, Any]]:
        """Digests and sizes of objects, of which no more is read than they should have."""

        def describe(blob: Any, size: int) -> dict[str, Any]:
            digest = _Digest(size)
            name = self._name(blob)
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
        return self._in_threads(lambda pair: describe(*pair), pairs)

    def _in_threads(
        self, work: Callable[[_Item], _Result], items: Collection[_Item]
    ) -> list[_Result]:
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
            where = f"{self.path}/{name}"
            if code == _NOT_FOUND:
                raise FileNotFoundError(errno.ENOENT, _NOT_THERE, where) from error
            if code == _PRECONDITION:
                raise FileExistsError(
                    errno.EEXIST, "another object has this name", where
                ) from error
            if code in _FORBIDDEN:
                text = f"to {what} it is not allowed: {error!s:.300}"
                raise PermissionError(errno.EACCES, text, where) from error
            if isinstance(error, ValueError):
                raise
            text = f"to {what} it has failed, and was tried for {self._total_s:g} s"
            cause = error.__cause__ or error
            raise StorageUnavailableError(errno.EIO, f"{text}: {cause!s:.300}", where) from error


_NOT_FOUND: Final = 404
_PRECONDITION: Final = 412
_NO_SUCH_RANGE: Final = 416
_FORBIDDEN: Final = (401, 403)
_NOT_THERE: Final = "there is no such object, or no such bucket"


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
    if (
        importlib.util.find_spec("gcsfs") is None
    ):  # for Orbax, which would say nothing of it until a save
        raise _not_installed("gcsfs")
    try:
        return storage.Client(project=None), retry.DEFAULT_RETRY
    except exceptions.DefaultCredentialsError as error:
        raise PermissionError(
            errno.EACCES, f"checkpoints in gs:// need credentials: {error}"
        ) from error


def _forget_listings() -> None:
    """Has gcsfs, by which Orbax finds files, ask for them: it would believe for ever what it saw once.

    Others write to a run too: processes that share it, and whoever had it before.
    """
    from etils.epath import backend  # type: ignore[import-untyped]  # noqa: PLC0415 (as in _client)

    found = backend.fsspec_backend.fs("gs://")
    found.dircache.use_listings_cache = False
    found.invalidate_cache()


def _not_installed(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"checkpoints in gs:// need the package {name}, which is not installed: pip install 'regrain[gcs]'",
        name=name,
    )


def _is_item(name: str) -> bool:
    return name.partition("/")[0] in ITEMS and "/" in name


def _of(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _shown(writer: Mapping[str, Any] | None) -> str:
    if not writer or "host" not in writer:
        return "which has closed them since, or is unknown"
    text = f"process {writer.get('process')} on {writer['host']}, since {writer.get('opened')}"
    return text[:200]
