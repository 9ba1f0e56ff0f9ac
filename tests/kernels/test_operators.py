"""Every operator on every kind of row, on every path: the bounds that its docstring states."""

from __future__ import annotations

import cases
import checks
import fuzzed
import plans
import pytest
import reports
import torch
from plans import Case, Plan
from reports import Report
from workload import ISAS

import adapmixed_ext
from adapmixed_ext import _C

# Rows that are hard for one operator.
SINGLE = {
    "clip_project": cases.boxed, "log_pool": cases.summed, "renyi_divergence": cases.rare_terms,
}  # fmt: skip
TABLE = [
    (operator, case)
    for operator in checks.CHECKS
    for case in (
        *cases.small(), *cases.corners(), *cases.demanding(), *cases.offsets(), *cases.wide(),
        *SINGLE.get(operator, list)(),
    )
]  # fmt: skip
SMALL = Plan()
# Of long rows, fewer numbers.
LONG = Plan(
    balls=((3.0, 0.03), (2.5, 0.03), (17.5, 1e-3), (18.0, 3.6), (64.0, 9.5)),
    weighings=((18.0, 3.6), (3.0, 0.03)), orders=(1.01, 2.0, 18.0, 64.0),
    boxes=(*plans.BOXES[1:8:3], (0.6, 1.65)), pools=plans.POOLS[::2],
)  # fmt: skip


def check(operators: list[str], case: Case, plan: Plan, device: torch.device) -> Report:
    ops = adapmixed_ext if device.type == "cpu" else reports.on_device(device)
    report = checks.run(operators, case, plan, ops)
    assert report.values > 0
    assert not report.failures, "\n".join(report.failures[:5])
    return report


def on_every_path(operator: str, case: Case) -> bool:
    """Tell of long rows, and of operators that must agree in every bit or sum."""
    return case.public.shape[1] > 40 or operator in ("log_pool", "clip_project")


EVERY = [entry for entry in TABLE if on_every_path(*entry)]
# The other ones take turns in using the instruction sets.
SOME = [entry for entry in TABLE if not on_every_path(*entry)]


def plan_of(case: Case) -> Plan:
    return SMALL if case.public.shape[1] <= 60 else LONG


@pytest.mark.parametrize("operator,case", EVERY, ids=[f"{name}-{c.name}" for name, c in EVERY])
def test_contract_on_every_path(operator: str, case: Case, path: torch.device) -> None:
    torch.set_num_threads(1)
    check([operator], case, plan_of(case), path)


@pytest.mark.parametrize("index", range(len(SOME)), ids=[f"{name}-{c.name}" for name, c in SOME])
def test_contract(index: int, device: torch.device) -> None:
    torch.set_num_threads(1)
    assert _C.use_instruction_set(ISAS[index % len(ISAS)])
    operator, case = SOME[index]
    check([operator], case, plan_of(case), device)


@pytest.mark.parametrize(
    "vocab,adjacency",
    [(50_257, "zero_out"), pytest.param(128_256, "add_remove", marks=pytest.mark.slow)],
)
def test_vocabularies_of_language_models(vocab: int, adjacency: str, device: torch.device) -> None:
    torch.set_num_threads(1)
    ball = ((18.0, 0.3),)
    plan = Plan(
        balls=ball, weighings=ball, random_weights=False, orders=(2.5, 18.0),
        renyi_orders=(2.5, 18.0), adjacencies=(adjacency,), boxes=((0.6, 1.65),), models=2,
    )  # fmt: skip
    case = Case(f"V{vocab}", *plans.logits(vocab, 8, 1, vocab, 2.0, 1.0))
    operators = ["project", "leave_one_out", "mixture", "renyi_divergence", "clip_project"]
    check(operators, case, plan, device)


@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, 11))]
)
def test_fuzzed_calls(batch: int, device: torch.device) -> None:
    operators = [name for name in checks.CHECKS if device.type == "cpu" or name != "clip_project"]
    each = 60 if batch and device.type == "cpu" else 25
    values = 0
    for seed in range(each * batch, each * batch + each):
        torch.set_num_threads(1 + seed % 2)
        assert _C.use_instruction_set(ISAS[seed // 2 % len(ISAS)])
        values += check(operators, *fuzzed.fuzzed(seed), device).values
    assert values > 200


def test_every_kind_occurs() -> None:
    calls = [fuzzed.fuzzed(seed)[0] for seed in range(100)]
    assert all(any(case.name.startswith(kind) for case in calls) for kind in fuzzed.KINDS)
    assert len({case.private.dtype for case in calls}) == 3
    assert any(case.private.shape[2] > 4000 for case in calls)
