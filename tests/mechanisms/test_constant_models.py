"""N is a public constant: emptied, missing and exhausted members give the same answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import log_probs, losses, settled
from test_clipped import hockey_stick, of_pair
from test_enumerated import GRIDS, both_ways, everything
from tiny_models import ADAPTED, VOCAB, tiny_model, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.generation.loop import Answerer
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import Accountant
from adapmixed.privacy.costs.clipped_log_pool import bounded_range_rho
from adapmixed.privacy.costs.clipped_mixing import clipped_mixing_pair
from adapmixed.rng import SeededRandom

SETTING = (-0.25, 0.5, 2.0)
ORDERS = (1.5, 2.0, 9.0)
DELTA = 1e-5
CHARGED: dict[str, Mechanism] = {
    "pool": ClippedLogPool(*SETTING),
    "sure pool": ClippedLogPool(*SETTING, public_confidence=0.5),
    "box": ClippedMixing(0.6, 1.7, order=4.0),
    "sure box": ClippedMixing(0.6, 1.7, order=4.0, public_confidence=0.5),
}
SHAPES: list[dict[str, Any]] = [{}, {"top_k": 5}, {"temperature": 0.7}]


def drawn(seed: int, models: int, vocab: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 2 * torch.randn(6, vocab, generator=generator)
    public[5] *= 0.2  # a row that is surely not confident
    private = public + torch.randn(models, 6, vocab, generator=generator)
    private[0, 0, 3] = -torch.inf
    return private, public


def exhausted(mechanism: Mechanism, models: int, member: int, **bound: Any) -> Accountant:
    """Return an accountant with one shard that has spent its budget; the others spent nothing."""
    accountant = Accountant(DELTA, epsilon=50.0)
    accountant.bind(mechanism, models, **bound)
    spent = np.zeros(models)
    spent[member] = accountant.limit
    accountant._account = replace(accountant._account, spent=spent)
    return accountant


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CHARGED)
def test_emptied_and_exhausted_members_answer_alike_to_the_last_bit(
    name: str, shape: dict[str, Any]
) -> None:
    """Scores, tokens, public answers and the charges of every other shard are the same."""
    mechanism, (private, public) = CHARGED[name], drawn(1, 4)
    emptied = private.clone()
    emptied[2] = public  # also what a missing member answers
    found = []
    for rows, make in (
        (private, partial(exhausted, mechanism, 4, 2)),
        (emptied, partial(Accountant, DELTA, epsilon=50.0)),
        (emptied, partial(exhausted, mechanism, 4, 2)),
    ):
        answers = []
        for token in (None, *range(public.shape[1])):
            targets = None if token is None else torch.full((6,), token)
            accountant = make()
            proposal = mechanism.propose(
                rows, public, rng=SeededRandom(3), targets=targets, **shape
            )
            accountant.charge(proposal)
            answers.append(proposal.release())
        others = accountant.spent[[0, 1, 3]]
        found.append((answers, others, proposal._distribution.probabilities()))
    for answers, others, probabilities in found[1:]:
        assert (others == found[0][1]).all() and (others > 0).all()
        assert torch.equal(probabilities, found[0][2])
        for one, other in zip(answers, found[0][0], strict=True):
            for field in ("tokens", "log_prob", "public"):
                here, there = getattr(one, field), getattr(other, field)
                assert (here is None) == (there is None)
                assert here is None or torch.equal(here, there)
    whole = settled(mechanism.propose(private, public, rng=SeededRandom(3), **shape))._distribution
    assert not torch.equal(whole.probabilities(), found[0][2])


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ensemble]:
    """Return ensembles of four members whose third is trained, emptied or missing."""
    folder, base = tmp_path_factory.mktemp("members"), tiny_model("gpt2")
    targets = ["c_attn", "c_proj"]
    paths: list[Path | None] = [
        write_adapter(base, folder / f"m{i}", seed=i, target_modules=targets) for i in range(4)
    ]
    empty = write_adapter(base, folder / "empty", seed=9, zero=True, target_modules=targets)
    load = partial(Ensemble.from_pretrained, base, adapted=ADAPTED)
    return {
        "trained": load(paths),
        "emptied": load([*paths[:2], empty, paths[3]]),
        "missing": load([*paths[:2], None, paths[3]]),
    }


def test_a_missing_member_is_an_emptied_one_to_the_last_bit(
    ensembles: dict[str, Ensemble],
) -> None:
    """With any mechanism, the member's logits are the same, namely the public ones."""
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    private, public = ensembles["missing"].logits(ids)
    there = ensembles["emptied"].logits(ids)
    assert torch.equal(private, there[0]) and torch.equal(public, there[1])
    assert torch.equal(private[2], public) and ensembles["missing"].num_models == 4
    trained = ensembles["trained"].logits(ids)
    assert torch.equal(public, trained[1]) and torch.equal(
        private[[0, 1, 3]], trained[0][[0, 1, 3]]
    )
    assert not torch.equal(private[2], trained[0][2])


