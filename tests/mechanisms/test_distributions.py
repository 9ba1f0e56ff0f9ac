"""The distribution of an answer is the same in scores, samples and charges, at every token.

Over a grid of all ensembles and all neighbours, what is charged covers the truth: each ensemble is
one position of one call, and the neighbours' distributions come from the mechanism.
"""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from exact import costs, individual, log_probs, mixtures, settled
from mechanism_cases import (
    BASELINES,
    FORMULAS,
    GRIDS,
    MECHANISMS,
    both_ways,
    every,
    everything,
    hockey_stick,
    logits,
    neighbours,
    propose,
)
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import LEAST_PUBLIC
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    NextToken,
    PMixED,
)
from adapmixed.privacy import BoundedRangeAnswer, ClippedAnswer, LeaveOneOutLoss, RenyiBound
from adapmixed.privacy.costs import bounded_range_rho, clipped_mixing_pair
from adapmixed.rng import SeededRandom
from adapmixed_ext.reference import sampling_weights
from adapmixed_lab.audit import search
from adapmixed_lab.reproduce.published import FixedLoss


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [n for n in MECHANISMS if n != "pmixed-published-subsampled"])
def test_what_is_scored_what_is_sampled_and_what_is_charged_is_one_distribution(
    name: str, masked: bool
) -> None:
    """log_prob, the sampler's probabilities and the weights of the proposal agree to 1e-13.

    Masked are token 0 in the public row alone, 1 in every row, and 2 in one private row.
    """
    private, public = logits(12)
    if masked:
        public[:, :2] = private[:, :, 1] = private[1, :, 2] = -math.inf
    proposal = settled(MECHANISMS[name].propose(private, public, rng=SeededRandom(5)))
    scored = log_probs(MECHANISMS[name], private, public, seed=5).exp()
    sampled = proposal._distribution.probabilities()
    torch.testing.assert_close(scored, sampled, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(scored.sum(1), torch.ones(12).double(), rtol=0.0, atol=1e-13)
    if masked:
        assert not scored[:, 1].any() and bool((scored[:, 3:] > 0).all())
        return
    if name in BASELINES:
        return
    if name in FORMULAS:
        expected = FORMULAS[name](private, public)
        return torch.testing.assert_close(scored, expected, rtol=1e-6, atol=0.0)
    assert hasattr(proposal._proposed.projection, "weight"), f"FORMULAS needs that of {name}"
    expected = torch.from_numpy(mixtures(proposal).mean.astype(float))
    torch.testing.assert_close(scored, expected, rtol=1e-12, atol=0.0)


@every
def test_tokens_are_drawn_from_the_distribution_to_the_last_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of draws would show that digits are missing, so the bits are compared."""
    drawn: list[Tensor] = []

    def watched(probabilities: Tensor, public_logits: Tensor, *, rng: Any) -> Tensor:
        drawn.append(probabilities.clone())
        return sample(probabilities, public_logits, rng=rng)

    sample = ops.sample
    monkeypatch.setattr(ops, "sample", watched)
    proposal = settled(propose(name))
    expected = proposal._distribution.probabilities()
    proposal.release()
    assert torch.equal(torch.cat(drawn), expected)


# Drawn tokens, down to where doubles end: docs/theory/numerics.md.

# Each with the least and the largest log p/q.
CASES: dict[str, tuple[Mechanism, float, float]] = {
    "box": (ClippedMixing(0.5, 2.0, 9), math.log(0.5), math.log(2.0)),
    "charged": (ClippedMixing(0.25, 8.0, order=3.0), -math.log(4), math.log(8.0)),
    "least": (ClippedMixing(3e-6, 3.0, order=2.0), math.log(3e-6), 1.1),
    "pool": (ClippedLogPool(-1.0, 2.0, 1.5), -4.5, 4.5),
    "wide-pool": (ClippedLogPool(-10.0, 20.0, 11.0), -330.0, 330.0),
}


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.cat([torch.zeros(1, 3), -torch.linspace(1, 780, 1500)[None]], 1)
    return public + 3 * torch.randn(3, 1, 1503, generator=generator), public


def drawn(token: NextToken) -> list[Any]:
    """Return the log of each token's probability; one of the tail is drawn after the tail."""
    logits = token.rows.tail
    columns = sampling_weights(token.probabilities(), token.rows.public)[0]
    within = sampling_weights(logits.double().softmax(-1), logits)[0]
    assert min(w for w in columns[:-1] if w) >= 2**52  # as many bits as a double can have
    unit = 1074 * mpmath.log(2)
    tail = mpmath.log(columns[-1]) - unit
    return [
        mpmath.log(weight) - unit if weight else tail + mpmath.log(share) - unit
        for weight, share in zip(columns[:-1], within, strict=True)
    ]


def exact_log_q(public: Tensor) -> list[Any]:
    with mpmath.workdps(40):
        row = [mpmath.mpf(z) for z in public[0].tolist()]
        lse = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in row))
        return [z - lse for z in row]


