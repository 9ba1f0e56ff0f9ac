"""Queries of mechanisms and rows of the output layer on the CUDA kernels: the CPU's answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import simulated
import torch
from test_low_rank import SHAPES, operands, rows
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, PMixED
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

MECHANISMS = {
    "adapmixed": AdaPMixED.preset("wikitext-103"),
    "adapmixed-add-remove": replace(AdaPMixED.preset("wikitext-103"), adjacency="add_remove"),
    "pmixed": PMixED(8.0, 1e-5, 100, 3.0),
    "clipped-mixing": ClippedMixing(0.6, 1.7, queries=100, order=4.0),
    "clipped-log-pool": ClippedLogPool(-0.5, 0.5, queries=100),
}


def logits(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 2 * torch.randn(2, 150, generator=generator)
    return public + 0.5 * torch.randn(5, 2, 150, generator=generator), public


@pytest.mark.parametrize("name", MECHANISMS)
def test_answers_and_charges_are_the_cpus(name: str) -> None:
    private, public = logits(1)
    outcomes = []
    for on_gpu in (False, True):
        with simulated.kernels("random", 3) if on_gpu else torch.no_grad():
            proposal = MECHANISMS[name].propose(private, public, rng=SeededRandom(7))
            Accountant(1e-5).charge(proposal)
            answer = proposal.release()
            proposed = proposal._proposed
            outcomes.append((answer.tokens, answer.public, proposed.losses, proposed.charges))
    (tokens, from_public, losses, charges), other = outcomes
    assert torch.equal(tokens, other[0]) and torch.equal(from_public, other[1])
    if losses is not None:  # bounds, as far above the truth as each side needs
        torch.testing.assert_close(other[2], losses, rtol=1e-4, atol=1e-9)
    if charges is not None:
        torch.testing.assert_close(other[3], charges, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_rows_raise_before_anything_is_charged(name: str, value: float) -> None:
    private, public = logits(2)
    private[3, 1, 70] = value
    with simulated.kernels(), pytest.raises(ValueError, match=r"private_logits\[3, 1\]"):
        MECHANISMS[name].propose(private, public, rng=SeededRandom(7))
    public[0, 5] = value
    with simulated.kernels(), pytest.raises(ValueError, match=r"public_logits\[0\]"):
        MECHANISMS[name].propose(private, public, rng=SeededRandom(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_the_output_layer_are_the_cpus(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    start, coefficients, factors, tokens = operands(*shape)
    starts = start + torch.arange(len(factors))[:, None, None]
    whole = torch.randn(len(start), shape[-1])
    for z, ids in ((start, tokens), (starts, tokens), (whole, None)):
        expected = rows(z, coefficients, factors, ids, dtype)
        for order in simulated.ORDERS:
            with simulated.kernels(*order):
                assert torch.equal(rows(z, coefficients, factors, ids, dtype), expected)


def test_columns_of_unknown_tokens_are_nan() -> None:
    """A call that is only queued cannot raise, and must not read beyond the factors."""
    start, coefficients, factors, tokens = operands(17, 2, 3, 40, 90)
    wrong = tokens.clone()
    wrong[0, 3], wrong[1, 39] = 90, -1
    with simulated.kernels():
        result = rows(start, coefficients, factors, wrong)
    unknown = wrong != tokens
    assert result[:, unknown].isnan().all()
    assert torch.equal(result[:, ~unknown], rows(start, coefficients, factors, tokens)[:, ~unknown])
