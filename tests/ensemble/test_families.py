"""Every family in fp32 and bf16: peft's loop, one pass, chunks, cache, padding, bits of rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import linear_names, tiny
from tiny_models import VOCAB, adapted_layers, peft_logits, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.cache import written_layers
from adapmixed.ensemble.support import TESTED

# Tolerances relative to the largest logit. The loop multiplies the same shapes, while passes of
# other shapes round all activations otherwise. Missing positions move logits by 0.6 of it or more.
LOOP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
PASSES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4}
LENGTH = 9
PADDING = 4


@dataclass(frozen=True)
class Family:
    """A tiny model and adapters of unequal rank, scale and targets; the last one has B = 0."""

    base: Any
    folders: list[Path]
    ensemble: Ensemble
    ids: Tensor

    def close(self, found: Tensor, expected: Tensor, allowed: Any = PASSES) -> None:
        atol = float(expected.float().abs().max()) * allowed[self.base.dtype]
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol)


# One of each kind of cache, positions, attention and linear layers; `make test-slow` takes all.
KINDS = {"bloom", "gemma3_text", "gemma4_text", "gpt_bigcode", "gpt_neo", "gpt2", "llama"}
WAYS = [
    pytest.param(
        (name, dtype),
        id=f"{short}-{name}",
        marks=() if name in (KINDS if short == "fp32" else {"gpt2"}) else pytest.mark.slow,
    )
    for name in sorted(TESTED)
    for dtype, short in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    if name in KINDS or dtype == torch.float32
]


@pytest.fixture(scope="module", params=WAYS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name, dtype = request.param
    base = tiny(name)
    names = linear_names(base)
    settings: list[dict[str, Any]] = [
        {"target_modules": names},
        {"target_modules": names[::2], "r": 5, "use_rslora": True},
        {"target_modules": names, "zero": True},
    ]
    root = tmp_path_factory.mktemp(name)
    folders = [
        write_adapter(base, root / str(seed), seed=seed, **setting)
        for seed, setting in enumerate(settings)
    ]
    base = base.to(dtype)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    return Family(base, folders, ensemble, ids)


def one_pass(ensemble: Ensemble, ids: Tensor, mask: Any = None, cache: Any = None) -> Tensor:
    """Return logits (N + 1, b, t, V)."""
    private, public, _ = ensemble.forward(ids, mask, cache)
    return torch.cat([public[None], private])


def passes(ensemble: Ensemble, ids: Tensor, mask: Any, chunk: int, cache: Any = None) -> Tensor:
    """Return logits (N + 1, b, t, V), computed through a cache in chunks of `chunk` positions."""
    cache = ensemble.new_cache() if cache is None else cache
    parts = [
        one_pass(
            ensemble, ids[:, i : i + chunk], None if mask is None else mask[:, : i + chunk], cache
        )
        for i in range(0, ids.shape[1], chunk)
    ]
    return torch.cat(parts, dim=2)


@pytest.mark.slow
def test_equals_peft_loop(family: Family) -> None:
    private, public = family.ensemble.logits(family.ids)
    assert private.dtype == public.dtype == family.base.dtype
    family.close(private, peft_logits(family.base, family.folders, family.ids), LOOP)
    assert float((private[:2] - public).float().abs().amax(dim=(1, 2, 3)).min()) > 0.1


@pytest.mark.slow
def test_public_row_and_empty_shards_are_the_public_model_bit_by_bit(family: Family) -> None:
    """This also holds if other members change, with padding, in chunks and in decoding."""
    folders = family.folders
    ensemble = family.ensemble
    changed = [folders[1], folders[1].parent / "0", folders[2]]
    layers = adapted_layers(changed)
    other = Ensemble.from_pretrained(family.base, changed, adapted=layers)
    mask = torch.ones_like(family.ids)
    mask[0, :PADDING] = 0
    rows = family.ids.repeat(len(folders) + 1, 1)
    with torch.no_grad():
        plain = family.base(input_ids=rows).logits[: len(family.ids)]
    private, public = ensemble.logits(family.ids)
    assert torch.equal(public, plain) and torch.equal(private[2], plain)
    assert torch.equal(other.logits(family.ids)[1], plain)
    for found, again in (
        (one_pass(ensemble, family.ids, mask), one_pass(other, family.ids, mask)),
        (passes(ensemble, family.ids, mask, 3), passes(other, family.ids, mask, 3)),
    ):
        live = mask.bool()
        assert torch.equal(found[0][live], again[0][live])
        assert torch.equal(found[3][live], found[0][live])
        assert not torch.equal(found[1][live], again[1][live])


def test_chunks_and_decoding_equal_one_pass(family: Family) -> None:
    ensemble = family.ensemble
    whole = one_pass(ensemble, family.ids)
    for chunk in (2, 5):
        family.close(passes(ensemble, family.ids, None, chunk), whole)
    decoder = ensemble.decoder(family.ids[:, :3])
    for position in range(3, LENGTH):
        private, public, _ = decoder.logits
        family.close(torch.cat([public[None], private]), whole[:, :, position - 1])
        decoder.append(family.ids[:, position])


def test_left_padding_equals_single_prompts(family: Family) -> None:
    ensemble = family.ensemble
    padded, mask = family.ids.clone(), torch.ones_like(family.ids)
    padded[0, :PADDING], mask[0, :PADDING] = 9, 0
    short = one_pass(ensemble, family.ids[:1, PADDING:])
    full = one_pass(ensemble, family.ids[1:])
    for found in (one_pass(ensemble, padded, mask), passes(ensemble, padded, mask, 3)):
        family.close(found[:, :1, PADDING:], short)
        family.close(found[:, 1:], full)
    decoder = ensemble.decoder(padded[:, :6], attention_mask=mask[:, :6])
    for position in range(6, LENGTH):
        private = decoder.logits.private
        family.close(private[:, 0], short[1:, 0, position - PADDING - 1])
        family.close(private[:, 1], full[1:, 0, position - 1])
        decoder.append(family.ids[:, position])


def test_a_sequence_that_ends_leaves_the_others_as_they_were(family: Family) -> None:
    """This holds for every kind of cache: full, few heads, sliding window; padded, and twice."""
    ensemble = family.ensemble
    ids = torch.cat([family.ids, family.ids.flip(0) * 5 % VOCAB])
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    rows, start = torch.arange(4), 6
    whole = one_pass(ensemble, ids, mask)
    decoder = ensemble.decoder(ids[:, :start], attention_mask=mask[:, :start])
    for position in range(start, LENGTH):
        private, public, _ = decoder.logits
        family.close(torch.cat([public[None], private]), whole[:, rows, position - 1])
        if position in (start, start + 2):
            ended = torch.zeros(len(rows), dtype=torch.bool)
            ended[position // 2 - 3] = True  # the first, then the second
            decoder.drop(ended)
            rows = rows[~ended]
            private, public, _ = decoder.logits
            family.close(torch.cat([public[None], private]), whole[:, rows, position - 1])
        decoder.append(ids[rows, position])
    assert rows.tolist() == [1, 3]


def test_the_cache_is_as_large_as_it_is_counted(family: Family) -> None:
    """Exactly, without the largest layer's copy; a sliding window of w keeps w - 1."""
    ensemble, cache = family.ensemble, family.ensemble.new_cache()
    ensemble.forward(family.ids, None, cache)
    layers = [
        sum(part.numel() * part.element_size() for part in (layer.keys, layer.values))
        * (4 if getattr(layer, "sliding_window", None) else 1)
        // (3 if getattr(layer, "sliding_window", None) else 1)
        for layer in written_layers(cache)
    ]
    assert ensemble.cache_bytes(len(family.ids), LENGTH) == sum(layers) + max(layers)
