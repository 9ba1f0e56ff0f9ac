"""The two phases of every mechanism: events first, then an answer of the law they charge."""

from __future__ import annotations

import math
import warnings
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from exact import all_log_probs, mean, slots
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import AdaPMixED, Mechanism, PMixED, Proposal, PublicOnly, Unprotected
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.06, threshold=0.3, top_k=4
)
MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "adapmixed": AdaPMixED(**SCREENED),
    "adapmixed-public-screen": AdaPMixED(**SCREENED | dict(screen="public")),
    "adapmixed-no-screen": AdaPMixED(**SCREENED | dict(screen=None)),
    "adapmixed-zero-out": AdaPMixED(**SCREENED | dict(adjacency="zero_out")),
    "adapmixed-fixed": AdaPMixED(**SCREENED | dict(loss="fixed")),
    "pmixed": PMixED(8.0, 1e-5, 100, 3.0),
    "pmixed-subsampled": PMixED(8.0, 1e-5, 100, 3.0, sample_rate=0.4),
    "pmixed-published": PMixED(8.0, 1e-5, 100, 3.0, analysis="published"),
    "pmixed-published-subsampled": PMixED(
        8.0, 1e-5, 100, 3.0, analysis="published", sample_rate=0.4
    ),
}
MODELS, VOCAB = 3, 6

every = pytest.mark.parametrize("name", list(MECHANISMS))


