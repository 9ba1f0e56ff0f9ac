"""The table "Misuse" in docs/concepts/threat-model.md: each entry raises, or the guarantee says it.

Here are the forbidden options, randomness and screening. `test_misuse_public_model.py` and
`test_misuse_shards.py` test the rest of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_ensemble import FakeEnsemble
from misuse_cases import MODELS, POOL, answer

from adapmixed.cli import _parser, main
from adapmixed.commands.options import unknown_options
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import evaluate
from adapmixed.generation import PrivateGenerator
from adapmixed.generation.refused import OTHERWISE, REASONS
from adapmixed.mechanisms import AdaPMixED, ClippedMixing, PMixED, PublicOnly
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

pytestmark = pytest.mark.usefixtures("demo_ensemble")

# Asking for something other than a sample


@pytest.mark.parametrize("function", ["generator", "generate", "stream", "chat"])
def test_python_arguments(demo: Ensemble, function: str) -> None:
    """Every function that could take an option raises with the reason, and nothing is charged."""
    accountant = Accountant(1e-5)
    here = PrivateGenerator(demo, POOL, accountant)
    asked: dict[str, Callable[..., object]] = {
        "generator": partial(PrivateGenerator, demo, POOL, accountant),
        "generate": partial(here.generate, "The", max_new_tokens=2),
        "stream": partial(here.stream, "The", max_new_tokens=2),
        "chat": partial(here.chat, [], max_new_tokens=2),
    }
    for name, why in REASONS.items():
        with pytest.raises(ValueError, match=rf"{name} must not be given, .*{re.escape(why)}"):
            asked[function](**{name: None})
    assert accountant.queries == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):  # as ever
        asked[function](max_tokens=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["generate", "--prompt", "The", "--do-sample", "False"],
         "argument --do-sample: must not be given: the likeliest token"),
        (["generate", "--prompt", "The", "--min-p=0.1"],
         f"argument --min-p: must not be given: {OTHERWISE}"),
        # evaluate scores plain answers, so that its command has no option for them.
        (["evaluate", "--text", "x", "--top-k", "50"], "unrecognized arguments: --top-k 50"),
    ],
)  # fmt: skip
def test_options_of_the_command(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([options[0], *MODELS, *options[1:]])
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


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
