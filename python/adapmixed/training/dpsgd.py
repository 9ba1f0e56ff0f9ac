"""One LoRA adapter trained with DP-SGD: the published baseline, on the same corpus.

A record is a block: at most `block_size` tokens of the documents of one identifier, which are cut
apart from everybody else's. Each step takes every record with probability q = batch / records
(Poisson sampling), clips its gradient to the norm C, adds N(0, (σC)²) to the sum and divides by
the expected batch. Opacus gives the gradients of single records, clips them, finds σ and accounts
by privacy random variables (PRV, Gopi et al. 2021), whose upper bound is what is stated.

What is ours: noise from ChaCha20 and sampling bits from the operating system, since a torch
generator is predictable from 32 bits of seed; a loss per record that no other record enters (the
usual mean over a batch's tokens would divide by the others' lengths); and an empty batch is a step
of noise like any other, since a skipped one would tell that it was empty.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.data.builtin import Document
from adapmixed.data.rows import missing_extra
from adapmixed.files import publish_folder, temporary_folder
from adapmixed.models.ensemble import load_base
from adapmixed.rng import SecureRandom
from adapmixed.training.finetune import (
    IGNORED,
    FinetuneConfig,
    Progress,
    adapted_copy,
    check_block_size,
    linear_schedule,
    save_adapter,
    token_blocks,
    token_stream,
)

FORMAT_VERSION = 1
GUARANTEE_FILE = "guarantee.json"
PHYSICAL_BATCH = 16  # records whose gradients are held at a time


@dataclass(frozen=True)
class PrivacyTarget:
    """What the adapter shall promise.

    Attributes:
        epsilon: target, > 0.
        delta: target, in (0, 1).
        clipping_norm: C of every record's gradient, > 0.
        blocks_per_identifier: records that one identifier may contribute, the first ones; None: all
            of them.
    """

    epsilon: float
    delta: float
    clipping_norm: float = 1.0
    blocks_per_identifier: int | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "clipping_norm"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}")
        if self.blocks_per_identifier is not None and self.blocks_per_identifier < 1:
            raise ValueError(
                f"blocks_per_identifier must be >= 1, got {self.blocks_per_identifier}"
            )


@dataclass(frozen=True)
class AdapterGuarantee:
    """What a DP-SGD adapter promises; `str()` says it in full.

    Attributes:
        epsilon, delta: the promise, ε an upper bound.
        noise_multiplier: σ.
        sample_rate: q.
        steps: noisy steps.
        clipping_norm: C.
        block_size: tokens of a record at most.
        unit: what an identifier is, in words.
        blocks_per_identifier: as `PrivacyTarget`.
        accountant: "prv".
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    clipping_norm: float
    block_size: int
    unit: str
    blocks_per_identifier: int | None
    accountant: str = "prv"

    def __str__(self) -> str:
        pair = f"ε = {math.ceil(self.epsilon * 1e4) / 1e4:g} at δ = {self.delta:g}"
        if self.blocks_per_identifier == 1:
            what = (
                f"one whole name in the corpus ({self.unit}), of which at most one block was used"
            )
            limit = ""
        else:
            what = f"one record: a block of at most {self.block_size} tokens"
            share = (
                "every block"
                if self.blocks_per_identifier is None
                else f"each of at most {self.blocks_per_identifier} blocks"
            )
            limit = (
                f" It is NOT for a whole user, document or shard: {share} of somebody's is "
                f"protected apart, all of them together only by what group privacy leaves (one "
                f"name in the corpus is one {self.unit})."
            )
        return (
            f"The adapter is (ε, δ)-differentially private with {pair} for {what}, added or "
            f"removed; it was fixed before training and covers any number of answers.{limit} "
            f"DP-SGD, {self.steps} steps, σ = {self.noise_multiplier:.6g}, q = "
            f"{self.sample_rate:.6g}, PRV accountant. The number of records counts as public, and "
            f"so do the settings; noise is rounded to single precision."
        )


