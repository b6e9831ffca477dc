"""A fork server for the `optpipe` commands of the pages: it has loaded what they import, and forks for each command.

Loading torch and the solvers takes most of the time of a short command. A client takes the place of `optpipe`: it sends
its arguments, folder, environment and standard streams to the server, and exits with the exit code of the command. It
runs as a script without site-packages, so that it starts at once.
"""

import json
import os
import socket
import sys

CLIENT = (sys.executable, "-I", "-S", __file__)
"""Beginning of a client's command; the path of the server's socket and the arguments follow."""


def client(server: str, arguments: list[str]) -> int:
    """Exit code of a command that the server runs."""
    request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        return int(connection.makefile().readline())


def serve(path: str) -> None:
    """Run commands until the process is killed; in each forked process, run one to its end."""
    from tests.rank_server import load

    load()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path + ".new")
        listening.listen(64)
        os.rename(path + ".new", path)  # a socket that is seen accepts connections
        while True:
            connection, _ = listening.accept()
            while _ended_child():
                pass
            if not os.fork():
                listening.close()
                break
            connection.close()
    _answer(connection)


def _ended_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _answer(connection: socket.socket) -> None:
    """Run the command of a connection in a forked process, and send its exit code."""
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    request = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["optpipe", *request["arguments"]]
    from optpipe.cli import main

    main()


if __name__ == "__main__":
    sys.exit(client(sys.argv[1], sys.argv[2:]))
