"""The HTTP service.

>>> from api import create_app
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import lazy

if TYPE_CHECKING:
    from api.app import create_app

__all__ = ["create_app"]

lazy.offer(__name__, {"create_app": "api.app"})
