"""The decoding loop with a ledger: charges are durable before a release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decoding_cases import MECHANISMS, PROMPT, Spy, answered, steps
from fake_ensemble import FakeEnsemble

from adapmixed.errors import BudgetSpentError
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.rng import SecureRandom


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_every_token_is_on_the_device_before_it_is_drawn(path: Path) -> None:
    spy = Spy(MECHANISMS["adapmixed"])
    with Accountant(1e-5, path=path) as accountant:
        ensemble: Any = FakeEnsemble()
        generator = PrivateGenerator(ensemble, spy, accountant)
        assert read_ledger(path).charges == 1  # the binding
        ledger: Any = accountant._ledger
        write = ledger._write

        def logged(reading: Any) -> None:
            write(reading)
            spy.log.append(("durable", reading.charges))

        ledger._write = logged
        for number, _ in enumerate(generator.stream_tokens(PROMPT, max_new_tokens=3), start=1):
            assert spy.phases == ["propose", "events", "durable", "release"] * number
            assert read_ledger(path).charges == number + 1
        assert read_ledger(path).guarantee == accountant.guarantee()
        assert accountant.queries == 3 * len(PROMPT)


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
