"""Training of one LoRA adapter with DP-SGD, the published baseline, and its guarantee.

A record is a block: at most `block_size` tokens of the documents of one identifier, which are cut
apart from all others. Each step takes every record with probability q = batch / records (Poisson
sampling) and clips its gradient to the norm C. It adds N(0, (σC)²) to the sum and divides by the
expected batch. Opacus computes and clips the gradients of single records and finds σ. The stated ε
is the upper bound of its accountant for privacy random variables (PRV, Gopi et al. 2021).

Three parts are our own:

- Noise comes from ChaCha20 and sampling bits from the operating system, because a torch generator
  is predictable from 32 bits of seed.
- The loss of a record depends on no other record. The usual mean over a batch's tokens would divide
  by the lengths of the others.
- An empty batch is a step of noise like any other. A skipped step would reveal that it was empty.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.ensemble.members import read_versioned
from adapmixed.ensemble.public_model import load_base
from adapmixed.files import publish_folder, temporary_folder
from adapmixed.limits import check_delta, check_epsilon, check_number, check_optional_count
from adapmixed.privacy.conversions import gdp_to_dp
from adapmixed.privacy.planner import largest_within
from adapmixed.rng import SecureRandom
from adapmixed.text import Document, beginning_of, token_stream
from adapmixed.training.blocks import IGNORED, token_blocks
from adapmixed.training.finetune import (
    adapted_copy,
    check_positions,
    linear_schedule,
    save_adapter,
)
from adapmixed.training.settings import FinetuneConfig

FORMAT_VERSION = 1
GUARANTEE_FILE = "guarantee.json"
PHYSICAL_BATCH = 16  # records whose gradients are held at a time


EPOCHS = {"wikitext-103": 20, "one-billion-word": 9, "pubmed": 5, "air-dialogue": 10}
BATCH_SIZE = 256
"""The paper's, by data set (table "train_params"), and its expected batch of Poisson sampling."""


@dataclass(frozen=True)
class PrivacyTarget:
    """The privacy that a DP-SGD adapter must reach.

    Attributes:
        epsilon: target, in (0, 200]. Opacus searches for larger ones without an end.
        delta: target, in [1e-9, 0.1]. The accountants compose by Fourier transforms, whose noise
            is beyond that no longer small.
        clipping_norm: C, the norm to which every record's gradient is clipped, > 0.
        blocks_per_identifier: most records of one identifier that are used, its first ones. ε then
            holds for the whole identifier. None: all of them, and ε holds for a single record.
    """

    epsilon: float
    delta: float
    clipping_norm: float = 1.0
    blocks_per_identifier: int | None = None

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, above=0.0, most=200.0)
        check_number("delta", check_delta(self.delta), least=1e-9)
        check_number("clipping_norm", self.clipping_norm, above=0.0)
        check_optional_count("blocks_per_identifier", self.blocks_per_identifier)


