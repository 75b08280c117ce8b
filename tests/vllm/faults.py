"""Faults for a pair of engines, and seeded runs of them: `python -m tests.vllm.faults --runs 200 --out FILE`.

A run gives a pair some two dozen requests, does one thing to it at a moment that the seed chooses, brings back what it
killed, and gives it another request. One JSON line per kind says what came of its runs:

    faults      that were made, those of links one by one
    requests    that were given to an engine that was not killed
    ended       of these, how many ended within the lease and 2 s (a freeze of decode itself does not count)
    landed      rooms that decode says have landed
    equal       of these, those whose bytes have the digest that prefill took when they left
    as_told     those that ended as `kv_load_failure_policy` says: "fail" ends in an error what has not landed
    at_rest     runs after which all blocks of both engines were free
    bad_frees   blocks that were freed while a peer could write them
    next_s      from the moment the peer was back to the end of the next request, the longest
    next_landed runs after which that request's prompt landed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import ROOT, Engine, ready, role, until

LEASE_S = 6.0
TIMES = {"hold_s": 2.0, "lease_s": LEASE_S}
SLACK_S = 2.0
FREEZE_S = 20.0
MORE = {"max_num_seqs": 8, "num_blocks": 512}
TIGHT = {"num_blocks": 36, "more": {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}}
"""A pool of about a tenth of the need: eight prompts of up to 188 tokens would need 96 blocks of 16."""
FLIP_BYTES = 1_500_000
LOCAL, OTHER = "127.0.0.1", "127.0.0.2"
LINKS = ("flips", "closes", "truncates")
"""The kinds that harm a link: prefill listens at LOCAL and says that it is at OTHER, so that links that are dialled
again pass the proxy too."""
COUNT = 24

Start = Callable[..., Engine]


@attrs.define(eq=False)
class Load:
    """Requests to a pair, 8 at a time, each by its room, with the time at which it was given to decode. `address` is
    where decode looks for prefill, "" for where it is."""

    prefill: Engine
    decode: Engine
    address: str = ""
    began: dict[str, float] = attrs.field(factory=dict)
    ended: dict[str, float] = attrs.field(factory=dict)

    def give(self, prompt: list[int]) -> str:
        sends, loads, room = asks(self.prefill)
        if self.address:
            loads["prefill"] = self.address
        self.prefill.say(add=room, prompt=prompt, max_tokens=1, params=sends)
        self.decode.say(add=room, prompt=prompt, max_tokens=8, params=loads)
        self.began[room] = time.monotonic()
        return room

    def look(self) -> int:
        """Note what has ended. Return how many requests decode has left."""
        for name in self.decode.done.keys() - self.ended.keys():
            self.ended[name] = time.monotonic()
        return len(self.began) - len(self.ended)

    def run(self, count: int, at: dict[int, Callable[[], Any]], seed: int = 3) -> None:
        """Give requests, and do something before some of them."""
        for number, prompt in enumerate(prompts(count, seed)):
            at.get(number, lambda: None)()
            until(lambda: self.look() < 8, [self.prefill, self.decode], 90)
            self.give(prompt)
        until(lambda: self.look() == 0, [self.prefill, self.decode], 90)

    def abort(self, rng: random.Random) -> None:
        """Abort a request at either engine, or at both, or none."""
        for engine in (self.prefill, self.decode):
            names = [name for name in self.began if name not in engine.done]
            if names and rng.random() < 0.7:
                name = rng.choice(names)
                engine.say(abort=name)
                engine.done.setdefault(name, {"reason": "abort"})

    def check(self, *, slack_s: float = SLACK_S) -> None:
        """See that every request ended within the lease and some seconds, and that what landed is what was sent."""
        late = {name: end - self.began[name] for name, end in self.ended.items()}
        assert max(late.values()) < LEASE_S + slack_s + 4.0, late  # 8 at a time, so some wait for others
        for room, said in self.decode.moved.items():
            if room in self.prefill.moved:
                assert said["digest"] == self.prefill.moved[room]["digest"], room


class Proxy:
    """A link to an address that changes what goes to whoever dialled: in `every` bytes it flips one, or it closes the
    link, cleanly or with a part of what it has read. With `every` 0 it changes nothing."""

    def __init__(self, address: str, every: int, kind: str = "flips", door: tuple[str, int] = (LOCAL, 0)) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.there, self.every, self.kind, self.num_faults = (host, int(port)), every, kind, 0
        self.passed = 0
        self.door = socket.create_server(door)
        self.address = f"tcp://{door[0]}:{self.door.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self.door.accept()
                there = socket.create_connection(self.there)
                for source, sink, harms in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pass, args=(source, sink, harms), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, harms: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.passed += len(data) if harms else 0
                is_payload = len(data) > 4096  # a flipped frame only closes the link
                if harms and 0 < self.every < self.passed and is_payload:
                    self.passed, self.num_faults = 0, self.num_faults + 1
                    if self.kind == "flips":
                        data[len(data) // 2] ^= 1
                    else:
                        sink.sendall(data[: len(data) // 3 if self.kind == "truncates" else 0])
                        break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def pair(start: Start, policy: str = "recompute", advertise: str = LOCAL, **extra: Any) -> Load:
    """Start a prefill and a decode over TCP."""
    address = {"listen": f"tcp://{LOCAL}:0", "advertise": advertise}
    prefill = start("prefill", "kv_producer", settings={**MORE, **extra}, **address, **TIMES)
    decode = start("decode", "kv_consumer", settings={**MORE, **extra}, policy=policy, **TIMES)
    ready(prefill, decode)
    return Load(prefill, decode)


# -- seeded runs ------------------------------------------------------------------------------------------------------


@attrs.define
class Tally:
    """What came of the runs of a kind; see above."""

    runs: int = 0
    faults: int = 0
    requests: int = 0
    ended: int = 0
    landed: int = 0
    equal: int = 0
    as_told: int = 0
    at_rest: int = 0
    bad_frees: int = 0
    longest_s: float = 0.0
    next_s: float = 0.0
    next_landed: int = 0

    def add(self, load: Load, policy: str, allowed_s: float) -> None:
        """Count the requests of a run in which decode lived."""
        sent = {room: said["digest"] for room, said in load.prefill.moved.items()}
        for room in load.began:
            self.requests += 1
            said = load.decode.done.get(room)
            if said is None or room not in load.ended:
                continue
            took = load.ended[room] - load.began[room]
            self.longest_s = max(self.longest_s, round(took, 2))
            self.ended += took <= allowed_s
            landed = load.decode.moved.get(room)
            if landed is not None:
                self.landed += 1
                self.equal += landed["digest"] == sent.get(room)
            ends = {"length", "abort"} if policy == "recompute" or landed is not None else {"error", "abort"}
            self.as_told += said["reason"] in ends

    def add_prefills(self, load: Load) -> None:
        """Count the requests of a run in which decode was killed: those of prefill have to end."""
        self.requests += len(load.began)
        self.ended += len(load.prefill.done)
        self.as_told += sum(said["reason"] == "length" for said in load.prefill.done.values())
        for room, said in load.decode.moved.items():
            self.landed += 1
            self.equal += said["digest"] == load.prefill.moved.get(room, {}).get("digest")


def later(rng: random.Random, what: Callable[[], Any]) -> Callable[[], None]:
    """Return what does something at a random moment soon."""
    return lambda: threading.Timer(rng.uniform(0.0, 0.4), what).start()


def freeze(engine: Engine, thaw: threading.Timer) -> None:
    engine.kill(signal.SIGSTOP)
    thaw.start()


def rests(engines: list[Engine]) -> bool:
    """Return whether all blocks of all engines are free, once they had time to let go of them."""
    with contextlib.suppress(AssertionError):
        for engine in engines:
            until(
                lambda one=engine: (stats := one.stats())["free"] == stats["all"],  # type: ignore[misc]
                [engine],
                5 * LEASE_S,  # prefill may have prompts to compute yet
            )
        return True
    return False


@attrs.define(eq=False)
class Runs:
    """The runs of one kind, on one pair of engines."""

    kind: str
    start: Start
    tally: Tally = attrs.field(factory=Tally)
    proxy: Proxy | None = None

    @property
    def policy(self) -> str:
        return "fail" if self.kind.endswith("fail") else "recompute"

    def all(self, seeds: range) -> None:
        """Do the runs. Interrupted, it forgets the one that is under way."""
        more = {**(TIGHT if self.kind == "preempt" else {}), "advertise": OTHER if self.kind in LINKS else LOCAL}
        load = pair(self.start, self.policy, **more)
        if self.kind in LINKS:
            assert load.prefill.address is not None
            port = int(load.prefill.address.rpartition(":")[2])
            self.proxy = Proxy(f"tcp://{LOCAL}:{port}", 0, self.kind, (OTHER, port))
        for seed in seeds:
            before = attrs.evolve(self.tally)
            try:
                load = self.one(Load(load.prefill, load.decode), random.Random(f"{self.kind}/{seed}"), seed)
            except KeyboardInterrupt:
                self.tally = before
                raise
            for engine in (load.prefill, load.decode):
                engine.done.clear()
                engine.moved.clear()

    def one(self, load: Load, rng: random.Random, seed: int) -> Load:
        """Do one run. Return a pair that is whole again."""
        at, lost, thaw, allowed_s = {}, None, None, LEASE_S + SLACK_S
        moment = rng.randrange(2, COUNT - 4)
        if self.kind.startswith("kill"):
            lost = load.decode if self.kind == "kill_decode" else load.prefill
            at = {moment: later(rng, lost.kill)}
        elif self.kind.startswith("freeze"):
            frozen = load.decode if self.kind == "freeze_decode" else load.prefill
            thaw = threading.Timer(FREEZE_S, frozen.kill, [signal.SIGCONT])
            at = {moment: lambda: freeze(frozen, thaw)}
            allowed_s += FREEZE_S if frozen is load.decode else 0.0
        elif self.kind == "abort":
            at = dict.fromkeys(range(2, COUNT), lambda: load.abort(rng))
        elif self.proxy is not None:
            self.proxy.every = rng.randrange(FLIP_BYTES // 3, FLIP_BYTES)
        self.tally.runs += 1
        if lost is load.decode:
            for number, prompt in enumerate(prompts(COUNT, seed)):
                at.get(number, lambda: None)()
                load.give(prompt)
            until(lambda: len(load.prefill.done) == COUNT, [load.prefill, load.decode], 90)
            self.tally.add_prefills(load)
        else:
            load.run(COUNT, at, seed)
            with contextlib.suppress(AssertionError):  # what prefill has said of them is on its way
                until(lambda: load.decode.moved.keys() <= load.prefill.moved.keys(), [load.prefill], 5)
            self.tally.add(load, self.policy, allowed_s)
        self.tally.faults += 1 if self.proxy is None else self.proxy.num_faults
        if self.proxy is not None:
            self.proxy.every = self.proxy.num_faults = 0
        if thaw is not None:
            thaw.join()
        return self.go_on(load, lost)

    def go_on(self, load: Load, lost: Engine | None) -> Load:
        """Bring back what was killed, give another request, and see that everything comes to rest."""
        if lost is not None:
            lost.close()
        if lost is load.prefill:
            again = self.start("prefill", "kv_producer", listen=lost.address, settings=MORE, **TIMES)
            load = Load(again, load.decode)
        elif lost is load.decode:
            load = Load(load.prefill, self.start("decode", "kv_consumer", settings=MORE, policy=self.policy, **TIMES))
        else:
            load = Load(load.prefill, load.decode)
        ready(load.prefill, load.decode)
        for engine in (load.prefill, load.decode):
            engine.done.clear()
        room, began = load.give(prompts(1, 7)[0]), time.monotonic()
        until(lambda: room in load.decode.done, [load.prefill, load.decode], 60)
        self.tally.next_s = max(self.tally.next_s, round(time.monotonic() - began, 2))
        self.tally.next_landed += room in load.decode.moved
        self.tally.at_rest += rests([load.prefill, load.decode])
        bad_frees = sum(engine.stats()["bad_frees"] for engine in (load.prefill, load.decode))
        self.tally.bad_frees = max(self.tally.bad_frees, bad_frees)
        return load


KINDS = (
    "kill_prefill",
    "kill_prefill_fail",
    "kill_decode",
    "freeze_prefill",
    "freeze_decode",
    "flips",
    "closes",
    "truncates",
    "abort",
    "preempt",
)


@contextlib.contextmanager
def engines(model: Path, folder: Path) -> Iterator[Start]:
    """Start engines that end with the block."""
    made: list[Engine] = []

    def start(name: str, kind: str, *, settings: dict[str, Any], **extra: Any) -> Engine:
        made.append(Engine.start(folder, name, **{"model": str(model), "transfer": role(kind, **extra), **settings}))
        return made[-1]

    try:
        yield start
    finally:
        for engine in made:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="over all kinds")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0, help="of each kind's first run")
    parser.add_argument("--out", type=Path, help="where lines are added")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    each = -(-arguments.runs // len(kinds))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = ROOT / "benchmarks" / "cpu_race" / "make_model.py"
        subprocess.run(
            [sys.executable, str(script), str(folder / "model"), "--preset", "tiny", "--yarn"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for kind in kinds:
            began, seeds = time.monotonic(), range(arguments.seed, arguments.seed + each)
            trouble, is_over = {}, False
            with engines(folder / "model", folder) as start:
                runs = Runs(kind, start)
                try:
                    runs.all(seeds)
                except AssertionError as error:
                    trouble = {"trouble": str(error)[-3000:]}
                except KeyboardInterrupt:
                    is_over = True
            took = {"took_s": round(time.monotonic() - began)}
            about = {"bench": "vllm_faults", "kind": kind, "seeds": [seeds.start, seeds.stop], "lease_s": LEASE_S}
            line = json.dumps({**about, **attrs.asdict(runs.tally), **took, **trouble})
            print(line, flush=True)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(line + "\n")
            if is_over:
                break


if __name__ == "__main__":
    main()
