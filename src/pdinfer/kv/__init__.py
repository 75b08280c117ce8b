"""Where the cache lives and how it travels. Transports are imported by name: `pdinfer.kv.SocketTransport`."""

from __future__ import annotations

from pdinfer.kv.channel import KVChannel
from pdinfer.kv.door import Strangers
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.memory import Memory
from pdinfer.kv.mooncake import MooncakeEngine, MooncakeTransport
from pdinfer.kv.pool import PagePool
from pdinfer.kv.shm import ShmTransport, same_host_transport
from pdinfer.kv.socket import SocketTransport
from pdinfer.kv.transport import Link, Receiver, Transfer, Transport
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.stats import ChannelStats

__all__ = [
    "ChannelStats",
    "KVChannel",
    "KVComponent",
    "KVLayout",
    "KVView",
    "Link",
    "LoopbackHub",
    "LoopbackTransport",
    "Memory",
    "MooncakeEngine",
    "MooncakeTransport",
    "PageMemory",
    "PagePool",
    "Receiver",
    "ShmTransport",
    "SocketTransport",
    "Strangers",
    "Transfer",
    "Transport",
    "same_host_transport",
]
