"""The links of the README and the site: files, anchors, and every page's place in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, anchors, links, name_of, pages

from adapmixed import __version__


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


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A «b» (c)\n\n[x](y.md#z) `[no](code.md)`\n\n```text\n[no](block.md)\n```\n")
    assert links(page) == ["y.md#z"]
    assert anchors(page) == {"a-b-c"}


def test_every_source_to_cite_has_an_entry() -> None:
    page = (DOCS / "how-to" / "cite.md").read_text(encoding="utf-8")
    table, bibliography = page.split("## Bibliography")
    entries = re.findall(r"^@\w+\{(\w+),$", bibliography, re.MULTILINE)
    named = set(re.findall(r"`([a-z]+\d{4}[a-z]+)`", table))
    assert sorted(entries) == sorted({*named, "adapmixed"})
    assert bibliography.count("{") == bibliography.count("}")
    assert f"Version {__version__}" in bibliography
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert all(number in bibliography for number in re.findall(r"arXiv:(\S+)", citation))
