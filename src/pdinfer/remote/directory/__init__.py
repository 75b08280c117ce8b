"""Engines announce themselves where front ends look for them.

    directory.py      `Directory`: announcements that may be believed, and ports to those who made them
    announcing.py     how a served engine announces itself
    announcement.py   what an engine says of itself, sealed with the key
    media.py          where that is kept: a folder, a service in DNS, a store of torch.distributed
    dialling.py       a connection to an announced engine, and the port that it becomes
    handshake.py      `Door`, where an engine's clients connect, and how both ends prove the key

May import: config, engine, kv, process, remote.client, remote.messages, remote.session, the ground.
"""

from __future__ import annotations

from pdinfer.remote.directory.directory import Directory
from pdinfer.remote.directory.handshake import Door
from pdinfer.remote.directory.media import Folder, HeadlessService, Medium, Store, WritableMedium

__all__ = ["Directory", "Door", "Folder", "HeadlessService", "Medium", "Store", "WritableMedium"]
