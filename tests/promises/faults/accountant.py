"""Faults of the accountant and its ledger."""

from __future__ import annotations

from .fault import Fault

_PRIVACY = "tests/privacy/"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "charge before draw",
        "a charge returns before its record is written",
        "python/adapmixed/privacy/ledger/writer.py",
        "            self._store.append(record, self._checkpoint, checkpoint)\n",
        "",
        (_PRIVACY + "test_ledger_durability.py::test_a_record_is_flushed_before_the_release",),
    ),
    Fault(
        "charge before draw",
        "SQLite does not wait for the device",
        "python/adapmixed/privacy/ledger/store.py",
        '(("synchronous", 2), ("fullfsync", 1), ("checkpoint_fullfsync", 1))',
        '(("synchronous", 1), ("fullfsync", 1), ("checkpoint_fullfsync", 1))',
        (_PRIVACY + "test_ledger_durability.py::test_a_record_is_flushed_before_the_release",),
    ),
    Fault(
        "charge before draw",
        "a ledger takes charges after one has failed",
        "python/adapmixed/privacy/ledger/writer.py",
        '            self._unusable = f"a charge failed ({error or type(error).__name__})"\n',
        '            _LOG.warning("a charge failed: %s", error)\n',
        (
            _PRIVACY
            + "test_ledger_failures.py::test_a_full_database_is_refused_and_releases_nothing",
        ),
    ),
    Fault(
        "budgets hold",
        "a generation does not see what earlier ones have spent of a plan",
        "python/adapmixed/privacy/protocols.py",
        "if planned is not None and answered + queries > planned:",
        "if planned is not None and queries > planned:",
        (
            "tests/generation/test_charging.py::"
            "test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call",
        ),
    ),
    Fault(
        "voiding raises",
        "a budget of every shard is accepted for losses that depend on the other members",
        "python/adapmixed/privacy/protocols.py",
        "    if mechanism.no_budget:\n",
        "    if mechanism.no_budget and mechanism.measure is not None:\n",
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
        "budgets are not copied",
        "a forked child spends its parent's budget",
        "python/adapmixed/privacy/accountant.py",
        "        if os.getpid() != self._process:\n",
        "        if self._process is None:\n",
        (_PRIVACY + "test_accountant_api.py::test_a_forked_child_spends_nothing",),
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
)
