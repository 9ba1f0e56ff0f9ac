"""The recommended plan keeps its ε, is the rule's, and composes over periods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapmixed.privacy.planner import epsilon_of
from adapmixed.privacy.recommendation import (
    SHARDS,
    kept_share,
    nearest,
    recommended,
    rounded_inward,
)  # fmt: skip

DELTA, MODELS, TOKENS = 1e-5, 64, 500


@pytest.mark.parametrize("mechanism", ["clipped-mixing", "clipped-log-pool"])
def test_it_is_the_widest_of_the_rule_within_epsilon(mechanism: str) -> None:
    one = recommended(1.0, DELTA, MODELS, TOKENS, mechanism=mechanism)
    settings: dict[str, Any] = dict(one.settings)
    assert one.mechanism == mechanism and one.queries == TOKENS
    assert one.epsilon == epsilon_of(DELTA, MODELS, TOKENS, "zero_out", **settings)
    assert 0.99 < one.epsilon <= 1.0
    for name, value in settings.items():  # in four digits, as they are printed and saved
        assert float(f"{value:.4g}") == value, name
    wider = settings | {"upper": settings["upper"] * 1.01, "lower": settings["lower"] * 0.999}
    assert epsilon_of(DELTA, MODELS, TOKENS, "zero_out", **wider) > 1.0


def test_a_budget_for_nothing_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="epsilon must pay for 500 .* got 1e-13: give a larger"):
        recommended(1e-13, 1e-15, 1, 500, mechanism="clipped-mixing")
    with pytest.raises(ValueError, match="periods must be an integer >= 1"):
        recommended(1.0, DELTA, MODELS, TOKENS, periods=0)


def test_settings_are_rounded_inward() -> None:
    given = {"lower": 0.77791, "upper": 1.60699, "scale": 1.99999}
    assert rounded_inward(given) == {"lower": 0.778, "upper": 1.606, "scale": 1.999}
    assert rounded_inward({"lower": -0.250999}) == {"lower": -0.2509}
    near = {"lower": 0.99871234, "upper": 1.00123456}
    assert rounded_inward(near) == {"lower": 0.998713, "upper": 1.001234}


def test_other_numbers_of_shards_take_the_nearest_measured_one() -> None:
    found = [nearest(models) for models in (1, 64, 173, 174, 547, 548, 65_536)]
    assert found == [100, 100, 100, 300, 300, 1_000, 1_000]
    one = recommended(3.0, DELTA, MODELS, 20_000)
    assert kept_share(one) == kept_share(replace(one, num_models=SHARDS[0]))
    assert kept_share(replace(one, num_models=1_000)) < kept_share(one)
