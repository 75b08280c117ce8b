"""Measure how fast KV pages move between two processes of one host: JSON lines, then a table.

    python benchmarks/kv_channel.py [--rounds 7] [--cases shm,unix+digest] [--busy] [--clock cpu]

`paged72/*`: 61 layers x 128 scattered pages of 72 KiB (64 tokens of 576 bfloat16 values), 549 MiB, are written layer by
layer through a transport from one process's pool into that of the other, until the other says that all of it is placed.
The baselines use the same pages in the same rounds (A B A B): numpy copies them out of the sender's pool, mapped, in
the receiver's process; bare sendmsg / recvmsg_into loops move them over one blocking Unix or TCP socket; and for
Mooncake the same pages travel as descriptors of its own, in batches of 256. `latency4k/shm`: the time from
KVChannel.push of one page of 4 KiB to the hand-off coming out of the other channel's poll, compared with 4 KiB through
a bare Unix socket into a thread that waits for them.

Ratios above 1 mean that pdinfer is faster; they are computed round by round, so a slow moment of the machine affects
both. With `--busy` each process also runs a Python loop, like a host that is busy itself. `--clock cpu` counts, instead
of the time that passes, the CPU seconds of the process that took more of them: what a pipeline of two takes on two idle
cores, whatever else the machine has to do.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy as np
import torch

import pdinfer as pd
from pdinfer import kv
from pdinfer.config import CacheConfig
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.memfd import PeerMemfd
from pdinfer.types import Handoff, HandoffStatus, PageGrant

LAYERS, POOL_PAGES, PAGES = 61, 256, 128
PAGE_BYTES = 64 * 576 * 2
IOV = 512
BUFFER_BYTES = 4 << 20
NUM_LATENCIES = 400
TIMEOUT_S = 120.0


def transport_of(name: str, path: str) -> kv.Transport:
    """Return the transport of a case; raise ConfigError or BackendUnavailable when this machine lacks it."""
    kind, _, option = name.partition("+")
    digest = option == "digest"
    match kind:
        case "shm":
            return kv.ShmTransport(digest=digest)
        case "unix":
            return kv.SocketTransport(path=path, digest=digest)
        case "tcp":
            return kv.SocketTransport(digest=digest)
        case "mooncake":
            return kv.MooncakeTransport(host="127.0.0.1", protocol="tcp", digest=digest)
    raise SystemExit(f"no case is called {name!r}; there are {', '.join(CASES)}")


CASES = ("shm", "shm+digest", "unix", "unix+digest", "tcp", "tcp+digest", "mooncake", "mooncake+digest")
BATCH = 256
"""The number of descriptors of one Mooncake batch, when its pages travel one by one."""
BARE = {"shm": "unix", "unix": "unix", "tcp": "tcp", "mooncake": "tcp"}
"""The bare loop that a kind of transport is compared with, beside memcpy."""


@attrs.frozen(kw_only=True)
class Shape:
    """The part of a model that a pool needs: one latent of `width` bfloat16 values per token and layer."""

    layers: int
    width: int

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        latent = KVComponent(
            name="latent",
            format="bench",
            dtype="bfloat16",
            width=self.width,
            token_bytes=2 * self.width,
            layers=tuple(range(self.layers)),
        )
        return KVLayout(model_id=b"", weights_id=b"", page_size=cache.page_size, components=(latent,))

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int:
        raise NotImplementedError

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> kv.PageMemory:
        return kv.PageMemory(layout, num_pages, device=torch.device("cpu"), memory=memory)


class Host:
    """The parts that both processes have: a pool, and which of its pages move, one list of spans per layer."""

    def __init__(self, seed: int) -> None:
        self.pool = pd.PagePool(Shape(layers=LAYERS, width=576), CacheConfig(page_size=64, num_pages=POOL_PAGES))
        assert isinstance(self.pool.memory, kv.PageMemory)
        self.memory = self.pool.memory
        chance = random.Random(seed)
        self.rows = [
            layer * POOL_PAGES + page for layer in range(LAYERS) for page in chance.sample(range(POOL_PAGES), PAGES)
        ]
        spans = [(row * PAGE_BYTES, PAGE_BYTES) for row in self.rows]
        self.spans: list[Spans] = [spans[start : start + PAGES] for start in range(0, len(spans), PAGES)]
        self.pages = self.memory.buffer.numpy().reshape(-1, PAGE_BYTES)

    def views(self) -> list[memoryview]:
        return self.memory.read(list(itertools.chain.from_iterable(self.spans)))


class Landing:
    """The channel of this benchmark: it puts layer i's payload into layer i's pages, and answers when all of it is
    there."""

    authenticates = False

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answered = threading.Event()
        self.transport: kv.Transport | None = None

    def opened(self, link: kv.Link) -> None:
        link.trusted = True

    def received(self, link: kv.Link, frame: bytes) -> None:
        self.answered.set()

    def place(self, link: kv.Link, frame: bytes, num_bytes: int) -> Spans:
        return self.host.spans[int(frame)]

    def placed(self, link: kv.Link, frame: bytes, error: Exception | None) -> None:
        assert error is None, error
        if int(frame) == LAYERS - 1:
            assert self.transport is not None
            self.transport.send(link, b"all placed")

    def tick(self) -> None:
        pass

    def closed(self, link: kv.Link, error: Exception | None) -> None:
        pass


# -- the bare loops ---


def prepared(sock: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def listening(kind: str, path: str) -> tuple[socket.socket, object]:
    sock = prepared(socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET, socket.SOCK_STREAM))
    sock.bind(path if kind == "unix" else ("127.0.0.1", 0))
    sock.listen()
    return sock, sock.getsockname()


def move(views: Sequence[memoryview], system_call: Callable[[list[memoryview]], int]) -> None:
    """Move all of `views` through `sock.sendmsg`, or `recvmsg_into`, of a blocking socket."""
    for start in range(0, len(views), IOV):
        rest = list(views[start : start + IOV])
        while rest:
            count = system_call(rest)
            done = 0
            while done < len(rest) and count >= len(rest[done]):
                count -= len(rest[done])
                done += 1
            rest = rest[done:]
            if count:
                rest[0] = rest[0][count:]


def mooncake_over(memory: kv.PageMemory) -> tuple[Any, str, int]:
    """Make a Mooncake engine that has registered a whole pool; return it with its name and the pool's address. A
    transport must have been made before, because it prepares the environment."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    address = memory.buffer.data_ptr()
    assert engine.register_memory(address, memory.num_bytes) == 0
    return engine, f"127.0.0.1:{engine.get_rpc_port()}", address


