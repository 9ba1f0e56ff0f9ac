"""docs/reference/limits.md: just inside each limit works, just outside raises a ValueError."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

import adapmixed as am
import adapmixed_ext as ops
from adapmixed import cli, limits, privacy
from adapmixed.data import demo_base
from adapmixed.ensemble.lora import MISSING
from adapmixed.mechanisms import Origin, shaped
from adapmixed.mechanisms import planned as mechanism_of_plan
from adapmixed.privacy import plan
from adapmixed.privacy.planner import epsilon_of, models_for, queries_for

LOGITS = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
ROWS = LOGITS, LOGITS[0].clone()


def wide(tokens: int) -> object:
    return ops.project(torch.zeros(1, 1, tokens), torch.zeros(1, tokens), order=2, radius=1)


def many(models: int) -> object:
    return ops.project(torch.zeros(models, 1, 2), torch.zeros(1, 2), order=2, radius=1)


def ball(order: float = 2.0, radius: float = 0.1) -> object:
    return ops.project(*ROWS, order=order, radius=radius)


def screened(order: float) -> object:
    common: Any = {"weight": 0.5, "threshold": math.inf, "top_k": 4}
    return ops.screen(*ROWS, torch.zeros(2, 4, dtype=torch.float64), order=order, **common)


def pooled(lower: float = -1.0, upper: float = 1.0, scale: float = 1.0) -> object:
    return ops.log_pool(*ROWS, lower=lower, upper=upper, scale=scale)


def stated(delta: float = 1e-5, models: int = 8, queries: int = 8) -> object:
    return epsilon_of(delta, models, queries, "zero_out", lower=-1.0, upper=1.0, scale=1.0)


def planned(delta: float = 1e-5, models: int = 8, queries: int = 8) -> object:
    return plan(1.0, delta, models, queries, shapes=(), scales=(4.0,))


def bound(models: int, active: int | None = None) -> None:
    origin = Origin(active_tokens=active)
    am.Accountant(1e-5).bind(am.ClippedLogPool(-1.0, 1.0), models, origin)


def lost(orders: Any = 2.0, num_models: int = 3) -> object:
    weight = torch.ones(3, 2)
    return ops.leave_one_out(*ROWS, weight, orders=orders, num_models=num_models)


def command(*words: str) -> None:
    """Run a command; raise ValueError with what it prints if it refuses."""
    try:
        status = cli.main(list(words))
    except SystemExit as error:
        status = int(str(error.code))
    if status:
        raise ValueError(words)


def orders(count: int) -> tuple[float, ...]:
    return tuple(2.0 + at for at in range(count))


UP, DOWN = math.inf, -math.inf
COUNTED = {
    "private_logits", "num_models", "models", "logits", "queries", "active", "active_tokens",
    "budget", "orders", "loss_orders",
}  # fmt: skip
TABLE: list[tuple[Callable[..., object], str, float, float]] = [
    # door, the argument in the message, the last allowed number, the direction of the refused one
    (many, "private_logits", 65_536, UP),
    (lambda n: lost(num_models=n), "num_models", 65_536, UP),
    (lambda n: stated(models=n), "num_models", 65_536, UP),
    (bound, "num_models", 65_536, UP),
    (bound, "num_models", 1, DOWN),
    (lambda n: privacy.BoundedRangeAnswer(1.0, -1.0, 1.0, n, 1), "num_models", 65_536, UP),
    (lambda n: planned(models=n), "num_models", 65_536, UP),
    (lambda n: privacy.IndividualCharge(None, np.zeros((n, 1))), "models", 65_536, UP),
    (
        lambda n: privacy.LeaveOneOutLoss((2,), np.zeros((n, 1, 1)), "zero_out"),
        "models",
        65_536,
        UP,
    ),
    (lambda n: shaped(*ROWS, active=n), "active", 2, DOWN),
    (lambda n: bound(8, n), "active_tokens", 2, DOWN),
    (lambda n: privacy.GaussianScreening(n, 1, 0.5, 1.0), "num_models", 65_536, UP),
    (lambda x: privacy.GaussianScreening(8, 1, 0.5, x), "sigma", 1e-6, DOWN),
    (lambda x: privacy.GaussianScreening(8, 1, x, 1.0), "weight", 1.0, UP),
    (lambda n: privacy.ClippedAnswer(0.5, 2.0, 8, 1, n), "budget", 2**40, UP),
    (lambda n: privacy.RenyiBound(2.0, 0.1, n, 1), "num_models", 65_536, UP),
    (lambda x: queries_for(1.0, x, 8, lower=-1.0, upper=1.0, scale=1.0), "delta", 0.1, UP),
    (lambda n: models_for(1.0, 1e-5, n, lower=-1.0, upper=1.0, scale=1.0), "queries", 2**40, UP),
    (lambda n: ops.renyi_divergence(LOGITS, LOGITS, [2.0] * n), "orders", 8, UP),
    (lambda n: am.AdaPMixED(2.0, 0.1, loss_orders=orders(n)), "loss_orders", 8, UP),
    (wide, "logits", 1, DOWN),
    (wide, "logits", 2**20, UP),
    (ball, "order", 1_024, UP),
    (ball, "order", 1 + 1e-8, DOWN),
    (screened, "order", 1_024, UP),
    (lambda x: lost(orders=[2.0, x]), "orders", 1_024.0, UP),
    (lambda x: ops.clip_project(*ROWS, lower=0.5, upper=2, orders=x), "orders", 1_024.0, UP),
    (lambda x: ops.renyi_divergence(LOGITS, LOGITS, x), "orders", 1_024.0, UP),
    (lambda x: ops.renyi_divergence(LOGITS, LOGITS, x), "orders", 1 + 1e-8, DOWN),
    (lambda x: am.AdaPMixED(x, 1e-6), "order", 1_024, UP),
    (lambda x: am.AdaPMixED(2.0, 0.1, loss_orders=(x,)), "loss_orders", 1_024.0, UP),
    (lambda x: am.PMixED(8.0, 1e-5, 8, x), "order", 1_024, UP),
    (lambda x: am.ClippedMixing(0.5, 2.0, order=x), "order", 1_024, UP),
    (lambda x: ball(4.0, x), "radius", 200, UP),
    (lambda x: am.AdaPMixED(4.0, x), "target_leakage", 50, UP),
    (am.Accountant, "delta", 0.1, UP),
    (am.Accountant, "delta", 1e-15, DOWN),
    (am.Accountant(1e-5).get_epsilon, "delta", 0.1, UP),
    (planned, "delta", 0.1, UP),
    (planned, "delta", 1e-15, DOWN),
    (stated, "delta", 0.1, UP),
    (lambda x: am.PMixED(80.0, x, 8, 3.0), "delta", 1e-15, DOWN),
    (lambda n: am.PMixED(8.0, 1e-5, n, 3.0), "queries", 2**40, UP),
    (lambda n: am.ClippedMixing(0.5, 2.0, n), "queries", 2**40, UP),
    (lambda n: am.ClippedLogPool(-1.0, 1.0, queries=n), "queries", 2**40, UP),
    (lambda n: planned(queries=n), "queries", 2**40, UP),
    (lambda n: stated(queries=n), "queries", 2**40, UP),
    (lambda x: pooled(-1.0, x), "upper", 63, UP),
    (lambda x: am.ClippedLogPool(x, 1.0), "lower", -63, DOWN),
    (lambda x: pooled(-1.0, 1.0, x), "scale", 165, UP),
    (lambda x: am.ClippedLogPool(-1.0, 1.0, x), "scale", 165, UP),
    (lambda x: ops.clip_project(*ROWS, lower=0.5, upper=x), "upper", 5e5, UP),
    (lambda x: am.ClippedMixing(0.5, x, 8), "upper", 5e5, UP),
    (lambda x: am.ClippedMixing(0.0, x, 8), "upper", 1e6, UP),
    (lambda x: am.AdaPMixED(3.0, 0.1, sigma=x), "sigma", 1e-6, DOWN),
    (lambda x: shaped(*ROWS, temperature=x), "temperature", 0.01, DOWN),
    (lambda x: shaped(*ROWS, temperature=x), "temperature", 100, UP),
]


@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda at: f"{at}-{TABLE[at][1]}")
def test_inside_works_and_outside_raises(row: int) -> None:
    door, name, last, direction = TABLE[row]
    door(last)
    step = 1 if isinstance(last, int) and name in COUNTED else 1e-9 * abs(last)
    with pytest.raises(ValueError, match=rf"(?s){name}.* must .*\d.*, got .*\d"):
        door(last + step if direction > 0 else last - step)


@pytest.mark.parametrize(
    "words",
    [
        "serve --demo folder --delta 0.2",
        f"generate --prompt a --base {demo_base()} --ensemble e --temperature 1000 "
        "--mechanism unprotected --ledger ledger",
        "plan --epsilon 1 --models 65537 --tokens 8",
        "plan --epsilon 1 --models 8 --tokens 1099511627777",
        "plan --epsilon 1 --models 8 --tokens 8 --delta 0.2",
    ],
)
def test_commands_refuse_before_they_write(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words.split()[0]):
        command(*words.split())
    assert "must be" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_planners_searches_stay_inside() -> None:
    wide: Any = {"shapes": (1.0,), "scales": (50.0,)}
    for given in ((0.02, 1e-15, 65_536, 1), (1e4, 0.1, 65_536, 1), (200.0, 0.1, 65_536, 1)):
        for options in ({}, wide):
            for choice in plan(*given, **options):
                mechanism_of_plan(choice)


def test_ensembles(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model("gpt2")
    for name, last in (("MOST_TOKENS", VOCAB), ("MOST_MODELS", 2)):
        with monkeypatch.context() as patched:
            patched.setattr(limits, name, last)
            am.Ensemble(copy.deepcopy(base), [MISSING] * 2, adapted={"lm_head": 2})
            patched.setattr(limits, name, last - 1)
            with pytest.raises(ValueError, match=f"{last - 1}.*got {last}"):
                am.Ensemble(copy.deepcopy(base), [MISSING] * 2, adapted={"lm_head": 2})


def test_pmixed_takes_the_largest_ball_that_its_order_allows() -> None:
    mechanism = am.PMixED(1e6, 1e-5, 1, 1_024.0)
    assert mechanism.radius(1) == limits.MOST_EXPONENT / 1_023
    mechanism.propose(*ROWS, rng=SimpleNamespace(reserve=lambda: None))  # type: ignore[arg-type]


def test_logits_far_below_the_largest_of_their_row_may_count_as_nothing() -> None:
    private, public = (rows.clone() for rows in ROWS)
    private[0, 0, 3], private[1, 0, 3] = -20_000.0, -math.inf
    private[1, 0, [0, 1, 2, 4, 5, 6, 7]] = private[0, 0, [0, 1, 2, 4, 5, 6, 7]]
    both = ops.project(private, public, order=3, radius=0.1).weight[:2, 0]
    assert torch.allclose(both[0], both[1], rtol=1e-5, atol=0)
    for row, bad in ((0, math.nan), (1, math.inf), (2, -1e7)):
        private, public = (rows.clone() for rows in ROWS)
        private[row, 1] = bad
        with pytest.raises(ValueError, match=rf"private_logits\[{row}, 1\]"):
            ops.project(private, public, order=3, radius=0.1)
        if bad != -1e7:
            answered = shaped(private, public).answerable()
            assert torch.equal(answered.private[row, 1], public[1])
        public[1, :] = bad
        with pytest.raises(ValueError, match=r"public_logits\[1\]"):
            ops.project(ROWS[0], public, order=3, radius=0.1)
