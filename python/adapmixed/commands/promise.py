"""The promise of a server about its answers, and the gate that weak promises must pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism, Origin, Ticket
    from adapmixed.privacy import Accountant, Guarantee


def promised(
    accountant: Accountant, mechanism: Mechanism, num_models: int, origin: Origin
) -> Guarantee:
    """Return the guarantee of an account's answers together with all answers to come.

    It is found by charging one made-up answer to a copy of the account, which is thrown away. If
    no plan and no budget limits ε, that ε is too small: see `Guarantee.limited`.

    Args:
        accountant: the account that will be charged. It is not changed.
        mechanism: how queries will be answered.
        num_models: N.
        origin: the ensemble that will answer.

    Raises:
        ValueError: the account is bound to another mechanism or ensemble.
    """
    from adapmixed.privacy import Accountant, BudgetSpentError

    now, trial = accountant.guarantee(), Accountant.from_state(accountant.state())
    try:
        trial.charge(_made_up(mechanism, num_models, origin))
    except BudgetSpentError:  # no private answer can follow
        return now
    return replace(trial.guarantee(), queries=now.queries, public_queries=now.public_queries)


def checked(guarantee: Guarantee, mechanism: Mechanism, *, allow_weak: bool) -> Guarantee:
    """Return a guarantee that may be served.

    Args:
        guarantee: the guarantee that :func:`promised` has found.
        mechanism: how queries will be answered.
        allow_weak: whether --allow-weak is given.

    Raises:
        ValueError: it is weak, without a limit, private or none, and --allow-weak is not given.
    """
    from adapmixed.privacy.guarantee import WEAK_DELTA, WEAK_EPSILON

    if allow_weak:
        return guarantee
    if not guarantee.limited:
        raise ValueError(
            "--allow-weak must be given to serve this mechanism, whose ε has no limit and grows "
            f"with every answer; {_limits(mechanism)}"
        )
    strong = guarantee.kind in ("fixed", "public")
    if guarantee.kind == "fixed" and guarantee.epsilon is not None:
        strong = guarantee.epsilon <= WEAK_EPSILON and guarantee.delta <= WEAK_DELTA
    if not strong:
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


def _limits(mechanism: Mechanism) -> str:
    """Return what would limit the ε of a mechanism, for an error message."""
    ways = ["queries= in --mechanism"] if hasattr(mechanism, "queries") else []
    ways += [] if mechanism.no_budget else ["--epsilon"]
    if not ways:
        return f"no option of {mechanism.name} limits it"
    return f"{' or '.join(ways)} would limit it"


def _made_up(mechanism: Mechanism, num_models: int, origin: Origin) -> Ticket:
    """Return a made-up answer, for an account that is thrown away.

    No rows are unsure enough for a public_confidence near 0. So the ticket is made without this
    rule, and is charged as one of the mechanism with it.
    """
    import torch

    from adapmixed.mechanisms import Rows
    from adapmixed.rng import SecureRandom

    private: Any = mechanism
    if hasattr(mechanism, "public_confidence"):
        private = replace(private, public_confidence=None)
    rows = Rows(torch.zeros(num_models, 1, 2), torch.zeros(1, 2), None, 2)
    ticket: Ticket = private.propose_rows(rows, rng=SecureRandom(), origin=origin)
    ticket.mechanism = mechanism
    return ticket
