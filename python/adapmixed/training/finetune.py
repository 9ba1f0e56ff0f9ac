"""One LoRA adapter from one shard.

Training of shard i may depend on the shard's own documents, on public data (the base, the settings)
and on a seed derived from (seed, i), on nothing else: no early stopping or tuning across shards, no
random state that another shard advanced. Otherwise removing shard j would change model i, and the
privacy analysis, which lets exactly one model change, would not hold.

An empty shard yields the zero adapter (B = 0), which answers exactly as the public model does.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.training.blocks import IGNORED, token_blocks

Progress = Callable[[int, int], None]
"""Called with (steps done, steps of all)."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of one adapter's training; the same for every shard, chosen without private data.

    Attributes:
        rank: r of the update B A, >= 1.
        alpha: LoRA's scale; the update is multiplied by alpha / rank.
        target_modules: names of the layers that are adapted.
        learning_rate: AdamW's highest rate; it falls linearly to zero.
        warmup_steps: steps over which the rate first rises linearly, >= 0.
        weight_decay: AdamW's decoupled weight decay.
        epochs: passes over the shard, >= 1.
        batch_size: blocks per step, >= 1.
        block_size: tokens per block, >= 2.
    """

    rank: int = 4
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ("c_attn",)
    learning_rate: float = 2e-4
    warmup_steps: int = 0
    weight_decay: float = 0.01
    epochs: int = 10
    batch_size: int = 8
    block_size: int = 512

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("epochs", 1), ("batch_size", 1), ("block_size", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        for name in ("alpha", "learning_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be >= 0, got {self.warmup_steps}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay must be >= 0 and finite, got {self.weight_decay}")
        if not self.target_modules:
            raise ValueError("target_modules must name at least one layer, got ()")


def shard_seed(seed: int, shard: int) -> int:
    """The seed of one shard's training, a function of (seed, shard) only, in [0, 2**63)."""
    digest = hashlib.blake2b(f"{seed}/{shard}".encode(), digest_size=8, person=b"adapmixed.train")
    return int.from_bytes(digest.digest(), "big") >> 1


def train_adapter(
    base: Any,
    tokens: Sequence[int],
    config: FinetuneConfig,
    *,
    seed: int,
    shard: int,
    progress: Progress | None = None,
    on_epoch: Callable[[float], None] | None = None,
) -> Any:
    """Trains one adapter on one shard; `base` is copied and never changed.

    AdamW with a rate that falls linearly from `learning_rate` to zero over all steps, after the
    warm-up if there is one. The global random state is left as it was.

    Args:
        base: a transformers causal language model.
        tokens: the shard's token stream; fewer than two tokens count as an empty shard.
        config: the settings.
        seed: the run's seed.
        shard: the shard's number, >= 0.
        progress: told of every step.
        on_epoch: told the mean loss of each epoch, in nats per token, when all are done.

    Returns:
        the adapted copy, a peft model in eval mode.

    Raises:
        ValueError: if a block is longer than the base's context.
    """
    check_block_size(base, config)
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(shard_seed(seed, shard))
        model = adapted_copy(base, config)
        inputs, labels = token_blocks(tokens, config.block_size)
        if inputs.shape[0] > 0:
            generator = _generator(seed, shard)
            history = fit(model, inputs, labels, config, generator=generator, progress=progress)
            for loss in history:
                if on_epoch is not None:
                    on_epoch(loss)
    return model.eval()


def adapted_copy(base: Any, config: FinetuneConfig) -> Any:
    """A copy of `base` with a new LoRA adapter (B = 0), drawn from the global random state."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.target_modules),
        fan_in_fan_out=_is_conv1d(base, config.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks transformers by an old name
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(copy.deepcopy(base), settings)


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
) -> list[float]:
    """Minimises the next-token cross entropy of `model`'s trainable parameters.

    Args:
        model: a causal language model; its parameters with requires_grad are trained in place.
        inputs, labels: (blocks, t) int64 from `blocks.token_blocks`, blocks >= 1.
        config: learning_rate, weight_decay, epochs and batch_size are used.
        generator: draws the order of blocks.
        progress: told of every step.

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
    model.train()
    for _ in range(config.epochs):
        total, count = 0.0, 0
        order = torch.randperm(blocks, generator=generator)
        for rows in torch.split(order, config.batch_size):
            ids = inputs[rows].to(model.device)
            targets = labels[rows, 1:].to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            scored = int((targets != IGNORED).sum())
            total += float(loss.detach()) * scored
            count += scored
            done += 1
            if progress is not None:
                progress(done, steps)
        history.append(total / count)
    return history


def linear_schedule(
    optimizer: torch.optim.Optimizer, config: FinetuneConfig, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate rises over `warmup_steps` and falls linearly to zero at the end of `steps`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (config.warmup_steps + 1), 1.0 - step / steps)
    )


@torch.no_grad()
def mean_loss(model: Any, inputs: Tensor, labels: Tensor, batch_size: int) -> float:
    """Next-token cross entropy over all scored tokens, in nats per token.

    Args:
        model: a causal language model in eval mode.
        inputs, labels: (blocks, t) int64 from `blocks.token_blocks`, blocks >= 1.
        batch_size: blocks per forward pass.
    """
    total, count = 0.0, 0
    for ids, targets in zip(
        torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True
    ):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1]
        scored = targets[:, 1:].to(model.device)
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), scored.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        total += float(loss)
        count += int((scored != IGNORED).sum())
    return total / count


def save_adapter(
    model: Any,
    folder: str | os.PathLike[str],
    config: FinetuneConfig,
    *,
    base_name: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes an ordinary peft folder that names no path of this machine.

    Args:
        model: what `train_adapter` returned.
        folder: created if need be; its adapter files are replaced.
        config: the settings the adapter was trained with.
        base_name: written as `base_model_name_or_path`: a hub name or a neutral word.
        dtype: of the stored weights; readers compute in fp32.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    peft_config = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": _is_conv1d(model, config.target_modules),
        "inference_mode": True,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": list(config.target_modules),
        "task_type": "CAUSAL_LM",
    }
    text = json.dumps(peft_config, indent=2) + "\n"
    (target / "adapter_config.json").write_text(text, encoding="utf-8")
    weights = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in get_peft_model_state_dict(model).items()
    }
    save_file(weights, str(target / "adapter_model.safetensors"), metadata={"format": "pt"})


def _generator(seed: int, shard: int) -> torch.Generator:
    return torch.Generator().manual_seed(shard_seed(seed, shard))


def _is_conv1d(model: Any, targets: Sequence[str]) -> bool:
    """Whether the adapted layers store (in, out), as GPT-2's Conv1D does."""
    from transformers.pytorch_utils import Conv1D

    return any(
        isinstance(getattr(module, "base_layer", module), Conv1D)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets
    )
