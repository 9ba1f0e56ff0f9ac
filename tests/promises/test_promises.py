"""The table of promises and faults is complete, and fits the present sources and tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .faults import FAULTS, Fault
from .promises import PROMISES, table

ROOT = Path(__file__).parents[2]
faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)


def test_every_promise_has_a_fault_and_every_fault_a_promise() -> None:
    assert {fault.promise for fault in FAULTS} == set(PROMISES)
    assert all(promise.faults and promise.tests for promise in table())


def test_faults_differ() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


@faults
def test_a_fault_changes_one_place(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old


@faults
def test_the_tests_of_a_fault_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.fullmatch(r"test_\w+\.py", Path(file).name)
        assert not name or re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE)


@faults
def test_a_fault_is_caught_without_the_slow_tests(fault: Fault) -> None:
    def marks(test: ast.FunctionDef) -> str:
        return " ".join(ast.unparse(one) for one in test.decorator_list)

    fast = []
    for test in fault.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
        named = [one for one in found if one.name == name or not name and one.name[:5] == "test_"]
        fast += [one for one in named if "mark.slow" not in marks(one)]
    assert fast
