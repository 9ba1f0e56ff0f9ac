"""Promises of the README alone; its blocks and links are tested with those of the site."""

from __future__ import annotations

import re

from doc_pages import ROOT, blocks

README = ROOT / "README.md"
PYTHON = [block for block in blocks(README) if block.language == "python" and block.runs]


def test_the_two_commands_stay() -> None:
    text = README.read_text(encoding="utf-8")
    assert re.search(r"^ *make demo\b", text, re.MULTILINE)
    assert re.search(r"^ *make test\b", text, re.MULTILINE)


def test_an_answer_comes_with_its_guarantee() -> None:
    assert any("PrivateGenerator(" in block.text for block in PYTHON)
    assert any("guarantee" in block.text for block in PYTHON)
