"""Files and folders that are there when they are complete, and take the place of nothing."""

import errno
import os
import pathlib
from typing import Any

import pytest

from loader.sources.new_paths import new_file, new_folder


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


@pytest.mark.parametrize("kind", ["a file", "an empty folder", "a folder"])
@pytest.mark.parametrize("late", [True, False])
def test_no_folder_takes_the_place_of_what_was_made_meanwhile(
    kind: str, late: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a"

    def make() -> None:
        if kind == "a file":
            target.write_text("of another process")
            return
        target.mkdir()
        if kind == "a folder":
            (target / "b").write_text("of another process")

    def write() -> None:
        with new_folder(target) as partial:
            (partial / "b").write_text("new")
            if not late:
                make()

    rename = pathlib.Path.rename

    def make_and_rename(self: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
        make()
        return rename(self, to)

    if late:  # at the last instant
        monkeypatch.setattr(pathlib.Path, "rename", make_and_rename)
    if late and kind == "an empty folder":
        write()
        assert (target / "b").read_text() == "new"
    else:
        with pytest.raises(FileExistsError, match="is there already; name another folder"):
            write()
        if kind != "an empty folder":
            file = target if kind == "a file" else target / "b"
            assert file.read_text() == "of another process"
    assert names(tmp_path) == ["a"]


def test_a_file_is_written_where_there_are_no_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    with new_file(tmp_path / "a") as partial:
        partial.write_text("new")
    assert names(tmp_path) == ["a"]


def test_another_error_is_not_hidden(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "a"):
        pass  # nothing was written

    def rename(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(pathlib.Path, "rename", rename)
    with pytest.raises(PermissionError), new_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == []
