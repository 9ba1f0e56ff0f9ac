"""A full window: refused, or its older half forgotten and the rest read anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import POSITIONS, VOCAB

from adapmixed.decoding import generate, stream
from adapmixed.mechanisms import Unprotected
from adapmixed.models import Ensemble
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom


@pytest.fixture
def ensemble(base: Any, make_adapters: Callable[..., list[Path]]) -> Ensemble:
    return Ensemble.load(base, make_adapters(2))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [0, 3, POSITIONS - 2])
def test_after_sliding_it_is_a_fresh_read_of_what_is_left(ensemble: Ensemble, padding: int) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (2, POSITIONS + 40), generator=generator)
    mask = torch.ones(2, POSITIONS, dtype=torch.int64)
    mask[1, :padding] = 0
    decoder = ensemble.decoder(ids[:, :POSITIONS], attention_mask=mask, overflow="slide")
    slid = []
    for place in range(POSITIONS, ids.shape[1]):
        before = decoder.length
        decoder.append(ids[:, place])
        if decoder.length != before + 1:
            slid.append(place)
            assert (before, decoder.length) == (POSITIONS, POSITIONS // 2)
        first = place + 1 - decoder.length
        seen = torch.cat([mask, torch.ones(2, 40, dtype=torch.int64)], 1)[:, first : place + 1]
        fresh = ensemble.decoder(ids[:, first : place + 1], attention_mask=seen)
        for here, there in zip(decoder.logits, fresh.logits, strict=True):
            assert close(here, there), place
    assert slid == [POSITIONS, POSITIONS + POSITIONS // 2 + 1, POSITIONS + 34][: len(slid)]
    assert len(slid) >= 2


def test_a_long_prompt_is_cut_on_its_left(ensemble: Ensemble) -> None:
    ids = torch.arange(3 * POSITIONS).remainder(VOCAB)[None]
    here = ensemble.decoder(ids, overflow="slide")
    there = ensemble.decoder(ids[:, -POSITIONS:])
    assert torch.equal(here.logits[0], there.logits[0])
    with pytest.raises(ValueError, match="at most max_positions"):
        ensemble.decoder(ids)
    with pytest.raises(ValueError, match="overflow must be one of"):
        ensemble.decoder(ids, overflow="crop")


def test_generating_beyond_the_window(ensemble: Ensemble) -> None:
    ids = torch.tensor([[1, 2, 3]])
    arguments: dict[str, Any] = dict(max_new_tokens=2 * POSITIONS, rng=SeededRandom(0))
    accountant = Accountant(1e-5)
    with pytest.raises(ValueError, match="max_new_tokens must be <="):
        stream(ensemble, Unprotected(), ids, accountant=accountant, **arguments)
    tokens = generate(
        ensemble, Unprotected(), ids, accountant=accountant, overflow="slide", **arguments
    )
    assert tokens.shape == (1, 2 * POSITIONS) and bool((tokens >= 0).all())
    assert accountant.queries == 2 * POSITIONS
