"""The ledger: every charge is on the device before its answer is released. And their register.

docs/how-to/keep-a-ledger.md states the promises and their limits; docs/reference/file-formats.md
shows the file. It is a SQLite database in WAL mode with one table of records, each with a hash over
all before it, one row of totals, and the tokens that a server's keys have used. Record 0 holds the
settings, every other one the events of one charge. A charge takes three steps:

1. It is added to a copy of the totals. If it cannot be charged, this raises before a write.
2. One transaction adds its record and replaces the totals. Both are then on the device.
3. The call returns, and the answer may be released.

If the process is killed during step 2, the charge may be missing, but nothing was released. If it
is killed later, the charge is counted, released or not.

The register of all ledgers of one ensemble, `ledgers.json`, lies in the private folder next to the
ensemble, `<folder>.private`. A ledger is entered before its first charge, with the ε that it
promises, so that it counts in full if it is lost. docs/concepts/guarantees.md says how they add up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerError,
    LedgerMismatchError,
    LedgerWriteError,
)
from adapmixed.files import remove_leftovers, sole_writer, temporary_folder, write_file
from adapmixed.privacy.events import READERS, Event, canonical, exactly, read_event, to_json
from adapmixed.privacy.guarantee import Guarantee, guarantee_of, sum_of

if TYPE_CHECKING:
    from adapmixed.privacy.accountant import Account

FORMAT_VERSION = 13
"""Version of the format. It rises when the content or its meaning changes. Older files are not
read."""

APPLICATION_ID = 0x4144504D  # "ADPM", in the header of the file
BUSY_SECONDS = 5.0
WRITING = threading.Lock()
"""Held by the thread that writes. Where two connections meet, SQLite polls, and one may lose."""
os.register_at_fork(
    before=WRITING.acquire, after_in_parent=WRITING.release, after_in_child=WRITING.release
)

SCHEMA = {
    "record": "CREATE TABLE record (\n"
    "  sequence INTEGER PRIMARY KEY,\n"
    "  text TEXT NOT NULL,\n"
    "  hash BLOB NOT NULL\n"
    ")",
    "used": "CREATE TABLE used (\n"
    "  name TEXT PRIMARY KEY,\n"
    "  tokens INTEGER NOT NULL\n"
    ") WITHOUT ROWID",
    "totals": "CREATE TABLE totals (\n"
    "  one INTEGER PRIMARY KEY CHECK (one = 1),\n"
    "  text TEXT NOT NULL,\n"
    "  hash BLOB NOT NULL\n"
    ")",
}
for _table, _act in (("record", "UPDATE"), ("record", "DELETE"), ("totals", "DELETE")):
    SCHEMA[f"no_{_act.lower()}_of_{_table}"] = (
        f"CREATE TRIGGER no_{_act.lower()}_of_{_table} BEFORE {_act} ON {_table} "
        "BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"
    )

_DURABLE = {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1}


class Record(NamedTuple):
    """The settings, or the events of one charge or of the binding, as stored.

    Attributes:
        sequence: number of the record, from 0.
        text: JSON text.
        hash: SHA-256 over the previous hash, the number and the text, 32 bytes.
    """

    sequence: int
    text: str
    hash: bytes

    @staticmethod
    def after(before: Record | None, written: str) -> Record:
        """Return the record of a JSON text that follows another record, or is the first."""
        sequence, previous = (0, b"") if before is None else (before.sequence + 1, before.hash)
        digest = _hash("record", previous, b"%d" % sequence, written.encode())
        return Record(sequence, written, digest)

    def check_after(self, before: Record | None) -> None:
        """Raise LedgerCorruptError unless this is the record after another one, or the first."""
        due = Record.after(before, self.text)
        if self.sequence != due.sequence:
            raise LedgerCorruptError(f"record {due.sequence} is missing")
        if self.hash != due.hash:
            raise LedgerCorruptError(f"record {due.sequence} was altered: its hash does not fit")

    def events(self) -> list[Event]:
        """Return the events of a record after the first.

        Raises:
            ValueError, TypeError: a part is missing or unknown, or a field has another type.
        """
        return [read_event(event) for event in exactly(list, json.loads(self.text))]


@dataclass(frozen=True)
class Reading:
    """An intact ledger as it was at one moment.

    Attributes:
        path: path of the database.
        first: record 0.
        last: the last record.
        account: settings and totals. Private.
    """

    path: str
    first: Record
    last: Record
    account: Account

    def records(self) -> Iterator[Record]:
        """Yield all records in order, up to `last`, from the file. They are private.

        Raises:
            LedgerCorruptError: one was altered, or the file is another one by now.
            LedgerWriteError: the ledger cannot be read.
        """
        query, record = "SELECT * FROM record WHERE sequence <= ? ORDER BY sequence", None
        with looked_at(self.path) as connection:
            for record in _chain(connection.execute(query, (self.last.sequence,))):
                yield record
        if record != self.last:
            raise LedgerCorruptError(f"{self.path} was replaced while it was read")

    @property
    def identity(self) -> str:
        """32 random hex digits, which no other ledger has."""
        return str(json.loads(self.first.text)["identity"])

    @property
    def charges(self) -> int:
        """Number of records after the first one."""
        return self.last.sequence

    @property
    def digest(self) -> str:
        """Hash of the last record, 64 hex digits.

        Note it elsewhere, to notice later if an older copy of the ledger was put back.
        """
        return self.last.hash.hex()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all charges."""
        return guarantee_of(self.account)

    @cached_property
    def totals(self) -> tuple[str, bytes]:
        """The row of totals: their JSON text, and a hash that ties it to the records."""
        text = canonical(to_json(self.account))
        return text, _hash("totals", self.first.hash, self.last.hash, text.encode())


