"""A projection is valid only for the rows that it was made from."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import adapmixed_ext as ops


def _pair() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    public = 2.0 * torch.randn(2, 40)
    return public + torch.randn(3, 2, 40), public


def _users(private: Tensor, public: Tensor, projection: ops.Projection) -> list[object]:
    targets = torch.zeros(2, dtype=torch.int64)
    return [
        lambda: ops.leave_one_out(private, public, projection, orders=[2.0, 18.0]),
        lambda: ops.mixture(private, public, projection),
        lambda: ops.log_prob(private, public, projection, targets),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["private", "public"])
def test_bad_rows_are_refused_also_with_a_projection(value: float, side: str) -> None:
    private, public = _pair()
    projection = ops.project(private, public, order=18, radius=3.6)
    (private if side == "private" else public)[..., 0] = value
    for use in _users(private, public, projection):
        with pytest.raises(ValueError, match="must belong to these logits"):
            use()  # type: ignore[operator]


def test_empty_rows_are_refused_also_with_a_projection() -> None:
    private, public = _pair()
    projection = ops.project(private, public, order=18, radius=3.6)
    private[1, 0] = -math.inf
    with pytest.raises(ValueError, match=r"at private_logits\[1, 0\] they are not the rows"):
        ops.leave_one_out(private, public, projection, orders=18)
    with pytest.raises(ValueError, match=r"at position \[0\]"):
        ops.mixture(private, public, projection)


def test_a_projection_of_other_rows_is_refused() -> None:
    private, public = _pair()
    projection = ops.project(private, public, order=18, radius=3.6)
    other = private[[1, 0, 2]]
    with pytest.raises(ValueError, match="must belong to these logits"):
        ops.leave_one_out(other, public, projection, orders=18)
    with pytest.raises(ValueError, match="must belong to these logits"):
        ops.mixture(other, public, projection)
    # The right rows pass, also with masked and rare tokens.
    private[0, 0, 3], public[1, 5] = -math.inf, -900.0
    good = ops.project(private, public, order=18, radius=3.6)
    assert bool(ops.leave_one_out(private, public, good, orders=18).isfinite().all())


@pytest.mark.parametrize("models", [3, 6])
def test_rows_that_are_normalised_otherwise_are_refused(models: int, device: torch.device) -> None:
    """All rows moved by a constant, or normalised after the projection: p̄ and q agree in size."""
    torch.manual_seed(4)
    public = 18.0 + 2.0 * torch.randn(2, 300, device=device)
    private = public + torch.randn(models, 2, 300, device=device)
    projection = ops.project(private, public, order=18, radius=3.6)
    for rows in (
        (private.log_softmax(-1), public.log_softmax(-1)),
        (private - 20.0, public - 20.0),
        (private + 1e-3, public + 1e-3),
    ):
        if device.type == "cpu":
            with pytest.raises(ValueError, match="must belong to these logits"):
                ops.leave_one_out(*rows, projection, orders=[2.0, 18.0])
        else:
            loss = ops.leave_one_out(*rows, projection, orders=[2.0, 18.0])
            assert bool((loss == math.inf).all())


@pytest.mark.parametrize("models", [3, 6])
@pytest.mark.parametrize("weight, gain", [(1e-33, 110.0), (1e-33, 300.0), (1e-100, 650.0)])
def test_a_tiny_weight_hides_no_foreign_row(
    models: int, weight: float, gain: float, device: torch.device
) -> None:
    """λ p/q may be huge although λ is below 2^-100: p/q of a foreign row has no bound."""
    torch.manual_seed(3)
    public = 2.0 * torch.randn(1, 300)
    private = public + 0.3 * torch.randn(models, 1, 300)
    rows = (private.to(device), public.to(device))
    projection = ops.project(*rows, order=18, radius=3.6)
    projection.weight[0, 0], projection.complement[0, 0] = weight, 1.0
    assert bool(ops.leave_one_out(*rows, projection, orders=18.0).isfinite().all())
    rows[0][0, 0, 7] += gain
    if device.type == "cpu":
        with pytest.raises(ValueError, match="must belong to these logits"):
            ops.leave_one_out(*rows, projection, orders=18.0)
    else:
        assert bool((ops.leave_one_out(*rows, projection, orders=18.0) == math.inf).all())


def test_bare_weights_on_masked_tokens_pass() -> None:
    private, public = _pair()
    public[:, 4] = -math.inf
    loss = ops.leave_one_out(private, public, torch.full((3, 2), 0.5), orders=3.0)
    assert bool((loss > 0).all())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("weight", -0.1, r"projection.weight\[0, 0\] must be in \[0, 1\], got -0.1"),
        ("weight", math.nan, r"projection.weight\[0, 0\] must be in \[0, 1\], got nan"),
        ("complement", 1.5, r"projection.complement\[0, 0\] must be in \[0, 1\], got 1.5"),
        ("complement", 0.9, r"projection.weight \+ projection.complement\[0, 0\]"),
        ("private_lse", math.nan, "must belong to these logits"),
    ],
)
def test_values_of_a_projection_are_checked(field: str, value: float, words: str) -> None:
    private, public = _pair()
    projection = ops.project(private, public, order=18, radius=0.1)
    changed = getattr(projection, field).clone()
    changed[0, 0] = value
    if field == "complement" and value < 1:
        assert float(projection.weight[0, 0] + value) != 1.0
    bad = dataclasses.replace(projection, **{field: changed})
    with pytest.raises(ValueError, match=words):
        ops.leave_one_out(private, public, bad, orders=18)


class Source:
    """A random source that hands out the given key and counter."""

    def __init__(self, key: Tensor, counter: int = 0) -> None:
        self.pair = key, counter

    def reserve(self) -> tuple[Tensor, int]:
        return self.pair


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Source(torch.zeros(4, dtype=torch.uint8)), r"of dtype torch.uint8 and shape \(32,\)"),
        (Source(torch.zeros(32)), "got torch.float32"),
        (Source(torch.zeros(64, dtype=torch.uint8)[::2]), "contiguous"),
        (Source(torch.zeros(32, dtype=torch.uint8), -1), "counter in"),
        (None, "rng must be a random source"),
        (torch.Generator(), "rng must be a random source"),
    ],
)
def test_keys_are_checked_before_they_are_read(source: Source, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.gaussian(3, sigma=1.0, rng=source)


def test_rows_are_named_as_they_were_given() -> None:
    p, q = torch.zeros(3, 2, 7), torch.zeros(2, 7)
    q[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"q_logits\[1\] contains NaN.*1 of 2 rows"):
        ops.renyi_divergence(p, q, 2.0)
    p[1, 0, 3] = math.inf
    with pytest.raises(ValueError, match=r"p_logits\[1, 0\] contains \+inf"):
        ops.renyi_divergence(p, torch.zeros(2, 7), 2.0)
