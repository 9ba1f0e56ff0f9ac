"""Check the shard records of `ensemble.json` for overlaps.

A guarantee covers one shard. It does not cover a person with records in two shards, so shards that
overlap raise. Overlaps are found through keyed hashes of the identifiers (users, documents), which
`training.partition.shard_record` writes. The operator keeps the key. Without it nobody can tell
whether a name is among the identifiers.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

_HEX = frozenset(string.digits + "abcdef")
_EMPTY = hashlib.sha256().hexdigest()


def check_shards(members: Sequence[str | None], shards: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the records prove that the shards are disjoint.

    Args:
        members: N folder names, None for missing members. Their records count like any other, so
            that the result does not depend on who is missing.
        shards: N records or none. A record is {"documents": count, "sha256": digest of the content,
            "identifiers": [keyed hash, ...], "identifier_key": digest of the key}; every entry is
            optional.

    Returns:
        False if the records do not tell.

    Raises:
        ValueError: if a record has another form.
        ValueError: if two shards share an identifier or their content, or if their identifiers
            were hashed under different keys. The message names the two members.
    """
    if shards and len(shards) != len(members):
        raise ValueError(
            f"shards must describe each of the {len(members)} members, got {len(shards)}"
        )
    content: dict[str, tuple[int, str]] = {}  # digest of the content -> its place and member
    owner: dict[str, tuple[int, str]] = {}
    first_key: tuple[Any, str] | None = None
    known = bool(shards)
    for index, shard in enumerate(shards):
        member = members[index] or f"missing member {index}"
        _check_record(member, shard)
        digest, key = shard.get("sha256"), shard.get("identifier_key")
        if digest not in (None, _EMPTY) and shard.get("documents") != 0:
            place, other = content.setdefault(digest, (index, member))
            if place != index:
                raise ValueError(
                    f"shards must be disjoint, {other} and {member} hold the same content"
                )
        if not shard.get("identifiers"):  # an empty list, too, unless the shard is empty
            known = known and shard.get("documents") == 0
        if shard.get("identifiers") is None:
            continue
        if first_key is None:
            first_key = (key, member)
        elif key != first_key[0]:
            raise ValueError(
                f"identifiers of {first_key[1]} and {member} must be hashed under one key, "
                "otherwise an overlap of their shards could not be found"
            )
        for identifier in shard["identifiers"]:
            place, other = owner.setdefault(identifier, (index, member))
            if place != index:
                raise ValueError(
                    f"shards must be disjoint, {other} and {member} share the identifier "
                    f"{identifier[:12]}..., whose person or document no guarantee covers"
                )
    return known or len(members) == 1


def _check_record(member: str, shard: Mapping[str, Any]) -> None:
    if not isinstance(shard, Mapping):
        raise ValueError(f"shards must be objects, got {shard!r} for {member}")
    documents, identifiers = shard.get("documents"), shard.get("identifiers")
    if documents is not None and (type(documents) is not int or documents < 0):
        raise ValueError(f"documents of {member} must be an integer >= 0, got {documents!r}")
    for name in ("sha256", "identifier_key"):
        if shard.get(name) is not None and not _is_hex(shard[name]):
            raise ValueError(f"{name} of {member} must be hexadecimal digits, got {shard[name]!r}")
    if identifiers is None:
        return
    if not isinstance(identifiers, list):
        raise ValueError(f"identifiers of {member} must be a list, got {identifiers!r}")
    for one in identifiers:
        if not _is_hex(one):
            raise ValueError(f"identifiers of {member} must be hexadecimal digests, got {one!r}")
    if shard.get("identifier_key") is None:
        raise ValueError(f"identifier_key of {member} must be given with its identifiers, got none")
    if documents is not None and (len(identifiers) > documents or (documents and not identifiers)):
        raise ValueError(
            f"identifiers of {member} must be those of its {documents} documents, got "
            f"{len(identifiers)}"
        )


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and 32 <= len(value) <= 128 and set(value) <= _HEX
