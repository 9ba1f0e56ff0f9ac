"""The private rows from the last hidden states: right, and each from its own member alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapmixed.ensemble.lora import MISSING, Adapter, Trunk
from adapmixed.ensemble.output_layer import HeadAdapters, OutputLayer
from adapmixed.vllm.heads import Heads
from adapmixed_ext.inputs import likeliest

SIZE, VOCAB, NAME = 24, 301, "lm_head"


def adapter(seed: int, rank: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(SIZE, rank, generator=generator) / SIZE**0.5
    return Adapter({NAME: (down, torch.randn(rank, VOCAB, generator=generator))})


def heads(
    adapters: list[Adapter], rank: int = 4, active: int | None = None, **others: Any
) -> Heads:
    """Return the heads of a stand-in for an ensemble, whose last tokens stand for none."""
    updates = [one.updates.get(NAME) for one in adapters]
    ensemble: Any = SimpleNamespace(
        trunk=Trunk(head=others.pop("head", NAME)),
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**others)),
        output_layer=OutputLayer(
            torch.nn.Identity(),
            len(adapters),
            VOCAB,
            HeadAdapters(updates, (SIZE, VOCAB), rank),
            shared=True,
            masked=torch.tensor([7, 300]),
        ),
        zero_members=tuple(i for i, one in enumerate(adapters) if one.is_zero),
        vocab_size=VOCAB,
    )
    return Heads(ensemble, active)


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
        private, same, tokens = heads(members).rows(hidden, public)
        assert tokens is None
        kept = [v for v in range(VOCAB) if v not in (7, 300)]
        assert private[..., [7, 300]].isneginf().all() and same[:, [7, 300]].isneginf().all()
        assert torch.equal(same[:, kept], public[:, kept])
        assert torch.equal(private[-1][:, kept], public[:, kept])
        for row, member in zip(private, members[:-1], strict=False):
            down, up = member.updates[NAME]
            wanted = public.double() + hidden.double() @ down.double() @ up.double()
            tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}
            torch.testing.assert_close(row[:, kept], wanted[:, kept].to(dtype), **tolerance)
        for active in (40, 300):  # the last one has a token that stands for none
            found, other, tokens = heads(members, active=active).rows(hidden, public)
            assert tokens is not None and torch.equal(other, same)
            assert torch.equal(found, private.gather(2, tokens.expand(len(private), -1, -1)))
            assert torch.equal(tokens, likeliest(same, active))


@pytest.mark.parametrize("ranks", [(4,), (2, 4)], ids=str)
def test_a_member_changes_no_other_row(ranks: tuple[int, ...]) -> None:
    members = [adapter(i, ranks[i % len(ranks)]) for i in range(4)]
    hidden, public = inputs(6)
    first = heads(members).rows(hidden, public)[0].clone()
    for other in (MISSING, adapter(9, ranks[0]), adapter(10, ranks[-1])):
        changed = heads([members[0], other, *members[2:]]).rows(hidden, public)[0]
        assert torch.equal(changed[[0, 2, 3]], first[[0, 2, 3]])
        assert not torch.equal(changed[1], first[1])


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"head": None}, "must have members that adapt the output layer alone inside vLLM"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"logits_scaling": 8.0}, "must not cap or scale its logits"),
    ],
)
def test_what_it_refuses(others: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        heads([adapter(0, 4)], **others)
    heads([adapter(0, 4)], logit_scale=1.0)
