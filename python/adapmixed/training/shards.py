"""From a stream of documents to one file per shard, under the operator's secret key.

The key decides who shares a shard (`partition`) and which identifiers are kept for validation.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapmixed.data.builtin import Document
from adapmixed.files import create_file
from adapmixed.training.partition import add_document, assign_shards

KEY_BYTES = 32
_LEAST_HELD_OUT = 8  # tokens of a shard of which some are held out
_BUFFERED = 64 << 20  # bytes of documents held before they are written to their shards' files


def create_key(path: Path) -> None:
    """Draws a key from the operating system and writes it where its owner alone can read it."""
    create_file(path, os.urandom(KEY_BYTES).hex().encode() + b"\n", mode=0o600)


def create_public_key(path: Path, words: str) -> None:
    """Write the key of a division that everybody may repeat, because the text is public.

    Raises:
        ValueError: if the file is there and holds another key.
    """
    key = hashlib.sha256(words.encode()).digest()
    if not create_file(path, key.hex().encode() + b"\n", mode=0o600) and load_key(path) != key:
        raise ValueError(f"{path} must hold the key of this text, it holds another: remove it")


def load_key(path: Path) -> bytes:
    """Reads the partition's key: 64 hexadecimal digits in a file that its owner alone can read.

    Raises:
        ValueError: if the file is missing, holds something else, or is open to others.
    """
    try:
        text = path.read_text(encoding="ascii").strip()
        key = bytes.fromhex(text)
    except FileNotFoundError as error:
        raise ValueError(f"key file must exist, {path} does not") from error
    except ValueError as error:
        raise ValueError(f"key file {path} must hold {2 * KEY_BYTES} hexadecimal digits") from error
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"key file {path} must hold {2 * KEY_BYTES} hexadecimal digits, got {len(text)}"
        )
    if path.stat().st_mode & 0o077:
        raise ValueError(f"key file {path} must be readable by its owner alone (chmod 600)")
    return key


@dataclass(frozen=True)
class Spool:
    """Shards on the disk, one file of JSON lines each.

    Attributes:
        folder: holds the files.
        documents: number of documents of the whole corpus, >= 1.
        fingerprint: of the whole corpus in its order, under the key; hexadecimal.
        sizes: bytes of each shard that was written.
    """

    folder: Path
    documents: int
    fingerprint: str
    sizes: dict[int, int]

    def read(self, shard: int) -> list[Document]:
        """A shard's documents, sorted by identifier (those of one identifier as they came)."""
        path = _file(self.folder, shard)
        if not path.exists():
            return []
        with open(path, encoding="utf-8") as lines:
            documents = [Document(*json.loads(line)) for line in lines]
        return sorted(documents, key=lambda document: document.identifier)


def spool(
    documents: Iterable[Document],
    num_shards: int,
    *,
    key: bytes,
    wanted: Collection[int],
    folder: Path,
) -> Spool:
    """Distributes a stream over files in one pass, holding 64 MiB of it at a time.

    Args:
        documents: the whole corpus.
        num_shards: N >= 1.
        key: of the partition.
        wanted: shards that are written; the others are only counted into the fingerprint.
        folder: an empty folder that nobody else can read: the text is written there.

    Raises:
        ValueError: if the corpus holds no text.
    """
    mac = hmac.new(key, b"adapmixed corpus", hashlib.sha256)
    sizes: Counter[int] = Counter()
    held: dict[int, list[bytes]] = {}
    count, bytes_held = 0, 0

    def write() -> None:
        for shard, lines in held.items():
            with open(_file(folder, shard), "ab") as file:
                file.writelines(lines)
        held.clear()

    for document in documents:
        count += 1
        add_document(mac, document)
        (shard,) = assign_shards([document.identifier], num_shards, key=key)
        if shard not in wanted:
            continue
        line = json.dumps([document.identifier, document.text]).encode() + b"\n"
        held.setdefault(shard, []).append(line)
        sizes[shard] += len(line)
        bytes_held += len(line)
        if bytes_held > _BUFFERED:
            write()
            bytes_held = 0
    write()
    if count == 0:
        raise ValueError("corpus must hold text, it has none")
    return Spool(folder, count, mac.hexdigest(), dict(sizes))


def hold_out(
    documents: Sequence[Document], fraction: float, *, key: bytes
) -> tuple[list[Document], list[Document]]:
    """(training, validation): whole identifiers are held out, by a keyed hash of each.

    Which ones depends on the identifier and the key alone. If nothing would be left to train on,
    nothing is held out (see `hold_out_end`).

    Args:
        documents: of one shard.
        fraction: expected share of the identifiers, in [0, 1).
        key: of the partition.
    """
    training: list[Document] = []
    validation: list[Document] = []
    for document in documents:
        digest = hashlib.blake2b(
            document.identifier.encode(), digest_size=8, key=key, person=b"adapmixed.valid"
        ).digest()
        held = int.from_bytes(digest, "big") < fraction * 2.0**64
        (validation if held else training).append(document)
    return (training, validation) if training else (validation, [])


def hold_out_end(tokens: list[int], fraction: float) -> tuple[list[int], list[int]]:
    """Return (training, validation): the end of a shard's stream is held out.

    This is for shards of which no whole identifier is held out, for instance of one user's text.
    At least two tokens are held out, since fewer have nothing to predict, but none of a shard with
    fewer than eight.

    Args:
        tokens: of one shard.
        fraction: share of the tokens, in [0, 1).
    """
    count = int(fraction * len(tokens))
    if fraction > 0 and len(tokens) >= _LEAST_HELD_OUT:
        count = max(count, 2)
    return (tokens[:-count], tokens[-count:]) if count >= 2 else (tokens, [])


def _file(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.jsonl"
