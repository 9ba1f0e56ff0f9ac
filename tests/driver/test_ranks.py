"""An ensemble that is spread over ranks answers and is charged as in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_cases import Group, in_ranks
from rank_mechanisms import FILTERED, MECHANISMS, MODELS, POSITIONS, TARGETS, logits
from torch import Tensor

from adapmixed.charging import Charge
from adapmixed.mechanisms import (
    PublicOnly,
)
from adapmixed.mechanisms.spread import likeliest
from adapmixed.privacy import Accountant, PerModelFilter
from adapmixed.ranks import ALONE, OneRank, Place, Ranks
from adapmixed.rng import SeededRandom
from adapmixed_ext import density_ratio_sum, leave_one_out, loss_error, reference


def answered(ranks: Ranks) -> dict[str, Any]:
    """All that mechanisms give: charges, events, tokens, log-probabilities."""
    private, public = logits()
    found: dict[str, Any] = {}
    if isinstance(ranks, Group):
        ranks = ranks.over(MODELS)
    for name, mechanism in MECHANISMS.items():
        for targets in (None, TARGETS):
            rng = SeededRandom(11, name)
            proposal = mechanism.propose(
                ranks.rows(private), public, targets=targets, rng=rng, ranks=ranks
            )
            events = [event.__dict__ for event in proposal.events()]
            answer = proposal.release()
            assert proposal.num_models == MODELS
            found[f"{name}, {targets is None}"] = (
                proposal.charges, events, answer.tokens, answer.log_prob, answer.public
            )  # fmt: skip
    for name, (mechanism, budget) in FILTERED.items():
        model_filter = PerModelFilter(MODELS, budget)
        charge = Charge(Accountant(1e-5, filter_budget=budget), None, model_filter)
        for step in range(4):
            private, public = logits(step)
            proposal = mechanism.propose(
                ranks.rows(private), public, rng=SeededRandom(step, name), ranks=ranks
            )
            active = charge(proposal)
            tokens = proposal.release(active).tokens
            found[f"{name}, filtered, {step}"] = (proposal.individual_charges, active, tokens)
        if ranks.leads:
            assert charge.accountant.queries == 4 * POSITIONS
            assert 0 < (model_filter.spent > 0).sum()
            found[f"{name}, spent"] = model_filter.spent
        else:
            assert charge.accountant.queries == 0 and not model_filter.spent.any()
    return found


def tolerance(where: str) -> tuple[float, float]:
    """(relative, absolute). A process without ranks takes single precision first for losses of
    leave-one-out, and keeps a position only if its error is bounded by 9.8e-6 of every loss
    (csrc/core/loss_bound.h, kLossError) or 1e-12: with the 2e-10 of ranks (below) that is the
    operator's loss_error."""
    realised = "adapmixed" in where and "fixed" not in where and where.startswith("alone")
    if realised and "[3]" not in where:  # [3]: log-probabilities
        return loss_error, 1e-12
    return 1e-9, 1e-9


