"""What the fields of an accountant's state must say of each other: no events can have given less.

A state that contradicts itself is refused with the name of a field, since what it states could be
too little. `private` below is `queries - public_queries`, the answers that used a private model.

| field | must be |
| --- | --- |
| `queries`, `public_queries`, `screened`, `answered` | >= 0 |
| `public_queries` | <= `queries`; equal to it where `total` is null and nothing is unprotected |
| `unprotected` | false where `private` is 0, or where the total has as many answers |
| `screening.rho`, `.single` | both 0 where nothing is screened; `rho` is `screened` by `single`; |
| | `single` is null for two screenings or more of different costs, `rho` > 0 |
| `num_models` | >= 1, and given where a total or screenings are |
| `adjacency` | given iff the total is of Rényi events, and what the accountant is asked about |
| `filter` | null without a `filter_budget` |
| RenyiTotal `delta`, `rule`, `order_weights` | the accountant's |
| `orders` | distinct, finite, > 1; one with rule "paper" or a bound; as many as `order_weights` |
| `realised`, `bounded`, `plan` | one of them true or given; `published` needs one of the last two |
| `planned_queries` | <= the plan's budget and `private`; equal to `private` for a plan alone |
| `mixing` | >= the whole plan's cost, and 1e-12 a realised answer; all the same where nothing is |
| | realised; 0 without private answers and plan |
| `conversion` | c_α(w_α δ) |
| ClippedTotal `setting` | of N models, with a budget and no queries of its own |
| `answered` | <= the budget; `private`, less what is unprotected |
| `screened`, `single` | <= the budget, one cost |
| PoolTotal `plan` | as `setting`, or null |
| `answered` | <= the budget and `private`; `unplanned` iff `private` is more by protected answers |
| `rho`, `removed`, | >= the whole plan's cost, equal to it where nothing is unplanned; `replaced` |
| `replaced` | is 4 `rho`; `removed` is `rho` with `constant_models`, else >= `replaced` |
| `constant_models` | given, and that of the plan |
| FilterTotal `budget` | the accountant's |
| `spent` | (N,), from what it reserves to all of it; the former without private answers; |
| | nothing screened |
| `counts` | as many as it reserves at most, of its `sigma` and of N models |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.bounded_range import bounded_range_rho
from adapmixed.privacy.checks import ADJACENCIES
from adapmixed.privacy.events import LOSS_ABSOLUTE_ERROR
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.fixed_totals import POOL_WAYS, ClippedTotal, PoolTotal, ScreeningTotal
from adapmixed.privacy.renyi_total import RenyiTotal
from adapmixed.privacy.running import Running

_LOG_ERROR = 2.0**-40  # of another machine's logarithms, far more than they differ


def check_running(running: Running, settings: Mapping[str, Any]) -> None:
    """Raises a ValueError that names the field of the table that these totals contradict.

    Args:
        running: the totals.  settings: the accountant's arguments by name, not yet checked.
    """
    try:
        _check_counts(running, settings)
        _check_screening(running.screening)
        total = running.total
        if isinstance(total, RenyiTotal):
            _check_renyi(total, running, settings)
        elif isinstance(total, ClippedTotal):
            _check_clipped(total, running)
        elif isinstance(total, PoolTotal):
            _check_pool(total, running)
        elif isinstance(total, FilterTotal):
            _check_filter(total, running, settings)
    except OverflowError as error:
        raise ValueError(f"accountant: counts must be those of answers: {error}") from error


def _check_counts(running: Running, settings: Mapping[str, Any]) -> None:
    for name in ("queries", "public_queries"):
        _require(getattr(running, name) >= 0, f"{name} must be >= 0: counts must be >= 0")
    private = running.queries - running.public_queries
    _require(private >= 0, "public_queries must be <= queries")
    _require(not running.unprotected or private > 0, "unprotected must be false without an answer")
    known, used = running.num_models, running.total is not None or running.screening.screened > 0
    _require(known is None or known >= 1, "num_models must be >= 1")
    _require(known is not None or not used, "num_models must be given beside private answers")
    if running.total is None and not running.unprotected:
        _require(private == 0, "public_queries must be queries where total is null")
    adjacency, asked = running.adjacency, settings["adjacency"]
    _require(adjacency in (None, *ADJACENCIES), f"adjacency must be one of {ADJACENCIES} or null")
    renyi = isinstance(running.total, RenyiTotal)
    _require(adjacency is not None or not renyi, "adjacency must be given beside Rényi events")
    _require(adjacency is None or renyi, "adjacency must be null without Rényi events")
    _require(
        None in (adjacency, asked) or adjacency == asked,
        f"adjacency must be the accountant's, {asked!r}, got {adjacency!r}",
    )
    budget = settings["filter_budget"]
    _require(running.filter is None or budget is not None, "filter must be null without a budget")


def _check_screening(found: ScreeningTotal) -> None:
    rho, single, screened = found.rho, found.single, found.screened
    _require(screened >= 0, "screening.screened must be >= 0")
    _require(rho >= 0 and (single or 0.0) >= 0, "screening.rho must be >= 0")
    if screened == 0:
        _require(rho == 0 and single == 0, "screening.rho and single must be 0 if none is screened")
    elif single is None:
        _require(screened >= 2, "screening.single must be given for one screening")
        _require(rho > 0, "screening.rho must be > 0 where costs differ")
    else:
        # Sums are rounded up, each step by less than 2^-51 of itself or two of the least floats.
        exact, steps = screened * single, screened + 8
        inside = exact * (1 - 2.0**-50) <= rho <= exact * (1 + steps * 2.0**-51) + steps * 1e-323
        _require(inside, f"screening.rho must be {screened} times single, {exact!r}, got {rho!r}")


def _check_renyi(total: RenyiTotal, running: Running, settings: Mapping[str, Any]) -> None:
    mine = (total.delta, total.rule, total.order_weights)
    asked = tuple(settings[name] for name in ("delta", "rule", "order_weights"))
    _require(mine == asked, "delta, rule and order_weights must be the accountant's")
    orders, plan, models = total.orders, total.plan, running.num_models or 0
    apart = len(set(orders)) == len(orders) > 0
    _require(apart and all(1 < a < math.inf for a in orders), "orders must be > 1 and distinct")
    single = total.rule == "paper" or total.bounded or plan is not None
    _require(not single or len(orders) == 1, "orders must be one with rule 'paper' and for bounds")
    weights = total.order_weights
    _require(weights is None or len(weights) == len(orders), "order_weights must be one per order")

    known = total.bounded or plan is not None
    _require(known or total.realised, "realised must be true without bounds and plan")
    _require(known or not total.published, "published must be false without bounds and plan")
    private, planned = running.queries - running.public_queries, total.planned_queries
    allowed = 0 if plan is None else plan[0]
    if plan is not None:
        _require(plan[0] >= 1 and plan[1] >= 0, "plan must have a budget >= 1 and a cost >= 0")
    _require(0 <= planned <= allowed, "planned_queries must be within the budget")
    others = private - planned - running.unprotected
    _require(others >= 0, "planned_queries must be <= the queries that are not public")
    alone = not (total.bounded or total.realised or running.unprotected)
    _require(not alone or others == 0, "planned_queries must be all that are not public")

    rows = 1 if total.rule == "paper" else models
    _amounts("mixing", total.mixing, (rows, len(orders)))
    assert total.mixing is not None
    least = 0.0 if plan is None else plan[0] * plan[1] if plan[1] > 0 else 0.0
    if not (total.bounded or running.unprotected):
        least += others * LOSS_ABSOLUTE_ERROR
    smallest, largest = float(total.mixing.min()), float(total.mixing.max())
    _require(
        smallest >= least * (1 - 2.0**-48),
        f"mixing must be >= {least!r}, what its answers cost at least, got {smallest!r}",
    )
    _require(
        total.realised or smallest == largest, "mixing must be the same for all without losses"
    )
    _require(
        private > 0 or plan is not None or largest == 0, "mixing must be 0 without private answers"
    )
    expected, found = total.conversion_costs(), total.conversion
    shape = None if found is None else found.shape
    _require(shape == expected.shape, f"conversion must have shape {expected.shape}, got {shape}")
    assert found is not None
    # Its terms may be larger than their sum: log((α-1)/α), and log α beside log δ.
    terms = [1 - 2 * math.log1p(-1 / a) + 2 * math.log(a) / (a - 1) for a in orders]
    near = np.abs(found - expected) <= _LOG_ERROR * (np.abs(expected) + terms)
    _require(bool(near.all()), f"conversion must be {expected.tolist()}, got {found.tolist()}")


def _check_clipped(total: ClippedTotal, running: Running) -> None:
    setting, screening = total.setting, running.screening
    _require(setting is not None and setting.budget is not None, "setting must have a budget")
    assert setting is not None and setting.budget is not None
    _require(setting.num_models == running.num_models, "num_models must be the same throughout")
    _require(setting.queries == 0, "setting.queries must be 0")
    _require(0 <= total.answered <= setting.budget, "answered must be within the budget")
    _check_answered(total.answered, running)
    _require(screening.screened <= setting.budget, "screening.screened must be within the budget")
    _require(screening.single is not None, "screening.single must be one cost")


def _check_pool(total: PoolTotal, running: Running) -> None:
    plan, models = total.plan, running.num_models
    _require(plan is None or plan.num_models == models, "num_models must be the same")
    _require(plan is None or plan.budget is not None, "plan must have a budget")
    _require(plan is None or plan.queries == 0, "plan.queries must be 0")
    budget = 0 if plan is None or plan.budget is None else plan.budget
    _require(0 <= total.answered <= budget, "answered must be within the budget")
    private = running.queries - running.public_queries
    if total.unplanned:
        more = private - total.answered - running.unprotected > 0
        _require(more, "unplanned must be false where all answers are planned")
    else:
        _check_answered(total.answered, running)
    slack = (private + 8) * 2.0**-50  # rounded up, once for each event
    for name, way in POOL_WAYS.items():
        least, found = 0.0, float(getattr(total, name))
        if plan is not None:
            setting = (plan.scale, plan.lower, plan.upper, plan.num_models, way)
            least = budget * bounded_range_rho(*setting, constant_models=plan.constant_models)
        enough = found >= least * (1 - 2.0**-50)
        _require(enough, f"{name} must be >= {least!r}, what the plan costs, got {found!r}")
        most = math.inf if total.unplanned else least * (1 + slack)
        _require(found <= most, f"{name} must be {least!r} of the plan alone, got {found!r}")
    near = 4 * total.rho <= total.replaced * (1 + slack) <= 4 * total.rho * (1 + 3 * slack)
    _require(near, f"replaced must be 4 times rho, {4 * total.rho!r}, got {total.replaced!r}")
    constant = total.constant_models
    _require(constant is not None, "constant_models must be given beside events")
    _require(plan is None or plan.constant_models == constant, "constant_models must be the plan's")
    known = total.removed == total.rho if constant else total.removed >= total.replaced
    where = "rho, where N is constant," if constant else ">= replaced, where N is counted,"
    _require(known, f"removed must be {where} got {total.removed!r}")


def _check_answered(answered: int, running: Running) -> None:
    """All private answers are the total's, but for unprotected ones, of which there is one."""
    others = running.queries - running.public_queries - answered
    right = others > 0 if running.unprotected else others == 0
    _require(right, "answered must be the queries that are neither public nor unprotected")


