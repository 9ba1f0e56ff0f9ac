"""Faults of generation, evaluation, several processes and the commands."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "charge before draw",
        "a token is drawn before it is charged",
        "python/adapmixed/generation/loop.py",
        "            (self.accountant if payer is None else payer).charge(proposal)\n"
        "            tokens = proposal.release().tokens\n",
        "            proposal._begin().settle(None)\n"
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
        "stop token charged",
        "the token that ends the last text is free",
        "python/adapmixed/generation/loop.py",
        "            tokens[going] = self.answer(*decoder.logits, **shape)\n",
        "            asked = shaped(*decoder.logits, **shape)\n"
        "            origin = Origin.of(self.ensemble)\n"
        "            proposal = self.mechanism.propose_rows(asked, rng=self.rng, origin=origin)\n"
        "            proposal._begin().settle(None)\n"
        "            tokens[going] = proposal.release().tokens\n"
        "            told = torch.cat([released, tokens[:, None]], dim=1)\n"
        "            if not any(not bool((going & ~stop(told)).any()) for stop in stops):\n"
        "                late = self.mechanism.propose_rows(asked, rng=self.rng, origin=origin)\n"
        "                self.accountant.charge(late)\n",
        ("tests/generation/test_decoding.py::test_decoding_stops_when_all_sequences_have_ended",),
    ),
    Fault(
        "voiding raises",
        "greedy decoding, beams and log-probabilities are silently ignored",
        "python/adapmixed/generation/loop.py",
        "        refuse(refused)\n        _check_query(",
        "        _check_query(",
        ("tests/misuse/test_misuse.py::test_python_arguments",),
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
        "everybody can read a result file",
        "python/adapmixed/evaluation/result_file.py",
        "write_file(self.path, _text(content), mode=0o600)",
        "write_file(self.path, _text(content), mode=0o644)",
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
        "resumable",
        "a resumed evaluation draws its first noise again",
        "python/adapmixed/evaluation/methods.py",
        "            self.rng.skip_to(counter)\n",
        "            self.rng.skip_to(0)\n",
        ("tests/evaluation/test_result_file.py::test_goes_on_with_new_noise",),
    ),
    Fault(
        "repeatable evaluation",
        "the mechanisms of an evaluation share one source",
        "python/adapmixed/evaluation/loop.py",
        "Method(name, settings, source.child(one.name)) for name, one in mechanisms.items()",
        "Method(name, settings, source) for name, one in mechanisms.items()",
        (
            "tests/evaluation/test_evaluation_results.py::"
            "test_a_mechanism_does_not_depend_on_its_neighbours",
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
        "processes equal one",
        "rows that are sent are rounded",
        "python/adapmixed/generation/loop.py",
        "private = ranks.gather(rows.private)",
        "private = ranks.gather(rows.private if ranks.alone else rows.private.half().float())",
        ("tests/ranks/test_ranks.py::test_generation_and_evaluation_charge_as_one_process",),
    ),
    Fault(
        "processes equal one",
        "rows that an evaluation sends are rounded",
        "python/adapmixed/evaluation/methods.py",
        "whole = self.ranks.gather(rows.private)",
        "whole = self.ranks.gather(rows.private * (1 + 1e-6 * (self.ranks.world - 1)))",
        ("tests/ranks/test_ranks.py::test_generation_and_evaluation_charge_as_one_process",),
    ),
    Fault(
        "processes equal one",
        "members of two processes change places",
        "python/adapmixed/ranks/group.py",
        "others = [whole[_share(len(whole), rank, self.world)] for rank in range(1, self.world)]",
        "others = [whole[_share(len(whole), rank, self.world)] for rank in range(1, self.world)]\n"
        "        others[-1] = others[-1].flip(0)",
        (
            "tests/ranks/test_ranks.py::test_what_is_sent",
            "tests/ranks/test_ranks.py::test_generation_and_evaluation_charge_as_one_process",
        ),
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
        "self._run(lambda: dist.broadcast(_as_bytes(found), src=0))",
        "self._run(dist.barrier)",
        ("tests/ranks/test_ranks_failures.py::test_a_run_that_nothing_happens_to",),
    ),
    Fault(
        "one process charges",
        "the other processes are told a token before it is charged",
        "python/adapmixed/generation/loop.py",
        "            (self.accountant if payer is None else payer).charge(proposal)\n"
        "            tokens = proposal.release().tokens\n"
        "            assert tokens is not None  # no targets were given\n"
        "            return tokens\n\n        public = rows.public\n"
        "        return ranks.tell(drawn, (len(public),), torch.int64, public.device).cpu()\n",
        "            proposal._begin().settle(None)\n"
        "            tokens = proposal.release().tokens\n"
        "            assert tokens is not None  # no targets were given\n"
        "            drafts.append(proposal)\n            return tokens\n\n"
        "        public, drafts = rows.public, []\n"
        "        told = ranks.tell(drawn, (len(public),), torch.int64, public.device).cpu()\n"
        '        for proposal in drafts:\n            proposal._charge._state = "proposed"\n'
        "            self.accountant.charge(proposal)\n        return told\n",
        ("tests/ranks/test_ranks_failures.py::test_no_rank_knows_a_token_before_it_is_charged",),
    ),
    Fault(
        "budgets hold",
        "the prompts of a batch are not counted against the plan",
        "python/adapmixed/generation/loop.py",
        "self.check(len(input_ids) * max_new_tokens)",
        "self.check(max_new_tokens)",
        ("tests/generation/test_generation.py::test_generators_of_one_plan_share_its_queries",),
    ),
    Fault(
        "whole statements",
        "logits of an unknown ensemble count as verified",
        "python/adapmixed/mechanisms/proposal.py",
        'caveats: tuple[str, ...] = ("shards", "base")',
        "caveats: tuple[str, ...] = ()",
        (
            "tests/mechanisms/test_protocol.py::"
            "test_answers_to_logits_of_an_unknown_ensemble_are_not_verified",
        ),
    ),
)
