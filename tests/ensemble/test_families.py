"""Every family: members of all layers, of the output layer and of the last block.

They equal peft's loop, every way of reading equals one pass, and rows keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Sequences
from families import linear_names, tiny
from tiny_models import VOCAB, adapted_layers, peft_logits, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import written_layers
from adapmixed.ensemble.lora import SHARES_NO_BLOCK, TESTED, block_names

# Tolerances relative to the largest logit. The loop multiplies the same shapes, while passes of
# other shapes round all activations otherwise. Missing positions move logits by 0.6 of it or more.
LOOP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
PASSES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4}
LENGTH, PADDING = 9, 4
# One of each kind of cache, positions, attention and linear layers; `make test-slow` takes all.
FAST = {"bloom", "gemma3_text", "gemma4_text", "gpt_bigcode", "gpt_neo", "gpt2", "llama"}
RANKS: list[dict[str, Any]] = [{}, {}, {"r": 5, "use_rslora": True}]
FP32, BF16 = torch.float32, torch.bfloat16
WAYS = {"all": FP32, "all, bf16": BF16, "head": BF16, "last:1": FP32, "mixed": FP32}


@dataclass(frozen=True)
class Family:
    """A tiny model, and three adapters of unequal rank and scale."""

    base: Any
    kind: str
    folders: list[Path]
    ensemble: Ensemble
    ids: Tensor

    def close(self, found: Tensor, expected: Tensor, allowed: Any = PASSES) -> None:
        atol = float(expected.float().abs().max()) * allowed[self.base.dtype]
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return the ids with padding in the first sequence, and their mask."""
        ids, mask = self.ids.clone(), torch.ones_like(self.ids)
        ids[0, :PADDING], mask[0, :PADDING] = 9, 0
        return ids, mask


def targets(base: Any, kind: str) -> list[list[str]]:
    """Return the target modules of three members."""
    names = linear_names(base)
    if kind == "all":
        return [names, names[::2], names]
    prefix = f"{block_names(base)[-1]}."
    layers = [name for name, _ in base.named_modules() if name.startswith(prefix)]
    last = [name for name in layers if name.rpartition(".")[2] in names]
    if kind == "mixed":
        return [["lm_head"], last, ["lm_head", *last]]
    return [["lm_head"] if kind == "head" else last] * 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, way),
            id=f"{name}-{way}",
            marks=() if name == "gpt2" or way == "all" and name in FAST else pytest.mark.slow,
        )
        for name in sorted(TESTED)
        for way in WAYS
    ],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name, way = request.param
    base, kind, root = tiny(name), way.removesuffix(", bf16"), tmp_path_factory.mktemp(name)
    folders = [
        write_adapter(base, root / str(seed), seed=seed, target_modules=names, **rank)
        for seed, (names, rank) in enumerate(zip(targets(base, kind), RANKS, strict=True))
    ]
    base = base.to(WAYS[way])
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    return Family(base, kind, folders, ensemble, ids)


