"""Files and folders that are there when they are complete, and take the place of nothing."""

import errno
import os
import pathlib
from typing import Any

import pytest

from loader.new_paths import new_file, new_folder


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    with new_file(tmp_path / "a") as partial:
        partial.write_text("new")
        assert names(tmp_path) == [partial.name]
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "new"


def test_a_folder_has_its_name_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    with new_folder(tmp_path / "a") as partial:
        (partial / "b").write_text("new")
        assert names(tmp_path) == [partial.name]
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a/b").read_text() == "new"


def test_nothing_is_left_of_what_failed(tmp_path: pathlib.Path) -> None:
    def fail(new: Any) -> None:
        with new(tmp_path / "a") as partial:
            (partial if new is new_file else partial / "b").write_text("half")
            raise KeyError

    for new in (new_file, new_folder):
        with pytest.raises(KeyError):
            fail(new)
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["a file", "a folder", "a link to nothing"])
def test_what_is_there_stays(kind: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "a"
    if kind == "a file":
        target.write_text("old")
    elif kind == "a folder":
        target.mkdir()
    else:
        target.symlink_to("nothing")
    for new in (new_file, new_folder):
        with pytest.raises(FileExistsError, match="is there already; name another"), new(target):
            raise AssertionError("not reached")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("has_links", [True, False])
def test_what_was_made_meanwhile_stays(
    has_links: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not has_links:
        monkeypatch.setattr(os, "link", link)

    def write() -> None:
        with new_file(tmp_path / "a") as partial:
            partial.write_text("new")
            (tmp_path / "a").write_text("of another process")

    with pytest.raises(FileExistsError, match="is there already; name another file"):
        write()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "of another process"


def test_a_file_is_written_where_there_are_no_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    with new_file(tmp_path / "a") as partial:
        partial.write_text("new")
    assert names(tmp_path) == ["a"]


def test_another_error_is_not_hidden(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "a"):
        pass  # nothing was written
    assert names(tmp_path) == []
