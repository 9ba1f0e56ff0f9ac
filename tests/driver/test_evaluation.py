"""Perplexity and queries against direct computations; conventions, repeatability, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from tiny_models import POSITIONS, TARGETS, VOCAB, tiny_model, write_adapter
from torch import Tensor

from adapmixed.charging import Charge
from adapmixed.evaluation import Evaluation, evaluate
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.models import Ensemble
from adapmixed.privacy import Accountant, FilterBudget, PerModelFilter, c_alpha
from adapmixed.rng import SeededRandom

SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.05, threshold=0.3, top_k=4
)
DETERMINISTIC: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
    "adapmixed": AdaPMixED(**SCREENED | dict(screen=None)),
}
DELTA = 1e-5


def stream(length: int, vocab: int = 7, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def run(ensemble: Any, tokens: list[int], mechanisms: Any = None, **settings: Any) -> Any:
    arguments: dict[str, Any] = dict(delta=DELTA, rng=SeededRandom(0), memory_bytes=1000)
    if mechanisms is None:
        mechanisms = {"public": PublicOnly()}
    return evaluate(ensemble, tokens, mechanisms, **(arguments | settings))


def target_log_probs(ensemble: Any, tokens: list[int], block: int) -> dict[str, Tensor]:
    """log q(target) and log mean_i p_i(target) of every scored token, by plain softmax."""
    public_parts, private_parts = [], []
    for start in range(0, len(tokens), block):
        ids = torch.tensor([tokens[start : start + block]])
        private, public = ensemble.logits(ids)
        targets = ids[0, 1:]
        where = torch.arange(len(targets))
        public_parts.append(torch.softmax(public[0, :-1].double(), -1)[where, targets])
        mean = torch.softmax(private[:, 0, :-1].double(), -1).mean(0)
        private_parts.append(mean[where, targets])
    return {"public": torch.cat(public_parts).log(), "unprotected": torch.cat(private_parts).log()}


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    base = tiny_model("gpt2")
    folder: Path = tmp_path_factory.mktemp("adapters")
    adapters = [
        write_adapter(base, folder / str(i), seed=i, target_modules=TARGETS["gpt2"])
        for i in range(3)
    ]
    return Ensemble.load(base, adapters)


@pytest.mark.parametrize("length,block,queries", [(100, 32, 96), (100, 10, 90), (97, 32, 93)])
def test_perplexity_of_a_real_model(
    ensemble: Ensemble, length: int, block: int, queries: int
) -> None:
    """The first token of each block is not scored; a last block of one token scores nothing."""
    tokens = stream(length, VOCAB)
    mechanisms = {"public": PublicOnly(), "unprotected": Unprotected()}
    results = run(ensemble, tokens, mechanisms, block=block, memory_bytes=1 << 24)
    direct = target_log_probs(ensemble, tokens, block)
    for result in results:
        expected = direct[result.name]
        assert result.queries == len(expected) == queries
        assert result.perplexity == pytest.approx(float(torch.exp(-expected.mean())), rel=1e-6)
    assert results[0].perplexity != pytest.approx(results[1].perplexity, rel=1e-2)


def test_perplexity_over_several_calls_and_chunks() -> None:
    """Blocks of 300 with chunks of 130: more positions than one call of a mechanism takes."""
    fake, tokens = FakeEnsemble(), stream(1000)
    mechanisms = {"public": PublicOnly(), "unprotected": Unprotected()}
    results = run(fake, tokens, mechanisms, block=300, memory_bytes=130)
    direct = target_log_probs(fake, tokens, 300)
    for result in results:
        expected = float(torch.exp(-direct[result.name].mean()))
        assert result.perplexity == pytest.approx(expected, rel=1e-12)
        assert result.queries == 996 == result.guarantee.queries
    assert fake.budgets == [130] * 4


def test_default_block_is_512_or_the_window(ensemble: Ensemble) -> None:
    tokens = stream(3 * POSITIONS, VOCAB)
    (result,) = run(ensemble, tokens, memory_bytes=1 << 24)
    assert result.queries == 3 * (POSITIONS - 1)
    for window, queries in ((None, 1021), (1024, 1021), (512, 1021), (100, 1012)):
        fake = FakeEnsemble(max_positions=window)
        (result,) = run(fake, stream(1023), queries=None)
        assert result.queries == queries


@pytest.mark.parametrize("queries", [1, 31, 32, 62, 70])
def test_queries_stop_the_evaluation(queries: int) -> None:
    fake, tokens = FakeEnsemble(), stream(100)
    (result,) = run(fake, tokens, block=32, queries=queries)
    direct = target_log_probs(fake, tokens, 32)["public"][:queries]
    assert result.queries == result.guarantee.queries == queries
    assert result.perplexity == pytest.approx(float(torch.exp(-direct.mean())), rel=1e-12)
    assert len(fake.budgets) == math.ceil(queries / 31)  # no block more than is needed


@pytest.mark.parametrize("memory_bytes", [1, 7, 64, 65, 199])
def test_the_memory_budget_changes_nothing_but_time(memory_bytes: int) -> None:
    tokens = stream(420)
    whole = run(FakeEnsemble(), tokens, DETERMINISTIC, block=200)
    parts = run(FakeEnsemble(), tokens, DETERMINISTIC, block=200, memory_bytes=memory_bytes)
    for one, other in zip(whole, parts, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-10)
        assert (one.queries, one.screened) == (other.queries, other.screened)
        if one.guarantee.epsilon is not None:
            assert one.guarantee.epsilon == pytest.approx(other.guarantee.epsilon, rel=1e-10)


def test_the_memory_budget_of_a_real_model(ensemble: Ensemble) -> None:
    tokens = stream(90, VOCAB)
    whole = run(ensemble, tokens, DETERMINISTIC, memory_bytes=1 << 26)
    low, high = 0, 1 << 26
    while low + 1 < high:  # the smallest budget: one position at a time
        middle = (low + high) // 2
        try:
            ensemble.iter_logits(torch.tensor([tokens[:31]]), memory_bytes=middle)
            high = middle
        except ValueError:
            low = middle
    parts = run(ensemble, tokens, DETERMINISTIC, memory_bytes=high)
    for one, other in zip(whole, parts, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        if one.guarantee.epsilon is not None:
            assert one.guarantee.epsilon == pytest.approx(other.guarantee.epsilon, rel=1e-3)


def numbers(results: list[Evaluation]) -> list[Any]:
    """Everything but the clock."""
    return [
        (r.name, r.perplexity, r.queries, r.guarantee, r.screened, r.curve, dict(r.breakdown))
        for r in results
    ]


def test_seeded_evaluation_repeats_bit_by_bit(ensemble: Ensemble) -> None:
    tokens = stream(96, VOCAB)
    mechanisms = DETERMINISTIC | {
        "screened": AdaPMixED(**SCREENED),
        "screened-publicly": AdaPMixED(**SCREENED | dict(screen="public")),
    }
    runs = [
        numbers(run(ensemble, tokens, mechanisms, rng=SeededRandom(s), memory_bytes=1 << 24))
        for s in (3, 3, 4)
    ]
    assert runs[0] == runs[1]
    assert runs[0][:4] == runs[2][:4]  # nothing random in these
    assert runs[0][4:] != runs[2][4:]


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
    # Screening is paid for all queries, answered publicly or not.
    screening = 400 * 3.0 * (0.5 / (3 * 0.05)) ** 2
    assert results["adapmixed"].breakdown["screening"] == pytest.approx(screening)


def test_rules() -> None:
    tokens, mechanisms = stream(300), {"adapmixed": AdaPMixED(**SCREENED | dict(screen=None))}
    losses = {
        rule: run(FakeEnsemble(), tokens, mechanisms, rule=rule)[0]
        for rule in ("per_model", "paper")
    }
    assert losses["per_model"].guarantee.rule == "per_model"
    assert losses["per_model"].breakdown["mixing"] < losses["paper"].breakdown["mixing"]
    assert losses["per_model"].perplexity == losses["paper"].perplexity


def test_mechanisms_answer_the_same_logits_in_their_order() -> None:
    tokens = stream(200)
    alone = [run(FakeEnsemble(), tokens, {n: m})[0] for n, m in DETERMINISTIC.items()]
    together = run(FakeEnsemble(), tokens, DETERMINISTIC)
    assert [r.name for r in together] == list(DETERMINISTIC)
    for one, other in zip(alone, together, strict=True):
        assert (one.perplexity, one.guarantee) == (other.perplexity, other.guarantee)


def test_a_target_that_cannot_occur_has_infinite_perplexity() -> None:
    fake = FakeEnsemble()
    fake._token[:, 2] = -math.inf
    mechanisms = {"public": PublicOnly(), "unprotected": Unprotected()}
    assert [r.perplexity for r in run(fake, [0, 1, 2, 0], mechanisms)] == [math.inf] * 2
    assert all(math.isfinite(r.perplexity) for r in run(fake, [0, 1, 3, 0], mechanisms))


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    run(
        FakeEnsemble(),
        stream(200),
        block=100,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == [64, 99, 163, 198]
    assert {total for _, total in seen} == {198}


def test_speed_counts_every_query() -> None:
    (result,) = run(FakeEnsemble(), stream(200))
    assert result.seconds > 0
    assert 0 < result.tokens_per_second <= result.queries / result.seconds


@pytest.mark.parametrize(
    "tokens,settings,message",
    [
        ([], {}, r"tokens must hold at least one query \(2 tokens\), got 0"),
        ([3], {}, r"tokens must hold at least one query \(2 tokens\), got 1"),
        ([1, 2, 3], dict(block=1), r"block must be in \[2, 512\], got 1"),
        ([1, 2, 3], dict(block=513), r"block must be in \[2, 512\], got 513"),
        ([1, 2, 3], dict(queries=0), r"queries must be in \[1, 2\].* got 0"),
        ([1, 2, 3], dict(queries=3), r"queries must be in \[1, 2\].* got 3"),
        ([1, 2, 3], dict(block=2, queries=2), r"queries must be in \[1, 1\].*blocks of 2.* got 2"),
        ([1, 2, 3], dict(delta=0.0), r"delta must be in \(0, 1\)"),
        ([1, 2, 3], dict(rule="best"), "rule must be one of"),
        ([1, 2, 3], dict(mechanisms={}), "mechanisms must name at least one mechanism, got none"),
    ],
)
def test_refusals(tokens: list[int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(FakeEnsemble(), tokens, **settings)


def test_tokens_outside_the_vocabulary_are_refused(ensemble: Ensemble) -> None:
    with pytest.raises(ValueError, match="input_ids must lie in"):
        run(ensemble, [1, VOCAB, 2], memory_bytes=1 << 24)
    with pytest.raises(ValueError, match=r"targets\[1\] must be a token in"):
        run(ensemble, [1, 2, VOCAB], memory_bytes=1 << 24)


def test_a_mechanism_does_not_depend_on_its_neighbours() -> None:
    """Screening noise comes from a source of the mechanism's own."""
    ensemble, tokens = FakeEnsemble(), [1, 2, 3, 0, 2, 1, 3, 3, 0, 1] * 6
    noisy = AdaPMixED(order=4.0, target_leakage=0.1, sigma=0.3, threshold=0.5, top_k=3)
    alone = evaluate(ensemble, tokens, {"ada": noisy}, delta=1e-5, rng=SeededRandom(3))
    other = PMixED(epsilon=9.0, delta=1e-5, queries=60, order=3.0, sample_rate=0.5)
    both = evaluate(
        ensemble, tokens, {"other": noisy, "p": other, "ada": noisy}, delta=1e-5,
        rng=SeededRandom(3),
    )  # fmt: skip
    assert alone[0].perplexity == both[2].perplexity
    assert alone[0].screened == both[2].screened
    assert 0 < alone[0].screened < 1
    assert both[0].screened != both[2].screened


