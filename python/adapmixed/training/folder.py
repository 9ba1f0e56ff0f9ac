"""The ensemble folder during training, and the operator's private folder.

my-ensemble/            member-000/ ... (each there whole or not at all), ensemble.json at last,
                        and .next/ with changed members until all of them are trained
my-ensemble.private/    mode 0700: shard.key, run.json (what the run was begun with, and the table
                        of enrolment: the keyed name at each place), and while it trains a lock and
                        the shards' text

Of several processes that train one ensemble the main one writes all files but the members.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
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

FORMAT_VERSION = 1
"""Of `run.json`."""
LATE_SECONDS = 60.0
"""Longest time after which a file that one machine has made is seen by another one."""
# What an update may change. Names of files are a record; the text is compared by its digest.
_CORPUS = {"corpus", "corpus_hmac", "corpus_files", "places"}


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
        if not (begun := self.begun()):
            return
        known, given = (
            {"id_column": one["corpus"]["id_column"], **one} for one in (begun, settings)
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
        (self.output / FILE_NAME).unlink(missing_ok=True)
        flush(self.output)
        for place in (self.output / self.members[member] for member in changed):
            if place.exists():
                os.rename(place, old := temporary_folder(place))
                flush(self.output)
                shutil.rmtree(old)
        write_file(self.private / "run.json", _run_text(settings), mode=0o600)
        for name in (self.members[member] for member in changed):
            os.rename(self.next / name, self.output / name)
        flush(self.output)

    def is_finished(self, member: int) -> bool:
        """Return whether a member is finished; its folder appears complete or not at all."""
        return (self.output / self.members[member]).is_dir()

    def record(self, member: int) -> dict[str, Any]:
        """Return the record of a finished member; see `read_member_record`."""
        await_path(self.output / self.members[member])
        return read_member_record(self.output / self.members[member])

    def finish(self, manifest: Manifest) -> None:
        """Write `ensemble.json`, or check that an existing one is equal.

        Raises:
            ValueError: if an existing one differs.
        """
        if not (self.output / FILE_NAME).exists():
            write_manifest(self.output, manifest)
        if read_manifest(self.output) != manifest:
            raise ValueError(f"{self.output / FILE_NAME} must be as training wrote it, but differs")


def await_path(path: Path) -> None:
    """Wait for what another process has made: another machine may see it a little later."""
    started = time.monotonic()
    while not path.exists() and time.monotonic() - started < LATE_SECONDS:
        time.sleep(0.1)


def _run_text(settings: Mapping[str, Any]) -> bytes:
    data = {"format_version": FORMAT_VERSION, "settings": settings}
    return (json.dumps(data, indent=1) + "\n").encode()
