"""Measure what a hand-off of one 4 KiB page over shared memory costs, in parts: JSON lines, then a table.

    python benchmarks/handoff_parts.py [--rounds 7] [--digest]

Two processes, as in the case latency4k of kv_channel.py. Every moment is one of CLOCK_MONOTONIC, which both share; a
part lies between two moments, so the medians of the parts add up to about that of the whole:

    push     the writer is inside `KVChannel.push`
    read     until the other process is asked where the page goes: a wake-up and a message read
    place    until the page is placed
    next     until the hand-off behind it is heard
    settle   until the channel tells its listeners
    poll     until the thread that waits has the hand-off: the wake-up of decode

The poller sleeps in `KVChannel.wait` (case channel) or, like an engine, in an `Inbox` that the channel wakes (case
inbox). Bare loops of the same rounds, A B A B: 4 KiB through a Unix socket into a thread of the other process that
waits for them (bare), and the same where that thread wakes a second one (bare, handed on), as any channel must whose
poller is not its reader. `cpu` lines are CPU microseconds of either process per hand-off, `idle` the share of a core
that each uses while two linked ends wait and nothing comes.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from kv_channel import Shape

import pdinfer as pd
from pdinfer import kv
from pdinfer.config import CacheConfig
from pdinfer.errors import TransferError
from pdinfer.inbox import Inbox
from pdinfer.kv.layout import Spans
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress

NUM = 200
PAUSE_S = 0.001
"""How long both sides are quiet before a hand-off, as decode is while prefill computes."""
IDLE_S = 2.0
TIMEOUT_S = 60.0
NUM_BYTES = 4096
PARTS = ("push", "read", "place", "next", "settle", "poll")
CASES = ("channel", "inbox")
BARE = ("bare", "bare, handed on")


def pool() -> pd.PagePool:
    """Return pages of 4 KiB."""
    return pd.PagePool(Shape(layers=1, width=32), CacheConfig(page_size=64, num_pages=8))


class Marked(pd.KVChannel):
    """A channel that notes when its transport calls it."""

    at: dict[str, float]

    def mark(self) -> None:
        """Note from now on."""
        self.at, arrivals = {}, self.arrivals
        place, placed, received = arrivals.place, arrivals.placed, arrivals.received

        def on_place(link: kv.Link, frame: bytes, num_bytes: int) -> Spans | None:
            self.at["place"] = time.monotonic()
            return place(link, frame, num_bytes)

        def on_placed(link: kv.Link, frame: bytes, error: TransferError | None) -> None:
            placed(link, frame, error)
            self.at["placed"] = time.monotonic()

        def on_received(link: kv.Link, frame: bytes) -> None:
            self.at["heard"] = time.monotonic()
            received(link, frame)

        vars(arrivals).update(place=on_place, placed=on_placed, received=on_received)

    def told(self) -> None:
        self.at["told"] = time.monotonic()


def until_polled(channel: Marked, case: str) -> Callable[[], list[Handoff]]:
    """Return a call that sleeps until there is a hand-off."""
    inbox = Inbox[None]()
    if case == "inbox":
        channel.notify(inbox.wake)

    def call() -> list[Handoff]:
        while not (handoffs := channel.poll()):
            if case == "inbox":
                inbox.wait(TIMEOUT_S)
                inbox.take()
            else:
                channel.wait(TIMEOUT_S)
        return handoffs

    return call


def receive(connection: Connection, digest: bool) -> None:
    """Serve the writer's orders until it says None."""
    channels: dict[str, tuple[Marked, Callable[[], list[Handoff]]]] = {}
    writers: dict[str, PeerAddress] = {}
    bare: dict[str, socket.socket] = {}
    while (order := connection.recv()) is not None:
        match order:
            case ("open", case):
                channel = Marked(pool(), kv.ShmTransport(digest=digest))
                channel.mark()
                channel.notify(channel.told)
                channels[case] = channel, until_polled(channel, case)
                connection.send(channel.address)
                writers[case] = connection.recv()
            case ("grant", case):
                channel, polled = channels[case]
                pages = channel.pool.grant(1)
                grant = PageGrant(
                    room=os.urandom(16),
                    request_id="r",
                    writers=(writers[case],),
                    destinations=(channel.address,),
                    tokens=range(64),
                    pages=pages,
                    generations=channel.pool.generations(pages),
                    layout_id=channel.pool.layout.layout_id,
                )
                channel.expect(grant)
                connection.send(grant)
                handoffs = polled()
                arrived = time.monotonic()
                assert handoffs[0].status is HandoffStatus.LANDED, handoffs[0].error
                channel.pool.release(pages)
                connection.send(channel.at | {"polled": arrived})
            case ("bare", kind, path):
                bare[kind] = socket.socket(socket.AF_UNIX)
                bare[kind].connect(path)
            case ("next", kind):
                connection.send(None)
                connection.send(taken(bare[kind], handed_on=kind != "bare"))
            case ("cpu",):
                connection.send(time.process_time())
            case ("sleep",):
                started = time.process_time()
                connection.send(None)
                for channel, _ in channels.values():
                    channel.wait(IDLE_S)
                connection.send(time.process_time() - started)
    for channel, _ in channels.values():
        channel.close()


