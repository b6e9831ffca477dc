"""The standard streams, such that no command fails because of them."""

from __future__ import annotations

import io
import os
import sys


def make_ready() -> None:
    """Let closed streams lead nowhere, and show a character that a stream's encoding lacks by its number.

    The numbers of closed streams would go to the next files opened, into which a solver's library may then print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
