"""Files and folders that exist whole or not at all, whenever a process ends.

A new file is written next to its place, flushed to the device, and moved to its place in one step.
A killed process leaves at most names that begin with ".tmp-", which `remove_leftovers` removes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = ".tmp-"


def write_file(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600) -> None:
    """Write or replace a file in one step.

    Args:
        path: path of the file.
        data: its whole content.
        mode: permissions, before the process's umask is applied. Most files depend on private data,
            so others may not read them unless the caller says so.
    """
    target = Path(path)
    temporary = _written_beside(target, data, mode)
    try:
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink()
        raise
    flush(target.parent)


def create_file(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600) -> bool:
    """Write a file unless it exists; return True in exactly one of several processes."""
    target = Path(path)
    temporary = _written_beside(target, data, mode)
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    flush(target.parent)
    return True


def temporary_folder(target: str | os.PathLike[str]) -> Path:
    """Make an empty folder next to `target`, to fill and pass to `publish_folder`."""
    folder = _beside(Path(target))
    folder.mkdir()
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
    """Remove the temporary files that killed processes left next to `folder / name`."""
    for path in Path(folder).glob(f"{_PREFIX}{name}-*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def sole_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a lock that only one process can have.

    The lock is a file next to `path`, which is removed at the end.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    lock = Path(path).with_name(f".{Path(path).name}.lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, lock):  # its last holder has not just removed it
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
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


def _beside(target: Path) -> Path:
    return target.with_name(f"{_PREFIX}{target.name}-{secrets.token_hex(8)}")


def _written_beside(target: Path, data: bytes, mode: int) -> Path:
    temporary = _beside(target)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary
