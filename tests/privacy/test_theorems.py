"""Every function and method of the privacy layer that computes a cost names its theorem."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adapmixed import privacy

BOOKKEEPING = {
    "encoding", "events_json",  # how things are written and read
    "rounding",  # sums
    "search",  # for settings, by the cost that it is given
}  # fmt: skip
"""Modules that compute no ε and no cost. Neither does the package `ledger`, which stores them."""

ACCESSORS = {
    "Account.added", "Account.bound", "Account.fixed_epsilon", "Account.from_state",
    "Account.guarantee", "Account.limit", "Account.parts", "Account.read", "Account.spent",
    "Account.state", "Account.written",
    "Accountant.add", "Accountant.adjacency", "Accountant.bind", "Accountant.charge",
    "Accountant.charges", "Accountant.check_left", "Accountant.close", "Accountant.delta",
    "Accountant.durable", "Accountant.epsilon", "Accountant.from_state",
    "Accountant.goes_on_from", "Accountant.limit", "Accountant.planned", "Accountant.queries",
    "Accountant.spent", "Accountant.state",
    "Guarantee.warnings",
    "IndividualCharge.num_models", "IndividualCharge.queries",
    "LeaveOneOutLoss.num_models", "LeaveOneOutLoss.queries",
    "Losses.add",
    "Totals.add", "Totals.kind", "Totals.num_models", "Totals.of", "Totals.planned",
    "Totals.public_queries", "Totals.queries", "Totals.renyi",
    "bound_to", "check_left", "checked_array", "format_epsilon",
    "larger_order", "weak_warnings",
}  # fmt: skip
"""What returns given values in another form, or searches by a cost that it is given."""


def _named(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if getattr(value, "_is_protocol", False):
            continue
        if inspect.isclass(value):
            for method, found in vars(value).items():
                function = getattr(found, "__func__", getattr(found, "fget", found))
                if not method.startswith("_") and inspect.isroutine(function):
                    yield f"{name}.{method}", function
        elif inspect.isroutine(inspect.unwrap(value)):
            yield name, value


COMPUTED = {
    name: function
    for found in pkgutil.walk_packages(privacy.__path__, "adapmixed.privacy.")
    if found.name.split(".")[2] not in BOOKKEEPING | {"ledger"}
    for name, function in _named(importlib.import_module(found.name))
}


@pytest.mark.parametrize("name", sorted(COMPUTED.keys() - ACCESSORS))
def test_what_is_computed_names_its_theorem(name: str) -> None:
    words = " ".join((inspect.getdoc(COMPUTED[name]) or "").split())
    named = re.search(r"docs/(theory|concepts)/[a-z-]+\.md", words)
    assert named or re.search(r"\b(Theorem|Proposition|Lemma|Corollary) \d", words), words


def test_all_of_them_were_asked() -> None:
    asked = COMPUTED.keys() - ACCESSORS
    assert {"c_alpha", "zcdp_to_dp", "clipped_mixing_epsilon", "plan", "sound_bound"} <= asked
    assert {
        "replace_one_epsilon",
        "emptied_share",
        "smallest_epsilon",
        "answer_error",
    } <= asked
    assert {"Accountant.guarantee", "Accountant.get_epsilon", "Accountant.breakdown"} <= asked
    assert {"guarantee_of", "parts_of", "Totals.admit"} <= asked
    assert {"ShardBudget.epsilon", "ShardBudget.for_epsilon", "DominatingPair.renyi"} <= asked
    assert COMPUTED.keys() >= ACCESSORS, ACCESSORS - COMPUTED.keys()
    exported = {name: inspect.unwrap(getattr(privacy, name)) for name in privacy.__all__}
    routines = {name for name, one in exported.items() if inspect.isroutine(one)}
    assert COMPUTED.keys() >= routines - {"read_ledger"}
