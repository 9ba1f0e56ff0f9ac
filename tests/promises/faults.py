"""Faults that break a promise: where, what is changed, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass

_KERNELS = "tests/kernels/"
_MECHANISMS = "tests/mechanisms/"
_PRIVACY = "tests/privacy/"


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
        "csrc/sample/math.h",
        "if (left < weight) return left >= static_cast<uint128>(v) ? v : -1;",
        "if (left <= weight) return left >= static_cast<uint128>(v) ? v : -1;",
        (_KERNELS + "test_sample.py::test_what_integers_leave_open_is_decided_by_the_fraction",),
    ),
    Fault(
        "exact sampling",
        "draws between the integer sum and the true sum are thrown away",
        "csrc/sample/cpu.cpp",
        "if (*token < 0 && draw < total + static_cast<uint128>(vocab)) {",
        "if (*token < 0 && draw < total) {",
        (_KERNELS + "test_sample.py::test_what_integers_leave_open_is_decided_by_the_fraction",),
    ),
    Fault(
        "exact sampling",
        "all rows of a batch draw from one stream",
        "csrc/sample/cpu.cpp",
        "const Stream stream{key, counter, static_cast<std::uint32_t>(b)};",
        "const Stream stream{key, counter, static_cast<std::uint32_t>(b - b)};",
        (_KERNELS + "test_sample.py::test_sample_draws_exactly_by_the_stream",),
    ),
    Fault(
        "exact sampling",
        "tokens are drawn from the distribution in single precision",
        "python/adapmixed/mechanisms/distribution.py",
        "return self.rows.released(ops.sample(probabilities, support, rng=rng))",
        "return self.rows.released(ops.sample(probabilities.float().double(), support, rng=rng))",
        (
            _MECHANISMS + "test_distributions.py::"
            "test_tokens_are_drawn_from_the_distribution_to_the_last_bit",
        ),
    ),
    Fault(
        "unpredictable randomness",
        "ChaCha with 18 rounds",
        "csrc/sample/chacha.h",
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
        "PMixED's radius leaves no room for the rounding of its sums",
        "python/adapmixed/mechanisms/pmixed.py",
        "return max(0.0, self.epsilon - conversion - rounding) / self.queries * slack",
        "return max(0.0, self.epsilon - conversion) / self.queries",
        (_MECHANISMS + "test_pmixed.py::test_no_rounding_exceeds_the_configured_epsilon",),
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
        "every order has the whole delta",
        "python/adapmixed/privacy/totals.py",
        "share = delta if len(orders) == 1 else math.nextafter(delta / len(orders), 0.0)",
        "share = delta",
        (_PRIVACY + "test_several_orders.py::test_several_orders_split_delta",),
    ),
    Fault(
        "costs are the theorems'",
        "a mean over a subset is amplified at the sampling rate",
        "python/adapmixed/privacy/pmixed.py",
        "return min(1.0, up(-math.expm1(up_magnitude(num_models * math.log1p(-rate)))))",
        "return rate",
        (_PRIVACY + "test_pmixed_bound.py::test_amplification_rate",),
    ),
    Fault(
        "costs are the theorems'",
        "replace-one doubles the zCDP budget, where it has to be four times that",
        "python/adapmixed/privacy/budget.py",
        'zcdp_to_dp(times_up(4, amount) if adjacency == "replace_one" else amount, delta)[0]',
        'zcdp_to_dp(times_up(2, amount) if adjacency == "replace_one" else amount, delta)[0]',
        (_PRIVACY + "test_budget.py::test_a_budget_is_the_largest_for_its_epsilon",),
    ),
    Fault(
        "costs are the theorems'",
        "a replaced shard of a pool costs what an emptied one does",
        "python/adapmixed/privacy/clipped_log_pool.py",
        "        span *= 2\n",
        "        span *= 1\n",
        (_PRIVACY + "test_totals.py::test_the_log_pool_is_zcdp",),
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
        "of two mechanisms in one accountant one is stated",
        "python/adapmixed/privacy/totals.py",
        "if None not in (family, known) and family != known:",
        "if None not in (family, known) and family != known and self.spent is not None:",
        (_PRIVACY + "test_totals.py::test_mechanisms_do_not_mix_in_any_sequence",),
    ),
    Fault(
        "feasible weights",
        "the projection in double precision leaves no margin for rounding",
        "csrc/project/math.h",
        "t.excess = margin < 1.0 ? excess * (1.0 - margin) : 0.0;",
        "t.excess = excess;",
        (_KERNELS + "test_project.py::test_the_range_in_which_weights_are_near_the_optimum",),
    ),
    Fault(
        "feasible weights",
        "the excess in single precision leaves no margin for rounding",
        "csrc/project/float_search.h",
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
        "csrc/project/float_search.h",
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
        "csrc/leave_one_out/bound.h",
        "std::fmax(std::fmax(forward.value, reverse.value), 0.0);",
        "std::fmax(forward.value, 0.0);",
        (_KERNELS + "test_leave_one_out.py::test_every_neighbour_on_tiny_vocabularies",),
    ),
    Fault(
        "losses in full",
        "a charge of clipped mixing is that of one direction",
        "csrc/clip/charge.h",
        "const double excess = share * std::fmax(std::fmax(forward, reverse), 0.0);",
        "const double excess = share * std::fmax(reverse, 0.0);",
        (_KERNELS + "test_clip.py::test_against_the_oracle",),
    ),
    Fault(
        "losses in full",
        "the upper bound of a pool's clip is rounded outward",
        "csrc/log_pool/math.h",
        "most_ = kGridZero + std::floor(options.upper * scale_);",
        "most_ = kGridZero + std::ceil(options.upper * scale_);",
        (_KERNELS + "test_log_pool_privacy.py::test_bounds_that_are_no_multiples_are_kept",),
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
        "losses in full",
        "charges of clipped mixing lack the rounding of the others' rows",
        "python/adapmixed/mechanisms/clipped_mixing.py",
        "inflated += LOSS_ABSOLUTE_ERROR + absolute",
        "inflated += LOSS_ABSOLUTE_ERROR",
        (_MECHANISMS + "test_clipped.py::test_an_emptied_member_costs_at_most_its_own_charge",),
    ),
    Fault(
        "charge before draw",
        "a token is drawn, and charged then",
        "python/adapmixed/generation/loop.py",
        "            self.accountant.charge(proposal)\n"
        "            tokens = proposal.release().tokens\n",
        "            proposal.begin().settle(None)\n"
        "            tokens = proposal.release().tokens\n"
        "            late = self.mechanism.propose_rows(\n"
        "                replace(rows, private=private),\n"
        "                rng=self.rng,\n"
        "                origin=Origin.of(self.ensemble),\n"
        "            )\n"
        "            self.accountant.charge(late)\n",
        (
            "tests/generation/test_decoding.py::"
            "test_every_step_is_charged_before_its_token_is_drawn_and_yielded",
        ),
    ),
    Fault(
        "charge before draw",
        "the head names a record that is not yet written",
        "python/adapmixed/privacy/ledger/file.py",
        "            self._store.append(record, self._checkpoint, checkpoint)\n"
        "            self._head.write(Head(record.sequence, record.hash))\n",
        "            self._head.write(Head(record.sequence, record.hash))\n"
        "            self._store.append(record, self._checkpoint, checkpoint)\n",
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
        "python/adapmixed/privacy/ledger/file.py",
        '            self._unusable = f"a charge failed ({error or type(error).__name__})"\n',
        '            _LOG.warning("a charge failed: %s", error)\n',
        (
            _PRIVACY + "test_ledger_failures.py::"
            "test_a_head_that_cannot_be_written_releases_nothing",
        ),
    ),
    Fault(
        "charge before draw",
        "a proposal is released without a charge",
        "python/adapmixed/mechanisms/charge.py",
        "        if self._state != _SETTLED:\n",
        "        if self._state == _FAILED:\n",
        (_MECHANISMS + "test_protocol.py::test_nothing_is_released_before_the_charge",),
    ),
    Fault(
        "stop token charged",
        "the token that ends the last text is free",
        "python/adapmixed/generation/loop.py",
        "            tokens[going] = self._answer(decoder, shape)\n",
        "            asked = shaped(*decoder.logits, **shape)\n"
        "            origin = Origin.of(self.ensemble)\n"
        "            proposal = self.mechanism.propose_rows(asked, rng=self.rng, origin=origin)\n"
        "            proposal.begin().settle(None)\n"
        "            tokens[going] = proposal.release().tokens\n"
        "            told = torch.cat([released, tokens[:, None]], dim=1)\n"
        "            if not any(not bool((going & ~stop(told)).any()) for stop in stops):\n"
        "                late = self.mechanism.propose_rows(asked, rng=self.rng, origin=origin)\n"
        "                self.accountant.charge(late)\n",
        ("tests/generation/test_decoding.py::test_decoding_stops_when_all_sequences_have_ended",),
    ),
    Fault(
        "one draw for one charge",
        "a second release draws again",
        "python/adapmixed/mechanisms/proposal.py",
        "                self._answer = self._drawn()\n",
        "                return self._drawn()\n",
        (_MECHANISMS + "test_protocol.py::test_a_charge_pays_for_one_token_a_position",),
    ),
    Fault(
        "one draw for one charge",
        "one proposal is charged twice",
        "python/adapmixed/mechanisms/charge.py",
        "        self._advance(_PROPOSED, _BEGUN)\n",
        "        self._advance(self._state, _BEGUN)\n",
        (_MECHANISMS + "test_protocol.py::test_a_second_charge_raises_and_costs_nothing",),
    ),
    Fault(
        "one draw for one charge",
        "a charge that is settled is settled again for other members",
        "python/adapmixed/mechanisms/charge.py",
        "self._advance(_BEGUN, _SETTLED,",
        "self._advance(self._state, _SETTLED,",
        (_MECHANISMS + "test_protocol.py::test_a_charge_is_begun_once_and_ends_once",),
    ),
    Fault(
        "one draw for one charge",
        "a copy of a proposal has an answer of its own",
        "python/adapmixed/mechanisms/proposal.py",
        "    def __reduce__(self) -> NoReturn:\n",
        "    def no_reduce(self) -> NoReturn:\n",
        (_MECHANISMS + "test_protocol.py::test_copies_and_pickles_of_a_proposal_raise",),
    ),
    Fault(
        "one draw for one charge",
        "a mask that the caller changes later is the charged one",
        "python/adapmixed/mechanisms/charge.py",
        "np.array(active)",
        "np.asarray(active)",
        (_MECHANISMS + "test_members.py::test_a_mask_changed_in_place_is_another_one",),
    ),
    Fault(
        "one draw for one charge",
        "parent and child of a fork draw for one charge",
        "python/adapmixed/mechanisms/proposal.py",
        "        if self._forks != _forks:\n",
        "        if self._forks > _forks:\n",
        (_PRIVACY + "test_accountant_api.py::test_a_child_of_a_fork_spends_nothing",),
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
        "python/adapmixed/privacy/totals.py",
        "return self.counts[event] if budget is None else budget",
        "return self.counts[event]",
        (_PRIVACY + "test_accountant.py::test_a_budget_is_charged_at_once_and_not_exceeded",),
    ),
    Fault(
        "budgets hold",
        "a generation does not see what earlier ones have spent of a plan",
        "python/adapmixed/privacy/accountant.py",
        "if planned is not None and answered + queries > planned:",
        "if planned is not None and queries > planned:",
        (
            "tests/generation/test_charging.py::"
            "test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call",
        ),
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
        "retirement is silent",
        "an answer says that it is public where all members are exhausted",
        "python/adapmixed/mechanisms/proposal.py",
        "distribution, public = self.distribution, self._prepared.public\n",
        "distribution, public = self.distribution, self._prepared.public\n"
        "        if self._active is not None:\n"
        "            public = public | ~self._active.any(0)\n",
        (_MECHANISMS + "test_members.py::test_an_answer_does_not_tell_who_contributed",),
    ),
    Fault(
        "row independence",
        "the tokens that are kept depend on the private rows",
        "python/adapmixed/mechanisms/rows.py",
        "tokens = public.float().topk(top_k, dim=-1).indices",
        "tokens = private.float().mean(0).topk(top_k, dim=-1).indices",
        (_MECHANISMS + "test_shaped.py::test_it_is_the_mechanism_on_shaped_rows",),
    ),
    Fault(
        "row independence",
        "members of another rank are added zeros",
        "python/adapmixed/ensemble/batched_lora.py",
        "kept = outputs.index_select(0, self.others) if len(self.others) else None",
        "kept = None",
        ("tests/ensemble/test_batched_lora.py::test_rows_of_other_ranks_are_not_even_added_zero",),
    ),
    Fault(
        "row independence",
        "what members share follows from the members that are there",
        "python/adapmixed/ensemble/ensemble.py",
        "self.trunk = find_trunk(model, adapted)",
        "self.trunk = find_trunk(model, merged_layers([one.layers for one in adapters]))",
        (
            "tests/ensemble/test_trunk.py::test_members_that_differ_cannot_be_missing_without_a_constant",
        ),
    ),
    Fault(
        "emptied is missing",
        "an emptied member is computed in its own row",
        "python/adapmixed/ensemble/forward.py",
        "            logits[member + 1].copy_(logits[0])\n",
        "            assert logits[member + 1].shape == logits[0].shape\n",
        (
            "tests/ensemble/test_separation.py::test_zero_adapter_is_exact_where_rows_round_differently",
        ),
    ),
    Fault(
        "emptied is missing",
        "a missing member is computed in its own row",
        "python/adapmixed/ensemble/ensemble.py",
        "enumerate(adapters) if adapter.is_zero),",
        "enumerate(adapters) if adapter.updates and adapter.is_zero),",
        (
            "tests/ensemble/test_separation.py::test_zero_adapter_is_exact_where_rows_round_differently",
        ),
    ),
    Fault(
        "emptied is missing",
        "a missing member goes with its rows",
        "python/adapmixed/ensemble/ensemble.py",
        "adapters = [MISSING if path is None else read[path] for path in mine]",
        "adapters = [read[path] for path in mine if path is not None]",
        (
            "tests/ensemble/test_removed_member.py::test_a_removed_member_moves_no_bit_of_the_others",
        ),
    ),
    Fault(
        "emptied is missing",
        "memory is counted for the members that are there",
        "python/adapmixed/ensemble/forward.py",
        "return (self.ranks.held(self.num_models)[0] + 1) * batch",
        "return (self.ranks.held(self.num_models)[0] + 1 - len(self.zero_members)) * batch",
        (
            "tests/ensemble/test_removed_member.py::"
            "test_shapes_batches_and_errors_do_not_tell_who_is_missing",
        ),
    ),
    Fault(
        "emptied is missing",
        "an emptied shard is projected where an exhausted one answers the public row",
        "python/adapmixed/mechanisms/clipped_mixing.py",
        "takes_part = asked & (charge > 0)",
        "takes_part = asked.expand(models, positions)",
        (
            _MECHANISMS + "test_clipped.py::"
            "test_an_exhausted_member_answers_as_an_emptied_one_to_the_last_bit",
        ),
    ),
    Fault(
        "emptied is missing",
        "an exhausted member of a pool goes on contributing",
        "csrc/log_pool/math.h",
        "return options.active == nullptr || options.active[at];",
        "return options.active == nullptr || at >= 0;",
        (_KERNELS + "test_log_pool.py::test_slots_that_are_inactive_or_absent_have_no_part",),
    ),
    Fault(
        "emptied is missing",
        "the screened mean forgets the members that are absent",
        "csrc/screen/math.h",
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
        ("tests/misuse/test_misuse.py::test_a_guarantee_of_seeded_answers_says_so",),
    ),
    Fault(
        "whole statements",
        "a source that does not say whether it is seeded counts as unseeded",
        "python/adapmixed/mechanisms/proposal.py",
        'if getattr(rng, "seeded", True):',
        'if getattr(rng, "seeded", False):',
        (_MECHANISMS + "test_protocol.py::test_a_source_that_does_not_say_counts_as_seeded",),
    ),
    Fault(
        "whole statements",
        "realised losses beside fixed bounds are called fixed",
        "python/adapmixed/privacy/totals.py",
        '        if self.losses is not None:\n            return "data-dependent, ex-post"\n',
        "        if self.losses is not None and not self._of(RenyiBound):\n"
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
        "if any(bound.published for bound in self._of(RenyiBound)):",
        "if self.losses is not None and any(one.published for one in self._of(RenyiBound)):",
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
        "python/adapmixed/privacy/totals.py",
        'adjacency=neighbours if neighbours == "add_remove" else adjacency,',
        "adjacency=adjacency,",
        (_PRIVACY + "test_accountant.py::test_a_guarantee_of_the_papers_leave_one_out_says_so",),
    ),
    Fault(
        "whole statements",
        "realised losses are stated for replaced records",
        "python/adapmixed/privacy/totals.py",
        '        if self.kind != "fixed":\n',
        '        if self.kind == "public":\n',
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
        "greedy decoding, beams and log-probabilities are ignored in silence",
        "python/adapmixed/generation/loop.py",
        "        refuse(refused)\n        _check_query(",
        "        _check_query(",
        ("tests/misuse/test_misuse.py::test_python_arguments",),
    ),
    Fault(
        "voiding raises",
        "settings of transformers that are not known are ignored",
        "python/adapmixed/generation/settings.py",
        "value in NEUTRAL.get(name, ()):\n            continue",
        "value in NEUTRAL.get(name, (value,)):\n            continue",
        (
            "tests/generation/test_custom_generate.py::"
            "test_every_setting_of_transformers_is_honoured_refused_or_of_a_pass_that_is_not_run",
        ),
    ),
    Fault(
        "voiding raises",
        "a budget of every shard is accepted for losses that depend on the other members",
        "python/adapmixed/privacy/accountant.py",
        "    if mechanism.no_budget:\n",
        "    if mechanism.no_budget and mechanism.measure is not None:\n",
        ("tests/misuse/test_misuse.py::test_no_filter_runs_on_adapmixed",),
    ),
    Fault(
        "voiding raises",
        "a screening under a budget of every shard is accepted",
        "python/adapmixed/privacy/totals.py",
        "if budget is not None and not isinstance(event, PublicAnswer):",
        "if budget is not None and not isinstance(event, PublicAnswer | GaussianScreening):",
        ("tests/misuse/test_misuse.py::test_no_filter_runs_on_adapmixed",),
    ),
    Fault(
        "voiding raises",
        "a ledger takes answers of a seeded source",
        "python/adapmixed/privacy/accountant.py",
        'if self._file is not None and Caveat("seeded") in events:',
        'if self._file is not None and Caveat("seeded") in events[:1]:',
        ("tests/misuse/test_misuse.py::test_no_ledger_is_charged_for_seeded_answers",),
    ),
    Fault(
        "changed logits raise",
        "logits that were changed after they were proposed are drawn from",
        "python/adapmixed/mechanisms/proposal.py",
        "        self._versions.check()\n",
        "",
        (_MECHANISMS + "test_protocol.py::test_logits_changed_after_proposing_raise",),
    ),
    Fault(
        "changed logits raise",
        "a proposal answers from memory that the caller can change unnoticed",
        "python/adapmixed/mechanisms/proposal.py",
        "self._proposal(rows.apart_from(*given), given,",
        "self._proposal(rows, given,",
        (_MECHANISMS + "test_protocol.py::test_changes_that_torch_does_not_count_have_no_effect",),
    ),
    Fault(
        "changed logits raise",
        "logits made in inference mode are not kept",
        "python/adapmixed/mechanisms/proposal.py",
        "rows.apart_from(*(one for one in given if one.is_inference()))",
        "rows",
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
        "an accountant can be copied",
        "python/adapmixed/privacy/accountant.py",
        "    def __reduce__(self) -> NoReturn:\n        raise TypeError(",
        "    def __reduce__(self) -> Any:\n"
        "        return Accountant.from_state, (self.state(),)\n        raise TypeError(",
        (_PRIVACY + "test_accountant_api.py::test_there_are_no_copies",),
    ),
    Fault(
        "budgets are not copied",
        "a forked child spends its parent's budget",
        "python/adapmixed/privacy/accountant.py",
        "        if os.getpid() != self._process:\n",
        "        if self._process is None:\n",
        (_PRIVACY + "test_accountant_api.py::test_a_child_of_a_fork_spends_nothing",),
    ),
    Fault(
        "nothing private in the open",
        "the log tells what was spent",
        "python/adapmixed/generation/loop.py",
        '_LOG.info("released %d tokens", int((released >= 0).sum()))',
        '_LOG.info(\n                    "released %d tokens, %s",\n'
        "                    int((released >= 0).sum()),\n"
        "                    self.accountant.state(),\n                )",
        ("tests/commands/test_logging.py::test_private_values_are_in_no_message",),
    ),
    Fault(
        "nothing private in the open",
        "an error tells that a shaped private row is beyond the operators' limit",
        "python/adapmixed/mechanisms/rows.py",
        "logits.sub_(torch.where(far, largest, 0.0)).div_(temperature)",
        "logits.div_(temperature)",
        (_MECHANISMS + "test_shaped.py::test_no_finite_row_raises_once_rows_are_shaped",),
    ),
    Fault(
        "nothing private in the open",
        "the line of a finished member tells its validation loss",
        "python/adapmixed/training/progress.py",
        'self.say(f"{name}: finished (',
        'self.say(f"{name}: {loss}, finished (',
        (
            "tests/commands/test_train_command.py::"
            "test_validation_losses_are_logged_for_the_operator_alone",
        ),
    ),
    Fault(
        "nothing private in the open",
        "everybody can read a result file",
        "python/adapmixed/evaluation/result_file.py",
        "write_file(self.path, _text(content), mode=0o600)",
        "write_file(self.path, _text(content))",
        ("tests/evaluation/test_result_file.py::test_a_result_is_read_back_without_the_models",),
    ),
    Fault(
        "nothing private in the open",
        "an epsilon that depends on the data is shown to everybody",
        "python/adapmixed/commands/serving.py",
        'if guarantee.kind.startswith("data-dependent") and not operator:',
        'if guarantee.kind == "data-dependent" and not operator:',
        (
            "tests/commands/test_serving_commands.py::"
            "test_what_depends_on_private_data_is_for_the_operator",
        ),
    ),
    Fault(
        "vocabulary mask",
        "the public row is not masked",
        "python/adapmixed/ensemble/forward.py",
        'logits.index_fill_(-1, self.masked_ids, float("-inf"))',
        'logits[1:].index_fill_(-1, self.masked_ids, float("-inf"))',
        ("tests/ensemble/test_vocabulary.py::test_ids_without_a_token_are_masked_in_every_row",),
    ),
    Fault(
        "vocabulary mask",
        "ids are taken to have no holes",
        "python/adapmixed/ensemble/vocabulary.py",
        "    unnamed[named] = False\n",
        "    unnamed[: len(named)] = False\n",
        ("tests/ensemble/test_vocabulary.py::test_ids_without_a_token_are_masked_in_every_row",),
    ),
    Fault(
        "vocabulary mask",
        "probability on masked tokens is drawn",
        "csrc/sample/math.h",
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
        ("tests/evaluation/test_result_file.py::test_goes_on_with_new_noise",),
    ),
    Fault(
        "resumable",
        "a member's folder appears before it is whole",
        "python/adapmixed/training/member.py",
        "        temporary = temporary_folder(folder)\n",
        "        folder.mkdir()\n        temporary = folder\n",
        ("tests/training/test_train.py::test_a_member_appears_whole",),
    ),
    Fault(
        "resumable",
        "training goes on with other settings",
        "python/adapmixed/training/folder.py",
        "            if name in given and known.get(name) != given[name]:\n",
        "            if name in given and name not in known:\n",
        ("tests/training/test_train.py::test_a_run_goes_on_with_the_same_only",),
    ),
    Fault(
        "repeatable evaluation",
        "the mechanisms of an evaluation share one source",
        "python/adapmixed/evaluation/loop.py",
        "[Method(name, settings, source.child(name)) for name in mechanisms]",
        "[Method(name, settings, source) for name in mechanisms]",
        (
            "tests/evaluation/test_evaluation_results.py::"
            "test_a_mechanism_does_not_depend_on_its_neighbours",
        ),
    ),
    Fault(
        "repeatable evaluation",
        "noise depends on how positions are grouped",
        "python/adapmixed/mechanisms/adapmixed.py",
        "        for position in range(positions):\n"
        "            noise[position] = ops.gaussian(top_k, sigma=self.sigma, rng=rng)\n",
        "        noise[:] = ops.gaussian((positions, top_k), sigma=self.sigma, rng=rng)\n",
        (_MECHANISMS + "test_protocol.py::test_events_are_known_before_the_token_is_drawn",),
    ),
    Fault(
        "bounded memory",
        "a chunk takes the place of the cache, too",
        "python/adapmixed/ensemble/forward.py",
        "return min(length, (memory_bytes - cache - fixed) // per_position)",
        "return min(length, (memory_bytes - fixed) // per_position)",
        ("tests/ensemble/test_ensemble.py::test_chunks_equal_the_whole",),
    ),
    Fault(
        "bounded memory",
        "the copy that an ended sequence leaves is not counted",
        "python/adapmixed/ensemble/forward.py",
        "        return sum(layers) + max(layers)\n",
        "        return sum(layers)\n",
        (
            "tests/ensemble/test_cache.py::test_a_decoder_has_room_for_all_that_was_counted_and_no_more",
        ),
    ),
    Fault(
        "bounded memory",
        "logits are kept while the next ones are computed",
        "python/adapmixed/evaluation/session.py",
        "            del private, public  # their place is the next chunk's\n",
        "",
        ("tests/evaluation/test_long_evaluation.py::test_logits_are_not_kept",),
    ),
    Fault(
        "ledger notices",
        "one lost charge is not noticed",
        "python/adapmixed/privacy/ledger/reading.py",
        "    if chain.count < head.count:\n",
        "    if chain.count < head.count - 1:\n",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "ledger notices",
        "a database of the same length from elsewhere is accepted",
        "python/adapmixed/privacy/ledger/reading.py",
        "if known.get(head.count, head.hash) != head.hash:",
        "if known.get(head.count, head.hash) is None:",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "ledger notices",
        "a record's hash is not compared",
        "python/adapmixed/privacy/ledger/records.py",
        "return self.hash == _link(previous, self.sequence, self.text)",
        "return bool(_link(previous, self.sequence, self.text))",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "ledger notices",
        "the digest of the checkpoint is not compared",
        "python/adapmixed/privacy/ledger/records.py",
        "if self.digest != _state_digest(description.first_hash, self.sequence, last, self.text):",
        "if not _state_digest(description.first_hash, self.sequence, last, self.text):",
        (_PRIVACY + "test_ledger_tampering.py::test_tampered_files_are_refused",),
    ),
    Fault(
        "ledger notices",
        "a charge of another writer is not seen",
        "python/adapmixed/privacy/ledger/store.py",
        "if self.checkpoint() != before:",
        "if self.checkpoint() is before:",
        (_PRIVACY + "test_ledger_failures.py::test_a_charge_of_another_writer_is_seen_at_once",),
    ),
    Fault(
        "shards are disjoint",
        "a person in two shards is not seen",
        "python/adapmixed/ensemble/shards.py",
        "            other = owner.setdefault(identifier, member)\n",
        '            other = owner.setdefault(f"{member} {identifier}", member)\n',
        ("tests/misuse/test_misuse_shards.py::test_overlapping_shards_are_refused",),
    ),
    Fault(
        "shards are disjoint",
        "identifiers under different keys are compared",
        "python/adapmixed/ensemble/shards.py",
        "        elif key != first_key[0]:\n",
        "        elif key is None:\n",
        ("tests/misuse/test_misuse_shards.py::test_overlapping_shards_are_refused",),
    ),
    Fault(
        "shards are disjoint",
        "what was not verified is not charged with the answers",
        "python/adapmixed/mechanisms/proposal.py",
        "caveats = [Caveat(name) for name in origin.caveats]",
        "caveats = [Caveat(name) for name in origin.caveats[:0]]",
        ("tests/misuse/test_misuse_shards.py::test_a_ledger_remembers_what_was_not_verified",),
    ),
    Fault(
        "shards are disjoint",
        "documents named by position are recorded as stable",
        "python/adapmixed/training/run.py",
        'document_names="positions" if run.corpus.positional else "stable",',
        'document_names="stable",',
        ("tests/training/test_train.py::test_the_manifest_says_what_names_documents",),
    ),
    Fault(
        "shards are disjoint",
        "documents are assigned to shards by their position",
        "python/adapmixed/training/shards.py",
        "(shard,) = assign_shards([document.identifier], num_shards, key=key)",
        "(shard,) = assign_shards([str(count)], num_shards, key=key)",
        ("tests/training/test_train.py::test_a_document_is_in_the_shard_of_its_name",),
    ),
    Fault(
        "provenance is checked",
        "of weights in parts the first is compared",
        "python/adapmixed/ensemble/provenance.py",
        'names = sorted(set(content["weight_map"].values()))',
        'names = sorted(set(content["weight_map"].values()))[:1]',
        (
            "tests/misuse/test_misuse_public_model.py::test_a_public_model_of_other_weights_is_refused",
        ),
    ),
    Fault(
        "provenance is checked",
        "a public model without a digest counts as compared",
        "python/adapmixed/ensemble/provenance.py",
        "return Compared(found is not None, same_tokenizer)",
        "return Compared(True, same_tokenizer)",
        ("tests/misuse/test_misuse_public_model.py::test_another_tokenizer_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "of a tokenizer one file is compared",
        "python/adapmixed/ensemble/provenance.py",
        "for name in found.keys() & manifest.tokenizer_files.keys():",
        "for name in found.keys() & manifest.tokenizer_files.keys() & {TOKENIZER}:",
        ("tests/misuse/test_misuse_public_model.py::test_another_tokenizer_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "a ledger goes on with the members in another order",
        "python/adapmixed/ensemble/provenance.py",
        "    for path in members:\n        if path is None:\n",
        "    for path in sorted(members, key=str):\n        if path is None:\n",
        (
            "tests/ensemble/test_ensemble_folder.py::test_a_fingerprint_is_of_the_members_in_their_order",
        ),
    ),
    Fault(
        "provenance is checked",
        "an accountant goes on with another mechanism or ensemble",
        "python/adapmixed/privacy/account.py",
        "        if self.binding == binding:\n",
        "        if self.binding is not None:\n",
        (
            _PRIVACY + "test_accountant_binding.py::"
            "test_an_accountant_is_bound_to_one_mechanism_ensemble_and_n",
        ),
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
        "events.append(RenyiBound(self.order, bound, models, positions))",
        "asked = int(passed.sum())\n"
        "            events.append(RenyiBound(self.order, bound, models, asked))",
        (_MECHANISMS + "test_adapmixed.py::test_fixed_loss_is_charged_for_every_query",),
    ),
    Fault(
        "one process charges",
        "a process that is not charged has an accountant of its own",
        "python/adapmixed/generation/loop.py",
        "        elif self.accountant is not None:\n",
        "        elif self.accountant is self.ensemble:\n",
        ("tests/ranks/test_ranks_failures.py::test_an_accountant_of_another_process_raises",),
    ),
    Fault(
        "one process charges",
        "the other processes are not told the token that was drawn",
        "python/adapmixed/ranks/group.py",
        'self._run("tell", data, lambda: dist.broadcast(data, src=0))',
        'self._run("tell", data, dist.barrier)',
        ("tests/ranks/test_ranks_failures.py::test_a_run_that_nothing_happens_to",),
    ),
    Fault(
        "one process charges",
        "the other processes are told a token before it is charged",
        "python/adapmixed/generation/loop.py",
        "            self.accountant.charge(proposal)\n"
        "            tokens = proposal.release().tokens\n"
        "            assert tokens is not None  # no targets were given\n"
        "            return tokens\n\n        public = rows.public\n"
        "        return ranks.tell(drawn, (len(public),), torch.int64, public.device).cpu()\n",
        "            proposal.begin().settle(None)\n"
        "            tokens = proposal.release().tokens\n"
        "            assert tokens is not None  # no targets were given\n"
        "            drafts.append(proposal)\n            return tokens\n\n"
        "        public, drafts = rows.public, []\n"
        "        told = ranks.tell(drawn, (len(public),), torch.int64, public.device).cpu()\n"
        '        for proposal in drafts:\n            proposal._charge._state = "proposed"\n'
        "            self.accountant.charge(proposal)\n        return told\n",
        ("tests/ranks/test_ranks_failures.py::test_no_rank_knows_a_token_before_it_is_charged",),
    ),
)
