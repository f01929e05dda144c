"""Digests of files: the same by any number of workers, kept for what stays unchanged, wrong for nothing."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader.sources import digests
from loader.sources.digest_cache import FILE_NAME, cache_path, load_digests, store_digests
from loader.sources.digests import FileDigest, digest_files, merge_digests
from loader.sources.files import FileSet

SIZES = {"a.bin": 1, "b/c.bin": 1000, "b/d.bin": 4096, "e.bin": 4097, "f.bin": 20_000}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(name.encode() * size)
    return tmp_path / "data"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read, in a list that grows."""
    found: list[str] = []
    real = digests._digest_piece

    def watched(files: FileSet, number: int, start: int) -> bytes:
        found.append(files.names[number])
        return real(files, number, start)

    monkeypatch.setattr(digests, "_digest_piece", watched)
    return found


def opened(root: Path) -> FileSet:
    return FileSet.open(root, [".bin"])


def test_a_digest_is_sha256_of_the_bytes(root: Path) -> None:
    found = digest_files(opened(root))
    assert {name: one.digest for name, one in found.items()} == {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in SIZES
    }


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_large_files_are_digested_in_pieces_by_any_number_of_threads(
    root: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(digests, "_READ_BYTES", 333)
    found = digest_files(opened(root), threads=threads)
    for name in SIZES:
        data = (root / name).read_bytes()
        pieces = [
            hashlib.sha256(data[i : i + 10_000]).digest() for i in range(0, len(data), 10_000)
        ]
        whole = pieces[0] if len(pieces) == 1 else hashlib.sha256(b"".join(pieces)).digest()
        assert found[name].digest == whole.hex()


def test_parts_of_several_workers_make_up_the_whole(root: Path) -> None:
    files = opened(root)
    parts = [digest_files(files, numbers) for numbers in ([0, 3], [4], [], [2, 1])]
    assert merge_digests(parts) == digest_files(files)
    other = {"a.bin": FileDigest(files.states[0], "0" * 64)}
    with pytest.raises(ValueError, match=r"file a\.bin was digested twice, and differently"):
        merge_digests([*parts, other])


def test_known_files_are_not_read_unless_they_have_changed(root: Path, reads: list[str]) -> None:
    known = digest_files(opened(root))
    reads.clear()
    assert digest_files(opened(root), known=known) == known
    assert reads == []
    (root / "b/d.bin").write_bytes(b"changed")
    found = digest_files(opened(root), known=known)
    assert reads == ["b/d.bin"]
    assert found["b/d.bin"].digest == hashlib.sha256(b"changed").hexdigest()


def test_an_edit_that_sets_the_time_back_is_seen(root: Path, reads: list[str]) -> None:
    path = root / "e.bin"
    known = digest_files(opened(root))
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert opened(root).states[3] == known["e.bin"].state
    reads.clear()
    assert digest_files(opened(root), known=known)["e.bin"] != known["e.bin"]
    assert reads == ["e.bin"]


def test_two_edits_at_once_are_told_apart(root: Path) -> None:
    """A file system's clock stands still for some milliseconds; a digest must not be kept meanwhile."""
    path = root / "a.bin"
    known: dict[str, FileDigest] = {}
    for text in ("0123456789" * 2)[:20]:
        path.write_bytes(text.encode())
        known = digest_files(opened(root), [0], known=known)
        assert known["a.bin"].digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_file_that_changed_since_the_set_was_opened_is_named(root: Path) -> None:
    files = opened(root)
    known = digest_files(files)
    (root / "b/c.bin").write_bytes(b"changed")
    for before in (None, known):
        with pytest.raises(ValueError, match=r"file b/c\.bin: it has changed"):
            digest_files(files, known=before)
    (root / "b/c.bin").unlink()
    with pytest.raises(OSError, match=r"file b/c\.bin cannot be read"):
        digest_files(files)


# --- what is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [True, "folder"])
def test_what_is_kept_comes_back(root: Path, where: bool | str) -> None:
    files = opened(root)
    cache = where if where is True else root.parent / "kept" / "here"
    path = cache_path(cache, files)
    assert path is not None
    assert (path == root / FILE_NAME) == (where is True)
    assert load_digests(path) == {}
    found = digest_files(files)
    store_digests(path, found)
    assert load_digests(path) == found
    assert all(one.state.is_exactly(found[name].state) for name, one in load_digests(path).items())
    assert opened(root).names == files.names
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == (
        [FILE_NAME] if where is True else []
    )


def test_other_files_stay_kept(root: Path) -> None:
    path = root / FILE_NAME
    found = digest_files(opened(root))
    store_digests(path, {name: found[name] for name in ("a.bin", "e.bin")})
    store_digests(path, {name: found[name] for name in ("e.bin", "f.bin")})
    assert sorted(load_digests(path)) == ["a.bin", "e.bin", "f.bin"]


def test_nothing_is_written_where_nothing_is_new(root: Path) -> None:
    path = root / FILE_NAME
    found = digest_files(opened(root))
    store_digests(path, found)
    before = path.stat()
    store_digests(path, found)
    assert path.stat().st_ino == before.st_ino


def signed(value: dict[str, Any], entry: Any) -> str:
    """A file with an entry of another kind, whose own digest holds."""
    files = {**value["files"], "a.bin": entry}
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({**value, "files": files, "digest": digest})


def damaged(text: str) -> Iterator[str]:
    yield text[: len(text) // 2]
    yield ""
    yield "null"
    yield "[" * 10**5
    yield text.replace('"version": 1', '"version": 2')
    yield text.replace("0", "1", 1)
    value = json.loads(text)
    yield json.dumps(value | {"files": {"a.bin": [1, 2, "x"]}})
    yield json.dumps(value | {"files": []})
    *numbers, digest = value["files"]["a.bin"]
    assert signed(value, [*numbers, digest]) == text
    for entry in (
        None,
        digest,
        numbers,
        [*numbers[:3], digest],
        [*map(str, numbers), digest],
        [True, *numbers[1:], digest],
        [*numbers, digest[:-1]],
        [*numbers, digest.upper()],
        [*numbers, 7],
        [*numbers, [digest]],
    ):
        yield signed(value, entry)


def test_a_torn_file_is_not_believed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = root / FILE_NAME
    store_digests(path, digest_files(opened(root)))
    for text in damaged(path.read_text()):
        path.write_text(text)
        with caplog.at_level(logging.WARNING):
            assert load_digests(path) == {}
        assert "keeps no digests that can be used" in caplog.text
        caplog.clear()


def test_nobody_is_waited_for_to_write_what_is_kept(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(root / FILE_NAME)
    with caplog.at_level(logging.WARNING):
        assert load_digests(root / FILE_NAME) == {}
    assert "it is no file" in caplog.text
    found = digest_files(opened(root))
    store_digests(root / FILE_NAME, found)
    assert load_digests(root / FILE_NAME) == found


@pytest.mark.parametrize("cache", [5, "", b"folder", 1.5])
def test_what_is_no_cache_is_refused_at_once(tmp_path: Path, cache: Any) -> None:
    np.save(tmp_path / "x.npy", np.arange(9, dtype=np.uint16))
    with pytest.raises(TypeError, match="cache must be True, for beside the data, a folder, or"):
        loader.NpySource(tmp_path, cache=cache)
    with pytest.raises(TypeError, match="cache must be True"):
        loader.TokenSource(tmp_path / "x.npy", window=1, cache=cache)


def test_what_cannot_be_kept_is_logged_and_no_more(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store_digests(root / "a.bin" / "kept.json", digest_files(opened(root)))
    assert "digests cannot be kept" in caplog.text


def test_there_is_no_cache_unless_it_is_asked_for(root: Path) -> None:
    settings: list[Any] = [None, False]
    assert [cache_path(cache, opened(root)) for cache in settings] == [None, None]
