"""The verdict: the share of the gain that is kept, its band, and what is said without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from report_cases import build, evaluation

from adapmixed.evaluation import Evaluation, Runs
from adapmixed.evaluation.result import BLOCK, gain_kept
from adapmixed.report import report_text
from adapmixed.report.runs import runs_entry

PUBLIC = np.log(60.0)


def lossy(name: str, kind: str, losses: Sequence[float], **given: Any) -> Evaluation:
    """Return a method with these mean losses of successive blocks of `BLOCK` tokens."""
    means = np.cumsum(losses) / np.arange(1, len(losses) + 1)
    found = evaluation(name, kind, perplexity=math.exp(means[-1]), **given)
    points = tuple((BLOCK * (i + 1), math.exp(mean)) for i, mean in enumerate(means))
    guarantee = replace(found.guarantee, budget=20_000 if kind == "fixed" else None)
    return replace(found, perplexities=points, queries=points[-1][0], guarantee=guarantee)


def compared(gain: Sequence[float], kept: Sequence[float], name: str = "pool") -> list[Evaluation]:
    """Return the public model, the ensemble that gains this much, and a private method."""
    return [
        lossy("public", "public", [PUBLIC] * len(gain), epsilon=0.0),
        lossy("unprotected", "none", [PUBLIC - one for one in gain]),
        lossy(name, "fixed", [PUBLIC - one for one in kept], epsilon=3.0),
    ]


def last_line(evaluations: list[Evaluation]) -> str:
    return report_text(build(evaluations)).splitlines()[-1]


def test_the_share_and_its_band_are_those_of_the_definition() -> None:
    random = np.random.default_rng(1)
    gain = 0.3 + 0.1 * random.standard_normal(20)
    kept = 0.4 * gain + 0.05 * random.standard_normal(20)
    public, unprotected, pool = compared(gain.tolist(), kept.tolist())
    found = gain_kept([pool], [public], [unprotected])
    assert found is not None
    share = math.log(public.perplexity / pool.perplexity)
    share /= math.log(public.perplexity / unprotected.perplexity)
    assert found[0] == pytest.approx(share) == pytest.approx(kept.sum() / gain.sum())
    left = [np.delete(kept, i).sum() / np.delete(gain, i).sum() for i in range(20)]
    error = math.sqrt(19 / 20 * sum((one - np.mean(left)) ** 2 for one in left))
    assert found[1] == pytest.approx(error) and 0.01 < error < 0.1
    # Blocks of two runs count as those of one.
    halves = [
        [lossy("m", "none", losses[:10]), lossy("m", "none", losses[10:])]
        for losses in (PUBLIC - kept, [PUBLIC] * 20, PUBLIC - gain)
    ]
    assert gain_kept(*halves) == pytest.approx(found)


def test_bands_hold_the_share_of_other_text_as_often_as_two_errors_should() -> None:
    random, inside = np.random.default_rng(2), 0
    for _ in range(200):
        gain = 0.3 + 0.2 * random.standard_normal(30)
        kept = 0.4 * gain + 0.1 * random.standard_normal(30)
        public, unprotected, pool = compared(gain.tolist(), kept.tolist())
        share, error = gain_kept([pool], [public], [unprotected]) or (math.inf, 0.0)
        inside += abs(share - 0.4) <= 2 * error
    assert 178 <= inside <= 198  # of 190 or so


def test_the_verdict_names_the_tokens_of_epsilon_and_not_those_scored() -> None:
    random = np.random.default_rng(3)
    gain = (0.3 + 0.05 * random.standard_normal(16)).tolist()
    evaluations = compared(gain, [0.3 * one + 0.01 for one in gain])
    found = gain_kept([evaluations[2]], [evaluations[0]], [evaluations[1]])
    assert found is not None
    band = math.ceil(200 * found[1])
    assert last_line(evaluations) == (
        f"pool keeps {100 * found[0]:.0f} % ± {band} of what the unprotected ensemble gains, at "
        "ε = 3 for 20,000 tokens."
    )
    table = report_text(build(evaluations)).split("\n\n")[1].splitlines()
    assert all(len(line.split("  ")) >= 7 for line in table[:1]) and len(table[1].split()) == 7
    assert "20,000 tokens" in table[-1] and "1,024" not in table[-1]
    budgeted = replace(evaluations[2].guarantee, method="per-shard budget", budget=None)
    spent = replace(evaluations[2], guarantee=budgeted)
    assert last_line([*evaluations[:2], spent]).endswith("at ε = 3 for any number of tokens.")
    entries = runs_entry([Runs(one.name, (one, one)) for one in evaluations])
    both = report_text(build(evaluations) | {"runs": entries}).splitlines()
    assert both[-1].endswith("at ε = 3 for 20,000 tokens.")


def test_the_best_reference_is_named_and_a_loss_is_no_gain() -> None:
    gain = [0.2] * 16
    evaluations = compared(gain, [-0.02] * 16)
    better = lossy("pool, κ = 2", "none", [PUBLIC - 0.4] * 16)
    unsure = lossy("pool, κ = 4", "none", [PUBLIC - 1.5, PUBLIC + 0.6] * 8)  # 0.45, or nothing
    ada = lossy("ada", "data-dependent, ex-post", [PUBLIC - 0.1] * 16, epsilon=4.0)
    lines = report_text(build([*evaluations, unsure, better, ada])).splitlines()
    assert lines[-2:] == [
        "pool keeps nothing (-5 % ± 1) of what 'pool, κ = 2' gains, at ε = 3 for 20,000 tokens.",
        "ada keeps 25 % ± 1 of what 'pool, κ = 2' gains, at ε = 4 (a private number) for 1,024 "
        "tokens.",
    ]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ([0.3] * 7, "that takes 512 scored tokens."),
        (
            [-0.1] * 16,
            "on this text the unprotected ensemble gains nothing over the public model (perplexity "
            "+10.5% [+10.5, +10.5]).",
        ),
        (
            [0.5, -0.45] * 8,
            "on this text the gain of the unprotected ensemble cannot be told from zero (perplexity"
            " -2.5% ",
        ),
    ],
)
def test_without_a_gain_there_is_no_share(gain: list[float], words: str) -> None:
    evaluations = compared(gain, [0.01] * len(gain))
    assert last_line(evaluations).startswith(f"No share of the gain is stated: {words}")
    kept = [method["kept"] for method in build(evaluations)["methods"]]
    assert kept == [None, *[{"of": "unprotected", "share": None, "error": None}] * 2]
    for left_out in range(3):  # no reference, or no ε
        assert "gain is" not in last_line(evaluations[:left_out] + evaluations[left_out + 1 :])
