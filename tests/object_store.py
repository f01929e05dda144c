"""A store for ``gs://`` on this machine, for tests: it counts requests, and fails or falls silent on demand.

It is gcp-storage-emulator with what that lacks and the clients rely on: preconditions on generations, and
the generation of what is downloaded.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus, server
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "a-bucket"
LOST = -1


@dataclasses.dataclass(frozen=True)
class Request:
    """A request as it came in.

    Attributes:
      kind: "put", "get", "list", "copy", "delete", "look" (at what is known of an object) or "bucket".
      name: of the object, or the prefix of a list.
      by: "client" (this project's), "tensorstore" or "gcsfs".
      sent: bytes that were sent with it.
    """

    kind: str
    name: str
    by: str
    sent: int


class PreconditionError(Exception):
    """The object is of another generation than the request demands."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


class Store:
    """What is in the store, and what it was asked for.

    Attributes:
      url: for the clients.
      requests: all so far, with what was answered: status and bytes.
      fails: given a request, the status to fail with, if any; `LOST` for an answer that is lost on its way.
      silent: while set, nothing is answered.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[Request, int, int]] = []
        self.fails: Callable[[Request], int | None] = lambda _: None
        self.silent = threading.Event()
        self.faults: list[BaseException | None] = []
        self.lock = threading.Lock()
        self.storage = _Conditional(use_memory_fs=True)
        kept = {"retentionDurationSeconds": "0"}  # nothing of what is deleted
        about = {"name": BUCKET, "kind": "storage#bucket", "softDeletePolicy": kept}
        self.storage.create_bucket(BUCKET, about)

    def names(self, prefix: str = "") -> list[str]:
        """Names of all objects that begin with it, without it."""
        with self.lock:
            names = sorted(self.storage.objects.get(BUCKET, {}))
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def read(self, name: str) -> bytes:
        with self.lock:
            data: bytes = Storage.get_file(self.storage, BUCKET, name)
            return data

    def write(self, name: str, data: bytes) -> None:
        """Puts what no client has put: an object of another generation."""
        from gcp_storage_emulator.handlers.objects import _checksums, _make_object_resource

        about = _make_object_resource("", BUCKET, name, "text/plain", str(len(data)))
        with self.lock:
            Storage.create_file(self.storage, BUCKET, name, data, _checksums(data, about))

    def remove(self, name: str) -> None:
        with self.lock:
            Storage.delete_file(self.storage, BUCKET, name)

    def told(self) -> Counter[str]:
        """How many requests each client has made so far, and bytes ``sent`` and ``received``."""
        told: Counter[str] = Counter()
        for request, _, received in self.requests:
            if request.kind != "bucket":
                told.update({request.by: 1, "sent": request.sent, "received": received})
        return told

    def taken(self) -> Counter[tuple[str, str]]:
        """How many requests of each kind each client has made since the last call."""
        # The client asks once for the bucket, in the background, for traces that nobody takes.
        counted = Counter((one.by, one.kind) for one, _, _ in self.requests if one.kind != "bucket")
        self.requests.clear()
        return counted


class _Conditional(Storage):  # type: ignore[misc]  # it has no types
    """A storage that minds the generation that a request demands."""

    def __init__(self, **settings: Any) -> None:
        self.asked = threading.local()
        super().__init__(**settings)

    def _write_config_to_file(self) -> None:
        """Nobody else reads what is in memory."""

    def get_file_obj(self, bucket: str, name: str) -> Any:
        found = super().get_file_obj(bucket, name)
        of_source = getattr(self.asked, "source", None) == name
        self._check("ifSourceGenerationMatch" if of_source else "ifGenerationMatch", found)
        wanted = self._asked("sourceGeneration" if of_source else "generation")
        if wanted not in (None, found["generation"]):
            raise NotFound
        if self._asked("ifGenerationNotMatch") == found["generation"]:
            raise PreconditionError(HTTPStatus.NOT_MODIFIED)
        self.asked.generation = found["generation"]
        return found

    def create_file(self, bucket: str, name: str, content: Any, about: Any, *rest: Any) -> None:
        self._check("ifGenerationMatch", self.objects.get(bucket, {}).get(name))
        super().create_file(bucket, name, content, about, *rest)

    def delete_file(self, bucket: str, name: str) -> None:
        self._check("ifGenerationMatch", self.objects.get(bucket, {}).get(name))
        super().delete_file(bucket, name)

    def _asked(self, name: str) -> str | None:
        found: list[str] | None = getattr(self.asked, "query", {}).get(name)
        return found[0] if found else None

    def _check(self, name: str, found: Any) -> None:
        wanted = self._asked(name)
        if wanted not in (None, found["generation"] if found else "0"):
            raise PreconditionError(HTTPStatus.PRECONDITION_FAILED)


class _Handler(RequestHandler):  # type: ignore[misc]  # it has no types
    rfile: Any
    wfile: Any

    def __init__(self, store: Store, *arguments: Any) -> None:
        self.store = store
        super().__init__(store.storage, *arguments)

    def _answer(self, method: Callable[[], None]) -> None:
        store, asked = self.store, self.storage.asked
        split = urlsplit(self.path)
        files = self.rfile, self.wfile
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.rfile = io.BytesIO(body)
        asked.query, asked.generation, asked.source = parse_qs(split.query), None, None
        request = self._request(unquote(split.path), body)
        self._status, self._length = 0, 0
        while store.silent.is_set():
            time.sleep(0.01)
        status = store.fails(request)
        answer = self.wfile = io.BytesIO()
        try:
            with store.lock:
                self._do(method, request, None if status == LOST else status)
        finally:
            self.rfile, self.wfile = files
        # Whoever has the answer finds the request counted.
        if status != LOST:
            self.wfile.write(answer.getvalue())

    def _do(self, method: Callable[[], None], request: Request, status: int | None) -> None:
        try:
            if status:
                self._end(HTTPStatus(status))
            else:
                if request.kind == "copy":
                    self.storage.asked.source = request.name
                method()
        except PreconditionError as error:
            self._end(error.status)
        self.store.requests.append((request, self._status, self._length))

    def _request(self, path: str, body: bytes) -> Request:
        agent = self.headers.get("User-Agent", "")
        by = "gcsfs" if "gcsfs" in agent else "tensorstore" if "tensorstore" in agent else "client"
        query = self.storage.asked.query
        sent = len(body)
        copied = re.search(r"/b/[^/]+/o/(.+)/(?:rewriteTo|copyTo)/b/", path)
        found = re.search(r"/b/[^/]+/o/(.+)$", path)
        name = found[1] if found else ""
        if copied:
            return Request("copy", copied[1], by, sent)
        if self.command == "DELETE":
            return Request("delete", name, by, sent)
        if self.command in ("POST", "PUT"):
            inside = re.search(rb'"name": "([^"]*)"', body)  # of a request in several parts
            names = query.get("name") or [inside[1].decode() if inside else ""]
            return Request("put", names[0], by, sent)
        if path.endswith("/o"):
            return Request("list", query.get("prefix", query.get("matchGlob", [""]))[0], by, sent)
        media = "alt" in query
        return Request("get" if media else "look" if found else "bucket", name, by, sent)

    def _end(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:  # noqa: N802 (what the base class looks for)
        self._answer(super().do_GET)

    def do_POST(self) -> None:  # noqa: N802 (what the base class looks for)
        self._answer(super().do_POST)

    def do_PUT(self) -> None:  # noqa: N802 (what the base class looks for)
        self._answer(super().do_PUT)

    def do_DELETE(self) -> None:  # noqa: N802 (what the base class looks for)
        self._answer(super().do_DELETE)

    def send_response(self, code: int, message: str | None = None) -> None:
        self._status = int(code)
        super().send_response(code, message)

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length":
            self._length = int(value)
        super().send_header(keyword, value)

    def end_headers(self) -> None:
        if self.storage.asked.generation:
            self.send_header("x-goog-generation", self.storage.asked.generation)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Not to the screen."""


class _Server(server.ThreadingHTTPServer):
    daemon_threads = True
    store: Store
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """A client that was killed is no error of the store; all else is told at the end."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | ValueError):  # reading from what is closed
            self.store.faults.append(error)


def environment(store: Store) -> dict[str, str]:
    """What the clients have to be told, in this process or another one."""
    return {
        "STORAGE_EMULATOR_HOST": store.url,
        "TENSORSTORE_GCS_HTTP_URL": store.url,
        # Else TensorStore looks for credentials, on the network too.
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        # Else gcsfs asks Google, over a protocol that the store does not speak, of what kind the bucket is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
    }


@functools.cache
def _started() -> Store:
    """One for as long as this process lives: gcsfs never looks at the address again."""
    store = Store()
    httpd = _Server(("127.0.0.1", 0), functools.partial(_Handler, store))
    httpd.store = store
    store.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    threading.Thread(target=httpd.serve_forever, name="store", daemon=True).start()
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    logging.getLogger("api").setLevel(logging.CRITICAL)
    return store


@contextlib.contextmanager
def running_store() -> Iterator[Store]:
    """An empty store that the clients of this process, and of those that it starts, are told of."""
    store = _started()
    for name in store.names():
        store.remove(name)
    store.requests.clear()
    try:
        with mock.patch.dict(os.environ, environment(store)):
            yield store
    finally:
        store.fails = lambda _: None
        store.silent.clear()
    assert not store.faults, store.faults
