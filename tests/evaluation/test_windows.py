"""Cutting of text into the authors' blocks, sliding windows and runs; direct perplexity."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from result_cases import DELTA, NOISY, stream

from adapmixed.evaluation import evaluate, plan_runs
from adapmixed.mechanisms import ClippedLogPool, Mechanism, PMixED, PublicOnly, Unprotected
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.published import PaperRule


def contexts(length: int, block: int, stride: int | None) -> dict[int, int]:
    """Return where each scored token's context begins, found independently token by token."""
    if stride is None:
        return {t: t - t % block for t in range(length) if t % block}
    found = {}
    for t in range(1, length):
        # The earliest window that reaches the token.
        number = 0
        while number * stride + block <= t:
            number += 1
        found[t] = number * stride
    return found


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 5, 6])
def test_every_token_is_scored_once_with_its_context(stride: int | None) -> None:
    block = 7
    for length in range(2, 40):
        (windows,), total = plan_runs(range(length), None, block, None, stride=stride)
        scored = {t: w.start for w in windows for t in range(w.first, w.stop)}
        assert sum(w.queries for w in windows) == len(scored) == total
        assert scored == contexts(length, block, stride)
        assert all(w.stop - w.start <= block and w.start < w.first < w.stop for w in windows)
        if stride is not None:
            assert set(scored) == set(range(1, length))
            assert all(t - start >= min(t, block - stride) for t, start in scored.items())
        for queries in range(1, total + 1):
            (fewer,), count = plan_runs(range(length), None, block, queries, stride=stride)
            assert count == queries == sum(w.queries for w in fewer)
            assert [t for w in fewer for t in range(w.first, w.stop)] == sorted(scored)[:queries]


@pytest.mark.parametrize("stride", [None, 1, 40, 99])
@pytest.mark.parametrize(
    ("memory_bytes", "queries"), [(1000, None), (33, None), (1000, 99), (33, 130)]
)
def test_perplexity_of_windows(stride: int | None, memory_bytes: int, queries: int | None) -> None:
    tokens, fake = stream(250), FakeEnsemble()
    mechanisms: dict[str, Mechanism] = {"public": PublicOnly(), "unprotected": Unprotected()}
    results = evaluate(
        fake, tokens, mechanisms, delta=DELTA, rng=SeededRandom(0), block=100, stride=stride,
        memory_bytes=memory_bytes, queries=queries,
    )  # type: ignore[arg-type]  # fmt: skip
    assert set(fake.budgets) == {memory_bytes}
    sums = [0.0, 0.0]
    starts = dict([*contexts(len(tokens), 100, stride).items()][:queries])
    assert len(fake.budgets) == len(set(starts.values()))  # no window more than is needed
    for t, start in starts.items():
        private, public = fake.logits(torch.tensor([tokens[start:t]]))
        for number, rows in enumerate((public[0, -1:], private[:, 0, -1])):
            p = torch.softmax(rows.double(), -1).mean(0)[tokens[t]]
            sums[number] -= math.log(p)
    for result, total in zip(results, sums, strict=True):
        assert result.queries == len(starts) == result.guarantee.queries
        assert result.perplexity == pytest.approx(math.exp(total / len(starts)), rel=1e-9)


@pytest.mark.parametrize("stride", [None, 5])
def test_runs_are_disjoint_and_as_many_as_there_are(stride: int | None) -> None:
    block = 8
    for length in range(9, 90, 3):
        for queries in (None, 1, 7, 8, 9, 20):
            most = 0
            for runs in range(1, 12):
                try:
                    found, total = plan_runs(
                        range(length), None, block, queries, runs=runs, stride=stride
                    )
                except ValueError:
                    continue
                assert runs == 1 or most == runs - 1  # fewer runs never raise
                most = runs
                assert len(found) == runs
                assert queries in (None, total)
                read = [{t for w in run for t in range(w.start, w.stop)} for run in found]
                assert sum(map(len, read)) == len(set().union(*read))
                assert set().union(*read) <= set(range(length))
                for run in found:
                    assert sum(w.queries for w in run) == total
                    assert run[0].start % block == 0
            if queries is not None and queries < block and most:
                assert most == length // block  # whole blocks


def test_runs_answer_as_if_each_were_alone() -> None:
    """Every run has its own text, accountant, budgets and randomness; mean and deviation."""
    tokens = stream(400)
    mechanisms: dict[str, Mechanism] = {
        "public": PublicOnly(), "unprotected": Unprotected(), "noisy": PaperRule(**vars(NOISY)),
        "pool": ClippedLogPool(-0.5, 0.5, 2.0), "pmixed": PMixED(8.0, DELTA, 90, 6.0),
    }  # fmt: skip
    settings: dict[str, Any] = dict(
        delta=DELTA, block=50, queries=90, epsilon={"pool": 8.0}, memory_bytes=1000
    )
    runs = evaluate(
        FakeEnsemble(), tokens, mechanisms, runs=3, rng=SeededRandom(5), **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    assert [one.name for one in runs] == list(mechanisms)
    for number in range(3):
        rng = SeededRandom(5) if number == 0 else SeededRandom(5).child(f"run {number}")
        alone = evaluate(
            FakeEnsemble(), tokens[100 * number : 100 * (number + 1)], mechanisms, rng=rng,
            **settings,
        )  # type: ignore[arg-type]  # fmt: skip
        for run, one in zip(runs, alone, strict=True):
            found = run.runs[number]
            assert (found.perplexity, found.guarantee, found.curve, found.screened) == (
                one.perplexity, one.guarantee, one.curve, one.screened,
            )  # fmt: skip
    public, unprotected, noisy, pool, pmixed = runs
    for one in runs:
        values = [e.perplexity for e in one.runs]
        mean = sum(values) / 3
        assert one.perplexity_mean == pytest.approx(mean, rel=1e-12)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 2)
        assert one.perplexity_deviation == pytest.approx(deviation, rel=1e-9)
        assert one.queries == 90 and [e.guarantee.queries for e in one.runs] == [90] * 3
    assert unprotected.epsilon_mean is None and unprotected.epsilon_deviation is None
    assert (public.epsilon_mean, public.epsilon_deviation) == (0.0, 0.0)
    epsilons = [e.guarantee.epsilon for e in noisy.runs]
    assert noisy.epsilon_mean == pytest.approx(statistics.fmean(epsilons))  # type: ignore[arg-type]
    assert noisy.epsilon_deviation == pytest.approx(statistics.stdev(epsilons))  # type: ignore[type-var]
    assert noisy.epsilon_deviation > 0
    # No run begins with what another one has spent.
    for one, other in zip(pool.runs, public.runs, strict=True):
        assert one.perplexities[0] != other.perplexities[0]
    assert {e.guarantee.method for e in pool.runs} == {"per-shard budget"}
    assert pmixed.epsilon_deviation == 0.0


def test_one_run_and_infinite_perplexities_have_no_deviation() -> None:
    fake = FakeEnsemble()
    settings: dict[str, Any] = dict(delta=DELTA, rng=SeededRandom(0), block=10, memory_bytes=100)
    (one,) = evaluate(fake, stream(60), {"q": PublicOnly()}, runs=1, **settings)  # type: ignore[arg-type]
    assert one.perplexity_deviation is None and one.epsilon_deviation is None
    assert one.perplexity_mean == one.perplexity
    fake._token[:, 2] = -math.inf
    (two,) = evaluate(fake, stream(60), {"q": PublicOnly()}, runs=2, **settings)  # type: ignore[arg-type]
    assert two.perplexity_mean == math.inf and two.perplexity_deviation is None
