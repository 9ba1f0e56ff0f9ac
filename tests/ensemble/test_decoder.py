"""The decoder's cache: as large as it is counted, and prompts that are read in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ensemble_cases import TOKENS, Make, Sequences

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import Decoder


def parts(decoder: Decoder) -> list[torch.Tensor]:
    return [part for layer in decoder._cache.layers for part in (layer.keys, layer.values)]


def rooms(decoder: Decoder) -> set[int]:
    """Return the positions that the tensors have room for."""
    return {
        part.untyped_storage().nbytes() // part[..., :1, :].numel() // part.element_size()
        for part in parts(decoder)
    }


def test_a_decoder_has_room_for_all_that_was_counted_and_no_more(
    base: Any, make_adapters: Make
) -> None:
    """Chunks, decoding, an end and a restart stay within the counted bytes."""
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    counted = ensemble.cache_bytes(3, 7 + 5)  # the largest of two layers counts twice
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as caught:
        ensemble.decoder(TOKENS[:3, :7], memory_bytes=1, new_tokens=5)
    needed = int(str(caught.value).split(">= ")[1].split()[0])
    held = Sequences(ensemble, dict.fromkeys(range(3), 7), memory_bytes=needed, new_tokens=5)

    def check(rows: int) -> None:
        total = sum(part.untyped_storage().nbytes() for part in parts(held.decoder))
        assert total * 9 == counted * 2 * rows

    assert rooms(held.decoder) == {12}
    check(3)
    place = parts(held.decoder)[0].data_ptr()
    for _ in range(3):
        held.append()
    assert parts(held.decoder)[0].data_ptr() == place
    held.drop(1)
    for _ in range(2):
        held.append()
    assert rooms(held.decoder) == {12}
    check(2)


def test_room_is_reserved_for_those_who_are_left(base: Any, make_adapters: Make) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    held = Sequences(ensemble, {0: 4}, new_tokens=20)
    held.append()
    held.join({1: 6, 2: 2}, new=3)
    assert held.decoder.window == 24
    held.append()
    held.drop(0)
    assert held.decoder.window == 9
    held.append()
    assert rooms(held.decoder) == {9}
    held.drop(1)
    assert held.decoder.window == 5


@pytest.mark.parametrize("leaves_at", [0, 2, 5, None])
def test_a_prompt_is_read_in_parts(base: Any, make_adapters: Make, leaves_at: int | None) -> None:
    """A sequence may leave before all is read: test_families.py has the logits of the others."""
    ensemble = Ensemble.from_pretrained(base, make_adapters(1))
    held = Sequences(ensemble, {0: 9, 1: 4, 2: 6}, new_tokens=3, unread=True)
    decoder, other = held.decoder, ensemble.decoder(TOKENS[:1, :2])
    if leaves_at is not None:
        decoder.read(leaves_at)
        held.drop(0)
        assert (decoder.length, decoder.window) == (6, 9)
    for left in {None: (9, 5, 1), 0: (6, 2), 2: (6, 2), 5: (4,)}[leaves_at]:
        assert decoder.unread == left
        for call in (held.append, lambda: decoder.join(other), lambda: other.join(decoder)):
            with pytest.raises(ValueError, match=rf"read\(\) must be called first: {left} posit"):
                call()
        decoder.read(4)
    held.append()
