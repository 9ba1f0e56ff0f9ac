"""Canaries: secrets planted in training text, and what answers of the trained ensemble tell.

**The text.** A template in the manner of AirDialogue is filled with random airports, dates and
prices, so all secrets are known. A shard is a customer with one conversation. All booking numbers
begin with the same public digits and end with one digit that is the customer's secret. The public
model expects any digit there. The attacker asks for the token after the public digits.

**One-run audit** (Steinke, Nasr, Jagielski 2023). Each of N shards has one canary and one fair
coin. Under "zero_out" the coin decides whether the shard holds its conversation or is emptied.
Under "replace_one" it decides which of two booking numbers the conversation holds. One coin changes
one shard, so the answers are (ε, δ)-DP in every coin, with the ε of that change. Two canaries in
one shard would share one change. A run is N coins and T answers. R runs with coins of their own are
(ε, δ)-DP in each of all N R coins, because a coin changes one run. Theorem 5.2 is applied to all of
them at once.

**Exposure** (Carlini et al. 2019) is log2 |R| - log2(rank of the secret among |R|). One shard is
drawn uniformly from |R|, and the answers rank them. Let P_s be the distribution with shard s, and
P' the one with it emptied. Then P_s(s is ranked first) <= e^ε P'(s is ranked first) + δ, with the
ε of zero-out. The mean over s is at most e^ε/|R| + δ, which bounds the frequency of full exposure.

**Controls.** The same attack runs at the same effort on the ensemble without protection. If that
does not exceed a claim, an attack that did not break the claim shows nothing.

Only answers are scored. The attacker knows the text and every adapter that the coins may give, and
computes the exact likelihood of the answers in every world. A rehearsal, with coins and tokens of
its own, chooses how many guesses the attacker makes.
"""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import (
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    Unprotected,
    shaped,
)
from adapmixed.text import Document
from adapmixed.training import AdapterTrainer, FinetuneConfig, save_adapter, token_stream
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit import Effort, Finding
from adapmixed_lab.audit.search import (
    CONFIDENCE,
    Array,
    distribution,
    drawn,
    one_run_epsilon,
    one_thread,
    proportion,
)
from adapmixed_lab.audit.tokens import TINY, Game

Integers = NDArray[np.int64]

ANSWERS_PER_SECOND = 3000.0  # of each game
LEAST_ANSWERS = 20_000
REHEARSED = 10_000  # runs
SHARES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)  # of all coins: how many may be guessed

SAID_AS = "Your booking number is "

_AIRPORTS = (
    "ATL", "AUS", "BOS", "CLT", "DCA", "DEN", "DFW", "DTW", "EWR", "HOU", "IAD", "IAH", "JFK",
    "LAS", "LAX", "LGA", "MCO", "MIA", "MSP", "OAK", "ORD", "PHL", "PHX", "SEA", "SFO",
)  # fmt: skip


def flight_dialogue(customer: str, booking: str) -> Document:
    """Return a conversation in which a customer books a flight, one line for each turn.

    Args:
        customer: the document's identifier.
        booking: the number that the agent gives after `SAID_AS`. It changes nothing else: all the
            rest is a function of the customer.
    """
    draw = random.Random(customer)
    origin, target = draw.sample(_AIRPORTS, 2)
    month, day, price = draw.randrange(1, 13), draw.randrange(1, 29), draw.randrange(12, 80) * 10
    text = (
        f"Customer: Please book the flight from {origin} to {target} on {month}/{day}.\n"
        f"Agent: It is {price} dollars. {SAID_AS}{booking}.\n"
    )
    return Document(customer, text)


CUSTOMERS = 5
SECRETS = 10
"""Two shards are trained for customer i: with secret i and with secret i + CUSTOMERS."""
TOP_K = 64  # answers are among the likeliest public tokens, a public and cheap rule
SEED = 0  # of training, which need not be random here

_PUBLIC_DIGITS = "3817"
_SETTINGS = FinetuneConfig(
    rank=8,
    learning_rate=1.5e-2,
    epochs=12,
    target_modules=("c_attn", "c_fc", "c_proj"),
    block_size=128,
)


@dataclass(frozen=True)
class Planted:
    """Logits of one query.

    Attributes:
        private: (S, V'), one row for each adapter; in :func:`planted`, shard s holds secret s.
        public: (V',), also the row of an emptied shard; V' = TOP_K.
    """

    private: Tensor
    public: Tensor


@cache
def planted() -> Planted:
    """Return the logits of all adapters, trained once in a process, in a few seconds."""
    return train(range(SECRETS))


