"""The preallocated cache: written in place, as large as requested, correct after any change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import Decoder, PreallocatedLayer

ROWS, HEADS, WIDTH = 3, 2, 4


def states(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return keys and values as attention passes them, with heads and positions transposed."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, ROWS, length, HEADS, WIDTH, generator=generator).transpose(2, 3)
    return both[0], both[1]


def blocks(cache: Any) -> list[int]:
    """Return the positions that each tensor has room for."""
    return [
        part.untyped_storage().nbytes() // part[..., :1, :].numel() // part.element_size()
        for layer in cache.layers for part in (layer.keys, layer.values)
    ]  # fmt: skip


@pytest.mark.parametrize("room", [0, 4, 104])
def test_tokens_are_written_in_place_and_rooms_grow_by_a_quarter(room: int) -> None:
    """The cache is copied now and then, not with every token, and never while there is room."""
    ours, theirs = PreallocatedLayer(room), DynamicLayer()
    places = []
    for step in range(101):
        for layer in (ours, theirs):
            found = layer.update(*states(4 if step == 0 else 1, step))
            assert found[0] is layer.keys and found[1] is layer.values
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        places.append((ours.keys.data_ptr(), ours.values.data_ptr()))
    length = ours.get_seq_length()
    assert length == theirs.get_seq_length() == 104
    assert len(set(places)) <= (16 if room < length else 1)
    assert ours.keys.untyped_storage().nbytes() <= 1.25 * length * ROWS * HEADS * WIDTH * 4
    # A first pass with no known end reserves nothing.
    first = PreallocatedLayer(4)
    first.update(*states(7, 0))
    assert first.values.untyped_storage().nbytes() == 7 * ROWS * HEADS * WIDTH * 4


def held(decoder: Decoder) -> int:
    return sum(
        part.untyped_storage().nbytes()
        for layer in decoder._cache.layers for part in (layer.keys, layer.values)
    )  # fmt: skip


def test_a_decoder_has_room_for_all_that_was_counted_and_no_more(
    base: Any, make_adapters: Callable[..., list[Path]]
) -> None:
    """Chunks, decoding, an end and a restart stay within the counted bytes."""
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    ids = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    counted = ensemble.cache_bytes(3, 7 + 5)  # the largest of two layers counts twice
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as caught:
        ensemble.decoder(ids, memory_bytes=1, new_tokens=5)
    needed = int(str(caught.value).split(">= ")[1].split()[0])
    decoder = ensemble.decoder(ids, memory_bytes=needed, new_tokens=5)
    assert set(blocks(decoder._cache)) == {12} and held(decoder) == counted * 2 // 3
    place = decoder._cache.layers[0].keys.data_ptr()
    for _ in range(3):
        decoder.append(ids[:, 0])
    assert decoder._cache.layers[0].keys.data_ptr() == place
    decoder.drop(torch.tensor([False, True, False]))
    assert held(decoder) == counted * 2 // 3 * 2 * 10 // (3 * 12)  # for two sequences
    for _ in range(2):
        decoder.append(ids[:2, 0])
    assert set(blocks(decoder._cache)) == {12} and held(decoder) == counted * 4 // 9
