"""Totals as a record states them, compared with what its events give.

Older accountings stated other ones. Recognising theirs tells an older ledger, which is intact, from
a damaged one; nothing is charged by them, and both are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.fields import canonical, parse, read_real, write_real
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.fixed_totals import PoolTotal
from adapmixed.privacy.law_rounding import charge_rounding
from adapmixed.privacy.ledger.errors import LedgerCorruptError
from adapmixed.privacy.rounding import add_up, times_up

_AGREEMENT = 1e-9  # relative; another machine's logarithms and sums may differ in the last bits

# 2^40 answers, each drawn from integer weights within V 2^-99 of its law, for V up to 2^20.
_DRAWN = 2.0**40 * 2.0**20 * 2.0**-99

_FILTER = (
    "of a filter while tokens were drawn within V 2^-99 of their law, which was taken off δ, and "
    "charges of ClippedMixing did not hold the rounding of the laws"
)
_POOL = (
    "of ClippedLogPool's add/remove while the rounding of another grid of the log-ratios was not "
    "charged"
)


def totals_of(accountant: Accountant) -> dict[str, Any]:
    """Answered queries, kind and ε of an accountant, as JSON; ε is None without a guarantee."""
    guarantee = accountant.epsilon()
    epsilon = guarantee.epsilon
    return {
        "queries": guarantee.queries,
        "kind": guarantee.kind,
        "epsilon": None if epsilon is None else write_real(float(epsilon)),
        "order": guarantee.order,
    }


def compare(sequence: int, written: str, accountant: Accountant, format_version: int) -> str | None:
    """None where a record's totals are the computed ones; words where an older accounting's.

    Args:
        sequence: of the record.  written: its totals.
        accountant: with all events up to it.
        format_version: of the ledger.

    Raises:
        LedgerCorruptError: they are no known accounting's.
    """
    computed = totals_of(accountant)
    try:
        recorded = dict(parse(written))
    except (ValueError, TypeError) as error:
        raise LedgerCorruptError(f"totals of record {sequence}: {error}") from error
    one, other = computed.pop("epsilon"), recorded.pop("epsilon", None)
    if {**computed, "order": None} == {**recorded, "order": None}:
        if _near(one, other):
            return None
        older = format_version < 3 and one is not None
        whose = _older(accountant, other) if older else None
        if whose is not None:
            delta = accountant.delta
            spent = max(read_real(one), read_real(other), _with_rounding(accountant))
            return (
                f"was charged by an older accounting, {whose} (format {format_version}): its "
                f"records are intact, but state ε = {other!r} where this version computes {one!r}, "
                "so it takes no more charges. Keep it: what it has spent counts as ε = "
                f"{spent!r} at δ = {delta!r}, and adds to what is charged elsewhere. Begin a new "
                "ledger in another file, with a budget of its own, for what is left of your ε and "
                "δ (docs/ledger.md)"
            )
    raise LedgerCorruptError(
        f"totals after record {sequence} must be those recorded, {written}, the events give "
        f"{canonical({**computed, 'epsilon': one})}"
    )


def _near(one: Any, other: Any) -> bool:
    if type(one) is float and type(other) is float:
        return math.isclose(one, other, rel_tol=_AGREEMENT, abs_tol=_AGREEMENT)
    return type(one) is type(other) and bool(one == other)


def _older(accountant: Accountant, recorded: Any) -> str | None:
    """Whose total that ε was before format 3, if anyone's."""
    asked, total = accountant.adjacency or "zero_out", accountant.state()["running"]["total"]
    if accountant.filter_budget is not None and asked != "add_remove":
        found = _with_drawing(accountant.filter_budget, asked)
        return _FILTER if _near(write_real(found), recorded) else None
    if asked == "add_remove" and total is not None and total["kind"] == PoolTotal.__name__:
        # One grid for both: then add/remove cost what replace-one does.
        return _POOL if _near(accountant.epsilon("replace_one").epsilon, recorded) else None
    return None


def _with_rounding(accountant: Accountant) -> float:
    """ε of an older filter of ClippedMixing, whose charges lacked the rounding of the laws; else 0.

    As if every answer had lacked all of it: what the models have spent is beyond the budget by it.
    """
    budget, models = accountant.filter_budget, accountant.individual_spent
    if budget is None or budget.order is None or models is None:
        return 0.0
    relative, absolute = charge_rounding(budget.order, len(models))
    beyond = add_up(times_up(budget.amount, relative), times_up(accountant.queries, absolute))
    wider = replace(budget, amount=add_up(budget.amount, beyond))
    return _with_drawing(wider, accountant.adjacency or "zero_out")


def _with_drawing(budget: FilterBudget, adjacency: str) -> float:
    """The least ε for which the exact law had (ε, δ − (1 + e^ε) 2^40 V 2^-99), or +inf."""
    epsilon, drawn = -1.0, 0.0
    for _ in range(100):
        delta = math.nextafter(budget.delta - drawn, 0.0)
        if not delta > 0:
            break
        found = replace(budget, delta=delta).epsilon(adjacency)
        if found <= epsilon:
            return epsilon
        epsilon = found
        drawn = (1 + math.exp(min(epsilon, 700.0))) * (1 + 2.0**-50) * _DRAWN
    return math.inf
