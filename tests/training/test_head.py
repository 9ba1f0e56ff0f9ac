"""Members that adapt the output layer alone train as with peft, but the trunk runs once."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import VOCAB
from torch import Tensor, nn

from adapmixed.ensemble.lora import TESTED, block_names, head_name, linear_names
from adapmixed.training import FinetuneConfig, blocks, shard_seed, train_adapter
from adapmixed.training.blocks import Blocks, find_trunk, token_blocks, trunk_once
from adapmixed.training.finetune import adapted_copy, mean_loss

CONFIG = FinetuneConfig(
    rank=3, alpha=6, target_modules=("lm_head",), learning_rate=0.02, epochs=3, batch_size=2,
    block_size=16, weight_decay=0.1,
)  # fmt: skip
# Tolerances relative to the largest weight, and in nats per token. Some machines round bfloat16
# products of other shapes otherwise.
WEIGHTS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
LOSSES = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def stream(seed: int, length: int = 90) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def settings(base: Any, **changes: Any) -> FinetuneConfig:
    return replace(CONFIG, target_modules=(head_name(base),), **changes)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def by_peft(base: Any, tokens: list[int], config: FinetuneConfig) -> tuple[Any, list[float]]:
    """Train with peft and transformers alone, without dropout; return the model and its losses."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            copy.deepcopy(base),
            LoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules),
                task_type="CAUSAL_LM",
            ),
        ).eval()  # fmt: skip
    torch.manual_seed(shard_seed(5, 2))
    for layer in (one for one in model.modules() if hasattr(one, "lora_A")):
        layer.reset_lora_parameters("default", init_lora_weights=True)
    inputs, labels = token_blocks(tokens, config.block_size)
    order = torch.Generator().manual_seed(shard_seed(5, 2))
    adamw = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    batches = -(-len(inputs) // config.batch_size)
    steps, done, losses = batches * config.epochs, 0, []
    for _ in range(config.epochs):
        total = count = 0.0
        for rows in torch.randperm(len(inputs), generator=order).split(config.batch_size):
            for group in adamw.param_groups:
                group["lr"] = config.learning_rate * (1 - done / steps)
            logits = model(input_ids=inputs[rows, :-1]).logits.float()
            targets = labels[rows, 1:]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            scored = int((targets >= 0).sum())
            total, count, done = total + float(loss.detach()) * scored, count + scored, done + 1
        losses.append(total / count)
    return model, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(TESTED))
@pytest.mark.slow
def test_equals_peft_without_dropout(family: str, dtype: torch.dtype) -> None:
    """Tied and untied heads, caps and scales give the same A, B and losses, up to rounding."""
    base = tiny(family).to(dtype)
    config = settings(base)
    trained = train_adapter(base, stream(1), config, seed=5, shard=2)
    model, losses = by_peft(base, stream(1), config)
    found, expected = weights(trained.model), weights(model)
    assert found.keys() == expected.keys() and len(found) == 2
    for name, value in expected.items():
        atol = WEIGHTS[dtype] * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)
        assert float(value.abs().max()) > 0.01
    assert losses[-1] < losses[0] - 10 * LOSSES[dtype]
    torch.testing.assert_close(trained.losses, tuple(losses), rtol=0, atol=LOSSES[dtype])


