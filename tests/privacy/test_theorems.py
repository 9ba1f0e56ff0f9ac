"""Every public function of the privacy layer says which theorem it computes."""

import inspect
import re

import pytest

from adapmixed import privacy
from adapmixed.privacy import planner

FUNCTIONS = {
    name: getattr(module, name)
    for module in (privacy, planner)
    for name in module.__all__
    if inspect.isroutine(inspect.unwrap(getattr(module, name)))
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_function_names_its_theorem(name: str) -> None:
    words = " ".join((inspect.getdoc(FUNCTIONS[name]) or "").split())
    named = re.search(r"docs/privacy\.md, sections? \d+", words)
    assert named or re.search(r"\b(Theorem|Proposition|Lemma|Corollary) \d", words), words


def test_all_of_them_were_asked() -> None:
    assert {"c_alpha", "zcdp_to_dp", "clipped_mixing_epsilon", "plan"} <= FUNCTIONS.keys()
