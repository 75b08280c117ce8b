"""How one rank wakes the others: they sleep on empty inboxes while it has work."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable

import torch

from pdinfer.parallel.groups import Group
from pdinfer.process.forked import OfOneProcess

SECRET_BYTES = 8
DATAGRAM = struct.Struct(f"<{SECRET_BYTES}sq")
"""The secret of the rank that is woken, and a number."""
LOOPBACK = "127.0.0.1"
LOOK_S = 0.5
"""How often the thread looks whether it was closed: the datagram that tells it so may be lost as any other."""
ANYWHERE = ("10.255.255.255", 9)
"""A socket connected to this address shows which address the host has in its network. Nothing is sent."""


class Wakeup(OfOneProcess):
    """A UDP socket on every rank of `world`, and a thread that listens to it. All ranks make it together.

    It listens on the loopback interface when all ranks are on one host, else on the one address of its host that the
    others were told. A notification is a number; the thread calls `heard` with each. A datagram that does not carry the
    secret of the ranks is dropped. The secret travels in the clear and a datagram may be lost, so a notification is
    only a hint: it may hasten what would be done without it, and nothing else.
    """

    def __init__(
        self, world: Group, heard: Callable[[int], None], *, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._heard = heard
        self._closing = False
        self._secret = random_bytes(SECRET_BYTES)
        own = _own_address()
        hosts = {
            int(host)
            for host in world.all_gather(torch.tensor([[_number(own)]], dtype=torch.int64, device="cpu")).flatten()
        }
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK if len(hosts) == 1 else own, 0))
        self._socket.settimeout(LOOK_S)
        self.address: tuple[str, int] = self._socket.getsockname()
        host, port = self.address
        ours = [[_number(host), port, int.from_bytes(self._secret, "little", signed=True)]]
        theirs = world.all_gather(torch.tensor(ours, dtype=torch.int64, device="cpu")).tolist()
        del theirs[world.rank]
        self._others = [
            ((socket.inet_ntoa(host.to_bytes(4, "big")), port), secret.to_bytes(SECRET_BYTES, "little", signed=True))
            for host, port, secret in theirs
        ]
        self._thread = threading.Thread(target=self._listen, name="pdinfer-wakeup", daemon=True)
        self._thread.start()

    def notify(self, number: int) -> None:
        """Send `number` to all other ranks. Never block."""
        for address, secret in self._others:
            with contextlib.suppress(OSError):  # a rank that does not hear it looks by itself
                self._socket.sendto(DATAGRAM.pack(secret, number), address)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(OSError):  # or else the thread looks by itself
                self._socket.sendto(b"", self.address)
            self._thread.join()
            self._socket.close()

    def _listen(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):  # no datagram came in time, or the system reports a peer's closed port
                data = self._socket.recv(64)
                if len(data) == DATAGRAM.size:
                    secret, number = DATAGRAM.unpack(data)
                    if hmac.compare_digest(secret, self._secret):
                        self._heard(number)


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _own_address() -> str:
    """Return the address at which other hosts reach this one, or loopback on a host without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ANYWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK
