"""An ensemble folder while it grows, and the operator's folder beside it.

my-ensemble/            member-000/ ... (each there whole or not at all), ensemble.json at last
my-ensemble.private/    mode 0700: shard.key, run.json (what the run was begun with), locks,
                        withdrawn.json (members that the operator has withdrawn, if there are any),
                        and while it trains the shards' text
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapmixed.ensemble.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from adapmixed.files import create_file, flush, remove_leftovers, temporary_folder, write_file
from adapmixed.training.shards import create_key, load_key

MEMBER_FILE = "shard.json"
FORMAT_VERSION = 1


def read_member_record(folder: Path) -> dict[str, Any]:
    """What `shard.json` in a member's folder says: "shard", "tokens", "losses" of the epochs and
    "validation".

    Raises:
        ValueError: it is not JSON of this format.
    """
    path = folder / MEMBER_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(record).__name__}")
    version = record.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}")
    missing = {"shard", "tokens", "losses", "validation"} - record.keys()
    if missing:
        raise ValueError(f"{path} must say {' and '.join(sorted(missing))}, it does not")
    return record


class TrainingFolder:
    """Paths of one run, and what is finished."""

    def __init__(self, output: Path, num_models: int) -> None:
        self.output = output
        self.private = output.with_name(output.name + ".private")
        self.members = tuple(f"member-{index:03d}" for index in range(num_models))

    def prepare(self) -> None:
        """Makes both folders.

        Raises:
            ValueError: if the output holds an ensemble that no recorded run has made, or if the
                private folder is open to others.
        """
        begun = (self.private / "run.json").exists()
        if not begun and any(self.output.glob("member-*")) | (self.output / FILE_NAME).exists():
            raise ValueError(
                f"output must be a new folder or one whose training was begun here; {self.output} "
                f"holds an ensemble and {self.private} does not say how it was trained"
            )
        self.output.mkdir(parents=True, exist_ok=True)
        self.private.mkdir(mode=0o700, exist_ok=True)
        if self.private.stat().st_mode & 0o077:
            raise ValueError(f"{self.private} must be open to its owner alone (chmod 700)")

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuses settings other than those the run was begun with, if it was.

        Raises:
            ValueError: naming the first that differs.
        """
        path = self.private / "run.json"
        if not path.exists():
            return
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
            version, known = begun["format_version"], begun["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} must say what the run was begun with: {error}") from error
        if version != FORMAT_VERSION:
            raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version}")
        given = json.loads(json.dumps(settings))  # tuples become lists
        for name in known | given:
            if name in given and known.get(name) != given[name]:
                raise ValueError(
                    f"training into {self.output} was begun with {name} = {known.get(name)!r}, got "
                    f"{given[name]!r}: go on with the same settings and corpus, or give another "
                    "output"
                )

    def withdrawn(self) -> dict[int, dict[str, Any]]:
        """Return the members that are `null` in `ensemble.json`, with their records in "shards".

        What it says is kept beside the run for the time when it is not there.

        Raises:
            ValueError: if either file is not of its format.
        """
        path = self.private / "withdrawn.json"
        with self._alone():  # ranks begin at the same time
            remove_leftovers(self.private, path.name)
            if not (self.output / FILE_NAME).exists():
                return _read_withdrawn(path) if path.exists() else {}
            manifest = read_manifest(self.output)
            shards = manifest.shards or ({},) * len(manifest.members)
            found = {
                number: dict(record)
                for number, (name, record) in enumerate(zip(manifest.members, shards, strict=True))
                if name is None
            }
            if found:
                write_file(path, json.dumps(found).encode(), mode=0o600)
            else:
                path.unlink(missing_ok=True)
        return found

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Records what the run is begun with; afterwards only the same may go on.

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
        """Record another corpus, and put a member that was trained on it in its place.

        `ensemble.json` is removed. Whenever the process ends, each member in place was trained on
        the corpus that is recorded, so that training can go on with that corpus.

        Args:
            settings: as `begin`, of the new corpus.
            member: number of the member; None: all are as they were.
            new: its new folder, on the same file system.
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
        """The operator's key; one that is drawn at first where no file is given.

        Raises:
            ValueError: see `load_key`.
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
        """An empty folder for the text of a rank's shards, removed at the end.

        What a killed process left is removed at the beginning.
        """
        folder = self.private / f"shards-{rank:03d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def is_finished(self, member: int) -> bool:
        """Whether a member is there; it is there whole."""
        return (self.output / self.members[member]).is_dir()

    def missing(self, withdrawn: Collection[int]) -> list[int]:
        """Return the members that are not finished, but for those that are withdrawn."""
        wanted = set(range(len(self.members))).difference(withdrawn)
        return [index for index in sorted(wanted) if not self.is_finished(index)]

    def remove_leftovers(self, member: int) -> None:
        """Removes what a killed process left of a member."""
        remove_leftovers(self.output, self.members[member])

    def record(self, member: int) -> dict[str, Any]:
        """What a finished member's training recorded."""
        return read_member_record(self.output / self.members[member])

    def finish(self, manifest: Manifest) -> None:
        """Writes `ensemble.json`; one that is there must say the same.

        Raises:
            ValueError: if it does not.
        """
        with self._alone():
            remove_leftovers(self.output, FILE_NAME)
            if not (self.output / FILE_NAME).exists():
                write_manifest(self.output, manifest)
        if read_manifest(self.output) != manifest:
            raise ValueError(f"{self.output / FILE_NAME} must be what training wrote, it is not")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits until no other rank is between these doors."""
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