class Ledger:
    """The one writer of a ledger. Not thread safe.

    After a failed charge it can charge no more. Open the ledger again to learn what is on the
    device.

    Attributes:
        path: path of the database.
        reading: the ledger as it is now.

    Args:
        path: path of the database on a local file system. A lock file lies next to it meanwhile.
        empty: an account without charges, whose settings the ledger must have.
        create: if False, raise LedgerWriteError if there is no ledger.

    Raises:
        LedgerMismatchError: the ledger was created with other settings.
        LedgerBusyError: the ledger has another writer.
        LedgerCorruptError: the ledger was altered, or it has another format.
        LedgerWriteError: the ledger cannot be read or written.
        ValueError: the file system has no locks.
    """

    def __init__(
        self, path: str | os.PathLike[str], empty: Account, *, create: bool = True
    ) -> None:
        self.path = place = os.path.realpath(path)
        self._unusable: str | None = None
        with ExitStack() as opened:
            try:
                opened.enter_context(sole_writer(place))
            except BlockingIOError:
                raise LedgerBusyError(
                    f"{place} is held by another writer: one process at a time may charge a ledger"
                ) from None
            except OSError as error:
                raise LedgerWriteError(f"{place} could not be opened: {error}") from error
            with translated(place):
                if create and not os.path.lexists(place):
                    _create(place, empty)
                if not os.path.isfile(place) or os.stat(place).st_nlink > 1:
                    raise LedgerWriteError(f"{place} must be an existing file with one name alone")
                self._connection = opened.enter_context(closing(connected(place)))
                self._opened = os.stat(place)
                self.reading = _end(self._connection, place)
            for name, kept in self.reading.account.settings.items():
                if (value := empty.settings[name]) != kept:
                    raise LedgerMismatchError(
                        f"{name} must be what the ledger was created with, {kept!r}, got {value!r}"
                    )
            self._files = opened.pop_all()

    def append(self, events: Sequence[Event], account: Account) -> None:
        """Add one record, which is durable when this returns.

        After an error, nothing may be released, and this object can charge no more. The ledger may
        hold the charge when it is opened again.

        Args:
            events: what was charged.
            account: the account with them.

        Raises:
            LedgerClosedError: the ledger is closed, a charge failed before, the file was replaced,
                or another writer charged it.
            LedgerBusyError: another program has locked the file.
            LedgerWriteError: the file cannot be written.
        """
        if self._unusable is not None:
            raise LedgerClosedError(f"{self.path} must be opened again: {self._unusable}")
        connection, before = self._connection, self.reading
        text = canonical(to_json(tuple(events)))
        reading = replace(before, last=Record.after(before.last, text), account=account)
        try:
            self._check_in_place()
            with WRITING, translated(self.path):
                connection.execute("BEGIN IMMEDIATE")
                (stored,) = connection.execute("SELECT hash FROM totals").fetchone()
                if stored != before.totals[1]:
                    raise LedgerClosedError(f"{self.path} was charged by another writer")
                connection.execute("INSERT INTO record VALUES (?, ?, ?)", reading.last)
                connection.execute("UPDATE totals SET text = ?, hash = ?", reading.totals)
                connection.execute("COMMIT")
            self.reading = reading
        except BaseException as error:
            self._unusable = f"a charge failed ({error or type(error).__name__})"
            with suppress(sqlite3.Error):
                connection.rollback()
            raise

    def _check_in_place(self) -> None:
        """Raise LedgerClosedError if the path no longer names the opened database."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self.path), self._opened):
                return
        raise LedgerClosedError(f"{self.path} was removed or replaced while it was open")

    def close(self, *, empty: bool = True) -> None:
        """Close the files for another writer; unless `empty`, remove a ledger without charges."""
        self._connection.close()
        if not empty and self._unusable is None and self.reading.account.empty:
            with suppress(LedgerClosedError):  # another file has its path
                self._check_in_place()
                for suffix in ("", "-wal", "-shm"):  # a reader may keep the last two
                    Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._files.close()
        self._unusable = self._unusable or "it was closed"


def read_ledger(path: str | os.PathLike[str], *, whole: bool = True) -> Reading:
    """Read and check every record of a ledger, also while a writer has it open.

    Args:
        path: path of the database.
        whole: if False, check the last two records and the totals alone, as an opening does.

    Returns:
        The ledger's records, guarantee and digest at this moment. They are private.

    Raises:
        LedgerCorruptError: the ledger was altered, or it has another format.
        LedgerWriteError: the ledger cannot be read.
    """
    place = os.path.realpath(path)
    with looked_at(place) as connection:
        (damage,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise LedgerCorruptError(f"{place} is damaged: {damage}")
        reading = _end(connection, place)
        if whole:
            account = replace(reading.account, counts={}, total=None)
            for record in _chain(connection.execute("SELECT * FROM record ORDER BY sequence")):
                account = account.added(record.events()) if record.sequence else account
            if replace(reading, account=account).totals != reading.totals:
                raise LedgerCorruptError(f"{place}: the totals are not what the records give")
    return reading


@contextmanager
def looked_at(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Open one state of a ledger for reading, also while a writer has it open.

    SQLite leaves its log and index next to a closed ledger. The log is empty, and the next writer
    removes both.

    Args:
        path: path of the database.

    Raises:
        LedgerCorruptError: the ledger was altered, or it has another format.
        LedgerWriteError: the ledger cannot be read.
    """
    place = os.path.realpath(path)
    if not os.path.isfile(place):
        raise LedgerWriteError(f"{place} must be an existing file")
    with translated(place), closing(connected(place, "ro")) as connection:
        yield connection


