"""Read and write `ensemble.json`, which describes an ensemble folder, and a member's `shard.json`.

    {"format_version": 4, "base_model": "...", "num_models": N,
     "adapted": {"lm_head": [8], ...}, "members": ["member-000", null, ...],
     "base_files": {"config.json": "...", "model.safetensors": "...", ...}, "training": {...},
     "document_names": "stable", "beginning": [2], "unit": "user",
     "shards": [{"documents": n, "sha256": "...", "identifiers": [...], "identifier_key": "..."}]}

The members are ordinary peft folders in the same folder. `null` stands for a missing member, which
answers as the public model does. N and `adapted` are public constants. They determine the layers
that members share and all shapes of the computation, so these do not depend on which members are
present.

A guarantee covers one shard. It does not cover a person with records in two shards, so shards that
overlap raise. Overlaps are found through keyed hashes of the identifiers (users, documents), which
`training.shard_record` writes. The operator keeps the key, without which nobody can tell
whether a name is among the identifiers. The digests must not be published: whoever holds a shard's
data can tell from them that a member was trained on it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from adapmixed.files import write_file
from adapmixed.limits import check_option, check_type

FORMAT_VERSION = 4
FILE_NAME = "ensemble.json"
MEMBER_FILE = "shard.json"
MEMBER_VERSION = 1
DOCUMENT_NAMES = ("stable", "positions")
"""How documents are named for their shards: by names that no other document can change ("stable"),
or by positions in a file."""
_DIGEST = re.compile("[0-9a-f]{32,128}")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The content of `ensemble.json`.

    Attributes:
        base_model: name of the public model, for people; callers pass the base itself to loading.
        members: folder names, N = len(members) >= 1; None for a missing member.
        adapted: names of the layers that members may adapt, each with its ranks, ascending.
        base_files: digest of each file that the base is loaded from, as
            `adapmixed.ensemble.base_files` returns them; {} if not recorded.
        revision: the hub commit of the base, used when it is loaded by its hub name; or None.
        training: the settings that the members were trained with.
        shards: one `training.shard_record` per member; empty if not recorded.
        document_names: one of `DOCUMENT_NAMES`, or None if not recorded. With "positions", one edit
            can move all later documents of a file to other shards.
        beginning: the tokens with which every training block began
            (`text.beginning_of`), or None if not recorded.
        unit: the column of names if every name has a member of its own, which `shards` show; or
            None.

    Raises:
        ValueError: if an entry has another form, if two shards overlap or are hashed under
            different keys, or if `shards` do not show `unit`.
    """

    base_model: str
    members: tuple[str | None, ...]
    adapted: Mapping[str, tuple[int, ...]]
    base_files: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[Mapping[str, Any], ...] = ()
    document_names: str | None = None
    beginning: tuple[int, ...] | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members must name at least one private model, got none")
        present = [name for name in self.members if name is not None]
        for name in present:
            if not isinstance(name, str) or not re.fullmatch(r"(?!\.\.?$)[^/\\]+", name):
                raise ValueError(f"members must be plain folder names or null, got {name!r}")
        check_distinct(present)
        for file, digest in self.base_files.items():
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                raise ValueError(
                    f"base_files of {file} must be 64 hexadecimal digits, got {digest!r}"
                )
        for name in ("base_model", "revision", "unit"):
            check_type(name, getattr(self, name), str, "a string or null", optional=True)
        check_type("training", self.training, Mapping, "an object")
        check_option("document_names", self.document_names, (None, *DOCUMENT_NAMES))
        if self.beginning is not None and not all(type(one) is int for one in self.beginning):
            raise ValueError(
                f"beginning must be a list of token ids or null, got {self.beginning!r}"
            )
        object.__setattr__(self, "adapted", checked_layers(self.adapted))
        check_shards(self.members, self.shards)
        each = bool(self.shards) and all(len(one["identifiers"]) <= 1 for one in self.shards)
        if self.unit is not None and not (self.unit and each):
            raise ValueError(
                f"unit must be null unless shards give every name a member, got {self.unit!r}"
            )

    def paths(self, folder: str | os.PathLike[str]) -> list[Path | None]:
        """Return the members' folders below `folder`, None for a missing member."""
        return [None if name is None else Path(folder, name) for name in self.members]


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read `folder/ensemble.json`.

    Raises:
        ValueError: if the file is missing, not JSON, of another format, or inconsistent.
    """
    path = Path(folder) / FILE_NAME
    if not path.exists():
        single = (Path(folder) / "adapter_config.json").is_file()
        why = ", it is a single adapter: give a list of such folders in Python, or write that file"
        raise ValueError(f"folder must hold {FILE_NAME}, {folder} does not{why * single}")
    data = read_versioned(path, FORMAT_VERSION, "num_models", "members", "adapted")
    names = [one.name for one in fields(Manifest)]
    given = {name: data[name] for name in names if data.get(name) is not None}
    try:
        for name in given.keys() & {"members", "shards", "beginning"}:
            if not isinstance(given[name], list):
                raise ValueError(f"{name} must be a list, got {given[name]!r}")
            given[name] = tuple(given[name])
        if data["num_models"] != len(given["members"]):
            raise ValueError(
                f"num_models must be the number of members {len(given['members'])}, "
                f"got {data['num_models']!r}"
            )
        return Manifest(**{"base_model": ""} | given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write `folder/ensemble.json` in the current format, atomically."""
    entries = {one.name: getattr(manifest, one.name) for one in fields(Manifest)}
    if manifest.unit is None:
        del entries["unit"]
    data = {"format_version": FORMAT_VERSION, "num_models": len(manifest.members), **entries}
    write_file(Path(folder) / FILE_NAME, (json.dumps(data, indent=1) + "\n").encode())


