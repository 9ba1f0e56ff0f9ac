"""Write the answers of the earlier version, from its own checkout: `python before.py OUT`."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from cases import ANSWERS, BUDGETS, DELTA, MECHANISMS, answer_cases, event_cases, logits, written

import adapmixed
from adapmixed import Accountant, FilterBudget, PerModelFilter, SeededRandom, privacy
from adapmixed.charging import Charge

_OLD_NAMES = {"order": "charge_order", "public_confidence": "sure_above"}


def mechanism_of(name: str) -> Any:
    kind, settings = MECHANISMS[name]
    if kind.startswith("Clipped"):
        settings = {_OLD_NAMES.get(key, key): value for key, value in settings.items()}
    return getattr(adapmixed, kind)(**settings)


def event_of(name: str, fields: dict[str, Any]) -> Any:
    fields = {k: np.array(v) if k == "loss" else v for k, v in fields.items()}
    return getattr(privacy, name)(**fields)


def totals() -> dict[str, Any]:
    found = {}
    for name, events in event_cases():
        accountant = Accountant(DELTA)
        for event in events:
            accountant.add(event_of(*event))
        stated = {}
        for question in ("zero_out", "replace_one"):
            try:
                guarantee = accountant.epsilon(None if question == "zero_out" else question)
            except ValueError:
                continue
            stated[question] = [guarantee.kind, written(guarantee.epsilon), guarantee.queries]
        found[name] = stated
    return found


def answers() -> dict[str, Any]:
    found = {}
    for name, key, shape, dtype in answer_cases():
        mechanism, (private, public) = mechanism_of(key), logits(shape, dtype)
        budget, kept = None, None
        if key in BUDGETS:
            order = getattr(mechanism, "charge_order", None)
            budget = FilterBudget.for_epsilon(BUDGETS[key], DELTA, order=order)
            kept = PerModelFilter(shape[0], budget)
        charge = Charge(Accountant(DELTA, filter_budget=budget), None, kept)
        rng, one = SeededRandom(7), {"tokens": [], "public": [], "log_prob": [], "charges": []}
        for step in range(ANSWERS):
            targets = None if step % 2 else torch.arange(shape[1]) + 5
            proposal = mechanism.propose(private, public, rng=rng, targets=targets)
            charges = proposal.charges
            answer = proposal.release(charge(proposal))
            for field in ("tokens", "log_prob", "public"):
                value = getattr(answer, field)
                one[field].append(None if value is None else written(value.tolist()))
            one["charges"].append(None if charges is None else written(charges.flatten().tolist()))
        guarantee = charge.accountant.epsilon()
        one["guarantee"] = [guarantee.kind, written(guarantee.epsilon), guarantee.queries]
        one["spent"] = None if kept is None else written(kept.spent.tolist())
        found[name] = one
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump({"totals": totals(), "answers": answers()}, file)
