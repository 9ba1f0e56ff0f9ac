"""The table "Misuse" in docs/privacy.md: each is refused, or said by the guarantee.

Here: what is asked for, randomness, screening. `test_misuse_public_model.py` and
`test_misuse_shards.py` have the rest of the table.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from misuse_cases import MODELS, POOL, PROMPT, answer

import adapmixed_ext as ops
from adapmixed.cli import main
from adapmixed.decoding import generate, stream
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import AdaPMixED, ClippedMixing, PMixED, PublicOnly
from adapmixed.misuse import REASONS
from adapmixed.privacy import (
    Accountant,
    Caveat,
    FilterBudget,
    GaussianScreening,
    IndividualCharge,
    Ledger,
    PerModelFilter,
)
from adapmixed.rng import SecureRandom, SeededRandom

pytestmark = pytest.mark.usefixtures("demo_ensemble")

# Asking for something other than a sample


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"do_sample": False}, "infinite Rényi divergence"),
        ({"num_beams": 4}, "a search keeps what private probabilities rank highest"),
        ({"penalty_alpha": 0.6}, "as deterministic as greedy"),
        ({"output_scores": True}, "a probability of the mixture is itself"),
        ({"logprobs": 5}, "a probability of the mixture is itself"),
        ({"temperature": 0.7}, "another law than the one that was projected and charged"),
        ({"top_p": 0.9}, "another law than the one that was projected and charged"),
        ({"top_k": 50}, "top_k of ClippedMixing"),
        ({"logits_processor": []}, "another law"),
        ({"num_return_sequences": 3}, "a query of its own"),
        ({"seed": 1}, "randomness comes from rng"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_python_arguments(function: Any, option: dict[str, Any], why: str) -> None:
    accountant = Accountant(1e-5)
    settings: dict[str, Any] = dict(max_new_tokens=2, rng=SecureRandom(), accountant=accountant)
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"{name} must not be given, got .*{why}"):
        function(FakeEnsemble(), POOL, PROMPT, **settings, **option)
    assert accountant.queries == 0


def test_other_unknown_arguments_are_errors_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        answer(max_tokens=3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--greedy"], "infinite Rényi divergence"),
        (["--do-sample", "False"], "infinite Rényi divergence"),
        (["--num-beams=4"], "a search keeps what private probabilities rank highest"),
        (["--logprobs", "5"], "a probability of the mixture is itself"),
        (["--min-p=0.1"], "another law than the one that was projected and charged"),
        (["--top-p", "0.9"], "another law than the one that was projected and charged"),
    ],
)
def test_options_of_the_command(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *MODELS, "--prompt", "The", *options])
    assert stop.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"argument {options[0].partition('=')[0]}: must not be given" in error and why in error


def test_top_k_after_mixing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *MODELS, "--text", str(tmp_path), "--top-k", "50"]) == 2
    error = capsys.readouterr().err
    assert "--top-k does not apply to adapmixed, got 50" in error and REASONS["top_k"] in error


# Randomness


def test_a_guarantee_of_seeded_answers_says_so() -> None:
    words = "The randomness was seeded"
    assert words in answer(rng=SeededRandom(1))
    assert words not in answer()
    tokens, names = [1, 2, 3, 0, 2, 1] * 4, {"pool": POOL, "public": PublicOnly()}
    pool, public = evaluate(FakeEnsemble(), tokens, names, delta=1e-5, rng=SeededRandom(1))
    assert words in str(pool.guarantee) and pool.guarantee.caveats == ("seeded",)
    assert words not in str(public.guarantee)  # nothing private was read
    for mechanism in (POOL, ClippedMixing(0.5, 2.0, 9), PMixED(8.0, 1e-5, 9, 6.0)):
        proposal = mechanism.propose(torch.randn(3, 1, 5), torch.randn(1, 5), rng=SeededRandom(0))
        assert Caveat("seeded") in proposal.events()


def test_no_ledger_is_charged_for_seeded_answers(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db", delta=1e-5, configuration="x") as ledger:
        with pytest.raises(ValueError, match="knows a seed can undo the randomness"):
            answer(rng=SeededRandom(1), ledger=ledger)
        proposal = POOL.propose(torch.randn(3, 1, 5), torch.randn(1, 5), rng=SeededRandom(0))
        with pytest.raises(ValueError, match="knows a seed can undo the randomness"):
            ledger.charge(proposal.events())
        assert ledger.charges == 0
        ledger.charge(Caveat("shards"))


def test_a_fork_does_not_reuse_a_key() -> None:
    rng = SecureRandom()
    here = bytes(rng.reserve()[0].tolist())
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, bytes(rng.reserve()[0].tolist()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        there = pipe.read(32)
    os.waitpid(child, 0)
    assert len(there) == 32 and there != here
    assert bytes(rng.reserve()[0].tolist()) == here


# Screening


def test_noise_is_added_before_re_scaling() -> None:
    with pytest.raises(ValueError, match="noise is added before re-scaling: after it the stated"):
        AdaPMixED(18.0, 0.2, screen="rescaled")  # type: ignore[arg-type]
    # The operator itself: of three kept tokens of small mass, noise as large as that mass decides.
    q = torch.log(torch.tensor([[0.004, 0.003, 0.003, *[0.99 / 990] * 990]]))
    noise = torch.tensor([[-0.004, 0.0, 0.0]], dtype=torch.float64)
    settings: Any = dict(weight=0.0, order=3.0, threshold=10.0, top_k=3)
    divergence = float(ops.screen(q[None], q, noise, **settings).check().divergence)
    kept = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    first = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    after = (kept + noise[0]).clamp_min(0) / (kept + noise[0]).clamp_min(0).sum()

    def renyi(s: torch.Tensor) -> float:
        return float((s**3 * kept**-2).sum().log() / 2)

    assert divergence == pytest.approx(renyi(first), rel=1e-4)
    assert renyi(after) < 0.01 * renyi(first)


@pytest.mark.parametrize("screen", ["noisy", None])
def test_no_filter_runs_on_adapmixed(screen: Any) -> None:
    """Its screening's bit and its losses are no part of a model's charge."""
    budget = FilterBudget("renyi", 1.0, 1e-5, 18.0)
    accountant, model_filter = Accountant(1e-5, filter_budget=budget), PerModelFilter(3, budget)
    with pytest.raises(ValueError, match="its screening tells a bit about all of them, retired"):
        answer(AdaPMixED(18.0, 0.2, screen), accountant=accountant, model_filter=model_filter)
    assert accountant.queries == 0 and not model_filter.spent.any()
    # Nor is a screening charged beside a filter by hand, in either order.
    charge = IndividualCharge("renyi", 18.0, torch.zeros(3, 1, dtype=torch.float64).numpy())
    events = [GaussianScreening(3, 1, 1e-4, 1e-2), charge]
    for order in (events, events[::-1]):
        accountant = Accountant(1e-5, filter_budget=budget)
        accountant.attach(PerModelFilter(3, budget))
        with pytest.raises(ValueError, match="screening must be off or public under a filter"):
            accountant.add(order)


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_no_filter_runs_on_adapmixed_by_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = {"generate": ["--prompt", "The"], "evaluate": ["--text", str(tmp_path)]}[command]
    assert main([command, *MODELS, *what, "--filter-epsilon", "2"]) == 2
    error = capsys.readouterr().err
    assert "--filter-epsilon does not apply to adapmixed" in error
    assert "screening tells a bit about all of them" in error


def test_the_table_in_the_documentation_names_these_tests() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
    section = page.read_text(encoding="utf-8").split("## Misuse", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    listed = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row[-2])}
    files = [
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_misuse*")
    ]
    ours = {name for file in files for name in re.findall(r"^def test_(\w+)\(", file, re.M)}
    assert ours - listed == {
        "a_fingerprint_is_of_the_base_and_its_tokenizer",
        "other_unknown_arguments_are_errors_as_ever",
        "the_table_in_the_documentation_names_these_tests",
    }
    assert listed <= ours
