"""A doorbell between ranks: a rank that sleeps while its own inbox is empty hears that another one has work."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

import torch

from pdinfer.groups import Group

_NUMBER = struct.Struct("<q")
ANYWHERE = ("10.255.255.255", 9)
"""Asked for the way there, a host tells the address it has in its network; nothing is sent."""


class Doorbell:
    """A UDP socket on every rank of `world`, and a thread that listens to it: made by all ranks together.

    A ring is a number, and `heard` is called with each from the thread. A datagram may be lost, or come from anybody,
    so a ring is a hint: it may only hasten what would be done without it.
    """

    def __init__(self, world: Group, heard: Callable[[int], None]) -> None:
        self._heard = heard
        self._closing = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._port = self._socket.getsockname()[1]
        ours = [[int.from_bytes(socket.inet_aton(_own_address()), "big"), self._port]]
        theirs = world.all_gather(torch.tensor(ours)).tolist()
        del theirs[world.rank]
        self._others = [(socket.inet_ntoa(host.to_bytes(4, "big")), port) for host, port in theirs]
        self._thread = threading.Thread(target=self._listen, name="pdinfer-doorbell", daemon=True)
        self._thread.start()

    def ring(self, number: int) -> None:
        """Sends `number` to all others; never blocks."""
        for address in self._others:
            with contextlib.suppress(OSError):  # whoever does not hear it looks by himself
                self._socket.sendto(_NUMBER.pack(number), address)

    def close(self) -> None:
        """Ends the thread. A second call does nothing."""
        if not self._closing:
            self._closing = True
            self._socket.sendto(b"", ("127.0.0.1", self._port))
            self._thread.join()
            self._socket.close()

    def _listen(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):  # a peer's closed port is told here
                data = self._socket.recv(64)
                if len(data) == _NUMBER.size:
                    self._heard(*_NUMBER.unpack(data))


def _own_address() -> str:
    """Where other hosts reach this one; loopback on a host without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ANYWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
