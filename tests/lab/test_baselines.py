"""The field's mechanisms: every neighbour over a grid, formulas, planted faults; and `compare`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from exact import costs, log_probs
from mechanism_cases import GRIDS, everything, logits, neighbours
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trained_demo import DEMO_ENSEMBLE
from transformers import AutoModelForCausalLM

import adapmixed_ext as ops
from adapmixed.data import demo_base, held_out_documents
from adapmixed.mechanisms import Mechanism, shaped
from adapmixed.privacy import Accountant, BoundedRangeAnswer, GaussianScreening, PublicAnswer
from adapmixed.privacy.conversions import zcdp_to_dp
from adapmixed.privacy.costs import answer_range
from adapmixed.rng import SeededRandom
from adapmixed_ext.inputs import likeliest
from adapmixed_lab import baselines
from adapmixed_lab.baselines import WORDS, InvisibleInk, NoisyAggregation, methods, unprotected
from adapmixed_lab.cli import main
from adapmixed_lab.dp_sgd import FORMAT_VERSION, GUARANTEE_FILE, AdapterGuarantee

# InvisibleInk


every_grid = pytest.mark.parametrize("grid", GRIDS)
every_question = pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
INKS = [InvisibleInk(0.5), InvisibleInk(2.5, 0.7), InvisibleInk(0.25, 3.0), InvisibleInk(0.0)]


def pairs(mechanism: Mechanism, grid: str, adjacency: str) -> Any:
    """Yield log p of all ensembles, and of each of their neighbours, (B, V) both."""
    private, public, rows, active = everything(grid)
    here = log_probs(mechanism, private, public, active=active)
    for other in neighbours(private, public, adjacency, rows):
        yield here, log_probs(mechanism, other, public, active=active)


def charged(mechanism: Mechanism, grid: str) -> Any:
    private, public, _, active = everything(grid)
    return costs(mechanism.propose(private, public, rng=SeededRandom(0), active=active))[0]


def widest(mechanism: InvisibleInk, grid: str, adjacency: str) -> float:
    """Return the largest range of log p/p'."""
    ratios = [here - there for here, there in pairs(mechanism, grid, adjacency)]
    return max(float((ratio.amax(1) - ratio.amin(1)).max()) for ratio in ratios)


@every_grid
@every_question
@pytest.mark.parametrize("mechanism", INKS)
def test_the_range_of_invisible_ink(mechanism: InvisibleInk, grid: str, adjacency: str) -> None:
    event = charged(mechanism, grid)
    assert isinstance(event, BoundedRangeAnswer)
    of = event.scale, event.lower, event.upper, event.num_models, adjacency
    stated, models = answer_range(*of), GRIDS[grid][1]
    ratio = 2 * mechanism.clip / (models * mechanism.temperature)
    assert stated == pytest.approx(ratio * (2 if adjacency == "replace_one" else 1), rel=1e-8)
    width = widest(mechanism, grid, adjacency)
    # A tail's token differs from the others in float32; what is charged is the column.
    assert width <= stated + (1e-6 if grid in ("tail", "active") else 1e-13)
    if grid == "V3-N2" and 0 < mechanism.clip < 1:  # wide rows, in which it is attained
        assert width >= 0.99 * stated
        broken = replace(mechanism, clip=1.01 * mechanism.clip)  # a planted fault
        assert widest(broken, grid, adjacency) > stated


def test_the_formula_and_the_papers_cost() -> None:
    """Also with constants added to rows: a clip of raw logits feels them."""
    private, public = logits(6)
    private += torch.tensor([0.0, 0.3, -5.0])[:, None, None]
    public[:, 5], private[0, :, 5], private[1, :, 1] = -math.inf, -math.inf, -math.inf
    mechanism = InvisibleInk(0.8, 1.7)
    difference = (private.double() - public.double()).clamp(-0.8, 0.8).nan_to_num(0.0)
    expected = ((public.double() + difference.mean(0)) / 1.7).log_softmax(-1)
    result = log_probs(mechanism, private, public)
    torch.testing.assert_close(result, expected, rtol=0.0, atol=1e-11)
    # The package `invink` 0.1.0 charges this; the accountant's composition is never above it.
    rho = 0.5 * (0.8 / (40 * 1.7)) ** 2
    for queries in (1, 100, 5000):
        spent = Accountant(1e-6).add([BoundedRangeAnswer(1 / 1.7, -0.8, 0.8, 40, queries)])
        assert spent.guarantee().epsilon <= zcdp_to_dp(queries * rho * (1 + 1e-6), 1e-6)