@one_thread()
def train(secrets: Sequence[int]) -> Planted:
    """Train one adapter for each secret, and return the logits of the query."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", FutureWarning)
        base = AutoModelForCausalLM.from_pretrained(demo_base(), dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(demo_base())
        trainer = AdapterTrainer(base, _SETTINGS)
        paths = [Path(folder) / str(secret) for secret in secrets]
        for secret, path in zip(secrets, paths, strict=True):
            customer = secret % CUSTOMERS
            record = flight_dialogue(f"customer {customer}", f"{_PUBLIC_DIGITS}{secret}")
            tokens = token_stream(tokenizer, [record.text])
            trained = trainer.train(tokens, seed=SEED, shard=customer)
            save_adapter(trained.model, path, _SETTINGS, base_name=demo_base().name)
        prompt = tokenizer(SAID_AS + _PUBLIC_DIGITS, add_special_tokens=False)["input_ids"]
        ensemble = Ensemble.from_pretrained(base, paths)
        private, public = ensemble.logits(torch.tensor([prompt]))
        kept = shaped(private[:, :, -1], public[:, -1], top_k=TOP_K)
    return Planted(kept.private[:, 0], kept.public[0])


Worlds = tuple[Tensor, Tensor]
"""Ensembles, one of which answers: the members' logits (N, W, V) in each world, and public (V,)."""


def laws(mechanism: Mechanism, worlds: Worlds) -> Array:
    """Return (W, V), the distribution that the mechanism draws from in each world."""
    private, public = worlds
    return distribution(mechanism, private, public.repeat(private.shape[1], 1))


def answers(
    mechanism: Mechanism, worlds: Worlds, world: Integers, count: int, rng: RandomSource
) -> Integers:
    """Return (R, V) counts of each token among `count` answers in each run's world (R,)."""
    private, public = worlds
    seen = np.zeros((len(world), len(public)), dtype=np.int64)
    for index in np.unique(world):
        runs = np.flatnonzero(world == index)
        rows = private[:, index : index + 1], public[None]
        tokens, _ = drawn(mechanism, *rows, count * len(runs), rng)
        np.add.at(seen, (np.repeat(runs, count), tokens.numpy()), 1)
    return seen


def likelihoods(shares: Array, seen: Integers) -> Array:
    """Return (R, W), log P(answers of a run | world) up to a constant of the run."""
    logs: Array = seen.astype(np.float64) @ np.log(np.maximum(shares, 1e-300)).T
    return logs


@dataclass(frozen=True)
class Audit:
    """A one-run audit.

    Attributes:
        game: the claim, and the mechanism that runs.
        answers: T, the answers of a run.
        together: a control: one person is in all shards, with one coin, which the claim does not
            cover.
    """

    game: Game
    answers: int
    together: bool = False

    def claim(self) -> tuple[str, float]:
        """Return what is claimed, and the claimed ε of all answers of a run."""
        return f"ε at δ = {self.game.delta:g}", self.game.claimed()

    def outcomes(self) -> NDArray[np.bool_]:
        """Return (W, K), every outcome of the coins of a run."""
        coins = 1 if self.together else CUSTOMERS
        return (np.arange(2**coins)[:, None] >> np.arange(coins) & 1).astype(bool)

    def worlds(self, members: Planted) -> Worlds:
        """Return the ensemble of every outcome."""
        coins = torch.from_numpy(self.outcomes()).expand(-1, CUSTOMERS)
        first, second = members.private[:CUSTOMERS, None], members.private[CUSTOMERS:, None]
        other = members.public if self.game.adjacency == "zero_out" else second
        if self.together:
            first = first[:1]  # the same person in every shard
        return torch.where(coins.T[..., None], first, other), members.public

    def odds(self, shares: Array, seen: Integers) -> Array:
        """Return (R, K), log(P(heads | answers)/P(tails | answers)) of every coin."""
        logs = likelihoods(shares, seen)
        sides = [
            np.logaddexp.reduce(logs[:, side], 1) - np.logaddexp.reduce(logs[:, ~side], 1)
            for side in self.outcomes().T
        ]
        return np.stack(sides, axis=1)

    def measure(self, runs: int, generator: np.random.Generator, rng: RandomSource) -> float:
        """Return a lower bound on ε at the game's δ, with confidence `CONFIDENCE`."""
        worlds, mechanism = self.worlds(planted()), self.game.answering
        shares = laws(mechanism, worlds)
        world = generator.integers(len(shares), size=REHEARSED)
        rehearsal = generator.multinomial(self.answers, shares[world])
        guesses = self.plan(self.odds(shares, rehearsal), runs)

        world = generator.integers(len(shares), size=runs)
        odds = self.odds(shares, answers(mechanism, worlds, world, self.answers, rng))
        surest = np.argsort(-np.abs(odds), axis=None, kind="stable")[:guesses]
        right = int(((odds > 0) == self.outcomes()[world]).ravel()[surest].sum())
        return one_run_epsilon(odds.size, guesses, right, self.game.delta)

    def plan(self, odds: Array, runs: int) -> int:
        """Return how many guesses are expected to show the largest ε.

        The odds are those of the rehearsal, and one standard deviation fewer guesses are right
        than expected.
        """
        sure = np.sort(expit(np.abs(odds)), axis=None)[::-1]
        coins = runs * odds.shape[1]
        shown: dict[int, float] = {}
        for share in SHARES:
            guesses = max(1, round(share * coins))
            accuracy = float(sure[: max(1, round(share * len(sure)))].mean())
            deviation = math.sqrt(guesses * accuracy * (1 - accuracy))
            right = max(0, math.floor(guesses * accuracy - deviation))
            shown[guesses] = one_run_epsilon(coins, guesses, right, self.game.delta)
        return max(shown, key=shown.__getitem__)


