"""Write your own transport: six methods that move frames and bytes. This one calls the other end directly.

    python examples/04_custom_transport.py [CHECKPOINT]

The channel above it brings grants, layouts and coverage. Both ends are in one thread here, so the transport leaves out
what threads, processes and strangers would need, and would not pass the suite. docs/howto/custom-transport.md says what
that is, and why one thread does without. To test yours, subclass `TransportSuite` of
tests/conformance/transport_suite.py, or `ProcessTransportSuite` when its ends may be in different processes.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tiny_tasks import BOS, decode, encode

import pdinfer as pd
from pdinfer.kv import Link, Memory, Receiver, Transfer, Transport

CHECKPOINT = Path(__file__).parent / "tiny"


class DirectTransport(Transport):
    """A transport whose ends find each other in `directory`. For one thread; closing one side closes both."""

    name = "direct"
    ticks = False  # there is no thread

    def __init__(self, directory: dict[str, "DirectTransport"]) -> None:
        self.directory = directory
        self.endpoint = f"direct://{len(directory)}"
        self.others: dict[Link, tuple[DirectTransport, Link]] = {}
        self.num_bytes = 0

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        self.memory, self.receiver = memory, receiver
        self.directory[self.endpoint] = self
        return (self.endpoint,)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        other = self.directory.get(endpoints[0])
        if other is None:
            raise pd.TransferError(f"nobody is at {endpoints[0]}")
        ours, theirs = Link(other.endpoint), Link(self.endpoint)
        self.others[ours], other.others[theirs] = (other, theirs), (self, ours)
        other.receiver.opened(theirs)
        return ours

    def send(self, link: Link, frame: bytes) -> None:
        if link in self.others:
            other, theirs = self.others[link]
            other.receiver.received(theirs, frame)

    def write(
        self,
        link: Link,
        frame: bytes,
        source: list[tuple[int, int]],
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        transfer = Transfer(sum(length for _, length in source), then)
        if link not in self.others:
            transfer.complete(pd.TransferError("the link is closed"))
            return transfer
        if ready is not None:
            ready()
        other, theirs = self.others[link]
        spans = other.receiver.place(theirs, frame, transfer.num_bytes)
        if spans is not None:
            other.memory.copy_from(spans, self.memory, source)
            other.receiver.placed(theirs, frame, None)
            self.num_bytes += transfer.num_bytes
        transfer.complete()
        return transfer

    def fence(self, link: Link) -> None:
        if link in self.others:
            other, theirs = self.others.pop(link)
            del other.others[theirs]
            self.receiver.closed(link, None)
            other.receiver.closed(theirs, pd.TransferError("the other end closed the link"))

    def close(self) -> None:
        for link in list(self.others):
            self.fence(link)


def main(checkpoint: Path) -> None:
    model = pd.load_model(checkpoint)
    directory: dict[str, DirectTransport] = {}
    transports = [DirectTransport(directory), DirectTransport(directory)]
    cache = pd.CacheConfig(page_size=16, num_pages=64)
    ends = [pd.KVChannel(pd.PagePool(model, cache), transport) for transport in transports]
    prompt = "set key=31337; get key="
    request = pd.Request(prompt=(BOS, *encode(prompt)), sampling=pd.SamplingParams(temperature=0, max_new_tokens=6))
    with pd.Pairing(pd.PrefillEngine(model, ends[0]), pd.DecodeEngine(model, ends[1])) as pairing:
        tokens = [event.token for event in pairing.generate([request]) if event.token is not None]
    print(f"{prompt}{decode(tokens)}   ({transports[0].num_bytes} bytes of KV moved)")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
