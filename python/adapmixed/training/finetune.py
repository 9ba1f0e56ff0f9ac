"""Train one LoRA adapter on one shard.

Training on shard i depends only on the shard's documents, on public data (the base, the settings)
and on a seed derived from (seed, i). So there is no early stopping or tuning across shards, and no
random state that another shard advanced. Otherwise removing shard j would change model i. The
privacy analysis would then fail, because it lets exactly one model change.

An empty shard gives the zero adapter (B = 0), which answers exactly as the public model does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.support import max_positions
from adapmixed.training.adapter import adapted_copy
from adapmixed.training.blocks import IGNORED, token_blocks
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.head import trunk_once

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""
PASS_TOKENS = 512
"""Tokens per forward pass on a CPU; a pass takes at least one block."""


def shard_seed(seed: int, shard: int) -> int:
    """Return the seed of one shard's training, in [0, 2**63).

    It depends on (seed, shard) only.
    """
    digest = hashlib.blake2b(f"{seed}/{shard}".encode(), digest_size=8, person=b"adapmixed.train")
    return int.from_bytes(digest.digest(), "big") >> 1


@dataclass(frozen=True)
class Trained:
    """The result of training on one shard.

    Attributes:
        model: the adapted copy of the base, a peft model in eval mode.
        losses: mean training loss of each epoch, in nats per token; () if the shard has nothing to
            predict.
        held_out_losses: mean loss on the held-out tokens, in nats per token, of the public model
            and then after each epoch; () without held-out tokens.
        epoch: the epoch whose final weights were kept; 0 for the public model.
    """

    model: Any
    losses: tuple[float, ...]
    held_out_losses: tuple[float, ...]
    epoch: int


def train_adapter(
    base: Any,
    tokens: Sequence[int],
    config: FinetuneConfig,
    *,
    seed: int,
    shard: int,
    beginning: Sequence[int] = (),
    held_out: Sequence[int] = (),
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train one adapter on one shard; `base` is never changed.

    AdamW minimises the next-token cross entropy. After an optional warm-up, its learning rate falls
    linearly from `learning_rate` to zero over all steps. torch's global random state is restored.
    If the output layer alone is adapted, everything below it runs once per token and in eval mode
    (`head.trunk_once`).

    Args:
        base: a transformers causal language model.
        tokens: the shard's token stream; fewer than two tokens count as an empty shard.
        config: the settings.
        seed: the run's seed.
        shard: the shard's number, >= 0.
        beginning: the tokens that every block begins with (`vocabulary.beginning_of`).
        held_out: tokens of the same shard, on which the loss is measured after each epoch.
        scratch: a private folder for hidden states that are too large for memory; None to keep
            them in memory.
        progress: called after every step.

    Raises:
        ValueError: if a block is longer than the base's context.
        RuntimeError: if `scratch` is full.
    """
    inputs, labels = token_blocks(tokens, config.block_size, beginning)
    held_inputs, held_labels = token_blocks(held_out, config.block_size, beginning)
    check_positions(base, inputs)
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(shard_seed(seed, shard))
        model = adapted_copy(base, config).eval()
        blocks = inputs.shape[0]
        losses: list[float] = []
        with trunk_once(model, torch.cat([inputs, held_inputs]), scratch) as rows:
            best = _Best(model, rows[blocks:], held_labels, keep=config.early_stopping)
            if blocks > 0:
                losses = fit(
                    model,
                    rows[:blocks],
                    labels,
                    config,
                    generator=torch.Generator().manual_seed(shard_seed(seed, shard)),
                    progress=progress,
                    after_epoch=best.look,
                )
            epoch = best.restore() if config.early_stopping else len(losses)
    return Trained(model.eval(), tuple(losses), tuple(best.losses), epoch)


