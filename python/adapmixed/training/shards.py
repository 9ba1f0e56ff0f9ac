"""Divide a stream of documents into one file per shard, with the operator's secret key.

The key determines the shard of each identifier (`partition`), and the identifiers that are held out
for validation.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapmixed.data.builtin import Document
from adapmixed.files import create_file
from adapmixed.training.partition import add_document

KEY_BYTES = 32
_LEAST_HELD_OUT = 8  # a shard with fewer tokens holds none of them out
_BUFFERED = 64 << 20  # bytes of documents in memory before they are written to files


def create_key(path: Path) -> None:
    """Draw a key from the operating system and write it to a file that only its owner can read."""
    create_file(path, os.urandom(KEY_BYTES).hex().encode() + b"\n", mode=0o600)


def create_public_key(path: Path, words: str) -> None:
    """Write the key of a partition that everybody may repeat, because the text is public.

    Args:
        path: file of the key.
        words: a public phrase, which determines the key.

    Raises:
        ValueError: if the file exists and holds another key.
    """
    key = hashlib.sha256(words.encode()).digest()
    if not create_file(path, key.hex().encode() + b"\n", mode=0o600) and load_key(path) != key:
        raise ValueError(f"{path} must hold the key of this text, it holds another: remove it")


def load_key(path: Path) -> bytes:
    """Read the partition's key, 64 hexadecimal digits in a file that only its owner can read.

    Raises:
        ValueError: if the file is missing, holds something else, or is open to others.
    """
    try:
        text = path.read_text(encoding="ascii").strip()
        key = bytes.fromhex(text)
    except FileNotFoundError as error:
        raise ValueError(f"key file must exist, but {path} does not") from error
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
    """Shards on the disk, each in a file of JSON lines.

    Attributes:
        folder: the folder of the files.
        fingerprint: hexadecimal keyed digest of the whole corpus in its order.
        sizes: bytes of each shard that was written.
    """

    folder: Path
    fingerprint: str
    sizes: dict[int, int]

    def read(self, shard: int) -> list[Document]:
        """Return a shard's documents sorted by identifier, else in the order of the corpus."""
        path = _file(self.folder, shard)
        if not path.exists():
            return []
        with open(path, encoding="utf-8") as lines:
            documents = [Document(*json.loads(line)) for line in lines]
        return sorted(documents, key=lambda document: document.identifier)


def spool(
    documents: Iterable[Document],
    shard_of: Callable[[str], int],
    *,
    key: bytes,
    wanted: Collection[int],
    folder: Path,
) -> Spool:
    """Divide a stream of documents into files in one pass, with 64 MiB in memory at a time.

    Args:
        documents: the whole corpus.
        shard_of: returns the shard of an identifier.
        key: the key of the partition.
        wanted: shards to write; the others only enter the fingerprint.
        folder: an empty folder that nobody else can read, where the text is written.

    Raises:
        ValueError: if the corpus holds no text.
    """
    mac = hmac.new(key, b"adapmixed corpus", hashlib.sha256)
    sizes: Counter[int] = Counter()
    held: dict[int, list[bytes]] = {}
    bytes_held = 0

    def write() -> None:
        for shard, lines in held.items():
            with open(_file(folder, shard), "ab") as file:
                file.writelines(lines)
        held.clear()

    document = None
    for document in documents:
        add_document(mac, document)
        shard = shard_of(document.identifier)
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
    if document is None:
        raise ValueError("corpus must hold text, but has none")
    return Spool(folder, mac.hexdigest(), dict(sizes))


def hold_out(
    documents: Sequence[Document], fraction: float, *, key: bytes
) -> tuple[list[Document], list[Document]]:
    """Return (training, validation), with whole identifiers held out by a keyed hash.

    Whether an identifier is held out depends on itself and the key alone. If nothing would be left
    to train on, nothing is held out (see `hold_out_end`).

    Args:
        documents: the documents of one shard.
        fraction: expected share of the identifiers to hold out, in [0, 1).
        key: the key of the partition.
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
    """Return (training, validation), with the end of a shard's token stream held out.

    This is for shards without a held-out identifier, for instance with the text of one user. At
    least two tokens are held out, since fewer have nothing to predict. A shard with fewer than
    eight tokens holds none out.

    Args:
        tokens: the token stream of one shard.
        fraction: share of the tokens to hold out, in [0, 1).
    """
    count = int(fraction * len(tokens))
    if fraction > 0 and len(tokens) >= _LEAST_HELD_OUT:
        count = max(count, 2)
    return (tokens[:-count], tokens[-count:]) if count >= 2 else (tokens, [])


def _file(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.jsonl"