class CountingRandom(SeededRandom):
    """Counts the draws."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.draws = 0

    def reserve(self) -> tuple[Tensor, int]:
        self.draws += 1
        return super().reserve()


def logits(positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.randn(positions, VOCAB, generator=generator)
    private = public + torch.randn(MODELS, positions, VOCAB, generator=generator)
    return private, public


def propose(
    name: str, positions: int = 12, *, seed: int = 5, rng: Any = None, targets: Any = None
) -> Proposal:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MECHANISMS[name].propose(
            *logits(positions), targets=targets, rng=rng or SeededRandom(seed)
        )


def same(events: list[Any], others: list[Any]) -> bool:
    """Equality of events, arrays included."""

    def plain(event: Any) -> Any:
        fields = vars(event) | {"type": type(event)}
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in fields.items()}

    return [plain(e) for e in events] == [plain(e) for e in others]


@every
def test_events_are_known_before_the_token_is_drawn(name: str) -> None:
    rng = CountingRandom(1)
    proposal = propose(name, rng=rng)
    draws = rng.draws
    # Screening noise or a subset for each of the 12 positions, but no token.
    screened = "adapmixed" in name and "no-screen" not in name
    assert draws == (12 if screened or name == "pmixed-published-subsampled" else 0)
    events = proposal.events()
    assert events and same(events, proposal.events())
    assert rng.draws == draws
    tokens = proposal.release().tokens
    assert rng.draws > draws
    assert tokens is not None and tokens.dtype == torch.int64 and tokens.shape == (12,)
    assert bool(((tokens >= 0) & (tokens < VOCAB)).all())
    assert same(events, proposal.events())
    assert Accountant(1e-5).add(events).epsilon().queries == 12


@every
def test_seeded_answers_repeat(name: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        proposal = propose(name, positions=40, seed=seed)
        runs.append((proposal.events(), proposal.release()))
    assert same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1].tokens, runs[1][1].tokens)
    assert torch.equal(runs[0][1].public, runs[1][1].public)
    assert not torch.equal(runs[0][1].tokens, runs[2][1].tokens)


@every
def test_a_charge_pays_for_one_token_a_position(name: str) -> None:
    """A second release must not hand out fresh tokens that nobody charged."""
    proposal = propose(name, positions=40)
    first = proposal.release().tokens
    try:
        again = proposal.release().tokens
    except (ValueError, RuntimeError):
        return
    assert torch.equal(first, again)


@every
def test_targets_change_neither_events_nor_the_randomness_of_the_proposal(name: str) -> None:
    targets = torch.arange(12) % VOCAB
    rng = CountingRandom(5)
    scored, plain = propose(name, rng=rng, targets=targets), propose(name)
    assert same(scored.events(), plain.events())
    assert torch.equal(scored.public, plain.public)
    draws = rng.draws
    answer = scored.release()
    assert answer.tokens is None and rng.draws == draws
    assert answer.log_prob is not None and answer.log_prob.dtype == torch.float64
    assert torch.equal(answer.public, plain.release().public)


@every
def test_all_slots_active_is_the_same_as_none_given(name: str) -> None:
    everyone = torch.ones(MODELS, 12, dtype=torch.bool)
    proposal = propose(name)
    assert same(proposal.events(everyone), proposal.events())
    assert torch.equal(proposal.release(everyone).tokens, propose(name).release().tokens)


@every
def test_retired_slots_are_refused(name: str) -> None:
    """The charges are those of the whole ensemble: nothing may be answered without a slot."""
    active = torch.ones(MODELS, 12, dtype=torch.bool)
    active[1, 3] = False
    proposal = propose(name)
    for phase in (proposal.events, proposal.release):
        with pytest.raises(ValueError, match="active must be all True"):
            phase(active)
        for bad in (active[:, :5], active[None], active.T, active.to(torch.uint8)):
            with pytest.raises(
                ValueError, match=r"active must be bool of shape \(N, B\) = \(3, 12"
            ):
                phase(bad)


@every
@pytest.mark.parametrize(
    "targets,message",
    [
        (torch.full((12,), VOCAB), r"targets\[0\] must be a token in \[0, 6\), got 6"),
        (torch.tensor([0] * 11 + [-1]), r"targets\[11\] must be a token in \[0, 6\), got -1"),
        (torch.zeros(11, dtype=torch.int64), r"targets must be torch.int64 of shape \(12,\)"),
        (torch.zeros(12, 1, dtype=torch.int64), r"targets must be torch.int64 of shape \(12,\)"),
        (torch.zeros(12, dtype=torch.int32), "targets must be torch.int64 .* got torch.int32"),
        (torch.zeros(12), "targets must be torch.int64 .* got torch.float32"),
    ],
)
def test_bad_targets_are_refused_before_anything_is_charged(
    name: str, targets: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        propose(name, targets=targets)


@every
def test_no_positions(name: str) -> None:
    proposal = propose(name, positions=0)
    guarantee = Accountant(1e-5).add(proposal.events()).epsilon()
    assert guarantee.queries == 0
    answer = proposal.release()
    assert answer.tokens.shape == (0,) and answer.tokens.dtype == torch.int64
    assert answer.public.shape == (0,) and answer.public.dtype == torch.bool
    scored = propose(name, positions=0, targets=torch.empty(0, dtype=torch.int64)).release()
    assert scored.log_prob.shape == (0,) and scored.log_prob.dtype == torch.float64


@every
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    private, public = logits(4)
    rng = SeededRandom(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bad in (private[:, :3], private[0], private[..., :5]):
            with pytest.raises(ValueError, match="private_logits|public_logits"):
                MECHANISMS[name].propose(bad, public, rng=rng)


def log_probs(name: str, positions: int) -> Tensor:
    """(B, V) through the public interface."""

    def answer(targets: Tensor) -> Tensor:
        log_prob = propose(name, positions, targets=targets).release().log_prob
        assert log_prob is not None
        return log_prob

    return all_log_probs(answer, VOCAB, positions)


@every
def test_the_law_is_a_distribution(name: str) -> None:
    total = log_probs(name, 12).exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n != "pmixed-published-subsampled"])
def test_what_is_scored_what_is_sampled_and_what_is_charged_is_one_law(name: str) -> None:
    """log_prob, the sampler's probabilities and the weights of the proposal agree to 1e-13."""
    private, public = logits(12)
    proposal = propose(name)
    law = proposal.law
    sampled = ops.mixture(law.private_logits, law.public_logits, law.projection)
    scored = log_probs(name, 12).exp()
    torch.testing.assert_close(scored, sampled, rtol=1e-13, atol=0.0)
    for b in range(12):
        rows = law.private_logits if name == "public" else private
        exact = mean(slots(proposal, rows, public, b)[0])
        expected = torch.tensor([float(x) for x in exact], dtype=torch.float64)
        torch.testing.assert_close(scored[b], expected, rtol=1e-12, atol=0.0)


