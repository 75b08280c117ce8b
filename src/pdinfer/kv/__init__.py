"""Pages of the cache: what their bytes mean, who owns them, and how they travel. Transports are imported by name:
`pdinfer.kv.SocketTransport`.

    layout.py     what the bytes of a page mean
    shapes.py     how heads lie in pages
    pool.py       who owns which page
    prefix.py     which cached page holds which tokens
    events.py     which pages can be found, told as vLLM tells it
    memory.py     a pool's bytes, on any device
    copies.py     what moves bytes to and from a device while it computes
    memfd.py      memory that another process may read
    fused.py      payloads copied and digested in one pass, by the loops of fused.c
    view.py       the bytes as tensors
    channel/      the rules of a hand-off between two engines
    transports/   what moves frames and bytes: loopback, sockets, shared memory, Mooncake

Tested by tests/unit/kv; the transports by tests/conformance.

May import: config, process, the ground."""

from __future__ import annotations

from pdinfer.kv.events import KVEvents
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.memory import Memory, Pages
from pdinfer.kv.shapes import AxisOrder, PageShape
from pdinfer.kv.transports.base import Link, Receiver, Transfer, Transport
from pdinfer.kv.transports.loopback import LoopbackTransport
from pdinfer.kv.transports.mooncake import MooncakeEngine, MooncakeTransport
from pdinfer.kv.transports.shm.transport import ShmTransport, same_host_transport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.transport import Strangers
from pdinfer.kv.view import PageMemory
from pdinfer.stats import ChannelStats
from pdinfer.types import HandoffStatus

__all__ = [
    "AxisOrder",
    "ChannelStats",
    "HandoffStatus",
    "KVComponent",
    "KVEvents",
    "KVLayout",
    "Link",
    "LoopbackTransport",
    "Memory",
    "MooncakeEngine",
    "MooncakeTransport",
    "PageMemory",
    "PageShape",
    "Pages",
    "Receiver",
    "ShmTransport",
    "SocketTransport",
    "Strangers",
    "Transfer",
    "Transport",
    "same_host_transport",
]
