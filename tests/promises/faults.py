"""Faults that break a promise: where, what is changed, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass

_KERNELS = "tests/kernels/"
_MECHANISMS = "tests/mechanisms/"
_PRIVACY = "tests/privacy/"
_DRIVER = "tests/driver/"


@dataclass(frozen=True)
class Fault:
    """One change of one source file.

    Attributes:
        promise: the one that it breaks.
        what: the fault, in a few words.
        file: path from the root of the repository.
        old: text that occurs there exactly once.
        new: what is put in its place.
        tests: files or single tests of which at least one must fail.
    """

    promise: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        """Whether the compiled module must be built again."""
        return self.file.startswith("csrc/")


FAULTS: tuple[Fault, ...] = (
    Fault(
        "exact sampling",
        "a draw that equals a weight takes its token",
        "csrc/core/sampling.h",
        "if (left < weight) return left >= static_cast<uint128>(v) ? v : -1;",
        "if (left <= weight) return left >= static_cast<uint128>(v) ? v : -1;",
        (_KERNELS + "test_sample.py::test_what_integers_leave_open_is_decided_by_the_fraction",),
    ),
    Fault(
        "exact sampling",
        "draws between the integer sum and the true sum are thrown away",
        "csrc/cpu/sample.cpp",
        "if (*token < 0 && draw < total + static_cast<uint128>(vocab)) {",
        "if (*token < 0 && draw < total) {",
        (_KERNELS + "test_sample.py::test_what_integers_leave_open_is_decided_by_the_fraction",),
    ),
    Fault(
        "exact sampling",
        "all rows of a batch draw from one stream",
        "csrc/cpu/sample.cpp",
        "const Stream stream{key, counter, static_cast<std::uint32_t>(b)};",
        "const Stream stream{key, counter, static_cast<std::uint32_t>(b - b)};",
        (_KERNELS + "test_sample.py::test_sample_draws_exactly_by_the_stream",),
    ),
    Fault(
        "exact sampling",
        "tokens are drawn from the distribution in single precision",
        "python/adapmixed/mechanisms/law.py",
        "lambda: ops.sample(probabilities, support, rng=rng),",
        "lambda: ops.sample(probabilities.float().double(), support, rng=rng),",
        (_MECHANISMS + "test_laws.py::test_tokens_are_drawn_from_the_law_to_the_last_bit",),
    ),
    Fault(
        "unpredictable randomness",
        "ChaCha with 18 rounds",
        "csrc/core/chacha.h",
        "for (int round = 0; round < 10; ++round) {",
        "for (int round = 0; round < 9; ++round) {",
        (_KERNELS + "test_chacha.py::test_rfc_8439_blocks",),
    ),
    Fault(
        "unpredictable randomness",
        "a counter is handed out twice",
        "python/adapmixed/rng.py",
        "        self._next += 1\n",
        "        self._next |= 1\n",
        ("tests/test_rng.py::test_counters_never_repeat",),
    ),
    Fault(
        "unpredictable randomness",
        "a forked child draws what its parent draws",
        "python/adapmixed/rng.py",
        "            if os.getpid() != self._owner:\n",
        "            if self._owner is None:\n",
        ("tests/test_rng.py::test_a_forked_child_draws_another_key",),
    ),
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
        (_PRIVACY + "test_filter.py::test_charging_is_in_order_and_silent",),
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
        "PMixED's radius leaves no room for the rounding of its sums",
        "python/adapmixed/mechanisms/pmixed.py",
        "return max(0.0, self.epsilon - conversion - rounding) / self.queries * slack",
        "return max(0.0, self.epsilon - conversion) / self.queries",
        (_MECHANISMS + "test_pmixed.py::test_no_rounding_exceeds_the_configured_epsilon",),
    ),
    Fault(
        "rounding toward privacy",
        "a budget for an epsilon is rounded up",
        "python/adapmixed/privacy/filter_budget.py",
        "return cls(measure, low, delta, order, releases, sigma)",
        "return cls(measure, high, delta, order, releases, sigma)",
        (_PRIVACY + "test_filter.py::test_a_budget_is_the_largest_for_its_epsilon",),
    ),
    Fault(
        "costs are the theorems'",
        "every order has the whole delta",
        "python/adapmixed/privacy/renyi_total.py",
        "uniform = math.nextafter(1 / len(orders), 0.0)",
        "uniform = 1.0",
        (_PRIVACY + "test_several_orders.py::test_several_orders_split_delta",),
    ),
    Fault(
        "costs are the theorems'",
        "a mean over a subset is amplified at the sampling rate",
        "python/adapmixed/privacy/ball_bounds.py",
        "return min(1.0, up(-math.expm1(up_magnitude(num_models * math.log1p(-rate)))))",
        "return rate",
        (_PRIVACY + "test_conversions.py::test_amplification_rate",),
    ),
    Fault(
        "costs are the theorems'",
        "replace-one doubles the zCDP budget, where it has to be four times that",
        "python/adapmixed/privacy/filter_budget.py",
        'zcdp_to_dp(times_up(4, amount) if adjacency == "replace_one" else amount, delta)[0]',
        'zcdp_to_dp(times_up(2, amount) if adjacency == "replace_one" else amount, delta)[0]',
        (_PRIVACY + "test_filter.py::test_a_budget_is_the_largest_for_its_epsilon",),
    ),
    Fault(
        "costs are the theorems'",
        "without a constant N a missing model of a pool costs what an emptied one does",
        "python/adapmixed/privacy/bounded_range.py",
        'if adjacency == "replace_one" or counted:',
        'if adjacency == "replace_one":',
        (_PRIVACY + "test_fixed_totals.py::test_the_log_pool_is_zcdp",),
    ),
    Fault(
        "costs are the theorems'",
        "one order of the neighbours alone is composed",
        "python/adapmixed/privacy/composition.py",
        "for pmf in (total._pmf_remove, total._pmf_add))",
        "for pmf in (total._pmf_add,))",
        (_PRIVACY + "test_composition.py::test_every_pair_of_orders_is_the_larger_one",),
    ),
    Fault(
        "costs are the theorems'",
        "a second mechanism replaces the total of the first",
        "python/adapmixed/privacy/running.py",
        "    if not isinstance(state.total, type(empty)):\n        raise ValueError(",
        "    if not isinstance(state.total, type(empty)):\n        return empty\n"
        "    if state.num_models == 0:\n        raise ValueError(",
        (_PRIVACY + "test_fixed_totals.py::test_mechanisms_do_not_mix_in_any_sequence",),
    ),
    Fault(
        "feasible weights",
        "the projection in double precision leaves no margin for rounding",
        "csrc/core/projection.h",
        "t.excess = margin < 1.0 ? excess * (1.0 - margin) : 0.0;",
        "t.excess = excess;",
        (_KERNELS + "test_project.py::test_the_range_in_which_weights_are_near_the_optimum",),
    ),
    Fault(
        "feasible weights",
        "the excess in single precision leaves no margin for rounding",
        "csrc/core/float_search.h",
        "target.excess = excess_ * (1.0 - constant);",
        "target.excess = constant < 1.0 ? excess_ : 0.0;",
        (
            _KERNELS + "test_project.py::"
            "test_single_precision_stays_below_the_optimum_by_what_it_may_cost",
        ),
    ),
    Fault(
        "feasible weights",
        "the weight in single precision leaves no margin for rounding",
        "csrc/core/float_search.h",
        "const double weight = x.weight * (1.0 + kFloatRelative);",
        "const double weight = x.weight;",
        (
            _KERNELS + "test_project.py::"
            "test_single_precision_stays_below_the_optimum_by_what_it_may_cost",
        ),
    ),
    Fault(
        "losses in full",
        "a leave-one-out loss in single precision is that of one direction",
        "csrc/core/loss_bound.h",
        "std::fmax(std::fmax(forward.value, reverse.value), 0.0);",
        "std::fmax(forward.value, 0.0);",
        (_KERNELS + "test_leave_one_out.py::test_every_neighbour_on_tiny_vocabularies",),
    ),
    Fault(
        "losses in full",
        "a charge of clipped mixing is that of one direction",
        "csrc/core/clip_charge.h",
        "const double excess = share * std::fmax(std::fmax(forward, reverse), 0.0);",
        "const double excess = share * std::fmax(reverse, 0.0);",
        (_KERNELS + "test_clip_project.py::test_against_the_oracle",),
    ),
    Fault(
        "losses in full",
        "the upper bound of a pool's clip is rounded outward",
        "csrc/core/log_pool.h",
        "most_ = kGridZero + std::floor(options.upper * scale_);",
        "most_ = kGridZero + std::ceil(options.upper * scale_);",
        (_KERNELS + "test_log_pool_privacy.py::test_bounds_that_are_no_multiples_are_kept",),
    ),
    Fault(
        "losses in full",
        "realised losses are charged without their error",
        "python/adapmixed/privacy/renyi_total.py",
        "loss = event.loss * (1 + event.loss_error) + LOSS_ABSOLUTE_ERROR",
        "loss = event.loss + LOSS_ABSOLUTE_ERROR",
        (_PRIVACY + "test_accountant.py::test_totals_are_upper_bounds_of_the_inflated_losses",),
    ),
    Fault(
        "losses in full",
        "charges of clipped mixing lack the rounding of the others' rows",
        "python/adapmixed/mechanisms/clipped.py",
        "inflated += LOSS_ABSOLUTE_ERROR + absolute",
        "inflated += LOSS_ABSOLUTE_ERROR",
        (_MECHANISMS + "test_clipped.py::test_an_emptied_slot_costs_at_most_its_own_charge",),
    ),
    Fault(
        "charge before draw",
        "a token is drawn, and charged then",
        "python/adapmixed/decoding.py",
        "    answer = proposal.release(charge(proposal)).tokens\n",
        "    answer = proposal.release().tokens\n    charge(proposal)\n",
        (
            _DRIVER + "test_decoding.py::"
            "test_every_step_is_charged_before_its_token_is_drawn_and_yielded",
        ),
    ),
    Fault(
        "charge before draw",
        "the head names a record that is not yet written",
        "python/adapmixed/privacy/ledger/ledger.py",
        "            self._store.append(record)\n"
        "            self._head.write(Head(record.sequence, record.hash))\n",
        "            self._head.write(Head(record.sequence, record.hash))\n"
        "            self._store.append(record)\n",
        (
            _PRIVACY + "test_ledger_durability.py::"
            "test_record_and_head_are_flushed_before_the_release",
        ),
    ),
    Fault(
        "charge before draw",
        "SQLite does not wait for the device",
        "python/adapmixed/privacy/ledger/store.py",
        '(("synchronous", 2), ("fullfsync", 1), ("checkpoint_fullfsync", 1))',
        '(("synchronous", 1), ("fullfsync", 1), ("checkpoint_fullfsync", 1))',
        (
            _PRIVACY + "test_ledger_durability.py::"
            "test_the_settings_of_an_open_writer_wait_for_the_device",
        ),
    ),
    Fault(
        "charge before draw",
        "a ledger takes charges after one has failed",
        "python/adapmixed/privacy/ledger/ledger.py",
        '                self._unusable = f"a charge failed ({error or type(error).__name__})"\n',
        '                _LOG.warning("a charge failed: %s", error)\n',
        (
            _PRIVACY + "test_ledger_failures.py::"
            "test_a_head_that_cannot_be_written_releases_nothing",
        ),
    ),
    Fault(
        "stop token charged",
        "the token that ends the last text is free",
        "python/adapmixed/decoding.py",
        "        tokens[going] = _answer(decoder, ranks, mechanism, rng, charge)\n",
        "        proposal = mechanism.propose(*decoder.logits, rng=rng, ranks=ranks)\n"
        "        tokens[going] = proposal.release().tokens\n"
        "        told = torch.cat([released, tokens[:, None]], dim=1)\n"
        "        if not any(not bool((going & ~stop(told)).any()) for stop in stops):\n"
        "            charge(proposal)\n",
        (_DRIVER + "test_decoding.py::test_decoding_stops_when_all_sequences_have_ended",),
    ),
    Fault(
        "one draw for one charge",
        "a second release draws again",
        "python/adapmixed/mechanisms/base.py",
        "                self._answers.append(answer)\n            return self._answers[0]\n",
        "                return answer\n            return self._answers[0]\n",
        (_MECHANISMS + "test_protocol.py::test_a_charge_pays_for_one_token_a_position",),
    ),
    Fault(
        "one draw for one charge",
        "a copy of a proposal has an answer of its own",
        "python/adapmixed/mechanisms/base.py",
        "_answers: list[Answer] = field(default_factory=list, repr=False, compare=False)",
        "_answers: list[Answer] = field(\n"
        "        default_factory=list, repr=False, compare=False, init=False\n    )",
        (_MECHANISMS + "test_slots.py::test_copies_share_slots_and_answer",),
    ),
    Fault(
        "one draw for one charge",
        "a mask that the caller changes later is the charged one",
        "python/adapmixed/mechanisms/base.py",
        "active = None if active is None else active.clone()  # the caller may change the mask"
        " later",
        "",
        (_MECHANISMS + "test_slots.py::test_a_mask_changed_in_place_is_another_one",),
    ),
    Fault(
        "budgets hold",
        "a member contributes while anything is left",
        "python/adapmixed/privacy/filter.py",
        "active[:, position] = total <= self.budget.amount",
        "active[:, position] = spent < self.budget.amount",
        (_PRIVACY + "test_filter.py::test_charging_is_in_order_and_silent",),
    ),
    Fault(
        "budgets hold",
        "the positions of a batch do not see one another's charges",
        "python/adapmixed/privacy/filter.py",
        "total = array_add_up(spent, charges[:, position])",
        "total = array_add_up(self._spent, charges[:, position])",
        (_PRIVACY + "test_filter.py::test_charging_is_in_order_and_silent",),
    ),
    Fault(
        "budgets hold",
        "a plan of T queries costs what was answered so far",
        "python/adapmixed/privacy/renyi_total.py",
        "return budget if self.plan is None else 0",
        "return event.queries",
        (_PRIVACY + "test_accountant.py::test_a_budget_is_charged_at_once_and_not_exceeded",),
    ),
    Fault(
        "budgets hold",
        "a generation does not see what earlier ones have spent of a plan",
        "python/adapmixed/charging.py",
        "if mechanism.budget is not None and answered + queries > mechanism.budget:",
        "if mechanism.budget is not None and queries > mechanism.budget:",
        (
            _DRIVER + "test_charging.py::"
            "test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call",
        ),
    ),
    Fault(
        "retirement is silent",
        "an error tells that all members are exhausted",
        "python/adapmixed/privacy/filter.py",
        "            self._spent, self._answers = spent, self._answers + shape[1]\n",
        "            self._spent, self._answers = spent, self._answers + shape[1]\n"
        "        if shape[1] and not active.any():\n"
        '            raise ValueError("charges must leave some of the budget")\n',
        (_DRIVER + "test_evaluation_results.py::test_perplexity_under_a_filter",),
    ),
    Fault(
        "retirement is silent",
        "an answer says that it is public where all members are exhausted",
        "python/adapmixed/mechanisms/base.py",
        "answer = Answer(law.sample(self._rng), None, self.public)",
        "public = self.public if active is None else self.public | ~active.any(0)\n"
        "                    answer = Answer(law.sample(self._rng), None, public)",
        (_MECHANISMS + "test_slots.py::test_an_answer_does_not_tell_who_contributed",),
    ),
    Fault(
        "row independence",
        "the tokens that are kept depend on the private rows",
        "python/adapmixed/mechanisms/shaped.py",
        "kept = ranks.same(public.float().topk(top_k, dim=-1).indices)",
        "kept = ranks.same(private.float().mean(0).topk(top_k, dim=-1).indices)",
        (_MECHANISMS + "test_shaped.py::test_it_is_the_mechanism_on_reshaped_rows",),
    ),
    Fault(
        "row independence",
        "members of another rank are added zeros",
        "python/adapmixed/models/batched_lora.py",
        "kept = outputs.index_select(0, self.others) if len(self.others) else None",
        "kept = None",
        (_DRIVER + "test_batched_lora.py::test_rows_of_other_ranks_are_not_even_added_zero",),
    ),
    Fault(
        "row independence",
        "what members share follows from the members that are there",
        "python/adapmixed/models/ensemble.py",
        "self.trunk = find_trunk(model, adapted)",
        "self.trunk = find_trunk(model, merged_layers([one.layers for one in adapters]))",
        (_DRIVER + "test_trunk.py::test_members_that_differ_cannot_be_missing_without_a_constant",),
    ),
    Fault(
        "emptied is missing",
        "an emptied member is computed in its own row",
        "python/adapmixed/models/forward.py",
        "            logits[member + 1].copy_(logits[0])\n",
        "            assert logits[member + 1].shape == logits[0].shape\n",
        (_DRIVER + "test_separation.py::test_zero_adapter_is_exact_where_rows_round_differently",),
    ),
    Fault(
        "emptied is missing",
        "a missing member is computed in its own row",
        "python/adapmixed/models/ensemble.py",
        "enumerate(adapters) if adapter.is_zero),",
        "enumerate(adapters) if adapter.updates and adapter.is_zero),",
        (_DRIVER + "test_separation.py::test_zero_adapter_is_exact_where_rows_round_differently",),
    ),
    Fault(
        "emptied is missing",
        "an emptied shard is projected where an exhausted one answers the public row",
        "python/adapmixed/mechanisms/clipped.py",
        "takes_part = asked & (charge[..., 0] > 0)",
        "takes_part = asked",
        (
            _MECHANISMS + "test_clipped.py::"
            "test_a_retired_slot_answers_as_an_emptied_one_to_the_last_bit",
        ),
    ),
    Fault(
        "emptied is missing",
        "an exhausted member of a pool goes on contributing",
        "csrc/core/log_pool.h",
        "return options.active == nullptr || options.active[at];",
        "return options.active == nullptr || at >= 0;",
        (_KERNELS + "test_log_pool.py::test_slots_that_are_inactive_or_absent_have_no_part",),
    ),
    Fault(
        "emptied is missing",
        "the screened mean forgets the members that are absent",
        "csrc/core/screening.h",
        "rest_ = ((slots - on) + (1.0 - options.weight) * on) / slots;",
        "rest_ = (1.0 - options.weight) * on / slots;",
        (_KERNELS + "test_screen.py::test_inactive_slots_answer_the_public_distribution",),
    ),
    Fault(
        "whole statements",
        "a guarantee leaves out its caveats",
        "python/adapmixed/privacy/guarantee.py",
        'return " ".join([self._statement(), *self.warnings])',
        "return self._statement()",
        (_DRIVER + "test_misuse.py::test_a_guarantee_of_seeded_answers_says_so",),
    ),
    Fault(
        "whole statements",
        "a source that does not say whether it is seeded counts as unseeded",
        "python/adapmixed/mechanisms/base.py",
        'if getattr(self._rng, "seeded", True) else []',
        'if getattr(self._rng, "seeded", False) else []',
        (_MECHANISMS + "test_protocol.py::test_a_source_that_does_not_say_counts_as_seeded",),
    ),
    Fault(
        "whole statements",
        "realised losses beside fixed bounds are called fixed",
        "python/adapmixed/privacy/running.py",
        "        if total.realised:\n",
        "        if total.realised and not total.bounded:\n",
        (
            _PRIVACY + "test_accountant.py::"
            "test_fixed_bounds_compose_and_mix_with_realised_losses_of_the_same_order",
        ),
    ),
    Fault(
        "whole statements",
        "numbers of the published bound are called a guarantee",
        "python/adapmixed/privacy/running.py",
        "        if total.published:\n",
        "        if total.published and total.realised:\n",
        (
            _MECHANISMS + "test_pmixed_published.py::"
            "test_guarantee_of_the_published_analysis_promises_nothing",
        ),
    ),
    Fault(
        "whole statements",
        "unprotected answers after protected ones are forgotten",
        "python/adapmixed/privacy/running.py",
        "            state.unprotected = True\n",
        "            state.unprotected = state.total is None\n",
        (_PRIVACY + "test_fixed_totals.py::test_public_and_unprotected_answers_beside_them",),
    ),
    Fault(
        "whole statements",
        "a guarantee does not say who is a neighbour",
        "python/adapmixed/privacy/guarantee.py",
        "; neighbouring: {_ADJACENCY_WORDS[self.adjacency or '']}",
        "",
        (_PRIVACY + "test_guarantee.py::test_sentences_say_what_is_promised_and_what_is_not",),
    ),
    Fault(
        "whole statements",
        "losses for one kind of neighbours are stated for another",
        "python/adapmixed/privacy/accountant.py",
        "        if asked is not None and known is not None and asked != known:\n",
        "        if asked is not None and known is not None and asked is known:\n",
        (_PRIVACY + "test_fixed_totals.py::test_renyi_events_answer_their_own_question_only",),
    ),
    Fault(
        "whole statements",
        "a number of queries that was not planned is stated without its condition",
        "python/adapmixed/privacy/guarantee.py",
        'condition = " if the number of queries and the settings of each were fixed, too"',
        'condition = ""',
        (
            _PRIVACY + "test_fixed_totals.py::"
            "test_what_may_follow_a_schedule_says_that_it_must_be_fixed",
        ),
    ),
    Fault(
        "voiding raises",
        "greedy decoding, beams and log-probabilities are ignored in silence",
        "python/adapmixed/decoding.py",
        "    refuse(refused)\n    check_parties(\n",
        "    check_parties(\n",
        (_DRIVER + "test_misuse.py::test_python_arguments",),
    ),
    Fault(
        "voiding raises",
        "settings of transformers that are not known are ignored",
        "python/adapmixed/integrations/generation_settings.py",
        "value in NEUTRAL.get(name, ()):\n            continue",
        "value in NEUTRAL.get(name, (value,)):\n            continue",
        (
            _DRIVER + "test_custom_generate.py::"
            "test_every_setting_of_transformers_is_honoured_refused_or_of_a_pass_that_is_not_run",
        ),
    ),
    Fault(
        "voiding raises",
        "a per-member budget runs on losses that depend on the other members",
        "python/adapmixed/mechanisms/base.py",
        "        if self._retirement is None or self.charges is None:\n            return None\n",
        "        if self.charges is None:\n            return None\n",
        (_DRIVER + "test_misuse.py::test_no_filter_runs_on_adapmixed",),
    ),
    Fault(
        "voiding raises",
        "a screening before the first charge of a filter is accepted",
        "python/adapmixed/privacy/running.py",
        "    if isinstance(state.total, FilterTotal) and state.screening.screened:\n",
        "    if isinstance(state.total, FilterTotal) and isinstance(event, GaussianScreening):\n",
        (_DRIVER + "test_misuse.py::test_no_filter_runs_on_adapmixed",),
    ),
    Fault(
        "voiding raises",
        "a ledger takes answers of a seeded source",
        "python/adapmixed/privacy/ledger/ledger.py",
        'if Caveat("seeded") in listed:',
        'if Caveat("seeded") == listed[0]:',
        (_DRIVER + "test_misuse.py::test_no_ledger_is_charged_for_seeded_answers",),
    ),
    Fault(
        "changed logits raise",
        "logits that were changed after they were proposed are drawn from",
        "python/adapmixed/mechanisms/law.py",
        '        """One token per position, (B,) int64."""\n        self._check_unchanged()\n',
        '        """One token per position, (B,) int64."""\n',
        (_MECHANISMS + "test_protocol.py::test_logits_changed_after_proposing_are_refused",),
    ),
    Fault(
        "changed logits raise",
        "logits made in inference mode are not kept",
        "python/adapmixed/mechanisms/law.py",
        "                object.__setattr__(self, name, logits.clone())\n",
        "                object.__setattr__(self, name, logits.detach())\n",
        (
            _MECHANISMS + "test_protocol.py::"
            "test_logits_of_inference_mode_are_kept_as_they_were_proposed",
        ),
    ),
    Fault(
        "budgets are not copied",
        "a source of randomness can be pickled",
        "python/adapmixed/rng.py",
        "    def __getstate__(self) -> object:\n        raise TypeError(",
        "    def __getstate__(self) -> object:\n"
        '        return {"_key": self._key, "_next": self._next}\n        raise TypeError(',
        ("tests/test_rng.py::test_sources_cannot_be_duplicated",),
    ),
    Fault(
        "budgets are not copied",
        "a filter can be copied",
        "python/adapmixed/privacy/filter.py",
        "    def __reduce__(self) -> NoReturn:\n        raise TypeError(",
        "    def __reduce__(self) -> Any:\n"
        "        return PerModelFilter.from_state, (self.state(),)\n        raise TypeError(",
        (_PRIVACY + "test_filter.py::test_there_are_no_copies",),
    ),
    Fault(
        "budgets are not copied",
        "a forked child spends its parent's budget",
        "python/adapmixed/privacy/filter.py",
        "        if os.getpid() != self._process:\n",
        "        if self._process is None:\n",
        (_PRIVACY + "test_filter.py::test_a_child_of_a_fork_spends_nothing",),
    ),
    Fault(
        "nothing private in the open",
        "the log tells what was spent",
        "python/adapmixed/decoding.py",
        '_LOG.info("released %d tokens", int((released >= 0).sum()))',
        '_LOG.info(\n                "released %d tokens, %s",\n'
        "                int((released >= 0).sum()),\n"
        "                charge.accountant.individual_spent,\n            )",
        (_DRIVER + "test_logging.py::test_private_values_are_in_no_message",),
    ),
    Fault(
        "nothing private in the open",
        "the line of a finished member tells its validation loss",
        "python/adapmixed/training/progress.py",
        'self.say(f"{name}: finished (',
        'self.say(f"{name}: {loss}, finished (',
        (
            _DRIVER + "test_train_command.py::"
            "test_validation_losses_are_logged_for_the_operator_alone",
        ),
    ),
    Fault(
        "nothing private in the open",
        "everybody can read a result file",
        "python/adapmixed/evaluation/result_file.py",
        "write_file(self.path, _text(content), mode=0o600)",
        "write_file(self.path, _text(content))",
        (_DRIVER + "test_result_file.py::test_a_result_is_read_back_without_the_models",),
    ),
    Fault(
        "nothing private in the open",
        "an epsilon that depends on the data is shown to everybody",
        "python/adapmixed/commands/serving.py",
        'if guarantee.kind.startswith("data-dependent") and not arguments.operator:',
        'if guarantee.kind == "data-dependent" and not arguments.operator:',
        (
            _DRIVER + "test_serving_commands.py::"
            "test_what_depends_on_private_data_is_for_the_operator",
        ),
    ),
    Fault(
        "vocabulary mask",
        "the public row is not masked",
        "python/adapmixed/models/forward.py",
        'logits.index_fill_(-1, self.masked_ids, float("-inf"))',
        'logits[1:].index_fill_(-1, self.masked_ids, float("-inf"))',
        (_DRIVER + "test_vocabulary.py::test_ids_without_a_token_are_masked_in_every_row",),
    ),
    Fault(
        "vocabulary mask",
        "ids are taken to have no holes",
        "python/adapmixed/models/vocabulary.py",
        "    unnamed[named] = False\n",
        "    unnamed[: len(named)] = False\n",
        (_DRIVER + "test_vocabulary.py::test_ids_without_a_token_are_masked_in_every_row",),
    ),
    Fault(
        "vocabulary mask",
        "probability on masked tokens is drawn",
        "csrc/core/sampling.h",
        "return supported ? (p > 0.0 ? p : 0x1p-1074) : 0.0;",
        "return p > 0.0 ? p : (supported ? 0x1p-1074 : 0.0);",
        (_KERNELS + "test_sample.py::test_tokens_outside_the_public_support_are_never_drawn",),
    ),
    Fault(
        "resumable",
        "a resumed evaluation draws its first noise again",
        "python/adapmixed/evaluation/methods.py",
        "            self.rng.skip_to(counter)\n",
        "            self.rng.skip_to(0)\n",
        (_DRIVER + "test_result_file.py::test_killed_before_every_change_of_the_disk",),
    ),
    Fault(
        "resumable",
        "a member's folder appears before it is whole",
        "python/adapmixed/training/member.py",
        "        temporary = temporary_folder(folder)\n",
        "        folder.mkdir()\n        temporary = folder\n",
        (_DRIVER + "test_train_kill.py::test_killed_before_every_change_of_the_disk",),
    ),
    Fault(
        "resumable",
        "training goes on with other settings",
        "python/adapmixed/training/folder.py",
        "            if name in given and known.get(name) != given[name]:\n",
        "            if name in given and name not in known:\n",
        (_DRIVER + "test_train.py::test_a_run_goes_on_with_the_same_only",),
    ),
    Fault(
        "repeatable evaluation",
        "the mechanisms of an evaluation share one source",
        "python/adapmixed/evaluation/loop.py",
        "kept.get(name), source.child(name)) for name in mechanisms]",
        "kept.get(name), source) for name in mechanisms]",
        (
            _DRIVER + "test_evaluation_results.py::"
            "test_a_mechanism_does_not_depend_on_its_neighbours",
        ),
    ),
    Fault(
        "repeatable evaluation",
        "noise depends on how positions are grouped",
        "python/adapmixed/mechanisms/adapmixed.py",
        "            for position in range(positions):\n"
        "                noise[position] = ops.gaussian(top_k, sigma=self.sigma, rng=rng)\n",
        "            noise[:] = ops.gaussian((positions, top_k), sigma=self.sigma, rng=rng)\n",
        (_MECHANISMS + "test_protocol.py::test_events_are_known_before_the_token_is_drawn",),
    ),
    Fault(
        "bounded memory",
        "a chunk takes the place of the cache, too",
        "python/adapmixed/models/forward.py",
        "return min(length, (memory_bytes - cache - fixed) // per_position)",
        "return min(length, (memory_bytes - fixed) // per_position)",
        (_DRIVER + "test_ensemble.py::test_chunks_equal_the_whole",),
    ),
    Fault(
        "bounded memory",
        "the copy that an ended sequence leaves is not counted",
        "python/adapmixed/models/forward.py",
        "        return sum(layers) + max(layers)\n",
        "        return sum(layers)\n",
        (_DRIVER + "test_cache.py::test_a_decoder_has_room_for_all_that_was_counted_and_no_more",),
    ),
    Fault(
        "bounded memory",
        "logits are kept while the next ones are computed",
        "python/adapmixed/evaluation/session.py",
        "            del private, public  # their place is the next chunk's\n",
        "",
        (_DRIVER + "test_long_evaluation.py::test_logits_are_not_kept",),
    ),
    Fault(
        "ledger notices",
        "one lost charge is not noticed",
        "python/adapmixed/privacy/ledger/reading.py",
        "    if tail.count < head.count:\n",
        "    if tail.count < head.count - 1:\n",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "ledger notices",
        "a database of the same length from elsewhere is accepted",
        "python/adapmixed/privacy/ledger/reading.py",
        "    if tail.watched != head.hash:\n",
        "    if tail.watched is None:\n",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "ledger notices",
        "a record's hash is not compared",
        "python/adapmixed/privacy/ledger/records.py",
        "if _link(previous, *fields, self.events, self.charges, self.totals) != self.hash:",
        "if not _link(previous, *fields, self.events, self.charges, self.totals):",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "shards are disjoint",
        "a person in two shards is not seen",
        "python/adapmixed/models/shards.py",
        "            other = owner.setdefault(identifier, member)\n",
        '            other = owner.setdefault(f"{member} {identifier}", member)\n',
        (_DRIVER + "test_misuse_shards.py::test_overlapping_shards_are_refused",),
    ),
    Fault(
        "shards are disjoint",
        "identifiers under different keys are compared",
        "python/adapmixed/models/shards.py",
        "        elif key != first_key[0]:\n",
        "        elif key is None:\n",
        (_DRIVER + "test_misuse_shards.py::test_overlapping_shards_are_refused",),
    ),
    Fault(
        "shards are disjoint",
        "what was not verified is not charged with the answers",
        "python/adapmixed/charging.py",
        "events = [*proposal.events(active), *map(Caveat, self.unverified)]",
        "events = proposal.events(active)",
        (_DRIVER + "test_misuse_shards.py::test_a_ledger_remembers_what_was_not_verified",),
    ),
    Fault(
        "shards are disjoint",
        "documents named by position are recorded as stable",
        "python/adapmixed/training/run.py",
        'document_names="positions" if run.corpus.positional else "stable",',
        'document_names="stable",',
        (_DRIVER + "test_document_names.py::test_training_says_and_records_positions",),
    ),
    Fault(
        "shards are disjoint",
        "documents are assigned to shards by their position",
        "python/adapmixed/training/shards.py",
        "(shard,) = assign_shards([document.identifier], num_shards, key=key)",
        "(shard,) = assign_shards([str(count)], num_shards, key=key)",
        (_DRIVER + "test_train.py::test_a_member_depends_on_its_shard_alone",),
    ),
    Fault(
        "provenance is checked",
        "of weights in parts the first is compared",
        "python/adapmixed/models/provenance.py",
        'names = sorted(set(content["weight_map"].values()))',
        'names = sorted(set(content["weight_map"].values()))[:1]',
        (_DRIVER + "test_misuse_public_model.py::test_a_public_model_of_other_weights_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "a public model without a digest counts as compared",
        "python/adapmixed/models/provenance.py",
        "return Compared(found is not None, same_tokenizer)",
        "return Compared(True, same_tokenizer)",
        (_DRIVER + "test_misuse_public_model.py::test_another_tokenizer_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "of a tokenizer one file is compared",
        "python/adapmixed/models/provenance.py",
        "for name in found.keys() & manifest.tokenizer_files.keys():",
        "for name in found.keys() & manifest.tokenizer_files.keys() & {TOKENIZER}:",
        (_DRIVER + "test_misuse_public_model.py::test_another_tokenizer_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "a ledger goes on with the members in another order",
        "python/adapmixed/models/provenance.py",
        "    for path in members:\n        if path is None:\n",
        "    for path in sorted(members, key=str):\n        if path is None:\n",
        (_DRIVER + "test_charging.py::test_a_ledger_belongs_to_the_members_in_their_order",),
    ),
    Fault(
        "screening is paid",
        "queries that are screened out are not charged for it",
        "python/adapmixed/mechanisms/adapmixed.py",
        "events.append(GaussianScreening(models, positions, self.screen_weight, self.sigma))",
        "screened = int(passed.sum())\n                events.append("
        "GaussianScreening(models, screened, self.screen_weight, self.sigma))",
        (_MECHANISMS + "test_adapmixed.py::test_screening_is_charged_whatever_its_outcome",),
    ),
    Fault(
        "screening is paid",
        "the fixed loss is charged to the queries that pass",
        "python/adapmixed/mechanisms/adapmixed.py",
        'events.append(RenyiBound(self.order, bound, models, positions, "zero_out"))',
        "asked = int(passed.sum())\n"
        '            events.append(RenyiBound(self.order, bound, models, asked, "zero_out"))',
        (_MECHANISMS + "test_adapmixed.py::test_fixed_loss_is_charged_for_every_query",),
    ),
    Fault(
        "one process charges",
        "a process that is not charged states a guarantee",
        "python/adapmixed/charging.py",
        "            self.accountant.follow()\n",
        "",
        (_DRIVER + "test_ranks.py::test_a_rank_that_is_not_charged_states_no_guarantee",),
    ),
    Fault(
        "one process charges",
        "every process draws a token of its own",
        "python/adapmixed/mechanisms/law.py",
        "        tokens = self.ranks.decide(\n",
        "        tokens = ALONE.decide(\n",
        (_DRIVER + "test_ranks_failures.py::test_a_run_that_nothing_happens_to",),
    ),
    Fault(
        "one process charges",
        "the other processes are told a token before it is charged",
        "python/adapmixed/charging.py",
        "        self.accountant.add(events)\n        if self.ledger is not None:\n",
        "        self.accountant.add(events)\n"
        "        if not proposal.ranks.alone:\n            proposal.release(active)\n"
        "        if self.ledger is not None:\n",
        (_DRIVER + "test_ranks_failures.py::test_no_rank_knows_a_token_before_it_is_charged",),
    ),
)
