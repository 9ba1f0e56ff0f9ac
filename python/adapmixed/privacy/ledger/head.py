"""The head file: the number of charges and the hash of the last one, apart from the database.

It has two slots of 4096 bytes, each with its own checksum, which are written in turn. An
interrupted write spoils one slot, and the other holds the state before. A record is committed
before its slot is written, so after a crash the database holds the charge of the spoilt slot. If
the database lacks that charge, it was no crash. Writers also lock this file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import time
from dataclasses import dataclass, replace

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerWriteError,
)

SLOT = 4096
_READINGS = 3  # attempts to read a whole head without its lock
_LINE = re.compile(rb"adapmixed-ledger-head 1 (0|[1-9][0-9]{0,18}) ([0-9a-f]{64}) ([0-9a-f]{64})\n")


def head_path(path: str) -> str:
    """Return where the head file of a database lies."""
    return f"{path}-head"


@dataclass(frozen=True)
class Head:
    """The state that a head file holds.

    Attributes:
        count: number of charges.
        hash: hash of the last charge, 32 bytes; without charges that of the first link.
        torn: True if the other slot is spoilt, so that there may have been one more charge.
    """

    count: int
    hash: bytes
    torn: bool = False

    @property
    def least(self) -> int:
        """The least number of charges that the database holds, however a writer ended."""
        return self.count + self.torn


def _slot(head: Head) -> bytes:
    line = b"adapmixed-ledger-head 1 %d %s" % (head.count, head.hash.hex().encode())
    line += b" %s\n" % hashlib.sha256(line).hexdigest().encode()
    return line.ljust(SLOT, b"\0")


def _parse(slot: bytes) -> Head | None:
    line = slot.rstrip(b"\0")
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    head = Head(int(match[1]), bytes.fromhex(match[2].decode()))
    return head if _slot(head) == slot else None


def _slots(data: bytes) -> list[Head | None]:
    return [_parse(data[start : start + SLOT]) for start in (0, SLOT)]


def newest(data: bytes) -> Head | None:
    """Return the head in a file's bytes, or None if no writer can leave these bytes.

    Both slots are there from the start, so a file of another length may have lost the newer one.
    The older slot holds the state before the last charge. In a new file, both hold the same state.
    """
    if len(data) != 2 * SLOT:
        return None
    slots = _slots(data)
    last = max((one for one in slots if one is not None), key=lambda one: one.count, default=None)
    if last is None or slots[last.count % 2] != last:
        return None
    other = slots[(last.count + 1) % 2]
    if other is None:
        return replace(last, torn=True)
    follows = other.count == last.count - 1 if last.count else other == last
    return last if follows else None


def read_head(path: str) -> Head:
    """Read the head without locking it.

    Raises:
        LedgerCorruptError: the file is missing, or no writer can leave its bytes.
        LedgerWriteError: the file cannot be read.
    """
    for _ in range(_READINGS):
        try:
            with open(path, "rb") as file:
                data = file.read(2 * SLOT + 1)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise LedgerWriteError(f"{path} could not be read: {error}") from error
        head = newest(data)
        if head is not None and not head.torn:
            return head
        time.sleep(0.005)  # a writer may be at work; what stays the same is in the file
    return _whole(path, data)


def _missing(path: str) -> LedgerCorruptError:
    return LedgerCorruptError(
        f"{path} must lie next to its database, but there is no such file: either it was lost, and "
        "the loss of the last charges would go unnoticed, or the database is no ledger"
    )


def _whole(path: str, data: bytes) -> Head:
    head = newest(data)
    if head is None:
        counts = ["spoilt" if one is None else str(one.count) for one in _slots(data)]
        raise LedgerCorruptError(
            f"{path} must hold a whole head, got {len(data)} bytes with the slots "
            f"{', '.join(counts)}: the ledger is damaged and may lack charges, so count it as "
            "spent in full"
        )
    return head


class HeadFile:
    """The locked head file of one writer.

    Args:
        path: path of the head file.
        empty: if True, create an empty file if there is none. Only :meth:`create` needs this.

    Raises:
        LedgerBusyError: another writer holds it, in this process or in another one.
        LedgerCorruptError: the file is missing.
        LedgerWriteError: the file cannot be opened for writing.
    """

    def __init__(self, path: str, *, empty: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if empty else 0)
        try:
            self._file = os.open(path, flags, 0o600)
        except FileNotFoundError as error:
            if empty:
                raise LedgerWriteError(f"{path} could not be created: {error}") from error
            raise _missing(path) from None
        except OSError as error:
            raise LedgerWriteError(f"{path} could not be opened for writing: {error}") from error
        try:
            self._lock()
        except BaseException as error:
            self.close()
            if empty and isinstance(error, LedgerWriteError):
                os.unlink(path)
            raise

    @staticmethod
    def create(path: str, head: Head) -> HeadFile:
        """Create a head file, which is complete and durable before it gets its name, and lock it.

        The creator locks the file before it is renamed, so no two processes can create one. A file
        that was left half written never had the name, so nothing was charged, and it is rewritten.

        Raises:
            LedgerBusyError: another writer is creating one, or has just done so.
            LedgerWriteError: the file cannot be created.
            OSError: the file cannot be written.
        """
        made = HeadFile(f"{path}-new", empty=True)
        try:
            if os.path.lexists(path):
                os.unlink(made.path)
                raise LedgerBusyError(f"{path} was made by another writer at the same time")
            os.ftruncate(made._file, 0)
            made._write(_slot(head) * 2, 0)  # later writes need no more space
            os.rename(made.path, path)
            made.path = path
            flush_folder(path)
        except BaseException:
            made.close()
            raise
        return made

    def _lock(self) -> None:
        # flock belongs to this opening of the file, so it also keeps out a second writer in this
        # process. The system drops it when the process ends, however it ends.
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise LedgerBusyError(
                    f"{self.path} is held by another writer: one process at a time may charge a "
                    "ledger"
                ) from None
            raise LedgerWriteError(
                f"{self.path} could not be locked, and a ledger must lie on a file system with "
                f"locks, such as a local disk: {error}"
            ) from error
        self.check_in_place()

    def check_in_place(self) -> None:
        """Raise LedgerClosedError if the path no longer names the locked file."""
        check_same(self.path, os.fstat(self._file))

    def read(self) -> Head:
        """Return the head; raise LedgerCorruptError if the file holds none."""
        return _whole(self.path, self._data())

    def untouched(self) -> bool:
        """Return True if every byte is as :meth:`create` wrote it, so no charge was completed."""
        data = self._data()
        head = newest(data)
        return head is not None and head.count == 0 and data == _slot(head) * 2

    def _data(self) -> bytes:
        return os.pread(self._file, 2 * SLOT + 1, 0)

    def write(self, head: Head) -> None:
        """Write the older slot durably; raise OSError if that fails."""
        self._write(_slot(head), SLOT * (head.count % 2))

    def _write(self, data: bytes, offset: int) -> None:
        written = os.pwrite(self._file, data, offset)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes of the head were written")
        flush(self._file)

    def close(self) -> None:
        """Close the file, which also releases the lock."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


def check_same(path: str, opened: os.stat_result) -> None:
    """Raise LedgerClosedError unless `path` names the file that was opened."""
    try:
        there = os.stat(path)
    except OSError as error:
        raise LedgerClosedError(f"{path} was removed while it was open: {error}") from error
    if (there.st_dev, there.st_ino) != (opened.st_dev, opened.st_ino):
        raise LedgerClosedError(f"{path} was replaced while it was open")


def flush(file: int) -> None:
    """Wait until the file's content is on the device."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync stops at the drive's cache
    if full is not None:
        fcntl.fcntl(file, full)
    else:
        os.fdatasync(file)


def flush_folder(path: str) -> None:
    """Make the names in a file's folder durable."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
