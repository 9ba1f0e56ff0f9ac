"""The exact ε of a Gaussian mechanism, for tests."""

import math


def gaussian_epsilon(shift, delta):
    """The smallest ε >= 0 at which N(shift, 1) against N(0, 1) exceeds e^ε by at most delta."""

    def normal(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    def beyond(epsilon):
        tail = normal(-shift / 2 - epsilon / shift)
        return normal(shift / 2 - epsilon / shift) - (math.exp(epsilon) * tail if tail else 0.0)

    low, high = 0.0, 1.0
    if beyond(low) <= delta:
        return 0.0
    while beyond(high) > delta:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > delta else (low, middle)
    return low