def read(ensemble: Ensemble, ids: Tensor, mask: Tensor | None = None, chunk: int = 0) -> Tensor:
    """Return logits (N + 1, b, t, V) of one pass, or through a cache in chunks."""
    cache, chunk = (ensemble.new_cache(), chunk) if chunk else (None, ids.shape[1])
    parts = []
    for start in range(0, ids.shape[1], chunk):
        stop = start + chunk
        part = None if mask is None else mask[:, :stop]
        private, public, _ = ensemble.forward(ids[:, start:stop], part, cache)
        parts.append(torch.cat([public[None], private]))
    return torch.cat(parts, dim=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_equals_the_peft_loop(family: Family) -> None:
    base, kind, trunk = family.base, family.kind, family.ensemble.trunk
    if kind == "head":
        assert trunk.head == "lm_head"
    elif kind == "all":
        assert str(trunk).startswith("no block")
    elif base.config.model_type in SHARES_NO_BLOCK:
        assert trunk.repeats_input  # its blocks cannot be shared
    else:
        assert (len(trunk.blocks), trunk.depth) == (1, len(block_names(base)))
    private, public = family.ensemble.logits(family.ids)
    assert private.dtype == public.dtype == base.dtype
    family.close(private, peft_logits(base, family.folders, family.ids), LOOP)
    assert float((private - public).float().abs().amax(dim=(1, 2, 3)).min()) > 0.02
    rows = family.ids.repeat(1 if kind == "head" else 4, 1)
    with torch.no_grad():
        reference = base(input_ids=rows).logits[: len(family.ids)]
    family.close(public, reference, LOOP)
    if kind in ("all", "head"):
        assert torch.equal(public, reference)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_an_emptied_or_missing_member_changes_no_bit_of_others(
    family: Family, tmp_path: Path
) -> None:
    base, full, layers = family.base, family.ensemble, adapted_layers(family.folders)
    mask = family.padded()[1]
    for gone in (1, 2):
        names = targets(base, family.kind)[gone]
        empty = write_adapter(
            base, tmp_path / str(gone), seed=9, zero=True, target_modules=names, **RANKS[gone]
        )
        for stand_in in (None, empty):
            paths: list[Path | None] = list(family.folders)
            paths[gone] = stand_in
            other = Ensemble.from_pretrained(base, paths, adapted=layers)
            assert other.trunk == full.trunk
            assert other.sequence_bytes(7) == full.sequence_bytes(7)
            for ids, live in ((family.ids, None), (family.ids[:1], None), (family.ids, mask)):
                for chunk in (0, LENGTH, 4):
                    a, b = (read(ensemble, ids, live, chunk) for ensemble in (full, other))
                    keep = slice(None) if live is None else live.bool()
                    for row in range(4):
                        expected = a[0] if row == gone + 1 else a[row]
                        assert torch.equal(b[row][keep], expected[keep])
                    assert not torch.equal(a[gone + 1][keep], a[0][keep])


@pytest.mark.filterwarnings("ignore")
def test_every_way_of_reading_equals_one_pass(family: Family) -> None:
    """In chunks and token by token; what is padded equals what is shorter."""
    ensemble, ids = family.ensemble, family.ids
    whole = read(ensemble, ids)
    for chunk in (2, 5):
        family.close(read(ensemble, ids, None, chunk), whole)
    parts = ensemble.iter_logits(ids, memory_bytes=ensemble.sequence_bytes(LENGTH) * 3)
    chunks = [torch.cat([public[None], private]) for _, private, public, _ in parts]
    family.close(torch.cat(chunks, dim=2), whole)
    padded, mask = family.padded()
    single, live = whole.clone(), mask.bool()
    single[:, :1, PADDING:] = read(ensemble, ids[:1, PADDING:])
    for chunk in (0, 3):
        family.close(read(ensemble, padded, mask, chunk)[:, live], single[:, live])
    for tokens, attention, expected in ((ids, None, whole), (padded, mask[:, :6], single)):
        decoder = ensemble.decoder(tokens[:, :6], attention_mask=attention)
        for position in range(6, LENGTH):
            private, public, _ = decoder.logits
            family.close(torch.cat([public[None], private]), expected[:, :, position - 1])
            decoder.append(tokens[:, position])


@pytest.mark.filterwarnings("ignore")
def test_sequences_that_join_and_leave_answer_as_each_does_alone(family: Family) -> None:
    """They join a longer and a shorter batch, leave, and join again.

    One leaves before the prompts are read: so far that the other has only padding, or further.
    """
    rtol = 2e-5 if family.base.dtype == FP32 else 2.0**-4
    for part in (2, 5):
        held = Sequences(family.ensemble, {0: 9, 1: 6}, unread=True)
        held.decoder.read(part)
        held.drop(0)
        held.decoder.read()
        held.check(rtol)
    held = Sequences(family.ensemble, {0: 9, 1: 3}, new_tokens=8)
    held.append()
    held.check(rtol)
    held.join({2: 2, 3: 6}, new=10)
    held.append()
    held.check(rtol)
    held.drop(0)
    assert held.decoder.length == max(held.lengths.values())  # the padding that was left has gone
    held.append()
    held.check(rtol)
    held.drop(3, 2)
    held.join({4: 12}, new=3)
    held.append()
    assert held.decoder.length == 13
    held.check(rtol)
    for _ in range(5):
        held.append()
    held.drop(4)
    held.append()
    held.check(rtol)


@pytest.mark.filterwarnings("ignore")
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
