"""Write the answers of this version: `python now.py OUT`."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from cases import ANSWERS, BUDGETS, DELTA, MECHANISMS, answer_cases, event_cases, logits, written

from adapmixed import mechanisms, privacy
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom


def event_of(name: str, fields: dict[str, Any]) -> Any:
    fields = {k: np.array(v) if k == "loss" else v for k, v in fields.items()}
    if name == "RenyiBound":
        del fields["adjacency"]
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
                guarantee = accountant.guarantee(question)
            except ValueError:
                continue
            stated[question] = [guarantee.kind, written(guarantee.epsilon), guarantee.queries]
        found[name] = stated
    return found


def answers() -> dict[str, Any]:
    found = {}
    for name, key, shape, dtype in answer_cases():
        kind, settings = MECHANISMS[key]
        mechanism, (private, public) = getattr(mechanisms, kind)(**settings), logits(shape, dtype)
        accountant = Accountant(DELTA, epsilon=BUDGETS.get(key))
        rng, one = SeededRandom(7), {"tokens": [], "public": [], "log_prob": [], "charges": []}
        for step in range(ANSWERS):
            targets = None if step % 2 else torch.arange(shape[1]) + 5
            proposal = mechanism.propose(private, public, rng=rng, targets=targets)
            prepared = proposal._prepared
            charges = prepared.losses if prepared.charges is None else prepared.charges
            accountant.charge(proposal)
            answer = proposal.release()
            for field in ("tokens", "log_prob", "public"):
                value = getattr(answer, field)
                one[field].append(None if value is None else written(value.tolist()))
            one["charges"].append(None if charges is None else written(charges.flatten().tolist()))
        guarantee = accountant.guarantee()
        one["guarantee"] = [guarantee.kind, written(guarantee.epsilon), guarantee.queries]
        one["spent"] = written(accountant.spent.tolist()) if key in BUDGETS else None
        found[name] = one
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump({"totals": totals(), "answers": answers()}, file)