class _Best:
    """The weights with the least held-out loss so far, starting with the public model's."""

    def __init__(self, model: Any, inputs: Tensor, labels: Tensor, *, keep: bool) -> None:
        self._model, self._inputs, self._labels = model, inputs, labels
        self._keep = keep
        self._kept: dict[str, Tensor] = {}
        self._looks = 0
        self.epoch = 0
        self.losses: list[float] = []
        self.look()

    def look(self) -> None:
        """Measure the loss of the current weights, and copy them if it is the least so far."""
        epoch, self._looks = self._looks, self._looks + 1
        if self._inputs.shape[0] > 0:
            self._model.eval()
            loss = mean_loss(self._model, self._inputs, self._labels)
            better = not self.losses or loss < min(self.losses)
            self.losses.append(loss)
        else:
            better = True
        if better and self._keep:
            self.epoch = epoch
            self._kept = {name: p.detach().clone() for name, p in self._trained()}

    @torch.no_grad()
    def restore(self) -> int:
        """Restore the best weights and return their epoch."""
        for name, parameter in self._trained():
            parameter.copy_(self._kept[name])
        return self.epoch

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)


def check_positions(base: Any, inputs: Tensor) -> None:
    """Raise ValueError if blocks (blocks, t) are longer than the base's context."""
    limit = max_positions(base.config.get_text_config())
    if limit is not None and inputs.shape[1] > limit:
        raise ValueError(
            f"block_size must be <= the base's {limit} positions, the tokens that begin a block "
            f"included, got {inputs.shape[1]}"
        )


def fit(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    config: FinetuneConfig,
    *,
    generator: torch.Generator,
    progress: Progress | None = None,
    after_epoch: Callable[[], None] | None = None,
) -> list[float]:
    """Minimise the next-token cross entropy over the trainable parameters of `model`.

    Args:
        model: a causal language model; its parameters with requires_grad are trained in place.
        inputs: the model's input_ids, one row per block, blocks >= 1. They are token ids, or the
            block numbers of `head.trunk_once`.
        labels: (blocks, t) int64 from `blocks.token_blocks`.
        config: the settings; learning_rate, warmup_steps, weight_decay, epochs and batch_size are
            used.
        generator: draws the order of the blocks.
        progress: called after every step.
        after_epoch: called after each epoch; it may leave the model in eval mode.

    Returns:
        the mean loss of each epoch, in nats per token.
    """
    blocks = inputs.shape[0]
    batches = math.ceil(blocks / config.batch_size)
    steps = batches * config.epochs
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = linear_schedule(optimizer, config, steps)
    history: list[float] = []
    done = 0
    for _ in range(config.epochs):
        model.train()
        total, count = 0.0, 0
        order = torch.randperm(blocks, generator=generator)
        for rows in torch.split(order, config.batch_size):
            scored = _scored(labels[rows])
            for part in torch.split(rows, _blocks_of_a_pass(model, labels)):
                loss = _total_loss(model, inputs[part], labels[part])
                (loss / scored).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            count += scored
            done += 1
            if progress is not None:
                progress(done, steps)
        history.append(total / count)
        if after_epoch is not None:
            after_epoch()
    return history


def linear_schedule(
    optimizer: torch.optim.Optimizer, config: FinetuneConfig, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that rises over `warmup_steps`, then falls linearly to 0 at `steps`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (config.warmup_steps + 1), 1.0 - step / steps)
    )


@torch.no_grad()
def mean_loss(model: Any, inputs: Tensor, labels: Tensor) -> float:
    """Return the next-token cross entropy over all scored tokens, in nats per token.

    Args:
        model: a causal language model in eval mode.
        inputs: as in `fit`.
        labels: as in `fit`.
    """
    blocks = _blocks_of_a_pass(model, labels)
    parts = zip(torch.split(inputs, blocks), torch.split(labels, blocks), strict=True)
    total = sum(float(_total_loss(model, ids, targets)) for ids, targets in parts)
    return total / _scored(labels)


def _blocks_of_a_pass(model: Any, labels: Tensor) -> int:
    """Return how many blocks one forward pass takes.

    On a GPU it takes all. On a CPU it takes few, so that the logits stay in the cache. The
    gradients of a step's passes add up.
    """
    blocks, length = labels.shape
    return blocks if model.device.type == "cuda" else max(1, PASS_TOKENS // length)


def _scored(labels: Tensor) -> int:
    """Return how many tokens are predicted."""
    return int((labels[:, 1:] != IGNORED).sum())


def _total_loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the next-token cross entropies, in nats.

    The labels are shifted instead of the logits, because a slice of the logits and its gradient
    would be copied.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).to(model.device)
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