@pytest.mark.parametrize("name", CASES)
def test_drawn_ratios_keep_to_the_bounds_at_every_token(name: str) -> None:
    mechanism, least, most = CASES[name]
    private, public = rows(1)
    token = settled(mechanism.propose(private, public, rng=SeededRandom(0)))._distribution
    tail = []
    for log_p, log_q in zip(drawn(token), exact_log_q(public), strict=True):
        # The tail's logit is float32, which moves its tokens by as much as half of its last bit.
        slack = 1e-9 if log_q >= LEAST_PUBLIC else 4e-6
        assert least - slack <= log_p - log_q <= most + slack
        if LEAST_PUBLIC - 600 < log_q < LEAST_PUBLIC - 0.01:  # where q/t is a double
            tail.append(log_p - log_q)
    assert len(tail) > 500 and max(tail) - min(tail) < 1e-9  # one factor


@pytest.mark.parametrize("name", CASES)
def test_an_evaluated_distribution_is_the_drawn_one(name: str) -> None:
    private, public = rows(3)
    targets = torch.arange(0, public.shape[1], 7)
    token = settled(CASES[name][0].propose(private, public, rng=SeededRandom(0)))._distribution
    exact = drawn(token)
    for target in targets.tolist():
        stated = token.log_prob(torch.tensor([target])).item()
        if stated > -707.0:
            assert stated == pytest.approx(float(exact[target]), abs=1e-9)


@pytest.mark.parametrize(("lower", "upper"), [(-32.0, 32.0), (0.0, 64.0), (-64.0, 0.0)])
def test_mass_on_the_tail_raises_no_error(lower: float, upper: float) -> None:
    """An error would tell that a member has its mass where the public model has none."""
    private, public = torch.tensor([[[-2000.0, 0.0]]]), torch.tensor([[0.0, 0.0]])
    for rare in (-69.0, -71.0, -500.0, -1e4):
        public[0, 1] = rare
        proposal = settled(
            ClippedLogPool(lower, upper, 5.0).propose(private, public, rng=SeededRandom(0))
        )
        assert abs(float(proposal._distribution.probabilities().sum()) - 1.0) < 1e-12


# Every ensemble and every neighbour over a grid of logits.

BOXES = [(0.6, 1.6), (0.8, 2.7), (0.3, 1.2), (0.0, 1.5), (0.9, 1.0)]
POOLS = [(-0.25, 0.5, 2.0), (-1.0, 0.25, 1.0), (0.0, 0.7, 0.5)]
EPSILONS = (0.0, 0.01, 0.1, 0.3, 1.0)

every_grid = pytest.mark.parametrize("grid", GRIDS)


def proposed(mechanism: Mechanism, private: Tensor, public: Tensor, active: int | None) -> Any:
    return mechanism.propose(private, public, rng=SeededRandom(0), active=active)


def event_of(mechanism: Mechanism, *inputs: Any) -> Any:
    """Return the event of answers; None if the public model may answer, or there are several."""
    event, *more = (cost for cost in costs(proposed(mechanism, *inputs)) if cost.queries)
    return None if more or getattr(mechanism, "screen", None) else event


SOME = [(2.0, 0.05, ()), (6.0, 0.02, ()), (18.0, 0.2, ()), (6.0, 0.1, (1.5, 3.0, 18.0))]
REALISED = [
    *(AdaPMixED(*ball, screen=None, loss_orders=orders, adjacency=adjacency)
      for *ball, orders in SOME for adjacency in ("add_remove", "zero_out")),
    *(mechanism for mechanism in MECHANISMS.values()
      if isinstance(event_of(mechanism, *logits(1), None), LeaveOneOutLoss)),
]  # fmt: skip


