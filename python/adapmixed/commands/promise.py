"""The promise of a server about its answers, and the gate that weak promises must pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism, Origin
    from adapmixed.privacy import Accountant, Guarantee


def promised(
    accountant: Accountant, mechanism: Mechanism, num_models: int, origin: Origin
) -> Guarantee:
    """Return the guarantee of an account's answers together with all answers to come.

    One made-up answer is charged to a copy of the account, which is thrown away. If no plan and no
    budget limits ε, that ε is too small: see `Guarantee.limited`.

    Args:
        accountant: the account that will be charged. It is not changed.
        mechanism: how queries will be answered.
        num_models: N.
        origin: the ensemble that will answer.

    Raises:
        ValueError: the account is bound to another mechanism or ensemble.
    """
    import torch

    from adapmixed.mechanisms import Rows
    from adapmixed.privacy import Accountant, BudgetSpentError
    from adapmixed.rng import SecureRandom

    now, trial = accountant.guarantee(), Accountant.from_state(accountant.state())
    asking: Any = mechanism
    if hasattr(mechanism, "public_confidence"):  # no rows are unsure enough for one near 0
        asking = replace(asking, public_confidence=None)
    rows = Rows(torch.zeros(num_models, 1, 2), torch.zeros(1, 2), None, 2)
    ticket = asking.propose_rows(rows, rng=SecureRandom(), origin=origin)
    ticket.mechanism = mechanism
    try:
        trial.charge(ticket)
    except BudgetSpentError:  # no private answer can follow
        return now
    return replace(trial.guarantee(), queries=now.queries, public_queries=now.public_queries)


def checked(guarantee: Guarantee, mechanism: Mechanism, *, allow_weak: bool) -> Guarantee:
    """Return a guarantee of :func:`promised` that may be served.

    Raises:
        ValueError: it is weak, without a limit, private or none, and --allow-weak is not given.
    """
    from adapmixed.privacy.guarantee import weak_warnings

    if allow_weak:
        return guarantee
    if not guarantee.limited:
        ways = ["queries= in --mechanism"] if hasattr(mechanism, "queries") else []
        ways += [] if mechanism.no_budget else ["--epsilon"]
        limits = f"{' or '.join(ways)} would limit it"
        raise ValueError(
            "--allow-weak must be given to serve this mechanism, whose ε has no limit and grows "
            f"with every answer; {limits if ways else f'no option of {mechanism.name} limits it'}"
        )
    fixed = guarantee.kind in ("fixed", "public") and guarantee.epsilon is not None
    if not fixed or weak_warnings(guarantee.epsilon or 0.0, guarantee.delta):
        raise ValueError(f"--allow-weak must be given to serve this mechanism: {_said(guarantee)}")
    return guarantee


def promise(accountant: Accountant, mechanism: Mechanism, num_models: int, origin: Origin) -> str:
    """Return what may be published of an account's answers and of all answers to come.

    Arguments and errors are those of :func:`promised`.
    """
    found = promised(accountant, mechanism, num_models, origin)
    if found.limited:
        return _said(found)
    now = replace(accountant.guarantee(), caveats=found.caveats)
    so_far = [str(now)] if now.queries else replace(found, epsilon=math.inf).warnings
    return " ".join(["The ε of all answers has no limit and grows with every answer.", *so_far])


def _said(guarantee: Guarantee) -> str:
    """Return what may be published of a guarantee."""
    if guarantee.kind.startswith("data-dependent"):
        words = "The cost of its answers depends on the private data and is for the operator alone."
        return " ".join([words, *guarantee.warnings])
    if guarantee.kind == "none":
        return "Its answers have no privacy guarantee."
    return str(guarantee)
