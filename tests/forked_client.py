"""A client of `tests.forked`, run as a script without site-packages, so that it starts at once.

It sends its arguments, folder, environment and standard streams to the server, passes signals on, and ends as the
command does; when it is killed, the command is too.
"""

import json
import os
import signal
import socket
import sys


def client(server: str, arguments: list[str]) -> int:
    """Exit code of a command that the server runs."""
    request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        code = int(connection.makefile().readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(client(sys.argv[1], sys.argv[2:]))
