"""Records are dealt by their names alone."""

from __future__ import annotations

import pytest

from adapmixed.data import Document
from adapmixed.synthesis.batches import dealt

KEY = bytes(range(32))


def documents(*names: str) -> list[Document]:
    return [Document(name, f"text of {name}") for name in names]


def test_each_name_has_one_slot_at_most() -> None:
    names = [f"n{k}" for k in range(200)]
    found = dealt([*documents(*names), Document("n7", "more")], 8, 20, key=KEY)
    assert [len(slots) for slots in found.slots] == [20] * 8
    held = [record for slots in found.slots for record in slots if record is not None]
    assert len(set(held)) == len(held) == 160 - found.empty == 200 - len(found.left_out)
    assert found.names == 200 and 0 < found.empty
    assert "text of n7\n\nmore" in held
    first, again, other = (
        dealt(order(documents(*names)), 8, 20, key=key)
        for order, key in ((list, KEY), (reversed, KEY), (list, bytes(32)))
    )
    assert first == again != other


def test_a_change_of_one_record_stays_in_its_slot() -> None:
    names = [f"n{k}" for k in range(200)]
    before = dealt(documents(*names), 8, 20, key=KEY).slots
    changed = [
        Document(one.identifier, one.text + "!" * (one.identifier == "n3"))
        for one in documents(*names)
    ]
    after = dealt(changed, 8, 20, key=KEY).slots
    places = [(b, k) for b in range(8) for k in range(20) if before[b][k] != after[b][k]]
    assert [after[b][k] for b, k in places] == ["text of n3!"]


@pytest.mark.parametrize(
    "count,size,words",
    [(5, 2, "count must be <= 4, .* that 8 names fill"), (1, 9, "at least 9 names")],
)
def test_too_few_names(count: int, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dealt(documents(*"abcdefgh"), count, size, key=KEY)
