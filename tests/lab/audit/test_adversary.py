"""The worst adaptive adversary: its δ is exact, near what is stated, and sees what is wrong."""

import itertools
import math

import numpy as np
import pytest

from adapmixed.privacy.composition import adaptive_epsilon
from adapmixed_lab.audit import adversary
from adapmixed_lab.audit.adversary import MODELS, POOL, Duel


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_the_mechanism_answers_as_the_adversary_expects(adjacency: str) -> None:
    game = Duel(POOL, adjacency)
    other = -1.0 if adjacency == "replace_one" else 0.0
    p, q = game.answers(1.0), game.answers(other)
    assert q == pytest.approx(game.upward(), rel=1e-6)
    ranges = np.log(p / q) - np.log((1 - p) / (1 - q))
    assert ranges == pytest.approx(np.full(15, game.span), rel=1e-6)
    assert np.log(p / q) == pytest.approx(game.span * np.arange(1, 16) / 16, rel=1e-5)
    charges = game.ticket(1.0)._charges[0]
    assert charges == pytest.approx(np.full(15, POOL.largest_charge(MODELS)), rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.25])
def test_three_answers_by_enumeration(epsilon: float) -> None:
    """Every transcript is enumerated; no other questions reach more."""
    game = Duel(POOL, "zero_out")
    p, q = game.answers(1.0), game.answers(0.0)
    moves = adversary.best_moves(game.upward(), game.span, 3, epsilon)
    total = 0.0
    for history in itertools.product((True, False), repeat=3):
        place, mass = 0, [1.0, 1.0]
        for t, up in enumerate(history):
            k = int(moves[t][place + 16 * t])
            place += k if up else k - 16
            for side, answers in enumerate((p, q)):
                mass[side] *= answers[k - 1] if up else 1 - answers[k - 1]
        total += max(0.0, mass[0] - math.exp(epsilon) * mass[1])
    assert game.reached(3, epsilon) == pytest.approx(total, rel=1e-6)
    for k in range(1, 16):  # the same question at every state
        fixed = [np.full(len(move), k) for move in moves]
        ends = [adversary.transcript(answers, fixed) for answers in (p, q)]
        assert np.maximum(ends[0] - math.exp(epsilon) * ends[1], 0).sum() <= total * (1 + 1e-6)


@pytest.mark.parametrize(("queries", "delta"), [(16, 1e-3), (64, 1e-2)])
def test_the_theorem_covers_the_worst_adversary(queries: int, delta: float) -> None:
    game = Duel(POOL, "zero_out")
    rho = game.span**2 / 8
    epsilon = adaptive_epsilon(queries * rho, rho, delta)
    assert game.reached(queries, epsilon) <= delta
