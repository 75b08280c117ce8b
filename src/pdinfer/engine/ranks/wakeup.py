"""How one rank wakes the others, which sleep on empty inboxes while it has work, and how all know that all live."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

import torch

from pdinfer.errors import RankLost
from pdinfer.parallel.groups import Group
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.silence import RANKS, SilenceWatch

SECRET_BYTES = 8
DATAGRAM = struct.Struct(f"<{SECRET_BYTES}sqI")
"""The secret of the receiving rank, a number, and the sending rank."""
BEAT, LEAVES = -1, -2
"""Numbers that notify of nothing: a rank lives, and a rank closes."""
LOOPBACK = "127.0.0.1"
ANYWHERE = ("10.255.255.255", 9)
"""A socket connected to this address shows which address the host has in its network. Nothing is sent."""


class Beats:
    """How long each of `ranks` has been silent. One that was never heard is not waited for: where datagrams do not get
    through, the deadline of a collective has to do. `heard` and `look` are called in one thread, `check` in any."""

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected = set(ranks)
        self._watches: dict[int, SilenceWatch] = {}
        self._heard_at: dict[int, float] = {}

    def heard(self, rank: int, number: int) -> None:
        """Note that a rank has sent a number. One that leaves is not heard again."""
        if number == LEAVES:
            self._expected.discard(rank)
            self._watches.pop(rank, None)
        elif rank in self._expected:
            now = self._heard_at[rank] = self._clock()
            self._watches.setdefault(rank, SilenceWatch(RANKS, now))

    def look(self) -> None:
        """Add up the silences. Call it every `RANKS.look_s`."""
        now = self._clock()
        for rank, watch in self._watches.items():
            watch.look(now, heard_ago_s=now - self._heard_at[rank])

    def check(self) -> None:
        """Raise RankLost when a rank has been silent for `RANKS.silent_s`."""
        for rank, watch in list(self._watches.items()):
            if watch.silent_s >= RANKS.silent_s:
                raise RankLost(
                    f"rank {rank} has been silent for {watch.silent_s:.1f} s: its process stands still, its engine was "
                    "closed, or its machine is gone; start all ranks anew"
                )


class Wakeup(OfOneProcess):
    """A UDP socket on every rank of `world`, and a thread that listens to it and beats. All ranks make it together.

    It listens on the loopback interface when all ranks are on one host, else on the one address of its host that the
    others know. A notification is a number from 0; the thread calls `heard` with each. A datagram that does not
    carry the secret of the ranks is dropped. The secret travels in the clear and a datagram may be lost, so a
    notification is only a hint: it may hasten what would be done without it, and nothing else. Several beats in a row
    would have to be lost for a rank to count as lost."""

    def __init__(
        self,
        world: Group,
        heard: Callable[[int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._heard = heard
        self._rank = world.rank
        self._clock = clock
        self._beats = Beats(set(range(world.size)) - {world.rank}, clock)
        self._beat_at = clock()
        self._closing = False
        self._secret = random_bytes(SECRET_BYTES)
        own = _own_address()
        hosts = {
            int(host)
            for host in world.all_gather(torch.tensor([[_number(own)]], dtype=torch.int64, device="cpu")).flatten()
        }
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((LOOPBACK if len(hosts) == 1 else own, 0))
        self._socket.settimeout(RANKS.look_s)
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
                self._socket.sendto(DATAGRAM.pack(secret, number, self._rank), address)

    def check(self) -> None:
        """Raise RankLost when another rank has been silent for too long."""
        self._beats.check()

    def close(self, *, as_agreed: bool = True) -> None:
        """End the thread. A second call does nothing. The others miss this rank unless it leaves `as_agreed`."""
        if not self._closing:
            self._closing = True
            if as_agreed:
                self.notify(LEAVES)
            with contextlib.suppress(OSError):  # or else the thread looks by itself
                self._socket.sendto(b"", self.address)
            self._thread.join()
            self._socket.close()

    def _listen(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):  # no datagram came in time, or the system reports a peer's closed port
                data = self._socket.recv(64)
                if len(data) == DATAGRAM.size:
                    self._take(*DATAGRAM.unpack(data))
            if self._clock() >= self._beat_at:
                self._beat_at = self._clock() + RANKS.look_s
                self._beats.look()
                self.notify(BEAT)

    def _take(self, secret: bytes, number: int, rank: int) -> None:
        if hmac.compare_digest(secret, self._secret):
            self._beats.heard(rank, number)
            if number >= 0:
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
