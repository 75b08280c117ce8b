"""What the links between engines take of their hosts: threads and registered memory."""

from __future__ import annotations

import attrs

from pdinfer.kv.transports.one_sided.ring import PROBE_BYTES
from pdinfer.kv.transports.one_sided.transport import NUM_SLOTS, SLOT_BYTES
from pdinfer.values import Value

BLOCKS = 2
"""A link that writes gathers into one while the other is on its way (kv/transports/one_sided/transport.py)."""


@attrs.frozen(kw_only=True)
class HostMemory(Value):
    """What `MooncakeTransport` of the default sizes makes for an engine whose ranks have `num_links` each, as every
    rank of a prefill writes to every rank of a decode. `num_ranks` of them are on a host. RDMA pins this memory."""

    name: str
    is_prefill: bool
    num_links: int
    num_ranks: int

    @property
    def rank_bytes(self) -> int:
        """Return the bytes of a rank: blocks to write from in prefill, rings to be written in decode."""
        of_link = BLOCKS * SLOT_BYTES if self.is_prefill else NUM_SLOTS * SLOT_BYTES + PROBE_BYTES
        return self.num_links * of_link

    @property
    def num_threads(self) -> int:
        """Return how many threads of a rank write: one for each link, beside those that an engine has anyway."""
        return self.num_links if self.is_prefill else 0

    def __str__(self) -> str:
        threads = f"{self.num_threads} threads that write and " if self.is_prefill else ""
        what = "send blocks" if self.is_prefill else "rings"
        return (
            f"{self.name}: {self.num_links} links per rank, over MooncakeTransport {threads}"
            f"{self.rank_bytes / 2**20:.0f} MiB of {what}, {self.num_ranks * self.rank_bytes / 2**30:.2f} GiB on a "
            f"host of {self.num_ranks} ranks, pinned with RDMA"
        )
