"""Results of evaluations, with and without budgets: guarantees, curves, progress, errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_cases
import torch
from evaluation_cases import DETERMINISTIC, SCREENED, run
from fake_ensemble import FakeEnsemble
from result_cases import DELTA, stream

from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import Evaluation
from adapmixed.evaluation.result import paired_difference
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
    UnprotectedPool,
)
from adapmixed.privacy import Accountant, BudgetSpentError
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SeededRandom


def test_guarantees_shares_and_curves() -> None:
    fake, tokens = FakeEnsemble(), stream(401)
    mechanisms: dict[str, Mechanism] = {
        "public": PublicOnly(),
        "unprotected": Unprotected(),
        "pmixed": PMixED(8.0, DELTA, 400, 6.0),
        "fixed": AdaPMixED(**SCREENED | dict(loss="fixed")),
        "adapmixed": AdaPMixED(**SCREENED),
    }
    results = {r.name: r for r in run(fake, tokens, mechanisms, block=401)}
    kinds = {name: r.guarantee.kind for name, r in results.items()}
    assert kinds == {
        "public": "public",
        "unprotected": "none",
        "pmixed": "fixed",
        "fixed": "fixed",
        "adapmixed": "data-dependent, ex-post",
    }
    assert results["public"].guarantee.epsilon == 0.0
    assert results["unprotected"].guarantee.epsilon is None
    assert results["pmixed"].guarantee.epsilon == pytest.approx(8.0, rel=1e-9)
    assert [results[n].screened for n in ("public", "unprotected", "pmixed")] == [0.0, 0.0, 0.0]
    assert 0.05 < results["adapmixed"].screened < 0.95
    for name, result in results.items():
        counts = [queries for queries, _ in result.curve]
        assert counts == [64, 128, 192, 256, 320, 384, 400]
        assert result.curve[-1][1] == result.guarantee.epsilon
        if name not in ("public", "unprotected"):
            epsilons = [epsilon for _, epsilon in result.curve]
            # PMixED's whole budget is charged with the first query.
            assert epsilons == sorted(epsilons)
            assert (epsilons[0] < epsilons[-1]) == (name != "pmixed")
            parts = result.breakdown
            assert parts["total"] == result.guarantee.epsilon
            assert parts["conversion"] == pytest.approx(c_alpha(mechanisms[name].order, DELTA))
            assert parts["total"] == pytest.approx(
                parts["mixing"] + parts["screening"] + parts["conversion"]
            )
    # Screening is charged for all queries, even for those that the public model answers.
    screening = 400 * 3.0 * (0.5 / (3 * 0.05)) ** 2
    assert results["adapmixed"].breakdown["screening"] == pytest.approx(screening)


def test_a_target_that_cannot_occur_has_infinite_perplexity() -> None:
    fake = FakeEnsemble()
    fake._token[:, 2] = -math.inf
    mechanisms = {"public": PublicOnly(), "unprotected": Unprotected()}
    assert [r.perplexity for r in run(fake, [0, 1, 2, 0], mechanisms)] == [math.inf] * 2
    assert all(math.isfinite(r.perplexity) for r in run(fake, [0, 1, 3, 0], mechanisms))


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    run(FakeEnsemble(), stream(200), block=100, progress=lambda *counts: seen.append(counts))
    assert [done for done, _ in seen] == [0, 64, 99, 163, 198]
    assert {total for _, total in seen} == {198}


@pytest.mark.parametrize(
    "tokens,settings,message",
    [
        ([3], {}, "tokens must .* got 1"),
        ([1, 2, 3], dict(block=513), "block must .* got 513"),
        ([1, 2, 3], dict(queries=0), "queries must .* got 0"),
        ([1, 2, 3], dict(block=2, queries=2), "queries must .* got 2"),
        ([1, 2, 3], dict(delta=0.0), "delta must"),
        ([1, 2, 3], dict(adjacency="removed"), "adjacency must"),
        ([1, 2, 3], dict(epsilon=-1.0), "epsilon must"),
        ([1, 2, 3], dict(mechanisms={}), "mechanisms must"),
    ],
)
def test_refusals(tokens: list[int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(FakeEnsemble(), tokens, **settings)


def test_a_mechanism_does_not_depend_on_its_neighbours() -> None:
    """Screening noise comes from the mechanism's own source."""
    noisy = AdaPMixED(order=4.0, target_leakage=0.1, sigma=0.3, threshold=0.5, screen_top_k=3)
    mechanisms = {"other": noisy, **DETERMINISTIC, "ada": noisy}
    together = run(FakeEnsemble(), stream(200), mechanisms)
    assert [one.name for one in together] == list(mechanisms)
    for one in together:
        (alone,) = run(FakeEnsemble(), stream(200), {one.name: mechanisms[one.name]})
        for part in ("perplexity", "screened", "guarantee"):
            assert getattr(one, part) == getattr(alone, part), (one.name, part)
    assert 0 < together[-1].screened < 1
    assert together[0].screened == together[-1].screened  # of one kind: the same noise


