"""The command line: what every command has in common, and its logs."""

from __future__ import annotations

import argparse
import logging
import shlex
from pathlib import Path

import pytest
import torch
from decoding_cases import answered
from fake_ensemble import FakeEnsemble
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import _parser, main
from adapmixed.data import demo_base
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed_lab.cli import _parser as laboratory_parser
from adapmixed_lab.cli import main as laboratory

pytestmark = pytest.mark.usefixtures("demo_ensemble")


def test_the_help_of_a_command_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for parser in (_parser(), laboratory_parser()):
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        assert all(len(str(action.help)) > 20 for action in commands._choices_actions)
        for name, command in commands.choices.items():
            assert command.description, name
            assert sum(bool(action.option_strings) for action in command._actions) <= 26, name
            assert len(command.format_help().splitlines()) <= 52, name
            assert ("standard error, PRIVATE" in command.format_help()) == (name == "train")


ANSWERS = "--ensemble e --mechanism 'clipped-log-pool lower=0 upper=1 queries=9'"


@pytest.mark.parametrize(
    "command",
    [
        "train --corpus builtin --output out",
        "evaluate --ensemble e --text text.txt",
        f"generate {ANSWERS} --prompt x",
        f"chat {ANSWERS}",
        f"serve {ANSWERS} --ledger ledger --port 0",
        "doctor",
        "dp-sgd --corpus builtin --output out --epsilon 1 --delta 1e-5",
        "reproduce table2 --scale full --ensemble e --text text.txt",
    ],
)
def test_a_base_below_a_folder_that_is_here_is_no_hub_name(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("text.txt").write_text("some text")
    program = laboratory if command.startswith(("dp-sgd", "reproduce")) else main
    assert program([*shlex.split(command), "--base", "models/none"]) == 2
    printed = capsys.readouterr()
    words = ": --base must be an existing folder or a hub name, got "
    assert words in printed.err.splitlines()[-1]
    assert "asking the model hub" not in printed.err and printed.out == ""


MECHANISMS: dict[str, Mechanism] = {
    "adapmixed": AdaPMixED(3.0, 0.05, screen_weight=0.5, sigma=0.05, threshold=0.3, screen_top_k=4),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
    "budgets, mixing": ClippedMixing(0.5, 2.0, order=8.0),
    "budgets, pool": ClippedLogPool(-0.5, 0.5),
}


def serve(name: str, spread: float, ledger: Path | None) -> Accountant:
    """Answer twenty steps with models close to the public one, or far from it."""
    epsilon = 4.0 if name.startswith("budgets") else None
    with Accountant(1e-5, epsilon=epsilon, path=ledger) as accountant:
        answered(
            FakeEnsemble(spread=spread), MECHANISMS[name], torch.tensor([[1, 2, 3], [4, 5, 6]]),
            accountant=accountant, rng=SeededRandom(1) if ledger is None else SecureRandom(),
            max_new_tokens=20,
        )  # fmt: skip
    return accountant


@pytest.mark.parametrize("name", list(MECHANISMS))
@pytest.mark.parametrize("with_ledger", [False, True])
def test_private_values_are_in_no_message(
    name: str, with_ledger: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="adapmixed")
    messages, accountants = [], []
    for spread in (1e-3, 10.0):
        caplog.clear()
        path = tmp_path / f"{spread}.sqlite" if with_ledger else None
        accountants.append(serve(name, spread, path))
        found = [record.getMessage() for record in caplog.records]
        messages.append([text.replace(str(path), "") for text in found])
    assert messages[0] == messages[1] != []
    near, far = accountants
    if near.epsilon is not None:  # near models spent little, far ones their whole budgets
        assert (near.spent < 0.1 * near.limit).all()
        assert (far.spent > 0.9 * far.limit).all()
        assert str(near.guarantee()) == str(far.guarantee())


def test_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
    short = ["--prompt", "The", "--max-new-tokens", "2", "--seed", "1"]
    command = ["generate", *models, *short, "--mechanism", "adapmixed"]
    assert main(command) == 0
    quiet = capsys.readouterr()
    assert main([*command, "--verbose"]) == 0
    verbose = capsys.readouterr()
    assert logging.getLogger("adapmixed").handlers == []
    assert verbose.out == quiet.out
    added = set(verbose.err.splitlines()) - set(quiet.err.splitlines())
    assert any("adapmixed.ensemble.ensemble: ensemble of 64 models" in line for line in added)
    assert any("answers up to 2 more of each" in line for line in added)
    assert not any("ε" in line for line in added)
