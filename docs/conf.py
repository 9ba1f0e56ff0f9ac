"""Settings of the site; `make docs` builds it without the network."""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import adapmixed  # noqa: E402
import adapmixed_ext  # noqa: E402
from adapmixed import __version__  # noqa: E402


def _program() -> str:
    """Return a digest of the program whose output the notebooks show."""
    digest = hashlib.sha256()
    for package in (adapmixed, adapmixed_ext):
        for path in sorted(Path(package.__path__[0]).rglob("*")):
            if path.suffix in (".py", ".so", ".json"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


project = "adapmixed"
author = "the adapmixed developers"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_line",
    "mathml",
    "outside",
]
source_suffix = {".md": "myst-nb"}
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

# Notebooks are stored without outputs and run by the build. One is run again if it or the program
# has changed: the cache knows the notebook's code alone, so each program has a cache of its own.
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-notebooks" / _program())
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_output_stderr = "remove"
nb_merge_streams = True

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
