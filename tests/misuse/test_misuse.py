"""The table "Misuse" in docs/concepts/threat-model.md: each entry raises, or the guarantee says it.

Here are the forbidden options, randomness and screening. `test_misuse_public_model.py` and
`test_misuse_shards.py` test the rest of the table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from misuse_cases import MODELS, POOL, answer

import adapmixed_ext as ops
from adapmixed.cli import _parser, main
from adapmixed.commands.options import unknown_options
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import evaluate
from adapmixed.generation import PrivateGenerator
from adapmixed.generation.refused import REASONS
from adapmixed.mechanisms import AdaPMixED, ClippedMixing, PMixED, PublicOnly, Unprotected
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

pytestmark = pytest.mark.usefixtures("demo_ensemble")

# Asking for something other than a sample


OTHER = "another distribution than the one that was projected and charged"


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"do_sample": False}, "infinite Rényi divergence"),
        ({"num_beams": 4}, "a search keeps what private probabilities rank highest"),
        ({"logprobs": 5}, "a probability of the mixture is itself"),
        ({"top_p": 0.9}, OTHER),
        ({"assistant_model": "a"}, "a draft is kept or thrown away"),
        ({"seed": 1}, "randomness comes from rng"),
    ],
)
@pytest.mark.parametrize("function", ["generator", "generate", "stream", "chat"])
def test_python_arguments(demo: Ensemble, function: str, option: dict[str, Any], why: str) -> None:
    """Every function that takes the option raises, and nothing is charged."""
    accountant = Accountant(1e-5)
    ((name, value),) = option.items()
    message = rf"{name} must not be given, got .*{re.escape(why)}"
    if function == "generator":
        with pytest.raises(ValueError, match=message):
            PrivateGenerator(demo, POOL, accountant, **option)
        return
    here = PrivateGenerator(demo, POOL, accountant)
    asked: Any = {
        "generate": lambda: here.generate("The", max_new_tokens=2, **option),
        "stream": lambda: here.stream("The", max_new_tokens=2, **option),
        "chat": lambda: here.chat([], max_new_tokens=2, **option),
    }
    with pytest.raises(ValueError, match=message):
        asked[function]()
    assert accountant.queries == 0


def test_other_unknown_arguments_are_errors_as_ever(demo: Ensemble) -> None:
    here = PrivateGenerator(demo, POOL, Accountant(1e-5))
    for name, why in REASONS.items():  # all known ones
        with pytest.raises(ValueError, match=rf"{name} must not be given, .*{re.escape(why)}"):
            here.generate("The", max_new_tokens=2, **{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        here.generate("The", max_new_tokens=2, max_tokens=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--do-sample", "False"], "infinite Rényi divergence"),
        (["--min-p=0.1"], OTHER),
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


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate"])
def test_every_reason_is_said_by_the_command(command: str) -> None:
    """No option of the command takes such a name for its own, not even as an abbreviation."""
    what = {"generate": ["--prompt", "The"], "evaluate": ["--text", "x"], "chat": []}
    parser = _parser()
    for name, why in REASONS.items():
        option = f"--{name.replace('_', '-')}"
        if option == "--seed":  # allowed in tests and evaluation, never with a ledger
            continue
        for given in ([f"{option}=1"], [option, "1"], [f"--{name}"]):
            _, unknown = parser.parse_known_args([command, *MODELS, *what[command], *given])
            assert f"must not be given: {why}" in unknown_options(unknown), given


def test_top_k_after_mixing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It does not exist: top-k and temperature act on the rows that are projected and charged."""
    private, public = torch.randn(3, 2, 9), torch.randn(2, 9)
    for mechanism in (POOL, AdaPMixED(3.0, 0.1), PMixED(8.0, 1e-5, 40, 6.0), Unprotected()):
        accountant = Accountant(1e-5)
        settings: Any = dict(rng=SeededRandom(0), top_k=3, temperature=0.5)
        proposal = mechanism.propose(private, public, **settings)
        kept = public.topk(3).indices.sort().values
        same = mechanism.propose(
            private.gather(2, kept.expand(3, 2, 3)) / 0.5, public.gather(1, kept) / 0.5,
            rng=SeededRandom(0),
        )  # fmt: skip
        # Distribution and costs belong to the reshaped rows, not to a mixture that is cut
        # afterwards.
        found, expected = proposal._proposed, same._proposed
        assert torch.equal(found.probabilities(), expected.probabilities())
        assert repr(found.events) == repr(expected.events)
        for name in ("charges", "losses"):
            mine, theirs = getattr(found, name), getattr(expected, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
        accountant.charge(proposal)
        tokens = proposal.release().tokens
        assert tokens is not None and bool((tokens[:, None] == kept).any(1).all())
    # evaluate scores plain answers, so that its command has no option for them.
    with pytest.raises(SystemExit):
        main(["evaluate", *MODELS, "--text", str(tmp_path), "--top-k", "50"])
    assert "unrecognized arguments: --top-k 50" in capsys.readouterr().err


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
        accountant = Accountant(1e-5)
        accountant.charge(proposal)
        assert "seeded" in accountant.guarantee().caveats


# Screening


def test_noise_is_added_before_re_scaling() -> None:
    with pytest.raises(ValueError, match="noise is added before re-scaling: after it the stated"):
        AdaPMixED(18.0, 0.2, screen="rescaled")  # type: ignore[arg-type]
    # The operator: for three kept tokens of small mass, noise of the same size decides.
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


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate"])
def test_no_filter_runs_on_adapmixed_by_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = {"generate": ["--prompt", "The"], "evaluate": ["--text", str(tmp_path)], "chat": []}
    adaptive = ["--mechanism", "adapmixed", "--epsilon", "2"]
    assert main([command, *MODELS, *what[command], *adaptive]) == 2
    error = capsys.readouterr().err
    assert "--epsilon must be None for AdaPMixED" in error
    assert "screening tells a bit about all of them" in error