# -- the receiving process ---


def receive(connection: Connection, folder: str, busy: bool) -> None:
    """Serve the sender's requests, until it asks for None."""
    with computing(busy):
        host = Host(2)
        source: np.ndarray | None = None
        sockets: dict[str, socket.socket] = {}
        ends: dict[str, tuple[kv.Transport, Landing]] = {}
        decode: Decode | None = None
        while (order := connection.recv()) is not None:
            match order:
                case ("map", pid, descriptor):
                    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
                    memfd = PeerMemfd(opened, host.memory.num_bytes)
                    source = np.frombuffer(memfd.view, np.uint8).reshape(-1, PAGE_BYTES)
                    connection.send(None)
                case ("memcpy", rows):
                    assert source is not None
                    started = time.perf_counter()
                    for to, start in zip(host.rows, rows, strict=True):
                        host.pages[to] = source[start]
                    connection.send(time.perf_counter() - started)
                case ("bare", kind):
                    if kind not in sockets:
                        listener, address = listening(kind, f"{folder}/bare-{kind}")
                        connection.send(address)
                        sockets[kind] = prepared(listener.accept()[0])
                        listener.close()
                    views = host.views()
                    connection.send("ready")
                    move(views, lambda part, sock=sockets[kind]: sock.recvmsg_into(part)[0])  # type: ignore[misc]
                    sockets[kind].sendall(b"all here")
                case ("pages",):
                    registered = mooncake_over(host.memory)  # kept as long as this process lives
                    connection.send((registered[1], [registered[2] + row * PAGE_BYTES for row in host.rows]))
                case ("open", name):
                    landing = Landing(host)
                    landing.transport = transport_of(name, f"{folder}/{name}-receiver")
                    ends[name] = landing.transport, landing
                    connection.send(landing.transport.register(host.memory, landing))
                case ("cpu",):
                    connection.send(time.process_time())
                case ("clear",):
                    host.pages[:] = 0
                    connection.send(None)
                case ("verify", rows):
                    assert source is not None
                    pairs = zip(host.rows, rows, strict=True)
                    connection.send(all(np.array_equal(host.pages[to], source[start]) for to, start in pairs))
                case ("latency", name):
                    decode = Decode(transport_of(name, f"{folder}/latency-receiver"))
                    decode.serve(connection)
        for transport, _ in ends.values():
            transport.close()


