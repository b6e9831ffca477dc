"""Every picture on the site is a link to itself at full size."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def link_to_full_size(_app: Sphinx, tree: nodes.document) -> None:
    """Give pictures the width of the text; Sphinx links those with a width to their file."""
    for image in tree.findall(nodes.image):
        image.setdefault("width", "100%")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", link_to_full_size)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
