"""Resolve what pages and docstrings refer to outside the site.

A name of another package is shown as it is: no inventory of it is downloaded. A name of this
package that no page documents is shown as it is, too, unless it is public: then it must be found.

A link to a file of the repository becomes a download. A link to a folder becomes plain text.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(((?:\.\./)+[^)\s]*)\)")
_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
PUBLIC = ("adapmixed", "adapmixed_ext", "adapmixed.privacy", "adapmixed.rng")


def is_public(target: str) -> bool:
    """Return whether a dotted name is one that a public module exports."""
    module, _, name = target.rpartition(".")
    if module not in PUBLIC:
        return False
    return name in getattr(importlib.import_module(module), "__all__", ())


def unresolved(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Return the text of a reference to a name without a page."""
    if node.get("refdomain") != "py" or is_public(node["reftarget"]):
        return None
    return contnode


def files(app: Any, name: str, source: list[str]) -> None:
    """Rewrite a page's links to what lies in the repository, but not in its documents."""
    docs = Path(app.srcdir)
    page = Path(app.env.doc2path(name)).parent

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path = Path(os.path.normpath(page / target.partition("#")[0]))
        if path.is_relative_to(docs):
            return match[0]
        plain = text.replace("`", "")
        return f"{{download}}`{plain} <{target.partition('#')[0]}>`" if path.is_file() else text

    source[0] = _LINK.sub(link, source[0])


def docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Link the pages that a docstring names, and keep the bars of |x|.

    reStructuredText would read the bars as a substitution.
    """

    def link(match: re.Match[str]) -> str:
        return f":doc:`/{match[1]}`" if match[1] in app.env.found_docs else match[0]

    for index, line in enumerate(lines):
        parts = re.split(r"(``.+?``|`[^`]+`)", line)
        parts[::2] = [_PAGE.sub(link, part.replace("|", r"\|")) for part in parts[::2]]
        lines[index] = "".join(parts)


def setup(app: Any) -> dict[str, Any]:
    """Add the handlers."""
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon's 500
    app.connect("missing-reference", unresolved)
    app.connect("source-read", files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
