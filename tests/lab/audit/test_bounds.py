"""The weight of a member in a hidden random subset, against 60-digit arithmetic."""

import mpmath
import pytest
from just_above import assert_just_above, exactly

from adapmixed_lab.audit.bounds import amplification_rate


def test_amplification_rate():
    assert amplification_rate(0.03, 100, "slots") == 0.03
    exact = exactly(lambda: 1 - (1 - mpmath.mpf(0.03)) ** 100)
    assert_just_above(amplification_rate(0.03, 100, "subset"), exact)
    assert amplification_rate(0.03, 1, "subset") == pytest.approx(0.03, rel=1e-14)
    assert amplification_rate(0.0, 9, "subset") == 0.0
    assert amplification_rate(1.0, 9, "subset") == 1.0
    assert amplification_rate(1 - 1e-12, 9, "subset") <= 1.0
