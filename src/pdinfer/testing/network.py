"""Transports between the nodes of a simulation, and the faults that happen to them.

    network = SimNetwork(Simulation(seed=7), NetworkFaults(slow=0.1, late_read=0.2))
    channel = SimChannel(pool, network, "prefill")
    network.cut("prefill", "decode")

`simulation.freeze`, `thaw`, `crash` and `restart` act on links as they do on those of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from pdinfer.errors import TransferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.memory import Memory
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import TICK_S, Link, Message, QueuingTransport, Receiver, WriteMessage
from pdinfer.testing.links import End, Parcel, ParcelKind
from pdinfer.testing.simulation import NetworkFaults, Placement, Simulation

SCHEME = "sim://"
LATE_SHARE = 0.3
"""The chance that an end of a broken link learns of it late."""


class SimNetwork:
    """Links between the nodes of one simulation. `faults` may be replaced at any time.

    `fired` counts the faults that happened, by name. `refusals` holds (node, reason) for every link that a receiver
    closed by raising although nothing on it had been damaged. A test of a sound protocol finds it empty. `transports`
    are those that listen, by endpoint."""

    def __init__(self, simulation: Simulation, faults: NetworkFaults | None = None) -> None:
        self.simulation = simulation
        self.faults = faults or NetworkFaults()
        self.fired: Counter[str] = Counter()
        self.refusals: list[tuple[str, TransferError]] = []
        self.transports: dict[str, SimTransport] = {}
        self._partitions: set[frozenset[str]] = set()
        simulation.crash_listeners.append(self._crashed)

    def transport(self, node: str, *, placement: Placement = Placement.BY_RECEIVER) -> SimTransport:
        """Return a transport for a channel that lives on `node`. See `Placement` for how its payloads are written."""
        return SimTransport(self, node, placement)

    def cut(self, one: str, other: str) -> int:
        """Break the links between two nodes. Both learn of it, one perhaps later by up to `slow_s`. Return how many
        links there were."""
        ends = self._between(one, other)
        for end in ends:
            self.fired["cut"] += 1
            error = TransferError(f"the connection to {end.link.endpoint} was reset")
            end.peer.inbound.clear()
            end.inbound.clear()
            for side in (end, end.peer):
                side.mangled = True
                late = self.simulation.rng.random() < LATE_SHARE
                delay_s = self.simulation.rng.random() * self.faults.slow_s if late else self.faults.flight_s[1]
                self.simulation.later(delay_s, partial(side.shut, error), node=side.node)
        return len(ends)

    def partition(self, one: str, other: str) -> None:
        """Let nothing pass between two nodes from now on. No node hears of it."""
        self.fired["partition"] += 1
        self._partitions.add(frozenset((one, other)))

    def heal(self) -> None:
        """End every partition. What was on its way arrives, in order."""
        self._partitions.clear()
        for transport in self.transports.values():
            for end in transport.ends:
                if end.waiting:
                    self.simulation.later(0.0, end.resume, node=end.node)

    def blocked(self, one: str, other: str) -> bool:
        """Return whether a partition stands between two nodes."""
        return bool(self._partitions) and frozenset((one, other)) in self._partitions

    def listen(self, transport: SimTransport) -> str:
        """Return the endpoint of a transport. A transport that is built anew on a restarted node gets the same one."""
        number = 0
        while (endpoint := f"{SCHEME}{transport.node}/{number}") in self.transports:
            number += 1
        self.transports[endpoint] = transport
        return endpoint

    def _between(self, one: str, other: str) -> list[End]:
        transports = [transport for transport in self.transports.values() if transport.node == one]
        return [end for transport in transports for end in transport.ends if end.peer.node == other]

    def _crashed(self, node: str) -> None:
        for endpoint, transport in list(self.transports.items()):
            if transport.node == node:
                del self.transports[endpoint]
                transport.vanish()


class SimChannel(KVChannel):
    """A channel on a node of a simulation. Where another channel would sleep, it looks once: no time passes during a
    call, so nothing that it waits for could come."""

    def __init__(
        self,
        pool: PagePool,
        network: SimNetwork,
        node: str,
        *,
        placement: Placement = Placement.BY_RECEIVER,
        key: bytes | None = None,
    ) -> None:
        simulation = network.simulation
        transport = network.transport(node, placement=placement)
        super().__init__(pool, transport, key=key, clock=simulation.clock, random_bytes=simulation.random_bytes)
        self._changed.wait_for = lambda predicate, timeout=None: predicate()  # type: ignore[method-assign]


class SimTransport(QueuingTransport):
    """A Transport inside a `SimNetwork`. It calls `tick` about every TICK_S of virtual time. `connect` with a timeout
    and the handshake that follows it take no time at all, and fail at once when the peer cannot answer."""

    def __init__(self, network: SimNetwork, node: str, placement: Placement) -> None:
        self.node = node
        self._network = network
        self._placement = placement
        self._links: dict[Link, End] = {}
        self._endpoint = ""
        self._closed = False

    @property
    def name(self) -> str:
        return f"sim ({self._placement.value})"

    @property
    def ends(self) -> list[End]:
        """This side of every open link."""
        return [end for end in self._links.values() if end.open]

    def _listen(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        self._endpoint = self._network.listen(self)
        self._network.simulation.every(TICK_S, self._tick, node=self.node)
        return (self._endpoint,)

    def _tick(self) -> None:
        if not self._closed:
            self._receiver.tick()

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        endpoint = next((e for e in endpoints if e.startswith(SCHEME)), None)
        if endpoint is None:
            raise TransferError(f"a simulated transport cannot reach {list(endpoints)}; it needs {SCHEME}node/n")
        if self._closed:
            raise TransferError(f"the transport at {self._endpoint} is closed; make a new one")
        network = self._network
        other = network.transports.get(endpoint)
        waits = timeout_s > 0
        refusal = TransferError(f"cannot connect to {endpoint} within {timeout_s} s")
        if waits and (
            other is None or not network.simulation.running(other.node) or network.blocked(self.node, other.node)
        ):
            raise refusal
        end = self.new_end(endpoint, eager=waits)
        if other is None:
            end.peer = end
            network.simulation.later(network.faults.flight_s[1], lambda: end.shut(refusal), node=self.node)
            return end.link
        end.peer = other.new_end(self._endpoint, eager=waits)
        end.peer.peer = end
        end.link.same_memory = end.peer.link.same_memory = end.memory is end.peer.memory
        if waits:
            end.peer.receiver.opened(end.peer.link)
        else:
            end.send(Parcel(ParcelKind.OPEN))
        return end.link

    def new_end(self, endpoint: str, *, eager: bool) -> End:
        """Return this side of a new link to the transport at `endpoint`."""
        self._links = {link: end for link, end in self._links.items() if end.open or end.queue or end.unreported}
        link = Link(endpoint, heard_at=self._network.simulation.clock.now_s)
        end = End(self._network, self.node, link, *self._registered, self._placement, eager)
        self._links[link] = end
        return end

    def _queue(self, link: Link, message: Message) -> bool:
        end = self._links.get(link)
        if end is None:
            return False
        if isinstance(message, WriteMessage):
            write = Parcel(ParcelKind.WRITE, message.frame, message.transfer, list(message.source), message.ready)
            end.send(write)
        else:
            end.send(Parcel(ParcelKind.FRAME, message.frame))
        return True

    def fence(self, link: Link) -> None:
        end = self._links.get(link)
        if end is not None:
            end.shut(None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.transports.pop(self._endpoint, None)
            for end in list(self._links.values()):
                end.finish()

    def vanish(self) -> None:
        """End with this process, without any cleanup but its kernel's, which informs the peers."""
        self._closed = True
        for end in self._links.values():
            end.vanish()
