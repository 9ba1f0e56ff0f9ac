"""The links of the README and the site: files, anchors, and every page's place in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, anchors, links, name_of, pages

from adapmixed.commands.ledger import LETTER


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in links(page):
        if re.match(r"https://[\w.-]+(/|$)", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        inside = found.is_relative_to(ROOT)
        if not inside or not found.exists():
            broken.append(target)
        elif anchor and (found.suffix != ".md" or anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def test_every_page_is_in_the_index_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.DOTALL | re.MULTILINE)
    listed = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    found = [page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(set(found) - {"index"})


def test_every_page_is_one_click_from_the_index() -> None:
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in links(DOCS / "index.md")}
    missing = {name_of(page) for page in DOCS.rglob("*.md") if page.resolve() not in linked}
    assert missing == {"docs/index.md"}


def test_each_sentence_of_the_letter_has_its_section() -> None:
    known = anchors(DOCS / "concepts" / "guarantees.md")
    said = [line for line in LETTER.read_text(encoding="utf-8").splitlines() if "|- " in line]
    assert len(said) > 15
    for line in said:
        found = re.fullmatch(r"\w*\|- .+[.}] \[([^\]]+)\]", line)
        assert found is not None and set(found[1].split(", ")) <= known, line
