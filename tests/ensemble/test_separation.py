"""A member's logits depend on it alone in every bit; an empty one answers as the public model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ensemble_cases import Make

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import BatchedLoRA


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_broken_member_stays_in_its_rows(
    base: Any, make_adapters: Make, ids: torch.Tensor, value: float
) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(3))
    private, public = ensemble.logits(ids)
    for module in ensemble.model.modules():
        if isinstance(module, BatchedLoRA):
            module.up[1].fill_(value)
    wild, public_2 = ensemble.logits(ids)
    assert not torch.equal(private[1], wild[1])
    assert torch.equal(public, public_2)
    assert torch.equal(private[0], wild[0]) and torch.equal(private[2], wild[2])


@pytest.mark.parametrize("missing", [False, True])
def test_zero_adapter_is_exact_where_rows_round_differently(
    missing: bool, base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    """Products may round a member's columns by its number, but the answer must not show it."""
    empty = None if missing else make_adapters(1, first=60, zero=True)[0]
    ensemble = Ensemble.from_pretrained(base, [*make_adapters(1), empty])

    def round_by_member(module: Any, arguments: Any, output: torch.Tensor) -> None:
        columns = output[..., ensemble.vocab_size :].view(*output.shape[:-1], 2, -1)
        columns *= 1 + torch.tensor([[2.0**-20], [2.0**-19]])

    ensemble.output_layer.register_forward_hook(round_by_member)
    private, public = ensemble.logits(ids)
    assert torch.equal(private[1], public) and not torch.equal(private[0], public)
