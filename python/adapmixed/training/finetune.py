"""Put a LoRA adapter on a copy of the public model, train it on one shard, and save it.

Training on shard i depends only on the shard's documents, on public data (the base, the settings)
and on a seed derived from (seed, i). So there is no early stopping or tuning across shards, and no
random state that another shard advanced. Otherwise removing shard j would change model i. The
privacy analysis would then fail, because it lets exactly one model change.

An empty shard gives the zero adapter (B = 0), which answers exactly as the public model does.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.public_model import max_positions
from adapmixed.training.blocks import IGNORED, Blocks, HeadTrunk, lora_layers, token_blocks
from adapmixed.training.settings import FinetuneConfig

ROUNDS = 4
"""Parts of a small shard's training, which has more steps than its epochs; each has a loss."""


def shard_seed(seed: int, shard: int) -> int:
    """Return the seed of one shard's training, in [0, 2**63).

    It depends on (seed, shard) only. Shard -1 stands for what all members share.
    """
    digest = hashlib.blake2b(f"{seed}/{shard}".encode(), digest_size=8, person=b"adapmixed.train")
    return int.from_bytes(digest.digest(), "big") >> 1


def adapted_copy(base: Any, config: FinetuneConfig) -> Any:
    """Return a copy of `base` with a new LoRA adapter.

    A is drawn from torch's global random state, and B is 0. Modules are copied. Weights are shared
    with `base` and frozen in the copy.

    Args:
        base: a transformers causal language model.
        config: the settings; rank, alpha and target_modules are used.
    """
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(**_settings(base, config))
    shared = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in base.parameters()}
    with warnings.catch_warnings():
        # peft uses an old name of transformers, and warns about merging adapters of a tied head.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=r"Model has `tie_word_embeddings=True`")
        return get_peft_model(copy.deepcopy(base, shared), settings)


@torch.no_grad()
def shorten(model: Any) -> None:
    """Round every B to bfloat16."""
    for layer in lora_layers(model):
        (name,) = layer.active_adapters
        weight = layer.lora_B[name].weight
        weight.copy_(weight.bfloat16())


def save_adapter(
    model: Any, folder: str | os.PathLike[str], config: FinetuneConfig, *, base_name: str
) -> None:
    """Write an ordinary peft folder that contains no path of this machine.

    Weights are in bfloat16 where it holds them exactly, else in float32.

    Args:
        model: the result of `adapted_copy`.
        folder: the folder, created if it is missing; its adapter files are replaced.
        config: the settings that the adapter was trained with.
        base_name: the value of `base_model_name_or_path`, a hub name or a neutral word.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = _settings(model, config) | {"base_model_name_or_path": base_name, "peft_type": "LORA"}
    written |= {"inference_mode": True, "lora_dropout": 0.0}
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (target / "adapter_config.json").write_text(text, encoding="utf-8")
    # By default peft also stores the whole output layer if that is adapted.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {
        name: _short(value.detach().to("cpu", torch.float32)) for name, value in state.items()
    }
    save_file(weights, str(target / "adapter_model.safetensors"), metadata={"format": "pt"})


def _short(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in bfloat16 if that is exact."""
    short = value.contiguous().bfloat16()
    return short if torch.equal(short.float(), value) else value.contiguous()


