"""Formulas as MathML, which browsers draw themselves: no script, no font and nothing loaded from elsewhere."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def inline(translator: Any, node: nodes.math) -> None:
    """A formula within a sentence."""
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula on lines of its own."""
    translator.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    tex = node.astext()
    try:
        return str(tex2mathml(tex, as_block=as_block))
    except MathError as error:
        logger.warning("formula cannot be read: %s in %r", error, tex, location=node)
        return ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Make `mathml` a choice for `html_math_renderer`."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
