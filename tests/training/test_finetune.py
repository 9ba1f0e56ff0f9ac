"""Training one adapter: it depends on its shard and seed alone, and is peft's own.

Members that adapt the output layer alone train as with peft, too, but the trunk runs once.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from safetensors.torch import load_file
from tiny_models import TARGETS, VOCAB, peft_logits
from torch import Tensor, nn

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import TESTED, block_names, head_name, linear_names
from adapmixed.ensemble.members import read_adapters
from adapmixed.training import AdapterTrainer, FinetuneConfig, blocks, save_adapter, shard_seed
from adapmixed.training.blocks import Blocks, HeadTrunk, token_blocks
from adapmixed.training.finetune import Trained, adapted_copy, mean_loss
from adapmixed.training.shards import hold_out

CONFIG = FinetuneConfig(
    rank=3, alpha=6, target_modules=("lm_head",), learning_rate=0.02, epochs=3, batch_size=2,
    block_size=16, weight_decay=0.1,
)  # fmt: skip
FAST = replace(CONFIG, learning_rate=0.05, epochs=6, weight_decay=0.01)
KINDS = {"head": ("lm_head",), "deep": ("q_proj", "v_proj")}  # of Llama
# Tolerances relative to the largest weight, and in nats per token. Some machines round bfloat16
# products of other shapes otherwise.
WEIGHTS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
LOSSES = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def stream(seed: int, length: int = 90, successors: int = 2) -> list[int]:
    """Return tokens with few possible successors, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 1 + successors, (length,), generator=generator)
    return (steps.cumsum(0) % VOCAB).tolist()


def train_adapter(base: Any, tokens: list[int], config: FinetuneConfig, **options: Any) -> Trained:
    return AdapterTrainer(base, config).train(tokens, **options)


def settings(base: Any, adapt: str = "head") -> FinetuneConfig:
    """Return settings of members of the output layer, or of the first target of the family."""
    first = TARGETS.get(base.config.model_type, [""])[0]
    return replace(CONFIG, target_modules=(first if adapt == "first" else head_name(base),))


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    return {name for name in first if torch.equal(first[name], second[name])}


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
    for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
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


