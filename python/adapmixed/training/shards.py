"""Assign documents to shards, each of which trains one private model, and keep a training's files.

The unit of protection is a shard, so this assignment determines what a document can influence. A
document is assigned by a keyed hash of its *identifier* (a user, an account, a document id):

    shard(identifier) = BLAKE2b(key, identifier) mod N.

If identifiers depend neither on content nor on other documents, an edited document stays in its
shard. Adding or removing one document then moves no other. This holds for names, but not for
positions in a file (`data.corpus`). There one edit can rename all later documents, which every
guarantee of the ensemble states. A person whose records share one identifier is in one shard.

The hash is keyed so that nobody can choose identifiers that fall into a given shard. Use a secret
key of at least 16 random bytes for real data.

If every identifier has a shard of its own, an enrolment table says which one (`enrol`).

Assignment comes before text is cut into blocks. Blocks with text of two shards would make one
model depend on both.

A training has two folders:

my-ensemble/            .next/ with the members that are trained, each there whole or not at all;
                        when all are there, member-000/ ... and at last ensemble.json
my-ensemble.private/    mode 0700: shard.key, run.json (what the run was begun with, and the table
                        of enrolment: the keyed name at each place), and while it trains a lock and
                        the shards' text

Of several processes that train one ensemble the main one writes all files but the members.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from adapmixed.ensemble.members import (
    Manifest,
    read_manifest,
    read_member_record,
    read_versioned,
    write_manifest,
)
from adapmixed.ensemble.public_model import FILE_NAME
from adapmixed.files import (
    check_locks,
    create_file,
    flush,
    remove_leftovers,
    sole_writer,
    temporary_folder,
    write_file,
)
from adapmixed.limits import check_count
from adapmixed.text import Document

FORMAT_VERSION = 2
"""Of `run.json`."""
LATE_SECONDS = 60.0
"""Longest time after which a file that one machine has made is seen by another one."""
_CORPUS = {"corpus", "corpus_hmac", "places"}  # what an update may change
_MIN_KEY = 16
_MAX_KEY = 64  # BLAKE2b's limit
KEY_BYTES = 32
_LEAST_HELD_OUT = 8  # a shard with fewer tokens holds none of them out


def assign_shards(identifiers: Sequence[str], num_shards: int, *, key: bytes) -> list[int]:
    """Return the shard of each identifier.

    Args:
        identifiers: stable names; equal names give equal shards.
        num_shards: N >= 1.
        key: 16 to 64 bytes.

    Returns:
        one integer in [0, N) per identifier. The modulo bias is below N * 2**-128.

    Raises:
        ValueError: if an argument is out of range.
    """
    check_count("num_shards", num_shards)
    _check_key(key)
    return [_digest(identifier, key) % num_shards for identifier in identifiers]


def enrol(
    table: Sequence[str | None],
    identifiers: Collection[str],
    *,
    key: bytes,
    empty: Collection[int] = (),
) -> list[str | None]:
    """Return the enrolment table with a place for every identifier.

    Who has a place keeps it. Everybody else gets a free one, which only the key determines: it is
    random to whoever does not hold the key.

    Args:
        table: for each of the N places the keyed name that has it, or None.
        identifiers: the names in the corpus.
        key: 16 to 64 bytes.
        empty: places whose member is empty. If somebody is new, those of absent names are free.

    Raises:
        ValueError: if there are too few places.
    """
    _check_key(key)
    present = {keyed_name(identifier, key) for identifier in identifiers}
    names, new = list(table), sorted(present.difference(table))
    if new:
        for place in empty:
            names[place] = names[place] if names[place] in present else None
    free = [place for place, name in enumerate(names) if name is None]
    if len(new) > len(free):
        raise ValueError(
            f"num_models (--models) must leave a place for each of {len(new)} new names, got "
            f"{len(free)} free of {len(table)}: give more places, in a new output if training has "
            "begun, or let names share them (--share-shards). An update without new names frees "
            "the places of names that left"
        )
    for name in new:
        names[free.pop(_digest(name, key) % len(free))] = name
    return names


def by_table(table: Sequence[str | None], key: bytes) -> Callable[[str], int]:
    """Return the function from an identifier to its place in a table of enrolment."""
    places = {name: place for place, name in enumerate(table) if name is not None}

    def place_of(identifier: str) -> int:
        if (name := keyed_name(identifier, key)) not in places:
            raise ValueError("corpus must not change while it is read: a new name has come")
        return places[name]

    return place_of


def by_hash(num_shards: int, key: bytes) -> Callable[[str], int]:
    """Return the function from an identifier to its shard; see `assign_shards`."""
    return lambda identifier: assign_shards([identifier], num_shards, key=key)[0]


def places_line(table: Sequence[str | None], column: str) -> str:
    """Return how many places are taken, for the operator alone."""
    taken, places = sum(name is not None for name in table), len(table)
    return (
        f"Places: {taken} of {places} are taken, each by one {column}. That number is private: do "
        f"not publish it. N = {places} is a public constant."
    )


def sharing_line(names: Collection[str], num_shards: int, column: str, *, key: bytes) -> str:
    """Return what shared shards mean for one name, in numbers, for the operator alone."""
    homes = Counter(assign_shards(list(names), num_shards, key=key)).values()
    shared = sum(count for count in homes if count > 1)
    return (
        f"Shared shards: {shared} of the {len(names)} names of {column} share one with others, at "
        f"most {max(homes, default=0)} in one. These numbers are private: do not publish them. ε "
        "at δ is for a whole shard, with all of its names emptied at once. For one name among "
        "several the sentence on replace-one holds, in general 2ε at (1 + e^ε)δ: 6 at 0.00022 "
        "instead of 3 at 1e-05."
    )


def keyed_name(identifier: str, key: bytes, person: bytes = b"adapmixed.ident") -> str:
    """Return the keyed hash of an identifier, 32 hexadecimal digits."""
    return hashlib.blake2b(identifier.encode(), digest_size=16, key=key, person=person).hexdigest()


def shard_record(documents: Sequence[Document], *, key: bytes) -> dict[str, Any]:
    """Return the record of a shard for `ensemble.json`, from which overlaps are found.

    Args:
        documents: the documents of one shard.
        key: the operator's secret of 16 to 64 bytes, the same for all shards, for instance the key
            of the assignment. Without it nobody can tell whether an identifier is in the shard.

    Returns:
        "documents", their number; "sha256", the HMAC-SHA-256 of identifiers and text, which reveals
        nothing without the key; "identifiers", the sorted keyed hashes of the distinct identifiers;
        "identifier_key", a digest that distinguishes keys.

    Raises:
        ValueError: if the key has another length, or the documents are none.
    """
    _check_key(key)
    for document in documents:
        if not isinstance(document, Document):
            raise ValueError(
                "documents must be adapmixed.data.Document(identifier, text), got "
                f"{type(document).__name__}"
            )
    content = hmac.new(key, b"adapmixed shard", hashlib.sha256)
    for document in documents:
        add_document(content, document)
    names = {document.identifier for document in documents}
    return {
        "documents": len(documents),
        "sha256": content.hexdigest(),
        "identifiers": sorted(keyed_name(name, key) for name in names),
        "identifier_key": keyed_name("", key, b"adapmixed.key"),
    }


def add_document(mac: hmac.HMAC, document: Document) -> None:
    """Add identifier and text to a digest, each preceded by its length."""
    for part in (document.identifier, document.text):
        encoded = part.encode()
        mac.update(len(encoded).to_bytes(8, "big"))
        mac.update(encoded)


def _check_key(key: bytes) -> None:
    if not _MIN_KEY <= len(key) <= _MAX_KEY:
        raise ValueError(f"key must have {_MIN_KEY} to {_MAX_KEY} bytes, got {len(key)}")


def _digest(identifier: str, key: bytes) -> int:
    return int(keyed_name(identifier, key, b"adapmixed.shard"), 16)


def create_key(path: Path, words: str | None = None) -> None:
    """Write a key to a file that only its owner can read, unless the file exists.

    Args:
        path: the file; its folder is created if it is missing.
        words: of which the key is made if the text is public, so that everybody may repeat its
            division; None to draw the key from the operating system.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = os.urandom(KEY_BYTES) if words is None else hashlib.sha256(words.encode()).digest()
    create_file(path, key.hex().encode() + b"\n", mode=0o600)