@dataclass(frozen=True)
class AdapterGuarantee:
    """The guarantee of a DP-SGD adapter; `str()` states it in full.

    Attributes:
        epsilon, delta: the guarantee; ε is an upper bound.
        noise_multiplier: σ.
        sample_rate: q, the probability that a step takes a record.
        steps: number of noisy steps.
        clipping_norm: C, of a record's gradient.
        block_size: largest number of tokens of a record.
        unit: what an identifier names, as a phrase.
        blocks_per_identifier: as in `PrivacyTarget`.
        accountant: "prv" for a record; for an identifier with several records "pld", or "gdp" if
            every step takes all.
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
    accountant: str

    @property
    def protected(self) -> str:
        """What ε is for, in a few words."""
        single = self.blocks_per_identifier is None
        return f"block of {self.block_size} tokens" if single else self.unit

    def __str__(self) -> str:
        pair = f"ε = {math.ceil(self.epsilon * 1e4) / 1e4:g} at δ = {self.delta!r}"
        limit = ""
        if self.blocks_per_identifier is None:
            what = f"one record: a block of at most {self.block_size} tokens"
            limit = (
                " It is NOT for a whole user, document or shard: every block of one name is "
                "protected on its own, and all of them together only as far as group privacy "
                f"reaches (a name in the corpus stands for: {self.unit})."
            )
        else:
            what = (
                f"one whole name in the corpus ({self.unit}), of which at most "
                f"{self.blocks_per_identifier} blocks of {self.block_size} tokens were used"
            )
        return (
            f"The adapter is (ε, δ)-differentially private with {pair} for {what}, added or "
            f"removed. The guarantee was fixed before training and covers any number of "
            f"answers.{limit} DP-SGD with {self.steps} steps, σ = {self.noise_multiplier:.6g}, q = "
            f"{self.sample_rate:.6g} and the {self.accountant.upper()} accountant. The number of "
            f"records and the settings count as public. Noise is rounded to single precision."
        )


def read_dp_adapter(folder: Path) -> tuple[AdapterGuarantee, object]:
    """Return the guarantee and the settings of an adapter that ``adapmixed-lab dp-sgd`` wrote.

    Raises:
        ValueError: if the folder holds no readable guarantee of this format.
    """
    names = [field.name for field in fields(AdapterGuarantee)]
    try:
        content = read_versioned(folder / GUARANTEE_FILE, FORMAT_VERSION, *names, "training")
        check_epsilon(content["epsilon"])
        return AdapterGuarantee(**{name: content[name] for name in names}), content["training"]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"folder must be one that 'adapmixed-lab dp-sgd' wrote, got {folder}: {error}"
        ) from error


def plan_noise(
    target: PrivacyTarget, records: int, config: FinetuneConfig, unit: str
) -> AdapterGuarantee:
    """Return the guarantee of a training that reaches a target.

    Its σ is what Opacus finds, or for several records what `group_epsilon` allows.

    Args:
        target: ε and δ, and the records that ε is for.
        records: number of records in the corpus.
        config: has the expected records per step, `batch_size`, and the expected passes, `epochs`.
        unit: what an identifier names, as a phrase.

    Raises:
        ValueError: if the batch exceeds the records, or ε cannot be reached.
    """
    if config.batch_size > records:
        raise ValueError(
            f"batch_size must be at most the {records} records of the corpus, got "
            f"{config.batch_size}"
        )
    rate = config.batch_size / records
    steps = config.epochs * math.ceil(records / config.batch_size)
    group = target.blocks_per_identifier or 1

    def cost(accuracy: float) -> float:
        grid = min(1e-2, 1e-3 * target.epsilon)
        try:
            return group_epsilon(1 / accuracy, rate, steps, group, target.delta, grid=grid)
        except ValueError:  # dp-accounting's, if a difference of its logarithms rounds below 0
            return math.inf

    if group == 1:
        sigma, epsilon, accountant = *_record_noise(target, rate, steps), "prv"
    elif accuracy := largest_within(cost, target.epsilon, most=2.0):
        sigma, epsilon = 1 / accuracy, cost(accuracy)
        accountant = "gdp" if rate == 1.0 else "pld"
    else:
        raise ValueError(f"epsilon must be larger for {group} blocks, got {target.epsilon!r}")
    return AdapterGuarantee(
        epsilon, target.delta, sigma, rate, steps, target.clipping_norm, config.block_size, unit,
        target.blocks_per_identifier, accountant,
    )  # fmt: skip


def group_epsilon(
    sigma: float, rate: float, steps: int, records: int, delta: float, *, grid: float = 1e-2
) -> float:
    """Return an upper bound of ε for all records of a group at once, added or removed.

    A step takes j of them with the binomial probability, and they move the clipped sum by j C at
    most. So N(0, σ²) and the mixture of N(j, σ²) dominate a step (Ganesh 2024, "Tight group-level
    DP guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms"). dp-accounting
    rounds their losses up to a grid and composes them.

    Args:
        sigma: σ > 0, noise over C.
        rate: q, the probability that a step takes a record.
        steps: number of steps.
        records: most records of the group.
        delta: δ >= 1e-9.
        grid: width of the losses' grid; a smaller one is nearer to ε, and takes longer.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism
    from scipy.stats import binom

    if rate == 1.0:  # every step is a Gaussian mechanism, and their composition is exact
        return gdp_to_dp(records * math.sqrt(steps) / sigma, delta)
    taken = np.arange(records + 1)
    step = from_mixture_gaussian_mechanism(
        sigma, taken.astype(float), binom.pmf(taken, records, rate),
        value_discretization_interval=grid,
    )  # fmt: skip
    return float(step.self_compose(steps).get_epsilon_for_delta(delta))


def _record_noise(target: PrivacyTarget, rate: float, steps: int) -> tuple[float, float]:
    """Return Opacus' σ for a single record, and its accountant's ε."""
    from opacus.accountants import PRVAccountant
    from opacus.accountants.utils import get_noise_multiplier

    try:
        with warnings.catch_warnings():  # about an order that only sizes the grid
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
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"epsilon {target.epsilon!r} at delta {target.delta!r} cannot be reached in {steps} "
            f"steps: {error}"
        ) from error
    if not epsilon <= target.epsilon:
        raise ValueError(f"epsilon must be at most {target.epsilon!r}, σ = {sigma} gives {epsilon}")
    return float(sigma), epsilon


