"""Makes an engine in another process a port of a Pairing here.

    spawning.py   `spawn_prefill` and `spawn_decode` start engines in processes
    child.py      that process
    orders.py     what it is told, and what it says until it serves
    client.py     `PrefillClient` and `DecodeClient`, where the Pairing is
    line.py       their sessions, which outlive a connection, and what they know of an engine
    served.py     `serve`, where the engine is
    shared_engine.py the engine as its clients share it, and what their requests are called there
    served_client.py one of these clients, and what it has not been told yet
    directory/    engines announce themselves, and front ends find them
    session.py    the threads that carry messages, and notice when the other end is silent
    messages.py   the messages
    orphan.py     ends a served process that hangs when its parent is gone

May import: config, engine, execution, kv, model, process, the ground."""

from __future__ import annotations

from pdinfer.config import RemoteConfig
from pdinfer.engine.engine import Engine
from pdinfer.remote import directory
from pdinfer.remote.client import DecodeClient, EngineClient, PrefillClient
from pdinfer.remote.served import serve
from pdinfer.remote.spawning import spawn_decode, spawn_prefill
from pdinfer.types import Event

__all__ = [
    "DecodeClient",
    "Engine",
    "EngineClient",
    "Event",
    "PrefillClient",
    "RemoteConfig",
    "directory",
    "serve",
    "spawn_decode",
    "spawn_prefill",
]
