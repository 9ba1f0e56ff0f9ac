"""Scores of the public model: against transformers' loss, and against the harness' own backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import of_windows

from adapmixed import Accountant, Ensemble, PublicOnly
from adapmixed.evaluation import evaluate
from adapmixed.rng import SeededRandom

pytestmark = pytest.mark.real

BLOCK = 64


@pytest.fixture(scope="module")
def stream(public: Ensemble, paragraphs: list[str]) -> list[int]:
    tokenizer = public.tokenizer
    texts = [tokenizer(text, add_special_tokens=False).input_ids for text in paragraphs]
    return [token for text in texts for token in [*text, tokenizer.eos_token_id]]


@pytest.mark.parametrize("stride", [None, 48])
def test_an_evaluation_is_transformers_own_loss(
    public: Ensemble, base: Any, stream: list[int], folder: Path, stride: int | None
) -> None:
    """Gemma's windows begin with BOS: without it this text has a perplexity of 194.7."""
    begin, measured = {"smollm2": ((), 19.13), "gemma3": ((2,), 13.4)}[folder.name]
    assert public.beginning == begin
    (result,) = evaluate(
        public, stream, {"public": PublicOnly()}, delta=1e-5, rng=SeededRandom(0), block=BLOCK,
        stride=stride,
    )  # fmt: skip
    expected, queries = of_windows(base, begin, stream, BLOCK, stride)
    assert result.queries == queries and result.perplexity == pytest.approx(expected, rel=1e-4)
    assert stride or result.perplexity == pytest.approx(measured, abs=0.05)


CHOICES = [("The capital of France is", city) for city in (" Paris", " Rome", " London")]
CHOICES += [("How many legs has a spider? ", "eight"), ("", "The city of Paris"), ("", "Wien 😀")]


def test_the_harness_gets_the_scores_of_its_own_backend(
    public: Ensemble, base: Any, paragraphs: list[str]
) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (the lm-eval extra)")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from adapmixed.evaluation.lm_eval import MixtureLM

    ours = MixtureLM(public, PublicOnly(), accountant=Accountant(1e-5), rng=SeededRandom(0))
    settings = {"device": "cpu", "add_bos_token": bool(public.beginning)}
    theirs = HFLM(base, tokenizer=public.tokenizer, backend="causal", **settings)

    def asked(kind: str, *calls: tuple[str, ...]) -> list[Instance]:
        return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(calls)]

    choices = asked("loglikelihood", *CHOICES)
    scores, expected = ours.loglikelihood(choices), theirs.loglikelihood(choices)
    assert [pair[0] for pair in scores] == pytest.approx([pair[0] for pair in expected], rel=1e-3)
    assert [pair[1] for pair in scores] == [bool(pair[1]) for pair in expected]
    assert scores[0] == max(scores[:3])  # Paris
    texts = asked("loglikelihood_rolling", *((text,) for text in paragraphs))
    # Its windows begin with BOS by themselves: it would score a second one.
    theirs.add_bos_token = False
    rolling = [float(value) for value in theirs.loglikelihood_rolling(texts)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(rolling, rel=1e-3)