# -- the sending process ---


class Sender:
    """The sending process: it owns the clock, and asks the receiver for its part of each case."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self.connection = connection
        self.folder = folder
        self.host = Host(1)
        words = self.host.memory.buffer.numpy().view(np.uint64)
        words[:] = np.arange(words.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        memfd = self.host.memory.memfd
        if memfd is None:
            raise SystemExit("this benchmark needs Linux: memcpy is measured out of the sender's pool")
        descriptor = memfd.readable()
        self.ask("map", os.getpid(), descriptor)
        os.close(descriptor)
        self.sockets: dict[str, socket.socket] = {}
        self.engine: Any = None
        self.links: dict[str, tuple[kv.Transport, Landing, kv.Link]] = {}

    def ask(self, *order: object) -> object:
        self.connection.send(order)
        return self.connection.recv()

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds that the two processes have used so far."""
        theirs = self.ask("cpu")
        assert isinstance(theirs, float)
        return time.process_time(), theirs

    def on_cpus(self, work: Callable[[], float]) -> float:
        """Return the CPU seconds of the process that takes more of them for `work`."""
        before = self.cpu_s()
        work()
        return max(after - start for after, start in zip(self.cpu_s(), before, strict=True))

    def memcpy(self) -> float:
        seconds = self.ask("memcpy", self.host.rows)
        assert isinstance(seconds, float)
        return seconds

    def bare(self, kind: str) -> float:
        ready = self.ask("bare", kind)
        if kind not in self.sockets:
            sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET, socket.SOCK_STREAM)
            sock.connect(ready)  # type: ignore[arg-type]
            self.sockets[kind] = prepared(sock)
            assert self.connection.recv() == "ready"
        views = self.host.views()
        sock = self.sockets[kind]
        started = time.perf_counter()
        move(views, sock.sendmsg)
        assert sock.recv(8, socket.MSG_WAITALL) == b"all here"
        return time.perf_counter() - started

    def pages(self) -> float:
        """Move every page as a descriptor of its own, straight into the receiver's pages, by Mooncake alone."""
        if self.engine is None:
            self.engine, _, self.address = mooncake_over(self.host.memory)
            self.theirs = self.ask("pages")
        name, targets = self.theirs  # type: ignore[misc]
        sources = [self.address + row * PAGE_BYTES for row in self.host.rows]
        started = time.perf_counter()
        for start in range(0, len(sources), BATCH):
            ours, theirs = sources[start : start + BATCH], targets[start : start + BATCH]
            code = self.engine.batch_transfer_sync_write(name, ours, theirs, [PAGE_BYTES] * len(ours))
            assert code == 0, code
        return time.perf_counter() - started

    def open(self, name: str) -> None:
        """Connect a transport, and move everything once to check that every byte arrives."""
        landing = Landing(self.host)
        transport = landing.transport = transport_of(name, f"{self.folder}/{name}-sender")
        transport.register(self.host.memory, landing)
        endpoints = self.ask("open", name)
        assert isinstance(endpoints, tuple)
        link = transport.connect(endpoints, timeout_s=TIMEOUT_S)
        link.trusted = True
        self.links[name] = transport, landing, link
        self.ask("clear")
        self.paged(name)
        if not self.ask("verify", self.host.rows):
            raise SystemExit(f"paged72/{name}: the pages that arrived are not those that were sent")

    def paged(self, name: str) -> float:
        transport, landing, link = self.links[name]
        landing.answered.clear()
        started = time.perf_counter()
        transfers = [transport.write(link, b"%d" % layer, spans) for layer, spans in enumerate(self.host.spans)]
        assert landing.answered.wait(TIMEOUT_S)
        seconds = time.perf_counter() - started
        while not all(transfer.done for transfer in transfers):
            time.sleep(0.001)
        return seconds

    def close(self) -> None:
        for transport, _, _ in self.links.values():
            transport.close()
        self.connection.send(None)


