"""Settings of the site; `make docs` builds it without the network."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from adapmixed import __version__  # noqa: E402

project = "adapmixed"
author = "the adapmixed developers"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_line",
    "mathml",
    "outside",
]
exclude_patterns = ["_ext"]
# Blocks without a language are output and file listings: nothing to highlight.
highlight_language = "text"
default_role = "obj"
smartquotes = False
nitpicky = True

# Markdown. GitHub's anchors, so that one link works there and here.
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4

# Formulas between dollar signs become MathML. A dollar sign beside a space or a digit is text.
html_math_renderer = "mathml"
myst_dmath_allow_space = False
myst_dmath_allow_digits = False

# Docstrings.
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"adapmixed {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