def filtered(mechanism: Mechanism, budget: FilterBudget, **settings: Any) -> Any:
    """(evaluation, filter) of 400 queries; the seed plays no part."""
    model_filter = PerModelFilter(3, budget)
    filters = {"pool": model_filter}
    (result,) = run(
        FakeEnsemble(), stream(401), {"pool": mechanism}, block=401, model_filters=filters,
        **settings,
    )  # fmt: skip
    return result, model_filter


@pytest.mark.parametrize(
    ("mechanism", "budget"),
    [
        (ClippedLogPool(-0.5, 0.5, 2.0), FilterBudget("zcdp", 0.5, DELTA)),
        (ClippedMixing(0.5, 2.0, charge_order=4.0), FilterBudget("renyi", 0.5, DELTA, 4.0)),
    ],
)
def test_perplexity_under_a_filter(mechanism: Mechanism, budget: FilterBudget) -> None:
    result, model_filter = filtered(mechanism, budget)
    assert result.guarantee.method == "filter" and result.guarantee.kind == "fixed"
    assert {epsilon for _, epsilon in result.curve} == {budget.epsilon()}
    # Charged as generation charges: position after position, each slot until it cannot pay.
    private, public = FakeEnsemble().logits(torch.tensor([stream(401)[:400]]))
    alone, log_probs, active = PerModelFilter(3, budget), [], []
    charge = Charge(Accountant(DELTA, filter_budget=budget), None, alone)
    for t, target in enumerate(stream(401)[1:]):
        proposal = mechanism.propose(
            private[:, 0, t : t + 1], public[0, t : t + 1], targets=torch.tensor([target]),
            rng=SeededRandom(0),
        )  # fmt: skip
        active.append(charge(proposal))
        answer = proposal.release(active[-1])
        assert answer.log_prob is not None
        log_probs.append(float(answer.log_prob))
    contributing = torch.stack([a for a in active if a is not None])
    assert bool(contributing[0].all()) and not bool(contributing[-1].any())
    assert model_filter.spent.tolist() == alone.spent.tolist()
    counts = [queries for queries, _ in result.perplexities]
    assert counts == [64, 128, 192, 256, 320, 384, 400]
    for queries, perplexity in result.perplexities:
        expected = math.exp(-math.fsum(log_probs[:queries]) / queries)
        assert perplexity == pytest.approx(expected, rel=1e-9)
    assert result.perplexities[-1][1] == result.perplexity


