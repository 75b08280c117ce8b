"""Faults for a pair of engines, and seeded runs of them: `python -m tests.vllm.faults --runs 200 --out FILE`.

A run gives a pair some two dozen requests, does one thing to it at a moment that the seed chooses, brings back what it
killed, and gives it another request once both engines answer. One JSON line per kind says what came of its runs:

    faults      that were made, those of links one by one
    requests    that were given to an engine which was not killed, so twice two dozen where both engines lived
    ended       of these, how many ended within the lease and 2 s, without the time in which their own engine was frozen
    late        the others: (seed, engine, seconds)
    longest_s   the longest of them, at decode and at prefill
    landed      rooms that decode says have landed
    equal       of these, those whose bytes have the digest that prefill took when they left
    as_told     decode's requests that ended as `kv_load_failure_policy` says ("fail" ends in an error what has not
                landed), and prefill's that ended with a token
    at_rest     runs after which all blocks of both engines were free
    bad_frees   blocks that were freed while a peer could write them
    next_s      from the moment both engines answered to the first token of the next request, the longest
    next_late   those that took longer than 1 s: (seed, seconds)
    next_landed runs after which that request's prompt landed
    load        of the host, the lowest and the highest at the end of a run
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
from tests.vllm.forked import launch

LEASE_S = 4.0
TIMES = {"hold_s": 1.0, "lease_s": LEASE_S}
SLACK_S = 2.0
NEXT_S = 1.0
NEVER_S = 999.0
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

    def give(self, prompt: list[int], max_tokens: int = 8) -> str:
        sends, loads, room = asks(self.prefill)
        if self.address:
            loads["prefill"] = self.address
        self.prefill.say(add=room, prompt=prompt, max_tokens=1, params=sends)
        self.decode.say(add=room, prompt=prompt, max_tokens=max_tokens, params=loads)
        self.began[room] = time.monotonic()
        return room

    def look(self) -> int:
        """Note what has ended. Return how many requests decode has left."""
        self.ended |= {name: at for name, at in self.decode.ended.items() if name in self.began}
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
                engine.end(name, {"reason": "abort"})

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
    late: tuple[tuple[int, str, float], ...] = ()
    longest_s: tuple[float, float] = (0.0, 0.0)
    landed: int = 0
    equal: int = 0
    as_told: int = 0
    at_rest: int = 0
    bad_frees: int = 0
    next_s: float = 0.0
    next_late: tuple[tuple[int, float], ...] = ()
    next_landed: int = 0
    load: tuple[float, ...] = ()

    def add(self, load: Load, seed: int, policy: str, lost: Engine | None, freeze: Freeze | None) -> None:
        """Count the requests of a run."""
        longest = list(self.longest_s)
        for at, engine in enumerate((load.decode, load.prefill)):
            for room in load.began if engine is not lost else ():
                self.requests += 1
                said, end = engine.done.get(room), engine.ended.get(room, load.began[room] + NEVER_S)
                took_s = end - load.began[room]
                if freeze is not None and freeze.engine is engine:
                    took_s -= freeze.overlap_s(load.began[room], end)
                longest[at] = max(longest[at], round(took_s, 2))
                if took_s <= LEASE_S + SLACK_S:
                    self.ended += 1
                else:
                    self.late += ((seed, ("decode", "prefill")[at], round(took_s, 2)),)
                is_lost = engine is load.decode and policy == "fail" and room not in load.decode.moved
                as_told = {"abort", "error" if is_lost else "length"}
                self.as_told += said is not None and said["reason"] in as_told
        self.longest_s = longest[0], longest[1]
        for room in load.began.keys() & load.decode.moved.keys():
            self.landed += 1
            self.equal += load.decode.moved[room]["digest"] == load.prefill.moved.get(room, {}).get("digest")

    def add_next(self, seed: int, took_s: float, has_landed: bool) -> None:
        """Count the request behind a run."""
        self.next_s = max(self.next_s, round(took_s, 2))
        self.next_late += ((seed, round(took_s, 2)),) if took_s > NEXT_S else ()
        self.next_landed += has_landed
        now = round(os.getloadavg()[0], 1)
        self.load = min(*self.load, now, now), max(*self.load, now, now)


def later(rng: random.Random, what: Callable[[], Any]) -> Callable[[], None]:
    """Return what does something at a random moment soon."""
    return lambda: threading.Timer(rng.uniform(0.0, 0.4), what).start()


@attrs.define(eq=False)
class Freeze:
    """An engine that stands still for FREEZE_S once it is told to `begin`."""

    engine: Engine
    began: float = 0.0
    thawed: float = 0.0
    timer: threading.Timer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.timer = threading.Timer(FREEZE_S, self._thaw)

    def begin(self) -> None:
        self.engine.kill(signal.SIGSTOP)
        self.began = time.monotonic()
        self.timer.start()

    def _thaw(self) -> None:
        self.engine.kill(signal.SIGCONT)
        self.thawed = time.monotonic()

    def overlap_s(self, start: float, end: float) -> float:
        """Return how much of a time the engine stood still."""
        return max(0.0, min(end, self.thawed) - max(start, self.began))


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
        more: dict[str, Any] = {
            **(TIGHT if self.kind == "preempt" else {}),
            "advertise": OTHER if self.kind in LINKS else LOCAL,
        }
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
                for said in (engine.done, engine.ended, engine.moved):
                    said.clear()

    def one(self, load: Load, rng: random.Random, seed: int) -> Load:
        """Do one run. Return a pair that is whole again."""
        at: dict[int, Callable[[], Any]] = {}
        lost: Engine | None = None
        freeze: Freeze | None = None
        moment = rng.randrange(2, COUNT - 4)
        if self.kind.startswith("kill"):
            lost = load.decode if self.kind == "kill_decode" else load.prefill
            at = {moment: later(rng, lost.kill)}
        elif self.kind.startswith("freeze"):
            freeze = Freeze(load.decode if self.kind == "freeze_decode" else load.prefill)
            at = {moment: freeze.begin}
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
        else:
            load.run(COUNT, at, seed)
        self.tally.faults += 1 if self.proxy is None else self.proxy.num_faults
        if self.proxy is not None:
            self.proxy.every = self.proxy.num_faults = 0
        if freeze is not None:
            freeze.timer.join()
        again = self.go_on(load, seed, lost)
        with contextlib.suppress(AssertionError):  # what prefill has said of them is on its way
            until(lambda: load.decode.moved.keys() <= load.prefill.moved.keys(), [load.prefill], 5)
        self.tally.add(load, seed, self.policy, lost, freeze)
        return again

    def go_on(self, load: Load, seed: int, lost: Engine | None) -> Load:
        """Bring back what was killed, give another request, and see that everything ends and comes to rest."""
        again = Load(load.prefill, load.decode)
        if lost is not None:
            lost.close()
        if lost is load.prefill:
            again.prefill = self.start("prefill", "kv_producer", listen=lost.address, settings=MORE, **TIMES)
        elif lost is load.decode:
            again.decode = self.start("decode", "kv_consumer", settings=MORE, policy=self.policy, **TIMES)
        both = [again.prefill, again.decode]
        ready(*both)
        for engine in both:
            engine.stats()
        room = again.give(prompts(1, 7)[0], max_tokens=1)
        until(lambda: room in again.decode.done, both, 60)
        took_s = again.decode.ended[room] - again.began[room]
        self.tally.add_next(seed, took_s, room in again.decode.moved)
        with contextlib.suppress(AssertionError):  # they count as late
            until(
                lambda: all(load.began.keys() <= one.done.keys() for one in both if one in (load.prefill, load.decode)),
                both,
                30,
            )
        self.tally.at_rest += rests(both)
        bad_frees = sum(engine.stats()["bad_frees"] for engine in both)
        self.tally.bad_frees = max(self.tally.bad_frees, bad_frees)
        return again


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
        more = {"model": str(model), "transfer": role(kind, **extra), **settings}
        made.append(Engine.start(folder, name, launch, **more))
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