def test_bad_settings() -> None:
    """Beyond these a sum is not exact, a token leaves float64, or no bound holds."""
    for make, name in (
        (lambda: InvisibleInk(33.0), "clip"),
        (lambda: InvisibleInk(1.0, 0.1), "temperature"),
        (lambda: NoisyAggregation(0.0), "sigma"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            make()


# Noisy aggregation


DELTA = 1e-5


def vectors(private: Tensor, public: Tensor, active: int | None, top_k: int) -> Tensor:
    """Return the vectors that get noise, (B, k)."""
    rows = shaped(private, public, active=active).with_tail()
    top = likeliest(rows.public[:, : rows.width], min(top_k, rows.width))
    return baselines._mean_on(rows, unprotected(rows)[1], top)


def moved(grid: str, adjacency: str, top_k: int) -> float:
    """Return the largest L2 distance between neighbours, in units of √2/N."""
    private, public, rows, active = everything(grid)
    here = vectors(private, public, active, top_k)
    others = neighbours(private, public, adjacency, rows)
    norms = [(vectors(other, public, active, top_k) - here).norm(dim=1).max() for other in others]
    return float(max(norms)) * len(private) / math.sqrt(2)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("top_k", [1, 2, 100])
def test_the_mean_moves_by_at_most_the_stated_sensitivity(
    grid: str, adjacency: str, top_k: int
) -> None:
    shift = moved(grid, adjacency, top_k)
    assert shift <= 1 + 1e-11
    assert shift > 0.9 or grid != "V2-N1" or top_k == 1


def test_a_mean_scaled_before_the_noise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = baselines._mean_on

    def scaled(*arguments: Any) -> Tensor:
        mean = plain(*arguments)
        return mean / mean.sum(-1, keepdim=True)

    assert moved("V3-N2", "replace_one", 2) <= 1
    monkeypatch.setattr(baselines, "_mean_on", scaled)
    assert moved("V3-N2", "replace_one", 2) > 1.01


@pytest.mark.parametrize(("models", "queries", "sigma"), [(1, 1, 2.0), (64, 1000, 0.3)])
def test_the_stated_epsilon_is_that_of_the_gaussian_mechanism(
    models: int, queries: int, sigma: float
) -> None:
    """Charged one by one by the accountant, it is exact but for the widening, and never below."""
    private, public = (torch.zeros(*shape, 4) for shape in ((models, queries), (queries,)))
    ticket = NoisyAggregation(sigma).propose(private, public, rng=SeededRandom(0))
    assert costs(ticket)[1] == PublicAnswer(queries)
    accountant = Accountant(DELTA)
    accountant.charge(ticket)
    assert accountant.queries == queries and accountant.guarantee().kind == "fixed"
    stated = accountant.guarantee("replace_one").epsilon
    with mpmath.workdps(40):
        epsilon = mpmath.mpf(stated)
        mu = mpmath.sqrt(2 * queries) / (models * mpmath.mpf(sigma))
        delta = mpmath.ncdf(mu / 2 - epsilon / mu)
        delta -= mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
    assert DELTA * (1 - 1e-4) < delta <= DELTA


def test_what_rounding_adds_to_the_distance_is_charged() -> None:
    """Distances of the computed means, in exact fractions; some are above the real √2/N."""
    mechanism, above = NoisyAggregation(0.5), False
    for models in (3, 1000, 65_535):
        private, public = torch.tensor([-40.0, 40.0]).repeat(models, 1, 1), torch.zeros(1, 2)
        other = private.clone()
        other[0] = -private[0]
        means = [vectors(rows, public, None, 2)[0].tolist() for rows in (private, other)]
        squared = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(*means, strict=True))
        event = costs(mechanism.propose(private, public, rng=SeededRandom(0)))[0]
        assert event == GaussianScreening(models, 1, 1.0, event.sigma)
        # The distance over σ is at most √2/N over the charged σ.
        assert squared * (models * Fraction(event.sigma)) ** 2 <= 2 * Fraction(mechanism.sigma) ** 2
        above |= squared * models**2 > 2
    assert above


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_answer_is_the_clamped_noisy_vector(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = torch.tensor([0.3, -2.0, 0.01])
    monkeypatch.setattr(ops, "gaussian", lambda *_, **__: noise.double())
    private, public = logits(5)
    p, q = (rows.double().softmax(-1) for rows in (private, public))
    top = public.topk(3).indices.sort(-1).values  # in the order of tokens
    noisy = (p.mean(0).gather(1, top) + noise).clamp(min=0)
    expected = (1 - weight) * q
    expected.scatter_add_(1, top, weight * noisy / noisy.sum(1, keepdim=True))
    mechanism = NoisyAggregation(0.5, top_k=3, weight=weight)
    torch.testing.assert_close(
        log_probs(mechanism, private, public).exp(), expected, rtol=1e-12, atol=1e-300
    )
    noise = torch.full((3,), -2.0)  # nothing is left
    result = log_probs(NoisyAggregation(0.5, top_k=3), private, public).exp()
    kept = torch.zeros_like(q).scatter(1, top, q.gather(1, top))
    torch.testing.assert_close(result, kept / kept.sum(1, keepdim=True), rtol=1e-12, atol=0.0)


def test_the_tokens_that_can_be_drawn_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if members prefer others, and if the public model masks some of the top ones."""
    private, public = logits(4)
    public[:, 4:] = -math.inf
    mechanism, supports = NoisyAggregation(0.5, top_k=5), []
    monkeypatch.setattr(ops, "gaussian", lambda *_, **__: torch.ones(5).double())
    for rows in (private, -9 * private, public.expand(3, -1, -1)):
        supports.append(log_probs(mechanism, rows.contiguous(), public) > -math.inf)
    assert all(torch.equal(support, public > -math.inf) for support in supports)


# SubMix's program, whose neighbours lose more than is charged


def larger(p: Tensor, q: Tensor) -> float:
    """Return the larger divergence of order 2 of both directions."""
    return max(math.log(float((a**2 / b).sum())) for a, b in ((p, q), (q, p)))


def test_one_answer_of_submix_loses_more_than_is_charged_and_more_than_the_whole_budget() -> None:
    """Item 12 of docs/theory/errata.md: the first of four pairs is emptied.

    The program itself gave the same numbers: the charges of the pairs and the loss.
    """
    q = torch.full((50_257,), (1 - 1e-3) / 50_256, dtype=torch.float64)
    p = torch.zeros_like(q)
    q[0], p[0] = 1e-3, 1.0
    while bool(((p / q).log().abs() > 5 + 1e-4).any()):
        p = p.clamp(q * math.exp(-5), q * math.exp(5))
        p = p / p.sum()
    # The members of a pair agree, so mixing costs nothing: λ is the first power of 0.93.
    mixes = torch.stack([q + 0.93 * (p - q), q, q, q])
    whole, tokens = mixes.mean(0), len(q)
    # The program divides by `len(P_out)`, the number of tokens, as if that were that of pairs.
    without = (whole - mixes / tokens) * (tokens / (tokens - 1))
    charged = [
        math.log(max(float((r**2 / whole).sum()), float((whole**2 / mix).sum())))
        for r, mix in zip(without, mixes, strict=True)
    ]
    loss = larger(whole, q)  # from 0.5 over 1 024 answers
    assert charged == pytest.approx([0.0851, *[0.7774] * 3], rel=1e-3)
    assert loss > 9 * charged[0] and loss > 1.5 * 0.5
    # The divergence from the mean over the other pairs, which is meant, covers it.
    assert larger(whole, (4 * whole - mixes[0]) / 3) >= loss * (1 - 1e-6)


# `adapmixed-lab compare`: settings that keep to ε, one table, one figure


MODELS, QUERIES, VOCAB = 12, 40, 30
EX_POST = "data-dependent, ex-post"


def test_every_setting_keeps_to_its_epsilon() -> None:
    """Also for rows far from the public one; a fixed ε is nearly spent."""
    generator = torch.Generator().manual_seed(1)
    public = torch.randn(QUERIES, VOCAB, generator=generator)
    private = 3 * torch.randn(MODELS, QUERIES, VOCAB, generator=generator)
    mechanisms = methods([0.5, 4.0], DELTA, MODELS, QUERIES)
    assert list(mechanisms)[:2] == ["public", "unprotected"] and len(mechanisms) == 15
    for name, mechanism in mechanisms.items():
        accountant = Accountant(DELTA)
        accountant.charge(mechanism.propose(private, public, rng=SeededRandom(0)))
        guarantee = accountant.guarantee()
        if "≤" in name:
            target, ex_post = float(name.partition("≤")[2]), name.startswith("adapmixed")
            assert guarantee.kind == (EX_POST if ex_post else "fixed"), name
            assert guarantee.epsilon is not None and guarantee.epsilon <= target * (1 + 1e-9)
            assert ex_post or guarantee.epsilon > 0.99 * target


def test_a_member_within_the_ball_keeps_its_whole_distribution() -> None:
    """So AdaPMixED is not handicapped by weights of 0 where no projection is needed."""
    public = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    private = torch.stack([public, public + 1e-3, public + 1e-3 * torch.arange(VOCAB)])
    mechanisms = methods([1.0], DELTA, 3, 5)
    for name in ("adapmixed, ≤ 1", "pmixed, ≤ 1"):
        ticket = mechanisms[name].propose(private, public, rng=SeededRandom(0))
        assert bool((ticket._proposed.projection.weight == 1).all())  # type: ignore[union-attr]


def dp_adapters(tmp_path: Path) -> list[str]:
    """Write two adapters with a guarantee, and return their folders; a shard's changes nothing."""
    folders = []
    for unit, changes_nothing in (("shard", True), ("user", False)):
        config = LoraConfig(r=1, target_modules=["c_attn"], init_lora_weights=changes_nothing)
        folder = tmp_path / unit
        base = AutoModelForCausalLM.from_pretrained(demo_base())
        get_peft_model(base, config).save_pretrained(folder)
        stated = AdapterGuarantee(1.75, DELTA, 1.0, 0.5, 10, 1.0, 64, unit, 8, "pld")
        content = {"format_version": FORMAT_VERSION, "training": None, **asdict(stated)}
        (folder / GUARANTEE_FILE).write_text(json.dumps(content))
        folders.append(str(folder))
    return folders


@pytest.mark.usefixtures("demo_ensemble")
def test_the_command_prints_a_table_and_writes_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, figure = tmp_path / "text.txt", tmp_path / "compare.svg"
    text.write_text("\n\n".join(doc.text for doc in held_out_documents()[:20]), encoding="utf-8")
    command = ["compare", "--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
    command += ["--text", str(text), "--epsilon", "2", "--seed", "1", "--out", str(figure)]
    command += ["--dp-adapter", *dp_adapters(tmp_path)]
    assert main([*command, "--queries", "24"]) == 0
    printed = capsys.readouterr().out
    table = [re.split(r"  +", line) for line in printed.split("\n\n")[0].splitlines()]
    lines = {line[0]: line for line in table[2:]}
    assert float(lines["public"][1]) > float(lines["unprotected"][1])
    assert lines["adapmixed, ≤ 2"][-1] == f"{EX_POST}, zero-out"
    for name in ("clipped-log-pool", "invisible-ink", "noisy-aggregation"):
        *_, epsilon, covered, kind = lines[f"{name}, ≤ 2"]
        assert 1.99 < float(epsilon) <= 2.0 and covered == "24 tokens" and "fixed" in kind
    name, perplexity, *_, kept, epsilon, covered, kind = lines["dp-sgd (shard)"]
    assert (perplexity, kept, epsilon) == (lines["public"][1], "-", "1.75")
    assert covered == "any number of tokens" and kind == "fixed, add/remove"
    assert lines["dp-sgd (user)"][1] not in (perplexity, lines["unprotected"][1])
    assert all(" ".join(words.split()) in " ".join(printed.split()) for words in WORDS)
    assert figure.read_text(encoding="utf-8").startswith("<svg role=")
    assert figure.stat().st_mode & 0o077 == 0
    for bad, words in (
        (["--queries", "99999"], "--queries must be at least 1 and at most"),
        (["--epsilon", "0"], "--epsilon must be > 0"),
        (["--delta", "1e-6"], "--dp-adapter must have its ε at δ = 1e-06, got 1e-05"),
    ):
        assert main([*command, *bad]) == 2
        assert words in capsys.readouterr().err
