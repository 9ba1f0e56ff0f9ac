"""The promises of the library, each with the faults that break it and the tests that hold it.

`python -m tests.promises.plant` plants every fault in a copy of the sources and checks that one of
its tests fails; `test_promises.py` checks the table itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from .faults import FAULTS, Fault

PROMISES: dict[str, str] = {
    "exact sampling": "A token is drawn from the distribution that was charged, exactly.",
    "unpredictable randomness": "No counter or key of a source is ever used twice.",
    "rounding toward privacy": "Every cost is rounded up, every admissible setting down.",
    "costs are the theorems'": "Every charge is a bound that a proof in docs/theory gives.",
    "feasible weights": "The mixing weight is never above the exact optimum.",
    "losses in full": "A privacy loss or charge is never under-reported beyond its stated error.",
    "charge before draw": "A charge is complete, and durable with a ledger, before the draw.",
    "stop token charged": "The token that ends an answer is charged as any other.",
    "one draw for one charge": "One charge pays for one answer, however often it is asked for.",
    "budgets hold": "No member is charged beyond its budget, nor a plan beyond its queries.",
    "retirement is silent": "Nothing that is released tells that a member is exhausted.",
    "row independence": "No member's data move a bit of another member's row or of the public one.",
    "emptied is missing": "An emptied member, a missing one and an exhausted one answer alike.",
    "whole statements": "Every epsilon comes with kind, unit, neighbours and caveats.",
    "voiding raises": "A use that would void a guarantee raises before anything is released.",
    "changed logits change nothing": "Logits changed between propose and release change nothing.",
    "budgets are not copied": "Forks, copies and pickles of an object with a budget raise.",
    "nothing private in the open": "No message, log or public result holds a private number.",
    "vocabulary mask": "Ids that stand for no token are never released.",
    "resumable": "Evaluation and training go on after a kill, with the same result.",
    "repeatable evaluation": "An evaluation with a seed gives the same bits again.",
    "bounded memory": "Logits, activations and caches stay within the stated bound.",
    "ledger notices": "A ledger that was altered or damaged raises an error.",
    "shards are disjoint": "Nobody is in two shards and no edit moves others, or a caveat says so.",
    "provenance is checked": "Another public model, tokenizer or order of members is noticed.",
    "screening is paid": "Every screening is charged whatever its outcome.",
    "processes equal one": "Several processes answer and charge as one does, bit for bit.",
    "one process charges": "One of several processes charges, and then all receive one token.",
}
"""Sentences of the promises by name."""


@dataclass(frozen=True)
class Promise:
    """One promise.

    Attributes:
        name: name in `PROMISES`.
        sentence: sentence in `PROMISES`.
        faults: faults that break it.
    """

    name: str
    sentence: str
    faults: tuple[Fault, ...]

    @property
    def tests(self) -> tuple[str, ...]:
        """The fast tests that check it."""
        return tuple(sorted({test for fault in self.faults for test in fault.tests}))


def table() -> list[Promise]:
    """Return all promises."""
    return [
        Promise(name, sentence, tuple(fault for fault in FAULTS if fault.promise == name))
        for name, sentence in PROMISES.items()
    ]