def load_key(path: Path) -> bytes:
    """Read the partition's key, 64 hexadecimal digits in a file that only its owner can read.

    Raises:
        ValueError: if the file is missing, holds something else, or is open to others.
    """
    if not path.exists():
        raise ValueError(f"key file must exist, but {path} does not")
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        raise ValueError(f"key file {path} must hold {2 * KEY_BYTES} hexadecimal digits")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"key file {path} must be readable by its owner alone (chmod 600)")
    return bytes.fromhex(text)


class Spool:
    """Shards on the disk, each in a file of JSON lines.

    Attributes:
        folder: the folder of the files.
        fingerprint: hexadecimal keyed digest of the whole corpus in its order.
        sizes: bytes of each shard that was written.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        shard_of: Callable[[str], int],
        *,
        key: bytes,
        wanted: Collection[int],
        folder: Path,
    ) -> None:
        """Divide a stream of documents into files in one pass, with one document in memory.

        Args:
            documents: the whole corpus.
            shard_of: returns the shard of an identifier.
            key: the key of the partition.
            wanted: shards to write; the others only enter the fingerprint.
            folder: an empty folder that nobody else can read, where the text is written.

        Raises:
            ValueError: if the corpus holds no text.
        """
        mac = hmac.new(key, b"adapmixed corpus", hashlib.sha256)
        self.folder, self.sizes = folder, Counter[int]()
        document = None
        for document in documents:
            add_document(mac, document)
            if (shard := shard_of(document.identifier)) in wanted:
                line = json.dumps([document.identifier, document.text]).encode() + b"\n"
                with open(self._file(shard), "ab") as file:
                    self.sizes[shard] += file.write(line)
        if document is None:
            raise ValueError("corpus must hold text, but has none")
        self.fingerprint = mac.hexdigest()

    def read(self, shard: int) -> list[Document]:
        """Return a shard's documents sorted by identifier, else in the order of the corpus."""
        if shard not in self.sizes:
            return []
        with open(self._file(shard), encoding="utf-8") as lines:
            documents = [Document(*json.loads(line)) for line in lines]
        return sorted(documents, key=lambda document: document.identifier)

    def _file(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.jsonl"


def hold_out(tokens: list[int], fraction: float) -> tuple[list[int], list[int]]:
    """Return (training, validation), with the end of a shard's token stream held out.

    At least two tokens are held out, since fewer have nothing to predict. A shard with fewer than
    eight tokens holds none out.

    Args:
        tokens: the token stream of one shard.
        fraction: share of the tokens to hold out, in [0, 1).
    """
    count = int(fraction * len(tokens))
    if fraction > 0 and len(tokens) >= _LEAST_HELD_OUT:
        count = max(count, 2)
    return (tokens[:-count], tokens[-count:]) if count >= 2 else (tokens, [])


class TrainingFolder:
    """The paths of one training run, and its finished members."""

    def __init__(self, output: Path, num_models: int) -> None:
        self.output = output
        self.private = output.with_name(output.name + ".private")
        self.key_file = self.private / "shard.key"
        self.next = output / ".next"
        self.members = tuple(f"member-{index:03d}" for index in range(num_models))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create both folders, and let no other run train into them while the context is entered.

        What killed processes left, such as their shards' text, is removed.

        Raises:
            ValueError: if another run holds them, if the output holds an ensemble without the
                record of its run, if a member is a link, if other users can open the private
                folder, or if the file system has no locks.
        """
        begun = (self.private / "run.json").exists()
        if not begun and any(self.output.glob("member-*")) | (self.output / FILE_NAME).exists():
            raise ValueError(
                f"output must be a new folder or one whose training was begun here, but "
                f"{self.output} holds an ensemble and {self.private} has no record of its training"
            )
        check_locks(self.private)
        self.output.mkdir(parents=True, exist_ok=True)
        self.private.mkdir(mode=0o700, exist_ok=True)
        if self.private.stat().st_mode & 0o077:
            raise ValueError(f"{self.private} must be open to its owner alone (chmod 700)")
        for name in self.members:
            if (self.output / name).is_symlink():
                raise ValueError(
                    f"members must be folders in the output, not links, got {self.output / name}: "
                    "training could not remove the old files of a member that it replaces"
                )
        with ExitStack() as stack:
            try:
                stack.enter_context(sole_writer(self.private / "run.json"))
            except BlockingIOError:
                raise ValueError(
                    f"another process trains into {self.output}: wait for it or end it"
                ) from None
            for name in ("run.json", self.key_file.name):
                remove_leftovers(self.private, name)
            temporary = (folder.glob(".tmp-*") for folder in (self.output, self.next))
            for left in chain(self.private.glob("shards-*"), *temporary):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield

    def begun(self) -> dict[str, Any]:
        """Return the settings that the run was begun with, {} if it was not.

        Raises:
            ValueError: if their file has another format.
        """
        path = self.private / "run.json"
        if not path.exists():
            return {}
        return dict(read_versioned(path, FORMAT_VERSION, "settings")["settings"])

    def check_settings(self, settings: Mapping[str, Any], *, update: bool = False) -> None:
        """Check that the settings equal those that the run was begun with, if it was.

        Args:
            settings: those of this run, or some of them.
            update: whether another corpus may follow, with the same column of names.

        Raises:
            ValueError: if a setting differs; the message names the first one.
        """
        begun = self.begun()
        changed = [name for name in settings if begun and begun.get(name) != settings[name]]
        for name in changed:
            if name not in _CORPUS:
                raise ValueError(
                    f"training into {self.output} was begun with {name} = {begun.get(name)!r}, got "
                    f"{settings[name]!r}: use the same settings and corpus, or another output"
                )
        if changed and not update:
            raise ValueError(
                f"training into {self.output} was begun with another corpus, or its text has "
                "changed: give the same corpus, or another output, or update (--update) if every "
                "name has a place of its own"
            )

    def withdrawn(self) -> set[int]:
        """Return the members that are `null` in `ensemble.json`."""
        if not (self.output / FILE_NAME).exists():
            return set()
        members = read_manifest(self.output).members
        return {number for number, name in enumerate(members) if name is None}

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of a new run; those of one that was begun must be equal."""
        create_file(self.private / "run.json", _run_text(settings), mode=0o600)
        self.check_settings(settings)

    def exchange(self, settings: Mapping[str, Any], changed: Collection[int]) -> None:
        """Put members in place, and record the corpus that they were trained on.

        For another corpus than the recorded one `ensemble.json` is removed. Even if the process
        ends at any moment, every member in place was trained on the recorded corpus. So training
        can continue with that corpus.

        Args:
            settings: as in `begin`, or those for another corpus.
            changed: numbers of the members whose new folders are in `next`.
        """
        if another := self.begun() != settings:
            (self.output / FILE_NAME).unlink(missing_ok=True)
            flush(self.output)
        for place in (self.output / self.members[member] for member in changed):
            if place.exists():
                os.rename(place, old := temporary_folder(place))
                flush(self.output)
                shutil.rmtree(old)
        if another:
            write_file(self.private / "run.json", _run_text(settings), mode=0o600)
        for name in (self.members[member] for member in changed):
            await_path(self.next / name)
            os.rename(self.next / name, self.output / name)
        flush(self.output)

    def record(self, member: int) -> dict[str, Any] | None:
        """Return the record of the shard that a member in place was trained on, None without it."""
        path = self.output / self.members[member]
        return read_member_record(path)["shard"] if path.is_dir() else None

    def finish(self, manifest: Manifest) -> None:
        """Write `ensemble.json`, or check that an existing one is equal; nothing else is left.

        Raises:
            ValueError: if an existing one differs.
        """
        if not (self.output / FILE_NAME).exists():
            write_manifest(self.output, manifest)
        if read_manifest(self.output) != manifest:
            raise ValueError(f"{self.output / FILE_NAME} must be as training wrote it, but differs")
        shutil.rmtree(self.next)


def await_path(path: Path) -> None:
    """Wait for what another process has made: another machine may see it a little later."""
    started = time.monotonic()
    while not path.exists() and time.monotonic() - started < LATE_SECONDS:
        time.sleep(0.1)


def _run_text(settings: Mapping[str, Any]) -> bytes:
    data = {"format_version": FORMAT_VERSION, "settings": settings}
    return (json.dumps(data, indent=1) + "\n").encode()