def compare(found: Any, expected: Any, where: str) -> None:
    """Equal; numbers in nats to `tolerance`."""
    if isinstance(expected, Tensor | np.ndarray):
        found, expected = (torch.tensor(np.asarray(value)) for value in (found, expected))
        assert found.dtype == expected.dtype, where
        if not expected.is_floating_point():
            assert torch.equal(found, expected), where
            return
        relative, absolute = tolerance(where)
        assert torch.allclose(found, expected, rtol=relative, atol=absolute), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            compare(found[key], expected[key], f"{where}, {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected, strict=True)):
            compare(*pair, f"{where}[{i}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_answer_as_one_process(world: int, tmp_path: Path) -> None:
    """5 models are not divisible by either; the other ranks hear the same. Losses of leave-one-out
    are those of one rank to 1e-9, of a process without ranks to what single precision leaves."""
    expected, one = answered(ALONE), answered(OneRank())
    for name in ("clipped-mixing", "clipped-log-pool"):
        last = expected[f"{name}, filtered, 3"][1]
        assert last.any() and not last.all(), f"{name}: the filter decides nothing"
    screened = expected["adapmixed, True"][4]
    assert screened.any() and not screened.all()
    for rank, found in enumerate(in_ranks(world, answered, tmp_path)):
        if isinstance(found, Exception):
            raise found
        if rank:
            expected, one = (
                {key: value for key, value in all_of.items() if "spent" not in key}
                for all_of in (expected, one)
            )
        compare(found, expected, f"alone, rank {rank}")
        compare(found, one, f"one of one, rank {rank}")


def test_a_rank_that_is_not_charged_states_no_guarantee(tmp_path: Path) -> None:
    def work(ranks: Group) -> str:
        private, public = logits()
        ranks, charge = ranks.over(MODELS), Charge(Accountant(1e-5))
        charge(PublicOnly().propose(ranks.rows(private), public, rng=SeededRandom(0), ranks=ranks))
        try:
            return str(charge.accountant.epsilon())
        except ValueError as error:
            return str(error)

    leading, following = in_ranks(2, work, tmp_path)
    assert leading.startswith("ε = 0")
    assert "must be asked of the rank that leads" in following


def test_losses_are_those_of_the_reference(tmp_path: Path) -> None:
    """Of all rows in float64, and of one process that takes them in double: only its single
    precision is a difference.

    A loss is an excess of order x², x_i = (mean_j δ_j − δ_i) q / ((N−1) p). Σ δ is off by 1e-12 of
    Σ p̄/q (`density_ratio_sum`), x by 1e-12 N/(N−1), the loss by 2e-12 N/(N−1)/|x| of itself; with
    |x| > 0.02, as here, that is within 2e-10.
    """
    names = [n for n in MECHANISMS if n.startswith("adapmixed") and "fixed" not in n]

    def work(ranks: Group) -> Any:
        private, public = logits()
        ranks = ranks.over(MODELS)
        return [
            MECHANISMS[name]
            .propose(ranks.rows(private), public, rng=SeededRandom(11, name), ranks=ranks)
            .charges  # fmt: skip
            for name in names
        ]

    private, public = logits()
    for found in in_ranks(2, work, tmp_path):
        for name, charges in zip(names, found, strict=True):
            mechanism: Any = MECHANISMS[name]
            law: Any = mechanism.propose(private, public, rng=SeededRandom(11, name)).law
            expected = reference.leave_one_out(
                private, public, law.projection, orders=list(mechanism._orders),
                adjacency=mechanism.adjacency,
            )  # fmt: skip
            assert expected.amax() > 1e-3
            assert torch.allclose(charges, expected, rtol=2e-10, atol=0.0), name
            ratio = density_ratio_sum(private, public, law.projection) / MODELS
            double = leave_one_out(
                private, public, law.projection, orders=list(mechanism._orders),
                adjacency=mechanism.adjacency, num_models=MODELS, mean_excess=ratio - 1.0,
            )  # fmt: skip
            assert torch.allclose(charges, double, rtol=2e-10, atol=0.0), name


def test_the_pool_has_the_bits_of_one_process(tmp_path: Path) -> None:
    """Its sums are exact; those of mixtures are the same on every rank, but not as in one."""

    def work(ranks: Group) -> Any:
        private, public = logits()
        spread = ranks.over(MODELS)
        found = []
        for name in ("clipped-log-pool", "adapmixed, no screen", "clipped-mixing"):
            law = MECHANISMS[name].propose(
                spread.rows(private), public, rng=SeededRandom(0), ranks=spread
            ).law  # fmt: skip
            found.append(law.log_prob(TARGETS))
        return found

    private, public = logits()
    ranks = in_ranks(2, work, tmp_path)
    alone = MECHANISMS["clipped-log-pool"].propose(private, public, rng=SeededRandom(0)).law
    assert torch.equal(ranks[0][0], alone.log_prob(TARGETS))
    for first, second in zip(*ranks, strict=True):
        assert torch.equal(first, second)


def test_likeliest_takes_ties_by_lower_index() -> None:
    public = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, -math.inf, 5.0]])
    assert likeliest(public, 3).tolist() == [[1, 3, 0], [4, 0, 1]]
    assert likeliest(public, 5).tolist() == [[1, 3, 0, 2, 4], [4, 0, 1, 2, 3]]
    rows = torch.randn(40, 50).round(decimals=1)
    order = rows.argsort(dim=-1, descending=True, stable=True)
    for top_k in (1, 7, 50):
        assert torch.equal(likeliest(rows, top_k), order[:, :top_k])


def test_what_ranks_refuse(tmp_path: Path) -> None:
    def more_ranks_than_members(ranks: Group) -> None:
        ranks.over(1)

    def other_members(ranks: Group) -> None:
        private, public = logits()
        PublicOnly().propose(private, public, rng=SeededRandom(0), ranks=ranks.over(MODELS))

    def other_facts(ranks: Group) -> None:
        ranks.agree({"a": "same", "the mechanism": MECHANISMS["pmixed"]})
        ranks.agree({"a": "same", "the mechanism": f"one of rank {ranks.rank}"})

    for error in in_ranks(2, more_ranks_than_members, tmp_path):
        assert "at most as many as members, got 2 ranks for 1 members" in str(error)
    for rank, error in enumerate(in_ranks(2, other_members, tmp_path)):
        assert f"must be those of the {3 - rank} members of rank {rank}, got 5" in str(error)
    for rank, error in enumerate(in_ranks(2, other_facts, tmp_path)):
        assert isinstance(error, ValueError)
        assert "ranks must agree on the mechanism: rank 1 has another than rank 0" in str(error)
        assert f"one of rank {rank}" in str(error)


def test_slices_are_contiguous_and_whole() -> None:
    for members in range(1, 12):
        for world in range(1, members + 1):
            parts = []
            for rank in range(world):
                ranks = Group(Place(rank, world), 1.0).over(members)
                own = ranks.own(members)
                size = own.stop - own.start
                assert ranks.slots(size) == members and 1 <= size <= ranks.most(size)
                parts += range(members)[own]
            assert parts == list(range(members))
