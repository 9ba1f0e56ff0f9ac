"""Tokens: which of two neighbouring ensembles answered? Mechanisms and draws are the real ones.

There are two tokens. Member 0 pushes one up, and all others push it down. Of the ensembles with
these clipped or projected rows, this one is told apart best. The mechanism's own probabilities
choose the event and how rare the token is, before anything is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.rng import SeededRandom
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit import Effort, Finding
from adapmixed_lab.audit.search import (
    CONFIDENCE,
    distribution,
    drawn,
    least_epsilon,
    neighbour,
    stated_epsilon,
)

PUSH = 60.0  # a logit that leaves nothing to the other token
DRAWS_PER_SECOND = 4000.0  # of one game with 10 models, in each world; rounded down
TINY = 1e-15  # the least δ, at which ε is that of δ = 0
SHARES = torch.logspace(-4, math.log10(0.9), 60, dtype=torch.float64)


@dataclass(frozen=True)
class Game:
    """A claim about `stated`, tried on `running`; they differ only if a bug is injected."""

    name: str
    stated: Mechanism
    num_models: int
    adjacency: str
    delta: float
    running: Mechanism | None = None

    @property
    def answering(self) -> Mechanism:
        """The mechanism that answers."""
        return self.running or self.stated

    def claimed(self) -> float:
        """Return the claimed ε of one answer at δ."""
        rows = torch.zeros(self.num_models, 1, 2), torch.zeros(1, 2)
        ticket = self.stated.propose(*rows, rng=SeededRandom(0))
        return stated_epsilon(ticket, self.delta, self.adjacency)


def worlds(game: Game) -> tuple[Tensor, Tensor, Tensor]:
    """Return private logits here and there (N, B, 2), and public (B, 2), for q of all `SHARES`."""
    public = torch.stack((SHARES.log(), torch.log1p(-SHARES)), 1).float()
    raised, lowered = torch.tensor([PUSH, 0.0]), torch.tensor([-PUSH, 0.0])
    here = lowered.expand(game.num_models, len(SHARES), 2).clone()
    here[0] = raised
    return here, neighbour(here, public, lowered, game.adjacency), public


def play(game: Game, draws: int, rng: RandomSource) -> float:
    """Return a lower bound on ε at the game's δ, with confidence `CONFIDENCE`.

    The share, the token and the direction are those that are expected to show most.
    """
    *ensembles, public = worlds(game)
    laws = [distribution(game.answering, private, public) for private in ensembles]
    expected = []
    for p, q in (laws, laws[::-1]):
        low = p - game.delta - 3.5 * np.sqrt(p / draws)
        expected.append(np.maximum(low, 1e-300) / (q + 3.5 * np.sqrt(q / draws) + 8 / draws))
    exchanged, place, token = np.unravel_index(np.argmax(expected), np.shape(expected))
    hits = []
    for private in ensembles[::-1] if exchanged else ensembles:
        rows = private[:, place, None], public[place, None]
        tokens, _ = drawn(game.answering, *rows, draws, rng)
        hits.append(int(tokens.eq(int(token)).sum()))
    return least_epsilon((hits[0], draws), (hits[1], draws), game.delta)


BOX = ClippedMixing(0.3, 3.0, queries=1)
POOL = ClippedLogPool(-1.0, 1.0, 2.0, queries=1)
BALL_DELTA = 0.05
BALL = PMixED(1.0, BALL_DELTA, queries=1, order=4.0)


def games() -> list[Game]:
    """Return all games; those that run another mechanism than they state are controls."""
    claims = []
    for models in (2, 10):
        for mechanism in (BOX, POOL):
            for adjacency in ("zero_out", "replace_one"):
                for delta in (TINY, 0.01):
                    claims.append(Game(mechanism.name, mechanism, models, adjacency, delta))
        claims.append(Game(BALL.name, BALL, models, "zero_out", BALL_DELTA))
    wide = ClippedMixing(0.3, 4.5, queries=1)
    sharp = ClippedLogPool(-1.0, 1.0, 4.0, queries=1)
    ball = PMixED(2.0, BALL_DELTA, queries=1, order=4.0)
    return [
        *claims,
        Game("clipped-mixing, box 1.5 times as wide", BOX, 2, "zero_out", TINY, wide),
        Game("clipped-log-pool, scale doubled", POOL, 2, "zero_out", TINY, sharp),
        Game("pmixed, ball for ε = 2", BALL, 2, "zero_out", BALL_DELTA, ball),
    ]


def audit(effort: Effort) -> Iterator[Finding]:
    """Play every game."""
    draws = effort.count(DRAWS_PER_SECOND, 2000)
    for index, game in enumerate(games()):
        name = f"{game.name}, N = {game.num_models}, {game.adjacency}"
        claim, control = f"ε of one answer at δ = {game.delta:g}", game.running is not None
        measured = play(game, draws, effort.source(f"tokens/{index}"))
        yield Finding("tokens", name, claim, game.claimed(), measured, CONFIDENCE, control)
