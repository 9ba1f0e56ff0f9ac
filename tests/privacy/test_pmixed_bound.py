"""PMixED's bound and radius against 60-digit arithmetic; each errs on its safe side."""

import itertools
import math

import mpmath
from just_above import assert_just_above, exactly

from adapmixed.privacy.costs.pmixed import radius_for_epsilon, sound_bound


def exact_sound_bound(order, radius, num_models, rate):
    def formula():
        a, r = mpmath.mpf(order), mpmath.mpf(radius)
        share = mpmath.mpf(rate) / num_models
        return mpmath.log1p(share * mpmath.expm1((a - 1) * r)) / (a - 1)

    return exactly(formula)


GRID = list(
    itertools.product(
        [1 + 1e-6, 1.5, 3.0, 18.0, 1000.0],
        [1e-12, 1e-3, 0.03, 3.6, 50.0, 1e4],
        [1, 2, 80],
        [1, 0.1],
    )
)


def test_sound_bound_is_just_above_the_exact_value():
    for point in GRID:
        bound = sound_bound(*point)
        assert bound <= point[1], point
        assert_just_above(bound, exact_sound_bound(*point))


def test_radius_is_admissible_and_largest():
    for order, epsilon, num_models, rate in GRID:
        if rate == 1:
            at = (order, epsilon, num_models)
            radius = radius_for_epsilon(*at)
            assert sound_bound(order, radius, num_models) <= epsilon, at
            assert exact_sound_bound(order, radius, num_models, 1) <= epsilon, at
            assert exact_sound_bound(order, radius * (1 + 1e-10), num_models, 1) > epsilon, at
            assert radius >= epsilon, at


def test_radius_at_the_ends():
    assert sound_bound(3, math.inf, 80) == math.inf
    assert radius_for_epsilon(3, 0.0, 80) == 0.0
    assert radius_for_epsilon(3, math.inf, 80) == math.inf
    assert sound_bound(3, 0.0, 80) == sound_bound(3, 5.0, 80, rate=0.0) == 0.0
    assert sound_bound(18, 0.3, 1) == 0.3
    assert radius_for_epsilon(18, 1e-320, 80) >= 0.0
    assert math.isfinite(radius_for_epsilon(18, 1e307, 80))
