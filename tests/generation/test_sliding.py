"""A full window: it raises, or a sequence forgets its older half and the rest is read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered, steps
from tiny_models import POSITIONS, VOCAB

from adapmixed.ensemble import Ensemble
from adapmixed.generation.text import left_padded
from adapmixed.mechanisms import PublicOnly, Unprotected
from adapmixed.privacy import Accountant


@pytest.fixture
def ensemble(base: Any, make_adapters: Callable[..., list[Path]]) -> Ensemble:
    return Ensemble.from_pretrained(base, make_adapters(2))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_after_sliding_it_is_a_fresh_read_of_what_is_left(ensemble: Ensemble) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (2, POSITIONS + 40), generator=generator)
    decoder = ensemble.decoder(ids[:, :POSITIONS], overflow="slide")
    slid = []
    for place in range(POSITIONS, ids.shape[1]):
        before = decoder.length
        decoder.append(ids[:, place])
        if decoder.length != before + 1:
            slid.append(place)
            assert (before, decoder.length) == (POSITIONS, POSITIONS // 2)
        first = place + 1 - decoder.length
        fresh = ensemble.decoder(ids[:, first : place + 1])
        for here, there in zip(decoder.logits, fresh.logits, strict=True):
            assert close(here, there), place
    assert slid == [POSITIONS, POSITIONS + POSITIONS // 2 + 1, POSITIONS + 34][: len(slid)]
    assert len(slid) >= 2


@pytest.mark.parametrize(
    "lengths",
    [(POSITIONS, 1, POSITIONS - 3), (2 * POSITIONS, 5, 3), (POSITIONS, POSITIONS - 1)],
)
def test_each_sequence_forgets_as_it_does_alone(
    ensemble: Ensemble, lengths: tuple[int, ...]
) -> None:
    """The others' lengths do not matter, also after one of them has ended."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    more = torch.randint(0, VOCAB, (2 * POSITIONS + 6, len(lengths)), generator=generator)
    ids, mask = left_padded(prompts)
    together = ensemble.decoder(ids, attention_mask=mask, overflow="slide")
    alone = [ensemble.decoder(torch.tensor([p]), overflow="slide") for p in prompts]
    rows = torch.arange(len(lengths))
    for step, tokens in enumerate(more):
        if step == POSITIONS + 5:
            together.drop(rows == 0)
            rows = rows[1:]
        private, public = together.logits
        for place, row in enumerate(rows):
            own_private, own_public = alone[row].logits
            assert close(private[:, place], own_private[:, 0]), (step, int(row))
            assert close(public[place], own_public[0])
        together.append(tokens[rows])
        for row in rows:
            alone[row].append(tokens[row][None])
    assert all(decoder.length < POSITIONS for decoder in alone)


def test_a_batch_that_slides_answers_as_single_prompts_do(ensemble: Ensemble) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [3] * (POSITIONS + 7)]
    ids, mask = left_padded(prompts)
    # The likeliest public token, so that nothing is drawn.
    arguments: dict[str, Any] = dict(max_new_tokens=2 * POSITIONS, top_k=1, overflow="slide")
    together = answered(ensemble, PublicOnly(), ids, attention_mask=mask, **arguments)
    for row, prompt in zip(together, prompts, strict=True):
        single = answered(ensemble, PublicOnly(), torch.tensor([prompt]), **arguments)
        assert torch.equal(row, single[0])
    assert not torch.equal(together[0], together[1])


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
    arguments: dict[str, Any] = dict(max_new_tokens=2 * POSITIONS, accountant=Accountant(1e-5))
    with pytest.raises(ValueError, match="max_new_tokens must be <="):
        steps(ensemble, Unprotected(), ids, **arguments)
    tokens = answered(ensemble, Unprotected(), ids, overflow="slide", **arguments)
    assert tokens.shape == (1, 2 * POSITIONS) and bool((tokens >= 0).all())
    assert arguments["accountant"].queries == 2 * POSITIONS


@pytest.mark.parametrize("overflow,count", [("slide", 3 * POSITIONS), ("refuse", POSITIONS - 2)])
def test_memory_is_enough_to_the_end_or_nothing_is_answered(
    ensemble: Ensemble, overflow: str, count: int
) -> None:
    """The largest window of the whole answer is counted before the first token is charged."""
    ids, accountant = torch.tensor([[1, 2, 3]]), Accountant(1e-5)
    arguments: dict[str, Any] = dict(max_new_tokens=count, accountant=accountant, overflow=overflow)
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as caught:
        steps(ensemble, Unprotected(), ids, memory_bytes=1, **arguments)
    needed = int(str(caught.value).split(">= ")[1].split()[0])
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {needed} "):
        steps(ensemble, Unprotected(), ids, memory_bytes=needed - 1, **arguments)
    assert accountant.queries == 0
    # The prompt alone would need less.
    ensemble.decoder(ids, memory_bytes=needed - 1, overflow=overflow)
    tokens = answered(ensemble, Unprotected(), ids, memory_bytes=needed, **arguments)
    assert tokens.shape[1] == count