@pytest.mark.parametrize(
    ("mechanism", "order"),
    [(ClippedLogPool(-0.5, 0.5, 2.0), None), (ClippedMixing(0.5, 2.0, order=4.0), 4.0)],
)
def test_perplexity_under_budgets_of_shards(
    mechanism: Mechanism, order: float | None, tmp_path: Path
) -> None:
    epsilon = ShardBudget("zcdp" if order is None else "renyi", 0.5, order).epsilon(DELTA)
    (result,) = run(
        FakeEnsemble(), stream(401), {"pool": mechanism}, block=401, epsilon={"pool": epsilon},
        result=tmp_path / "result.json",
    )  # fmt: skip
    kept = json.loads((tmp_path / "result.json").read_text())["state"]["runs"][0][0]["tally"]
    found = result.guarantee
    assert (found.method, found.kind) == ("per-shard budget", "fixed")
    assert {e for _, e in result.curve} == {found.epsilon} and found.epsilon <= epsilon
    # It charges as generation does: position after position, each shard until it cannot pay.
    private, public = FakeEnsemble().logits(torch.tensor([stream(401)[:400]]))
    alone, log_probs, active = Accountant(DELTA, epsilon=epsilon), [], []
    for t, target in enumerate(stream(401)[1:]):
        proposal = mechanism.propose(
            private[:, 0, t : t + 1], public[0, t : t + 1], targets=torch.tensor([target]),
            rng=SeededRandom(0),
        )  # fmt: skip
        alone.charge(proposal)
        assert proposal._active is not None
        active.append(proposal._active)
        answer = proposal.release()
        assert answer.log_prob is not None
        log_probs.append(float(answer.log_prob))
    assert bool(active[0].all()) and not bool(active[-1].any())
    assert alone.guarantee().epsilon == found.epsilon
    assert 0.0 < alone.spent.max() <= alone.limit
    assert Accountant.from_state(kept["accountant"]).spent.tolist() == alone.spent.tolist()
    counts = [queries for queries, _ in result.perplexities]
    assert counts == [64, 128, 192, 256, 320, 384, 400]
    for queries, perplexity in result.perplexities:
        expected = math.exp(-math.fsum(log_probs[:queries]) / queries)
        assert perplexity == pytest.approx(expected, rel=1e-9)
    assert result.perplexities[-1][1] == result.perplexity


def test_no_budget_of_shards_if_charges_are_not_those_of_single_members() -> None:
    for mechanism in (
        AdaPMixED(**SCREENED), PMixED(8.0, DELTA, 400, 6.0), Unprotected(), ClippedMixing(0.5, 2.0)
    ):  # fmt: skip
        fake = FakeEnsemble()
        with pytest.raises(ValueError, match=r"epsilon must be None for \w+, got 3.0: it"):
            run(fake, stream(401), {"m": mechanism}, epsilon=3.0)
        assert not fake.budgets  # nothing was read
    with pytest.raises(ValueError, match="queries must be None if every shard has a budget"):
        run(FakeEnsemble(), stream(401), {"m": ClippedLogPool(-0.5, 0.5, queries=400)}, epsilon=3.0)
    with pytest.raises(ValueError, match=r"epsilon must name mechanisms .* got \['x'\]"):
        run(FakeEnsemble(), stream(9), epsilon={"x": 3.0})


def test_a_plan_for_fewer_queries_raises_before_anything_is_read() -> None:
    fake = FakeEnsemble()
    with pytest.raises(BudgetSpentError, match="within the 99 that the mechanism was planned for"):
        run(fake, stream(101), {"p": PMixED(8.0, DELTA, 99, 6.0)}, block=101)
    assert not fake.budgets


def test_neighbours() -> None:
    pool: dict[str, Mechanism] = {"pool": ClippedLogPool(-0.5, 0.5, queries=200)}
    default, zero_out, replaced = (
        run(FakeEnsemble(), stream(101), pool, block=101, adjacency=question)[0].guarantee
        for question in (None, "zero_out", "replace_one")
    )
    assert default == zero_out and zero_out.epsilon < replaced.epsilon
    assert [g.adjacency for g in (zero_out, replaced)] == ["zero_out", "replace_one"]
    # A guarantee under the paper's leave-one-out names it, even if another adjacency was given.
    for way in ("zero_out", "add_remove"):
        ada = {"ada": AdaPMixED(**SCREENED | dict(adjacency=way))}
        assert run(FakeEnsemble(), stream(101), ada)[0].guarantee.adjacency == way
        fake = FakeEnsemble()
        with pytest.raises(ValueError, match="adjacency must be 'zero_out' for AdaPMixED, got"):
            run(fake, stream(101), ada, adjacency="replace_one")
        assert not fake.budgets  # nothing was read
    fixed = {"ada": AdaPMixED(**SCREENED | dict(loss="fixed"))}
    found = run(FakeEnsemble(), stream(101), fixed, adjacency="replace_one")[0].guarantee
    assert (found.kind, found.adjacency) == ("fixed", "replace_one")


