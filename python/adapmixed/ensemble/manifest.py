"""Read and write `ensemble.json`, which describes an ensemble folder.

    {"format_version": 4, "base_model": "...", "num_models": N,
     "adapted": {"lm_head": [8], ...}, "members": ["member-000", null, ...],
     "base_files": {"config.json": "...", "model.safetensors": "...", ...}, "training": {...},
     "document_names": "stable", "beginning": [2], "unit": "user",
     "shards": [{"documents": n, "sha256": "...", "identifiers": [...], "identifier_key": "..."}]}

The members are ordinary peft folders in the same folder. `null` stands for a missing member, which
answers as the public model does. N and `adapted` are public constants. They determine the layers
that members share and all shapes of the computation, so these do not depend on which members are
present.
`shards.check_shards` reads `shards`. Its digests must not be published: whoever holds a shard's
data can tell from them that a member was trained on it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapmixed.ensemble.adapted_layers import checked_layers
from adapmixed.ensemble.member import CONFIG_FILE
from adapmixed.ensemble.shards import check_shards
from adapmixed.files import write_file

FORMAT_VERSION = 4
FILE_NAME = "ensemble.json"
DOCUMENT_NAMES = ("stable", "positions")
"""How documents are named for their shards: by names that no other document can change ("stable"),
or by positions in a file."""


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
            (`vocabulary.beginning_of`), or None if not recorded.
        unit: the column of names if every name has a member of its own, which `shards` show; or
            None.
        disjoint: whether `shards` shows that no two members share an identifier.
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
    disjoint: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members must name at least one private model, got none")
        present = [name for name in self.members if name is not None]
        if len(set(present)) != len(present):
            twice = next(name for name in present if present.count(name) > 1)
            raise ValueError(f"members must be distinct, got {twice!r} more than once")
        for name in present:
            if not name or name in (".", "..") or "/" in name or "\\" in name:
                raise ValueError(f"members must be plain folder names, got {name!r}")
        if self.document_names not in (None, *DOCUMENT_NAMES):
            raise ValueError(
                f"document_names must be one of {DOCUMENT_NAMES} or None, got "
                f"{self.document_names!r}"
            )
        object.__setattr__(self, "adapted", checked_layers(self.adapted))
        object.__setattr__(self, "disjoint", check_shards(self.members, self.shards))
        if self.unit is not None:
            each = all(len(one.get("identifiers") or ()) <= 1 for one in self.shards)
            if not (self.unit and self.shards and self.disjoint and each):
                raise ValueError(
                    f"unit must be null unless shards give every name a member, got {self.unit!r}"
                )


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read `folder/ensemble.json`.

    Raises:
        ValueError: if the file is missing, not JSON, of another format, or inconsistent.
    """
    path = Path(folder) / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        why = ""
        if (Path(folder) / CONFIG_FILE).is_file():
            why = (
                ", it is a single adapter: give a list of such folders in Python, or write "
                f"{FILE_NAME}"
            )
        raise ValueError(f"folder must hold {FILE_NAME}, {folder} does not{why}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    version = data.get("format_version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{path}: format_version must be an integer >= 1, got {version!r}")
    if version < FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version must be {FORMAT_VERSION}, got {version}, written by an older "
            "adapmixed: train the ensemble again; texts may have begun otherwise then"
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version must be <= {FORMAT_VERSION}, got {version}, "
            "written by a newer adapmixed"
        )
    members = data.get("members")
    if not isinstance(members, list) or not all(isinstance(name, str | None) for name in members):
        raise ValueError(f"{path}: members must be folder names or null, got {members!r}")
    if data.get("num_models") != len(members):
        raise ValueError(
            f"{path}: num_models must be the number of members {len(members)}, "
            f"got {data.get('num_models')!r}"
        )
    try:
        return Manifest(
            base_model=str(data.get("base_model", "")),
            members=tuple(members),
            adapted=checked_layers(data.get("adapted")),
            base_files=_digests(data.get("base_files") or {}),
            revision=_text_or_none(data.get("revision"), "revision"),
            training=dict(data.get("training") or {}),
            shards=tuple(data.get("shards") or ()),
            document_names=data.get("document_names"),
            beginning=_tokens(data.get("beginning")),
            unit=_text_or_none(data.get("unit"), "unit"),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write `folder/ensemble.json` in the current format, atomically."""
    data = {
        "format_version": FORMAT_VERSION,
        "base_model": manifest.base_model,
        "num_models": len(manifest.members),
        "adapted": {name: list(ranks) for name, ranks in manifest.adapted.items()},
        "members": list(manifest.members),
        "base_files": dict(manifest.base_files),
        "revision": manifest.revision,
        "training": dict(manifest.training),
        "document_names": manifest.document_names,
        "beginning": None if manifest.beginning is None else list(manifest.beginning),
        "shards": [dict(shard) for shard in manifest.shards],
        **({} if manifest.unit is None else {"unit": manifest.unit}),
    }
    text = json.dumps(data, indent=1) + "\n"
    write_file(Path(folder) / FILE_NAME, text.encode())


def _text_or_none(value: Any, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a string or null, got {value!r}")
    return value


def _tokens(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"beginning must be a list of token ids or null, got {value!r}")
    return tuple(value)


def _digests(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"base_files must be an object, got {value!r}")
    for file, digest in value.items():
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"base_files of {file} must be 64 hexadecimal digits, got {digest!r}")
    return dict(value)
