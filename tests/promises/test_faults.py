"""Planted faults: the named test must fail while a function of the library breaks its promise.

All named tests run without a fault first. Then each fault replaces one function or method, wherever
it was imported, and its test runs again in this process. `kernels/test_reference.py` plants faults
in the answers of the operators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from math import inf, nextafter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adapmixed_ext as ops
from adapmixed.privacy import Caveat
from adapmixed.rng import SeededRandom

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Replacement = Callable[[Any], Any]


def changed(change: Callable[[Any], Any]) -> Replacement:
    """Return a fault that changes a function's result."""
    return lambda original: lambda *values, **named: change(original(*values, **named))


def instead(function: Any) -> Replacement:
    """Return a fault that replaces a function."""
    return lambda _: function


NOTHING = instead(lambda *_, **__: None)


def larger(budget: Any) -> Any:
    return replace(budget, amount=nextafter(budget.amount, inf))


def single_precision(self: Any, rng: Any) -> Any:
    probabilities = self.probabilities().float().double()
    return self.rows.released(ops.sample(probabilities, self.rows.public, rng=rng), rng)


def without_caveats(original: Any) -> Any:
    return lambda self, account, events: account.added(
        [event for event in events if event != Caveat("seeded")]
    )


def charged_again(original: Any) -> Any:
    def charge(self: Any, pay: Any) -> None:
        self._state = "proposed"
        original(self, pay)

    return charge


