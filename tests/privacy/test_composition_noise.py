"""The FFT's noise in composed loss distributions is far below the amount that δ is lowered by."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from adapmixed.limits import QUESTIONS
from adapmixed.privacy.composition import _interval, _power, _split, composed_epsilon
from adapmixed.privacy.costs.clipped_mixing import clipped_mixing_pair


def tilted_delta(pair, queries, epsilon, points):
    """Return δ of the composed pair on the same grid, by FFT of tilted distributions.

    The exponential tilt moves the bulk to ε, so rounding is relative to δ, not to 1.
    """
    interval = _interval(pair, queries, points)
    masses = _split(pair, interval)[0]
    index = np.array(sorted(masses))
    mass, loss = np.array([masses[k] for k in index]), index * interval
    low, high = 0.0, 500.0
    for _ in range(200):
        tilt = (low + high) / 2
        distribution = mass * np.exp(tilt * loss)
        below = queries * (distribution @ loss) / distribution.sum() < epsilon
        low, high = (tilt, high) if below else (low, tilt)
    size = 2 * points
    array = np.zeros(size)
    array[index - index[0]] = distribution / distribution.sum()
    composed = np.fft.irfft(np.fft.rfft(array) ** queries, size)
    sums = np.arange(-points, points) + round(epsilon / interval)
    losses = sums * interval
    weight = composed[(sums - queries * int(index[0])) % size]
    weight = weight * np.exp(queries * math.log(distribution.sum()) - tilt * losses)
    return float(np.sum(np.where(losses > epsilon, -np.expm1(epsilon - losses) * weight, 0.0)))


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("adjacency", QUESTIONS)
def test_fft_noise_is_far_below_what_is_allowed_for_it(adjacency, delta):
    pair, queries, points = clipped_mixing_pair(0.8, 1.3, 100, adjacency), 99_840, 2**16
    epsilon = composed_epsilon(pair, queries, delta, points=points)
    found = max(tilted_delta(one, queries, epsilon, points) for one in (pair, pair.exchanged()))
    assert found <= delta
    # T 2^-50, as in docs/theory/clipped-mixing.md; at δ = 1e-9 that is 9 % of it.
    assert found == pytest.approx(delta - queries * 2.0**-50, rel=1e-3)


@pytest.mark.parametrize(
    "queries, up, down",
    [(100, 100, 70), (9728, 3, 2), pytest.param(99_840, 20, 19, marks=pytest.mark.slow)],
)
def test_fft_noise_of_a_composition_that_is_known(queries, up, down):
    """With two losses on the grid, the masses are binomial, computed with 40 digits.

    δ(ε) weighs its tail by 1 - e^(ε-l), which rises with l. So its noise is at most that of the
    tail sum at its largest.
    """
    interval, chance = 2.0**-20, 0.4999
    other = 1 - chance
    single = privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
        {up: chance, -down: other},
        0.0,
        interval,
        pessimistic_estimate=True,
        rounded_probability_mass_function_add={
            -up: chance * math.exp(-up * interval),
            down: other * math.exp(down * interval),
        },
        infinity_mass_add=0.0,
        symmetric=False,
    )
    dense = _power(single, queries, 1e-19)._pmf_remove.to_dense_pmf()
    first, noise = int(dense._lower_loss), np.array(dense._probs, dtype=np.float64)
    with mpmath.workdps(40):
        mass = mpmath.mpf(other) ** queries
        for raised in range(queries + 1):
            place = raised * up - (queries - raised) * down - first
            if 0 <= place < len(noise):
                noise[place] -= float(mass)
            mass *= mpmath.mpf(chance) * (queries - raised) / (mpmath.mpf(other) * (raised + 1))
    largest = np.abs(np.cumsum(noise[::-1])).max()
    assert 0 < largest < queries * 2.0**-50 / 8
