"""Faults of costs, totals and the guarantees that follow from them."""

from __future__ import annotations

from .fault import Fault

_PRIVACY = "tests/privacy/"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "rounding toward privacy",
        "sums are rounded to nearest",
        "python/adapmixed/privacy/rounding.py",
        "return a + b if 0 in (a, b) else math.nextafter(a + b, math.inf)",
        "return a + b",
        (_PRIVACY + "test_rounding.py::test_a_sum_is_never_below_the_exact_one",),
    ),
    Fault(
        "rounding toward privacy",
        "sums of arrays are rounded to nearest",
        "python/adapmixed/privacy/rounding.py",
        "        above = np.nextafter(total, np.inf)\n",
        "        above = total\n",
        (_PRIVACY + "test_budget.py::test_charging_is_in_order_and_silent",),
    ),
    Fault(
        "rounding toward privacy",
        "an epsilon is shown rounded to nearest",
        "python/adapmixed/privacy/guarantee.py",
        "Context(prec=4, rounding=ROUND_CEILING)",
        "Context(prec=4)",
        (_PRIVACY + "test_guarantee.py::test_displayed_epsilon_is_rounded_up",),
    ),
    Fault(
        "rounding toward privacy",
        "a budget for an epsilon is rounded up",
        "python/adapmixed/privacy/budget.py",
        "return ShardBudget(measure, low, order)",
        "return ShardBudget(measure, high, order)",
        (_PRIVACY + "test_budget.py::test_a_budget_is_the_largest_for_its_epsilon",),
    ),
    Fault(
        "costs are the theorems'",
        "every order gets the whole delta",
        "python/adapmixed/privacy/epsilon.py",
        "share = delta if len(orders) == 1 else math.nextafter(delta / len(orders), 0.0)",
        "share = delta",
        (_PRIVACY + "test_several_orders.py::test_several_orders_split_delta",),
    ),
    Fault(
        "costs are the theorems'",
        "a mean over a subset is amplified at the sampling rate",
        "python/adapmixed_lab/audit/subsets.py",
        "return min(1.0, up(-math.expm1(_up_magnitude(num_models * math.log1p(-rate)))))",
        "return rate",
        ("tests/lab/audit/test_subsets.py::test_amplification_rate",),
    ),
    Fault(
        "costs are the theorems'",
        "replace-one doubles the zCDP budget instead of multiplying it by four",
        "python/adapmixed/privacy/budget.py",
        'zcdp_to_dp(times_up(4, amount) if adjacency == "replace_one" else amount, delta)[0]',
        'zcdp_to_dp(times_up(2, amount) if adjacency == "replace_one" else amount, delta)[0]',
        (_PRIVACY + "test_budget.py::test_a_budget_is_the_largest_for_its_epsilon",),
    ),
    Fault(
        "costs are the theorems'",
        "a replaced shard of a pool costs what an emptied one does",
        "python/adapmixed/privacy/costs/clipped_log_pool.py",
        "        span *= 2\n",
        "        span *= 1\n",
        (_PRIVACY + "test_totals.py::test_the_log_pool_is_zcdp",),
    ),
    Fault(
        "costs are the theorems'",
        "only one order of the neighbours is composed",
        "python/adapmixed/privacy/composition.py",
        "for pmf in (total._pmf_remove, total._pmf_add))",
        "for pmf in (total._pmf_add,))",
        (_PRIVACY + "test_composition.py::test_every_pair_of_orders_is_the_larger_one",),
    ),
    Fault(
        "costs are the theorems'",
        "one of two mechanisms in an accountant is left out",
        "python/adapmixed/privacy/totals.py",
        "if None not in (family, known) and family != known:",
        "if None not in (family, known) and family != known and self.spent is not None:",
        (_PRIVACY + "test_totals.py::test_mechanisms_do_not_mix_in_any_sequence",),
    ),
    Fault(
        "losses in full",
        "realised losses are charged without their error",
        "python/adapmixed/privacy/totals.py",
        "loss = event.loss * (1 + event.loss_error) + LOSS_ABSOLUTE_ERROR",
        "loss = event.loss + LOSS_ABSOLUTE_ERROR",
        (_PRIVACY + "test_accountant.py::test_totals_are_upper_bounds_of_the_inflated_losses",),
    ),
    Fault(
        "budgets hold",
        "a member contributes while anything is left",
        "python/adapmixed/privacy/totals.py",
        "active[:, position] = total <= budget.amount",
        "active[:, position] = spent < budget.amount",
        (_PRIVACY + "test_budget.py::test_charging_is_in_order_and_silent",),
    ),
    Fault(
        "budgets hold",
        "the positions of a batch do not see one another's charges",
        "python/adapmixed/privacy/totals.py",
        "total = array_add_up(spent, charge[:, position])",
        "total = array_add_up(np.zeros(len(charge)), charge[:, position])",
        (_PRIVACY + "test_budget.py::test_charging_is_in_order_and_silent",),
    ),
    Fault(
        "budgets hold",
        "a plan of T queries costs what was answered so far",
        "python/adapmixed/privacy/epsilon.py",
        "return totals.counts[event] if budget is None else budget",
        "return totals.counts[event]",
        (_PRIVACY + "test_accountant.py::test_a_budget_is_charged_at_once_and_not_exceeded",),
    ),
    Fault(
        "retirement is silent",
        "an error tells that all members are exhausted",
        "python/adapmixed/privacy/totals.py",
        "            spent = np.where(active[:, position], total, spent)\n        return active\n",
        "            spent = np.where(active[:, position], total, spent)\n"
        "        if active.size and not active.any():\n"
        '            raise ValueError("charge must leave some of the budget")\n'
        "        return active\n",
        ("tests/evaluation/test_evaluation_results.py::test_perplexity_under_budgets_of_shards",),
    ),
    Fault(
        "whole statements",
        "a guarantee leaves out its caveats",
        "python/adapmixed/privacy/guarantee.py",
        'return " ".join([self._statement(), *self.warnings])',
        "return self._statement()",
        ("tests/misuse/test_misuse.py::test_a_guarantee_of_seeded_answers_says_so",),
    ),
    Fault(
        "whole statements",
        "realised losses together with fixed bounds are called fixed",
        "python/adapmixed/privacy/totals.py",
        '        if self.losses is not None:\n            return "data-dependent, ex-post"\n',
        "        if self.losses is not None and not self.of(RenyiBound):\n"
        '            return "data-dependent, ex-post"\n',
        (
            _PRIVACY + "test_accountant.py::"
            "test_fixed_bounds_compose_and_mix_with_realised_losses_of_the_same_order",
        ),
    ),
    Fault(
        "whole statements",
        "numbers of the published bound are called a guarantee",
        "python/adapmixed/privacy/totals.py",
        "if any(bound.published for bound in self.of(RenyiBound)):",
        "if self.losses is not None and any(one.published for one in self.of(RenyiBound)):",
        (
            "tests/lab/reproduce/test_pmixed_published.py::"
            "test_guarantee_of_the_published_analysis_promises_nothing",
        ),
    ),
    Fault(
        "whole statements",
        "unprotected answers after protected ones are forgotten",
        "python/adapmixed/privacy/totals.py",
        "if self.counts.get(UnprotectedAnswer(0), 0):",
        "if self.counts.get(UnprotectedAnswer(0), 0) and self._family is None:",
        (_PRIVACY + "test_totals.py::test_public_and_unprotected_answers_beside_them",),
    ),
    Fault(
        "whole statements",
        "a guarantee does not say who is a neighbour",
        "python/adapmixed/privacy/guarantee.py",
        "; neighbouring: {_NEIGHBOURS[self.adjacency or '']}",
        "",
        (_PRIVACY + "test_guarantee.py::test_sentences_say_what_is_promised_and_what_is_not",),
    ),
    Fault(
        "whole statements",
        "losses for one kind of neighbours are stated for another",
        "python/adapmixed/privacy/epsilon.py",
        'adjacency=neighbours if neighbours == "add_remove" else adjacency,',
        "adjacency=adjacency,",
        (_PRIVACY + "test_accountant.py::test_a_guarantee_of_the_papers_leave_one_out_says_so",),
    ),
    Fault(
        "whole statements",
        "realised losses are stated for replaced records",
        "python/adapmixed/privacy/epsilon.py",
        '        if totals.kind != "fixed":\n',
        '        if totals.kind == "public":\n',
        (
            _PRIVACY + "test_accountant.py::"
            "test_what_is_not_fixed_has_no_statement_for_a_replaced_shard",
        ),
    ),
    Fault(
        "whole statements",
        "a number of queries that was not planned is stated without its condition",
        "python/adapmixed/privacy/guarantee.py",
        'condition = " if the number of queries and the settings of each were fixed, too"',
        'condition = ""',
        (_PRIVACY + "test_totals.py::test_what_may_follow_a_schedule_says_that_it_must_be_fixed",),
    ),
    Fault(
        "voiding raises",
        "a screening under a budget of every shard is accepted",
        "python/adapmixed/privacy/totals.py",
        "if budget is not None and not isinstance(event, PublicAnswer):",
        "if budget is not None and not isinstance(event, PublicAnswer | GaussianScreening):",
        ("tests/misuse/test_misuse.py::test_no_filter_runs_on_adapmixed",),
    ),
)
