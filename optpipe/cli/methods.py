"""`optpipe methods`: the methods and what each can handle."""

from __future__ import annotations

from optpipe.cli.output import AsJson, print_json, stdout, table


def command(as_json: AsJson = False) -> int:
    """List the methods and what each can handle."""
    from solver.methods import METHODS

    if as_json:
        keys = ("name", "kind", "summary", "handles")
        print_json([{key: getattr(method, key) for key in keys} for method in METHODS.values()])
        return 0
    rows = table("method", "kind", "what it is", "what it handles")
    for column in rows.columns:
        column.justify, column.no_wrap = "left", False
    for method in METHODS.values():
        rows.add_row(method.name, method.kind, method.summary, method.handles)
    stdout().print(rows)
    return 0