def read_member_record(folder: Path) -> dict[str, Any]:
    """Return the content of `shard.json` in a member's folder.

    Returns:
        "shard" (its `training.shard_record`), "tokens" (their number), "losses" of the epochs in
        nats per token, and "validation".

    Raises:
        ValueError: if the file is not JSON of this format.
        OSError: if it cannot be read.
    """
    path = folder / MEMBER_FILE
    return read_versioned(path, MEMBER_VERSION, "shard", "tokens", "losses", "validation")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: if it is not JSON.
        OSError: if it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from error


def read_versioned(path: Path, version: int, *entries: str) -> dict[str, Any]:
    """Return the content of a JSON file of this format version with these entries.

    Raises:
        ValueError: if it is another file.
        OSError: if it cannot be read.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    if (found := data.get("format_version")) != version:
        raise ValueError(f"{path}: format_version must be {version}, got {found!r}")
    if missing := sorted(set(entries) - data.keys()):
        raise ValueError(f"{path} must hold {', '.join(entries)}, got no {missing[0]}")
    return data


def check_distinct(members: Sequence[object]) -> None:
    """Raise ValueError if a member is listed twice."""
    if twice := [one for one, count in Counter(members).items() if count > 1]:
        raise ValueError(f"members must be distinct, got {str(twice[0])!r} more than once")


def checked_layers(adapted: Any) -> dict[str, tuple[int, ...]]:
    """Return the adapted layers in alphabetical order, each with its ascending ranks.

    Raises:
        ValueError: if `adapted` does not map at least one name to distinct integers >= 1.
    """
    layers: Mapping[str, Any] = adapted if isinstance(adapted, Mapping) else {}
    for ranks in layers.values() or [()]:
        numbers = isinstance(ranks, list | tuple) and all(type(one) is int for one in ranks)
        if not numbers or not 1 <= len(set(ranks)) == len(ranks) or min(ranks) < 1:
            raise ValueError(
                f"adapted must map layer names to distinct integers >= 1, got {adapted!r}"
            )
    return {name: tuple(sorted(layers[name])) for name in sorted(layers)}


def check_shards(members: Sequence[str | None], shards: Sequence[Mapping[str, Any]]) -> None:
    """Check that the shards of N members are disjoint.

    Args:
        members: N folder names, None for missing members. Their records count like any other, so
            that the result does not depend on who is missing.
        shards: N records, or none. A record is {"documents": count, "sha256": digest of the
            content, "identifiers": [keyed hash, ...], "identifier_key": digest of the key}.

    Raises:
        ValueError: if a record has another form.
        ValueError: if two shards share an identifier or their content, or if their identifiers
            were hashed under different keys. The message names the two members.
    """
    if shards and len(shards) != len(members):
        raise ValueError(
            f"shards must describe each of the {len(members)} members, got {len(shards)}"
        )
    owner: dict[str, int] = {}  # what a shard has alone -> its member
    names = [name or f"missing member {index}" for index, name in enumerate(members)]
    for index, shard in enumerate(shards):
        if not _is_record(shard):
            raise ValueError(
                "shards must be records as training.shard_record makes them, got another one for "
                f"{names[index]}"
            )
        if shard["identifier_key"] != shards[0]["identifier_key"]:
            raise ValueError(
                f"identifiers of {names[0]} and {names[index]} must be hashed under one key, "
                "otherwise an overlap of their shards could not be found"
            )
        for what in (*shard["identifiers"], shard["sha256"]) if shard["documents"] else ():
            if (other := owner.setdefault(what, index)) != index:
                raise ValueError(
                    f"shards must be disjoint, {names[other]} and {names[index]} share an "
                    f"identifier or all content ({what[:12]}...), whose person or document no "
                    "guarantee covers"
                )


def _is_record(shard: Any) -> bool:
    """Return whether this is a whole record: a shard with documents has identifiers, too."""
    entries: Mapping[str, Any] = shard if isinstance(shard, Mapping) else {}
    documents, identifiers = entries.get("documents"), entries.get("identifiers")
    if type(documents) is not int or not isinstance(identifiers, list):
        return False
    digests = (*identifiers, entries.get("sha256"), entries.get("identifier_key"))
    return min(documents, 1) <= len(identifiers) <= documents and all(
        isinstance(one, str) and _DIGEST.fullmatch(one) for one in digests
    )