# -- latency ---


class Decode:
    """The receiving end of single pages of 4 KiB."""

    def __init__(self, transport: kv.Transport) -> None:
        self.pool = pd.PagePool(Shape(layers=1, width=32), CacheConfig(page_size=64, num_pages=8))
        self.channel = pd.KVChannel(self.pool, transport)

    def serve(self, connection: Connection) -> None:
        """Grant a page, say when its hand-off came out of `poll`, and take the page back; end with None."""
        connection.send(self.channel.address)
        writer = connection.recv()
        while (order := connection.recv()) is not None:
            assert order == ("grant",)
            pages = self.pool.grant(1)
            grant = PageGrant(
                room=os.urandom(16),
                request_id="r",
                writers=(writer,),
                destinations=(self.channel.address,),
                tokens=range(64),
                pages=pages,
                generations=self.pool.generations(pages),
                layout_id=self.pool.layout.layout_id,
            )
            self.channel.expect(grant)
            connection.send(grant)
            while not (handoffs := self.channel.poll()):
                self.channel.wait(TIMEOUT_S)
            arrived = time.monotonic()
            assert handoffs[0].status is HandoffStatus.LANDED, handoffs[0].error
            self.pool.release(pages)
            connection.send(arrived)
        self.channel.close()


def latencies(sender: Sender, name: str) -> list[float]:
    """Return the seconds from `push` to `poll`. The clock is CLOCK_MONOTONIC, the same in both processes."""
    pool = pd.PagePool(Shape(layers=1, width=32), CacheConfig(page_size=64, num_pages=8))
    with pd.KVChannel(pool, transport_of(name, f"{sender.folder}/latency-sender")) as channel:
        channel.connect(sender.ask("latency", name))  # type: ignore[arg-type]
        sender.connection.send(channel.address)
        (page,) = pool.own(1)
        found = []
        for _ in range(NUM_LATENCIES):
            grant = sender.ask("grant")
            assert isinstance(grant, PageGrant)
            channel.accept(grant)
            handoff = Handoff(room=grant.room, writer=channel.address, status=HandoffStatus.LANDED, token=1)
            time.sleep(0.001)  # let the other side fall asleep, as it does while prefill computes
            started = time.monotonic()
            channel.push(grant, layers=range(1), tokens=range(64), pages=(page,))
            channel.finish(grant, handoff)
            arrived = sender.connection.recv()
            found.append(arrived - started)
        sender.connection.send(None)
    return found


def bare_latencies() -> list[float]:
    """Return the same for 4 KiB through a socket, to a thread of this process that waits for them."""
    ours, theirs = socket.socketpair()
    arrived: list[float] = []
    answer = threading.Event()

    def wait() -> None:
        while theirs.recv(4096, socket.MSG_WAITALL):
            arrived.append(time.monotonic())
            answer.set()

    thread = threading.Thread(target=wait)
    thread.start()
    found = []
    for _ in range(NUM_LATENCIES):
        answer.clear()
        time.sleep(0.001)
        started = time.monotonic()
        ours.sendall(bytes(4096))
        answer.wait()
        found.append(arrived[-1] - started)
    ours.close()
    thread.join()
    theirs.close()
    return found


# -- results ---


