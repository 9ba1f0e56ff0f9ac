"""Check that values are rounded up from exact ones with 60 digits."""

import mpmath


def exactly(function):
    """Evaluate `function` of mpmath numbers with 60 digits."""
    with mpmath.workdps(60):
        return mpmath.mpf(function())


def assert_just_above(value, exact, tolerance=1e-11):
    """Assert that `value` is at least the exact one, and exceeds it by rounding alone."""
    with mpmath.workdps(60):
        assert value >= exact
        assert value - exact <= tolerance * abs(exact) + mpmath.mpf(10) ** -300
