"""The ensemble folder during training, and the operator's private folder.

my-ensemble/            member-000/ ... (each there whole or not at all), ensemble.json at last,
                        and .next/ with changed members until all of them are trained
my-ensemble.private/    mode 0700: shard.key, run.json (what the run was begun with, and the table
                        of enrolment: the keyed name at each place), locks, and while it trains the
                        shards' text

Several processes that train one ensemble share nothing but these files. Rank r of R trains the
members r, r + R, r + 2R, ... and holds a lock, which the operating system releases when the process
ends, however it ends. So a process that waits for a member sees whether its rank still runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapmixed.ensemble.manifest import (
    FILE_NAME,
    Manifest,
    read_manifest,
    read_member_record,
    read_versioned,
    write_manifest,
)
from adapmixed.files import create_file, flush, remove_leftovers, temporary_folder, write_file
from adapmixed.ranks import Rank
from adapmixed.training.shards import create_key, load_key

FORMAT_VERSION = 1
"""Of `run.json`."""
START_SECONDS = 60.0
"""Seconds that a rank waits for another one to appear, after finishing its own members."""
_POLL_SECONDS = 0.2
_LOCK_SECONDS = 1.0  # a rank that tests a lock takes it for an instant
# What an update may change. Names of files are a record; the text is compared by its digest.
_CORPUS = {"corpus", "corpus_hmac", "corpus_files", "places"}


class TrainingFolder:
    """The paths of one training run, and its finished members."""

    def __init__(self, output: Path, num_models: int) -> None:
        self.output = output
        self.private = output.with_name(output.name + ".private")
        self.next = output / ".next"
        self.members = tuple(f"member-{index:03d}" for index in range(num_models))

    def prepare(self) -> None:
        """Create both folders.

        Raises:
            ValueError: if the output holds an ensemble without the record of its run, or a member
                is a link, or other users can open the private folder.
        """
        begun = (self.private / "run.json").exists()
        if not begun and any(self.output.glob("member-*")) | (self.output / FILE_NAME).exists():
            raise ValueError(
                f"output must be a new folder or one whose training was begun here, but "
                f"{self.output} holds an ensemble and {self.private} has no record of its training"
            )
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
        if not (begun := self.begun()):
            return
        known, given = (
            {"id_column": one["corpus"]["id_column"], **one}
            for one in (begun, json.loads(json.dumps(settings)))  # tuples become lists
        )
        changed = [name for name in given if known.get(name) != given[name]]
        for name in changed:
            if name not in _CORPUS:
                raise ValueError(
                    f"training into {self.output} was begun with {name} = {known.get(name)!r}, got "
                    f"{given[name]!r}: use the same settings and corpus, or another output"
                )
        if not update and set(changed) - {"corpus_files"}:
            same = "give update (--update) to train whose text has changed"
            raise ValueError(
                f"training into {self.output} was begun with another corpus, or its text has "
                f"changed: {same if given['places'] else 'give the same corpus'}, or another output"
            )

    def withdrawn(self) -> dict[int, dict[str, Any]]:
        """Return the members that are `null` in `ensemble.json`, with their shards' records."""
        if not (self.output / FILE_NAME).exists():
            return {}
        manifest = read_manifest(self.output)
        shards = manifest.shards or ({},) * len(manifest.members)
        return {
            number: dict(record)
            for number, (name, record) in enumerate(zip(manifest.members, shards, strict=True))
            if name is None
        }

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the run, which only a run with the same settings may continue.

        Raises:
            ValueError: as `check_settings`.
        """
        with self._alone():
            remove_leftovers(self.private, "run.json")
            create_file(self.private / "run.json", _run_text(settings), mode=0o600)
        self.check_settings(settings)

    def exchange(self, settings: Mapping[str, Any], changed: Collection[int]) -> None:
        """Record another corpus, and put the members that were trained on it in place.

        `ensemble.json` is removed. Even if the process ends at any moment, every member in place
        was trained on the recorded corpus. So training can continue with that corpus.

        Args:
            settings: as in `begin`, for the new corpus.
            changed: numbers of the members whose new folders are in `next`.
        """
        with self._alone():
            (self.output / FILE_NAME).unlink(missing_ok=True)
            flush(self.output)
            for place in (self.output / self.members[member] for member in changed):
                if place.exists():
                    os.rename(place, old := temporary_folder(place))
                    flush(self.output)
                    shutil.rmtree(old)
            remove_leftovers(self.private, "run.json")
            write_file(self.private / "run.json", _run_text(settings), mode=0o600)
            for name in (self.members[member] for member in changed):
                os.rename(self.next / name, self.output / name)
            flush(self.output)

    def key(self, key_file: Path | None) -> bytes:
        """Return the operator's key.

        Args:
            key_file: the file with the key; None for the private folder's own, which is created if
                it is missing.

        Raises:
            ValueError: as `load_key`.
        """
        if key_file is not None:
            return load_key(key_file)
        path = self.private / "shard.key"
        with self._alone():
            remove_leftovers(self.private, path.name)
            if not path.exists():
                create_key(path)
        return load_key(path)

    @contextmanager
    def shards_folder(self, rank: int) -> Iterator[Path]:
        """Yield an empty folder for the text of a process's shards, and remove it at the end.

        What a killed process of this rank left is removed first.
        """
        folder = self.private / f"shards-{rank:03d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def remove_shards(self) -> None:
        """Remove what killed processes left of their shards' text."""
        for left in self.private.iterdir():
            if match := re.fullmatch(r"shards-(\d{3,})", left.name):
                with idle(self.private, int(match[1])) as removable:
                    if removable:
                        shutil.rmtree(left, ignore_errors=True)

    def is_finished(self, member: int) -> bool:
        """Return whether a member is finished; its folder appears complete or not at all."""
        return (self.output / self.members[member]).is_dir()

    def is_empty(self, member: int) -> bool:
        """Return whether a member is finished and was trained on nothing."""
        return self.is_finished(member) and self.record(member)["shard"]["documents"] == 0

    def missing(self, withdrawn: Collection[int]) -> list[int]:
        """Return the members that are neither finished nor withdrawn."""
        members = range(len(self.members))
        return [one for one in members if one not in withdrawn and not self.is_finished(one)]

    def record(self, member: int) -> dict[str, Any]:
        """Return the record of a finished member; see `read_member_record`."""
        return read_member_record(self.output / self.members[member])

    def finish(self, manifest: Manifest) -> None:
        """Write `ensemble.json`, or check that an existing one is equal.

        Raises:
            ValueError: if an existing one differs.
        """
        with self._alone():
            remove_leftovers(self.output, FILE_NAME)
            if not (self.output / FILE_NAME).exists():
                write_manifest(self.output, manifest)
        if read_manifest(self.output) != manifest:
            raise ValueError(f"{self.output / FILE_NAME} must be as training wrote it, but differs")

    def wait(self, place: Rank, withdrawn: Collection[int]) -> None:
        """Wait until no member is missing, of which rank r of R trains r, r + R, r + 2R, ...

        Args:
            place: the rank of this process.
            withdrawn: members that are not waited for.

        Raises:
            RuntimeError: if the rank of a missing member has ended or never began.
        """
        started = time.monotonic()
        seen = {place.rank}
        while True:
            # The order matters: a rank may finish its last member and end between the two checks.
            living = set()
            for rank in range(place.world):
                with idle(self.private, rank) as free:
                    if not free:
                        living.add(rank)
            left = [member % place.world for member in self.missing(withdrawn)]
            if not left:
                return
            seen |= living
            waited = time.monotonic() - started > START_SECONDS
            for rank in sorted(set(left) - living):
                if rank in seen or waited:
                    ended = "ended" if rank in seen else "never began"
                    raise RuntimeError(
                        f"rank {rank} of {place.world} {ended} and left {left.count(rank)} members "
                        "untrained; the finished ones are kept: run the same command again"
                    )
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock that excludes the other processes of the run."""
        descriptor = os.open(self.private / "folder.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _run_text(settings: Mapping[str, Any]) -> bytes:
    data = {"format_version": FORMAT_VERSION, "settings": settings}
    return (json.dumps(data, indent=1) + "\n").encode()


@contextmanager
def locked(folder: Path, rank: int) -> Iterator[None]:
    """Hold a rank's lock in `folder` while the context is entered.

    Raises:
        ValueError: if another process holds it.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        with idle(folder, rank, fcntl.LOCK_EX) as free:
            if free:
                yield
                return
        if time.monotonic() > deadline:
            raise ValueError(
                f"another process trains as rank {rank} with {folder}: wait for it or end it"
            )
        time.sleep(0.05)


@contextmanager
def idle(folder: Path, rank: int, kind: int = fcntl.LOCK_SH) -> Iterator[bool]:
    """Yield whether no process has a rank's lock in `folder`, and meanwhile let none take it.

    Processes that only ask share the lock, so that none of them is taken for the rank.
    """
    descriptor = os.open(folder / f"rank-{rank:03d}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        free = True
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)
