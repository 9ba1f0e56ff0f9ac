"""Perplexity and queries compared with direct computations; conventions, repeatability."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_cases import DETERMINISTIC, SCREENED, run, target_log_probs
from fake_ensemble import FakeEnsemble
from result_cases import stream
from tiny_models import POSITIONS, TARGETS, VOCAB, tiny_model, write_adapter

from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import Evaluation
from adapmixed.mechanisms import (
    AdaPMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.rng import SeededRandom


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    base = tiny_model("gpt2")
    folder: Path = tmp_path_factory.mktemp("adapters")
    adapters = [
        write_adapter(base, folder / str(i), seed=i, target_modules=TARGETS["gpt2"])
        for i in range(3)
    ]
    return Ensemble.from_pretrained(base, adapters)


@pytest.mark.parametrize("length,block,queries", [(100, 32, 96), (100, 10, 90), (97, 32, 93)])
def test_perplexity_of_a_real_model(
    ensemble: Ensemble, length: int, block: int, queries: int
) -> None:
    """The first token of each block is not scored; a last block of one token scores nothing."""
    tokens = stream(length, vocab=VOCAB)
    mechanisms = {"public": PublicOnly(), "unprotected": Unprotected()}
    results = run(ensemble, tokens, mechanisms, block=block, memory_bytes=1 << 24)
    direct = target_log_probs(ensemble, tokens, block)
    for result in results:
        expected = direct[result.name]
        assert result.queries == len(expected) == queries
        assert result.perplexity == pytest.approx(float(torch.exp(-expected.mean())), rel=1e-6)
    assert results[0].perplexity != pytest.approx(results[1].perplexity, rel=1e-2)


def test_perplexity_over_several_calls_and_chunks() -> None:
    """Blocks of 300 in chunks of 130 have more positions than one call of a mechanism takes."""
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
    tokens = stream(3 * POSITIONS, vocab=VOCAB)
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


def test_the_memory_budget_of_a_real_model(ensemble: Ensemble) -> None:
    tokens = stream(90, vocab=VOCAB)
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
    """Return all numbers but the times."""
    return [
        (r.name, r.perplexity, r.queries, r.guarantee, r.screened, r.curve, dict(r.breakdown))
        for r in results
    ]


def test_seeded_evaluation_repeats_bit_by_bit(ensemble: Ensemble) -> None:
    tokens = stream(96, vocab=VOCAB)
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


def test_tokens_outside_the_vocabulary_are_refused(ensemble: Ensemble) -> None:
    with pytest.raises(ValueError, match="input_ids must lie in"):
        run(ensemble, [1, VOCAB, 2], memory_bytes=1 << 24)
    with pytest.raises(ValueError, match=r"targets\[1\] must be a token in"):
        run(ensemble, [1, 2, VOCAB], memory_bytes=1 << 24)
