"""The published data-independent bound fails; the sound one holds and is attained in the limit.

Two-token ensembles are evaluated with 80 digits. The audit `bounds` searches for others.
"""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp
from just_above import exactly

from adapmixed.privacy.conversions import rdp_to_dp
from adapmixed.privacy.costs import sound_bound
from adapmixed_lab.reproduce.published import (
    published_bound,
    published_target_leakage,
    subsampled_rdp,
)


def divergence(p, q, order):
    """Return D_order(p ‖ q) of positive probability vectors, in the arithmetic of the arguments."""
    log = mpmath.log if isinstance(p[0], mpmath.mpf) else math.log
    return log(sum(a**order * b ** (1 - order) for a, b in zip(p, q, strict=True))) / (order - 1)


def both(p, q, order):
    return max(divergence(p, q, order), divergence(q, p, order))


def pair(rare):
    return (1 - rare, rare)


def edge(public, toward, order, radius):
    """Return the last rare mass with D↔ <= radius on the way from `public` to `toward`."""
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(250):
        middle = (low + high) / 2
        moved = public + middle * (toward - public)
        if both(pair(moved), pair(public), order) <= radius:
            low = middle
        else:
            high = middle
    return public + low * (toward - public)


def extreme_ensemble(rare, order, beta):
    """Return the rare mass of q, and of members raised and lowered to the edge of their ball."""
    rare, radius = mpmath.mpf(rare), mpmath.mpf(beta) * order
    raised = edge(rare, mpmath.mpf(1), order, radius)
    lowered = edge(rare, rare * mpmath.mpf(10) ** -60, order, radius)
    return rare, raised, lowered


def add_remove_losses(rare, order, beta, num_models):
    """Return (D(p ‖ p_{-1}), D(p_{-1} ‖ p)) with member 1 raised and all others lowered."""
    _, raised, lowered = extreme_ensemble(rare, order, beta)
    mixture = ((num_models - 1) * lowered + raised) / num_models
    forward = divergence(pair(mixture), pair(lowered), order)
    return forward, divergence(pair(lowered), pair(mixture), order)


def zero_out_loss(rare, order, beta, num_models):
    rare, raised, lowered = extreme_ensemble(rare, order, beta)
    mixture = ((num_models - 1) * lowered + raised) / num_models
    emptied = ((num_models - 1) * lowered + rare) / num_models
    return both(pair(mixture), pair(emptied), order)


def test_counterexample_to_the_published_bound():
    with mpmath.workdps(80):
        forward, backward = add_remove_losses("1e-8", 3, "0.01", 80)
        claimed = published_bound(3, 0.01, 80)
        assert claimed == pytest.approx(0.0016924, abs=5e-8)
        assert float(forward) == pytest.approx(0.27903, abs=5e-6)
        _, raised, lowered = extreme_ensemble("1e-8", 3, "0.01")
        assert float(raised) == pytest.approx(1.8355e-6, abs=5e-11)
        assert float(lowered) == pytest.approx(4.0214e-12, abs=5e-17)
        assert float(divergence(pair(raised), pair(lowered), 3)) == pytest.approx(6.4271, abs=5e-5)
        # The other direction is safe, by a bound that does not depend on the ball.
        assert backward <= mpmath.log(mpmath.mpf(80) / 79)
        # The sound bound speaks of zero-out, and holds on the same ensemble.
        lost = float(zero_out_loss("1e-8", 3, "0.01", 80))
        assert 0 < lost <= sound_bound(3, 0.03, 80)
        assert lost == pytest.approx(0.00036310, abs=5e-9)
        assert sound_bound(3, 0.03, 80) == pytest.approx(0.00038633, abs=5e-9)


def test_violation_grows_without_limit():
    with mpmath.workdps(80):
        losses = [add_remove_losses(f"1e-{k}", 3, "0.01", 80)[0] for k in (4, 8, 12, 16, 20, 24)]
        backward = add_remove_losses("1e-24", 3, "0.01", 80)[1]
    # The table of docs/theory/errata.md.
    stated = ("8.15e-05", "0.27903", "4.459", "9.064", "18.27")
    for loss, number in zip([*losses[:4], losses[5]], stated, strict=True):
        digits = len(number.split("e")[0].lstrip("0.").replace(".", ""))
        assert f"{float(loss):.{digits}g}" == number
    steps = np.diff([float(loss) for loss in losses])
    assert (steps > 0).all()
    # Asymptotically log(1/mass)/(order - 1): each step of four decades adds log(10^4)/2.
    assert steps[-1] == pytest.approx(math.log(1e4) / 2, rel=0.05)
    assert backward <= math.log(80 / 79)


