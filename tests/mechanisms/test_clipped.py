"""ClippedMixing and ClippedLogPool: every neighbour over a grid, and the charge that covers it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from exact import answered_from_q, costs, individual, log_probs, settled, uncharged
from test_enumerated import ACTIVE, GRIDS, both_ways, everything
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import Accountant
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.costs.clipped_log_pool import bounded_range_rho
from adapmixed.privacy.costs.clipped_mixing import DominatingPair, clipped_mixing_pair
from adapmixed.privacy.rounding import array_add_up
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import search

BOXES = [(0.6, 1.6), (0.8, 2.7), (0.3, 1.2), (0.0, 1.5), (0.9, 1.0)]
POOLS = [(-0.25, 0.5, 2.0), (-1.0, 0.25, 1.0), (0.0, 0.7, 0.5)]
EPSILONS = (0.0, 0.01, 0.1, 0.3, 1.0)
ADJACENCIES = ("zero_out", "replace_one")


def neighbours(private: Tensor, public: Tensor, adjacency: str, rows: Tensor) -> list[Tensor]:
    """Return the ensembles that differ in one member, with every row of the grid in its place."""
    result = []
    for i in range(len(private)):
        for row in [public] if adjacency == "zero_out" else [r.expand_as(public) for r in rows]:
            changed = private.clone()
            changed[i] = row
            result.append(changed)
    return result


def hockey_stick(p: Tensor, q: Tensor, epsilon: float) -> Tensor:
    """Return the hockey stick, (B,), of log-probabilities (B, V)."""
    return (p.exp() - torch.exp(torch.tensor(epsilon)) * q.exp()).clamp(min=0).sum(1)


def of_pair(pair: DominatingPair, epsilon: float) -> float:
    """Return the hockey stick of a pair, the larger of both orders."""
    return float(search.hockey_stick(np.array(pair.p), np.array(pair.q), epsilon))


def values_of(grid: str) -> Tensor:
    vocab, _, values = GRIDS[grid]
    return torch.tensor([(0.0, *rest) for rest in product(values, repeat=vocab - 1)])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("box", BOXES)
def test_no_neighbour_is_told_apart_better_than_the_pair(
    grid: str, adjacency: str, box: tuple[float, float]
) -> None:
    (private, public), k = everything(*GRIDS[grid]), ACTIVE.get(grid)
    mechanism = ClippedMixing(*box, queries=len(public))
    pair = clipped_mixing_pair(*box, len(private), adjacency)
    here = log_probs(mechanism, private, public, active=k)
    for neighbour in neighbours(private, public, adjacency, values_of(grid)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for epsilon in EPSILONS:
            bound = of_pair(pair, epsilon)
            for p, q in ((here, there), (there, here)):
                assert float(hockey_stick(p, q, epsilon).max()) <= bound + 1e-12


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("setting", POOLS)
def test_no_neighbour_of_a_pool_costs_more_than_its_range(
    grid: str, adjacency: str, setting: tuple[float, float, float]
) -> None:
    (private, public), k = everything(*GRIDS[grid]), ACTIVE.get(grid)
    lower, upper, scale = setting
    mechanism = ClippedLogPool(lower, upper, scale)
    rho = bounded_range_rho(scale, lower, upper, len(private), adjacency)
    here = log_probs(mechanism, private, public, active=k)
    worst = 0.0
    for neighbour in neighbours(private, public, adjacency, values_of(grid)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for order in (2.0, 9.0):
            true = float((both_ways(here, there, order) / order).max())
            worst = max(worst, true)
            assert true <= rho + 1e-14
    assert worst > 0.05 * rho


def charged(mechanism: Mechanism, private: Tensor, public: Tensor, **shape: Any) -> Tensor:
    """Return the charges of every member, (N, B)."""
    proposal = mechanism.propose(private, public, rng=SeededRandom(0), **shape)
    return torch.from_numpy(individual(proposal))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("order", [2.0, 6.5])
def test_an_emptied_member_costs_at_most_its_own_charge(
    grid: str, box: tuple[float, float], order: float
) -> None:
    (private, public), k = everything(*GRIDS[grid]), ACTIVE.get(grid)
    mechanism = ClippedMixing(max(box[0], 1e-5), box[1], order=order)
    charges = charged(mechanism, private, public, active=k)
    here = log_probs(mechanism, private, public, active=k)
    for i, neighbour in enumerate(neighbours(private, public, "zero_out", public)):
        true = both_ways(here, log_probs(mechanism, neighbour, public, active=k), order)
        assert bool((true <= charges[i] + 1e-13).all())
    # For an emptied shard: "Rounding" in docs/theory/per-shard-budgets.md, e₀ = 4e-12.
    least = (2 * order - 1) / (order - 1) * (4 * 4e-12 + len(private) * 2.0**-52)
    emptied = charges[:, (private == public).all(2).all(0)]
    assert bool(((emptied >= least) & (emptied <= least * (1 + 1e-12))).all())
    assert emptied.numel() > 0


@pytest.mark.parametrize(
    "mechanism", [ClippedMixing(0.6, 1.6, order=5.0), ClippedLogPool(-0.25, 0.5, 2.0)]
)
@pytest.mark.parametrize("num_models", [1, 2, 5])
def test_an_exhausted_member_answers_as_an_emptied_one_to_the_last_bit(
    mechanism: Mechanism, num_models: int
) -> None:
    """A member that pays nothing must change no bit of the answer, over many answers."""
    generator = torch.Generator().manual_seed(num_models)
    public = 3 * torch.randn(40, 700, generator=generator)
    private = public + torch.randn(num_models, 40, 700, generator=generator)
    emptied = private.clone()
    emptied[0] = public
    every = torch.ones(num_models, 40, dtype=torch.bool)
    others = every.clone()
    others[0] = False
    found, logs = [], []
    for rows, active in ((private, others), (emptied, every), (emptied, others), (emptied, None)):
        proposal = mechanism.propose(rows, public, rng=SeededRandom(0))
        answer = settled(proposal, None if active is None else active.numpy())._distribution
        found.append(answer.probabilities())
        logs.append(torch.stack([answer.log_prob(torch.full((40,), v)) for v in range(0, 700, 50)]))
    for same in (found, logs):
        assert all(torch.equal(same[0], other) for other in same[1:])
    whole = settled(mechanism.propose(private, public, rng=SeededRandom(0)))._distribution
    assert not torch.equal(whole.probabilities(), found[0])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("setting", POOLS)
def test_an_emptied_member_of_a_pool_costs_at_most_its_own_charge(
    grid: str, setting: tuple[float, float, float]
) -> None:
    (private, public), k = everything(*GRIDS[grid]), ACTIVE.get(grid)
    mechanism = ClippedLogPool(*setting)
    charges = charged(mechanism, private, public, active=k)
    here = log_probs(mechanism, private, public, active=k)
    for i, neighbour in enumerate(neighbours(private, public, "zero_out", public)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for order in (2.0, 9.0):
            assert bool((both_ways(here, there, order) / order <= charges[i] + 1e-14).all())
    assert float(charges.max()) <= bounded_range_rho(
        setting[2], *setting[:2], len(private), "zero_out"
    ) * (1 + 1e-6)


@pytest.mark.parametrize("changed", ["another", "emptied", "corners", "outside q"])
@pytest.mark.parametrize(
    ("mechanism", "amount", "top_k"),
    [
        (ClippedMixing(0.6, 1.6, order=5.0), 0.02, None),
        (ClippedMixing(0.2, 9.0, order=2.0), 0.3, 7),
        (ClippedLogPool(-9.0, 9.0, 0.1), 0.006, None),
        (ClippedLogPool(-9.0, 9.0, 0.2, public_confidence=0.4), 0.02, None),
    ],
)
def test_a_charge_does_not_depend_on_the_other_shards(
    mechanism: Mechanism, amount: float, top_k: int | None, changed: str
) -> None:
    """Proposed charges, paid charges and spent totals agree to the last bit."""
    models, answers, vocab = 6, 9, 300
    generator = torch.Generator().manual_seed(3)
    public = 2 * torch.randn(answers, vocab, generator=generator)
    private = public + torch.randn(models, answers, vocab, generator=generator)
    rows = {
        "another": private + 3 * torch.randn(models, answers, vocab, generator=generator),
        "emptied": public.expand_as(private),
        "corners": public + 40 * torch.randn(models, answers, vocab, generator=generator).sign(),
        "outside q": private.masked_fill(torch.arange(vocab) % 3 > 0, -torch.inf),
    }[changed]
    assert mechanism.measure is not None
    measure, order = mechanism.measure
    epsilon = ShardBudget(measure, amount, order).epsilon(1e-5)

    def charges(here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the proposed, paid and total charges after each answer, each (N, answers)."""
        accountant = Accountant(1e-5, epsilon=epsilon)
        found = []
        for t in range(answers):
            query = here[:, t : t + 1].contiguous(), public[t : t + 1]
            proposal = mechanism.propose(*query, rng=SeededRandom(0), top_k=top_k)
            own, before = individual(proposal)[:, 0], accountant.spent if t else np.zeros(models)
            accountant.charge(proposal)
            assert proposal._active is not None
            paid = np.where(proposal._active[:, 0].numpy(), own, 0.0)
            assert (accountant.spent == array_add_up(before, paid)).all()
            found.append([torch.from_numpy(one) for one in (own, paid, accountant.spent)])
        assert bool((found[-1][1] == 0).any()) and bool((found[0][1] > 0).any())  # some retire
        proposed, paid, spent = (torch.stack(column, 1) for column in zip(*found, strict=True))
        return proposed, paid, spent

    before = charges(private)
    for j in range(models):
        other = private.clone()
        other[j] = rows[j]
        kept = [i for i in range(models) if i != j]
        after = charges(other)
        assert not torch.equal(before[0][j], after[0][j])
        for own, then in zip(before, after, strict=True):
            assert torch.equal(own[kept], then[kept])
    others = rows.clone()  # all of them at once
    others[2] = private[2]
    for own, then in zip(before, charges(others), strict=True):
        assert torch.equal(own[2], then[2])