@every_grid
@pytest.mark.parametrize("mechanism", REALISED, ids=repr)
def test_realised_losses_of_every_order(mechanism: Mechanism, grid: str) -> None:
    private, public, rows, k = everything(grid)
    event = event_of(mechanism, private, public, k)
    if isinstance(mechanism, AdaPMixED):
        orders = mechanism.loss_orders or (mechanism.order,)
        assert (event.adjacency, event.orders) == (mechanism.adjacency, orders)
    here = log_probs(mechanism, private, public, active=k)
    for i, neighbour in enumerate(neighbours(private, public, event.adjacency, rows)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for order, charge in zip(event.orders, event.loss[i].T, strict=True):
            # float64 resolves a divergence to about 1e-14 of its logarithms.
            assert (both_ways(here, there, order).numpy() <= charge + 1e-13).all(), (grid, i)
    assert event.loss.max() > 1e-3


def stated(mechanism: Mechanism, *inputs: Any) -> Any:
    """Return the event of answers of a cost that is fixed in advance; None for other answers."""
    event = event_of(mechanism, *inputs)
    fixed = isinstance(event, RenyiBound | ClippedAnswer | BoundedRangeAnswer)
    return event if fixed and not getattr(event, "published", False) else None


FIXED = [
    *(mechanism for name, mechanism in MECHANISMS.items() if name not in BASELINES),
    *(ClippedMixing(*box, queries=1) for box in BOXES),
    *(ClippedLogPool(*setting) for setting in POOLS),
    *(FixedLoss(*ball, screen=None) for ball in [(6.0, 0.02), (2.0, 0.2)]),
    PMixED(8.0, 1e-5, 100, 6.0),
]
EVENTS = [(mechanism, stated(mechanism, *logits(1), None)) for mechanism in FIXED]
QUESTIONS = [
    pytest.param(mechanism, way, id=f"{mechanism.name}-{at}-{way}")
    for at, (mechanism, event) in enumerate(EVENTS)
    for way in ("zero_out", "replace_one")
    if event and way in (getattr(event, "adjacency", way), "zero_out")
]


def test_every_planned_mechanism_is_enumerated() -> None:
    names = {question.values[0].name for question in QUESTIONS}
    assert names >= {m.name for m in FIXED if m.planned_queries} - {"pmixed-published"}


SLACK = {RenyiBound: 1e-13, BoundedRangeAnswer: 1e-14, ClippedAnswer: 1e-12}
"""What float64 does not resolve of two answers."""


def both(event: Any, here: Tensor, there: Tensor, adjacency: str) -> list[tuple[float, float]]:
    """Return what is true of two answers, and what their event states at most."""
    if isinstance(event, RenyiBound):
        return [(float(both_ways(here, there, event.order).max()), event.epsilon)]
    if isinstance(event, BoundedRangeAnswer):
        setting = event.scale, event.lower, event.upper, event.num_models, adjacency
        rho = bounded_range_rho(*setting)
        return [(float(both_ways(here, there, a).max()) / a, rho) for a in (1.5, 2.0, 9.0)]
    pair = clipped_mixing_pair(event.lower, event.upper, event.num_models, adjacency)
    p, q = np.array(pair.atoms).T
    return [(hockey_stick(here, there, e), search.hockey_stick(p, q, e)) for e in EPSILONS]


@every_grid
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize(("mechanism", "adjacency"), QUESTIONS)
def test_a_fixed_cost(grid: str, missing: int, mechanism: Mechanism, adjacency: str) -> None:
    """Also with members that are missing in both ensembles."""
    present, public, rows, k = everything(grid)
    absent = public.expand(missing, -1, -1)
    private = torch.cat([present, absent])
    event = stated(mechanism, private, public, k)
    here = log_probs(mechanism, private, public, active=k)
    pairs = []
    for neighbour in neighbours(present, public, adjacency, rows):
        there = log_probs(mechanism, torch.cat([neighbour, absent]), public, active=k)
        pairs += both(event, here, there, adjacency)
    assert all(true <= most + SLACK[type(event)] for true, most in pairs)
    assert max(true for true, _ in pairs) >= 0.05 * max(most for _, most in pairs)


@every_grid
@pytest.mark.parametrize(
    "mechanism",
    [
        *(ClippedMixing(max(c, 1e-5), u, order=a) for c, u in BOXES for a in (2.0, 6.5)),
        *(ClippedLogPool(*setting) for setting in POOLS),
    ],
)
def test_an_emptied_member_costs_at_most_its_own_charge(grid: str, mechanism: Any) -> None:
    private, public, rows, k = everything(grid)
    charges = torch.from_numpy(individual(proposed(mechanism, private, public, k)))
    here, boxed = log_probs(mechanism, private, public, active=k), mechanism.charge_order
    for i, neighbour in enumerate(neighbours(private, public, "zero_out", rows)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for order in [boxed] if boxed else [2.0, 9.0]:
            true = both_ways(here, there, order) / (1.0 if boxed else order)
            assert bool((true <= charges[i] + 1e-13).all())
    if not boxed:
        setting = mechanism.scale, mechanism.lower, mechanism.upper, len(private), "zero_out"
        assert float(charges.max()) <= bounded_range_rho(*setting) * (1 + 1e-6)
        return
    # For an emptied shard: "Rounding" in docs/theory/per-shard-budgets.md, e₀ = 4e-12.
    least = (2 * boxed - 1) / (boxed - 1) * (4 * 4e-12 + len(private) * 2.0**-52)
    emptied = charges[:, (private == public).all(2).all(0)]
    assert bool(((emptied >= least) & (emptied <= least * (1 + 1e-12))).all())
    assert emptied.numel() > 0