def record_blocks(
    tokenizer: Any,
    documents: Iterable[Document],
    block_size: int,
    *,
    blocks_per_identifier: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cut the text of each identifier into records; no record holds text of two.

    Args:
        tokenizer: of the public model.
        documents: the corpus.
        block_size: t >= 2, the tokens of text in a record; what the tokenizer begins a text with
            comes before them.
        blocks_per_identifier: blocks kept of each identifier, the first ones; None: all.
        vocab_size: V of the public model, as in `token_stream`.

    Returns:
        (input_ids, labels), each (records, k + t) int64, as `token_blocks` returns them.
    """
    streams: dict[str, list[int]] = {}
    for document in documents:
        ids = token_stream(tokenizer, [document.text], vocab_size)
        streams.setdefault(document.identifier, []).extend(ids)
    beginning = beginning_of(tokenizer)
    parts = [
        tuple(part[:blocks_per_identifier] for part in token_blocks(stream, block_size, beginning))
        for _, stream in sorted(streams.items())
    ]
    if not any(len(inputs) for inputs, _ in parts):
        raise ValueError("corpus must hold at least one record of two tokens, got none")
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])


def train_dp_adapter(
    base: Any,
    inputs: Tensor,
    labels: Tensor,
    config: FinetuneConfig,
    guarantee: AdapterGuarantee,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Train an adapter by DP-SGD with AdamW on a copy of `base`, which never changes.

    Args:
        base: a transformers causal language model.
        inputs, labels: (records, t) from `record_blocks`.
        config: the settings; `batch_size` is the expected batch.
        guarantee: from `plan_noise`, for these records and settings.
        progress: called after every step with (steps done, steps in all).

    Returns:
        the adapted copy in eval mode.

    Raises:
        ValueError: if a block is longer than the base's context, or if a gradient is not finite,
            because clipping would not bound it.
    """
    check_positions(base, inputs)
    from opacus import GradSampleModule

    model = adapted_copy(base, config)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = linear_schedule(adamw, config, guarantee.steps)
    optimizer = _optimizer(adamw, guarantee, config.batch_size)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    for step in range(guarantee.steps):
        rows = poisson_sample(inputs.shape[0], guarantee.sample_rate)
        batches = torch.split(rows, PHYSICAL_BATCH)
        for index, batch in enumerate(batches):
            _backward(wrapped, inputs[batch], labels[batch])
            optimizer.signal_skip_step(index + 1 < len(batches))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if progress is not None:
            progress(step + 1, guarantee.steps)
    wrapped.to_standard_module()
    return model.eval()


def poisson_sample(records: int, rate: float) -> Tensor:
    """Draw the rows of a step, each with probability `rate`, from the operating system.

    The probability is rounded down to a multiple of 2^-64.

    Returns:
        indices (batch,) int64, possibly none.
    """
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
    progress: Callable[[int, int], None] | None = None,
) -> AdapterGuarantee:
    """Train on a corpus, and write an ordinary peft folder with `guarantee.json` in one step.

    Raises:
        ValueError: if the output exists, and as `plan_noise` and `train_dp_adapter`.
    """
    if output.exists():
        raise ValueError(f"output must be a new folder, {output} exists")
    model, tokenizer = load_base(base, dtype, revision=revision)
    if tokenizer is None:
        raise ValueError(f"base must have a tokenizer, got {base}, which has none")
    inputs, labels = record_blocks(
        tokenizer,
        documents,
        config.block_size,
        blocks_per_identifier=target.blocks_per_identifier,
        vocab_size=int(model.config.get_text_config().vocab_size),
    )
    guarantee = plan_noise(target, inputs.shape[0], config, unit)
    adapted = train_dp_adapter(model.to(device), inputs, labels, config, guarantee, progress)
    temporary = temporary_folder(output)
    save_adapter(adapted, temporary, config, base_name=base_name)
    content = {**asdict(guarantee), "statement": str(guarantee), "training": asdict(config)}
    data = {"format_version": FORMAT_VERSION, **content}
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    (temporary / GUARANTEE_FILE).write_text(text, encoding="utf-8")
    if not publish_folder(temporary, output):
        raise ValueError(f"output must be a new folder, {output} appeared during training")
    return guarantee


def _backward(wrapped: Any, inputs: Tensor, labels: Tensor) -> None:
    """Compute the gradient of every record: of its mean loss over its own tokens."""
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
    with warnings.catch_warnings():  # expected: the first layers' inputs need no gradient
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        (losses.sum(dim=1) / count).sum().backward()  # type: ignore[no-untyped-call]


def _optimizer(adamw: Any, guarantee: AdapterGuarantee, batch_size: int) -> Any:
    """Return Opacus' optimizer with unpredictable noise; it raises for gradients not finite."""
    from opacus.optimizers import DPOptimizer

    class SecureOptimizer(DPOptimizer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                adamw,
                noise_multiplier=guarantee.noise_multiplier,
                max_grad_norm=guarantee.clipping_norm,
                expected_batch_size=None,
                loss_reduction="sum",
            )
            self._rng = SecureRandom()

        def add_noise(self) -> None:
            for p in self.params:
                if not bool(p.summed_grad.isfinite().all()):
                    raise ValueError("a gradient is not finite, learning_rate must be lower")
                noise = ops.gaussian(
                    tuple(p.shape),
                    sigma=self.noise_multiplier * self.max_grad_norm,
                    rng=self._rng,
                    device=p.device,
                )
                noisy = p.summed_grad.view_as(p).double() + noise
                p.grad = (noisy / batch_size).to(p.dtype)

    return SecureOptimizer()
