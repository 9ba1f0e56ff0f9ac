"""The private rows from the last hidden states: right, and each from its own member alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapmixed.ensemble.member import MISSING, Adapter
from adapmixed.vllm.heads import Heads

SIZE, VOCAB, NAME = 24, 301, "lm_head"


def adapter(seed: int, rank: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(SIZE, rank, generator=generator) / SIZE**0.5
    return Adapter({NAME: (down, torch.randn(rank, VOCAB, generator=generator))})


def heads(adapters: list[Adapter], ranks: tuple[int, ...]) -> Heads:
    return Heads(adapters, NAME, ranks, (SIZE, VOCAB), torch.tensor([7, 300]))


def inputs(positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, public = (torch.randn(positions, one, generator=generator) for one in (SIZE, VOCAB))
    return hidden.to(dtype), public.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [(4,), (2, 4)], ids=str)
def test_rows(dtype: torch.dtype, ranks: tuple[int, ...]) -> None:
    members = [adapter(i, ranks[i % len(ranks)]) for i in range(4)] + [MISSING]
    for positions in (1, 6):
        hidden, public = inputs(positions, dtype)
        private, same = heads(members, ranks).rows(hidden, public)
        kept = [v for v in range(VOCAB) if v not in (7, 300)]
        assert private[..., [7, 300]].isneginf().all() and same[:, [7, 300]].isneginf().all()
        assert torch.equal(same[:, kept], public[:, kept])
        assert torch.equal(private[-1][:, kept], public[:, kept])
        for row, member in zip(private, members[:-1], strict=False):
            down, up = member.updates[NAME]
            wanted = public.double() + hidden.double() @ down.double() @ up.double()
            tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}
            torch.testing.assert_close(row[:, kept], wanted[:, kept].to(dtype), **tolerance)


@pytest.mark.parametrize("ranks", [(4,), (2, 4)], ids=str)
def test_a_member_changes_no_other_row(ranks: tuple[int, ...]) -> None:
    members = [adapter(i, ranks[i % len(ranks)]) for i in range(4)]
    hidden, public = inputs(6)
    first = heads(members, ranks).rows(hidden, public)[0].clone()
    for other in (MISSING, adapter(9, ranks[0]), adapter(10, ranks[-1])):
        changed = heads([members[0], other, *members[2:]], ranks).rows(hidden, public)[0]
        assert torch.equal(changed[[0, 2, 3]], first[[0, 2, 3]])
        assert not torch.equal(changed[1], first[1])