ONCE = "mechanisms/test_mechanism.py::test_an_answer_is_charged_once_and_released_once"
# Rank, what goes wrong there, how, and the test that fails.
FAULTS: list[tuple[str, str, Replacement, str]] = [
    # Costs are rounded up, settings down, and draws are exact.
    ("adapmixed.privacy.conversions:add_up", "sums are rounded to nearest",
     instead(np.add),
     "privacy/test_conversions.py::test_a_sum_is_never_below_the_exact_one"),
    ("adapmixed.privacy.conversions:add_up", "sums of losses are rounded to nearest",
     instead(lambda total, losses: total + losses),
     "privacy/test_accountant.py::test_totals_are_upper_bounds_of_the_losses"),
    ("adapmixed.privacy.guarantee:format_epsilon", "an epsilon is shown rounded to nearest",
     instead(lambda epsilon: f"{epsilon:.4g}"),
     "privacy/test_guarantee.py::test_displayed_epsilon_is_rounded_up"),
    ("adapmixed.privacy.conversions:gdp_to_dp", "an epsilon of Gaussian DP is rounded down",
     changed(lambda epsilon: epsilon * (1 - 1e-9)),
     "privacy/test_conversions.py::test_epsilon_of_gaussian_dp_keeps_delta_and_little_less_does_not"),
    ("adapmixed.privacy.composition:ShardBudget.for_epsilon", "a budget is rounded up",
     lambda original: classmethod(lambda cls, *args: larger(original.__func__(cls, *args))),
     "privacy/test_accountant.py::test_a_budget_is_the_largest_for_its_epsilon"),
    ("adapmixed.mechanisms.paper:PMixED.per_query", "PMixED leaves no room for rounding",
     lambda original: property(lambda self: original.fget(self) * (1 + 1e-9)),
     "mechanisms/test_paper.py::test_no_rounding_exceeds_the_configured_epsilon"),
    ("adapmixed.privacy.costs:charge_rounding", "charges lack the others' rounding",
     changed(lambda _: (0.0, 0.0)),
     "mechanisms/test_distributions.py::test_an_emptied_member_costs_at_most_its_own_charge"),
    ("adapmixed.mechanisms.mechanism:NextToken.sample", "tokens are drawn in single precision",
     instead(single_precision),
     "mechanisms/test_distributions.py"
     "::test_tokens_are_drawn_from_the_distribution_to_the_last_bit"),
    # Costs are those of the theorems.
    ("adapmixed.privacy.guarantee:_conversions", "every order gets the whole delta",
     lambda original: lambda orders, delta: original(orders, delta * len(orders)),
     "privacy/test_accountant.py::test_several_orders_split_delta"),
    ("adapmixed.privacy.costs:screening_rho", "a screening is free",
     changed(lambda _: 0.0),
     "privacy/test_accountant.py::test_table_2b"),
    # A charge comes before its release, once, and is on the device.
    ("adapmixed.privacy.accountant:Accountant.charge", "answers are free",
     instead(lambda self, ticket: ticket.charge(lambda events, charges: None)),
     "generation/test_generator.py"
     "::test_every_step_is_charged_before_its_token_is_drawn_and_yielded"),
    ("adapmixed.mechanisms.mechanism:Ticket._active", "an answer is released without a charge",
     instead(property(lambda self: None)), ONCE),
    ("adapmixed.mechanisms.mechanism:Ticket.release", "a second release draws again",
     instead(lambda self: self._distribution.answer(self._targets, self._rng)), ONCE),
    ("adapmixed.mechanisms.mechanism:Ticket.charge", "one ticket is charged twice",
     charged_again, ONCE),
    ("adapmixed.privacy.accountant:Accountant._check_usable", "a forked child spends",
     NOTHING,
     "privacy/test_accountant.py::test_a_forked_child_spends_nothing"),
    ("adapmixed.privacy.ledger:Ledger.append", "a ledger does not write its charges",
     NOTHING,
     "privacy/test_ledger.py::test_a_record_is_flushed_before_the_release"),
    ("adapmixed.privacy.ledger:Record.check_after", "a record's hash is not compared",
     NOTHING,
     "privacy/test_ledger_tampering.py::test_tampered_files_are_refused"),
    ("adapmixed.serving.engine:Drawing.check_all_drawn", "what was not drawn pays for later steps",
     NOTHING,
     "serving/test_engines.py::test_a_step_draws_what_is_charged_and_nothing_else"
     "[a row is not answered-adapmixed]"),
    # No member and no plan is charged beyond its budget.
    ("adapmixed.privacy.accountant:Account.admit", "a member contributes after its budget is spent",
     changed(lambda active: active | True),
     "mechanisms/test_clipped.py::test_members_are_admitted_position_after_position"),
    ("adapmixed.privacy.accountant:Account._check_plan", "a plan of T queries answers more",
     NOTHING,
     "privacy/test_accountant.py"
     "::test_the_first_answer_charges_the_whole_plan_which_is_not_exceeded[bound]"),
    ("adapmixed.privacy.accountant:Accountant.check_left", "a generation ignores what others spent",
     NOTHING,
     "generation/test_generator.py::test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call"),
    ("adapmixed.serving.admission:Admission.reserve", "running answers have nothing reserved",
     instead(lambda self, tokens, key=None: None),
     "serving/test_admission.py::test_tokens_are_reserved_until_they_are_charged_or_given_back"),
    ("adapmixed.privacy.accountant:_check_fits", "losses of all are charged to one shard's budget",
     NOTHING,
     "privacy/test_accountant.py::test_mechanisms_without_a_guarantee_under_the_settings"),
    # Seeds and replays.
    ("adapmixed.rng:_Counter.reserve", "a counter is handed out twice",
     instead(lambda self: (self._key, self._next)),
     "test_rng.py::test_counters_never_repeat"),
    ("adapmixed.rng:SecureRandom._renew", "a forked child draws what its parent draws",
     NOTHING,
     "test_rng.py::test_a_forked_child_draws_another_key"),
    ("adapmixed.rng:SeededRandom.child", "the mechanisms of an evaluation share one source",
     instead(lambda self, label: SeededRandom(self.seed, self.label)),
     "test_rng.py::test_children_are_apart_and_repeatable"),
    ("adapmixed.rng:SeededRandom.skip_to", "a resumed evaluation draws its first noise again",
     NOTHING,
     "evaluation/test_loop.py::test_goes_on_with_new_noise"),
    ("adapmixed.privacy.accountant:Accountant._added", "a ledger takes seeded answers",
     without_caveats,
     "privacy/test_accountant.py::test_what_raises_writes_nothing"),
    # Guarantees are whole statements, about members that are apart.
    ("adapmixed.privacy.guarantee:Guarantee.__str__", "a guarantee leaves out its caveats",
     instead(lambda self: self._statement()),
     "misuse/test_misuse.py::test_a_guarantee_of_seeded_answers_says_so"),
    ("adapmixed.ensemble.members:check_shards", "a person in two shards is not noticed",
     instead(lambda members, shards: True),
     "misuse/test_misuse.py::test_overlapping_shards_are_refused"),
    ("adapmixed_ext:log_pool", "an exhausted member of a pool still contributes",
     lambda original: lambda *rows, active=None, **named: original(*rows, **named),
     "mechanisms/test_clipped.py"
     "::test_emptied_and_exhausted_members_answer_alike_to_the_last_bit"),
    # Every text has records of its own, and a batch is drawn from once.
    ("adapmixed.synthesis.run:dealt", "a record lies in every batch",
     changed(lambda deal: deal._replace(slots=[deal.slots[0]] * len(deal.slots))),
     "synthesis/test_run_synthesis.py::test_each_name_has_one_slot_at_most"),
    ("adapmixed.synthesis.run:Journal.begin", "a token is drawn before its batch is spent",
     instead(lambda self, batch: self.tokens.setdefault(batch, [])),
     "synthesis/test_run_synthesis.py::test_a_batch_is_spent_before_its_first_token"),
    ("adapmixed.synthesis.run:Journal._read", "a journal forgets the batches that are spent",
     instead(lambda self, path, expected: 0),
     "synthesis/test_run_synthesis.py::test_a_run_goes_on_from_any_line_of_its_journal"),
    ("adapmixed.synthesis.run:Synthesis._drawn", "a second iteration draws from the same records",
     lambda original: property(original.func),
     "synthesis/test_run_synthesis.py::test_the_guarantee_is_that_of_one_text"),
]  # fmt: skip


