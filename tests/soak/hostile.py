"""A process of strangers, and of welcome peers that misbehave."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pdinfer as pd
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.stream.framing import Header, MessageKind
from tests.e2e import knocking
from tests.e2e.knocking import bare
from tests.e2e.setups import model_of
from tests.e2e.strangers import Identity, framed, opening

NUM_SILENT = 150
NUM_DEAF = 4
GARBAGE = 64


def work(control: Connection, family: str, seed: int, cache: pd.CacheConfig) -> None:
    """Run in the process: each message is (kind of attack, endpoint, seconds), and is answered when the attack is
    over."""
    layout = model_of(family, seed).kv_layout(cache)
    rng = random.Random(seed)
    control.send("ready")
    while True:
        kind, endpoint, seconds = control.recv()
        with contextlib.suppress(OSError, AssertionError):  # a victim that is killed or frozen does not answer
            attack(kind, endpoint, seconds, layout, rng)
        control.send("done")


def attack(kind: str, endpoint: str, seconds: float, layout: KVLayout, rng: random.Random) -> None:
    end = time.monotonic() + seconds
    if kind == "silent":
        knock(endpoint, seconds, b"", 0.0)
    elif kind == "dribble":
        knock(endpoint, seconds, opening(), 0.5)
    elif kind == "garbage":
        while time.monotonic() < end:
            with contextlib.suppress(OSError), bare(endpoint) as sock:
                sock.sendall(garbage(rng))
                time.sleep(0.02)
    else:
        deaf(endpoint, end, layout, rng)


def knock(endpoint: str, seconds: float, says: bytes, byte_s: float) -> None:
    """Connect strangers as in `strangers`, without waiting for them: their victim may be frozen, or dead."""
    command = [sys.executable, knocking.__file__, endpoint, str(NUM_SILENT), str(byte_s), says.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.kill()


def garbage(rng: random.Random) -> bytes:
    """Send bytes without meaning, in a frame or not, at once or behind a good beginning."""
    junk = rng.randbytes(rng.randrange(1, GARBAGE))
    cut = Header(MessageKind.FRAME, 1 << 19).packed() + junk
    return rng.choice([junk, framed(junk), opening() + framed(junk), cut])


def deaf(endpoint: str, end: float, layout: KVLayout, rng: random.Random) -> None:
    """Connect welcome peers that send many messages about rooms which belong to nobody, and read nothing."""
    peers: dict[Identity, bytes] = {}  # and what they could not send yet
    try:
        while time.monotonic() < end:
            if len(peers) < NUM_DEAF:
                peer = Identity(endpoint, layout, rng.getrandbits(127))
                peer.sock.setblocking(False)
                peers[peer] = b""
            for peer, unsent in list(peers.items()):
                data = unsent or peer.aborts(rng.getrandbits(100), 100, "poem " * rng.choice([0, 800]))
                try:
                    peers[peer] = data[peer.sock.send(data) :]
                except BlockingIOError:
                    peers[peer] = data
                except OSError:
                    peer.sock.close()
                    del peers[peer]
            time.sleep(0.02)
    finally:
        for peer in peers:
            peer.sock.close()
