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
from adapmixed.training.shards import assign_shards, keyed_name

BETWEEN = "\n\n"
"""Between the records of one name."""


class Batches(NamedTuple):
    """The records of all batches. All of it is private.

    Attributes:
        slots: for each batch its records, None in an empty slot.
        left_out: the records of names that found their batch full.
    """

    slots: list[list[str | None]]
    left_out: list[str]

    @property
    def empty(self) -> int:
        """The number of empty slots."""
        return sum(record is None for batch in self.slots for record in batch)

    @property
    def names(self) -> int:
        """The number of names."""
        return sum(map(len, self.slots)) - self.empty + len(self.left_out)


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
    slots = [[*batch[:size], *[None] * (size - len(batch))] for batch in found]
    return Batches(slots, [record for batch in found for record in batch[size:]])