@pytest.mark.parametrize(
    "mechanism", [ClippedMixing(0.6, 1.6, queries=3), ClippedLogPool(-0.25, 0.5, 2.0)]
)
def test_top_k_keeps_the_likeliest_public_tokens(mechanism: Mechanism) -> None:
    generator = torch.Generator().manual_seed(4)
    public = 2 * torch.randn(3, 40, generator=generator)
    private = public + torch.randn(4, 3, 40, generator=generator)
    private[1, 0, public[0].topk(7).indices] = -torch.inf  # nothing left: answers q
    every = log_probs(mechanism, private, public, top_k=7)
    kept = public >= public.topk(7).values[:, -1:]
    assert torch.equal(every > -torch.inf, kept)
    assert torch.allclose(every.exp().sum(1), torch.ones(3, dtype=torch.float64), atol=1e-12)
    masked = torch.where(kept, private, -torch.inf)
    masked[1, 0] = torch.where(kept[0], public[0], -torch.inf)
    expected = log_probs(mechanism, masked, torch.where(kept, public, -torch.inf))
    assert torch.allclose(every.exp(), expected.exp(), atol=1e-12)
    proposal = mechanism.propose(private, public, rng=SeededRandom(0), top_k=7)
    tokens = uncharged(proposal).tokens
    assert tokens is not None and bool(kept.gather(1, tokens[:, None]).all())


@pytest.mark.parametrize(
    "mechanism",
    [
        ClippedMixing(0.6, 1.6, 9, order=3.0, public_confidence=0.5),
        ClippedLogPool(-1, 1, public_confidence=0.5),
    ],
)
def test_a_sure_query_is_answered_from_q_for_nothing(mechanism: Mechanism) -> None:
    public = torch.zeros(2, 5)
    public[1, 3] = 6.0
    private = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(5))
    proposal = mechanism.propose(private, public, rng=SeededRandom(0))
    assert answered_from_q(proposal).tolist() == [False, True]
    assert [event.queries for event in costs(proposal)] == [1, 1]
    assert (individual(proposal)[:, 1] == 0).all()
    q = torch.log_softmax(public.double(), 1)
    there = log_probs(mechanism, private, public)
    assert torch.allclose(there[1], q[1], atol=1e-12)
    assert not torch.allclose(there[0], q[0], atol=1e-3)