def _check_filter(total: FilterTotal, running: Running, settings: Mapping[str, Any]) -> None:
    _require(total.budget == settings["filter_budget"], "budget must be the accountant's")
    budget, models = total.budget, running.num_models or 0
    _amounts("spent", total.spent, (models,), budget.reserved, budget.amount)
    assert total.spent is not None
    private = running.queries - running.public_queries - running.unprotected
    unspent = bool((total.spent == budget.reserved).all())
    _require(private > 0 or unspent, f"spent must be {budget.reserved!r} without private answers")
    _require(len(total.counts) <= budget.releases, "counts must be those that budget reserves")
    for one in total.counts:
        paid = (one.sigma, one.num_models) == (budget.sigma, models)
        _require(paid, "counts must be of the budget's sigma and of num_models")
    _require(running.screening.screened == 0, "screening.screened must be 0 under a filter")


def _amounts(
    name: str,
    values: NDArray[np.float64] | None,
    shape: tuple[int, ...],
    least: float = 0.0,
    most: float = np.inf,
) -> None:
    """Charges of that shape in [least, most], +inf allowed, NaN not."""
    found = None if values is None else values.shape
    _require(found == shape, f"{name} must have shape {shape}, got {found}")
    assert values is not None
    inside = bool(((values >= least) & (values <= most)).all())
    _require(inside, f"{name} must be in [{least!r}, {most!r}] and not NaN in every entry")


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise ValueError(f"accountant: {words}")
