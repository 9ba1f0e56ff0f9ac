"""Faults of the server: its engine, its queue and its reservations."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "row independence",
        "a sequence that joins reads the padding of the longer ones",
        "python/adapmixed/ensemble/decoder.py",
        "        self._set_mask(torch.cat(masks))\n",
        "        self._mask = None\n",
        ("tests/ensemble/test_joining.py::test_every_trunk",),
    ),
    Fault(
        "bounded memory",
        "padding that nobody needs stays in the cache",
        "python/adapmixed/ensemble/decoder.py",
        "        first = int(self._padding()[going].min())\n",
        "        first = 0\n",
        ("tests/ensemble/test_joining.py::test_every_trunk",),
    ),
    Fault(
        "bounded memory",
        "sequences join although the longest of them leaves no room",
        "python/adapmixed/serving/batch.py",
        "self._bytes(max(window, _window(joining)))",
        "self._bytes(_window(joining))",
        ("tests/serving/test_batch.py::test_all_sequences_fit_the_memory",),
    ),
    Fault(
        "charge before draw",
        "sequences of the second temperature are answered without a charge",
        "python/adapmixed/serving/batch.py",
        "payer=self._prepaid\n            )\n",
        "payer=self._prepaid\n            ) if shape == shapes[0] else public.argmax(-1)\n",
        ("tests/serving/test_batch.py::test_what_is_one_charge",),
    ),
    Fault(
        "charge before draw",
        "a token is drawn while its charge is still being written",
        "python/adapmixed/serving/batch.py",
        "                charged.result()\n",
        "                pass\n",
        ("tests/serving/test_batch.py::test_no_token_is_drawn_before_the_charge_is_written",),
    ),
    Fault(
        "budgets hold",
        "what running answers have reserved is not counted",
        "python/adapmixed/serving/admission.py",
        "self._spent + self._reserved + tokens > planned",
        "self._spent + tokens > planned",
        (
            "tests/serving/test_scheduler.py::"
            "test_tokens_are_reserved_until_they_are_charged_or_given_back",
        ),
    ),
    Fault(
        "whole statements",
        "an epsilon that grows without a limit is taken for a plan's",
        "python/adapmixed/commands/promise.py",
        '    return guarantee.kind != "fixed" or planned\n',
        "    return True\n",
        ("tests/serving/test_promise.py::test_a_growing_epsilon_is_that_of_the_ledger",),
    ),
    Fault(
        "whole statements",
        "a server's promise forgets the caveats of its ledger",
        "python/adapmixed/commands/promise.py",
        "Accountant.from_state(accountant.state())",
        "Accountant(accountant.delta, epsilon=accountant.epsilon)",
        ("tests/serving/test_promise.py::test_caveats_of_the_ledger_and_of_the_ensemble",),
    ),
    Fault(
        "whole statements",
        "a server promises the epsilon of an answer from public values",
        "python/adapmixed/commands/promise.py",
        'if hasattr(mechanism, "public_confidence"):',
        "if False:",
        ("tests/serving/test_promise.py::test_public_answers_are_not_those_to_come",),
    ),
    Fault(
        "nothing private in the open",
        "the log repeats the error of an operator, which can name a private row",
        "python/adapmixed/serving/scheduler.py",
        "if isinstance(error, LedgerError) else name",
        "if isinstance(error, Exception) else name",
        ("tests/serving/test_scheduler.py::test_a_failed_engine_ends_all_answers",),
    ),
    Fault(
        "nothing private in the open",
        "answers end once a member has spent its budget",
        "python/adapmixed/serving/batch.py",
        "            released += zip(batch.prompts, batch.tokens.tolist(), strict=True)\n",
        "            released += zip(batch.prompts, batch.tokens.tolist(), strict=True)\n"
        "            paid = self._answerer.accountant\n"
        "            if paid is not None and paid.epsilon is not None:\n"
        "                if bool((paid.spent > 0.8 * paid.limit)[0]):\n"
        "                    released = [(prompt, 3) for prompt, _ in released]\n",
        ("tests/serving/test_nothing_private.py::test_members_change_nothing_but_the_tokens",),
    ),
    Fault(
        "bounded memory",
        "a long sequence that has left makes all others reserve its window",
        "python/adapmixed/ensemble/cache.py",
        "        self._blocks, self._positions = blocks, positions\n",
        "        self._blocks = blocks\n",
        ("tests/serving/test_batch.py::test_a_long_sequence_that_left_leaves_no_room_behind",),
    ),
    Fault(
        "budgets hold",
        "a key that was removed goes on spending until the server is started again",
        "python/adapmixed/serving/clients.py",
        "        self._clients = [old.get(key) or Client(key, self._usage) for key in keys]\n",
        "        self._clients += [Client(key, self._usage) for key in keys if key not in old]\n",
        ("tests/serving/test_keys.py::test_the_file_is_read_again",),
    ),
    Fault(
        "budgets hold",
        "a second name of the ledger gives every key its share again",
        "python/adapmixed/serving/usage.py",
        'Path(f"{os.path.realpath(ledger)}.usage")',
        'Path(f"{ledger}.usage")',
        ("tests/serving/test_keys.py::test_a_ledger_has_one_file_of_used_tokens",),
    ),
    Fault(
        "budgets hold",
        "a key that was removed through a link stays in the server's file",
        "python/adapmixed/files.py",
        "    return Path(os.path.realpath(path))\n",
        "    return Path(path)\n",
        ("tests/serving/test_keys.py::test_a_key_is_removed_through_a_link",),
    ),
    Fault(
        "budgets hold",
        "a key does not pay for the token that is under way when its client leaves",
        "python/adapmixed/serving/running.py",
        "        used = self._left + self._delivered  ",
        "        used = self._delivered  ",
        ("tests/serving/test_reservations.py::test_a_key_pays_for_the_token_that_was_under_way",),
    ),
    Fault(
        "charge before draw",
        "inside vLLM a step draws a position that was not granted",
        "python/adapmixed/vllm/till.py",
        "        if len(drawing) > self._spare:\n",
        "        if len(drawing) > self._spare + 1:\n",
        ("tests/vllm_plugin/test_till.py",),
    ),
)