def record_blocks(
    tokenizer: Any,
    documents: Iterable[Document],
    block_size: int,
    *,
    blocks_per_identifier: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cuts the text of each identifier into records; none holds text of two.

    Args:
        tokenizer: of the public model.
        documents: the corpus.
        block_size: t >= 2.
        blocks_per_identifier: the first so many are kept; None: all.

    Returns:
        (input_ids, labels), each (records, t) int64, as `token_blocks`.
    """
    streams: dict[str, list[int]] = {}
    for document in documents:
        streams.setdefault(document.identifier, []).extend(token_stream(tokenizer, [document.text]))
    parts = [
        tuple(part[:blocks_per_identifier] for part in token_blocks(streams[name], block_size))
        for name in sorted(streams)
    ]
    if not any(len(inputs) for inputs, _ in parts):
        raise ValueError("corpus must hold at least one record of two tokens, it has none")
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])


def plan_noise(
    target: PrivacyTarget, records: int, batch_size: int, epochs: int
) -> tuple[float, float, float, int]:
    """(σ, ε, q, steps) for a target.

    Args:
        target: ε and δ.
        records: in the corpus.
        batch_size: expected records per step.
        epochs: expected passes.

    Returns:
        the noise multiplier that Opacus finds, and the PRV accountant's upper bound of its ε, which
        is at most the target's.

    Raises:
        ValueError: if the batch exceeds the records, ε cannot be reached, or Opacus is missing.
    """
    try:
        from opacus.accountants import PRVAccountant
        from opacus.accountants.utils import get_noise_multiplier
    except ImportError as error:
        raise missing_extra("DP-SGD", "opacus", error) from error
    if batch_size > records:
        raise ValueError(
            f"batch_size must be at most the {records} records of the corpus, got {batch_size}"
        )
    rate = batch_size / records
    steps = epochs * math.ceil(records / batch_size)
    try:
        with warnings.catch_warnings():  # about a Rényi bound that sizes the grid; still a bound
            warnings.filterwarnings("ignore", message="Optimal order is the")
            sigma = get_noise_multiplier(
                target_epsilon=target.epsilon,
                target_delta=target.delta,
                sample_rate=rate,
                steps=steps,
                accountant="prv",
            )
            accountant = PRVAccountant()
            accountant.history = [(sigma, rate, steps)]
            epsilon = float(accountant.get_epsilon(delta=target.delta))
    except ValueError as error:
        raise ValueError(
            f"epsilon {target.epsilon:g} at delta {target.delta:g} cannot be reached in {steps} "
            f"steps: {error}"
        ) from error
    if not epsilon <= target.epsilon:
        raise ValueError(f"epsilon must be at most {target.epsilon:g}, σ = {sigma} gives {epsilon}")
    return float(sigma), epsilon, rate, steps


def train_dp_adapter(
    base: Any,
    inputs: Tensor,
    labels: Tensor,
    config: FinetuneConfig,
    target: PrivacyTarget,
    *,
    unit: str,
    progress: Progress | None = None,
) -> tuple[Any, AdapterGuarantee]:
    """Trains an adapter by DP-SGD with AdamW; `base` is copied and never changed.

    Args:
        base: a transformers causal language model.
        inputs, labels: (records, t) from `record_blocks`.
        config: the settings; `batch_size` is the expected batch.
        target: the promise.
        unit: what an identifier is, in words.
        progress: told of every step.

    Returns:
        (the adapted copy in eval mode, what it promises).

    Raises:
        ValueError: as `plan_noise`; if a block is longer than the base's context; or if a gradient
            is not finite, which clipping would not bound.
    """
    sigma, epsilon, rate, steps = plan_noise(
        target, inputs.shape[0], config.batch_size, config.epochs
    )
    check_block_size(base, config)
    from opacus import GradSampleModule

    model = adapted_copy(base, config)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = linear_schedule(adamw, config, steps)
    optimizer = _optimizer(adamw, sigma, target.clipping_norm, config.batch_size)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    for step in range(steps):
        rows = poisson_sample(inputs.shape[0], rate)
        batches = torch.split(rows, PHYSICAL_BATCH)
        for index, batch in enumerate(batches):
            _backward(wrapped, inputs[batch], labels[batch])
            optimizer.signal_skip_step(index + 1 < len(batches))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if progress is not None:
            progress(step + 1, steps)
    wrapped.to_standard_module()
    guarantee = AdapterGuarantee(
        epsilon, target.delta, sigma, rate, steps, target.clipping_norm, config.block_size, unit,
        target.blocks_per_identifier,
    )  # fmt: skip
    return model.eval(), guarantee


def poisson_sample(records: int, rate: float) -> Tensor:
    """Rows of a step: each with probability `rate`, rounded down to a multiple of 2^-64, by the
    operating system's randomness. Indices (batch,) int64, possibly none."""
    draws = np.frombuffer(os.urandom(8 * records), dtype=np.uint64)
    if rate >= 1.0:
        return torch.arange(records)
    return torch.from_numpy(np.flatnonzero(draws < np.uint64(math.floor(rate * 2.0**64))))


def train_dp(
    base: str,
    documents: Iterable[Document],
    output: Path,
    config: FinetuneConfig,
    target: PrivacyTarget,
    *,
    unit: str,
    base_name: str,
    revision: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> AdapterGuarantee:
    """Trains on a corpus and writes an ordinary peft folder with `guarantee.json`, in one step.

    Raises:
        ValueError: if the output is there already; see `train_dp_adapter`.
    """
    if output.exists():
        raise ValueError(f"output must be a new folder, {output} is there")
    model, tokenizer = load_base(base, dtype, revision=revision)
    if tokenizer is None:
        raise ValueError(f"base must have a tokenizer, {base} has none")
    inputs, labels = record_blocks(
        tokenizer,
        documents,
        config.block_size,
        blocks_per_identifier=target.blocks_per_identifier,
    )
    adapted, guarantee = train_dp_adapter(
        model.to(device), inputs, labels, config, target, unit=unit, progress=progress
    )
    temporary = temporary_folder(output)
    save_adapter(adapted, temporary, config, base_name=base_name)
    data = {
        "format_version": FORMAT_VERSION,
        **asdict(guarantee),
        "statement": str(guarantee),
        "training": {**asdict(config), "target_modules": list(config.target_modules)},
    }
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    (temporary / GUARANTEE_FILE).write_text(text, encoding="utf-8")
    if not publish_folder(temporary, output):
        raise ValueError(f"output must be a new folder, {output} has appeared meanwhile")
    return guarantee


def _backward(wrapped: Any, inputs: Tensor, labels: Tensor) -> None:
    """Gradients of single records: of each record's own mean loss over its own tokens."""
    if inputs.shape[0] == 0:  # one row without anything to predict: a gradient of zero
        inputs = torch.zeros((1, inputs.shape[1]), dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORED)
    device = next(wrapped.parameters()).device
    logits = wrapped(input_ids=inputs.to(device), use_cache=False).logits[:, :-1].float()
    targets = labels[:, 1:].to(device)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    count = (targets != IGNORED).sum(dim=1).clamp(min=1)
    with warnings.catch_warnings():  # the first layers' inputs need no gradient, nor do hooks
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        (losses.sum(dim=1) / count).sum().backward()  # type: ignore[no-untyped-call]


def _optimizer(adamw: Any, sigma: float, clipping_norm: float, batch_size: int) -> Any:
    """Opacus' optimizer, with noise that nobody can predict and refusal of what is not finite."""
    from opacus.optimizers import DPOptimizer

    class SecureOptimizer(DPOptimizer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                adamw,
                noise_multiplier=sigma,
                max_grad_norm=clipping_norm,
                expected_batch_size=None,
                loss_reduction="sum",
            )
            self._rng = SecureRandom()

        def add_noise(self) -> None:
            for p in self.params:
                if not bool(p.summed_grad.isfinite().all()):
                    raise ValueError("a gradient is not finite: a lower learning_rate is needed")
                noise = ops.gaussian(
                    tuple(p.shape),
                    sigma=self.noise_multiplier * self.max_grad_norm,
                    rng=self._rng,
                    device=p.device,
                )
                noisy = p.summed_grad.view_as(p).double() + noise
                p.grad = (noisy / batch_size).to(p.dtype)

    return SecureOptimizer()