def taken(sock: socket.socket, *, handed_on: bool) -> float:
    """Return when 4 KiB are here: in the thread that reads them, or in one that it wakes."""
    if not handed_on:
        sock.recv(NUM_BYTES, socket.MSG_WAITALL)
        return time.monotonic()
    news = threading.Event()
    reader = threading.Thread(target=lambda: (sock.recv(NUM_BYTES, socket.MSG_WAITALL), news.set()))
    reader.start()
    news.wait(TIMEOUT_S)
    arrived = time.monotonic()
    reader.join()
    return arrived


class Writer:
    """The writing process; it owns the clock."""

    def __init__(self, connection: Connection, digest: bool) -> None:
        self.connection = connection
        self.channels: dict[str, tuple[pd.KVChannel, int]] = {}
        self.bare: dict[str, socket.socket] = {}
        for case in CASES:
            channel = pd.KVChannel(pool(), kv.ShmTransport(digest=digest))
            channel.connect(self.ask("open", case))  # type: ignore[arg-type]
            connection.send(channel.address)
            self.channels[case] = channel, channel.pool.own(1)[0]  # type: ignore[attr-defined]
        for kind in BARE:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0pdinfer-parts-{os.getpid()}-{kind}")
            listener.listen()
            connection.send(("bare", kind, listener.getsockname()))
            self.bare[kind] = listener.accept()[0]
            listener.close()

    def ask(self, *order: object) -> object:
        self.connection.send(order)
        return self.connection.recv()

    def handoff(self, case: str) -> dict[str, float]:
        """Hand one page over. Return the seconds of every part."""
        channel, page = self.channels[case]
        grant = self.ask("grant", case)
        assert isinstance(grant, PageGrant)
        channel.accept(grant)
        handoff = Handoff(room=grant.room, writer=channel.address, status=HandoffStatus.LANDED, token=1)
        time.sleep(PAUSE_S)
        started = time.monotonic()
        channel.push(grant, layers=range(1), tokens=range(64), pages=(page,))
        pushed = time.monotonic()
        channel.finish(grant, handoff)
        finished = time.monotonic()
        at = self.connection.recv()
        moments = [started, pushed, *(at[name] for name in ("place", "placed", "heard", "told", "polled"))]
        parts = dict(zip(PARTS, (b - a for a, b in itertools.pairwise(moments)), strict=True))
        return {"whole": at["polled"] - started, **parts, "finish": finished - pushed}

    def through_socket(self, kind: str) -> dict[str, float]:
        """Send 4 KiB without any channel."""
        self.ask("next", kind)
        time.sleep(PAUSE_S)
        started = time.monotonic()
        self.bare[kind].sendall(bytes(NUM_BYTES))
        arrived = self.connection.recv()
        return {"whole": arrived - started}

    def cpu_s(self) -> tuple[float, float]:
        theirs = self.ask("cpu")
        assert isinstance(theirs, float)
        return time.process_time(), theirs

    def idle(self) -> tuple[float, float]:
        """Return the share of a core that either process uses while it waits for nothing."""
        self.ask("sleep")
        started = time.process_time()
        theirs = self.connection.recv()
        return (time.process_time() - started) / IDLE_S / len(CASES), theirs / IDLE_S / len(CASES)

    def close(self) -> None:
        self.connection.send(None)
        for channel, _ in self.channels.values():
            channel.close()


def measure(writer: Writer, rounds: int) -> Iterator[dict[str, object]]:
    """Return the lines of all cases. Each value is the median over rounds of the median of a round."""
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds + 1):
        for case in (*CASES, *BARE):
            before = writer.cpu_s()
            each = [(writer.handoff if case in CASES else writer.through_socket)(case) for _ in range(NUM)]
            spent = [(after - start) / NUM for after, start in zip(writer.cpu_s(), before, strict=True)]
            medians = {name: statistics.median(one[name] for one in each) for name in each[0]}
            if number:  # the first round fills caches
                found.setdefault(case, []).append(medians | {"writer's cpu": spent[0], "receiver's cpu": spent[1]})
    for case in CASES:
        for baseline in BARE:
            pairs = zip(found[case], found[baseline], strict=True)
            ratios = [theirs["whole"] / ours["whole"] for ours, theirs in pairs]
            yield {
                "bench": "handoff_parts",
                "case": case,
                "unit": "us",
                **{name: middle(found[case], name) for name in found[case][0]},
                "whole_low": microseconds(min(one["whole"] for one in found[case])),
                "baseline": baseline,
                "baseline_value": middle(found[baseline], "whole"),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_low": round(min(ratios), 3),
                "ratio_high": round(max(ratios), 3),
                "runs": rounds,
            }
    idle = writer.idle()
    yield {
        "bench": "handoff_parts",
        "case": "idle",
        "unit": "share of a core",
        "writer": round(idle[0], 4),
        "receiver": round(idle[1], 4),
    }


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def middle(rounds: list[dict[str, float]], name: str) -> float:
    """Return the median over rounds, in microseconds."""
    return microseconds(statistics.median(one[name] for one in rounds))


def main(rounds: int, digest: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, digest), daemon=True)
    receiver.start()
    theirs.close()
    writer = Writer(ours, digest)
    about = {"digest": digest, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
    lines = [line | about for line in measure(writer, rounds)]
    writer.close()
    receiver.join(TIMEOUT_S)
    for line in lines:
        print(json.dumps(line))
    for line in lines:
        shown = {name: value for name, value in line.items() if name not in ("bench", "unit", *about)}
        print("  " + "  ".join(f"{name} {value}" for name, value in shown.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--digest", action="store_true")
    options = parser.parse_args()
    main(options.rounds, options.digest)
