"""Strangers at a door, in a process of their own: `python knocking.py ENDPOINT COUNT SECONDS HEX`.

So many connections say the bytes, at once or one of them every SECONDS, and come again when they are closed. Prints a
line when as many have come; ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time


def bare(endpoint: str, *, limit_s: float) -> socket.socket:
    """A connected socket. Nothing that it does takes longer."""
    scheme, _, where = endpoint.partition("://")
    if scheme == "tcp":
        host, port = where.split(":")
        return socket.create_connection((host, int(port)), limit_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(limit_s)
    sock.connect(where)
    return sock


class Knocking:
    """The connections, and how often any came."""

    def __init__(self, endpoint: str, count: int, byte_s: float, says: bytes) -> None:
        self.endpoint, self.count, self.byte_s, self.says = endpoint, count, byte_s, says
        self.selector = selectors.DefaultSelector()
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        self.said: dict[socket.socket, int] = {}
        self.told_at = time.monotonic()
        self.came = 0

    def run(self) -> None:
        while True:
            missing = len(self.said) < self.count
            if missing:
                with contextlib.suppress(OSError):
                    self.come()
            for key, _ in self.selector.select(0.0 if missing else 0.05):
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self.look(key.fileobj)
            if self.byte_s and time.monotonic() > self.told_at + self.byte_s:
                self.told_at = time.monotonic()
                for sock, at in self.said.items():
                    self.said[sock] = at + 1
                    with contextlib.suppress(OSError):
                        sock.send(self.says[at : at + 1])

    def come(self) -> None:
        sock = bare(self.endpoint, limit_s=10.0)
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ)
        self.said[sock] = 0
        self.came += 1
        if self.came == self.count:
            sys.stdout.write("all are here\n")
            sys.stdout.flush()
        if not self.byte_s:
            sock.send(self.says)

    def look(self, sock: socket.socket) -> None:
        """What the other end says is nothing to a stranger, but that it closes."""
        with contextlib.suppress(BlockingIOError):
            try:
                gone = not sock.recv(1 << 16)
            except ConnectionError:
                gone = True
            if gone:
                self.selector.unregister(sock)
                del self.said[sock]
                sock.close()


if __name__ == "__main__":
    os.nice(19)  # strangers have machines of their own
    Knocking(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), bytes.fromhex(sys.argv[4])).run()