@pytest.mark.parametrize(
    ("family", "adapt"), [("llama", "head"), ("gemma2", "head"), ("llama", "all")]
)
def test_steps_in_several_passes_equal_peft(
    family: str, adapt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of one block, of which the last is shorter; not all public logits are kept."""
    monkeypatch.setattr(blocks, "PASS_TOKENS", 1)
    monkeypatch.setattr(blocks, "PUBLIC_BYTES", 4 * 20 * VOCAB)
    base = tiny(family)
    names = (head_name(base),) if adapt == "head" else linear_names(base)
    config = replace(CONFIG, target_modules=names, batch_size=4)
    trained = train_adapter(base, stream(1, 86), config, seed=5, shard=2)
    model, losses = by_peft(base, stream(1, 86), config)
    found = weights(trained.model)
    for name, value in weights(model).items():
        atol = WEIGHTS[torch.float32] * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)
    torch.testing.assert_close(trained.losses, tuple(losses), rtol=0, atol=LOSSES[torch.float32])


@pytest.mark.parametrize("family", sorted(TESTED))
def test_the_trunk_runs_once_per_block(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny(family)
    trunk, calls = base.get_decoder(), []
    monkeypatch.setattr(blocks, "_TOKENS", 1)  # one block per pass
    model = adapted_copy(base, settings(base)).eval()
    inner = model.get_base_model().get_decoder()
    inner.register_forward_hook(lambda module, given, found: calls.append(1))
    given = Blocks(*token_blocks(stream(3, 60), 16))
    trunk_found = find_trunk(model)
    with torch.no_grad():
        expected, logits = mean_loss(model, given), model(input_ids=given.inputs).logits
        calls.clear()
        with trunk_once(model, trunk_found, [given]) as (stored,):
            for _ in range(2):
                assert mean_loss(model, stored) == pytest.approx(expected, abs=1e-5)
            (part,) = stored.passes(torch.tensor([3, 0]), whole=True)  # as on a GPU
            assert part[0].tolist() == [[*range(45, 56), *range(15)]]
            assert torch.equal(part[1][0], torch.cat([given.labels[3, 1:12], given.labels[0, 1:]]))
            assert len(calls) == 4
        assert torch.equal(model(input_ids=given.inputs).logits, logits)  # the trunk is back
    assert base.get_decoder() is trunk


def test_the_trunk_has_no_dropout_and_the_base_stays() -> None:
    base = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = settings(base)
    first = train_adapter(base, stream(1), config, seed=5, shard=2)
    still = train_adapter(tiny("gpt2", resid_pdrop=0.0, embd_pdrop=0.0), stream(1), config, seed=5,
                          shard=2)  # fmt: skip
    assert first.losses == still.losses
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert all(p.requires_grad for p in base.parameters())


def test_a_trunk_that_is_not_found_runs_in_every_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """An output layer that reads more than the trunk's output is trained as any other layer."""
    base = tiny("llama")
    forward = type(base).forward

    class Odd(type(base)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **arguments: Any) -> Any:
            found = forward(self, input_ids=input_ids, **arguments)
            found.logits = found.logits + input_ids[..., None] / VOCAB
            return found

    base.__class__ = Odd
    trained = train_adapter(base, stream(1), settings(base), seed=5, shard=2)
    assert "was not found: it runs in every epoch" in caplog.text
    expected, _ = by_peft(base, stream(1), settings(base))
    for name, value in weights(expected).items():
        torch.testing.assert_close(weights(trained.model)[name], value, rtol=1e-3, atol=1e-4)


def test_only_head_members_use_stored_states() -> None:
    base = tiny("llama")
    for targets in ("lm_head", "lm_head q_proj", "q_proj"):
        model = adapted_copy(base, replace(CONFIG, target_modules=tuple(targets.split())))
        assert (find_trunk(model.eval()) is not None) == (targets == "lm_head")


@pytest.mark.parametrize(("family", "depth"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_layers_by_full_name_are_those_that_peft_adapts(family: str, depth: str) -> None:
    """Full names match their own layers alone, so h.1 does not match h.11."""
    depth = {"num_hidden_layers": 12} | ({"n_layer": 12} if family == "gpt2" else {})
    base = tiny(family, **depth)
    blocks = block_names(base)
    assert len(blocks) == 12
    for index in (1, 11):
        of_one = [name for name in linear_names(base) if name.startswith(f"{blocks[index]}.")]
        model = adapted_copy(base, replace(CONFIG, target_modules=tuple(of_one)))
        inner = model.get_base_model()
        found = [name for name, module in inner.named_modules() if hasattr(module, "lora_A")]
        assert found == of_one and len(found) >= 4


def test_states_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gives the same bits, has no name while in use, and raises without room."""
    base = tiny("llama").to(torch.bfloat16)
    expected = train_adapter(base, stream(1), settings(base), seed=5, shard=2)
    opened: list[tuple[str, int]] = []
    real = os.open

    def seen(path: Any, flags: int, mode: int = 0o777) -> int:
        opened.append((str(path), mode))
        return real(path, flags, mode)

    monkeypatch.setattr(blocks, "IN_MEMORY", 0)
    monkeypatch.setattr(os, "open", seen)
    found = train_adapter(base, stream(1), settings(base), seed=5, shard=2, scratch=tmp_path)
    assert opened and {mode for _, mode in opened} == {0o600}
    assert all(path.startswith(str(tmp_path)) for path, _ in opened)
    assert list(tmp_path.iterdir()) == []
    for name, value in weights(expected.model).items():
        assert torch.equal(weights(found.model)[name], value)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    size = (90 - 6) * 16 * 2  # tokens that are predicted, d, bytes
    with pytest.raises(RuntimeError, match=f"hidden states of a shard, {size} bytes, got .* free"):
        train_adapter(base, stream(1), settings(base), seed=5, shard=2, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