def blocks_of(losses: list[float]) -> Evaluation:
    """Return an evaluation whose blocks of 64 queries have these mean losses."""
    so_far = [math.exp(sum(losses[:k]) / k) for k in range(1, len(losses) + 1)]
    points = tuple((64 * (k + 1), value) for k, value in enumerate(so_far))
    one = report_cases.evaluation("m", "fixed", epsilon=1.0, perplexity=so_far[-1])
    return replace(one, queries=64 * len(losses), perplexities=points)


def test_paired_differences_have_the_interval_of_a_block_bootstrap() -> None:
    """The text's own spread, which both share, leaves the interval."""
    text = np.random.default_rng(1).normal(4.0, 1.0, 40)
    gaps = np.random.default_rng(2).normal(-0.1, 0.02, 40)
    public, method = blocks_of(list(text)), blocks_of(list(text + gaps))
    found = paired_difference([method], [public])
    assert found is not None and found["blocks"] == 40
    low, mean, high = (float(found[name] or 0.0) for name in ("low", "mean", "high"))
    assert mean == pytest.approx(float(gaps.mean()), abs=1e-9)
    error = float(gaps.std()) / math.sqrt(40)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert paired_difference([method], [public]) == found  # seeded
    # Runs count by their blocks; few blocks, or an infinite loss, have no interval.
    parts = (slice(20), slice(20, 40))
    halves = [[blocks_of(list(text[s])), blocks_of(list((text + gaps)[s]))] for s in parts]
    both = paired_difference([own for _, own in halves], [other for other, _ in halves])
    assert both is not None and both["mean"] == pytest.approx(mean, abs=1e-9)
    few = paired_difference([blocks_of([4.0] * 7)], [blocks_of([4.5] * 7)])
    assert few == {"mean": pytest.approx(-0.5), "low": None, "high": None, "blocks": 7}
    assert paired_difference([blocks_of([math.inf])], [blocks_of([4.0])]) is None
    # A long text has no more than 64 blocks.
    many = paired_difference([blocks_of([4.0] * 500)], [blocks_of([4.5] * 500)])
    assert many is not None and many["blocks"] == 64


def test_the_unprotected_pool_is_its_formula() -> None:
    """p ∝ q exp(κ mean_i log p_i/q), the members unclipped."""
    ensemble, tokens = FakeEnsemble(5), stream(60)
    (found,) = run(ensemble, tokens, {"pool": UnprotectedPool(3.0)})
    ids = torch.tensor([tokens[:-1]])
    loss = 0.0
    for where, private, public, _ in ensemble.iter_logits(ids, memory_bytes=1 << 30):
        own, q = private[:, 0].double().log_softmax(-1), public[0].double().log_softmax(-1)
        pooled = (q + 3.0 * (own - q).mean(0)).log_softmax(-1)
        loss -= float(pooled.gather(1, torch.tensor(tokens[1:])[where][:, None]).sum())
    assert math.log(found.perplexity) == pytest.approx(loss / 59, abs=1e-6)
    assert found.guarantee.kind == "none" and found.guarantee.epsilon is None
    with pytest.raises(ValueError, match="it has no bound that could be charged"):
        run(ensemble, tokens, {"pool": UnprotectedPool()}, epsilon=1.0)
    for scale in (0.0, 101.0, math.nan):
        with pytest.raises(ValueError, match="scale must be"):
            UnprotectedPool(scale)


def test_members_speak_about_the_active_vocabulary(demo_ensemble: Path) -> None:
    """A member has (1 − t) p_i(y) / p_i(S) at a token of S, and q(y) elsewhere."""
    demo = Ensemble.from_pretrained(demo_base(), demo_ensemble)
    tokens = stream(60, vocab=demo.vocab_size)
    (found,) = run(demo, tokens, {"mean": Unprotected()}, memory_bytes=1 << 30, active=600)
    private, public = (z[..., 0, :-1, :].double() for z in demo.logits(torch.tensor([tokens])))
    q = public.softmax(-1)
    tail = torch.ones_like(q, dtype=torch.bool).scatter(-1, q.topk(600).indices, False)
    p = private.masked_fill(tail, -math.inf).softmax(-1).mean(0)
    expected = torch.where(tail, q, p * q.masked_fill(tail, 0.0).sum(-1, keepdim=True))
    losses = -expected.gather(1, torch.tensor(tokens[1:])[:, None]).log()
    assert math.log(found.perplexity) == pytest.approx(float(losses.mean()), abs=1e-6)
