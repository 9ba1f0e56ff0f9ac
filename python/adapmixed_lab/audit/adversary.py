"""Adversary: the worst adaptive adversary against the ε of many answers of ClippedLogPool.

The adversary chooses every question from the answers so far. A dynamic programme finds the choices
that reach the largest δ at the stated ε, as docs/theory/bounded-range.md describes. ClippedLogPool
then answers these questions itself. The δ is a sum over all states, without any sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from adapmixed.mechanisms import ClippedLogPool, Ticket
from adapmixed.privacy import Accountant
from adapmixed.privacy.conversions import gdp_to_dp
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import SLACK, Effort, Finding
from adapmixed_lab.audit.search import FAR, Array, stated_epsilon, uncharged

DELTA = 1e-5
CELLS = 16
"""Questions: one raises log P/Q by k/16 of the range of an answer, or lowers it by the rest."""
POOL = ClippedLogPool(-0.05, 0.05, scale=4.0)
NARROW = replace(POOL, scale=1.0)
"""For many answers: beyond 512 a plan's ε is that of the theorem, as a budget's always is."""
MODELS = 4
BUDGET = 2.0
"""ε of every shard's budget."""


@dataclass(frozen=True)
class Duel:
    """ClippedLogPool with a member at both clips, against the same without it.

    Attributes:
        mechanism: answers the questions, over two tokens; all other members answer q.
        adjacency: "zero_out": member 0 is emptied; "replace_one": its clips are exchanged.
    """

    mechanism: ClippedLogPool
    adjacency: str

    @property
    def span(self) -> float:
        """The range η of one answer, by its theorem."""
        width = self.mechanism.scale * (self.mechanism.upper - self.mechanism.lower) / MODELS
        return 2 * width if self.adjacency == "replace_one" else width

    def upward(self) -> Array:
        """Return the probability under Q that log P/Q rises by k η/16, for k = 1, ..., 15."""
        rise = self.span * np.arange(1, CELLS) / CELLS
        up: Array = -np.expm1(rise - self.span) / (np.exp(rise) - np.exp(rise - self.span))
        return up

    def ticket(self, member: float) -> Ticket:
        """Return the mechanism's ticket for all 15 questions.

        Args:
            member: the sign of member 0's log-ratio of token 0; 0 if it answers q.
        """
        up = self.upward()
        # q is such that the world Q, with the replacing member, answers as `upward` says.
        shift = self.span / 2 if self.adjacency == "replace_one" else 0.0
        odds = np.log(up / (1 - up)) + shift
        public = torch.from_numpy(np.stack([odds, 0 * odds], axis=1)).float()
        private = public.repeat(MODELS, 1, 1)
        private[0] += member * torch.tensor([FAR, -FAR])
        return self.mechanism.propose(private, public, rng=SeededRandom(0))

    def answers(self, member: float) -> Array:
        """Return the mechanism's probability of token 0, for each of the 15 questions."""
        probabilities = uncharged(self.ticket(member))._distribution.probabilities()
        return np.array(probabilities[:, 0].tolist())

    def reached(self, queries: int, epsilon: float) -> float:
        """Return δ at ε after so many answers, of the states that the adversary tells apart."""
        moves = best_moves(self.upward(), self.span, queries, epsilon)
        other = -1.0 if self.adjacency == "replace_one" else 0.0
        p, q = (transcript(self.answers(member), moves) for member in (1.0, other))
        return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def best_moves(up: Array, span: float, queries: int, epsilon: float) -> list[NDArray[np.int64]]:
    """Return the best question for every state, after 0, 1, ... answers.

    A state is log P/Q in units of η/16, from -16 t to 16 t after t answers.
    """
    place = np.arange(-queries * CELLS, queries * CELLS + 1) * (span / CELLS)
    value = np.maximum(np.exp(place) - math.exp(epsilon), 0.0)
    moves = []
    for _ in range(queries):
        count = len(value) - 2 * CELLS
        chords = [
            odd * value[CELLS + k : CELLS + k + count] + (1 - odd) * value[k : k + count]
            for k, odd in enumerate(up, 1)
        ]
        moves.append(1 + np.argmax(chords, axis=0))
        value = np.max(chords, axis=0)
    return moves[::-1]


def transcript(answers: Array, moves: list[NDArray[np.int64]]) -> Array:
    """Return the probability of every last state, if the questions follow `moves`."""
    mass = np.ones(1)
    for move in moves:
        odds = answers[move - 1]
        after = np.zeros(len(mass) + 2 * CELLS)
        start = np.arange(len(mass)) + move
        np.add.at(after, start + CELLS, mass * odds)
        np.add.at(after, start, mass * (1 - odds))
        mass = after
    return mass


def admitted(game: Duel) -> int:
    """Return how many answers the accountant of a budget charges before member 0 is retired."""
    accountant, count = Accountant(DELTA, epsilon=BUDGET, adjacency=game.adjacency), 0
    while True:
        ticket = game.ticket(1.0)
        accountant.charge(ticket)
        active = ticket._active
        whole = CELLS - 1 if active is None else int(active[0].sum())
        count += whole
        if whole < CELLS - 1:
            return count


def stated(game: Duel, queries: int) -> float:
    """Return the ε that an accountant states for so many planned answers."""
    planned = replace(game, mechanism=replace(game.mechanism, queries=queries))
    return stated_epsilon(planned.ticket(1.0), DELTA, game.adjacency)


def finding(
    game: Duel, what: str, queries: int, epsilon: float, delta: float = DELTA, control: bool = False
) -> Finding:
    """Play the adversary for so many answers against (ε, δ)."""
    name = f"clipped-log-pool, {what}, N = {MODELS}, {game.adjacency}"
    measured, claim = game.reached(queries, epsilon), f"δ at ε = {epsilon:.4g}"
    return Finding("adversary", name, claim, delta * (1 + SLACK), measured, 1.0, control)


def audit(effort: Effort) -> Iterator[Finding]:
    """Play the worst adversary against plans and budgets; the effort changes nothing."""
    counts = {}
    for adjacency in ("zero_out", "replace_one"):
        game, narrow = Duel(POOL, adjacency), Duel(NARROW, adjacency)
        for queries in (16, 64, 256):
            yield finding(game, f"plan of {queries}", queries, stated(game, queries))
        yield finding(narrow, "plan of 1024", 1024, stated(narrow, 1024))
        counts[adjacency] = count = admitted(narrow)
        yield finding(narrow, f"budget, {count} answers", count, BUDGET)
    game = Duel(POOL, "zero_out")
    # Without its reserve the theorem is wrong by little, and for a large δ only.
    for queries, delta in ((16, 1e-3), (64, 1e-2)):
        epsilon = gdp_to_dp(game.span / 2 * math.sqrt(queries), delta)
        yield finding(game, f"{queries} answers, no reserve", queries, epsilon, delta, True)
    plan = stated(game, 64)
    yield finding(game, "plan of 64, 70 answered", 70, plan, control=True)
    for adjacency, count in counts.items():
        narrow, more = Duel(NARROW, adjacency), count * 11 // 10
        yield finding(narrow, "budget, a tenth more answers", more, BUDGET, control=True)
    doubled = replace(game, mechanism=replace(POOL, scale=2 * POOL.scale))
    yield finding(doubled, "plan of 64, scale doubled", 64, plan, control=True)