def test_supremum_of_the_sound_bound_is_approached():
    bound = sound_bound(3, 0.03, 80)
    with mpmath.workdps(120):
        exact = [zero_out_loss(f"1e-{k}", 3, "0.01", 80) / bound for k in (2, 6, 12, 30)]
        short = float(1 - exact[3])
    ratios = [float(ratio) for ratio in exact]
    assert ratios == sorted(ratios)
    assert all(ratio <= 1 for ratio in ratios)
    assert ratios[-1] > 1 - 1e-6
    assert [f"{ratios[0]:.3g}", f"{ratios[1]:.3g}", f"{ratios[2]:.5g}"] == [
        "0.0256", "0.589", "0.99937",
    ]  # fmt: skip
    assert f"{short:.0g}" == "6e-13"
    assert ratios[0] < 0.95


def test_amplifying_at_the_rate_while_dividing_by_the_subset_is_unsound():
    rate, order, num_models = 0.06, 3, 100
    with mpmath.workdps(60):
        rare, raised, lowered = extreme_ensemble("1e-24", order, "0.05")
        g = 1 - (1 - mpmath.mpf("0.06")) ** num_models
        others = (num_models - 1) * lowered
        distribution = (1 - g) * rare + g * (others + raised) / num_models
        emptied = (1 - g) * rare + g * (others + rare) / num_models
        loss = both(pair(distribution), pair(emptied), order)
    assert loss > 8 * sound_bound(order, 0.15, num_models, rate)
    sound = sound_bound(order, 0.15, num_models, float(g))
    assert loss <= sound
    # docs/theory/pmixed.md.
    formula = sound_bound(order, 0.15, num_models, rate)
    found = [float(loss), formula, sound]
    assert found == pytest.approx([0.0011990, 0.00010495, 0.0017427], rel=5e-5)


def test_a_ball_at_one_order_does_not_bound_lower_orders_proportionally():
    order, beta = 3, 0.1
    with mpmath.workdps(40):
        edge_mass = edge(mpmath.mpf("0.6"), mpmath.mpf(1), order, mpmath.mpf(beta) * order)
        second = both(pair(edge_mass), pair(mpmath.mpf("0.6")), 2)
    assert second > 2 * beta  # so (2, 2β)-RDP, which the subsampling formula is given, fails
    assert second <= order * beta  # monotonicity in the order: all that the ball gives


# Poisson subsampling (equation 4 of the paper).


@pytest.mark.parametrize("order", [2, 64])
@pytest.mark.parametrize("rate", [1e-4, 0.5, 0.97])
@pytest.mark.parametrize("sigma", [0.5, 20.0])
def test_subsampled_gaussian_agrees_with_dp_accounting(order, rate, sigma):
    delta = 1e-30
    accountant = rdp.RdpAccountant([order])
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event)
    expected = accountant.get_epsilon(delta)
    ours = subsampled_rdp(rate, [k / (2 * sigma**2) for k in range(2, order + 1)])
    assert rdp_to_dp(order, ours, delta) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("order", [2, 18, 200])
@pytest.mark.parametrize("rate", [1e-9, 0.03, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 0.7, 40.0, 1e5])
def test_subsampled_cost_against_the_exact_value(order, rate, scale):
    def formula():
        s, a = mpmath.mpf(rate), order
        total = (1 - s) ** (a - 1) * (1 + (a - 1) * s)
        for k in range(2, a + 1):
            growth = mpmath.exp((k - 1) * mpmath.mpf(scale * k))
            total += mpmath.binomial(a, k) * (1 - s) ** (a - k) * s**k * growth
        return mpmath.log(total) / (a - 1)

    found = subsampled_rdp(rate, [scale * k for k in range(2, order + 1)])
    assert found == pytest.approx(float(exactly(formula)), rel=1e-11)


def test_subsampling_at_the_ends_of_the_rate():
    assert subsampled_rdp(0.0, [1.0] * 17) == subsampled_rdp(0.5, [0.0] * 17) == 0.0
    assert subsampled_rdp(1.0, range(2, 19)) == pytest.approx(18.0)
    assert subsampled_rdp(0.5, [math.inf] * 2) == math.inf


def test_bad_arguments_raise():
    with pytest.raises(ValueError, match="order must be an integer .* got 2.5"):
        published_target_leakage(2.5, 0.1, 80, 0.1)
    with pytest.raises(ValueError, match="sample_rate must be > 0, got 0.0"):
        published_target_leakage(3, 0.1, 80, 0.0)
    with pytest.raises(ValueError, match="models must be .* got 0"):
        published_target_leakage(3, 0.1, 0)
    with pytest.raises(ValueError, match="target_leakage must be >= 0"):
        published_bound(3, -0.1, 80)
