"""The decoding loop: the order of charge and release, who is charged, and what models read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import MECHANISMS, PROMPT, Spy, answered, steps
from fake_ensemble import FakeEnsemble

from adapmixed.ensemble import Ensemble
from adapmixed.errors import BudgetSpentError
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism, PMixED, PublicOnly
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.events import Binding
from adapmixed.rng import SecureRandom

FORCED = ((1, 2, 3), (4, 60, 5), (60, 6), (7,), (8,))  # tokens of each step


class LoggedAccountant(Accountant):
    """An accountant that logs charges once they are on the device."""

    def __init__(self, log: list[tuple[str, Any]], **settings: Any) -> None:
        super().__init__(1e-5, **settings)
        self.log = log

    def _commit(self, events: Any, account: Any) -> None:
        super()._commit(events, account)
        if not isinstance(events[0], Binding):
            self.log.append(("charge", None))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_every_step_is_charged_before_its_token_is_drawn_and_yielded(name: str, path: Path) -> None:
    spy = Spy(MECHANISMS[name])
    with LoggedAccountant(spy.log, path=path) as accountant:
        settings: dict[str, Any] = {"accountant": accountant, "rng": SecureRandom()}
        stepwise = steps(FakeEnsemble(), spy, max_new_tokens=3, **settings)
        assert read_ledger(path).charges == 1  # the binding
        for step in range(1, 4):
            tokens = next(stepwise)
            assert spy.phases == ["propose", "events", "charge", "release"]
            assert torch.equal(tokens, spy.log[-1][1])
            assert accountant.queries == 3 * step and read_ledger(path).charges == step + 1
            spy.log.clear()
        assert next(stepwise, None) is None
        assert spy.log == []
        assert read_ledger(path).guarantee == accountant.guarantee()


@pytest.mark.parametrize("mechanism", [ClippedLogPool(-0.5, 0.5), ClippedMixing(0.5, 2.0, order=8)])
def test_budgets_are_decided_and_charged_before_a_token_is_drawn(mechanism: Mechanism) -> None:
    """A member whose shard has spent its budget answers q, and the stream goes on."""
    spy = Spy(mechanism)
    accountant = LoggedAccountant(spy.log, epsilon=2.0)
    before = None
    for tokens in steps(FakeEnsemble(), spy, max_new_tokens=40, accountant=accountant):
        assert spy.phases == ["propose", "events", "charge", "release"]
        active = spy.log[1][1]
        assert active.shape == (3, len(PROMPT)) and bool((tokens >= 0).all())
        spent = accountant.spent
        assert bool((spent <= accountant.limit).all())
        if before is not None:  # only those that paid have spent more
            assert np.array_equal(spent > before, active.any(1))
        before = spent
        spy.log.clear()
    assert not active.all() and spent.min() > 0.8 * accountant.limit


def test_ended_sequences_are_neither_charged_nor_sampled_nor_computed(ensemble: Ensemble) -> None:
    """The remaining rows continue from their own caches, padding included."""
    prompt, mask = torch.tensor([[0, 9], [5, 6], [0, 7]]), torch.tensor([[0, 1], [1, 1], [0, 1]])
    # Row 1 ends at step 1, row 0 at step 2.
    spy, accountant = Spy(MECHANISMS["adapmixed"], forced=FORCED), Accountant(1e-5)
    settings: dict[str, Any] = {"max_new_tokens": 5, "ends": [60], "accountant": accountant}
    tokens = answered(ensemble, spy, prompt, attention_mask=mask, **settings)
    assert tokens.tolist() == [[1, 4, 60, -1, -1], [2, 60, -1, -1, -1], [3, 5, 6, 7, 8]]
    # The end tokens are charged, but nothing after them.
    assert accountant.queries == 3 + 3 + 2 + 1 + 1
    for step, rows in enumerate(([0, 1, 2], [0, 1, 2], [0, 2], [2], [2])):
        ids = torch.cat([prompt, tokens], dim=1)[rows, : 2 + step]
        seen = torch.cat([mask[rows], torch.ones(len(rows), step, dtype=torch.int64)], dim=1)
        private, public = ensemble.logits(ids, seen)
        torch.testing.assert_close(spy.asked[step][1], public[:, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(spy.asked[step][0], private[:, :, -1], rtol=1e-4, atol=1e-4)


def test_window() -> None:
    """The last token is never read back: a window of 8 holds a prompt of 3 and 6 new tokens."""
    ensemble = FakeEnsemble(max_positions=8)
    accountant = Accountant(1e-5)
    made = []
    for tokens in steps(ensemble, PublicOnly(), max_new_tokens=6, accountant=accountant):
        made.append(tokens.clone())
        tokens.fill_(-1)  # a yielded tensor is the caller's own
    read = torch.cat([PROMPT, torch.stack(made, dim=1)], dim=1)
    assert read.shape == (3, 9) and torch.equal(ensemble.decoders[0].ids, read[:, :8])
    with pytest.raises(
        ValueError,
        match=r"max_new_tokens must be <= 6 after a prompt of 3 tokens .*window is 8.*got 7",
    ):
        answered(ensemble, PublicOnly(), max_new_tokens=7, accountant=accountant)
    assert accountant.queries == 18  # refused before anything is charged
    endless = FakeEnsemble(max_positions=None)
    assert answered(endless, PublicOnly(), max_new_tokens=7).shape == (3, 7)


@pytest.mark.parametrize(
    "mechanism",
    [
        PMixED(8.0, 1e-5, 7, 6.0),
        ClippedLogPool(-0.25, 0.5, queries=7),
        ClippedMixing(0.5, 2.0, queries=7),
    ],
)
def test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call(
    path: Path, mechanism: Mechanism
) -> None:
    """The error comes before anything is read or charged, with and without a ledger."""
    words = (
        "within the 7 that .* was planned for, 6 of which are spent, got up to 2 more with 1 left: "
        r"ask for fewer \(evaluate: --queries, else --max-new-tokens"
    )
    for place in (None, path):
        ensemble = FakeEnsemble()
        settings: dict[str, Any] = {"rng": SecureRandom(), "temperature": 0.5, "top_k": 4}
        with Accountant(1e-5, path=place) as accountant:
            settings["accountant"] = accountant
            answered(ensemble, mechanism, max_new_tokens=2, **settings)
        if place is not None:
            accountant = settings["accountant"] = Accountant(1e-5, path=place)
        read, charges = len(ensemble.decoders), accountant.charges
        with pytest.raises(BudgetSpentError, match=words):
            steps(ensemble, mechanism, PROMPT[:1], max_new_tokens=2, **settings)
        assert (accountant.charges, accountant.queries) == (charges, 6)
        assert len(ensemble.decoders) == read
        answered(ensemble, mechanism, PROMPT[:1], max_new_tokens=1, **settings)
        assert accountant.queries == 7
        accountant.close()
