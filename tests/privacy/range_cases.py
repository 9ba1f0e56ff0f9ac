"""Adversaries of bounded range on a grid, and the theorem of docs/theory/bounded-range.md."""

import math

import mpmath
import numpy as np


def upward(x, span):
    """Return the probability under Q of a step up to e^x; it goes down to e^(x - span) else."""
    return -math.expm1(x - span) / (math.exp(x) - math.exp(x - span))


def grid_price(span, queries, cells):
    """Return log m and the best price that an adversary with steps x on a grid can reach.

    It is a lower bound of the optimum, without any error of interpolation.
    """
    reach = cells * queries
    position = np.arange(-reach, reach + 1)
    price = np.maximum(np.expm1(position * span / cells), 0.0)
    odds = [upward(span * k / cells, span) for k in range(1, cells)]
    for _ in range(queries):
        wide = np.concatenate([np.zeros(cells), price])
        top = price[-1] + np.exp(reach * span / cells) * np.expm1(
            np.arange(1, cells + 1) * span / cells
        )
        wide = np.concatenate([wide, top])
        best = price
        for k, odd in enumerate(odds, 1):
            up = wide[cells + k : cells + k + len(price)]
            best = np.maximum(best, odd * up + (1 - odd) * wide[k : k + len(price)])
        price = best
    return position * span / cells, price


def grid_delta(span, queries, epsilon, cells=32):
    """Return a lower bound of the optimum's δ at the next grid point above ε."""
    position, price = grid_price(span, queries, cells)
    at = int(np.searchsorted(-position[::-1], epsilon))
    at = len(position) - 1 - at
    return price[at] / math.exp(position[at])


def exact_delta(mu, epsilon):
    """Return δ(ε) of μ-Gaussian DP, with 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first = mpmath.ncdf(mu / 2 - epsilon / mu)
        return first - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def theorem_epsilon(rho, largest, delta):
    """Return ε for Σ η²/8 <= rho and every η²/8 <= largest, to 1e-12 of itself."""
    with mpmath.workdps(60):
        s, h = 2 * mpmath.mpf(rho), 2 * mpmath.mpf(largest)
        mu = mpmath.sqrt(s + h * (mpmath.mpf(5) / 2 + mpmath.log(1 + s / h)))
        low, high = mpmath.mpf(0), mpmath.mpf(1)
        while exact_delta(mu, high) > delta:
            low, high = high, 2 * high
        while high - low > high * mpmath.mpf(10) ** -12:
            middle = (low + high) / 2
            low, high = (middle, high) if exact_delta(mu, middle) > delta else (low, middle)
        return float(high)
