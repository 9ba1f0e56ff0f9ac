"""Files and folders that exist whole or not at all, whenever a process ends.

A new file is written next to its place, flushed to the device, and moved to its place in one step.
A killed process leaves at most names that begin with ".tmp-", which `remove_leftovers` removes.
The place of a file is where its path leads through links, so every link to a file stays a link.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile

_PREFIX = ".tmp-"


def write_file(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600) -> None:
    """Write or replace a file in one step.

    Args:
        path: path of the file, or a link to it, which stays.
        data: its whole content.
        mode: permissions, before the process's umask is applied. Most files depend on private data,
            so others may not read them unless the caller says so.

    Raises:
        OSError: the file cannot be written, or a link cannot be followed.
    """
    target = _place(path)
    with _written_near(target, data, mode) as temporary:
        os.replace(temporary, target)
    flush(target.parent)


def create_file(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600) -> bool:
    """Write a file unless it exists; return True in exactly one of several processes.

    Args:
        path: path of the file. None is created through a link: its file may be on a disk that is
            not there, and another user may have made the link.
        data: as in `write_file`.
        mode: as in `write_file`.

    Raises:
        FileNotFoundError: the path is a link to a missing file.
        OSError: the file cannot be written.
    """
    target = Path(path)
    with _written_near(target, data, mode) as temporary, suppress(FileExistsError):
        os.link(temporary, target)
        flush(target.parent)
        return True
    if target.is_symlink() and not target.exists():
        raise FileNotFoundError(f"{target} must not be a link to a missing file")
    return False


def temporary_folder(target: str | os.PathLike[str]) -> Path:
    """Make an empty folder next to `target`, to fill and pass to `publish_folder`.

    Only its owner can open it: sizes of files could tell how much text a shard has.
    """
    folder = _sibling(Path(target))
    folder.mkdir(mode=0o700)
    return folder


def publish_folder(temporary: Path, target: str | os.PathLike[str]) -> bool:
    """Flush a folder of files and move it to its place in one step.

    Returns:
        True if it was moved. False if another process was first; the temporary folder is then
        removed.
    """
    for file in temporary.iterdir():
        flush(file)
    flush(temporary)
    try:
        os.rename(temporary, target)
    except OSError:
        if not Path(target).is_dir():
            raise
        shutil.rmtree(temporary)
        return False
    flush(Path(target).parent)
    return True


def remove_leftovers(folder: str | os.PathLike[str], name: str) -> None:
    """Remove the temporary files that killed processes left next to `folder / name`.

    If that is a link, files that were left next to the file that it leads to are removed, too.
    """
    named = Path(folder) / name
    for place in {named, Path(os.path.realpath(named))}:
        pattern = f"{escape(_PREFIX + place.name)}-{'[0-9a-f]' * 16}"
        for path in list(place.parent.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def check_locks(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the file system of a path has locks; no file is left."""
    place = Path(path).absolute()
    with TemporaryFile(dir=next(home for home in (place, *place.parents) if home.is_dir())) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"{path} must lie on a file system with locks, such as a local disk: {error}"
            ) from error


@contextmanager
def sole_writer(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """Hold a lock that only one process can have.

    The lock is a file next to the file, which is removed at the end.

    Args:
        path: path of the file, or a link to it. All symbolic links to it have the same lock.
        wait: wait until no other process holds the lock, in place of raising.

    Raises:
        BlockingIOError: another process holds the lock.
        ValueError: the file system has no locks.
        OSError: the lock cannot be made, or a link cannot be followed.
    """
    place = _place(path)
    check_locks(place)
    lock, process = place.with_name(f".{place.name}.lock"), os.getpid()
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_at(descriptor, lock):  # its last holder has not just removed it
                break
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(f"{path} must not be written by another process") from None
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        with suppress(OSError):  # a file that stays locks nothing
            if os.getpid() == process:  # a forked child must not, as its parent holds the lock
                lock.unlink()
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place(path: str | os.PathLike[str]) -> Path:
    """Return where a file is or will be, through links.

    Raises:
        OSError: a link cannot be followed.
    """
    with suppress(FileNotFoundError):
        os.stat(path)  # raises for a loop, and for a link that the system does not let us follow
    return Path(os.path.realpath(path))


def _sibling(target: Path) -> Path:
    return target.with_name(f"{_PREFIX}{target.name}-{secrets.token_hex(8)}")


@contextmanager
def _written_near(target: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Write a file next to its place; it is gone at the end, unless it was moved."""
    temporary = _sibling(target)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:  # as on a full disk
        error.filename = error.filename or str(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)
