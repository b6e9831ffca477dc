"""The site: the pages of this folder and the docstrings, by Sphinx. `make docs` builds it to out/docs."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

project = "OptPipe"
html_title = "OptPipe"
author = "the authors of OptPipe"
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "command_line",
    "docstrings",
    "mathml",
    "pictures",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_extensions", "pictures/**"]

# Pages are plain Markdown that reads well on GitHub too: its maths, its anchors, its HTML comments.
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# Our names must resolve. What other packages name is not looked up: their indexes are elsewhere.
nitpick_ignore_regex = [(r"py:.*", r"(?!(optpipe|solver|api)\.).*")]
# A field of a class may have the name of a built-in type, such as `bytes`, which then has more than one target.
suppress_warnings = ["ref.python"]
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "native"
