"""The harness gets the scores of an evaluation, within a mechanism's plan."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from trained_demo import DEMO_ENSEMBLE

from adapmixed.data import demo_base, held_out_text
from adapmixed.ensemble import Ensemble
from adapmixed.errors import BudgetSpentError
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism, PublicOnly
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed.training import token_stream

pytest.importorskip("lm_eval", reason="lm_eval is not installed (the lm-eval extra)")

from lm_eval.api.instance import Instance

from adapmixed.evaluation.lm_eval import MixtureLM

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "adapmixed": AdaPMixED(18.0, 0.1, screen=None),
    "pool": ClippedLogPool(-0.5, 0.5),
}


@pytest.fixture(scope="module")
def ensemble() -> Ensemble:
    return Ensemble.from_pretrained(demo_base(), DEMO_ENSEMBLE)


def harness(ensemble: Ensemble, mechanism: Mechanism) -> MixtureLM:
    return MixtureLM(ensemble, mechanism, accountant=Accountant(1e-5), rng=SeededRandom(0))


def request(kind: str, *arguments: str) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_text_scores_as_in_an_evaluation(ensemble: Ensemble, name: str) -> None:
    lm = harness(ensemble, MECHANISMS[name])
    text = ensemble.tokenizer.decode(token_stream(ensemble.tokenizer, held_out_text())[:40])
    tokens = [lm.eot_token_id, *lm.tok_encode(text)]
    (whole,) = evaluate(ensemble, tokens, {name: MECHANISMS[name]}, delta=1e-5, rng=SeededRandom(0))
    (rolling,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert math.exp(-rolling / (len(tokens) - 1)) == pytest.approx(whole.perplexity, rel=1e-6)
    assert lm.guarantee.queries == len(tokens) - 1 == whole.queries


def test_a_continuation_and_the_likeliest_token(ensemble: Ensemble) -> None:
    lm = harness(ensemble, PublicOnly())
    context = lm.tok_encode("The try statement")
    _, public = ensemble.logits(torch.tensor([context]))
    likeliest = int(public[0, -1].argmax())
    expected = float(public[0, -1].double().log_softmax(-1)[likeliest])
    for token, greedy in ((likeliest, True), ((likeliest + 1) % ensemble.vocab_size, False)):
        ((value, best),) = lm._loglikelihood_tokens([(("", ""), context, [token])])
        assert best == greedy and (value == pytest.approx(expected, rel=1e-6)) == greedy


def test_more_than_was_planned_for_is_refused_before_the_models_run(
    ensemble: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests count together with the queries answered before."""
    lm = harness(ensemble, ClippedLogPool(-0.5, 0.5, queries=10))
    context = lm.tok_encode("The try statement")
    text = ensemble.tokenizer.decode(token_stream(ensemble.tokenizer, held_out_text())[:12])
    passes: list[object] = []
    forward = ensemble.iter_logits
    monkeypatch.setattr(
        ensemble, "iter_logits", lambda *a, **k: passes.append(a) or forward(*a, **k)
    )

    def ask(*lengths: int) -> list[tuple[float, bool]]:
        return lm._loglikelihood_tokens([(("", ""), context, [5] * n) for n in lengths])

    whole = [request("loglikelihood_rolling", text)]
    for refused in (lambda: ask(6, 5), lambda: lm.loglikelihood_rolling(whole)):
        with pytest.raises(BudgetSpentError, match="within the 10 that .*, 0 of which are"):
            refused()
    with pytest.raises(ValueError, match=f"got 0 after {len(context)}"):
        ask(4, 0)
    assert not passes and lm.guarantee.queries == 0
    ask(4, 2)
    for refused in (lambda: ask(5), lambda: lm.loglikelihood_rolling(whole)):
        with pytest.raises(BudgetSpentError, match="6 of which are spent, got up to"):
            refused()
    assert len(passes) == 2 and lm.guarantee.queries == 6
    ask(4)
    assert lm.guarantee.queries == 10


def test_an_accountant_of_something_else_raises_at_construction(
    ensemble: Ensemble, tmp_path: Path
) -> None:
    with Accountant(1e-5, path=tmp_path / "ledger.db") as accountant:
        with pytest.raises(ValueError, match="knows a seed can undo the randomness"):
            MixtureLM(ensemble, PublicOnly(), accountant=accountant, rng=SeededRandom(0))
        assert accountant.charges == 0
        MixtureLM(ensemble, PublicOnly(), accountant=accountant, rng=SecureRandom())
        with pytest.raises(ValueError, match="accountant must be charged for what it is bound to"):
            MixtureLM(ensemble, MECHANISMS["pool"], accountant=accountant, rng=SecureRandom())
        assert accountant.charges == 1  # the first binding


def test_generation_is_refused(ensemble: Ensemble) -> None:
    with pytest.raises(
        ValueError, match="generation tasks are not supported, .* use PrivateGenerator"
    ):
        harness(ensemble, PublicOnly()).generate_until([])
