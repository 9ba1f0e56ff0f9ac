"""AdaPMixED charged by the paper's rule: the sum over queries of the largest loss."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from adapmixed_cases import SEED, SETTINGS, ensemble
from exact import answered_from_q, losses, stated

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant, LeaveOneOutLoss
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.published import PaperRule

DELTA = 1e-5
SCREENED = AdaPMixED(**SETTINGS, adjacency="add_remove")


@pytest.mark.parametrize("screen", ["noisy", None])
def test_the_largest_loss_of_each_query_is_charged_to_all(screen: str | None) -> None:
    inner = replace(SCREENED, screen=screen)
    private, public = ensemble()
    proposal = PaperRule(inner).propose(private, public, rng=SeededRandom(SEED))
    realised = losses(proposal)[..., 0]
    passed = ~answered_from_q(proposal)
    assert bool(passed.all()) == (screen is None)
    (event,) = (one for one in stated(proposal) if isinstance(one, LeaveOneOutLoss))
    largest = realised[:, passed].amax(0)
    assert event.loss[:, :, 0].tolist() == [largest.tolist()] * len(private)
    # The other events, and the realised losses that diagnostics show, are AdaPMixED's own.
    own = inner.propose(private, public, rng=SeededRandom(SEED))
    assert torch.equal(losses(own), losses(proposal))
    others, same = (
        [one for one in stated(each) if not isinstance(one, LeaveOneOutLoss)]
        for each in (proposal, own)
    )
    assert others == same
    alone = Accountant(DELTA).add(event).guarantee()
    expected = float(largest.sum()) + c_alpha(inner.order, DELTA)
    assert alone.epsilon == pytest.approx(expected, rel=1e-12)


def test_the_paper_rule_wants_one_order() -> None:
    words = re.escape("loss_orders must be one order, got (2.0, 3.0)")
    with pytest.raises(ValueError, match=words):
        PaperRule(replace(SCREENED, loss_orders=(2.0, 3.0)))
    PaperRule(replace(SCREENED, loss_orders=(2.0,)))


def test_what_an_accountant_may_be_asked_is_as_of_adapmixed() -> None:
    private, public = ensemble(positions=2)
    for settings in ({"epsilon": 1.0}, {"adjacency": "replace_one"}):
        proposal = PaperRule(SCREENED).propose(private, public, rng=SeededRandom(SEED))
        (name,) = settings
        with pytest.raises(ValueError, match=f"{name} must be .* for PaperRule"):
            Accountant(DELTA, **settings).charge(proposal)  # type: ignore[arg-type]