@pytest.mark.parametrize("name", CHARGED)
def test_missing_emptied_and_exhausted_members_generate_alike(
    name: str, ensembles: dict[str, Ensemble]
) -> None:
    mechanism = CHARGED[name]
    makers: dict[str, Callable[[], Accountant]] = {
        "trained": partial(exhausted, mechanism, 4, 2, ensemble=ensembles["trained"].fingerprint),
        "emptied": partial(Accountant, DELTA, epsilon=50.0),
        "missing": partial(Accountant, DELTA, epsilon=50.0),
    }
    found = {}
    for which, make in makers.items():
        accountant = make()
        answerer = Answerer(ensembles[which], mechanism, accountant, rng=SeededRandom(5))
        steps = answerer.stream(torch.tensor([[1, 2, 3]]), max_new_tokens=12)
        found[which] = [step.tolist() for step in steps], accountant.spent[[0, 1, 3]].tolist()
        assert accountant.queries == 12
    assert found["trained"] == found["emptied"] == found["missing"]
    answerer = Answerer(
        ensembles["trained"], mechanism, Accountant(DELTA, epsilon=50.0), rng=SeededRandom(5)
    )
    whole = [
        step.tolist() for step in answerer.stream(torch.tensor([[1, 2, 3]]), max_new_tokens=12)
    ]
    assert whole != found["trained"][0]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("more", [0, 3])
def test_no_missing_member_costs_more_than_an_emptied_one(grid: str, more: int) -> None:
    """The test covers all rows of a grid, with `more` members missing in both ensembles.

    The control shows that a mean over the present members would cost more.
    """
    private, public = everything(*GRIDS[grid])
    private = torch.cat([private, public.expand(more, -1, -1)])
    models = len(private)
    lower, upper, scale = SETTING
    rho = bounded_range_rho(scale, lower, upper, models, "zero_out")
    mechanism = ClippedLogPool(*SETTING)
    here = log_probs(mechanism, private, public)
    worst: dict[bool, float] = {True: 0.0, False: 0.0}
    for i in range(models - more):
        missing = private.clone()
        missing[i] = public
        others = torch.cat((private[:i], private[i + 1 :]))
        for constant, rows in ((True, missing), (False, others)):
            there = log_probs(mechanism, rows if len(rows) else public[None], public)
            for order in ORDERS:
                found = float((both_ways(here, there, order) / order).max())
                worst[constant] = max(worst[constant], found)
    assert 0.05 * rho < worst[True] <= rho + 1e-14
    if models - more > 1 and not more:
        assert worst[False] > 1.5 * rho


def test_a_mean_over_those_that_are_there_would_break_the_pair_too() -> None:
    private, public = everything(*GRIDS["V2-N2"])
    mechanism, pair = (
        ClippedMixing(0.6, 1.6, queries=1),
        clipped_mixing_pair(0.6, 1.6, 2, "zero_out"),
    )
    here, missing = log_probs(mechanism, private, public), private.clone()
    missing[0] = public
    bound = of_pair(pair, 0.0)
    there = log_probs(mechanism, missing, public)
    assert float(hockey_stick(here, there, 0.0).max()) <= bound + 1e-12
    there = log_probs(mechanism, private[1:], public)
    assert float(hockey_stick(here, there, 0.0).max()) > 1.2 * bound


@pytest.mark.parametrize("models", [4, 9])
def test_the_divisor_is_the_constant(models: int) -> None:
    """All rows count, also those of missing members."""
    private, public = drawn(2, 4)
    rows = torch.cat([private, public.expand(models - 4, -1, -1)])
    lower, upper, scale = SETTING
    logs = [torch.log_softmax(one.double(), -1) for one in (private, public)]
    clipped = (logs[0] - logs[1]).clamp(lower, upper)
    expected = torch.log_softmax(logs[1] + scale / models * clipped.sum(0), -1)
    found = log_probs(ClippedLogPool(*SETTING), rows, public)
    assert torch.allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove"])
def test_adapmixed_divides_by_the_constant_unless_it_is_the_papers(adjacency: str) -> None:
    """Zero-out losses are about an emptied member, the paper's about one member fewer."""
    private, public = drawn(3, 3)
    mechanism = AdaPMixED(3.0, 0.05, screen=None, adjacency=adjacency)
    own = losses(mechanism.propose(private, public, rng=SeededRandom(0)))[0, :, 0]
    here = log_probs(mechanism, private, public)
    emptied = private.clone()
    emptied[0] = public
    true = {
        "zero_out": both_ways(here, log_probs(mechanism, emptied, public), 3.0),
        "add_remove": both_ways(here, log_probs(mechanism, private[1:], public), 3.0),
    }
    other = true["add_remove" if adjacency == "zero_out" else "zero_out"]
    assert torch.allclose(own, true[adjacency], rtol=1e-5, atol=1e-12)
    assert not torch.allclose(own, other, rtol=1e-2)
    accountant = Accountant(DELTA)
    accountant.charge(mechanism.propose(private, public, rng=SeededRandom(0)))
    assert accountant.guarantee().adjacency == adjacency
