"""The blocks, headings and links of the README and the site's pages, read from Markdown."""

from __future__ import annotations

import doctest
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

CHECKED = ("python", "sh")
"""Languages of blocks that run, or are parsed if a mark says that they cannot."""

SHOWN = ("text", "json", "toml", "yaml", "ini")
"""Languages of blocks that are only shown, as are directives in braces."""

_ANSWERED = re.compile(
    r"(?<=\()\d+(?= so far\))|\d+(?= records)|(?<=charges: )\d+|(?<=queries: )\d+"
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: relative to the repository.
        line: of its first line of content, from 1.
        language: the first word after the fence.
        marks: the other words. "no-run" is for what cannot run in the tests. In a text block that
            shows an output, "random=1,3" names lines that differ from run to run, and "measured"
            says that the numbers of the others do.
        text: the content, each line with its line break.
    """

    page: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def runs(self) -> bool:
        return self.language in CHECKED and "no-run" not in self.marks

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def random_lines(self) -> set[int]:
        """The lines that differ from run to run, counted from 1."""
        listed = [mark[7:].split(",") for mark in self.marks if mark.startswith("random=")]
        return {int(number) for numbers in listed for number in numbers}


def flat(text: str, measured: bool) -> str:
    """Return a text as one line with single blanks.

    An answer may end early, so # stands for counts of answers and, if measured, for every number.
    """
    text = " ".join(re.sub("─+", "─", text).split())
    text = _ANSWERED.sub("#", text)
    if not measured:
        return text
    text = re.sub(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", text)
    return re.sub(r"# (?:h|min) left", "# s left", text)  # a slow machine's time


def is_printed(shown: Block, printed: str) -> bool:
    """Tell whether a run printed what a block shows, but for random lines and ellipses."""
    lines = shown.text.splitlines()
    kept = ["..." if at in shown.random_lines else line for at, line in enumerate(lines, 1)]
    want, got = (flat(text, "measured" in shown.marks) for text in (" ".join(kept), printed))
    return doctest.OutputChecker().check_output(f"... {want} ...", f"  {got}  ", doctest.ELLIPSIS)


def pages() -> list[Path]:
    """Return README.md and every page below docs."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return (page.relative_to(ROOT) if page.is_relative_to(ROOT) else page).as_posix()


@cache
def split(page: Path) -> tuple[tuple[Block, ...], str]:
    """Return the fenced blocks, and the page with blank lines in their place."""
    text, blocks = page.read_text(encoding="utf-8"), list[Block]()
    prose = text.splitlines()
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence":
            assert token.map is not None
            start, end = token.map
            ended = prose[end - 1].strip() == token.markup
            assert ended, f"{name_of(page)}:{start + 1}: the block does not end"
            language, *marks = token.info.split() or [""]
            marks = [] if language.startswith("{") else marks
            blocks.append(Block(name_of(page), start + 2, language, tuple(marks), token.content))
            prose[start:end] = [""] * (end - start)
    return tuple(blocks), "\n".join(prose) + "\n"


def blocks(page: Path) -> tuple[Block, ...]:
    return split(page)[0]


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]


def shell_lines(text: str) -> list[str]:
    """Return a block's commands, continued lines joined, without bodies of here-documents."""
    joined = re.sub(r"\\\n\s*", " ", text)
    outside = re.sub(r"<<'(\w+)'(.*)\n(?:.*\n)*?\1$", r"\2", joined, flags=re.MULTILINE)
    return [line.strip() for line in outside.splitlines() if line.strip()]


def indented_commands(page: Path) -> list[str]:
    """Return this package's commands in code that is marked by its indent alone."""
    return re.findall(r"^ {4,}(?:\$ )?(adapmixed(?:-lab)? [a-z].*)$", split(page)[1], re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    from command_line import filled

    names: set[str] = set()
    prose = filled(split(page)[1])
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", prose, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        name, count = slug, 0
        while name in names:
            count += 1
            name = f"{slug}-{count}"
        names.add(name)
    return names | set(re.findall(r"^\(([\w-]+)\)=$", prose, re.MULTILINE))


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and images, without those in code."""
    prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", split(page)[1], flags=re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", prose)
    return targets + re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose, re.MULTILINE)
