"""A member's logits depend on it alone in every bit; an empty one answers as the public model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ensemble_cases import Make, budget

from adapmixed.ensemble import BatchedLoRA, Ensemble


def assert_only_one_member_differs(
    ensemble: Ensemble,
    neighbour: Ensemble,
    ids: torch.Tensor,
    mask: torch.Tensor,
    changed: int,
    limit: int,
) -> None:
    """Assert that all passes and decoding agree in every bit, except for one member."""
    pairs = [
        (ensemble.logits(ids), neighbour.logits(ids)),
        (ensemble.logits(ids, mask), neighbour.logits(ids, mask)),
    ]
    chunks = [
        list(e.iter_logits(ids, memory_bytes=limit, attention_mask=mask))
        for e in (ensemble, neighbour)
    ]
    assert len(chunks[0]) == 3
    pairs += [(a[1:3], b[1:3]) for a, b in zip(*chunks, strict=True)]
    decoders = [e.decoder(ids) for e in (ensemble, neighbour)]
    for _ in range(2):
        pairs.append((decoders[0].logits[:2], decoders[1].logits[:2]))
        for decoder in decoders:
            decoder.append(torch.tensor([5, 6]))
    for (private, public), (private_2, public_2) in pairs:
        assert torch.equal(public, public_2)
        for member in range(ensemble.num_models):
            assert torch.equal(private[member], private_2[member]) == (member != changed)


@pytest.mark.parametrize("changed", [0, 2, 4])
@pytest.mark.slow
def test_changing_one_adapter_leaves_all_other_rows_bit_identical(
    base: Any, make_adapters: Make, ids: torch.Tensor, changed: int
) -> None:
    folders = make_adapters(5)
    (other,) = make_adapters(1, first=50)
    (zero,) = make_adapters(1, first=60, zero=True)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ensemble = Ensemble.from_pretrained(base, folders)
    limit = budget(ensemble, 2, 9, 4, False)
    for replacement in (other, zero):
        neighbour = Ensemble.from_pretrained(
            base, [*folders[:changed], replacement, *folders[changed + 1 :]]
        )
        assert_only_one_member_differs(ensemble, neighbour, ids, mask, changed, limit)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_broken_member_stays_in_its_rows(
    base: Any, make_adapters: Make, ids: torch.Tensor, value: float
) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(3))
    private, public = ensemble.logits(ids)
    for module in ensemble._forward.model.modules():
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

    ensemble._forward.layer.register_forward_hook(round_by_member)
    private, public = ensemble.logits(ids)
    assert torch.equal(private[1], public) and not torch.equal(private[0], public)
