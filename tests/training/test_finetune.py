"""The held-out text of a shard, its record, and the epoch that is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import VOCAB

from adapmixed.training import FinetuneConfig, train_adapter
from adapmixed.training.blocks import Blocks, token_blocks
from adapmixed.training.finetune import mean_loss
from adapmixed.training.shards import hold_out_end

TARGETS = {"head": ("lm_head",), "deep": ("q_proj", "v_proj")}


def config(kind: str, *, epochs: int = 6, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig(
        rank=3, alpha=6, target_modules=TARGETS[kind], learning_rate=0.05, epochs=epochs,
        batch_size=2, block_size=16, **changes,
    )  # fmt: skip


def stream(seed: int, length: int = 90) -> list[int]:
    """Return tokens with few possible successors, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 3, (length,), generator=generator)
    return (steps.cumsum(0) % VOCAB).tolist()


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny("llama")


@pytest.mark.parametrize("kind", ["head", "deep"])
def test_the_best_epoch_is_kept(base: Any, kind: str) -> None:
    """The kept epoch has the least held-out loss; training itself does not change."""
    given: dict[str, Any] = {"seed": 0, "shard": 2, "held_out": stream(2, 20)}
    plain = train_adapter(base, stream(1), config(kind), **given)
    best = train_adapter(base, stream(1), config(kind, early_stopping=True), **given)
    assert best.losses == plain.losses and best.held_out_losses == plain.held_out_losses
    assert len(best.held_out_losses) == 1 + 6 == 1 + len(best.losses)
    assert plain.epoch == 6 and best.epoch < 6
    assert best.held_out_losses[best.epoch] == min(best.held_out_losses)
    blocks = Blocks(*token_blocks(stream(2, 20), 16))
    for trained in (plain, best):
        found = mean_loss(trained.model, blocks)
        assert found == pytest.approx(trained.held_out_losses[trained.epoch], abs=1e-5)
    assert best.held_out_losses[0] == pytest.approx(mean_loss(base, blocks), abs=1e-5)


@pytest.mark.parametrize("kind", ["head", "deep"])
def test_a_least_number_of_steps(base: Any, kind: str) -> None:
    """As many steps as six epochs have give the same member; all of the shard is read once."""
    given: dict[str, Any] = {"seed": 0, "shard": 2, "held_out": stream(2, 20)}
    plain = train_adapter(base, stream(1), config(kind), **given)
    steps = train_adapter(base, stream(1), config(kind, epochs=1, steps=18), **given)
    assert len(steps.losses) == 4 and steps.epoch == 4
    assert steps.held_out_losses[-1] == plain.held_out_losses[-1] != plain.held_out_losses[-2]
    for least, losses in ((2, 1), (3, 1), (4, 4)):  # one epoch has three steps
        few = train_adapter(base, stream(1), config(kind, epochs=1, steps=least), **given)
        assert len(few.losses) == losses and few.losses[0] > steps.losses[-1]
    short = train_adapter(base, stream(1, 9), config(kind, epochs=1, steps=2), **given)
    assert len(short.losses) == 2 and min(short.losses) > 1.0  # no part is without a step


@pytest.mark.parametrize("kind", ["head", "deep"])
def test_training_that_never_helps_leaves_the_public_model(base: Any, kind: str) -> None:
    harmful = config(kind, early_stopping=True)
    others = list(range(6, 26))
    trained = train_adapter(base, [5] * 90, harmful, seed=0, shard=0, held_out=others)
    assert trained.epoch == 0 and min(trained.held_out_losses[1:]) > trained.held_out_losses[0]
    ids = torch.tensor([stream(3, 9)])
    with torch.no_grad():
        assert torch.equal(trained.model(input_ids=ids).logits, base(input_ids=ids).logits)


def test_without_held_out_text_all_epochs_are_kept(base: Any) -> None:
    found = [
        train_adapter(base, stream(1), config("head", early_stopping=stop), seed=0, shard=0)
        for stop in (False, True)
    ]
    for trained in found:
        assert trained.epoch == 6 and trained.held_out_losses == ()
    first, second = (dict(trained.model.named_parameters()) for trained in found)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_end_of_a_stream_is_held_out() -> None:
    tokens = list(range(100))
    assert hold_out_end(tokens, 0.05) == (tokens[:95], tokens[95:])
    assert hold_out_end(tokens, 0.0) == (tokens, [])
    assert hold_out_end(tokens[:60], 0.05) == (tokens[:57], tokens[57:60])
    assert hold_out_end(tokens[:8], 0.05) == (tokens[:6], tokens[6:8])  # one predicts nothing
    assert hold_out_end(tokens[:7], 0.05) == (tokens[:7], [])
    assert hold_out_end([], 0.5) == ([], [])