def test_unprotected_is_the_plain_mean() -> None:
    private, _ = logits(12)
    expected = torch.softmax(private.double(), -1).mean(0)
    scored = log_probs("unprotected", 12).exp()
    torch.testing.assert_close(scored, expected, rtol=1e-13, atol=0.0)


def chi_square(tokens: Tensor, law: Tensor) -> float:
    """Standardised: (chi2 - dof) / sqrt(2 dof), summed over rows of tokens (B, n), law (B, V)."""
    draws = tokens.shape[1]
    observed = torch.stack([(tokens == v).sum(1) for v in range(law.shape[1])], dim=1).double()
    expected = draws * law
    assert float(expected.min()) > 5
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = law.shape[0] * (law.shape[1] - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@every
def test_tokens_follow_the_law(name: str) -> None:
    """4 000 tokens from one proposal each of 6 queries, then as many from one batch."""
    draws = 4000
    private, public = logits(6)
    mechanism = MECHANISMS[name]
    if "screen" in name or name.startswith("adapmixed"):
        # Screening decides position by position: without it every copy has the same law.
        settings = SCREENED | dict(screen=None)
        mechanism = AdaPMixED(**settings)
    if name == "pmixed-published-subsampled":
        return _subsets_average_out(mechanism, private[:, :1], public[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = mechanism.propose(
            private.repeat(1, draws, 1), public.repeat(draws, 1), rng=SeededRandom(2)
        )

        def answer(targets: Tensor) -> Tensor:
            rng = SeededRandom(0)
            released = mechanism.propose(private, public, targets=targets, rng=rng).release()
            assert released.log_prob is not None
            return released.log_prob

        law = all_log_probs(answer, VOCAB, 6).exp()
    tokens = batch.release().tokens.reshape(draws, 6).T
    assert abs(chi_square(tokens, law)) < 4
    # Rows of a batch draw independently: pairs of neighbouring copies follow the product law.
    pairs = tokens[:, 0::2] * VOCAB + tokens[:, 1::2]
    product = (law[:, :, None] * law[:, None, :]).reshape(6, -1)
    frequent = product.amin(1) * pairs.shape[1] > 5
    assert bool(frequent.any())
    assert abs(chi_square(pairs[frequent], product[frequent])) < 4
    # So do successive calls with one source.
    rng = SeededRandom(3)
    calls = [
        mechanism.propose(private[:, :1], public[:1], rng=rng).release().tokens for _ in range(2000)
    ]
    assert abs(chi_square(torch.cat(calls)[None], law[:1])) < 4


def _subsets_average_out(mechanism: Mechanism, private: Tensor, public: Tensor) -> None:
    """Each copy draws its own subset: tokens follow the mean of the copies' laws."""
    draws = 2000
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = mechanism.propose(*copies, rng=SeededRandom(2)).release().tokens
        columns = []
        for v in range(VOCAB):
            targets = torch.full((draws,), v)
            scored = mechanism.propose(*copies, targets=targets, rng=SeededRandom(4)).release()
            columns.append(scored.log_prob.exp().mean(0, keepdim=True))
    assert abs(chi_square(tokens[None], torch.stack(columns, dim=1))) < 4


def test_screened_tokens_follow_q_and_the_others_the_mixture() -> None:
    """With screening on: the tokens of either outcome follow the law of that outcome."""
    draws = 6000
    generator = torch.Generator().manual_seed(8)
    public = torch.randn(1, VOCAB, generator=generator)
    private = public + 2 * torch.randn(MODELS, 1, VOCAB, generator=generator)
    mechanism = AdaPMixED(**SCREENED | dict(target_leakage=1.0))
    targets = torch.arange(VOCAB)
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    proposal = mechanism.propose(*copies, rng=SeededRandom(1))
    tokens, screened = proposal.release().tokens, proposal.public
    assert 1000 < int(screened.sum()) < draws - 1000
    open_law = AdaPMixED(**SCREENED | dict(target_leakage=1.0, screen=None)).propose(
        private.repeat(1, VOCAB, 1),
        public.repeat(VOCAB, 1),
        targets=targets,
        rng=SeededRandom(0),
    )
    mixed = open_law.release().log_prob.exp()
    q = torch.softmax(public[0].double(), -1)
    assert abs(chi_square(tokens[screened][None], q[None])) < 4
    assert abs(chi_square(tokens[~screened][None], mixed[None])) < 4
    assert abs(chi_square(tokens[~screened][None], q[None])) > 20  # they are told apart


@every
def test_tokens_and_scores_agree_on_masked_tokens(name: str) -> None:
    """Token 0 is masked in the public row only, token 1 in every row, token 2 in one private row:
    no token is drawn that the law gives nothing, and none is lost that it gives something."""
    generator = torch.Generator().manual_seed(9)
    public = torch.randn(1, VOCAB, generator=generator)
    private = public + torch.randn(MODELS, 1, VOCAB, generator=generator)
    public[:, :2] = private[:, :, 1] = private[1, :, 2] = -math.inf
    draws = 1500
    mechanism = MECHANISMS[name]
    if isinstance(mechanism, AdaPMixED):
        mechanism = AdaPMixED(**SCREENED | dict(screen=None))
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = mechanism.propose(*copies, rng=SeededRandom(1)).release().tokens
        law = []
        for v in range(VOCAB):
            targets = torch.full((draws,), v)
            scored = mechanism.propose(*copies, targets=targets, rng=SeededRandom(2)).release()
            law.append(float(scored.log_prob.exp().mean()))
    for v, mass in enumerate(law):
        share = float((tokens == v).double().mean())
        assert abs(share - mass) <= 4 * math.sqrt(mass * (1 - mass) / draws), (v, share, mass)
    assert law[1] == 0.0


@every
def test_configurations_are_frozen(name: str) -> None:
    mechanism = MECHANISMS[name]
    with pytest.raises(FrozenInstanceError):
        mechanism.order = 2.0  # type: ignore[attr-defined]
    assert hash(mechanism) == hash(mechanism)
    proposal = propose(name)
    with pytest.raises(FrozenInstanceError):
        proposal.num_models = 1  # type: ignore[misc]


def test_public_only_never_reads_the_private_values() -> None:
    _, public = logits(5)
    nothing = torch.full((MODELS, 5, VOCAB), math.nan)
    proposal = PublicOnly().propose(nothing, public, rng=SeededRandom(0))
    guarantee = Accountant(1e-5).add(proposal.events()).epsilon()
    assert (guarantee.kind, guarantee.epsilon, guarantee.delta) == ("public", 0.0, 0.0)
    assert bool(proposal.public.all())
    assert proposal.release().tokens.shape == (5,)


def test_unprotected_has_no_guarantee() -> None:
    guarantee = Accountant(1e-5).add(propose("unprotected").events()).epsilon()
    assert (guarantee.kind, guarantee.epsilon) == ("none", None)


def test_logits_changed_after_proposing_are_refused() -> None:
    """The charged law is that of the proposed values."""
    public = torch.randn(3, 7)
    private = public + torch.randn(2, 3, 7)
    for changed in (private, public):
        proposal = AdaPMixED(order=4.0, target_leakage=0.1).propose(
            private, public, rng=SeededRandom(0)
        )
        changed.add_(1.0)
        with pytest.raises(ValueError, match="must not be changed between propose and release"):
            proposal.release()
