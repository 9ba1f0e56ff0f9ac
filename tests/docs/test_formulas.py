"""Formulas of the pages: Markdown leaves them alone, and the site can show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import name_of, pages
from markdown_it import MarkdownIt
from mathml import mathml
from mdit_py_plugins.dollarmath import dollarmath_plugin


def tokens(text: str, dollars: bool) -> Iterator[Any]:
    """Yield a page's tokens, with or without what is known of formulas."""
    parser = MarkdownIt("commonmark").enable("table")
    if dollars:  # as docs/conf.py sets it
        parser.use(dollarmath_plugin, allow_space=False, allow_digits=False)
    for token in parser.parse(text):
        yield from token.children or [token]


def emphasised(text: str) -> list[str]:
    """Return what begins in italics because of an underscore.

    Formulas are not known here: Markdown that GitHub reads before them must leave them alone.
    """
    seen = list(tokens(text, dollars=False))
    return [
        "".join(one.content for one in seen[at : at + 4])
        for at, token in enumerate(seen)
        if token.type in ("em_open", "strong_open") and token.markup.startswith("_")
    ]


def formulas(text: str) -> list[tuple[str, bool]]:
    """Return a page's formulas, each with whether it has lines of its own."""
    return [
        (token.content, token.type == "math_block")
        for token in tokens(text, dollars=True)
        if token.type in ("math_inline", "math_block")
    ]


def misread(text: str, found: list[tuple[str, bool]]) -> list[str]:
    """Return those of a page's formulas that GitHub would not show as they are written.

    It drops a backslash before punctuation, reads "*" and "<" as Markdown and HTML, begins a list
    at a line that begins with a sign, and knows a dollar sign beside some characters as text.
    """
    bad = []
    for latex, display in found:
        sign = display and re.search(r"^\s*[-+>#]", latex, re.MULTILINE)
        if sign or re.search(r"\\[^a-zA-Z\s]|[*<~]|\]\(", latex) or (not display and "\n" in latex):
            bad.append(latex)
            continue
        if not display:
            at = re.escape(f"${latex}$")
            if not re.search(rf"(?:^|[\s(\[]){at}(?:$|[\s.,;:)\]])", text, re.MULTILINE):
                bad.append(latex)
    return bad


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_formula_can_be_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not emphasised(text)
    found = formulas(text)
    for latex, display in found:
        assert "\\" not in mathml(latex, display), latex
    assert not misread(text, found)
    left = tokens(text, dollars=True)
    assert not [token.content for token in left if token.type == "text" and "$" in token.content]
