"""Shards: which documents belong together behind one private model.

The unit of protection is a shard, so what a document may influence is settled here: a document is
assigned by a keyed hash of its *identifier* (a user, an account, a document id),

    shard(identifier) = BLAKE2b(key, identifier) mod N.

If identifiers depend neither on content nor on other documents, an edited document stays in its
shard, and adding or removing one document moves no other. That holds for names, but not for
positions in a file (`data.corpus`): there one edit can rename all later documents, so every
guarantee of the ensemble says it. A person whose records share one identifier lies in one shard.

The hash is keyed so that nobody can choose identifiers that crowd into a shard of their liking; use
a secret key of at least 16 random bytes for real data.

Assignment comes before text is cut into blocks: blocks that run across documents of two shards
would tie their models together.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from adapmixed.data.builtin import Document

_MIN_KEY = 16
_MAX_KEY = 64  # BLAKE2b's limit


def assign_shards(identifiers: Sequence[str], num_shards: int, *, key: bytes) -> list[int]:
    """Shard of each identifier.

    Args:
        identifiers: stable names; equal names give equal shards.
        num_shards: N >= 1.
        key: 16 to 64 bytes.

    Returns:
        as many integers in [0, N). The modulo bias is below N * 2**-128.

    Raises:
        ValueError: if an argument is out of range.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards must be >= 1, got {num_shards}")
    _check_key(key)
    return [_digest(identifier, key) % num_shards for identifier in identifiers]


def partition_documents(
    documents: Sequence[Document], num_shards: int, *, key: bytes
) -> list[list[Document]]:
    """Distributes documents over N shards by `assign_shards` of their identifiers.

    Documents that share an identifier (the records of one user) stay together.

    Returns:
        N lists, some possibly empty, each sorted by identifier (documents of one identifier in the
        order given): a shard's content and order depend on its own documents only.

    Raises:
        ValueError: as `assign_shards`.
    """
    ordered = sorted(documents, key=lambda document: document.identifier)
    numbers = assign_shards([document.identifier for document in ordered], num_shards, key=key)
    shards: list[list[Document]] = [[] for _ in range(num_shards)]
    for document, shard in zip(ordered, numbers, strict=True):
        shards[shard].append(document)
    return shards


def shard_record(documents: Sequence[Document], *, key: bytes) -> dict[str, Any]:
    """What `ensemble.json` says about a shard, so that overlapping shards are refused.

    Args:
        documents: of one shard.
        key: the operator's secret of 16 to 64 bytes, the same for all shards; for instance that of
            the assignment. Without it nobody can tell whether an identifier is in the shard.

    Returns:
        "documents", their number; "sha256", the HMAC-SHA-256 of identifiers and text, which tells
        nothing without the key; "identifiers", the sorted keyed hashes of the distinct identifiers;
        "identifier_key", a digest that tells keys apart.

    Raises:
        ValueError: a key of another length.
    """
    _check_key(key)
    content = hmac.new(key, b"adapmixed shard", hashlib.sha256)
    for document in documents:
        add_document(content, document)

    def keyed(text: str, person: bytes) -> str:
        digest = hashlib.blake2b(text.encode(), digest_size=16, key=key, person=person)
        return digest.hexdigest()

    names = {document.identifier for document in documents}
    return {
        "documents": len(documents),
        "sha256": content.hexdigest(),
        "identifiers": sorted(keyed(name, b"adapmixed.ident") for name in names),
        "identifier_key": keyed("", b"adapmixed.key"),
    }


def add_document(mac: hmac.HMAC, document: Document) -> None:
    """Adds identifier and text to a digest, each with its length before it."""
    for part in (document.identifier, document.text):
        encoded = part.encode()
        mac.update(len(encoded).to_bytes(8, "big"))
        mac.update(encoded)


def _check_key(key: bytes) -> None:
    if not _MIN_KEY <= len(key) <= _MAX_KEY:
        raise ValueError(f"key must have {_MIN_KEY} to {_MAX_KEY} bytes, got {len(key)}")


def _digest(identifier: str, key: bytes) -> int:
    digest = hashlib.blake2b(
        identifier.encode(), digest_size=16, key=key, person=b"adapmixed.shard"
    ).digest()
    return int.from_bytes(digest, "big")