@contextmanager
def computing(busy: bool) -> Iterator[None]:
    """Keep the interpreter of this process busy meanwhile, if asked to."""
    stop = threading.Event()

    def compute() -> None:
        number = 0
        while not stop.is_set():
            number = (number * 1103515245 + 12345) % 2**31

    thread = threading.Thread(target=compute, daemon=True)
    if busy:
        thread.start()
    yield
    stop.set()


def line(case: str, unit: str, values: Sequence[float], baseline: str, baselines: Sequence[float]) -> dict[str, object]:
    """Return one JSON line; values and baselines are seconds, paired round by round, and reported in `unit`."""
    ratios = [theirs / ours for ours, theirs in zip(values, baselines, strict=True)]
    gigabytes = LAYERS * PAGES * PAGE_BYTES / 1e9

    def told(seconds: Sequence[float]) -> float:
        middle = statistics.median(seconds)
        return round(middle * 1e6, 1) if unit == "us" else round(gigabytes / middle, 3)

    return {
        "bench": "kv_channel",
        "case": case,
        "value": told(values),
        "unit": unit,
        "baseline": baseline,
        "baseline_value": told(baselines),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "runs": len(values),
    }


def measure(sender: Sender, names: Sequence[str], rounds: int, clock: str) -> Iterator[dict[str, object]]:
    """Return the lines of all paged cases."""

    def timed(work: Callable[..., float], *arguments: str) -> float:
        return sender.on_cpus(lambda: work(*arguments)) if clock == "cpu" else work(*arguments)

    present = []
    for name in names:
        try:
            sender.open(name)
            present.append(name)
        except (BackendUnavailable, ConfigError) as error:
            yield {"bench": "kv_channel", "case": f"paged72/{name}", "missing": str(error)}
    staged = [name for name in present if name.startswith("mooncake")]
    kinds = sorted({BARE[name.partition("+")[0]] for name in present})
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        found = {"memcpy": timed(sender.memcpy)}
        found |= {f"bare {kind}": timed(sender.bare, kind) for kind in kinds}
        found |= {"pages": timed(sender.pages)} if staged else {}
        found |= {name: timed(sender.paged, name) for name in present}
        if number:  # the first round touches pages for the first time
            for what, time_s in found.items():
                seconds.setdefault(what, []).append(time_s)
    for name in present:
        for baseline in ("memcpy", f"bare {BARE[name.partition('+')[0]]}"):
            yield line(f"paged72/{name}", "GB/s", seconds[name], baseline, seconds[baseline]) | {"clock": clock}
        if name in staged:
            yield line(f"paged72/{name}", "GB/s", seconds[name], "pages", seconds["pages"]) | {"clock": clock}


def main(rounds: int, names: Sequence[str], busy: bool, clock: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        receiver = context.Process(target=receive, args=(theirs, folder, busy), daemon=True)
        receiver.start()
        theirs.close()
        with computing(busy):
            sender = Sender(ours, folder)
            lines += measure(sender, [name for name in names if name != "latency4k"], rounds, clock)
            if "latency4k" in names:
                pairs = [(latencies(sender, "shm"), bare_latencies()) for _ in range(3)]
                medians = [[statistics.median(each) for each in pair] for pair in pairs]
                ours_s, bare_s = zip(*medians, strict=True)
                lines.append(line("latency4k/shm", "us", ours_s, "bare unix", bare_s))
            sender.close()
        receiver.join(TIMEOUT_S)
    for each in lines:
        print(json.dumps(each))
    print(f"\n  {'case':<22}{'value':>12}  {'baseline':<10}{'value':>10}  ratio [low, high]")
    for each in lines:
        if "missing" in each:
            print(f"  {each['case']:<22}{'missing':>12}  {each['missing']}")
        else:
            print(
                f"  {each['case']:<22}{each['value']:>7} {each['unit']:<4}  {each['baseline']:<10}"
                f"{each['baseline_value']:>10}  {each['ratio']} [{each['ratio_low']}, {each['ratio_high']}]"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join((*CASES, "latency4k")))
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    main(options.rounds, options.cases.split(","), options.busy, options.clock)