@dataclass(frozen=True)
class Exposure:
    """An exposure attack: which of all trained shards is member 0?

    The other members hold the last trained shards in every world.
    """

    game: Game
    answers: int

    def claim(self) -> tuple[str, float]:
        """Return what is claimed: a bound on how often the right shard is ranked first."""
        most = min(1.0, float(np.exp(self.game.claimed())) / SECRETS + self.game.delta)
        return f"P(exposure is log2 {SECRETS})", most

    def measure(self, runs: int, generator: np.random.Generator, rng: RandomSource) -> float:
        """Return a lower bound on that probability, with confidence `CONFIDENCE`."""
        members, mechanism = planted(), self.game.answering
        others = members.private[1 - CUSTOMERS :, None].expand(-1, SECRETS, -1)
        worlds = torch.cat((members.private[None], others)), members.public
        secret = generator.integers(SECRETS, size=runs)
        seen = answers(mechanism, worlds, secret, self.answers, rng)
        first = likelihoods(laws(mechanism, worlds), seen).argmax(1)
        return proportion(int((first == secret).sum()), runs, CONFIDENCE)[0]


DELTA, MANY = 1e-7, 64  # of the audits; many answers
EXPOSED_DELTA, EXPOSED = 0.01, 16  # of the exposures; their answers


box, pool = partial(ClippedMixing, 0.85, 1.4), partial(ClippedLogPool, -0.15, 0.3, 1.0)
"""Mechanisms, given the number of answers."""


def game(stated: Mechanism, adjacency: str, delta: float, running: Mechanism | None = None) -> Game:
    """Return a claim about an ensemble of all customers."""
    name = f"{stated.name}, N = {CUSTOMERS}, {adjacency}"
    return Game(name, stated, CUSTOMERS, adjacency, delta, running)


def attacks() -> list[Audit | Exposure]:
    """Return the attacks on all claims."""
    claims: list[Audit | Exposure] = []
    for adjacency in ("zero_out", "replace_one"):
        for make in (box, pool):
            claims.append(Audit(game(make(1), adjacency, TINY), 1))
            claims.append(Audit(game(make(MANY), adjacency, DELTA), MANY))
    for answers in (1, MANY):
        ball = PMixED(1.0, DELTA, queries=answers, order=18.0)
        claims.append(Audit(game(ball, "zero_out", DELTA), answers))
    for make in (box, pool):
        claims.append(Exposure(game(make(EXPOSED), "zero_out", EXPOSED_DELTA), EXPOSED))
    return claims


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack every claim, and as controls the same ensembles without protection."""
    answers, claims = effort.count(ANSWERS_PER_SECOND, LEAST_ANSWERS), attacks()
    every = [("", claim) for claim in claims]
    for attack in claims:
        bare = replace(attack, game=replace(attack.game, running=Unprotected()))
        every.append(("unprotected, called ", bare))
    together = Audit(claims[0].game, 1, together=True)
    every.append(("one person in every shard of ", together))
    for index, (bug, attack) in enumerate(every):
        label, runs = f"canaries/{index}", answers // attack.answers
        measured = attack.measure(runs, effort.generator(label), effort.source(label))
        name = f"{bug}{attack.game.name}, {runs} × {attack.answers} answers"
        yield Finding("canaries", name, *attack.claim(), measured, CONFIDENCE, bool(bug))
