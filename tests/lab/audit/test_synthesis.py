"""All texts of `synthesize`: their enumerated probabilities, and that a broken promise is found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adapmixed.rng import SeededRandom
from adapmixed.synthesis import Synthesis
from adapmixed.synthesis.run import Journal
from adapmixed_lab.audit import synthesis
from adapmixed_lab.audit.search import uncharged
from adapmixed_lab.audit.synthesis import DELTA, NAMES, TOKENS

KEY = bytes(range(32))


@pytest.fixture
def run(tmp_path: Path) -> Synthesis:
    return synthesis.synthesis(tmp_path / "run", KEY, {name: f"of {name}" for name in NAMES})


def test_a_law_is_that_of_whole_texts(run: Synthesis) -> None:
    opening = run.ensemble.opening
    for records, law in zip(run.batches.slots, synthesis.laws(run), strict=True):
        assert sum(law.values()) == pytest.approx(1.0) and len(law) > 2 ** (TOKENS - 1)
        private, public = run.ensemble.filled(records).logits(
            torch.tensor([[*opening, *text] for text in law if len(text) == TOKENS])
        )
        for place, text in enumerate(text for text in law if len(text) == TOKENS):
            rows = (logits[..., place, len(opening) - 1 : -1, :] for logits in (private, public))
            ticket = run.mechanism.propose(
                *rows, rng=SeededRandom(0), targets=torch.tensor(text), temperature=0.3, top_k=2
            )
            log_prob = uncharged(ticket).release().log_prob
            assert log_prob is not None
            assert float(log_prob.sum().exp()) == pytest.approx(law[text], rel=1e-3)


def test_epsilon_is_that_of_all_texts_together() -> None:
    p, q = {(0,): 0.75, (1,): 0.25}, {(0,): 0.25, (1,): 0.75}
    assert synthesis.least_epsilon([p, p], [p, p]) == 0
    for world, share in (([p, q], 3), ([q, p], 3), ([q, q], 9)):
        expected = math.log(share) + math.log1p(-DELTA / (0.75 if share == 3 else 0.5625))
        assert synthesis.least_epsilon([p, p], world) == pytest.approx(expected, abs=1e-9)
    sure: synthesis.Law = {(0,): 1.0, (1,): 0.0}
    assert synthesis.least_epsilon([p], [sure]) == math.inf
    assert synthesis.least_epsilon([p], [{(0,): 1.0}]) == math.inf
    assert synthesis.least_epsilon([p], [{(0,): math.nan, (1,): 0.0}]) == math.inf


def test_a_record_in_two_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    deal = synthesis.dealt

    def twice(*arguments: Any, **named: Any) -> Any:
        batches = deal(*arguments, **named)
        return batches._replace(slots=[[batches.slots[0][0], *slot[1:]] for slot in batches.slots])

    monkeypatch.setattr(synthesis, "dealt", twice)
    for leaves in (False, True):
        assert synthesis.slots_changed(KEY, leaves, named=True) >= 5


def test_a_journal_that_does_not_read_what_was_spent_is_found(
    run: Synthesis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "_read", lambda self, path, expected: 0)
    assert synthesis.over_kills(run, tmp_path / "journal", lost=False) > TOKENS