def _settings(model: Any, config: FinetuneConfig) -> dict[str, Any]:
    """Return peft's settings of an adapter on this model."""
    from transformers.pytorch_utils import Conv1D

    suffixes = tuple(f".{target}" for target in config.target_modules)
    # GPT-2's Conv1D stores weights as (in, out).
    conv1d = any(
        isinstance(getattr(module, "base_layer", module), Conv1D)
        for name, module in model.named_modules()
        if f".{name}".endswith(suffixes)
    )
    return {
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "target_modules": list(config.target_modules),
        "fan_in_fan_out": conv1d,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


@dataclass(frozen=True)
class Trained:
    """The result of training on one shard.

    Attributes:
        model: the adapted copy of the base, a peft model in eval mode.
        losses: mean training loss of each epoch, or of each quarter of the steps, in nats per
            token; () if the shard has nothing to predict.
        held_out_losses: mean loss on the held-out tokens, in nats per token, of the public model
            and then after each of these; () without held-out tokens.
        epoch: the epoch or quarter whose final weights were kept; 0 for the public model.
    """

    model: Any
    losses: tuple[float, ...]
    held_out_losses: tuple[float, ...]
    epoch: int


class AdapterTrainer:
    """A trainer of adapters on one public model, which is never changed.

    AdamW minimises the next-token cross entropy. After an optional warm-up, its learning rate falls
    linearly from `learning_rate` to zero over all steps. If the output layer alone is adapted,
    everything below it runs once per token and in eval mode (`blocks.HeadTrunk`).
    """

    def __init__(self, base: Any, config: FinetuneConfig) -> None:
        """Prepare a copy of a transformers causal language model for these settings."""
        self._config = config
        with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
            self._model = adapted_copy(base, config).eval()
        self._trunk = HeadTrunk(self._model)

    def train(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        shard: int,
        beginning: Sequence[int] = (),
        held_out: Sequence[int] = (),
    ) -> Trained:
        """Train one adapter on one shard. The trainer's next call changes its model.

        torch's global random state is restored.

        Args:
            tokens: the shard's token stream; fewer than two tokens count as an empty shard.
            seed: the run's seed.
            shard: the shard's number, >= 0.
            beginning: the tokens that every block begins with (`text.beginning_of`).
            held_out: tokens of the same shard, on which the loss is measured after each epoch.

        Raises:
            ValueError: if a block is longer than the base's context.
        """
        config, model = self._config, self._model
        parts = [
            Blocks(*token_blocks(ids, config.block_size, beginning)) for ids in (tokens, held_out)
        ]
        check_positions(model, parts[0].inputs)
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(shard_seed(seed, -1 if config.shared_a else shard))
            for layer in lora_layers(model):  # A is drawn anew, and B is 0
                (name,) = layer.active_adapters
                layer.reset_lora_parameters(name, init_lora_weights=True)
                layer.lora_A[name].weight.requires_grad_(not config.shared_a)
            torch.manual_seed(shard_seed(seed, shard))
            losses: list[float] = []
            held_losses: list[float] = []
            epoch, kept = 0, list[Tensor]()
            with self._trunk.once(parts) as (blocks, held):
                trained = [p for p in model.parameters() if p.requires_grad]
                generator = torch.Generator().manual_seed(shard_seed(seed, shard))
                rounds = fit(model, blocks, config, generator=generator)
                for number, loss in enumerate(chain([None], rounds)):  # first the public model
                    if loss is not None:
                        losses.append(loss)
                    if len(held):
                        held_losses.append(mean_loss(model.eval(), held))
                    if config.early_stopping and min(held_losses, default=0) in held_losses[:-1]:
                        continue  # no better than one before
                    epoch = number
                    if config.early_stopping:
                        kept = [p.detach().clone() for p in trained]
                with torch.no_grad():
                    for parameter, value in zip(trained, kept, strict=False):
                        parameter.copy_(value)
        return Trained(model.eval(), tuple(losses), tuple(held_losses), epoch)


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
    blocks: Blocks,
    config: FinetuneConfig,
    *,
    generator: torch.Generator,
) -> Iterator[float]:
    """Minimise the next-token cross entropy over the trainable parameters of `model`.

    Args:
        model: a causal language model; its parameters with requires_grad are trained in place.
            Between two values it may be put in eval mode.
        blocks: blocks of one shard; without any, nothing is done.
        config: the settings; learning_rate, warmup_steps, weight_decay, epochs, steps and
            batch_size are used.
        generator: draws the order of the blocks.

    Yields:
        the mean loss of each epoch, or of each quarter of the steps, in nats per token.
    """
    if not len(blocks):
        return
    batches = math.ceil(len(blocks) / config.batch_size)
    passes = batches * config.epochs
    steps = max(config.steps, passes)
    ends = list(range(batches, passes + 1, batches))
    if steps > passes:
        ends = sorted({-(-steps * part // ROUNDS) for part in range(1, ROUNDS + 1)})
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    schedule = linear_schedule(optimizer, config, steps)
    drawn = _batches(len(blocks), config.batch_size, generator)
    for steps_of_round in (end - start for start, end in pairwise([0, *ends])):
        model.train()
        total, count = 0.0, 0
        for rows in islice(drawn, steps_of_round):
            parts = list(blocks.passes(rows, whole=model.device.type == "cuda"))
            scored = sum(map(_scored, parts))
            for part in parts:
                total += _total_loss(model, blocks, *part, 1 / scored)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            count += scored
        yield total / count


def _batches(blocks: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows of each step, without end: all blocks in random order, again and again."""
    while True:
        yield from torch.split(torch.randperm(blocks, generator=generator), size)


def linear_schedule(
    optimizer: torch.optim.Optimizer, config: FinetuneConfig, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that rises over `warmup_steps`, then falls linearly to 0 at `steps`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (config.warmup_steps + 1), 1.0 - step / steps)
    )


@torch.no_grad()
def mean_loss(model: Any, blocks: Blocks) -> float:
    """Return the next-token cross entropy over all scored tokens, in nats per token.

    Args:
        model: a causal language model in eval mode.
        blocks: as in `fit`.
    """
    parts = list(blocks.passes(torch.arange(len(blocks))))
    return sum(_total_loss(model, blocks, *part) for part in parts) / sum(map(_scored, parts))


def _scored(part: tuple[Tensor, Tensor]) -> int:
    """Return how many tokens of a pass are predicted."""
    return int((part[1] != IGNORED).sum())


def _total_loss(
    model: Any,
    blocks: Blocks,
    ids: Tensor,
    targets: Tensor,
    weight: float | None = None,
) -> float:
    """Return the sum of the cross entropies of a pass's targets (k, s), in nats.

    With a weight, the gradient of the sum times the weight is added to the parameters'.
    """
    if blocks.head is not None:
        return blocks.head.loss(ids, targets, weight)
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        targets.to(model.device).flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    if weight is not None:
        (loss * weight).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