def check_equals_peft(
    base: Any, length: int, config: FinetuneConfig, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Check A, B and losses up to rounding; return the losses."""
    tokens = stream(1, length, successors=VOCAB)
    trained = train_adapter(base, tokens, config, seed=5, shard=2)
    model, losses = by_peft(base, tokens, config)
    found = weights(trained.model)
    for name, value in weights(model).items():
        atol = WEIGHTS[dtype] * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)
        assert float(value.abs().max()) > 0.01
    torch.testing.assert_close(trained.losses, tuple(losses), rtol=0, atol=LOSSES[dtype])
    return losses


def test_blocks_cover_the_stream_and_score_no_filling() -> None:
    inputs, labels = token_blocks(list(range(1, 12)), 4)
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]]
    assert labels.tolist() == [[-100, 2, 3, 4], [-100, 6, 7, 8], [-100, 10, 11, -100]]
    assert token_blocks(list(range(9)), 4)[0].shape == (2, 4)
    assert token_blocks([3], 4)[0].shape == (0, 4)
    with pytest.raises(ValueError, match="block_size"):
        token_blocks([1, 2], 1)


@pytest.mark.parametrize("adapt", ["first", "head", "head in bf16"])
@pytest.mark.parametrize("change", [{}, {"steps": 40}, {"shared_a": True}])
def test_training_depends_on_shard_and_seed_only(
    base: Any, adapt: str, change: dict[str, Any]
) -> None:
    """A trainer's members have no trace of those that it trained before, or of random numbers."""
    base = base.to(torch.bfloat16 if "bf16" in adapt else torch.float32)
    config = replace(settings(base, adapt), **change)
    trainer = AdapterTrainer(base, config)

    def trained(trainer: AdapterTrainer, seed: int, shard: int) -> dict[str, Tensor]:
        torch.rand(5)
        return weights(trainer.train(stream(1), seed=seed, shard=shard).model)

    first = trained(trainer, 0, 1)
    for before in ([], stream(2), [*stream(1), *stream(1)], stream(3, 9)):
        trainer.train(before, seed=0, shard=0, held_out=stream(4, 20))
        assert same(trained(trainer, 0, 1), first) == first.keys()
    assert same(trained(AdapterTrainer(base, config), 0, 1), first) == first.keys()
    for seed, shard in ((0, 2), (1, 1)):
        shared = {name for name in first if "lora_A" in name and change.get("shared_a")}
        assert same(trained(trainer, seed, shard), first) == (shared if seed == 0 else set())
    assert shard_seed(1, 23) != shard_seed(12, 3)


@pytest.mark.parametrize("tokens", [[], [4]])
def test_an_empty_shard_is_the_public_model(
    base: Any, tmp_path: Path, ids: Tensor, tokens: list[int]
) -> None:
    config = settings(base, "first")
    for shard, text in enumerate((tokens, stream(1))):
        model = train_adapter(base, text, config, seed=0, shard=shard).model
        save_adapter(model, tmp_path / str(shard), config, base_name="tiny")
    private, public = Ensemble.from_pretrained(base, [tmp_path / "0", tmp_path / "1"]).logits(ids)
    assert torch.equal(private[0], public)
    assert not torch.equal(private[1], public)


@pytest.mark.parametrize("adapt", ["first", "head"])
def test_a_saved_adapter_is_ordinary_and_neutral(base: Any, tmp_path: Path, adapt: str) -> None:
    """peft reads the folder and answers as the trained model; it holds no weight of the base.

    Neither the base nor torch's random state has changed.
    """
    before, state = copy.deepcopy(base.state_dict()), torch.get_rng_state()
    config = replace(settings(base, adapt), learning_rate=0.05)
    trained = train_adapter(base, stream(1), config, seed=0, shard=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert before.keys() == base.state_dict().keys() == same(before, base.state_dict())
    assert all(p.requires_grad for p in base.parameters())
    assert trained.losses[-1] < trained.losses[0] - 0.05
    save_adapter(trained.model, tmp_path / "a", config, base_name="tiny")
    text = (tmp_path / "a" / "adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == "tiny"
    assert str(tmp_path) not in text and "/" not in text
    assert not read_adapters(base, [tmp_path / "a"])[0].is_zero
    assert all("lora_" in name for name in load_file(tmp_path / "a" / "adapter_model.safetensors"))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, public = (model(input_ids=ids).logits for model in (trained.model, base))
    torch.testing.assert_close(peft_logits(base, [tmp_path / "a"], ids)[0], expected)
    assert float((expected - public).abs().max()) > 0.001


def test_refused_settings(base: Any) -> None:
    wrong: dict[str, Any] = {"target_modules": (), "learning_rate": 0.0, "alpha": 0.0}
    wrong |= dict.fromkeys(("rank", "epochs", "steps", "batch_size"), 0) | {"block_size": 1}
    wrong |= {"weight_decay": -0.1, "warmup_steps": -1, "validation_fraction": float("nan")}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must .*, got "):
            FinetuneConfig(**{name: value})
    with pytest.raises(ValueError, match="validation_fraction must be > 0 with early_stopping"):
        FinetuneConfig(early_stopping=True, validation_fraction=0.0)
    with pytest.raises(ValueError, match="block_size must be <= the base's 32"):
        train_adapter(base, [1, 2, 3], replace(settings(base), block_size=64), seed=0, shard=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_epoch_is_kept(kind: str) -> None:
    """The kept epoch has the least held-out loss; training itself does not change."""
    base, config = tiny("llama"), replace(FAST, target_modules=KINDS[kind])
    stopping = replace(config, early_stopping=True)
    arguments: dict[str, Any] = {"seed": 0, "shard": 2, "held_out": stream(2, 20)}
    plain = train_adapter(base, stream(1), config, **arguments)
    best = train_adapter(base, stream(1), stopping, **arguments)
    assert best.losses == plain.losses and best.held_out_losses == plain.held_out_losses
    assert len(best.held_out_losses) == 1 + 6 == 1 + len(best.losses)
    assert plain.epoch == 6 and best.epoch < 6
    assert best.held_out_losses[best.epoch] == min(best.held_out_losses)
    held = Blocks(*token_blocks(stream(2, 20), 16))
    for trained in (plain, best):
        found = mean_loss(trained.model, held)
        assert found == pytest.approx(trained.held_out_losses[trained.epoch], abs=1e-5)
    assert best.held_out_losses[0] == pytest.approx(mean_loss(base, held), abs=1e-5)
    # What never helps leaves the public model, and without held-out text all epochs are kept.
    arguments["held_out"] = list(range(6, 26))
    never = train_adapter(base, [5] * 90, stopping, **arguments)
    assert never.epoch == 0 and min(never.held_out_losses[1:]) > never.held_out_losses[0]
    ids = torch.tensor([stream(3, 9)])
    with torch.no_grad():
        assert torch.equal(never.model(input_ids=ids).logits, base(input_ids=ids).logits)
    whole = train_adapter(base, stream(1), stopping, seed=0, shard=2)
    assert whole.epoch == 6 and whole.held_out_losses == ()
    assert same(weights(whole.model), weights(plain.model)) == weights(plain.model).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_least_number_of_steps(kind: str) -> None:
    """As many steps as six epochs have give the same member; all of the shard is read once."""
    base, config = tiny("llama"), replace(FAST, target_modules=KINDS[kind])
    arguments: dict[str, Any] = {"seed": 0, "shard": 2, "held_out": stream(2, 20)}
    plain = train_adapter(base, stream(1), config, **arguments)
    config = replace(config, epochs=1)
    steps = train_adapter(base, stream(1), replace(config, steps=18), **arguments)
    assert len(steps.losses) == 4 and steps.epoch == 4
    assert steps.held_out_losses[-1] == plain.held_out_losses[-1] != plain.held_out_losses[-2]
    for least, losses in ((2, 1), (3, 1), (4, 4)):  # one epoch has three steps
        few = train_adapter(base, stream(1), replace(config, steps=least), **arguments)
        assert len(few.losses) == losses and few.losses[0] > steps.losses[-1]
    short = train_adapter(base, stream(1, 9), replace(config, steps=2), **arguments)
    assert len(short.losses) == 2 and min(short.losses) > 1.0  # no part is without a step


def test_the_end_of_a_stream_is_held_out() -> None:
    tokens = list(range(100))
    assert hold_out(tokens, 0.05) == (tokens[:95], tokens[95:])
    assert hold_out(tokens, 0.0) == (tokens, [])
    assert hold_out(tokens[:60], 0.05) == (tokens[:57], tokens[57:60])
    assert hold_out(tokens[:8], 0.05) == (tokens[:6], tokens[6:8])  # one predicts nothing
    assert hold_out(tokens[:7], 0.05) == (tokens[:7], [])
    assert hold_out([], 0.5) == ([], [])


# Members of the output layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(TESTED))
@pytest.mark.slow
def test_equals_peft_without_dropout(family: str, dtype: torch.dtype) -> None:
    """Tied and untied heads, caps and scales give the same A, B and losses, up to rounding."""
    base = tiny(family).to(dtype)
    losses = check_equals_peft(base, 90, settings(base), dtype)
    assert losses[-1] < losses[0] - 10 * LOSSES[dtype]


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
    check_equals_peft(base, 86, replace(CONFIG, target_modules=names, batch_size=4))


@pytest.mark.parametrize("family", sorted(TESTED))
def test_the_trunk_runs_once_per_block(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny(family)
    trunk, calls = base.get_decoder(), []
    monkeypatch.setattr(blocks, "_TOKENS", 1)  # one block per pass
    model = adapted_copy(base, settings(base)).eval()
    inner = model.get_base_model().get_decoder()
    inner.register_forward_hook(lambda module, inputs, output: calls.append(1))
    text = Blocks(*token_blocks(stream(3, 60), 16))
    trunk_found = HeadTrunk(model)
    with torch.no_grad():
        expected, logits = mean_loss(model, text), model(input_ids=text.inputs).logits
        calls.clear()
        with trunk_found.once([text]) as (stored,):
            for _ in range(2):
                assert mean_loss(model, stored) == pytest.approx(expected, abs=1e-5)
            (part,) = stored.passes(torch.tensor([3, 0]), whole=True)  # as on a GPU
            assert part[0].tolist() == [[*range(45, 56), *[0] * 4], [*range(15)]]
            assert torch.equal(part[1], text.labels[[3, 0], 1:])
            assert len(calls) == 4
        assert torch.equal(model(input_ids=text.inputs).logits, logits)  # the trunk is back
    assert base.get_decoder() is trunk


@pytest.mark.parametrize("adapt", ["head", "first"])
def test_the_trunk_has_no_dropout(adapt: str) -> None:
    """A base in train mode is trained as one in eval mode. Layers above the trunk have dropout."""
    first, still = (
        train_adapter(base.train(), stream(1), settings(base, adapt), seed=5, shard=2)
        for base in (tiny("gpt2", resid_pdrop=p, embd_pdrop=p) for p in (0.5, 0.0))
    )
    assert (first.losses == still.losses) == (adapt == "head")


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


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layers_by_full_name_are_those_that_peft_adapts(family: str) -> None:
    """Full names match their own layers alone, so h.1 does not match h.11.

    Members of the output layer and of others do not use stored states.
    """
    base = tiny(family, num_hidden_layers=12, n_layer=12)
    blocks = block_names(base)
    assert len(blocks) == 12
    for index in (1, 11):
        of_one = [name for name in linear_names(base) if name.startswith(f"{blocks[index]}.")]
        names = (*of_one, "lm_head")
        model = adapted_copy(base, replace(CONFIG, target_modules=names)).eval()
        inner = model.get_base_model()
        found = [name for name, module in inner.named_modules() if hasattr(module, "lora_A")]
        assert found == list(names) and len(found) >= 5
        assert not HeadTrunk(model).found


def test_states_that_memory_does_not_hold_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    base, size = tiny("llama"), (60 - 4) * 16 * 4  # tokens that are predicted, d, bytes
    model = adapted_copy(base, settings(base)).eval()
    text = Blocks(*token_blocks(stream(3, 60), 16))
    for limit in (size, size - 1):
        monkeypatch.setattr(blocks, "STATES_BYTES", limit)
        with HeadTrunk(model).once([text]) as (stored,):
            assert (stored is text) == (limit < size)
    check_equals_peft(base, 90, settings(base))
