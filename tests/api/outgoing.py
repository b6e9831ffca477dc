"""An audit hook that tells whom this process calls; it loads nothing, as it is to see what others do when they load."""

from __future__ import annotations

from typing import Any

WATCHED = frozenset({"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"})


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Print who is called, except for this process itself: asyncio wakes itself through a pair of sockets."""
    if event in WATCHED and not any(name in repr(arguments) for name in ("127.0.0.1", "/")):
        print(event, arguments[1:], flush=True)
