"""Links, formulas, the reference and the built site of the README and the pages.

Files and anchors exist, and every page is in the index. Markdown leaves formulas alone, and the
site can show them. The reference has every public name, command and option, and every mechanism's
keys. The site builds without warnings and loads nothing from other machines.
"""

from __future__ import annotations

import argparse
import html
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_pages  # noqa: F401  (puts the site's extensions on the path)
import pytest
from command_line import attributes, commands, mechanisms, parser_of
from doc_pages import DOCS, ROOT, anchors, links, name_of, pages
from markdown_it import MarkdownIt
from mathml import mathml
from mdit_py_plugins.dollarmath import dollarmath_plugin

from adapmixed.commands.ledger import LETTER
from adapmixed.commands.options import keys_of, kinds


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in links(page):
        if re.match(r"https://[\w.-]+(/|$)", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        inside = file.is_relative_to(ROOT)
        if not inside or not file.exists():
            broken.append(target)
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_is_one_click_from_the_index() -> None:
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in links(DOCS / "index.md")}
    missing = {name_of(page) for page in DOCS.rglob("*.md") if page.resolve() not in linked}
    assert missing == {"docs/index.md"}


def test_each_sentence_of_the_letter_has_its_section() -> None:
    known = anchors(DOCS / "concepts" / "guarantees.md")
    said = [line for line in LETTER.read_text(encoding="utf-8").splitlines() if "|- " in line]
    assert len(said) > 15
    for line in said:
        match = re.fullmatch(r"\w*\|- .+[.}] \[([^\]]+)\]", line)
        assert match is not None and set(match[1].split(", ")) <= known, line


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
        "".join(part.content for part in seen[at : at + 4])
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


def misread(text: str, pairs: list[tuple[str, bool]]) -> list[str]:
    """Return those of a page's formulas that GitHub would not show as they are written.

    It drops a backslash before punctuation, reads "*" and "<" as Markdown and HTML, begins a list
    at a line that begins with a sign, and knows a dollar sign beside some characters as text.
    """
    bad = []
    for latex, display in pairs:
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
    pairs = formulas(text)
    for latex, display in pairs:
        assert "\\" not in mathml(latex, display), latex
    assert not misread(text, pairs)
    left = tokens(text, dollars=True)
    assert not [token.content for token in left if token.type == "text" and "$" in token.content]


def unread(page: str) -> list[str]:
    """Return marks of Markdown that a built page still shows outside code and signatures."""
    page = re.sub(r"<(pre|code|script|style|dt)\b.*?</\1>", "", page, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    return re.findall(r".{0,40}(?:`|\]\(|\{download\}).{0,40}", text)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="the extra `docs` is not installed"
)
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q",
        "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "html").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(\w+:)?//", text)
        assert not loaded, page.name
        assert not unread(text), page.name
    theory = (tmp_path / "html" / "theory" / "clipped-mixing.html").read_text(encoding="utf-8")
    assert "<math " in theory
    reference = (tmp_path / "html" / "reference" / "python.html").read_text(encoding="utf-8")
    assert 'id="adapmixed.Accountant.charge"' in reference
    commands = (tmp_path / "html" / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "--max-new-tokens" in commands


PYTHON = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^\.\. auto(?:class|function|exception|data):: ([\w.]+)", PYTHON, re.M)
DOCUMENTED += [
    f"{module}.{name}"
    for module in re.findall(r"^\.\. automodule:: ([\w.]+)", PYTHON, re.M)
    for name in getattr(importlib.import_module(module), "__all__", ())
    if f"{module}.{name}" not in DOCUMENTED
]
MODULES = ("adapmixed", "adapmixed_ext", "adapmixed.privacy", "adapmixed.training")


def _found(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    documented = [_found(name) for name in DOCUMENTED]
    home = importlib.import_module(module)
    missing = [
        name for name in home.__all__ if not any(getattr(home, name) is obj for obj in documented)
    ]
    assert not missing


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from _leaves(command)


@pytest.mark.parametrize("program", ["adapmixed", "adapmixed-lab"])
def test_every_command_and_option_is_shown(program: str) -> None:
    text = commands(program)
    leaves = list(_leaves(parser_of(program)))
    assert len(leaves) >= 3
    for parser in leaves:
        # Options of other programs are known by name, but are not accepted.
        assert not {"--top-p", "--num-beams", "--greedy"} & set(parser._option_string_actions)
        (section,) = re.findall(
            rf"^###+ {parser.prog}\n(.*?)(?=^###|\Z)", text, re.MULTILINE | re.DOTALL
        )
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            for option in action.option_strings:
                assert action.help and option in section, f"{parser.prog} {option}"


def test_every_key_of_every_mechanism_is_shown_with_its_meaning() -> None:
    text = mechanisms()
    for name, kind in kinds().items():
        assert f"### {name}\n" in text
        described = attributes(kind) | {"preset": "of this page"}
        for key in keys_of(name):
            assert f"| `{key}` |" in text
            assert described.get(key), f"{name}: {key} has no description in its class"
