"""Training one adapter depends on its shard and seed alone, and peft reads what is saved."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TARGETS, VOCAB, peft_logits

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import head_name
from adapmixed.ensemble.members import read_adapters
from adapmixed.training import FinetuneConfig, save_adapter, shard_seed, token_blocks, train_adapter
from adapmixed.training.finetune import AdapterTrainer


def settings(family: str) -> FinetuneConfig:
    targets = tuple(TARGETS[family][:1])
    return FinetuneConfig(
        rank=2, alpha=4, target_modules=targets, learning_rate=0.02, epochs=3, batch_size=2,
        block_size=8,
    )  # fmt: skip


def stream(seed: int, length: int = 50) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, VOCAB, (length,), generator=generator)]


def test_blocks_cover_the_stream_and_score_no_filling() -> None:
    inputs, labels = token_blocks(list(range(1, 12)), 4)
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]]
    assert labels.tolist() == [[-100, 2, 3, 4], [-100, 6, 7, 8], [-100, 10, 11, -100]]
    assert token_blocks(list(range(9)), 4)[0].shape == (2, 4)
    assert token_blocks([3], 4)[0].shape == (0, 4)
    with pytest.raises(ValueError, match="block_size"):
        token_blocks([1, 2], 1)


def test_training_learns_and_leaves_the_base_alone(base: Any, family: str) -> None:
    config = settings(family)
    before = copy.deepcopy(base.state_dict())
    tokens = stream(1)
    state = torch.get_rng_state()
    model = train_adapter(base, tokens, config, seed=0, shard=3).model
    assert torch.equal(torch.get_rng_state(), state)
    after = base.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    inputs, labels = token_blocks(tokens, config.block_size)

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(model(input_ids=inputs, labels=labels).loss)

    assert loss(model) < loss(base) - 0.05


@pytest.mark.parametrize("adapt", ["first", "head"])
@pytest.mark.parametrize("change", [{}, {"steps": 40}, {"shared_a": True}])
def test_training_depends_on_shard_and_seed_only(
    base: Any, family: str, adapt: str, change: dict[str, Any]
) -> None:
    """A trainer's members have no trace of those that it trained before, or of random numbers."""
    config = replace(settings(family), **change)
    if adapt == "head":
        config = replace(config, target_modules=(head_name(base),))
    trainer = AdapterTrainer(base, config)

    def weights(trainer: AdapterTrainer, seed: int, shard: int) -> dict[str, torch.Tensor]:
        torch.rand(5)
        model = trainer.train(stream(1), seed=seed, shard=shard).model
        return {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}

    first = weights(trainer, 0, 1)
    for before in ([], stream(2), [*stream(1), *stream(1)], stream(3, 9)):
        trainer.train(before, seed=0, shard=0, held_out=stream(4, 20))
        again = weights(trainer, 0, 1)
        assert all(torch.equal(first[name], again[name]) for name in first)
    alone = weights(AdapterTrainer(base, config), 0, 1)
    assert all(torch.equal(first[name], alone[name]) for name in first)
    for seed, shard in ((0, 2), (1, 1)):
        other = weights(trainer, seed, shard)
        same = {name for name in first if torch.equal(first[name], other[name])}
        shared = {name for name in first if "lora_A" in name and change.get("shared_a")}
        assert same == (shared if seed == 0 else set())
    assert shard_seed(1, 23) != shard_seed(12, 3)


@pytest.mark.parametrize("tokens", [[], [4]])
def test_an_empty_shard_is_the_public_model(
    base: Any, family: str, tmp_path: Path, ids: torch.Tensor, tokens: list[int]
) -> None:
    config = settings(family)
    for shard, text in enumerate((tokens, stream(1))):
        model = train_adapter(base, text, config, seed=0, shard=shard).model
        save_adapter(model, tmp_path / str(shard), config, base_name="tiny")
    private, public = Ensemble.from_pretrained(base, [tmp_path / "0", tmp_path / "1"]).logits(ids)
    assert torch.equal(private[0], public)
    assert not torch.equal(private[1], public)


@pytest.mark.parametrize("adapt", ["first", "head"])
def test_saved_adapter_is_ordinary_and_neutral(
    base: Any, family: str, tmp_path: Path, adapt: str
) -> None:
    """peft reads the folder and answers as the trained model; it holds no weight of the base."""
    config = settings(family)
    if adapt == "head":
        config = replace(config, target_modules=(head_name(base),))
    model = train_adapter(base, stream(1), config, seed=0, shard=0).model
    save_adapter(model, tmp_path / "a", config, base_name="tiny")
    text = (tmp_path / "a" / "adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == "tiny"
    assert str(tmp_path) not in text and "/" not in text
    assert not read_adapters(base, [tmp_path / "a"])[0].is_zero
    assert all("lora_" in name for name in load_file(tmp_path / "a" / "adapter_model.safetensors"))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, public = (one(input_ids=ids).logits for one in (model, base))
    torch.testing.assert_close(peft_logits(base, [tmp_path / "a"], ids)[0], expected)
    assert float((expected - public).abs().max()) > 0.001


def test_config_refusals() -> None:
    wrong: dict[str, Any] = {"target_modules": (), "learning_rate": 0.0, "alpha": 0.0}
    wrong |= dict.fromkeys(("rank", "epochs", "steps", "batch_size"), 0) | {"block_size": 1}
    for name, value in (wrong | {"weight_decay": -0.1, "warmup_steps": -1}).items():
        with pytest.raises(ValueError, match=f"{name} must .*, got "):
            FinetuneConfig(**{name: value})


def test_block_longer_than_the_context_is_refused(base: Any, family: str) -> None:
    config = replace(settings(family), block_size=64)
    with pytest.raises(ValueError, match="block_size must be <= the base's 32"):
        train_adapter(base, [1, 2, 3], config, seed=0, shard=0)
