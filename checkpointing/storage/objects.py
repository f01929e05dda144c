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
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from checkpointing.manifest import MAX_MANIFEST_BYTES, Manifest
from checkpointing.storage.base import (
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
    Writer,
    check_size,
    commit_bytes,
    is_step,
    iterator_bytes,
    left_over_kind,
    save_times,
    step_files,
)
from checkpointing.storage.bucket import BucketFolder

_log: Final = logging.getLogger(__name__)

_WRITER: Final = ".writer"
_ADDRESS: Final = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])((?:/[^/]+)+?)/*")
#: What stands for other characters, or for another place, to a store or to Orbax.
_PATTERN: Final = re.compile(r"[*?{}\[\]\\#;\x00-\x1f]|%[0-9a-fA-F]{2}|/\.\.?(?:/|$)")
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
                "behind the bucket, none of * ? { } [ ] \\ # ; and %20 or the like in it, and no name . or .."
            )
        self.path = f"gs://{parsed[1]}{parsed[2]}"
        self.timeout_s: float | None = timeout_s
        self._objects = BucketFolder(parsed[1], parsed[2].removeprefix("/"), timeout_s / 2)
        #: Of this writer, or of the one that a reader works with.
        self._token = ""
        #: Of the object that names this writer; 0 where this is none.
        self._generation = 0
        #: Steps that the writer knows to be there.
        self._known: set[int] = set()
        for name, value in _TENSORSTORE.items():
            os.environ.setdefault(name, value)

    def is_one_step(self) -> bool:
        """By a manifest in it; looked for where it is named as a step is, to spare others the request."""
        _, _, bucket, *names = self.path.split("/")
        if names[-1] in ITEMS:
            names.pop()
        if not names or not is_step(names[-1]):
            return False
        step = BucketFolder(bucket, "/".join(names), (self.timeout_s or 0) / 2)
        try:
            step.get(MANIFEST_FILE, 0)
        except FileNotFoundError:
            return False
        return True

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
        self._generation = self._objects.put(_WRITER, json.dumps(about).encode())
        if before:
            _log.warning(
                "%s was left open by %s, or is open there still, which then can save nothing more",
                self.path,
                _shown(before),
            )
        try:
            self._clean()
            self._known = set(self.steps())
        except BaseException:
            self.close()
            raise

    def _clean(self) -> None:
        for name in self._objects.folders():
            step, suffix, _ = name.partition(TMP_SUFFIX)
            if suffix and is_step(step):
                written = self._objects.listed(name)
                self._remove_copies(int(step), {*written, ITERATOR_FILE, STEP_FILE})
                self._objects.delete(written.values())
        self._finish_deletions()

    def close(self) -> None:
        """Takes the name of the writer away, if it is this one's still."""
        if not self._generation:
            return
        generation, self._generation = self._generation, 0
        try:
            self._objects.delete_one(_WRITER, generation)
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
        found = self._objects.matching(f"*/{{{MANIFEST_FILE},{COMMIT_FILE}}}")
        names = {name.partition("/")[0] for name in found}
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
        own = self._objects.listed(unfinished, f"{TRAIN_STATE_ITEM}/{PART_FOLDER.format(process)}/")
        found = dict(zip(own, self._objects.describe(own.values()), strict=True))
        part = [(name, own[name].generation, described) for name, described in found.items()]
        self._objects.put(f"{unfinished}/{PART_FILE.format(process)}", json.dumps(part).encode())

    def commit_step(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        """Has the store copy what is written to its final address, and puts the manifest last."""
        try:
            return self._commit(step, manifest, about)
        except (FileNotFoundError, FileExistsError):
            self._check_writer()  # which tells why, if it is another one by now
            raise

    def _commit(self, step: int, manifest: Manifest, about: dict[str, Any]) -> Manifest:
        written = self._objects.listed(self._unfinished(step))
        files = {name: blob for name, blob in written.items() if _is_item(name)}
        iterator = iterator_bytes(manifest.position)
        described = {**self._described(files, self._parts(written)), ITERATOR_FILE: _of(iterator)}
        sealed = dataclasses.replace(manifest, files=described)
        data = sealed.to_bytes()  # an error before anything is copied, if it is too large

        self._remove_copies(step, {*files, ITERATOR_FILE, STEP_FILE})
        self._objects.in_threads(
            lambda name: self._objects.copy(files[name], f"{step}/{name}"), files
        )
        self._objects.put(f"{step}/{ITERATOR_FILE}", iterator, new=True)
        self._objects.put(f"{step}/{STEP_FILE}", json.dumps(about).encode(), new=True)
        self._check_copies(step, files, iterator)
        self._check_writer()
        self._objects.put(f"{step}/{MANIFEST_FILE}", data, new=True)
        self._known.add(step)
        try:  # it is whole; what is left undone the next writer does
            self._objects.put(f"{step}/{COMMIT_FILE}", commit_bytes(step))
            self._objects.delete(written.values())
        except OSError as error:
            _log.warning(
                "%s: step %d is whole, but what it was copied from is left: %s",
                self.path,
                step,
                error,
            )
        return sealed

    def _described(
        self, files: Mapping[str, Any], parts: Mapping[tuple[str, int], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Digests and sizes of files: those that a part tells of as they are now, and those of the rest."""
        known = {name: parts.get((name, blob.generation)) for name, blob in files.items()}
        rest = [name for name, described in known.items() if described is None]
        found = dict(zip(rest, self._objects.describe([files[name] for name in rest]), strict=True))
        return {name: described or found[name] for name, described in known.items()}

    def clean_step(self, step: int) -> None:
        """Also what it has left at the final address, if nobody else has come to write there."""
        try:
            written = self._objects.listed(self._unfinished(step))
            with contextlib.suppress(BlockingIOError):  # then that is no longer ours to remove
                self._remove_copies(step, {*written, ITERATOR_FILE, STEP_FILE})
            self._objects.delete(written.values())
        except OSError as error:
            _log.warning("%s: what step %d has left is there still: %s", self.path, step, error)

    def sizes(self, step: int) -> dict[str, int | None]:
        """By a listing."""
        return {
            name: int(blob.size)
            for name, blob in self._objects.listed(str(step)).items()
            if _is_item(name) and name != MANIFEST_FILE
        }

    def read(self, step: int, name: str, limit: int) -> bytes:
        """No more than a byte behind the limit is asked for."""
        data = self._objects.get(f"{step}/{name}", limit)
        if len(data) > limit:
            raise ValueError(f"{name} is larger than {limit} bytes")
        return data

    def digests(
        self, step: int, sizes: Mapping[str, int], read: Callable[[int], None]
    ) -> dict[str, str]:
        """In one request each, whose answer the client also compares with the store's own checksum."""
        blobs = [self._objects.blob(f"{step}/{name}") for name in sizes]
        found = self._objects.describe(blobs, [*sizes.values()], read)
        for (name, size), one in zip(sizes.items(), found, strict=True):
            check_size(name, one["bytes"], size)
        return {name: one["sha256"] for name, one in zip(sizes, found, strict=True)}

    def step_files(self, step: int) -> StepFiles:
        """By a listing."""
        found = self._objects.listed(str(step))
        sizes = {name: int(blob.size) for name, blob in found.items()}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            return step_files(
                sizes, *save_times(self._objects.get(f"{step}/{STEP_FILE}", MAX_ABOUT_BYTES))
            )
        manifest = found.get(MANIFEST_FILE)
        return step_files(sizes, manifest.updated.timestamp() if manifest else None, None)

    def left_overs(self) -> list[LeftOver]:
        """By a listing of each."""
        found = []
        for name in sorted(self._objects.folders()):
            kind = left_over_kind(name)
            if kind == "deleted":  # there are but notes; what they are of is where it was
                steps = {
                    step: self._objects.listed(step)
                    for step in filter(is_step, self._objects.listed(name))
                }
                size = sum(int(blob.size) for blobs in steps.values() for blob in blobs.values())
                found.append(LeftOver(name, kind, size))
            elif kind is not None:
                size = sum(int(blob.size) for blob in self._objects.listed(name).values())
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
        taken = self._objects.folders()
        numbers = (f"{step}{ASIDE_SUFFIX.format(number)}" for number in range(1, MOST_ASIDE))
        name = next((name for name in numbers if name not in taken), None)
        if name is None:
            raise FileExistsError(
                f"{self.path} holds {MOST_ASIDE:,} copies of step {step} that were set aside"
            )
        files = self._objects.listed(str(step))
        self._check_writer()  # as in _remove_copies
        self._objects.in_threads(
            lambda inner: self._objects.copy(files[inner], f"{name}/{inner}"), files
        )
        self._delete_step(step, files)
        return name

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Notes what there is to delete first, so that the next writer can finish it."""
        found = {step: self._objects.listed(str(step)) for step in steps}
        if steps:
            self._check_writer()  # as in _remove_copies
        for step, files in found.items():
            self._delete_step(step, files)
        self._finish_deletions()

    def _unfinished(self, step: int) -> str:
        return f"{step}{TMP_SUFFIX}-{self._token[:_TOKEN_CHARACTERS]}"

    def _writer(self) -> dict[str, Any] | None:
        """What the writer's object says; None without one."""
        try:
            found = json.loads(self._objects.get(_WRITER, _MAX_WRITER_BYTES))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
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
                    self._objects.get(self._objects.name(blob), MAX_MANIFEST_BYTES)
                ):
                    taken[inner, generation] = described
        return taken

    def _check_copies(self, step: int, files: Mapping[str, Any], iterator: bytes) -> None:
        """Raises FileExistsError if there is anything else at a step's final address than what was put."""
        expected = {name: (blob.size, blob.crc32c) for name, blob in files.items()}
        found = {
            name: (blob.size, blob.crc32c)
            for name, blob in self._objects.listed(str(step)).items()
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
        """Removes what was left at a step's final address by a commit that did not come to its end.

        Raises:
          BlockingIOError: another writer has taken this run over.
        """
        found = self._objects.listed(str(step))
        self._check_writer()  # only now: so nothing of what was found is of a writer after this one
        if MANIFEST_FILE not in found:
            self._objects.delete(blob for name, blob in found.items() if name in names)
        elif COMMIT_FILE not in found:  # it lacks but Orbax's own mark
            self._objects.put(f"{step}/{COMMIT_FILE}", commit_bytes(step))

    def _delete_step(self, step: int, found: Mapping[str, Any]) -> None:
        note = {name: blob.generation for name, blob in found.items()}
        self._objects.put(f"{TRASH}/{step}", json.dumps(note).encode())
        self._known.discard(step)
        self._delete_noted(step, note)

    def _delete_noted(self, step: int, note: Mapping[str, int]) -> None:
        # What Orbax goes by, then what we go by, and only then what they stand for.
        for name in (COMMIT_FILE, MANIFEST_FILE):
            if name in note:
                self._objects.delete_one(f"{step}/{name}", note[name])
        rest = [name for name in note if name not in (COMMIT_FILE, MANIFEST_FILE)]
        self._objects.in_threads(
            lambda name: self._objects.delete_one(f"{step}/{name}", note[name]), rest
        )
        self._objects.delete([self._objects.blob(f"{TRASH}/{step}")])

    def _finish_deletions(self) -> None:
        for name in filter(is_step, self._objects.listed(TRASH)):
            note = _note(self._objects.get(f"{TRASH}/{name}", MAX_MANIFEST_BYTES))
            self._check_writer()
            if note is None:
                _log.warning("%s/%s/%s is no note of ours, and was left", self.path, TRASH, name)
            else:
                self._delete_noted(int(name), note)


def _forget_listings() -> None:
    """Has gcsfs, by which Orbax finds files, ask for them: it would believe for ever what it saw once.

    Others write to a run too: processes that share it, and whoever had it before.
    """
    from etils.epath import backend  # type: ignore[import-untyped]  # noqa: PLC0415 (it asks for gcsfs when it is called)

    found = backend.fsspec_backend.fs("gs://")
    found.dircache.use_listings_cache = False
    found.invalidate_cache()


def _is_item(name: str) -> bool:
    return name.partition("/")[0] in ITEMS and "/" in name


def _note(data: bytes) -> dict[str, int] | None:
    """Which objects are to be deleted: generations by name; None where it does not tell."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(found, dict) and all(type(one) is int for one in found.values())
    return found if ours else None


def _of(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _shown(writer: Mapping[str, Any] | None) -> str:
    if not writer or "host" not in writer:
        return "which has closed them since, or is unknown"
    text = f"process {writer.get('process')} on {writer['host']}, since {writer.get('opened')}"
    return text[:200]
