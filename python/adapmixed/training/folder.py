"""The ensemble folder during training, and the operator's private folder.

my-ensemble/            member-000/ ... (each there whole or not at all), ensemble.json at last
my-ensemble.private/    mode 0700: shard.key, run.json (what the run was begun with), locks,
                        withdrawn.json (members that the operator has withdrawn, if there are any),
                        and while it trains the shards' text
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapmixed.ensemble.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from adapmixed.ensemble.member_record import FORMAT_VERSION, read_member_record
from adapmixed.files import create_file, flush, remove_leftovers, temporary_folder, write_file
from adapmixed.training.ranks import idle
from adapmixed.training.shards import create_key, load_key

_WITHDRAWN = "withdrawn.json"


class TrainingFolder:
    """The paths of one training run, and its finished members."""

    def __init__(self, output: Path, num_models: int) -> None:
        self.output = output
        self.private = output.with_name(output.name + ".private")
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

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Check that the settings equal those that the run was begun with, if it was.

        Raises:
            ValueError: if a setting differs; the message names the first one.
        """
        path = self.private / "run.json"
        if not path.exists():
            return
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
            version, known = begun["format_version"], begun["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} must hold the settings of the run: {error}") from error
        if version != FORMAT_VERSION:
            raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version}")
        given = json.loads(json.dumps(settings))  # tuples become lists
        for name in known | given:
            # Names of files are a record; the text is compared by its digest.
            if name in given and name != "corpus_files" and known.get(name) != given[name]:
                raise ValueError(
                    f"training into {self.output} was begun with {name} = {known.get(name)!r}, got "
                    f"{given[name]!r}: use the same settings and corpus, or another output"
                )

    def withdrawn(self, retrained: int | None = None) -> dict[int, dict[str, Any]]:
        """Return the members that were ever `null` in `ensemble.json`, with their shards' records.

        They are kept in the private folder, until `keep_withdrawn` changes that.

        Args:
            retrained: the member that this run brings back, if it was withdrawn.

        Raises:
            ValueError: if a file has another format, or if the name of another withdrawn member was
                put back by hand: its text may no longer be in the corpus.
        """
        with self._alone():  # several processes begin at the same time
            remove_leftovers(self.private, _WITHDRAWN)
            path = self.private / _WITHDRAWN
            found = _read_withdrawn(path) if path.exists() else {}
            if not (self.output / FILE_NAME).exists():
                return found
            manifest = read_manifest(self.output)
            for number in found:
                if number != retrained and manifest.members[number] is not None:
                    raise ValueError(
                        f"{self.output / FILE_NAME} must have null for {self.members[number]}, "
                        f"which was withdrawn: only training with retrain={number} brings it back"
                    )
            shards = manifest.shards or ({},) * len(manifest.members)
            new = {
                number: dict(record)
                for number, (name, record) in enumerate(zip(manifest.members, shards, strict=True))
                if name is None
            }
            if new.keys() - found.keys():
                self._write_withdrawn(found := found | new)
        return found

    def keep_withdrawn(self, withdrawn: Mapping[int, Mapping[str, Any]]) -> None:
        """Record these members alone as withdrawn."""
        with self._alone():
            self._write_withdrawn(withdrawn)

    def _write_withdrawn(self, withdrawn: Mapping[int, Mapping[str, Any]]) -> None:
        path = self.private / _WITHDRAWN
        if withdrawn:
            write_file(path, json.dumps(withdrawn).encode(), mode=0o600)
        else:
            path.unlink(missing_ok=True)
            flush(self.private)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the run, which only a run with the same settings may continue.

        Raises:
            ValueError: as `check_settings`.
        """
        with self._alone():
            remove_leftovers(self.private, "run.json")
            create_file(self.private / "run.json", _run_text(settings), mode=0o600)
        self.check_settings(settings)

    def exchange(
        self, settings: Mapping[str, Any], member: int | None = None, new: Path | None = None
    ) -> None:
        """Record another corpus, and replace a member by one that was trained on it.

        `ensemble.json` is removed. Even if the process ends at any moment, every member in place
        was trained on the recorded corpus. So training can continue with that corpus.

        Args:
            settings: as in `begin`, for the new corpus.
            member: number of the member; None if all members stay.
            new: the new member's folder, on the same file system.
        """
        with self._alone():
            (self.output / FILE_NAME).unlink(missing_ok=True)
            flush(self.output)
            if member is not None:
                place = self.output / self.members[member]
                if place.exists():
                    os.rename(place, old := temporary_folder(place))
                    flush(self.output)
                    shutil.rmtree(old)
            remove_leftovers(self.private, "run.json")
            write_file(self.private / "run.json", _run_text(settings), mode=0o600)
            if new is not None:
                os.rename(new, place)
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

    def remove_shards(self, least: int) -> None:
        """Remove what killed processes of rank `least` and above left of their shards' text."""
        for left in self.private.iterdir():
            match = re.fullmatch(r"shards-(\d{3,})", left.name)
            if match is not None and int(match[1]) >= least:
                with idle(self.private, int(match[1])) as removable:
                    if removable:
                        shutil.rmtree(left, ignore_errors=True)

    def is_finished(self, member: int) -> bool:
        """Return whether a member is finished; its folder appears complete or not at all."""
        return (self.output / self.members[member]).is_dir()

    def missing(self, withdrawn: Collection[int]) -> list[int]:
        """Return the members that are neither finished nor withdrawn."""
        wanted = set(range(len(self.members))).difference(withdrawn)
        return [index for index in sorted(wanted) if not self.is_finished(index)]

    def remove_leftovers(self, member: int) -> None:
        """Remove what a killed process left of a member."""
        remove_leftovers(self.output, self.members[member])

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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock that excludes the other processes of the run."""
        descriptor = os.open(self.private / "folder.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read_withdrawn(path: Path) -> dict[int, dict[str, Any]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {int(number): dict(record) for number, record in kept.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must map members to their records: {error}") from error


def _run_text(settings: Mapping[str, Any]) -> bytes:
    data = {"format_version": FORMAT_VERSION, "settings": settings}
    return (json.dumps(data, indent=1) + "\n").encode()
