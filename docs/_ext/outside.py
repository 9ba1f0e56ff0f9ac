"""What the pages and docstrings refer to outside the site.

A name of another package is shown as it is: no inventory of it is downloaded. A name of this
package that no page documents is shown as it is, too, unless it is public: a public name must be
found.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

PUBLIC = ("adapmixed", "adapmixed_ext", "adapmixed.privacy", "adapmixed.rng")


def is_public(target: str) -> bool:
    """Whether a dotted name is one that a public module exports."""
    module, _, name = target.rpartition(".")
    if module not in PUBLIC:
        return False
    return name in getattr(importlib.import_module(module), "__all__", ())


def unresolved(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Return the text of a reference to a name without a page."""
    if node.get("refdomain") != "py" or is_public(node["reftarget"]):
        return None
    return contnode


def bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep the bars of |x| in docstrings, which reStructuredText reads as a substitution."""
    for index, line in enumerate(lines):
        parts = re.split(r"(``.+?``|`[^`]+`)", line)
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[index] = "".join(parts)


def setup(app: Any) -> dict[str, Any]:
    """Add the handlers."""
    app.connect("autodoc-process-docstring", bars, priority=400)  # before napoleon's 500
    app.connect("missing-reference", unresolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
