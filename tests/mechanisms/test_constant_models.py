"""N is a public constant: emptied, missing and exhausted members give the same answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import settled
from tiny_models import ADAPTED, tiny_model, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

SETTING = (-0.25, 0.5, 2.0)
CHARGED: dict[str, Mechanism] = {
    "pool": ClippedLogPool(*SETTING),
    "sure pool": ClippedLogPool(*SETTING, public_confidence=0.5),
    "box": ClippedMixing(0.6, 1.7, order=4.0),
    "sure box": ClippedMixing(0.6, 1.7, order=4.0, public_confidence=0.5),
}


def drawn(seed: int, models: int, vocab: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 2 * torch.randn(6, vocab, generator=generator)
    public[5] *= 0.2  # a row that is surely not confident
    private = public + torch.randn(models, 6, vocab, generator=generator)
    private[0, 0, 3] = -torch.inf
    return private, public


def exhausted(mechanism: Mechanism, models: int, member: int, **bound: Any) -> Accountant:
    """Return an accountant with one shard that has spent its budget; the others spent nothing."""
    accountant = Accountant(1e-5, epsilon=50.0)
    accountant.bind(mechanism, models, **bound)
    spent = np.zeros(models)
    spent[member] = accountant.limit
    accountant._kept = replace(accountant._account, total=spent)
    return accountant


@pytest.mark.parametrize("shape", [{}, {"top_k": 5}, {"temperature": 0.7}], ids=str)
@pytest.mark.parametrize("models", [1, 4])
@pytest.mark.parametrize("name", CHARGED)
def test_emptied_and_exhausted_members_answer_alike_to_the_last_bit(
    name: str, models: int, shape: dict[str, Any]
) -> None:
    """Scores, tokens, public answers and the charges of every other shard are the same."""
    mechanism, (private, public), member = CHARGED[name], drawn(1, models), models // 2
    emptied = private.clone()
    emptied[member] = public  # also what a missing member answers
    others = [i for i in range(models) if i != member]
    found = []
    for rows, make in (
        (private, partial(exhausted, mechanism, models, member)),
        (emptied, partial(Accountant, 1e-5, epsilon=50.0)),
        (emptied, partial(exhausted, mechanism, models, member)),
    ):
        answers = []
        for token in (None, *range(public.shape[1])):
            targets, accountant = None if token is None else torch.full((6,), token), make()
            ticket = mechanism.propose(rows, public, rng=SeededRandom(3), targets=targets, **shape)
            accountant.charge(ticket)
            answers.append(ticket.release())
        spent = accountant.spent[others]
        found.append((answers, spent, ticket._distribution.probabilities()))
    for answers, spent, probabilities in found[1:]:
        assert (spent == found[0][1]).all() and (spent > 0).all()
        assert torch.equal(probabilities, found[0][2])
        for one, other in zip(answers, found[0][0], strict=True):
            for field in ("tokens", "log_prob", "public"):
                here, there = getattr(one, field), getattr(other, field)
                assert here is there is None or torch.equal(here, there)
    whole = settled(mechanism.propose(private, public, rng=SeededRandom(3), **shape))._distribution
    assert not torch.equal(whole.probabilities(), found[0][2])


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ensemble]:
    """Return ensembles of four members whose third is trained, emptied or missing."""
    folder, base = tmp_path_factory.mktemp("members"), tiny_model("gpt2")
    write = partial(write_adapter, base, target_modules=["c_attn", "c_proj"])
    paths: list[Path | None] = [write(folder / f"m{i}", seed=i) for i in range(4)]
    empty = write(folder / "empty", seed=9, zero=True)
    load = partial(Ensemble.from_pretrained, base, adapted=ADAPTED)
    found = {
        "trained": load(paths),
        "emptied": load([*paths[:2], empty, paths[3]]),
        "missing": load([*paths[:2], None, paths[3]]),
    }
    for ensemble in found.values():
        ensemble.tokenizer = "unused"
    return found


@pytest.mark.parametrize("name", CHARGED)
def test_missing_emptied_and_exhausted_members_generate_alike(
    name: str, ensembles: dict[str, Ensemble]
) -> None:
    mechanism, found = CHARGED[name], {}
    known = ensembles["trained"].fingerprint
    for which, make in {
        "exhausted": partial(exhausted, mechanism, 4, 2, ensemble=known),
        "trained": partial(Accountant, 1e-5, epsilon=50.0),
        "emptied": partial(Accountant, 1e-5, epsilon=50.0),
        "missing": partial(Accountant, 1e-5, epsilon=50.0),
    }.items():
        accountant, ensemble = make(), ensembles.get(which, ensembles["trained"])
        generator = PrivateGenerator(ensemble, mechanism, accountant, rng=SeededRandom(5))
        steps = generator.stream_tokens(torch.tensor([[1, 2, 3]]), max_new_tokens=12)
        found[which] = [step.tolist() for step in steps], accountant.spent[[0, 1, 3]].tolist()
        assert accountant.queries == 12
    assert found["exhausted"] == found["emptied"] == found["missing"]
    assert found["trained"][0] != found["missing"][0]