def _end(connection: sqlite3.Connection, place: str) -> Reading:
    """Return the end of a ledger, from its first and last two records and the totals.

    Raises:
        LedgerCorruptError: the records and the totals do not fit each other.
    """
    query = "SELECT * FROM record ORDER BY sequence"
    ends = [*connection.execute(f"{query} LIMIT 1"), *connection.execute(f"{query} DESC LIMIT 2")]
    if not ends:
        raise LedgerCorruptError(f"{place}: record 0 is missing")
    first, last, *before = map(_record, ends)
    first.check_after(None)
    last.check_after(before[0] if before else None)
    rows = connection.execute("SELECT text, hash FROM totals").fetchall()
    if [tuple(map(type, row)) for row in rows] != [(str, bytes)]:
        raise LedgerCorruptError(f"{place} must have one row of totals")
    ((text, digest),) = rows
    if digest != _hash("totals", first.hash, last.hash, text.encode()):
        raise LedgerCorruptError(f"{place}: the totals do not fit the first and last record")
    account = READERS["Account"](json.loads(text))
    if account.settings != json.loads(first.text)["settings"]:
        raise LedgerCorruptError(f"{place}: the totals do not have the settings of record 0")
    return Reading(place, first, last, account)


def _chain(rows: Iterable[tuple[Any, ...]]) -> Iterator[Record]:
    """Yield the records of rows from the first one, each of which must follow the one before."""
    before: Record | None = None
    for record in map(_record, rows):
        record.check_after(before)
        yield (before := record)


def _record(row: tuple[Any, ...]) -> Record:
    if tuple(map(type, row)) != (int, str, bytes):
        raise LedgerCorruptError(f"record {row[0]!r} does not have the columns of a record")
    return Record(*row)


