"""One LoRA adapter from one shard.

Training of shard i may depend on the shard's own documents, on public data (the base, the settings)
and on a seed derived from (seed, i), on nothing else: no early stopping or tuning across shards, no
random state that another shard advanced. Otherwise removing shard j would change model i, and the
privacy analysis, which lets exactly one model change, would not hold.

An empty shard yields the zero adapter (B = 0), which answers exactly as the public model does.
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

from adapmixed.training.adapter import adapted_copy
from adapmixed.training.blocks import IGNORED, token_blocks
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.head import trunk_once

Progress = Callable[[int, int], None]
"""Called with (steps done, steps of all)."""
PASS_TOKENS = 512
"""Tokens of a forward pass on a CPU, but at least one block."""


def shard_seed(seed: int, shard: int) -> int:
    """The seed of one shard's training, a function of (seed, shard) only, in [0, 2**63)."""
    digest = hashlib.blake2b(f"{seed}/{shard}".encode(), digest_size=8, person=b"adapmixed.train")
    return int.from_bytes(digest.digest(), "big") >> 1


@dataclass(frozen=True)
class Trained:
    """What training on one shard has given.

    Attributes:
        model: the adapted copy of the base, a peft model in eval mode.
        losses: mean loss of each epoch while it was trained, in nats per token; () if the shard
            has nothing to predict.
        held_out_losses: on the held-out tokens, of the public model and then after each epoch;
            () without such tokens.
        epoch: the one after which the weights were taken, 0: the public model.
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
    held_out: Sequence[int] = (),
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train one adapter on one shard; `base` is never changed.

    AdamW minimises the next-token cross entropy with a rate that falls linearly from
    `learning_rate` to zero over all steps, after the warm-up if there is one. The global random
    state is left as it was. If the output layer alone is adapted, all below it runs once per token
    and in eval mode (`head.trunk_once`).

    Args:
        base: a transformers causal language model.
        tokens: the shard's token stream; fewer than two tokens count as an empty shard.
        config: the settings.
        seed: the run's seed.
        shard: the shard's number, >= 0.
        held_out: tokens of the same shard to measure the loss on after each epoch.
        scratch: a private folder for hidden states that are too large for memory.
        progress: told of every step.

    Raises:
        ValueError: if a block is longer than the base's context.
        RuntimeError: if `scratch` is full.
    """
    check_block_size(base, config)
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(shard_seed(seed, shard))
        model = adapted_copy(base, config).eval()
        inputs, labels = token_blocks(tokens, config.block_size)
        held_inputs, held_labels = token_blocks(held_out, config.block_size)
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
    """The weights so far with the least loss on held-out text, the public model's included."""

    def __init__(self, model: Any, inputs: Tensor, labels: Tensor, *, keep: bool) -> None:
        self._model, self._inputs, self._labels = model, inputs, labels
        self._keep = keep
        self._kept: dict[str, Tensor] = {}
        self._looks = 0
        self.epoch = 0
        self.losses: list[float] = []
        self.look()

    def look(self) -> None:
        """Measure the loss of the weights as they are, and copy them if there is none less."""
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
        """Put the best weights back; return their epoch."""
        for name, parameter in self._trained():
            parameter.copy_(self._kept[name])
        return self.epoch

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)


def check_block_size(base: Any, config: FinetuneConfig) -> None:
    """Refuses blocks that are longer than the base's context."""
    limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.block_size > limit:
        raise ValueError(
            f"block_size must be <= the base's {limit} positions, got {config.block_size}"
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
    """Minimises the next-token cross entropy of `model`'s trainable parameters.

    Args:
        model: a causal language model; its parameters with requires_grad are trained in place.
        inputs: what the model takes as input_ids, one row per block, blocks >= 1.
        labels: (blocks, t) int64 from `blocks.token_blocks`.
        config: learning_rate, weight_decay, epochs and batch_size are used.
        generator: draws the order of blocks.
        progress: told of every step.
        after_epoch: called after each epoch; it may leave the model in eval mode.

    Returns:
        mean loss of each epoch, in nats per token.
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
    """The rate rises over `warmup_steps` and falls linearly to zero at the end of `steps`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (config.warmup_steps + 1), 1.0 - step / steps)
    )


@torch.no_grad()
def mean_loss(model: Any, inputs: Tensor, labels: Tensor) -> float:
    """Return the next-token cross entropy over all scored tokens, in nats per token.

    Args:
        model: a causal language model in eval mode.
        inputs, labels: as `fit`.
    """
    blocks = _blocks_of_a_pass(model, labels)
    parts = zip(torch.split(inputs, blocks), torch.split(labels, blocks), strict=True)
    total = sum(float(_total_loss(model, ids, targets)) for ids, targets in parts)
    return total / _scored(labels)


def _blocks_of_a_pass(model: Any, labels: Tensor) -> int:
    """Return how many blocks one forward pass takes: all on a GPU, on a CPU those of few tokens.

    Logits of many tokens would leave a CPU's cache. The gradients of a step's passes add up.
    """
    blocks, length = labels.shape
    return blocks if model.device.type == "cuda" else max(1, PASS_TOKENS // length)


def _scored(labels: Tensor) -> int:
    """Return how many tokens are predicted."""
    return int((labels[:, 1:] != IGNORED).sum())


def _total_loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the next-token cross entropies.

    The labels are shifted, not the logits: a slice of the logits would be copied, and so would
    its gradient.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).to(model.device)
    logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
