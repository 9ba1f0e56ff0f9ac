"""The privacy target of a DP-SGD adapter, the noise that reaches it, and the guarantee.

`EPOCHS` and `BATCH_SIZE` are the paper's, by data set (its table "train_params"). The batch size is
the expected one of Poisson sampling.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapmixed.limits import check_delta, check_number, check_optional_count
from adapmixed.privacy.conversions import gdp_to_dp
from adapmixed.privacy.planner import largest_within
from adapmixed.training.settings import PRESETS

EPOCHS = {"wikitext-103": 20, "one-billion-word": 9, "pubmed": 5, "air-dialogue": 10}
BATCH_SIZE = 256


def finetune_settings(name: str) -> dict[str, Any]:
    """Return arguments of `FinetuneConfig`: a member's, with DP-SGD's epochs and batch size."""
    return PRESETS[name].settings | {"epochs": EPOCHS[name], "batch_size": BATCH_SIZE}


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


def plan_noise(
    target: PrivacyTarget, records: int, batch_size: int, epochs: int
) -> tuple[float, float, float, int, str]:
    """Return (σ, ε, q, steps, accountant) for a target.

    Args:
        target: ε and δ, and the records that ε is for.
        records: number of records in the corpus.
        batch_size: expected records per step.
        epochs: expected passes.

    Returns:
        σ is the noise multiplier that Opacus finds, or for several records that `group_epsilon`
        allows. ε is the accountant's upper bound, at most the target's.

    Raises:
        ValueError: if the batch exceeds the records, or ε cannot be reached.
    """
    if batch_size > records:
        raise ValueError(
            f"batch_size must be at most the {records} records of the corpus, got {batch_size}"
        )
    rate = batch_size / records
    steps = epochs * math.ceil(records / batch_size)
    group = target.blocks_per_identifier or 1
    if group == 1:
        return *_record_noise(target, rate, steps), rate, steps, "prv"

    def cost(accuracy: float) -> float:
        grid = min(1e-2, 1e-3 * target.epsilon)
        try:
            return group_epsilon(1 / accuracy, rate, steps, group, target.delta, grid=grid)
        except ValueError:  # dp-accounting's, if a difference of its logarithms rounds below 0
            return math.inf

    accuracy = largest_within(cost, target.epsilon, most=2.0)
    if accuracy == 0.0:
        raise ValueError(f"epsilon must be larger for {group} blocks, got {target.epsilon!r}")
    return 1 / accuracy, cost(accuracy), rate, steps, "gdp" if rate == 1.0 else "pld"


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