def _hash(kind: str, *parts: bytes) -> bytes:
    """Return SHA-256 over parts and their lengths, so that no two lists hash the same bytes."""
    digest = hashlib.sha256()
    for part in (f"adapmixed ledger {kind}".encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn errors of SQLite, of the system and of what is read into LedgerErrors."""
    try:
        yield
    except LedgerError:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # the content
        raise LedgerCorruptError(f"{path} is not an intact ledger: {error}") from error
    except sqlite3.Error as error:
        primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):  # also after ENOLCK
            raise LedgerBusyError(
                f"{path} is locked by another program, or its file system has no locks: {error}"
            ) from error
        if primary == sqlite3.SQLITE_ERROR or not isinstance(error, sqlite3.OperationalError):
            raise LedgerCorruptError(
                f"{path} is not an intact ledger: {error}; if it was one, count it as spent in full"
            ) from error
        raise LedgerWriteError(f"{path} could not be read or written: {error}") from error
    except OSError as error:
        raise LedgerWriteError(f"{path} could not be read or written: {error}") from error


def connected(path: str, mode: str = "rw") -> sqlite3.Connection:
    """Return a connection to a ledger's database. Use it within `translated`.

    Args:
        path: path of the database.
        mode: "rw" to write, with commits that wait for the device; "ro" to read one state, whatever
            a writer does meanwhile.

    Raises:
        LedgerCorruptError: it is no ledger, or has another format.
        LedgerWriteError: the file system or the database cannot be written durably.
    """
    address, busy = f"file:{quote(path)}?mode={mode}", BUSY_SECONDS
    connection = sqlite3.connect(
        address, uri=True, timeout=busy, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA cell_size_check = ON")  # more damage is seen when it is opened
        if mode != "rw":
            connection.execute("BEGIN")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            raise LedgerCorruptError(f"{path} is not the database of a ledger")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != FORMAT_VERSION:
            raise LedgerCorruptError(
                f"{path} must have format_version {FORMAT_VERSION}, got {version}: read it with "
                "the version of adapmixed that wrote it; another ledger's ε and δ add to its own"
            )
        if dict(connection.execute("SELECT name, sql FROM sqlite_master")) != SCHEMA:
            raise LedgerCorruptError(f"{path} does not have the tables of a ledger")
        if mode == "rw":
            _make_durable(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_durable(connection: sqlite3.Connection, path: str) -> None:
    """Have every commit wait for the device, and raise LedgerWriteError if that cannot be."""
    for setting, value in _DURABLE.items():
        connection.execute(f"PRAGMA {setting} = {value}").fetchone()
        if connection.execute(f"PRAGMA {setting}").fetchone() != (value,):
            raise LedgerWriteError(
                f"{path} must lie on a local file system: SQLite refuses {setting} = {value}"
            )
    # A write that is rolled back, so that a read-only file raises here.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
    connection.execute("ROLLBACK")


def _create(path: str, empty: Account) -> None:
    """Create an empty ledger, which is complete and durable before it gets its name.

    Raises:
        LedgerCorruptError: the write-ahead log of a lost database is there.
        OSError: the file cannot be written.
    """
    if os.path.exists(f"{path}-wal") and os.stat(f"{path}-wal").st_size:
        raise LedgerCorruptError(f"{path} must exist if {path}-wal holds charges, but is missing")
    written = {"format_version": FORMAT_VERSION, "identity": os.urandom(16).hex()}
    first = Record.after(None, canonical(written | {"settings": empty.settings}))
    totals = Reading(path, first, first, empty).totals
    place = Path(path)
    remove_leftovers(place.parent, place.name)
    folder = temporary_folder(place)
    fresh = folder / "ledger.db"
    try:
        with translated(path), closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
            for statement in SCHEMA.values():
                connection.execute(statement)
            connection.execute("INSERT INTO record VALUES (?, ?, ?)", first)
            connection.execute("INSERT INTO totals VALUES (1, ?, ?)", totals)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
            _make_durable(connection, path)  # writes go to a log only from here on
        write_file(place, fresh.read_bytes())
    finally:
        shutil.rmtree(folder)


# The register

FILE_NAME, REGISTER_VERSION = "ledgers.json", 2
_LOG = logging.getLogger(__name__)
_CONDITION = (
    "This is fixed only if the number of ledgers, and the ε, δ and plan (settings and number of "
    "queries) of each, were chosen without the answers."
)


class Entry(NamedTuple):
    """A ledger as it was promised; ε is None without a limit, or without a private answer."""

    path: str
    adjacency: str
    epsilon: float | None
    delta: float


def register_of(ensemble: str | os.PathLike[str]) -> Path:
    """Return the path of an ensemble's register."""
    folder = Path(os.path.realpath(ensemble))
    return folder.with_name(f"{folder.name}.private") / FILE_NAME


def entered(register: Path) -> dict[str, Entry]:
    """Return the entry of each ledger by its identity, in the order of their first use.

    Raises:
        ValueError: the file is not a register of this format.
        OSError: the file cannot be read. Without a file there are no ledgers.
    """
    if not register.exists():
        return {}
    try:
        written = json.loads(register.read_text(encoding="utf-8"))
        if (stored := written["format_version"]) != REGISTER_VERSION:
            words = f"format_version must be {REGISTER_VERSION}, got {stored!r}"
            raise ValueError(f"{words}: use the adapmixed that wrote it")
        return {str(identity): Entry(**entry) for identity, entry in written["ledgers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{register} must be a register of ledgers: {error}") from error


def enter(ensemble: str | os.PathLike[str], reading: Reading) -> None:
    """Enter a ledger at its path, with the charge to come, into an ensemble's register.

    The log announces a further ledger. It also says if the register cannot be written; answers
    then go on without it.
    """
    register, path, identity = register_of(ensemble), reading.path, reading.identity
    account, promised = reading.account, None
    if account.kind == "fixed":
        stated = reading.guarantee
        promised = stated.epsilon if stated.limited and stated.epsilon != math.inf else None
    entry = Entry(path, account.adjacency, promised, account.delta)
    try:
        if entered(register).get(identity) == entry:
            return
        register.parent.mkdir(mode=0o700, exist_ok=True)
        with sole_writer(register, wait=True):
            remove_leftovers(register.parent, FILE_NAME)
            ledgers = entered(register) | {identity: entry}
            listed = {key: ledger._asdict() for key, ledger in ledgers.items()}
            text = json.dumps({"format_version": REGISTER_VERSION, "ledgers": listed}, indent=1)
            write_file(register, f"{text}\n".encode())
    except (OSError, ValueError) as error:
        _LOG.warning("%s is in no register, so nothing adds its cost to others: %s", path, error)
        return
    if len(ledgers) > 1:
        words = "%s is one of %d ledgers of this ensemble's periods, whose costs add up: see '%s'"
        _LOG.warning(words, path, len(ledgers), "adapmixed ledger show --all")


class Together(NamedTuple):
    """The ledgers of one ensemble, and what they cost together so far.

    Attributes:
        readings: the ledgers that are there.
        ledgers: number of all ledgers.
        stated: all charges; "none" if a ledger has no ε that is fixed in advance. If neighbours of
            the ledgers differ, these are zero-out; if units differ or are not known, it is a shard.
        words: the sum as sentences; "" if no ledger was ever entered.
    """

    readings: list[Reading]
    ledgers: int
    stated: Guarantee
    words: str


def together(ensemble: str | os.PathLike[str], known: Reading | None = None) -> Together:
    """Read all ledgers of an ensemble, and add up their costs.

    A ledger that is lost, moved or damaged counts in full, as the register has it.

    Args:
        ensemble: the ensemble's folder.
        known: a ledger that was read already, wherever it lies.

    Raises:
        ValueError, OSError: the register cannot be read.
    """
    readings = [] if known is None else [known]
    lost, reasons = list[Guarantee](), list[str]()
    for identity, entry in entered(register_of(ensemble)).items():
        if known is not None and known.identity == identity:
            continue
        why = "lost or moved"
        try:
            reading = read_ledger(entry.path, whole=False)
            if reading.identity == identity:
                readings.append(reading)
                continue
        except LedgerError as error:
            why = "damaged" if isinstance(error, LedgerCorruptError) else why
        lost.append(Guarantee(entry.epsilon, entry.delta, "fixed", entry.adjacency))
        reasons.append(f"{entry.path} ({why})")
    stated, phrase = sum_of([r.account for r in readings], lost)
    count, full = len(readings) + len(lost), "" if stated.epsilon is None else ", counted in full"
    whose = f"All {count} ledgers" if count > 1 else "The only ledger in the register"
    words = [f"{whose} of this ensemble's periods{' together' * (count > 1)}, so far: {phrase}"]
    words += [f"Not there{full}, caveats unknown: {', '.join(reasons)}."] if lost else []
    if stated.epsilon is not None:
        words += [] if count == 1 and all(r.guarantee.limited for r in readings) else [_CONDITION]
        words += [stated.inside()] if count > 1 and stated.adjacency == "zero_out" else []
        each = [warning for r in readings for warning in r.guarantee.warnings]
        words += dict.fromkeys([*stated.warnings, *each])
    return Together(readings, count, stated, " ".join(words) if count else "")
