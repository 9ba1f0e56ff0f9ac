"""Files that are replaced through links, and folders that nobody else reads before their time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import ended

from adapmixed.files import (
    create_file,
    publish_folder,
    remove_leftovers,
    sole_writer,
    temporary_folder,
    write_file,
)


@pytest.fixture
def umask() -> Iterator[None]:
    """Let files be readable by all users unless their writer says otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def linked(folder: Path) -> tuple[Path, Path]:
    """Return a file's path in a new folder, and a link to it; the file is not there yet."""
    (folder / "etc").mkdir()
    link = folder / "short.json"
    link.symlink_to("etc/keys.json")
    return folder / "etc" / "keys.json", link


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_write_through_a_link_replaces_the_file(tmp_path: Path) -> None:
    file, link = linked(tmp_path)
    second = tmp_path / "second.json"
    second.symlink_to(link)
    for number, path in enumerate((link, second, file)):
        write_file(path, b"%d" % number)
        assert link.is_symlink() and second.is_symlink() and not file.is_symlink()
        assert file.read_bytes() == b"%d" % number and mode(file) == 0o600
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "etc", "keys.json", "second.json", "short.json",
    ]  # fmt: skip


def test_a_failed_write_leaves_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_file(tmp_path / "folder", b"private")
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(descriptor, None))
    for write in (write_file, create_file):
        with pytest.raises(TypeError):
            write(tmp_path / "file", b"private")
    assert os.listdir(tmp_path) == ["folder"]


def test_no_file_is_created_through_a_link(tmp_path: Path) -> None:
    """A link that leads nowhere may be a disk that is missing, or another user's trap."""
    file, link = linked(tmp_path)
    with pytest.raises(FileNotFoundError, match="must not be a link to a missing file"):
        create_file(link, b"new")
    assert not file.exists() and os.listdir(file.parent) == []
    file.write_bytes(b"old")
    assert not create_file(link, b"new")
    assert file.read_bytes() == b"old" and link.is_symlink()


@pytest.mark.parametrize("there", [False, True])
def test_a_file_has_one_writer_under_all_its_names(tmp_path: Path, there: bool) -> None:
    file, link = linked(tmp_path)
    if there:
        file.write_bytes(b"")
    for held, other in ((file, link), (link, file)):
        words = pytest.raises(BlockingIOError, match="must not be written by another process")
        with ExitStack() as stack:
            stack.enter_context(sole_writer(held))
            assert ended(stack.close) == 0  # a forked child leaves its parent's lock
            with words, sole_writer(other):
                pass
        with sole_writer(other):
            pass
    assert os.listdir(file.parent) == ["keys.json"] * there


def test_a_lock_that_its_holder_has_just_removed_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its opening and its locking, another writer ends and a third one begins."""
    first, third, opened = ExitStack(), ExitStack(), os.open
    first.enter_context(sole_writer(tmp_path / "file"))

    def opens(path: Any, *settings: Any) -> int:
        descriptor = opened(path, *settings)
        if Path(path).name == ".file.lock":
            monkeypatch.undo()
            first.close()
            third.enter_context(sole_writer(tmp_path / "file"))
        return descriptor

    monkeypatch.setattr(os, "open", opens)
    with third, pytest.raises(BlockingIOError), sole_writer(tmp_path / "file"):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a", "[a]*?.json"])
def test_only_a_files_own_leftovers_are_removed(tmp_path: Path, name: str) -> None:
    short = temporary_folder(tmp_path / name)
    longer = temporary_folder(tmp_path / f"{name}-b")
    remove_leftovers(tmp_path, name)
    assert not short.exists() and longer.exists()
    remove_leftovers(tmp_path / "missing", name)


@pytest.mark.usefixtures("umask")
def test_a_published_folder_is_closed_to_others(tmp_path: Path) -> None:
    target = tmp_path / "member"
    folder = temporary_folder(target)
    assert mode(folder) == 0o700
    (folder / "file").write_bytes(b"x")
    late = temporary_folder(target)
    assert publish_folder(folder, target) and not publish_folder(late, target)
    assert mode(target) == 0o700 and os.listdir(tmp_path) == ["member"]
