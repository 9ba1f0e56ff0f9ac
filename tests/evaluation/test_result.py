"""Comparisons of results: intervals of paired differences, and the share of a gain that is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from report_cases import PUBLIC, compared_methods, evaluation, lossy

from adapmixed.evaluation import Evaluation
from adapmixed.evaluation.result import gain_kept, paired_difference


def blocks_of(losses: list[float]) -> Evaluation:
    """Return an evaluation whose blocks of 64 queries have these mean losses."""
    so_far = [math.exp(sum(losses[:k]) / k) for k in range(1, len(losses) + 1)]
    points = tuple((64 * (k + 1), value) for k, value in enumerate(so_far))
    one = evaluation("m", "fixed", epsilon=1.0, perplexity=so_far[-1])
    return replace(one, queries=64 * len(losses), perplexities=points)


def test_paired_differences_have_the_interval_of_a_block_bootstrap() -> None:
    """The text's own spread, which both share, leaves the interval."""
    text = np.random.default_rng(1).normal(4.0, 1.0, 40)
    gaps = np.random.default_rng(2).normal(-0.1, 0.02, 40)
    public, method = blocks_of(list(text)), blocks_of(list(text + gaps))
    found = paired_difference(method, public)
    assert found is not None and found["blocks"] == 40
    low, mean, high = (float(found[name] or 0.0) for name in ("low", "mean", "high"))
    assert mean == pytest.approx(float(gaps.mean()), abs=1e-9)
    error = float(gaps.std()) / math.sqrt(40)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert paired_difference(method, public) == found  # seeded
    # Runs count by their blocks; few blocks, or an infinite loss, have no interval.
    parts = (slice(20), slice(20, 40))
    whole, other = (
        replace(one, further=(two,))
        for one, two in (
            [blocks_of(list(losses[s])) for s in parts] for losses in (text + gaps, text)
        )
    )
    both = paired_difference(whole, other)
    assert both is not None and both["mean"] == pytest.approx(mean, abs=1e-9)
    few = paired_difference(blocks_of([4.0] * 7), blocks_of([4.5] * 7))
    assert few == {"mean": pytest.approx(-0.5), "low": None, "high": None, "blocks": 7}
    assert paired_difference(blocks_of([math.inf]), blocks_of([4.0])) is None
    # A long text has no more than 64 blocks.
    many = paired_difference(blocks_of([4.0] * 500), blocks_of([4.5] * 500))
    assert many is not None and many["blocks"] == 64


def test_the_share_and_its_band_are_those_of_the_definition() -> None:
    random = np.random.default_rng(1)
    gain = 0.3 + 0.1 * random.standard_normal(20)
    kept = 0.4 * gain + 0.05 * random.standard_normal(20)
    public, unprotected, pool = compared_methods(gain.tolist(), kept.tolist())
    found = gain_kept(pool, public, unprotected)
    assert found is not None
    share = math.log(public.perplexity / pool.perplexity)
    share /= math.log(public.perplexity / unprotected.perplexity)
    assert found[0] == pytest.approx(share) == pytest.approx(kept.sum() / gain.sum())
    left = [np.delete(kept, i).sum() / np.delete(gain, i).sum() for i in range(20)]
    error = math.sqrt(19 / 20 * sum((one - np.mean(left)) ** 2 for one in left))
    assert found[1] == pytest.approx(error) and 0.01 < error < 0.1
    # Blocks of two runs count as those of one.
    halves = [
        replace(lossy("m", "none", losses[:10]), further=(lossy("m", "none", losses[10:]),))
        for losses in (PUBLIC - kept, [PUBLIC] * 20, PUBLIC - gain)
    ]
    assert gain_kept(*halves) == pytest.approx(found)


def test_bands_hold_the_share_of_other_text_as_often_as_two_errors_should() -> None:
    random, inside = np.random.default_rng(2), 0
    for _ in range(200):
        gain = 0.3 + 0.2 * random.standard_normal(30)
        kept = 0.4 * gain + 0.1 * random.standard_normal(30)
        public, unprotected, pool = compared_methods(gain.tolist(), kept.tolist())
        share, error = gain_kept(pool, public, unprotected) or (math.inf, 0.0)
        inside += abs(share - 0.4) <= 2 * error
    assert 178 <= inside <= 198  # of 190 or so
