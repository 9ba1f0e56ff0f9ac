"""The batched layer: what it computes, and that a row depends on its own adapter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Make
from tiny_models import adapted_layers, peft_logits, write_adapter

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import BatchedLoRA

Update = tuple[torch.Tensor, torch.Tensor]


def test_unequal_ranks_rslora_and_targets(
    base: Any, family: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    first, second = ("c_attn", "c_fc") if family == "gpt2" else ("q_proj", "gate_proj")
    settings: list[dict[str, Any]] = [
        {"target_modules": [first], "r": 1},
        {"target_modules": [second], "r": 5},
        {"target_modules": [first, second], "r": 4, "use_rslora": True},
        {
            "target_modules": [first],
            "rank_pattern": {f".*0.*{first}": 2},
            "alpha_pattern": {f".*1.*{first}": 11},
        },
        {"target_modules": [second], "layers_to_transform": [1]},
        {"target_modules": rf".*\.1\..*{first}"},
    ]
    folders = [
        write_adapter(base, tmp_path / str(seed), seed=seed, **one)
        for seed, one in enumerate(settings, start=1)
    ]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    private, public = ensemble.logits(ids)
    torch.testing.assert_close(private, peft_logits(base, folders, ids), rtol=0, atol=1e-5)
    assert float((private - public).abs().amax(dim=(1, 2, 3)).min()) > 0.1


@pytest.mark.parametrize("ranks", [(3, 3), (3, 5)])
def test_bfloat16_layer_rounds_once(ranks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, dtype=torch.bfloat16)
    updates = [(torch.randn(16, rank), torch.randn(rank, 24)) for rank in ranks]
    x = torch.randn(6, 5, 16).to(torch.bfloat16)
    with torch.no_grad():
        y = BatchedLoRA(layer, updates, max(ranks))(x)
        exact = layer(x).double()
        for i, (down, up) in enumerate(updates):
            rows = slice(2 + 2 * i, 4 + 2 * i)
            exact[rows] += x[rows].double() @ down.double() @ up.double()
    half_ulp = exact.abs() * 2.0**-8
    assert bool(((y.double() - exact).abs() <= half_ulp + 1e-5).all())


def random_update(rank: int, seed: int, shape: tuple[int, int] = (128, 384)) -> Update:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(shape[0], rank, generator=generator)
    return down, torch.randn(rank, shape[1], generator=generator)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_ranks_of_other_members(
    threads: int, length: int, dtype: torch.dtype
) -> None:
    """At shapes where the matrix library's kernels differ, with 1 to N members of one rank."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    count = 8
    layer = torch.nn.Linear(128, 384, dtype=dtype)
    x = torch.randn(count + 1, length, 128).to(dtype)
    for rank in (1, 4, 7, 64):
        own = [random_update(rank, seed) for seed in range(count)]
        with torch.no_grad():
            expected = BatchedLoRA(layer, own, 64)(x)
            public = layer(x)
        for kept in range(count):
            updates: list[Update | None] = [*own]
            for i in range(count):  # `kept` others keep `rank`, the rest change it
                if (i - 2) % count > kept:
                    other = (1, 3, 7, 64, None)[i % 5]
                    updates[i] = None if other is None else random_update(other, 100 + i)
            with torch.no_grad():
                y = BatchedLoRA(layer, updates, 64)(x)
            assert torch.equal(y[0], public[0])
            for i, update in enumerate(updates):
                if update is own[i]:
                    assert torch.equal(y[i + 1], expected[i + 1]), (rank, kept, i)
                elif update is None:
                    assert torch.equal(y[i + 1], public[i + 1])
                else:
                    assert not torch.equal(y[i + 1], expected[i + 1])


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
