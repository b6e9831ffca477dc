"""Docstrings are plain text with `names` in backticks; indented blocks stand as they are (trees, lists of files)."""

from __future__ import annotations

import pydoc
import re

from docutils import nodes
from pydantic.fields import FieldInfo
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

BARS = re.compile(r"\|(?=[^`]*(?:`[^`]*`[^`]*)*$)")
"""Bars that stand outside of backticks."""
OUR_PACKAGES = ("optpipe.", "solver.", "api.")


def keep_indented_blocks(_app: Sphinx, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Announce each indented block as literal text; a bar is the sign of an absolute value, not of a substitution."""
    lines[:] = [BARS.sub(r"\\|", line) for line in lines]
    for place in range(len(lines) - 2, -1, -1):
        if _opens_block(lines, place):
            lines[place + 1 : place + 1] = ["", "::", ""]


def _opens_block(lines: list[str], place: int) -> bool:
    """True if a flush line and a blank one stand before an indented line."""
    line, *after = lines[place:]
    ahead = next((text for text in after if text.strip()), "")
    blank_between = not after[0].strip()
    flush = bool(line.strip()) and not line.startswith(" ")
    return (
        flush and blank_between and ahead.startswith("  ") and not line.rstrip().endswith("::") and line[0] not in "-*"
    )


def document_signature(
    _app: Sphinx, what: str, _name: str, of: object, _options: object, _signature: str, returns: str
) -> tuple[str, str] | None:
    """The fields of a document by the names of their types, as its source says them."""
    from optpipe.document import Document

    if what != "class" or not (isinstance(of, type) and issubclass(of, Document)):
        return None
    types = {
        name: text for base in reversed(of.__mro__) for name, text in vars(base).get("__annotations__", {}).items()
    }
    fields = (f"{name}: {_plain_type(types[name])}{_default(field)}" for name, field in of.model_fields.items())
    return f"(*, {', '.join(fields)})", returns


def _plain_type(text: str) -> str:
    return re.sub(r"Annotated\[(.*), Field\(.*\)\]", r"\1", text).lstrip("_")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    plain = isinstance(field.default, str | int | float | None)
    return f" = {field.default!r}" if plain else " = ..."


def show_inner_names(
    _app: Sphinx, _environment: object, reference: pending_xref, words: nodes.Node
) -> nodes.Node | None:
    """Leave a name of ours that stands on no page as words; one that does not exist stays a warning."""
    name = reference.get("reftarget", "")
    if name.endswith(".Annotated"):  # typing's, which claims the module of what it annotates
        return words
    return words if name.startswith(OUR_PACKAGES) and pydoc.locate(name) is not None else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_indented_blocks)
    app.connect("autodoc-process-signature", document_signature)
    app.connect("missing-reference", show_inner_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
