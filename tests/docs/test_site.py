"""The site builds without warnings and loads nothing from other machines."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import DOCS


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
