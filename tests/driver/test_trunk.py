"""Members that share the public trunk: every family, head members and those of the last block."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import linear_names, tiny
from tiny_models import VOCAB, peft_logits, write_adapter
from torch import Tensor

from adapmixed.models import Ensemble
from adapmixed.models.layers import block_names
from adapmixed.models.support import TESTED

LOOP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
PASSES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4}
LENGTH, PADDING = 9, 4
KINDS = ("head", "last:1", "mixed")


def targets(base: Any, kind: str) -> list[list[str]]:
    """The target modules of three members."""
    last = [f"{block_names(base)[-1]}.{name}" for name in _inside(base)]
    if kind == "mixed":
        return [["lm_head"], last, ["lm_head", *last]]
    return [["lm_head"] if kind == "head" else last] * 3


def _inside(base: Any) -> list[str]:
    prefix = f"{block_names(base)[-1]}."
    wanted = set(linear_names(base))
    return [
        name.removeprefix(prefix)
        for name, _ in base.named_modules()
        if name.startswith(prefix) and name.rpartition(".")[2] in wanted
    ]


def close(found: Tensor, expected: Tensor, allowed: float) -> None:
    atol = float(expected.float().abs().max()) * allowed
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol)


@pytest.fixture(scope="module", params=sorted(TESTED))
def written(request: Any, tmp_path_factory: Any) -> tuple[Any, dict[str, list[Path]]]:
    base = tiny(request.param)
    found = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(f"{request.param}-{kind[:4]}")
        found[kind] = [
            write_adapter(base, root / str(i), seed=i, r=3 if i < 2 else 5, target_modules=names)
            for i, names in enumerate(targets(base, kind))
        ]
    return base, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_reading_equals_the_peft_loop(written: Any, kind: str, dtype: Any) -> None:
    base, folders = copy.deepcopy(written[0]).to(dtype), written[1][kind]
    ensemble = Ensemble.load(base, folders)
    depth = len(block_names(base))
    assert (ensemble.trunk.head is not None) == (kind == "head")
    assert (
        len(ensemble.trunk.blocks) == (0 if kind == "head" else 1) and ensemble.trunk.depth == depth
    )
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    private, public = ensemble.logits(ids)
    close(private, peft_logits(base, folders, ids), LOOP[dtype])
    assert float((private - public).float().abs().amax(dim=(1, 2, 3)).min()) > 0.02
    with torch.no_grad():
        alone = base(input_ids=ids).logits
    close(public, alone, LOOP[dtype])
    if kind == "head":
        assert torch.equal(public, alone)
    whole = torch.cat([public[None], private])
    parts = ensemble.iter_logits(
        ids, memory_bytes=ensemble._forward.sequence_bytes(LENGTH, None) * 3
    )
    chunks = [torch.cat([q[None], p]) for _, p, q in parts]
    close(torch.cat(chunks, dim=2), whole, PASSES[dtype])
    _decode(ensemble, ids, whole, PASSES[dtype])


def _decode(ensemble: Ensemble, ids: Tensor, whole: Tensor, allowed: float) -> None:
    """Token by token, the first sequence padded; then it is dropped."""
    padded, mask = torch.cat([ids[:1].roll(PADDING, 1), ids[1:]]), torch.ones_like(ids)
    padded[0, :PADDING], mask[0, :PADDING] = 9, 0
    single = ensemble._forward(ids[:1, : LENGTH - PADDING], None, None)
    decoder = ensemble.decoder(padded[:, :6], attention_mask=mask[:, :6])
    for position in range(6, LENGTH):
        private, public = decoder.logits
        both = torch.cat([public[None], private])
        close(both[:, -1], whole[:, 1, position - 1], allowed)
        if position < LENGTH - 1:
            close(both[:, 0], single[:, 0, position - PADDING - 1], allowed)
        else:
            assert both.shape[1] == 1
        if position == LENGTH - 2:
            decoder.drop(torch.tensor([True, False]))
        del private, public, both
        decoder.append(padded[-len(decoder.logits[1]) :, position])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_emptied_or_missing_member_changes_no_bit_of_others(
    written: Any, kind: str, dtype: Any, tmp_path: Path
) -> None:
    base, folders = copy.deepcopy(written[0]).to(dtype), written[1][kind]
    full = Ensemble.load(base, folders)
    layers = {name: ranks for name, ranks in _adapted(full).items()}
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    for gone in (1, 2):
        empty = write_adapter(
            base, tmp_path / f"{gone}", seed=9, zero=True, r=3 if gone < 2 else 5,
            target_modules=targets(base, kind)[gone],
        )  # fmt: skip
        for stand_in in (None, empty):
            paths: list[Path | None] = list(folders)
            paths[gone] = stand_in
            other = Ensemble.load(base, paths, adapted=layers)
            assert other.trunk == full.trunk
            assert other.sequence_bytes(7) == full.sequence_bytes(7)
            for tokens, live in ((ids, None), (ids[:1], None), (ids, mask)):
                for cut in (LENGTH, 4):
                    a, b = (_chunked(e, tokens, live, cut) for e in (full, other))
                    keep = slice(None) if live is None else live.bool()
                    for row in range(4):
                        expected = a[0] if row == gone + 1 else a[row]
                        assert torch.equal(b[row][keep], expected[keep])


def _adapted(ensemble: Ensemble) -> dict[str, list[int]]:
    from adapmixed.models.batched_lora import RankGroup

    found: dict[str, set[int]] = {}
    for name, module in ensemble._forward.model.named_modules():
        if isinstance(module, RankGroup):
            layer = name.split(".groups.")[0].split(".parts.")[0]
            found.setdefault(layer, set()).add(module.up.shape[1])
    return {name: sorted(ranks) for name, ranks in found.items()}


def _chunked(ensemble: Ensemble, ids: Tensor, mask: Tensor | None, cut: int) -> Tensor:
    forward = ensemble._forward
    cache = forward.new_cache()
    parts = [
        forward(ids[:, i : i + cut], None if mask is None else mask[:, : i + cut], cache)
        for i in range(0, ids.shape[1], cut)
    ]
    return torch.cat(parts, dim=2)