class Outcome:
    """A plugin that counts the tests that passed and lists those that failed."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)


def outcome(tests: list[str], folder: Path) -> Outcome:
    """Run tests in this process until one fails."""
    tally = Outcome()
    names = [str(ROOT / "tests" / test) for test in tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--basetemp={folder}"]
    status = pytest.main([*options, *names], plugins=[tally])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return tally


def our_modules() -> list[Any]:
    here = str(ROOT / "tests")
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith("adapmixed") or str(getattr(module, "__file__", "")).startswith(here)
    ]


def exchange(old: Any, new: Any) -> None:
    """Replace an object in every module that holds it, and forget what was computed with it."""
    for module in our_modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
            elif callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


@contextmanager
def planted(place: str, fault: Replacement) -> Iterator[None]:
    module, _, path = place.partition(":")
    owner, _, name = path.rpartition(".")
    home = import_module(module)
    if owner:
        original = vars(getattr(home, owner))[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(getattr(home, owner), name, fault(original))
            yield
    else:
        original = getattr(home, name)
        replacement = fault(original)
        exchange(original, replacement)
        try:
            yield
        finally:
            exchange(replacement, original)


@pytest.fixture(scope="module", autouse=True)
def without_a_fault(tmp_path_factory: pytest.TempPathFactory) -> None:
    tests = list(dict.fromkeys(test for *_, test in FAULTS))
    tally = outcome(tests, tmp_path_factory.mktemp("control"))
    assert tally.passed >= len(tests) and not tally.failed


@pytest.mark.parametrize("place, what, fault, test", FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_fault_is_caught(
    place: str, what: str, fault: Replacement, test: str, tmp_path: Path
) -> None:
    with planted(place, fault):
        assert outcome([test], tmp_path / "faulty").failed
