"""Deal records to batches, of which each text uses one.

The number of batches and of slots in each is public. A name goes to the batch that a keyed hash of
it tells, so that no other record decides in which it lies. Records of one name share a slot,
because one slot is charged. If more names meet in a batch than it has slots, those that come first
by their hash have one, and the others are left out. A slot without a name is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from adapmixed.data import Document
from adapmixed.training.partition import assign_shards, keyed_name

BETWEEN = "\n\n"
"""Between the records of one name."""


class Batches(NamedTuple):
    """The records of all batches.

    Attributes:
        slots: for each batch its records, None in an empty slot.
        names: the number of names in the corpus. It and the next two are private.
        left_out: names without a slot.
        empty: empty slots.
    """

    slots: list[list[str | None]]
    names: int
    left_out: int
    empty: int


def dealt(documents: Iterable[Document], count: int, size: int, *, key: bytes) -> Batches:
    """Return the records of `count` batches of `size` slots.

    Args:
        documents: the records and their names.
        count: number of batches, ≥ 1.
        size: number of slots in each, ≥ 1.
        key: 16 to 64 bytes, a secret.

    Raises:
        ValueError: there are no records, or fewer names than `size` for each of the batches.
    """
    texts: dict[str, list[str]] = {}
    for document in documents:
        texts.setdefault(document.identifier, []).append(document.text)
    if len(texts) < count * size:
        possible = len(texts) // size
        raise ValueError(
            f"count must be <= {possible}, the batches of {size} that {len(texts)} names fill, got "
            f"{count}: ask for fewer texts, or for smaller batches"
            if possible
            else f"texts must hold at least {size} names, a batch, got {len(texts)}"
        )
    found: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(texts, key=lambda name: keyed_name(name, key)):
        (batch,) = assign_shards([name], count, key=key)
        found[batch].append(BETWEEN.join(texts[name]))
    left_out = sum(max(0, len(batch) - size) for batch in found)
    slots = [[*batch[:size], *[None] * (size - len(batch))] for batch in found]
    empty = sum(record is None for batch in slots for record in batch)
    return Batches(slots, len(texts), left_out, empty)
