"""Ensembles inside a box, for tests that attack the dominating pairs."""

import numpy as np

BOXES = [
    (np.exp(-0.25), np.exp(0.25)),
    (np.exp(-1.0), np.exp(1.0)),
    (np.exp(-0.25), np.exp(2.0)),
    (0.5, 20.0),
    (0.1, 1.05),  # C + c < 2
    (0.5, 1.2),
    (0.0, 3.0),
    (0.0, 1.5),
    (1.0, 2.0),
    (0.5, 1.0),
]


def clip(p, q, lower, upper):
    """Return clip(s p, lower q, upper q) with s such that the sum is 1, by bisection on log s."""
    low, high = np.full(p.shape[:-1] + (1,), -80.0), np.full(p.shape[:-1] + (1,), 80.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = np.clip(np.exp(middle) * p, lower * q, upper * q).sum(-1, keepdims=True) > 1
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    # Bisection ends within 1e-22 of log s, so sums differ from 1 by rounding only.
    return np.clip(np.exp(low) * p, lower * q, upper * q)


def random_distributions(generator, vocabulary, num_models, lower, upper):
    """Return (q, p̄_1..p̄_N, another p̄_1), half of the time near corners of the box."""
    q = generator.dirichlet(np.full(vocabulary, generator.choice([0.3, 1.0, 5.0]))) + 1e-12
    q /= q.sum()
    shape = (num_models + 1, vocabulary)
    if generator.random() < 0.5:
        raised = generator.random(shape) < (1 - lower) / max(upper - lower, 1e-9)
        p = q * np.where(raised, 1e6, 1e-6) * np.exp(generator.normal(0, 0.1, shape))
    else:
        p = generator.dirichlet(np.full(vocabulary, 0.5), num_models + 1) + 1e-12
    clipped = clip(p, q, lower, upper)
    return q, clipped[:-1], clipped[-1]


def neighbours(q, clipped, other, adjacency):
    """Return (P, Q) of one answer, where member 0 answers q or another distribution in Q."""
    num_models = len(clipped)
    p = clipped.mean(axis=0)
    rest = clipped[1:].sum(axis=0)
    return p, (rest + (q if adjacency == "zero_out" else other)) / num_models


def hockey_stick(p, q, ratios):
    """Return Σ (p - γ q)_+ for every γ."""
    return np.maximum(0.0, p - np.multiply.outer(ratios, q)).sum(-1)