def test_no_filter_where_charges_are_not_those_of_single_models() -> None:
    budget = FilterBudget("renyi", 0.5, DELTA, 3.0)
    for mechanism in (AdaPMixED(**SCREENED), PMixED(8.0, DELTA, 400, 6.0), PublicOnly()):
        with pytest.raises(ValueError, match="model_filter needs one charge of each model"):
            filtered(mechanism, budget)
    with pytest.raises(ValueError, match=r"delta must be the filter's, 1e-05, got 1e-06"):
        filtered(ClippedMixing(0.5, 2.0, charge_order=3.0), budget, delta=1e-6)
    with pytest.raises(ValueError, match=r"model_filters must name mechanisms .* got \['x'\]"):
        run(FakeEnsemble(), stream(9), model_filters={"x": PerModelFilter(3, budget)})


def test_neighbours() -> None:
    pool: dict[str, Mechanism] = {"pool": ClippedLogPool(-0.5, 0.5, queries=200)}
    zero_out, removed, replaced = (
        run(FakeEnsemble(), stream(101), pool, block=101, adjacency=question)[0].guarantee
        for question in (None, "add_remove", "replace_one")
    )
    assert zero_out.epsilon < removed.epsilon == replaced.epsilon
    questions = [g.adjacency for g in (zero_out, removed, replaced)]
    assert questions == ["zero_out", "add_remove", "replace_one"]
    ada = {"ada": AdaPMixED(**SCREENED)}
    with pytest.raises(ValueError, match="adjacency must be 'zero_out'.* got 'add_remove'"):
        run(FakeEnsemble(), stream(101), ada, adjacency="zero_out")
