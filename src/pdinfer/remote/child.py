"""The process of a spawned engine: it serves a model until its parent is gone or closes the port."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import msgspec

from pdinfer.config import CacheConfig, EngineConfig, RemoteConfig
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import PDInferError
from pdinfer.execution.warm_up import WarmUp
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.model.load import load_model
from pdinfer.progress import Tell
from pdinfer.remote.orders import Failed, Loaded, Loading, Order, Said, Warming, decode_order
from pdinfer.remote.served import serve

LOOK_S = 0.05
"""How often a process that loads looks for the end of its parent, and how often it tells how far it is."""
STDERR = 2


def main(connection: int, stderr: int) -> None:
    """Serve what comes over the `connection`. Until that is loaded, stderr goes to the parent; from then on it is the
    descriptor `stderr`. A SIGTERM closes the engine."""
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run(Connection(connection), lambda: os.dup2(stderr, STDERR))


def run(parent: Connection, loaded: Callable[[], object] = lambda: None) -> None:
    """Make and serve the engine that the parent orders, with a call of `loaded` in between. Exits with status 1 on
    failure."""
    try:
        order = decode_order(parent.recv_bytes())
    except EOFError:
        return
    logging.basicConfig(level=order.log_level, format=f"%(levelname)s %(name)s {order.role} %(process)d: %(message)s")
    try:
        engine, warm_ups = make_engine(order, parent)
    except PDInferError as error:
        _say(parent, Failed(error.code, str(error)))
        sys.exit(1)
    loaded()
    _say(parent, Loaded(warm_ups))
    serve(engine, parent, config=RemoteConfig(**order.remote))


def make_engine(order: Order, parent: Connection) -> tuple[PrefillEngine | DecodeEngine, tuple[WarmUp, ...]]:
    """Load the model, telling the parent how far it is, make the engine with a channel of its own, and warm it up.
    Raises what `load_model`, the channel and the engine raise."""
    cache, config, other = CacheConfig(**order.cache), EngineConfig(**order.engine), EngineConfig(**order.other_engine)
    make_transport = order.transport.find()
    processors = {name: named.find() for name, named in order.logits_processors.items()}
    with _watched(parent) as progress:
        model = load_model(
            order.checkpoint,
            device=order.device,
            dtype=order.dtype,
            mtp=config.num_draft_tokens > 0 or other.num_draft_tokens > 0,
            cache=cache,
            trusted_roots=order.trusted_roots,
            progress=progress,
        )
    channel = KVChannel(PagePool(model, cache), make_transport(), key=order.key)
    try:
        kind = PrefillEngine if order.role == "prefill" else DecodeEngine
        engine = kind(model, channel, config, other_config=other, logits_processors=processors)
        warm_ups = tuple(engine.warm_up(progress=_warming(parent, at, order.warm_up)) for at in range(order.warm_up))
    except BaseException:
        channel.close()
        raise
    return engine, warm_ups


def _warming(parent: Connection, at: int, times: int) -> Tell:
    """Return what tells the parent how far the warm-up is that `at` of `times` others came before."""
    return lambda done, total: _say(parent, Warming(at * total + done, times * total))


@contextlib.contextmanager
def _watched(parent: Connection) -> Iterator[Tell]:
    """Give a function that tells the parent how many bytes are loaded, and end this process with its parent meanwhile,
    when nothing else listens to it. A parent says nothing then, so a connection that can be read has ended."""
    ended, told_at = threading.Event(), 0.0

    def watch() -> None:
        while not ended.is_set():
            if parent.poll(LOOK_S):
                os._exit(1)  # nothing was made yet that would be left behind

    def tell(done_bytes: int, total_bytes: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if done_bytes == total_bytes or now > told_at + LOOK_S:
            told_at = now
            _say(parent, Loading(done_bytes, total_bytes))

    thread = threading.Thread(target=watch, name="pdinfer-parent", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


def _say(parent: Connection, what: Said) -> None:
    parent.send_bytes(msgspec.msgpack.encode(what))
