"""Faults of the mechanisms and their proposals."""

from __future__ import annotations

from .fault import Fault

_MECHANISMS = "tests/mechanisms/"
_PRIVACY = "tests/privacy/"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "costs are the theorems'",
        "PMixED spends all of epsilon on each step of a replacement",
        "python/adapmixed/mechanisms/pmixed.py",
        "        epsilon = self.epsilon / 2\n",
        "        epsilon = self.epsilon\n",
        ("tests/mechanisms/test_pmixed.py::test_epsilon_is_for_the_neighbours_that_were_chosen",),
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
        "rounding toward privacy",
        "PMixED's radius leaves no room for the rounding of its sums",
        "python/adapmixed/mechanisms/pmixed.py",
        "return max(0.0, epsilon - conversion - rounding) / self.queries * slack",
        "return max(0.0, epsilon - conversion) / self.queries",
        (_MECHANISMS + "test_pmixed.py::test_no_rounding_exceeds_the_configured_epsilon",),
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
        "a proposal is released without a charge",
        "python/adapmixed/mechanisms/single_charge.py",
        "        if self._state != _SETTLED:\n",
        "        if self._state == _FAILED:\n",
        (_MECHANISMS + "test_protocol.py::test_nothing_is_released_before_the_charge",),
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
        "python/adapmixed/mechanisms/single_charge.py",
        "        self._advance(_PROPOSED, _BEGUN)\n",
        "        self._advance(self._state, _BEGUN)\n",
        (_MECHANISMS + "test_protocol.py::test_a_second_charge_raises_and_costs_nothing",),
    ),
    Fault(
        "one draw for one charge",
        "a charge that is settled is settled again for other members",
        "python/adapmixed/mechanisms/single_charge.py",
        "self._advance(_BEGUN, _SETTLED,",
        "self._advance(self._state, _SETTLED,",
        (_MECHANISMS + "test_protocol.py::test_a_charge_is_begun_once_and_ends_once",),
    ),
    Fault(
        "retirement is silent",
        "an answer says that it is public if all members are exhausted",
        "python/adapmixed/mechanisms/proposal.py",
        "distribution, public = self._distribution, self._prepared.public\n",
        "distribution, public = self._distribution, self._prepared.public\n"
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
        "whole statements",
        "a source that does not say whether it is seeded counts as unseeded",
        "python/adapmixed/mechanisms/proposal.py",
        'if getattr(rng, "seeded", True):',
        'if getattr(rng, "seeded", False):',
        (_MECHANISMS + "test_protocol.py::test_a_source_that_does_not_say_counts_as_seeded",),
    ),
    Fault(
        "changed logits change nothing",
        "a proposal answers from memory that the caller can change unnoticed",
        "python/adapmixed/mechanisms/proposal.py",
        "own = rows.apart_from(private_logits, public_logits)",
        "own = rows",
        (_MECHANISMS + "test_protocol.py::test_logits_changed_after_proposing_have_no_effect",),
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
        "repeatable evaluation",
        "noise depends on how positions are grouped",
        "python/adapmixed/mechanisms/adapmixed.py",
        "        for position in range(positions):\n"
        "            noise[position] = ops.gaussian(top_k, sigma=self.sigma, rng=rng)\n",
        "        noise[:] = ops.gaussian((positions, top_k), sigma=self.sigma, rng=rng)\n",
        (_MECHANISMS + "test_protocol.py::test_events_are_known_before_the_token_is_drawn",),
    ),
    Fault(
        "shards are disjoint",
        "the caveats of an unverified ensemble are not recorded",
        "python/adapmixed/mechanisms/proposal.py",
        "caveats = [Caveat(name) for name in origin.caveats]",
        "caveats = [Caveat(name) for name in origin.caveats[:0]]",
        ("tests/misuse/test_misuse_shards.py::test_a_ledger_remembers_what_was_not_verified",),
    ),
    Fault(
        "screening is paid",
        "the screening of queries that fail it is not charged",
        "python/adapmixed/mechanisms/adapmixed.py",
        "events.append(GaussianScreening(models, positions, self.screen_weight, self.sigma))",
        "screened = int(passed.sum())\n                events.append("
        "GaussianScreening(models, screened, self.screen_weight, self.sigma))",
        (_MECHANISMS + "test_adapmixed.py::test_screening_is_charged_whatever_its_outcome",),
    ),
    Fault(
        "screening is paid",
        "only queries that pass are charged the fixed loss",
        "python/adapmixed/mechanisms/adapmixed.py",
        "events.append(RenyiBound(self.order, bound, models, positions))",
        "asked = int(passed.sum())\n"
        "            events.append(RenyiBound(self.order, bound, models, asked))",
        (_MECHANISMS + "test_adapmixed.py::test_fixed_loss_is_charged_for_every_query",),
    ),
)
