"""Reading TOML files: bounded, with errors that a person can act on."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from optpipe.document import read_bounded
from optpipe.errors import InputError, Issue


def read_toml(path: Path, max_bytes: int, if_json: str = "") -> dict[str, Any]:
    """Parse a TOML file of at most `max_bytes`.

    `if_json` is what to say to someone who gave a JSON document instead. Raises InputError that names the file.
    """
    content = read_bounded(path, max_bytes)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        maybe = f" {if_json}" if if_json and path.suffix == ".json" else ""
        detail = f"is not TOML: {error}.{maybe}"
    except (RecursionError, ValueError):  # the parser recurses into brackets, and Python limits the digits of integers
        detail = "nests too deeply, or has a number of thousands of digits. Maybe this is another file."
    raise InputError([Issue("", "bad_toml", detail)], str(path))
