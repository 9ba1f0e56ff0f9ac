"""What `ensemble.json` says about the shards, and whether it shows that they are disjoint.

A guarantee is for one shard. Whoever has records in two of them is not covered by it, so shards
that are seen to overlap are refused. They are seen through keyed hashes of the identifiers (users,
documents) that `training.partition.shard_record` writes; the key stays with the operator, and
without it nobody can tell whether a name is among them.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

_HEX = frozenset(string.digits + "abcdef")
_EMPTY = hashlib.sha256().hexdigest()


def check_shards(members: Sequence[str | None], shards: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the records show that the shards are disjoint; False where they do not say.

    Args:
        members: N folder names, None for missing members, whose records are not read.
        shards: N records {"documents": count, "sha256": digest of the content, "identifiers":
            [keyed hash, ...], "identifier_key": digest of the key}, every entry optional, or none.

    Raises:
        ValueError: an entry of another form, or, naming the two members: shards with a common
            identifier or the same content, or identifiers hashed under different keys.
    """
    if shards and len(shards) != len(members):
        raise ValueError(
            f"shards must describe each of the {len(members)} members, got {len(shards)}"
        )
    content: dict[str, str] = {}  # what was seen -> the member that had it
    owner: dict[str, str] = {}
    first_key: tuple[Any, str] | None = None
    known = bool(shards)
    for member, shard in zip(members, shards, strict=False):
        if member is None:
            continue
        _check_record(member, shard)
        digest, key = shard.get("sha256"), shard.get("identifier_key")
        if digest not in (None, _EMPTY) and shard.get("documents") != 0:
            other = content.setdefault(digest, member)
            if other != member:
                raise ValueError(f"shards must be disjoint, {other} and {member} hold the same")
        if shard.get("identifiers") is None:
            known = known and shard.get("documents") == 0
            continue
        if first_key is None:
            first_key = (key, member)
        elif key != first_key[0]:
            raise ValueError(
                f"identifiers of {first_key[1]} and {member} must be hashed under one key: "
                "else an overlap of their shards would not be seen"
            )
        for identifier in shard["identifiers"]:
            other = owner.setdefault(identifier, member)
            if other != member:
                raise ValueError(
                    f"shards must be disjoint, {other} and {member} share the identifier "
                    f"{identifier[:12]}...: whoever it stands for is covered by neither's guarantee"
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
    if not isinstance(identifiers, list) or not all(map(_is_hex, identifiers)):
        raise ValueError(f"identifiers of {member} must be a list of hexadecimal digests")
    if shard.get("identifier_key") is None:
        raise ValueError(f"identifier_key of {member} must be given with its identifiers")
    if documents is not None and (len(identifiers) > documents or (documents and not identifiers)):
        raise ValueError(
            f"identifiers of {member} must be those of its {documents} documents, got "
            f"{len(identifiers)}"
        )


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and 32 <= len(value) <= 128 and set(value) <= _HEX
